"""Threads and processes tune one problem once, also after kills and stops, and longer lists only add configs."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import json
import logging
import os
import random
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aftermath import MARK, carriers, eventually
from helpers import SweepWatch

import quarantune
from quarantune.measure import finals

NAME = "shared"

KERNEL = """
import functools, os, time
import jax
import quarantune
from quarantune.host.process import in_sandbox

@quarantune.autotune(
    lambda x, place, good, **_: ({"n": n} for n in range(len(good))), name="shared", warmup=0, rep=1, ref_fn=None
)
@functools.partial(jax.jit, static_argnames=["place", "good", "n"])
def kernel(x, place, good, n: int = 0):
    "Adds n; notes in `place` that a worker traced it, waits there at a gate that is shut, and fails unless good[n]."
    if in_sandbox():
        with open(f"{place}/notes", "a") as notes:
            notes.write(f"{n}\\n")
        while os.path.exists(f"{place}/shut") or os.path.exists(f"{place}/shut {n}"):
            time.sleep(0.01)
        if not good[n]:
            raise ArithmeticError(f"n={n} is bad")
    return x + n
"""

MEMBER = """
import json, logging, os, signal, sys, threading, time
import numpy as np
from quarantune.tuning import claim_and_journal
from quarantune.cache import claims
from quarantune.cache.journal import Journal
from shared_kernel import kernel

def die(recorded, moment, delay_s, most):
    "Kills this process after a moment, given by the number of recorded trials, and before `most` are recorded."
    def kill():
        time.sleep(delay_s)
        os.kill(os.getpid(), signal.SIGKILL)

    def append(self, record, real=Journal.append):
        nonlocal recorded
        real(self, record)
        recorded += "limits" in record
        if recorded == moment:
            killer.start()
        if recorded == most - 1:
            killer.join()

    Journal.append = append
    killer = threading.Thread(target=kill)
    if recorded >= moment:
        killer.start()

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what runs in the background
logger = logging.getLogger("quarantune")
logger.setLevel(logging.INFO)
kernel._tuner  # imports as the first call does
print("ready", flush=True)
for line in sys.stdin:
    order = json.loads(line)
    os.environ["QUARANTUNE_CACHE_DIR"] = order["cache"]
    handler = logging.FileHandler(order["log"])
    logger.addHandler(handler)
    if order["worst_case_s"] is not None:
        claim_and_journal._HEARTBEAT_S = 0.1
        claim_and_journal.ClaimAndJournal._worst_case_s = lambda self: order["worst_case_s"]
        claims._GRACE_S = 0.5
    if order["dies"] is not None:
        die(*order["dies"], len(order["good"]))
    x = np.zeros(2, np.float32)
    try:
        if order["tunes"]:
            kernel.tune(x, order["place"], tuple(order["good"]))
        result = kernel(x, order["place"], tuple(order["good"]))
        answer = [kernel.lookup(x, order["place"], tuple(order["good"])), np.asarray(result).tolist()]
    except KeyboardInterrupt:
        answer = "interrupted"
    logger.removeHandler(handler)
    handler.close()
    print(json.dumps(answer), flush=True)
