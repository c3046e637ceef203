"""The records that a sweep leaves on disk: its claim, its trials, and the configs that do not compile."""

from __future__ import annotations

import builtins
import collections
import contextlib
import dataclasses
import datetime
import functools
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from quarantune import device_table
from quarantune.cache import claims, journal
from quarantune.cache import store as cache
from quarantune.cache.claims import Claim
from quarantune.cache.journal import Journal
from quarantune.cache.store import CacheWriteError
from quarantune.resolve.call_key import KeyedCall
from quarantune.resolve.resolver import Known
from quarantune.sweep.limits import Isolation, SweepLimits, isolation_of
from quarantune.values import describe
from quarantune.values.codec import DamageError, JsonObject, Record, as_json, text_of
from quarantune.values.configs import Config
from quarantune.values.settings import Settings
from quarantune.values.space import Space
from quarantune.values.trial import (
    CompilerFigures,
    DifferentProgramError,
    Outcome,
    Phase,
    Route,
    Trial,
    TuningFailedError,
)

_UNSETTLED = frozenset({Outcome.LOST, Outcome.NOT_RUN, Outcome.PRUNED})
"""Outcomes that a journal's trial does not settle: the config runs again."""
_HEARTBEAT_S = 1.0
"""How often a tuning job refreshes its claim."""
_WORST_CASE_S = 60.0
"""A tuning job whose claim has not been refreshed for this long is stopped, or its host is gone."""
_WAIT_MESSAGE_S = 5.0
"""How often a waiting job reports that it waits."""
_FATAL = 2
"""How often a process must end while it runs a config for the config to be the cause, and not chance."""
_TRANSIENT = (OSError, ImportError, MemoryError, EOFError, KeyboardInterrupt, SystemExit, GeneratorExit)
"""Exceptions that tell something about the machine rather than about the config."""
_PASSING = re.compile(
    r"\b(UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED|(CUDA|HIP)_ERROR_\w+"
    r"|No space left on device|Too many open files|Cannot allocate memory|Resource temporarily unavailable)\b"
)
"""Texts of a compiler's errors that do the same."""
_AT_COMPILE_TIME = frozenset({Outcome.ERROR, Outcome.DEVICE_OOM, Outcome.TIMEOUT, Outcome.OOM, Outcome.CRASHED})


