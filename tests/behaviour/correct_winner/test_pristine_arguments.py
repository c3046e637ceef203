"""Every run gets the arguments as the caller gave them, whatever earlier runs did to theirs."""

from __future__ import annotations

import array
import collections
import contextlib
import functools
import io
import os
import random
import socket
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from aftermath import running_templates
from helpers import everywhere, isolated
from tuned_functions import SOON, X, tuned

import quarantune
from quarantune import Outcome
from quarantune.sandbox import spool, template
from quarantune.transport import payload
from quarantune.values.options import Tolerance
from quarantune.worker.arguments import BenchOptions
from quarantune.worker.bench import Bench
from quarantune.worker.compiling import compile_here

pytestmark = pytest.mark.usefixtures("two_slots")


@everywhere
def test_every_run_of_a_donating_config_gets_new_arguments(isolation: str) -> None:
    def check(output: Any, expected: Any, x: Any) -> None:
        np.testing.assert_array_equal(x, X)

    @quarantune.autotune([{"do": 1.0}, {"do": 2.0}], ref_fn=lambda x: x, check_fn=check, warmup=2, rep=6)
    @functools.partial(jax.jit, static_argnames=["do"], donate_argnames=["x"])
    def kernel(x: Any, do: float = 1.0) -> Any:
        return x * do

    x = jnp.asarray(X)
    with isolated(isolation):
        assert {trial.outcome for trial in kernel.tune(x).trials} <= {Outcome.OK, Outcome.SLOW}
    np.testing.assert_array_equal(x, X)  # the caller's array is unchanged


def bench_of(fn: Callable[..., Any], *args: Any, **judges: Any) -> tuple[Bench, int]:
    packed = payload.pack_call(fn, args, {}, judges)
    fd = spool.create("arrays", size_bytes=packed.call.spool_bytes)
    payload.write_arrays(packed, fd)
    options = BenchOptions(platform="cpu", warmup=2, rep=5, supply="auto", tolerance=Tolerance(0.0, 0.0, 0.0))
    return Bench(packed.call, arrays_fd=fd, options=options), fd


def test_a_plain_function_never_sees_its_earlier_writes() -> None:
    seen: list[float] = []

    def scribble(x: Any, do: int) -> Any:
        seen.append(float(x[0]))
        x[:] = do
        return x

    def check(output: Any, expected: Any, x: Any) -> None:
        np.testing.assert_array_equal(x, X)
        np.testing.assert_array_equal(output, np.full_like(X, 5))

    bench, fd = bench_of(scribble, X.copy(), check_fn=check)
    try:
        programs = [compile_here(bench, {"do": do}) for do in (5, 6)]
        assert bench.check(programs[0]).wrong is None
        assert len(bench.measure(programs[0], best_median_ms=None).samples_ms) >= 3
        assert all(1 <= len(rounds_ms) <= 5 for rounds_ms in bench.compare(programs)[:2])
    finally:
        os.close(fd)
    assert len(seen) > 10
    assert set(seen) == {-1.0}


here_and_there = pytest.mark.parametrize("isolation", ["process", "none"])


class Slots:
    __slots__ = ("items",)

    def __init__(self) -> None:
        self.items = [1]

    def __getstate__(self) -> Any:
        return None, {"items": self.items}


