"""Compiles the configs of a function and runs none: to use the programs, or to see which compile for a device."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from quarantune.answers.layers import save
from quarantune.api.autotune import Autotuned
from quarantune.calls.call import BoundCall, TunedFunction
from quarantune.calls.key import keyed_to_tune
from quarantune.devices import targets
from quarantune.devices.targets import Target
from quarantune.engine.place import ThisMachine, place_of
from quarantune.functions.binding import Arguments, bind_config, describe_function, fitted
from quarantune.functions.description import as_structs
from quarantune.functions.names import cache_name
from quarantune.results.compiled_winner import Winner
from quarantune.results.progress import Progress
from quarantune.results.report import CompileReport
from quarantune.sweep.ledger import Ledger, Listener
from quarantune.sweep.limits import SweepLimits
from quarantune.sweep.request import SweepRequest, Swept
from quarantune.transport.executable import from_data
from quarantune.tuning.compile_verdicts import CompileVerdicts, note_check
from quarantune.tuning.job import check_outside
from quarantune.tuning.outcome import entry_for, findings_now
from quarantune.values import blocks
from quarantune.values.codec import text_of
from quarantune.values.configs import MOST_CONFIGS, Config, MadeConfigs, checked_config, configs_made_by, format_config
from quarantune.values.options import Options
from quarantune.values.space import expand
from quarantune.values.trial import ESTIMATED, Findings, Searched, Trial, pruned_trial


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

    A separate worker process compiles each config, as in a sweep: a config that crashes, hangs or takes too much memory
    ends its own trial only. Compiling for a TPU needs the extra `tpu`, and for an NVIDIA GPU the extra `cuda-compile`.
    Neither needs the device or its driver.

    Args:
        fn: the jitted function, autotuned or not. The options of an autotuned function apply.
        configs: a list of dicts, a dict of lists, or a callable that makes dicts from the call's arguments.
        *args: the call's positional arguments, without the config; arrays or `jax.ShapeDtypeStruct`.
        target: the device: one of `targets()`, or its name, such as `TPU v5e` or `h100`.
        num_workers: how many configs compile at a time; None follows the settings.
        prune_fn: `(config, *args, **kwargs) -> bool`; False drops the config.
        compile_timeout: seconds for loading, tracing, lowering and compiling one config; None for 120.
        memory_limit: host memory of one worker and its children, in bytes or as "8GB"; None for a fair share of the
            free memory.
        again: whether to compile again the configs whose verdict is known from an earlier check of the same code,
            device and versions.
        estimate: whether to ask the compiler for TPUs how many cycles each config takes.
        **kwargs: the call's keyword arguments.

    Returns:
        The report, with one trial for each config.

    Raises:
        TypeError: `fn` is not jitted, or a worker cannot receive a part of the call.
        ValueError: The target is unknown, `estimate` is set for another device than a TPU, or the configs or an option
            are not valid.
        ImportError: This Python lacks the compiler for the target.

    Example:
        >>> import jax, quarantune
        >>> @jax.jit(static_argnames=["width"])
        ... def fold(x, width: int):
        ...     return x.reshape(-1, width).sum(axis=0)
        >>> x = jax.ShapeDtypeStruct((1024,), "float32")
        >>> report = quarantune.compile_check(fold, {"width": [64, 100]}, x, target="cpu")
        >>> report.failures
        {'error': 1}
        >>> report.compiled
        ({'width': 64},)
    """
    base = dataclasses.replace(fn.options, name=fn.name) if isinstance(fn, Autotuned) else Options()
    options = dataclasses.replace(
        base,
        prune_fn=base.prune_fn if prune_fn is None else prune_fn,
        compile_timeout=base.compile_timeout if compile_timeout is None else compile_timeout,
        memory_limit=base.memory_limit if memory_limit is None else memory_limit,
    )
    # With an engine, its machines need the compiler, and this one does not.
    found = targets.usable(target) if blocks.current().executor is None else targets.find(target)
    if estimate and found.platform != "tpu":
        raise ValueError(f"estimate=True asks the compiler for TPUs, and {found.name} is not a TPU: leave it out")
    found = dataclasses.replace(found, estimates=estimate)
    call = BoundCall(TunedFunction.of(fn, configs, options, compiled_by="compile_check"), args, kwargs)
    trials, _, key, known = _compile_all(call, found, num_workers=num_workers, again=again)
    return CompileReport(name=call.name, target=found, trials=trials, key=key, known=known)


