"""The stack behind context managers that hold in one thread, for a block of code."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

_T = TypeVar("_T")


class ScopedStack(threading.local, Generic[_T]):
    """The scopes that a thread is in; every thread sees its own.

    Attributes:
        entered: the scopes, outermost first.
    """

    def __init__(self) -> None:
        self.entered: list[_T] = []

    @property
    def innermost(self) -> _T | None:
        """The scope that was entered last, or None."""
        return self.entered[-1] if self.entered else None

    def enter(self, scope: _T) -> None:
        """Enters a scope, which may have been entered further out, too."""
        self.entered.append(scope)

    def leave(self, scope: _T) -> None:
        """Leaves a scope where it was entered last."""
        del self.entered[max(place for place, entered in enumerate(self.entered) if entered is scope)]
