"""A saved result is used for the program that was measured, and for no other; trials are recalled by their program."""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import change_version, python
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import quarantune
from quarantune import CacheMissError, CacheWarning, TuningCache
from quarantune.scheduler.recall import NO_REFERENCE, Recall, comparable
from quarantune.transport import programs
from quarantune.transport.program_text import ProgramText
from quarantune.values.trial import Outcome, Trial, is_same_program, lowered_half

pytestmark = pytest.mark.usefixtures("two_slots")

X, Y = np.arange(12, dtype=np.float32), np.ones((3, 4), np.float32)
VARIABLE = "MODE_OF_THE_TEST"


def total(name: str, **options: Any) -> Any:
    """Returns a kernel that reads its mode from the environment, which no fingerprint shows."""

    @quarantune.autotune({"rows": [1, 5]}, name=name, warmup=0, rep=2, **options)
    @functools.partial(jax.jit, static_argnames=["rows"])
    def total_of(x: Any, rows: int = 1) -> Any:
        if os.environ.get(VARIABLE) == "quick":  # right only if `rows` divides
            return x[: len(x) // rows * rows].reshape(-1, rows).sum()
        return sum(x[i : i + rows].sum() for i in range(0, len(x), rows))

    return total_of


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs configs in this process, whose environment the test changes."""
    monkeypatch.setenv("QUARANTUNE_ISOLATION", "none")
    monkeypatch.setattr("quarantune.sweep.processes.warn_once", lambda message, category: None)


def another_program(*parts: str) -> Any:
    return pytest.warns(CacheWarning, match=".*".join(["another program", *parts]))


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A kernel's name that no other test has, because each name warns once."""
    return str(request.node.name)


# The proof


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("form", ["call", "keyword", "lookup", "jit", "grad", "vmap"])
def test_a_result_is_not_used_for_another_program(form: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    uses: dict[str, Callable[[Any], Any]] = {
        "call": lambda fn: fn(X),
        "keyword": lambda fn: fn(x=X),
        "lookup": lambda fn: fn.lookup(X),
        "jit": lambda fn: jax.jit(lambda x: fn(x) + 1)(X),
        "grad": lambda fn: jax.jit(jax.grad(fn))(X),
        "vmap": lambda fn: jax.vmap(fn)(np.stack([X, X])),
    }
    total(name)(X)
    with quarantune.settings(on_miss="error"):
        uses[form](total(name))
        monkeypatch.setenv(VARIABLE, "quick")
        with another_program("its line 2 is '(slice|reshape)", "made by .*test_saved_program.py", "in total.*total_of"):
            if form == "lookup":
                assert total(name).lookup(X) is None
            else:
                with pytest.raises(CacheMissError, match=r"differs in its program: its line 2 is"):
                    uses[form](total(name))


@pytest.mark.usefixtures("here")
def test_a_result_serves_traces_over_arrays_of_a_mesh(name: str) -> None:
    total(name)(X)  # on one device, as the command tunes recorded calls
    mesh = AbstractMesh((2,), ("d",), axis_types=(AxisType.Auto,))
    on_mesh = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(mesh, PartitionSpec("d")))
    with quarantune.settings(on_miss="error"):
        jax.jit(lambda x: total(name)(x) + 1).trace(on_mesh)
        jax.jit(jax.vmap(total(name))).trace(jax.ShapeDtypeStruct((2, *X.shape), X.dtype, sharding=on_mesh.sharding))


@pytest.mark.usefixtures("here")
def test_each_program_of_a_key_keeps_its_result(name: str, monkeypatch: pytest.MonkeyPatch, sweeps: list[str]) -> None:
    exact = total(name)
    exact(X)
    monkeypatch.setenv(VARIABLE, "quick")
    quick = total(name)
    with another_program():
        assert quick(X) == quick.default(X) == X.sum(), "five rows at a time lose two of twelve numbers"
    assert sweeps == [name, name]
    for mode in ("exact", "quick", "exact"):
        monkeypatch.setenv(VARIABLE, mode)
        with quarantune.settings(on_miss="error"):
            assert total(name)(X) == X.sum()
    (entry,) = TuningCache()
    assert len(entry.entry["other_programs"]) == 1
    assert sweeps == [name, name]


@pytest.mark.usefixtures("here")
def test_a_result_in_memory_is_not_proved_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fn = total(name)
    fn(X)
    monkeypatch.setattr(ProgramText, "__init__", lambda self, jaxpr: pytest.fail("it is in memory"))
    fn(X)
    fn.lookup(X)


@pytest.mark.usefixtures("here")
def test_a_call_that_is_proved_is_traced_and_lowered_once(name: str, compiles: list[str]) -> None:
    total(name)(X)
    jnp.zeros(3).block_until_ready()
    fn = total(name)
    compiles.clear()
    fn(X)
    events = [event.rpartition("/")[2] for event in compiles]
    assert events.count("jaxpr_trace_duration") == 1
    assert events.count("jaxpr_to_mlir_module_duration") == 1


@pytest.mark.parametrize("first", ["left out", "by position", "by name"])
def test_a_result_is_found_however_the_call_is_spelt(first: str, name: str) -> None:
    spellings: dict[str, Callable[[Any], Any]] = {
        "left out": lambda fn: fn(X, Y),
        "by position": lambda fn: fn(X, Y, 1.0),
        "by name": lambda fn: fn(scale=1.0, other=Y, x=X),
    }

    def scaled() -> Any:
        @quarantune.autotune({"n": [1, 2]}, name=name, warmup=0, rep=2)
        @functools.partial(jax.jit, static_argnames=["n"])
        def fn(x: Any, other: Any, scale: float = 1.0, n: int = 1) -> Any:
            return x * scale - other.sum() + 1e-9 * n

        return fn

    spellings[first](scaled())
    with quarantune.settings(on_miss="error"):
        for spelling in spellings.values():
            spelling(scaled())


@pytest.mark.usefixtures("here")
def test_results_without_a_program_are_used_as_before(
    name: str, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    total(name)(X)
    monkeypatch.setenv(VARIABLE, "quick")
    change_version(cache_dir, "jaxlib", "0.0.1")
    with quarantune.settings(on_miss="error"), pytest.warns(CacheWarning, match="made under"):
        total(name)(X)
    ((key, entry),) = TuningCache()
    entry = {name: value for name, value in entry.items() if name != "program"}
    change_version(cache_dir, "jaxlib", jax.lib.__version__)
    TuningCache().clear()
    TuningCache()._on_disk().put(
        key.kernel_type, key.device, key.problem_size, {**entry, "versions": quarantune.functions.versions.versions()}
    )
    with quarantune.settings(on_miss="error"):
        total(name)(X)


@pytest.mark.usefixtures("here")
def test_a_key_fns_result_serves_other_shapes_of_one_program(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    total(name, key_fn=lambda x: "any")(X)
    with quarantune.settings(on_miss="error"):
        total(name, key_fn=lambda x: "any")(X[:10])
        monkeypatch.setenv(VARIABLE, "quick")
        total(name, key_fn=lambda x: "any")(X[:10])
        with another_program(), pytest.raises(CacheMissError, match="its program"):
            total(name, key_fn=lambda x: "any")(X)


@pytest.mark.slow
def test_verify_completes_an_entry_without_a_program(name: str, cache_dir: Path, tmp_path: Path) -> None:
    fn = total(name)
    fn(X)
    ((key, entry),) = TuningCache()
    program = entry.pop("program")
    TuningCache().clear()
    store = TuningCache()._on_disk()
    store.put(key.kernel_type, key.device, key.problem_size, entry)
    (verified,) = TuningCache().verify(fn).entries
    ((_, completed),) = TuningCache()
    assert verified.verdict == "current"
    assert completed["program"]["winner"] == program["winner"]


# Trials by program

KERNEL = """
import jax, jax.numpy as jnp, quarantune

SCALE = 2.0

def helper(x):
    return x * SCALE

@quarantune.autotune({"n": [1, 2, 3]}, warmup=0, rep=2, name="edited")
@jax.jit(static_argnames=["n"])
def kernel(x, n: int = 1):
    result = helper(x)
    if n == 3:
        result = result + 0.0 * jnp.sin(x)
    return result + 1e-9 * n * jnp.cos(x)
"""
EDITS = {
    "a comment": ("    result = helper", "    # a comment\n    result = helper", []),
    "a renamed variable": ("result", "outcome", []),
    "a renamed helper": ("helper", "scaled", []),
    "dead code": ("    result = helper", "    unused = x * 7\n    result = helper", []),
    "an unused argument": ("n: int = 1):", "n: int = 1, unused=None):", []),
    "one branch": ("0.0 * jnp.sin(x)", "0.0 * jnp.tan(x)", [1, 3]),
    "the defaults, too": ("1e-9 * n * jnp.cos(x)", "1e-9 * n * jnp.tan(x)", [1, 2, 3]),
}


_times = itertools.count(1_700_000_000)


def load(directory: Path, source: str) -> Any:
    path = directory / "edited_kernel.py"
    path.write_text(source)
    os.utime(path, (0, next(_times)))  # Python compares times of compiled files in whole seconds
    sys.modules.pop("edited_kernel", None)
    importlib.invalidate_caches()
    return importlib.import_module("edited_kernel").kernel


@pytest.mark.parametrize("edit", EDITS)
def test_a_sweep_after_an_edit_measures_what_it_has_changed(
    edit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swept: list[list[Any]]
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before, after, measured = EDITS[edit]
    first = load(tmp_path, KERNEL).tune(X)
    again = load(tmp_path, KERNEL.replace(before, after)).tune(X, resume=True)
    # A config that was stopped early runs again, unless another is as fast as the one that stopped it.
    stopped = {trial.config["n"] for trial in first.trials if trial.outcome is Outcome.SLOW}
    ran = {trial.config["n"] for trial in again.trials if trial.recalled_from is None}
    assert {*measured} <= ran <= {*measured} | stopped
    assert [{*each} for each in swept] == [{1, 2, 3}, *([ran] if ran else [])]
    if not ran:
        assert again.best_config == first.best_config
        assert again.time_ms == first.time_ms, "the final is not repeated"


def test_an_interrupted_sweep_resumes_by_its_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swept: list[list[Any]], cache_dir: Path
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    load(tmp_path, KERNEL).tune(X)
    for path in cache_dir.glob("*.json"):
        path.unlink()
    load(tmp_path, KERNEL)(X)
    assert [sorted(each) for each in swept] == [[1, 2, 3]]


def test_a_trial_is_recalled_only_with_its_own_reference() -> None:
    measured = Trial(config={"n": 1}, outcome=Outcome.OK, time_ms=1.0, program="program:a.b", ended_s=7.0)

    def recalled(then: str, now: str) -> bool:
        against = comparable(then)
        recall = Recall({} if against is None else {("b", against): measured}, has_reference=True)
        recall.reference = now
        trial = recall.trial("program:other.b")
        return trial is not None and trial.recalled_from == 7.0

    assert recalled("program:r.s", "program:t.s")
    assert not recalled("program:r.s", "program:r.t")
    assert recalled(NO_REFERENCE, NO_REFERENCE)
    assert not recalled(NO_REFERENCE, "program:r.s")
    assert not recalled("program:r.", "program:t."), "their callbacks may differ"
    assert not recalled("program:r.", NO_REFERENCE)


# The text of a program


def text(fn: Callable[..., Any], *args: Any) -> str:
    return ProgramText(jax.jit(fn).trace(*(args or (X,))).jaxpr).hash


def identity(fn: Callable[..., Any]) -> str:
    traced = jax.jit(fn).trace(X)
    lowered = traced.lower()
    return programs.identity(lowered, lowered.as_text(), ProgramText(traced.jaxpr), {})


def scaled_by(number: float) -> Callable[[Any], Any]:
    return lambda x: jax.lax.fori_loop(0, 3, lambda _, y: y * number, x)


PAIRS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "a constant in its last digit": (scaled_by(0.1), scaled_by(0.1 + 1e-8)),
    "a large integer": (lambda x: x.astype(int) + 2**30, lambda x: x.astype(int) + (2**30 + 1)),
    "the order of operands": (lambda x: x - jnp.sin(x), lambda x: jnp.sin(x) - x),
    "which operand": (lambda x: (x + 1) * (x + 2) + (x + 1), lambda x: (x + 1) * (x + 2) + (x + 2)),
    "an element of a table": (lambda x: x + np.arange(12.0), lambda x: x + np.r_[np.arange(11.0), 12.0]),
    "a parameter": (lambda x: jnp.cumsum(x), lambda x: jax.lax.cumsum(x, reverse=True)),
    "a branch": (
        lambda x: jax.lax.cond(x[0] > 0, lambda y: y + 1, lambda y: y, x),
        lambda x: jax.lax.cond(x[0] > 0, lambda y: y + 1, lambda y: y + 2, x),
    ),
    "the result": (lambda x: (x + 1, x + 2), lambda x: (x + 2, x + 1)),
    "a random seed": (
        lambda x: x + jax.random.normal(jax.random.key(1), (12,)),
        lambda x: x + jax.random.normal(jax.random.key(2), (12,)),
    ),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_two_programs_have_two_identities(pair: str) -> None:
    one, other = PAIRS[pair]
    assert text(one) == text(one) != text(other)
    assert lowered_half(identity(one))
    assert identity(one) == identity(one) != identity(other)
    assert not is_same_program(identity(one), identity(other))


def test_names_and_dead_code_do_not_distinguish_programs() -> None:
    @jax.jit
    def helper(x: Any) -> Any:
        return x * 2

    @jax.jit
    def another(x: Any) -> Any:
        _ = jnp.sin(x)
        return x * 2

    assert identity(lambda x: helper(x) + 1) == identity(lambda y: another(y) + 1)


_KERNEL_AT = """
import sys, jax, jax.numpy as jnp
from jax.experimental import pallas as pl
from quarantune.scheduler.recall import NO_REFERENCE, Recall, comparable
from quarantune.transport import programs
from quarantune.transport.program_text import ProgramText
{lines}
def body(x_ref, o_ref):
    o_ref[...] = x_ref[...] * {factor}
def double(x):
    spec = pl.BlockSpec((8, 128), lambda i: (i, 0))
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(body, out, grid=(2,), in_specs=[spec], out_specs=spec)(x)
traced = jax.jit(double).trace(jax.ShapeDtypeStruct((16, 128), jnp.float32))
lowered = traced.lower(lowering_platforms=("tpu",))
assert "tpu_custom_call" in lowered.as_text()
print(programs.identity(lowered, lowered.as_text(), ProgramText(traced.jaxpr), {{}}))
"""


@pytest.mark.long
@pytest.mark.slow
def test_a_kernels_position_in_its_file_does_not_count(tmp_path: Path) -> None:
    def told(place: str, lines: str, factor: float, seed: str) -> str:
        path = tmp_path / place / "program.py"
        path.parent.mkdir()
        path.write_text(_KERNEL_AT.format(lines=lines, factor=factor))
        return python(path, PYTHONHASHSEED=seed).strip()

    here = told("here", "", 2.0, "1")
    assert lowered_half(here)
    assert told("there", "# moved\n\n\n", 2.0, "2") == here
    assert not is_same_program(told("other", "", 3.0, "1"), here)


def test_identities_without_a_second_half_match_by_the_first() -> None:
    assert is_same_program("program:a.b", "program:a.")
    assert is_same_program("program:a.", "program:a.b")
    assert not is_same_program("program:a.b", "program:a.c")
    assert is_same_program("program:a.b", "program:c.b"), "another trace lowered to the same program"
    assert not is_same_program("program:a.", "program:b.")


def test_a_ranked_programs_time_needs_its_own_reference() -> None:
    measured = Trial(config={"n": 1}, outcome=Outcome.OK, time_ms=1.0, program="program:a.b", cheap_ms=2.0)
    against = comparable("program:r.s")
    assert against is not None
    recall = Recall({("b", against): measured}, has_reference=True)
    assert recall.time_ms("program:other.b", "program:t.s") == 1.0
    assert recall.time_ms("program:other.b", "program:r.t") is None, "its output may be wrong for other defaults"
    assert recall.time_ms("program:other.b", None) is None
    assert Recall({("b", NO_REFERENCE): measured}).time_ms("program:other.b", None) == 1.0
