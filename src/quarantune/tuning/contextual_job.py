"""Tunes the kernels of one function one after another, each with the others at their best so far."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quarantune.answers.answer import Answer
from quarantune.cache import problems
from quarantune.cache.entry_file import Entry
from quarantune.cache.sweeps import SweepState
from quarantune.calls.call import BoundCall, TunedFunction
from quarantune.calls.rebuilt import described_arguments
from quarantune.engine.place import place_of
from quarantune.functions.binding import Arguments, kernels
from quarantune.host.locks import lazy
from quarantune.jax_internals import jax_functions
from quarantune.measure import finals
from quarantune.results import report
from quarantune.results.progress import Progress
from quarantune.results.result import ContextualResult, KernelChoice, labels
from quarantune.sandbox import wire
from quarantune.scheduler.plan import NOTHING_MORE, Mode
from quarantune.sweep import proof
from quarantune.sweep.ledger import Ledger, Listener
from quarantune.sweep.limits import EXHAUSTED, SearchLimits
from quarantune.sweep.request import SweepRequest, Swept
from quarantune.sweep.searching import Searching
from quarantune.transport import assignment
from quarantune.transport.assignment import DEFAULT, FIRST, KEY, OWN, Runner, Seen, Slot
from quarantune.tuning.job import TuningJob
from quarantune.tuning.outcome import call_result, failed_sweep, findings_now
from quarantune.values.codec import JsonObject, as_json, decode_json, has_tag, originals, restore
from quarantune.values.configs import Config, format_config
from quarantune.values.errors import SandboxError, TuningFailedError
from quarantune.values.options import BATCH_INVARIANT, NO_BATCH, SURROGATE, Options
from quarantune.values.space import Space
from quarantune.values.trial import Findings, Outcome, Searched, Trial

_logger = logging.getLogger("quarantune")

_COMBINATIONS = 64
"""Combinations of configs to try if changing one kernel's config does not make the function run."""


def _together(searched: Sequence[Searched], limits: SearchLimits) -> Searched:
    """Returns how thorough the searches of all kernels were together."""
    ends = [part.stopped for part in searched]
    stopped = next((end for end in ends if end != EXHAUSTED), EXHAUSTED if ends else "")
    seen, size = sum(part.seen or 0 for part in searched), sum(part.space_size or 0 for part in searched)
    return Searched(stopped, seen, size, limits.budget(stopped))


@dataclasses.dataclass(frozen=True)
class _Step:
    """One sweep over the whole function.

    Attributes:
        trials: the trials of all assignments, in order.
        winner: the index of the best assignment.
        best: the best assignment's trial.
        tie: the configs that are as fast.
        slots: the kernels that the function called under the best assignment.
        compiled: the best assignment's program for JAX's compilation cache, see `Swept`.
        searched: how thorough the sweep was.
    """

    trials: tuple[Trial, ...]
    winner: int
    best: Trial
    tie: tuple[Config, ...]
    slots: dict[Slot, Seen]
    compiled: dict[str, bytes]
    searched: Searched

    @property
    def time_ms(self) -> float:
        assert self.best.time_ms is not None
        return self.best.time_ms


