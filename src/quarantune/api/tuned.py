"""The base of everything that has a tuner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quarantune.calls.call import TunedFunction

if TYPE_CHECKING:
    from quarantune.api.tuner import Tuner
    from quarantune.results.result import TuningResult
    from quarantune.values.settings import Which


class Tuned:
    """A function with a tuner."""

    _tuner: Tuner

    @property
    def function(self) -> TunedFunction:
        """The function with its configs and options."""
        return self._tuner.function

    def forget(self, of: Which | None = None) -> None:
        """Clears the choices remembered for earlier calls, if there are any; as `forget_choices`."""

    def result(self, call: tuple[tuple[Any, ...], Mapping[str, Any]], *, anew: bool = False) -> TuningResult:
        """Returns the result for a call; for `tune_many` and the command line.

        Args:
            call: its positional and its keyword arguments.
            anew: whether to tune even if a result is cached.

        Raises:
            TuningFailedError: every config failed.
            TypeError: the function does not take these arguments.
        """
        try:
            bound = self._tuner.bind(*call)
            return self._tuner.tune(bound) if anew else self._tuner.result(bound)
        finally:
            self.forget()
