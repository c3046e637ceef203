"""The times of a winner and of the function's own defaults, and their ratio, as numbers and as text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from quarantune.values.trial import is_plausible_ms


@dataclasses.dataclass(frozen=True)
class Times:
    """The times of one call in milliseconds, measured side by side.

    Attributes:
        best_ms: the time of the best config; NaN where it is unknown.
        default_ms: the time of the function's own defaults; None where it is unknown.
        interval: the speed-ups that the noise of the two allows; None where it is unknown.
    """

    best_ms: float
    default_ms: float | None = None
    interval: tuple[float, float] | None = None

    @property
    def speedup(self) -> float | None:
        """The time of the defaults divided by that of the best config; None where one of them is unknown."""
        return self.default_ms / self.best_ms if self.default_ms and self.best_ms > 0 else None

    def text(self, *, is_default: bool = False) -> str:
        """Returns the times as text, as `2.02x faster than the defaults (0.0077 ms against 0.0155 ms)`.

        Args:
            is_default: whether the best config is that of the defaults.
        """
        if not self.best_ms > 0:
            return "time not known"
        best = f"{self.best_ms:.4g} ms"
        if is_default:
            return f"the defaults are best ({best})"
        return f"{self.compared} ({best} against {self.default_ms:.4g} ms)" if self.compared else best

    @property
    def compared(self) -> str:
        """The speed-up in words, as `2.02x faster than the defaults`; empty where it is unknown."""
        if (speedup := self.speedup) is None:
            return ""
        low, high = self.interval or (speedup, speedup)
        if low <= 1.0 <= high:
            return "as fast as the defaults"
        return f"{ratio_text(max(speedup, 1 / speedup))} {'faster' if speedup > 1 else 'slower'} than the defaults"


def ratio_text(ratio: float) -> str:
    """Returns a ratio of times as text, as `2.02x` or `31.5x`."""
    return f"{ratio:.2f}x" if 0.1 <= ratio < 9.995 else f"{ratio:.3g}x"


def interval_text(interval: tuple[float, float] | None) -> str:
    """Returns an interval of ratios as text, as `1.95x to 2.10x`; empty for None."""
    return "" if interval is None else " to ".join(map(ratio_text, interval))


def times_of(entry: Mapping[str, Any]) -> Times:
    """Returns the times in an entry of the cache; the file may hold anything."""
    best_ms, default_ms, interval = (entry.get(name) for name in ("time_ms", "default_time_ms", "speedup_interval"))
    return Times(
        best_ms if is_plausible_ms(best_ms) else math.nan,
        default_ms if is_plausible_ms(default_ms) else None,
        checked_interval(interval),
    )


def checked_interval(value: Any) -> tuple[float, float] | None:
    """Returns an interval of speed-ups that a file holds; None where that cannot be one: the file may hold anything."""
    is_pair = isinstance(value, list) and [type(end) for end in value] == [float, float]
    return (value[0], value[1]) if is_pair and 0.0 <= value[0] <= value[1] < math.inf else None
