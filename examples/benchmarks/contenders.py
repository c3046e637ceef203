"""Tunes with each contender, and times its sweeps and its cached calls."""

from __future__ import annotations

import importlib
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import kernels

import quarantune

Tuned = Callable[..., Any]
Chosen = Callable[..., dict[str, Any]]
"""Returns the config that a tuned call with these arguments runs with."""

_CALLS_PER_SAMPLE = 200
_CALL_SAMPLES = 101


def with_quarantune(kernel: Tuned, space: kernels.Space) -> tuple[Tuned, Chosen]:
    """Tunes with quarantune."""
    tuned = quarantune.autotune(dict(space))(kernel)

    def chosen(*args: Any) -> dict[str, Any]:
        config = tuned.lookup(*args)
        assert config is not None
        return dict(config)

    return tuned, chosen


def with_tonno(kernel: Tuned, space: kernels.Space) -> tuple[Tuned, Chosen]:
    """Tunes with tonno, and reads its choice from its cache file."""
    tuned = importlib.import_module("tonno").autotune(kernels.grid(space))(kernel)

    def chosen(*args: Any) -> dict[str, Any]:
        file = Path(os.environ["TONNO_CACHE_DIR"], f"{kernel.__qualname__}.json")
        (calls,) = json.loads(file.read_text()).values()
        (entry,) = calls.values()
        return dict(entry["config"])

    return tuned, chosen


def with_tune_jax(kernel: Tuned, space: kernels.Space) -> tuple[Tuned, Chosen]:
    """Tunes with tune-jax, which keeps its choice for the life of the process."""
    tuned = importlib.import_module("tune_jax").tune(kernel, hyperparams=dict(space))
    return tuned, lambda *args: dict(tuned.optimal_hyperparams)


CONTENDERS = {"quarantune": with_quarantune, "tonno": with_tonno, "tune-jax": with_tune_jax}


def sweep(*, contender: str, problem: str, size: int, is_first: bool) -> dict[str, Any]:
    """Makes the first call of a tuned function.

    The backend is up and the arguments are on the device before the clock starts.

    Args:
        contender: the tuner's name.
        problem: the kernel's name.
        size: the problem's size.
        is_first: whether this is the process's first sweep. If not, one-time work comes before the clock starts:
            the contender tunes something else, and JAX lowers a kernel like this one.

    Returns:
        `sweep_s`, the seconds until the call's result is ready, and `config`, the contender's choice.
    """
    case = kernels.PROBLEMS[problem]
    args = case.arguments(size)
    if not is_first:
        jax.block_until_ready(CONTENDERS[contender](kernels.trivial, {"factor": [1, 2]})[0](args[0], args[0]))
        case.kernel.lower(*args)
    tuned, chosen = CONTENDERS[contender](case.kernel, case.space)
    start = time.perf_counter()
    jax.block_until_ready(tuned(*args))
    return {"sweep_s": time.perf_counter() - start, "config": chosen(*args)}


def cached_call(*, contender: str, problem: str) -> dict[str, Any]:
    """Times calls of a tuned function that does next to nothing, in turn with calls of the jitted function.

    Returns:
        `tuned_us` and `bare_us`, the medians of one call in microseconds.
    """
    args = kernels.PROBLEMS[problem].arguments(8)
    tuned, chosen = CONTENDERS[contender](kernels.trivial, {"factor": [1, 2]})
    jax.block_until_ready(tuned(*args))
    config = chosen(*args)

    times: dict[str, list[float]] = {"tuned_us": [], "bare_us": []}
    for _ in range(_CALL_SAMPLES):
        times["tuned_us"].append(_call_us(tuned, args, {}))
        times["bare_us"].append(_call_us(kernels.trivial, args, config))
    return {name: statistics.median(samples) for name, samples in times.items()}


def _call_us(fn: Tuned, args: tuple[Any, ...], config: dict[str, Any]) -> float:
    start = time.perf_counter()
    for _ in range(_CALLS_PER_SAMPLE):
        out = fn(*args, **config)
    elapsed = time.perf_counter() - start
    jax.block_until_ready(out)
    return 1e6 * elapsed / _CALLS_PER_SAMPLE
