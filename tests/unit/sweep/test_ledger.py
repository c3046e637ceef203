"""The ledger of a sweep has a trial before its listeners do, and each config ends once."""

from __future__ import annotations

from quarantune.sweep.ledger import Ledger, Listener
from quarantune.values.trial import END, UNTUNED, Outcome, Trial

TRIAL = Trial(config={"block": 8}, outcome=Outcome.OK)


def test_the_ledger_has_a_trial_before_its_listeners() -> None:
    heard: list[bool] = []
    ledger = Ledger()
    for _ in range(2):
        ledger.listen(Listener(on_trial=lambda index, trial: heard.append(ledger.trials[index] is trial)))
    ledger.end(3, TRIAL)
    assert heard == [True, True]


def test_each_config_ends_once_and_after_its_trial() -> None:
    heard: list[object] = []
    ledger = Ledger(Listener(on_trial=lambda index, _: heard.append(index), on_phase=lambda *at: heard.append(at)))
    ledger.end(3, TRIAL)
    ledger.untuned(TRIAL)
    assert heard == [3, (3, END), (UNTUNED, END)]


def test_recalled_trials_reach_no_listener() -> None:
    heard: list[int] = []
    ledger = Ledger(Listener(on_trial=lambda index, _: heard.append(index)))
    ledger.recall({0: TRIAL})
    assert (heard, dict(ledger.trials)) == ([], {0: TRIAL})
