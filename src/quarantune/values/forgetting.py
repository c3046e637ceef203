"""Choices that calls keep in memory, and what makes the calls forget them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    pass


Which: TypeAlias = Callable[[str, str, str], bool]
"""Whether the result for a function's name, a kind of device and a key is meant."""
_forgetting: weakref.WeakKeyDictionary[Any, Callable[[Any, Which | None], None]] = weakref.WeakKeyDictionary()
"""The functions of the registered methods, by their objects."""


def on_forgetting(forget: Any) -> None:
    """Registers a method, for as long as its object exists, that forgets choices for calls which it keeps in memory.

    Args:
        forget: as `forget_choices`.
    """
    _forgetting[forget.__self__] = forget.__func__


def forget_choices(of: Which | None = None) -> None:
    """Makes all calls ask for their choices again.

    Args:
        of: accepts the results to forget too, because files have changed; None for none.
    """
    for keeper, forget in list(_forgetting.items()):
        forget(keeper, of)
