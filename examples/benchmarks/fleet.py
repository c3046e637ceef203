"""Tunes on a fleet of fake machines, to measure the cost of a sweep over many machines for the submitting process.

The submitter is real: its claim, its journal, its shards, their connections, the finals. The fleet is one process that
plays the engine and all of its workers. Each worker has a separate connection, sends the messages of a real shard at
the times of a real shard, and takes the next shard from the engine's queue. Only the configs do not run.

    python examples/benchmarks/fleet.py --workers 1000 --configs 100000
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import heapq
import hmac
import itertools
import json
import os
import pickle
import resource
import selectors
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

_HEADER = struct.Struct("<QQ")
_ROUNDS = 5
_STEPS = ("compile", "check", "measure")
_MOST_CPU_MS = 2.0
"""Budget of the submitter, in milliseconds of CPU time per config."""


# --- the fleet's process ------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class Worker:
    """A fake machine of the fleet.

    Attributes:
        host: its name.
        task: the shard that it runs; None while it is idle.
        idle_since: when it became idle, by the monotonic clock.
    """

    host: str
    task: Any = None
    number: int = 0
    idle_since: float = 0.0
    asked: float = 0.0
    line: socket.socket | None = None
    proves: Callable[[str], str] | None = None
    at: int = 0
    trials: list[Any] = dataclasses.field(default_factory=list)


class Fleet:
    """Plays an engine with many workers, in one thread."""

    def __init__(self, submitter: socket.socket, workers: int, trial_s: float) -> None:
        self._submitter = submitter
        self._trial_s = trial_s
        self._selector = selectors.DefaultSelector()
        self._selector.register(submitter, selectors.EVENT_READ)
        self._received = bytearray()
        self._queue: collections.deque[tuple[int, Any]] = collections.deque()
        self._idle = collections.deque(Worker(f"node{index:04}") for index in range(workers))
        self._timers: list[tuple[float, int, Worker]] = []
        self._order = itertools.count()
        self._first_task: float | None = None
        self.start_s: list[float] = []
        self.idle_s: list[float] = []
        self.round_trips_s: list[float] = []

    def run(self) -> None:
        """Runs until the submitter closes its connection."""
        while True:
            now = time.monotonic()
            wait_s = max(0.0, self._timers[0][0] - now) if self._timers else None
            for key, _ in self._selector.select(wait_s):
                if key.fileobj is self._submitter:
                    if not self._receive():
                        return
                else:
                    self._go(key.data)
            now = time.monotonic()
            while self._timers and self._timers[0][0] <= now:
                self._step(heapq.heappop(self._timers)[2])

    def _receive(self) -> bool:
        received = self._submitter.recv(1 << 20)
        self._received += received
        while len(self._received) >= _HEADER.size:
            number, size = _HEADER.unpack_from(self._received)
            if len(self._received) < _HEADER.size + size:
                break
            self._queue.append((number, pickle.loads(self._received[_HEADER.size : _HEADER.size + size])))
            del self._received[: _HEADER.size + size]
            self._first_task = self._first_task or time.monotonic()
        self._assign()
        return bool(received)

    def _assign(self) -> None:
        """Gives the tasks in the queue to idle workers."""
        while self._queue and self._idle:
            worker = self._idle.popleft()
            worker.number, worker.task = self._queue.popleft()
            worker.at, worker.trials = 0, []
            now = time.monotonic()
            if not worker.task["is_whole"]:  # workers idle before a final
                waits = self.idle_s if worker.idle_since else self.start_s
                waits.append(now - (worker.idle_since or self._first_task or now))
            self._connect(worker)

    def _connect(self, worker: Worker) -> None:
        address = worker.task["address"]
        worker.line = socket.create_connection(("127.0.0.1", address["port"]))
        worker.line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        worker.asked = time.monotonic()
        worker.proves = None
        self._say(worker, {"nonce": worker.host})
        self._selector.register(worker.line, selectors.EVENT_READ, worker)

    def _go(self, worker: Worker) -> None:
        """Reads the submitter's challenge, then its answer."""
        assert worker.line is not None
        try:
            said = json.loads(worker.line.recv(1000))
        except (OSError, ValueError):
            said = {}
        if worker.proves is None and "nonce" in said:
            token = worker.task["address"]["token"]
            worker.proves = functools.partial(_proof, token, worker.host, said["nonce"])
            greeting = {"shard": worker.task["shard"], "run": worker.host, "about": {"host": worker.host}}
            self._say(worker, greeting | {"proof": worker.proves("shard")})
            return
        self._selector.unregister(worker.line)
        if worker.proves is None or said.get("proof") != worker.proves("go"):
            self._finish(worker, {"end": "stopped"})
            return
        self.round_trips_s.append(time.monotonic() - worker.asked)
        self._later(worker)

    def _later(self, worker: Worker) -> None:
        heapq.heappush(self._timers, (time.monotonic() + self._trial_s / len(_STEPS), next(self._order), worker))

    def _step(self, worker: Worker) -> None:
        """Enters the next phase of a config, or ends it."""
        configs = worker.task["configs"]
        position, step = divmod(worker.at, len(_STEPS))
        index, config = configs[position]
        worker.at += 1
        if step + 1 < len(_STEPS):
            self._say(worker, {"phase": [index, _STEPS[step]]})
        else:
            trial = self._trial(worker, index, config)
            worker.trials.append(trial)
            self._say(worker, {"phase": [index, _STEPS[step]]}, trial, {"phase": [index, "end"]})
        if worker.at < len(_STEPS) * len(configs):
            self._later(worker)
        else:
            self._finish(worker, self._end(worker))

    @staticmethod
    def _trial(worker: Worker, index: int, config: Any) -> Any:
        time_ms = time_of(index)
        record = {
            "config": config,
            "outcome": "ok",
            "phase": "measure",
            "time_ms": time_ms,
            "samples_ms": [time_ms] * _ROUNDS,
            "own_ms": time_ms,
            "compile_s": 0.1,
            "peak_memory_bytes": 1 << 28,
            "message": "",
            "log_tail": "",
            "route": "together",
            "device": f"cpu on {worker.host}",
            "clock": "wall",
        }
        return {"index": index, "trial": record, "figures": None}

    @staticmethod
    def _end(worker: Worker) -> Any:
        end = {"end": "done", "host": worker.host, "rounds_ms": [], "warm_ms": []}
        if worker.task["is_whole"]:
            end["rounds_ms"] = [[index, [time_of(index)] * _ROUNDS] for index, _ in worker.task["configs"]]
        return end | {"default_time_ms": None, "complaint": ""}

    def _finish(self, worker: Worker, end: Any) -> None:
        assert worker.line is not None
        self._say(worker, end)
        worker.line.close()
        result = pickle.dumps(end | {"trials": worker.trials})
        self._submitter.sendall(_HEADER.pack(worker.number, len(result)) + result)
        worker.idle_since, worker.task, worker.trials = time.monotonic(), None, []
        self._idle.append(worker)
        self._assign()

    @staticmethod
    def _say(worker: Worker, *messages: Any) -> None:
        assert worker.line is not None
        with contextlib.suppress(OSError):  # the submitter may have ended the shard
            worker.line.sendall(b"".join(json.dumps(message).encode() + b"\n" for message in messages))


