"""The machine's cores and memory that this process may use, out-of-memory kills, and trees of processes."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import platform
import resource
from collections.abc import Callable
from pathlib import Path

from quarantune.host import proc

_ROOT = Path("/")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def available_cpus(*, root: Path = _ROOT) -> int:
    """Returns how many cores this process may use, by its affinity and its cgroup's quota, rounded up."""
    quotas = (_cpu_quota(directory) for directory in _cgroup_directories("cpu", root))
    return max(1, min([len(os.sched_getaffinity(0)), *(math.ceil(quota) for quota in quotas if quota)]))


def compile_slots(*, utilization: float, count: int, max_count: int, root: Path = _ROOT) -> int:
    """Returns how many configs to compile at a time.

    Args:
        utilization: the share of the available cores to use where `count` is not positive.
        count: the wanted number; where it is 0 or less, `utilization` applies.
        max_count: an upper bound; 0 or less sets none.
        root: the root of the file system; another one in tests.
    """
    available = available_cpus(root=root)
    wanted = count if count > 0 else max(1, round(available * utilization))
    return min(wanted, available, max_count if max_count > 0 else available)


def available_memory_bytes(*, root: Path = _ROOT) -> int:
    """Returns how much more memory can be used before the machine, or a cgroup of this process, runs out."""
    free = [_available(root)]
    for directory in _cgroup_directories("memory", root):
        if (limit := _memory_limit(directory)) is not None:
            free.append(limit - _working_set(directory))
    return max(0, min(free))


def oom_kills(*, root: Path = _ROOT) -> int:
    """Returns a counter that rises whenever the kernel kills for memory, in our cgroup or on the machine.

    One kill may raise it by more than one: only the fact that it rose is meaningful.
    """
    directories = _cgroup_directories("memory", root)
    files = [directory / name for directory in directories for name in ("memory.events", "memory.oom_control")]
    return sum(_counter(file, "oom_kill") or 0 for file in [*files, root / "proc/vmstat"])


def descriptors_left() -> int:
    """Returns how many more descriptors this process may open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 1 << 20 if limit == resource.RLIM_INFINITY else limit
    with contextlib.suppress(OSError):
        return max(0, most - len(os.listdir("/proc/self/fd")))
    return most // 2


def processes_left(*, root: Path = _ROOT) -> tuple[int, str] | None:
    """Returns how many more processes and threads may be started here, and the limit; None where no limit holds.

    The user's own limit does not bind root.
    """
    left = []
    for directory in _cgroup_directories("pids", root):
        limit, used = (proc.text(directory / name).strip() for name in ("pids.max", "pids.current"))
        if limit.isdigit():
            left.append((max(0, int(limit) - int(used or 0)), f"pids.max of the control group is {limit}"))
    limit_of_user, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if os.geteuid() != 0 and limit_of_user != resource.RLIM_INFINITY:
        in_use = _threads_of_user(root)
        left.append((max(0, limit_of_user - in_use), f"`ulimit -u` of this user is {limit_of_user}"))
    return min(left, default=None)


@functools.cache
def processor_name(*, root: Path = _ROOT) -> str:
    """Returns the processor's model, used as the kind of a CPU device."""
    for line in proc.read(root / "proc/cpuinfo").decode(errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip().lower() == "model name" and value.strip():
            return " ".join(value.split())
    # Many ARM kernels give no model name.
    return platform.processor() or platform.machine() or "unknown processor"


def private_memory_bytes(pid: int) -> int:
    """Returns a process's private memory; 0 when the process is gone."""
    return resident_bytes(pid)[0]


def resident_bytes(pid: int) -> tuple[int, int]:
    """Returns a process's private memory and its mapped files and shared memory; zeros when it is gone."""
    fields = proc.read(f"/proc/{pid}/statm").split()
    if len(fields) < 3:  # gone, or just ending
        return 0, 0
    resident, shared = int(fields[1]), int(fields[2])
    return (resident - shared) * _PAGE_BYTES, shared * _PAGE_BYTES


def activity(pid: int) -> tuple[str, int]:
    """Returns the letter of a process's state, as `ps` shows it, and its CPU time in ticks.

    Returns an empty text and 0 where the process is gone or the system has no such figures.
    """
    fields = proc.status(pid)
    return (fields[0].decode(), int(fields[11]) + int(fields[12])) if fields else ("", 0)


def is_stopped(pid: int) -> bool:
    """Returns whether a process is stopped, by a signal or by a debugger; False where that is not known."""
    return activity(pid)[0] in ("T", "t")


def children(pid: int) -> list[int]:
    """Returns the children of a process; empty when it is gone."""
    return _children_function()(pid)


def descendants(pid: int) -> list[int]:
    """Returns the children of a process, their children and so on, parents first; empty when it is gone.

    A process that is forked, or orphaned, during the walk can be missed.
    """
    children_of = _children_function()
    found: list[int] = []
    pending = [pid]
    while pending:
        born = children_of(pending.pop())
        found += born
        pending += born
    return found


def _children_function() -> Callable[[int], list[int]]:
    """Returns the cheapest function on this kernel that lists a process's children."""
    if _has_children_files():
        return _children_from_tasks
    by_parent: dict[int, list[int]] = {}
    for child in proc.pids():
        if fields := proc.status(child):
            by_parent.setdefault(int(fields[1]), []).append(child)
    return lambda pid: by_parent.get(pid, [])


@functools.cache
def _has_children_files() -> bool:
    """Returns whether the kernel was built with CONFIG_PROC_CHILDREN."""
    return os.path.exists(f"/proc/self/task/{os.getpid()}/children")


def _children_from_tasks(pid: int) -> list[int]:
    found: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for thread in threads:
        # A thread that has ended has passed its children on to another one.
        found += map(int, proc.read(f"/proc/{pid}/task/{thread}/children").split())
    return found


@functools.cache
def _cgroup_directories(controller: str, root: Path) -> tuple[Path, ...]:
    """Returns the directories whose files may limit this process, innermost first, of both versions."""
    directories: dict[Path, None] = {}
    for line in map(os.fsdecode, proc.lines(root / "proc/self/cgroup")):
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        names = (controllers, controller) if controllers else (".", "unified")
        # A container may see its own group as the root while the path is the host's: keep the directories that exist.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for base in (root / "sys/fs/cgroup" / name for name in names):
            levels = (base.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1))
            directories |= dict.fromkeys(level for level in levels if level.is_dir())
    return tuple(directories)


