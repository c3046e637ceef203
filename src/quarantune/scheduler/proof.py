"""The proof that workers run the caller's program: one config's program, as a worker has traced it, is compared."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from quarantune.values.trial import Config

Compare = Callable[[Config, Mapping[str, int]], None]
"""Compares the program of a config, as `Traced` tells it, with the caller's; raises where it is another one."""


class Proof:
    """Has one program that a worker of a sweep has traced compared with that of the caller."""

    def __init__(self, compare: Compare | None = None, only: Collection[int | None] = ()) -> None:
        """Sets up the proof.

        Args:
            compare: the comparison; None for no proof.
            only: the indices of the configs that may be compared; empty for all.
        """
        self._compare = compare
        self._only = only

    @property
    def is_due(self) -> bool:
        """Whether a program is still to be compared."""
        return self._compare is not None

    def wants(self, index: int) -> bool:
        """Returns whether the program of a config is to be compared."""
        return self.is_due and (not self._only or index in self._only)

    def show(self, config: Config, lines: Mapping[str, int]) -> None:
        """Compares the program of a config, unless one was compared before."""
        compare, self._compare = self._compare, None
        if compare is not None:
            compare(config, lines)
