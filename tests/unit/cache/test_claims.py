"""One process at a time holds the claim of a problem, and a dead or silent holder loses it."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import pass_time, python

from quarantune.cache.claims import Claim, wait
from quarantune.cache.owner import Owner
from quarantune.cache.problems import CacheWriteError
from quarantune.host.shared_files import Directory, side_lock

HOLD = """
import fcntl, sys
from pathlib import Path
from quarantune.cache.claims import Claim
if sys.argv[2] == "no-op":
    fcntl.flock = lambda fd, operation: None
claim = Claim(Path(sys.argv[1]), "f", "cpu", "key", worst_case_s=1000)
print(claim.try_acquire(), flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Claim]:
    return lambda **options: Claim(tmp_path, "f", "cpu", "key", **options)


@pytest.fixture(params=["working locks", "no-op locks", "no locks"])
def locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    if request.param == "no-op locks":
        monkeypatch.setattr(fcntl, "flock", lambda fd, operation: None)
    elif request.param == "no locks":
        monkeypatch.setattr(fcntl, "flock", refuse)
    return str(request.param)


def be_on_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quarantune.cache.owner.this_host", lambda: "0123456789ab")
    monkeypatch.setattr("quarantune.cache.claims.boot_id", lambda: "another kernel")


@pytest.mark.usefixtures("locks")
def test_one_claim_at_a_time_and_the_next_after_its_release(make: Callable[..., Claim]) -> None:
    one, other = make(), make()
    assert one.try_acquire()
    assert one.try_acquire()
    assert not other.try_acquire()
    assert one.held
    assert not other.held
    assert str(os.getpid()) in str(other.holder())
    one.release()
    assert other.holder() is None
    assert other.try_acquire()
    assert not one.try_acquire()
    other.release()


def test_hosts_without_a_boot_id_are_not_taken_for_one(
    make: Callable[..., Claim], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quarantune.cache.claims.boot_id", lambda: "")
    holder, rival = make(), make()
    assert holder.try_acquire()
    holder._path.with_suffix(".lock").unlink()  # the lock of one host has no effect on another
    monkeypatch.setattr("quarantune.cache.owner.this_host", lambda: "0123456789ab")
    assert not rival.try_acquire()
    pass_time(monkeypatch, 100)
    assert holder.refresh()
    assert not rival.try_acquire()
    pass_time(monkeypatch, 100)
    assert rival.try_acquire()
    rival.release()
    holder.release()


def test_a_claim_made_while_another_is_set_aside_is_respected(
    make: Callable[..., Claim], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick, slow = make(), make()
    quick._path.parent.mkdir()
    quick._path.write_text('{"who": "knows"}')
    assert [quick.try_acquire(), slow.try_acquire()] == [False, False]
    pass_time(monkeypatch, 100)
    find_free_name = Directory.free_name

    def after_the_other(place: Directory, name: str) -> str:
        monkeypatch.setattr(Directory, "free_name", find_free_name)
        while not quick.held:  # it may give way once, to the holder of the lock
            quick.try_acquire()
        return find_free_name(place, name)

    monkeypatch.setattr(Directory, "free_name", after_the_other)
    assert not slow.try_acquire()
    assert quick.refresh()
    quick.release()


def test_different_problems_are_claimed_independently(tmp_path: Path) -> None:
    claims = [Claim(tmp_path, *names) for names in (("f", "cpu", "a"), ("f", "cpu", "b"), ("f", "gpu", "a"))]
    assert [claim.try_acquire() for claim in claims] == [True] * 3
    for claim in claims:
        claim.release()


def test_a_with_block_releases_the_claim(make: Callable[..., Claim]) -> None:
    with make() as claim:
        assert claim.try_acquire()
    assert not claim.held
    assert make().holder() is None
    claim.release()


def test_releasing_leaves_no_descriptor_and_no_holder(make: Callable[..., Claim]) -> None:
    rival = make()
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(3):
        claim = make()
        assert claim.try_acquire()
        assert not rival.try_acquire()
        claim.release()
    assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("locks_of_holder", ["working", "no-op"])
def test_a_claim_dies_with_its_holder(tmp_path: Path, make: Callable[..., Claim], locks_of_holder: str) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path), locks_of_holder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        claim = make()
        assert not claim.try_acquire()
        assert str(claim.holder()) == f"process {holder.pid} on {os.uname().nodename}"
        holder.kill()
        holder.wait()
        assert claim.try_acquire()
        claim.release()


def test_a_lock_finds_a_dead_holder_in_another_pid_namespace(
    tmp_path: Path, make: Callable[..., Claim], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path), "working"]
    monkeypatch.setattr("quarantune.cache.owner.this_host", lambda: "0123456789ab")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        claim = make()
        assert not claim.try_acquire()
        holder.kill()
        holder.wait()
        assert claim.try_acquire()
        claim.release()


