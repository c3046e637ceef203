"""Sends the configs of one sweep along its routes, one route after another, and compares the fastest of all."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import os
import statistics
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from quarantune.devices.discovery import Device
from quarantune.devices.leases import Lease
from quarantune.host import machine
from quarantune.host.interruptions import Stops
from quarantune.jax_internals import jax_backends, jax_functions
from quarantune.measure import finals
from quarantune.measure.model import ENOUGH, PROCESSES
from quarantune.sandbox.pool import LoadError
from quarantune.sandbox.workforce import Workforce
from quarantune.scheduler.fastest import Fastest
from quarantune.scheduler.loop import Scheduler
from quarantune.scheduler.plan import (
    MEMORY_SHARE,
    NOTHING_MORE,
    ConfigSource,
    Finish,
    Leftovers,
    MemoryLimits,
    Plan,
    Proof,
    SharedMemoryLimits,
)
from quarantune.scheduler.reference import Reference
from quarantune.scheduler.routes import choosing
from quarantune.scheduler.routes.base import Conditions, TrialRoute
from quarantune.scheduler.screening import CheapTrials, Screening
from quarantune.scheduler.side_tasks import settle_errors
from quarantune.sweep.request import SweepRequest, Swept
from quarantune.values.amounts import parse_memory
from quarantune.values.configs import Config
from quarantune.values.errors import ReferenceFailedError
from quarantune.values.options import AUTO, BITWISE
from quarantune.values.trial import UNTUNED, CompileTarget, Outcome, Phase, Route, Trial

_logger = logging.getLogger("quarantune")

_FINAL_SHARE = 0.1
"""Share of a sweep's time that the rounds of its final may add if further processes repeat it."""
_LEAST_FINAL_S = 0.2
"""The same of a short sweep, in seconds."""
_REPEATED_SHARE = 0.15
"""Share of a sweep's time that the repetitions of its final may add."""
_START_S = 0.15
"""Seconds that a fresh worker takes to start and to load the finalists on an idle CPU."""
_LEAST_ROUNDS = ENOUGH + 2
"""Runs of each finalist in a repetition: for a check, to warm up, and for the least rounds."""

_unfit = weakref.WeakValueDictionary[tuple[Route, int], Callable[..., object]]()
"""Functions of earlier sweeps of this process, none of whose configs could take a route, by route and identity."""