def _proof(token: str, *said: str) -> str:
    """Returns the proof of the last statement, like `quarantune.engine.contact`."""
    *nonces, statement = said
    return hmac.new(token.encode(), json.dumps([statement, *nonces]).encode(), "sha256").hexdigest()


def time_of(index: int) -> float:
    """Returns the time of a config in milliseconds: the same on all machines, and no two alike."""
    return 1.0 + (index * 7919 % 1_000_003) / 1_000_003


def play(fd: int, workers: int, trial_s: float) -> None:
    """Plays the fleet, and prints its measurements."""
    fleet = Fleet(socket.socket(fileno=fd), workers, trial_s)
    fleet.run()
    trips = fleet.round_trips_s or [0.0]
    seen = {
        "start_s": max(fleet.start_s, default=0.0),
        "idle_s": max(fleet.idle_s, default=0.0),
        "shards": len(trips),
        "round_trip_s": statistics.median(trips),
        "longest_round_trip_s": max(trips),
    }
    print(json.dumps(seen))


# --- the submitter's process --------------------------------------------------------------------------------


class FleetExecutor(Executor):
    """An executor of the fleet's workers."""

    def __init__(self, workers: int, trial_s: float) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, "--play", str(theirs.fileno()), str(workers), str(trial_s)],
                pass_fds=[theirs.fileno()],
                stdout=subprocess.PIPE,
                text=True,
            )
        self._line = ours
        self._futures: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Submits a shard; any other task runs at once, in this process."""
        future: Future[Any] = Future()
        if fn.__name__ != "run":
            future.set_result(fn(*args, **kwargs))
            return future
        number, data = next(self._numbers), pickle.dumps(args[0])
        self._futures[number] = future
        self._line.sendall(_HEADER.pack(number, len(data)) + data)
        return future

    def _read(self) -> None:
        with self._line.makefile("rb") as lines:
            while header := lines.read(_HEADER.size):
                number, size = _HEADER.unpack(header)
                future = self._futures.pop(number)
                result = pickle.loads(lines.read(size))
                if future.set_running_or_notify_cancel():
                    future.set_result(result)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends the fleet."""
        self._line.shutdown(socket.SHUT_WR)
        self.seen = json.loads(self._process.communicate(timeout=60)[0])
        self._reader.join()
        self._line.close()


def kernel(x: Any, a: int, b: int) -> Any:
    """Stands for the tuned function; no machine of the fleet runs it."""
    return x


