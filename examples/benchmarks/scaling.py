"""Compares the cost per config of sweeps of 1,000 and of 100 trivial configs.

    python examples/benchmarks/scaling.py          # takes minutes
    python examples/benchmarks/scaling.py 20 200   # other numbers of configs

The aim is a ratio of at most 1.2.
"""

from __future__ import annotations

import functools
import sys
import tempfile
import time
from typing import Any

import jax
import numpy as np

import quarantune


def per_config_ms(count: int) -> tuple[float, float]:
    """Returns the time per config and the CPU time of this process per config, in milliseconds."""

    @quarantune.autotune([{"n": n} for n in range(count)], name=f"of-{count}", warmup=0, rep=3, ref_fn=None)
    @functools.partial(jax.jit, static_argnames=["n"])
    def add(x: Any, n: int = 0) -> Any:
        return x + n

    started, cpu_started = time.perf_counter(), time.process_time()
    result = add.tune(np.zeros(4, np.float32))
    elapsed, cpu = time.perf_counter() - started, time.process_time() - cpu_started
    assert not any(trial.outcome.is_failure for trial in result.trials), result.failures
    return 1e3 * elapsed / count, 1e3 * cpu / count


def main(few: int, many: int) -> None:
    """Runs the long sweep between two short ones, so that a change in the machine's load affects both kinds."""
    with tempfile.TemporaryDirectory() as directory, quarantune.settings(cache_dir=directory):
        per_config_ms(2)
        before = per_config_ms(few)
        long = per_config_ms(many)
        after = per_config_ms(few)
    for label, (ms, cpu_ms) in ((few, before), (many, long), (few, after)):
        print(f"a sweep of {label}: {ms:.1f} ms per config, {cpu_ms:.2f} ms of this process's CPU")
    print(f"ratio: {2 * long[0] / (before[0] + after[0]):.2f}")


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]) if len(sys.argv) == 3 else (100, 1000))
