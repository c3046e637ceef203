"""The rules that all searches share: no config is asked twice, and the starts come first."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import TypeAlias

from quarantune.values.configs import Config
from quarantune.values.options import Search
from quarantune.values.space import Space
from quarantune.values.texts import shown
from quarantune.values.trial import TIME, Outcome, Trial, ranked_by


def log_time(trial: Trial) -> float | None:
    """Returns the logarithm of a trial's figure; NaN for a failure; None if uninformative, as of a lost config."""
    if trial.outcome is Outcome.OK and ranked_by(trial) != TIME and trial.merit is not None:
        return math.asinh(trial.merit)  # near a logarithm, and defined for all numbers
    if trial.outcome in (Outcome.OK, Outcome.SLOW) and trial.merit:
        return math.log(trial.merit)
    return math.nan if trial.outcome.is_failure and trial.outcome is not Outcome.LOST else None


MOST_REPEATS = 100
"""Number of repeated or dropped configs in a row after which a search has nothing new to try."""


class Strategy:
    """A search over positions in their order; subclasses pick positions otherwise.

    It implements `Search`. It reads a generator only as far as `ask` needs.
    """

    def __init__(self, space: Space, starts: Iterable[Config] = ()) -> None:
        """Remembers the starts.

        Args:
            space: the configs.
            starts: configs to try before all others; configs outside the space are ignored.
        """
        self.space = space
        self.trials: dict[int, Trial] = {}
        self.pending: set[int] = set()
        self._taken: set[int] = set()
        self._in_order = space.positions()
        self._starts = iter([at for at in map(space.find, starts) if at is not None])

    def ask(self, n: int) -> list[Config]:
        """Returns up to `n` configs that were never asked or told before."""
        asked = list(map(self._take, itertools.islice(filter(self.is_free, self._starts), n)))
        left = n - len(asked)
        asked += map(self._take, itertools.islice(self.pick(left), left))
        return [self.space[position] for position in asked]

    def tell(self, config: Config, trial: Trial) -> None:
        """Takes note of a trial, unless its config is outside the space."""
        position = self.space.find(config)
        if position is None:
            return
        self.pending.discard(position)
        if trial.outcome is not Outcome.NOT_RUN:
            self._taken.add(position)
            self.trials[position] = trial
            self.learn(position, trial)

    def learn(self, position: int, trial: Trial) -> None:
        """Takes note of the trial of a config of the space; `trials` already holds it."""

    def pick(self, n: int) -> Iterable[int]:
        """Yields the positions of configs that `is_free` accepts at that time; the caller takes at most `n`."""
        return filter(self.is_free, self._in_order)

    def is_free(self, position: int) -> bool:
        """Whether the space keeps a config that was neither asked nor told."""
        return position not in self._taken and self.space.keeps(position)

    def _take(self, position: int) -> int:
        self._taken.add(position)
        self.pending.add(position)
        return position


Make: TypeAlias = Callable[[], Search]


class UsersSearch(Strategy):
    """Passes on the configs of another search, mostly a user's object, without repeats."""

    def __init__(self, search: Search, space: Space, starts: Iterable[Config], make_next: Make | None = None) -> None:
        """Wraps the object.

        Args:
            search: the object.
            space: the configs.
            starts: configs to try first; see `Strategy`. The object receives their trials like all others.
            make_next: makes the search that replaces the object once there is a trial, and may read the space to its
                end. Until then, only one config is tried at a time. None if the object stays.
        """
        super().__init__(space, starts)
        self._search, self._make_next = search, make_next

    def pick(self, n: int) -> Iterable[int]:
        """Yields the object's new configs; answers a repeated config with its known trial."""
        if self._make_next is not None:
            if self.pending:
                return
            if self.trials:
                self._search, self._make_next = self._make_next(), None
                for position, trial in self.trials.items():
                    self._search.tell(self.space[position], trial)
            else:
                n = 1
        repeats = 0
        while n and repeats < MOST_REPEATS:
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
        """Whether the other search expects a gain; True if it has no model."""
        return bool(getattr(self._search, "expects_gain", True))

    def tell(self, config: Config, trial: Trial) -> None:
        """Takes note of a trial, and passes it on."""
        super().tell(config, trial)
        self._search.tell(dict(config), trial)

    def _position(self, config: Config) -> int:
        name = type(self._search).__name__
        if not isinstance(config, dict):
            raise TypeError(f"{name}.ask returned {shown(config)} among the configs; every config is a dict.")
        config = self.space.completed(config)
        position = self.space.find(config)
        if position is None:
            self.space.whole()  # a generator may yield it later
            position = self.space.find(config)
        if position is None:
            raise ValueError(f"{name}.ask returned {shown(config)}, which is not one of the configs; return one.")
        return position
