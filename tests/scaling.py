"""Prints what a config costs in a sweep of 1,000 trivial ones over one of 100; run by hand, as it takes minutes.

The aim is a ratio of at most 1.2.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
import time
from typing import Any

import jax
import numpy as np

import quarantune


def per_config_ms(count: int) -> tuple[float, float]:
    """Returns the time that a config takes, and what it takes of this process's CPU."""

    @quarantune.autotune([{"n": n} for n in range(count)], name=f"of-{count}", warmup=0, rep=3)
    @functools.partial(jax.jit, static_argnames=["n"])
    def add(x: Any, n: int = 0) -> Any:
        return x + n

    started, cpu_started = time.perf_counter(), time.process_time()
    result = add.tune(np.zeros(4, np.float32))
    elapsed, cpu = time.perf_counter() - started, time.process_time() - cpu_started
    assert not any(trial.outcome.is_failure for trial in result.trials), result.failures
    return 1e3 * elapsed / count, 1e3 * cpu / count


def main(few: int, many: int) -> None:
    """Interleaves the two, so that a machine that grows busy slows both."""
    with tempfile.TemporaryDirectory() as directory:
        os.environ["QUARANTUNE_CACHE_DIR"] = directory
        per_config_ms(2)
        before = per_config_ms(few)
        long = per_config_ms(many)
        after = per_config_ms(few)
    for label, (ms, cpu_ms) in ((few, before), (many, long), (few, after)):
        print(f"a sweep of {label}: {ms:.1f} ms per config, {cpu_ms:.2f} ms of the caller's CPU")
    print(f"ratio: {2 * long[0] / (before[0] + after[0]):.2f}")


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]) if len(sys.argv) == 3 else (100, 1000))
