"""Claims: one job tunes a problem while others wait for it. One of them takes over when it dies or falls silent.

Two mechanisms keep processes apart, here and among the writers of `store`. The first is a lock on a side file, which
the kernel releases when its holder dies. On some shared filesystems, locks have no effect or bind one host only. So the
second is a file that names its owner. It counts until its owner is certainly dead, or until a waiter has seen no change
of the file for the owner's stated worst case. Nothing compares a file's time with a clock: the clocks of hosts differ.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

from quarantune.cache.file_names import problem_hash
from quarantune.cache.journal import trials_folder
from quarantune.cache.owner import Owner, short_text
from quarantune.cache.problems import report_once, write_errors
from quarantune.host import shared_files
from quarantune.host.machine import boot_id
from quarantune.host.shared_files import Directory, side_lock
from quarantune.values.codec import JsonObject, Record, decode_json, within

T = TypeVar("T")
_Kind = TypeVar("_Kind", bound=Record)

_LONGEST_WORST_CASE_S = 24 * 3600.0
"""Longest silence in seconds that a claim's holder may announce."""
_LARGEST_CLAIM_BYTES = 1 << 16
_LARGEST_FAILURE_BYTES = 1 << 26
_Text: TypeAlias = Annotated[str, short_text]
_GRACE_S = 2.0
"""Seconds to add to every worst case, because a filesystem may show a refreshed claim late."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Holder(Record):
    """The holder of a claim, read from the claim's file.

    Attributes:
        token: different for every claim ever made.
        host_name: the holder's machine, for people.
        owner: the holder's process.
        boot: the holder's kernel and mount. A lock binds all processes that share both.
        locked: whether it also holds the lock, which its kernel releases when it dies.
        worst_case_s: the longest time in seconds between two refreshes by the holder.
    """

    token: _Text
    host_name: _Text
    owner: Owner
    boot: _Text
    locked: bool = False
    worst_case_s: Annotated[float, within(0, _LONGEST_WORST_CASE_S + 1)]

    def __str__(self) -> str:
        """Returns the holder's process and machine."""
        return f"process {self.owner.pid} on {self.host_name}"


@dataclasses.dataclass(frozen=True)
class _Failure(Record):
    """The record that a holder leaves instead of an answer.

    Attributes:
        token: the token of the holder's claim.
        about: the holder's data for the jobs that wait.
    """

    token: _Text
    about: JsonObject


