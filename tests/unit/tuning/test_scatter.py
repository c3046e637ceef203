"""A warning of scatter comes only if the choice or the speed-up is uncertain, and says what to do."""

from __future__ import annotations

import dataclasses

import pytest

from quarantune import Outcome, Trial
from quarantune.tuning.scatter import REMEDY, doubt

CALM = (1.0, 1.01, 0.99, 1.0, 1.02)
WILD = (1.0, 1.9, 0.6, 2.4, 1.3)
NARROW, WIDE = (2.0, 2.2), (1.1, 3.9)
BEST = Trial(config={"n": 1}, outcome=Outcome.OK, time_ms=1.0, samples_ms=WILD, clock="wall", program="best")
OTHER = dataclasses.replace(BEST, config={"n": 2}, program="other")
SAME = dataclasses.replace(BEST, config={"n": 3}, program="best")


def test_wild_samples_leave_the_choice_uncertain() -> None:
    assert doubt(BEST, [BEST, OTHER], NARROW) == (
        "the winner's samples scatter by 68%, so 1 other config may be as fast as the winner"
    )
    assert "2 other configs may" in doubt(BEST, [BEST, OTHER, OTHER], NARROW)


def test_wild_samples_leave_the_speedup_uncertain() -> None:
    assert doubt(BEST, [BEST], WIDE) == (
        "the winner's samples scatter by 68%, so the speed-up may be anything from 1.10x to 3.90x"
    )
    assert " and the speed-up may be" in doubt(BEST, [BEST, OTHER], WIDE)


@pytest.mark.parametrize(
    ("best", "equals", "interval"),
    [(BEST, [BEST, SAME], NARROW), (BEST, [BEST], None), (dataclasses.replace(BEST, samples_ms=CALM), [OTHER], WIDE)],
    ids=["equal programs and a narrow interval", "nothing to compare with", "calm samples"],
)
def test_nobody_is_warned_of_scatter_that_decides_nothing(
    best: Trial, equals: list[Trial], interval: tuple[float, float] | None
) -> None:
    assert doubt(best, equals, interval) == ""


def test_the_remedy_names_the_device_and_how_to_tune_again() -> None:
    assert REMEDY.format(device="cpu") == (
        "for a surer choice, stop what else runs on cpu, and tune again with QUARANTUNE_ALWAYS_TUNE=1"
    )
