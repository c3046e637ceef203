"""The claim on a call, and the journal of its trials."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from quarantune import device_table
from quarantune.answers.answer import Answer, Situation
from quarantune.answers.layers import demands_versions
from quarantune.cache import claims, journal, problems, sweeps
from quarantune.cache.claims import Claim
from quarantune.cache.journal import Journal
from quarantune.cache.problems import CacheWriteError
from quarantune.cache.sweeps import Beginning, Ending, Moment, SweepState
from quarantune.calls import given_inputs
from quarantune.calls.key import KeyedCall
from quarantune.functions import versions
from quarantune.scheduler.recall import Recall, comparable
from quarantune.sweep.limits import SweepLimits
from quarantune.tuning.compile_verdicts import CompileVerdicts
from quarantune.values.codec import DamageError, JsonObject, as_json, canonical_json, short_hash
from quarantune.values.configs import Config
from quarantune.values.errors import DifferentProgramError, TuningFailedError
from quarantune.values.options import Options
from quarantune.values.space import Space
from quarantune.values.trial import UNSETTLED, Outcome, Phase, Route, Trial, lowered_half

_HEARTBEAT_S = 1.0
"""Seconds between two refreshes of a tuning job's claim."""
_STEP_S = 2.0
"""Seconds between two records of what a sweep does, which grow its log by some 100 bytes each."""
_WORST_CASE_S = 60.0
"""Seconds without a refresh after which a tuning job counts as stopped, or its host as gone."""
_WAIT_MESSAGE_S = 5.0
"""Seconds between two reports of a waiting job."""
_MOST_KEYS = 16
"""How many of the latest versions of the code contribute trials of their sweeps to `recall`."""
_FATAL = 2
"""Number of processes that must end while running a config before the config, not chance, counts as the cause."""