def _threads_of_user(root: Path) -> int:
    """Returns how many threads, of all its processes, this process's user has."""
    count = 0
    for pid in proc.pids(root):
        with contextlib.suppress(OSError):
            if os.stat(root / f"proc/{pid}").st_uid == os.getuid():
                count += len(os.listdir(root / f"proc/{pid}/task"))
    return count


def _cpu_quota(directory: Path) -> float | None:
    """Returns how many cores' worth of time the cgroup may use; None when unlimited."""
    fields = proc.text(directory / "cpu.max").split() or [
        proc.text(directory / "cpu.cfs_quota_us").strip(),
        proc.text(directory / "cpu.cfs_period_us").strip(),
    ]
    if len(fields) != 2 or not all(field.isdigit() for field in fields) or not int(fields[1]):
        return None  # "max", or -1, or no such file
    return int(fields[0]) / int(fields[1])


def _memory_limit(directory: Path) -> int | None:
    """Returns the cgroup's limit in bytes; None when it has none."""
    text = (proc.text(directory / "memory.max") or proc.text(directory / "memory.limit_in_bytes")).strip()
    # In version 1, "unlimited" is the largest page-aligned 63-bit number.
    return int(text) if text.isdigit() and int(text) < 1 << 60 else None


def _working_set(directory: Path) -> int:
    """Returns the cgroup's memory in use, less the page cache that the kernel can drop."""
    used = (proc.text(directory / "memory.current") or proc.text(directory / "memory.usage_in_bytes")).strip()
    statistics = directory / "memory.stat"
    droppable = _counter(statistics, "total_inactive_file")
    if droppable is None:
        droppable = _counter(statistics, "inactive_file")
    return max(0, int(used or 0) - (droppable or 0))


def _available(root: Path) -> int:
    kibibytes = _counter(root / "proc/meminfo", "MemAvailable:")
    return os.sysconf("SC_AVPHYS_PAGES") * _PAGE_BYTES if kibibytes is None else kibibytes * 1024


def _counter(file: Path, name: str) -> int | None:
    """Returns the number after `name` in a file of "name number" lines; None when there is none."""
    for line in proc.text(file).splitlines():
        fields = line.split()
        if len(fields) > 1 and fields[0] == name and fields[1].isdigit():
            return int(fields[1])
    return None
