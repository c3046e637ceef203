"""One worker compiles a config with the device, while none measures, and another worker measures it."""

from __future__ import annotations

from typing import Self

from quarantune.scheduler.bursts import Batches
from quarantune.scheduler.routes.base import DEVICE_PARKED, Conditions
from quarantune.scheduler.routes.prepared_ahead import PreparedAhead
from quarantune.values.trial import Route


class HandedOver(PreparedAhead):
    """Several workers compile with the device, and hand their programs over to a worker that measures.

    XLA tries kernels for a product of matrices on the device while it compiles. On an H200 with 16 cores, 24 attention
    programs took 11.6 s one after another in one process, 12.3 and 25.9 s in 4 and 16 threads of that process, and 5.8,
    6.0 and 6.8 s in 4, 8 and 14 processes. The measuring worker is idle during the compiles. Loading programs in it
    during that time had no visible gain: 0.16 s of 9 s, with a standard error of 0.22 s, in 11 pairs of sweeps of these
    programs on an H100.
    """

    label = Route.HANDED_OVER
    _admits = Batches

    @classmethod
    def of(cls, given: Conditions, *, is_closed: bool) -> Self:
        """Returns the route under some conditions; `is_closed` says that no search adds configs."""
        slots, each = min(given.slots, given.devices * DEVICE_PARKED), given.configs_per_worker
        return cls(given.in_files(slots, is_closed=is_closed, configs_per_worker=each, compiles_per_worker=each))
