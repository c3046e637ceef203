"""The finalists of a sweep are timed in several fresh processes, if the sweep is long enough."""

from __future__ import annotations

import collections
import os
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from aftermath import nothing_is_left, quiet_place  # noqa: F401
from helpers import isolated

import quarantune
from quarantune.host.process import in_sandbox
from quarantune.sweep import routes
from quarantune.values.trial import interval_text

pytestmark = pytest.mark.usefixtures("two_slots")


def slept(directory: str, n: int = 20) -> str:
    """Sleeps, and notes which config has run in which process."""
    assert in_sandbox()
    (Path(directory) / f"{os.getpid()} {n}").touch()
    time.sleep(n / 1e3)
    return directory


def processes_of_final(directory: Path) -> int:
    """Returns how many processes have run more than one config: each worker measures one before the final."""
    pids = collections.Counter(path.name.split()[0] for path in directory.iterdir())
    return sum(count > 1 for count in pids.values())


@pytest.mark.slow
@pytest.mark.usefixtures("quiet_place")
@pytest.mark.parametrize(("share", "processes"), [(100.0, 3), (0.0, 1)])
def test_the_final_takes_place_in_as_many_processes_as_its_time_allows(
    share: float, processes: int, tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "_REPEATED_SHARE", share)
    tuner = quarantune.AutoTuner(slept, {"n": [1, 20, 30]}, name="slept", ref_fn=None)
    with nothing_is_left():
        result = tuner.run(str(tmp_path))
    assert processes_of_final(tmp_path) == processes
    low, high = result.speedup_interval or (0.0, 0.0)
    assert low < (result.speedup or 0.0) < high
    assert f"speed-up of *: {interval_text((low, high))} in 95 of 100 later runs" in result.table()
    lengths = {len(trial.samples_ms) for trial in result.finalists}
    assert len(lengths) == 1
    assert min(lengths) >= 3 * processes


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["compile", "none"])
def test_a_sweep_that_measures_in_this_process_has_one(isolation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "_REPEATED_SHARE", 100.0)
    counts: list[Any] = []
    repeated = routes.Routes._repeated

    def noting(*given: Any) -> Any:
        counts.append(repeated(*given).counts)
        return repeated(*given)

    monkeypatch.setattr(routes.Routes, "_repeated", noting)

    @quarantune.autotune({"n": [1, 300]}, name="tanhs", ref_fn=None)
    @jax.jit(static_argnames=["n"])
    def tanhs(x: Any, n: int = 100) -> Any:
        return jax.lax.fori_loop(0, n, lambda _, y: jnp.tanh(y), x)

    with isolated(isolation):
        result = tanhs.tune(jnp.ones(1000))
    assert [len(each) for each in counts] == [1]
    assert result.speedup_interval is not None
