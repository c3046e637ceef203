"""One sweep: packs the call, opens the sandbox, and has configs take their routes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import os
import pickle
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from quarantune import jax_internals
from quarantune.cache.store import safe_name
from quarantune.calls import given_inputs
from quarantune.devices import discovery, targets
from quarantune.devices.discovery import LOGS_PTXAS, Device, cheap_context
from quarantune.host.process import Stops, warn
from quarantune.host.shared_files import Directory
from quarantune.sandbox import shortages, spawning, spool, template, wire
from quarantune.scheduler.plan import Finish, Mode, Proof
from quarantune.sweep.proof import comparison
from quarantune.sweep.request import Problem, SweepRequest, Swept
from quarantune.transport import payload, program_values
from quarantune.transport.payload import PackedCall
from quarantune.values import codec
from quarantune.values.codec import originals, text_of
from quarantune.values.configs import Config, format_config
from quarantune.values.settings import Isolation, Options, Settings
from quarantune.values.trial import UNTUNED, CompileTarget, Trial
from quarantune.worker.arguments import BenchOptions

if TYPE_CHECKING:
    from quarantune.sandbox.workforce import Workforce
    from quarantune.sweep.routes import Routes

_logger = logging.getLogger("quarantune")

_PALLAS = "jax.experimental.pallas"
_PALLAS_MODULES = {
    "cpu": [f"{_PALLAS}.{backend}" for backend in ("triton", "tpu", "mosaic_gpu")],
    "cuda": [f"{_PALLAS}.triton"],
    "rocm": [f"{_PALLAS}.triton"],
    "tpu": [f"{_PALLAS}.tpu"],
}
"""The modules that Pallas imports when it lowers its first kernel, interpreted or for a device: up to 0.25 s."""

_LARGEST_CONFIG_BYTES = wire.MAX_FRAME_BYTES // 8
"""Several configs fit into one message, as the one about finalists needs."""

_sweep_numbers = itertools.count(1)


def run(
    request: SweepRequest,
    configs: Mapping[int, Config],
    *,
    packed: PackedCall | None = None,
) -> Swept:
    """Runs every config to its outcome, then times the fastest once more, in alternation.

    Args:
        request: the call, and the conditions under which its configs run.
        configs: the configs by index, in the order to try them.
        packed: the call, where another machine has packed it; the function and the arguments of the request's problem
            do not count.

    Returns:
        The findings beside the trials.

    Raises:
        TypeError: a part of the call cannot be sent to another process; no process was started.
        ValueError: the settings name a device that does not exist.
        SandboxError: the sandbox itself failed.
    """
    problem, possible, is_alone = request.problem, request.possible(configs), request.mode is Mode.HERE
    if packed is None:
        packed = pack(problem, possible, request.options, is_sent=not is_alone)
    observers = _observers(request, packed, possible)
    _check(request, packed, possible)
    if is_alone:
        _warn_here(request)
        with _routes(request, packed, Proof(), [Device("", "")], observers=observers) as routes:
            return routes.run(dict(configs))
    # Tracing may have side effects. Only the defaults are traced in this process, unless the caller is about to run
    # every config anyway.
    only = (problem.default, UNTUNED) if request.runs and problem.untuned is not None else ()
    proof = Proof(request.on_program or comparison(request, packed.call), only)
    with shortages.with_advice(problem.name):
        # Started before the imports, because it takes longer to start than the modules of the routes take to import.
        shortages.patiently(template.shared)
        devices, target = _devices_and_target(request)
        with _routes(request, packed, proof, devices, target, observers=observers) as routes:
            swept = routes.run(dict(configs))
    return dataclasses.replace(swept, is_traced=not proof.is_due)


def _warn_here(request: SweepRequest) -> None:
    """Warns, once for each reason, that configs run in this process."""
    setting = request.settings.isolation
    reason = f"{setting}, and {request.problem.name} has no jax.jit that workers could compile for"
    if setting == Isolation.NONE.value:
        reason = f"{setting} (unset it to tune in worker processes)"
    _warn(f"QUARANTUNE_ISOLATION={reason}")


def _observers(request: SweepRequest, packed: PackedCall, possible: Sequence[Config]) -> list[str]:
    """Returns the observers whose figures the objective takes.

    Raises:
        ValueError: one of them cannot measure.
    """
    if not request.runs or request.options.is_by_time:
        return []
    from quarantune.measure import objective, observers  # few sweeps need them

    problem, devices = request.problem, max(packed.devices_needed, request.options.devices_per_trial)
    names = objective.needed_observers(request.options.objective, dict(possible[0]) if possible else {})
    jit = jax_internals.jit_options(problem.fn) if jax_internals.is_jitted(problem.fn) else None
    for observer in map(observers.named, names):
        reason = observer.why_not(problem.platform, problem.device_kind)
        if jit is None or jit.donate_argnums or jit.donate_argnames or devices > 1:
            reason = "that takes one device, and a jitted function that donates no arguments"
        if reason:
            what = observer.WHAT
            raise ValueError(f"{problem.name}: objective needs {what}, which cannot be measured: {reason}")
    return names


def _check(request: SweepRequest, packed: PackedCall, possible: Sequence[Config]) -> None:
    """Raises if the sweep cannot run as it is asked for."""
    problem, needed, per_trial = request.problem, packed.devices_needed, request.options.devices_per_trial
    names_devices = problem.platform != "cpu"
    match request.mode:
        case Mode.HERE:
            _check_here(problem, packed, request.settings)
            return
        case Mode.MEASURING_HERE:
            _check_here(problem, packed, request.settings)
            names_devices &= problem.platform != "tpu"
        case Mode.CHECKING:
            names_devices = False
            if needed > 1:
                raise ValueError(
                    f"{problem.name}: its arguments are laid out over {needed} devices, and a compile check is for "
                    f"one: give it the arguments of one device, as arrays or as jax.ShapeDtypeStruct"
                )
        case Mode.IN_WORKERS if problem.platform == "tpu" and jax_internals.backends_initialized():
            raise ValueError(
                f"{problem.name}: this process uses the TPU, so workers cannot measure on it: set "
                f"QUARANTUNE_ISOLATION=compile to measure in this process, or tune before JAX is used here"
            )
    if names_devices and needed > per_trial:
        why = "its arguments are laid out" if problem.manual_mesh is None else "in shard_map it communicates"
        raise ValueError(
            f"{problem.name}: {why} over {needed} devices, and devices_per_trial={per_trial}: set "
            f"devices_per_trial={needed}"
        )
    _check_sizes(problem, possible)


def _finisher(request: SweepRequest) -> Finish:
    """Returns a function that keeps the log of a trial, and enters the trial into the ledger."""
    settings, name, ledger = request.settings, request.problem.name, request.ledger
    sweep_number = next(_sweep_numbers)

    def finish(index: int, trial: Trial, log: str) -> None:
        if settings.log_dir is not None:
            _keep_log(settings.log_dir, name, f"{os.getpid()}-{sweep_number}-{index:04d}", trial, log)
        ledger.end(index, trial)

    return finish


def pack(
    problem: Problem,
    configs: Sequence[Config],
    options: Options,
    *,
    with_values: bool = True,
    is_sent: bool = True,
) -> PackedCall:
    """Packs a call, with the arguments to run with and the functions that judge outputs.

    Args:
        problem: the call.
        configs: configs with all values that the configs of the space have.
        options: the author's options.
        with_values: as for `payload.pack_call`.
        is_sent: as for `payload.pack_call`.
    """
    judges = {name: fn for name in ("ref_fn", "check_fn") if callable(fn := getattr(options, name))}
    args, kwargs = given_inputs.arguments(problem.fn, problem.args, problem.kwargs, options.supply)
    return payload.pack_call(
        problem.fn,
        args,
        kwargs,
        judges,
        originals(configs),
        problem.manual_mesh,
        devices=math.inf if problem.platform == "cpu" else options.devices_per_trial,
        with_values=with_values,
        program_values=program_values.collect([problem.fn, *judges.values()]) if is_sent else (),
        is_sent=is_sent,
    )


@contextlib.contextmanager
def _routes(
    request: SweepRequest,
    packed: PackedCall,
    proof: Proof,
    devices: Sequence[Device],
    target: CompileTarget | None = None,
    *,
    observers: Sequence[str],
) -> Iterator[Routes]:
    """Yields the routes of a sweep, which lead through workers, this process, or both."""
    from quarantune.sandbox.pool import Sandbox
    from quarantune.sweep.routes import Routes

    problem, settings = request.problem, request.settings
    is_spread = max(packed.devices_needed, request.options.devices_per_trial) > 1
    options = BenchOptions.of(problem.platform, request.options, observers=observers)
    stops = Stops(time.monotonic)
    with spawning.standard_descriptors(), contextlib.ExitStack() as stack:
        payload_fd, arrays_fd = stack.enter_context(_spooled(packed, options))
        own = (request, packed.call, devices[0], stops, options, arrays_fd)
        if request.mode is Mode.HERE:
            from quarantune.sweep.this_process import ThisProcess  # with all that a worker needs

            workforce: Workforce = stack.enter_context(contextlib.closing(ThisProcess(*own)))
        else:
            workforce = stack.enter_context(
                Sandbox(
                    payload_fd=payload_fd,
                    arrays_fd=arrays_fd,
                    method=settings.start_method or ("fork" if sys.platform == "linux" else "spawn"),
                    modules=_PALLAS_MODULES.get(problem.platform, []) if _PALLAS in sys.modules else [],
                    plugins=problem.platform != "cpu",
                    **_surroundings(request, target, is_spread=is_spread),
                )
            )
        if request.mode is Mode.MEASURING_HERE:
            from quarantune.sweep.this_process import MeasuringProcess

            workforce = stack.enter_context(contextlib.closing(MeasuringProcess(workforce, *own)))
        yield Routes(
            workforce,
            request,
            _finisher(request),
            proof,
            devices=devices,
            target=target,
            is_spread=is_spread,
            stops=stops,
        )


def _surroundings(request: SweepRequest, target: CompileTarget | None, *, is_spread: bool) -> Mapping[str, Any]:
    """Returns what a sandbox needs for the device that it compiles for or measures on, as its arguments."""
    problem = request.problem
    environ = discovery.sandbox_environ(problem.platform, problem.device_kind)
    if not is_spread:
        environ |= cheap_context(problem.platform, os.environ)
    if request.target is not None:
        return {"environ": environ | (LOGS_PTXAS if problem.platform == "cuda" else {})}
    can_warm_up = target is not None and target.platform != "tpu" and not is_spread
    return {
        "environ": environ,
        "directory": problem.platform in ("cuda", "rocm"),
        "warm_up": codec.encode(target) if target is not None and can_warm_up else None,
    }


def _devices_and_target(request: SweepRequest) -> tuple[list[Device], CompileTarget | None]:
    """Returns the devices to measure on, and the target of compile workers without one, which the cache remembers."""
    if request.target is not None:
        return [request.target.device], request.target.for_compiling
    devices, target = discovery.devices_and_target(
        request.problem.platform, request.settings, request.options.devices_per_trial
    )
    if request.problem.platform == "tpu":
        target = targets.of_tpu(devices[0].kind)
    targets.remember(target, request.settings)
    return devices, target


@functools.cache
def _warn(reason: str) -> None:
    warn(f"{reason}: configs run in this process, so that one that crashes or hangs takes it along", RuntimeWarning)


def _check_here(problem: Problem, packed: PackedCall, settings: Settings) -> None:
    """Raises if configs cannot be measured in this process.

    Raises:
        ValueError: the configs communicate, or run on devices of several processes, and only one of these tunes.
    """
    is_spread = any(own is not None and not own.is_fully_addressable for own in packed.call.own_shardings)
    needed = packed.devices_needed
    if is_spread or (needed > 1 and jax.process_count() > 1 and needed > jax.local_device_count()):
        raise ValueError(
            f"{problem.name}: with QUARANTUNE_ISOLATION={settings.isolation}, a call whose arrays lie on devices of "
            f"several processes cannot be tuned, because only one of these tunes: unset it to tune in workers"
        )
    if problem.manual_mesh is not None:
        raise ValueError(
            f"{problem.name}: inside shard_map, a function that communicates between devices is tuned by workers "
            f"only: unset QUARANTUNE_ISOLATION or set it to 'process', or give its tunables by hand"
        )


def _check_sizes(problem: Problem, configs: Sequence[Config]) -> None:
    """Raises if a config is too large for a message to a worker."""
    for config in configs:
        size_bytes = len(text_of(config))
        if size_bytes > _LARGEST_CONFIG_BYTES:
            largest = max(config, key=lambda name: len(text_of(config[name])))
            raise ValueError(
                f"{problem.name}: a config takes {size_bytes:,} bytes as JSON, most of them its {largest!r}, and "
                f"at most {_LARGEST_CONFIG_BYTES:,} can be sent to a worker: pass large data as an argument of the "
                f"call, and let the config hold a short name or a number for it"
            )


@contextlib.contextmanager
def _spooled(packed: PackedCall, options: BenchOptions) -> Iterator[tuple[int, int]]:
    """Yields read-only descriptors of the payload and of the arrays; -1 for what there is none of."""
    with contextlib.ExitStack() as stack:
        fds = []
        for label, size_bytes in (("payload", len(packed.blob)), ("arrays", packed.call.spool_bytes)):
            fds.append(spool.create(label, size_bytes=size_bytes) if size_bytes else -1)
            if size_bytes:
                stack.callback(os.close, fds[-1])
        if packed.blob:
            spool.write_parts(fds[0], [packed.blob, pickle.dumps(options)])
        if packed.call.spool_bytes:
            payload.write_arrays(packed, fds[1])
        for position, fd in enumerate(fds):
            if fd >= 0:
                fds[position] = spool.protect(fd)
                stack.callback(os.close, fds[position])
        yield fds[0], fds[1]


def _keep_log(directory: Path, name: str, label: str, trial: Trial, log: str) -> None:
    """Keeps the output of a trial; warns where it cannot be written."""
    text = f"# {format_config(trial.config)}\n# {trial.outcome.value}: {trial.message}\n{log}"
    try:
        with Directory(directory, safe_name(name), make=True) as place:
            place.replace(f"{label}.log", text.encode("utf-8", "backslashreplace"))
    except OSError as error:
        _logger.warning("cannot keep a trial's log in %s: %s", directory, error)
