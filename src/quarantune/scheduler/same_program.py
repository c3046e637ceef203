"""Configs that lower to the same program: one of them runs, and the others get its outcome."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import TypeVar

from quarantune.scheduler.workers import Job
from quarantune.values.trial import UNTUNED, Trial

_Program = TypeVar("_Program")


class SamePrograms:
    """The programs of the configs so far.

    Attributes:
        ran_as: the index of the config that ran instead, by the indices of those that did not run.
    """

    def __init__(self, ran_as: dict[int, int] | None = None) -> None:
        """Knows of no programs yet.

        Args:
            ran_as: the copies among configs that ran before, to which those of this run are added.
        """
        self.ran_as = {} if ran_as is None else ran_as
        self._jobs: dict[str, Job] = {}
        self._ended: dict[int, tuple[Trial, str]] = {}

    def first(self, program: str, job: Job) -> Job:
        """Returns the job that runs a program: an earlier one, or `job`."""
        return self._jobs.setdefault(program, job)

    def forget(self, jobs: Collection[Job]) -> None:
        """Makes jobs that will have no result stand for no others."""
        self._jobs = {program: first for program, first in self._jobs.items() if first not in jobs}

    def has_ended(self, job: Job) -> bool:
        """Whether the outcome of a job is known."""
        return job.index in self._ended

    def end(self, job: Job, trial: Trial, log: str) -> None:
        """Records the trial and the output of a job that ran."""
        self._ended[job.index] = (trial, log)

    def copy_end(self, job: Job, first: Job) -> tuple[Trial, str]:
        """Returns the trial and the output of a job whose program `first` ran."""
        trial, log = self._ended[first.index]
        self.ran_as[job.index] = first.index
        same = f"the same program as {'the defaults' if first.index == UNTUNED else first.config}"
        message = f"{same}: {trial.message}" if trial.message else same
        return dataclasses.replace(trial, config=job.config, message=message), log

    def with_copies(self, programs: Mapping[int, _Program]) -> dict[int, _Program]:
        """Returns programs by index, with those of the configs that did not run themselves."""
        copies = {index: programs[first] for index, first in self.ran_as.items() if first in programs}
        return {**programs, **copies}