class ContextualJob(TuningJob):
    """One call whose kernels this process tunes, or waits for while another process tunes them."""

    @property
    def _runner(self) -> Runner:
        assert isinstance(self._call.function, ContextualFunction)
        return self._call.function.runner

    def run(self) -> ContextualResult:
        """Returns the result of tuning each kernel, or of another job that tuned the call.

        Raises:
            TuningFailedError: the function failed with every config of a kernel.
        """
        if not place_of(self._now.settings).is_here:
            raise ValueError(
                f"{self._name}: contextual_autotune tunes on this machine only: call it outside of the settings block "
                f"that gives an executor"
            )
        with self._shown_progress() as progress, contextlib.ExitStack() as stack:
            stack.callback(self._ledger.close)
            stack.callback(self._records.report_unsaved)
            # All sweeps run the same function on the same arguments, so one reference serves them.
            self._outputs: list[int] = []
            stack.callback(wire.close_all, self._outputs)
            if (answer := self._take_claim(progress, stack)) is not None:
                progress.end("tuned by another job")
                return self._result_of(answer)
            self._records.begin()
            try:
                result = self._tune_kernels()
            except TuningFailedError as error:
                self._records.end(SweepState.FAILED, error.trials)
                raise
            self._records.end(SweepState.DONE)
            was = "" if not result.baseline_ms else f", {result.baseline_ms / result.time_ms:.3g}x the first configs"
            progress.end(f"{result.time_ms:.4g} ms with {result.config_text}{was}; {self._records.saved}")
            return result

    @property
    def _search(self) -> SearchLimits:
        """The search of each kernel, and the budgets that all kernels share."""
        return SearchLimits.of(self._options, self._now.settings)

    def _tune_kernels(self) -> ContextualResult:
        others, start, step = self._begin()
        baseline_ms = step.time_ms if others == FIRST else None
        slots, time_ms = step.slots, step.time_ms
        choices: dict[Slot, KernelChoice] = {}
        searched: list[Searched] = []
        started_s = time.monotonic()
        spaces: list[JsonObject] = []
        tries: list[tuple[dict[Slot, Config], Trial]] = []
        # One at a time, because one kernel's config may change the calls of another kernel.
        while slot := next((slot for slot, seen in slots.items() if seen.configs and slot not in choices), None):
            chosen = start | {settled: choice.config for settled, choice in choices.items()}
            share = self._search.share(
                sum(bool(seen.configs) and slot not in choices for slot, seen in slots.items()),
                spent_trials=sum(len(choice.trials) for choice in choices.values()),
                spent_s=time.monotonic() - started_s,
            )
            step = self._tune_kernel(slot, slots[slot], chosen, others, share)
            searched.append(step.searched)
            choices[slot] = KernelChoice(
                name=slot.name,
                key=slot.key,
                config=step.best.config,
                time_ms=step.time_ms,
                trials=step.trials,
                tie=step.tie,
            )
            first = {other: seen.configs[0] for other, seen in slots.items() if seen.configs} if others == FIRST else {}
            tries += [(first | chosen | {slot: trial.config}, trial) for trial in step.trials]
            spaces.append(slots[slot].space)
            slots, time_ms = step.slots, step.time_ms
        _logger.info("%s: %.4g ms with %d kernels tuned", self._name, time_ms, len(choices))
        if self._keyed.axes is None:
            self._tuning.seeds.add(step.compiled)
        found, search = Findings(time_ms, baseline_ms=baseline_ms), _together(searched, self._search)
        findings = findings_now(self._call, found, [trial for _, trial in tries], search)
        return self._conclude_kernels(choices, spaces, tries, findings)

    def _begin(self) -> tuple[str, dict[Slot, Config], _Step]:
        """Runs the function once, to see which kernels it calls and how long it takes.

        Returns:
            The rule for kernels without a config, the configs to start from, and the run. The rule is the first config
            of each kernel or, if the function fails with these, the kernels' defaults. There are configs to start from
            if the function also fails with the defaults.
        """
        for others, then in (
            (FIRST, "starting from the kernels' defaults"),
            (DEFAULT, "looking for configs that make it run"),
        ):
            try:
                return (
                    others,
                    {},
                    self._try([assignment.encode({}, others=others)], [{"configs": others}], "all kernels"),
                )
            except TuningFailedError as error:
                _logger.info("%s: %s: %s", self._name, then, error)
        with tempfile.TemporaryDirectory(prefix="quarantune-") as reports:
            return DEFAULT, *self._find_a_start(Runner(self._call.function.fn, reports))

    def _find_a_start(self, runner: Runner) -> tuple[dict[Slot, Config], _Step]:
        """Finds configs that make the function run.

        Starting from the defaults, one kernel at a time gets each of its configs. If the function still fails, but
        calls more kernels before it fails, the search continues from that config. Otherwise some combinations run.

        Raises:
            TuningFailedError: the function fails with every assignment that this method tried.
        """
        start: dict[Slot, Config] = {}
        seen: dict[Slot, Seen] = {}
        candidates = [start]
        while True:
            tried = [assignment.encode(chosen, others=DEFAULT) for chosen in candidates]
            try:
                step = self._try(tried, [shown_together(chosen) for chosen in candidates], "any kernel", runner)
            except TuningFailedError:
                reports = [self._with_objects(runner.left_report(text)) for text in tried]
                furthest = max(range(len(tried)), key=lambda index: len(reports[index]))
                if len(reports[furthest]) > len(seen):
                    start, seen = candidates[furthest], reports[furthest]
                elif len(seen) - len(start) < 2:
                    raise
                else:
                    break
            else:
                return candidates[step.winner], step
            left = [slot for slot in reversed(seen) if slot not in start]
            candidates = [start | {slot: config} for slot in left for config in seen[slot].configs] or [start]
        return self._try_combinations(start, {slot: seen[slot].configs for slot in seen if slot not in start}, runner)

    def _try_combinations(
        self, start: dict[Slot, Config], open_slots: Mapping[Slot, Sequence[Config]], runner: Runner
    ) -> tuple[dict[Slot, Config], _Step]:
        """Runs the function with some combinations of the kernels' configs."""
        pick = random.Random(0)
        drawn = [
            start | {slot: pick.choice(configs) for slot, configs in open_slots.items() if configs}
            for _ in range(_COMBINATIONS)
        ]
        by_text = {assignment.encode(chosen, others=DEFAULT): chosen for chosen in drawn}
        candidates = list(by_text.values())
        step = self._try([*by_text], [shown_together(chosen) for chosen in candidates], "combinations", runner)
        return candidates[step.winner], step

    def _tune_kernel(
        self, slot: Slot, seen: Seen, chosen: Mapping[Slot, Config], others: str, share: SearchLimits
    ) -> _Step:
        """Tries all configs of one kernel, or those that a search asks for."""
        texts = [assignment.encode({**chosen, slot: config}, others=others) for config in seen.configs]
        step = self._try(texts, seen.configs, slot.name, share=share.resolved(Space({"config": range(len(texts))})))
        best = format_config(step.best.config)
        _logger.info("%s: %s is best with %s: %.4g ms", self._name, slot.name, best, step.time_ms)
        return step

    def _try(
        self,
        texts: Sequence[str],
        shown: Sequence[Config],
        kernel: str,
        runner: Runner | None = None,
        share: SearchLimits | None = None,
    ) -> _Step:
        """Runs the whole function under each assignment.

        Args:
            texts: the assignments.
            shown: the config that trials and messages show for each.
            kernel: the kernel whose configs differ.
            runner: calls the function; None for the function's own runner.
            share: the search among the assignments and its budgets; None runs all assignments.

        Raises:
            TuningFailedError: the function failed under every assignment.
        """
        runner = runner or self._runner
        is_jitted = jax_functions.is_jitted(runner.tunable)
        label = f"{self._name} ({kernel})"
        untuned = assignment.encode({}, others=DEFAULT)
        problem = dataclasses.replace(
            self._request.problem,
            fn=runner.tunable,
            untuned={KEY: untuned},
            default=texts.index(untuned) if untuned in texts else None,
        )
        progress = Progress(
            label, len(texts), shown=self._now.settings.progress, config_of=shown.__getitem__, default=shown[0]
        )

        def as_shown(index: int, trial: Trial) -> Trial:
            return dataclasses.replace(trial, config=dict(shown[index]))

        ledger = Ledger(
            Listener(on_tick=self._records.refresh, on_trial=lambda *_: self._records.refresh()),
            Listener(on_trial=lambda *ended: progress.step(as_shown(*ended)), on_phase=progress.enter),
        )
        with contextlib.closing(progress):
            possible: list[Config] = [{KEY: text} for text in texts]
            configs, search = dict(enumerate(possible)), None
            if share is not None and not share.tries_all:
                trial_s = self._limits.compile_timeout_s + self._limits.timeout_s
                space = Space(self._to_search(kernel, shown, share))
                search = Searching(share, space, defaults=0, trial_s=trial_s, run_as=possible)
                progress.expect(search.total, is_bound=True, budget_s=search.time_budget_s)
                configs = search.take(1)
            request = dataclasses.replace(
                self._request,
                problem=problem,
                limits=self._limits if is_jitted else self._limits.compiling_as_it_runs(),
                ledger=ledger,
                space=Space(possible),
                source=search or NOTHING_MORE,
                outputs=None if callable(self._options.supply) else self._outputs,
            )
            swept = place_of(self._now.settings).run(request, configs)
        trials = {index: as_shown(index, trial) for index, trial in ledger.trials.items() if index >= 0}
        if swept.complaint:
            _logger.warning("%s: %s", label, swept.complaint)
        if not any(trial.is_usable for trial in trials.values()):
            ordered = [trials[index] for index in sorted(trials)]
            message, sweep = report.failure_message(label, ordered), failed_sweep(self._keyed, ordered)
            raise TuningFailedError(message, trials=ordered, key=self._key.key, sweep=sweep)
        settled, (winner, *tie) = finals.conclude(trials, swept.final, default=0)
        slots = self._slots(request, swept, winner, texts[winner], runner)
        return _Step(
            tuple(settled[index] for index in sorted(settled)),
            winner,
            settled[winner],
            tuple(settled[index].config for index in tie),
            slots,
            swept.compiled.get(winner, {}),
            Searched(
                EXHAUSTED if search is None else search.stopped,
                sum(trial.outcome is not Outcome.NOT_RUN for trial in settled.values()),
                len(texts),
            ),
        )

    def _slots(self, request: SweepRequest, swept: Swept, winner: int, text: str, runner: Runner) -> dict[Slot, Seen]:
        """Returns the kernels that the function called under the winning assignment."""
        problem = request.problem
        if jax_functions.is_jitted(problem.fn):  # safe: a worker has already traced it
            with proof.unheard():
                return runner.traced(text, problem.args, problem.kwargs)
        if request.mode is Mode.HERE:
            return dict(runner.assignment(text).seen)
        try:
            seen = assignment.read_report(swept.executables[winner])
        except (KeyError, ValueError) as error:
            raise SandboxError(f"{self._name}: its worker did not say which kernels were called: {error!r}") from error
        return self._with_objects(seen)

    def _with_objects(self, seen: Mapping[Slot, Seen]) -> dict[Slot, Seen]:
        """Returns the kernels of a report, with the objects in their configs."""
        return {slot: Seen(with_objects(slot, each.configs, self._objects), each.space) for slot, each in seen.items()}

    @lazy
    def _objects(self) -> Callable[[Slot], Mapping[str, Any]]:
        """Returns a cached `objects_of`, because that may call a user's function."""
        return functools.cache(objects_of)

    def _to_search(self, kernel: str, configs: Sequence[Config], limits: SearchLimits) -> Sequence[Config]:
        """Returns a kernel's configs for a search, with plain dicts in place of objects unknown here.

        Raises:
            ValueError: the search is the user's, which can only ask for the objects themselves.
        """
        if not (unknown := [config for config in configs if any(map(has_tag, config.values()))]):
            return configs
        if not isinstance(limits.search, str):
            raise ValueError(
                f"{self._name}: {limits.label} cannot ask for configs of {kernel} such as {format_config(unknown[0])}: "
                f"they hold objects that this process does not have, because only a call of {kernel} makes them and "
                "its arguments are not known here; list the configs in its decorator, or choose a search by its name, "
                f"as search={SURROGATE!r}"
            )
        return [_without_tags(config) for config in configs]

    def _conclude_kernels(
        self,
        choices: Mapping[Slot, KernelChoice],
        spaces: Sequence[JsonObject],
        tries: Sequence[tuple[dict[Slot, Config], Trial]],
        findings: Findings,
    ) -> ContextualResult:
        """Saves the choices, and returns the result."""
        names = dict(zip(choices, labels([slot.name for slot in choices]), strict=True))
        trials = [
            dataclasses.replace(
                trial, config={name: format_config(used[slot]) if slot in used else "" for slot, name in names.items()}
            )
            for used, trial in tries
        ]
        chosen = {slot: choice.config for slot, choice in choices.items()}
        config: Config = {KEY: assignment.encode(chosen, others=OWN)}
        kernels = [
            {**slot._asdict(), "config": as_json(choice.config), "time_ms": choice.time_ms, "space": space}
            for (slot, choice), space in zip(choices.items(), spaces, strict=True)
        ]
        parts = {
            "config": {"assignment": assignment.nested(chosen)},
            "kernels": kernels,
            "baseline_ms": findings.baseline_ms,
        }
        self._save(self._entry(config, findings) | parts)
        return self._contextual(config, findings, [*choices.values()], tuple(trials), from_cache=False)

    def _result_of(self, answer: Answer) -> ContextualResult:
        assert answer.config is not None
        kernels = [
            KernelChoice(name=slot.name, key=slot.key, config=chosen, time_ms=answer.findings.time_ms)
            for slot, chosen in chosen_in(answer.config).items()
        ]
        return self._contextual(answer.config, answer.findings, kernels)

    def _contextual(
        self,
        config: Config,
        findings: Findings,
        kernels: Sequence[KernelChoice],
        trials: tuple[Trial, ...] = (),
        *,
        from_cache: bool = True,
    ) -> ContextualResult:
        result = call_result(self._keyed, config, findings, trials, from_cache=from_cache)
        fields = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
        fields["fn"] = functools.partial(self._runner, **result.best_config)
        return ContextualResult(**fields, kernels=tuple(kernels), baseline_ms=findings.baseline_ms)


