"""The progress of a sweep: how many configs wait, compile, measure and are done, the best so far, and the last line.

It appears in redrawn lines of a terminal, in a cell of a notebook, or in a log. A thread draws it, so it stays current
even if the tuning thread is busy.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dataclasses
import functools
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO, TypeAlias

from quarantune.results import times
from quarantune.values.codec import equal
from quarantune.values.configs import Config, format_config
from quarantune.values.trial import AGAIN, END, READY, Findings, Outcome, Phase, Trial, count_outcomes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

_logger = logging.getLogger("quarantune")

_STATES = {Phase.LOAD: "compiling", Phase.COMPILE: "compiling", READY: "ready"}
"""The states of configs by phase; in any other phase a config is measuring."""
_VERBS = {Phase.LOAD: "loads", Phase.COMPILE: "compiles", Phase.CHECK: "is checked", Phase.MEASURE: "is measured"}
_MOST_RUNNING, _MOST_NAMED = 8, 3
_FEWEST_FOR_ESTIMATE = 3


@dataclasses.dataclass(eq=False)
class Progress:
    """Shows the progress of one sweep from its creation, and its end in one line; a context manager.

    Events may come from any thread.

    Attributes:
        label: the tuned function, and the shapes of the call.
        total: the number of configs; 0 if unknown.
        shown: the setting `progress`: False shows nothing, True writes a line every 10 s even without a terminal.
        name: the name in log records; empty for the label.
        config_of: returns the config at an index.
        default: the config that equals the function's own defaults; None without such a config.
        is_timed: whether the fastest configs are timed at the end; False if configs are only compiled.
        may_redraw: whether to replace lines on a terminal; False if a debugger may use the terminal.
        stream: the stream to write to; None for stderr.
        clock: returns seconds.
    """

    label: str
    total: int = 0
    _: dataclasses.KW_ONLY
    shown: dataclasses.InitVar[bool | None]
    name: str = ""
    config_of: Callable[[int], Config] | None = None
    default: Config | None = None
    is_timed: bool = True
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
        self._default_ms: float | None = None
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
        """Sets the number of configs to try.

        Args:
            total: the number.
            is_bound: whether the number is only an upper limit of a search.
            budget_s: seconds after which the search ends; None for no limit.
            why_ended: returns why the search ended, such as `the search ended after 200 trials`; empty until then.
        """
        self.total, self._is_bound, self._budget_s, self._why_ended = total, is_bound, budget_s, why_ended

    def enter(self, index: int, phase: str) -> None:
        """Notes that a config enters a phase, `READY`, `END` or `AGAIN`."""
        with self._lock:
            self._notice = ""
            if phase in (END, AGAIN):
                self._running.pop(index, None)
            else:
                self._running[index] = (phase, self.clock())

    def step(self, trial: Trial) -> None:
        """Counts a trial that ended."""
        self._count([trial])
        took = f" {text} ms" if (text := times.text_of_time(trial)) else ""
        ended = f"{trial.outcome.value}{took} {trial.message}"
        _logger.info("%s: %s: %s", self.name, format_config(trial.config), ended)

    def recall(self, trials: Sequence[Trial]) -> None:
        """Counts trials that an earlier sweep finished."""
        if trials:
            self._count(trials)
            self._recalled += len(trials)
            _logger.info("%s: %d of %d configs are known already", self.name, len(trials), self.total)

    def note_default(self, time_ms: float | None) -> None:
        """Notes the time of the function's own defaults, if they are not a config of the sweep."""
        self._default_ms = time_ms

    def say(self, text: str) -> None:
        """Shows a sentence about something other than a config, such as waiting for another job."""
        _logger.info("%s: %s", self.name, text)
        self._notice = text

    # The end

    def conclude(self, best: Config, told: str, *, saved: str) -> None:
        """Sets the last line of a sweep that has succeeded.

        Args:
            best: the winner.
            told: its time and the time of the defaults, as text.
            saved: what became of the result, such as `saved`.
        """
        why, failed = self._why_ended(), sum(trial.outcome.is_failure for trial in self._trials)
        recalled = sum(trial.recalled_from is not None for trial in self._trials)
        counts = ", ".join(f"{count:,} {what}" for count, what in ((failed, "failed"), (recalled, "recalled")) if count)
        tried = f"{self._tried()} in {_duration(self._gone_s())}{counts and f' ({counts})'}"
        self.end(f"{tried}, {why and f'{why}, '}best {format_config(best)}, {told}; {saved}")

    def conclude_compiling(self) -> None:
        """Sets the last line of a sweep that only compiled its configs."""
        good = sum(trial.outcome is Outcome.OK for trial in self._trials)
        self.end(f"{good:,} of {self._tried()} compile, in {_duration(self._gone_s())}")

    def end(self, text: str) -> None:
        """Sets the last line."""
        self._last_line = text

    def on_interrupt(self, text: str) -> None:
        """Sets the words of an interrupted sweep's last line about the trials that are kept."""
        self._on_interrupt = text

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, KeyboardInterrupt):  # Python shows the notes below the traceback
            error.add_note(f"{self.label}: {self._interrupted()}")
        self.close()

    def close(self) -> None:
        """Ends the display, and writes the last line."""
        if self._screen is not None:
            self._screen.remove(self.view, f"{self.label}: {self._last_line}" if self._last_line else "")

    # The view

    def view(self) -> View:
        """Returns the progress as it is now."""
        with self._lock:
            running, trials, now = dict(self._running), list(self._trials), self.clock()
        begun, states, flow = self._flow(running, len(trials))
        if self._is_bound:
            done = f"{len(trials) + begun:,} asked of at most {self.total:,}, {len(trials):,} done"
        else:
            done = f"{len(trials):,} of {self.total:,} done"
        counts = ", ".join(f"{count:,} {outcome}" for outcome, count in count_outcomes(trials).items())
        gone_s = now - self._started_s
        more = [
            f"{_duration(gone_s)} gone{self._to_go(gone_s, len(trials))}",
            self._notice,
            flow if running else self._before_or_after(len(trials)),
            self._best_text(trials),
            self._running_text(running, now),
        ]
        return View(
            label=self.label,
            done=len(trials) + (states["ready"] + states["measuring"]) / 2,
            total=self.total,
            counts=f"{done}{f' ({counts})' if counts else ''}" if self.total else "",
            more=[line for line in more if line],
        )

    def doing(self) -> str:
        """Returns what the sweep does now, without times: the numbers of configs by state, and those that run."""
        with self._lock:
            running, done = dict(self._running), len(self._trials)
        flow = self._notice or (self._flow(running, done)[2] if running else self._before_or_after(done))
        names = [
            f"{self._name_of(index)} {_VERBS.get(Phase(phase), phase)}"
            for index, (phase, _) in sorted(running.items(), key=lambda item: item[1][1])
            if phase != READY
        ]
        return "; ".join(filter(None, [flow, *names[:_MOST_NAMED]]))

    def _flow(self, running: dict[int, tuple[str, float]], done: int) -> tuple[int, collections.Counter[str], str]:
        """Returns the number of configs that have begun, the numbers by state, and these as text."""
        begun = sum(index >= 0 for index in running)  # the untuned function is not a config
        states = collections.Counter(_STATES.get(phase, "measuring") for phase, _ in running.values())
        states["waiting"] = 0 if self._is_bound else max(0, self.total - done - begun)
        shown_states = [state for state in ("waiting", "compiling", "ready", "measuring") if states[state]]
        return begun, states, ", ".join(f"{states[state]:,} {state}" for state in shown_states)

    def _name_of(self, index: int) -> str:
        if index < 0:
            return "the untuned function"
        return f"config {index}" if self.config_of is None else format_config(self.config_of(index))

    def _interrupted(self) -> str:
        if self._notice:
            return f"interrupted while {self._notice}"
        done = sum(trial.outcome not in (Outcome.PRUNED, Outcome.NOT_RUN) for trial in self._trials)
        of = f" of {self.total:,}" if self.total else ""
        best, kept = self._best_text(self._trials), self._on_interrupt if done else ""
        return (
            f"interrupted after {_duration(self._gone_s())}, with {done:,}{of} configs done"
            f"{f', {best}, which this process uses' if best else ''}; {kept or 'nothing is kept'}"
        )

    def _before_or_after(self, done: int) -> str:
        """Returns the step of a sweep while no config runs; empty if no sweep is under way."""
        if not self.total or self._notice or (done == self.total and not self.is_timed):
            return ""
        if done == self._recalled:
            return "starting workers"
        ended = [why] if (why := self._why_ended()) else []
        return "; ".join([*ended, "the fastest are timed once more, in turn"]) if ended or done >= self.total else ""

    def _running_text(self, running: dict[int, tuple[str, float]], now: float) -> str:
        """Returns the running configs, the longest first."""
        parts = []
        for index, (phase, since) in sorted(running.items(), key=lambda item: item[1][1])[:_MOST_RUNNING]:
            if phase != READY:
                parts.append(f"{self._name_of(index)} {_VERBS.get(Phase(phase), phase)} ({_duration(now - since)})")
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

    def _best_text(self, trials: Sequence[Trial]) -> str:
        """Returns the best trial so far, and its gain; empty without a measured trial."""
        timed = [trial for trial in trials if trial.is_usable]
        if not timed:
            return ""
        best = min(timed, key=lambda trial: trial.figure or 0.0)
        default = next((it for it in timed if equal(it.config, self.default)), None)
        found = Findings.of(best, default, **({} if default else {"default_time_ms": self._default_ms}))
        return f"best {format_config(best.config)}, {found.text()}"

    def _tried(self) -> str:
        of = f" of {self.total:,}" if self.total > len(self._trials) and not self._is_bound else ""
        return f"{len(self._trials):,}{of} config{'' if len(self._trials) == 1 else 's'}"

    def _gone_s(self) -> float:
        return self.clock() - self._started_s

    def _count(self, trials: Sequence[Trial]) -> None:
        with self._lock:
            self._notice = ""
            self._trials += trials


