"""The places where progress is shown: lines of a terminal that are redrawn, a cell of a notebook, or a log.

A thread draws, so that there is news at least every second, whatever the thread that tunes is doing.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TextIO

if TYPE_CHECKING:
    from quarantune.results.progress import Progress

_logger = logging.getLogger("quarantune")

_REDRAW_S = 0.25
_NOTEBOOK_S = 0.5
_LOG_S = 10.0


class Screen(Protocol):
    """A place where the progress of some sweeps is shown."""

    def add(self, progress: Progress) -> None:
        """Begins to show a sweep."""
        ...

    def remove(self, progress: Progress, last_line: str) -> None:
        """Ends to show a sweep, and writes its last line, if it has one."""
        ...


class _Nowhere:
    """Shows nothing."""

    def add(self, progress: Progress) -> None:
        return

    def remove(self, progress: Progress, last_line: str) -> None:
        return


class _Surface(Protocol):
    """Draws; called by one thread at a time."""

    interval_s: float

    def begin(self) -> None: ...

    def draw(self, sweeps: list[Progress]) -> None: ...

    def end(self, last_line: str) -> None: ...

    def write_line(self, last_line: str) -> None: ...


class _Shared:
    """Shows all sweeps of this process that are under way, which may be several: in threads, or one inside another."""

    def __init__(self, surface: _Surface) -> None:
        self._surface = surface
        self._sweeps: list[Progress] = []
        self._lock = threading.Lock()
        self._drawing = threading.RLock()
        self._stop: threading.Event | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_used(self) -> bool:
        return bool(self._sweeps)

    def add(self, progress: Progress) -> None:
        with self._lock:
            self._sweeps.append(progress)
            if self._thread is None:
                self._surface.begin()
                self._stop = threading.Event()
                context = contextvars.copy_context()  # by which a notebook knows the cell
                self._thread = threading.Thread(
                    target=context.run, args=(self._draw, self._stop), name="quarantune-progress", daemon=True
                )
                self._thread.start()

    def remove(self, progress: Progress, last_line: str) -> None:
        with self._lock:
            if progress not in self._sweeps:
                return
            self._sweeps.remove(progress)
            is_last = not self._sweeps
            if is_last and self._stop is not None and self._thread is not None:
                self._stop.set()  # the thread draws nothing from now on, and ends by itself
                self._thread = self._stop = None
            with self._drawing, contextlib.suppress(OSError, ValueError):
                if is_last:
                    self._surface.end(last_line)
                elif last_line:
                    self._surface.write_line(last_line)

    def _draw(self, stop: threading.Event) -> None:
        try:
            while not stop.wait(self._surface.interval_s):
                with self._drawing:
                    if not stop.is_set():
                        self._surface.draw(list(self._sweeps))
        except Exception:  # the terminal may be gone, which must not end the sweep
            _logger.debug("progress is not shown any more", exc_info=True)


class _Lines:
    """Without a terminal: a line every 10 s, in the log or, where the user asks for progress, on the stream."""

    interval_s = _LOG_S

    def __init__(self, stream: Callable[[], TextIO | None], *, on_stream: bool) -> None:
        self._stream = stream
        self._on_stream = on_stream

    def begin(self) -> None:
        return

    def draw(self, sweeps: list[Progress]) -> None:
        for sweep in sweeps:
            text = "; ".join(sweep.view().lines())
            if self._on_stream:
                self.write_line(text)
            else:
                _logger.info("%s", text)

    def end(self, last_line: str) -> None:
        if last_line:
            self.write_line(last_line)

    def write_line(self, last_line: str) -> None:
        if (stream := self._stream()) is not None:
            stream.write(f"{last_line}\n")
            stream.flush()


class _Notebook:
    """Shows progress in the output of a notebook's cell."""

    interval_s = _NOTEBOOK_S

    def __init__(self) -> None:
        self._handle: Any = None
        self._ended: list[str] = []

    def begin(self) -> None:
        from IPython.display import display

        self._ended = []
        show: Any = display  # it has no types
        self._handle = show(self._data(["quarantune"]), raw=True, display_id=True)

    def draw(self, sweeps: list[Progress]) -> None:
        self._show([line for sweep in sweeps for line in sweep.view().lines()])

    def end(self, last_line: str) -> None:
        self._ended += [last_line] if last_line else []
        self._show([])

    def write_line(self, last_line: str) -> None:
        self._ended.append(last_line)

    def _show(self, lines: list[str]) -> None:
        self._handle.update(self._data([*self._ended, *lines]), raw=True)

    @staticmethod
    def _data(lines: list[str]) -> dict[str, str]:
        import html  # needed here only, and no part of the import of this package

        text = "\n".join(lines)
        style = "white-space:pre-wrap;margin:0"
        return {"text/plain": text, "text/html": f'<pre style="{style}">{html.escape(text)}</pre>'}


_NOWHERE = _Nowhere()
_shared: dict[object, _Shared] = {}
_making = threading.Lock()


def screen_for(shown: bool | None, stream: TextIO | None, *, may_redraw: bool) -> Screen:
    """Returns the place to show progress.

    Args:
        shown: the setting `progress`.
        stream: the stream to write to; None for stderr.
        may_redraw: whether lines on a terminal may be replaced.
    """
    if shown is False:
        return _NOWHERE
    target = sys.stderr if stream is None else stream
    is_notebook = _is_notebook()
    is_terminal = not is_notebook and may_redraw and _is_terminal(target)
    kind = ("notebook", None) if is_notebook else ("terminal", target) if is_terminal else (f"lines {shown}", stream)

    def surface() -> _Surface:
        if is_notebook:
            return _Notebook()
        if is_terminal:
            from quarantune.results.terminal import Terminal

            assert target is not None
            return Terminal(target, interval_s=_REDRAW_S)
        return _Lines(lambda: sys.stderr if stream is None else stream, on_stream=bool(shown))

    with _making:
        for other in [other for other in _shared if other != kind and not _shared[other].is_used]:
            del _shared[other]  # its stream may be closed by now
        if kind not in _shared:
            _shared[kind] = _Shared(surface())
        return _shared[kind]


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty() and os.environ.get("TERM", "") != "dumb"
    except (OSError, ValueError, AttributeError):
        return False


def _is_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    return getattr(shell, "kernel", None) is not None
