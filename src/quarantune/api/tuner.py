"""The programmatic interface: tune any callable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

from quarantune.api.on_engine import on_engine
from quarantune.host.process import own_frames_hidden
from quarantune.resolve.resolver import Resolver
from quarantune.resolve.tuned_function import TunedFunction
from quarantune.results.result import TuningResult
from quarantune.transport.problem import Arguments
from quarantune.values.configs import MadeConfigs
from quarantune.values.settings import OptionKeywords, checked_options


class AutoTuner:
    """Tunes any callable that takes a config as keyword arguments.

    Args:
        fn: a jitted function, or any other callable: numpy code, a C extension, something that starts a program.
        configs: a list of dicts, a dict of lists, or a callable that makes dicts from the call's arguments.
        on_progress: called in this process with the index of a config and the phase that it enters: `load` where its
            worker loads the function itself, `compile`, `check`, `measure`, and `end` once its trial is over.
        **options: the options of the author, as `Options` documents them.

    Raises:
        TypeError: `fn` is not callable, an option is unknown, or the configs are of no usable type.
        ValueError: the configs are empty or without end, or the function cannot take them.

    Example:
        >>> result = AutoTuner(sort_rows, {"block": [64, 256]}).run(rows)  # doctest: +SKIP
        >>> result.best_config  # doctest: +SKIP
        {'block': 256}
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        configs: MadeConfigs,
        *,
        on_progress: Callable[[int, str], None] | None = None,
        **options: Unpack[OptionKeywords],
    ) -> None:
        function = TunedFunction.of(fn, configs, checked_options("AutoTuner", options))
        self._resolver = Resolver(function, on_phase=on_progress)

    def run(self, *args: Any, **kwargs: Any) -> TuningResult:
        """Returns the result for these arguments, from the cache or by tuning now.

        Args:
            *args: the call's positional arguments.
            **kwargs: its keyword arguments; `executor=` sets the setting of that name for this call, and with
                `resume=True` an interrupted sweep goes on, in place of the best config that it had found.

        Raises:
            TuningFailedError: every config failed.
            EngineError: the executor could not run the sweep.
            CacheMissError: nothing is cached and `ON_MISS` is `error`.
        """
        with own_frames_hidden(), on_engine(self._resolver.function.signature, kwargs) as (kwargs, resume):
            call = self._resolver.bind(args, kwargs)
            return self._resolver.tune(call, resume=True) if resume else self._resolver.result(call)

    def result(self, call: Arguments) -> TuningResult:
        """Returns the result for a call, as `run` does; for `tune_many`."""
        return self._resolver.result(self._resolver.bind(*call))