"""


class Member:
    """A process that calls the kernel on request."""

    _serial = itertools.count()

    def __init__(self, home: Path) -> None:
        self.mark = f"{os.getpid()}-{next(self._serial)}"
        self._log = home / f"{self.mark}.log"
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", MEMBER],
            cwd=home,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                MARK: self.mark,
                "PYTHONPATH": os.pathsep.join([str(home), *sys.path]),
                "QUARANTUNE_NUM_WORKERS": "2",  # more CPUs let more configs wait for measurement
            },
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def order(
        self,
        cache_dir: Path,
        place: Path,
        good: list[bool],
        *,
        worst_case_s: float | None = None,
        tunes: bool = False,
        dies: tuple[int, int, float] | None = None,
    ) -> None:
        self._log.unlink(missing_ok=True)
        order = {"cache": str(cache_dir), "place": str(place), "good": good, "log": str(self._log), "tunes": tunes}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({**order, "worst_case_s": worst_case_s, "dies": dies}) + "\n")
        self._process.stdin.flush()

    def read_line(self, *, timeout_s: float = 200) -> str:
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        assert readable, f"no answer within {timeout_s} s; its log: {self.log}"
        return self._process.stdout.readline().strip()

    def answer(self, *, timeout_s: float = 200) -> Any:
        return json.loads(self.read_line(timeout_s=timeout_s))

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self) -> None:
        """Waits until it has been killed, and all processes that it started are gone."""
        assert self._process.wait(timeout=200) == -signal.SIGKILL
        self.kill()

    def kill(self) -> None:
        """Kills the process, and waits until all processes that it started are gone."""
        self._process.kill()
        self._process.communicate()
        assert eventually(lambda: not carriers(MARK, self.mark))

    def close(self) -> None:
        if self._process.returncode is None:
            self.kill()


class Fleet:
    """Members on standby; each serves once."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._ready: list[Member] = []
        self._in_use: list[Member] = []

    def hand_out(self, count: int) -> list[Member]:
        new = [Member(self._home) for _ in range(count - len(self._ready))]
        for member in new:
            assert member.read_line() == "ready"
        self._ready += new
        members = [self._ready.pop() for _ in range(count)]
        self._in_use += members
        return members

    def give_back(self, members: list[Member]) -> None:
        """Takes back idle and unharmed members, which saves starting others."""
        self._ready += members

    def close(self) -> None:
        for member in {*self._ready, *self._in_use}:
            member.close()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    home = tmp_path_factory.mktemp("fleet")
    (home / "shared_kernel.py").write_text(KERNEL)
    fleet = Fleet(home)
    yield fleet
    fleet.close()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The directory for the kernel's notes of its traces."""
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


def notes(place: Path) -> list[int]:
    file = place / "notes"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def recorded(cache_dir: Path) -> list[int]:
    """Returns the n of every finished trial in the sweep's journal; known compile failures have another journal."""
    lines = [line for file in cache_dir.glob(f"{NAME}.trials/*.jsonl") for line in file.read_text().splitlines()]
    records = [json.loads(line.partition(" ")[2]) for line in lines]
    return [record["trial"]["config"]["n"] for record in records if "limits" in record]


def holder_pid(cache_dir: Path) -> int | None:
    for claim in cache_dir.glob(f"{NAME}.trials/*.claim"):
        with contextlib.suppress(OSError, ValueError):
            return int(json.loads(claim.read_text())["owner"]["pid"])
    return None


def entry_of(cache_dir: Path) -> dict[str, Any]:
    contents = json.loads((cache_dir / f"{NAME}.json").read_text())
    ((entry,),) = [entries.values() for entries in contents.values()]
    return dict(entry)


# --- sixteen at once ----------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.slow
def test_eight_processes_that_start_together_sweep_once(fleet: Fleet, cache_dir: Path, place: Path) -> None:
    members = fleet.hand_out(8)
    (place / "shut").touch()  # the sweep lasts until all others have looked
    for member in members:
        member.order(cache_dir, place, [True] * 6)
    assert eventually(lambda: sum("waiting for process" in member.log for member in members) == 7, timeout_s=200)
    (place / "shut").unlink()
    answers = [member.answer() for member in members]
    assert sorted(recorded(cache_dir)) == [0, 1, 2, 3, 4, 5]
    # The final traces its configs once more.
    assert 6 <= len(notes(place)) <= 6 + finals.FINALISTS
    config = entry_of(cache_dir)["config"]
    assert answers == [[config, [config["n"]] * 2]] * 8
    fleet.give_back(members)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "tunes"), [(8, False), pytest.param(3, True, marks=pytest.mark.long)], ids=["calls", "tune"]
)
def test_another_process_finishes_the_sweep_of_a_killed_one(
    fleet: Fleet, cache_dir: Path, place: Path, count: int, tunes: bool
) -> None:
    members = fleet.hand_out(count)
    (place / "shut").touch()  # until the others wait
    (place / "shut 5").touch()  # until the first is killed
    for member in members:
        member.order(cache_dir, place, [n == 5 for n in range(12)], tunes=tunes)
    waiting = count - 1
    assert eventually(lambda: sum("waiting for process" in member.log for member in members) == waiting, timeout_s=200)
    (place / "shut").unlink()
    assert eventually(lambda: len(recorded(cache_dir)) >= 3, timeout_s=200)
    (holder,) = [member for member in members if member.pid == holder_pid(cache_dir)]
    holder.kill()
    finished, traced = set(recorded(cache_dir)), set(notes(place))
    assert len(finished) < 12, "the sweep ended before the kill"
    (place / "shut 5").unlink()
    members.remove(holder)
    assert [member.answer() for member in members] == [[{"n": 5}, [5.0, 5.0]]] * (count - 1)
    assert sorted(recorded(cache_dir)) == list(range(12))
    again = {n for n, count in collections.Counter(notes(place)).items() if count > 1}
    assert again <= traced - finished
    assert max(collections.Counter(notes(place)).values()) <= 2
    fleet.give_back(members)


