"""A search of the user's own, held to the rules of all searches."""

from __future__ import annotations

from collections.abc import Iterable

from quarantune.search.strategy import Strategy
from quarantune.values.search_choice import Search
from quarantune.values.space import Space
from quarantune.values.texts import shown
from quarantune.values.trial import Config, Trial

_MOST_REPEATS = 100
"""A search that returns so many configs in a row which were asked before, or are dropped, has nothing new to try."""


class UsersSearch(Strategy):
    """Passes on what a user's object asks, without configs that were asked before."""

    def __init__(self, search: Search, space: Space, starts: Iterable[Config] = ()) -> None:
        """Wraps the object.

        Args:
            search: the object.
            space: the configs.
            starts: as for `Strategy`; the object is told their trials like all others.
        """
        super().__init__(space, starts)
        self._search = search

    def pick(self, n: int) -> list[int]:
        """Returns configs that the object asks; a repeated one is answered with the trial that is known."""
        picked: list[int] = []
        repeats = 0
        while len(picked) < n and repeats < _MOST_REPEATS:
            asked = self._search.ask(n - len(picked))
            if not isinstance(asked, (list, tuple)) or len(asked) > n - len(picked):
                raise TypeError(
                    f"{type(self._search).__name__}.ask({n - len(picked)}) returned {shown(asked)}; "
                    f"return a list of at most {n - len(picked)} configs."
                )
            if not asked:
                break
            for config in asked:
                position = self._position(config)
                if position not in picked and self.is_free(position):
                    picked.append(position)
                    continue
                repeats += 1
                if position in self.trials:
                    self._search.tell(config, self.trials[position])
        return picked

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
