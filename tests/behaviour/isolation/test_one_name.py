"""A file has one name, however a process came to its functions and classes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from helpers import PROGRAMS, run_python

DATA = PROGRAMS / "named"
PROGRAM = str(DATA / "pkg" / "mod.py")
REPORT = "import json; print(json.dumps(mod.report()))"

# Python's arguments for a script, and for a module of a package.
WAYS: dict[str, dict[str, list[str]]] = {
    "mod": {
        "run": [PROGRAM, "report"],
        "imported": ["-c", f"import sys; sys.path.insert(0, {str(DATA / 'pkg')!r}); import mod; {REPORT}"],
        "child": [PROGRAM, "report_from_a_child"],
        "pool": [PROGRAM, "report_from_a_pool"],
        "cProfile": ["-m", "cProfile", "-o", os.devnull, PROGRAM, "report"],
        "trace": ["-m", "trace", "--trace", "--ignore-dir=/", PROGRAM, "report"],
        "pdb": ["-m", "pdb", "-c", "continue", "-c", "quit", PROGRAM, "report"],
        "runpy as a program": ["-c", "import runpy; runpy.run_path(sys.argv[1], run_name='__main__')", PROGRAM],
    },
    "pkg.mod": {
        "run": ["-m", "pkg.mod", "report"],
        "imported": ["-c", f"from pkg import mod; {REPORT}"],
        "child": ["-m", "pkg.mod", "report_from_a_child"],
        "pool": ["-m", "pkg.mod", "report_from_a_pool"],
        "cProfile": ["-m", "cProfile", "-o", os.devnull, "-m", "pkg.mod", "report"],
        "pdb": ["-m", "pdb", "-c", "continue", "-c", "quit", "-m", "pkg.mod", "report"],
        "runpy as a program": ["-c", "import runpy; runpy.run_module('pkg.mod', run_name='__main__', alter_sys=True)"],
    },
}
WAYS["mod"]["runpy as a program"] = [
    *("-c", "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')", PROGRAM, "report"),
]
WAYS["pkg.mod"]["runpy as a program"].append("report")


def python(arguments: list[str], cache: Path) -> Any:
    """Runs Python and returns the JSON that it prints."""
    done = run_python(*arguments, path=[DATA], QUARANTUNE_CACHE_DIR=str(cache))
    found = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert found, done.stderr
    return json.loads(found[-1])


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with a result of the script and a result of the module."""
    cache = tmp_path_factory.mktemp("named")
    for name, start in (("mod", [PROGRAM]), ("pkg.mod", ["-m", "pkg.mod"])):
        assert python([*start, "tune"], cache)[0] == f"{name}.kernel"
    assert {path.name for path in cache.glob("*.json")} == {"mod.kernel.json", "pkg.mod.kernel.json"}
    return cache


NAMED = [
    # How a program starts matters to a file and to a module alike, so rarer ways are tried with only one of them.
    pytest.param(name, way, marks=() if name == "mod" and way in ("run", "child", "imported") else pytest.mark.long)
    for name, ways in WAYS.items()
    for way in ways
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), NAMED)
def test_a_file_has_one_name_however_it_runs(name: str, way: str, tuned: Path) -> None:
    found, config = python(WAYS[name][way], tuned)
    assert found == f"{name}.kernel"
    assert config is not None


@pytest.mark.long
@pytest.mark.slow
def test_runpy_gives_a_file_the_name_of_its_script(tmp_path: Path) -> None:
    program = "import json, runpy, sys; print(json.dumps([runpy.run_path(sys.argv[1])['kernel'].name]))"
    assert python(["-c", program, PROGRAM], tmp_path) == ["mod.kernel"]


@pytest.mark.long
@pytest.mark.slow
def test_a_workers_classes_have_the_names_of_the_callers(tmp_path: Path) -> None:
    """The worker looks up a kernel that another kernel calls; its key holds classes of the program."""
    program = tmp_path / "program.py"
    program.write_text(
        """
import enum, functools, json
import jax, numpy as np
import quarantune

class Mode(enum.Enum):
    FAST = 1

@quarantune.autotune({"n": [2]}, rep=1, ref_fn=None)
@functools.partial(jax.jit, static_argnames=["mode", "n"])
def inner(x, mode, n: int = 1):
    return x * n

@quarantune.autotune({"m": [3]}, rep=1, ref_fn=None)
@functools.partial(jax.jit, static_argnames=["m"])
def outer(x, m: int = 1):
    y = inner(x, Mode.FAST)
    assert m == 1 or "2.0" in str(jax.make_jaxpr(lambda x: inner(x, Mode.FAST))(x)), "the worker has other configs"
    return y * m

if __name__ == "__main__":
    x = np.ones(4, np.float32)
    inner(x, Mode.FAST)
    assert inner.lookup(x, Mode.FAST) == {"n": 2}
    print(json.dumps([trial.outcome for trial in outer.tune(x).trials]))
"""
    )
    assert python([str(program)], tmp_path) in (["ok"], ["slow"])
    assert python(["-m", "cProfile", "-o", os.devnull, str(program)], tmp_path) in (["ok"], ["slow"])
