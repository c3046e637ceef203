"""Writers that are killed at any moment, on one host or two, lose no acknowledged write and tear no read."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quarantune.cache.entry_file import SCHEMA
from quarantune.cache.store import Store

WRITERS, KEYS = 8, 20

# One process imports the package and forks the writers and the reader, so that all start soon and together.
HAMMER = """
import errno, fcntl, json, os, sys, traceback, warnings
from pathlib import Path
from quarantune.cache import store as store_module
from quarantune.cache.store import Store

directory, writers, victims, writes, keys = Path(sys.argv[1]), *map(int, sys.argv[2:6])
locks, store_module._MAIN_BYTES = sys.argv[6], int(sys.argv[7])
finished = directory / "finished"
if locks == "no-op":
    fcntl.flock = lambda fd, operation: None
if locks == "none":
    def refuse(fd, operation):
        raise OSError(errno.ENOLCK, "no locks")
    fcntl.flock = refuse

def write(writer, writes):
    store = Store(directory, lock_timeout_s=100)
    acknowledged = os.open(directory / f"{writer}.acknowledged", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in range(writes):
        key = f"{writer}/{number % keys}"
        if number >= keys:  # No other writer uses this key: the last acknowledged value must still be there.
            found = store.get("kernel", "cpu", key)
            assert found is not None and found["config"] == {"BM": number - keys}, (key, number, found)
        store.put("kernel", "cpu", key, {"config": {"BM": number}})
        os.write(acknowledged, f"{key} {number}\\n".encode())

def read():
    os.nice(19)  # Reads all the time without slowing down the writers.
    store, reads, newest = Store(directory, read_only=True), 0, {}
    warnings.simplefilter("error")
    while not (finished.exists() and reads):
        if entries := store.read("kernel").get("cpu"):
            assert all(entries[key]["config"]["BM"] >= number for key, number in newest.items())
            reads, newest = reads + 1, {key: entry["config"]["BM"] for key, entry in entries.items()}

def fork(work, *args):
    if pid := os.fork():
        return pid
    try:
        work(*args)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)

