"""Keeps linear algebra on small matrices from starting threads, which cost more than they save."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
from collections.abc import Callable, Iterator

from quarantune.host import proc

_PREFIXES = ("scipy_openblas", "openblas")
_SUFFIXES = ("64_", "")

_Functions = tuple[Callable[[], int], Callable[[int], None]]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Limits the OpenBLAS libraries of NumPy and SciPy to one thread.

    Their threads wait for work by spinning: on a machine of 2 cores with other work, a search took 8.8 ms of CPU per
    trial instead of 0.8, on cores that workers compile on. Neither package has a function for this. A library that is
    not known is left alone.
    """
    before = [(put, get()) for get, put in _functions()]
    for put, _ in before:
        put(1)
    try:
        yield
    finally:
        for put, count in before:
            put(count)


@functools.cache
def _functions() -> list[_Functions]:
    """Returns the functions that read and set the number of threads of each OpenBLAS in this process."""
    paths = sorted(set(re.findall(r"(/\S*openblas\S*\.so\S*)$", proc.text("/proc/self/maps"), re.MULTILINE)))
    found = []
    for path in paths:
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD)
            for prefix, suffix in ((prefix, suffix) for prefix in _PREFIXES for suffix in _SUFFIXES):
                names = [f"{prefix}_{verb}_num_threads{suffix}" for verb in ("get", "set")]
                if all(hasattr(library, name) for name in names):
                    get, put = (getattr(library, name) for name in names)
                    get.argtypes, get.restype, put.argtypes, put.restype = [], ctypes.c_int, [ctypes.c_int], None
                    found.append((get, put))
                    break
    return found
