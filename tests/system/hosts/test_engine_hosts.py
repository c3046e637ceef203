"""Sweeps on separate hosts survive other services at their addresses, cut links, and networks with only IPv6."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from emulated_hosts import Host, hosts, network
from helpers import SUPPORT, child_environ

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
]

ADDRESS, PRIVATE, ADDRESS_6 = "10.78.5.{}", "172.31.7.1", "fd77:5::{}"

PORTS = range(42_000, 42_032)
"""Ports of the submitter's listeners, so that another host can have a service on all of them."""

SERVICE = """
import selectors, socket, sys
private, first, last, say = sys.argv[1:]
say = say.encode().decode("unicode_escape")
selector = selectors.DefaultSelector()
for port in range(int(first), int(last) + 1):
    selector.register(socket.create_server((private, port), backlog=500), selectors.EVENT_READ)
print("ready", flush=True)
while True:
    for key, _ in selector.select():
        connection, _ = key.fileobj.accept()
        if say:
            connection.sendall(say.encode())
            connection.settimeout(5)
            heard = connection.recv(4096)
            print("heard", heard, flush=True)
        else:
            print("closed", flush=True)
        connection.close()
"""
"""A service on all ports of a host that sends something or closes its connections."""

SWEEP = """
import json, sys
import engine_kernels, jax.numpy as jnp
import quarantune
from emulated_hosts import Host, Machines
from quarantune.engine import shards

heard = []
greet = shards.Shards._greet
shards.Shards._greet = lambda self, number, about: heard.append(about["host"]) or greet(self, number, about)
space = {"n": [30, 20, 10, 0], "same": list(range(12))}
tuner = quarantune.AutoTuner(engine_kernels.plain, space, rep=2, ref_fn=None)
with Machines([Host(*host) for host in json.loads(sys.argv[1])]) as machines:
    result = tuner.run(jnp.ones((8, 128)), executor=machines)
print(json.dumps({
    "best": result.best_config["n"],
    "outcomes": [trial.outcome.value for trial in result.trials],
    "machines": sorted({trial.device.partition(" on ")[2] for trial in result.trials}),
    "heard": sorted(set(heard)),
}))
"""

SUBMITTER = """
import json, time
from quarantune.engine.contact import Contacts
contacts = Contacts(lambda number, about: True)
print(json.dumps(contacts.address.to_json()), flush=True)
while not any(isinstance(said.message, Exception) for said in contacts.poll(0.1)):
    pass
print(time.monotonic(), flush=True)
"""

SHARD = """
import json, sys, time
from quarantune.engine import contact
line = contact.reach(contact.Address.from_json(json.loads(sys.argv[1])), 1, {})
print("reached", flush=True)
every_s, said_at = float(sys.argv[2]), 0.0
while not line.is_over:
    if every_s and time.monotonic() > said_at + every_s:
        said_at = time.monotonic()
        if not line.say({"phase": [0, "check"]}):
            break
    time.sleep(0.1)
print(time.monotonic(), flush=True)
"""
"""A shard that is silent, or sends from time to time, as a shard does with each config."""


CROWD = """
import json, sys, threading
from concurrent.futures import ThreadPoolExecutor
from quarantune.engine import contact

address, count = contact.Address.from_json(json.loads(sys.argv[1])), int(sys.argv[2])
start = threading.Barrier(count)
with ThreadPoolExecutor(count) as shards:
    lines = list(shards.map(lambda number: start.wait(60) is None or contact.reach(address, number, {}), range(count)))
print(json.dumps([getattr(line, "unreached", str(line)) for line in lines]), flush=True)
"""

HEARS = """
import json, sys
from quarantune.engine.contact import Contacts
begun, count = [], int(sys.argv[1])
contacts = Contacts(lambda number, about: begun.append(number) is None)
print(json.dumps(contacts.address.to_json()), flush=True)
while len(begun) < count:
    contacts.poll(0.1, expected=count - len(begun))
print(len(begun), flush=True)
while True:
    contacts.poll(1.0)
"""


def environ(**changes: str) -> dict[str, str]:
    return child_environ(
        SUPPORT, JAX_PLATFORMS="cpu", QUARANTUNE_PROGRESS="0", QUARANTUNE_CACHE_DIR="/tmp/cache", **changes
    )


