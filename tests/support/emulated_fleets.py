"""Clusters of Dask and Ray over emulated hosts, and a submitter that tunes on them; this file contains no test."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from aftermath import eventually
from emulated_hosts import Network, network
from helpers import PROGRAMS, SUPPORT, child_environ

ROUNDS = range(int(os.environ.get("HOST_ROUNDS", "1")))
"""Rounds of each case."""
TOLD_S = 30.0
"""Time within which a sweep names a host that cannot take part as usual."""
ALL_PORTS = (1, 65_535)
_ANSWER_S = 400.0
_FAULTS = ("cannot connect", "takes no part", "died", "could not run", "begun to work", "no word from", "several kinds")
"""Parts of all warnings about hosts."""


@dataclasses.dataclass
class Swept:
    """The answer of the submitter.

    Attributes:
        told: its warnings, each with its time in the sweep.
    """

    took_s: float
    told: list[tuple[float, str]]
    best: int | None = None
    outcomes: list[str] = dataclasses.field(default_factory=list)
    trials: int = 0
    machines: list[str] = dataclasses.field(default_factory=list)
    error: str = ""

    @property
    def faults(self) -> list[tuple[float, str]]:
        """The warnings about hosts; a busy machine also causes warnings about times."""
        return [each for text in _FAULTS for each in self.about(text)]

    def about(self, text: str) -> list[tuple[float, str]]:
        """Returns the warnings with a text."""
        return [(at_s, line) for at_s, line in self.told if text in line]


class Fleet:
    """A cluster over hosts.

    Attributes:
        net: the hosts.
        shifts_s: the names of the workers, with the errors of their clocks.
    """

    shifts_s: ClassVar[dict[str, float]] = {}

    def __init__(self, net: Network, logs: Path) -> None:
        """Knows the hosts; `begin` starts the cluster."""
        self.net, self._logs, self._count = net, logs, 0
        self._parts: list[subprocess.Popen[str]] = []

    def begin(self) -> None:
        """Makes names and interfaces as wrong as on real hosts, and starts the cluster."""
        net = self.net
        for host in net.hosts.values():
            # A host often has its own name at the loopback, and old addresses of others.
            wrong = {host.name: "127.0.1.1", "submits": net.absent}
            host.knows(*((wrong.get(name, address), name) for name, address in net.addresses.items()))
        submits = net.hosts["submits"]
        submits.run("sh", "-c", "echo 1 > /proc/sys/net/ipv4/conf/all/arp_ignore")
        for number in range(3):  # interfaces on networks that no other host reaches
            submits.run(*f"ip addr add 10.99.{number}.1/32 dev lo".split())
        for name in self.shifts_s:
            net.hosts[name].run("ip", "route", "add", "10.99.0.0/16", "dev", "eth0")
        self.begin_cluster()
        program = str(PROGRAMS / "fleet_submitter.py")
        self._submitter = self._popen("submits", sys.executable, program, *self.engine, stdin=-1, stdout=-1)
        assert self._answer() == {"ready": True}, self.log

    @property
    def engine(self) -> tuple[str, str]:
        """The arguments of the submitter."""
        raise NotImplementedError

    def begin_cluster(self) -> None:
        """Starts the parts of the cluster."""
        raise NotImplementedError

    def worker(self, name: str) -> None:
        """Starts a worker on a host, and waits until it has joined."""
        raise NotImplementedError

    def _popen(self, name: str, *words: str, **streams: int) -> subprocess.Popen[str]:
        """Starts a part of the cluster on a host."""
        environ = child_environ(
            SUPPORT / "shifted_clock", SUPPORT, JAX_PLATFORMS="cpu", HOME=f"/tmp/home-of-{name}",
            QUARANTUNE_PROGRESS="0", QUARANTUNE_CACHE_DIR="/tmp/cache", CLOCK_SHIFT_S=str(self.shifts_s.get(name, 0.0)),
            TMPDIR=None, PYTHONWARNINGS="ignore",
        )  # fmt: skip
        with (self._logs / name).open("a") as log:
            streams = {"stdin": subprocess.DEVNULL, "stdout": log.fileno(), "stderr": log.fileno(), **streams}
            self._parts.append(self.net.hosts[name].popen(*words, env=environ, **streams))
        return self._parts[-1]

    def end(self) -> None:
        """Ends everything on all hosts."""
        for host in self.net.hosts.values():
            host.kill()
        for part in self._parts:
            with part:
                part.kill()

    @property
    def log(self) -> str:
        """The logs of all parts."""
        return "".join(file.read_text() for file in self._logs.iterdir())

    def sweep(
        self,
        *,
        configs: int = 64,
        at: int = 0,
        then: Callable[[], Any] = lambda: None,
        is_here: bool = False,
        **settings: Any,
    ) -> Swept:
        """Tunes a new function.

        Args:
            configs: the number of configs.
            at: the number of ended configs at which something happens.
            then: does it.
            is_here: whether to tune without the cluster.
            **settings: settings of the sweep.
        """
        self._count += 1
        order = {"configs": configs, "at": at, "settings": settings, "name": f"fleet{self._count}", "is_here": is_here}
        assert self._submitter.stdin is not None
        self._submitter.stdin.write(json.dumps(order) + "\n")
        self._submitter.stdin.flush()
        answer = self._answer()
        if "at" in answer:
            then()
            answer = self._answer()
        return Swept(**answer)

    def _answer(self) -> dict[str, Any]:
        assert self._submitter.stdout is not None
        assert select.select([self._submitter.stdout], [], [], _ANSWER_S)[0], self.log
        line = self._submitter.stdout.readline()
        assert line, self.log
        return dict(json.loads(line))

    def heal(self, *names: str) -> None:
        """Mends the network, and replaces the workers of some hosts."""
        self.net.faults()
        for name in names:
            self.net.hosts[name].kill()
            self.worker(name)

    def assert_named(self, swept: Swept, *names: str, remedy: str = "QUARANTUNE_LISTEN=") -> None:
        """Asserts that exactly these hosts were named, once each, in time, with their addresses and the remedy."""
        told = {line.split(": ")[1].split()[0]: (at_s, line) for at_s, line in swept.about("cannot connect to this")}
        assert sorted(told) == sorted(names), swept.told
        assert len(told) == len(swept.about("cannot connect to this"))
        for name, (at_s, line) in told.items():
            assert f"from {self.net.addresses[name]}, " in line
            assert self.net.addresses["submits"] in line
            assert remedy in line
            assert at_s < TOLD_S, swept.told


def assert_won(swept: Swept, configs: int = 64) -> None:
    """Asserts that a sweep has the winner of a local one, and a good trial of each config."""
    assert swept.error == ""
    assert (swept.best, swept.trials) == (0, configs), swept
    assert set(swept.outcomes) <= {"ok", "slow"}, swept


_DASK = "import sys, warnings\nwarnings.simplefilter('ignore')\nfrom distributed.cli.dask_{} import main\nmain()"


class DaskFleet(Fleet):
    """The scheduler on `head`, the submitter on `submits`, and workers."""

    shifts_s: ClassVar[dict[str, float]] = {"a": 0.0, "b": 3600.0, "c": -3600.0}

    @property
    def engine(self) -> tuple[str, str]:
        """The arguments of the submitter."""
        return "dask", f"tcp://{self._address('head')}:8786"

    def _address(self, name: str) -> str:
        address = self.net.addresses[name]
        return f"[{address}]" if ":" in address else address

    def begin_cluster(self) -> None:
        """Starts the scheduler and the workers."""
        options = ["--host", self._address("head"), "--port", "8786", "--no-dashboard"]
        self._popen("head", sys.executable, "-c", _DASK.format("scheduler"), *options)
        for name in self.shifts_s:
            self.worker(name)

    def worker(self, name: str, prelude: str = "", before: tuple[str, ...] = ()) -> None:
        """Starts a worker on a host, and waits until it has joined.

        Args:
            name: the host.
            prelude: a program that runs in its process first.
            before: a command that starts it.
        """
        joined = self.log.count("Registered to")
        options = ["--host", self._address(name), "--nthreads", "1", "--no-nanny", "--no-dashboard"]
        program = f"{prelude}\n{_DASK.format('worker')}"
        words = [*before, sys.executable, "-c", program, self.engine[1], *options, "--local-directory", "/tmp"]
        self._popen(name, *words)
        assert eventually(lambda: self.log.count("Registered to") > joined, timeout_s=90), self.log


class RayFleet(Fleet):
    """A head without cores on `submits`, where the submitter is, and nodes."""

    shifts_s: ClassVar[dict[str, float]] = {"a": 3600.0, "b": -3600.0}
    engine = ("ray", "auto")

    def begin_cluster(self) -> None:
        """Starts the head and the nodes."""
        self._node("submits", "--head", "--port=6379", "--num-cpus=0", "--include-dashboard=false")
        for name in self.shifts_s:
            self.worker(name)

    def worker(self, name: str) -> None:
        """Starts a node on a host, and waits until it has joined."""
        self._node(name, f"--address={self.net.addresses['submits']}:6379", "--num-cpus=1")

    def _node(self, name: str, *options: str) -> None:
        started = self.log.count("Ray runtime started")
        ray = str(Path(sys.executable).with_name("ray"))
        words = [sys.executable, ray, "start", "--block", "--disable-usage-stats", "--object-store-memory=100000000"]
        self._popen(name, *words, f"--node-ip-address={self.net.addresses[name]}", *options)
        assert eventually(lambda: self.log.count("Ray runtime started") > started, timeout_s=120), self.log


@contextlib.contextmanager
def fleet_of(kind: type[Fleet], directory: Path, *more: str, family: int = 4) -> Iterator[Any]:
    """Yields a cluster, and asserts in the end that its sweeps have left no process on its workers.

    Args:
        kind: its class.
        directory: an empty directory.
        *more: the names of its hosts that are not workers.
        family: 4 or 6, the version of IP.
    """
    logs = directory / "logs"
    logs.mkdir()
    with network(directory, *more, *kind.shifts_s, family=family) as net:
        fleet = kind(net, logs)
        try:
            fleet.begin()
            yield fleet
            net.faults()
            assert eventually(lambda: not any(net.hosts[name].sandboxes() for name in fleet.shifts_s))
        finally:
            fleet.end()