def objects_of(slot: Slot) -> Mapping[str, Any]:
    """Returns the objects in the configs of a kernel's call, by their texts, as far as they are known here.

    It finds no objects of a kernel that only a call of the function makes. If a function makes the configs, it also
    finds none of a call that its key does not describe.
    """
    found: Mapping[str, Any] = {}
    for kernel in kernels(slot.name):
        function = kernel.function
        arguments: Arguments = ((), {})
        try:
            if callable(function.configs):
                arguments = described_arguments(decode_json(slot.key), function)
            space = BoundCall(function, *arguments).configs
            space.whole()
            found = {**found, **originals(space.examples())}
        except Exception as error:  # a user's function may raise anything for these arguments
            _logger.debug("%s: the objects in its configs are not known: %r", slot.name, error)
    return found


def with_objects(
    slot: Slot, configs: Sequence[Config], known: Callable[[Slot], Mapping[str, Any]] = objects_of
) -> list[Config]:
    """Returns configs from a report or a file with objects in the place of tags.

    Args:
        slot: the kernel's call.
        configs: its configs.
        known: returns the objects that are known here, by their texts. Other tags stay.
    """
    tagged = any(has_tag(value) for config in configs for value in config.values())
    return [restore(config, known(slot)) for config in configs] if tagged else [*configs]


