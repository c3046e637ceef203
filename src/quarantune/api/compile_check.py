"""Finds out which configs of a function compile for a device, which need not be here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from quarantune.api.autotune import Autotuned
from quarantune.values import settings as environment
from quarantune.values.options import Options

if TYPE_CHECKING:
    from quarantune.devices.targets import Target
    from quarantune.results.compile_report import CompileReport


def compile_check(
    fn: Callable[..., Any],
    configs: Any,
    *args: Any,
    target: str | Target,
    num_workers: int | None = None,
    prune_fn: Callable[..., bool] | None = None,
    compile_timeout: float | None = None,
    memory_limit: int | str | None = None,
    again: bool = False,
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
        **kwargs: the call's keyword arguments.

    Returns:
        The report, with one trial for each config.

    Raises:
        TypeError: `fn` is not jitted, or something of the call cannot be sent to a worker.
        ValueError: the target is not known, or the configs or an option are not valid.
        ImportError: the compiler for the target is not installed.

    Example:
        >>> report = compile_check(matmul, {"BM": [64, 128]}, a, b, target="TPU v5e")  # doctest: +SKIP
        >>> report.failures  # doctest: +SKIP
        {'error': 1}
    """
    from quarantune.devices import targets
    from quarantune.resolve import compiling
    from quarantune.resolve.bound_call import BoundCall
    from quarantune.resolve.tuned_function import TunedFunction

    base = dataclasses.replace(fn.options, name=fn.name) if isinstance(fn, Autotuned) else Options()
    options = dataclasses.replace(
        base,
        prune_fn=base.prune_fn if prune_fn is None else prune_fn,
        compile_timeout=base.compile_timeout if compile_timeout is None else compile_timeout,
        memory_limit=base.memory_limit if memory_limit is None else memory_limit,
    )
    # The machines of an engine need the compiler, and not this one.
    found = targets.usable(target) if environment.current().executor is None else targets.find(target)
    call = BoundCall(TunedFunction.of(fn, configs, options, compiled_by="compile_check"), args, kwargs)
    return compiling.check_all(call, found, num_workers=num_workers, again=again)
