"""A shard: its sweep, packed for an engine and run in a sandbox of the machine that the engine chose."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import os
import pickle
import platform
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import jax

from quarantune.calls import given_inputs
from quarantune.devices import discovery, targets
from quarantune.devices.targets import Target
from quarantune.engine import contact
from quarantune.engine.contact import Address, Contact
from quarantune.functions.versions import versions
from quarantune.host.locks import new_lock
from quarantune.host.process import environment_variables
from quarantune.jax_internals import jax_functions
from quarantune.measure.finals import Final
from quarantune.sandbox import spool, template
from quarantune.sweep import sweep
from quarantune.sweep.ledger import Ledger, Listener
from quarantune.sweep.limits import SweepLimits
from quarantune.sweep.request import Problem, SweepRequest, Swept
from quarantune.transport import payload
from quarantune.transport.payload import Call, PackedCall
from quarantune.values import blocks
from quarantune.values.codec import DamageError, JsonObject, Record, as_json, one_of
from quarantune.values.configs import Config
from quarantune.values.errors import EngineError, ReferenceFailedError
from quarantune.values.options import Options
from quarantune.values.trial import END, READY, TIME, Outcome, Phase, Samples, Trial

DONE, STOPPED, LATE, REFUSED, FAILED = "done", "stopped", "late", "refused", "failed"
UNREACHED = "unreached"
"""The ways in which a shard ends on its machine. `UNREACHED`: it cannot connect to its submitter, and has not begun."""
NO_CONFIG = -1
"""Index in the message that a machine has the device and begins."""
REFUSAL_S = 0.3
"""Seconds, times the number of refusals, for which a machine stays busy after it refused a shard: another machine
should get the shard next."""
_LONGEST_REFUSAL_S = 2.0


# --- the call in a shard ------------------------------------------------------------------------------------

_THREADS = ("OMP", "MKL", "OPENBLAS", "BLIS", "NUMEXPR")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parcel:
    """One call in the form for the shards of its sweep.

    Attributes:
        problem: the call, without its arguments; a stand-in takes the place of the function.
        is_jitted: whether the function is jitted.
        packed: the call as a sweep sends it to its workers; only workers unpack it.
        options: the author's options; stand-ins take the place of functions, which travel with the call.
        settings: the settings for every machine, by name.
        threads: the variables that limit threads of numerical libraries, with their values in the submitter's process.
        target: the device to compile for, which the machines need not have; None if configs are measured.
    """

    problem: Problem
    is_jitted: bool
    packed: PackedCall
    options: Options
    settings: Mapping[str, Any]
    threads: Mapping[str, str | None]
    target: Target | None


def stand_in(*args: Any, **kwargs: Any) -> None:
    """Takes the place of a function that only the workers of a sandbox load.

    Raises:
        RuntimeError: something called it.
    """
    raise RuntimeError("a stand-in for a function was called: only the workers of a sandbox have the function itself")


_jitted_stand_in = jax.jit(stand_in)


def pack(request: SweepRequest, configs: Sequence[Config]) -> tuple[bytes, Call]:
    """Returns the call of a sweep as a pickled `Parcel`, and as its `Call` in this process.

    Args:
        request: the sweep.
        configs: configs that together have all values of the space.

    Raises:
        TypeError: pickle cannot serialize a part of the call.
    """
    problem, options, settings, limits = request.problem, request.options, request.settings, request.limits
    packed = sweep.pack(problem, configs, options, with_values=given_inputs.are_given(options.supply))
    values = _values_of(packed)
    untuned = None if problem.untuned is None else as_json(problem.untuned)
    parcel = Parcel(
        problem=dataclasses.replace(problem, fn=stand_in, args=(), kwargs={}, untuned=untuned),
        is_jitted=jax_functions.is_jitted(problem.fn),
        packed=dataclasses.replace(
            packed,
            call=Call(fn=stand_in, args=(), kwargs={}, specs=packed.call.specs),
            sources=(None,) * len(packed.call.specs),
            spool=values,
        ),
        options=_plain(options),
        settings={
            "compile_timeout": limits.compile_timeout_s,
            "timeout": limits.timeout_s,
            "memory_limit": limits.memory_limit_bytes,
            "configs_per_worker": settings.configs_per_worker,
            "start_method": settings.start_method,
            "isolation": "process",
            "disable_cache": True,  # only the submitter writes
        },
        threads={name: os.environ.get(name) for name in (f"{library}_NUM_THREADS" for library in _THREADS)},
        target=request.target,
    )
    return pickle.dumps(parcel), packed.call


def _values_of(packed: PackedCall) -> bytes:
    if not packed.call.spool_bytes:
        return b""
    fd = spool.create("arrays", size_bytes=packed.call.spool_bytes)
    try:
        payload.write_arrays(packed, fd)
        return spool.read(fd)
    finally:
        os.close(fd)


def _plain(options: Options) -> Options:
    """Returns options without the fields that only the submitter needs, and with stand-ins for the user's functions."""
    return dataclasses.replace(
        options,
        key_fn=None,
        prune_fn=None,
        objective=TIME,
        supply="auto" if callable(options.supply) else options.supply,
        ref_fn=stand_in if callable(options.ref_fn) else options.ref_fn,
        check_fn=None if options.check_fn is None else stand_in,
        search="exhaustive",
        max_trials=None,
        time_budget=None,
        patience=None,
        tables=None,
    )


