"""Functions from scripts, notebooks and modules are tuned in every kind of process."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers import child_environ, run_python
from shared_python import SharedPython

import quarantune

DEFINE = """
import functools, os, sys, threading, warnings
import jax, jax.numpy as jnp, numpy as np
import quarantune

CONFIGS = {"n": [2]}
FREE = {"rep": 1, "ref_fn": None}  # the defaults fail
jitted = functools.partial(jax.jit, static_argnames=["n"])
X = np.arange(3, dtype=np.float32)

def check(n):
    if n != 2:  # only a tuned call works
        raise ArithmeticError(n)

def agree(fn, times):
    np.testing.assert_array_equal(fn(X), X * times)
    np.testing.assert_array_equal(jax.jit(fn)(X), X * times)
    assert fn.lookup(X) == {"n": 2}
"""

KERNEL = """
@quarantune.autotune(CONFIGS, **FREE)
@jitted
def kernel(x, n: int = 1):
    check(n)
    return x * FACTOR

FACTOR = 3
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[SharedPython]:
    """The shared process for scripts that need no fresh process."""
    process = SharedPython("-W", "error", "-bb", environ=child_environ())
    yield process
    process.close()


def run(directory: Path, script: str, shared: SharedPython | None = None, **modules: str) -> str:
    """Runs a script next to some modules, with warnings as errors; returns its output."""
    for name, text in modules.items():
        (directory / f"{name}.py").write_text(textwrap.dedent(text))
    file = directory / "script.py"
    file.write_text(script)
    done = shared.run(file) if shared else run_python("-W", "error", "-bb", file)
    assert done.returncode == 0, done.stderr
    # The script may warn only of a busy machine.
    assert [line for line in done.stderr.splitlines() if "the samples scatter" not in line] == []
    return done.stdout


class Helper:
    @staticmethod
    def doubled(x: Any) -> Any:
        assert x.ndim == 1
        return 2 * x


def doubled(x: Any) -> Any:
    assert x.ndim == 1
    return Helper.doubled(x)


@quarantune.autotune({"n": [1, 2]}, rep=1)
@functools.partial(jax.jit, static_argnames=["n"])
def with_helpers(x: Any, n: int = 1) -> Any:
    return doubled(x) * 1


def test_a_function_whose_asserts_pytest_rewrote_is_tuned() -> None:
    assert "@pytest_ar" in doubled.__code__.co_names
    assert with_helpers.tune(np.ones(3, np.float32)).failures == {}


@pytest.mark.slow
def test_workers_do_not_run_a_script_without_a_guard_again(tmp_path: Path, shared: SharedPython) -> None:
    count = tmp_path / "count"
    script = f"""
with open({str(count)!r}, "a") as file:
    file.write("x")
{DEFINE}{KERNEL}
agree(kernel, 3)
print("once")
"""
    assert run(tmp_path, script, shared) == "once\n"
    assert count.read_text() == "x"


@pytest.mark.slow
def test_functions_from_every_source_are_tuned(tmp_path: Path, shared: SharedPython) -> None:
    script = f"""{DEFINE}
def closure(factor, table):
    scale = lambda x: x * factor
    @quarantune.autotune(CONFIGS, **FREE, name="closure")
    @jitted
    def kernel(x, n: int = 1):
        check(n)
        return scale(x) * table["a"][0]
    return kernel

agree(closure(3, {{"a": jnp.full(3, 2.0)}}), 6)

def nested(x, n: int = 1):
    def helper(y):
        check(n)
        return y + y
    return jax.vmap(helper)(x)

agree(quarantune.autotune(CONFIGS, **FREE)(jax.jit(nested, static_argnums=1)), 2)

agree(quarantune.autotune(CONFIGS, **FREE)(jax.jit(lambda x, n=1: check(n) or x * 5, static_argnames="n")), 5)

partial = functools.partial(lambda factor, x, n=1: check(n) or x * factor, 7)
agree(quarantune.autotune(CONFIGS, **FREE, name="part")(jitted(partial)), 7)

class Weights:
    def __init__(self, factor):
        self.factor = factor
    def apply(self, x, n: int = 1):
        check(n)
        return x * self.factor

agree(quarantune.autotune(CONFIGS, **FREE)(jitted(Weights(8).apply)), 8)

@quarantune.autotune(CONFIGS, **FREE)
@jitted
def recursive(x, n: int = 1):
    check(n)
    return x * 1.0 if x.ndim == 0 else jnp.stack([recursive(row, n=n) for row in x])

agree(recursive, 1)
"""
    run(tmp_path, script, shared)


