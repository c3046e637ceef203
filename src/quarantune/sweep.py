"""One sweep: packs the call, opens the sandbox, and chooses the routes its configs take."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from quarantune import _jax_internals, devices, discovery, finals, host, in_process, payload, report, supply
from quarantune.cache.keys import safe_name
from quarantune.environment import Settings, parse_memory
from quarantune.options import Options
from quarantune.outcomes import Config, Outcome, Phase, ReferenceFailedError, Route, Trial
from quarantune.sandbox import pool, spool
from quarantune.scheduler import ErrandError, Leftovers, Plan, Scheduler

_logger = logging.getLogger("quarantune")

_CPU_PARKED = 16
"""On a CPU, how many compiled configs wait, memory allowing, before the machine is kept quiet to measure them: the more
there are, the sooner those that are far behind are known."""
_CPU_SHARES = 4
"""Among how many configs, at least, the memory is divided."""
_DEVICE_PARKED = 4
"""The same on an accelerator, for each device: every one of them holds a context there."""
_CONFIGS_PER_ACCELERATOR_WORKER = 32
_MEMORY_SHARE = 0.9
_PALLAS = "jax.experimental.pallas"
_PALLAS_MODULES = {
    "cpu": [f"{_PALLAS}.{backend}" for backend in ("triton", "tpu", "mosaic_gpu")],
    "cuda": [f"{_PALLAS}.triton"],
    "rocm": [f"{_PALLAS}.triton"],
}
"""What Pallas imports when it lowers its first kernel, interpreted or for a device: up to 0.25 s."""

_sweep_numbers = itertools.count(1)

Finish = Callable[[int, Trial, str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """A call to tune for.

    Attributes:
        fn: the function inside, jitted or not.
        name: what to call it.
        args: the call's positional arguments; arrays may be concrete, tracers or `jax.ShapeDtypeStruct`.
        kwargs: its keyword arguments, likewise.
        platform: where it is to run: `cpu`, `cuda`, `rocm` or `tpu`.
        device_kind: the kind of device there, as the cache calls it.
    """

    fn: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    platform: str
    device_kind: str


@dataclasses.dataclass(frozen=True)
class Swept:
    """What a sweep found out beside its trials.

    Attributes:
        final: what the finalists showed.
        compiled: what of some configs JAX's compilation cache can hold, by key, by the configs' indices.
        executables: some configs' executables as `winner.Winner` loads them, by index.
    """

    final: finals.Final
    compiled: dict[int, dict[str, bytes]] = dataclasses.field(default_factory=dict)
    executables: dict[int, bytes] = dataclasses.field(default_factory=dict)


def run(
    problem: Problem,
    configs: Mapping[int, Config],
    *,
    options: Options,
    settings: Settings,
    on_trial: Callable[[int, Trial], None],
    on_tick: Callable[[], None],
    troubled: Collection[int] = (),
    known: Mapping[int, Trial] | None = None,
    on_phase: Callable[[int, str], None] = lambda index, phase: None,
    compile_only: bool = False,
) -> Swept:
    """Runs every config to its outcome, then compares the fastest once more, in turn.

    Args:
        problem: the call.
        configs: the configs by index, in the order to try them.
        options: the author's.
        settings: the operator's, which beat the author's.
        on_trial: called with each config's index and trial as it ends.
        on_tick: called many times a second while the sweep lives.
        troubled: indices of configs that hung or crashed before, and get shorter deadlines.
        known: trials of an earlier sweep, by index, which are not run again but may be finalists.
        on_phase: told of the phases that configs enter, by their indices, and of their `end`.
        compile_only: whether configs are only compiled, and their executables returned.

    Returns:
        What the comparison gave.

    Raises:
        TypeError: something of the call cannot be sent to another process; nothing was started then.
        ValueError: the settings name a device that is not there.
        SandboxError: the machinery around the configs failed.
    """
    sweep_number = next(_sweep_numbers)

    def finish(index: int, trial: Trial, log: str) -> None:
        if settings.log_dir is not None:
            _keep_log(settings.log_dir, problem.name, f"{os.getpid()}-{sweep_number}-{index:04d}", trial, log)
        measured[index] = trial
        on_trial(index, trial)
        on_phase(index, "end")

    measured = dict(known or {})
    judges = {"ref_fn": options.ref_fn, "check_fn": options.check_fn}
    args, kwargs = supply.arguments(problem.args, problem.kwargs, options.supply)
    packed = payload.pack_call(problem.fn, args, kwargs, {name: fn for name, fn in judges.items() if fn is not None})
    with _spooled(packed) as (payload_fd, arrays_fd):
        if settings.isolation == "none":
            worker_options = _worker_options(None, options)
            in_process.run(packed.call, configs, arrays_fd=arrays_fd, options=worker_options, finish=finish)
            return Swept(in_process.compare(packed.call, measured, arrays_fd=arrays_fd, options=worker_options))
        if problem.platform == "tpu":
            raise ValueError(
                "a TPU belongs to the process that uses it, so workers cannot measure on it: "
                "set QUARANTUNE_ISOLATION=none to tune in this process"
            )
        if problem.platform != "cpu" and packed.devices_needed > options.devices_per_trial:
            raise ValueError(
                f"{problem.name}: its arguments are laid out over {packed.devices_needed} devices, and "
                f"devices_per_trial={options.devices_per_trial}: set devices_per_trial={packed.devices_needed}"
            )
        method = settings.start_method or ("fork" if sys.platform == "linux" else "spawn")
        many = max(packed.devices_needed, options.devices_per_trial) > 1
        environ = discovery.telling(problem.platform, problem.device_kind)
        modules = _PALLAS_MODULES.get(problem.platform, []) if _PALLAS in sys.modules else []
        if not many:
            environ |= devices.cheap_context(problem.platform, os.environ)
        with pool.Sandbox(
            payload_fd=payload_fd,
            arrays_fd=arrays_fd,
            method=method,
            environ=environ,
            modules=modules,
            plugins=problem.platform != "cpu",
        ) as sandbox:
            sweep = _Sweep(sandbox, problem, options, settings, finish, on_tick, on_phase, troubled, many)
            return sweep.compile(dict(configs)) if compile_only else sweep.run(dict(configs), measured)


class _Sweep:
    """The routes of one sweep."""

    def __init__(
        self,
        sandbox: pool.Sandbox,
        problem: Problem,
        options: Options,
        settings: Settings,
        finish: Finish,
        on_tick: Callable[[], None],
        on_phase: Callable[[int, str], None],
        troubled: Collection[int],
        on_many_devices: bool,
    ) -> None:
        self._sandbox = sandbox
        self._problem = problem
        self._options = options
        self._settings = settings
        self._finish = finish
        self._on_tick = on_tick
        self._on_phase = on_phase
        self._compile_only = False
        self._scheduler: Scheduler | None = None
        self._expected_fd = -1
        self._schedulers = contextlib.ExitStack()
        self._troubled = troubled
        self._on_many_devices = on_many_devices
        self._on_cpu = problem.platform == "cpu"
        self._compile_timeout_s = settings.compile_timeout or float(options.compile_timeout)
        self._devices, self._target = discovery.devices_and_target(
            problem.platform, settings, options.devices_per_trial
        )
        self._slots = host.compile_slots(
            utilization=settings.cpu_utilization,
            count=settings.cpu_count,
            max_count=settings.max_cpu_count,
        )

    def run(self, configs: dict[int, Config], measured: Mapping[int, Trial]) -> Swept:
        try:
            self._sandbox.open(load_timeout_s=self._compile_timeout_s)
        except pool.LoadError as error:
            self._fail_all(configs, error.report)
            return Swept(finals.Final())
        with contextlib.ExitStack() as self._schedulers:
            self._refer(configs)
            self._run_routes(configs)
            contenders = {index: measured[index].config for index in finals.finalists(measured)}
            scheduler = self._scheduler or self._new_scheduler(Route.TOGETHER, self._finish)
            final = scheduler.compare(contenders) if len(contenders) > 1 else finals.Final()
            executables, for_cache = scheduler.compiled()
            return Swept(final, for_cache, executables)

    def compile(self, configs: dict[int, Config]) -> Swept:
        self._compile_only = True
        executables: dict[int, bytes] = {}
        try:
            self._sandbox.open(load_timeout_s=self._compile_timeout_s)
        except pool.LoadError as error:
            self._fail_all(configs, error.report)
            return Swept(finals.Final())
        with contextlib.ExitStack() as self._schedulers:
            left = configs
            if (self._on_cpu and not self._on_many_devices) or self._can_part():
                leftovers = self._run_route(configs, Route.APART, self._finish)
                assert self._scheduler is not None
                executables |= self._scheduler.compiled()[0]
                again = leftovers.unfit.keys() | leftovers.unconfirmed.keys()
                left = {index: configs[index] for index in configs if index in again}
            if left:
                self._run_route(left, Route.TOGETHER, self._finish)
                executables |= self._scheduler.compiled()[0] if self._scheduler is not None else {}
        return Swept(finals.Final(), executables=executables)

    def _refer(self, configs: dict[int, Config]) -> None:
        """Computes the reference, once, in a worker like any other."""
        if self._options.ref_fn is None or not configs:
            return
        self._expected_fd = spool.create("expected")
        self._schedulers.callback(os.close, self._expected_fd)
        try:
            self._new_scheduler(Route.TOGETHER, self._finish).refer(self._expected_fd)
        except ErrandError as error:
            raise ReferenceFailedError(
                f"{self._problem.name}: ref_fn failed, so no config can be judged: {error}"
            ) from None

    def _run_routes(self, configs: dict[int, Config]) -> None:
        if not configs:
            return
        if not self._can_part():
            self._run_route(configs, Route.TOGETHER, self._finish)
            return
        leftovers = self._run_route(_from_both_ends(configs, self._troubled), Route.APART, self._finish)
        if leftovers.unfit:
            reason = next(iter(leftovers.unfit.values()))
            _logger.info("%s: compiling on the device, because %s", self._problem.name, reason)
            self._run_route({index: configs[index] for index in leftovers.unfit}, Route.TOGETHER, self._finish)
        if leftovers.unconfirmed:
            self._confirm(configs, leftovers.unconfirmed)

    def _can_part(self) -> bool:
        """Whether compiling and measuring are to be done by different workers."""
        if self._on_many_devices:
            return False  # what compiles without the device compiles for one
        if self._on_cpu:
            # A CPU worker is cheap, and carrying an executable from one to another is not quicker.
            return self._configs_per_worker() > 1 and _jax_internals.is_jitted(self._problem.fn)
        # A function whose module asked JAX for its devices as it was imported may depend on the answer.
        return self._target is not None and self._sandbox.forks_loaded and _jax_internals.is_jitted(self._problem.fn)

    def _confirm(self, configs: dict[int, Config], unconfirmed: dict[int, tuple[Trial, str]]) -> None:
        """Repeats the first error raised without the device on the device; if it stands there, so do the others."""
        first, *others = unconfirmed
        repeated: list[Trial] = []

        def finish_first(index: int, trial: Trial, log: str) -> None:
            repeated.append(trial)
            self._finish(index, trial, log)

        self._run_route({first: configs[first]}, Route.TOGETHER, finish_first)
        if repeated[0].outcome is Outcome.ERROR:
            for index in others:
                self._finish(index, *unconfirmed[index])
        elif others:
            self._run_route({index: configs[index] for index in others}, Route.TOGETHER, self._finish)

    def _run_route(self, configs: dict[int, Config], route: Route, finish: Finish) -> Leftovers:
        return self._new_scheduler(route, finish).run(configs)

    def _new_scheduler(self, route: Route, finish: Finish) -> Scheduler:
        exclusive = (self._on_cpu or route is Route.TOGETHER) and not self._compile_only
        parked = (
            max(_CPU_PARKED, 2 * self._slots) if self._on_cpu else len(self._devices) * min(_DEVICE_PARKED, self._slots)
        )
        if not exclusive:
            workers = self._slots + len(self._devices)
        else:
            workers = max(_CPU_SHARES, 2 * self._slots) if self._on_cpu else parked
        plan = Plan(
            route=route,
            options=_worker_options(self._problem.platform, self._options),
            target=self._target if route is Route.APART else None,
            slots=self._slots,
            devices=tuple(self._devices),
            configs_per_worker=self._configs_per_worker(),
            exclusive=exclusive,
            parked=parked,
            # A worker that has to load the function first may be brought down by that, which is for a config to tell.
            ahead=route is Route.TOGETHER and self._on_cpu and self._sandbox.forks_loaded and not self._compile_only,
            compile_timeout_s=self._compile_timeout_s,
            timeout_s=self._settings.timeout or float(self._options.timeout),
            memory_limit_bytes=self._memory_limit(workers),
            compile_only=self._compile_only,
            troubled=frozenset(self._troubled),
        )
        self._scheduler = Scheduler(
            self._sandbox,
            plan,
            on_trial=finish,
            on_tick=self._on_tick,
            on_phase=self._on_phase,
            expected_fd=self._expected_fd,
        )
        self._schedulers.callback(self._scheduler.close)
        return self._scheduler

    def _memory_limit(self, workers: int) -> int:
        if self._settings.memory_limit is not None:
            return self._settings.memory_limit
        if self._options.memory_limit is not None:
            return parse_memory(self._options.memory_limit)
        return int(_MEMORY_SHARE * host.available_memory_bytes() / max(1, workers))

    def _configs_per_worker(self) -> int:
        if self._settings.configs_per_worker is not None:
            return self._settings.configs_per_worker
        return 1 if self._on_cpu else _CONFIGS_PER_ACCELERATOR_WORKER

    def _fail_all(self, configs: dict[int, Config], report: dict[str, Any]) -> None:
        """The function itself cannot be loaded, which is every config's end."""
        text = f"{report['error']}: {report['message']}" if report["error"] else report["message"]
        log = "\n".join(part for part in (report["traceback"], report.get("log", "")) if part)
        for index, config in configs.items():
            trial = Trial(
                config=config,
                outcome=Outcome(report.get("outcome", "error")),
                phase=Phase.LOAD,
                message=text,
                log_tail=log,
            )
            self._finish(index, trial, log)


