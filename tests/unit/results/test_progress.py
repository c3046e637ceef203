"""Progress is right on terminals of any width, in pipes and notebooks, and after Ctrl-C; rich is not tested."""

from __future__ import annotations

import enum
import functools
import io
import logging
import re
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import rich.text
from aftermath import eventually
from helpers import child_environ, isolated, python, selected
from terminals import Recording, record
from terminals import python as program_of

import quarantune
from quarantune.results import progress as display
from quarantune.results.progress import Progress
from quarantune.tuning import job as tuning_job
from quarantune.values.texts import array_text
from quarantune.values.trial import AGAIN, READY, Findings, Outcome, Trial


class Way(enum.IntEnum):
    ON = 1


PROGRAM = """
import functools, logging, signal, sys, threading, time, warnings
import jax, numpy as np
import quarantune
from quarantune.host.process import in_sandbox

logging.basicConfig()
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what runs in the background
NUMBER, SECONDS, NOISY = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "noisy"

@quarantune.autotune({"BM": list(range(NUMBER))}, warmup=0, rep=1, name="pkg.matmul", ref_fn=None)
@functools.partial(jax.jit, static_argnames=["BM"])
def matmul(a, b, BM: int = 1):
    if in_sandbox():
        time.sleep(SECONDS)  # a slow compilation
    if BM == NUMBER - 1:  # the first that is compiled
        raise ValueError(f"BM={BM} does not divide")
    return a @ b + BM

def disturb():
    for number in range(12):
        time.sleep(0.4)
        warnings.warn(f"careful {number}")
        logging.getLogger("mine").warning("logged " + "x" * 70)
        print("printed", number)
        sys.stderr.write("torn ")
        sys.stderr.write("apart\\n")


if __name__ == "__main__":
    if NOISY:
        threading.Thread(target=disturb, daemon=True).start()
    a = np.ones((8, 8), np.float32)
    if sys.argv[3] == "many":
        quarantune.tune_many([(matmul, (a, a)), (matmul, (a[:4], a))])
    else:
        matmul(a, a)
"""


def environ(**more: str) -> dict[str, str]:
    terminal = {"TERM": "xterm-256color", "PYTHON_COLORS": "0", "PYTHONWARNINGS": "always"}
    return child_environ(**{"QUARANTUNE_PROGRESS": None, **terminal, **more})


@pytest.fixture
def program(tmp_path: Path) -> str:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM, encoding="utf-8")
    return str(file)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def watched(total: int, clock: Clock, **options: Any) -> Progress:
    def config_of(index: int) -> dict[str, int]:
        return {"BM": index}

    return Progress("matmul f32[512,512]", total, shown=False, config_of=config_of, clock=clock, **options)


def ended(n: int, outcome: Outcome = Outcome.OK, time_ms: float | None = None) -> Trial:
    return Trial(config={"BM": n}, outcome=outcome, time_ms=time_ms)


def test_progress_counts_what_waits_runs_and_is_done() -> None:
    clock = Clock()
    progress = watched(20, clock, default={"BM": 1})
    assert progress.view().lines() == ["matmul f32[512,512]: 0 of 20 done", "0.0 s gone", "starting workers"]
    for index, phase in enumerate(["end", "end", "end", "measure", "compile", READY, "load"]):
        progress.enter(index, phase)
        clock.now += 1.0
    for trial in (ended(0, Outcome.ERROR), ended(1, time_ms=0.775), ended(2, time_ms=0.25)):
        progress.step(trial)
    assert progress.view().lines() == [
        "matmul f32[512,512]: 3 of 20 done (1 error, 2 ok)",
        "7.0 s gone, about 39.7 s to go",
        "13 waiting, 2 compiling, 1 ready, 1 measuring",
        "best BM=2, 3.10x faster than the defaults (0.25 ms against 0.775 ms)",
        "now: BM=3 is measured (4.0 s); BM=4 compiles (3.0 s); BM=6 loads (1.0 s)",
    ]
    progress.say("waiting for process 7 to tune it (5 s)")
    assert "waiting for process 7 to tune it (5 s)" in progress.view().lines()