class SweepRecords:
    """The claim on one call, its journal, and what is known of its configs on this kind of device.

    Attributes:
        directory: the cache directory; None where nothing is read or written.
        has_waited: whether another job had the claim first.
    """

    def __init__(self, keyed: KeyedCall, settings: Settings, limits: SweepLimits) -> None:
        """Names the records; nothing is read.

        Args:
            keyed: the call.
            settings: the operator's settings.
            limits: the limits of the sweep.
        """
        self.directory: Path | None = None if settings.disable_cache else settings.cache_dir
        self.has_waited = False
        self._keyed = keyed
        self._name, self._key = keyed.call.name, keyed.key
        self._settings = settings
        self._limits = limits
        self._journal = Journal(settings.cache_dir, self._name, self._key.device, self._key.text)
        self._conclusions = journal.conclusions(settings.cache_dir, self._name, self._key.device, self._key.text)
        self._compile_failures = CompileFailures(keyed, settings.cache_dir, limits, also=settings.cache_path)
        self._ended: collections.Counter[int] = collections.Counter()  # by the config's index, as in `ended_processes`
        self._unsaved: CacheWriteError | None = None
        self._claim: Claim | None = None
        self._next_heartbeat = 0.0

    def claim(
        self,
        stack: contextlib.ExitStack,
        *,
        done: Callable[[bool], Known | TuningFailedError | None],
        failed: Callable[[JsonObject], Known | TuningFailedError | None],
        say: Callable[[str], None],
    ) -> Known | None:
        """Waits until the right to tune the call is this job's, or until another job has answered.

        Where no claim can be made in the directory, nothing is read or written from now on.

        Args:
            stack: releases the claim when it is closed.
            done: returns the answer, if there is one; takes whether to read the cache afresh, see `EntryFile.load`.
            failed: takes the failure that another job has left, and returns it as an answer if it is one.
            say: shows that the job waits.

        Returns:
            The other job's answer; None where this job tunes.

        Raises:
            TuningFailedError: every config failed in that job.
        """
        if self.directory is None:
            return None
        key, next_message_s = self._key, 0.0
        # Nothing refreshes the claim while the function is loaded, or while a config runs in this process.
        is_apart = isolation_of(self._settings, self._keyed.problem()) is Isolation.PROCESS
        worst_case_s = _WORST_CASE_S + self._limits.compile_timeout_s + (0.0 if is_apart else self._limits.timeout_s)
        claim = Claim(self.directory, self._name, key.device, key.text, worst_case_s=worst_case_s)

        def on_wait(holder: str, waited_s: float) -> None:
            nonlocal next_message_s
            self.has_waited = True
            if waited_s >= next_message_s:
                next_message_s = waited_s + _WAIT_MESSAGE_S
                trials = sum(1 for _ in self._journal.each())
                say(f"waiting for {holder} to tune it ({waited_s:.0f} s, {trials:,} trials so far)")

        try:
            answer: Known | TuningFailedError | Claim = claims.wait(
                claim, lambda: done(claim.held), on_wait, failed=failed
            )
        except CacheWriteError as error:
            cache.report_once(f"{self._name}: the results of this process are not saved: {error}")
            self.directory = None
            return None
        if isinstance(answer, TuningFailedError):
            raise answer
        if not isinstance(answer, Claim):
            return answer
        self._claim = stack.enter_context(claim)
        return None

    def refresh(self) -> None:
        """Shows other jobs that this one goes on, where it has the claim and the last time was long ago."""
        now = time.monotonic()
        if self._claim is not None and now >= self._next_heartbeat:
            self._next_heartbeat = now + _HEARTBEAT_S
            self._claim.refresh()

    def leave_failure(self, terms: JsonObject, trials: Sequence[Trial]) -> None:
        """Leaves the failure of all configs to the jobs that wait, where this job has the claim; forgets its journal.

        Args:
            terms: what distinguishes the sweep from others that might have succeeded.
            trials: its trials.
        """
        if self.directory is not None:
            self.discard()  # another process may find the machine in a better state
        if self._claim is not None:
            self._claim.leave_failure({**terms, "trials": [trial.to_json() for trial in trials]})

    def read(self, configs: Space) -> dict[int, Trial]:
        """Returns the trials of an interrupted sweep that settle a config, by the config's index.

        Configs that ended the processes that ran them are settled, too.

        Args:
            configs: the configs.
        """
        trials: dict[int, Trial] = {}
        refused = 0
        for record in self._journal.each():
            try:
                trial = Trial.from_json(record["trial"])
                configs.whole()  # any of them may have a trial
                index = configs.find(trial.config)
                if index is None:
                    continue
                self._ended[index] = ended_processes(self._ended[index], trial)
                if self._still_counts(trial, record):
                    trials[index] = dataclasses.replace(trial, config=configs[index])
            except (KeyError, DamageError):
                refused += 1
        if refused:
            cache.report_once(
                f"{refused} records of the journal in {str(self._journal.directory)!r} are no trials: they are not used"
            )
        for index, times in self._ended.items():
            if times >= _FATAL:
                trials[index] = Trial(
                    config=configs[index],
                    outcome=Outcome.CRASHED,
                    phase=Phase.CHECK,
                    message=f"the process that ran it ended {times} times meanwhile",
                    route=Route.IN_PROCESS,
                )
        return trials

    def discard(self, *, with_failures: bool = False) -> None:
        """Removes the journal, and the failed compilations too `with_failures`."""
        with self.saving():
            self._journal.discard()
            self._conclusions.discard()
            if with_failures:
                self._compile_failures.discard()

    def forget_another_program(self, kind: type[BaseException] | None, *_: object) -> None:
        """Removes all records of the key if a sweep ends because its workers had another program."""
        if kind is DifferentProgramError:
            self.discard(with_failures=True)

    def append(self, trial: Trial, *, was_troubled: bool) -> None:
        """Records a trial.

        Args:
            trial: the trial.
            was_troubled: whether its config is known to have crashed or hung.
        """
        self.refresh()
        if self.directory is None:
            return
        with self.saving():
            if self._keyed.call.function.is_jitted:
                self._compile_failures.note(trial, source="a sweep")
            self._journal.append(
                {"trial": trial.to_json(), "limits": self._limits.deadlines(), "versions": describe.versions()}
            )
            is_trouble = trial.outcome in (Outcome.CRASHED, Outcome.TIMEOUT)
            if is_trouble or (was_troubled and trial.outcome not in _UNSETTLED):
                journal.remember_trouble(
                    self.directory, self._name, self._key.device, as_json(trial.config), trial.outcome.value
                )

    def append_conclusion(
        self, finalists: Sequence[Trial], *, best: Config, tie: Sequence[Config], default: Config | None
    ) -> None:
        """Records how the sweep ended, for reports.

        Args:
            finalists: the trials of the configs that were timed in turn, with the times of the final; none where one
                was far ahead.
            best: the winner.
            tie: the configs that the noise cannot tell from it.
            default: the config that equals the function's own defaults, if there is one.
        """
        if self.directory is None:
            return
        with self.saving():
            self._conclusions.append(
                {
                    "finalists": [trial.to_json() for trial in finalists],
                    "best": as_json(best),
                    "tie": as_json(tuple(tie)),
                    "default": None if default is None else as_json(default),
                }
            )

    def troubled(self, configs: Space) -> set[int]:
        """Returns the configs that crashed or hung for this function on this device, whatever the shapes.

        Those that may have ended a process that ran them, as the journal says once it was read, are among them.
        """
        if self.directory is None:
            return set()
        known = journal.troublesome(self.directory, self._name, self._key.device)
        found = map(configs.find_text, known)
        suspects = {index for index, times in self._ended.items() if 0 < times < _FATAL}
        return suspects | {index for index in found if index is not None}

    def known_not_to_compile(
        self, configs: Space, trials: Mapping[int, Trial], *, start_over: bool
    ) -> dict[int, Trial]:
        """Returns the trials of further configs that are known not to compile, unless no other config is left.

        If everything is known to fail, something around the configs may have been wrong, and all are tried.

        Args:
            configs: the configs.
            trials: the trials that are known already, by index.
            start_over: whether failures that depend on the machine do not count.
        """
        if self.directory is None:
            return {}
        found: dict[int, Trial] = {}
        for text, trial in self._compile_failures.known(start_over=start_over).items():
            index = configs.find_text(text)
            if index is not None and index not in trials:
                found[index] = dataclasses.replace(trial, config=configs[index])
        if not found or any(trial.outcome is Outcome.OK for trial in trials.values()):
            return found
        return found if configs.has_more_than(0, besides=found.keys() | trials.keys()) else {}

    def estimates(self, configs: Space) -> dict[int, float]:
        """Returns how long configs take by the estimates of compile checks, the best one 1, the fastest first."""
        found: dict[int, tuple[float, float]] = {}
        for text, trial in self._compile_failures.known(with_compiled=True).items() if self.directory else ():
            order, index = device_table.estimated_order(trial.figures, self._key.device), configs.find_text(text)
            if 0 < order[1] < math.inf and index is not None and configs.keeps(index):
                found[index] = order
        ms, cycles = min(found.values(), default=(math.inf, math.inf))
        return {
            index: found[index][0] / ms if ms < math.inf else found[index][1] / cycles
            for index in sorted(found, key=found.__getitem__)
        }

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Notes where something in the block could not be saved."""
        try:
            yield
        except CacheWriteError as error:
            self._unsaved = error

    @property
    def saved(self) -> str:
        """What became of the result, in a few words."""
        if self._settings.disable_cache:
            return "not saved, because the cache is disabled"
        return "saved" if self.directory is not None and self._unsaved is None else "not saved"

    def report_unsaved(self) -> None:
        """Warns once if something could not be saved: of the result if it could not, else of some trials."""
        if self._unsaved is not None:
            cache.report_once(str(self._unsaved))

    def _still_counts(self, trial: Trial, record: Mapping[str, object]) -> bool:
        if trial.outcome in _UNSETTLED:
            return False
        if trial.outcome is Outcome.TIMEOUT and record["limits"] != self._limits.deadlines():
            return False
        return not self._settings.version_check or record["versions"] == describe.versions()


def left_trials(about: Mapping[str, object], terms: JsonObject, configs: Space) -> tuple[Trial, ...] | None:
    """Returns the trials of a failure that another job has left, if it ran the same sweep.

    Args:
        about: the failure; anybody may have written it.
        terms: what distinguishes the sweep of this job.
        configs: the configs of this job.
    """
    raw = about.get("trials")
    if not isinstance(raw, list) or {name: value for name, value in about.items() if name != "trials"} != terms:
        return None
    try:
        trials = [Trial.from_json(trial) for trial in raw]
        indices = [configs.find(trial.config) for trial in trials]
    except DamageError:
        return None
    if None in indices:
        return None
    pairs = zip(trials, indices, strict=True)
    return tuple(dataclasses.replace(trial, config=configs[index]) for trial, index in pairs if index is not None)


def ended_processes(before: int, trial: Trial) -> int:
    """Returns how many processes have ended while they ran a config, since it last had an outcome.

    A trial that is `lost` is recorded when a process begins to run a config, and one that is `not_run` when it pauses.

    Args:
        before: how many they were before.
        trial: the config's next trial in the journal.
    """
    if trial.outcome is Outcome.NOT_RUN:
        return max(0, before - 1)
    began = trial.outcome is Outcome.LOST and trial.route in (Route.COMPILED_APART, Route.IN_PROCESS)
    return before + 1 if began else 0


class CompileFailures:
    """The failed compilations of one call on one kind of device, whether or not such a device was there.

    Of compile checks, those that did not fail are among them, so that a check need not repeat another.
    """

    def __init__(self, keyed: KeyedCall, directory: Path, limits: SweepLimits, *, also: Iterable[Path] = ()) -> None:
        """Names the failures of a call; nothing is read.

        Args:
            keyed: the call, with the key of the device that configs are compiled for.
            directory: the cache directory.
            limits: the limits of the sweep.
            also: further directories where failures are looked up.
        """
        self._device = keyed.key.device
        # These outlive the journal of a sweep, which starts over now and then.
        self._journal, *self._others = (
            Journal(each, keyed.call.name, keyed.key.device, keyed.key.text, suffix=".uncompiled")
            for each in (directory, *also)
        )
        self._limits = limits
        self._compilers = describe.compilers(keyed.platform)

    def known(self, *, start_over: bool = False, with_compiled: bool = False) -> dict[str, Trial]:
        """Returns the trials of configs that need not be compiled again, by the text of the config.

        Args:
            start_over: whether failures that depend on the machine do not count.
            with_compiled: whether those that a check has compiled are among them.
        """
        return {
            text: self._with_origin(it)
            for text, it in self._known.items()
            if (with_compiled or it.trial.outcome is not Outcome.OK) and it.counts(self._limits, start_over=start_over)
        }

    def note(self, trial: Trial, *, source: str) -> None:
        """Remembers a trial that failed to compile, or has a compiler's figures; forgets a failure that has passed.

        Args:
            trial: the trial.
            source: how it was found: `a sweep` or `a compile check`.

        Raises:
            CacheWriteError: it cannot be remembered; the message says why.
        """
        is_verdict = _is_verdict(trial)
        if not is_verdict and (not self._known or not _compiled(trial)):
            return
        text = text_of(trial.config)
        before = self._known.get(text)
        if not is_verdict and (before is None or before.trial.outcome is Outcome.OK):
            return
        failure = _FailedCompile(
            trial=dataclasses.replace(trial, samples_ms=()),
            source=source,
            found=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
            compilers=self._compilers,
            compile_timeout_s=self._limits.compile_timeout_s,
            memory_limit_bytes=self._limits.memory_limit_bytes,
        )
        if before is not None and _is_same(before, failure):
            return
        self._journal.append(failure.to_json())
        if is_verdict:
            self._known[text] = failure
        else:
            self._known.pop(text, None)

    def discard(self) -> None:
        """Forgets all failures in the cache directory.

        Raises:
            CacheWriteError: they could not be removed; the message says why.
        """
        self._journal.discard()
        vars(self).pop("_known", None)

    @functools.cached_property
    def _known(self) -> dict[str, _FailedCompile]:
        """The last verdict on each config under the present versions."""
        last: dict[str, _FailedCompile] = {}
        refused = 0
        for record in (record for source in [*self._others, self._journal] for record in source.records()):
            try:
                failure = _FailedCompile.from_json(record)
                text = cache.canonical_json(failure.trial.config)
            except ValueError:
                refused += 1
                continue
            if failure.compilers == self._compilers and (text not in last or last[text].found <= failure.found):
                last[text] = failure
        if refused:
            cache.report_once(
                f"{refused} records of failed compilations in {str(self._journal.directory)!r} cannot be understood: "
                "their configs are compiled again"
            )
        return {text: failure for text, failure in last.items() if _is_verdict(failure.trial)}

    def _with_origin(self, failure: _FailedCompile) -> Trial:
        trial = failure.trial
        ended = "compiled" if trial.outcome is Outcome.OK else "failed to compile"
        origin = f"known since {failure.found[:10]}: {ended} for {self._device} in {failure.source}"
        return dataclasses.replace(trial, message=f"{origin}: {trial.message}" if trial.message else origin)


def note_check(failures: CompileFailures, trial: Trial) -> None:
    """Remembers a failure of a compile check; warns where that is not possible."""
    try:
        failures.note(trial, source="a compile check")
    except cache.CacheWriteError as error:
        cache.report_once(f"the failures of a compile check are not remembered: {error}")


@dataclasses.dataclass(frozen=True)
class _FailedCompile(Record):
    """A failed compilation, or one of a check that did not fail, and the conditions under which it counts.

    Attributes:
        trial: the trial; of a check that did not fail, it has the compiler's figures.
        source: how it was found, for messages: `a sweep` or `a compile check`.
        found: when, in UTC as ISO text.
        compilers: the versions and flags of the compilers.
        compile_timeout_s: the deadline that it ran under.
        memory_limit_bytes: the memory limit that it ran under; None for a share of the memory that was free.
        figures: in a record, the compiler's figures of its trial.
    """

    trial: Trial
    source: str
    found: Annotated[str, _date]
    compilers: Mapping[str, Any]
    compile_timeout_s: float
    memory_limit_bytes: int | None
    figures: CompilerFigures | None = None

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Returns the failure that a record describes.

        Raises:
            DamageError: it describes none.
        """
        read = super().from_json(data)
        if read.figures is None:
            return read
        return dataclasses.replace(
            read, trial=dataclasses.replace(read.trial, outcome=Outcome.OK, figures=read.figures)
        )

    def to_json(self) -> JsonObject:
        """Returns the failure as JSON-able data."""
        data, figures = super().to_json(), self.trial.figures
        if self.trial.outcome is not Outcome.OK or figures is None:
            return {name: value for name, value in data.items() if name != "figures"}
        # In files, a trial that is ok has a time.
        trial = dataclasses.replace(self.trial, outcome=Outcome.NOT_RUN, figures=None)
        return data | {"trial": trial.to_json(), "figures": figures.to_json()}

    def counts(self, limits: SweepLimits, *, start_over: bool) -> bool:
        """Returns whether a config that failed like this need not be compiled again.

        An error of the compiler counts always. How much time and memory there is depends on the machine: such a
        failure counts only under limits that are no more generous, and not where the sweep starts over.
        """
        match self.trial.outcome:
            case Outcome.OK | Outcome.ERROR | Outcome.DEVICE_OOM:
                return True
            case Outcome.TIMEOUT:
                return not start_over and self.compile_timeout_s >= limits.compile_timeout_s
            case Outcome.OOM:
                return not start_over and self._had_as_much_memory(limits)
            case Outcome.CRASHED:
                same = self.memory_limit_bytes == limits.memory_limit_bytes
                return not start_over and (same or self._had_as_much_memory(limits))
        return False

    def _had_as_much_memory(self, limits: SweepLimits) -> bool:
        then, now = self.memory_limit_bytes, limits.memory_limit_bytes
        return then is not None and now is not None and then >= now


