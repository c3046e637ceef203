"""The fastest configs are measured again against each other, and a final that fails loses no result."""

from __future__ import annotations

import ctypes
import logging
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from aftermath import nothing_is_left, quiet_place  # noqa: F401
from helpers import ends, everywhere, isolated
from tuned_functions import Notes, X, after, here, tuned

from quarantune import Outcome
from quarantune.measure import finals
from quarantune.sandbox import template
from quarantune.sweep.request import Swept

pytestmark = pytest.mark.usefixtures("two_slots")


@everywhere
def test_finalists_are_timed_again_and_the_final_decides(isolation: str, findings: list[Swept]) -> None:
    # A busy machine may rule out all but one config, which needs no final.
    for _ in range(5):
        with isolated(isolation):
            result = tuned(lambda x, do: after(do, x), [300, 301, 302, 303, 304], rep=3).tune(X)
        if (swept := findings[-1]).final.rounds_ms:
            break
    assert 2 <= len(swept.final.rounds_ms) <= finals.MOST_FINALISTS
    for index, rounds_ms in swept.final.rounds_ms.items():
        if result.trials[index].outcome is Outcome.SLOW:  # a second look that confirmed the first
            continue
        assert result.trials[index].samples_ms == tuple(rounds_ms)
        assert result.trials[index].time_ms == statistics.median(rounds_ms)
    for index in set(range(5)) - set(swept.final.rounds_ms):
        assert len(result.trials[index].samples_ms) <= 3
    contenders = [result.trials[index].config for index in swept.final.rounds_ms]
    assert result.best_config in contenders
    assert all(config in contenders for config in result.tie)
    assert result.best_config not in result.tie


def called_back(run: Callable[[Any], None]) -> Callable[[Any, Any], Any]:
    """Returns a body that adds one in a Python callback, which first calls `run` with the config."""

    def body(x: Any, do: Any) -> Any:
        def callback(x: Any) -> Any:
            run(do)
            time.sleep(0.05)  # the same for all configs, so that all are finalists
            return np.asarray(x) + 1

        return jax.pure_callback(callback, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    return body


@pytest.mark.usefixtures("quiet_place")
@pytest.mark.parametrize("mood", ["crash", "raise"])
def test_a_finalist_that_fails_only_in_the_final_breaks_no_sweep(
    mood: str, notes: Notes, caplog: pytest.LogCaptureFixture, findings: list[Swept]
) -> None:
    def fails_in_its_second_process(do: str) -> None:
        notes.add(do, os.getpid())
        if len({line for line in notes.lines() if line.startswith(do)}) > 1:
            if do == "crash":
                ctypes.memset(0, 1, 1)
            if do == "raise":
                raise ArithmeticError("not again")

    kernel = tuned(called_back(fails_in_its_second_process), ["good", mood])
    template.shared()
    with nothing_is_left(), caplog.at_level(logging.WARNING, "quarantune"):
        result = kernel.tune(X)
    assert ends(result.trials) == ["ok", "ok"]
    assert findings[0].final == finals.Final()
    assert "could not be compared" in caplog.text
    assert len({line for line in notes.lines() if line.startswith(mood)}) > 1
    fastest = min(result.trials, key=lambda trial: trial.merit or 0)
    assert result.best_config == fastest.config
    assert len(fastest.samples_ms) <= 3


def test_a_final_that_fails_in_process_breaks_no_sweep_either(caplog: pytest.LogCaptureFixture) -> None:
    turns: list[int] = []

    def fails_in_the_final(do: int) -> None:
        if turns[-1:] == [do]:
            return
        turns.append(do)
        if turns.count(do) > 1:  # a trial takes one turn, so a second turn is in the final
            raise ArithmeticError("not again")

    kernel = tuned(called_back(fails_in_the_final), [1, 2])
    with here(), caplog.at_level(logging.WARNING, "quarantune"):
        result = kernel.tune(X)
    assert ends(result.trials) == ["ok", "ok"]
    assert len(turns) > len(set(turns))
    assert "could not be compared" in caplog.text
