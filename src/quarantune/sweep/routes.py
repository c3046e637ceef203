"""The routes of configs through one sweep: a compile worker and a measuring worker each, or one worker for both."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence

import jax

from quarantune import jax_internals
from quarantune.devices.device import Device
from quarantune.devices.leases import Lease
from quarantune.host import machine
from quarantune.measure import finals
from quarantune.sandbox import pool
from quarantune.sandbox.messages import BenchOptions
from quarantune.sandbox.template_link import LoadError
from quarantune.sandbox.template_messages import LoadFailed
from quarantune.scheduler.confirmation import settle
from quarantune.scheduler.jobs import SamePrograms
from quarantune.scheduler.loop import Scheduler
from quarantune.scheduler.plan import MEMORY_SHARE, NOTHING_MORE, ConfigSource, Leftovers, Plan, only_stopping
from quarantune.scheduler.race import Race
from quarantune.scheduler.reference import Reference
from quarantune.scheduler.side_tasks import NoReferenceError
from quarantune.sweep.request import Finish, SweepRequest
from quarantune.sweep.swept import Swept
from quarantune.values.compiling import CompileTarget
from quarantune.values.options import Options
from quarantune.values.trial import UNTUNED, Config, Outcome, Phase, ReferenceFailedError, Route, Trial

_logger = logging.getLogger("quarantune")

_CPU_PARKED = 16
"""How many compiled configs wait on a CPU, memory permitting, before compiling stops and they are measured: among many,
slow configs are recognised sooner."""
_SEARCH_PARKED = 8
"""The same where a search decides what is tried: in replays of five recorded GPU spaces, it needed 11 to 65% more
trials in batches of 16 than in batches of 8."""
_CPU_SHARES = 4
"""The least number of configs among which the memory is divided."""
_DEVICE_PARKED = 4
"""How many compiled configs wait for each accelerator, where every one of them holds a context."""
_CONFIGS_PER_ACCELERATOR_WORKER = 32
_CONFIGS_PER_TPU_WORKER = 1000
"""No worker can be made ready while another one owns the TPU, which takes seconds to initialise."""
_COMPILES_PER_WORKER = 32
"""How many configs one compile worker takes for an accelerator. The first takes 0.3 s more than others: on an H200, 648
configs of which 59% fail take a second less than with 8 for each worker, which grows by less than 1 MB per config."""


_need_their_device: weakref.WeakSet[Callable[..., object]] = weakref.WeakSet()
"""Functions of which an earlier sweep of this process could compile no config without its device."""


class Routes:
    """The routes of one sweep.

    Attributes:
        programs: the programs of the configs that were only compiled.
    """

    def __init__(
        self,
        sandbox: pool.Sandbox,
        request: SweepRequest,
        finish: Finish,
        *,
        devices: Sequence[Device],
        target: CompileTarget | None,
        on_many_devices: bool,
        measures: bool,
    ) -> None:
        """Sets up the routes; no worker is started.

        Args:
            sandbox: the sandbox that workers run in.
            request: the sweep.
            finish: receives the trials.
            devices: where to measure.
            target: the device that workers without one compile for; None where they cannot.
            on_many_devices: whether one trial needs several devices.
            measures: whether workers measure; if not, they only compile.
        """
        self._sandbox = sandbox
        self._request = request
        self._problem = request.problem
        self._options = request.options
        self._limits = request.limits
        self._events = request.events
        self._troubled = request.troubled
        self._compile_only = not measures
        self._source = request.source
        self._finish = finish
        self.programs = SamePrograms()
        self._ran_as: dict[int, int] = {}
        self._race = Race()
        self._made: list[Scheduler] = []
        self._reference = Reference()
        self._schedulers = contextlib.ExitStack()
        self._lease_on = functools.cache(functools.partial(Lease, thread=threading.get_ident()))
        self._on_many_devices = on_many_devices
        self._on_cpu = request.problem.platform == "cpu"
        self._on_tpu = request.problem.platform == "tpu"
        # A TPU belongs to the process that uses it.
        self._device_is_taken = self._on_tpu and jax_internals.backends_initialized()
        # libtpu compiles alike with its device and without it: there, errors need no confirmation.
        self._confirmed: set[str] = set()
        self._is_check = request.target is not None
        self._devices, self._target = devices, target

    def run(self, configs: dict[int, Config], measured: Mapping[int, Trial]) -> Swept:
        """Runs configs to their outcomes, and compares the fastest in `measured`, to which their trials are added."""
        if not self.load(configs):
            return Swept()
        with contextlib.closing(self._race), contextlib.ExitStack() as self._schedulers:
            self._reference, configs = reference_for(self._request, configs, measured)
            self._schedulers.callback(self._reference.close)
            self._reference.is_coming = callable(self._options.ref_fn) and bool(configs)
            finish, self._finish = self._finish, self._reference.hold(self._finish, self._events.untuned)
            try:
                self._run_routes(configs)
            except NoReferenceError as error:
                raise ReferenceFailedError(f"{self._problem.name}: {error}") from None
            self._reference.settle(finish)
            contenders = self._reference.contenders(measured, self._problem.default) if self._request.has_final else {}
            last = self._made[-1] if self._made else self._new_scheduler(Route.TOGETHER, self._finish)
            # The last route may have run nothing but the config that confirms an error.
            comparing = next((scheduler for scheduler in self._made if scheduler.has_idle_worker), last)
            final = comparing.compare(contenders) if len(contenders) > 1 else finals.Final()
            executables, for_cache = last.compiled()
            reference = self._reference
            return Swept(final, for_cache, executables, reference.untuned, reference.complaint(), reference.noise)

    def compile(self, configs: dict[int, Config]) -> Swept:
        """Compiles configs without running them, and returns their executables."""
        if not self.load(configs):
            return Swept()
        executables = self.compile_batch(configs, self._finish)
        # The caller runs a program without the gradient that it was compiled with.
        return Swept(executables={} if self._options.time_grad else executables)

    def compile_batch(
        self, configs: dict[int, Config], finish: Finish, *, again: bool = False, source: ConfigSource = NOTHING_MORE
    ) -> dict[int, bytes]:
        """Compiles some configs of a loaded function without running them.

        Args:
            configs: the configs by index.
            finish: receives the trials. Where no worker can compile a program, its trial is that of a config that was
                compiled, and it has no executable.
            again: whether configs are compiled that were before, so that no other one may stand for them.
            source: says when to stop; gives no configs and receives no trials.

        Returns:
            Executables as data, by the indices of the configs that have one.
        """
        programs, self.programs = self.programs, SamePrograms() if again else self.programs
        executables: dict[int, bytes] = {}

        def compile_on(route: Route, configs: dict[int, Config], finish: Finish, source: ConfigSource) -> Leftovers:
            scheduler = self._new_scheduler(route, finish, only_stopping(source))
            leftovers = scheduler.run(configs)
            executables.update(scheduler.compiled()[0])
            return leftovers

        with contextlib.ExitStack() as self._schedulers:
            left = configs
            if (self._on_cpu and not self._on_many_devices) or self._can_part():
                leftovers = compile_on(Route.APART, configs, finish, source)
                left = {index: configs[index] for index in leftovers.unfit}
                self._confirm(leftovers, finish, functools.partial(compile_on, Route.TOGETHER), source)
            if left and self._device_is_taken:
                for index, config in left.items():
                    finish(index, Trial(config=config, outcome=Outcome.OK, phase=Phase.COMPILE), "")
            elif left:
                compile_on(Route.TOGETHER, left, finish, source)
        self.programs = programs
        return executables

    def check(self, configs: dict[int, Config]) -> None:
        """Compiles configs for a device that need not be here, and reports how each ends."""
        if self.load(configs):
            with contextlib.ExitStack() as self._schedulers:
                self._run_route(Route.APART, _from_both_ends(configs, self._troubled), self._finish)

    def load(self, configs: dict[int, Config]) -> bool:
        """Opens the sandbox; returns whether the function could be loaded. If not, every config has failed."""
        try:
            self._sandbox.open(load_timeout_s=self._limits.compile_timeout_s)
        except LoadError as error:
            self._fail_all(configs, error.report)
            return False
        return True

    def _run_routes(self, configs: dict[int, Config]) -> None:
        if not configs:
            return
        ordered = _from_both_ends(configs, self._troubled)
        if not self._can_part():
            self._run_route(Route.TOGETHER, ordered, self._finish, self._source)
            return
        leftovers = self._run_route(Route.APART, ordered, self._finish, self._source)
        if leftovers.unfit:
            reason = next(iter(leftovers.unfit.values()))
            _logger.info("%s: compiling on the device, because %s", self._problem.name, reason)
            if leftovers.none_fits:
                with contextlib.suppress(TypeError):  # not every callable can be referred to
                    _need_their_device.add(self._problem.fn)
            self._run_route(Route.TOGETHER, leftovers.unfit_configs, self._finish, self._source)

        self._confirm(leftovers, self._finish, functools.partial(self._run_route, Route.TOGETHER), self._source)

    @property
    def devices(self) -> Sequence[Device]:
        """The devices to measure on."""
        return self._devices

    def _can_part(self) -> bool:
        """Returns whether one worker compiles a config and another measures it."""
        if self._on_many_devices:
            return False  # a worker without a device compiles for a single device
        if self._problem.fn in _need_their_device:
            return False
        if self._on_cpu:
            # A CPU worker is cheap: handing an executable to another one saves no time.
            return self._configs_per_worker() > 1 and jax_internals.is_jitted(self._problem.fn)
        return self._target is not None and jax_internals.is_jitted(self._problem.fn)

    def _confirm(
        self,
        left: Leftovers,
        finish: Finish,
        run: Callable[[dict[int, Config], Finish, ConfigSource], Leftovers],
        source: ConfigSource,
    ) -> None:
        """Settles the configs that failed where there was no device; `run` runs some of them with the device."""
        self._confirmed |= left.first_at.keys() if self._on_tpu else left.confirmed
        settle(left, self._confirmed, finish, run, source)

    def _run_route(
        self, route: Route, configs: dict[int, Config], finish: Finish, source: ConfigSource = NOTHING_MORE
    ) -> Leftovers:
        return self._new_scheduler(route, finish, source).run(configs)

    def _new_scheduler(self, route: Route, finish: Finish, source: ConfigSource = NOTHING_MORE) -> Scheduler:
        exclusive = (self._on_cpu or route is Route.TOGETHER) and not self._compile_only
        # Where workers with the device compile, and only one at a time may have it, they do all one after another.
        slots = 1 if self._on_tpu and route is Route.TOGETHER else self._limits.compile_slots
        cpu_parked = _CPU_PARKED if source.is_closed else _SEARCH_PARKED
        parked = max(cpu_parked, 2 * slots) if self._on_cpu else len(self._devices) * min(_DEVICE_PARKED, slots)
        if not exclusive:
            workers = slots + len(self._devices)
        else:
            workers = max(_CPU_SHARES, 2 * slots) if self._on_cpu else parked
        limit_bytes = self._limits.memory_limit_bytes
        plan = Plan(
            route=route,
            options=worker_options(self._problem.platform, self._options),
            target=self._target if route is Route.APART else None,
            slots=slots,
            devices=tuple(self._devices),
            configs_per_worker=self._configs_per_worker(),
            compiles_per_worker=self._compiles_per_worker(route),
            exclusive=exclusive,
            parked=parked,
            # Loading the function may crash a worker, and only the trial of a config can report that.
            ahead=route is Route.TOGETHER and self._on_cpu and self._sandbox.forks_loaded and not self._compile_only,
            compile_timeout_s=self._limits.compile_timeout_s,
            timeout_s=self._limits.timeout_s,
            memory_limit_bytes=limit_bytes or int(MEMORY_SHARE * machine.available_memory_bytes() / max(1, workers)),
            may_exceed_alone=limit_bytes is None,
            compile_only=self._compile_only,
            is_check=self._is_check,
            errors_stand=self._on_tpu,
            proof=self._request.proof,
        )
        if self._made:
            self._made[-1].free_devices()
        scheduler = Scheduler(
            self._sandbox,
            plan,
            on_trial=finish,
            on_tick=self._events.on_tick,
            on_phase=self._events.on_phase,
            reference=self._reference,
            programs=self.programs if self._compile_only else SamePrograms(self._ran_as),
            race=None if self._compile_only else self._race,
            source=source,
            lease_on=self._lease_on,
        )
        self._made.append(scheduler)
        self._schedulers.callback(self._made.remove, scheduler)
        self._schedulers.callback(scheduler.close)
        self._schedulers.callback(scheduler.free_devices)
        return scheduler

    def _compiles_per_worker(self, route: Route) -> int:
        if route is Route.TOGETHER:
            # What a plain callable does to its process, no other config may meet.
            return (
                1 if self._compile_only or not jax_internals.is_jitted(self._problem.fn) else self._configs_per_worker()
            )
        # libtpu may take tens of seconds for what does not fit into a TPU. A deadline missed in a used worker must be
        # waited for twice, and in a check, which measures nothing, that is more than used workers save.
        is_fresh = self._on_cpu or (self._on_tpu and self._is_check)
        return 1 if is_fresh else min(_COMPILES_PER_WORKER, self._configs_per_worker())

    def _configs_per_worker(self) -> int:
        if self._limits.configs_per_worker is not None:
            return self._limits.configs_per_worker
        if self._on_tpu:
            return _CONFIGS_PER_TPU_WORKER
        return 1 if self._on_cpu else _CONFIGS_PER_ACCELERATOR_WORKER

    def _fail_all(self, configs: dict[int, Config], report: LoadFailed) -> None:
        """Ends every config, because the function itself cannot be loaded."""
        text = f"{report.error}: {report.text}" if report.error else report.text
        log = "\n".join(part for part in (report.traceback, report.log) if part)
        for index, config in configs.items():
            trial = Trial(
                config=config,
                outcome=report.outcome,
                phase=Phase.LOAD,
                message=text,
                log_tail=log,
            )
            self._finish(index, trial, log)


def reference_for(
    request: SweepRequest, configs: Mapping[int, Config], known: Mapping[int, Trial]
) -> tuple[Reference, dict[int, Config]]:
    """Returns the reference for outputs, and the configs including the function's defaults.

    The defaults run where outputs are compared with theirs, and in any case for the final, which shows their time.

    Args:
        request: the sweep.
        configs: the first configs to run, by index.
        known: the trials of an earlier sweep by index.
    """
    problem, options, configs = request.problem, request.options, dict(configs)
    compares, calibrates, default = options.compares_outputs, options.calibrates, problem.default
    if problem.untuned is None:
        # The output of a plain callable may well differ between configs.
        return Reference(compares=bool(compares and configs and jax_internals.is_jitted(problem.fn))), configs
    make = functools.partial(Reference, compares=compares and bool(configs), calibrates=calibrates and bool(configs))
    if default in configs:
        return make(default=default, is_first=default not in request.troubled), configs
    has_final = request.has_final and bool(configs or finals.finalists(known))
    if not (configs and (compares or calibrates)) and (default in known or not has_final):
        return Reference(), configs
    return make(default=UNTUNED), {UNTUNED: problem.untuned, **configs}


def _from_both_ends(configs: Mapping[int, Config], last: Collection[int]) -> dict[int, Config]:
    """Orders configs so that the longest compilation does not begin last, and a fast config runs soon.

    Neither is often in the middle of a list, because a grid grows towards one of its ends.

    Args:
        configs: the configs by index.
        last: the indices of configs that come last all the same.
    """
    sound = [index for index in configs if index not in last]
    half = len(sound) // 2
    pairs = itertools.zip_longest(reversed(sound[half:]), sound[:half])
    ordered = [index for pair in pairs for index in pair if index is not None]
    return {index: configs[index] for index in [*ordered, *(index for index in configs if index in last)]}


def worker_options(platform: str | None, options: Options) -> BenchOptions:
    """Returns the author's options that a worker needs.

    Args:
        platform: the platform that configs run on; None for the one of this process.
        options: the author's options.
    """
    return BenchOptions(
        platform=platform,
        warmup=options.warmup,
        rep=options.rep,
        supply="auto" if callable(options.supply) else options.supply,
        tolerance=options.tolerance,
        check_grad=options.check_grad or options.time_grad,
        time_grad=options.time_grad,
        # On a GPU, XLA itself would write to the directory, and a killed worker would leave torn files.
        compilation_cache=jax.config.values["jax_compilation_cache_dir"] if platform == "cpu" else None,
    )
