"""This machine: the cores and the memory that this process may use, and the memory and descendants of processes.

It reads the files of /proc as bytes, because names of processes, control groups, mounts and mapped files may be any
bytes.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import platform
import resource
import stat
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

_ROOT = Path("/")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_USUAL_SHARE = 0.9
"""Share of the available cores that compile; the others are left to the caller."""


def available_cpus(*, root: Path = _ROOT) -> int:
    """Returns how many cores this process may use, by its affinity and its cgroup's quota, rounded up."""
    quotas = (_cpu_quota(directory) for directory in _cgroup_directories("cpu", root))
    return max(1, min([len(os.sched_getaffinity(0)), *(math.ceil(quota) for quota in quotas if quota)]))


def compile_slots(wanted: int | float | None, *, root: Path = _ROOT) -> int:
    """Returns how many configs to compile at a time, at most one for each available core.

    Args:
        wanted: a number of configs, or as a float a share of the available cores; None for the usual share.
        root: the root of the file system; another one in tests.
    """
    available = available_cpus(root=root)
    share = _USUAL_SHARE if wanted is None else wanted
    return min(share if isinstance(share, int) else max(1, round(available * share)), available)


def available_memory_bytes(*, root: Path = _ROOT) -> int:
    """Returns how many more bytes this process can use before the machine, or one of its cgroups, runs out."""
    free = [_available(root)]
    for directory in _cgroup_directories("memory", root):
        if (limit := _memory_limit(directory)) is not None:
            free.append(limit - _working_set(directory))
    return max(0, min(free))