MUTABLES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "list": (lambda: [3, 1, 2], lambda it: it.sort() or it.append(0) or len(it)),
    "bytearray": (lambda: bytearray(b"ab"), lambda it: it.append(0) or len(it)),
    "array of Python's": (lambda: array.array("d", [1.0]), lambda it: it.append(0) or len(it)),
    "deque": (lambda: collections.deque([1]), lambda it: it.append(0) or len(it)),
    "set": (lambda: {1}, lambda it: it.add(len(it) + 9) or len(it)),
    "dict of lists": (lambda: {"a": [1]}, lambda it: it["a"].append(0) or len(it["a"])),
    "defaultdict": (lambda: collections.defaultdict(list), lambda it: it[len(it)].append(0) or len(it)),
    "object": (lambda: types.SimpleNamespace(items=[1]), lambda it: it.items.append(0) or len(it.items)),
    "object with slots": (Slots, lambda it: it.items.append(0) or len(it.items)),
    "object with an array": (lambda: types.SimpleNamespace(a=np.zeros(2)), lambda it: it.a.__iadd__(1).sum()),
    "array of objects": (lambda: np.array([[1], [2, 3]], object), lambda it: it[0].append(0) or len(it[0])),
    "masked array": (lambda: np.ma.masked_array([1.0], [False]), lambda it: it.__iadd__(1).sum()),
    "list with an array": (
        lambda: [np.zeros(2), [1]],
        lambda it: it[1].append(0) or (it[0].__iadd__(1).sum(), len(it[1])),
    ),
    "tuple of lists": (lambda: ([1], [2]), lambda it: it[0].append(0) or len(it[0])),
    "iterator": (lambda: types.SimpleNamespace(i=iter([1, 2])), lambda it: len(list(it.i))),
    "map": (lambda: types.SimpleNamespace(i=map(abs, [1, 2])), lambda it: len(list(it.i))),
    "stream": (lambda: io.StringIO("abc"), lambda it: it.read(1)),
    "random generator": (lambda: random.Random(1), lambda it: it.random()),
    "partial": (lambda: functools.partial(len, [1]), lambda it: it.args[0].append(0) or it()),
}


@here_and_there
def test_a_plain_function_never_sees_changes_to_any_object(isolation: str) -> None:
    wanted = {name: use(make()) for name, (make, use) in MUTABLES.items()}

    def changes(first: Any, *, given: Any, do: int) -> Any:
        found = {name: use(given[name]) for name, (_, use) in MUTABLES.items()}
        if found != wanted or first.append(do) or len(first) > 1:
            raise ValueError(f"an earlier run has left {found} and {first}")
        return np.ones(2)

    def ref_fn(first: Any, *, given: Any) -> Any:
        return changes(first, given=given, do=0)

    first: list[int] = []
    given = {name: make() for name, (make, _) in MUTABLES.items()}
    with isolated(isolation):
        tuner = quarantune.AutoTuner(changes, [{"do": 1}, {"do": 2}], ref_fn=ref_fn, warmup=2, rep=3)
        trials = tuner.run(first, given=given).trials
    assert {trial.outcome for trial in trials} <= {Outcome.OK, Outcome.SLOW}
    assert first == [], "the caller's own list has changed"
    assert {name: use(given[name]) for name, (_, use) in MUTABLES.items()} == wanted


@here_and_there
def test_an_argument_given_twice_is_one_object_in_each_run(isolation: str) -> None:
    def work(a: Any, b: Any, c: Any, nested: Any, do: int) -> Any:
        a[0] += 1
        c.append(a)
        assert b[0] == 1
        assert nested["c"][0] is b
        return np.ones(2)

    same, shared = np.zeros(2), list[Any]()
    with isolated(isolation):
        result = quarantune.AutoTuner(work, [{"do": 1}, {"do": 2}], **SOON).run(same, same, shared, {"c": shared})
    assert {trial.outcome for trial in result.trials} <= {Outcome.OK, Outcome.SLOW}
    assert (same[0], shared) == (0, [])