# --- interrupted --------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.slow
def test_a_sweep_killed_five_times_runs_no_finished_trial_twice(fleet: Fleet, cache_dir: Path, place: Path) -> None:
    random_ = random.Random(3)
    finished: list[int] = []
    ran: list[int] = []
    for moment in sorted(random_.sample(range(1, 20), 5)):
        (member,) = fleet.hand_out(1)
        # Anywhere within a trial. This process chooses the moment: another could be late on a busy machine.
        member.order(cache_dir, place, [True] * 24, dies=(len(finished), moment, random_.uniform(0, 0.05)))
        member.wait()
        new = notes(place)[len(ran) :]
        assert not set(new) & set(finished)
        assert len(new) == len(set(new))
        finished, ran = recorded(cache_dir), notes(place)
        assert moment <= len(finished) == len(set(finished)) < 24
        in_flight = set(new) - set(finished)
        assert len(in_flight) <= 18  # waiting for measurement, one compiling, one ended unrecorded
    (member,) = fleet.hand_out(1)
    member.order(cache_dir, place, [True] * 24)
    config, values = member.answer()
    assert values == [config["n"]] * 2
    assert sorted(recorded(cache_dir)) == list(range(24))
    left = 24 - len(finished)
    new = notes(place)[len(ran) :]
    assert sorted(finished + new[:left]) == list(range(24))
    # The final has the defaults, and more finalists on a busy machine.
    assert len(new) - left <= finals.MOST_FINALISTS + 1
    fleet.give_back([member])


@pytest.mark.long
@pytest.mark.slow
def test_a_stopped_holder_is_taken_over_and_may_continue(fleet: Fleet, cache_dir: Path, place: Path) -> None:
    stopped, other = fleet.hand_out(2)
    (place / "shut").touch()
    stopped.order(cache_dir, place, [False, True, False], worst_case_s=1.5)
    assert eventually(lambda: 0 in notes(place), timeout_s=200)
    assert holder_pid(cache_dir) == stopped.pid
    stopped.send_signal(signal.SIGSTOP)
    try:
        other.order(cache_dir, place, [False, True, False], worst_case_s=1.5)
        assert eventually(lambda: holder_pid(cache_dir) == other.pid, timeout_s=200)
        assert f"waiting for process {stopped.pid} on " in other.log
        (place / "shut").unlink()
        assert other.answer() == [{"n": 1}, [1.0, 1.0]]
        assert sorted(recorded(cache_dir)) == [0, 1, 2]
    finally:
        stopped.send_signal(signal.SIGCONT)
    assert stopped.answer() == [{"n": 1}, [1.0, 1.0]]
    assert entry_of(cache_dir)["config"] == {"n": 1}
    assert holder_pid(cache_dir) is None


