"""Tells what a scatter of the winner's samples leaves uncertain."""

from __future__ import annotations

from collections.abc import Sequence

from quarantune.measure import model
from quarantune.values.trial import Trial, interval_text

_WIDE = 1.2
"""Ratio of the ends of an interval of speed-ups above which the speed-up is uncertain."""
REMEDY = "for a surer choice, stop what else runs on {device}, and tune again with QUARANTUNE_ALWAYS_TUNE=1"


def doubt(best: Trial, equals: Sequence[Trial], interval: tuple[float, float] | None) -> str:
    """Returns what is less certain than on a quiet machine; empty if nothing is, or the samples hardly scatter.

    Args:
        best: the winner.
        equals: the configs that tie with it.
        interval: the speed-ups that the noise allows; None if unknown.
    """
    scatter = model.spread(best.samples_ms)
    others = sum(not trial.program or trial.program != best.program for trial in equals)
    affected = [f"{others} other config{'s' * (others > 1)} may be as fast as the winner"] if others else []
    if interval is not None and interval[1] > _WIDE * interval[0]:
        affected.append(f"the speed-up may be anything from {interval_text(interval)}")
    if not affected or scatter <= model.BUSY[best.clock or "wall"]:
        return ""
    return f"the winner's samples scatter by {100 * scatter:.0f}%, so {' and '.join(affected)}"