@here_and_there
def test_an_argument_pickled_by_name_is_the_modules_object(isolation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("module_of_one")
    exec("class Kind:\n    def __reduce__(self): return 'ONE'\n    __repr__ = __reduce__\nONE = Kind()", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def work(a: Any, given: Any, do: int) -> Any:
        assert given[0] is module.ONE
        return a

    with isolated(isolation):
        result = quarantune.AutoTuner(work, [{"do": 1}, {"do": 2}], **SOON).run(np.ones(2), [module.ONE])
    assert {trial.outcome for trial in result.trials} <= {Outcome.OK, Outcome.SLOW}


@here_and_there
def test_a_sort_in_place_is_timed_on_unsorted_data(isolation: str) -> None:
    def sort(data: list[int], how: str) -> Any:
        if how == "builtin":
            time.sleep(0.002)
            data.sort()
        for end in range(1, len(data)):
            value, place = data[end], end
            while place and data[place - 1] > value:
                data[place] = data[place - 1]
                place -= 1
            data[place] = value
        return np.asarray(data[:5])

    data = random.Random(0).sample(range(100_000), 700)
    with isolated(isolation):
        result = quarantune.AutoTuner(sort, {"how": ["insertion", "builtin"]}, ref_fn=None, **SOON).run(data)
    assert result.best_config == {"how": "builtin"}


class Mode:
    """Compares by identity, so a dict finds only the object itself."""

    def __init__(self) -> None:
        self.notes = list[int]()


FAST = Mode()
FACTORS = {FAST: 2}


@here_and_there
@pytest.mark.parametrize("kind", ["static", "closure", "key", "method"])
def test_an_argument_stays_the_object_that_the_function_holds(kind: str, isolation: str) -> None:
    fast = Mode()
    table = {fast: 2}

    def static(x: Any, mode: Any, do: int = 1) -> Any:
        return x * table[mode] + 0 * do

    def closure(x: Any, held: Any, notes: list[int], do: int = 1) -> Any:
        assert (held.mode is fast, notes) == (True, [])
        notes.append(do)
        return x * table[held.mode]

    def key(x: Any, given: Any, notes: list[int], do: int = 1) -> Any:
        assert (given is table, notes) == (False, [])
        notes.append(do)
        return x * given[fast]

    class Kernel:
        mode = fast

        def run(self, x: Any, held: Any, notes: list[int], do: int = 1) -> Any:
            assert held.mode is self.mode
            return closure(x, held, notes, do)

    held, notes = types.SimpleNamespace(mode=fast), list[int]()
    fn, args = {
        "static": (jax.jit(static, static_argnames=["mode", "do"]), (fast,)),
        "closure": (closure, (held, notes)),
        "key": (key, (table, notes)),
        "method": (Kernel().run, (held, notes)),
    }[kind]
    with isolated(isolation):
        trials = quarantune.AutoTuner(fn, [{"do": 1}, {"do": 2}], warmup=1, rep=2).run(X, *args).trials
    assert {trial.outcome for trial in trials} <= {Outcome.OK, Outcome.SLOW}
    assert notes == []


def test_an_argument_stays_the_object_that_a_module_holds() -> None:
    def looks_up(x: Any, mode: Any, notes: list[int], do: int = 1) -> Any:
        assert (mode is FAST, notes) == (True, [])
        notes.append(do)
        return x * FACTORS[mode]

    with isolated("none"):
        trials = quarantune.AutoTuner(looks_up, [{"do": 1}, {"do": 2}], warmup=1, rep=2).run(X, FAST, []).trials
    assert {trial.outcome for trial in trials} <= {Outcome.OK, Outcome.SLOW}


@here_and_there
def test_an_argument_without_a_copy_is_refused_before_any_work(isolation: str) -> None:
    ran: list[int] = []
    template.close_shared()
    with quarantune.settings(isolation=isolation), socket.socket() as given:
        tuner = quarantune.AutoTuner(lambda held, do: ran.append(do), [{"do": 1}, {"do": 2}], name="refused", **SOON)
        with pytest.raises(
            TypeError, match=r"element 0 \(reached through argument 0\) is <socket\.socket.* cannot be copied"
        ):
            tuner.run([given])
    assert ran == []
    assert running_templates() == []


@pytest.mark.slow
def test_a_big_argument_is_in_memory_once_for_all_configs() -> None:
    big = np.zeros(16 << 20, np.uint8)
    kernel = tuned(lambda x, do: x[:8] + np.uint8(do), [1, 2, 3])
    kernel.tune(X)  # imports and setup happen here
    process, is_over = psutil.Process(), threading.Event()
    held: list[int] = []
    resident: list[int] = []

    def watch() -> None:
        while not is_over.wait(0.01):
            held.append(_held_in_nameless_files())
            resident.append(process.memory_info().rss)

    before = process.memory_info().rss
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        trials = kernel.tune(big).trials
    finally:
        is_over.set()
        watcher.join()
    assert {trial.outcome for trial in trials} <= {Outcome.OK, Outcome.SLOW}
    assert big.nbytes <= max(held) < 1.2 * big.nbytes
    assert max(resident) - before < 1.5 * big.nbytes


def _held_in_nameless_files() -> int:
    """Returns the bytes in this process's nameless files in memory, each file counted once."""
    files: dict[int, int] = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if "memfd:quarantune" in os.readlink(f"/proc/self/fd/{fd}"):
                status = os.stat(f"/proc/self/fd/{fd}")
                files[status.st_ino] = 512 * status.st_blocks
    return sum(files.values())