# --- the messages of a shard, checked like any other input, and the errors of engines -------------------------

_MOST_TEXT = 20_000
_DEATHS = ("Killed", "Crashed", "Died", "Lost", "Terminated", "Unreachable")
"""Parts of the names of errors with which engines report a dead worker."""
ERRORS = {error.__name__: error for error in (ReferenceFailedError, ValueError, TypeError)}
"""The errors of a sweep that are the fault of the call itself, and so the same on every machine."""


_Text: TypeAlias = Annotated[str, lambda text: text[:_MOST_TEXT]]
_Rounds: TypeAlias = tuple[tuple[int, Samples], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfigEnded(Record):
    """A config has ended.

    Attributes:
        index: its index.
        trial: its trial, in the form of `Trial.to_json`.
    """

    index: int
    trial: JsonObject

    def read(self, configs: Mapping[int, Config], *, is_check: bool) -> Trial:
        """Returns the trial.

        Args:
            configs: the configs by index, used instead of the message's.
            is_check: whether the sweep only compiles configs.

        Raises:
            DamageError: the message does not describe a trial.
        """
        if self.index not in configs:
            raise DamageError(f"there is no config {self.index}")
        is_compiled = is_check and self.trial.get("outcome") == Outcome.OK
        # `from_json` demands a time of an `ok` trial.
        found = Trial.from_json(self.trial | ({"outcome": Outcome.NOT_RUN.value} if is_compiled else {}))
        outcome = Outcome.OK if is_compiled else found.outcome
        return dataclasses.replace(found, config=configs[self.index], outcome=outcome)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfigEntered(Record):
    """A config has entered a phase.

    Attributes:
        phase: its index, and the phase.
    """

    phase: tuple[int, Annotated[str, one_of(*Phase, READY, END)]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfigTraced(Record):
    """A config has been traced.

    Attributes:
        program: the config, and the lines of its program.
    """

    program: tuple[JsonObject, Mapping[str, int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class End(Record):
    """A shard has ended on its machine.

    Attributes:
        end: the way it ended: `DONE`, `STOPPED`, `LATE`, `REFUSED`, `FAILED` or `UNREACHED`.
        host: the machine.
        error: the reason for a failure or a refusal.
        kind: the type of the error if the call itself is at fault; else empty.
        rounds_ms: `Final.rounds_ms` of its fastest configs, if the shard was whole.
        warm_ms: `Final.warm_ms` of its fastest configs, if the shard was whole.
        untuned: `Swept.untuned` of its sweep.
        complaint: `Swept.complaint` of its sweep.
        unreached: `Contact.unreached` of its machine.
        trials: all its trials; only in the result that the engine returns.
    """

    end: str
    host: _Text = ""
    error: _Text = ""
    kind: Annotated[str, one_of("", *ERRORS)] = ""
    rounds_ms: _Rounds = ()
    warm_ms: _Rounds = ()
    untuned: Trial | None = None
    complaint: _Text = ""
    unreached: _Text = ""
    trials: tuple[ConfigEnded, ...] = ()

    @property
    def swept(self) -> Swept:
        """The findings of its sweep."""
        return Swept(Final(dict(self.rounds_ms), dict(self.warm_ms)), untuned=self.untuned, complaint=self.complaint)


def read(message: JsonObject) -> End | ConfigEntered | ConfigTraced | ConfigEnded:
    """Returns the message of a shard.

    Raises:
        DamageError: the message has another form.
    """
    if "end" in message:
        return End.from_json(message)
    if "phase" in message:
        return ConfigEntered.from_json(message)
    return ConfigTraced.from_json(message) if "program" in message else ConfigEnded.from_json(message)


def means_death(error: BaseException) -> bool:
    """Returns whether an engine's error means a dead worker, and not only that the engine gave up the work."""
    return isinstance(error, concurrent.futures.BrokenExecutor) or any(part in type(error).__name__ for part in _DEATHS)


def reason_of(error: BaseException) -> str:
    """Returns an engine's error as text, with a remedy if the engine cancelled the work."""
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if not isinstance(error, concurrent.futures.CancelledError):
        return said
    return f"the engine cancelled it ({said}): its client may have lost the scheduler; see that it runs, and reconnect"


def cannot_import(error: BaseException) -> str | None:
    """Returns the text of an error if it means that a worker lacks this package; None for any other error."""
    found: BaseException | None = error
    while found is not None:
        if "No module named 'quarantune" in str(found):
            return next(line for line in str(found).splitlines() if "No module named 'quarantune" in line)
        found = found.__cause__ or found.__context__
    return None


def lacks_package(text: str) -> str:
    """Returns the end of a sentence about a worker that lacks this package, with the remedy.

    Args:
        text: the worker's error.
    """
    ours = versions_here()
    return f"cannot import quarantune ({text}): install quarantune {ours['quarantune']} with jax {ours['jax']} there"


def check_description(found: Any) -> None:
    """Raises if a worker's description of itself shows that it cannot take part.

    Raises:
        EngineError: it has other versions, or could not find its device.
    """
    if not isinstance(found, dict) or not isinstance(found.get("versions"), dict):
        raise EngineError(f"a worker of the executor described itself as {found!r:.80}: give it this quarantune")
    if reason := differing(versions_here(), found["versions"]):
        raise EngineError(f"{found['host']} cannot take part: {reason}; give all machines the same versions")
    if "kind" not in found:
        raise EngineError(f"{found['host']} cannot take part, because its devices are unknown: {found['error']}")


# --- the shard on its machine ---------------------------------------------------------------------------------


_unreached: collections.deque[str] = collections.deque(maxlen=64)
"""The secrets of the sweeps whose submitters know that this process cannot connect to them."""


class _EndError(Exception):
    """Ends a shard early.

    Attributes:
        end: the shard's end.
    """

    def __init__(self, end: str, error: str = "") -> None:
        self.end = End(end=end, error=error)


def versions_here() -> dict[str, str]:
    """Returns the versions that must be the same on all machines of a sweep."""
    found = versions()
    python = ".".join(platform.python_version_tuple()[:2])
    return {name: found[name] for name in ("quarantune", "jax", "jaxlib")} | {"python": python}


def describe(stays_s: float = 0.0) -> JsonObject:
    """Returns the platform and the kind of the device that this process would tune for, or the error.

    An engine runs it before any sweep, so its result is plain data. It raises nothing.

    Args:
        stays_s: seconds for which this machine stays busy, so that other machines get the same question.
    """
    time.sleep(stays_s)
    found: JsonObject = {"host": socket.gethostname(), "versions": versions_here()}
    try:
        return found | dict(zip(("platform", "kind"), discovery.platform_and_kind(None), strict=True))
    except Exception as error:
        return found | {"error": f"{type(error).__name__}: {error}"}


def run(task: Mapping[str, Any]) -> JsonObject:
    """Runs a shard, and returns its `End` as plain data; raises nothing.

    The first shard of a process that cannot connect to its submitter ends at once, so that the submitter can name the
    machine early. The next ones run without a connection.

    Args:
        task: the task from `Shards._task`; it is plain data, so that machines with another version can report that.
    """
    host = socket.gethostname()
    address = Address.from_json(task["address"])
    line = contact.reach(address, task["shard"], {"host": host, "pid": os.getpid()})
    if line is False:
        return End(end=STOPPED, host=host).to_json()
    if line.unreached and not task.get("may_be_silent") and address.token not in _unreached:
        _unreached.append(address.token)
        return End(end=UNREACHED, host=host, unreached=line.unreached).to_json()
    with contextlib.closing(line):
        shard = _ShardRun(task, line, host)
        end = dataclasses.replace(shard.run(), host=host, unreached=line.unreached)
        line.say(end.to_json())
        if end.end == REFUSED:  # stay busy, so that another machine takes the shard
            time.sleep(min(_LONGEST_REFUSAL_S, REFUSAL_S * (1 + task["refusals"])))
    return dataclasses.replace(end, trials=tuple(shard.trials)).to_json()


def differing(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """Returns the differences of a machine's versions from the submitter's; empty if there are none.

    Args:
        theirs: the submitter's versions by name.
        ours: the machine's versions by name.
    """
    differ = [name for name in ours if theirs.get(name) != ours[name]]
    return "; ".join(f"it has {name} {ours[name]}, and the submitter {theirs.get(name)}" for name in differ)


class _ShardRun:
    """One shard on its machine."""

    def __init__(self, task: Mapping[str, Any], line: Contact, host: str) -> None:
        self.trials: list[ConfigEnded] = []
        self._task = task
        self._line = line
        self._host = host
        self._ends_at = time.monotonic() + task["deadline_s"]

    def run(self) -> End:
        """Runs the shard and returns its end."""
        try:
            if self._task["versions"] != (here := versions_here()):
                raise _EndError(REFUSED, differing(self._task["versions"], here))
            parcel: Parcel = pickle.loads(self._task["parcel"])
            self._check_device(parcel)
            self._say(ConfigEntered(phase=(NO_CONFIG, Phase.LOAD)))
            with _prepared(parcel.threads):
                swept = self._sweep(parcel)
        except _EndError as early:
            return early.end
        except ImportError as error:
            return End(end=REFUSED, error=str(error))
        except tuple(ERRORS.values()) as error:
            return End(end=FAILED, kind=type(error).__name__, error=str(error))
        except Exception as error:
            return End(end=FAILED, error=f"{type(error).__name__}: {error}")
        except (KeyboardInterrupt, SystemExit):  # an engine's way of cancelling
            return End(end=STOPPED)
        rounds_ms, warm_ms = _listed(swept.final.rounds_ms), _listed(swept.final.warm_ms)
        return End(end=DONE, rounds_ms=rounds_ms, warm_ms=warm_ms, untuned=swept.untuned, complaint=swept.complaint)

    def _check_device(self, parcel: Parcel) -> None:
        """Raises if this machine lacks the device."""
        if parcel.target is not None:
            return
        platform, kind = parcel.problem.platform, parcel.problem.device_kind
        found = discovery.platform_and_kind("cpu" if platform == "cpu" else None)
        if found != (platform, kind):
            raise _EndError(REFUSED, f"it has {found[1]}, another kind of device than {kind}")

    def _sweep(self, parcel: Parcel) -> Swept:
        configs: dict[int, Any] = dict(self._task["configs"])
        problem = parcel.problem
        if parcel.is_jitted:
            problem = dataclasses.replace(problem, fn=_jitted_stand_in)
        with blocks.settings(**parcel.settings):
            settings = blocks.current()
        target = None if parcel.target is None else targets.usable(parcel.target)
        request = SweepRequest(
            problem=problem,
            options=parcel.options,
            settings=settings,
            limits=SweepLimits.of(parcel.options, settings),
            ledger=Ledger(
                Listener(
                    on_trial=self._tell,
                    on_tick=self._look,
                    on_phase=lambda index, phase: self._say(ConfigEntered(phase=(index, phase))),
                )
            ),
            on_program=lambda config, lines: self._say(ConfigTraced(program=(config, lines))),
            troubled=self._task["troubled"],
            target=target,
            has_final=self._task["is_whole"],
        )
        return sweep.run(request, configs, packed=parcel.packed)

    def _tell(self, index: int, trial: Trial) -> None:
        if trial.outcome is Outcome.ERROR and trial.phase is Phase.LOAD:
            raise _EndError(REFUSED, f"it cannot load the function: {trial.message}")  # not the fault of a config
        record = trial.to_json()
        if trial.device:
            record["device"] = f"{trial.device} on {self._host}"
        ended = ConfigEnded(index=index, trial=record)
        self.trials.append(ended)
        self._say(ended)

    def _say(self, message: Record) -> None:
        if not self._line.say(message.to_json()):
            raise _EndError(STOPPED)

    def _look(self) -> None:
        if self._line.is_over:
            raise _EndError(STOPPED)
        if time.monotonic() > self._ends_at:
            raise _EndError(LATE)


def _listed(times_ms: Mapping[int, Sequence[float]]) -> _Rounds:
    return tuple((index, tuple(samples_ms)) for index, samples_ms in times_ms.items())


_LINGER_S = 20.0
"""Seconds without a shard after which the template ends."""

_lock = new_lock()
_running = 0
_timer: threading.Timer | None = None
_variables = contextlib.ExitStack()


@contextlib.contextmanager
def _prepared(threads: Mapping[str, str | None]) -> Iterator[None]:
    """Prepares this process for a shard, and keeps its template for the next one unless the shard is interrupted.

    Args:
        threads: the submitter's limits of threads; None for an unset variable. A numerical library reads them in the
            template when it loads, and engines set them to 1 for their own workers. If shards of several sweeps run in
            one process at a time, the limits of the first apply.
    """
    global _running, _timer
    with _lock:
        _running += 1
        if _running == 1:
            _variables.enter_context(environment_variables(threads))
        if _timer is not None:
            _timer.cancel()
    is_interrupted = True
    try:
        yield
        is_interrupted = False
    finally:
        with _lock:
            _running -= 1
            if not _running:
                _variables.close()
            is_worker = "quarantune.engine.distributed" not in sys.modules  # otherwise this process also tunes
            if is_worker and not _running and not is_interrupted:
                _timer = threading.Timer(_LINGER_S, _end_template)
                _timer.daemon = True
                _timer.start()
        if is_worker and is_interrupted:
            _end_template()


def _end_template() -> None:
    """Ends the template unless a shard runs."""
    with _lock:
        if not _running:
            template.close_shared()
