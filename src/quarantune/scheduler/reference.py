"""The outputs to compare a sweep's configs with, and the groups of configs that agree.

If `ref_fn` is a function, its output is right. If it is "defaults", the output of the function's own defaults is right:
they run first, like any other config, and the sweep keeps their output. If the defaults fail or do not exist, the sweep
compares outputs with each other as they arrive, and the largest group that agrees counts as right.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Collection, Mapping

from quarantune.measure import finals
from quarantune.sandbox import spool
from quarantune.scheduler.plan import Finish
from quarantune.values.configs import Config, format_config
from quarantune.values.trial import SAME, UNTUNED, Outcome, Phase, Trial

_MOST_GROUPS = 8
"""Largest number of different outputs to keep while the right one is unknown."""
_MOST_WRONG_GROUPS = 3
"""Largest number of wrong outputs to keep once the right one is known; only a warning needs them."""
_SHOWN = 3


class Reference:
    """The outputs to compare with, and the groups of configs that agree.

    Attributes:
        fds: descriptors of the outputs to compare with; nobody can write to them.
        untuned: the trial of the function's defaults if they ran as `UNTUNED`; else None.
        compares: whether to compare the configs' outputs with each other.
        is_awaited: whether the defaults must run before any other config does.
        is_coming: whether a worker must compute the output of `ref_fn` before any comparison.
        is_exact: whether configs may win only with the bits of the defaults' output.
        noise: the RMS of the first kept output's change when its inputs move, relative to the output's RMS.
    """

    def __init__(
        self, *, compares: bool = False, default: int | None = None, is_first: bool = True, calibrates: bool = False
    ) -> None:
        """Sets up a reference.

        Args:
            compares: whether to compare the configs' outputs with each other, and not only with the output of `give`.
            default: the index under which the function's defaults run; None if the function has none.
            is_first: whether all other configs wait for the defaults before any comparison.
            calibrates: whether to keep the defaults' output in addition to the output of `give`, for its noise or bits.
        """
        self.fds: list[int] = []
        self.untuned: Trial | None = None
        self.compares = compares
        self.is_coming = False
        self.is_exact = False
        self.noise: float | None = None
        self._is_given = False
        self._calibrates = calibrates
        self._defaults = {default} if default is not None else set()
        self._default_end = ""
        self._is_first = is_first
        self.is_awaited = False
        self._group_of: dict[int, int | None] = {}
        self._held: dict[int, tuple[Trial, str]] = {}
        self._configs: dict[int, Config] = {}

    def give(self, fd: int) -> None:
        """Takes a file with the output of `ref_fn`, or a file of an earlier sweep's `right_fds`."""
        self.fds.append(spool.protect(fd))
        self._is_given, self.is_coming = True, False

    @property
    def right_fds(self) -> list[int]:
        """The outputs that suffice to judge configs, the right one first; empty while unknown."""
        if self._is_given:
            return [] if self._calibrates else self.fds
        return [] if self.standard is None else [self.fds[self.standard]]

    def close(self) -> None:
        """Closes the outputs."""
        while self.fds:
            os.close(self.fds.pop())

    # While configs run

    def begin(self, indices: Collection[int]) -> None:
        """Prepares for the configs that will run next; all wait for the defaults if these are among them."""
        is_here = not self._defaults.isdisjoint(indices)
        is_unknown = self._calibrates or (self.compares and not self.fds)
        self.is_awaited = is_unknown and self._is_first and is_here

    @property
    def is_open(self) -> bool:
        """Whether outputs are compared while the right one is unknown."""
        return self.compares and not self.is_awaited and self.standard is None

    def is_default(self, index: int) -> bool:
        """Whether a config equals the function's defaults, or lowers to their program."""
        return index in self._defaults

    @property
    def standard(self) -> int | None:
        """The position in `fds` of the right output, from `ref_fn` or the defaults; None if unknown."""
        if self._is_given:
            return 0
        groups = [self._group_of[index] for index in self._defaults if index in self._group_of]
        return next((group for group in groups if group is not None), None)

    @property
    def keeps(self) -> bool:
        """Whether to keep an output that differs from all in `fds`."""
        most = _MOST_GROUPS if self.standard is None else 1 + _MOST_WRONG_GROUPS
        return (self.compares and len(self.fds) < most) or (self._calibrates and self.is_awaited)

    def note(self, index: int, group: int | None, *, offered: int, fd: int, noise: float | None = None) -> None:
        """Records the output that a config's own output agrees with.

        Args:
            index: the config's index.
            group: the reply of its worker: a position in `fds`; `offered` if the worker kept a new output; None if the
                output differs from all and was not kept.
            offered: the number of outputs that the worker compared it with.
            fd: the file for its own output; -1 for none.
            noise: how far its output moves when its inputs do, if the worker kept it.

        Raises:
            ValueError: the reply names an output that does not exist.
        """
        if not self.compares and not self._calibrates:
            return
        if group is not None and (type(group) is not int or not 0 <= group <= offered - (fd < 0)):
            raise ValueError(f"there is no output {group!r} to agree with")
        if group == offered:
            group = len(self.fds)
            self.fds.append(spool.protect(fd))
            self.noise = noise if self.noise is None else self.noise
        if self._calibrates:
            self._calibrates = self.is_awaited = False
            return
        self._group_of[index] = group
        if index in self._defaults:
            self.is_awaited = False

    def join(self, index: int, first: int) -> None:
        """Records that another config with the same program runs instead of a config."""
        if first in self._group_of:
            self._group_of[index] = self._group_of[first]
        if index in self._defaults:
            self._defaults.add(first)

    def ended(self, index: int, end: str = "") -> None:
        """Records the end of a config. If it was the defaults and left no output, the others wait no longer."""
        if index in self._defaults and index not in self._group_of:
            self.is_awaited = False
            self._default_end = end or self._default_end

    def why_refused(self, index: int, bits: str | None) -> str:
        """Returns why a config may not win whatever its output is; empty if it may.

        Args:
            index: the config's index.
            bits: the bits of its output.
        """
        if not self.is_exact or bits == SAME or self.is_default(index):
            return ""
        why = "no output of the defaults to compare its bits with" if bits is None else "its own repeated runs differ"
        return f"{why} (numerics='bitwise')"

    # In the end

    def hold(self, finish: Finish, on_untuned: Callable[[Trial], None] = lambda trial: None) -> Finish:
        """Returns a function to call instead of `finish`; it holds the trials that `judge_held` must judge.

        Args:
            finish: receives the trials of configs.
            on_untuned: receives the trial of the function's own defaults, if they ran as `UNTUNED`.
        """

        def take(index: int, trial: Trial, log: str) -> None:
            self._configs[index] = trial.config
            if trial.outcome.is_failure:
                self.ended(index, f"{trial.outcome.value}: {trial.message}")
            if index == UNTUNED:
                self.untuned = trial
                on_untuned(trial)
            elif self.is_open and not trial.outcome.is_failure:
                self._held[index] = (trial, log)
            else:
                finish(index, trial, log)

        return take

    def judge_held(self, finish: Finish) -> None:
        """Judges the held trials, once all outputs are known."""
        right = self._right()
        for index, (trial, log) in self._held.items():
            group = self._group_of.get(index)
            if not self.compares or group == right:
                finish(index, trial, log)
                continue
            message = "its output differs from the output of the configs that agree with each other"
            if self.standard is not None:
                message = "its output differs from the defaults' output"
            finish(index, trial.without_times(Outcome.WRONG, message, phase=Phase.CHECK), log)
        self._held.clear()

    def contenders(self, measured: Mapping[int, Trial], default: int | None) -> dict[int, Config]:
        """Returns the configs to compare in the final by index, including the function's defaults if they work.

        Args:
            measured: the configs' trials by index.
            default: the index of the config that equals the defaults; None if no config does.
        """
        trials = {index: trial for index, trial in measured.items() if not self.why_refused(index, trial.bits)}
        if self.untuned is not None and finals.default_among(measured, default) == UNTUNED:
            trials[UNTUNED] = self.untuned
        return {index: trials[index].config for index in finals.in_final(trials, default)}

    def complaint(self) -> str:
        """Returns a warning for the author about outputs that disagree; empty if they agree."""
        groups = {index: group for index, group in sorted(self._group_of.items()) if index != UNTUNED}
        right, standard = self._right(), self.standard
        if not self.compares or right is None or not groups:
            return ""
        if standard is not None:
            others = [group for index, group in groups.items() if index not in self._defaults]
            if 2 * sum(group != right for group in others) <= len(others):
                return ""
            return (
                f"most configs disagree with the function's defaults, and only configs that agree can win "
                f"({self._show(groups, right, 'like the defaults')}); if the defaults are not right, give ref_fn"
            )
        agree = f"{self._show(groups, right, 'taken to be right')}; {_ADVICE}"
        if self._defaults:
            reason = f" ({self._default_end})" if self._default_end else ""
            return f"its defaults failed{reason}, so that configs were compared with each other: {agree}"
        return f"configs compute different things: {agree}" if len(set(groups.values())) > 1 else ""

    def _right(self) -> int | None:
        """Returns the right group: the defaults' group, else the largest, else the first config's."""
        if (standard := self.standard) is not None:
            return standard
        known = sorted((index, group) for index, group in self._group_of.items() if group is not None)
        groups = [group for _, group in known]
        return max(groups, key=groups.count, default=None)

    def _show(self, groups: Mapping[int, int | None], right: int, how: str) -> str:
        """Returns groups as text, the right one first and described as `how`, then the larger ones."""
        size, parts = collections.Counter(groups.values()), []
        for group in sorted(size, key=lambda group: (group != right, group is None, -size[group], group or 0)):
            members = [self._configs[index] for index in groups if groups[index] == group and index in self._configs]
            if members or group == right:
                shown = ", ".join(map(format_config, members[:_SHOWN])) + (", ..." if len(members) > _SHOWN else "")
                kind = how if group == right else "unlike all others" if group is None else "of another kind"
                parts.append(f"{len(members)} {kind}" + (f": {shown}" if shown else ""))
        return "; ".join(parts)


_ADVICE = "give ref_fn to define the right output, or ref_fn=None if configs may differ"
