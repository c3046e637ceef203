"""The places where progress is shown: lines of a terminal that are redrawn, a cell of a notebook, or a log.

A thread draws, so that there is news at least every second, whatever the thread that tunes is doing.
"""

from __future__ import annotations

import abc
import contextlib
import contextvars
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO, TypeAlias

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

_logger = logging.getLogger("quarantune")

_MOST_SWEEPS = 4
_BAR_WIDTH = 60
_hooks: list[_Hook] = []


class View(NamedTuple):
    """The progress at one moment.

    Attributes:
        label: the function and its shapes.
        done: how many configs are done; one that is compiled counts half.
        total: how many there are, at most; 0 where that is not known.
        counts: the numbers of configs that are done, by outcome; empty where there is no total.
        more: further lines: the time; and, where there is something to say: what other job is waited for, the numbers
            of configs by state, the best so far, and the configs that run.
    """

    label: str
    done: float
    total: int
    counts: str
    more: list[str]

    def lines(self, *, width: int = sys.maxsize) -> list[str]:
        """Returns the progress as lines; where the first one is too long for the width, the label is cut."""
        room = max(16, width - len(self.counts) - len(": "))
        label = self.label if len(self.label) <= room else f"{self.label[: room - 1]}…"
        return [f"{label}: {self.counts}" if self.counts else label, *self.more]


Sweep: TypeAlias = Callable[[], View]
"""A sweep that is under way, by the method that returns its progress."""


class Screen(abc.ABC):
    """Shows all sweeps of this process that are under way, which may be several: in threads, or one inside another."""

    interval_s = 0.25

    def __init__(self, stream: TextIO | None = None, *, on_stream: bool = False) -> None:
        """Shows nothing yet.

        Args:
            stream: the stream to write to; None for stderr.
            on_stream: whether lines go there even without a terminal.
        """
        self.sweeps: list[Sweep] = []
        self._stream = stream
        self.on_stream = on_stream
        self._lock = threading.Lock()
        self._drawing = threading.RLock()
        self._stop: threading.Event | None = None

    def add(self, sweep: Sweep) -> None:
        """Begins to show a sweep."""
        with self._lock:
            self.sweeps.append(sweep)
            if self._stop is None:
                self.begin()
                self._stop = threading.Event()
                context = contextvars.copy_context()  # by which a notebook knows the cell
                threading.Thread(
                    target=context.run, args=(self._draw, self._stop), name="quarantune-progress", daemon=True
                ).start()

    def remove(self, sweep: Sweep, last_line: str) -> None:
        """Ends to show a sweep, and writes its last line, if it has one."""
        with self._lock:
            if sweep not in self.sweeps:
                return
            self.sweeps.remove(sweep)
            if not self.sweeps and self._stop is not None:
                self._stop.set()  # the thread draws nothing from now on, and ends by itself
                self._stop = None
            with self._drawing, contextlib.suppress(OSError, ValueError):
                if not self.sweeps:
                    self.end()
                if last_line:
                    self.write_line(last_line)

    def _draw(self, stop: threading.Event) -> None:
        try:
            while not stop.wait(self.interval_s):
                with self._drawing:
                    if not stop.is_set():
                        self.draw(list(self.sweeps))
        except Exception:  # the terminal may be gone, which must not end the sweep
            _logger.debug("progress is not shown any more", exc_info=True)

    # Of these, one thread at a time calls one.

    def begin(self) -> None:  # noqa: B027  most places need no preparation
        """Prepares for the first sweep."""

    @abc.abstractmethod
    def draw(self, sweeps: list[Sweep]) -> None:
        """Shows the sweeps as they are now."""

    def end(self) -> None:  # noqa: B027  lines of a log stay
        """Removes what was drawn."""

    def write_line(self, last_line: str) -> None:
        """Writes a line that stays, above those that are redrawn."""
        stream = sys.stderr if self._stream is None else self._stream
        if stream is not None:
            stream.write(f"{last_line}\n")
            stream.flush()


class _Lines(Screen):
    """Without a terminal: a line every 10 s, in the log or, where the user asks for progress, on the stream."""

    interval_s = 10.0

    def draw(self, sweeps: list[Sweep]) -> None:
        for sweep in sweeps:
            text = "; ".join(sweep().lines())
            if self.on_stream:
                self.write_line(text)
            else:
                _logger.info("%s", text)


class _Notebook(Screen):
    """Shows progress in the output of a notebook's cell."""

    interval_s = 0.5

    def begin(self) -> None:
        from IPython.display import display

        self._ended: list[str] = []
        show: Any = display  # it has no types
        self._handle = show(self._data(["quarantune"]), raw=True, display_id=True)

    def draw(self, sweeps: list[Sweep]) -> None:
        self._show([line for sweep in sweeps for line in sweep().lines()])

    def end(self) -> None:
        self._show([])

    def write_line(self, last_line: str) -> None:
        self._ended.append(last_line)
        self._show([])

    def _show(self, lines: list[str]) -> None:
        self._handle.update(self._data([*self._ended, *lines]), raw=True)

    @staticmethod
    def _data(lines: list[str]) -> dict[str, str]:
        import html  # needed here only, and no part of the import of this package

        text = "\n".join(lines)
        styled = f'<pre style="white-space:pre-wrap;margin:0">{html.escape(text)}</pre>'
        return {"text/plain": text, "text/html": styled}


