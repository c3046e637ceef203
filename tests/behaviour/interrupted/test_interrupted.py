"""However a sweep is cut short, none of its processes survive, and no measurement is repeated."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import misdeeds
import numpy as np
import psutil
import pytest
from aftermath import MARK, carriers, eventually, left_of, nothing_is_left, quiet_place, running_templates  # noqa: F401
from helpers import SUPPORT, child_environ, python

import quarantune

X = np.ones(8, np.float32)
GOOD = ("good", "")

# While the file `hang` exists, config 10 hangs: it begins after others have been measured. Config 2 leaves a
# grandchild. The log lists the measured configs.
PROGRAM = """
import functools, logging, os, signal, sys, time
from pathlib import Path

# Whoever runs the tests may have these ignored, as `nohup` does, and a shell for what runs in the background.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
import jax
import numpy as np
import psutil
import quarantune
from quarantune.host.process import in_sandbox

sys.path.insert(0, {tests!r})
import misdeeds
from aftermath import eventually, left_of

HERE = Path({here!r})

@quarantune.autotune({{"n": list(range(20))}}, warmup=0, rep=1, name="kernel", ref_fn=None)
@functools.partial(jax.jit, static_argnames=["n"])
def kernel(x, n: int = 0):
    if n == 2 and in_sandbox():  # the caller also traces the winner
        misdeeds.leave_a_daemon()
    if n == 10 and (HERE / "hang").exists():
        (HERE / "hangs").touch()
        misdeeds.hang()
    return x + n

if __name__ == "__main__":
    logging.getLogger("quarantune").addHandler(logging.FileHandler(HERE / "log"))
    logging.getLogger("quarantune").setLevel(logging.INFO)
    x = np.ones(8, np.float32)
    try:
        kernel(x)
    except KeyboardInterrupt:
        (HERE / "interrupted_at").write_text(str(time.monotonic()))
        eventually(lambda: len(left_of(psutil.Process())) == 1)
        left = left_of(psutil.Process())
        for _ in range(2):  # with the best config so far, and without another sweep
            assert np.asarray(kernel(x))[0] == 1 + kernel.lookup(x)["n"]
        (HERE / "left").write_text(str(len(left)))
