from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

WRITERS, KEYS = 8, 20

WRITER = """
import fcntl, os, sys
from pathlib import Path
from quarantune.cache import Store

directory, writer, writes, keys, locks = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:5]), sys.argv[5]
if locks == "no-op":
    fcntl.flock = lambda fd, operation: None
store = Store(directory, lock_timeout_s=100)
acknowledged = os.open(directory / f"{writer}.acknowledged", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
sys.stdin.readline()
for number in range(writes):
    key = f"{writer}/{number % keys}"
    if number >= keys:  # Nobody else writes this key: what was acknowledged last must still be there.
        found = store.get("kernel", "cpu", key)
        assert found is not None and found["config"] == {"BM": number - keys}, (key, number, found)
    store.put("kernel", "cpu", key, {"config": {"BM": number}})
    os.write(acknowledged, f"{key} {number}\\n".encode())
"""

READER = """
import json, os, sys
from pathlib import Path

os.nice(19)  # Reading all the while, but not instead of the writers.
path, reads, newest = Path(sys.argv[1]), 0, {}
sys.stdin.readline()
while not Path(sys.argv[2]).exists():
    if path.exists():
        entries = json.loads(path.read_bytes())["cpu"]
        assert all(entries[key]["config"]["BM"] >= number for key, number in newest.items())
        reads, newest = reads + 1, {key: entry["config"]["BM"] for key, entry in entries.items()}
print(reads)
"""


@contextlib.contextmanager
def running(script: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def acknowledged(directory: Path) -> list[tuple[str, int]]:
    lines = [line for path in directory.glob("*.acknowledged") for line in path.read_text().splitlines()]
    return [(key, int(number)) for key, number in (line.split() for line in lines)]


@pytest.mark.parametrize("locks", ["working", "no-op"])
@pytest.mark.parametrize(("writes_each", "killed"), [(400, 0), (150, WRITERS // 2)])
def test_no_acknowledged_write_is_lost_and_no_read_is_torn(
    tmp_path: Path, locks: str, writes_each: int, killed: int
) -> None:
    finished = tmp_path / "finished"
    rng = random.Random(killed)
    with contextlib.ExitStack() as stack:
        arguments = [(tmp_path, f"w{number}", writes_each, KEYS, locks) for number in range(WRITERS)]
        writers = [stack.enter_context(running(WRITER, *each)) for each in arguments]
        reader = stack.enter_context(running(READER, tmp_path / "kernel.json", finished))
        for process in (reader, *writers):
            go(process)
        for victim in writers[:killed]:
            # Spread by the progress of all and a random moment, so that any instruction may be the last.
            goal = len(acknowledged(tmp_path)) + rng.randrange(20, 100)
            while len(acknowledged(tmp_path)) < goal:
                time.sleep(rng.uniform(0.0, 0.005))
            victim.kill()
        endings = [writer.wait(timeout=100) for writer in writers]
        finished.touch()
        reads = int(reader.communicate(timeout=100)[0])

    assert endings == [-signal.SIGKILL] * killed + [0] * (WRITERS - killed)
    writes = acknowledged(tmp_path)
    assert len(writes) >= (WRITERS - killed) * writes_each
    found = json.loads((tmp_path / "kernel.json").read_bytes())["cpu"]
    # A killed writer may have written once more than it could say.
    lost = {key: n for key, n in dict(writes).items() if found[key]["config"]["BM"] not in (n, n + KEYS)}
    assert lost == {}
    assert reads > 0
    assert list(tmp_path.glob("*.corrupt-*")) == []
