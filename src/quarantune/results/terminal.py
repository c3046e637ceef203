"""Progress on a terminal: a few lines at its end that are redrawn, below all that the program writes meanwhile."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

    from quarantune.results.progress import Progress

_MOST_SWEEPS = 4
_BAR_WIDTH = 60
_hooks: list[_Hook] = []


class Terminal:
    """Draws with rich, which is imported when the first line is drawn."""

    def __init__(self, stream: TextIO, *, interval_s: float) -> None:
        self.interval_s = interval_s
        self._stream = stream
        self._console: Console | None = None
        self._live: Live | None = None
        # The cursor's way up is computed when the lines' number is known and written later: nothing may come between.
        self._writing = threading.RLock()

    def begin(self) -> None:
        """Does nothing: rich is imported by the thread that draws."""

    def draw(self, sweeps: list[Progress]) -> None:
        """Replaces the lines by those of the sweeps now."""
        rendered = _rendered(sweeps)
        with self._writing:
            if self._live is None:
                self._open()
            assert self._live is not None
            self._fit()
            self._live.update(rendered, refresh=True)

    def end(self, last_line: str) -> None:
        """Removes the lines, and writes the last one."""
        with self._writing:
            self._close()
        if last_line:
            self._stream.write(f"{last_line}\n")
            self._stream.flush()

    def write_line(self, last_line: str) -> None:
        """Writes a line above those that are redrawn."""
        self._stream.write(f"{last_line}\n")
        self._stream.flush()

    def _fit(self) -> None:
        """Draws as wide as the terminal is now; rich alone would trust `COLUMNS`, and wider lines would wrap."""
        with contextlib.suppress(OSError, ValueError):
            size = os.get_terminal_size(self._stream.fileno())
            if self._console is not None and size.columns > 0:
                self._console.width, self._console.height = size

    def _open(self) -> None:
        from rich.console import Console
        from rich.live import Live

        class OpenConsole(Console):
            """Leaves the cursor visible, which a program that is killed could not show again."""

            def show_cursor(self, show: bool = True) -> bool:
                return False

        raw = _Raw(self._stream)
        self._console = OpenConsole(file=raw, highlight=False)  # type: ignore[arg-type]
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()
        for stream in dict.fromkeys((self._stream, sys.stderr, sys.stdout)):
            with contextlib.suppress(AttributeError, OSError, ValueError):
                if stream is not None and stream.isatty():
                    _hooks.append(_Hook(stream, self._console, self._writing))

    def _close(self) -> None:
        if self._live is not None:
            live, self._live, self._console = self._live, None, None
            try:
                live.stop()
            finally:  # the terminal may be gone
                _release_hooks()


def _rendered(sweeps: list[Progress]) -> Any:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    def line(text: str, style: str = "") -> Text:
        return Text(text, style=style, no_wrap=True, overflow="ellipsis")

    parts: list[Any] = []
    for sweep in sweeps[-_MOST_SWEEPS:]:
        view = sweep.view()
        parts.append(line(f"{view.label}: {view.counts}", "bold"))
        if view.total:
            parts.append(ProgressBar(total=view.total, completed=view.done, width=_BAR_WIDTH))
        parts += [line(f"  {text}") for text in (view.notice, view.flow, view.best, view.running) if text]
    grid = Table.grid(expand=True)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    for part in parts:
        grid.add_row(part)
    return Group(grid)


class _Raw:
    """A stream as it is without a hook."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._write = stream.write

    def write(self, text: str) -> int:
        return self._write(text)

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