@pytest.mark.parametrize(
    ("other", "own"), [(1, True), (1.0, 1), (True, 1.0), (Way.ON, 1), ((1,), (True,)), (-0.0, 0.0)]
)
def test_the_defaults_are_not_a_config_equal_only_in_python(other: Any, own: Any) -> None:
    progress = watched(2, Clock(), default={"n": own})
    progress.step(Trial(config={"n": other}, outcome=Outcome.OK, time_ms=1.0))
    assert "defaults" not in progress.view().lines()[-1]
    progress.step(Trial(config={"n": own}, outcome=Outcome.OK, time_ms=2.0))
    assert progress.view().lines()[-1].endswith("2.00x faster than the defaults (1 ms against 2 ms)")


def test_a_searchs_progress_says_how_many_of_how_many() -> None:
    clock = Clock()
    progress = watched(9, clock)
    ends: list[str] = []
    progress.expect(400, is_bound=True, budget_s=30.0, why_ended=lambda: "".join(ends))
    progress.note_default(5.0)
    for index in (-1, *range(5)):
        progress.enter(index, "compile")
    for index in range(3):
        progress.enter(index, "end")
        progress.step(ended(index, time_ms=2.0 + index))
    clock.now += 20
    assert progress.view().lines() == [
        "matmul f32[512,512]: 5 asked of at most 400, 3 done (3 ok)",
        "20.0 s gone of at most 30.0 s, about 10.0 s to go",
        "3 compiling",
        "best BM=0, 2.50x faster than the defaults (2 ms against 5 ms)",
        "now: the untuned function compiles (20.0 s); BM=3 compiles (20.0 s); BM=4 compiles (20.0 s)",
    ]
    for index in (-1, 3, 4):
        progress.enter(index, "end")
    ends.append("the search ended after 2 trials without a gain")
    assert progress.view().lines()[1:3] == [
        "20.0 s gone of at most 30.0 s",
        "the search ended after 2 trials without a gain; the fastest are timed once more, in turn",
    ]


def test_configs_of_a_lost_machine_count_as_waiting() -> None:
    clock = Clock()
    progress = watched(3, clock)
    for index, phase in enumerate(["compile", READY, "measure"]):
        progress.enter(index, phase)
    clock.now += 500.0
    for index in range(3):
        progress.enter(index, AGAIN)
    progress.enter(0, "compile")
    clock.now += 1.0
    assert progress.view().lines()[-2:] == ["2 waiting, 1 compiling", "now: BM=0 compiles (1.0 s)"]


def test_configs_that_are_only_compiled_are_not_called_timed() -> None:
    progress = watched(1, Clock(), is_timed=False)
    progress.step(ended(0))
    assert progress.view().lines() == ["matmul f32[512,512]: 1 of 1 done (1 ok)", "0.0 s gone"]


def test_the_bar_moves_while_the_first_configs_compile() -> None:
    progress = watched(4, Clock())
    steps = [progress.view().done]
    for phase in ("compile", READY, "measure", "end"):
        progress.enter(0, phase)
        if phase == "end":
            progress.step(ended(0))
        steps.append(progress.view().done)
    assert steps == [0, 0, 0.5, 0.5, 1]


def shown_on(stream: io.StringIO, act: Callable[[Progress, Clock], None], *, shown: bool | None = None) -> str:
    clock = Clock()
    with Progress("matmul f32[512,512]", 48, shown=shown, stream=stream, clock=clock) as progress:
        act(progress, clock)
    return stream.getvalue()


def note_on_ctrl_c(act: Callable[[Progress, Clock], None]) -> str:
    stream = io.StringIO()
    with pytest.raises(KeyboardInterrupt) as interrupt:
        shown_on(stream, act)
    assert stream.getvalue() == ""
    [note] = interrupt.value.__notes__
    return note


def test_the_last_line_sums_up_the_sweep() -> None:
    def sweep(progress: Progress, clock: Clock) -> None:
        for index in range(48):
            progress.step(ended(index, *((Outcome.ERROR,) if index < 3 else (Outcome.OK, 1.0))))
        clock.now += 2.1
        progress.conclude({"BM": 128, "BN": 256}, Findings(0.025, 0.0775).text(), saved="saved")

    def search(progress: Progress, clock: Clock) -> None:
        progress.expect(400, is_bound=True, why_ended=lambda: "the search ended after 40 trials without a gain")
        sweep(progress, clock)

    expected = (
        "matmul f32[512,512]: 48 configs in 2.1 s (3 failed), best BM=128 BN=256, "
        "3.10x faster than the defaults (0.025 ms against 0.0775 ms); saved\n"
    )
    assert shown_on(io.StringIO(), sweep) == expected
    ended_early = expected.replace(", best", ", the search ended after 40 trials without a gain, best")
    assert shown_on(io.StringIO(), search) == ended_early
    assert shown_on(io.StringIO(), sweep, shown=False) == ""


