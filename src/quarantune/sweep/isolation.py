"""Decides which halves of a trial run in workers."""

from __future__ import annotations

import enum

from quarantune import jax_internals
from quarantune.transport.problem import Problem
from quarantune.values.settings import Settings

AUTO = "auto"


class Isolation(enum.Enum):
    """The steps of a trial that run in workers."""

    PROCESS = "process"
    """All of them."""
    COMPILE = "compile"
    """All until there is an executable; this process, which has the device, loads, checks and measures."""
    NONE = "none"
    """None: this process does everything."""


def isolation_of(settings: Settings, problem: Problem) -> Isolation:
    """Returns the isolation of a sweep, by the operator's setting and the platform."""
    return choose(
        settings.isolation,
        problem.platform,
        is_held=jax_internals.backends_initialized(),
        is_jitted=jax_internals.is_jitted(problem.fn),
    )


def choose(setting: str, platform: str, *, is_held: bool, is_jitted: bool) -> Isolation:
    """Returns the isolation of a sweep.

    Args:
        setting: the operator's setting.
        platform: the platform of the call.
        is_held: whether this process has initialised its backends. Only one process can use a TPU, so that no worker
            can measure on one that this process holds.
        is_jitted: whether there is anything to compile.
    """
    if setting == AUTO:
        setting = Isolation.COMPILE.value if platform == "tpu" and is_held else Isolation.PROCESS.value
    if setting == Isolation.COMPILE.value and not is_jitted:
        return Isolation.NONE
    return Isolation(setting)