def _duration(seconds: float) -> str:
    """Returns a duration as `3.2 s`, `2 min 5 s` or `1 h 2 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


# --- the places that show it -----------------------------------------------------------------------------------

_MOST_SWEEPS = 4
_BAR_WIDTH = 60
_hooked = contextlib.ExitStack()
"""Restores the streams' own methods when it is closed."""


class View(NamedTuple):
    """The progress at one moment.

    Attributes:
        label: the function and its shapes.
        done: the number of configs that are done; a compiled config counts half.
        total: the number of configs, at most; 0 if unknown.
        counts: the numbers of configs that are done, by outcome; empty without a total.
        more: further lines: the time; then, if known, the job that the sweep waits for, the numbers of configs by
            state, the best so far, and the running configs.
    """

    label: str
    done: float
    total: int
    counts: str
    more: list[str]

    def lines(self, *, width: int = sys.maxsize) -> list[str]:
        """Returns the progress as lines; if the first line is too long for the width, its label is cut."""
        room = max(16, width - len(self.counts) - len(": "))
        label = self.label if len(self.label) <= room else f"{self.label[: room - 1]}…"
        return [f"{label}: {self.counts}" if self.counts else label, *self.more]


_harmless = functools.partial(contextlib.suppress, Exception)
"""Ignores errors of a display, so that the sweep continues: the terminal may be gone, or no thread can start."""

