"""Prepares standby workers while others compile, because the driver takes long to make a context."""

from __future__ import annotations

import contextlib
import itertools
import os

from quarantune.sandbox import spool
from quarantune.sandbox.messages import Expect, Prepare
from quarantune.scheduler.plan import Numbers
from quarantune.scheduler.routes.split import Split
from quarantune.scheduler.run_state import RunState
from quarantune.scheduler.workers import DeviceState, Worker
from quarantune.values.trial import ArrayKind

_STANDBY_WORKERS = 10
"""Number of standby workers of a device if each takes one config. A config takes less time than preparing a worker: on
an H100 with 16 cores, 48 matmuls took 14.3, 11.1 and 9.6 s with 4, 6 and 10 workers."""


_comparisons: dict[tuple[object, ...], bytes] = {}
"""The programs that compare outputs, by the kind of device and the outputs, for the later sweeps of this process.

An H200's standby worker takes 0.7 s to compile them while 14 workers compile, and all compiled configs wait for it.
"""
_MOST_COMPARISONS = 32


class PreparedAhead(Split):
    """A route that prepares standby workers while others compile."""

    def __init__(self, numbers: Numbers) -> None:
        super().__init__(numbers)
        self._outputs: tuple[ArrayKind, ...] = ()
        self._comparisons_fd = -1

    def take_standby(self, earlier: RunState) -> None:
        """Takes over the standby workers of an earlier run of the sweep.

        The driver makes the contexts of a device one after another: on an H100, seven took 0.8 s.
        """
        for device, mine in itertools.product(earlier.devices, self._run.devices):
            if device.device == mine.device:
                earlier.workers.give_standby(device, self._run.workers, mine)

    def on_lowered(self, outputs: tuple[ArrayKind, ...]) -> None:
        """Sends the standby workers the outputs they will compare, while they take their device."""
        run = self._run
        compares = run.reference.compares or run.reference.is_coming
        if outputs and not self._outputs and compares:
            self._outputs = outputs
            for device in run.devices:
                for worker in run.workers.standby(device):
                    self._expect_outputs(worker)

    def _expect_outputs(self, worker: Worker, *, has_programs: bool = False) -> None:
        """Sends a standby worker the outputs; the first leaves its programs for other workers and later sweeps."""
        if not self._outputs:
            return
        is_first = self._comparisons_fd < 0
        if is_first:
            self._comparisons_fd = spool.create("comparisons")
            spool.write(self._comparisons_fd, _comparisons.get(self._kind_of_comparisons(), b""))
        fds = [self._comparisons_fd] if is_first or (self._has_comparisons() and not has_programs) else []
        self._run.workers.send(worker, Expect(outputs=self._outputs), fds)

    def _has_comparisons(self) -> bool:
        return self._comparisons_fd >= 0 and os.fstat(self._comparisons_fd).st_size > 0

    def _kind_of_comparisons(self) -> tuple[object, ...]:
        return self._run.plan.devices[0].kind, *self._outputs

    def close(self) -> None:
        """Keeps the comparison programs that a worker has left for later sweeps."""
        if self._comparisons_fd >= 0:
            with contextlib.suppress(OSError, ValueError):
                if len(_comparisons) < _MOST_COMPARISONS and (programs := spool.read(self._comparisons_fd)):
                    _comparisons.setdefault(self._kind_of_comparisons(), programs)
            os.close(self._comparisons_fd)
            self._comparisons_fd = -1

    def prepare_on(self, device: DeviceState) -> None:
        """Starts the standby workers that a device will need, because the driver takes long to make a context."""
        run, each = self._run, self.numbers.configs_per_worker
        if not run.jobs.will_measure or device.is_cramped or not run.may_start_on(device):
            return
        most = _STANDBY_WORKERS if each == 1 and not device.device.has_one_owner else 1
        share = -(-self._unmeasured() // len(run.devices))
        waiting = share + self._needs_one_for_final(device)
        waiting -= sum(each - worker.used for worker in run.workers.standby(device))
        if device.measuring is not None:
            waiting -= each - device.measuring.used - 1
        while waiting > 0 and len(run.workers.standby(device)) < most:
            self._start_standby(device)
            waiting -= each

    def _needs_one_for_final(self, device: DeviceState) -> bool:
        """Whether to prepare a worker for the final: on the first device, once a compile slot stays idle."""
        run = self._run
        is_idle = not (run.jobs.pending or run.jobs.may_come) and run.workers.compiling() < self.numbers.slots
        return run.plan.has_final and is_idle and device is run.devices[0] and len(run.jobs.begun) > 1

    def _start_standby(self, device: DeviceState) -> None:
        """Starts a standby worker, with the programs that compare outputs if another worker has left them."""
        has_programs = self._has_comparisons()
        fds = [self._comparisons_fd] if has_programs else []
        worker = self._prepare(device, Prepare(has_programs=has_programs), *fds)
        self._expect_outputs(worker, has_programs=has_programs)