class Routes:
    """The routes of one sweep."""

    def __init__(
        self,
        workforce: Workforce,
        request: SweepRequest,
        finish: Finish,
        proof: Proof,
        *,
        devices: Sequence[Device],
        target: CompileTarget | None,
        is_spread: bool,
        stops: Stops,
    ) -> None:
        """Sets up the routes without starting a worker.

        Args:
            workforce: starts workers; `run` opens it.
            request: the sweep.
            finish: receives the trials.
            proof: compares the program of one config with the caller's.
            devices: where to measure.
            target: the device that workers without one compile for; None if they cannot.
            is_spread: whether one trial needs several devices.
            stops: notices when this process is stopped.
        """
        self._began = time.monotonic()
        self._workforce = workforce
        self._stops = stops
        self._request = request
        self._problem = request.problem
        self._finish = finish
        self._proof = proof
        self._fastest = Fastest(by_time=request.options.is_by_time)
        self._latest: Scheduler | None = None
        self._opened: list[Scheduler] = []
        self._reference = Reference()
        self._schedulers = contextlib.ExitStack()
        self._lease_on: Callable[[Device], Lease] = functools.cache(
            functools.partial(Lease, thread=threading.get_ident())
        )
        self._devices = devices
        platform = request.problem.platform
        self._given = Conditions(
            platform=platform,
            mode=request.mode,
            is_jitted=jax_functions.is_jitted(request.problem.fn),
            is_spread=is_spread,
            # A TPU belongs to the process that uses it.
            is_taken=platform == "tpu" and self._holds_devices(),
            target=target,
            devices=len(devices),
            slots=request.limits.compile_slots,
            each=request.limits.configs_per_worker,
            ranks=request.options.fidelity == AUTO and request.options.is_by_time,
        )

    def run(self, configs: dict[int, Config]) -> Swept:
        """Runs configs to their outcomes, and compares the fastest of all in the ledger."""
        if not self._load(configs):
            return Swept()
        with self._schedulers:
            self._reference, configs = self._reference_for(configs, self._request.ledger.trials)
            self._reference.is_exact = self._request.options.numerics == BITWISE
            self._schedulers.callback(self._reference.close)
            needs_ref_fn = callable(self._request.options.ref_fn) and not self._request.outputs
            self._reference.is_coming = needs_ref_fn and bool(configs)
            finish, self._finish = self._finish, self._reference.hold(self._finish, self._request.ledger.untuned)
            try:
                self._run_routes(configs)
                while further := dict(self._request.source.rest()):
                    self._run_routes(further)
            except ReferenceFailedError as error:
                raise ReferenceFailedError(f"{self._problem.name}: {error}") from None
            self._reference.judge_held(finish)
            if self._request.outputs == []:
                self._request.outputs.extend(map(os.dup, self._reference.right_fds))
            trials, default = self._request.ledger.trials, self._problem.default
            contenders = self._reference.contenders(trials, default) if self._request.has_final else {}
            final = self._final(contenders) if len(contenders) > 1 else finals.Final()
            executables, for_cache = self._fastest.executables()
            if len(contenders) > 1 and not final.rounds_ms and jax_functions.is_jitted(self._problem.fn):
                executables, for_cache = {}, {}  # no worker could load them, and XLA may end a process that tries
            reference = self._reference
            return Swept(final, for_cache, executables, reference.untuned, reference.complaint(), reference.noise)

    def _final(self, contenders: Mapping[int, Config]) -> finals.Final:
        """Compares the fastest configs, unless an earlier sweep has compared their programs."""
        untuned = self._reference.untuned
        known = {**self._request.ledger.trials, **({} if untuned is None else {UNTUNED: untuned})}
        recalled = self._request.recall.final({index: known[index] for index in contenders})
        if recalled.rounds_ms and self._request.options.is_by_time:  # no record has the scores of a final's rounds
            return recalled
        last = self._opened[-1] if self._opened else self._new_scheduler([*self._with_device(1, NOTHING_MORE)][-1])
        # The last route may have run nothing but the config that confirms an error.
        comparing = next((scheduler for scheduler in self._opened if scheduler.has_idle_worker), last)
        budget_s = None
        if self._most_processes({known[index].clock or "wall" for index in contenders}) > 1:
            budget_s = max(_LEAST_FINAL_S, _FINAL_SHARE * (time.monotonic() - self._began))
        return self._repeated(comparing.compare(contenders, budget_s), contenders, known, comparing)

    def _repeated(
        self,
        final: finals.Final,
        contenders: Mapping[int, Config],
        known: Mapping[int, Trial],
        comparing: Scheduler,
    ) -> finals.Final:
        """Repeats a final in fresh processes while the time allows: processes differ by more than rounds scatter."""
        lasting = {index: contenders[index] for index in final.lasting}
        most = self._most_processes({known[index].clock or "wall" for index in lasting})
        round_s = sum(statistics.median(final.rounds_ms[index]) for index in lasting) / 1e3
        now = time.monotonic()
        ends_at = now + _REPEATED_SHARE * (now - self._began)
        while len(lasting) > 1 and len(final.counts) < most and now + _START_S + _LEAST_ROUNDS * round_s < ends_at:
            further = comparing.compare_again(lasting, ends_at)
            if not further.rounds_ms:
                break
            final, now = final.joined(further), time.monotonic()
        return final

    def _most_processes(self, clocks: Collection[str]) -> int:
        """Returns how many processes the final may have with these clocks."""
        return max((PROCESSES[clock] for clock in clocks), default=1) if self._request.options.is_by_time else 1

    def _load(self, configs: dict[int, Config]) -> bool:
        """Opens the sandbox and returns whether the function has loaded. If not, every config has failed."""
        try:
            self._workforce.open(load_timeout_s=self._request.limits.compile_timeout_s)
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
        left = Leftovers(unfit=self._ordered(configs))
        apart = choosing.without_device(self._given, self._unfit(), is_closed=source.is_closed)
        if apart is not None:
            left = self._run_route(apart, left.unfit, source)
        if unranked := self._run_ranked(left.unfit, source):
            self._run_with_device(unranked, source)
        settle_errors(left, self._finish, self._run_with_device, source)

    def _run_ranked(self, configs: dict[int, Config], source: ConfigSource) -> dict[int, Config]:
        """Ranks configs by a cheap compile, and runs those that may win.

        Returns:
            The configs that have yet to run. If a config had no rank, these are all configs, including those that the
            source has added.
        """
        if not configs:
            return configs
        route = choosing.cheaply(self._given, self._unfit(), count=len(configs), is_closed=source.is_closed)
        if route is None:
            return configs
        cheap = CheapTrials(configs, self._finish, self._request.ledger.enter)
        ranking = self._plan(route).ranking()
        left = self._scheduler(ranking, route, cheap.end, Reference(), Fastest(), source).run(configs)
        configs = cheap.configs | left.unfit
        if left.unfit:
            return configs
        default = self._problem.default if self._problem.default in configs else UNTUNED
        reference = cheap.trials[default].program if default in cheap.trials else None
        recall = self._request.recall
        full_ms = {index: recall.time_ms(trial.program, reference) for index, trial in cheap.trials.items()}
        screening = Screening(
            configs,
            {index: trial.time_ms for index, trial in cheap.trials.items() if trial.time_ms is not None},
            defaults=default,
            known_ms={index: ms for index, ms in full_ms.items() if ms is not None},
            best_ms=self._fastest.best_median_ms or math.inf,
            source=source,
        )
        finish, self._finish = self._finish, cheap.finish_fully
        self._run_with_device(screening.take(len(configs)), screening)
        self._finish = finish
        cheap.rule_out(screening)
        if screening.why_it_did_not_pay:
            _logger.info("%s: %s", self._problem.name, screening.why_it_did_not_pay)
        return {}

    def _run_with_device(self, configs: dict[int, Config], source: ConfigSource) -> Leftovers:
        raised_at: dict[int, str] = {}
        left = Leftovers(unfit=configs)
        for route in self._with_device(len(configs), source):
            left = self._run_route(route, left.unfit, source)
            raised_at |= left.raised_at
            if not left.unfit:
                break
        self._on_unfit(left.unfit)
        left.raised_at = raised_at
        return left

    def _on_unfit(self, configs: Mapping[int, Config]) -> None:
        """Takes note of configs that no route could take; if configs run, the last route takes them all."""

    def _with_device(self, count: int, source: ConfigSource) -> Iterator[TrialRoute]:
        return choosing.with_device(self._given, self._unfit(), count=count, is_closed=source.is_closed)

    def _unfit(self) -> list[Route]:
        return [label for label in Route if _unfit.get((label, id(self._problem.fn))) is self._problem.fn]

    def _run_route(
        self, route: TrialRoute, configs: dict[int, Config], source: ConfigSource = NOTHING_MORE
    ) -> Leftovers:
        left = self._new_scheduler(route, source).run(configs)
        if left.unfit:
            name = self._problem.name
            _logger.info("%s: the programs take another route than %s, because %s", name, route.label, left.why_unfit)
            if left.none_fits:
                with contextlib.suppress(TypeError):  # some callables allow no weak reference
                    _unfit[route.label, id(self._problem.fn)] = self._problem.fn
        return left

    def _new_scheduler(self, route: TrialRoute, source: ConfigSource = NOTHING_MORE) -> Scheduler:
        plan = self._plan(route)
        scheduler = self._scheduler(plan, route, self._finish, self._reference, self._fastest, source)
        self._opened.append(scheduler)
        return scheduler

    def _scheduler(
        self,
        plan: Plan,
        route: TrialRoute,
        finish: Finish,
        reference: Reference,
        fastest: Fastest,
        source: ConfigSource,
    ) -> Scheduler:
        """Returns a scheduler, which takes over the workers that the latest scheduler has prepared."""
        ledger, latest = self._request.ledger, self._latest
        if latest is not None:
            latest.free_devices()
        self._latest = scheduler = Scheduler(
            self._workforce,
            plan,
            route,
            on_trial=finish,
            on_tick=ledger.tick,
            on_phase=ledger.enter,
            reference=reference,
            fastest=fastest,
            source=source,
            lease_on=self._lease_on,
            stops=self._stops,
        )
        if latest is not None:
            scheduler.take_standby_workers(latest)
        self._schedulers.callback(scheduler.close)
        self._schedulers.callback(scheduler.free_devices)
        return scheduler

    def _plan(self, route: TrialRoute) -> Plan:
        """Returns the plan of a scheduler."""
        limits, request = self._request.limits, self._request
        compile_timeout_s, timeout_s = self._deadlines()
        share_bytes = int(MEMORY_SHARE * machine.available_memory_bytes() / max(1, route.numbers.workers))
        most = request.options.max_device_memory
        device_bytes = None if most is None else parse_memory(most, least=1)
        return Plan(
            devices=tuple(self._devices),
            compile_timeout_s=compile_timeout_s,
            timeout_s=timeout_s,
            memory=SharedMemoryLimits(worker_bytes=share_bytes, device_bytes=device_bytes)
            if limits.memory_limit_bytes is None
            else MemoryLimits(worker_bytes=limits.memory_limit_bytes, device_bytes=device_bytes),
            has_final=request.has_final,
            troubled=request.troubled,
            proof=self._proof,
            objective=request.options.objective,
            recall=request.recall,
            # Configs with one program may have different programs for half of the batch.
            runs_all=request.options.check_batch is not None,
        )

    def _reference_for(
        self, configs: dict[int, Config], known: Mapping[int, Trial]
    ) -> tuple[Reference, dict[int, Config]]:
        """Returns the reference for outputs, and the configs including the function's defaults.

        The defaults run if the sweep compares outputs with theirs, and always for the final, which shows their time.

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
            return Reference(compares=compares and jax_functions.is_jitted(problem.fn)), configs
        make = functools.partial(Reference, compares=compares, calibrates=calibrates)
        if default in configs:
            return make(default=default, is_first=default not in self._request.troubled), configs
        has_final = self._request.has_final and bool(configs or finals.finalists(known))
        if not (compares or calibrates) and (default in known or not has_final):
            return Reference(), configs
        return make(default=UNTUNED), {UNTUNED: problem.untuned, **configs}

    def _ordered(self, configs: dict[int, Config]) -> dict[int, Config]:
        """Orders configs; those that hung or crashed before come last."""
        return _from_both_ends(configs, self._request.troubled)

    def _holds_devices(self) -> bool:
        """Returns whether this process holds its devices."""
        return jax_backends.backends_initialized()

    def _deadlines(self) -> tuple[float, float]:
        """Returns the seconds for compiling a config, and for checking and measuring one."""
        return self._request.limits.compile_timeout_s, self._request.limits.timeout_s


class RoutesHere(Routes):
    """The routes of a sweep that measures in this process; its configs keep their order."""

    def _holds_devices(self) -> bool:
        return True

    def _most_processes(self, clocks: Collection[str]) -> int:
        return 1  # there is no other

    def _ordered(self, configs: dict[int, Config]) -> dict[int, Config]:
        troubled = self._request.troubled
        return {index: configs[index] for index in sorted(configs, key=lambda index: index in troubled)}


class RoutesAllHere(RoutesHere):
    """The same if this process also compiles: without workers, deadlines could end nothing."""

    def _deadlines(self) -> tuple[float, float]:
        return math.inf, math.inf


class CompilingRoutes(Routes):
    """The routes of a sweep that only compiles its configs."""

    def run(self, configs: dict[int, Config]) -> Swept:
        """Compiles configs without running them, and returns their executables, but none in a check.

        If no worker can compile a program, its config counts as compiled, but has no executable.
        """
        if not self._load(configs):
            return Swept()
        with self._schedulers:
            self._run_routes(configs)
            # With `time_grad`, these programs include the gradient, and the caller's does not.
            return Swept(executables={} if self._request.options.time_grad else self._fastest.executables()[0])

    def _on_unfit(self, configs: Mapping[int, Config]) -> None:
        for index, config in configs.items():
            self._finish(index, Trial(config=config, outcome=Outcome.OK, phase=Phase.COMPILE), "")


def _from_both_ends(configs: Mapping[int, Config], last: Collection[int]) -> dict[int, Config]:
    """Orders configs so that the longest compilation does not begin last, and a fast config runs soon.

    Neither is often in the middle of a list, because a grid grows towards one of its ends.

    Args:
        configs: the configs by index.
        last: the indices of configs that come last in any case.
    """
    sound = [index for index in configs if index not in last]
    half = len(sound) // 2
    pairs = itertools.zip_longest(reversed(sound[half:]), sound[:half])
    ordered = [index for pair in pairs for index in pair if index is not None]
    return {index: configs[index] for index in [*ordered, *(index for index in configs if index in last)]}
