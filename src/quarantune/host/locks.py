"""Locks that a fork finds free, and attributes computed once: a fork lacks the threads that held or computed them."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from typing import Any, TypeVar

_T = TypeVar("_T")

_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def new() -> threading.RLock:
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
    """An attribute computed when it is first asked for, as `functools.cached_property` but without its lock.

    That lock, which Python 3.11 has, is one for all instances, and stays held in a fork. Threads that ask together may
    compute the attribute twice; all are given the same value.
    """

    def __get__(self, instance: Any, owner: type | None = None) -> _T:  # type: ignore[override]
        """Returns the value, kept in the instance's dictionary from now on."""
        if instance is None:
            return self  # type: ignore[return-value]
        value: _T = vars(instance).setdefault(self.attrname, self.func(instance))
        return value
