"""Recalls trials of earlier sweeps by program: a config whose program has a trial is lowered, but not measured.

Whether an output is right depends on the output to compare it with. So a sweep recalls a trial only if the program of
the function's defaults, the *reference*, is the same as in the sweep that measured the trial.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from quarantune.measure.finals import Final
from quarantune.sandbox.messages import tail_of
from quarantune.values.trial import Outcome, Trial, lowered_half

_MOST_KNOWN = 2048
"""Largest number of known programs. Each task to compile a config lists them; this many take 30 kB."""
NO_REFERENCE = ""
"""Replaces the defaults' program if outputs are not compared with the defaults' output."""


def comparable(reference: str) -> str | None:
    """Returns the part of a reference that identifies it; None if its identity does not cover the whole program."""
    return lowered_half(reference) or (NO_REFERENCE if reference == NO_REFERENCE else None)


class Recall:
    """The trials that one sweep may recall.

    Attributes:
        reference: the program whose output this sweep compares others with; `NO_REFERENCE` if that is not the
            defaults' program; None while it is unknown.
        known: `tail_of` each program that has a trial.
    """

    def __init__(
        self,
        trials: Mapping[tuple[str, str], Trial] | None = None,
        finals: Sequence[Sequence[Trial]] = (),
        *,
        has_reference: bool = False,
    ) -> None:
        """Takes the trials of earlier sweeps.

        Args:
            trials: the trials, by the `lowered_half` of their program and the `comparable` part of their reference.
            finals: the trials of the finalists of each earlier sweep, with their rounds, the latest last.
            has_reference: whether the sweep compares outputs with the defaults' output.
        """
        self.reference: str | None = None if has_reference else NO_REFERENCE
        self._trials = {each: trial for each, trial in (trials or {}).items() if not trial.is_ruled_out}
        self._ranked = {lowered: trial for (lowered, _), trial in (trials or {}).items() if trial.cheap_ms is not None}
        self.known = tuple(dict.fromkeys(tail_of(lowered) for lowered, _ in self._trials))[-_MOST_KNOWN:]
        self._known = frozenset(self.known)
        self._finals = finals

    def ranked(self) -> Recall:
        """Returns the trials of cheaply compiled programs, as trials that need no reference."""
        return Recall({(lowered, NO_REFERENCE): _as_cheap(trial) for lowered, trial in self._ranked.items()})

    def time_ms(self, program: str, defaults: str | None) -> float | None:
        """Returns the time of a program in milliseconds; None if it has none, or no recallable trial.

        Args:
            program: the program.
            defaults: the program of the function's defaults in this sweep; None if unknown.
        """
        reference = defaults if self.reference is None else self.reference
        against = None if reference is None else comparable(reference)
        trial = None if against is None else self._trials.get((lowered_half(program), against))
        return None if trial is None else trial.time_ms

    def knows(self, program: str) -> bool:
        """Returns whether a program has a trial, whatever its reference."""
        return tail_of(lowered_half(program)) in self._known

    def trial(self, program: str) -> Trial | None:
        """Returns the trial of a program for the reference of this sweep; None if there is none."""
        reference = None if self.reference is None else comparable(self.reference)
        found = None if reference is None else self._trials.get((lowered_half(program), reference))
        return None if found is None else dataclasses.replace(found, recalled_from=found.recalled_from or found.ended_s)

    def final(self, contenders: Mapping[int, Trial]) -> Final:
        """Returns an earlier sweep's final between the programs of some contenders, if all were recalled.

        Args:
            contenders: the trials of the contenders by index.

        Returns:
            The final; without rounds if this sweep measured a contender, or no earlier final holds all of them.
        """
        if all(trial.recalled_from is not None for trial in contenders.values()):
            for finalists in reversed(self._finals):
                rounds_ms = {lowered_half(trial.program): trial.samples_ms for trial in finalists}
                programs = {index: lowered_half(trial.program) for index, trial in contenders.items()}
                if rounds_ms.keys() >= set(programs.values()):
                    return Final({index: rounds_ms[program] for index, program in programs.items()})
        return Final()


def _as_cheap(trial: Trial) -> Trial:
    """Returns the trial of the cheaply compiled program."""
    return dataclasses.replace(trial, outcome=Outcome.OK, time_ms=trial.cheap_ms, own_ms=trial.cheap_ms, cheap_ms=None)