def _date(text: str) -> str:
    datetime.datetime.fromisoformat(text)
    return text


def _is_verdict(trial: Trial) -> bool:
    """Returns whether a trial shows that its config does not compile, or does in a check, and not a fault around it.

    A compiler without a device, or one that names a memory space, has computed that the device's memory is too small.
    In a worker that holds the device, other programs may have taken the memory.
    """
    if trial.outcome is Outcome.OK:
        return trial.time_ms is None and trial.figures is not None
    if trial.phase is not Phase.COMPILE or trial.outcome not in _AT_COMPILE_TIME:
        return False
    if trial.outcome is Outcome.DEVICE_OOM:
        return trial.route is Route.APART or "memory space" in trial.message
    return trial.outcome is not Outcome.ERROR or not _is_transient(trial.message)


def _is_transient(message: str) -> bool:
    name = message.partition(":")[0].strip()
    kind = getattr(builtins, name, None)
    is_ours = name.startswith("quarantune.")  # such as `UncheckableError`: the config did not get as far as a compiler
    is_transient = isinstance(kind, type) and issubclass(kind, _TRANSIENT)
    return is_ours or is_transient or _PASSING.search(message) is not None


def _compiled(trial: Trial) -> bool:
    has_run = trial.outcome not in _UNSETTLED and trial.phase in (Phase.CHECK, Phase.MEASURE)
    return has_run or trial.outcome is Outcome.OK


def _is_same(before: _FailedCompile, after: _FailedCompile) -> bool:
    """Returns whether a failure adds nothing to what is known."""
    return (
        (before.trial.outcome, before.trial.message, before.trial.figures)
        == (after.trial.outcome, after.trial.message, after.trial.figures)
        and before.compile_timeout_s >= after.compile_timeout_s
        and before.memory_limit_bytes == after.memory_limit_bytes
    )