def ending(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

reader, pids = fork(read), [
    fork(write, f"w{number}", writes if number >= victims else 10**9) for number in range(writers)
]
print(json.dumps(pids), flush=True)
endings = [ending(pid) for pid in pids]
finished.touch()
print(json.dumps([*endings, ending(reader)]))
"""


def acknowledged(directory: Path) -> list[tuple[str, int]]:
    lines = [line for path in directory.glob("*.acknowledged") for line in path.read_text().splitlines()]
    return [(key, int(number)) for key, number in (line.split() for line in lines)]


@pytest.mark.slow
@pytest.mark.parametrize("room", [1 << 19, 1500], ids=["one file", "many files"])
@pytest.mark.parametrize(
    ("locks", "writes_each", "killed"),
    [
        # Half of the writers survive the kills and write to the end.
        *(pytest.param(locks, 50, 0, marks=pytest.mark.long) for locks in ("working", "no-op", "none")),
        ("working", 40, WRITERS // 2),
        *(pytest.param(locks, 40, WRITERS // 2, marks=pytest.mark.long) for locks in ("no-op", "none")),
    ],
)
def test_no_acknowledged_write_is_lost_and_no_read_is_torn(
    tmp_path: Path, locks: str, room: int, writes_each: int, killed: int
) -> None:
    rng = random.Random(killed)
    before = {f"before/{number}": {"schema": SCHEMA, "config": {"BM": number}} for number in range(100)}
    (tmp_path / "kernel.json").write_text(json.dumps({"cpu": before}))  # large for the small disk
    arguments = [tmp_path, WRITERS, killed, writes_each, KEYS, locks, room]
    command = [sys.executable, "-c", HAMMER, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as hammer:
        assert hammer.stdout is not None
        for victim in json.loads(hammer.stdout.readline())[:killed]:
            # The moments are random, so any instruction may be the last.
            goal = len(acknowledged(tmp_path)) + rng.randrange(20, 60)
            while len(acknowledged(tmp_path)) < goal:
                time.sleep(rng.uniform(0.0, 0.005))
            os.kill(victim, signal.SIGKILL)
        endings = json.loads(hammer.stdout.read())

    # The reader ends last. It succeeds only if each read was complete and no older than the read before.
    assert endings == [-signal.SIGKILL] * killed + [0] * (WRITERS - killed) + [0]
    writes = acknowledged(tmp_path)
    assert len(writes) >= (WRITERS - killed) * writes_each
    found = Store(tmp_path, read_only=True).read("kernel")["cpu"]
    assert before.items() <= found.items()
    assert len(list(tmp_path.glob("kernel.entries/*.json"))) in (range(1) if room > 1500 else range(50, 257))
    # A killed writer may have made one write without acknowledging it.
    lost = {key: n for key, n in dict(writes).items() if found[key]["config"]["BM"] not in (n, n + KEYS)}
    assert lost == {}
    assert list(tmp_path.rglob("*.corrupt-*")) == []


# --- two hosts: two mounts of one directory, with separate caches -------------------------------------------

MOUNTS = {
    "sshfs": ["sshfs", "-o", "ssh_command={server}"],
    "sshfs that keeps content": ["sshfs", "-o", "ssh_command={server},kernel_cache"],
    "bindfs": ["bindfs", "-o", "attr_timeout=1,entry_timeout=1"],
}
SERVER = "/usr/lib/openssh/sftp-server"

TWO_HOSTS = """
import os, random, socket, sys, time
from pathlib import Path
from quarantune.cache.store import Store
from quarantune.cache.claims import Claim, wait
directory, me, count, ahead_s = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
socket.sethostname(me)
store, swept, configs, utime = Store(directory), 0, [], os.utime
if ahead_s:
    os.utime = lambda fd: utime(fd, (time.time() + ahead_s,) * 2)  # as on a filesystem that takes its clients' times
for number in range(count):
    store.put("writers", "cpu", f"{me}/{number}", {"config": {"n": number}, "note": "x" * 300})
    claim = Claim(directory, "f", "cpu", str(number))
    found = wait(claim, lambda: store.get("f", "cpu", str(number), afresh=claim.held), lambda *_: None, poll_s=0.01)
    if found is claim:
        for _ in range(3):
            time.sleep(0.01)
            claim.refresh()
        swept += 1
        store.put("f", "cpu", str(number), {"config": {"by": me}})
        claim.release()
        found = store.get("f", "cpu", str(number), afresh=True)
    configs.append(found["config"]["by"])
print(swept, *configs)
"""


@contextlib.contextmanager
def two_mounts(kind: str, tmp_path: Path) -> Iterator[tuple[Path, list[Path]]]:
    program, *options = MOUNTS[kind]
    needed = [program, "fusermount3", *([SERVER] if program == "sshfs" else [])]
    if missing := [name for name in needed if shutil.which(name) is None]:
        pytest.skip(f"{missing[0]} is not installed")
    if os.geteuid() != 0 or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("only root can mount and change a process's host name; /dev/fuse is also needed")
    shared, server, mounts = tmp_path / "shared", tmp_path / "server", [tmp_path / "one", tmp_path / "two"]
    server.write_text(f"#!/bin/sh\nexec {SERVER}\n")
    server.chmod(0o755)
    shared.mkdir()
    source = f"host:{shared}" if program == "sshfs" else str(shared)
    try:
        for mount in mounts:
            mount.mkdir()
            command = [program, *(option.format(server=server) for option in options), source, str(mount)]
            if subprocess.run(command, capture_output=True).returncode != 0:
                pytest.skip(f"{program} may not mount here")
        yield shared, mounts
    finally:
        for mount in mounts:
            subprocess.run(["fusermount3", "-u", "-z", str(mount)], capture_output=True)


@pytest.mark.slow
@pytest.mark.parametrize("ahead_s", [0, 3600])
@pytest.mark.parametrize("kind", MOUNTS)
def test_hosts_that_cache_file_sizes_lose_nothing(tmp_path: Path, kind: str, ahead_s: int) -> None:
    count = 15
    with two_mounts(kind, tmp_path) as (shared, mounts):
        writers = [
            subprocess.Popen(
                [
                    "unshare",
                    "--uts",
                    sys.executable,
                    "-W",
                    "error",
                    "-c",
                    TWO_HOSTS,
                    mount,
                    mount.name,
                    str(count),
                    ahead,
                ],
                stdout=subprocess.PIPE,
                text=True,
            )
            for mount, ahead in zip(mounts, ("0", str(ahead_s)), strict=True)
        ]
        (swept, *configs), (more_swept, *same_configs) = (writer.communicate()[0].split() for writer in writers)
        assert configs == same_configs, "both hosts use one config"
        assert int(swept) + int(more_swept) == count
        entries = Store(shared, read_only=True).read("writers")["cpu"]
        assert entries.keys() == {f"{mount.name}/{number}" for mount in mounts for number in range(count)}
        assert [path for path in shared.rglob("*") if "corrupt" in path.name or path.suffix == ".tmp"] == []
