from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quarantune.cache import SCHEMA, Store

WRITERS, KEYS = 8, 20

# One process imports the package and forks the writers and the reader, so that all start at once, and sooner.
HAMMER = """
import errno, fcntl, json, os, sys, traceback, warnings
from pathlib import Path
from quarantune.cache import Store, store as store_module

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
        ("working", 50, 0),
        # Those that are killed leave half of the writers, which write to the end as these do.
        pytest.param("no-op", 50, 0, marks=pytest.mark.long),
        pytest.param("none", 50, 0, marks=pytest.mark.long),
        *((locks, 40, WRITERS // 2) for locks in ("working", "no-op", "none")),
    ],
)
def test_no_acknowledged_write_is_lost_and_no_read_is_torn(
    tmp_path: Path, locks: str, room: int, writes_each: int, killed: int
) -> None:
    rng = random.Random(killed)
    before = {f"before/{number}": {"schema": SCHEMA, "config": {"BM": number}} for number in range(100)}
    (tmp_path / "kernel.json").write_text(json.dumps({"cpu": before}))  # large, where there is little room
    arguments = [tmp_path, WRITERS, killed, writes_each, KEYS, locks, room]
    command = [sys.executable, "-c", HAMMER, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as hammer:
        assert hammer.stdout is not None
        for victim in json.loads(hammer.stdout.readline())[:killed]:
            # At random moments, so that any instruction may be the last.
            goal = len(acknowledged(tmp_path)) + rng.randrange(20, 60)
            while len(acknowledged(tmp_path)) < goal:
                time.sleep(rng.uniform(0.0, 0.005))
            os.kill(victim, signal.SIGKILL)
        endings = json.loads(hammer.stdout.read())

    # The reader ends last, and succeeds only if each read was complete and none older than the one before.
    assert endings == [-signal.SIGKILL] * killed + [0] * (WRITERS - killed) + [0]
    writes = acknowledged(tmp_path)
    assert len(writes) >= (WRITERS - killed) * writes_each
    found = Store(tmp_path, read_only=True).read("kernel")["cpu"]
    assert before.items() <= found.items()
    assert len(list(tmp_path.glob("kernel.entries/*.json"))) in (range(1) if room > 1500 else range(50, 257))
    # A killed writer may have made one write that it could not acknowledge.
    lost = {key: n for key, n in dict(writes).items() if found[key]["config"]["BM"] not in (n, n + KEYS)}
    assert lost == {}
    assert list(tmp_path.rglob("*.corrupt-*")) == []
