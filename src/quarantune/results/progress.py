"""The progress of a sweep: how many configs wait, compile, measure and are done, the best so far, and the last line."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TextIO

from quarantune.results.display import View, screen_for
from quarantune.values import shown
from quarantune.values.findings import Findings
from quarantune.values.trial import END, READY, Config, Outcome, Phase, Trial, count_outcomes

_logger = logging.getLogger("quarantune")

_VERBS = {Phase.LOAD: "loads", Phase.COMPILE: "compiles", Phase.CHECK: "is checked", Phase.MEASURE: "is measured"}
_MOST_RUNNING = 8
_FEWEST_FOR_ESTIMATE = 3


@dataclasses.dataclass(eq=False)
class Progress:
    """Shows the progress of one sweep from when it is made, and its end in one line; a context manager.

    Events may come from any thread.

    Attributes:
        label: the tuned function, and the shapes of the call.
        total: how many configs there are; 0 where that is not known.
        shown: the setting `progress`: False shows nothing, True writes a line every 10 s even without a terminal.
        name: the name in log records; empty for the label.
        config_of: returns the config at an index.
        default: the config that equals the function's own defaults; None where there is none.
        has_last_line: whether a line about the end is written.
        may_redraw: whether lines on a terminal may be replaced; not while a debugger may use it.
        stream: the stream to write to; None for stderr.
        clock: seconds.
    """

    label: str
    total: int = 0
    _: dataclasses.KW_ONLY
    shown: dataclasses.InitVar[bool | None]
    name: str = ""
    config_of: Callable[[int], Config] | None = None
    default: Config | None = None
    has_last_line: bool = True
    may_redraw: dataclasses.InitVar[bool] = True
    stream: dataclasses.InitVar[TextIO | None] = None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self, shown: bool | None, may_redraw: bool, stream: TextIO | None) -> None:
        """Starts to show the sweep."""
        self.name = self.name or self.label
        self._started_s = self.clock()
        self._lock = threading.Lock()
        self._trials: list[Trial] = []
        self._recalled = 0
        self._running: dict[int, tuple[str, float]] = {}
        self._best: Trial | None = None
        self._default_ms: float | None = None
        self._default: Trial | None = None
        self._budget_s: float | None = None
        self._is_bound = False
        self._notice = ""
        self._last_line = ""
        self._on_interrupt = ""
        self._why_ended: Callable[[], str] = str
        self._screen = screen_for(shown, stream, may_redraw=may_redraw)
        if self._screen is not None:
            self._screen.add(self.view)

    # Events

    def expect(
        self, total: int, *, is_bound: bool = False, budget_s: float | None = None, why_ended: Callable[[], str] = str
    ) -> None:
        """Sets how many configs are to be tried.

        Args:
            total: the number.
            is_bound: whether that is only the most that a search may ask.
            budget_s: seconds after which the search ends; None for no limit.
            why_ended: returns why the search has ended, as `the search ended after 200 trials`; empty until it has.
        """
        self.total, self._is_bound, self._budget_s, self._why_ended = total, is_bound, budget_s, why_ended

    def enter(self, index: int, phase: str) -> None:
        """Notes that a config enters a phase, `READY` or `END`."""
        with self._lock:
            self._notice = ""
            if phase == END:
                self._running.pop(index, None)
            else:
                self._running[index] = (phase, self.clock())

    def step(self, trial: Trial) -> None:
        """Counts a trial that ended."""
        self._count(trial)
        took = "" if trial.time_ms is None else f" {trial.time_ms:.4g} ms"
        ended = f"{trial.outcome.value}{took} {trial.message}"
        _logger.info("%s: %s: %s", self.name, shown.format_config(trial.config), ended)

    def recall(self, trials: Sequence[Trial]) -> None:
        """Counts trials that an earlier sweep finished."""
        for trial in trials:
            self._count(trial)
        self._recalled += len(trials)
        if trials:
            _logger.info("%s: %d of %d configs are known already", self.name, len(trials), self.total)

    def note_default(self, time_ms: float | None) -> None:
        """Notes the time of the function's own defaults, where they are no config of the sweep."""
        self._default_ms = time_ms

    def say(self, text: str) -> None:
        """Shows a sentence about something other than a config, such as waiting for another job."""
        _logger.info("%s: %s", self.name, text)
        self._notice = text

    # The end

    def conclude(self, best: Config, told: str, *, saved: str) -> None:
        """Sets the last line to that of a sweep that has succeeded.

        Args:
            best: the winner.
            told: its time and that of the defaults, as text.
            saved: what became of the result, as `saved`.
        """
        why = self._why_ended()
        result = f"{why and f'{why}, '}best {shown.format_config(best)}, {told}"
        self.end(f"{self._tried()} in {_duration(self._gone_s())}{self._failed()}, {result}; {saved}")

    def conclude_compiling(self) -> None:
        """Sets the last line to that of configs that were only compiled."""
        good = sum(trial.outcome is Outcome.OK for trial in self._trials)
        self.end(f"{good:,} of {self._tried()} compile, in {_duration(self._gone_s())}")

    def end(self, text: str) -> None:
        """Sets the last line."""
        self._last_line = text

    def on_interrupt(self, text: str) -> None:
        """Sets what the last line says of the configs that are kept if the sweep is interrupted."""
        self._on_interrupt = text

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, KeyboardInterrupt):  # which shows its notes below its traceback
            error.add_note(f"{self.label}: {self._interrupted()}")
        self.close()

    def close(self) -> None:
        """Ends the display, and writes the last line."""
        line = f"{self.label}: {self._last_line}" if self._last_line and self.has_last_line else ""
        if self._screen is not None:
            self._screen.remove(self.view, line)

    # The view

    def view(self) -> View:
        """Returns the progress as it is now."""
        with self._lock:
            running, trials, now = dict(self._running), list(self._trials), self.clock()
        phases = [phase for phase, _ in running.values()]
        compiling = sum(phase in (Phase.LOAD, Phase.COMPILE) for phase in phases)
        ready = phases.count(READY)
        begun = sum(index >= 0 for index in running)  # the untuned function is none of the configs
        waiting = 0 if self._is_bound else max(0, self.total - len(trials) - begun)
        states = {"waiting": waiting, "compiling": compiling, "ready": ready}
        states["measuring"] = len(phases) - compiling - ready
        flow = ", ".join(f"{number:,} {state}" for state, number in states.items() if number)
        if self._is_bound:
            done = f"{len(trials) + begun:,} asked of at most {self.total:,}, {len(trials):,} done"
        else:
            done = f"{len(trials):,} of {self.total:,} done"
        counts = ", ".join(f"{count:,} {outcome}" for outcome, count in count_outcomes(trials).items())
        gone_s = now - self._started_s
        more = [
            f"{_duration(gone_s)} gone{self._to_go(gone_s, len(trials))}",
            self._notice,
            flow if phases else self._before_or_after(len(trials)),
            self._best_text(),
            self._running_text(running, now),
        ]
        return View(
            label=self.label,
            done=len(trials) + (states["ready"] + states["measuring"]) / 2,
            total=self.total,
            counts=f"{done}{f' ({counts})' if counts else ''}" if self.total else "",
            more=[line for line in more if line],
        )

    def _interrupted(self) -> str:
        if self._notice:
            return f"interrupted while {self._notice}"
        done = sum(trial.outcome not in (Outcome.PRUNED, Outcome.NOT_RUN) for trial in self._trials)
        of = f" of {self.total:,}" if self.total else ""
        best, kept = self._best_text(), self._on_interrupt if done else ""
        return (
            f"interrupted after {_duration(self._gone_s())}, with {done:,}{of} configs done"
            f"{f', {best}, which this process uses' if best else ''}; {kept or 'nothing is kept'}"
        )

    def _before_or_after(self, done: int) -> str:
        """Returns the step of the sweep where no config runs; empty where no sweep is under way."""
        if not self.total or self._notice:
            return ""
        if done == self._recalled:
            return "starting workers"
        ended = [why] if (why := self._why_ended()) else []
        return "; ".join([*ended, "the fastest are timed once more, in turn"]) if ended or done >= self.total else ""

    def _running_text(self, running: dict[int, tuple[str, float]], now: float) -> str:
        """Returns the configs that run, the longest first."""
        parts = []
        for index, (phase, since) in sorted(running.items(), key=lambda item: item[1][1])[:_MOST_RUNNING]:
            if phase != READY:
                if index < 0:
                    name = "the untuned function"
                else:
                    name = f"config {index}" if self.config_of is None else shown.format_config(self.config_of(index))
                parts.append(f"{name} {_VERBS.get(Phase(phase), phase)} ({_duration(now - since)})")
        return f"now: {'; '.join(parts)}" if parts else ""

    def _to_go(self, gone_s: float, done: int) -> str:
        fresh = done - self._recalled
        budget = "" if self._budget_s is None else f" of at most {_duration(self._budget_s)}"
        if fresh < _FEWEST_FOR_ESTIMATE or done >= self.total or self._why_ended():
            return budget
        left_s = gone_s / fresh * (self.total - done)
        if self._budget_s is not None:
            left_s = min(left_s, max(0.0, self._budget_s - gone_s))
        return f"{budget}, about {_duration(left_s)} to go"

    def _best_text(self) -> str:
        best, default_ms = self._best, self._default_ms
        if best is None or not best.time_ms:
            return ""
        found = Findings(best.time_ms, default_ms).with_score(best, self._default)
        told = found.text(is_default=best.config == self.default)
        return f"best {shown.format_config(best.config)}, {told}"

    def _tried(self) -> str:
        of = f" of {self.total:,}" if self.total > len(self._trials) and not self._is_bound else ""
        return f"{len(self._trials):,}{of} config{'' if len(self._trials) == 1 else 's'}"

    def _failed(self) -> str:
        failed = sum(trial.outcome.is_failure for trial in self._trials)
        return f" ({failed:,} failed)" if failed else ""

    def _gone_s(self) -> float:
        return self.clock() - self._started_s

    def _count(self, trial: Trial) -> None:
        with self._lock:
            self._notice = ""
            self._trials.append(trial)
            if trial.outcome is not Outcome.OK or trial.time_ms is None:
                return
            if self._best is None or (trial.figure or 0.0) < (self._best.figure or 0.0):
                self._best = trial
            if self.default is not None and trial.config == self.default:
                self._default_ms, self._default = trial.time_ms, trial


def _duration(seconds: float) -> str:
    """Returns a duration as `3.2 s`, `2 min 5 s` or `1 h 2 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
