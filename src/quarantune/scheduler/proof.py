"""The proof that workers run the caller's program: one config's program, as a worker has traced it, is compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from quarantune.values.trial import Config

Compare = Callable[[Config, Mapping[str, int]], None]
"""Compares the program of a config, as `Traced` tells it, with the caller's; raises where it is another one."""


class Proof:
    """Has the first program that a worker of a sweep traces compared, before any config of it is measured."""

    def __init__(self, compare: Compare | None = None) -> None:
        """Takes the comparison; None for no proof."""
        self._compare = compare

    @property
    def is_due(self) -> bool:
        """Whether a program is still to be compared."""
        return self._compare is not None

    def show(self, config: Config, lines: Mapping[str, int]) -> None:
        """Compares the program of a config, unless one was compared before."""
        compare, self._compare = self._compare, None
        if compare is not None:
            compare(config, lines)