@pytest.mark.usefixtures("locks")
def test_a_silent_holder_loses_its_claim_after_its_worst_case(
    make: Callable[..., Claim], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, waiter = make(worst_case_s=30), make(worst_case_s=1)
    assert slow.try_acquire()
    for waited_s in (0, 25):
        pass_time(monkeypatch, waited_s)
        assert not waiter.try_acquire()
    pass_time(monkeypatch, 10)
    assert waiter.try_acquire()
    assert not slow.refresh()
    assert not slow.held
    assert waiter.refresh()
    assert not make().try_acquire()
    waiter.release()
    assert make().holder() is None


@pytest.mark.usefixtures("locks")
@pytest.mark.parametrize("hours", [-1, 1, 24 * 365])
def test_a_changing_claim_is_respected_whatever_its_clock(
    make: Callable[..., Claim], monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    # A network filesystem may take the times of files from its clients.
    holder, waiter = make(worst_case_s=30), make()
    assert holder.try_acquire()
    for waited_s in range(0, 100, 20):
        there = time.time() + 3600 * hours + waited_s
        os.utime(holder._path, (there, there))
        assert not waiter.try_acquire()
        pass_time(monkeypatch, 20)
    assert holder.held
    pass_time(monkeypatch, 20)
    assert waiter.try_acquire(), "the claim no longer changes"
    waiter.release()
    holder.release()


def test_a_lock_without_effect_does_not_prove_a_holder_dead(
    make: Callable[..., Claim], monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = make()
    assert holder.try_acquire()
    monkeypatch.setattr(fcntl, "flock", lambda fd, operation: None)
    assert not make().try_acquire()
    assert holder.refresh()
    holder.release()


def test_a_hung_holder_does_not_keep_its_claim_for_ever(
    make: Callable[..., Claim], monkeypatch: pytest.MonkeyPatch
) -> None:
    hung, second, third = make(worst_case_s=1), make(), make()
    assert hung.try_acquire()
    assert not second.try_acquire()
    pass_time(monkeypatch, 100)
    assert second.try_acquire()
    second.release()
    # The third gives way once, because the holder of the lock may be about to make the claim.
    assert [third.try_acquire(), third.try_acquire()] == [False, True]
    third.release()
    hung.release()


@pytest.mark.usefixtures("locks")
def test_refreshing_keeps_the_claim(make: Callable[..., Claim], monkeypatch: pytest.MonkeyPatch) -> None:
    holder, waiter = make(worst_case_s=30), make()
    assert not holder.refresh()
    assert holder.try_acquire()
    assert not waiter.try_acquire()
    pass_time(monkeypatch, 1000)
    assert holder.refresh()
    assert not waiter.try_acquire()
    pass_time(monkeypatch, 1000)
    assert waiter.try_acquire()
    waiter.release()


def test_hosts_judge_each_other_by_silence_alone(make: Callable[..., Claim], monkeypatch: pytest.MonkeyPatch) -> None:
    there = make(worst_case_s=30)
    monkeypatch.setattr(fcntl, "flock", lambda fd, operation: None)
    assert there.try_acquire()
    be_on_another_host(monkeypatch)
    here = make()
    assert not here.try_acquire()
    pass_time(monkeypatch, 40)
    assert here.try_acquire()
    here.release()


@pytest.mark.filterwarnings("ignore::quarantune.cache.CacheWarning")  # some contents warn, as no crash leaves them
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"token": 1}'])
def test_a_claim_torn_by_a_crash_is_taken_over_soon(
    make: Callable[..., Claim], monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    claim = make()
    claim._path.parent.mkdir()
    claim._path.write_bytes(content)
    assert not claim.try_acquire()
    pass_time(monkeypatch, 10)
    assert claim.try_acquire()
    claim.release()


def test_a_slow_waiter_does_not_take_a_quicker_ones_claim(
    make: Callable[..., Claim], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda fd, operation: None)
    dead, quick, slow = make(worst_case_s=1), make(), make()
    assert dead.try_acquire()
    assert [quick.try_acquire(), slow.try_acquire()] == [False, False]
    pass_time(monkeypatch, 100)
    real = os.replace

    def rename(*names: str, **where: int) -> None:
        monkeypatch.setattr(os, "replace", real)
        assert quick.try_acquire()
        real(*names, **where)

    monkeypatch.setattr(os, "replace", rename)
    assert not slow.try_acquire()
    assert quick.refresh()
    assert list(quick._path.parent.glob("*.tmp")) == []
    quick.release()
    dead.release()


def test_a_directory_that_cannot_be_written_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "f.trials").write_text("")
    with pytest.raises(CacheWriteError, match="other jobs cannot see"):
        Claim(tmp_path, "f", "cpu", "key").try_acquire()


def test_a_fork_of_a_killed_holder_does_not_keep_its_lock(tmp_path: Path) -> None:
    # Only its lock shows that the holder lives: the rival is on another host.
    script = """
import os, signal, sys
from pathlib import Path
from quarantune.cache.claims import Claim
claim = Claim(Path(sys.argv[1]), "f", "cpu", "key", worst_case_s=1000)
assert claim.try_acquire()
if (pid := os.fork()) == 0:
    sys.stdin.read()
    os._exit(0)
print(pid, flush=True)
signal.pause()
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        fork = int(holder.stdout.readline())
        name = Claim(tmp_path, "f", "cpu", "key")._lock_name
        with Directory(tmp_path, "f.trials") as place:
            with side_lock(place, name) as is_granted:
                assert is_granted is False
            holder.kill()
            holder.wait()
            os.kill(fork, 0)
            with side_lock(place, name, 10.0) as is_granted:
                assert is_granted


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # other tests have imported JAX, which warns
def test_a_fork_that_leaves_the_block_keeps_its_parents_claim(make: Callable[..., Claim]) -> None:
    with make() as claim:
        assert claim.try_acquire()
        if (pid := os.fork()) == 0:
            claim.release()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert claim.refresh()
        assert not make().try_acquire()


def test_a_waiter_gets_the_lock_and_a_signal_ends_its_wait(tmp_path: Path) -> None:
    with Directory(tmp_path) as place:
        with side_lock(place, "lock") as is_held:
            assert is_held
            with side_lock(place, "lock", 0.02) as is_granted:
                assert is_granted is False
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt), side_lock(place, "lock", 100.0):
                pass
        with side_lock(place, "lock", 100.0) as is_granted:
            assert is_granted


def test_another_thread_releases_the_lock_of_a_claim(make: Callable[..., Claim]) -> None:
    claim = make()
    assert claim.try_acquire()
    thread = threading.Thread(target=claim.release)
    thread.start()
    thread.join()
    other = make()
    assert other.try_acquire()
    assert other._locked
    other.release()


def test_of_many_processes_exactly_one_acquires_at_a_time(tmp_path: Path) -> None:
    script = """
import os, sys, time
from pathlib import Path
from quarantune.cache.claims import Claim

def contend(directory):
    claim = Claim(directory, "f", "cpu", "key")
    done = 0
    while done < 10:
        if claim.try_acquire():
            os.close(os.open(directory / "inside", os.O_CREAT | os.O_EXCL))
            time.sleep(0.001)
            os.unlink(directory / "inside")
            claim.release()
            done += 1
        time.sleep(0.001)
    os._exit(0)

pids = [os.fork() or contend(Path(sys.argv[1])) for _ in range(4)]
print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])
"""
    assert python("-c", script, tmp_path) == "[0, 0, 0, 0]\n"


def test_wait_returns_an_answer_that_is_there_without_claiming(make: Callable[..., Claim]) -> None:
    claim = make()
    assert wait(claim, lambda: "answer", lambda *_: None) == "answer"
    assert not claim.held


def test_wait_returns_the_claim_when_nobody_has_it(make: Callable[..., Claim]) -> None:
    claim = make()
    assert wait(claim, lambda: None, lambda *_: None) is claim
    assert claim.held
    claim.release()


def test_wait_looks_again_after_acquiring_the_claim(make: Callable[..., Claim]) -> None:
    answers = [None, "answer"]
    claim = make()
    assert wait(claim, lambda: answers.pop(0), lambda *_: None) == "answer"
    assert not claim.held


def test_wait_releases_the_claim_when_it_is_interrupted(make: Callable[..., Claim]) -> None:
    claim = make()

    def done() -> None:
        if claim.held:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        wait(claim, done, lambda *_: None)
    assert not claim.held
    assert claim.holder() is None


def test_wait_names_the_holder_and_ends_with_the_answer(make: Callable[..., Claim]) -> None:
    holder = make()
    assert holder.try_acquire()
    told: list[tuple[str, float]] = []
    answers: list[str] = []

    def on_wait(who: str, waited_s: float) -> None:
        told.append((who, waited_s))
        if len(told) == 3:
            answers.append("answer")

    claim = make()
    assert wait(claim, lambda: answers[0] if answers else None, on_wait, poll_s=0.01) == "answer"
    assert [who for who, _ in told] == [f"process {os.getpid()} on {os.uname().nodename}"] * 3
    assert sorted(told, key=lambda each: each[1]) == told
    holder.release()


def test_wait_takes_over_when_the_holder_releases_its_claim(make: Callable[..., Claim]) -> None:
    holder, claim = make(), make()
    assert holder.try_acquire()
    assert wait(claim, lambda: None, lambda *_: holder.release(), poll_s=0.01) is claim
    claim.release()


def test_wait_can_be_interrupted(make: Callable[..., Claim]) -> None:
    holder = make()
    assert holder.try_acquire()

    def interrupt(_who: str, _waited_s: float) -> None:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()

    with pytest.raises(KeyboardInterrupt):
        wait(make(), lambda: None, interrupt, poll_s=60)
    holder.release()


@pytest.mark.slow
def test_sixteen_processes_get_one_answer_despite_a_kill(tmp_path: Path) -> None:
    script = """
