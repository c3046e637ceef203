"""Tunes for one call: claims its key, reads the journal, prunes, sweeps and saves, or waits for the job that does."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quarantune.answers import guard, saved_program
from quarantune.answers.answer import Answer, Origin, Situation
from quarantune.answers.layers import Layers, save
from quarantune.answers.memory import Memory
from quarantune.cache.entry_file import Entry
from quarantune.cache.joining import STALE
from quarantune.cache.sweeps import SweepState
from quarantune.calls.call import BoundCall
from quarantune.calls.key import KeyedCall, check_can_travel
from quarantune.engine.place import place_of
from quarantune.functions import batch
from quarantune.host.interruptions import is_interruption
from quarantune.host.locks import lazy
from quarantune.host.process import in_sandbox
from quarantune.measure import finals, intervals
from quarantune.results import report
from quarantune.results.progress import Progress
from quarantune.results.result import TuningResult
from quarantune.scheduler.plan import NOTHING_MORE, Mode
from quarantune.scheduler.recall import Recall
from quarantune.sweep.ledger import Ledger, Listener
from quarantune.sweep.limits import EXHAUSTED, MAX_TRIALS, TIME_BUDGET, SearchLimits
from quarantune.sweep.request import SweepRequest, Swept
from quarantune.sweep.searching import Searching
from quarantune.tuning import scatter
from quarantune.tuning.claim_and_journal import ClaimAndJournal, left_trials
from quarantune.tuning.outcome import call_result, entry_for, failed_sweep, findings_now, measured_entry, saved_result
from quarantune.tuning.reuse import CompilationSeeds
from quarantune.tuning.starts import starts
from quarantune.values.codec import JsonObject
from quarantune.values.configs import MOST_CONFIGS, Config, format_config
from quarantune.values.errors import DifferentProgramError, TuningFailedError
from quarantune.values.options import BITWISE
from quarantune.values.trial import (
    AGAIN,
    READY,
    UNSETTLED,
    UNTUNED,
    Findings,
    Interval,
    Outcome,
    Phase,
    Searched,
    Trial,
    count_outcomes,
    failed_text,
    is_same_program,
    pruned_trial,
    with_bits,
)

if TYPE_CHECKING:
    from quarantune.engine.among_ranks import Board

_logger = logging.getLogger("quarantune")

_FIRST = 16
"""How many configs with the best estimates of a compile check run first, whatever their estimates."""
_FAR = 4.0
"""Multiple of the best estimate above which a config does not run. Published winners of TPU kernels reach at most 2."""


_UNBOUND = "unbound axis name"
"""Part of JAX's message for a collective outside of its mesh."""
_NO_MESH = (
    "configs failed because they communicate over an axis of the mesh and the function's defaults do not: it was tuned "
    "on one device; give its tunables defaults that communicate, and it is tuned on a mesh"
)


