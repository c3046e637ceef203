"""Sweeps whose configs are compiled by workers without the device, and measured in this process, which has it.

A batch of configs is compiled while nothing is measured, so that the deadlines and memory limits of compile workers are
kept; then the batch is measured. Nothing that a worker sends is unpickled: its programs come as data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import jax

from quarantune.devices.device import Device
from quarantune.devices.leases import Lease
from quarantune.measure import finals
from quarantune.scheduler.plan import TICK_S
from quarantune.scheduler.race import Race
from quarantune.scheduler.reference import Reference
from quarantune.scheduler.workers import Job
from quarantune.sweep import in_process
from quarantune.sweep.attempt import Attempt
from quarantune.sweep.request import Finish, SweepRequest
from quarantune.sweep.routes import Routes, reference_for, worker_options
from quarantune.sweep.swept import Swept
from quarantune.sweep.watchdog import Watchdog, Watched
from quarantune.transport.call import Call
from quarantune.values.trial import UNTUNED, Config, Outcome, Phase, ReferenceFailedError, Route, Trial
from quarantune.worker.bench import Bench, Program

_logger = logging.getLogger("quarantune")

_BATCH = 64
"""How many configs are compiled before they are measured: a sweep that is interrupted loses the work on no more."""
_SEARCH_BATCH = 8
"""The same where a search decides what is tried, which learns from one batch for the next."""


class MeasuredHere:
    """One sweep."""

    def __init__(
        self, request: SweepRequest, call: Call, *, arrays_fd: int, routes: Routes, device: Device, finish: Finish
    ) -> None:
        """Sets up the sweep.

        Args:
            request: the sweep.
            call: the call, with the caller's own function.
            arrays_fd: the file that holds the bytes of its arrays; -1 for none.
            routes: the routes, for compiling alone.
            device: the device that this process measures on.
            finish: receives the trials.
        """
        self._request = request
        self._name = request.problem.name
        self._limits = request.limits
        self._call = call
        self._arrays_fd = arrays_fd
        self._routes = routes
        self._device = device
        self._lease = Lease(device, thread=threading.get_ident())
        self._finish = finish
        # A bench for "cpu" would keep this process from its other devices.
        platform = None if request.problem.platform == "cpu" else request.problem.platform
        self._options = worker_options(platform, request.options)
        self._race = Race()
        self._reference = Reference()
        self._watchdog = Watchdog()
        self._bench: Bench | None = None
        self._fastest: dict[int, tuple[float, Program]] = {}
        self._has_compiled_here = False

    def run(self, configs: dict[int, Config], measured: Mapping[int, Trial]) -> Swept:
        """Runs configs to their outcomes, and compares the fastest in `measured`, to which their trials are added."""
        if not self._routes.load(configs):
            return Swept()
        request = self._request
        reference, configs = reference_for(request, configs, measured)
        self._reference = reference
        with contextlib.closing(reference), contextlib.closing(self._watchdog), self._on_device():
            if configs and "ref_fn" in self._call.companions:
                self._give_reference()
            finish, self._finish = self._finish, reference.hold(self._finish, self._request.events.untuned)
            reference.begin(configs.keys())
            left = sorted(configs, key=lambda index: not (reference.is_awaited and reference.is_default(index)))
            while left:
                batch, left = left[:_BATCH], left[_BATCH:]
                self._run_batch({index: configs[index] for index in batch})
            source = request.source
            while not source.is_closed and (taken := source.take(max(_SEARCH_BATCH, self._limits.compile_slots))):
                self._run_batch(taken)
            reference.settle(finish)
            final = self._compare(reference.contenders(measured, request.problem.default))
            return Swept(final, untuned=reference.untuned, complaint=reference.complaint(), noise=reference.noise)

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        """Makes the call's device the default one, which in a process with several kinds of devices it need not be."""
        device = jax.local_devices(backend=self._request.problem.platform)[self._device.position(os.environ)]
        is_single = self._call.devices_needed == 1
        try:
            with jax.default_device(device) if is_single else contextlib.nullcontext(), in_process.undisturbed():
                yield
        finally:
            self._lease.release()
            self._fastest.clear()
            self._drop_bench()

    def _give_reference(self) -> None:
        limit_s = self._limits.compile_timeout_s + self._limits.timeout_s
        with self._turn(), self._watching(limit_s, "ref_fn"):
            try:
                in_process.give_reference(self._call, self._bench_here(), self._reference)
            except ReferenceFailedError as error:
                raise ReferenceFailedError(f"{self._name}: {error}") from error.__cause__

    # One batch

    def _run_batch(self, batch: Mapping[int, Config]) -> None:
        """Compiles configs in workers, then measures those that have a program."""
        programs, reference = self._routes.programs, self._reference
        compiled: dict[int, tuple[Trial, str]] = {}

        def on_compiled(index: int, trial: Trial, log: str) -> None:
            if index in programs.ran_as:
                reference.join(index, programs.ran_as[index])
            if trial.outcome is Outcome.OK and trial.phase is Phase.COMPILE:
                compiled[index] = (trial, log)
            else:  # it failed, or has the program of a config that was measured before
                self._end(index, trial, log)

        executables = self._routes.compile_batch(dict(batch), on_compiled, source=self._request.source)
        # In the order of the batch, not in that in which workers ended: suspects come last.
        attempts = [
            Attempt(index, *compiled[index], executables.get(index))
            for index in batch
            if index in compiled and index not in programs.ran_as
        ]
        self._measure_all(sorted(attempts, key=lambda attempt: not reference.is_default(attempt.index)))
        for index in sorted(compiled.keys() & programs.ran_as.keys()):
            first = programs.ran_as[index]
            reference.join(index, first)
            self._end(index, *programs.copy_end(Job(index, batch[index]), Job(first, batch[first])))

    def _measure_all(self, attempts: list[Attempt]) -> None:
        """Runs each config once; then measures those that may still win, the fastest first."""
        for attempt in attempts:
            self._stop_in_time(attempt)
            if not attempt.is_over:
                self._load(attempt)
            if not attempt.is_over:
                self._step(attempt, Phase.CHECK, self._check)
            if attempt.is_over:
                self._conclude(attempt)
        parked = [attempt for attempt in attempts if not attempt.is_over]
        for attempt in sorted(parked, key=lambda attempt: attempt.run_ms or 0.0):
            self._rule_out(attempt)
            self._stop_in_time(attempt)
            if not attempt.is_over:
                self._step(attempt, Phase.MEASURE, self._measure)
            self._conclude(attempt)

    def _stop_in_time(self, attempt: Attempt) -> None:
        """Ends a config that should not go on, because the time of the search is over."""
        if not attempt.is_over and (reason := self._request.source.reason_to_stop()):
            attempt.update(outcome=Outcome.NOT_RUN, message=reason)

    def _load(self, attempt: Attempt) -> None:
        """Loads the program of a config, or compiles it here where it cannot be passed on."""

        def load(attempt: Attempt) -> None:
            with contextlib.suppress(ValueError):
                attempt.program = self._bench_here().load_data(attempt.trial.config, attempt.data or b"")

        def compile_here(attempt: Attempt) -> None:
            attempt.program = self._bench_here().compile(attempt.trial.config, target=None)
            attempt.update(compile_s=attempt.program.compile_s)

        attempt.update(device=self._device.name, route=Route.COMPILED_APART)
        if attempt.data is not None:
            self._step(attempt, Phase.LOAD, load)
        if attempt.program is None and not attempt.is_over:
            self._report_compiling_here(attempt)
            attempt.update(route=Route.IN_PROCESS)
            self._step(attempt, Phase.COMPILE, compile_here)
            attempt.held_s = 0.0

    def _check(self, attempt: Attempt) -> None:
        """Checks a config, and measures it at once unless its first run was informative."""
        assert attempt.program is not None
        bench = self._bench_here()
        in_process.check(bench, attempt.program, attempt.index, self._reference)
        if (run := bench.informative_first_run(attempt.program)) is None:
            self._measure(attempt)
            return
        attempt.run_ms, attempt.cpu_ms, attempt.is_disturbed = run.whole, run.least, run.is_disturbed
        self._race.note_first_run(attempt.index, run.whole, run.least)
        self._pause(attempt, "it waits for its further runs")

    def _rule_out(self, attempt: Attempt) -> None:
        """Ends a config whose first run was too slow."""
        run_ms = attempt.run_ms
        if run_ms is None or attempt.is_disturbed or self._reference.is_open:
            return
        if (fastest_ms := self._race.hopeless_beside_ms(run_ms, attempt.cpu_ms)) is not None:
            attempt.update(
                outcome=Outcome.SLOW,
                phase=Phase.MEASURE,
                message=f"its first run took {run_ms:.4g} ms, where another config takes {fastest_ms:.4g}",
                time_ms=run_ms,
                samples_ms=(run_ms,),
                own_ms=attempt.cpu_ms,
                clock="wall",
            )

    def _measure(self, attempt: Attempt) -> None:
        assert attempt.program is not None
        race = self._race
        attempt.update(phase=Phase.MEASURE)
        self._on_phase(attempt.index, Phase.MEASURE)
        # The fastest of those that are wrong must not rule out the right ones.
        best_median_ms = None if self._reference.is_open else race.best_median_ms
        measured = self._bench_here().measure(attempt.program, best_median_ms=best_median_ms, noise=race.noise)
        if measured.own_ms:
            race.noise.add(measured.own_ms, min(measured.own_ms))
        if attempt.run_ms is not None and not attempt.is_disturbed:
            race.noise.add_first_run(attempt.cpu_ms, measured.cpu_ms)
        attempt.trial = in_process.timed(attempt.trial, measured)
        if measured.is_slow:
            message = f"at best {min(measured.samples_ms):.4g} ms, where another config takes {best_median_ms:.4g}"
            attempt.update(outcome=Outcome.SLOW, message=message)

    def _conclude(self, attempt: Attempt) -> None:
        """Ends a config, keeps it if it is among the fastest, and records its trial for those with the same program."""
        index, trial, own_ms = attempt.index, attempt.trial, attempt.trial.own_ms
        if trial.outcome is Outcome.OK and own_ms is not None:
            self._race.note_time(index, own_ms)
        if own_ms is not None and attempt.program is not None:
            self._fastest[index] = (0.0 if self._reference.is_default(index) else own_ms, attempt.program)
            if len(self._fastest) > finals.MOST_FINALISTS + 1:
                del self._fastest[max(self._fastest, key=lambda index: self._fastest[index][0])]
        attempt.program = attempt.data = None
        if self._reference.is_open and not trial.outcome.is_failure:
            self._pause(attempt, "it waits for the outputs of others")
        self._routes.programs.end(Job(index, trial.config), trial, attempt.log)
        self._end(index, trial, f"{attempt.log}\n{trial.log_tail}" if trial.outcome.is_failure else attempt.log)

    def _end(self, index: int, trial: Trial, log: str) -> None:
        self._reference.ended(index)
        self._request.source.ended(index, trial)
        self._finish(index, trial, log)
        self._request.events.on_tick()

    # In this process

    def _step(self, attempt: Attempt, phase: Phase, work: Callable[[Attempt], None]) -> None:
        """Runs one step of a config; an exception or a missed deadline ends its trial."""
        is_compiling = phase is Phase.COMPILE
        limit_s = self._limits.compile_timeout_s if is_compiling else self._limits.timeout_s
        attempt.update(phase=phase)
        self._on_phase(attempt.index, phase)
        doing = "compiling" if is_compiling else "checking and measuring"
        overdue = dataclasses.replace(
            attempt.trial, outcome=Outcome.TIMEOUT, message=f"{doing} took longer than {limit_s:g} s"
        )

        def on_overdue() -> None:
            self._note(attempt, overdue)

        with self._turn(), self._watching(limit_s - attempt.held_s, attempt.label, on_overdue) as watched:
            if not attempt.is_noted:
                attempt.is_noted = True
                self._note(attempt, attempt.provisional(Outcome.LOST, "the process that ran it has ended meanwhile"))
            try:
                with in_process.interruptible():
                    work(attempt)
            except (Exception, SystemExit) as error:
                attempt.trial = in_process.failed(attempt.trial, error)
                self._drop_bench()  # its arguments may be damaged
            except BaseException:  # KeyboardInterrupt is for the caller
                self._pause(attempt, "the sweep was interrupted")
                raise
        attempt.held_s += watched.taken_s
        if watched.is_overdue:
            attempt.trial = dataclasses.replace(overdue, phase=attempt.trial.phase)

    def _pause(self, attempt: Attempt, reason: str) -> None:
        """Notes that a config does not run any more: until it goes on, it is not the cause if this process ends."""
        if attempt.is_noted:
            attempt.is_noted = False
            self._note(attempt, attempt.provisional(Outcome.NOT_RUN, reason))

    def _note(self, attempt: Attempt, trial: Trial) -> None:
        if attempt.index != UNTUNED:
            self._request.events.on_provisional(attempt.index, trial)

    @contextlib.contextmanager
    def _watching(self, limit_s: float, label: str, on_overdue: Callable[[], None] = lambda: None) -> Iterator[Watched]:
        """Watches work of this process, and reports when it hangs."""

        def report(taken_s: float) -> None:
            _logger.warning(
                "%s: %s has run for %.1f s in this process, which cannot end it; the limit is %.1f s. If it never "
                "ends, end this process; where results are saved, the next sweep leaves it out",
                self._name,
                label,
                taken_s,
                limit_s,
            )
            on_overdue()

        with self._watchdog.watching(limit_s, report) as watched:
            yield watched

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Holds the device's lease, which it waits for."""
        while not self._lease.acquire(time.monotonic()):
            self._request.events.on_tick()
            time.sleep(TICK_S)
        try:
            yield
        finally:
            self._lease.release()

    def _bench_here(self) -> Bench:
        if self._bench is None:
            self._bench = Bench(self._call, arrays_fd=self._arrays_fd, options=self._options)
        return self._bench

    def _drop_bench(self) -> None:
        if self._bench is not None:
            self._bench.close()
            self._bench = None

    def _on_phase(self, index: int, phase: Phase) -> None:
        self._request.events.on_phase(index, phase)

    def _report_compiling_here(self, attempt: Attempt) -> None:
        """Reports, once in a sweep, that a config is compiled without containment."""
        if not self._has_compiled_here:
            self._has_compiled_here = True
            _logger.warning(
                "%s: %s is compiled in this process, without containment, because its program cannot come from a "
                "worker; so are others whose route is %r",
                self._name,
                attempt.label,
                Route.IN_PROCESS.value,
            )

    # The final

    def _compare(self, configs: Mapping[int, Config]) -> finals.Final:
        """Times the fastest configs in turn."""
        if len(configs) < 2:
            return finals.Final()
        programs = {}
        for index in configs:
            first = self._routes.programs.ran_as.get(index, index)
            if first in self._fastest:
                programs[index] = self._fastest[first][1]
        missing = {index: config for index, config in configs.items() if index not in programs}
        limit_s = len(configs) * (self._limits.compile_timeout_s + self._limits.timeout_s)
        try:
            for attempt in self._loaded(missing):
                assert attempt.program is not None, attempt.trial.message
                programs[attempt.index] = attempt.program
            bench = self._bench_here()
            watched = self._watching(limit_s, "the comparison of the fastest configs")
            with self._turn(), watched, in_process.interruptible():
                for index in configs:
                    bench.run(programs[index])
                return finals.Final.of(configs, *bench.compare([programs[index] for index in configs]))
        except (Exception, SystemExit) as error:
            _logger.warning("the finalists could not be compared, so their first measurements count: %r", error)
            return finals.Final()

    def _loaded(self, configs: Mapping[int, Config]) -> list[Attempt]:
        """Returns configs with their programs, compiled again by workers: those of an earlier sweep, for example."""
        trials: dict[int, Trial] = {}
        found = self._routes.compile_batch(
            dict(configs), lambda index, trial, log: trials.update({index: trial}), again=True
        )
        attempts = [Attempt(index, trials[index], "", found.get(index)) for index in configs]
        for attempt in attempts:
            if not attempt.is_over:
                self._load(attempt)
            self._pause(attempt, "it waits to be compared")
        return attempts