import os, signal, sys
from pathlib import Path
from quarantune.cache.store import Store
from quarantune.cache.claims import Claim, wait
from quarantune.cache.journal import Journal

def search(directory):
    store, journal = Store(directory), Journal(directory, "f", "cpu", "key")
    claim = Claim(directory, "f", "cpu", "key")
    found = wait(claim, lambda: store.get("f", "cpu", "key"), lambda *_: None, poll_s=0.01)
    if found is claim:
        for trial in range(len(journal.records()), 10):
            journal.append({"trial": trial})
            if trial == 4:
                os.kill(os.getpid(), signal.SIGKILL)
        store.put("f", "cpu", "key", {"config": {"BM": 32}})
        claim.release()
        found = store.get("f", "cpu", "key")
    os.write(1, f"{found['config']}\\n".encode())
    os._exit(0)

pids = [os.fork() or search(Path(sys.argv[1])) for _ in range(16)]
print(sorted(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids))
"""
    *answers, endings = python("-c", script, tmp_path).splitlines()
    from quarantune.cache.journal import Journal

    assert endings == str([-signal.SIGKILL] + [0] * 15)
    assert answers == ["{'BM': 32}"] * 15
    trials = [record["trial"] for record in Journal(tmp_path, "f", "cpu", "key").records()]
    assert trials == list(range(10))


def test_a_process_is_dead_only_when_that_is_certain() -> None:
    me = Owner.this_process()
    assert not me.is_dead()
    gone = int(python("-c", "import os; print(os.getpid())"))
    assert Owner(host=me.host, pid=gone, started=1).is_dead()
    assert Owner(host=me.host, pid=me.pid, started=me.started + 1).is_dead()
    assert not Owner(host="0123456789ab", pid=gone, started=1).is_dead()


def test_a_zombie_is_dead() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert Owner(host=Owner.this_process().host, pid=process.pid, started=0).is_dead()


def test_a_failure_is_passed_to_waiters_and_not_to_later_callers(make: Callable[..., Claim]) -> None:
    holder, waiter, late = make(), make(), make()
    assert holder.try_acquire()
    looks: list[float] = []

    def on_wait(who: str, waited_s: float) -> None:
        looks.append(waited_s)
        if len(looks) == 2:
            holder.leave_failure({"why": "all of them failed"})
            holder.release()

    answer = wait(waiter, lambda: None, on_wait, failed=lambda about: about["why"], poll_s=0.001)
    assert answer == "all of them failed"
    assert not waiter.held
    assert wait(late, lambda: None, on_wait, failed=lambda about: about["why"]) is late
    late.release()


def test_a_waiter_that_never_saw_the_holder_gets_its_failure(
    make: Callable[..., Claim], monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, waiter = make(), make()
    assert holder.try_acquire()
    take = waiter.try_acquire

    def refused_as_the_holder_ends() -> bool:
        is_taken = take()
        holder.leave_failure({"why": "all of them failed"})
        holder.release()
        return is_taken

    monkeypatch.setattr(waiter, "try_acquire", refused_as_the_holder_ends)
    seen: list[str] = []
    answer = wait(
        waiter, lambda: None, lambda who, _: seen.append(who), failed=lambda about: about["why"], poll_s=0.001
    )
    assert (answer, seen) == ("all of them failed", ["another job"])
    assert not waiter.held


def test_a_waiter_that_cannot_use_a_failure_tunes(make: Callable[..., Claim]) -> None:
    holder, waiter = make(), make()
    assert holder.try_acquire()

    def on_wait(who: str, waited_s: float) -> None:
        holder.leave_failure({})
        holder.release()

    assert wait(waiter, lambda: None, on_wait, failed=lambda about: None, poll_s=0.001) is waiter
    waiter.release()