@contextlib.contextmanager
def program(host: Host, text: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Runs a Python program on a host while the block runs."""
    words = [sys.executable, "-c", text, *map(str, arguments)]
    with host.popen(*words, stdout=subprocess.PIPE, env=environ()) as process:
        try:
            yield process
        finally:
            process.kill()


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def tune(submitter: Host, *workers: Host) -> tuple[dict[str, Any], str]:
    """Tunes on hosts; returns the result and the log."""
    machines = json.dumps([(host.name, host.pid) for host in workers])
    words = submitter.command(sys.executable, "-c", SWEEP, machines)
    done = subprocess.run(words, env=environ(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize(
    ("says", "is_hidden"),
    [
        ("", False),
        ("", True),
        ("SSH-2.0-OpenSSH_9.2\\r\\n", True),
        ('{"go": true}\\n', True),
        ("HTTP/1.1 400 Bad Request\\r\\n\\r\\n", False),
    ],
    ids=["closes", "closes, alone", "banner, alone", "go, alone", "HTTP"],
)
def test_a_service_at_the_submitters_address_costs_no_config(says: str, is_hidden: bool, tmp_path: Path) -> None:
    """One machine has another service at a private address of the submitter, and may reach no other address."""
    with hosts(tmp_path, "submits", "meshed", "plain") as (submits, meshed, plain):
        for number, host in enumerate((submits, meshed, plain), 1):
            host.run(*f"ip addr add {ADDRESS.format(number)}/24 dev eth0".split())
        for host in (submits, meshed):
            host.run(*f"ip addr add {PRIVATE}/32 dev lo".split())
        submits.run("sh", "-c", f"echo {PORTS[0]} {PORTS[-1]} > /proc/sys/net/ipv4/ip_local_port_range")
        if is_hidden:
            meshed.run(*f"ip route add prohibit {ADDRESS.format(1)}".split())
        with program(meshed, SERVICE, PRIVATE, PORTS[0], PORTS[-1], says) as service:
            assert next_line(service) == "ready\n"
            result, log = tune(submits, meshed, plain)
            assert next_line(service).startswith("heard" if says else "closed")
    assert set(result["outcomes"]) <= {"ok", "slow"}
    assert (result["best"], result["machines"]) == (0, ["meshed", "plain"])
    assert result["heard"] == (["plain"] if is_hidden else ["meshed", "plain"])
    assert "died" not in log


@pytest.mark.parametrize("cut", ["submits", "works"])
@pytest.mark.parametrize("every_s", [0.0, 3.0], ids=["silent", "speaks"])
def test_a_cut_link_is_noticed_by_both_sides_within_45_s(cut: str, every_s: float, tmp_path: Path) -> None:
    with hosts(tmp_path, "submits", "works") as both:
        for number, host in enumerate(both, 1):
            host.run(*f"ip addr add {ADDRESS.format(number)}/24 dev eth0".split())
        with program(both[0], SUBMITTER) as submitter, program(both[1], SHARD, next_line(submitter), every_s) as shard:
            assert next_line(shard) == "reached\n"
            began = time.monotonic()
            next(host for host in both if host.name == cut).run("ip", "link", "set", "eth0", "down")
            noticed = [float(next_line(process)) - began for process in (shard, submitter)]
    assert all(5 < after_s < 45 for after_s in noticed), noticed


def test_hosts_with_only_ipv6_tune_together(tmp_path: Path) -> None:
    with hosts(tmp_path, "submits", "left", "right") as three:
        for number, host in enumerate(three, 1):
            host.run(*f"ip -6 addr add {ADDRESS_6.format(number)}/64 dev eth0 nodad".split())
        result, log = tune(*three)
    assert set(result["outcomes"]) <= {"ok", "slow"}
    assert (result["best"], result["machines"], result["heard"]) == (0, ["left", "right"], ["left", "right"])
    assert "died" not in log


@pytest.mark.parametrize("fault", [{}, {"delay_s": 0.3}, {"delay_s": 0.1, "loss": 0.02}], ids=str)
def test_300_shards_that_greet_at_once_are_heard(fault: dict[str, Any], tmp_path: Path) -> None:
    with network(tmp_path, "submits", "works") as net:
        net.faults(("*", "*", fault))
        submits, works = net.hosts.values()
        with program(submits, HEARS, 300) as hears, program(works, CROWD, next_line(hears), 300) as crowd:
            assert json.loads(next_line(crowd)) == [""] * 300
            assert next_line(hears) == "300\n"