@pytest.mark.slow
def test_a_notebook_cell_is_tuned(tmp_path: Path, shared: SharedPython) -> None:
    # In a notebook, `__main__` has no file, and only linecache has a cell's source.
    script = f"""
import linecache, sys, types
main = types.ModuleType("__main__")
sys.modules["__main__"] = main
again = {KERNEL.replace("= 3", "= 4")!r}
for number, cell in enumerate(({DEFINE!r}, {KERNEL!r}, "agree(kernel, 3)", again, "agree(kernel, 4)")):
    file = f"<cell {{number}}>"
    linecache.cache[file] = (len(cell), None, cell.splitlines(True), file)
    exec(compile(cell, file, "exec"), vars(main))
print(main.kernel)
"""
    assert run(tmp_path, script, shared) == "<Autotuned __main__.kernel: 1 config of n>\n"


@pytest.mark.slow
def test_a_module_from_a_path_inserted_at_run_time_is_tuned(tmp_path: Path, shared: SharedPython) -> None:
    away = tmp_path / "away"
    away.mkdir()
    (away / "far_kernels.py").write_text(DEFINE + KERNEL)
    script = f"""
import os, sys
sys.path.insert(0, {str(away)!r})
import far_kernels
before = list(sys.path)
os.chdir({str(away)!r})
far_kernels.agree(far_kernels.kernel, 3)
assert sys.path == before
assert os.getcwd() == {str(away)!r}
"""
    run(tmp_path, script, shared)


@pytest.mark.slow
def test_a_module_from_a_programs_import_hook_is_tuned(tmp_path: Path, shared: SharedPython) -> None:
    module = (DEFINE + KERNEL).replace("FACTOR = 3", "from beside import FACTOR")
    script = f"""{DEFINE}
import importlib.abc, importlib.util

class Finder(importlib.abc.InspectLoader):
    def find_spec(self, name, path, target=None):
        return importlib.util.spec_from_loader(name, self) if name in SOURCES else None

    def get_source(self, name):
        return SOURCES[name]

SOURCES = {{"in_memory": {module!r}, "beside": "FACTOR = 3"}}
sys.meta_path.insert(0, Finder())
import in_memory
agree(in_memory.kernel, 3)
"""
    run(tmp_path, script, shared)


@pytest.mark.long
@pytest.mark.slow
def test_a_module_that_starts_a_backend_or_thread_is_tuned(tmp_path: Path, shared: SharedPython) -> None:
    modules = {
        "with_array": DEFINE + KERNEL.replace("FACTOR = 3", "FACTOR = jnp.full((), 3.0)"),
        "with_thread": DEFINE + KERNEL + "threading.Thread(target=threading.Event().wait, daemon=True).start()\n",
    }
    script = """
import with_array, with_thread
with_array.agree(with_array.kernel, 3)
with_thread.agree(with_thread.kernel, 3)
"""
    run(tmp_path, script, shared, **modules)


@pytest.mark.slow
def test_a_script_that_computes_in_threads_is_tuned(tmp_path: Path, shared: SharedPython) -> None:
    script = f"""{DEFINE}{KERNEL}
from concurrent.futures import ThreadPoolExecutor

stop = threading.Event()
threading.Thread(target=stop.wait).start()
try:
    with ThreadPoolExecutor(4) as pool:
        for size, result in enumerate(pool.map(kernel, [jnp.ones(n) for n in (1, 2, 3, 4)]), 1):
            assert result.tolist() == [3.0] * size
finally:
    stop.set()
"""
    run(tmp_path, script, shared)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_a_daemonic_multiprocessing_child_may_tune(method: str, tmp_path: Path) -> None:
    script = f"""{DEFINE}{KERNEL}
import multiprocessing

def work(queue):
    result = kernel.tune(X)
    queue.put((multiprocessing.current_process().daemon, result.best_config, kernel(X).tolist()))

if __name__ == "__main__":
    context = multiprocessing.get_context({method!r})
    queue = context.Queue()
    child = context.Process(target=work, args=(queue,), daemon=True)
    child.start()
    print(queue.get(timeout=280))
    child.join(200)
    assert child.exitcode == 0, child.exitcode
"""
    assert run(tmp_path, script) == "(True, {'n': 2}, [0.0, 3.0, 6.0])\n"


@pytest.mark.long
@pytest.mark.slow
def test_numpy_sweeps_start_no_backend_so_forks_may_tune(tmp_path: Path) -> None:
    script = f"""{DEFINE}{KERNEL}
import multiprocessing, psutil, signal
from jax._src import xla_bridge

def children():
    return {{process.pid for process in psutil.Process().children()}}

def work(queue, parents):
    assert not children()
    queue.put(kernel.tune(X[:2]).best_config)
    assert len(children()) == 1
    assert not children() & parents

def state():
    return [dict(os.environ), os.getcwd(), list(sys.path), [signal.getsignal(number) for number in range(1, 32)]]

assert not xla_bridge.backends_are_initialized()
before = state()
kernel.tune(X)
assert kernel.lookup(X) == {{"n": 2}}
assert not xla_bridge.backends_are_initialized()  # JAX could not be forked with one
assert state() == before
template = children()
assert len(template) == 1
context = multiprocessing.get_context("fork")
queue = context.Queue()
child = context.Process(target=work, args=(queue, template), daemon=True)
child.start()
print(queue.get(timeout=280))
child.join(200)
assert child.exitcode == 0, child.exitcode
assert children() >= template
print(kernel.tune(X).best_config)
assert children() == template
"""
    assert run(tmp_path, script) == "{'n': 2}\n{'n': 2}\n"