def oom_kills(*, root: Path = _ROOT) -> int:
    """Returns a counter that rises whenever the kernel kills for memory, in this process's cgroup or on the machine.

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
    """Returns how many more processes and threads can start here, and the limit; None if unlimited.

    The user's own limit does not bind root.
    """
    left = []
    for directory in _cgroup_directories("pids", root):
        limit, used = (proc_text(directory / name).strip() for name in ("pids.max", "pids.current"))
        if limit.isdigit():
            left.append((max(0, int(limit) - int(used or 0)), f"pids.max of the control group is {limit}"))
    limit_of_user, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if os.geteuid() != 0 and limit_of_user != resource.RLIM_INFINITY:
        in_use = _threads_of_user(root)
        left.append((max(0, limit_of_user - in_use), f"`ulimit -u` of this user is {limit_of_user}"))
    return min(left, default=None)


@functools.cache
def processor_name(*, root: Path = _ROOT) -> str:
    """Returns the processor's model, which is the kind of a CPU device."""
    for line in read_proc(root / "proc/cpuinfo").decode(errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip().lower() == "model name" and value.strip():
            return " ".join(value.split())
    # Many ARM kernels give no model name.
    return platform.processor() or platform.machine() or "unknown processor"


def resident_bytes(pid: int) -> tuple[int, int]:
    """Returns the bytes of a process's private memory, and of its mapped files and shared memory; zeros if gone."""
    fields = read_proc(f"/proc/{pid}/statm").split()
    if len(fields) < 3:  # gone, or just ending
        return 0, 0
    resident, shared = int(fields[1]), int(fields[2])
    return (resident - shared) * _PAGE_BYTES, shared * _PAGE_BYTES


def activity(pid: int) -> tuple[str, int]:
    """Returns the letter of a process's state, as `ps` shows it, and its CPU time in ticks.

    Returns an empty text and 0 if the process is gone or the system lacks these figures.
    """
    fields = process_status(pid)
    return (fields[0].decode(), int(fields[11]) + int(fields[12])) if fields else ("", 0)


def is_stopped(pid: int) -> bool:
    """Returns whether a signal or a debugger has stopped a process; False if unknown."""
    return activity(pid)[0] in ("T", "t")


def children(pid: int) -> list[int]:
    """Returns the children of a process; empty if it is gone."""
    return _children_function()(pid)


def descendants(pid: int) -> list[int]:
    """Returns the children of a process, their children and so on, parents first; empty if it is gone.

    It can miss a process that is forked, or loses its parent, during the walk.
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
    for child in process_ids():
        if fields := process_status(child):
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
        # An ended thread has passed its children on to another thread.
        found += map(int, read_proc(f"/proc/{pid}/task/{thread}/children").split())
    return found


@functools.cache
def _cgroup_directories(controller: str, root: Path) -> tuple[Path, ...]:
    """Returns the cgroup directories (of versions 1 and 2) whose files may limit this process, innermost first."""
    directories: dict[Path, None] = {}
    for line in map(os.fsdecode, proc_lines(root / "proc/self/cgroup")):
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
    """Returns how many threads this process's user has, over its processes."""
    count = 0
    for pid in process_ids(root):
        with contextlib.suppress(OSError):
            if os.stat(root / f"proc/{pid}").st_uid == os.getuid():
                count += len(os.listdir(root / f"proc/{pid}/task"))
    return count


def _cpu_quota(directory: Path) -> float | None:
    """Returns how many cores' worth of time the cgroup may use; None if unlimited."""
    fields = proc_text(directory / "cpu.max").split() or [
        proc_text(directory / "cpu.cfs_quota_us").strip(),
        proc_text(directory / "cpu.cfs_period_us").strip(),
    ]
    if len(fields) != 2 or not all(field.isdigit() for field in fields) or not int(fields[1]):
        return None  # "max", or -1, or no such file
    return int(fields[0]) / int(fields[1])


def _memory_limit(directory: Path) -> int | None:
    """Returns the cgroup's limit in bytes; None if unlimited."""
    text = (proc_text(directory / "memory.max") or proc_text(directory / "memory.limit_in_bytes")).strip()
    # In version 1, "unlimited" is the largest page-aligned 63-bit number.
    return int(text) if text.isdigit() and int(text) < 1 << 60 else None


def _working_set(directory: Path) -> int:
    """Returns the cgroup's memory in use, less the page cache that the kernel can drop."""
    used = (proc_text(directory / "memory.current") or proc_text(directory / "memory.usage_in_bytes")).strip()
    statistics = directory / "memory.stat"
    droppable = _counter(statistics, "total_inactive_file")
    if droppable is None:
        droppable = _counter(statistics, "inactive_file")
    return max(0, int(used or 0) - (droppable or 0))


def _available(root: Path) -> int:
    kibibytes = _counter(root / "proc/meminfo", "MemAvailable:")
    return os.sysconf("SC_AVPHYS_PAGES") * _PAGE_BYTES if kibibytes is None else kibibytes * 1024


def _counter(file: Path, name: str) -> int | None:
    """Returns the number after `name` in a file of "name number" lines; None if missing."""
    for line in proc_text(file).splitlines():
        fields = line.split()
        if len(fields) > 1 and fields[0] == name and fields[1].isdigit():
            return int(fields[1])
    return None


# --- the memory of a worker's processes ---

FileId: TypeAlias = tuple[int, int]
"""The device and the inode of a file."""
_NOTABLE_BYTES = 16 << 20
"""Growth of mapped memory, or memory of forks, that justifies an exact measurement, which takes milliseconds."""
_BLOCK_BYTES = 512
_FEW_BYTES = 1 << 20
"""Resident shared memory below which a process's list of maps is not worth the 1.5 ms to read it."""
_THOROUGH_S = 2.0
"""Seconds between measurements that always read the maps, because mapped memory need not be resident."""


class MemoryMeter:
    """Measures one worker's memory again and again: cheaply as a rule, exactly on request or near the limit.

    The cheap measurement adds up the private pages of all processes, so it counts pages that forks still share several
    times. It corrects this sum, and adds shared memory, by the figures of the last exact measurement.
    """

    def __init__(self) -> None:
        self._began = time.time()
        self._next_thorough = time.monotonic() + _THOROUGH_S
        self._mapped = 0
        self._shared = 0
        self._counted_again = 0

    def held_bytes(
        self,
        family: Sequence[int],
        *,
        baseline_bytes: int,
        limit_bytes: int,
        foreign: Callable[[], Collection[FileId]],
        exactly: bool,
    ) -> int:
        """Returns how many bytes a worker's processes hold in addition to those inherited from its template.

        Args:
            family: process ids, the worker's own first; empty while it is unknown.
            baseline_bytes: the private memory inherited from the template.
            limit_bytes: the sum above which an exact measurement confirms it.
            foreign: returns the files in memory that do not count, though the worker has them open.
            exactly: whether to measure exactly in any case.
        """
        if not family:
            return 0
        pages = [resident_bytes(pid) for pid in family]
        private = sum(own for own, _ in pages) - baseline_bytes
        mapped = sum(shared for _, shared in pages)
        suspicious = private - self._counted_again + self._shared > limit_bytes
        if exactly or suspicious or mapped > self._mapped + _NOTABLE_BYTES:
            self._mapped = mapped
            thorough = suspicious or time.monotonic() >= self._next_thorough
            if thorough:
                self._next_thorough = time.monotonic() + _THOROUGH_S
            self._shared = shared_bytes(family, since=self._began, foreign=foreign(), thorough=thorough)
            self._counted_again = _counted_again(family, private, pages[0][0] - baseline_bytes, baseline_bytes)
        return max(0, private - self._counted_again) + self._shared


def _counted_again(family: Sequence[int], private: int, own: int, baseline_bytes: int) -> int:
    """Returns the surplus bytes in a sum of private pages, because processes share some of them."""
    if private - max(0, own) < _NOTABLE_BYTES or (exact := proportional_bytes(family)) is None:
        return 0
    return max(0, private - max(own, exact - baseline_bytes))


def proportional_bytes(family: Sequence[int]) -> int | None:
    """Returns the private memory of processes in bytes; a page that n processes share counts 1/n. None if unknown."""
    total = 0
    for pid in family:
        text = read_proc(f"/proc/{pid}/smaps_rollup")
        if text and b"Pss_Anon:" not in text:
            return None  # a kernel before 5.3
        total += sum(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith(b"Pss_Anon:"))
    return total or None


def shared_bytes(family: Sequence[int], *, since: float, foreign: Collection[FileId], thorough: bool = True) -> int:
    """Returns the bytes of files in memory that processes have open or mapped, counting each file once.

    These are all kinds of shared memory: anonymous maps, memfd, System V's, and files of a tmpfs such as /dev/shm.

    Args:
        family: the processes.
        since: a time in seconds. Named files that have not changed since then existed before the processes.
        foreign: files that do not count.
        thorough: whether to look also at the maps of processes with little resident shared memory.
    """
    held: dict[FileId, int] = {}
    pages: dict[FileId, int] = {}
    for pid in family:
        for about in _open_files(pid):
            held[about.st_dev, about.st_ino] = _bytes_of(about, since)
    for pid in family:
        if not thorough and _resident_shared_bytes(pid) < _FEW_BYTES:
            continue
        unknown = set()
        for identity, place, path in _mapped_files(pid):
            if identity in held or identity in foreign or identity in unknown:
                continue
            if (about_map := _stat_mapped(pid, identity, place, path)) is None:
                unknown.add(identity)
            else:
                held[identity] = _bytes_of(about_map, since)
        if unknown:
            for identity, amount in _proportional_maps(pid, unknown).items():
                pages[identity] = pages.get(identity, 0) + amount
    return sum(amount for identity, amount in (pages | held).items() if identity not in foreign)


def shared_files(family: Sequence[int]) -> set[FileId]:
    """Returns the files in memory that processes have open or mapped."""
    opened = {(about.st_dev, about.st_ino) for pid in family for about in _open_files(pid)}
    return opened | {identity for pid in family for identity, _, _ in _mapped_files(pid)}


def file_id(fd: int) -> FileId:
    """Returns the identity of an open file."""
    about = os.fstat(fd)
    return about.st_dev, about.st_ino


@functools.cache
def _devices_in_memory() -> frozenset[int]:
    """Returns the devices whose files are in memory: mounted ones, and the kernel's own for nameless files."""
    found = set()
    with contextlib.suppress(OSError, AttributeError):  # the kernel or Python may lack memfd
        probe = os.memfd_create("quarantune-probe", os.MFD_CLOEXEC)
        found.add(os.fstat(probe).st_dev)
        os.close(probe)
    for line in proc_lines("/proc/self/mountinfo"):
        fields, _, kind = line.partition(b" - ")
        if kind.startswith((b"tmpfs ", b"ramfs ")):
            major, _, minor = fields.split()[2].partition(b":")
            found.add(os.makedev(int(major), int(minor)))
    return frozenset(found)


def _resident_shared_bytes(pid: int) -> float:
    """Returns the bytes of shared memory that a process has mapped and touched; infinity if unknown."""
    _, found, rest = read_proc(f"/proc/{pid}/status").partition(b"\nRssShmem:")
    return int(rest.split(maxsplit=1)[0]) << 10 if found else math.inf


def _open_files(pid: int) -> Iterator[os.stat_result]:
    """Yields the status of each file in memory that a process has open."""
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return  # the process is gone
    for name in names:
        with contextlib.suppress(OSError):
            about = os.stat(f"/proc/{pid}/fd/{name}")
            if stat.S_ISREG(about.st_mode) and about.st_dev in _devices_in_memory():
                yield about


def _mapped_files(pid: int) -> Iterator[tuple[FileId, str, str]]:
    """Yields the identity, the address range and the path of each file in memory that a process has mapped."""
    for line in proc_lines(f"/proc/{pid}/maps"):
        place, _, _, device, inode, *path = line.split(maxsplit=5)
        if inode != b"0":
            major, _, minor = device.partition(b":")
            identity = os.makedev(int(major, 16), int(minor, 16)), int(inode)
            if identity[0] in _devices_in_memory():
                yield identity, place.decode(), os.fsdecode(b"".join(path))


def _stat_mapped(pid: int, identity: FileId, place: str, path: str) -> os.stat_result | None:
    """Returns the status of a mapped file; None if only its pages can be counted."""
    # The first path needs a capability that usually only root has; the second needs a file with a name.
    for name in (f"/proc/{pid}/map_files/{place}", path):
        with contextlib.suppress(OSError, ValueError):
            about = os.stat(name)
            if (about.st_dev, about.st_ino) == identity:
                return about
    return None


def _proportional_maps(pid: int, wanted: Collection[FileId]) -> dict[FileId, int]:
    """Returns a process's share of mapped files in bytes; a page that n processes map counts 1/n."""
    found: dict[FileId, int] = {}
    identity = None
    for line in proc_lines(f"/proc/{pid}/smaps"):
        name, _, rest = line.partition(b" ")
        if name == b"Pss:" and identity in wanted and identity is not None:
            found[identity] = found.get(identity, 0) + (int(rest.split()[0]) << 10)
        elif not name.endswith(b":"):
            _, _, device, inode, *_ = rest.split(maxsplit=4)
            major, _, minor = device.partition(b":")
            identity = os.makedev(int(major, 16), int(minor, 16)), int(inode)
    return found


def _bytes_of(about: os.stat_result, since: float) -> int:
    """Returns the bytes that a file takes in memory; 0 for a named file that existed before."""
    was_there = about.st_nlink > 0 and max(about.st_mtime, about.st_ctime) < since
    return 0 if was_there else about.st_blocks * _BLOCK_BYTES


# --- /proc ---


def read_proc(file: str | Path) -> bytes:
    """Returns the content of a file; empty if the process is gone, or the system lacks the file."""
    try:
        with open(file, "rb", buffering=0) as opened:
            return opened.read()
    except OSError:
        return b""


def proc_text(file: str | Path) -> str:
    """Returns the content of a file as text that `os.fsencode` turns into the same bytes again."""
    return os.fsdecode(read_proc(file))


def proc_lines(file: str | Path) -> list[bytes]:
    """Returns the lines of a file. Only a newline ends a line, because names may hold all other line separators."""
    return [line for line in read_proc(file).split(b"\n") if line]


def boot_id() -> str:
    """Returns the kernel's identifier of this boot; empty if unknown."""
    return proc_text("/proc/sys/kernel/random/boot_id").strip()


def process_ids(root: Path = Path("/")) -> list[int]:
    """Returns the ids of all processes.

    Args:
        root: the root of the file system; another one in tests.
    """
    return [int(name) for name in os.listdir(root / "proc") if name.isdigit()]


def process_status(pid: int | str) -> list[bytes]:
    """Returns the fields of a process's `stat` from its state on; empty if the process is gone.

    The command's name before them stands in parentheses and may itself hold spaces and parentheses.
    """
    return read_proc(f"/proc/{pid}/stat").rpartition(b")")[2].split()
