"""The routes of configs through one sweep: a compile worker and a measuring worker each, or one worker for both."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import os
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence

from quarantune import jax_internals
from quarantune.devices.discovery import Device
from quarantune.devices.leases import Lease
from quarantune.host import machine
from quarantune.host.process import Stops
from quarantune.measure import finals
from quarantune.sandbox import pool
from quarantune.sandbox.pool import LoadError
from quarantune.scheduler.loop import Scheduler
from quarantune.scheduler.plan import MEMORY_SHARE, NOTHING_MORE, ConfigSource, Finish, Leftovers, Plan, Proof
from quarantune.scheduler.race import Race
from quarantune.scheduler.reference import Reference
from quarantune.scheduler.side_tasks import settle
from quarantune.sweep.limits import Isolation
from quarantune.sweep.request import SweepRequest, Swept
from quarantune.values.configs import Config
from quarantune.values.trial import READY, UNTUNED, CompileTarget, Outcome, Phase, ReferenceFailedError, Route, Trial

_logger = logging.getLogger("quarantune")

_CPU_PARKED = 16
"""How many compiled configs wait on a CPU, memory permitting, before compiling stops and they are measured: among many,
slow configs are recognised sooner."""
_SEARCH_PARKED = 8
"""The same where a search decides what is tried: in replays of five recorded GPU spaces, it needed 11 to 65% more
trials in batches of 16 than in batches of 8."""
_CPU_SHARES = 4
"""The least number of configs among which the memory is divided."""
_DEVICE_PARKED = 6
"""How many workers compile on each accelerator, and how many compiled configs wait in workers that hold a context."""
_CONFIGS_PER_ACCELERATOR_WORKER = 32
_CONFIGS_PER_TPU_WORKER = 1000
"""No worker can be made ready while another one owns the TPU, which takes seconds to initialise."""
_BATCH = 64
"""How many configs are compiled before this process measures them: a sweep that is interrupted loses the work on no
more."""
_COMPILES_PER_WORKER = 32
"""How many configs one compile worker takes for an accelerator. The first takes 0.3 s more than others: on an H200, 648
configs, 59% of them bad, take a second less than with 8 for each worker, which grows by less than 1 MB per config."""


_unfit = weakref.WeakValueDictionary[tuple[Route, int], Callable[..., object]]()
"""The functions whose configs could all not take a route in an earlier sweep of this process, by route and identity."""


class Routes:
    """The routes of one sweep."""

    def __init__(
        self,
        sandbox: pool.Sandbox,
        request: SweepRequest,
        finish: Finish,
        proof: Proof,
        *,
        devices: Sequence[Device],
        target: CompileTarget | None,
        on_many_devices: bool,
        stops: Stops,
    ) -> None:
        """Sets up the routes; no worker is started.

        Args:
            sandbox: the sandbox that workers run in.
            request: the sweep.
            finish: receives the trials.
            proof: compares the program of one config with the caller's.
            devices: where to measure.
            target: the device that workers without one compile for; None if they cannot.
            on_many_devices: whether one trial needs several devices.
            stops: notices when this process is stopped.
        """
        self._sandbox = sandbox
        self._stops = stops
        self._request = request
        self._problem = request.problem
        self._limits = request.limits
        self._is_alone = request.isolation is Isolation.NONE
        self._measures_here = request.isolation is Isolation.COMPILE
        self._compile_only = request.compile_only and not self._is_alone
        self._finish = finish
        self._proof = proof
        self._race = Race(by_time=request.options.is_by_time)
        self._opened: list[Scheduler] = []
        self._reference = Reference()
        self._schedulers = contextlib.ExitStack()
        self._lease_on: Callable[[Device], Lease] = functools.cache(
            functools.partial(Lease, thread=threading.get_ident())
        )
        self._on_many_devices = on_many_devices
        self._on_cpu = request.problem.platform == "cpu"
        self._on_tpu = request.problem.platform == "tpu"
        # A TPU belongs to the process that uses it.
        self._device_is_taken = self._on_tpu and (self._measures_here or jax_internals.backends_initialized())
        self._devices, self._target = devices, target

    def run(self, configs: dict[int, Config]) -> Swept:
        """Runs configs to their outcomes, and compares the fastest of all in the ledger."""
        if not self._load(configs):
            return Swept()
        with self._schedulers:
            self._reference, configs = self._reference_for(configs, self._request.ledger.trials)
            self._schedulers.callback(self._reference.close)
            needs_ref_fn = callable(self._request.options.ref_fn) and not self._request.outputs
            self._reference.is_coming = needs_ref_fn and bool(configs)
            finish, self._finish = self._finish, self._reference.hold(self._finish, self._request.ledger.untuned)
            try:
                self._run_routes(configs)
            except ReferenceFailedError as error:
                raise ReferenceFailedError(f"{self._problem.name}: {error}") from None
            self._reference.settle(finish)
            if self._request.outputs == []:
                self._request.outputs.extend(map(os.dup, self._reference.right_fds))
            trials, default = self._request.ledger.trials, self._problem.default
            contenders = self._reference.contenders(trials, default) if self._request.has_final else {}
            final = self._final(contenders) if len(contenders) > 1 else finals.Final()
            executables, for_cache = self._race.executables()
            if len(contenders) > 1 and not final.rounds_ms and jax_internals.is_jitted(self._problem.fn):
                executables, for_cache = {}, {}  # no worker could load them, and XLA may end a process that tries
            reference = self._reference
            return Swept(final, for_cache, executables, reference.untuned, reference.complaint(), reference.noise)

    def _final(self, contenders: Mapping[int, Config]) -> finals.Final:
        """Compares the fastest configs, unless an earlier sweep has compared their programs."""
        untuned = self._reference.untuned
        known = {**self._request.ledger.trials, **({} if untuned is None else {UNTUNED: untuned})}
        if (final := self._request.recall.final({index: known[index] for index in contenders})).rounds_ms:
            return final
        last = self._opened[-1] if self._opened else self._new_scheduler(self._route_with_device)
        # The last route may have run nothing but the config that confirms an error.
        comparing = next((scheduler for scheduler in self._opened if scheduler.has_idle_worker), last)
        return comparing.compare(contenders)

    def compile(self, configs: dict[int, Config]) -> Swept:
        """Compiles configs without running them, and returns their executables, but none in a check.

        Where no worker can compile a program, its trial is that of a config that was compiled, without an executable.
        """
        if self._load(configs):
            with self._schedulers:
                if self._request.target is None:
                    self._run_routes(configs)
                else:
                    self._run_route(Route.APART, self._ordered(configs))
        # The caller runs a program without the gradient that it was compiled with.
        return Swept(executables={} if self._request.options.time_grad else self._race.executables()[0])

    def _load(self, configs: dict[int, Config]) -> bool:
        """Opens the sandbox; returns whether the function could be loaded. If not, every config has failed."""
        try:
            self._sandbox.open(load_timeout_s=self._limits.compile_timeout_s)
        except LoadError as error:
            log = "\n".join(part for part in (error.description.traceback, error.log) if part)
            message = error.description.message
            for index, config in configs.items():
                trial = Trial(config=config, outcome=error.outcome, phase=Phase.LOAD, message=message, log_tail=log)
                self._finish(index, trial, log)
            return False
        return True

    def _run_routes(self, configs: dict[int, Config]) -> None:
        source = self._request.source
        if not configs:
            return
        ordered = self._ordered(configs)
        if not self._can_part():
            self._run_with_device(ordered, source)
            return
        left = self._run_route(Route.APART, ordered, source)
        if left.unfit:
            self._run_with_device(left.unfit, source)
        settle(left, self._finish, self._run_with_device, source)

    def _can_part(self) -> bool:
        """Returns whether one worker compiles a config and another process measures it."""
        if self._on_many_devices or self._is_alone:
            return False  # a worker without a device compiles for a single device
        if self._on_cpu and (self._compile_only or self._measures_here):
            return True
        if self._is_unfit(Route.APART):
            return False
        if self._on_cpu:
            # A CPU worker is cheap: handing an executable to another one saves no time.
            return self._configs_per_worker() > 1 and jax_internals.is_jitted(self._problem.fn)
        return self._target is not None and jax_internals.is_jitted(self._problem.fn)

    def _is_unfit(self, route: Route) -> bool:
        return _unfit.get((route, id(self._problem.fn))) is self._problem.fn

    def _can_hand_over(self, configs: Mapping[int, Config], source: ConfigSource) -> bool:
        """Returns whether workers with the device compile several configs each, and another one measures them."""
        at_once = len(configs) > 1 or not source.is_closed
        is_whole = self._measures_here or self._is_alone or self._compile_only or self._on_many_devices
        if is_whole or self._on_cpu or self._on_tpu or not at_once or self._is_unfit(Route.HANDED_OVER):
            return False
        return self._configs_per_worker() > 1 and jax_internals.is_jitted(self._problem.fn)

    @property
    def _route_with_device(self) -> Route:
        """The route of configs that must be compiled with their device."""
        is_here = self._is_alone or (self._measures_here and self._device_is_taken)
        return Route.IN_PROCESS if is_here else Route.TOGETHER

    def _run_with_device(self, configs: dict[int, Config], source: ConfigSource) -> Leftovers:
        if not (self._compile_only and self._device_is_taken):
            raised_at = {}
            if self._can_hand_over(configs, source):
                left = self._run_route(Route.HANDED_OVER, configs, source)
                if not left.unfit:
                    return left
                configs, raised_at = left.unfit, left.raised_at
            left = self._run_route(self._route_with_device, configs, source)
            left.raised_at = raised_at | left.raised_at
            return left
        for index, config in configs.items():
            self._finish(index, Trial(config=config, outcome=Outcome.OK, phase=Phase.COMPILE), "")
        return Leftovers()

    def _run_route(self, route: Route, configs: dict[int, Config], source: ConfigSource = NOTHING_MORE) -> Leftovers:
        left = self._new_scheduler(route, source).run(configs)
        if left.unfit:
            name = self._problem.name
            _logger.info("%s: the programs take another route than %s, because %s", name, route, left.why_unfit)
            if left.none_fits:
                with contextlib.suppress(TypeError):  # not every callable can be referred to
                    _unfit[route, id(self._problem.fn)] = self._problem.fn
        return left

    def _new_scheduler(self, route: Route, source: ConfigSource = NOTHING_MORE) -> Scheduler:
        if self._opened:
            self._opened[-1].free_devices()
        here, ledger = route is Route.IN_PROCESS, self._request.ledger
        scheduler = Scheduler(
            self._sandbox,
            self._plan(route, is_closed=source.is_closed),
            on_trial=self._finish,
            on_tick=ledger.tick,
            # Nothing waits where configs are compiled one by one.
            on_phase=lambda index, phase: None if here and phase == READY else ledger.enter(index, phase),
            reference=self._reference,
            race=self._race,
            source=source,
            lease_on=self._lease_on,
            stops=self._stops,
        )
        if self._opened:
            scheduler.take_standby_workers(self._opened[-1])
        self._opened.append(scheduler)
        self._schedulers.callback(scheduler.close)
        self._schedulers.callback(scheduler.free_devices)
        return scheduler

    def _plan(self, route: Route, *, is_closed: bool) -> Plan:
        """Returns the plan of a scheduler; `is_closed` says that no search decides what is tried."""
        limits, with_device = self._limits, route is not Route.APART
        measures_here = self._measures_here and route is not Route.IN_PROCESS
        exclusive = (self._on_cpu or with_device or self._measures_here) and not self._compile_only
        # Where workers with the device compile, and only one at a time may have it, they do all one after another.
        slots = 1 if route is Route.IN_PROCESS or (self._on_tpu and with_device) else limits.compile_slots
        in_files = measures_here or route is Route.HANDED_OVER
        if route is Route.HANDED_OVER:
            slots = min(slots, len(self._devices) * _DEVICE_PARKED)
        if route is Route.IN_PROCESS:
            parked = 1
        elif in_files:
            parked = _BATCH if is_closed else max(_SEARCH_PARKED, slots)
        elif self._on_cpu:
            parked = max(_CPU_PARKED if is_closed else _SEARCH_PARKED, 2 * slots)
        else:
            parked = len(self._devices) * min(_DEVICE_PARKED, slots)
        if not exclusive or in_files:
            workers = slots + len(self._devices)
        else:
            workers = max(_CPU_SHARES, 2 * slots) if self._on_cpu else parked
        memory_bytes = limits.memory_limit_bytes
        return Plan(
            route=route,
            target=None if with_device else self._target,
            slots=slots,
            devices=tuple(self._devices),
            configs_per_worker=1 if measures_here else self._configs_per_worker(),
            compiles_per_worker=self._compiles_per_worker(route),
            exclusive=exclusive,
            parked=parked,
            # There is no deadline where no worker could be ended.
            compile_timeout_s=math.inf if self._is_alone else limits.compile_timeout_s,
            timeout_s=math.inf if self._is_alone else limits.timeout_s,
            memory_limit_bytes=memory_bytes or int(MEMORY_SHARE * machine.available_memory_bytes() / max(1, workers)),
            device_memory_bytes=self._request.options.device_memory_bytes,
            may_exceed_alone=memory_bytes is None,
            compile_only=self._compile_only,
            is_check=self._request.target is not None,
            measures_here=measures_here,
            has_final=self._request.has_final,
            troubled=self._request.troubled,
            # libtpu compiles alike with its device and without it.
            errors_are_final=self._on_tpu or self._request.target is not None,
            proof=self._proof,
            complete=self._request.complete,
            recall=self._request.recall,
        )

    def _compiles_per_worker(self, route: Route) -> int:
        if route is not Route.APART:
            # What a plain callable does to its process, no other config may meet.
            is_reused = route in (Route.TOGETHER, Route.HANDED_OVER) and not (self._compile_only or self._measures_here)
            return self._configs_per_worker() if is_reused and jax_internals.is_jitted(self._problem.fn) else 1
        # libtpu may take tens of seconds for what does not fit into a TPU. A deadline missed in a used worker must be
        # waited for twice, and in a check, which measures nothing, that is more than used workers save.
        is_fresh = self._on_cpu or (self._on_tpu and self._request.target is not None)
        return 1 if is_fresh else min(_COMPILES_PER_WORKER, self._configs_per_worker())

    def _configs_per_worker(self) -> int:
        if self._limits.configs_per_worker is not None:
            return self._limits.configs_per_worker
        if self._on_tpu:
            return _CONFIGS_PER_TPU_WORKER
        return 1 if self._on_cpu else _CONFIGS_PER_ACCELERATOR_WORKER

    def _reference_for(
        self, configs: dict[int, Config], known: Mapping[int, Trial]
    ) -> tuple[Reference, dict[int, Config]]:
        """Returns the reference for outputs, and the configs including the function's defaults.

        The defaults run where outputs are compared with theirs, and in any case for the final, which shows their time.

        Args:
            configs: the first configs to run, by index.
            known: the trials of an earlier sweep by index.
        """
        problem, options, default = self._problem, self._request.options, self._problem.default
        compares, calibrates = options.compares_outputs and bool(configs), options.calibrates and bool(configs)
        if self._request.outputs:
            reference = Reference(compares=compares, default=default if default in configs else None)
            for fd in self._request.outputs:
                reference.give(fd)
            return reference, configs
        if problem.untuned is None:
            # The output of a plain callable may well differ between configs.
            return Reference(compares=compares and jax_internals.is_jitted(problem.fn)), configs
        make = functools.partial(Reference, compares=compares, calibrates=calibrates)
        if default in configs:
            return make(default=default, is_first=default not in self._request.troubled), configs
        has_final = self._request.has_final and bool(configs or finals.finalists(known))
        if not (compares or calibrates) and (default in known or not has_final):
            return Reference(), configs
        return make(default=UNTUNED), {UNTUNED: problem.untuned, **configs}

    def _ordered(self, configs: dict[int, Config]) -> dict[int, Config]:
        """Orders configs, those that were in trouble before last; in this process, the others keep their order."""
        troubled = self._request.troubled
        if self._is_alone or self._measures_here:
            return {index: configs[index] for index in sorted(configs, key=lambda index: index in troubled)}
        return _from_both_ends(configs, troubled)


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