def chosen_in(config: Config) -> dict[Slot, Config]:
    """Returns the config of each kernel, with its objects, in the only config of a contextual function."""
    chosen = assignment.Assignment(str(config[KEY])).chosen
    return {slot: with_objects(slot, [config])[0] for slot, config in chosen.items()}


def _without_tags(value: Any) -> Any:
    """Returns a config from a report, or one of its values, with tags as plain dicts, which a space accepts."""
    if isinstance(value, Mapping):
        return {f"its {key[1:]}" if key[:1] == "$" else key: _without_tags(item) for key, item in value.items()}
    return [_without_tags(item) for item in value] if isinstance(value, (list, tuple)) else value


_MOST_CONFIGS = 256
"""Number of configs of all kernels that the wait for another rank's result assumes."""


class ContextualFunction(TunedFunction):
    """A function with tuned kernels. Its only config holds the assignment of configs to kernels under `KEY`.

    Attributes:
        runner: calls the function under an assignment.
    """

    most_configs = _MOST_CONFIGS

    def __init__(self, fn: Callable[..., Any], options: Options) -> None:
        """Describes a function, as `TunedFunction` does. Its calls show the kernels to tune.

        Raises:
            TypeError: `TunedFunction` refuses it, or `time_grad` would have to jit it again and cannot.
        """
        super().__init__(fn, Space([{KEY: assignment.encode({}, others=OWN)}]), options=options)
        self.runner = Runner(fn)
        if self.options.time_grad and not jax_functions.is_jitted(self.compiled_fn):
            bound = " and ".join(jax_functions.jit_options(fn).cannot_travel)
            raise TypeError(
                f"{self.name}: time_grad has to jit the function again to differentiate it, but jax.jit was given "
                f"{bound}, which would be lost: leave one or the other out"
            )

    def under(self, numerics: str | None) -> TunedFunction:
        """Returns the function as it is tuned under an operator's `numerics`; see `TunedFunction`.

        Raises:
            ValueError: They are batch-invariant, which a time of the whole function cannot show.
        """
        if numerics == BATCH_INVARIANT:
            raise ValueError(f"{self.name}: contextual_autotune {NO_BATCH}")
        return super().under(numerics)

    def with_options(self, options: Options, configs: Sequence[Config] | None = None) -> ContextualFunction:
        """Returns the function with other options; its only config stays."""
        return ContextualFunction(self.fn, options)

    @property
    def compiled_fn(self) -> Any:
        """The function that a sweep compiles: the runner."""
        return self.runner.tunable

    def config_of(self, entry: Entry, call: BoundCall, *, is_own: bool) -> Config | None:
        """Returns the assignment of an entry if every kernel still has the config space that it had."""
        try:
            chosen = assignment.chosen_from(entry["config"]["assignment"])
            offered = [_is_offered(str(kernel["name"]), kernel["space"]) for kernel in entry["kernels"]]
        except (KeyError, TypeError, ValueError):
            problems.report_once(
                f"{self.name}: the cached entry does not say which config each kernel uses and is ignored"
            )
            return None
        return {KEY: assignment.encode(chosen, others=OWN)} if all(offered) else None

    def config_from(self, encoded: JsonObject, call: BoundCall) -> Config | None:
        """Returns the assignment that another process has encoded; None if it is malformed."""
        try:
            chosen = assignment.Assignment(str(encoded[KEY])).chosen
        except (KeyError, TypeError, ValueError):
            return None
        return {KEY: assignment.encode(chosen, others=OWN)}

    def text_of(self, config: Config) -> str:
        """Returns an assignment as text for messages."""
        return format_config(shown_together(chosen_in(config)))


def _is_offered(name: str, space: Any) -> bool:
    """Returns whether a kernel still has its configs. True if nobody has defined it yet, or it makes its configs."""
    listed = [known for kernel in kernels(name) if (known := kernel.function.listed_space)]
    return not listed or space in listed


def shown_together(chosen: Mapping[Slot, Config]) -> Config:
    """Returns the configs of some kernels as one, for messages."""
    names = labels([slot.name for slot in chosen])
    return {name: format_config(config) for name, config in zip(names, chosen.values(), strict=True)}