@pytest.mark.slow
def test_waiting_is_visible_and_ctrl_c_ends_it_at_once(fleet: Fleet, cache_dir: Path, place: Path) -> None:
    tuning, waiting = fleet.hand_out(2)
    (place / "shut").touch()
    tuning.order(cache_dir, place, [True])
    assert eventually(lambda: notes(place) == [0], timeout_s=200)
    began = time.monotonic()
    waiting.order(cache_dir, place, [True])
    said = f"{NAME}: waiting for process {tuning.pid} on "
    assert eventually(lambda: said in waiting.log, timeout_s=200)
    started = time.monotonic()
    waiting.send_signal(signal.SIGINT)
    assert waiting.answer() == "interrupted"
    # It takes a fraction of a second, or longer on a busy machine; the tuning process continues until it may end.
    assert time.monotonic() - started < 20.0
    most = 2 + (time.monotonic() - began) / 5
    assert waiting.log.count("waiting for process") <= most, "the message comes once in a while, not at every look"
    assert holder_pid(cache_dir) == tuning.pid
    waiting.order(cache_dir, place, [True])
    (place / "shut").unlink()
    assert tuning.answer() == waiting.answer() == [{"n": 0}, [0.0, 0.0]]
    assert recorded(cache_dir) == [0]
    fleet.give_back([tuning, waiting])


# --- in one process -----------------------------------------------------------------------------------------


X = np.zeros(4, np.float32)


def scaled(configs: Any, *, bad: tuple[int, ...] = (1,), slow: tuple[int, ...] = ()) -> quarantune.Autotuned:
    """Returns a new function for the same problem: bad configs raise, slow ones take long."""

    @quarantune.autotune(configs, rep=3, name=NAME, ref_fn=None)
    @functools.partial(jax.jit, static_argnames=["n"])
    def scale(x: Any, n: int = 0) -> Any:
        if n in bad:
            raise ArithmeticError(f"n={n} is bad")
        if n in slow:
            square = jnp.ones((200, 200)) * x[0]
            x = x + 0 * jax.lax.fori_loop(0, 30, lambda _, y: y @ square, square)[0, 0]
        return x + n

    return scale


def test_threads_with_separate_function_objects_sweep_once(swept: list[list[Any]]) -> None:
    barrier = threading.Barrier(4)
    fns = [scaled([{"n": 1}, {"n": 2}]) for _ in range(4)]

    def call(fn: quarantune.Autotuned) -> Any:
        barrier.wait()
        return fn(X)

    with ThreadPoolExecutor(4) as pool:
        for result in pool.map(call, fns):
            np.testing.assert_array_equal(result, X + 2)
    assert swept == [[1, 2]]


@pytest.fixture
def hold(sweep_watch: SweepWatch, caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], None]]:
    """Returns a function; after its call, every sweep stops until two threads wait for it."""
    all_wait, waiting = threading.Event(), set[int]()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            # A waiter that has seen only "another job", not the holder, would not take its failure.
            if re.search(r": waiting for (?!another job).* to tune it", record.getMessage()):
                waiting.add(threading.get_ident())
            if len(waiting) == 2:
                all_wait.set()

    def hold() -> None:
        sweep_watch.on_begin.append(lambda *_: all_wait.wait(200) or pytest.fail("no two threads wait"))

    listener = Listener()
    with caplog.at_level(logging.INFO, "quarantune"):
        logging.getLogger("quarantune").addHandler(listener)
        yield hold
        logging.getLogger("quarantune").removeHandler(listener)


@pytest.mark.parametrize("tunes", [False, True], ids=["calls", "tune"])
def test_waiters_share_the_failure_of_a_sweep(tunes: bool, swept: list[list[Any]], hold: Callable[[], None]) -> None:
    hold()

    def call(fn: quarantune.Autotuned) -> quarantune.TuningFailedError:
        with pytest.raises(quarantune.TuningFailedError, match="All 2 configs failed") as failed:
            (fn.tune if tunes else fn)(X)
        return failed.value

    with ThreadPoolExecutor(3) as pool:
        errors = list(pool.map(call, [scaled([{"n": 1}, {"n": 2}], bad=(0, 1, 2)) for _ in range(3)]))
    assert swept == [[1, 2]]
    assert [[(trial.config["n"], trial.outcome) for trial in error.trials] for error in errors] == [
        [(1, "error"), (2, "error")]
    ] * 3
    with pytest.raises(quarantune.TuningFailedError):  # a later call may find the machine in a better state
        scaled([{"n": 1}, {"n": 2}], bad=(0, 1, 2))(X)
    assert swept == [[1, 2]] * 2


