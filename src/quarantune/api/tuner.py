"""The programmatic interface: tune any callable, or only compile its configs."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Unpack

from quarantune.api.on_engine import on_engine
from quarantune.results.result import TuningResult
from quarantune.transport import binding
from quarantune.transport.call import Arguments
from quarantune.transport.problem import as_structs, describe_function
from quarantune.values import config_space, naming
from quarantune.values.config_values import text_of
from quarantune.values.options import OptionKeywords, Options, checked_options
from quarantune.values.trial import Config

if TYPE_CHECKING:
    from quarantune.devices.targets import Target


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
        configs: Any,
        *,
        on_progress: Callable[[int, str], None] | None = None,
        **options: Unpack[OptionKeywords],
    ) -> None:
        from quarantune.resolve.resolver import Resolver
        from quarantune.resolve.tuned_function import TunedFunction

        function = TunedFunction.of(fn, configs, checked_options("AutoTuner", options))
        self._resolver = Resolver(function, on_phase=on_progress)

    def run(self, *args: Any, **kwargs: Any) -> TuningResult:
        """Returns the result for these arguments, from the cache or by tuning now.

        Args:
            *args: the call's positional arguments.
            **kwargs: its keyword arguments; `executor=` sets the setting of that name for this call.

        Raises:
            TuningFailedError: every config failed.
            EngineError: the executor could not run the sweep.
            CacheMissError: nothing is cached and `ON_MISS` is `error`.
        """
        with on_engine(self._resolver.function.signature, kwargs) as kwargs:
            return self.result((args, kwargs))

    def result(self, call: Arguments) -> TuningResult:
        """Returns the result for a call, as `run` does; for `tune_many`."""
        return self._resolver.result(self._resolver.bind(*call))


def compile_configs(
    fn: Callable[..., Any],
    configs: Any,
    *args: Any,
    num_workers: int | None = None,
    target: str | Target | None = None,
    **kwargs: Any,
) -> list[Callable[..., Any] | None]:
    """Compiles many configs of a jitted function, each in a worker process.

    Workers answer with data that is validated, and reading it runs no code. Only XLA can read the program itself:
    machine code that it loads in this process and runs when the callable is called.

    Args:
        fn: the jitted function, autotuned or not.
        configs: as for `AutoTuner`.
        *args: the call's positional arguments, without the config; arrays or `jax.ShapeDtypeStruct`.
        num_workers: how many configs compile at a time; None follows the settings.
        target: the device to compile for, which need not be here, as for `compile_check`; None for the device that the
            call would run on here.
        **kwargs: the call's keyword arguments.

    Returns:
        For each config, in order and with repeated ones, a callable that runs the program that its worker compiled;
        None, with a warning, where compiling failed. With a target, a callable compiles again where it is called.

    Raises:
        TypeError: `fn` is not jitted, or something of the call cannot be sent to a worker.
        ValueError: the configs, `num_workers` or the target are not valid.
        ImportError: the compiler for the target is not installed.
    """
    from quarantune.devices import targets
    from quarantune.resolve import compiling
    from quarantune.resolve.bound_call import BoundCall
    from quarantune.resolve.tuned_function import TunedFunction

    fn, signature, _ = describe_function(fn)
    label = naming.cache_name(fn)
    listed = _listed(configs, args, kwargs, label, signature)
    expanded = config_space.distinct(listed)
    function = TunedFunction.of(fn, expanded, Options(), compiled_by="compile_configs")
    call = BoundCall(function, args, kwargs)
    if target is None:
        compiled = compiling.compile_all(call, num_workers=num_workers)
    else:
        checked = compiling.check_all(call, targets.usable(target), num_workers=num_workers, again=False)
        compiled = [(trial, None) for trial in checked.trials]
    functions: dict[str, Callable[..., Any] | None] = {}
    for config, (trial, executable) in zip(expanded, compiled, strict=True):
        functions[text_of(config)] = _callable_of(fn, config, executable, args, kwargs)
        if not executable and trial.outcome.is_failure:
            warnings.warn(f"{label}: {config} did not compile: {trial.outcome.value}: {trial.message}", stacklevel=2)
            functions[text_of(config)] = None
    return [functions[text_of(config)] for config in listed]


def _callable_of(
    fn: Any, config: Config, executable: bytes | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Callable[..., Any]:
    """Returns a callable that runs what a worker compiled; one that compiles again here where there is no such thing.

    A config may compile to an executable that cannot leave its worker.
    """
    from quarantune.results.compiled_winner import Winner
    from quarantune.transport import executable_data

    if executable:
        with contextlib.suppress(ValueError):  # a config may have forged it
            return Winner(fn, config, executable_data.loads(executable), args=args, kwargs=kwargs)
    return binding.bind(fn, config)


def _listed(
    configs: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], label: str, signature: inspect.Signature
) -> list[Config]:
    """Returns the configs for a call in order, with repeated ones."""
    if not callable(configs):
        return config_space.expand(configs, fn_name=label, parameters=signature, keep_repeated=True)
    structs = as_structs(args, kwargs)
    return config_space.expand_callable(configs, *structs, fn_name=label, parameters=signature, keep_repeated=True)
