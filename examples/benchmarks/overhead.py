"""Measures the sandbox's cost per config, compared with compiling and measuring in one process."""

from __future__ import annotations

import itertools
import logging
import statistics
import time
from typing import Any

import kernels

import quarantune

_FEW, _MANY = 8, 40
"""The numbers of configs of two sweeps. A config's cost is the slope between them, without one-time costs.

Their difference is the number of configs that one worker runs on an accelerator, so the cost includes a config's share
of a worker's start.
"""

WAYS: dict[str, dict[str, Any]] = {
    "in process": {"isolation": "none"},
    "sandbox, one compile worker": {"num_workers": 1},
    "sandbox": {},
}


def per_config(*, problem: str, repeat: int) -> dict[str, Any]:
    """Sweeps configs that do next to nothing, in each of the `WAYS` in turn.

    Returns:
        `start_s`, the extra seconds of a process's first sweep, and `per_config_ms`, one value per repetition for each
        way.
    """
    logging.getLogger("quarantune").setLevel(logging.ERROR)  # hides the warning about running without a sandbox
    args = kernels.PROBLEMS[problem].arguments(8)
    factors = itertools.count(1)  # no program twice, because JAX remembers traces

    def sweep_s(count: int) -> float:
        fresh = {"factor": list(itertools.islice(factors, count))}
        tuned = quarantune.autotune(fresh, name=f"trivial-{fresh['factor'][0]}", ref_fn=None)(kernels.trivial)
        start = time.perf_counter()
        tuned.tune(*args)
        return time.perf_counter() - start

    first_s = sweep_s(_FEW)
    start_s = first_s - statistics.median(sweep_s(_FEW) for _ in range(repeat))
    costs: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(repeat):
        for way, settings in WAYS.items():
            with quarantune.settings(**settings):
                few_s, many_s = sweep_s(_FEW), sweep_s(_MANY)
            costs[way].append(1e3 * (many_s - few_s) / (_MANY - _FEW))
    return {"start_s": start_s, "per_config_ms": costs}
