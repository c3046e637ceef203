"""A user's bounds hold for the samples of a config, and for the time of a search with its final."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import everywhere, isolated

import quarantune
from quarantune.host.waits import RunTime
from quarantune.measure import finals

pytestmark = pytest.mark.usefixtures("two_slots")

X = np.ones((64, 64), np.float32)


@everywhere
@pytest.mark.parametrize("rep", [1, 4])
def test_no_config_has_more_samples_than_rep(rep: int, isolation: str) -> None:
    @quarantune.autotune({"n": [1, 2, 3]}, rep=rep, name="quick")
    @functools.partial(jax.jit, static_argnames=["n"])
    def quick(x: Any, n: int = 1) -> Any:
        return jnp.sin(x)

    with isolated(isolation):
        result = quick.tune(X)
    assert all(1 <= len(trial.samples_ms) <= rep for trial in result.trials)


def test_a_slow_config_runs_a_few_times_with_one_sample(tmp_path: Path) -> None:
    def nap(directory: str, n: int = 1) -> None:
        with (Path(directory) / f"ran {n}").open("a") as file:
            file.write("x")
        time.sleep(0.2)

    result = quarantune.AutoTuner(nap, {"n": [1, 2]}, rep=1, ref_fn=None).run(str(tmp_path))
    assert [len(trial.samples_ms) for trial in result.trials] == [1, 1]
    runs = [len((tmp_path / f"ran {n}").read_text()) for n in (1, 2)]
    assert max(runs) <= 9, "check, warm-up and sample; the same again for a disturbance, and for the final"


@pytest.mark.parametrize(("each_ms", "rep", "most_runs"), [(200.0, 1, 2), (200.0, 7, 8), (0.01, 1, 51), (0.01, 3, 151)])
def test_a_final_has_at_most_rep_samples(each_ms: float, rep: int, most_runs: int) -> None:
    taken = [0, 0]

    def contender(at: int) -> Any:
        def take(count: int) -> list[RunTime]:
            taken[at] += count
            return [RunTime.exactly(each_ms * (1 + 0.01 * ((taken[at] + at) % 7))) for _ in range(count)]

        return take

    for is_exact in (True, False):
        taken[:] = [0, 0]
        rounds = finals.take_turns([contender(0), contender(1)], is_exact=is_exact, rep=rep, clock=lambda: 0.0)
        assert all(1 <= len(samples_ms) <= rep for samples_ms in rounds)
        assert max(taken) <= most_runs
