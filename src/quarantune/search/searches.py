"""Makes searches by their names."""

from __future__ import annotations

import time
from collections.abc import Iterable

from quarantune.search.drawing import RandomSearch
from quarantune.search.strategy import Strategy, UsersSearch
from quarantune.values.configs import Config
from quarantune.values.settings import (
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
"""So much CPU time a generator gets before the first config is tried; it yields some 50,000 configs in that time."""


def reads_on(space: Space) -> bool:
    """Reads a space for a moment, and returns whether that was not enough."""
    ends_s = time.thread_time() + _READ_FIRST_S
    known = space.reach(1)
    while space.size is None and time.thread_time() < ends_s:
        known = space.reach(known + max(1000, known // 2))
    return space.size is None


def chosen(search: str | Search, space: Space) -> str | Search:
    """Returns the search that `auto` stands for in a space; any other one as it is."""
    if search != AUTO:
        return search
    return SURROGATE if space.has_more_than(AUTO_EXHAUSTIVE_MOST) else EXHAUSTIVE


def make(
    search: str | Search,
    space: Space,
    *,
    defaults: Config | None = None,
    seed: int = 0,
    starts: Iterable[Config] = (),
) -> Search:
    """Returns a search that begins with the defaults and the starts, and asks for no config twice.

    Args:
        search: a name, or an object with the methods of `Search`.
        space: the configs.
        defaults: the config of the function's own defaults, which is tried first if it is in the space.
        seed: the same seed and the same trials give the same search; an object of the user's has its own.
        starts: configs to try next, such as the best ones of similar problems; those outside the space are left out.

    Raises:
        TypeError: `search` is neither a name nor such an object.
        ValueError: no search has this name.
        ImportError: the search needs an extra that is not installed.
    """
    check_search(search)
    search = chosen(search, space)
    first = [*([] if defaults is None else [defaults]), *starts]
    if not isinstance(search, str):
        return UsersSearch(search, space, first)
    if search == EXHAUSTIVE:
        return Strategy(space, first)
    if reads_on(space):
        return UsersSearch(
            Strategy(space), space, first, make_next=lambda: make(search, space, seed=seed, starts=first)
        )
    if search == RANDOM:
        return RandomSearch(space, seed, first)
    # Imported where they are used: scipy and optuna take time.
    if search == SURROGATE:
        from quarantune.search.surrogate import Surrogate

        return Surrogate(space, seed, first)
    from quarantune.search.optuna_search import OptunaSearch

    return OptunaSearch(search.removeprefix(OPTUNA), space, seed, first)