def test_an_interrupted_sweeps_last_line_says_how_to_resume() -> None:
    def stop(progress: Progress, clock: Clock) -> None:
        progress.on_interrupt("they are kept: the next call goes on from there")
        progress.step(ended(1, time_ms=0.5))
        clock.now += 75
        raise KeyboardInterrupt

    assert note_on_ctrl_c(stop) == (
        "matmul f32[512,512]: interrupted after 1 min 15 s, with 1 of 48 configs done, best BM=1, 0.5 ms, "
        "which this process uses; they are kept: the next call goes on from there"
    )


def test_a_waiting_jobs_last_line_names_the_tuner() -> None:
    def stop(progress: Progress, clock: Clock) -> None:
        progress.say("waiting for process 7 to tune it (5 s)")
        raise KeyboardInterrupt

    expected = "matmul f32[512,512]: interrupted while waiting for process 7 to tune it (5 s)"
    assert note_on_ctrl_c(stop) == expected


@pytest.mark.parametrize(
    ("shown", "place", "on_stream"),
    [(None, "pipe", False), (True, "pipe", True), (None, "CI", True), (None, "dumb terminal", True)],
)
def test_without_a_terminal_there_is_a_line_now_and_then(
    shown: bool | None, place: str, on_stream: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(display.Screen, "interval_s", 0.01)
    monkeypatch.setenv("CI", "true" if place == "CI" else "")
    monkeypatch.setenv("TERM", "dumb")
    line = "matmul f32[512,512]: 0 of 48 done; 0.0 s gone"
    written = threading.Event()

    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return place == "dumb terminal"

        def write(self, text: str) -> int:
            written.set()
            return super().write(text)

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            written.set()

    handler = Handler()
    logging.getLogger("quarantune").addHandler(handler)
    try:
        with caplog.at_level(logging.INFO, logger="quarantune"):
            text = shown_on(Stream(), lambda *_: assert_in_time(written), shown=shown)
    finally:
        logging.getLogger("quarantune").removeHandler(handler)
    assert (line in text) is on_stream
    assert (line in caplog.text) is not on_stream


def assert_in_time(event: threading.Event) -> None:
    assert event.wait(60)


def test_two_sweeps_share_a_display_and_lose_no_last_line() -> None:
    stream = io.StringIO()
    with Progress("outer", shown=None, stream=stream) as outer, Progress("inner", shown=None, stream=stream) as inner:
        inner.end("is done")
        outer.end("is done, too")
    assert stream.getvalue() == "inner: is done\nouter: is done, too\n"
    assert eventually(lambda: all(thread.name != "quarantune-progress" for thread in threading.enumerate()))


def test_a_stream_that_is_gone_does_not_end_the_sweep() -> None:
    stream = io.StringIO()
    with Progress("matmul", shown=None, stream=stream) as progress:
        progress.end("is done")
        stream.close()


def test_a_stream_in_another_encoding_gets_the_last_line_escaped() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with Progress("größe", shown=None, stream=stream) as progress:
        progress.end("is done")
    stream.seek(0)
    assert stream.read() == "gr\\xf6\\xdfe: is done\n"


def test_a_notebook_that_shows_no_progress_ends_no_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("the kernel is shutting down")

    monkeypatch.setattr(display, "_is_notebook", lambda: True)
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=refuse))
    for _ in range(2):
        with Progress("matmul", shown=None) as progress:
            progress.end("is done")


