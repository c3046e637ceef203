"""The request for one sweep: the call to tune for, and the conditions under which its configs run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import TypeAlias

import jax

from quarantune.devices.targets import Target
from quarantune.sandbox.messages import BenchOptions
from quarantune.scheduler.plan import NOTHING_MORE, ConfigSource, Proof
from quarantune.sweep.events import SweepEvents
from quarantune.sweep.limits import SweepLimits
from quarantune.transport.problem import Problem
from quarantune.values.options import Options
from quarantune.values.settings import Settings
from quarantune.values.space import Space
from quarantune.values.trial import Config, Trial

Finish: TypeAlias = Callable[[int, Trial, str], None]
"""Receives the index of a config, its trial and its output, once the trial is over."""


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
        target: the device for which it is only found out which configs compile, and which need not exist here; None
            where configs are for running here.
        space: all configs that may be tried, where `source` gives more than those that are known from the start.
        source: gives configs in addition to these while the sweep runs.
        has_final: whether the fastest configs are compared once more at the end.
        proof: compares the program of one config with the caller's.
        measures_energy: whether the energy of calls is measured.
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

    def possible(self, configs: Mapping[int, Config]) -> list[Config]:
        """Returns configs with all values that the configs of the sweep have."""
        return list(configs.values()) if self.space is None else self.space.examples()


def worker_options(platform: str | None, options: Options, *, energy: bool = False) -> BenchOptions:
    """Returns the author's options that a worker needs.

    Args:
        platform: the platform that configs run on; None for the one of this process.
        options: the author's options.
        energy: whether the energy of calls is measured.
    """
    return BenchOptions(
        platform=platform,
        warmup=options.warmup,
        rep=options.rep,
        supply="auto" if callable(options.supply) else options.supply,
        tolerance=options.tolerance,
        check_grad=options.check_grad or options.time_grad,
        time_grad=options.time_grad,
        # On a GPU, XLA itself would write to the directory, and a killed worker would leave torn files.
        compilation_cache=jax.config.values["jax_compilation_cache_dir"] if platform == "cpu" else None,
        measures_energy=energy,
    )