@dataclasses.dataclass(frozen=True)
class Report:
    """The cost of a sweep.

    Attributes:
        configs: the number of different configs that had a trial.
        cpu_ms: the submitter's CPU time for each config, in milliseconds; of all its threads.
        wall_s: seconds.
        growth_bytes: the growth of the submitter's memory per config, after the first quarter of the trials.
        record_bytes: the part of this growth for the record of the trial itself, which the result holds.
        start_s: the longest time until a worker had its first shard, after the engine had one.
        idle_s: the longest time between two shards of a worker, before the final.
        round_trip_s: the median time of a message to the submitter and back.
        longest_round_trip_s: the longest such time.
        shards: the number of shards that ran.
        is_best: whether the choice is the fastest config.
    """

    configs: int
    cpu_ms: float
    wall_s: float
    growth_bytes: float
    record_bytes: float
    start_s: float
    idle_s: float
    round_trip_s: float
    longest_round_trip_s: float
    shards: int
    is_best: bool


def measure(workers: int, configs: int, trial_s: float) -> Report:
    """Tunes once on a fleet.

    Args:
        workers: the number of fake machines.
        configs: the number of configs.
        trial_s: seconds that each config takes a machine.
    """
    import quarantune

    space = {"a": list(range(100)), "b": list(range(-(-configs // 100)))}
    marks: list[tuple[int, int]] = []
    ended = itertools.count(1)
    total = len(space["a"]) * len(space["b"])

    def on_progress(index: int, phase: str) -> None:
        if phase == "end" and (count := next(ended)) % max(1, total // 20) == 0:
            marks.append((count, resident_bytes()))

    tuner = quarantune.AutoTuner(
        kernel, space, on_progress=on_progress, search="exhaustive", ref_fn=None, name="fleet", rep=_ROUNDS
    )
    fleet = FleetExecutor(workers, trial_s)
    began, cpu_began = time.monotonic(), cpu_s()
    with fleet, quarantune.settings(executor=fleet):
        result = tuner.run(1)
        cpu, wall = cpu_s() - cpu_began, time.monotonic() - began
    first, last = next(mark for mark in marks if mark[0] >= total // 4), marks[-1]
    best = min(range(total), key=time_of)
    return Report(
        configs=sum(trial.time_ms is not None for trial in result.trials),
        cpu_ms=1e3 * cpu / total,
        wall_s=wall,
        growth_bytes=(last[1] - first[1]) / (last[0] - first[0]),
        record_bytes=record_bytes(),
        start_s=fleet.seen["start_s"],
        idle_s=fleet.seen["idle_s"],
        round_trip_s=fleet.seen["round_trip_s"],
        longest_round_trip_s=fleet.seen["longest_round_trip_s"],
        shards=fleet.seen["shards"],
        is_best=result.best_config == result.trials[best].config,
    )


def record_bytes(count: int = 20_000) -> float:
    """Returns the memory of the record of one trial."""
    import tracemalloc

    from quarantune.values.trial import Trial

    text = json.dumps(Fleet._trial(Worker("node0001"), 1, {"a": 1, "b": 1})["trial"])
    tracemalloc.start()
    try:
        records = [Trial.from_json(json.loads(text)) for _ in range(count)]
        return tracemalloc.get_traced_memory()[0] / len(records)
    finally:
        tracemalloc.stop()


def cpu_s() -> float:
    """Returns the CPU time of this process, of all its threads, in seconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def resident_bytes() -> int:
    """Returns the bytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    """Prints the cost of a sweep; returns 1 if it exceeds the budget or the choice is not the fastest config."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1000, help="fake machines")
    parser.add_argument("--configs", type=int, default=100_000, help="configs of the space, in hundreds")
    parser.add_argument("--trial-s", type=float, default=0.5, help="seconds that a config takes a machine")
    given = parser.parse_args()
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors[1], descriptors[1]))
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"QUARANTUNE_CACHE_DIR": cache, "JAX_PLATFORMS": "cpu", "QUARANTUNE_PROGRESS": "0"}
        report = measure(given.workers, given.configs, given.trial_s)
    ideal_s = given.trial_s * report.configs / given.workers
    print(f"{report.configs} configs in {report.shards} shards on {given.workers} workers: {report.wall_s:.1f} s")
    print(f"  submitter's CPU per config {report.cpu_ms:8.3f} ms   (budget {_MOST_CPU_MS:g} ms)")
    print(f"  memory per config          {report.growth_bytes / 1e3:8.2f} kB   ", end="")
    print(f"(the record of its trial: {report.record_bytes / 1e3:.2f} kB)")
    print(f"  all workers have begun in  {1e3 * report.start_s:8.1f} ms")
    print(f"  longest idle time          {1e3 * report.idle_s:8.1f} ms   (round trips: median ", end="")
    print(f"{1e3 * report.round_trip_s:.1f}, longest {1e3 * report.longest_round_trip_s:.1f} ms)")
    print(f"  time without any overhead  {ideal_s:8.1f} s")
    is_good = report.cpu_ms < _MOST_CPU_MS and report.idle_s <= report.longest_round_trip_s and report.is_best
    print("good" if is_good else "over the budget, or not the fastest config")
    return 0 if is_good else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--play"]:
        play(int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
    else:
        sys.exit(main())