"""


class Program:
    """A tuning program in the middle of its sweep."""

    def __init__(self, here: Path) -> None:
        self.here = here
        self.mark = uuid.uuid4().hex
        (here / "hang").touch()
        text = PROGRAM.format(here=str(here), tests=str(SUPPORT))
        (here / "program.py").write_text(text, encoding="utf-8")

    def start(self, prefix: tuple[str, ...] = (), **options: object) -> subprocess.Popen[bytes]:
        command = [*prefix, sys.executable, "-W", "error", str(self.here / "program.py")]
        process = subprocess.Popen(
            command,
            env=child_environ(**{MARK: self.mark}),
            stderr=subprocess.PIPE,
            **options,  # type: ignore[call-overload]
        )
        assert eventually((self.here / "hangs").exists, timeout_s=200), "the sweep did not reach the hanging config"
        # Owner, template, sweep's template, the grandchild, and the worker that hangs.
        assert eventually(lambda: len(carriers(MARK, self.mark)) >= 5)
        return process

    def is_gone(self) -> bool:
        return not carriers(MARK, self.mark)

    def measured(self) -> list[int]:
        """Returns the configs that ended, in order, with repetitions."""
        return [int(n) for n in re.findall(r": n=(\d+): (?:ok|slow)", (self.here / "log").read_text())]


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    program = Program(tmp_path)
    yield program
    for pid in carriers(MARK, program.mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, marks=pytest.mark.long),
    ],
)
def test_nothing_outlives_a_caller_that_is_killed(program: Program, number: signal.Signals) -> None:
    with program.start() as process:
        process.send_signal(number)
        assert eventually(program.is_gone)
        assert process.wait() == -number


@pytest.mark.slow
def test_a_sweep_resumes_where_a_killed_one_ended(program: Program) -> None:
    with program.start() as process:
        process.kill()
    assert program.measured(), "the kill came before the first measurement, so the test shows nothing"
    (program.here / "hang").unlink()
    python(program.here / "program.py", **{MARK: program.mark})
    assert sorted(program.measured()) == list(range(20))


def _to_the_process(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)


def _to_its_group(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGINT)


@pytest.mark.long  # Ctrl-C on a terminal, below, also interrupts the group
@pytest.mark.slow
@pytest.mark.parametrize("interrupt", [_to_the_process, _to_its_group])
def test_an_interrupt_ends_the_sweep_at_once_and_keeps_the_best(
    program: Program, interrupt: Callable[[subprocess.Popen[bytes]], None]
) -> None:
    with program.start(start_new_session=True) as process:
        interrupt(process)
        _check_the_interrupt(program, process)


@pytest.mark.slow
def test_control_c_on_a_terminal_ends_the_sweep_at_once(program: Program) -> None:
    ours, theirs = os.openpty()
    login = "import os, sys; os.login_tty(int(sys.argv[1])); os.execv(sys.argv[2], sys.argv[2:])"
    try:
        prefix = (sys.executable, "-c", login, str(theirs))
        with program.start(prefix, start_new_session=False, pass_fds=[theirs]) as process:
            os.write(ours, b"\x03")
            _check_the_interrupt(program, process)
    finally:
        os.close(ours)
        os.close(theirs)


def _check_the_interrupt(program: Program, process: subprocess.Popen[bytes]) -> None:
    sent_at = time.monotonic()
    _, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors.decode()
    assert float((program.here / "interrupted_at").read_text()) - sent_at < 60, "the config hangs for longer"
    assert (program.here / "left").read_text() == "1", "only the template may be left"
    assert eventually(program.is_gone)
    measured = program.measured()
    assert 0 < len(measured) < 20
    best = re.search(r"best n=\d+ [\d.]+ ms.*, which this process uses; they are kept", errors.decode())
    assert best or os.environ["QUARANTUNE_PROGRESS"] == "0"
    assert not (program.here / "cache" / "kernel.json").exists(), "the answer holds in that process alone"
    (program.here / "hang").unlink()
    python(program.here / "program.py", **{MARK: program.mark})
    assert sorted(program.measured()) == list(range(20)), "the next run of the program continues"
    assert json.loads((program.here / "cache" / "kernel.json").read_text())


# Config 1 works for a second on its first run, and notes it; its limits are three seconds.
STOPPED = """
import json, sys, time
from pathlib import Path
import quarantune

HERE = Path({here!r})

def work(*, n: int = 0) -> int:
    if n == 1 and not (HERE / "runs").exists():
        (HERE / "runs").touch()
        time.sleep(1.0)
    time.sleep(0.005 + 0.1 * (n != 3))
    return 0

