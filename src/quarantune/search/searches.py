"""Makes searches by their names."""

from __future__ import annotations

import time
from collections.abc import Sequence

from quarantune.search.random_search import RandomSearch
from quarantune.search.strategy import Strategy, UsersSearch
from quarantune.values.configs import Config
from quarantune.values.options import (
    AUTO,
    AUTO_EXHAUSTIVE_MOST,
    EXHAUSTIVE,
    OPTUNA,
    RANDOM,
    SURROGATE,
    Search,
    check_search,
)
from quarantune.values.space import Space

_READ_FIRST_S = 0.2
"""Seconds of CPU time for a generator before the first config runs; it yields some 50,000 configs in that time."""


def reads_on(space: Space) -> bool:
    """Reads a space for a moment, and returns whether that was not enough."""
    ends_s = time.thread_time() + _READ_FIRST_S
    known = space.reach(1)
    while space.size is None and time.thread_time() < ends_s:
        known = space.reach(known + max(1000, known // 2))
    return space.size is None


def make(search: str | Search, space: Space, *, seed: int = 0, starts: Sequence[Config] = ()) -> Search:
    """Returns a search that begins with the starts, and asks for no config twice.

    Args:
        search: a name, or an object with the methods of `Search`.
        space: the configs.
        seed: the same seed and the same trials give the same search; a user's object ignores it.
        starts: configs to try first, such as the best configs of similar problems; configs outside the space are
            ignored.

    Raises:
        TypeError: `search` is neither a name nor an object with the methods of `Search`.
        ValueError: no search has this name.
        ImportError: the search needs an extra that is not installed.
    """
    check_search(search)
    if search == AUTO:
        search = SURROGATE if space.has_more_than(AUTO_EXHAUSTIVE_MOST) else EXHAUSTIVE
    if not isinstance(search, str):
        return UsersSearch(search, space, starts)
    if search == EXHAUSTIVE:
        return Strategy(space, starts)
    if reads_on(space):
        return UsersSearch(Strategy(space), space, starts, lambda: make(search, space, seed=seed, starts=starts))
    if search == RANDOM:
        return RandomSearch(space, seed, starts)
    # Importing scipy and optuna takes time, so each import waits until it is needed.
    if search == SURROGATE:
        from quarantune.search.surrogate import Surrogate

        return Surrogate(space, seed, starts)
    from quarantune.search.optuna_search import OptunaSearch

    return OptunaSearch(search.removeprefix(OPTUNA), space, seed, starts)
