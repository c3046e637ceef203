"""The place of a sweep: this machine, or the machines of an engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from concurrent.futures import Executor
from typing import TYPE_CHECKING

from quarantune.values.configs import Config
from quarantune.values.settings import Settings

if TYPE_CHECKING:
    from quarantune.devices.targets import Target
    from quarantune.sweep.request import SweepRequest, Swept


class ThisMachine:
    """This machine."""

    is_here = True
    """Whether the place is this machine."""

    def device(self) -> None:
        """Returns None: the arguments of the call decide the device."""

    def run(self, request: SweepRequest, configs: Mapping[int, Config]) -> Swept:
        """Runs a sweep in workers of this machine, or in this process."""
        from quarantune.sweep import sweep  # only calls that tune need it

        return sweep.run(request, configs)


@dataclasses.dataclass(frozen=True)
class OnEngine:
    """The machines of an engine.

    Attributes:
        executor: the engine.
    """

    executor: Executor
    is_here = False

    def device(self) -> Target:
        """Returns the device of the machines."""
        from quarantune.engine import distributed  # few programs have an engine

        return distributed.device(self.executor)

    def run(self, request: SweepRequest, configs: Mapping[int, Config]) -> Swept:
        """Runs a sweep on the machines."""
        from quarantune.engine import distributed

        return distributed.run(request, configs)


def place_of(settings: Settings) -> ThisMachine | OnEngine:
    """Returns the place where the sweeps of a call run."""
    return ThisMachine() if settings.executor is None else OnEngine(settings.executor)