def _from_both_ends(configs: Mapping[int, Config], last: Collection[int]) -> dict[int, Config]:
    """Orders configs that compile many at a time: what takes longest must not begin last, to be waited for alone.

    That is seldom in the middle of a list: a grid grows towards one of its ends.

    Args:
        configs: the configs by index.
        last: the indices of those that come last all the same.
    """
    sound = [index for index in configs if index not in last]
    half = len(sound) // 2
    pairs = itertools.zip_longest(reversed(sound[half:]), sound[:half])
    ordered = [index for pair in pairs for index in pair if index is not None]
    return {index: configs[index] for index in [*ordered, *(index for index in configs if index in last)]}


def _worker_options(platform: str | None, options: Options) -> dict[str, Any]:
    return {
        "platform": platform,
        "warmup": options.warmup,
        "rep": options.rep,
        "supply": "auto" if callable(options.supply) else options.supply,
        "tolerance": {
            "rtol": options.rtol,
            "atol": options.atol,
            "max_mismatched_ratio": options.max_mismatched_ratio,
        },
        "check_grad": options.check_grad,
        # On a GPU, XLA itself would write there, and a killed worker would leave torn files.
        "compilation_cache": jax.config.values["jax_compilation_cache_dir"] if platform == "cpu" else None,
    }


