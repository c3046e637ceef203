"""What the sandbox costs per config, over compiling and measuring in one process."""

from __future__ import annotations

import itertools
import logging
import statistics
import time
from typing import Any

import kernels

import quarantune

_FEW, _MANY = 8, 40
"""A config's cost is the slope between sweeps of so many configs: what a sweep costs only once drops out.

They lie as many apart as one worker on an accelerator takes, so that its share of the start of a worker is in it.
"""

WAYS: dict[str, dict[str, Any]] = {
    "in process": {"isolation": "none"},
    "sandbox, one compile worker": {"cpu_count": 1},
    "sandbox": {},
}


def per_config(*, problem: str, repeat: int) -> dict[str, Any]:
    """Sweeps configs that do next to nothing, in each of the `WAYS` in turn.

    Returns:
        `start_s`, what the first sweep of a process takes on top of a later one, and `per_config_ms`, one value per
        repetition for each way.
    """
    logging.getLogger("quarantune").setLevel(logging.ERROR)  # it warns of what we do on purpose: use no sandbox
    args = kernels.PROBLEMS[problem].arguments(8)
    factors = itertools.count(1)  # no program twice: JAX would remember its trace

    def sweep_s(count: int) -> float:
        fresh = {"factor": list(itertools.islice(factors, count))}
        tuned = quarantune.autotune(fresh, name=f"trivial-{fresh['factor'][0]}")(kernels.trivial)
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