@pytest.mark.long
@pytest.mark.slow
def test_spawned_workers_tune_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: SharedPython) -> None:
    monkeypatch.setenv("QUARANTUNE_START_METHOD", "spawn")
    script = f"""{DEFINE}{KERNEL}
print("once")
result = kernel.tune(X)
assert [str(trial.outcome) for trial in result.trials] == ["ok"], result.table()
"""
    assert run(tmp_path, script) == "once\n"


def test_tuning_without_isolation_warns_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUARANTUNE_ISOLATION", "none")
    script = f"""{DEFINE}{KERNEL}
import psutil
path, environ = list(sys.path), dict(os.environ)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    agree(kernel, 3)
assert [str(warning.message) for warning in caught if "ISOLATION" in str(warning.message)] != [], caught
assert len(caught) == 1, [str(warning.message) for warning in caught]
assert psutil.Process().children() == []
assert (sys.path, dict(os.environ)) == (path, environ)
"""
    run(tmp_path, script)


@pytest.mark.slow
def test_a_tuned_call_inside_a_worker_starts_no_sweep(tmp_path: Path, shared: SharedPython) -> None:
    script = f"""{DEFINE}
@quarantune.autotune(CONFIGS, **FREE)
@jitted
def inner(x, n: int = 1):
    return x * n

@quarantune.autotune({{"n": [1, 2]}}, rep=1, ref_fn=None)
@jitted
def outer(x, n: int = 1):
    check(n)
    import psutil
    y = inner(x)
    assert psutil.Process().children() == []
    return y

print(outer.tune(X).best_config)
assert inner.lookup(X) is None
"""
    assert run(tmp_path, script, shared) == "{'n': 2}\n"


EDITED_KERNEL = """
import functools
import jax, quarantune
import helper_module

LIMIT = 2
numbers = (number for number in range(9))

@quarantune.autotune({"n": [1, 2]}, rep=1, ref_fn=None)
@functools.partial(jax.jit, static_argnames=["n"])
def kernel(x, n: int = 1):
    if n != LIMIT:  # only a tuned call works
        raise ArithmeticError(n)
    return helper_module.scale(x)

def plain(x, n):
    return x * n * next(numbers)
"""


@pytest.mark.slow
def test_the_code_in_memory_is_tuned_even_if_the_file_was_edited(tmp_path: Path) -> None:
    script = f"""{DEFINE}
import importlib
from pathlib import Path
import edited_module, helper_module
from quarantune.functions import importable
from quarantune.transport import pickling

def by_name():
    return importable.travels_by_name(edited_module.kernel), importable.travels_by_name(edited_module.plain)

files = {{name: Path(__file__).with_name(f"{{name}}_module.py") for name in ("edited", "helper")}}
texts = {{name: file.read_text() for name, file in files.items()}}
assert by_name() == (True, True)
edits = {{
    "a comment": ("edited", "# nothing of it runs\\n" + texts["edited"], (True, True)),
    "code": ("edited", texts["edited"].replace("x * n", "x + n"), (False, False)),
    "a constant": ("edited", texts["edited"].replace("LIMIT = 2", "LIMIT = 1"), (True, True)),
    "broken": ("edited", "def", (False, False)),
    "a module it uses": ("helper", texts["helper"].replace("x *", "40 * x *"), (False, False)),
}}
for name, (file, text, expected) in edits.items():
    files[file].write_text(text)
    assert by_name() == expected, name
    files[file].write_text(texts[file])  # edited and reverted
    assert by_name() == (True, True), name

files["edited"].write_text(edits["a constant"][1])
agree(edited_module.kernel, 3)  # with the constant in memory, as a value
files["edited"].write_text("def")
files["helper"].write_text(edits["a module it uses"][1])
edited_module.kernel.tune(X)
agree(edited_module.kernel, 3)
assert edited_module.kernel.lookup(X) == {{"n": 2}}
try:
    pickling.dumps(edited_module.plain)
except TypeError as error:
    assert "'numbers' used by 'plain'" in str(error), error
    assert "edited_module, helper_module changed on disk" in str(error), error
else:
    raise AssertionError("a generator cannot travel")
files["edited"].write_text(texts["edited"])
importlib.reload(helper_module)
assert by_name() == (True, True)
"""
    run(
        tmp_path,
        script,
        edited_module=EDITED_KERNEL,
        helper_module="FACTOR = 3\ndef scale(x):\n    return x * FACTOR\n",
    )