@contextlib.contextmanager
def _spooled(packed: payload.PackedCall) -> Iterator[tuple[int, int]]:
    """Yields descriptors of the payload and of the arrays, which no worker can write to; -1 for no arrays."""
    with contextlib.ExitStack() as stack:
        fds = []
        for label, size_bytes in (("payload", len(packed.blob)), ("arrays", packed.spool_bytes)):
            fds.append(spool.create(label, size_bytes=size_bytes) if size_bytes else -1)
            if size_bytes:
                stack.callback(os.close, fds[-1])
        spool.write(fds[0], packed.blob)
        if packed.spool_bytes:
            payload.write_arrays(packed, fds[1])
        for position, fd in enumerate(fds):
            if fd >= 0:
                fds[position] = spool.protect(fd)
                stack.callback(os.close, fds[position])
        yield fds[0], fds[1]


def _keep_log(directory: Path, name: str, label: str, trial: Trial, log: str) -> None:
    """Keeps what a trial printed; a log that cannot be kept is no reason to lose the trial."""
    text = f"# {report.format_config(trial.config)}\n# {trial.outcome.value}: {trial.message}\n{log}"
    try:
        folder = directory / safe_name(name)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{label}.log"
        file.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        _logger.warning("cannot keep a trial's log in %s: %s", directory, error)