Sweep: TypeAlias = Callable[[], View]
"""A sweep under way, represented by the method that returns its progress."""


class Screen:
    """Shows all sweeps under way in this process; several may run in threads or inside each other.

    This class is for places without a terminal. It writes a line every 10 s: to the stream if somebody reads along, or
    to the log.
    """

    interval_s = 10.0

    def __init__(self, stream: TextIO | None = None, *, in_log: bool = False) -> None:
        """Shows nothing yet.

        Args:
            stream: the stream to write to; None for stderr.
            in_log: whether all lines except the last go to the log.
        """
        self._stream = stream
        self._in_log = in_log
        self.reset()

    def reset(self) -> None:
        """Forgets all sweeps in a forked child: it has no thread that draws them, and its locks may be held forever."""
        self.sweeps: list[Sweep] = []
        self._lock = threading.Lock()
        self._writing = threading.RLock()
        self._stop: threading.Event | None = None
        self._live: Live | None = None  # the lines on a terminal

    def add(self, sweep: Sweep) -> None:
        """Begins to show a sweep."""
        with self._lock:
            self.sweeps.append(sweep)
            if self._stop is None:
                with _harmless():
                    self._begin()
                    stop = threading.Event()
                    context = contextvars.copy_context()  # from this a notebook knows the cell
                    threading.Thread(
                        target=context.run, args=(self._keep_drawing, stop), name="quarantune-progress", daemon=True
                    ).start()
                    self._stop = stop

    def remove(self, sweep: Sweep, last_line: str) -> None:
        """Stops showing a sweep, and writes its last line, if it has one."""
        with self._lock:
            if sweep not in self.sweeps:
                return
            self.sweeps.remove(sweep)
            if not self.sweeps and self._stop is not None:
                self._stop.set()  # the thread draws nothing more, and ends
                self._stop = None
            with self._writing, _harmless():
                if not self.sweeps:
                    self.end()
            with self._writing, _harmless():
                if last_line:
                    self._write_line(last_line)

    def _keep_drawing(self, stop: threading.Event) -> None:
        with _harmless():
            while not stop.wait(self.interval_s):
                self.draw(list(self.sweeps), stop)

    def draw(self, sweeps: Sequence[Sweep], stop: threading.Event | None = None) -> None:
        """Shows the sweeps as they are now, unless the event is set."""
        views = [sweep() for sweep in sweeps]  # before taking the lock, because they wait for other locks
        with self._writing:
            if stop is None or not stop.is_set():
                self._show(views)

    def _begin(self) -> None:
        """Prepares for the first sweep."""

    def _show(self, views: Sequence[View]) -> None:
        """Shows the sweeps, in place of the former lines if these can be replaced."""
        for view in views:
            line = "; ".join(view.lines())
            if self._in_log:
                _logger.info("%s", line)
            else:
                self._write_line(line)

    def end(self) -> None:
        """Removes the drawn lines, if they can be replaced."""

    def _write_line(self, line: str) -> None:
        """Writes a line that stays, above the redrawn lines."""
        if (stream := self._target()) is not None:
            encoding = getattr(stream, "encoding", None) or "utf-8"
            stream.write(f"{line.encode(encoding, 'backslashreplace').decode(encoding)}\n")
            stream.flush()

    def _target(self) -> TextIO:
        return sys.stderr if self._stream is None else self._stream


