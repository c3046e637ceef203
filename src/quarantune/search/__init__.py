"""Which configs of a space to try next; nothing in here knows how they are run.

The rules that all searches share, and the searches that have no model: in order, at random, and the user's own.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import numpy as np

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
from quarantune.values.texts import shown
from quarantune.values.trial import Outcome, Trial

__all__ = ["Space", "Strategy", "UsersSearch", "chosen", "log_time", "make", "shuffled"]

_READ_FIRST_S = 0.2
"""So much CPU time a generator gets before the first config is tried; it yields some 50,000 configs in that time."""


def log_time(trial: Trial) -> float | None:
    """Returns the logarithm of a trial's figure, NaN for a failure; None for one that says nothing, as a lost one."""
    if trial.outcome is Outcome.OK and trial.score is not None:
        return math.asinh(trial.score)  # near a logarithm, and defined for all numbers
    if trial.outcome in (Outcome.OK, Outcome.SLOW) and trial.merit:
        return math.log(trial.merit)
    return math.nan if trial.outcome.is_failure and trial.outcome is not Outcome.LOST else None


def reads_on(space: Space) -> bool:
    """Reads a space for a moment, and returns whether that was not enough."""
    ends_s = time.thread_time() + _READ_FIRST_S
    known = space.reach(1)
    while space.size is None and time.thread_time() < ends_s:
        known = space.reach(known + max(1000, known // 2))
    return space.size is None


_MOST_REPEATS = 100
"""A search that returns so many configs in a row which were asked before, or are dropped, has nothing new to try."""


class Strategy:
    """A search over positions, in a given order, or as a class that derives from it picks them.

    It implements `Search`; of a generator, it reads only as many configs as are asked.
    """

    def __init__(self, space: Space, starts: Iterable[Config] = (), order: Iterable[int] = ()) -> None:
        """Remembers the starts.

        Args:
            space: the configs.
            starts: configs to try before all others; those that are not in the space are left out.
            order: the positions of all configs, unless a class picks them otherwise.
        """
        self.space = space
        self.trials: dict[int, Trial] = {}
        self.pending: set[int] = set()
        self._taken: set[int] = set()
        self._order = iter(order)
        self._starts = deque(at for at in map(space.find, starts) if at is not None and space.keeps(at))

    def ask(self, n: int) -> list[Config]:
        """Returns up to `n` configs that were never returned nor told before."""
        asked: list[int] = []
        while self._starts and len(asked) < n:
            if (start := self._starts.popleft()) not in self._taken:
                asked.append(self._take(start))
        if left := n - len(asked):
            asked += map(self._take, itertools.islice(self.pick(left), left))
        return [self.space[position] for position in asked]

    def tell(self, config: Config, trial: Trial) -> None:
        """Takes note of a trial; those of configs outside the space are left out."""
        position = self.space.find(config)
        if position is None:
            return
        self.pending.discard(position)
        if trial.outcome is not Outcome.NOT_RUN:
            self._taken.add(position)
            self.trials[position] = trial
            self.learn(position, trial)

    def learn(self, position: int, trial: Trial) -> None:
        """Takes note of the trial of a config of the space, which `trials` holds from now on."""

    def pick(self, n: int) -> Iterable[int]:
        """Yields the positions of configs for which `is_free` holds then; `n` of them are wanted."""
        return filter(self.is_free, self._order)

    def is_free(self, position: int) -> bool:
        """Whether a config is kept and was neither asked nor told."""
        return position not in self._taken and self.space.keeps(position)

    def _take(self, position: int) -> int:
        self._taken.add(position)
        self.pending.add(position)
        return position


def shuffled(space: Space, rng: np.random.Generator) -> Iterator[int]:
    """Returns all positions of a space in random order; needs memory only for those that were asked.

    This is the shuffle of Fisher and Yates, which keeps only the positions that were moved. A generator is run to its
    end at once.
    """
    size = space.whole()
    moved: dict[int, int] = {}

    def draw(at: int) -> int:
        drawn = int(rng.integers(at, size))
        here = moved.pop(at, at)
        if drawn == at:
            return here
        found = moved.get(drawn, drawn)
        moved[drawn] = here
        return found

    return map(draw, range(size))


class UsersSearch(Strategy):
    """Passes on what another search asks, mostly an object of the user's, without configs that were asked before."""

    def __init__(
        self,
        search: Search,
        space: Space,
        starts: Iterable[Config] = (),
        *,
        make_next: Callable[[], Search] | None = None,
    ) -> None:
        """Wraps the object.

        Args:
            search: the object.
            space: the configs.
            starts: as for `Strategy`; the object is told their trials like all others.
            make_next: makes the search that takes the object's place once there is a trial, and that may read the space
                to its end; until then, one config is tried at a time. None where the object stays.
        """
        super().__init__(space, starts)
        self._search, self._make_next = search, make_next

    def pick(self, n: int) -> Iterable[int]:
        """Yields configs that the object asks; a repeated one is answered with the trial that is known."""
        if self._make_next is not None:
            if self.pending:
                return
            if self.trials:
                self.space.whole()
                self._search, self._make_next = self._make_next(), None
                for position, trial in self.trials.items():
                    self._search.tell(self.space[position], trial)
            else:
                n = 1
        repeats = 0
        while n and repeats < _MOST_REPEATS:
            asked = self._search.ask(n)
            if not isinstance(asked, (list, tuple)) or len(asked) > n:
                raise TypeError(
                    f"{type(self._search).__name__}.ask({n}) returned {shown(asked)}; "
                    f"return a list of at most {n} configs."
                )
            if not asked:
                break
            for config in asked:
                position = self._position(config)
                if self.is_free(position):
                    n -= 1
                    yield position
                    continue
                repeats += 1
                if position in self.trials:
                    self._search.tell(config, self.trials[position])

    @property
    def expects_gain(self) -> bool:
        """Whether the other search expects a gain, if it has a model; True if it has none."""
        return bool(getattr(self._search, "expects_gain", True))

    def tell(self, config: Config, trial: Trial) -> None:
        """Takes note of a trial, and passes it on."""
        super().tell(config, trial)
        self._search.tell(dict(config), trial)

    def _position(self, config: Config) -> int:
        name = type(self._search).__name__
        if not isinstance(config, dict):
            raise TypeError(f"{name}.ask returned {shown(config)} among the configs; every config is a dict.")
        position = self.space.find(config)
        if position is None:
            self.space.whole()  # a generator may yield it later
            position = self.space.find(config)
        if position is None:
            raise ValueError(f"{name}.ask returned {shown(config)}, which is none of the configs; return one of them.")
        return position


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
        return Strategy(space, first, space.positions())
    if reads_on(space):
        in_order = Strategy(space, (), space.positions())
        return UsersSearch(in_order, space, first, make_next=lambda: make(search, space, seed=seed, starts=first))
    if search == RANDOM:
        return Strategy(space, first, shuffled(space, np.random.default_rng(seed)))
    # Imported where they are used: scipy and optuna take time.
    if search == SURROGATE:
        from quarantune.search.surrogate import Surrogate

        return Surrogate(space, seed, first)
    from quarantune.search.optuna_search import OptunaSearch

    return OptunaSearch(search.removeprefix(OPTUNA), space, seed, first)
