"""The rules that all searches share: starts first, nothing twice, dropped configs never."""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Iterable

from quarantune.values.space import Space
from quarantune.values.trial import Config, Outcome, Trial


class Strategy(abc.ABC):
    """A search over positions; it implements `Search` for the strategies that derive from it."""

    def __init__(self, space: Space, starts: Iterable[Config] = ()) -> None:
        """Remembers the starts.

        Args:
            space: the configs.
            starts: configs to try before all others; those that are not in the space are left out.
        """
        self.space = space
        self.trials: dict[int, Trial] = {}
        self.pending: set[int] = set()
        self._taken: set[int] = set()
        self._starts = deque(at for at in map(space.find, starts) if at is not None and space.keeps(at))

    def ask(self, n: int) -> list[Config]:
        """Returns up to `n` configs that were never returned nor told before."""
        asked: list[int] = []
        while self._starts and len(asked) < n:
            asked += self._take([self._starts.popleft()])
        if len(asked) < n:
            asked += self._take(self.pick(n - len(asked)))
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

    def learn(self, position: int, trial: Trial) -> None:  # noqa: B027  most searches have no use for it
        """Takes note of the trial of a config of the space, which `trials` holds from now on."""

    @abc.abstractmethod
    def pick(self, n: int) -> list[int]:
        """Returns the positions of up to `n` configs for which `is_free` holds, each once."""

    def is_free(self, position: int) -> bool:
        """Whether a config is kept and was neither asked nor told."""
        return position not in self._taken and self.space.keeps(position)

    def _take(self, positions: list[int]) -> list[int]:
        free = [position for position in positions if position not in self._taken]
        self._taken.update(free)
        self.pending.update(free)
        return free
