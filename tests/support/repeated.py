"""Measurements that are repeated until one is good enough."""

from __future__ import annotations

from collections.abc import Callable

ATTEMPTS = 3


def best_of(attempt: Callable[[], float], *, limit: float) -> float:
    """Returns the least of what a few attempts give; the first one within the limit is enough."""
    least = float("inf")
    for _ in range(2 * ATTEMPTS):
        least = min(least, attempt())
        if least <= limit:
            break
    return least
