"""Calls and saved results use the program that the sweep compiled: they do not compile or trace it again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from tuned_functions import Notes, X, tuned

import quarantune
from quarantune.jax_internals.other_processes import compilation_cache_in_memory, executable_parts
from quarantune.transport import programs
from quarantune.transport.program_text import ProgramText
from quarantune.tuning.reuse import CompilationSeeds

pytestmark = pytest.mark.usefixtures("two_slots")


@pytest.fixture
def cache_events() -> Iterator[list[str]]:
    """Notes hits and misses of JAX's compilation caches in this process."""
    heard: list[str] = []

    def listen(event: str, **_: object) -> None:
        if event.startswith("/jax/compilation_cache/cache_"):
            heard.append(event.rpartition("/")[2])

    jax.monitoring.register_event_listener(listen)
    yield heard
    jax.monitoring.unregister_event_listener(listen)


# The default wins a tie, whichever of the three equal programs ran.
@pytest.mark.parametrize(
    ("default", "has_own_cache", "is_committed"),
    [(1, False, True), (2, True, True), (3, False, False), (3, True, False)],
)
def test_the_first_call_after_a_sweep_compiles_nothing(
    default: int, has_own_cache: bool, is_committed: bool, cache_events: list[str], tmp_path: Path
) -> None:
    x = jax.device_put(X, jax.local_devices()[0]) if is_committed else X
    directory = tmp_path / "compiled"
    if has_own_cache:
        jax.config.update("jax_compilation_cache_dir", str(directory))
        compilation_cache.reset_cache()  # an earlier test of this process may have opened another one
    try:
        kernel = tuned(lambda x, do: x + do // 10, [1, 2, 3], default=default)
        result = kernel.tune(x)
        assert result.best_config == {"do": default}
        assert not cache_events, "the sweep itself compiles nothing here"
        np.testing.assert_array_equal(kernel(x), x)
        assert cache_events == ["cache_hits"]
        assert len(list(directory.glob("jit_kernel-*"))) == has_own_cache
    finally:
        if has_own_cache:
            jax.config.update("jax_compilation_cache_dir", None)
            compilation_cache.reset_cache()


@pytest.mark.parametrize("is_committed", [False, True])
@pytest.mark.parametrize("do", [1, 2])
def test_a_program_compiled_elsewhere_is_found_by_its_text(
    is_committed: bool, do: int, cache_events: list[str]
) -> None:
    def scaled(x: Any, y: Any, do: int) -> Any:
        return {"sum": x @ y + do}

    there, here = (jax.jit(scaled, static_argnames=["do"]) for _ in range(2))
    placed = jax.ShapeDtypeStruct((4, 4), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    traced = there.trace(placed, placed, do=1)
    lowered = traced.lower()
    identity = programs.identity(lowered, lowered.as_text(), ProgramText(traced.jaxpr), {})
    executable = executable_parts(lowered.compile()).program
    x = np.eye(4, dtype=np.float32)
    arrays = [jax.device_put(x, jax.devices()[0]) if is_committed else jnp.asarray(x), jnp.asarray(x)]
    seeds = CompilationSeeds()
    seeds.add({identity: executable})
    with seeds.in_use(here, {"do": do}, tuple(arrays), {}):
        np.testing.assert_array_equal(here(*arrays, do=do)["sum"], x + do)
    assert cache_events == ["cache_hits" if do == 1 else "cache_misses"], "only an equal program is a hit"


def test_a_program_that_jaxs_key_finds_is_not_lowered_again(compiles: list[str]) -> None:
    def shifted() -> Any:
        def shift(x: Any) -> Any:
            return x + 7

        return jax.jit(shift)

    with compilation_cache_in_memory({}) as cache:
        traced = shifted().trace(X)
        lowered = traced.lower()
        lowered.compile()
    identity = programs.identity(lowered, lowered.as_text(), ProgramText(traced.jaxpr), {})
    seeds, here = CompilationSeeds(), shifted()
    seeds.add({**cache.programs, str(identity): b"is not looked at"})
    compiles.clear()
    with seeds.in_use(here, {}, (X,), {}):
        np.testing.assert_array_equal(here(X), X + 7)
    events = [event.rpartition("/")[2] for event in compiles]
    assert events.count("jaxpr_to_mlir_module_duration") == 1
    assert "compile_time_saved_sec" in events


@pytest.mark.parametrize("default", [1, 2, 3])
def test_a_saved_winner_is_never_traced(default: int, notes: Notes, tmp_path: Path) -> None:
    def noting(x: Any, do: int) -> Any:
        notes.add(do)
        return x + do // 10

    result = tuned(noting, [1, 2, 3], default=default).tune(X)
    assert result.best_config == {"do": default}
    result.save(tmp_path / "best")
    traced = notes.lines()
    np.testing.assert_array_equal(quarantune.TuningResult.load(tmp_path / "best", trusted=True).fn(X), X)
    assert notes.lines() == traced
