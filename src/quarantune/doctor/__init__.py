"""Looks at this machine for tuning: what it gives, and what is in the way, each finding with its remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from quarantune import sandbox
from quarantune.doctor import machine_checks, trial_checks
from quarantune.doctor.check import Check, Status, fail, failed, first_line, warn
from quarantune.values import settings as environment
from quarantune.values.settings import Settings

__all__ = ["Check", "Status", "failed", "run"]


def run(*, on_check: Callable[[Check], None] | None = None) -> list[Check]:
    """Returns the findings about this machine: some 10 s of work, most of it real sweeps in the sandbox.

    It saves nothing. At its end this process has initialised JAX's backend.

    Args:
        on_check: called with each finding as soon as it is known.
    """
    checks = []
    for check in _all():
        checks.append(check)
        if on_check is not None:
            on_check(check)
    return checks


def _all() -> Iterator[Check]:
    """Makes all checks, in the order in which people read them."""
    try:
        settings = environment.current()
    except ValueError as error:
        yield fail("settings", first_line(error), "correct the variable, or unset it")
        settings = Settings()
    if sandbox.is_inside():
        yield fail("sandbox", "this process is a worker of another sweep", "run the doctor outside of a tuned function")
        return
    steps: dict[str, Callable[[], Check | Iterable[Check]]] = {
        "versions": machine_checks.jax_versions,
        "plugins": machine_checks.plugins,
        "cores": lambda: machine_checks.cores(settings),
        "memory": lambda: machine_checks.memory(settings),
        "/dev/shm": machine_checks.shared_memory,
        "temporary files": machine_checks.temporary_files,
        "descriptors": lambda: machine_checks.descriptors(settings),
        "processes": lambda: machine_checks.processes(settings),
        "thread variables": machine_checks.thread_variables,
        "cache directory": lambda: machine_checks.cache_directory(settings),
        "devices": machine_checks.devices,
        "ranks": lambda: trial_checks.ranks(settings),
        "trials": trial_checks.trials,
        "TPU compiler": trial_checks.tpu_compiler,
    }
    for name, step in steps.items():
        try:
            found = step()
            yield from [found] if isinstance(found, Check) else found
        except Exception as error:  # one check that cannot be made says nothing about the others
            yield warn(name, f"could not be looked at: {first_line(error)}", "report this as an error of quarantune")
