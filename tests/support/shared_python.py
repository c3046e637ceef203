"""Scripts that run one after another in one process, which imports JAX and starts a template once for all of them.

Most of what a script costs is the import of JAX, in its own process and in the template's. A script whose test needs
neither a fresh process nor one with other flags can share it. Each one has a `__main__`, a working directory,
an import path and an environment of its own. What it changes in libraries stays; such a script needs its own process.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


class SharedPython:
    """The process in which scripts run one after another; it is started with the first, and again if it has died.

    Args:
        *options: options of Python.
        environ: the environment with which it starts. Scripts cannot change what libraries have read by then.
        anew: the packages that each script imports anew, because scripts change them.
    """

    def __init__(self, *options: str, environ: Mapping[str, str], anew: Sequence[str] = ()) -> None:
        self._command = [sys.executable, *options, __file__, *anew]
        self._environ = dict(environ)
        self._process: subprocess.Popen[str] | None = None

    def run(
        self, script: Path, *, cwd: Path | None = None, timeout_s: float = 280, **changes: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs a script, and waits for its end, whichever that is.

        Args:
            script: its file; the script finds the modules beside it.
            cwd: the directory in which it runs.
            timeout_s: the longest that it may take; the process is then killed.
            **changes: variables of its environment, besides those that this process has now.
        """
        if self._process is None:
            self._process = subprocess.Popen(
                self._command, env=self._environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        place = script.parent
        order = {"script": str(script), "cwd": str(cwd or os.getcwd()), "environ": {**os.environ, **changes}}
        timer = threading.Timer(timeout_s, process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            timer.cancel()
        if answer:
            returncode = json.loads(answer)
        else:
            self.close()
            returncode = process.returncode
        files = [place / f"{script.name}.{name}" for name in ("stdout", "stderr")]
        outputs = [file.read_text("utf-8") if file.exists() else "" for file in files]
        return subprocess.CompletedProcess([*self._command, str(script)], returncode, *outputs)

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.communicate()
            self._process = None


@contextlib.contextmanager
def _output_to(script: str) -> Iterator[None]:
    """Has all that this process and its children print go to two files beside the script."""
    try:
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            with open(f"{script}.{name}", "wb") as file:
                os.dup2(file.fileno(), descriptor)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        with open(os.devnull, "wb") as nothing:
            for descriptor in (1, 2):
                os.dup2(nothing.fileno(), descriptor)


@contextlib.contextmanager
def _place_of_its_own(
    script: str, cwd: str, environ: Mapping[str, str], anew: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Gives a script its own surroundings, and takes them away at its end, with the modules from its directory."""
    directory = os.path.dirname(script)
    before = (dict(os.environ), os.getcwd(), list(sys.path), list(sys.argv), sys.modules["__main__"])
    modules = set(sys.modules)
    main = types.ModuleType("__main__")
    main.__file__ = script
    # What is read once, when a process starts, is that of this process.
    kept = {name: value for name, value in os.environ.items() if name.startswith("PYTHON")}
    changed = {name: value for name, value in environ.items() if not name.startswith("PYTHON")}
    try:
        os.environ.clear()
        os.environ.update(kept | changed)
        os.chdir(cwd)
        sys.path.insert(0, directory)
        sys.argv[:] = [script]
        sys.modules["__main__"] = main
        with warnings.catch_warnings():
            yield vars(main)
    finally:
        variables, place, sys.path[:], sys.argv[:], sys.modules["__main__"] = before
        os.environ.clear()
        os.environ.update(variables)
        os.chdir(place)
        for name in set(sys.modules) - modules:
            is_beside = (getattr(sys.modules[name], "__file__", None) or "").startswith(directory)
            if is_beside or name.partition(".")[0] in anew:
                del sys.modules[name]


def _run(script: str, cwd: str, environ: Mapping[str, str], anew: Sequence[str]) -> int:
    with _output_to(script), _place_of_its_own(script, cwd, environ, anew) as names:
        try:
            exec(compile(Path(script).read_bytes(), script, "exec"), names)
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
            return 1
    return 0


if __name__ == "__main__":
    anew = sys.argv[1:]
    with os.fdopen(os.dup(1), "w") as answers:
        for line in sys.stdin:
            print(json.dumps(_run(**json.loads(line), anew=anew)), file=answers, flush=True)
