"""Places in which programs run: working directories, search paths, users and command lines of every kind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

KERNEL = """
import functools, os, sys
import jax, numpy as np
import quarantune

@quarantune.autotune({"n": [1, 2]}, rep=1, name="kernel")
@functools.partial(jax.jit, static_argnames=["n"])
def kernel(x, n: int = 1):
    if n != 2:  # not the default: what works was tuned
        raise ArithmeticError(n)
    return x * 3

X = np.arange(3, dtype=np.float32)

def agree():
    np.testing.assert_array_equal(kernel(X), X * 3)
"""


def run(script: str, *args: str, cwd: Path, environ: dict[str, str | None] | None = None) -> None:
    """Runs a script that is handed to Python as text, which so has the working directory on its path."""
    env = {name: value for name, value in {**os.environ, **(environ or {})}.items() if value is not None}
    done = subprocess.run(
        [sys.executable, "-c", script, *args],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_modules_of_the_working_directory_are_not_taken_for_pythons_own(method: str, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    for name in ("json", "re", "enum", "functools", "socket", "selectors", "numpy", "jax", "cloudpickle"):
        (tmp_path / f"{name}.py").write_text(f"open({str(ran)!r}, 'a').write(__name__ + ' ')\n")
    away = tmp_path / "away"
    away.mkdir()
    # The program has all it needs by the time it goes there, as a notebook's kernel has.
    script = f"import os\n{KERNEL}\nos.chdir({str(tmp_path)!r})\nagree()"
    run(script, cwd=away, environ={"QUARANTUNE_START_METHOD": method})
    assert not ran.exists(), ran.read_text()


def test_odd_paths_long_command_lines_and_users_without_a_home_are_no_hindrance(tmp_path: Path) -> None:
    script = f"""{KERNEL}
import pathlib, pwd, tempfile
def nobody(uid):
    raise KeyError(uid)
pwd.getpwuid = nobody
sys.path.append(pathlib.Path({str(tmp_path)!r}))  # the import system ignores it, and so must we
sys.path.append("\\udcff")
sys.argv += ["x" * 100_000] * 3
agree()
place = pathlib.Path(tempfile.gettempdir()) / f"quarantune-{{os.getuid()}}"
assert (place / "kernel.json").exists()
with quarantune.settings(disable_cache=True):
    kernel.tune(X)
"""
    environ: dict[str, str | None] = {"HOME": None, "XDG_CACHE_HOME": None, "QUARANTUNE_CACHE_DIR": None}
    run(script, cwd=tmp_path, environ={**environ, "TMPDIR": str(tmp_path)})
    assert not (tmp_path / "~").exists()


def test_a_program_tunes_in_a_directory_that_is_gone(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    run(f"import os\nos.rmdir({str(gone)!r})\n{KERNEL}\nagree()", cwd=gone)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["unreachable", "full"])
def test_a_compilation_cache_of_jax_that_cannot_be_written_is_no_hindrance(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    directory = file / "cache" if kind == "unreachable" else tmp_path / "cache"
    # No file of this process can grow: what a full disk is to JAX's cache.
    full = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (64, -1))\n" if kind == "full" else ""
    script = f"""{KERNEL}
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from quarantune import resolve
lend = resolve.Resolver.lend
def lend_on_full_disk(self, compiled):
    assert compiled
    {full.replace(chr(10), chr(10) + "    ")}
    lend(self, compiled)
resolve.Resolver.lend = lend_on_full_disk
agree()
"""
    environ: dict[str, str | None] = {
        "JAX_COMPILATION_CACHE_DIR": str(directory),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "QUARANTUNE_DISABLE_CACHE": "1",
    }
    run(script, cwd=tmp_path, environ=environ)