class Tuning:
    """The last rung, `tune`: finds the config of a call by a sweep, or waits for the job that does."""

    def __init__(
        self,
        layers: Layers,
        memory: Memory,
        *,
        job: Callable[..., TuningJob] | None = None,
        on_phase: Callable[[int, str], None] = lambda index, phase: None,
    ) -> None:
        """Starts nothing.

        Args:
            layers: the saved results of the function.
            memory: remembers answers and failures.
            job: makes the job that tunes for a call; None for `TuningJob`.
            on_phase: called with the index of a config and the phase that it enters; the last phase is `end`.
        """
        self.layers = layers
        self.seeds = CompilationSeeds()
        self.on_phase = on_phase
        self._memory = memory
        self._job = job or TuningJob

    def tune(self, call: KeyedCall, now: Situation, *, earlier: Entry | None = None) -> Answer:
        """Tunes for a call, and remembers the result or the failure in this process; see `TuningJob`."""
        try:
            result = self._job(call, now, self, earlier=earlier).run()
        except TuningFailedError as error:
            self._memory.remember(call, error)
            raise
        return self.remember(call, result, now)

    def help(self, call: KeyedCall, now: Situation, board: Board, why_over: Callable[[], str]) -> None:
        """Measures configs of a call for the rank that tunes it; see `among_ranks.help_with`."""
        from quarantune.engine import among_ranks

        request = SweepRequest.of(call, now.settings, Ledger())
        records = ClaimAndJournal(call, now, request.limits)
        options = call.call.function.options
        recall = Recall() if records.directory is None else records.recall(options, start_over=now.start_over)
        among_ranks.help_with(dataclasses.replace(request, recall=recall, space=call.call.configs), board, why_over)

    def remember(self, call: KeyedCall, result: TuningResult, now: Situation) -> Answer:
        """Remembers a result in this process, and returns it as an answer."""
        limits, found = SearchLimits.of(call.call.function.options, now.settings), result.findings
        budget = limits.budget(result.stopped) or result.seen  # `auto` sets its own budget
        found = dataclasses.replace(found, search=dataclasses.replace(found.search, budget=budget))
        record = entry_for(call, result.best_config, found, {"name": f"tune_for by {result.by}"} if result.by else {})
        if result.calls:
            record["calls"] = [share.to_json() for share in result.calls]
        directory = None if now.settings.disable_cache else now.settings.cache_dir
        answer = Answer(Origin.MEASURED, result.best_config, record, directory=directory, result=result)
        self._memory.remember(call, dataclasses.replace(answer, origin=Origin.SAVED, result=None))
        return answer


