"""Cores, memory and processes of a machine are read within the limits of its cgroups."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from helpers import python

from quarantune.host import machine
from quarantune.host.process import environment_variables

GB = 10**9


def write(root: Path, files: dict[str, str]) -> Path:
    """Writes the files under a root directory."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.fsencode(text))
    return root


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process with a child; both end when the pipe to the child closes."""
    inner = "import sys; print('up', flush=True); sys.stdin.read()"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    with subprocess.Popen([sys.executable, "-c", outer], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        yield process
        process.communicate(timeout=280)


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}, 3),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "1600000 100000\n"}, 8),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "10000 100000\n"}, 1),
        (
            {
                "proc/self/cgroup": "0::/job/step\n",
                "sys/fs/cgroup/job/cpu.max": "200000 100000\n",
                "sys/fs/cgroup/job/step/cpu.max": "max 100000\n",
            },
            2,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/host/path\n0::/\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "400000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            4,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            8,
        ),
        ({"proc/self/cgroup": "1:cpuset:/\n", "sys/fs/cgroup/cpu.max": "100000 100000\n"}, 8),
        ({"proc/self/cgroup": "0::/../../up\n", "sys/fs/cgroup/up/cpu.max": "500000 100000\n"}, 5),
        ({"proc/self/cgroup": "0::/no\v\udcfftext\n", "sys/fs/cgroup/no\v\udcfftext/cpu.max": "500000 100000\n"}, 5),
    ],
    ids=[
        "none",
        "v2-max",
        "v2-rounded-up",
        "v2-above",
        "v2-tiny",
        "v2-parent",
        "v1",
        "v1-none",
        "other",
        "above-root",
        "no-text",
    ],
)
def test_cores_are_the_affinity_bounded_by_the_cgroup_quota(
    files: dict[str, str], expected: int, tmp_path: Path
) -> None:
    assert machine.available_cpus(root=write(tmp_path, files)) == expected


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs CPU affinity")
def test_a_process_pinned_to_one_core_has_one() -> None:
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from quarantune.host import machine as host; print(host.available_cpus())"
    )
    assert python("-c", code) == "1\n"


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(
    ("wanted", "expected"),
    [(None, 7), (0.95, 8), (0.01, 1), (0.5, 4), (1.0, 8), (1, 1), (5, 5), (50, 8)],
)
def test_compile_slots_never_exceed_the_cores(wanted: int | float | None, expected: int, tmp_path: Path) -> None:
    assert machine.compile_slots(wanted, root=tmp_path) == expected


MEMINFO = {"proc/meminfo": "MemTotal:       20000000 kB\nMemFree: 1 kB\nMemAvailable:   10000000 kB\n"}
V2 = {"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/cgroup.procs": ""}


@pytest.mark.parametrize(
    ("files", "available"),
    [
        (MEMINFO, 10_240_000_000),
        (
            MEMINFO
            | V2
            | {
                "sys/fs/cgroup/job/memory.max": f"{4 * GB}\n",
                "sys/fs/cgroup/job/memory.current": f"{3 * GB}\n",
                "sys/fs/cgroup/job/memory.stat": f"anon 5\nfile 7\ninactive_file {GB}\n",
            },
            2 * GB,
        ),
        (
            MEMINFO | V2 | {"sys/fs/cgroup/job/memory.max": "max\n", "sys/fs/cgroup/job/memory.current": "1\n"},
            10_240_000_000,
        ),
        (
            MEMINFO
            | {
                "proc/self/cgroup": "5:memory:/a\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/a/memory.limit_in_bytes": f"{5 * GB}\n",
                "sys/fs/cgroup/memory/a/memory.usage_in_bytes": f"{6 * GB}\n",
                "sys/fs/cgroup/memory/a/memory.stat": f"inactive_file 0\ntotal_inactive_file {2 * GB}\n",
            },
            1 * GB,
        ),
        (
            MEMINFO | V2 | {"sys/fs/cgroup/job/memory.max": "1000\n", "sys/fs/cgroup/job/memory.current": "2000\n"},
            0,
        ),
    ],
    ids=["machine", "v2", "v2-unlimited", "v1", "v2-overdrawn"],
)
def test_memory_is_the_machines_bounded_by_the_cgroup(files: dict[str, str], available: int, tmp_path: Path) -> None:
    root = write(tmp_path, files)
    assert machine.available_memory_bytes(root=root) == available


def test_memory_of_this_machine_is_plausible() -> None:
    assert 10**7 < machine.available_memory_bytes() <= psutil.virtual_memory().total


def test_memory_without_proc_comes_from_psutil(tmp_path: Path) -> None:
    assert 0 < machine.available_memory_bytes(root=tmp_path) <= psutil.virtual_memory().total


@pytest.mark.parametrize(
    "counter",
    ["sys/fs/cgroup/job/memory.events", "sys/fs/cgroup/memory/job/memory.oom_control", "proc/vmstat"],
)
def test_a_kill_in_any_cgroup_raises_the_counter(counter: str, tmp_path: Path) -> None:
    root = write(tmp_path, {"proc/self/cgroup": "5:memory:/job\n0::/job\n", counter: "oom 1\noom_kill 2\n"})
    assert machine.oom_kills(root=root) == 2
    write(root, {counter: "oom 1\noom_kill 3\n"})
    assert machine.oom_kills(root=root) == 3


def test_without_any_counter_the_count_is_zero(tmp_path: Path) -> None:
    assert machine.oom_kills(root=tmp_path) == 0


def test_the_processor_is_named_by_its_model(tmp_path: Path) -> None:
    write(tmp_path, {"proc/cpuinfo": "processor\t: 0\nmodel name\t: Fast  CPU @ 3 GHz\nmodel name\t: other\n"})
    assert machine.processor_name(root=tmp_path) == "Fast CPU @ 3 GHz"


def test_a_processor_without_a_model_still_has_a_name(tmp_path: Path) -> None:
    assert machine.processor_name(root=write(tmp_path, {"proc/cpuinfo": "CPU part : 0xd40\n"}))


def test_memory_that_a_process_touches_is_its_private_memory() -> None:
    before = machine.resident_bytes(os.getpid())[0]
    block = bytearray(64 * 2**20)
    block[::4096] = b"x" * (len(block) // 4096)
    assert machine.resident_bytes(os.getpid())[0] - before > 60 * 2**20


def test_children_and_grandchildren_are_found(child: subprocess.Popen[bytes]) -> None:
    found = machine.descendants(child.pid)
    assert len(found) == 1
    # This process may have other children, such as the template of another test.
    assert child.pid in machine.children(os.getpid())
    assert found[0] not in machine.children(os.getpid())
    assert {child.pid, found[0]} <= set(machine.descendants(os.getpid()))
    assert machine.resident_bytes(found[0])[0] > 0


def test_children_are_found_without_the_kernels_children_files(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = machine.descendants(child.pid)
    monkeypatch.setattr(machine, "_has_children_files", lambda: False)
    assert machine.descendants(child.pid) == expected != []


def test_a_process_that_is_gone_has_no_memory_and_no_children() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    assert gone.wait(timeout=280) == 0
    assert (machine.resident_bytes(gone.pid)[0], machine.descendants(gone.pid)) == (0, [])


def test_watching_a_process_does_not_import_psutil(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)  # importing psutil raises from here on
    assert machine.resident_bytes(os.getpid())[0] > 0
    assert os.getpid() in machine.descendants(os.getppid())
    assert machine.available_memory_bytes() > 0


def test_variables_are_set_for_a_block_and_then_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QT_THERE", "old")
    monkeypatch.delenv("QT_MISSING", raising=False)
    with contextlib.suppress(ArithmeticError), environment_variables({"QT_THERE": "new", "QT_MISSING": "1"}):
        assert (os.environ["QT_THERE"], os.environ["QT_MISSING"]) == ("new", "1")
        raise ArithmeticError
    assert os.environ["QT_THERE"] == "old"
    assert "QT_MISSING" not in os.environ
