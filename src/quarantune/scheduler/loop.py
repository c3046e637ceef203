"""One sweep's event loop: slots, leases, deadlines, memory watch, kill. Knows nothing of JAX, search or files.

A job is compiled and then measured. Where one worker does both (`Route.TOGETHER`) it parks between the two; where they
are apart, a compile worker leaves an executable in a spool file and a measuring worker, which holds a device, loads it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from quarantune.devices.device import Device
from quarantune.devices.leases import Lease
from quarantune.host import machine, memory, stops
from quarantune.measure import finals, sampling
from quarantune.sandbox import codec, pool, spool
from quarantune.sandbox.messages import (
    REPLIES,
    BenchOptions,
    Checked,
    CheckShapes,
    Compare,
    Compared,
    Compile,
    Compiled,
    CompileTarget,
    ComputeReference,
    Failed,
    Finalist,
    Lowered,
    Measure,
    Measured,
    PhaseEntered,
    Prepare,
    Raised,
    Ready,
    ReferenceComputed,
    Reply,
    ShapesChecked,
    Task,
    Warm,
)
from quarantune.scheduler.reference import UNTUNED, Reference
from quarantune.values.config_values import encode
from quarantune.values.trial import Config, Outcome, Phase, Route, Trial, is_plausible_ms

_logger = logging.getLogger("quarantune")

STARTUP_DEADLINE_S = 120.0
"""How long a worker may take before its first word; only a broken machine needs it."""
_KILL_DEADLINE_S = 10.0
"""How long after SIGKILL a worker is believed to be dying; after that its device is withdrawn."""
_TICK_S = 0.05
_PARKED_S = 5.0
"""How long a compiled config may wait until those before it have a result: what has one is not lost with the sweep."""
_PARKED_SHARE = 0.25
"""How much of the memory that is free without them compiled configs may hold while others are compiled."""
_LOOK_S = 0.1
_CLOSE_LOOK_S = 0.25
_FREE_LOOK_S = 1.0
_FAST_BYTES = 64 << 20
_MEMORY_FLOOR_BYTES = 256 << 20
MEMORY_SHARE = 0.9
"""How much of the memory that is free the workers may take between them where nobody set a limit."""
_LOG_TAIL_CHARS = 2000
_MAX_DEVICE_FAILURES = 2
_ERRAND_TRIES = 2
_SHAPES_S = 10.0
"""How long the shapes of outputs may take to be known; they are only looked at to fail early."""
_Kept = TypeVar("_Kept")
_Expected = TypeVar("_Expected", bound=Reply)
_MAX_READY = 64
"""Executables that wait to be measured; each holds a descriptor."""
_SPARE_WORKERS = 6
"""Measuring workers made ready ahead where each takes one config, which takes less time than making one ready."""


class SandboxLike(Protocol):
    """What the scheduler needs of a sandbox; `sandbox.pool.Sandbox` says what each does."""

    # ruff: noqa: D102 - they are documented there

    @property
    def baseline_bytes(self) -> int: ...
    def common_files(self) -> set[memory.FileId]: ...
    def start(self, task: codec.Frame, *, fds: Sequence[int] = (), environ: Mapping[str, str] | None = None) -> int: ...
    def send(self, number: int, message: codec.Frame, fds: Sequence[int] = ()) -> None: ...
    def finish(self, number: int) -> None: ...
    def kill(self, number: int) -> None: ...
    def forget(self, number: int) -> None: ...
    def pid(self, number: int) -> int | None: ...
    def log(self, number: int) -> str: ...
    def trim_logs(self) -> None: ...
    def share_modules(self, names: Sequence[str]) -> None: ...
    def poll(self, timeout_s: float) -> list[pool.Event]: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How a sweep is to be run.

    Attributes:
        route: whether one worker does both halves of a trial or two do.
        options: goes to every worker as it is.
        target: what compile workers compile for when they have no device; None for the machine's own.
        slots: how many configs compile at a time.
        devices: where to measure; one lease each.
        configs_per_worker: how many configs a measuring worker may take when the halves are apart.
        exclusive: whether compiling disturbs measuring, so that the two must alternate.
        parked: with `exclusive`, how many compiled configs wait, memory allowing, before a measuring burst begins.
        ahead: whether a worker is made ready for the next config while one compiles.
        compile_timeout_s: for loading, tracing, lowering and compiling one config.
        timeout_s: for checking and measuring one config, from the moment it holds its device.
        memory_limit_bytes: host memory of one worker and its children.
        may_exceed_alone: whether the limit is a share of what is free, so that a config over it is tried once more,
            alone, with nearly all that is free.
        compile_only: whether configs are compiled and not run.
    """

    route: Route
    options: BenchOptions
    target: CompileTarget | None
    slots: int
    devices: tuple[Device, ...]
    configs_per_worker: int
    exclusive: bool
    parked: int
    ahead: bool = False
    compile_timeout_s: float
    timeout_s: float
    memory_limit_bytes: int
    may_exceed_alone: bool = False
    compile_only: bool = False


@dataclasses.dataclass(eq=False)
class _Job:
    index: int
    config: Config
    executable_fd: int = -1
    compile_s: float | None = None
    peak_bytes: int = 0
    slack_s: float = float("inf")
    """How much of its deadline was left when it had been lowered."""
    was_lost: bool = False
    needs_fresh: bool = False
    is_alone: bool = False
    """Whether it runs when no other config does, because it lacked memory beside others."""
    limit_bytes: int | None = None
    """Its own memory limit where that is not the plan's."""
    twins: list[_Job] = dataclasses.field(default_factory=list)
    """Configs that lowered to the same program, and get what this one gets."""


@dataclasses.dataclass(eq=False)
class _Worker:
    number: int
    job: _Job | None
    device: _DeviceState | None
    deadline: float
    phase: Phase = Phase.LOAD
    compiling: bool = False
    was_spare: bool = False
    """Whether it was started before there was a config for it."""
    is_ahead: bool = False
    """Whether it was made ready while others had the same device."""
    errand_s: float | None = None
    """How long it may take for what is no trial, from its first phase on; None for one that runs trials."""
    reply: Reply | None = None
    parked: bool = False
    run_ms: float | None = None
    """How long its first run took, where that tells something and it waits for its turn to go on."""
    cpu_ms: float = 0.0
    """The same without the time that it waited for a CPU."""
    was_disturbed: bool = False
    """Whether its first run tells nothing: it waited long, or this process, and it too, perhaps, was stopped."""
    granted_at: float = 0.0
    held_s: float = 0.0
    """How long it has held the device before."""
    used: int = 0
    idle: bool = False
    began: bool = False
    peak_bytes: int = 0
    used_bytes: int = 0
    scale: memory.Scale = dataclasses.field(default_factory=memory.Scale)
    descendants: list[int] = dataclasses.field(default_factory=list)
    offered: int = 0
    """With how many outputs its own was to be compared."""
    output_fd: int = -1
    """Where it was to leave its own, where that is like none of them."""
    traceback: str = ""
    """The last lines of what its config raised."""
    verdict: tuple[Outcome, str] | None = None
    """What its end means, once it was decided before it ended."""
    given_up_at: float | None = None