class TuningJob:
    """One call that this process tunes for, or waits for while another process tunes."""

    def __init__(self, keyed: KeyedCall, now: Situation, tuning: Tuning, *, earlier: Entry | None = None) -> None:
        """Sets up a job without reading or starting anything.

        Args:
            keyed: the call.
            now: its situation. With `start_over`, the job tunes even a cached call: an earlier search that ended by its
                budget continues, if more budget is left now; otherwise every config runs again, whatever the journal
                holds. If another job is tuning the call, this one waits for it unless `ALWAYS_TUNE` is set.
            tuning: the rung that asks for the job.
            earlier: with `start_over`, the entry that existed at the time of the call.

        Raises:
            RuntimeError: this process is a worker.
            TypeError: the function cannot be tuned in the context of the call.
        """
        check_outside(keyed.call)
        check_can_travel(keyed.call)
        if keyed.axes is not None:
            keyed.axes.check(keyed.call.name)
        self._keyed, self._key, self._now, self._tuning = keyed, keyed.id, now, tuning
        self._call = keyed.call
        self._name = keyed.call.name
        self._options = keyed.call.function.options
        self._configs = keyed.call.configs
        self._start_over = now.start_over
        self._follows = not (now.start_over and now.settings.always_tune)
        self._earlier = earlier
        self._stopped, self._saw_all = EXHAUSTED, True
        self._troubled: set[int] = set()
        self._not_compiling: set[int] = set()
        self._far: list[int] = []
        self._ledger = Ledger()
        self._recall = Recall()  # until the journal is read
        self._request = SweepRequest.of(keyed, now.settings, self._ledger)
        self._limits = self._request.limits
        self._records = ClaimAndJournal(keyed, now, self._limits)
        journal = Listener(
            on_trial=self._record,
            on_provisional=self._append,
            on_default=self._record_defaults,
            on_tick=self._records.refresh,
        )
        self._ledger.listen(journal)
        self._ledger.listen(Listener(on_phase=self._tell_author))

    def run(self) -> TuningResult:
        """Returns the result of a sweep, or of another job that tuned the call.

        Raises:
            TuningFailedError: every config failed.
            DifferentProgramError: workers run another program than this process.
        """
        check_numerics(self._call)
        total = self._configs.size or self._configs.reach(self._search.max_trials or MOST_CONFIGS)
        with self._shown_progress(total) as progress, contextlib.ExitStack() as stack:
            shown = Listener(
                on_trial=lambda index, trial: progress.step(trial),
                on_phase=progress.enter,
                on_default=lambda trial: progress.note_default(trial.time_ms),
            )
            self._ledger.listen(shown)
            stack.callback(self._ledger.close)
            stack.callback(self._records.report_unsaved)
            stack.push(self._keep_best)
            if (answer := self._take_claim(progress, stack)) is not None:
                progress.end("tuned by another job")
                return self._result_of(answer)
            goes_on = self._follows and self._records.has_waited
            self._start_over = self._now.start_over and not goes_on and not self._may_go_on()
            if self._records.directory is not None:
                stack.push(self._records.forget_another_program)
                stack.push(self._records.forget_refused)
                found = self._records.read(self._configs)
                if self._start_over:
                    self._records.discard()
                else:
                    self._ledger.recall(self._of_this_program(found))
                self._recall = self._records.recall(self._options, start_over=self._start_over)
                progress.on_interrupt(
                    "they are kept: the next run of the program continues from there "
                    "(here: tune or run with resume=True)"
                )
            if self._search.tries_all:
                self._prune(progress)
                self._ledger.recall(self._known_not_to_compile())
                swept = self._sweep(progress)
            else:
                swept = self._sweep_by_search(progress)
            return self._conclude(self._beyond_estimates(swept, progress), progress)

    def _shown_progress(self, total: int = 0) -> Progress:
        """Shows the progress of the job from now on, and returns it."""
        default = None if total == 0 else self._call.default_index
        return Progress(
            self._keyed.label,
            total,
            name=self._name,
            shown=self._now.settings.progress,
            config_of=self._configs.__getitem__ if total else None,
            default=None if default is None else self._configs[default],
            may_redraw=self._request.mode is not Mode.HERE,
        )

    def _tell_author(self, index: int, phase: str) -> None:
        if index >= 0 and phase not in (READY, AGAIN):
            self._tuning.on_phase(index, phase)

    # The claim

    def _take_claim(self, progress: Progress, stack: contextlib.ExitStack) -> Answer | None:
        """Claims the call for this job, or returns the result of another job.

        Raises:
            TuningFailedError: every config failed in the other job.
        """

        def done(afresh: bool) -> Answer | None:
            if not self._follows:
                return None
            layers = self._tuning.layers
            found = layers.saved(self._keyed, self._now, other_than=self._earlier, afresh=afresh)
            if found is None or (self._now.start_over and guard.is_dropped(found.config, self._keyed)):
                return None
            return found if layers.serves(found, self._now) else None

        is_apart = self._request.mode is Mode.IN_WORKERS
        return self._records.claim(stack, done=done, failed=self._failure_of, say=progress.say, is_apart=is_apart)

    def _terms(self) -> JsonObject:
        """Returns the properties of this sweep on which its failure may depend."""
        search = {} if self._search.tries_all else {"search": self._search.to_json()}
        call = {"space": self._call.space, "arguments": self._keyed.arguments_hash}
        return {**call, "limits": self._limits.deadlines(), **search}

    def _failure_of(self, about: JsonObject) -> TuningFailedError | None:
        """Returns the failure of another job, if it ran the same configs under the same limits."""
        trials = left_trials(about, self._terms(), self._configs) if self._follows else None
        if trials is None or (self._search.tries_all and len(trials) != len(self._configs)):
            return None
        return self._failure(trials)

    def _failure(self, trials: tuple[Trial, ...]) -> TuningFailedError:
        message, sweep = report.failure_message(self._name, trials), failed_sweep(self._keyed, trials)
        return TuningFailedError(message, trials=trials, key=self._key.key, sweep=sweep)

    # The journal

    def _record(self, index: int, trial: Trial) -> None:
        if trial.outcome is not Outcome.NOT_RUN:
            self._append(index, trial)

    def _of_this_program(self, found: Mapping[int, Trial]) -> Mapping[int, Trial]:
        """Returns the trials of an interrupted sweep by config, if the best config still has the program of its trial.

        Otherwise it leaves out trials with a program: workers look these up when they lower each config.
        """
        usable = [trial for trial in found.values() if trial.is_usable and trial.program]
        ours = None
        if usable and place_of(self._now.settings).is_here:
            best = min(usable, key=lambda trial: math.inf if trial.merit is None else trial.merit)
            ours = saved_program.traced_apart(self._keyed, best.config)
        is_proved = ours is None or is_same_program(ours.identity, best.program)
        if is_proved and self._key not in self._tuning.layers.differences:
            return found
        return {index: trial for index, trial in found.items() if not trial.program}

    def _record_defaults(self, trial: Trial) -> None:
        if trial.outcome not in UNSETTLED:
            self._records.append(trial, reference=self._recall.reference, is_untuned=True)

    def _append(self, index: int, trial: Trial) -> None:
        self._records.append(trial, reference=self._recall.reference, was_troubled=index in self._troubled)

    def _known_not_to_compile(self) -> dict[int, Trial]:
        """Returns the trials of further configs that are known not to compile, so that nobody compiles them again."""
        found = self._records.known_not_to_compile(self._configs, self._ledger.trials, start_over=self._start_over)
        self._not_compiling = set(found)
        if found:
            _logger.info(
                "%s: %d configs are known not to compile for %s, and are not compiled again",
                self._name,
                len(found),
                self._key.device,
            )
        return found

    def _far_behind(self, estimates: Mapping[int, float]) -> dict[int, Trial]:
        """Returns the trials of configs that need not run, because a compile check estimated them far behind the best.

        Those with the best estimates always run, because the very best may turn out to be wrong.
        """
        far = [] if self._start_over or not self._options.is_by_time else [*estimates.items()][_FIRST:]
        found = {
            index: dataclasses.replace(
                pruned_trial(self._configs[index]), message=f"estimated at {ratio:.3g}x the best"
            )
            for index, ratio in far
            if ratio > _FAR and index not in self._ledger.trials and index != self._call.default_index
        }
        self._far = [*found]
        return found

    # The sweep

    def _prune(self, progress: Progress) -> None:
        dropped = {index: pruned_trial(self._configs[index]) for index in sorted(self._call.pruned)}
        for index, trial in (self._far_behind(self._records.estimates(self._configs)) | dropped).items():
            self._ledger.recall({index: trial})
            progress.step(trial)

    def _sweep(self, progress: Progress) -> Swept:
        """Runs the configs without a trial, and compares the fastest of all."""
        trials = self._ledger.trials
        left = {index: self._configs[index] for index in self._configs.listed() if index not in trials}
        progress.recall([trial for trial in trials.values() if trial.outcome is not Outcome.PRUNED])
        self._records.begin(
            total=len(self._configs),
            settled=len(trials),
            default=self._call.own_defaults,
            doing=progress.doing,
        )
        if not left and not finals.finalists(trials):
            return Swept()
        self._troubled = self._records.troubled(self._configs) & left.keys()
        last = set() if self._start_over else self._troubled
        ordered = sorted(left, key=lambda index: index in last)
        return self._run({index: left[index] for index in ordered}, last)

    def _sweep_by_search(self, progress: Progress) -> Swept:
        """Runs the configs that the search asks for, and compares the fastest of all."""
        keeps, trials = self._configs.keeps, self._ledger.trials
        self._ledger.keep({index: trial for index, trial in trials.items() if keeps(index)})
        self._troubled = self._records.troubled(self._configs)
        estimates = self._records.estimates(self._configs)
        far = self._far_behind(estimates)
        failures = self._known_not_to_compile() | far
        first = [] if self._records.directory is None else starts(self._keyed, self._tuning.layers, self._now)
        first += [self._configs[index] for index in [*estimates][:_FIRST]]
        default = self._call.default_index
        searching = Searching(
            self._search,
            self._configs,
            defaults=None if default is None or not keeps(default) or default in failures else default,
            starts=[config for config in first if self._configs.find(config) not in self._troubled],
            known=dict(trials),
            failures=failures,
            trial_s=self._limits.compile_timeout_s + self._limits.timeout_s,
        )
        progress.expect(
            searching.total,
            is_bound=True,
            budget_s=searching.time_budget_s,
            why_ended=lambda: self._search.why_ended(searching.stopped),
        )
        progress.recall(list(trials.values()))
        self._records.begin(
            total=searching.total,
            is_bound=True,
            settled=len(trials),
            default=self._call.own_defaults,
            doing=progress.doing,
        )
        self._ledger.recall(far)
        configs = searching.take(1)
        swept = Swept()
        if configs or finals.finalists(trials):
            swept = self._run(configs, self._troubled, searching)
        self._stopped, self._saw_all = searching.stopped, searching.saw_all
        return swept

    def _beyond_estimates(self, swept: Swept, progress: Progress) -> Swept:
        """Runs the configs that estimates have left out, the best first, as long as no config works."""
        while self._far and not any(trial.is_usable for trial in self._ledger.trials.values()):
            chosen, self._far = self._far[:_FIRST], self._far[_FIRST:]
            self._ledger.keep({index: it for index, it in self._ledger.trials.items() if index not in chosen})
            progress.total += len(chosen)
            swept = self._run({index: self._configs[index] for index in chosen}, set())
        return swept

    def _run(self, configs: Mapping[int, Config], last: Collection[int], source: Searching | None = None) -> Swept:
        """Runs configs, and then those that a search asks for."""
        problem = self._request.problem
        if self._call.default_index in self._not_compiling:
            problem = dataclasses.replace(problem, untuned=None)  # nor are the defaults compiled again
        request = dataclasses.replace(
            self._request,
            problem=problem,
            troubled=last,
            recall=self._recall,
            space=None if source is None else self._configs,
            source=source or NOTHING_MORE,
        )
        place = place_of(self._now.settings)
        if self._now.board is not None and place.is_here:
            from quarantune.engine import among_ranks  # few programs have ranks

            return among_ranks.lead(request, configs, self._now.board, self._configs)
        return place.run(request, configs)

    @lazy
    def _search(self) -> SearchLimits:
        """The search and its budgets."""
        return SearchLimits.of(self._options, self._now.settings).resolved(self._configs)

    def _may_go_on(self) -> bool:
        """Returns whether an earlier search ended by a budget and more budget is left now."""
        if self._records.directory is None or self._search.tries_all:
            return False
        known = self._tuning.layers.saved(self._keyed, self._now)
        searched = Searched() if known is None or STALE in known.record else known.findings.search
        most = self._search.max_trials
        is_left = most is None or (searched.seen is not None and searched.seen < most)
        return searched.stopped in (MAX_TRIALS, TIME_BUDGET) and is_left

    def _all_trials(self) -> tuple[Trial, ...]:
        """Returns the trials of all configs in order, or of the configs that a search asked for."""
        trials = self._ledger.trials
        if self._search.tries_all:
            return tuple(trials[index] for index in range(len(self._configs)))
        return tuple(trials.values())

    def _searched(self) -> Searched:
        """Returns how thorough the sweep was."""
        tried = sum(trial.outcome is not Outcome.NOT_RUN for trial in self._ledger.trials.values())
        size = self._configs.size
        return Searched(self._stopped, size if self._saw_all else tried, size, self._search.budget(self._stopped))

    # The result

    def _conclude(self, swept: Swept, progress: Progress) -> TuningResult:
        if swept.complaint:
            _logger.warning("%s: %s", self._name, swept.complaint)
        if not self._has_winner(swept):
            progress.end(failed_text(tuple(self._ledger.trials.values())))
            raise self._error(swept)
        default, known = self._call.default_index, {**self._ledger.trials, **swept.retimed}
        if swept.untuned is not None and finals.default_among(self._ledger.trials, default) == UNTUNED:
            known[UNTUNED] = dataclasses.replace(swept.untuned, config=self._call.own_defaults or {})
        judges = self._options.judges_outputs  # without a judge, the defaults may compute something else
        settled, (winner, *level) = finals.conclude(known, swept.final, default=default, untuned_wins=judges)
        own = swept.untuned if default is None else settled.get(default)
        settled = _with_bits(settled, own)
        self._ledger.keep({index: trial for index, trial in settled.items() if index != UNTUNED})
        trials = self._all_trials()
        best, tie = settled[winner], tuple(settled[index].config for index in level)
        self._log_winner(best, tie, tried=len(trials), is_untuned=winner == UNTUNED)
        finalists = tuple(settled[index] for index in swept.final.rounds_ms)
        own_index = finals.default_among(settled, default)
        defaults = settled.get(own_index)
        self._records.append_conclusion(finalists, best=best.config, tie=tie, default=self._call.own_defaults)
        assert best.time_ms is not None
        findings = findings_now(self._call, Findings.of(best, defaults), trials, self._searched())
        if defaults is not None and defaults.outcome is Outcome.OK:  # not ruled out after a sample or two
            interval = self._interval(swept.final, known, (winner, best), (own_index, defaults))
            findings = dataclasses.replace(findings, speedup_interval=interval)
        if doubt := scatter.doubt(best, [settled[index] for index in level], findings.speedup_interval):
            _logger.warning("%s: %s; %s", self._name, doubt, scatter.REMEDY.format(device=self._key.device))
        program = functools.partial(
            saved_program.measured_program,
            self._keyed,
            defaults=defaults,
            is_here=place_of(self._now.settings).is_here,
            is_disputed=self._key in self._tuning.layers.differences,
        )
        entry = measured_entry(
            self._keyed,
            best,
            findings,
            self._search_as_json(),
            among=settled.values(),
            program=program,
            samples=len(best.samples_ms),
        )
        self._save(entry)
        told = findings.text()
        if own is not None and own.outcome.is_failure:
            told += f", and the defaults ended as {own.outcome}"
        progress.conclude(best.config, told, saved=self._records.saved)
        executable = None
        if self._keyed.axes is None:  # otherwise the executable takes the arrays of all shards
            self._tuning.seeds.add(swept.compiled.get(winner, {}))
            if not self._options.time_grad:  # otherwise the executable returns the gradients, too
                executable = swept.executables.get(winner)
        return call_result(
            self._keyed,
            best.config,
            findings,
            trials,
            finalists=finalists,
            tie=tie,
            executable=executable,
            noise=swept.noise,
        )

    def _has_winner(self, swept: Swept) -> bool:
        """Returns whether a config may win, or the defaults because no config has their bits."""
        own = swept.untuned
        can_fall_back = self._options.numerics == BITWISE and own is not None and own.is_usable
        return can_fall_back or any(trial.is_usable for trial in self._ledger.trials.values())

    def _interval(self, final: finals.Final, before: Mapping[int, Trial], *both: tuple[int, Trial]) -> Interval | None:
        """Returns the interval of the speed-up; None without a final, or if both are one program.

        Args:
            final: the final.
            before: the trials by index, as before the final.
            *both: the winner and the defaults: the index, and the trial after the final.
        """
        (winner, best), (default, defaults) = both
        if len(final.rounds_ms) < 2 or best.samples_ms == defaults.samples_ms:
            return None
        typical_ms = finals.with_same_program(final.typical_ms, before)
        pairs = zip(typical_ms.get(winner, ()), typical_ms.get(default, ()), strict=False)
        return intervals.speedup_interval(
            best.samples_ms,
            defaults.samples_ms,
            clock=best.clock or "wall",
            processes=final.counts,
            typical=[theirs / ours for ours, theirs in pairs],
        )

    def _error(self, swept: Swept) -> Exception:
        """Returns the error if every config failed. Waiting jobs also get it; later jobs tune again."""
        failure = self._failure(self._all_trials())
        self._records.end(SweepState.FAILED, failure.trials)
        ran = [trial for index, trial in self._ledger.trials.items() if index not in self._not_compiling]
        if (error := callers_error(self._call, ran, only_there=None if swept.is_traced else failure)) is not None:
            self._records.discard(with_failures=True)
            return error
        self._records.leave_failure(self._terms(), failure.trials)
        return failure

    def _log_winner(self, best: Trial, tie: Sequence[Config], *, tried: int, is_untuned: bool) -> None:
        """Logs the winner of a sweep, and warns if no config won, or if some had no chance."""
        if is_untuned:
            shown_best = format_config(best.config)
            _logger.warning(
                "%s: its own defaults (%s) beat all %d configs: calls run with them", self._name, shown_best, tried
            )
        if self._keyed.axes is None and any(_UNBOUND in trial.message for trial in self._ledger.trials.values()):
            _logger.warning("%s: %s", self._name, _NO_MESH)
        _logger.info(
            "%s: best of %d is %s: %.4g ms%s",
            self._name,
            tried,
            format_config(best.config),
            best.time_ms,
            f", level with {' and '.join(map(format_config, tie))}" if tie else "",
        )

    def _keep_best(self, kind: type[BaseException] | None, *_: object) -> None:
        """Makes this process's calls use the best config so far, if its user interrupted the sweep."""
        trials = self._ledger.trials
        is_usable = any(trial.is_usable for trial in trials.values())
        if kind is not None and issubclass(kind, KeyboardInterrupt) and is_usable:
            settled, level = finals.conclude(trials, finals.Final(), default=self._call.default_index)
            best, ended = settled[level[0]], tuple(settled.values())
            findings = Findings.of(best, None, trials=count_outcomes(ended))
            self._tuning.remember(self._keyed, call_result(self._keyed, best.config, findings, ended), self._now)

    def _search_as_json(self) -> JsonObject:
        return {"name": self._search.label, "seed": self._search.seed}

    def _save(self, entry: Entry) -> None:
        if self._records.directory is not None:
            with self._records.saving():
                save(self._now.settings, self._key, entry)

    def _result_of(self, answer: Answer) -> TuningResult:
        return saved_result(self._keyed, answer)


