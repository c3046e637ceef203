"""What tuning one problem came to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from quarantune import report
from quarantune.outcomes import Config, Trial, count_outcomes


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuningResult:
    """What tuning one problem came to.

    Attributes:
        best_config: the fastest config.
        time_ms: its median time in milliseconds.
        trials: what every config came to, in the order of the configs; empty for a result from the cache.
        key: the problem's key in the cache.
        device: the kind of device it was tuned on.
        from_cache: whether it was remembered and not measured now.
        tie: the configs that the noise cannot tell from the best, without it.
        fn: the tuned function with the best config bound.
    """

    best_config: Config
    time_ms: float
    trials: tuple[Trial, ...]
    key: str
    device: str
    from_cache: bool = False
    tie: tuple[Config, ...] = ()
    fn: Callable[..., Any] = dataclasses.field(repr=False, compare=False)

    @property
    def failures(self) -> dict[str, int]:
        """How many configs ended in each outcome other than `ok`."""
        return {outcome: count for outcome, count in count_outcomes(self.trials).items() if outcome != "ok"}

    def table(self, *, width: int = 80) -> str:
        """Returns the trials as a table of that many columns, the winner marked with a star."""
        return report.table(self.trials, best=self.best_config, width=width)
