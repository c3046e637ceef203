"""A function whose kernels are tuned, and the known assignments of configs to its kernels."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from quarantune import cache
from quarantune.cache import Entry
from quarantune.resolve.bound_call import BoundCall
from quarantune.resolve.known_results import KnownResults
from quarantune.resolve.layers import space_of
from quarantune.resolve.tuned_function import TunedFunction
from quarantune.results.contextual_result import labels
from quarantune.transport import assignment
from quarantune.transport.assignment import KEY, OWN, Runner, Slot
from quarantune.values import shown
from quarantune.values.json_object import JsonObject
from quarantune.values.options import Options
from quarantune.values.settings import Settings
from quarantune.values.trial import Config

_MOST_CONFIGS = 256
"""How many configs all kernels of a function may have, as far as waiting for another rank's result is concerned."""


class ContextualFunction(TunedFunction):
    """A function whose kernels are tuned; its only config holds the assignment of configs to kernels under `KEY`.

    Attributes:
        runner: calls the function under an assignment.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        name: str,
        signature: inspect.Signature,
        static_names: frozenset[str] | None,
        options: Options,
    ) -> None:
        """Describes a function, as `TunedFunction` does; its calls show which kernels there are to tune."""
        space = [{KEY: assignment.encode({}, others=OWN)}]
        super().__init__(fn, space, name=name, signature=signature, static_names=static_names, options=options)
        self.runner = Runner(fn)

    most_configs = _MOST_CONFIGS


class KnownAssignments(KnownResults):
    """The known assignments for the calls of one function."""

    def config_of(self, entry: Entry, call: BoundCall, settings: Settings, *, is_own: bool = True) -> Config | None:
        """Returns the assignment of an entry if every kernel still has the config space that it had."""
        try:
            chosen = assignment.chosen_from(entry["config"]["assignment"])
            offered = [_is_offered(str(kernel["name"]), kernel["space"]) for kernel in entry["kernels"]]
        except (KeyError, TypeError, ValueError):
            cache.report_once(
                f"{self._function.name}: the cached entry does not say which config each kernel uses: it is not used"
            )
            return None
        if not all(offered) or not self.versions_serve(entry, settings, is_own=is_own):
            return None
        return {KEY: assignment.encode(chosen, others=OWN)}

    def config_from(self, encoded: JsonObject, call: BoundCall) -> Config | None:
        """Returns the assignment that another process has encoded, or None where it is none."""
        try:
            chosen = assignment.Assignment(str(encoded[KEY])).chosen
        except (KeyError, TypeError, ValueError):
            return None
        return {KEY: assignment.encode(chosen, others=OWN)}

    def text_of(self, config: Config) -> str:
        """Returns an assignment as messages show it."""
        return shown.format_config(shown_together(assignment.Assignment(str(config[KEY])).chosen))


def _is_offered(name: str, space: Any) -> bool:
    """Returns whether a kernel still has its configs; true for one not defined yet, or that makes its configs."""
    listed = [kernel._configs for kernel in assignment.kernels(name) if not callable(kernel._configs)]
    return not listed or any(space_of(configs) == space for configs in listed)


def shown_together(chosen: Mapping[Slot, Config]) -> Config:
    """Returns the configs of some kernels as one, for messages."""
    names = labels([slot.name for slot in chosen])
    return {name: shown.format_config(config) for name, config in zip(names, chosen.values(), strict=True)}
