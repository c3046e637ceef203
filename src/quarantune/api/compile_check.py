"""Compiles the configs of a function without running any: to use them, or to see which compile for a device."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from quarantune.api.autotune import Autotuned
from quarantune.devices import targets
from quarantune.devices.targets import Target
from quarantune.resolve import compiling
from quarantune.resolve.bound_call import BoundCall
from quarantune.resolve.tuned_function import TunedFunction
from quarantune.results.compiled_winner import Winner
from quarantune.results.report import CompileReport
from quarantune.transport import binding
from quarantune.transport.executable import from_data
from quarantune.transport.problem import as_structs, describe_function
from quarantune.values import settings as environment
from quarantune.values.configs import (
    MOST_CONFIGS,
    Config,
    MadeConfigs,
    checked_config,
    configs_made_by,
    format_config,
    text_of,
)
from quarantune.values.settings import Options
from quarantune.values.space import expand
from quarantune.values.texts import cache_name


def compile_check(
    fn: Callable[..., Any],
    configs: MadeConfigs,
    *args: Any,
    target: str | Target,
    num_workers: int | None = None,
    prune_fn: Callable[..., bool] | None = None,
    compile_timeout: float | None = None,
    memory_limit: int | str | None = None,
    again: bool = False,
    estimate: bool = False,
    **kwargs: Any,
) -> CompileReport:
    """Compiles every config of a jitted function for a device that need not be here, and runs none of them.

    Each config is compiled in a worker process of its own, as in a sweep, so that one that crashes, hangs or takes too
    much memory only ends its own trial. Compiling for a TPU needs the extra `tpu`, and for an NVIDIA GPU the extra
    `cuda-compile`; neither needs the device or its driver.

    Args:
        fn: the jitted function, autotuned or not. The options of an autotuned function apply.
        configs: as for `AutoTuner`.
        *args: the call's positional arguments, without the config; arrays or `jax.ShapeDtypeStruct`.
        target: the device: one of `targets()`, or its name, as `TPU v5e` or `h100`.
        num_workers: how many configs compile at a time; None follows the settings.
        prune_fn: `(config, *args, **kwargs) -> bool`; False drops the config.
        compile_timeout: seconds for loading, tracing, lowering and compiling one config; None for 120.
        memory_limit: host memory of one worker and its children, in bytes or as "8GB"; None for a fair share of the
            free memory.
        again: whether to compile configs, too, on which an earlier check has the verdict for the same code, device and
            versions.
        estimate: whether the compiler for TPUs is asked, too, how many cycles each config takes.
        **kwargs: the call's keyword arguments.

    Returns:
        The report, with one trial for each config.

    Raises:
        TypeError: `fn` is not jitted, or something of the call cannot be sent to a worker.
        ValueError: the target is not known, or no TPU and `estimate` is set, or the configs or an option are not valid.
        ImportError: the compiler for the target is not installed.

    Example:
        >>> report = compile_check(matmul, {"BM": [64, 128]}, a, b, target="TPU v5e")  # doctest: +SKIP
        >>> report.failures  # doctest: +SKIP
        {'error': 1}
    """
    base = dataclasses.replace(fn.options, name=fn.name) if isinstance(fn, Autotuned) else Options()
    options = dataclasses.replace(
        base,
        prune_fn=base.prune_fn if prune_fn is None else prune_fn,
        compile_timeout=base.compile_timeout if compile_timeout is None else compile_timeout,
        memory_limit=base.memory_limit if memory_limit is None else memory_limit,
    )
    # The machines of an engine need the compiler, and not this one.
    found = targets.usable(target) if environment.current().executor is None else targets.find(target)
    if estimate and found.platform != "tpu":
        raise ValueError(f"estimate=True asks the compiler for TPUs, and {found.name} is none: leave it out")
    found = dataclasses.replace(found, estimates=estimate)
    call = BoundCall(TunedFunction.of(fn, configs, options, compiled_by="compile_check"), args, kwargs)
    return compiling.check_all(call, found, num_workers=num_workers, again=again)


def compile_configs(
    fn: Callable[..., Any],
    configs: MadeConfigs,
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
    fn, signature, _ = describe_function(fn)
    label = cache_name(fn)
    given: Any = configs_made_by(configs, *as_structs(args, kwargs), fn_name=label) if callable(configs) else configs
    if isinstance(given, Mapping):
        given = expand(given, fn_name=label)
    elif isinstance(given, Iterable):
        given = list(itertools.islice(given, MOST_CONFIGS + 1))
    expanded = expand(given, fn_name=label, parameters=signature)
    listed = [checked_config(raw, fn_name=label, names=list(expanded[0]), parameters=signature) for raw in given]
    function = TunedFunction.of(fn, expanded, Options(), compiled_by="compile_configs")
    call = BoundCall(function, args, kwargs)
    found = None if target is None else targets.usable(target)
    compiled = compiling.compile_all(call, found, num_workers=num_workers)
    functions: dict[str, Callable[..., Any] | None] = {}
    for index, (config, trial) in enumerate(zip(expanded, compiled.trials, strict=True)):
        executable = compiled.executables.get(index)
        functions[text_of(config)] = _callable_of(fn, config, executable, args, kwargs)
        if not executable and trial.outcome.is_failure:
            ended = f"{format_config(config)} did not compile: {trial.outcome.value}: {trial.message}"
            warnings.warn(f"{label}: {ended}", stacklevel=2)
            functions[text_of(config)] = None
    return [functions[text_of(config)] for config in listed]


def _callable_of(
    fn: Any, config: Config, executable: bytes | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Callable[..., Any]:
    """Returns a callable that runs what a worker compiled; one that compiles again here where there is no such thing.

    A config may compile to an executable that cannot leave its worker.
    """
    if executable:
        with contextlib.suppress(ValueError):  # a config may have forged it
            return Winner(fn, config, from_data(executable), args=args, kwargs=kwargs)
    return binding.bind(fn, config)
