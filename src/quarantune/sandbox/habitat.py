"""The properties that a process inherits for good when it starts, to tell whether a running template is out of date."""

from __future__ import annotations

import dataclasses
import os

from quarantune.host import proc

_READ_AT_START = ("LD_", "PYTHON", "JAX_", "XLA_", "OMP_", "MKL_", "OPENBLAS_", "MALLOC_", "GLIBC_")
"""Prefixes of variables that the loader, Python, JAX, its plugins and numerical libraries read once, at start-up.

Every sweep gives its workers the current values of all other variables.
"""


@dataclasses.dataclass(frozen=True)
class Habitat:
    """Properties that a new child of this process would keep for good.

    Attributes:
        user: the user ids, the group ids and the supplementary groups.
        cpus: the CPUs that the calling thread may use.
        cgroup: the control groups.
        environ: the environment variables that are read once.
    """

    user: tuple[object, ...]
    cpus: frozenset[int]
    cgroup: bytes
    environ: tuple[tuple[str, str], ...]


def current() -> Habitat:
    """Returns the habitat that a child started now would inherit."""
    groups = tuple(sorted(os.getgroups()))
    return Habitat(
        user=(os.getuid(), os.geteuid(), os.getgid(), os.getegid(), groups),
        cpus=frozenset(os.sched_getaffinity(0)),
        cgroup=proc.read("/proc/self/cgroup"),
        environ=tuple(sorted(item for item in os.environ.items() if item[0].startswith(_READ_AT_START))),
    )
