"""One lock for each key of a function: of the threads that miss the cache together, one tunes."""

from __future__ import annotations

import os
import threading

from quarantune.resolve.call_key import CallKey


class KeyLocks:
    """Locks by key, free in a fork of this process, which lacks the threads that hold them."""

    def __init__(self) -> None:
        self._locks: dict[tuple[int, CallKey], threading.RLock] = {}

    def of(self, key: CallKey) -> threading.RLock:
        """Returns the lock of a key, the same one for all threads of this process."""
        return self._locks.setdefault((os.getpid(), key), threading.RLock())
