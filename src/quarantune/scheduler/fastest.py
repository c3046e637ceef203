"""The fastest configs of a sweep: the best times so far, the disturbance of runs, and the executables."""

from __future__ import annotations

import contextlib
import math
import os

from quarantune.measure import finals, sampling
from quarantune.sandbox.program_file import ProgramFile
from quarantune.scheduler.workers import Job
from quarantune.values.codec import DamageError
from quarantune.values.trial import UNTUNED


class Fastest:
    """The times of all configs so far.

    Attributes:
        best_median_ms: the time of the fastest config, in milliseconds; None before there is one.
        disturbance: how much other processes disturb runs here.
        ran_as: for configs that lowered to another config's program, the index of the config that ran instead.
    """

    def __init__(self, *, by_time: bool = True) -> None:
        """Begins without times.

        Args:
            by_time: whether the fastest config wins; if not, times rule out no config.
        """
        self._by_time = by_time
        self.best_median_ms: float | None = None
        self.disturbance = sampling.Disturbance()
        self.ran_as: dict[int, int] = {}
        self._fastest_first_ms: float | None = None
        self._executables: dict[int, bytes] = {}
        self._kept: dict[int, tuple[float, int]] = {}

    def note_first_run(self, index: int, run_ms: float, cpu_ms: float) -> None:
        """Records a config's informative first run: its wall time, and its time without waits for a CPU."""
        self.disturbance.add([run_ms], cpu_ms)
        if index != UNTUNED and self._by_time:
            self._fastest_first_ms = min(self._fastest_first_ms or run_ms, run_ms)

    def is_hopeless(self, run_ms: float, cpu_ms: float) -> bool:
        """Returns whether a config cannot win, by its first run.

        Args:
            run_ms: the wall time of its first run.
            cpu_ms: the time without waits for a CPU.
        """
        return sampling.is_hopeless(
            cpu_ms,
            fastest_ms=min(ms for ms in (self.best_median_ms, run_ms) if ms is not None),
            fastest_first_ms=self._fastest_first_ms or math.inf,
            disturbance=self.disturbance,
        )

    @property
    def fastest_ms(self) -> float | None:
        """The time of the fastest config or first run so far, in milliseconds; None before there is one."""
        return min((ms for ms in (self.best_median_ms, self._fastest_first_ms) if ms), default=None)

    @property
    def stop_ms(self) -> float | None:
        """Milliseconds after which a first run can no longer win; None before there is a time to compare it with."""
        return (
            None
            if self.fastest_ms is None
            else sampling.longest_first_run(self.fastest_ms, disturbance=self.disturbance)
        )

    def note_time(self, index: int, ranking_ms: float) -> None:
        """Records the time of a config that may win.

        The time of defaults that cannot win does not count, because all others may be slower.
        """
        if index != UNTUNED and self._by_time and (self.best_median_ms is None or ranking_ms < self.best_median_ms):
            self.best_median_ms = ranking_ms

    def keep_compiled(self, job: Job) -> None:
        """Keeps the executable of a config that only compiles."""
        if os.fstat(job.executable_fd).st_size:
            with contextlib.suppress(DamageError):
                self._executables[job.index] = ProgramFile.read(job.executable_fd).executable

    def keep_executable(self, job: Job, merit: float) -> None:
        """Keeps a config's executable for the comparison, if it has one and is among the best.

        Args:
            job: the config's job.
            merit: the figure that chooses finalists. The defaults have the least, because every comparison includes
                them.
        """
        if os.fstat(job.executable_fd).st_size:
            job.protect_executable()
            self._kept[job.index] = (merit, job.take_executable())
        if len(self._kept) > finals.MOST_FINALISTS + 1:
            worst = max(self._kept, key=lambda index: self._kept[index])
            os.close(self._kept.pop(worst)[1])

    def kept_fd(self, index: int) -> int | None:
        """Returns the file of a config's executable; None if it was not kept."""
        _, fd = self._kept.get(self.ran_as.get(index, index), (None, None))
        return fd

    def executables(self) -> tuple[dict[int, bytes], dict[int, dict[str, bytes]]]:
        """Returns the kept programs: of the fastest configs, or of all if configs only compiled.

        Returns:
            Executables in the form that a worker loads, and entries of JAX's compilation cache by key; both by the
            configs' indices.
        """
        executables, for_cache = dict(self._executables), dict[int, dict[str, bytes]]()
        for index, (_, fd) in self._kept.items():
            with contextlib.suppress(DamageError):
                program = ProgramFile.read(fd)
                executables[index], for_cache[index] = program.executable, dict(program.cache_entries)
        executables |= {index: executables[first] for index, first in self.ran_as.items() if first in executables}
        for_cache |= {index: for_cache[first] for index, first in self.ran_as.items() if first in for_cache}
        return executables, for_cache

    def close(self) -> None:
        """Closes the kept executables."""
        for _, fd in self._kept.values():
            os.close(fd)
        self._kept.clear()