def compile_configs(
    fn: Callable[..., Any],
    configs: MadeConfigs,
    *args: Any,
    num_workers: int | None = None,
    target: str | Target | None = None,
    **kwargs: Any,
) -> list[Callable[..., Any] | None]:
    """Compiles many configs of a jitted function, each in a worker process.

    Workers answer with data. This process validates the data, and reading it runs no code. Only XLA can read the
    program: it loads and runs the machine code in this process on the first call of the callable, and not before.

    Args:
        fn: the jitted function, autotuned or not.
        configs: a list of dicts, a dict of lists, or a callable that makes dicts from the call's arguments.
        *args: the call's positional arguments, without the config; arrays or `jax.ShapeDtypeStruct`.
        num_workers: how many configs compile at a time; None follows the settings.
        target: the device to compile for, here or not; see `compile_check`. None for the device on which the call
            would run here.
        **kwargs: the call's keyword arguments.

    Returns:
        For each config, in order and with repeated ones, a callable that runs the program from its worker; None, with
        a warning, if compiling failed. With a target, a callable compiles again on the machine that calls it.

    Raises:
        TypeError: `fn` is not jitted, or a worker cannot receive a part of the call.
        ValueError: The configs, `num_workers` or the target are not valid.
        ImportError: This Python lacks the compiler for the target.
    """
    fn, signature, statics = describe_function(fn)
    label = cache_name(fn)
    given: Any = configs
    if callable(configs):
        taken = fitted(configs, signature, statics or (), *as_structs(args, kwargs))
        given = configs_made_by(configs, *taken, fn_name=label)
    if isinstance(given, Mapping):
        given = expand(given, fn_name=label)
    elif isinstance(given, Iterable):
        given = list(itertools.islice(given, MOST_CONFIGS + 1))
    expanded = expand(given, fn_name=label, parameters=signature)
    listed = [checked_config(raw, fn_name=label, names=list(expanded[0]), parameters=signature) for raw in given]
    function = TunedFunction.of(fn, expanded, Options(), compiled_by="compile_configs")
    call = BoundCall(function, args, kwargs)
    found = None if target is None else targets.usable(target)
    trials, executables, key, _ = _compile_all(call, found, num_workers=num_workers)
    functions: dict[str, Callable[..., Any] | None] = {}
    for index, (config, trial) in enumerate(zip(expanded, trials, strict=True)):
        executable = executables.get(index)
        functions[text_of(config)] = _callable_of(fn, config, executable, (args, kwargs), key)
        if not executable and trial.outcome.is_failure:
            ended = f"{format_config(config)} did not compile: {trial.outcome.value}: {trial.message}"
            warnings.warn(f"{label}: {ended}", stacklevel=2)
            functions[text_of(config)] = None
    return [functions[text_of(config)] for config in listed]


def save_estimated(call: BoundCall, report: CompileReport) -> Config | None:
    """Saves the config with a check's best estimate as the result of a call, until a measured result replaces it.

    Args:
        call: the call.
        report: the check.

    Returns:
        The config; None if none has an estimate.
    """
    best = report.ranked[0]
    if best.figures is None or best.figures.estimate is None:
        return None
    described = keyed_to_tune(call, report.target)
    searched = Searched(ESTIMATED, len(report.compiled), call.configs.size)
    findings = findings_now(call, Findings(), report.trials, searched)
    entry = entry_for(described, best.config, findings, {"name": ESTIMATED})
    entry |= {"time_ms": None, "estimated_ms": report.estimated_ms(best)}
    save(blocks.current(), described.id, entry)
    return best.config


def _compile_all(
    call: BoundCall, target: Target | None, *, num_workers: int | None, again: bool = False
) -> tuple[tuple[Trial, ...], Mapping[int, bytes], str, int]:
    """Compiles the configs of a call in workers; runs none, and remembers those that fail.

    Args:
        call: the call.
        target: the device, here or not; None for the device on which the call would run.
        num_workers: how many configs compile at a time; None follows the settings.
        again: whether to compile again the configs whose verdict for the target is known from an earlier job.

    Returns:
        The trials of all configs, in order; the executables that can leave their workers, by the indices of their
        configs, none for a target; the key of the call; and the number of verdicts from earlier jobs.
    """
    check_outside(call)
    described, settings = keyed_to_tune(call, target), blocks.current()
    limits = SweepLimits.of(call.function.options, settings, num_workers=num_workers)
    verdicts = CompileVerdicts(described, limits, settings.cache_dir, *settings.read_directories)
    pruned = {index: pruned_trial(call.configs[index]) for index in call.pruned}
    left = {index: call.configs[index] for index in call.configs.listed() if index not in pruned}
    known: dict[int, Trial] = {}
    if target is not None and not (again or settings.disable_cache):
        earlier = verdicts.known(with_compiled=True)
        found = ((index, earlier.get(text_of(config))) for index, config in left.items())
        known = {index: trial for index, trial in found if trial is not None and _is_answer(trial, target)}
    known = {index: dataclasses.replace(trial, config=left.pop(index)) for index, trial in known.items()}
    label = described.label if target is None else f"{described.label} for {target.name}"
    config_of = call.configs.__getitem__
    with Progress(label, len(left), shown=settings.progress, config_of=config_of, is_timed=False) as progress:

        def note(index: int, trial: Trial) -> None:
            if not settings.disable_cache:
                note_check(verdicts, dataclasses.replace(trial, ended_s=None))
            progress.step(trial)

        ledger = Ledger(Listener(on_trial=note, on_phase=progress.enter), trials=pruned | known)
        request = SweepRequest.of(described, settings, ledger)
        request = dataclasses.replace(request, limits=limits, target=target, compile_only=True)
        swept = Swept()
        if left:
            swept = (ThisMachine() if target is None else place_of(settings)).run(request, left)
            progress.conclude_compiling()
    ordered = tuple(dataclasses.replace(ledger.trials[index], ended_s=None) for index in range(len(call.configs)))
    return ordered, swept.executables, described.id.key, len(known)


def _is_answer(trial: Trial, target: Target) -> bool:
    """Returns whether a known trial answers all questions of a check for a target."""
    figures = trial.figures
    return not target.estimates or figures is None or bool(figures.estimate or figures.no_estimate)


def _callable_of(fn: Any, config: Config, executable: bytes | None, call: Arguments, key: str) -> Callable[..., Any]:
    """Returns a callable that runs a worker's program. If the program could not leave the worker, it compiles again."""
    if executable:
        with contextlib.suppress(ValueError):  # a config may have forged it
            return Winner(fn, config, from_data(executable), call, key)
    return bind_config(fn, config)
