"""One function makes the entries of measured results."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

import quarantune
from quarantune.calls.key import KeyedCall, keyed
from quarantune.functions import versions
from quarantune.tuning.outcome import measured_entry
from quarantune.values.trial import Findings, Outcome, Trial

FAST = Trial(config={"n": 1}, outcome=Outcome.OK, time_ms=1.0, bits="other", program="program:a.a")
EXACT = Trial(config={"n": 2}, outcome=Outcome.OK, time_ms=2.0, bits="same", program="program:b.b")


def call(**options: Any) -> KeyedCall:
    @quarantune.autotune([{"n": 1}, {"n": 2}], name="scaled", **options)
    @functools.partial(jax.jit, static_argnames=["n"])
    def scaled(x: Any, n: int = 1) -> Any:
        return x * n

    return keyed(scaled._tuner.bind((np.ones(4, np.float32),), {}))


def entry(of: KeyedCall, *trials: Trial) -> dict[str, Any]:
    return measured_entry(
        of,
        trials[0],
        Findings.of(trials[0], None),
        {"name": "exhaustive"},
        among=trials,
        program=lambda trial: {"winner": trial.program},
        samples=7,
    )


def test_an_entry_holds_the_result_for_calls_that_demand_bits() -> None:
    found = entry(call(), FAST, EXACT)
    assert (found["config"], found["program"], found["samples"]) == ({"n": 1}, {"winner": FAST.program}, 7)
    assert found["exact"] == {"config": {"n": 2}, "time_ms": 2.0, "bits": "same", "program": {"winner": EXACT.program}}
    assert entry(call(), EXACT)["exact"]["program"] == {"winner": EXACT.program}


@pytest.mark.parametrize(
    "options", [{"numerics": "bitwise"}, {"objective": lambda trial: trial.time_ms}], ids=["bits", "an objective"]
)
def test_other_results_hold_none_for_such_calls(options: dict[str, Any]) -> None:
    assert "exact" not in entry(call(**options), FAST, EXACT)


def test_an_entry_names_all_that_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=true")
    made = entry(call(), FAST)["versions"]
    assert made["XLA_FLAGS"] == "--xla_cpu_multi_thread_eigen=true"
    assert versions.changed_since(made, "cpu") == ""
    monkeypatch.delenv("XLA_FLAGS")
    assert versions.changed_since(made) == ""
    assert versions.changed_since(made, "cpu") == "XLA_FLAGS --xla_cpu_multi_thread_eigen=true (now unset)"
    assert versions.changed_since({}, "cpu") == ""
