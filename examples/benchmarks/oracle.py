"""Measures the true time of every config: compiles all, then times them in turn, so that they share drift."""

from __future__ import annotations

import importlib
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import kernels

_ROUNDS = 3
"""Number of rounds that time every config."""
_CLOSE = 2.0
"""Ratio to the best time up to which configs get more rounds: only these can be mistaken for the best."""
_DEVICE_RUNS = 10
_PLAUSIBLE_MS = 60_000
"""Limit for times of the profiler: its counter wraps now and then, and then gives a time of centuries."""


def exhaust(*, problem: str, size: int, rounds: int) -> dict[str, Any]:
    """Times every config of a problem.

    Args:
        problem: the problem's name.
        size: the problem's size.
        rounds: the number of rounds for configs close to the best.

    Returns:
        `configs` and `times_ms`: for each config one value per round, or an empty list if the config does not work.

    Raises:
        ValueError: a config's output is wrong.
        RuntimeError: no config works.
    """
    case = kernels.PROBLEMS[problem]
    args = case.arguments(size)
    expected = case.kernel(*args)
    run = device_ms if jax.default_backend() == "gpu" else _wall_ms
    configs = kernels.grid(case.space)
    compiled: dict[int, Any] = {}
    reason: Exception | None = None
    for index, config in enumerate(configs):
        try:
            working = case.kernel.lower(*args, **config).compile()
            output = working(*args)
        except Exception as error:
            reason = error
            continue
        off_by = float(jnp.max(jnp.abs(output - expected)) / jnp.max(jnp.abs(expected)))
        if not off_by <= case.off_by:
            raise ValueError(f"{config} is off by {off_by:.1%} of the output's largest element")
        compiled[index] = working
    if not compiled:
        raise RuntimeError(f"none of the {len(configs)} configs works: {reason}")

    times: dict[int, list[float]] = {index: [] for index in range(len(configs))}
    _time_in_turn(compiled, times, run, args, rounds=min(_ROUNDS, rounds))
    limit = _CLOSE * min(statistics.median(times[index]) for index in compiled)
    close = {index: fn for index, fn in compiled.items() if statistics.median(times[index]) <= limit}
    _time_in_turn(close, times, run, args, rounds=rounds - min(_ROUNDS, rounds))
    return {"configs": configs, "times_ms": list(times.values())}


def _time_in_turn(
    compiled: dict[int, Any],
    times: dict[int, list[float]],
    run: Callable[[Any, tuple[Any, ...]], float],
    args: tuple[Any, ...],
    *,
    rounds: int,
) -> None:
    order = list(compiled)
    for _ in range(rounds):
        random.shuffle(order)
        for index in order:
            times[index].append(run(compiled[index], args))


def _wall_ms(compiled: Any, args: tuple[Any, ...]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(compiled(*args))
    return 1e3 * (time.perf_counter() - start)


def device_ms(compiled: Any, args: tuple[Any, ...]) -> float:
    """Returns the device time of one run, by CUPTI."""
    profiler: Any = importlib.import_module("jax.experimental.mosaic.gpu.profiler")  # exists only with a GPU
    # The first run of a series is slow, even after a warm-up.
    _, samples = profiler.Cupti(finalize=False).measure(compiled, iterations=1 + _DEVICE_RUNS)(*args)
    if samples is None:
        raise RuntimeError("the profiler saw no kernel run: is another profiler attached, or this user not allowed to?")
    return float(statistics.median(sample for sample in samples[1:] if 0 < sample < _PLAUSIBLE_MS))
