"""Predicts which configs take the longest to compile, so that none of these begins last."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping

import numpy as np

from quarantune.scheduler.workers import Job
from quarantune.values.configs import Config

_SHRINKAGE = 1.0
"""The prior weight of a value's effect, in configs. Replaying the compile times of 48 and 768 Triton matmuls and of 24
attention programs in plain JAX, the last compilation ended 1% after that of an order which knew all times, and 7 to 15%
later in the order of the list."""
_GROWTH = 1 / 16
"""The order is made again once so many more configs have been compiled, as a share of those before."""
_LEAST_S = 1e-3


class CompileTimes:
    """The compile times of a run's configs, and a model of them: the logarithm is a sum of effects, one for each value.

    The longest job first is the classic rule for few idle machines at the end (Graham, Bounds on Multiprocessing Timing
    Anomalies, SIAM Journal on Applied Mathematics 1969).
    """

    def __init__(self) -> None:
        self._columns: dict[tuple[str, str], int] = {}
        self._known: list[tuple[list[int], float]] = []
        self._ordered_with = 0

    def add(self, config: Config, seconds: float) -> None:
        """Records how long a config took to compile, or to fail."""
        self._known.append((self._columns_of(config), seconds))

    @property
    def is_news(self) -> bool:
        """Whether so many configs were compiled since the last order that another one is worth making."""
        return len(self._known) > max(1.0, (1 + _GROWTH) * self._ordered_with)

    def longest_first(self, jobs: Iterable[Job], running_s: Mapping[Job, float]) -> list[Job]:
        """Orders jobs by their predicted compile times; those with equal ones keep their order.

        Args:
            jobs: the jobs.
            running_s: how long others have been compiling, which will take at least the usual time.
        """
        self._ordered_with = len(self._known)
        usual_s = math.exp(sum(math.log(max(each, _LEAST_S)) for _, each in self._known) / len(self._known))
        rows = [(self._columns_of(job.config), max(spent_s, usual_s)) for job, spent_s in running_s.items()]
        rows += self._known
        waiting = [(job, self._columns_of(job.config)) for job in jobs]
        has_value = np.zeros((len(rows), len(self._columns)))
        for row, (columns, _) in zip(has_value, rows, strict=True):
            row[columns] = 1
        logs = np.log([max(each, _LEAST_S) / usual_s for _, each in rows])
        normal = has_value.T @ has_value + _SHRINKAGE * np.eye(len(self._columns))
        effects = np.linalg.solve(normal, has_value.T @ logs)
        waiting.sort(key=lambda each: -round(float(effects[each[1]].sum()), 6))
        return [job for job, _ in waiting]

    def _columns_of(self, config: Config) -> list[int]:
        pairs = [(name, json.dumps(value, sort_keys=True, default=repr)) for name, value in config.items()]
        return [self._columns.setdefault(pair, len(self._columns)) for pair in pairs]
