"""Repeats a measurement until it is good enough."""

from __future__ import annotations

from collections.abc import Callable

ATTEMPTS = 3


def best_of(attempt: Callable[[], float], *, limit: float) -> float:
    """Returns the least result of a few attempts; an attempt within the limit is the last."""
    least = float("inf")
    for _ in range(2 * ATTEMPTS):
        least = min(least, attempt())
        if least <= limit:
            break
    return least