def callers_error(
    call: BoundCall, trials: Iterable[Trial], *, only_there: TuningFailedError | None
) -> Exception | None:
    """Returns the error that ended all configs, if tracing the function with its defaults also raises it here.

    It says nothing about other calls of the same key, such as calls with a tuple instead of a list. This process
    compiles and runs nothing, so it finds no error of a function that is not jitted.

    Args:
        call: the call.
        trials: the trials of the configs that ran; trials dropped by `prune_fn` are ignored.
        only_there: the error to return if only workers raise one during tracing; None if a worker traced a config.
    """
    from quarantune.worker.failures import describe_error  # cached calls do not need it

    ends = {(trial.outcome, trial.phase, trial.message) for trial in trials if trial.outcome is not Outcome.PRUNED}
    if len(ends) != 1 or not call.function.is_jitted or call.untuned is None:
        return None
    jitted: Any = call.function.fn
    try:
        jitted.eval_shape(*call.args, **call.kwargs)
    except Exception as error:
        if is_interruption(error):
            raise
        if [end[::2] for end in ends] == [(Outcome.ERROR, describe_error(error).message)]:
            error.add_note(f"{call.name}: every config fails in this way, and so do the defaults")
            return error
        return None
    outcome, phase, message = ends.pop()
    if only_there is None or (outcome, phase) != (Outcome.ERROR, Phase.COMPILE):
        return None
    only_there.add_note(str(DifferentProgramError(call.name, f"only workers raise {message} while they trace it")))
    return only_there