class ClaimAndJournal:
    """The claim on one call, its journal, and the known facts about its configs on this kind of device.

    Attributes:
        directory: the cache directory; None if nothing is read or written.
        has_waited: whether another job had the claim first.
    """

    def __init__(self, call: KeyedCall, now: Situation, limits: SweepLimits) -> None:
        """Names the records without reading them.

        Args:
            call: the call.
            now: its situation.
            limits: the limits of the sweep.
        """
        settings = now.settings
        self.directory: Path | None = None if settings.disable_cache else settings.cache_dir
        self.has_waited = False
        self._id, self._is_jitted = call.id, call.call.function.is_jitted
        self._settings = settings
        self._limits = limits
        self._versions = versions.all_that_compiles(call.platform)
        self._demands_versions = demands_versions(call, now)
        self._directory = settings.cache_dir
        self._journal = Journal(settings.cache_dir, *call.id, arguments=call.arguments_hash)
        self._conclusions = journal.conclusions(settings.cache_dir, *call.id)
        self._readable = call.readable
        self._sweeps = sweeps.log(settings.cache_dir, *call.id)
        self._verdicts = CompileVerdicts(call, limits, settings.cache_dir, *settings.read_directories)
        described = [each for each in call.values.values() if isinstance(each, dict)]
        arrays = sorted(canonical_json(each) for each in described if "shape" in each or each.get("leaves"))
        self._keys = journal.keys(settings.cache_dir, call.id.name, call.id.device, canonical_json(arrays))
        parts, options = call.call.function.fingerprint.parts, call.call.function.options
        terms: JsonObject = {name: parts[name] for name in parts if name.startswith("option:")}
        terms["jax"] = call.jax_state  # some of its options change the compilation alone
        if callable(options.ref_fn) or options.check_fn is not None:  # they also get the other arguments
            terms["arguments"] = call.values
        if given_inputs.are_in_force():
            terms["inputs"] = "given"  # what other inputs show is not known
        self._terms = short_hash(canonical_json(terms))
        self._ended: collections.Counter[int] = collections.Counter()  # by the config's index; see `ended_processes`
        self._is_noted = self._has_trials = False
        self._unsaved: CacheWriteError | None = None
        self._claim: Claim | None = None
        self._next_heartbeat = 0.0
        self._doing: Callable[[], str] = str
        self._said, self._said_at = "", -math.inf

    def claim(
        self,
        stack: contextlib.ExitStack,
        *,
        done: Callable[[bool], Answer | TuningFailedError | None],
        failed: Callable[[JsonObject], Answer | TuningFailedError | None],
        say: Callable[[str], None],
        is_apart: bool,
    ) -> Answer | None:
        """Waits until this job has the claim on the call, or another job has answered.

        If the directory cannot hold a claim, the job reads and writes no records from then on.

        Args:
            stack: releases the claim when it closes.
            done: returns the answer, if there is one; takes whether to read the cache afresh, see `EntryFile.load`.
            failed: takes the failure record of another job, and returns it as an answer if it applies to this job.
            say: shows that the job waits.
            is_apart: whether all steps run in workers. If not, nothing refreshes the claim while a config runs here.

        Returns:
            The other job's answer; None if this job tunes.

        Raises:
            TuningFailedError: every config failed in the other job.
        """
        if self.directory is None:
            return None
        next_message_s = 0.0
        # Nothing refreshes the claim during the load of the function, so its deadline counts.
        worst_case_s = _WORST_CASE_S + self._limits.compile_timeout_s + (0.0 if is_apart else self._limits.timeout_s)
        claim = Claim(self.directory, *self._id, worst_case_s=worst_case_s)

        def on_wait(holder: str, waited_s: float) -> None:
            nonlocal next_message_s
            self.has_waited = True
            if waited_s >= next_message_s:
                next_message_s = waited_s + _WAIT_MESSAGE_S
                trials = sum(1 for _ in self._journal.each())
                say(f"waiting for {holder} to tune it ({waited_s:.0f} s, {trials:,} trials so far)")

        try:
            answer: Answer | TuningFailedError | Claim = claims.wait(
                claim, lambda: done(claim.held), on_wait, failed=failed
            )
        except CacheWriteError as error:
            problems.report_once(f"{self._id.name}: the results of this process are not saved: {error}")
            self.directory = None
            return None
        if isinstance(answer, TuningFailedError):
            raise answer
        if not isinstance(answer, Claim):
            return answer
        self._claim = stack.enter_context(claim)
        return None

    def refresh(self) -> None:
        """Shows other jobs that this one is alive, if it has the claim and the last refresh was long ago."""
        now = time.monotonic()
        if self._claim is not None and now >= self._next_heartbeat:
            self._next_heartbeat = now + _HEARTBEAT_S
            self._claim.refresh()
            if now - self._said_at >= _STEP_S and (step := self._doing()) != self._said:
                self._said, self._said_at = step, now
                with self.saving():
                    self._sweeps.append(Moment(now=step).to_json())

    def begin(
        self,
        *,
        total: int | None = None,
        is_bound: bool = False,
        settled: int = 0,
        default: Config | None = None,
        doing: Callable[[], str] = str,
    ) -> None:
        """Records for other processes that the sweep begins.

        Args:
            total: the number of configs to settle; None if unknown.
            is_bound: whether the total is only an upper limit of a search.
            settled: the number of configs that are settled already.
            default: the function's own defaults; None if it cannot run with them.
            doing: returns what the sweep does now, as text.
        """
        self._doing = doing
        if self.directory is None:
            return
        about = Beginning(
            **self._id._asdict(),
            call=self._readable,
            total=total,
            is_bound=is_bound,
            settled=settled,
            default=None if default is None else as_json(default),
            versions=versions.versions(),
            began_s=time.time(),
        )
        with self.saving():
            self._sweeps.discard()  # it holds the latest sweep only
            self._sweeps.append({"sweep": about.to_json()})

    def end(self, state: SweepState, trials: Sequence[Trial] = ()) -> None:
        """Records for other processes how the sweep ended.

        Args:
            state: what became of it.
            trials: the trials of a sweep whose configs all failed.
        """
        if self.directory is not None:
            with self.saving():
                self._sweeps.append(Ending(ended=state, trials=tuple(trials)).to_json())

    def leave_failure(self, terms: JsonObject, trials: Sequence[Trial]) -> None:
        """Leaves the failure of all configs for waiting jobs, if this job has the claim, and discards the journal.

        Args:
            terms: the properties of the sweep on which the failure may depend.
            trials: the sweep's trials.
        """
        if self.directory is not None:
            self.discard()  # another process may find the machine in a better state
        if self._claim is not None:
            self._claim.leave_failure({**terms, "trials": [trial.to_json() for trial in trials]})

    def recall(self, options: Options, *, start_over: bool) -> Recall:
        """Returns the trials of earlier sweeps by program, whatever the code was.

        They come from calls with the same arrays, whatever the other arguments that no `ref_fn` or `check_fn` gets.
        Trials judged by other options do not count, and none does in a block of `set_autotune_inputs`.

        Args:
            options: the author's options.
            start_over: whether to ignore all trials.
        """
        known = self._keys.records()
        self._is_noted = {"key": self._id.key, "terms": self._terms} in known
        has_own_inputs = given_inputs.are_in_force()
        alike = [each for each in known if each.get("terms") == self._terms and not (start_over or has_own_inputs)]
        latest = [*dict.fromkeys(key for each in alike if isinstance(key := each.get("key"), str))][-_MOST_KEYS:]
        trials: dict[tuple[str, str], Trial] = {}
        finals: list[list[Trial]] = []
        for key in latest:
            of = self._directory, self._id.name, self._id.device, key
            defaults = [each for each in alike if each["key"] == key and "trial" in each]
            for record in [*defaults, *Journal(*of).each()]:
                with contextlib.suppress(KeyError, DamageError):
                    trial, against = Trial.from_json(record["trial"]), comparable(str(record["reference"]))
                    counts = record["versions"] == self._versions and self._still_counts(trial, record)
                    if counts and (lowered := lowered_half(trial.program)) and against is not None:
                        trials[lowered, against] = trial
            for record in journal.conclusions(*of).each():
                with contextlib.suppress(KeyError, DamageError, TypeError):
                    finals.append([Trial.from_json(each) for each in record["finalists"]])
        return Recall(trials, finals, has_reference=options.compares_outputs or options.calibrates)

    def read(self, configs: Space) -> dict[int, Trial]:
        """Returns the trials of an interrupted sweep that settle a config, by the config's index.

        A config that ended the processes that ran it is also settled.

        Args:
            configs: the configs.
        """
        trials: dict[int, Trial] = {}

        def parse(record: JsonObject) -> tuple[Trial, bool]:
            trial = Trial.from_json(record["trial"])
            if record.get("versions") != self._versions:  # other compilers may give other bits
                trial = dataclasses.replace(trial, bits=None, digest="", batch=None)
            return trial, self._still_counts(trial, record)

        def complaint(refused: int) -> str:
            directory = str(self._journal.directory)
            return f"{refused} records of the journal in {directory!r} cannot be read as trials and are ignored"

        for trial, counts in journal.understood(self._journal.each(), parse, complaint):
            configs.whole()  # any of them may have a trial
            if (index := configs.find(trial.config)) is None:
                continue
            self._ended[index] = ended_processes(self._ended[index], trial)
            if counts and not trial.is_ruled_out:  # the faster config may no longer be among the configs
                when = trial.recalled_from or trial.ended_s
                trials[index] = dataclasses.replace(trial, config=configs[index], recalled_from=when)
        usable = [trial.own_ms for index, trial in trials.items() if trial.is_usable and configs.keeps(index)]
        best_ms = min((ms for ms in usable if ms is not None), default=math.inf)
        for index in [index for index, trial in trials.items() if trial.is_bound and (trial.own_ms or 0) <= best_ms]:
            del trials[index]  # the faster config that stopped it may no longer be among the configs
        for index, times in self._ended.items():
            if times >= _FATAL:
                trials[index] = Trial(
                    config=configs[index],
                    outcome=Outcome.CRASHED,
                    phase=Phase.CHECK,
                    message=f"the process ended {times} times while it ran this config",
                    route=Route.IN_PROCESS,
                )
        return trials

    def discard(self, *, with_failures: bool = False) -> None:
        """Removes the journal and, `with_failures`, the failed compilations."""
        with self.saving():
            self._journal.discard()
            self._conclusions.discard()
            if with_failures:
                self._verdicts.discard()

    def forget_another_program(self, kind: type[BaseException] | None, *_: object) -> None:
        """Removes all records of the key if a sweep ends because its workers had another program."""
        if kind is DifferentProgramError:
            self.discard(with_failures=True)
            with self.saving():
                self._sweeps.discard()

    def forget_refused(self, kind: type[BaseException] | None, *_: object) -> None:
        """Removes the record of the sweep if an error refused it before any config ran: nothing was interrupted."""
        if kind is not None and issubclass(kind, (TypeError, ValueError)) and not self._has_trials:
            with self.saving():
                self._sweeps.discard()

    def append(
        self, trial: Trial, *, reference: str | None, was_troubled: bool = False, is_untuned: bool = False
    ) -> None:
        """Records a trial.

        Args:
            trial: the trial.
            reference: the program of the reference; see `Recall`.
            is_untuned: whether it is the trial of the function's own defaults, which are not one of the configs.
            was_troubled: whether its config is known to have crashed or hung.
        """
        self.refresh()
        self._has_trials = True
        if self.directory is None:
            return
        record = {
            "trial": trial.to_json(),
            "limits": self._limits.deadlines(),
            **({} if (memory := self._limits.memory_limit_bytes) is None else {"memory_limit": memory}),
            "versions": self._versions,
            **({"reference": reference} if trial.program else {}),
        }
        mine = {"key": self._id.key, "terms": self._terms}
        with self.saving():
            if not self._is_noted:
                self._is_noted = True
                self._keys.append(mine)
            if is_untuned:
                self._keys.append({**mine, **record})
                return
            if self._is_jitted:
                self._verdicts.note(trial, source="a sweep")
            self._journal.append(record)
            is_trouble = trial.outcome in (Outcome.CRASHED, Outcome.TIMEOUT)
            if is_trouble or (was_troubled and trial.outcome not in UNSETTLED):
                journal.remember_trouble(
                    self.directory, self._id.name, self._id.device, as_json(trial.config), trial.outcome.value
                )

    def append_conclusion(
        self, finalists: Sequence[Trial], *, best: Config, tie: Sequence[Config], default: Config | None
    ) -> None:
        """Records how the sweep ended, for reports.

        Args:
            finalists: the trials of the configs that were timed in turn, with the times of the final; empty if one
                config was far ahead.
            best: the winner.
            tie: the configs that the noise cannot distinguish from the winner.
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
        self.end(SweepState.DONE)

    def troubled(self, configs: Space) -> set[int]:
        """Returns the configs that crashed or hung for this function on this device, whatever the shapes.

        After `read`, they include configs that may have ended a process that ran them.
        """
        if self.directory is None:
            return set()
        known = journal.troublesome(self.directory, self._id.name, self._id.device)
        found = map(configs.find_text, known)
        suspects = {index for index, times in self._ended.items() if 0 < times < _FATAL}
        return suspects | {index for index in found if index is not None}

    def known_not_to_compile(
        self, configs: Space, trials: Mapping[int, Trial], *, start_over: bool
    ) -> dict[int, Trial]:
        """Returns the trials of further configs that are known not to compile, unless no other config is left.

        If all configs are known to fail, the fault may lie elsewhere, so all of them run again.

        Args:
            configs: the configs.
            trials: the known trials, by index.
            start_over: whether to ignore failures that depend on the machine.
        """
        if self.directory is None:
            return {}
        found: dict[int, Trial] = {}
        for text, trial in self._verdicts.known(start_over=start_over).items():
            index = configs.find_text(text)
            if index is not None and index not in trials:
                found[index] = dataclasses.replace(trial, config=configs[index])
        if not found or any(trial.outcome is Outcome.OK for trial in trials.values()):
            return found
        return found if configs.has_more_than(0, besides=found.keys() | trials.keys()) else {}

    def estimates(self, configs: Space) -> dict[int, float]:
        """Returns the times that compile checks estimate, relative to the best, by config and fastest first."""
        found: dict[int, tuple[float, float]] = {}
        for text, trial in self._verdicts.known(with_compiled=True).items() if self.directory else ():
            order, index = device_table.estimated_order(trial.figures, self._id.device), configs.find_text(text)
            if 0 < order[1] < math.inf and index is not None and configs.keeps(index):
                found[index] = order
        ms, cycles = min(found.values(), default=(math.inf, math.inf))
        return {
            index: found[index][0] / ms if ms < math.inf else found[index][1] / cycles
            for index in sorted(found, key=found.__getitem__)
        }

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Notes a failure to save something in the block."""
        try:
            yield
        except CacheWriteError as error:
            self._unsaved = error

    @property
    def saved(self) -> str:
        """Whether the result was saved, in a few words."""
        if self._settings.disable_cache:
            return "not saved, because the cache is disabled"
        return "saved" if self.directory is not None and self._unsaved is None else "not saved"

    def report_unsaved(self) -> None:
        """Warns once if the result, or else some trials, could not be saved."""
        if self._unsaved is not None:
            problems.report_once(str(self._unsaved))

    def _still_counts(self, trial: Trial, record: Mapping[str, object]) -> bool:
        if trial.outcome in UNSETTLED:
            return False
        if trial.outcome is Outcome.TIMEOUT and record["limits"] != self._limits.deadlines():
            return False
        if trial.outcome is Outcome.OOM and _has_more(self._limits, record.get("memory_limit")):
            return False
        return not self._demands_versions or record["versions"] == self._versions


def _has_more(limits: SweepLimits, then: object) -> bool:
    """Returns whether workers may use more memory than under an earlier limit in bytes; None is no explicit limit."""
    now = limits.memory_limit_bytes
    return isinstance(then, (int, float)) and (now is None or now > then)


def left_trials(about: Mapping[str, object], terms: JsonObject, configs: Space) -> tuple[Trial, ...] | None:
    """Returns the trials of a failure that another job has left, if it ran the same sweep.

    Args:
        about: the failure. Anybody may have written it.
        terms: the properties of this job's sweep on which a failure may depend.
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

    A process records a `lost` trial when it begins to run a config, and a `not_run` trial when it pauses.

    Args:
        before: the number before this trial.
        trial: the config's next trial in the journal.
    """
    if trial.outcome is Outcome.NOT_RUN:
        return max(0, before - 1)
    began = trial.outcome is Outcome.LOST and trial.route in (Route.COMPILED_APART, Route.IN_PROCESS)
    return before + 1 if began else 0