class Terminal(Screen):
    """Draws with rich, which is imported when the first line is drawn."""

    def __init__(self, stream: TextIO, *, on_stream: bool = True) -> None:
        """Draws nothing yet; the arguments as for `Screen`."""
        super().__init__(stream, on_stream=on_stream)
        self._terminal = stream
        self._live: Live | None = None
        # The cursor's way up is computed when the lines' number is known and written later: nothing may come between.
        self._writing = threading.RLock()

    def draw(self, sweeps: list[Sweep]) -> None:
        """Replaces the lines by those of the sweeps now."""
        views = [sweep() for sweep in sweeps[-_MOST_SWEEPS:]]  # not below, as they wait for other locks
        with self._writing:
            live = self._live = self._live or self._open()
            # As wide as the terminal is now; rich alone would trust `COLUMNS`, and wider lines would wrap.
            with contextlib.suppress(OSError, ValueError):
                size = os.get_terminal_size(self._terminal.fileno())
                if size.columns > 0:
                    live.console.width, live.console.height = size
            live.update(_rendered(views, live.console.width), refresh=True)

    def end(self) -> None:
        """Removes the lines."""
        with self._writing:
            live, self._live = self._live, None
            try:
                if live is not None:
                    live.stop()
            finally:  # the terminal may be gone
                _release_hooks()

    def _open(self) -> Live:
        from rich.console import Console
        from rich.live import Live

        class OpenConsole(Console):
            """Leaves the cursor to `_Raw`."""

            def show_cursor(self, show: bool = True) -> bool:
                return False

        console = OpenConsole(file=_Raw(self._terminal), highlight=False)  # type: ignore[arg-type]
        live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False)
        live.start()
        for stream in dict.fromkeys((self._terminal, sys.stderr, sys.stdout)):
            with contextlib.suppress(AttributeError, OSError, ValueError):
                if stream is not None and stream.isatty():
                    _hooks.append(_Hook(stream, console, self._writing))
        return live


def _rendered(views: list[View], width: int) -> Any:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    parts: list[Any] = []
    for view in views:
        title, *lines = view.lines(width=width)
        parts.append(Text(title, style="bold", no_wrap=True, overflow="ellipsis"))
        if view.total:
            bar = ProgressBar(total=view.total, completed=view.done, width=min(_BAR_WIDTH, width))
            parts += [bar, Text()]  # which ends the line of the bar
        parts += [Text(f"  {line}", no_wrap=True, overflow="ellipsis") for line in lines]
    return Group(*parts)


class _Raw:
    """A stream as it is without a hook; the terminal shows each piece at once, and no cursor that runs through it.

    Between two pieces the cursor is visible, because a program that is killed or stopped could not show it again.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._write = stream.write

    def write(self, text: str) -> int:
        return self._write(f"\x1b[?2026h\x1b[?25l{text}\x1b[?25h\x1b[?2026l")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Hook:
    """Has whole lines that anybody writes to a stream appear above the lines that are redrawn.

    The stream object itself is changed and not `sys.stderr`, because handlers of `logging` keep the object.
    """

    def __init__(self, stream: TextIO, console: Console, writing: threading.RLock) -> None:
        self._stream = stream
        self._console = console
        self._writing = writing
        self._raw: Callable[[str], int] = stream.write
        self._rest = ""
        stream.write = self._write  # type: ignore[method-assign]

    def _write(self, text: str) -> int:
        from rich.text import Text

        with self._writing:
            whole, newline, rest = f"{self._rest}{text}".rpartition("\n")
            self._rest = rest
            if newline:
                lines = [line.rpartition("\r")[2] for line in whole.split("\n")]
                self._console.print(Text.from_ansi("\n".join(lines)), soft_wrap=True)
        return len(text)

    def release(self) -> None:
        """Gives the stream back its own method, and writes the rest of a line."""
        with contextlib.suppress(AttributeError):
            del self._stream.write
        if self._rest:
            with contextlib.suppress(OSError, ValueError):
                self._raw(self._rest)


def _release_hooks() -> None:
    while _hooks:
        _hooks.pop().release()


# A child that was forked meanwhile must not wait for a lock that a thread of this process held.
os.register_at_fork(after_in_child=_release_hooks)


_shared: dict[object, Screen] = {}
_making = threading.Lock()


def screen_for(shown: bool | None, stream: TextIO | None, *, may_redraw: bool) -> Screen | None:
    """Returns the place to show progress; None for nowhere.

    Args:
        shown: the setting `progress`.
        stream: the stream to write to; None for stderr.
        may_redraw: whether lines on a terminal may be replaced.
    """
    if shown is False:
        return None
    target = sys.stderr if stream is None else stream
    made: Screen
    if _is_notebook():
        made, stream = _Notebook(), None
    elif may_redraw and target is not None and _is_terminal(target):
        made, stream = Terminal(target), target
    else:
        is_read = may_redraw and (_is_ci() or (target is not None and _is_terminal(target, of_any_kind=True)))
        made = _Lines(stream, on_stream=is_read if shown is None else shown)
    kind = (type(made), stream, made.on_stream)
    with _making:
        for other in [other for other in _shared if other != kind and not _shared[other].sweeps]:
            del _shared[other]  # its stream may be closed by now
        return _shared.setdefault(kind, made)


def _is_ci() -> bool:
    return os.environ.get("CI", "").strip().lower() not in ("", "0", "false")


def _is_terminal(stream: TextIO, *, of_any_kind: bool = False) -> bool:
    try:
        return stream.isatty() and (of_any_kind or os.environ.get("TERM", "") != "dumb")
    except (OSError, ValueError, AttributeError):
        return False


def _is_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    return getattr(shell, "kernel", None) is not None