class Claim(contextlib.AbstractContextManager["Claim"]):
    """The right to tune one problem.

    The claim is a file that names its holder. Its creation is atomic, and fails if the file exists. It is stale if its
    holder is dead: the kernel has released the lock on a side file, or the process is gone. It is also stale if this
    object has seen it unchanged for longer than its holder's worst case. This second rule works between hosts that
    cannot see each other's processes or locks, and whose clocks differ. If a holder taken for dead continues, two jobs
    measure the same trials, and nothing is lost.

    Use the claim as a context manager to release it, or let it die with the process.
    """

    def __init__(self, directory: Path, name: str, device: str, key: str, *, worst_case_s: float = 60.0) -> None:
        """Names a claim without touching the disk, which `try_acquire` does.

        Args:
            directory: the cache directory.
            name: the function.
            device: the kind of device.
            key: the key of the problem.
            worst_case_s: the longest time in seconds between two calls of `refresh` by the holder.
        """
        stem = problem_hash(device, key)
        self._where = directory, trials_folder(name)
        self._path = directory / trials_folder(name) / f"{stem}.claim"
        self._name = self._path.name
        self._lock_name = f"{stem}.lock"
        self._failure_name = f"{stem}.failed"
        self._place: Directory | None = None
        self._token = ""
        self._worst_case_s = min(worst_case_s, _LONGEST_WORST_CASE_S)
        self._fd: int | None = None
        self._pid = 0
        """The process that made the claim. A fork of it holds nothing."""
        self._open = contextlib.ExitStack()
        """The directory and the side file of the lock, while they are open."""
        self._locked: bool | None = False
        """Whether this object holds the lock; None if locks have no effect."""
        self._gave_way = False
        self._seen: tuple[Holder | None, int] | None = None
        self._seen_since = 0.0

    def __exit__(self, *_: object) -> None:
        """Releases the claim."""
        self.release()

    @property
    def held(self) -> bool:
        """Whether this object acquired the claim, and has not released it or noticed its loss."""
        return self._fd is not None

    def try_acquire(self) -> bool:
        """Takes the claim if nobody has it, or if its holder is dead or silent for too long; never waits.

        Raises:
            CacheWriteError: the directory is not writable, so other jobs cannot see the claim. The message says why.
        """
        if self.held:
            return True
        with write_errors(f"other jobs cannot see in {str(self._path)!r} that this call is being tuned"):
            self._place = self._open.enter_context(Directory(*self._where, make=True))
            try:
                self._locked = self._open.enter_context(side_lock(self._place, self._lock_name))
                return self._take(self._place)
            finally:
                if not self.held:
                    self._let_go()

    def refresh(self) -> bool:
        """Shows the others that the holder is alive. It takes microseconds, so call it whenever something has happened.

        Returns:
            False if this object never had the claim, or lost it because this process was silent for too long.
        """
        if self._fd is None:
            return False
        if self._place is None or not self._place.is_same(self._name, self._fd):
            self.release()
            return False
        with contextlib.suppress(OSError):
            os.utime(self._fd)
        return True

    def release(self) -> None:
        """Gives the claim up; does nothing if it is not held."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            with contextlib.suppress(OSError):
                if self._pid == os.getpid() and self._place is not None and self._place.is_same(self._name, fd):
                    self._place.remove(self._name)
            os.close(fd)
        self._let_go()

    def leave_failure(self, about: Mapping[str, Any]) -> None:
        """Leaves a record of failure for waiting jobs. Call it before `release`.

        Args:
            about: JSON-able data for those jobs.
        """
        if self._place is not None:
            record = json.dumps(_Failure(self._token, dict(about)).to_json()).encode()
            with contextlib.suppress(OSError):  # without the record, each waiting job tunes and fails itself
                self._place.replace(self._failure_name, record)

    def failure(self) -> _Failure | None:
        """Returns the record that the last holder without an answer left, if any."""
        return self._read(_Failure, self._failure_name, _LARGEST_FAILURE_BYTES)

    def holder(self) -> Holder | None:
        """Returns the holder of the claim, dead or alive, or None."""
        return self._read(Holder, self._name)

    def _read(self, kind: type[_Kind], name: str, largest_bytes: int = _LARGEST_CLAIM_BYTES) -> _Kind | None:
        """Returns the record in a file; None if the file is missing or holds something else."""
        for afresh in (False, True):
            with contextlib.suppress(OSError, ValueError):
                return kind.from_json(decode_json(self._content(name, largest_bytes, afresh=afresh)))
        return None

    def _content(self, name: str, largest_bytes: int = _LARGEST_CLAIM_BYTES, *, afresh: bool = True) -> bytes:
        path, root = self._path.with_name(name), self._where[0]
        return shared_files.read(path, below=root, largest_bytes=largest_bytes, afresh=afresh)

    def _is_stale(self, place: Directory, holder: Holder | None) -> bool:
        """Returns whether the claim's holder is dead or has been silent for too long."""
        try:
            seen = holder, place.status(self._name).st_mtime_ns
        except FileNotFoundError:
            return False
        if seen != self._seen:
            self._seen, self._seen_since = seen, time.monotonic()
        silent_s = time.monotonic() - self._seen_since
        if holder is None:
            return silent_s > _GRACE_S
        # Some kernels show no boot id, so an empty one proves nothing.
        has_lost_lock = self._locked and holder.locked and holder.boot == _kernel(place) != ""
        return bool(has_lost_lock) or holder.owner.is_dead() or silent_s > holder.worst_case_s + _GRACE_S

    def _take(self, place: Directory) -> bool:
        if not place.is_there(self._name):
            # Another process may have the lock but not yet the claim. At our next look it has both, or it hangs.
            self._gave_way = self._locked is False and not self._gave_way
            return not self._gave_way and self._create(place)
        holder = self.holder()
        return self._is_stale(place, holder) and self._remove(place, holder) and self._create(place)

    def _create(self, place: Directory) -> bool:
        # O_EXCL creates it atomically; the same descriptor writes it, so no other process's file can be hit.
        try:
            fd = place.open(self._name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return False
        owner = Owner.this_process()
        holder = Holder(
            token=f"{owner}-{os.fstat(fd).st_ino}-{time.monotonic_ns()}",
            host_name=platform.node(),
            owner=owner,
            boot=_kernel(place),
            locked=bool(self._locked),
            worst_case_s=self._worst_case_s,
        )
        try:
            shared_files.write_all(fd, json.dumps(holder.to_json()).encode())
        except OSError:
            place.remove(self._name)
            os.close(fd)
            raise
        self._fd, self._token, self._pid = fd, holder.token, owner.pid
        for renamed in place.names(f"{self._name}.*.tmp"):
            place.remove(renamed)
        return True

    def _remove(self, place: Directory, expected: Holder | None) -> bool:
        renamed = f"{self._name}.{secrets.token_hex(8)}.tmp"
        try:
            place.rename(self._name, renamed)
        except FileNotFoundError:
            return True
        mistaken = self._read(Holder, renamed) != expected
        if mistaken:
            # Another waiter was quicker, and this is its fresh claim: put it back.
            with contextlib.suppress(OSError):
                place.link(renamed, self._name)
        elif expected is None and not self._is_unfinished(renamed):
            aside = place.free_name(self._name)
            with contextlib.suppress(FileNotFoundError):  # a new claimant has removed it
                place.rename(renamed, aside)
                report_once(
                    f"{str(self._path)!r} is not a claim of this program; it was set aside as "
                    f"{str(place.path / aside)!r}: look at it"
                )
        place.remove(renamed)
        return not mistaken

    def _is_unfinished(self, name: str) -> bool:
        """Returns whether a claim's holder died while writing it."""
        try:
            decode_json(self._content(name))
        except (OSError, ValueError) as error:
            return isinstance(error, ValueError)
        return False

    def _let_go(self) -> None:
        self._locked, self._place = False, None
        self._open.close()


def _kernel(place: Directory) -> str:
    """Returns this kernel's boot id with the mount's number, because each container may mount another directory."""
    boot = boot_id()
    return boot and f"{boot}-{place.status('.').st_dev}"


def wait(
    claim: Claim,
    done: Callable[[], T | None],
    on_wait: Callable[[str, float], None],
    *,
    failed: Callable[[JsonObject], T | None] = lambda about: None,
    poll_s: float = 0.1,
) -> T | Claim:
    """Waits until another job has the answer, or this one must find it.

    A signal interrupts the wait like any sleep. The holders' stated worst cases bound its length.

    Args:
        claim: the claim on the problem.
        done: looks for the answer; returns None until it exists.
        on_wait: called at every look with the holder of the claim and the seconds waited so far.
        failed: takes the record that a holder left instead of an answer, and returns a substitute for the answer, or
            None to tune anew.
        poll_s: seconds between two looks.

    Returns:
        The answer, or the acquired `claim` if nobody has answered.

    Raises:
        CacheWriteError: the claim cannot be made. The message says why.
    """
    started, earlier = time.monotonic(), claim.failure()

    def look() -> T | None:
        # A failure counts if any holder left it during this wait.
        if (answer := done()) is None and (left := claim.failure()) is not None and left != earlier:
            return failed(left.about)
        return answer

    with contextlib.ExitStack() as stack:
        stack.push(claim)  # released unless this function returns it
        while True:
            answer = look()
            # The holder may have saved its answer and released the claim between our two looks.
            if answer is None and claim.try_acquire() and (answer := look()) is None:
                stack.pop_all()
                return claim
            if answer is not None:
                return answer
            on_wait(str(claim.holder() or "another job"), time.monotonic() - started)
            time.sleep(poll_s)