class _Notebook(Screen):
    """Shows progress in the output of a notebook's cell."""

    interval_s = 0.5

    def _begin(self) -> None:
        from IPython.display import display

        self._ended: list[str] = []
        show: Any = display  # it has no types
        self._handle = show(self._data(["quarantune"]), raw=True, display_id=True)

    def _show(self, views: Sequence[View]) -> None:
        lines = [line for view in views for line in view.lines()]
        self._handle.update(self._data([*self._ended, *lines]), raw=True)

    def end(self) -> None:
        self._show([])

    def _write_line(self, line: str) -> None:
        self._ended.append(line)
        self._show([])

    @staticmethod
    def _data(lines: list[str]) -> dict[str, str]:
        import html  # only notebooks need it: keep it out of the package's import

        text = "\n".join(lines)
        styled = f'<pre style="white-space:pre-wrap;margin:0">{html.escape(text)}</pre>'
        return {"text/plain": text, "text/html": styled}


class Terminal(Screen):
    """Draws with rich, and imports it for the first line."""

    interval_s = 0.25

    # rich computes the cursor's way up from the number of lines, and writes it later. Nothing may come between, so all
    # other writes to the terminal wait for the lock of the screen.
    def _show(self, views: Sequence[View]) -> None:
        live = self._live = self._live or self._open()
        # The current width of the terminal: rich alone would trust `COLUMNS`, and wider lines would wrap.
        with contextlib.suppress(OSError, ValueError):
            size = os.get_terminal_size(self._target().fileno())
            if size.columns > 0:
                live.console.width, live.console.height = size
        live.update(_rendered(views[-_MOST_SWEEPS:], live.console.width), refresh=True)

    def end(self) -> None:
        """Removes the lines."""
        live, self._live = self._live, None
        try:
            if live is not None:
                live.stop()
        finally:  # the terminal may be gone
            _hooked.close()

    def _open(self) -> Live:
        from rich.console import Console
        from rich.live import Live

        console = Console(file=_Raw(self._target()), highlight=False)  # type: ignore[arg-type]
        live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False)
        live.start()
        for stream in dict.fromkeys((self._target(), sys.stderr, sys.stdout)):
            with contextlib.suppress(AttributeError, OSError, ValueError):
                if stream is not None and stream.isatty():
                    _hook(stream, console, self._writing)
        return live