TWO = [{"n": 1}, {"n": 2}]


@pytest.mark.slow
def test_jobs_that_tune_at_once_follow_the_first(swept: list[list[Any]], hold: Callable[[], None]) -> None:
    scaled(TWO, bad=())(X)  # an existing result is not an answer
    hold()
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda fn: fn.tune(X), [scaled(TWO, bad=()) for _ in range(3)]))
    assert swept == [[1, 2]] * 2
    assert len({str(result.best_config) for result in results}) == 1
    assert sorted(result.from_cache for result in results) == [False, True, True]
    assert not scaled(TWO, bad=()).tune(X).from_cache
    assert swept == [[1, 2]] * 3


@pytest.mark.long
@pytest.mark.slow
def test_jobs_with_always_tune_follow_no_other(swept: list[list[Any]], hold: Callable[[], None]) -> None:
    hold()

    def tune(fn: quarantune.Autotuned) -> quarantune.TuningResult:
        with quarantune.settings(always_tune=True):
            return fn.tune(X)

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(tune, [scaled(TWO, bad=()) for _ in range(3)]))
    assert swept == [[1, 2]] * 3
    assert not any(result.from_cache for result in results)


class Delayed(Executor):
    """A pool that begins its work after an event."""

    def __init__(self, pool: Executor, event: threading.Event) -> None:
        self._pool, self._event = pool, event
        self.is_asked = threading.Event()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.is_asked.set()
        return self._pool.submit(lambda: (self._event.wait(200), fn(*args, **kwargs))[1])


@pytest.mark.slow
def test_a_job_whose_engine_is_busy_takes_anothers_result(swept: list[list[Any]]) -> None:
    scaled(TWO, bad=())(X)  # an existing result is not an answer
    is_tuned = threading.Event()
    with ThreadPoolExecutor(1) as machine, ThreadPoolExecutor(1) as pool:
        engine = Delayed(machine, is_tuned)
        follower = pool.submit(scaled(TWO, bad=()).tune, X, executor=engine)
        assert engine.is_asked.wait(200)
        try:
            assert not scaled(TWO, bad=()).tune(X).from_cache
        finally:
            is_tuned.set()
        assert follower.result().from_cache
    assert swept == [[1, 2]] * 2


@pytest.mark.long
@pytest.mark.slow
def test_a_longer_list_measures_only_its_new_configs(swept: list[list[Any]], cache_dir: Path) -> None:
    def winner(*values: int) -> int:
        fn = scaled([{"n": n} for n in values], slow=(2, 3))
        config = fn.lookup(X)
        assert config is None, "a list that has grown is a miss"
        fn(X)
        config = fn.lookup(X)
        assert config is not None
        return int(config["n"])  # type: ignore[arg-type]

    assert winner(1, 2) == 2
    assert winner(4, 1, 2) == 4
    assert winner(3, 4, 1, 2) == 4, "an earlier measurement may win"
    assert swept == [[1, 2], [4], [3]]
    entry = entry_of(cache_dir)
    assert entry["space"]["configs"] == 4
    assert entry["trials"]["error"] == 1
    assert sum(entry["trials"].values()) == 4


def test_a_shorter_or_reordered_list_measures_nothing(swept: list[list[Any]]) -> None:
    scaled([{"n": 1}, {"n": 2}, {"n": 4}], slow=(4,))(X)
    fn = scaled([{"n": 4}, {"n": 2}, {"n": 1}], slow=(4,))
    assert fn.lookup(X) == {"n": 2}
    fn = scaled([{"n": 4}, {"n": 2}], slow=(4,))
    np.testing.assert_array_equal(fn(X), X + 2)
    assert swept == [[1, 2, 4]]