result = quarantune.AutoTuner(work, {{"n": [0, 1, 2, 3]}}, rep=1, timeout=3, compile_timeout=3).run()
(HERE / "result").write_text(json.dumps([result.best_config, [trial.outcome.value for trial in result.trials]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "whole_tree",
    [pytest.param(False, id="the caller"), pytest.param(True, id="all its processes")],
)
@pytest.mark.long
def test_stopping_the_caller_for_a_while_costs_no_result(tmp_path: Path, whole_tree: bool) -> None:
    script, mark = tmp_path / "program.py", uuid.uuid4().hex
    script.write_text(STOPPED.format(here=str(tmp_path)), encoding="utf-8")
    environ = child_environ(**{MARK: mark})
    with subprocess.Popen([sys.executable, str(script)], env=environ, stderr=subprocess.PIPE) as process:
        assert eventually((tmp_path / "runs").exists, timeout_s=200)
        stopped = carriers(MARK, mark) if whole_tree else [process.pid]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(4.0)  # longer than any limit
        for pid in reversed(stopped):
            os.kill(pid, signal.SIGCONT)
        _, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors.decode()
    best, outcomes = json.loads((tmp_path / "result").read_text())
    assert best == {"n": 3}
    assert set(outcomes) <= {"ok", "slow"}, outcomes
    assert eventually(lambda: not carriers(MARK, mark))


class Watcher(logging.Handler):
    """Does something when the first config of a sweep has ended."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__(logging.INFO)
        self._act = act
        self.calls = 0

    def emit(self, record: logging.LogRecord) -> None:
        if re.search(": (ok|slow) ", record.getMessage()):
            self.calls += 1
            if self.calls == 1:
                self._act()


@contextlib.contextmanager
def watching(act: Callable[[], object]) -> Iterator[Watcher]:
    logger, watcher = logging.getLogger("quarantune"), Watcher(act)
    level = logger.level
    logger.addHandler(watcher)
    logger.setLevel(logging.INFO)
    try:
        yield watcher
    finally:
        logger.removeHandler(watcher)
        logger.setLevel(level)


def press_ctrl_c() -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.usefixtures("quiet_place")
def test_an_interrupted_sweep_continues_here_if_asked_to() -> None:
    x, space = np.ones(6, np.float32), (GOOD,) * 6
    with nothing_is_left(), watching(press_ctrl_c), pytest.raises(KeyboardInterrupt):
        misdeeds.kernel.tune(x, space=space)
    with nothing_is_left(), watching(lambda: None) as watcher:
        misdeeds.kernel.tune(x, space=space, resume=True)
    assert 1 <= watcher.calls <= 5  # the first config is known


class StopIt(Exception):
    """Raised in the middle of a sweep, by the caller's own code."""


def stop_it(*_: object, **__: object) -> bool:
    raise StopIt


@pytest.mark.slow
@pytest.mark.usefixtures("quiet_place")
def test_an_exception_in_a_callback_ends_a_resumable_sweep() -> None:
    x, space = np.ones(7, np.float32), (GOOD,) * 6  # no other test in this process tunes this shape
    with nothing_is_left(), watching(stop_it), pytest.raises(StopIt):
        misdeeds.kernel.trace(x, space=space)
    with nothing_is_left(), watching(lambda: None) as watcher:
        misdeeds.kernel.trace(x, space=space)  # unlike a call, a trace starts no backend here
    assert 1 <= watcher.calls <= 5  # the first config is known


@pytest.mark.usefixtures("quiet_place")
def test_an_exception_in_prune_fn_reaches_the_caller() -> None:
    tuned = quarantune.autotune([{"mode": "good"}], prune_fn=stop_it)(misdeeds.kernel.__wrapped__)
    with nothing_is_left(), pytest.raises(StopIt):
        tuned.trace(X)


def _kill_the_template() -> None:
    running_templates()[0].kill()


def _kill_the_sweeps_template() -> None:
    (process,) = running_templates()
    process.children()[0].kill()


@pytest.mark.usefixtures("quiet_place")
@pytest.mark.parametrize("kill", [_kill_the_template, pytest.param(_kill_the_sweeps_template, marks=pytest.mark.long)])
@pytest.mark.slow
def test_a_sweep_whose_template_is_killed_finishes(kill: Callable[[], None]) -> None:
    with nothing_is_left(), watching(kill) as watcher:
        result = misdeeds.kernel.tune(X, space=(GOOD,) * 8)
    assert watcher.calls == 8
    assert all(trial.outcome in misdeeds.MEASURED for trial in result.trials)


@pytest.mark.slow
@pytest.mark.usefixtures("quiet_place")
def test_a_template_that_was_killed_between_sweeps_is_replaced() -> None:
    misdeeds.kernel.tune(X, space=(GOOD,))
    with nothing_is_left():
        _kill_the_template()
        result = misdeeds.kernel.tune(X, space=(GOOD,))
    assert all(trial.outcome in misdeeds.MEASURED for trial in result.trials)
    (template,) = running_templates()
    assert eventually(lambda: left_of(psutil.Process()) == [template.pid])
