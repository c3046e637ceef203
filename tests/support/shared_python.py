"""Runs scripts one after another in one process, which imports JAX and starts a template only once.

Most of a script's time goes into importing JAX, in its process and in the template. A script can share a process if its
test needs no fresh process and no other flags. Each script gets a new `__main__`, working directory, import path and
environment. Changes to libraries stay, so a script that changes a library needs a separate process.
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
    """A process that runs scripts one after another; it starts with the first script, and again if it has died.

    Args:
        *options: options of Python.
        environ: its environment at the start. Scripts cannot change variables that libraries have read.
        anew: packages that each script imports again, because scripts change them.
    """

    def __init__(self, *options: str, environ: Mapping[str, str], anew: Sequence[str] = ()) -> None:
        self._command = [sys.executable, *options, __file__, *anew]
        self._environ = dict(environ)
        self._process: subprocess.Popen[str] | None = None

    def run(
        self, script: Path, *, cwd: Path | None = None, timeout_s: float = 280, **changes: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs a script, and waits until it succeeds or fails.

        Args:
            script: its file; it can import modules of its directory.
            cwd: its working directory.
            timeout_s: the longest time for it; then the process is killed.
            **changes: variables that differ from this process's environment.
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
    """Sends the output of this process and its children to two files next to the script."""
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
    """Gives a script its surroundings, and removes them and the modules of its directory at its end."""
    directory = os.path.dirname(script)
    before = (dict(os.environ), os.getcwd(), list(sys.path), list(sys.argv), sys.modules["__main__"])
    modules = set(sys.modules)
    main = types.ModuleType("__main__")
    main.__file__ = script
    # Variables that are read at a process's start have this process's values.
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
