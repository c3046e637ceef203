"""Scripts that share a process fail as in separate processes, and leave nothing to the next script."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import child_environ
from shared_python import SharedPython


@pytest.fixture
def shared() -> Iterator[SharedPython]:
    process = SharedPython("-W", "error", environ=child_environ())
    yield process
    process.close()


@pytest.mark.parametrize(
    ("text", "returncode", "stderr"),
    [
        ("raise ArithmeticError('no good')", 1, "ArithmeticError: no good"),
        ("import warnings; warnings.warn('a warning')", 1, "UserWarning: a warning"),
        ("import sys; sys.exit(3)", 3, ""),
        ("import os; os.write(2, b'last words'); os.abort()", -6, "last words"),
    ],
)
def test_a_script_that_fails_is_reported_and_the_next_runs(
    text: str, returncode: int, stderr: str, shared: SharedPython, tmp_path: Path
) -> None:
    failing, good = tmp_path / "failing.py", tmp_path / "good.py"
    failing.write_text(text)
    good.write_text("import os; print('good', flush=True); os.system('echo child')")
    done = shared.run(failing)
    assert done.returncode == returncode
    assert stderr in done.stderr
    done = shared.run(good)
    assert (done.returncode, done.stdout, done.stderr) == (0, "good\nchild\n", "")


def test_a_script_leaves_no_names_or_modules_to_the_next(shared: SharedPython, tmp_path: Path) -> None:
    one, other = (tmp_path / name for name in ("one", "other"))
    for directory in (one, other):
        directory.mkdir()
        (directory / "beside.py").write_text(f"NAME = {directory.name!r}")
        (directory / "script.py").write_text(
            "import os, sys, beside\n"
            "assert 'mine' not in globals() and 'MINE' not in os.environ and 'mine' not in sys.path\n"
            "print(beside.NAME, __name__, sys.modules['__main__'].__file__ == __file__, os.getcwd())\n"
            "mine = os.environ['MINE'] = 'mine'\n"
            "sys.path.append(mine)\n"
            "os.chdir('/')\n"
        )
        done = shared.run(directory / "script.py", cwd=directory)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == f"{directory.name} __main__ True {directory}\n"


def test_a_script_that_hangs_is_ended(shared: SharedPython, tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text("import signal; signal.pause()")
    assert shared.run(tmp_path / "hanging.py", timeout_s=0.5).returncode == -9


def test_a_script_imports_anew_what_others_change(tmp_path: Path) -> None:
    shared = SharedPython(environ=child_environ(), anew=["wave"])
    script = tmp_path / "script.py"
    script.write_text("import wave\nprint(hasattr(wave, 'changed'))\nwave.changed = True")
    assert [shared.run(script).stdout for _ in range(2)] == ["False\n"] * 2
    shared.close()
