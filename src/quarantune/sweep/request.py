"""One sweep as others see it: the call to tune for, the request, and everything it returns except its trials."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

from jax.sharding import AbstractMesh

from quarantune.calls.key import KeyedCall
from quarantune.devices.targets import Target
from quarantune.measure import finals
from quarantune.scheduler.plan import NOTHING_MORE, CompareProgram, ConfigSource, Mode
from quarantune.scheduler.recall import Recall
from quarantune.sweep.ledger import Ledger
from quarantune.sweep.limits import SweepLimits, isolation_of
from quarantune.values.configs import Config
from quarantune.values.options import Options
from quarantune.values.settings import Isolation, Settings
from quarantune.values.space import Space
from quarantune.values.trial import Trial


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """A call to tune for.

    Attributes:
        fn: the function to tune, jitted or not.
        name: its name in messages.
        args: the call's positional arguments; arrays may be concrete, tracers or `jax.ShapeDtypeStruct`.
        kwargs: the call's keyword arguments, with the same kinds of arrays.
        platform: the platform to tune for: `cpu`, `cuda`, `rocm` or `tpu`.
        device_kind: the kind of device to tune for, by its name in the cache.
        manual_mesh: the mesh of the enclosing `shard_map`, if the function communicates over it; else None.
        untuned: the config with the function's own defaults; None if a tunable has no default.
        default: the index of `untuned` among the configs; None if it is not one of them.
    """

    fn: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    platform: str
    device_kind: str
    manual_mesh: AbstractMesh | None = None
    untuned: Config | None = None
    default: int | None = None

    @classmethod
    def of(cls, keyed: KeyedCall) -> Problem:
        """Returns the problem of tuning for a call."""
        call, (args, kwargs) = keyed.call, keyed.sent()
        return cls(
            fn=call.function.fn,
            name=call.name,
            args=args,
            kwargs=kwargs,
            platform=keyed.platform,
            device_kind=keyed.id.device,
            manual_mesh=keyed.axes.mesh if keyed.axes is not None else None,
            untuned=call.untuned,
            default=call.default_index,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepRequest:
    """One sweep: the call, and the conditions under which its configs run.

    Attributes:
        problem: the call.
        options: the author's options.
        settings: the operator's settings.
        limits: the limits that options and settings set together.
        ledger: owns the trials of the sweep.
        troubled: the indices of configs that hung or crashed before, and come last.
        compile_only: whether the sweep only compiles configs, and returns their executables.
        target: the device of a compile check, which need not exist here; None if configs are for running here.
        space: all configs that the sweep may try, if `source` adds to its first ones; else None.
        source: gives further configs while the sweep runs.
        has_final: whether the sweep compares the fastest configs once more at the end.
        on_program: called with a config and the lines of its program, if the sweep itself cannot compare these with
            the caller's.
        outputs: `Reference.right_fds` for all sweeps of one call with the same arguments, empty before the first; None
            for a sweep that stands alone. The caller closes them.
        recall: the trials of earlier sweeps, by program.
        mode: the steps of a trial, and which of them run in workers; see `isolation_of`.
    """

    problem: Problem
    options: Options
    settings: Settings
    limits: SweepLimits
    ledger: Ledger
    troubled: Collection[int] = ()
    compile_only: bool = False
    target: Target | None = None
    space: Space | None = None
    source: ConfigSource = NOTHING_MORE
    has_final: bool = True
    on_program: CompareProgram | None = None
    outputs: list[int] | None = None
    recall: Recall = dataclasses.field(default_factory=Recall)
    mode: Mode = dataclasses.field(init=False)

    @classmethod
    def of(cls, call: KeyedCall, settings: Settings, ledger: Ledger) -> SweepRequest:
        """Returns the request to tune a call, under the limits that its author and the operator set."""
        options = call.call.function.options
        limits = SweepLimits.of(options, settings)
        return cls(problem=Problem.of(call), options=options, settings=settings, limits=limits, ledger=ledger)

    def __post_init__(self) -> None:
        isolation = isolation_of(self.settings, self.problem.platform, self.problem.fn)
        mode = {Isolation.PROCESS: Mode.IN_WORKERS, Isolation.COMPILE: Mode.MEASURING_HERE, Isolation.NONE: Mode.HERE}
        found = mode[isolation]
        if self.target is not None:
            found = Mode.CHECKING
        elif self.compile_only and found is not Mode.HERE:
            found = Mode.COMPILING
        object.__setattr__(self, "mode", found)

    def possible(self, configs: Mapping[int, Config]) -> list[Config]:
        """Returns configs with all values that the configs of the sweep have."""
        return list(configs.values()) if self.space is None else self.space.examples()


@dataclasses.dataclass(frozen=True)
class Swept:
    """Everything that a sweep returns except its trials.

    Attributes:
        final: the comparison of the finalists.
        compiled: by the index of a config, the contents for JAX's compilation cache, by JAX's own key.
        executables: by the index of a config, its executable as `compiled_winner.Winner` loads it.
        untuned: the trial of the function's defaults, if they ran in addition to the configs; else None.
        complaint: how outputs disagreed, if the author should know; else empty.
        noise: how far the output of the defaults moves when its inputs do; see `Judgement`.
        is_traced: whether a worker may have traced a config to its end.
        retimed: by the index of a config, its new trial on the machine of the final, if it first ran on another.
    """

    final: finals.Final = dataclasses.field(default_factory=finals.Final)
    compiled: dict[int, dict[str, bytes]] = dataclasses.field(default_factory=dict)
    executables: dict[int, bytes] = dataclasses.field(default_factory=dict)
    untuned: Trial | None = None
    complaint: str = ""
    noise: float | None = None
    is_traced: bool = True
    retimed: dict[int, Trial] = dataclasses.field(default_factory=dict)
