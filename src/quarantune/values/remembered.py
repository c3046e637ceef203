"""The objects that keep choices in memory, so that they can be told to look these up again."""

from __future__ import annotations

import weakref
from typing import Protocol


class Keeper(Protocol):
    """An object that keeps choices for calls in memory."""

    def forget(self, device: str, key: str) -> None:
        """Forgets at least the choice for a key on a kind of device; both are empty where calls are to ask anew."""


_keepers: weakref.WeakValueDictionary[int, Keeper] = weakref.WeakValueDictionary()


def register(keeper: Keeper) -> None:
    """Registers an object for as long as it exists."""
    _keepers[id(keeper)] = keeper


def forget(device: str = "", key: str = "") -> None:
    """Has every keeper forget the choice for a key, or, without one, the short ways to all choices."""
    for reference in _keepers.valuerefs():
        if (keeper := reference()) is not None:
            keeper.forget(device, key)
