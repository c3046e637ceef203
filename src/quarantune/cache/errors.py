"""The cache's error and warning; each problem is reported once."""

from __future__ import annotations

from quarantune.host.process import new_lock, warn


class CacheWarning(UserWarning):
    """The cache on disk has a problem; the call goes on without it."""


class CacheWriteError(RuntimeError):
    """A result could not be saved; the message names the result, the reason and a remedy."""


class LeaseLostError(Exception):
    """Another writer took this lease for abandoned and withdrew it: nothing was written; acquire another."""


_reported: set[str] = set()
_reported_lock = new_lock()


def report_once(message: str, *, topic: str | None = None) -> None:
    """Warns about a problem, the first time that it occurs in this process.

    Args:
        message: the problem and its remedy; the same message is the same problem.
        topic: stands for the message where further messages tell of the same problem.
    """
    with _reported_lock:
        if (topic or message) in _reported:
            return
        _reported.add(topic or message)
    warn(message, CacheWarning)