def test_without_rich_a_terminal_gets_the_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for name in ("rich.live", "rich.console", "rich.ansi"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(display.Terminal, "interval_s", 0.01)
    stream = Terminal()
    with Progress("matmul", 2, shown=None, stream=stream) as progress:
        assert eventually(lambda: all(thread.name != "quarantune-progress" for thread in threading.enumerate()))
        progress.end("is done")
    assert stream.getvalue() == "matmul: is done\n"


NO_THREADS = """
import os, resource, sys, threading
from quarantune.results.progress import Progress

if os.getuid() == 0:
    os.setuid(54321)  # the limit does not hold for root
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
try:
    threading.Thread(target=print).start()
except RuntimeError:
    print("no thread can start")
for name in ("first", "second"):
    with Progress(name, 2, shown=True, stream=sys.stdout) as progress:
        progress.end("is done")
"""


def test_a_process_without_room_for_threads_shows_last_lines() -> None:
    assert python("-c", NO_THREADS) == "no thread can start\nfirst: is done\nsecond: is done\n"


def test_a_display_without_its_thread_leaves_the_sweep_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "quarantune-progress":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with isolated("none"), quarantune.settings(progress=True):
        result = quarantune.AutoTuner(lambda x, n: x * n / n, {"n": [1, 2]}, warmup=0, rep=1).run(np.ones(4))
    assert [trial.outcome for trial in result.trials] == [Outcome.OK] * 2


CHILD = """
import io, os, sys, threading
from quarantune.results import progress as display

display.Screen.interval_s = 0.01
seen = threading.Event()

class Stream(io.StringIO):
    def write(self, text):
        if text.startswith("child: 0 of 2 done"):
            seen.set()
        return super().write(text)

with display.Progress("parent", 2, shown=True) as parent:
    with parent._screen._lock, parent._screen._writing, display._making:  # another thread may draw at the fork
        child = os.fork()
    if not child:
        sys.stderr = Stream()
        with display.Progress("child", 2, shown=True) as progress:
            is_shown = seen.wait(60)
            progress.end("is done")
        parent.close()
        os._exit(0 if is_shown and sys.stderr.getvalue().endswith("child: is done\\n") else 1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    parent.end("is done")
"""


def test_a_child_forked_during_a_sweep_shows_its_own_progress() -> None:
    assert python("-c", CHILD).splitlines() == ["0"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


WRITTEN = (
    ("plain\n", [("plain", "default")]),
    ("with a carriage return\r\n", [("with a carriage return", "default")]),
    ("two\r\nlines\r\r\n", [("two", "default"), ("lines", "default")]),
    ("50%\r100%\n", [("100%", "default")]),
    ("\x1b[31mred\x1b[0m\n", [("red", "red")]),
    ("\x1b[32mgreen\n", [("green", "green")]),
    ("green too\r\n", [("green too", "green")]),
    ("\x1b[34m50%\rblue\x1b[0m\n", [("blue", "blue")]),
    ("after\n", [("after", "default")]),
)
"""Texts, each with the lines and colours that a terminal shows for it."""


@pytest.mark.clients
@pytest.mark.parametrize("columns", [80, 140])
def test_line_ends_and_colours_are_kept_above_redrawn_lines(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pyte = pytest.importorskip("pyte")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", str(columns))
    stream, progress = Terminal(), watched(48, Clock())
    surface = display.Terminal(stream)
    surface.draw([progress.view])
    for text, _ in WRITTEN:
        stream.write(text)
        surface.draw([progress.view])
    screen = pyte.Screen(columns, 40)
    pyte.Stream(screen).feed(stream.getvalue().replace("\n", "\r\n"))
    surface.end()
    expected = [line for _, lines in WRITTEN for line in lines]
    shown = [line.rstrip() for line in screen.display]
    assert shown[: len(expected)] == [text for text, _ in expected]
    assert [screen.buffer[at][0].fg for at in range(len(expected))] == [colour for _, colour in expected]
    assert shown[len(expected)] == "matmul f32[512,512]: 0 of 48 done"


def test_a_line_that_is_rewritten_takes_no_more_room() -> None:
    stream = Terminal()
    surface = display.Terminal(stream)
    surface.draw([watched(48, Clock()).view])
    for percent in range(1000):
        stream.write(f"\r{percent / 10}%")
    surface.end()
    assert stream.getvalue().count("%") == 1
    assert stream.getvalue().endswith("\r99.9%")


def test_a_stream_that_can_only_be_written_to_gets_the_last_line() -> None:
    class Stream:
        def __init__(self) -> None:
            self.write = written.append

    written: list[str] = []
    stream: Any = Stream()
    with Progress("matmul", shown=None, stream=stream) as progress:
        progress.end("is done")
    assert written == ["matmul: is done\n"]


@pytest.mark.clients
def test_a_line_written_during_a_redraw_leaves_no_line_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    pyte = pytest.importorskip("pyte")
    monkeypatch.setenv("TERM", "xterm")
    is_late, is_drawn = threading.Event(), threading.Event()
    render = rich.text.Text.__rich_console__

    def render_late(text: rich.text.Text, *about: Any) -> Any:
        if "printed" in text.plain:  # the display has computed the way up to its first line
            is_late.set()
            is_drawn.wait(1)
        return render(text, *about)

    monkeypatch.setattr(rich.text.Text, "__rich_console__", render_late)
    stream = Terminal()
    surface = display.Terminal(stream)
    progress = watched(48, Clock())
    progress.step(ended(0, time_ms=1.0))
    surface.draw([progress.view])
    printing = threading.Thread(target=stream.write, args=("printed\n",))
    printing.start()
    assert_in_time(is_late)
    progress.enter(1, "compile")  # adds a line to the display
    drawing = threading.Thread(target=lambda: (surface.draw([progress.view]), is_drawn.set()))
    drawing.start()
    printing.join()
    drawing.join()
    screen = pyte.Screen(80, 24)
    pyte.Stream(screen).feed(stream.getvalue().replace("\n", "\r\n"))
    surface.end()
    assert sum(" of 48 done" in line for line in screen.display) == 1, screen.display


@pytest.mark.clients
@pytest.mark.parametrize("columns", [80, 120])
def test_the_numbers_and_the_time_left_are_never_cut_off(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pyte = pytest.importorskip("pyte")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))

    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return True

    clock, stream = Clock(), Stream()
    label = "flash_attention q bf16[8,16,4096,128], k bf16[8,16,4096,128], v bf16[8,16,4096,128], causal true"
    progress = Progress(label, shown=False, config_of=lambda index: {"BLOCK_M": index}, clock=clock)
    progress.expect(4000, is_bound=True, budget_s=1830.0)
    for index in range(9):
        progress.step(ended(index, Outcome.ERROR if index % 2 else Outcome.OK, 1.0))
    progress.enter(9, "compile")
    clock.now += 750.4
    surface = display.Terminal(stream)
    surface.draw([progress.view])
    screen = pyte.Screen(columns, 24)
    pyte.Stream(screen).feed(stream.getvalue().replace("\n", "\r\n"))
    surface.end()
    pieces = re.split(r"(?<=\x1b\[\?2026l)", stream.getvalue())[:-1]
    assert pieces
    assert all(re.fullmatch(r"(?s)\x1b\[\?2026h\x1b\[\?25l.*\x1b\[\?25h\x1b\[\?2026l", piece) for piece in pieces)
    title, bar, time, states, *_ = (line.rstrip() for line in screen.display)
    assert title.startswith("flash_attention q bf16[8,")
    assert title.endswith(": 10 asked of at most 4,000, 9 done (5 ok, 4 error)")
    assert set(bar) <= set("━╸╺")
    assert time == "  12 min 30 s gone of at most 30 min 30 s, about 18 min 0 s to go"
    assert states == "  1 compiling"


def test_arrays_have_short_names() -> None:
    assert array_text((512, 8), np.dtype("float32")) == "f32[512,8]"
    assert array_text((), "bfloat16") == "bf16[]"
    names = ("int8", "uint4", "float8_e4m3fn", "bool", "complex64")
    assert [array_text((1,), name) for name in names] == ["s8[1]", "u4[1]", "float8_e4m3fn[1]", "pred[1]", "c64[1]"]


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["process", "none"])
def test_a_sweep_reports_phases_and_the_untuned_time(isolation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[tuple[int, str]] = []
    default_ms: list[float | None] = []
    given: list[tuple[int, str]] = []

    class Noting(Progress):
        def enter(self, index: int, phase: str) -> None:
            noted.append((index, phase))
            super().enter(index, phase)

        def note_default(self, time_ms: float | None) -> None:
            default_ms.append(time_ms)

    @functools.partial(jax.jit, static_argnames=["n"])
    def scale(x: Any, n: int = 1) -> Any:
        return jax.numpy.sort(x) * n / n

    monkeypatch.setattr(tuning_job, "Progress", Noting)
    with isolated(isolation):
        on_progress = lambda index, phase: given.append((index, phase))  # noqa: E731
        quarantune.AutoTuner(scale, {"n": [2, 3, 4, 5]}, rep=5, on_progress=on_progress).run(
            np.ones(1 << 16, np.float32)
        )
    phases = [phase for index, phase in noted if index == 0 and phase in ("compile", "check", "measure", "end")]
    assert list(dict.fromkeys(phases)) == ["compile", "check", "measure", "end"]  # a disturbed config is measured again
    assert {phase for index, phase in noted if index < 0} >= {"compile", "check", "measure", "end"}
    assert len(default_ms) == 1
    assert default_ms[0]
    assert ((0, READY) in noted) is (isolation == "process")
    on_device: set[int] = set()
    for index, phase in noted:  # a config that waits again after its first run is ready
        on_device = on_device | {index} if phase in ("check", "measure") else on_device - {index}
        assert len(on_device) <= 1
    assert given == [(index, phase) for index, phase in noted if index >= 0 and phase != READY]


# --- real programs ------------------------------------------------------------------------------------------

LAST = r"matmul f32\[8,8\]: (\d+) configs in [\d.]+ s \(1 failed\), best BM=\d+, .*the defaults.* \(.*\d ms\); saved"
RESUMED = LAST.replace("1 failed", r"1 failed, \d recalled")
DISTURBANCES = (
    r".*: UserWarning: careful \d+",
    r'  warnings\.warn\(f"careful \{number\}"\)',
    r"WARNING:mine:logged x+",
    r"printed \d+",
    r"torn apart",
    r"WARNING:quarantune:.*",
)


def settled_screens(recording: Recording, columns: int) -> list[tuple[float, list[str]]]:
    """Returns the screens before each pause and at the end, each with its time in seconds."""
    pyte = pytest.importorskip("pyte")
    screen = pyte.Screen(columns, 100)
    stream = pyte.ByteStream(screen)
    screens = []
    times = [at for at, _ in recording.pieces]
    for (at, piece), following in zip(recording.pieces, [*times[1:], times[-1] + 1], strict=True):
        stream.feed(piece)
        if following - at > 0.1:
            screens.append((at, [line.rstrip() for line in screen.display if line.strip()]))
    return screens


@pytest.fixture(scope="module")
def recordings(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[int, Future[Recording]]]:
    """Records the sweep in terminals of two widths at once, as each sleeps most of the time."""
    place = tmp_path_factory.mktemp("terminals")
    file = place / "program.py"
    file.write_text(PROGRAM, encoding="utf-8")

    def run(columns: int) -> Recording:
        about = environ(QUARANTUNE_CACHE_DIR=str(place / str(columns)), COLUMNS="80")  # a resized terminal leaves this
        return record(program_of(str(file), "24", "0.6", "noisy"), columns=columns, lines=100, environ=about)

    with ThreadPoolExecutor(2) as pool:
        yield {columns: pool.submit(run, columns) for columns in selected(request, "columns") if columns in (60, 200)}


@pytest.mark.slow
@pytest.mark.clients
@pytest.mark.parametrize("columns", [60, pytest.param(200, marks=pytest.mark.long)])
def test_a_terminal_gets_news_every_second_and_no_torn_line(
    recordings: dict[int, Future[Recording]], columns: int
) -> None:
    pytest.importorskip("pyte")
    recording = recordings[columns].result()
    assert recording.status == 0, recording.text
    screens = settled_screens(recording, columns)
    live = [(at, lines) for at, lines in screens if any(" of 24 done" in line for line in lines)]
    # One line shows the elapsed time, so that it is new at each redraw. Output of other threads repeats the lines.
    news: dict[str, float] = {}
    for at, lines in live:
        news.setdefault(next((line for line in lines if " s gone" in line), ""), at)
    assert len(news) > 10
    pauses = np.diff(list(news.values()))
    assert np.median(pauses) < 3.0  # a busy machine draws late
    assert max(pauses) < 60.0
    parts = (
        r"matmul f32\[8,8\]: \d+ of 24 done( \([^)]*\))?",
        r"[━╸╺]+",
        r"  [\d.]+ s gone(, about .* to go)?",
        r"  \d+ (waiting|compiling|ready|measuring)(, \d+ (compiling|ready|measuring))*",
        r"  best BM=\d+,? (\S+ ms|the defaults are best|as fast as|\S+ (faster|slower) than).*",
        r"  now: (BM=\d+|the untuned function) .*",
        r"  (starting workers|the fastest are timed once more, in turn)",
        *DISTURBANCES,
        LAST,
    )
    allowed = re.compile("|".join(f"(?:{part})" for part in parts))
    if columns == 200:
        assert [line for _, lines in screens for line in lines if not allowed.fullmatch(line)] == []
    for _, lines in live:
        (at, *others) = [number for number, line in enumerate(lines) if " of 24 done" in line]
        assert not others, lines
        assert lines[at].startswith("matmul f32[8,8]: ")
        assert not any(re.search("careful|logged|printed|torn", line) for line in lines[at:])
    _, end = screens[-1]
    assert not any(re.search("━| of 24 done|now: ", line) for line in end)
    assert re.search(LAST.replace(" ", ""), "".join(end).replace(" ", "")), end  # the terminal's width breaks lines
    assert end.count("torn apart") >= 10


@pytest.mark.slow
@pytest.mark.parametrize("calls", ["one", "many"])
@pytest.mark.long
def test_ctrl_c_says_what_is_kept_and_the_next_run_continues(program: str, calls: str) -> None:
    command = program_of(program, "5", "0.5", calls)
    stopped = record(command, columns=200, environ=environ(), interrupt_when=lambda text: " done (1 error" in text)
    assert stopped.status != 0
    traceback, said = stopped.text.split("KeyboardInterrupt")
    assert re.findall(r'File ".*/(\S+)", line', traceback) == ["program.py"], stopped.text
    found = re.search(r"interrupted after [\d.]+ s, with \d of 5 configs done.*; (they are kept: [\w ]*)", said)
    assert found, stopped.text
    assert found[1].strip() == "they are kept: the next run of the program continues from there"
    many = re.search("tune_many: [01] of 2 calls are done: continue with the next run", said)
    assert (many is not None) is (calls == "many")
    again = subprocess.run(command, env=environ(), capture_output=True, text=True, timeout=280)
    assert again.returncode == 0, again.stderr
    # The one call is resumed; of many calls, only the last is tuned now.
    last = LAST if calls == "many" else RESUMED
    assert re.search(last, again.stderr.replace("f32[4,8] ", "")), again.stderr


@pytest.mark.slow
def test_a_pipe_gets_the_last_line_and_nothing_else(program: str) -> None:
    for progress, expected in (("auto", 1), ("0", 0)):
        more = {"QUARANTUNE_PROGRESS": progress, "QUARANTUNE_ALWAYS_TUNE": "1"}
        command = program_of(program, "3", "0", "quiet")
        ran = subprocess.run(command, env=environ(**more), capture_output=True, text=True, timeout=280)
        lines = [line for line in ran.stderr.splitlines() if not line.startswith("WARNING:quarantune:")]
        assert (ran.returncode, ran.stdout, len(lines)) == (0, "", expected), ran.stderr
        assert all(re.fullmatch(LAST, line) for line in lines), ran.stderr


@pytest.mark.slow
@pytest.mark.clients
def test_a_notebook_shows_progress_in_the_cell_that_tunes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    for name, value in environ().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("QUARANTUNE_PROGRESS")
    own = PROGRAM.replace('int(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "noisy"', "3, 0.5, False")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(own), nbformat.v4.new_code_cell("1 + 1")])
    seen: list[str] = []

    class Client(nbclient.NotebookClient):  # type: ignore[misc, name-defined]
        def process_message(self, message: Any, *rest: Any) -> Any:
            if message["msg_type"] in ("display_data", "update_display_data"):
                seen.append(message["content"]["data"]["text/plain"])
            return super().process_message(message, *rest)

    Client(book, kernel_name="python3", timeout=280, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output["data"]["text/plain"] for output in book.cells[0].outputs if output.output_type == "display_data"]
    assert len(outputs) == 1
    assert re.fullmatch(LAST, outputs[0])
    assert any(" of 3 done" in text for text in seen), seen