def _rendered(views: Sequence[View], width: int) -> Any:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    parts: list[Any] = []
    for view in views:
        title, *lines = view.lines(width=width)
        parts.append(Text(title, style="bold", no_wrap=True, overflow="ellipsis"))
        if view.total:
            bar = ProgressBar(total=view.total, completed=view.done, width=min(_BAR_WIDTH, width))
            parts += [bar, Text()]  # ends the bar's line
        parts += [Text(f"  {line}", no_wrap=True, overflow="ellipsis") for line in lines]
    return Group(*parts)


class _Raw:
    """A stream without its hook. The terminal shows each piece at once, without a cursor running through it.

    Between two pieces the cursor is visible, because a killed or stopped program could not show it again.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._write = stream.write

    def write(self, text: str) -> int:
        return self._write(f"\x1b[?2026h\x1b[?25l{text}\x1b[?25h\x1b[?2026l")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _hook(stream: TextIO, console: Console, writing: threading.RLock) -> None:
    """Makes whole lines written to a stream appear above the redrawn lines.

    It changes the stream object itself and not `sys.stderr`, because handlers of `logging` keep the object.
    """
    from rich.ansi import AnsiDecoder
    from rich.text import Text

    raw, rest, pid = stream.write, "", os.getpid()
    decoder = AnsiDecoder()  # a colour lasts until its reset, also in a later line

    def write(text: str) -> int:
        nonlocal rest
        with writing:
            whole, newline, rest = f"{rest}{text}".rpartition("\n")
            rest = rest[max(0, rest.rfind("\r", 0, -1)) :]
            if newline:
                # Parts of a line overwrite each other: only the last one shows.
                lines = ([*map(decoder.decode_line, line.rstrip("\r").split("\r"))][-1] for line in whole.split("\n"))
                console.print(Text("\n").join(lines), soft_wrap=True)
        return len(text)

    def release() -> None:
        """Restores the stream's own method, and writes an unfinished line."""
        with contextlib.suppress(AttributeError):
            del stream.write
        if rest and os.getpid() == pid:
            with contextlib.suppress(OSError, ValueError):
                raw(rest)

    stream.write = write  # type: ignore[method-assign]
    _hooked.callback(release)


def _after_fork() -> None:
    """Makes a forked child show only its own sweeps, with new locks: threads of the parent may hold the old ones."""
    global _making
    _making = threading.Lock()
    for screen in list(_shared.values()):
        screen.reset()
    _hooked.close()


os.register_at_fork(after_in_child=_after_fork)


_shared: weakref.WeakValueDictionary[object, Screen] = weakref.WeakValueDictionary()
"""The screens in use by sweeps, by kind and stream."""
_making = threading.Lock()


def screen_for(shown: bool | None, stream: TextIO | None, *, may_redraw: bool) -> Screen | None:
    """Returns the screen to show progress on; None to show nothing.

    Args:
        shown: the setting `progress`.
        stream: the stream to write to; None for stderr.
        may_redraw: whether to replace lines on a terminal.
    """
    if shown is False:
        return None
    target = sys.stderr if stream is None else stream
    is_terminal = False
    with contextlib.suppress(AttributeError, OSError, ValueError):  # stderr may be missing or closed
        is_terminal = target.isatty()
    kind: type[Screen]
    in_log = False
    if _is_notebook():
        kind, stream = _Notebook, None
    elif may_redraw and is_terminal and os.environ.get("TERM", "") != "dumb":
        kind, stream = Terminal, target
    else:
        is_ci = os.environ.get("CI", "").strip().lower() not in ("", "0", "false")
        is_read = may_redraw and (is_ci or is_terminal)
        kind, in_log = Screen, not is_read and shown is None
    with _making:
        return _shared.setdefault((kind, stream, in_log), kind(stream, in_log=in_log))


def _is_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    return getattr(shell, "kernel", None) is not None
