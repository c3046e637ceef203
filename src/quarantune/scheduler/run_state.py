"""The parts of one run of a scheduler."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from quarantune.scheduler.fastest import Fastest
from quarantune.scheduler.gemm_cache import GemmCache
from quarantune.scheduler.jobs import Jobs
from quarantune.scheduler.memory_watch import MemoryWatch
from quarantune.scheduler.plan import Numbers, Plan
from quarantune.scheduler.reference import Reference
from quarantune.scheduler.worker_count import WorkerCount
from quarantune.scheduler.workers import DeviceState, Workers


@dataclasses.dataclass(frozen=True)
class RunState:
    """The state of one scheduler, in parts.

    Attributes:
        plan: the plan.
        numbers: how many configs and workers the route has at a time.
        devices: the devices that still work.
        workers: the workers.
        jobs: the jobs.
        fastest: the times so far.
        reference: the outputs to compare with.
        memory: the watch on workers' memory.
        gemm_cache: the programs whose products XLA tries kernels for.
        worker_count: the number of configs that may have a worker; lower after processes or threads ran out.
        clock: returns the time in seconds.
        on_phase: called with the index of a config and the phase that it enters.
    """

    plan: Plan
    numbers: Numbers
    devices: list[DeviceState]
    workers: Workers
    jobs: Jobs
    fastest: Fastest
    reference: Reference
    memory: MemoryWatch
    gemm_cache: GemmCache
    worker_count: WorkerCount
    clock: Callable[[], float]
    on_phase: Callable[[int, str], None]

    def least_used_device(self) -> DeviceState:
        """Returns the device that the fewest workers use."""
        return min(self.devices, key=self.workers.on)

    def may_start_on(self, device: DeviceState | None) -> bool:
        """Whether a further worker may start: not while another worker, even a dying one, owns its device."""
        if self.worker_count.pauses:
            return False
        return device is None or not device.device.has_one_owner or not self.workers.on(device)