@dataclasses.dataclass(eq=False)
class _DeviceState:
    device: Device
    lease: Lease
    measuring: _Worker | None = None
    bench: list[_Worker] = dataclasses.field(default_factory=list)
    """Measuring workers that have the device, or are about to, and no config."""
    is_cramped: bool = False
    """Whether its memory was too small for workers that are made ready ahead."""
    failures: int = 0


@dataclasses.dataclass(frozen=True)
class Leftovers:
    """What a route could not settle.

    Attributes:
        unfit: why a config's program must be compiled on its device, by the config's index.
        unconfirmed: errors raised where there was no device, each with all that was printed, by the config's index.
    """

    unfit: dict[int, str]
    unconfirmed: dict[int, tuple[Trial, str]]


class ErrandError(Exception):
    """What the scheduler itself needed of a worker was not done."""


class Scheduler:
    """Runs the configs of one sweep along one route."""

    def __init__(
        self,
        sandbox: SandboxLike,
        plan: Plan,
        *,
        on_trial: Callable[[int, Trial, str], None],
        on_tick: Callable[[], None] = lambda: None,
        on_phase: Callable[[int, str], None] = lambda index, phase: None,
        reference: Reference | None = None,
        clock: Callable[[], float] = time.monotonic,
        available_memory: Callable[[], int] = machine.available_memory_bytes,
        lease_on: Callable[[Device], Lease] = Lease,
    ) -> None:
        """Sets up a scheduler.

        Args:
            sandbox: starts and kills workers.
            plan: how to run.
            on_trial: called once for each config that ended, with its index, its trial and all it printed.
            on_tick: called many times a second while the sweep lives.
            on_phase: told of the phases that configs enter, by their indices.
            reference: what outputs are compared with, in this run and others of the sweep; None for nothing.
            clock: seconds.
            available_memory: bytes of memory that are free now.
            lease_on: makes the lease on a device, or finds that which the sweep has.
        """
        self._sandbox = sandbox
        self._plan = plan
        self._on_trial = on_trial
        self._on_tick = on_tick
        self._on_phase = on_phase
        self._clock = clock
        self._available_memory = available_memory
        self._together = plan.route is not Route.APART
        self._pending: collections.deque[_Job] = collections.deque()
        self._ready: collections.deque[_Job] = collections.deque()
        self._workers: dict[int, _Worker] = {}
        self._devices = [_DeviceState(device, lease_on(device)) for device in plan.devices]
        self._spare: _Worker | None = None
        self._ahead = plan.ahead
        self._waiting_since: float | None = None
        self._bursting = False
        self._unfinished = 0
        self._next_tick = 0.0
        self._next_look = 0.0
        self._next_close_look = 0.0
        self._next_free_look = 0.0
        self._last_total = 0
        self._last_free = available_memory()
        self._oom_kills = machine.oom_kills()
        self._leftovers = Leftovers({}, {})
        self._best_median_ms: float | None = None
        self._fastest_first_ms = float("inf")
        self._noise = sampling.Noise()
        self._executables: dict[int, bytes] = {}
        self._kept: dict[int, tuple[float, int]] = {}
        self._programs: dict[str, _Job] = {}
        self._twins: dict[int, int] = {}
        """The config that ran in their place, by the indices of those that it stood for."""
        self._ended: dict[int, tuple[Trial, str]] = {}
        self._reference = reference or Reference()
        self._stops = stops.Stops(clock)

    def run(self, configs: Mapping[int, Config]) -> Leftovers:
        """Runs every config to its outcome.

        Args:
            configs: the configs by index; they start in this order, but for the function's defaults, which others are
                compared with: they come first.

        Returns:
            What another route must settle; empty where this one settled all.
        """
        jobs = [_Job(index, config) for index, config in configs.items()]
        self._reference.begin(configs.keys())
        jobs.sort(key=lambda job: not (self._reference.is_awaited and self._reference.is_default(job.index)))
        self._pending.extend(jobs)
        self._unfinished = len(jobs)
        self._stops.begin()
        try:
            is_news = True
            while self._unfinished:
                if is_news:
                    self._start_what_can_be()
                    if not self._unfinished:
                        break
                events = self._sandbox.poll(self._until_next_deadline())
                for event in events:
                    self._handle(event)
                self._watch()
                is_news = not all(map(_is_progress, events)) or not events
        finally:
            for state in self._devices:
                state.lease.release()
            for job in jobs:
                _close_executable(job)
            for worker in self._workers.values():  # a retired one may take its time to die
                _close_output(worker)
        return self._leftovers

    def compare(self, configs: Mapping[int, Config]) -> finals.Final:
        """Times configs in turn in one worker, so that nothing but themselves tells them apart.

        What an earlier `run` has compiled is loaded, not compiled again. A worker that fails is replaced once.

        Args:
            configs: the configs by index.

        Returns:
            What they showed; nothing where they could not be compared.
        """
        ran = {index: self._twins.get(index, index) for index in configs}
        entries = tuple(
            Finalist(config=encode(config), saved=ran[index] in self._kept) for index, config in configs.items()
        )
        fds = [self._kept[index][1] for index in ran.values() if index in self._kept]
        try:
            task = Compare(options=self._plan.options, entries=entries, last=True)
            reply = self._errand(task, fds, Compared, patience=len(configs))
            rounds_ms = [_checked_samples(samples_ms) for samples_ms in reply.rounds_ms]
            warm_ms = [_checked_samples(samples_ms) if samples_ms else [] for samples_ms in reply.warm_ms]
            return finals.Final.of(configs, rounds_ms, warm_ms)
        except (ErrandError, TypeError, ValueError, ArithmeticError) as error:
            _logger.warning("the finalists could not be compared, so their first measurements count: %s", error)
            return finals.Final()

    def shapes(self) -> str:
        """Says how what the function returns with its defaults differs, by shapes alone, from the reference.

        Returns:
            One sentence; empty where nothing differs, or where that cannot be known, whatever the reason.
        """
        limit_s = min(_SHAPES_S, self._plan.compile_timeout_s)
        try:
            task = CheckShapes(options=self._plan.options, last=True)
            return self._errand(task, self._reference.fds, ShapesChecked, limit_s=limit_s).differs or ""
        except ErrandError:
            return ""

    def refer(self, fd: int) -> None:
        """Computes what the configs' outputs are to be compared with.

        Args:
            fd: a file that takes it.

        Raises:
            ErrandError: the reference failed.
        """
        task = ComputeReference(options=self._plan.options, last=True)
        self._errand(task, [fd], ReferenceComputed)

    def _errand(
        self,
        task: Task,
        fds: Sequence[int],
        expected: type[_Expected],
        *,
        patience: int = 1,
        limit_s: float | None = None,
    ) -> _Expected:
        """Has a worker with a device do something that is no trial; one that fails is replaced once.

        Args:
            task: what to do.
            fds: descriptors that go with it.
            expected: the reply that says that it was done.
            patience: how many configs' worth of time it may take.
            limit_s: how many seconds it may take, if not so much.

        Returns:
            The worker's reply.

        Raises:
            ErrandError: it was not done.
        """
        for _ in range(_ERRAND_TRIES):
            if not self._devices:
                raise ErrandError("no device is left")
            self._stops.begin()
            try:
                worker = self._send_on_errand(self._devices[0], task, fds)
                worker.errand_s = limit_s or patience * (self._plan.compile_timeout_s + self._plan.timeout_s)
                while worker.number in self._workers:
                    for event in self._sandbox.poll(self._until_next_deadline()):
                        self._handle(event)
                    self._watch()
            finally:
                for state in self._devices:
                    state.lease.release()
            if isinstance(worker.reply, expected):
                return worker.reply
            outcome, message = worker.verdict or (Outcome.LOST, "its process vanished")
            if outcome not in (Outcome.LOST, Outcome.CRASHED):
                break  # it would only happen again
        raise ErrandError(f"{outcome.value}: {message}")

    def compiled(self) -> tuple[dict[int, bytes], dict[int, dict[str, bytes]]]:
        """Returns what was compiled and kept: that of the fastest configs, or of all where nothing was measured.

        Returns:
            Executables as a worker loads them, and what JAX's compilation cache can hold, by key; both by the configs'
            indices.
        """
        executables = dict(self._executables)
        for_cache = {}
        for index, (_, fd) in self._kept.items():
            with contextlib.suppress(ValueError):  # a config may have written anything there
                executables[index], key, value = spool.read_parts(fd)
                if key:
                    for_cache[index] = {key.decode("ascii"): value}
        return self._with_twins(executables), self._with_twins(for_cache)

    def _with_twins(self, programs: dict[int, _Kept]) -> dict[int, _Kept]:
        """Returns programs by index, those too that ran in another config's name."""
        return programs | {twin: programs[first] for twin, first in self._twins.items() if first in programs}

    def close(self) -> None:
        """Lets idle workers end, and closes what was kept for a comparison."""
        for worker in list(self._workers.values()):
            if worker.verdict is None:
                self._sandbox.finish(worker.number)
        for _, fd in self._kept.values():
            os.close(fd)
        self._kept.clear()

    def _send_on_errand(self, state: _DeviceState, task: Task, fds: Sequence[int]) -> _Worker:
        while not state.lease.acquire(self._clock()):
            for event in self._sandbox.poll(_TICK_S):
                self._handle(event)
            self._watch()
        worker = next((worker for worker in state.bench if worker.idle), None)
        if worker is not None:
            state.bench.remove(worker)
            self._sandbox.send(worker.number, codec.encode(task), fds)
        else:
            number = self._sandbox.start(codec.encode(task), fds=fds, environ=state.device.environ)
            worker = self._workers[number] = _Worker(number, None, state, 0.0)
        worker.idle, state.measuring = False, worker
        worker.deadline = self._clock() + STARTUP_DEADLINE_S
        return worker

    # Starting

    def _start_what_can_be(self) -> None:
        self._turn()
        for state in self._devices:
            self._make_ready_ahead(state)
        while self._may_compile():
            self._start_compiling(self._pending.popleft())
        if self._ahead and self._spare is None and self._pending and self._compiling() and self._has_room():
            self._spare = self._start_preparing()
        for state in self._devices:
            self._measure_on(state)

    def _turn(self) -> None:
        """Where compiling and measuring must alternate, decides whose turn it is."""
        if not self._plan.exclusive:
            return
        if self._default_is_pending():
            self._bursting = False
            return
        waiting = len(self._waiting_to_measure())
        if not waiting:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = self._clock()
        if self._bursting:
            self._bursting = bool(waiting) or self._measuring() > 0
        elif waiting and not self._compiling():
            self._bursting = not self._pending or not self._has_room()

    def _default_is_pending(self) -> bool:
        """Whether what all others are to be compared with must yet be compiled, again perhaps."""
        reference = self._reference
        return reference.is_awaited and any(reference.is_default(job.index) for job in self._pending)

    def _has_room(self) -> bool:
        """Whether one more config may wait, compiled, for its turn to be measured."""
        if self._default_is_pending():
            return True
        waiting = len(self._waiting_to_measure()) + self._compiling()
        is_long = self._waiting_since is not None and self._clock() - self._waiting_since > _PARKED_S
        if waiting and (self._runs_alone() or (self._pending and self._pending[0].is_alone)):
            return False
        is_heavy = waiting > 1 and self._last_total > _PARKED_SHARE * (self._last_total + self._last_free)
        return waiting < self._plan.parked and not is_long and not is_heavy

    def _may_compile(self) -> bool:
        if not self._pending or self._bursting or not self._devices or self._compiling() >= self._plan.slots:
            return False
        if self._suspect_runs() or (self._pending[0].was_lost and (self._compiling() or self._measuring())):
            return False
        if self._runs_alone() or (self._pending[0].is_alone and not self._is_quiet()):
            return False
        if self._plan.exclusive:
            return not self._measuring() and self._has_room()
        return len(self._ready) < _MAX_READY or self._default_is_pending()

    def _suspect_runs(self) -> bool:
        """Whether a config runs that was running when a template died: alone, so that nobody else is lost with it."""
        return any(w.job is not None and w.job.was_lost and not w.parked for w in self._workers.values())

    def _runs_alone(self) -> bool:
        """Whether a config runs, or waits, beside which no other may take memory."""
        return any(job.is_alone for job in [*self._ready, *self._jobs_in_workers()])

    def _is_quiet(self) -> bool:
        """Whether no config waits to be measured and no worker lives but those made ready ahead."""
        ahead = [self._spare, *(worker for state in self._devices for worker in state.bench)]
        return not self._ready and all(worker in ahead for worker in self._workers.values())

    def _jobs_in_workers(self) -> list[_Job]:
        return [worker.job for worker in self._workers.values() if worker.job is not None]

    def _compiling(self) -> int:
        return len([worker for worker in self._workers.values() if worker.compiling])

    def _measuring(self) -> int:
        """How many measure, those too whose device was withdrawn and that are still dying."""
        return sum(w.device is not None and w.device.measuring is w for w in self._workers.values())

    def _waiting_to_measure(self) -> list[_Worker] | collections.deque[_Job]:
        if self._together:
            return [worker for worker in self._workers.values() if worker.parked]
        return self._ready

    def _start_compiling(self, job: _Job) -> None:
        if job.is_alone and self._plan.may_exceed_alone:
            alone_bytes = int(MEMORY_SHARE * self._available_memory())
            job.limit_bytes = max(self._plan.memory_limit_bytes, alone_bytes)
        task = Compile(trial=job.index, config=encode(job.config), options=self._plan.options, target=self._plan.target)
        if (worker := self._spare) is not None:
            self._spare = None
            worker.job, worker.compiling = job, True
            worker.deadline = self._clock() + STARTUP_DEADLINE_S
            self._sandbox.send(worker.number, codec.encode(task))  # it reads the task as soon as it is ready
            return
        state = min(self._devices, key=lambda state: self._load_of(state)) if self._together else None
        environ = {} if state is None else state.device.environ
        if self._together and not self._plan.compile_only:
            number = self._sandbox.start(codec.encode(task), environ=environ)
        else:
            _close_executable(job)
            job.executable_fd = spool.create("executable")
            task = dataclasses.replace(task, last=True, must_save=not self._together, as_data=self._plan.compile_only)
            number = self._sandbox.start(codec.encode(task), fds=[job.executable_fd], environ=environ)
        self._workers[number] = _Worker(number, job, state, self._clock() + STARTUP_DEADLINE_S, compiling=True)

    def _start_preparing(self) -> _Worker:
        state = min(self._devices, key=lambda state: self._load_of(state))
        task = Warm(options=self._plan.options)
        number = self._sandbox.start(codec.encode(task), environ=state.device.environ)
        self._workers[number] = worker = _Worker(number, None, state, float("inf"), was_spare=True)
        return worker

    def _load_of(self, state: _DeviceState) -> int:
        return sum(worker.device is state for worker in self._workers.values())

    def _measure_on(self, state: _DeviceState) -> None:
        if state.measuring is not None or self._plan.compile_only:
            return
        if self._reference.is_open and self._measuring():
            return  # outputs that nobody knows to be right are compared one after another
        if self._plan.exclusive and (self._compiling() or not self._bursting):
            if not self._bursting:
                state.lease.release()
            return
        if self._together:
            self._measure_parked(state)
            return
        self._measure_apart(state)

    def _measure_parked(self, state: _DeviceState) -> None:
        """Has the next of the parked configs run: all run once, then those go on, fastest first, that may still win."""
        parked = [
            worker
            for worker in self._workers.values()
            if worker.parked and worker.device is state and self._may_be_compared(worker.job)
        ]
        # Those that have run come after those that have not.
        for worker in sorted(parked, key=lambda worker: worker.run_ms or 0.0):
            may_rule_out = not worker.was_disturbed and not self._reference.is_open
            if worker.run_ms is not None and worker.job is not None and may_rule_out:
                fastest_ms = min(ms for ms in (self._best_median_ms, worker.run_ms) if ms is not None)
                if sampling.is_hopeless(
                    worker.cpu_ms,
                    fastest_ms=fastest_ms,
                    fastest_first_ms=self._fastest_first_ms,
                    noise=self._noise,
                ):
                    self._rule_out(worker, worker.job, worker.run_ms, fastest_ms)
                    continue
            if state.lease.acquire(self._clock()):
                worker.parked = False
                self._assign_device(state, worker)
            return
        state.lease.release()

    def _rule_out(self, worker: _Worker, job: _Job, run_ms: float, fastest_ms: float) -> None:
        message = f"its first run took {run_ms:.4g} ms, where another config takes {fastest_ms:.4g}"
        measured = {"time_ms": run_ms, "samples_ms": (run_ms,), "own_ms": worker.cpu_ms, "clock": "wall"}
        self._keep_peak(worker)
        self._finish(job, worker, Outcome.SLOW, Phase.MEASURE, message, **measured)
        worker.job, worker.parked = None, False
        self._retire(worker)

    def _may_be_compared(self, job: _Job | None) -> bool:
        return not self._reference.is_awaited or (job is not None and self._reference.is_default(job.index))

    def _measure_apart(self, state: _DeviceState) -> None:
        if self._reference.is_awaited:
            default = next((job for job in self._ready if self._may_be_compared(job)), None)
            if default is None:
                return
            self._ready.remove(default)
            self._ready.appendleft(default)
        if not self._ready:
            state.lease.release()
        if self._ready and self._ready[0].needs_fresh:
            for used in [worker for worker in state.bench if worker.used]:
                self._retire(used)
        if self._unmeasured() and not state.bench:
            self._start_measuring_worker(state)
        # One that was used before goes first, so that a fresh one stays at hand.
        worker = max((worker for worker in state.bench if worker.idle), key=lambda worker: worker.used, default=None)
        if self._ready and worker is not None and state.lease.acquire(self._clock()):
            worker.job = self._ready.popleft()
            worker.idle = False
            state.bench.remove(worker)
            self._assign_device(state, worker)

    def _make_ready_ahead(self, state: _DeviceState) -> None:
        """Starts the measuring workers that will be needed, so that nobody waits for the driver to make contexts."""
        if self._together or self._plan.exclusive or self._plan.compile_only or state.is_cramped:
            return
        each = self._plan.configs_per_worker
        most = _SPARE_WORKERS if each == 1 else 1
        share = -(-self._unmeasured() // len(self._devices))
        waiting = share - sum(each - worker.used for worker in state.bench)
        if state.measuring is not None:
            waiting -= each - state.measuring.used - 1
        while waiting > 0 and len(state.bench) < most:
            self._start_measuring_worker(state)
            waiting -= each

    def _unmeasured(self) -> int:
        """How many configs have yet to be given to a measuring worker."""
        return len(self._ready) + len(self._pending) + self._compiling()

    def _start_measuring_worker(self, state: _DeviceState) -> None:
        task = codec.encode(Prepare(options=self._plan.options))
        number = self._sandbox.start(task, fds=self._reference.fds, environ=state.device.environ)
        worker = _Worker(number, None, state, self._clock() + STARTUP_DEADLINE_S, is_ahead=self._load_of(state) > 0)
        self._workers[number] = worker
        state.bench.append(worker)

    def _assign_device(self, state: _DeviceState, worker: _Worker) -> None:
        """Gives a worker the device; from now on its time runs."""
        assert worker.job is not None
        state.measuring = worker
        worker.phase = Phase.CHECK
        if worker.run_ms is None:
            self._on_phase(worker.job.index, worker.phase.value)
        worker.granted_at = self._clock()
        worker.deadline = worker.granted_at + self._plan.timeout_s - worker.held_s
        # One worker for both halves may be asked to wait between its first run and the others; it is retired in the
        # end.
        last = not self._together and worker.used + 1 >= self._plan.configs_per_worker
        if self._together and worker.run_ms is None:
            _close_executable(worker.job)  # of an earlier try
            worker.job.executable_fd = spool.create("executable")
        offer = self._reference.offer()
        task = Measure(
            trial=worker.job.index,
            config=encode(worker.job.config),
            load=not self._together,
            checked=worker.run_ms is not None,
            pause=self._together,
            # The fastest of those that are wrong must not rule out the right ones.
            best_median_ms=None if self._reference.is_open else self._best_median_ms,
            noise_samples=self._noise.samples,
            noise_disturbed=self._noise.disturbed,
            references=offer.references,
            standard=offer.standard,
            keeps=offer.keeps,
            last=last,
        )
        fds = [worker.job.executable_fd, *self._reference.fds]
        _close_output(worker)
        worker.offered = len(self._reference.fds)
        if offer.keeps:
            worker.output_fd = spool.create("output")
            fds.append(worker.output_fd)
        self._sandbox.send(worker.number, codec.encode(task), fds)

    # Messages

    def _handle(self, event: pool.Event) -> None:
        worker = self._workers.get(event.number)
        if worker is None:
            if isinstance(event, pool.Ended):
                self._sandbox.forget(event.number)
        elif isinstance(event, pool.Said):
            self._on_message(worker, event.message)
        elif isinstance(event, pool.Damaged):
            self._kill_with_verdict(worker, Outcome.CRASHED, f"it damaged its own connection: {event.reason}")
        else:
            self._on_exit(worker, event.status)

    def _on_message(self, worker: _Worker, frame: codec.Frame) -> None:
        expected = None if worker.job is None else worker.job.index
        if worker.verdict is not None or frame.get("trial") != expected:
            return  # late, or of a trial that is over
        try:
            self._apply(worker, codec.decode(frame, *REPLIES))
        except (TypeError, ValueError, ArithmeticError) as error:
            # A config can forge a frame.
            reason = f"it sent a message that makes no sense: {error!r}"
            self._kill_with_verdict(worker, Outcome.CRASHED, reason)

    def _apply(self, worker: _Worker, reply: Reply) -> None:
        worker.phase = reply.phase
        if worker.job is not None and isinstance(reply, PhaseEntered):
            self._on_phase(worker.job.index, worker.phase.value)
        if worker.job is not None and isinstance(reply, (Checked, Measured, Failed)) and reply.agreement is not None:
            group, fd = reply.agreement.group, worker.output_fd
            self._reference.note(worker.job.index, group, offered=worker.offered, fd=fd)
            _close_output(worker)
        match reply:
            case PhaseEntered():
                self._begin(worker)
            case Ready() if worker.device is not None and worker in worker.device.bench:
                worker.idle, worker.deadline = True, float("inf")
                worker.device.failures = 0
                if self._plan.configs_per_worker == 1:  # there will be many more
                    self._share_modules(reply.modules)
            case Compiled() if worker.compiling and worker.job is not None:
                self._take_compiled(worker, worker.job, reply)
            case Lowered() if worker.compiling and worker.job is not None:
                worker.job.slack_s = worker.deadline - self._clock()
                self._recognise(worker, worker.job, reply.program)
            case Checked() if self._together and worker.device is not None and worker.device.measuring is worker:
                self._pause(worker, worker.device, reply)
            case Measured() if (
                worker.job is not None and worker.device is not None and worker.device.measuring is worker
            ):
                self._succeed(worker, worker.job, worker.device, reply)
            case ReferenceComputed() | ShapesChecked() | Compared() if worker.errand_s is not None:
                worker.reply = reply
                self._retire(worker)
            case Failed():
                self._fail(worker, reply)

    def _begin(self, worker: _Worker) -> None:
        """Starts the clock of what is timed from a worker's first phase on."""
        if (worker.compiling or worker.errand_s) and not worker.began:
            worker.began = True
            worker.deadline = self._clock() + (worker.errand_s or self._plan.compile_timeout_s)

    def _take_compiled(self, worker: _Worker, job: _Job, reply: Compiled) -> None:
        job.compile_s = _duration(reply.compile_s)
        self._share_modules(reply.modules)
        worker.compiling = False
        if self._plan.compile_only:
            self._succeed_compiling(worker, job)
        elif self._together:
            worker.parked, worker.deadline = True, float("inf")
        else:
            self._keep_peak(worker)
            _protect_executable(job)
            self._ready.append(job)
            worker.job = None
            # It ends by itself, unless the config keeps it from ending.
            worker.deadline = self._clock() + _KILL_DEADLINE_S

    def _pause(self, worker: _Worker, state: _DeviceState, reply: Checked) -> None:
        """Takes the device from a worker after the first run of its config, which says how fast it may be."""
        worker.run_ms, worker.cpu_ms = _run_ms(reply.run_ms), _duration(reply.cpu_ms)
        worker.was_disturbed = worker.was_disturbed or reply.is_disturbed
        self._noise.add(1, int(reply.is_disturbed))
        if worker.job is not None and worker.job.index != UNTUNED:
            self._fastest_first_ms = min(self._fastest_first_ms, worker.run_ms)
        worker.held_s += self._clock() - worker.granted_at
        worker.parked, worker.deadline, state.measuring = True, float("inf"), None

    def _share_modules(self, names: Sequence[str]) -> None:
        """Imports in the template the modules that a worker had to import, for later workers."""
        if names:
            self._sandbox.share_modules(names)

    def _succeed_compiling(self, worker: _Worker, job: _Job) -> None:
        if os.fstat(job.executable_fd).st_size:
            with contextlib.suppress(ValueError, IndexError, MemoryError):  # a config may have written anything there
                self._executables[job.index] = spool.read_parts(job.executable_fd)[0]
        self._keep_peak(worker)
        worker.job = None
        self._finish(job, worker, Outcome.OK, Phase.COMPILE, "")
        self._retire(worker)

    def _recognise(self, worker: _Worker, job: _Job, program: str) -> None:
        """Sees whether a config lowered to a program that another one has: one of them is enough to run."""
        first = self._programs.setdefault(program, job)
        if first is job:
            return
        self._reference.join(job.index, first.index)
        worker.job, worker.compiling = None, False
        _close_executable(job)
        self._keep_peak(worker)
        self._retire(worker)
        if first.index in self._ended:
            self._finish_twin(job, first)
        else:
            first.twins.append(job)

    def _finish_twin(self, job: _Job, first: _Job) -> None:
        trial, log = self._ended[first.index]
        self._twins[job.index] = first.index
        self._reference.join(job.index, first.index)
        same = f"the same program as {'the defaults' if first.index == UNTUNED else first.config}"
        message = f"{same}: {trial.message}" if trial.message else same
        self._settle_as(job, dataclasses.replace(trial, config=job.config, message=message), log)

    def _succeed(self, worker: _Worker, job: _Job, state: _DeviceState, reply: Measured) -> None:
        samples_ms = _checked_samples(reply.samples_ms)
        self._keep_peak(worker)
        median_ms, cpu_ms = statistics.median(samples_ms), _run_ms(reply.cpu_ms)
        self._noise.add(len(samples_ms), _count(reply.disturbed, most=len(samples_ms)))
        if worker.run_ms is not None and not worker.was_disturbed:
            self._noise.add_first_run(worker.cpu_ms, cpu_ms)
        outcome, text = Outcome.OK, ""
        if reply.is_slow:
            outcome, text = (
                Outcome.SLOW,
                f"at best {min(samples_ms):.4g} ms, where another config takes {self._best_median_ms:.4g}",
            )
        elif job.index != UNTUNED and (self._best_median_ms is None or cpu_ms < self._best_median_ms):
            self._best_median_ms = cpu_ms  # not the defaults' where they cannot win: all others may be slower
        measured = {
            "time_ms": median_ms,
            "samples_ms": tuple(samples_ms),
            "own_ms": cpu_ms,
            "clock": reply.clock,
        }
        self._keep_executable(job, cpu_ms)
        self._finish(job, worker, outcome, Phase.MEASURE, text, **measured)
        state.measuring, worker.job = None, None
        worker.used += 1
        worker.deadline = float("inf")
        if self._together or worker.used >= self._plan.configs_per_worker:
            self._retire(worker)
        else:
            worker.idle = True
            state.bench.append(worker)

    def _keep_executable(self, job: _Job, cpu_ms: float) -> None:
        """Keeps the fastest configs' executables for a comparison, where there are any."""
        if os.fstat(job.executable_fd).st_size:
            _protect_executable(job)
            self._kept[job.index] = (cpu_ms, job.executable_fd)
            job.executable_fd = -1
        if len(self._kept) > finals.MOST_FINALISTS + (UNTUNED in self._kept):
            slowest = max(self._kept, key=lambda index: self._kept[index])
            os.close(self._kept.pop(slowest)[1])

    def _fail(self, worker: _Worker, reply: Failed) -> None:
        """Ends a worker that raised, and with it whatever its config did to the process."""
        if reply.outcome is Raised.UNFIT:
            is_early = worker.compiling or worker.phase is Phase.LOAD
            if not is_early or self._together:
                raise ValueError("nothing raised here is 'unfit'")
            if worker.job is not None and not worker.used:
                self._hand_over(worker.job, reply.text)
                worker.job, worker.compiling = None, False
                self._retire(worker)
                return
        outcome = Outcome.ERROR if reply.outcome is Raised.UNFIT else Outcome(reply.outcome.value)
        worker.traceback = reply.traceback
        if outcome is Outcome.WRONG:
            self._kill_with_verdict(worker, outcome, reply.text)
        else:
            message = f"{reply.error}: {reply.text}" if reply.text else reply.error
            self._kill_with_verdict(worker, outcome, message)

    def _hand_over(self, job: _Job, reason: str) -> None:
        """Leaves a job, and those not yet begun, to the other route: what is true of one config's program is of all."""
        unfits = [job, *job.twins, *self._pending]
        self._forget_programs(unfits)
        for unfit in unfits:
            self._leftovers.unfit[unfit.index] = reason
            self._reference.ended(unfit.index)
            self._unfinished -= 1
        self._pending.clear()

    # Ending

    def _kill_with_verdict(self, worker: _Worker, outcome: Outcome, message: str) -> None:
        """Decides what a worker's end means, and brings it about."""
        if worker.verdict is None:
            worker.verdict = (outcome, message)
            worker.given_up_at = self._clock() + _KILL_DEADLINE_S
            worker.parked = worker.idle = False
            worker.deadline = float("inf")
            self._sandbox.kill(worker.number)

    def _retire(self, worker: _Worker) -> None:
        """Lets a worker that has nothing to do end by itself."""
        worker.idle = False
        if worker.device is not None and worker in worker.device.bench:
            worker.device.bench.remove(worker)
        worker.verdict, worker.deadline = (Outcome.OK, ""), float("inf")
        worker.given_up_at = self._clock() + _KILL_DEADLINE_S
        self._sandbox.finish(worker.number)
        # A worker holds nothing that matters here; one with a device would take seconds to close it politely.
        self._sandbox.kill(worker.number)

    def _on_exit(self, worker: _Worker, status: int | None) -> None:
        """Draws the conclusion from a worker's end: a process that ends without a result did not succeed."""
        job = worker.job
        self._keep_peak(worker)
        if worker.was_spare and not worker.began:
            # Whatever it died of was no config's doing. What is will bring down the worker that begins with it, too.
            self._ahead = False
            if self._spare not in (None, worker):
                self._retire(self._spare)  # its like would come to the same end, with the config that was just lost
                self._spare = None
            worker.verdict = worker.verdict or (Outcome.LOST, "the process died before it began")
        outcome, message = worker.verdict = worker.verdict or self._judge(worker, status)
        state = worker.device
        if job is not None:
            self._settle(job, worker, outcome, message)
        elif state in self._devices and worker in state.bench and not worker.used and outcome is not Outcome.OK:
            self._blame_device(state, worker, outcome, message)
        self._remove(worker)

    def _remove(self, worker: _Worker) -> None:
        if worker is self._spare:
            self._spare = None
        if (state := worker.device) is not None:
            if state.measuring is worker:
                state.measuring = None
            if worker in state.bench:
                state.bench.remove(worker)
        _close_output(worker)
        del self._workers[worker.number]
        self._sandbox.forget(worker.number)

    def _judge(self, worker: _Worker, status: int | None) -> tuple[Outcome, str]:
        if status is None:
            return Outcome.LOST, "it could not be started, or the process that started it died"
        message = f"the process {pool.describe_status(status)} without a result"
        kills = machine.oom_kills()
        if status == -9 and kills > self._oom_kills:
            self._oom_kills = kills
            largest = self._largest()
            if largest is not None and largest.used_bytes > worker.peak_bytes + _FAST_BYTES:
                # The kernel does not see who holds memory that is shared and not mapped.
                self._blame_for_shortage(largest, "the kernel ran out of memory, killed another config's process")
                return Outcome.LOST, "the kernel killed the process for want of memory that another one held"
            return Outcome.OOM, "the kernel's out-of-memory killer took the process"
        return Outcome.CRASHED, message

    def _settle(self, job: _Job, worker: _Worker, outcome: Outcome, message: str) -> None:
        if not self._devices:
            self._finish(job, worker, outcome, worker.phase, message)
        elif outcome is Outcome.LOST and (worker.parked or not job.was_lost):
            # One that only waited did nothing that its template could have died of.
            job.was_lost = job.was_lost or not worker.parked
            self._again(job)
        elif outcome is Outcome.OOM and self._may_fit_alone(job):
            job.is_alone = True
            self._release_twins(job)
            self._pending.append(job)
        elif outcome is Outcome.DEVICE_OOM and worker.device and self._make_room(worker.device):
            self._ready.appendleft(job)
        elif worker.used and outcome.is_failure:
            # What an earlier config did to this process is not this one's fault until a fresh process says so.
            job.needs_fresh = True
            self._ready.appendleft(job)
        else:
            self._finish(job, worker, outcome, worker.phase, message)

    def _may_fit_alone(self, job: _Job) -> bool:
        """Whether a config that ran out of memory might not have done so without the others."""
        if job.is_alone:
            return False
        if job.peak_bytes > self._plan.memory_limit_bytes:
            return self._plan.may_exceed_alone
        return any(other is not job for other in self._jobs_in_workers())

    def _again(self, job: _Job) -> None:
        if not self._together and job.executable_fd >= 0 and job.compile_s is not None:
            self._ready.appendleft(job)
        else:
            self._release_twins(job)  # it may come to another end, or be somebody's twin itself
            self._pending.appendleft(job)

    def _finish(
        self, job: _Job, worker: _Worker | None, outcome: Outcome, phase: Phase | None, message: str, **measured: Any
    ) -> None:
        log = "" if worker is None else self._sandbox.log(worker.number) + worker.traceback
        trial = Trial(
            config=job.config,
            outcome=outcome,
            phase=phase,
            message=message,
            compile_s=job.compile_s,
            peak_memory_bytes=job.peak_bytes or None,
            log_tail=_telling_part(log),
            route=self._plan.route,
            device="" if worker is None or worker.device is None else worker.device.device.name,
            **measured,
        )
        _close_executable(job)
        self._settle_as(job, trial, log)
        was_slow_to_lower = job.slack_s < self._plan.compile_timeout_s / 2
        if (outcome is Outcome.LOST and self._devices) or (
            (outcome, phase) == (Outcome.TIMEOUT, Phase.COMPILE) and was_slow_to_lower
        ):
            self._release_twins(job)  # what the machinery did to it, or its own tracing, says nothing of its program
            return
        self._ended[job.index] = (trial, log)
        for twin in job.twins:
            self._finish_twin(twin, job)

    def _release_twins(self, job: _Job) -> None:
        """Has those that were to get what a job gets run by themselves."""
        self._forget_programs([job])
        self._pending.extend(job.twins)
        job.twins = []

    def _forget_programs(self, jobs: Sequence[_Job]) -> None:
        """Lets nobody become the twin of a job that will have no result."""
        self._programs = {program: first for program, first in self._programs.items() if first not in jobs}

    def _settle_as(self, job: _Job, trial: Trial, log: str) -> None:
        self._unfinished -= 1
        self._reference.ended(job.index)
        if self._plan.target is not None and trial.outcome is Outcome.ERROR and trial.phase is Phase.COMPILE:
            self._leftovers.unconfirmed[job.index] = (trial, log)
        else:
            self._on_trial(job.index, trial, log)

    def _blame_device(self, state: _DeviceState, worker: _Worker, outcome: Outcome, message: str) -> None:
        """A measuring worker failed before it had a config: after a second time its device is withdrawn."""
        if outcome is Outcome.DEVICE_OOM and worker.is_ahead:
            state.is_cramped = True
            return
        state.failures += 1
        _logger.warning("no measuring worker on %s: %s: %s", state.device.name, outcome.value, message)
        if state.failures >= _MAX_DEVICE_FAILURES:
            self._withdraw(state, outcome, f"no worker could be made ready on {state.device.name}: {message}")

    def _make_room(self, state: _DeviceState) -> bool:
        """Retires what was made ready ahead, whose memory a config may have lacked; returns whether there was any."""
        ahead = list(state.bench)
        for worker in ahead:
            self._retire(worker)
        state.is_cramped = state.is_cramped or bool(ahead)
        return bool(ahead)

    def _withdraw(self, state: _DeviceState, outcome: Outcome, message: str) -> None:
        state.lease.release()
        self._devices.remove(state)
        if not self._devices:
            for job in [*self._ready, *self._pending]:
                self._finish(job, None, outcome, Phase.CHECK, message)
            self._ready.clear()
            self._pending.clear()
        for worker in list(self._workers.values()):
            if not self._devices:
                self._kill_with_verdict(worker, outcome, message)
            elif worker.device is state:
                self._kill_with_verdict(worker, Outcome.LOST, message)  # another device will do

    # Watching

    def _until_next_deadline(self) -> float:
        now = self._clock()
        soonest = min([worker.deadline for worker in self._workers.values()], default=now + _TICK_S)
        return max(0.0, min(soonest, max(self._next_tick, now + 0.001), now + _TICK_S) - now)

    def _watch(self) -> None:
        if lost_s := self._stops.lost_s():
            self._extend_deadlines(lost_s)
        now = self._clock()
        if any(now >= worker.deadline for worker in self._workers.values()):
            # Whatever came in time counts, however late it is read.
            for event in self._sandbox.poll(0.0):
                self._handle(event)
        for worker in list(self._workers.values()):
            if now >= worker.deadline:
                self._kill_with_verdict(worker, *self._overdue(worker))
            elif worker.given_up_at is not None and now >= worker.given_up_at:
                self._give_up(worker)
        if now >= self._next_tick:
            self._next_tick = now + _TICK_S
            self._on_tick()
            self._sandbox.trim_logs()
            if now >= self._next_look:
                self._next_look = now + _LOOK_S
                self._watch_memory(now)

    def _extend_deadlines(self, lost_s: float) -> None:
        """Gives back to all workers the time in which this process, and perhaps they too, did not run."""
        _logger.info("this process was stopped for %.1f s: deadlines are extended by it", lost_s)
        for worker in self._workers.values():
            worker.deadline += lost_s
            worker.granted_at += lost_s
            worker.was_disturbed = True
            if worker.given_up_at is not None:
                worker.given_up_at += lost_s

    def _overdue(self, worker: _Worker) -> tuple[Outcome, str]:
        if worker.errand_s is not None and worker.began:
            return Outcome.TIMEOUT, f"it took longer than {worker.errand_s:g} s"
        if worker.errand_s is None and worker.device is not None and worker.device.measuring is worker:
            return Outcome.TIMEOUT, f"checking and measuring took longer than {self._plan.timeout_s:g} s"
        if worker.began:
            return Outcome.TIMEOUT, f"compiling took longer than {self._plan.compile_timeout_s:g} s"
        return Outcome.LOST, f"the worker was not up within {STARTUP_DEADLINE_S:g} s"

    def _give_up(self, worker: _Worker) -> None:
        """A process that SIGKILL does not end: go on without it, and without its device."""
        assert worker.verdict is not None
        outcome, message = worker.verdict
        state = worker.device
        _logger.error("worker %s does not die after SIGKILL", self._sandbox.pid(worker.number))
        if worker.job is not None:
            self._finish(worker.job, worker, outcome, worker.phase, f"{message}; its process does not die")
        self._remove(worker)
        if state is not None and state in self._devices:
            self._withdraw(state, Outcome.LOST, f"{state.device.name} is held by a process that does not die")

    def _watch_memory(self, now: float) -> None:
        """Kills workers that hold too much.

        Workers that are at work are looked at with every tick. Looking at those that wait, for descendants of the
        others, and at what the machine has left, costs a hundred times more, so it is done now and then, and as soon as
        memory is being taken fast.
        """
        baseline = self._sandbox.baseline_bytes
        watched = [worker for worker in self._workers.values() if worker.verdict is None]
        busy = [worker for worker in watched if not worker.parked and not worker.idle]
        self._weigh(busy, baseline)
        total = sum(worker.used_bytes for worker in watched)
        is_fast = total > self._last_total + _FAST_BYTES
        if is_fast or now >= self._next_close_look:
            self._next_close_look = now + _CLOSE_LOOK_S
            for worker in busy:
                pid = self._sandbox.pid(worker.number)
                worker.descendants = [] if pid is None else machine.descendants(pid)
            self._weigh(watched, baseline, exactly=True)
            self._last_total = sum(worker.used_bytes for worker in watched)
        for worker in watched:
            if worker.used_bytes > (limit := self._limit_of(worker)):
                used, alone = _gigabytes(worker.used_bytes), " alone" if worker.job and worker.job.is_alone else ""
                message = f"it held {used}{alone}, over its memory_limit of {_gigabytes(limit)}"
                self._kill_with_verdict(worker, Outcome.OOM, message)
        if any(worker.verdict and worker.verdict[0] is Outcome.OOM for worker in self._workers.values()):
            return  # what is dying has yet to give its memory back
        if not is_fast and now < self._next_free_look:
            return
        self._next_free_look = now + _FREE_LOOK_S
        self._last_free = free = self._available_memory()
        if free < _MEMORY_FLOOR_BYTES and (largest := self._largest()) is not None:
            self._blame_for_shortage(largest, f"the machine had only {_gigabytes(free)} left")

    def _limit_of(self, worker: _Worker) -> int:
        own = None if worker.job is None else worker.job.limit_bytes
        return self._plan.memory_limit_bytes if own is None else own

    def _largest(self) -> _Worker | None:
        """Returns the worker that holds the most memory now."""
        watched = [worker for worker in self._workers.values() if worker.verdict is None]
        self._weigh(watched, self._sandbox.baseline_bytes, exactly=True)
        return max(watched, key=lambda worker: worker.used_bytes, default=None)

    def _blame_for_shortage(self, worker: _Worker, shortage: str) -> None:
        message = f"{shortage} and it held {_gigabytes(worker.used_bytes)}, the most of all"
        self._kill_with_verdict(worker, Outcome.OOM, message)

    def _weigh(self, workers: Sequence[_Worker], baseline: int, *, exactly: bool = False) -> None:
        """Notes how much each worker's tree holds now."""
        for worker in workers:
            pid = self._sandbox.pid(worker.number)
            worker.used_bytes = worker.scale.weigh(
                [] if pid is None else [pid, *worker.descendants],
                baseline_bytes=baseline,
                limit_bytes=self._limit_of(worker),
                foreign=self._foreign_files,
                exactly=exactly,
            )
            worker.peak_bytes = max(worker.peak_bytes, worker.used_bytes)

    def _foreign_files(self) -> set[memory.FileId]:
        """Returns the files in memory that no worker answers for."""
        return {*map(memory.file_id, self._reference.fds)} | self._sandbox.common_files()

    def _keep_peak(self, worker: _Worker) -> None:
        if worker.job is not None:
            worker.job.peak_bytes = max(worker.job.peak_bytes, worker.peak_bytes)


def _duration(value: Any) -> float:
    """Returns a duration that a worker told, in whatever unit, if it can be one."""
    duration = float(value)
    if not 0.0 <= duration < float("inf"):
        raise ValueError(f"{duration} is no duration")
    return duration


def _count(value: Any, *, most: int) -> int:
    """Returns a count that a worker told, if it can be one."""
    if not isinstance(value, int) or not 0 <= value <= most:
        raise ValueError(f"{value!r} is no count of up to {most}")
    return value


def _is_progress(event: pool.Event) -> bool:
    """Returns whether an event only tells how far a worker is, so that nothing can start for it."""
    return isinstance(event, pool.Said) and event.message.get("message") == PhaseEntered.__name__


def _telling_part(log: str) -> str:
    """Returns a log's end, or what surrounds the head of faulthandler's report: that names the latest call first."""
    report = log.rfind("Fatal Python error")
    start = len(log) - _LOG_TAIL_CHARS if report < 0 else report - _LOG_TAIL_CHARS // 4
    return log[max(0, start) :][:_LOG_TAIL_CHARS]


def _checked_samples(samples_ms: Any) -> list[float]:
    """Returns the samples of a message, which may be forged, as numbers that can be times."""
    checked = [_run_ms(sample) for sample in samples_ms]
    if not checked:
        raise ValueError("no samples")
    return checked


def _run_ms(value: Any) -> float:
    """Returns the milliseconds that a worker says a run took, if a run can take as long."""
    if not is_plausible_ms(value):
        raise ValueError(f"{value!r} ms is no time that a call can take")
    return float(value)


def _gigabytes(amount: int) -> str:
    return f"{amount / 1e9:.2f} GB"


def _close_executable(job: _Job) -> None:
    if job.executable_fd >= 0:
        os.close(job.executable_fd)
        job.executable_fd = -1


def _protect_executable(job: _Job) -> None:
    """Lets nobody write any more to what a worker left there: others will load it."""
    fd = job.executable_fd
    job.executable_fd = spool.protect(fd)
    os.close(fd)


def _close_output(worker: _Worker) -> None:
    if worker.output_fd >= 0:
        os.close(worker.output_fd)
        worker.output_fd = -1
