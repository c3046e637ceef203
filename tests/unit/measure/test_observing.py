"""Values that an observer of runs returns, not only energy, are in trials, tables, rows, files and the final."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
import pytest
from helpers import isolated

from quarantune import AutoTuner, Trial
from quarantune.measure import observers, observing
from quarantune.measure.finals import Final
from quarantune.sandbox.messages import REPLIES, Measured
from quarantune.values import codec
from quarantune.values.trial import Outcome

X = np.arange(8, dtype=np.float32)


class Steps:
    """Observes the number of steps of a run, the value of a tunable."""

    WHAT = "the steps of a call"
    FIELDS: ClassVar = {"steps": ("steps", "steps of one call")}

    def __init__(self, *, reason: str = "") -> None:
        self.reason, self.times = reason, 0

    def why_not(self, platform: str, kind: str) -> str:
        return self.reason

    def observe(self, dispatch: Any, ordinal: int, run_s: float) -> dict[str, float]:
        assert ordinal in [device.local_hardware_id for device in jax.devices()]
        assert 0 < run_s < 1
        self.times += 1
        return {"steps": float(jax.block_until_ready(dispatch())[0])}


def fewest_steps(trial: Trial) -> float:
    return trial.observed["steps"]


def tuner(**options: Any) -> AutoTuner:
    def kernel(x: Any, steps: int = 3) -> Any:
        return 0 * x + steps

    jitted = jax.jit(kernel, static_argnames=["steps"])
    return AutoTuner(jitted, {"steps": [3, 0, 5]}, ref_fn=None, rep=1, **options)


def test_a_new_observer_is_shown_wherever_energy_would_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    steps = Steps()
    monkeypatch.setattr(observing, "OBSERVERS", (*observing.OBSERVERS, "steps"))
    monkeypatch.setitem(sys.modules, f"{observers.__name__}.steps", steps)  # type: ignore[misc]
    with isolated("none"):
        result = tuner(objective=fewest_steps).run(X)
    assert (result.best_config, result.score, result.default_score) == ({"steps": 0}, 0.0, 3.0)
    assert [dict(trial.observed) for trial in result.trials] == [{"steps": 3.0}, {"steps": 0.0}, {"steps": 5.0}]
    assert [trial.observed["steps"] for trial in result.finalists] == [0.0, 3.0]
    assert steps.times > 3 + 3, "each trial and a few rounds of the final are observed"
    assert result.energy_mj is None
    head = result.table(width=120).splitlines()[0]
    assert head.split() == ["steps", "outcome", "ms", "steps", "objective", "speed-up", "compile", "s", "bits"]
    assert [row["config.steps"] for row in result.to_dicts()] == [3, 0, 5]
    assert [row["steps"] for row in result.to_dicts()] == [3.0, 0.0, 5.0]
    result.report(tmp_path / "report.html")
    assert '["steps","steps","stepsofonecall"]' in (tmp_path / "report.html").read_text().replace(" ", "")
    for trial in result.trials:
        assert Trial.from_json(json.loads(json.dumps(trial.to_json()))) == trial


def test_an_observer_runs_only_for_an_objective_that_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(reason="nobody counts here")
    monkeypatch.setattr(observing, "OBSERVERS", (*observing.OBSERVERS, "steps"))
    monkeypatch.setitem(sys.modules, f"{observers.__name__}.steps", steps)  # type: ignore[misc]
    with isolated("none"):
        for objective in ("time", lambda trial: trial.observed.get("steps", 1.0)):
            assert "observed" not in tuner(objective=objective).run(X).trials[0].to_json()
        needs = "kernel: objective needs the steps of a call, which cannot be measured: nobody counts here"
        with pytest.raises(ValueError, match=needs):
            tuner(objective=fewest_steps).run(X)
    assert steps.times == 0


@pytest.mark.parametrize(
    "observed",
    [
        {"energy_mj": -1.0},
        {"steps": 1e300},
        {"steps": "7"},
        {"s" * 41: 1.0},
        dict.fromkeys("ABCDEFGHIJKLMNOPQ", 1.0),
        [1],
    ],
)
def test_impossible_observed_values_of_a_worker_are_damage(observed: Any) -> None:
    about: dict[str, Any] = {"trial": 1, "phase": "measure", "samples_ms": [1.0], "cpu_ms": [], "ranking_ms": 1.0}
    frame = about | {"message": Measured.__name__, "is_slow": False, "clock": "wall", "held_bytes": 0}
    seen = {"energy_mj": 2.0, "steps": 0}
    message = codec.decode(frame | {"observed": seen}, *REPLIES)
    assert isinstance(message, Measured)
    trial = Trial(config={}, outcome=Outcome.OK, time_ms=1.0).with_observed(message.observed)
    assert (trial.energy_mj, trial.watts, trial.observed) == (2.0, None, {"steps": 0.0})
    with pytest.raises(codec.DamageError, match=r"Measured\.observed"):
        codec.decode(frame | {"observed": observed}, *REPLIES)


def test_a_final_must_observe_every_finalist_in_its_rounds() -> None:
    rounds: Any = [[1.0] * 3, [2.0] * 3], [[], []]
    seen = {"steps": 1.0}
    assert Final.of([4, 7], *rounds, [[seen, {"steps": 2.0}]] * 3).observed[7] == ({"steps": 2.0},) * 3
    for damaged in ([[seen]], [[seen, seen], [seen]], [[seen, {}]]):
        with pytest.raises(ValueError, match=r"zip|the finalists have different figures"):
            Final.of([4, 7], *rounds, damaged)
