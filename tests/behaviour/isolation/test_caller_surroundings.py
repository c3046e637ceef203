"""Workers run with the caller's settings, paths, working directory and CPUs, however odd these are."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import everywhere, isolated
from kernel_scripts import KERNEL, run
from tuned_functions import X, tuned


@pytest.mark.usefixtures("two_slots")
@everywhere
def test_a_caller_with_jit_disabled_still_gets_a_winner(isolation: str) -> None:
    kernel = tuned(lambda x, do: x * do, [2], ref_fn=lambda x: 2 * x)
    with isolated(isolation), jax.disable_jit():
        np.testing.assert_array_equal(kernel(X), 2 * X)
    assert kernel.lookup(X) == {"do": 2}


@pytest.mark.parametrize("where", [pytest.param("environment", marks=pytest.mark.slow), "module"])
def test_a_program_that_disables_jit_tunes(where: str, tmp_path: Path) -> None:
    disables = "import jax\njax.config.update('jax_disable_jit', True)\n" if where == "module" else ""
    (tmp_path / "without_jit.py").write_text(disables + KERNEL)
    environ = {"JAX_DISABLE_JIT": "1" if where == "environment" else None}
    run("import without_jit; without_jit.agree()", cwd=tmp_path, environ=environ)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_modules_of_the_working_directory_shadow_no_others(method: str, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    for name in ("json", "re", "enum", "functools", "socket", "selectors", "numpy", "jax", "cloudpickle"):
        (tmp_path / f"{name}.py").write_text(f"open({str(ran)!r}, 'a').write(__name__ + ' ')\n")
    away = tmp_path / "away"
    away.mkdir()
    # Like a notebook's kernel, the program enters the directory after its imports.
    script = f"import os\n{KERNEL}\nos.chdir({str(tmp_path)!r})\nagree()"
    run(script, cwd=away, environ={"QUARANTUNE_START_METHOD": method})
    assert not ran.exists(), ran.read_text()


@pytest.mark.long
@pytest.mark.slow
def test_odd_paths_long_command_lines_and_missing_homes_work(tmp_path: Path) -> None:
    script = f"""{KERNEL}
import pathlib, pwd, tempfile
def nobody(uid):
    raise KeyError(uid)
pwd.getpwuid = nobody
sys.path.append(pathlib.Path({str(tmp_path)!r}))  # the import system ignores it, and so must the sandbox
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


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info[:3] == (3, 13, 0), reason="Python 3.13.0 imports no NumPy in a deleted directory")
def test_a_program_tunes_in_a_deleted_working_directory(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    with_helper = KERNEL.replace("    return x * 3", "    return HELPERS[0](x)")
    helper = "def triple(x): return x * 3\nHELPERS = (triple,)"
    run(f"import os\nos.rmdir({str(gone)!r})\n{helper}\n{with_helper}\nagree()", cwd=gone)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("unreachable", marks=pytest.mark.long), "full"])
def test_tuning_works_with_an_unwritable_compilation_cache(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    directory = file / "cache" if kind == "unreachable" else tmp_path / "cache"
    # Files of this process cannot grow, which looks like a full disk to JAX's cache.
    full = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (64, -1))\n" if kind == "full" else ""
    script = f"""{KERNEL}
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from quarantune.tuning.reuse import CompilationSeeds
add = CompilationSeeds.add
def add_on_full_disk(self, compiled):
    assert compiled
    {full.replace(chr(10), chr(10) + "    ")}
    add(self, compiled)
CompilationSeeds.add = add_on_full_disk
agree()
"""
    environ: dict[str, str | None] = {
        "JAX_COMPILATION_CACHE_DIR": str(directory),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "QUARANTUNE_DISABLE_CACHE": "1",
    }
    run(script, cwd=tmp_path, environ=environ)


@pytest.mark.long
@pytest.mark.slow
def test_an_outdated_template_is_replaced(tmp_path: Path) -> None:
    script = """
import os
import psutil, quarantune
from quarantune.sandbox import template
from quarantune.sandbox.template_messages import Open

def look(n, expected):
    found = [sorted(os.sched_getaffinity(0)), sorted(os.getgroups()), os.environ.get("LD_BIND_NOW")]
    if found != expected:
        raise AssertionError(f"{found} in a worker, {expected} in its caller")

def sweep():
    expected = [sorted(os.sched_getaffinity(0)), sorted(os.getgroups()), os.environ.get("LD_BIND_NOW")]
    quarantune.AutoTuner(look, [{"n": 1}, {"n": 2}], rep=1, name="look").run(expected=expected)
    (child,) = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    assert child.pid == template.shared().pid
    return child.pid

with quarantune.settings(disable_cache=True):
    pids = [sweep()]
    assert sweep() == pids[0]
    cpus = os.sched_getaffinity(0)
    if len(cpus) > 1:
        os.sched_setaffinity(0, {min(cpus)})
        pids.append(sweep())
    os.environ["LD_BIND_NOW"] = "1"
    pids.append(sweep())
    if os.geteuid() == 0:
        os.setgroups([12345])
        pids.append(sweep())
    assert len(set(pids)) == len(pids), pids

    # A template that a sweep of another thread uses stays until the end of that sweep.
    used = template.shared()
    null = os.open(os.devnull, os.O_RDONLY)
    sweep = Open(environ={}, cwd=None, loads_plugins=False)
    connection = used.open(sweep, payload_fd=null, arrays_fd=null)
    os.environ["LD_BIND_NOW"] = "2"
    assert template.shared() is not used and used.is_alive
    connection.hang_up()
    template.close_unused()
    assert not used.is_alive
"""
    run(script, cwd=tmp_path)
