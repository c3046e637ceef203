"""Tunes the kernels of one function, one after another, each with the others at their best so far."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quarantune import cache
from quarantune.cache import Entry
from quarantune.measure import finals
from quarantune.resolve.resolver import Resolver, _Run, space_of
from quarantune.results import report
from quarantune.results.contextual_result import ContextualResult, KernelChoice, labels
from quarantune.results.progress import Progress
from quarantune.sweep import sweep
from quarantune.sweep.events import SweepEvents
from quarantune.transport import assignment
from quarantune.transport.assignment import DEFAULT, FIRST, KEY, OWN, Runner, Seen, Slot
from quarantune.values import shown
from quarantune.values.options import Options
from quarantune.values.settings import Settings
from quarantune.values.trial import Config, Outcome, SandboxError, Trial, TuningFailedError

if TYPE_CHECKING:
    from quarantune.sweep.routes import Swept

_logger = logging.getLogger("quarantune")


_COMBINATIONS = 64
"""How many combinations of configs are tried where no kernel alone keeps a function from running."""


class ContextResolver(Resolver):
    """Finds, or finds out, the best assignment for each call of one function; its configs hold it under `KEY`."""

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        name: str,
        signature: inspect.Signature,
        static_names: frozenset[str] | None,
        options: Options,
    ) -> None:
        """Sets up a resolver, as `Resolver` does; which kernels there are to choose for shows with a call."""
        space = [{KEY: assignment.encode({}, others=OWN)}]
        super().__init__(fn, space, name=name, signature=signature, static_names=static_names, options=options)
        self.runner = Runner(fn)

    def _config_of(self, entry: Entry, configs: Sequence[Config], settings: Settings) -> Config | None:
        try:
            chosen = assignment.chosen_from(entry["config"]["assignment"])
            offered = [_is_offered(str(kernel["name"]), kernel["space"]) for kernel in entry["kernels"]]
        except (KeyError, TypeError, ValueError):
            cache.report_once(f"{self.name}: the cached entry does not say what each kernel is to use: it is not used")
            return None
        if not all(offered) or not self._versions_serve(entry, settings):
            return None
        return {KEY: assignment.encode(chosen, others=OWN)}

    def _run_for(self, *problem: Any, start_over: bool) -> _Run:
        return _Descent(self, *problem, start_over=start_over)


def _is_offered(name: str, space: Any) -> bool:
    """Returns whether a kernel still has the configs it had; one not made yet, or that makes its configs, has."""
    listed = [kernel._configs for kernel in assignment.kernels(name) if not callable(kernel._configs)]
    return not listed or any(space_of(configs) == space for configs in listed)


def _shown(chosen: Mapping[Slot, Config]) -> Config:
    """Returns the configs of some kernels as one, for messages."""
    names = labels([slot.name for slot in chosen])
    return {name: shown.format_config(config) for name, config in zip(names, chosen.values(), strict=True)}


@dataclasses.dataclass(frozen=True)
class _Step:
    """One sweep over the whole function: its trials, who won, who tied with it, and what the winner asked for."""

    trials: tuple[Trial, ...]
    winner: int
    tie: tuple[int, ...]
    slots: dict[Slot, Seen]

    @property
    def time_ms(self) -> float:
        time_ms = self.trials[self.winner].time_ms
        assert time_ms is not None
        return time_ms


class _Descent(_Run):
    """One call whose kernels are being tuned by this process, or waited for while another does."""

    _resolver: ContextResolver

    def run(self) -> ContextualResult:
        with contextlib.ExitStack() as stack:
            stack.callback(self._tell_what_was_not_saved)
            if self._directory is not None:
                progress = Progress(self._resolver.name, 0, shown=self._settings.progress)
                stack.callback(progress.close)
                if (answer := self._take_claim(progress, self._directory, stack)) is not None:
                    return self._result_of(answer)
            return self._descend()

    def _descend(self) -> ContextualResult:
        others, start, step = self._begin()
        baseline_ms = step.time_ms if others == FIRST else None
        slots, time_ms = step.slots, step.time_ms
        choices: dict[Slot, KernelChoice] = {}
        spaces: list[dict[str, Any]] = []
        tries: list[tuple[dict[Slot, Config], Trial]] = []
        # One at a time, because what a kernel is asked for may depend on the config of the one that calls it.
        while slot := next((slot for slot, seen in slots.items() if seen.configs and slot not in choices), None):
            chosen = start | {settled: choice.config for settled, choice in choices.items()}
            step = self._settle(slot, slots[slot], chosen, others)
            best = step.trials[step.winner]
            tie = tuple(step.trials[index].config for index in step.tie)
            choices[slot] = KernelChoice(
                name=slot.name, key=slot.key, config=best.config, time_ms=step.time_ms, trials=step.trials, tie=tie
            )
            first = {other: seen.configs[0] for other, seen in slots.items() if seen.configs} if others == FIRST else {}
            tries += [(first | chosen | {slot: trial.config}, trial) for trial in step.trials]
            spaces.append(slots[slot].space)
            slots, time_ms = step.slots, step.time_ms
        _logger.info("%s: %.4g ms with %d kernels tuned", self._resolver.name, time_ms, len(choices))
        return self._conclude_descent(choices, spaces, tries, time_ms, baseline_ms)

    def _begin(self) -> tuple[str, dict[Slot, Config], _Step]:
        """Runs the function once as it comes, to see which kernels it calls and how long it takes.

        Returns:
            What kernels use that have no config yet: the first of theirs, or their defaults where that fails. Then the
            configs to start from where that fails too, and the run.
        """
        try:
            return FIRST, {}, self._try([assignment.encode({}, others=FIRST)], [{"configs": "first"}], "all kernels")
        except TuningFailedError as error:
            _logger.info("%s: starting from the kernels' defaults: %s", self._resolver.name, error)
        try:
            default = assignment.encode({}, others=DEFAULT)
            return DEFAULT, {}, self._try([default], [{"configs": "default"}], "all kernels")
        except TuningFailedError as error:
            _logger.info("%s: looking for configs with which it runs: %s", self._resolver.name, error)
        with tempfile.TemporaryDirectory(prefix="quarantune-") as reports:
            return DEFAULT, *self._find_a_start(Runner(self._resolver.fn, reports))

    def _find_a_start(self, runner: Runner) -> tuple[dict[Slot, Config], _Step]:
        """Finds configs with which the function runs.

        From the defaults one kernel at a time gets each of its configs. Where the function still fails, but calls more
        kernels before it does, the search goes on from there. Where it does not, some combinations are tried.

        Raises:
            TuningFailedError: it fails with all that was tried.
        """
        start: dict[Slot, Config] = {}
        seen: dict[Slot, Seen] = {}
        candidates = [start]
        while True:
            tried = [assignment.encode(chosen, others=DEFAULT) for chosen in candidates]
            try:
                step = self._try(tried, [_shown(chosen) for chosen in candidates], "any kernel", runner)
            except TuningFailedError:
                reports = [runner.left_report(text) for text in tried]
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
        step = self._try([*by_text], [_shown(chosen) for chosen in candidates], "combinations", runner)
        return candidates[step.winner], step

    def _settle(self, slot: Slot, seen: Seen, chosen: Mapping[Slot, Config], others: str) -> _Step:
        """Tries every config of one kernel."""
        texts = [assignment.encode({**chosen, slot: config}, others=others) for config in seen.configs]
        step = self._try(texts, seen.configs, slot.name)
        best = shown.format_config(step.trials[step.winner].config)
        _logger.info("%s: %s is best with %s: %.4g ms", self._resolver.name, slot.name, best, step.time_ms)
        return step

    def _try(self, texts: Sequence[str], shown: Sequence[Config], kernel: str, runner: Runner | None = None) -> _Step:
        """Runs the whole function under each assignment.

        Args:
            texts: the assignments.
            shown: what to call each in trials and messages.
            kernel: the kernel in which they differ.
            runner: what calls the function; None for the resolver's.

        Raises:
            TuningFailedError: it failed under every one.
        """
        trials: dict[int, Trial] = {}
        runner = runner or self._resolver.runner
        label = f"{self._resolver.name} ({kernel})"
        progress = Progress(label, len(texts), shown=self._settings.progress)

        def on_trial(index: int, trial: Trial) -> None:
            trials[index] = dataclasses.replace(trial, config=dict(shown[index]))
            self._show_life()
            progress.step(trials[index])

        untuned = assignment.encode({}, others=DEFAULT)
        problem = dataclasses.replace(
            self.problem(),
            fn=runner,
            untuned={KEY: untuned},
            default=texts.index(untuned) if untuned in texts else None,
        )
        with contextlib.closing(progress):
            swept = sweep.run(
                problem,
                {index: {KEY: text} for index, text in enumerate(texts)},
                options=self._resolver.options,
                settings=self._settings,
                limits=self._limits.compiling_as_it_runs(),
                events=SweepEvents(on_trial=on_trial, on_tick=self._show_life),
            )
        if swept.complaint:
            _logger.warning("%s: %s", label, swept.complaint)
        if not any(trial.outcome is Outcome.OK for trial in trials.values()):
            ordered = [trials[index] for index in range(len(texts))]
            raise TuningFailedError(report.failure_message(label, ordered), trials=ordered, key=self._key.text)
        settled, verdict = finals.conclude(trials, swept.final, default=0)
        slots = self._slots(swept, verdict.winner, texts[verdict.winner], runner)
        return _Step(tuple(settled[index] for index in range(len(texts))), verdict.winner, verdict.tie, slots)

    def _slots(self, swept: Swept, winner: int, text: str, runner: Runner) -> dict[Slot, Seen]:
        """Returns what was asked for under the winning assignment."""
        if self._settings.isolation == "none":
            return assignment.read_report(runner.report({KEY: text}))
        try:
            return assignment.read_report(swept.executables[winner])
        except (KeyError, ValueError) as error:
            raise SandboxError(
                f"{self._resolver.name}: its worker did not say which kernels were called: {error!r}"
            ) from error

    def _conclude_descent(
        self,
        choices: Mapping[Slot, KernelChoice],
        spaces: Sequence[dict[str, Any]],
        tries: Sequence[tuple[dict[Slot, Config], Trial]],
        time_ms: float,
        baseline_ms: float | None,
    ) -> ContextualResult:
        """Remembers what was found, and returns it."""
        names = dict(zip(choices, labels([slot.name for slot in choices]), strict=True))
        trials = [
            dataclasses.replace(
                trial,
                config={name: shown.format_config(used[slot]) if slot in used else "" for slot, name in names.items()},
            )
            for used, trial in tries
        ]
        chosen = {slot: choice.config for slot, choice in choices.items()}
        config: Config = {KEY: assignment.encode(chosen, others=OWN)}
        if self._directory is not None:
            best = Trial(config=config, outcome=Outcome.OK, time_ms=time_ms)
            kernels = [
                {**slot._asdict(), "config": choice.config, "time_ms": choice.time_ms, "space": space}
                for (slot, choice), space in zip(choices.items(), spaces, strict=True)
            ]
            entry = self._entry(best, trials) | {
                "config": {"assignment": assignment.nested(chosen)},
                "kernels": kernels,
                "baseline_ms": baseline_ms,
            }
            with self._saving():
                store = self._resolver._store(self._settings)
                store.put(self._resolver.name, self._key.device, self._key.text, entry)
        return self._contextual(self._result(config, time_ms, tuple(trials)), [*choices.values()], baseline_ms)

    def _result_of(self, entry: Entry) -> ContextualResult:
        config = self._resolver._config_of(entry, self._configs, self._settings)
        assert config is not None  # or it would not have been an answer
        kernels = [
            KernelChoice(name=slot.name, key=slot.key, config=chosen, time_ms=float(entry["time_ms"]))
            for slot, chosen in assignment.Assignment(str(config[KEY])).chosen.items()
        ]
        time_ms, baseline_ms = float(entry["time_ms"]), entry.get("baseline_ms")
        return self._contextual(self._result(config, time_ms, (), from_cache=True), kernels, baseline_ms)

    def _contextual(self, result: Any, kernels: Sequence[KernelChoice], baseline_ms: float | None) -> ContextualResult:
        fields = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
        fields["fn"] = functools.partial(self._resolver.runner, **result.best_config)
        return ContextualResult(**fields, kernels=tuple(kernels), baseline_ms=baseline_ms)
