"""Makes calls forget the choices that they keep in memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

Which: TypeAlias = Callable[[str, str, str], bool]
"""Takes a function's name, a kind of device and a key; returns whether their result is meant."""
_forgetting: weakref.WeakKeyDictionary[Any, Callable[[Any, Which | None], None]] = weakref.WeakKeyDictionary()
"""The functions of the registered methods, by their objects."""


def on_forgetting(forget: Any) -> None:
    """Registers a method that forgets the choices its object keeps in memory, for as long as the object exists.

    Args:
        forget: the method; takes the argument of `forget_choices`.
    """
    _forgetting[forget.__self__] = forget.__func__


def forget_choices(of: Which | None = None) -> None:
    """Makes all calls ask for their choices again.

    Args:
        of: accepts results to forget as well, because files have changed; None accepts none.
    """
    for keeper, forget in list(_forgetting.items()):
        forget(keeper, of)
