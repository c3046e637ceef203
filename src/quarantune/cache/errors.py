"""How the cache tells of trouble: one typed error, one warning category, each problem reported once."""

from __future__ import annotations

from quarantune.host import caller, locks


class CacheWarning(UserWarning):
    """Something about the cache on disk is not as it should be; the call goes on without it."""


class CacheWriteError(RuntimeError):
    """A result could not be saved; the message says what was not saved, why, and what helps."""


_reported: set[str] = set()
_reported_lock = locks.new()


def report_once(message: str) -> None:
    """Warns of a problem, the first time that this process meets it.

    Args:
        message: what is wrong and how to put it right; the same message is the same problem.
    """
    with _reported_lock:
        if message in _reported:
            return
        _reported.add(message)
    caller.warn(message, CacheWarning)
