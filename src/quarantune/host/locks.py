"""Locks and lazy attributes that forks of this process do not inherit as held."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from typing import Any, TypeVar

_T = TypeVar("_T")

_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def new_lock() -> threading.RLock:
    """Returns a reentrant lock that is free in a fork of this process, unless the thread that forked holds it."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def _free_in_fork() -> None:
    for lock in list(_locks):
        if not lock._is_owned():
            lock._at_fork_reinit()


os.register_at_fork(after_in_child=_free_in_fork)


class lazy(functools.cached_property[_T]):
    """An attribute computed at its first use, like `functools.cached_property` but without its lock.

    In Python 3.11 all instances share that lock, and a fork inherits it held. Threads that read the attribute at the
    same time may compute it twice; all get the same value.
    """

    def __get__(self, instance: Any, owner: type | None = None) -> _T:  # type: ignore[override]
        """Returns the value, and keeps it in the instance's dictionary."""
        if instance is None:
            return self  # type: ignore[return-value]
        value: _T = vars(instance).setdefault(self.attrname, self.func(instance))
        return value
