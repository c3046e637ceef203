"""One sweep as others see it: the request, the events that it reports, and its findings beside the trials."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping

from quarantune.devices.targets import Target
from quarantune.measure import finals
from quarantune.scheduler.plan import NOTHING_MORE, CompareProgram, ConfigSource, Proof
from quarantune.sweep.limits import SweepLimits
from quarantune.transport.problem import Problem
from quarantune.values.configs import Config
from quarantune.values.settings import Options, Settings
from quarantune.values.space import Space
from quarantune.values.trial import END, UNTUNED, Trial


def _ignore(*_: object) -> None:
    """Receives an event that nobody listens to."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepEvents:
    """Callbacks of a sweep, called in the thread that runs it unless stated otherwise.

    Attributes:
        on_trial: called with the index of a config and its trial, once the trial is over.
        on_tick: called many times a second while the sweep runs.
        on_provisional: called with the index of a config that runs in the caller's own process, and with the trial that
            it has if no other event of it follows, because that process has ended: `lost` as it begins, `timeout` at
            its deadline, which comes from another thread, and `not_run` where an exception interrupts the sweep.
        on_phase: called with the index of a config and the phase that it enters, with `READY` where it was compiled and
            waits, and at last with `END`. The function's own defaults have a negative index where they are no config.
        on_default: called with the time of the function's own defaults in milliseconds, where they are no config; None
            where they failed.
        on_program: called with a config and the lines of its program, where the sweep itself cannot compare these with
            the caller's; None where it can.
    """

    on_trial: Callable[[int, Trial], None]
    on_tick: Callable[[], None] = _ignore
    on_provisional: Callable[[int, Trial], None] = _ignore
    on_phase: Callable[[int, str], None] = _ignore
    on_default: Callable[[float | None], None] = _ignore
    on_program: CompareProgram | None = None

    def untuned(self, trial: Trial) -> None:
        """Reports the trial of the function's own defaults, where they are no config."""
        self.on_default(trial.time_ms)
        self.on_phase(UNTUNED, END)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepRequest:
    """One sweep: the call, and the conditions under which its configs run.

    Attributes:
        problem: the call.
        options: the author's options.
        settings: the operator's settings.
        limits: the limits that the two set together.
        events: receives the progress of the sweep.
        troubled: the indices of configs that hung or crashed before, and come last.
        compile_only: whether configs are only compiled, and their executables returned; so they are with a `target`.
        target: the device that configs are only checked to compile for, and that need not exist here; None
            where configs are for running here.
        space: all configs that may be tried, where `source` gives more than those that are known from the start.
        source: gives configs in addition to these while the sweep runs.
        has_final: whether the fastest configs are compared once more at the end.
        proof: compares the program of one config with the caller's.
        measures_energy: whether the energy of calls is measured.
        outputs: `Reference.right_fds` for all sweeps of one call with the same arguments, empty before the first; None
            for a sweep that stands alone. The caller closes them.
    """

    problem: Problem
    options: Options
    settings: Settings
    limits: SweepLimits
    events: SweepEvents
    troubled: Collection[int] = ()
    compile_only: bool = False
    target: Target | None = None
    space: Space | None = None
    source: ConfigSource = NOTHING_MORE
    has_final: bool = True
    proof: Proof = dataclasses.field(default_factory=Proof)
    measures_energy: bool = False
    outputs: list[int] | None = None

    def possible(self, configs: Mapping[int, Config]) -> list[Config]:
        """Returns configs with all values that the configs of the sweep have."""
        return list(configs.values()) if self.space is None else self.space.examples()


@dataclasses.dataclass(frozen=True)
class Swept:
    """The findings of a sweep beside its trials.

    Attributes:
        final: the comparison of the finalists.
        compiled: by the index of a config, the contents for JAX's compilation cache, by JAX's own key.
        executables: by the index of a config, its executable as `compiled_winner.Winner` loads it.
        untuned: the trial of the function's defaults, where they ran beside the configs.
        complaint: how outputs disagreed, where the author should know; else empty.
        noise: how far the output of the defaults moves when its inputs do, as in `Judgement`.
        is_traced: whether a worker may have traced a config to its end.
        retimed: by the index of a config, its trial on the machine of the final, where it was tried on another before.
    """

    final: finals.Final = dataclasses.field(default_factory=finals.Final)
    compiled: dict[int, dict[str, bytes]] = dataclasses.field(default_factory=dict)
    executables: dict[int, bytes] = dataclasses.field(default_factory=dict)
    untuned: Trial | None = None
    complaint: str = ""
    noise: float | None = None
    is_traced: bool = True
    retimed: dict[int, Trial] = dataclasses.field(default_factory=dict)