def check_numerics(call: BoundCall) -> None:
    """Raises if a call cannot be tuned under its numerics.

    Raises:
        ValueError: it has no defaults whose bits to keep, or its arguments have no batch.
    """
    options = call.function.options
    if options.numerics == BITWISE and call.untuned is None:
        raise ValueError(
            f"{call.name}: numerics='bitwise' keeps the bits of the function's own defaults, and it cannot run with "
            f"them: give every tunable a default that prune_fn keeps, or leave numerics (or QUARANTUNE_NUMERICS) out"
        )
    if options.check_batch is not None:
        batch.bound_batch(call.function.fn, call.args, call.kwargs, options.check_batch)


def check_outside(call: BoundCall) -> None:
    """Raises an error in a worker: tuning there would start workers that tune, and so on."""
    if in_sandbox():
        raise RuntimeError(
            f"{call.name}: a process that runs another config, or imports the module of a function to tune it, "
            f"was asked to tune: put calls of tune(), run() and compile_configs() in a module under "
            f"`if __name__ == '__main__':` or into a function that the module does not call during its import"
        )


def _with_bits(settled: Mapping[int, Trial], own: Trial | None) -> dict[int, Trial]:
    """Returns trials with their bits, compared with the defaults' trial."""
    expected = "" if own is None or own.recalled_from else own.digest
    return {index: with_bits(trial, expected) for index, trial in settled.items()}
