"""The time a run took is measured without its waits for a CPU."""

from __future__ import annotations

import gc
import os
import threading
import time

import pytest
from aftermath import eventually
from rivals import on_one_cpu_with_a_rival

from quarantune.host.waits import RunTime, ThreadTimes, Watch

MS = 1_000_000


def spin(cpu_s: float) -> None:
    ends = time.thread_time() + cpu_s
    while time.thread_time() < ends:
        pass


def test_a_thread_that_shares_its_cpu_is_seen_to_wait_for_it() -> None:
    with Watch(spins=False) as watch:
        if not watch.read():
            pytest.skip("this system does not report how long threads wait for a CPU")
        with on_one_cpu_with_a_rival():
            taken, _ = watch.time(lambda: spin(0.3))
    assert taken.whole > 0.4, "the rival took about half of the CPU"
    assert taken.is_disturbed
    assert taken.cpu == pytest.approx(0.3, rel=0.2)


def test_waits_of_threads_one_after_another_all_count() -> None:
    found: list[RunTime] = []

    def is_right() -> bool:
        found.append(taken := handed_over())
        return taken.cpu == pytest.approx(0.3, rel=0.3) and taken.cpu < 0.8 * taken.whole

    # Waits of this process's other threads on a busy machine would also count.
    assert eventually(is_right), f"the times include waits: {found}"


def handed_over() -> RunTime:
    """Times three threads that each work for 0.1 s in turn while a rival uses their CPU."""
    pauses = [threading.Event() for _ in range(3)]

    def hand_over(index: int) -> None:
        pauses[index].wait()
        spin(0.1)
        if index + 1 < len(pauses):
            pauses[index + 1].set()
        else:
            done.set()
        over.wait()  # an ended thread has no times

    done, over = threading.Event(), threading.Event()
    threads = [threading.Thread(target=hand_over, args=(index,)) for index in range(3)]
    with on_one_cpu_with_a_rival(), Watch(spins=False) as watch:
        for thread in threads:
            thread.start()
        if not watch.read():
            over.set()
            pytest.skip("this system does not report how long threads wait for a CPU")

        def work() -> None:
            pauses[0].set()
            done.wait()

        taken, _ = watch.time(work)
        over.set()
    for thread in threads:
        thread.join()
    return taken


@pytest.mark.parametrize(
    ("spins", "threads", "expected"),
    [
        (False, {"pool": (8, 0)}, (0.020, 0.020, 0.020)),
        (False, {"pool": (8, 1)}, (0.020, 0.020, 0.020)),
        (False, {"pool": (4, 8), "other": (4, 6)}, (0.020, 0.006, 0.006)),
        (False, {"pool": (9, 18), "other": (8, 18)}, (0.020, 0.009, 0.009)),
        (True, {"pool": (9, 18), "other": (8, 18)}, (0.020, 0.009, 0.0)),
    ],
    ids=["quiet", "hardly", "in turn", "together", "together, and spinning"],
)
def test_cpu_time_excludes_waits_but_not_the_busiest_thread(
    spins: bool,
    threads: dict[str, tuple[int, int]],
    expected: tuple[float, float, float],
) -> None:
    after = {name: ThreadTimes(ran * MS, waited * MS) for name, (ran, waited) in threads.items()}
    assert Watch(spins=spins)._taken(0.020, {}, after, 0) == pytest.approx(RunTime(*expected))


def test_a_watch_leaves_no_descriptor_open() -> None:
    gc.collect()  # garbage of earlier tests may close descriptors
    before = len(os.listdir("/proc/self/fd"))
    with Watch(spins=False) as watch:
        watch.time(lambda: spin(0.001))
    assert len(os.listdir("/proc/self/fd")) == before


def test_many_threads_are_all_watched_with_few_descriptors() -> None:
    over = threading.Event()
    threads = [threading.Thread(target=over.wait) for _ in range(200)]
    gc.collect()  # garbage of earlier tests may close descriptors
    before = len(os.listdir("/proc/self/fd"))
    with Watch(spins=False) as watch:
        if not watch.read():
            pytest.skip("this system does not report how long threads wait for a CPU")
        for thread in threads:
            thread.start()
        try:
            for _ in range(2):
                times = watch.read()
                assert {str(thread.native_id) for thread in threads} <= times.keys()
                assert len(os.listdir("/proc/self/fd")) < before + 100
        finally:
            over.set()
            for thread in threads:
                thread.join()
        ended = {str(thread.native_id) for thread in threads}
        assert eventually(lambda: ended.isdisjoint(watch.read()))
        others = len(os.listdir("/proc/self/task"))
        assert len(os.listdir("/proc/self/fd")) <= before + others, "descriptors of ended threads are closed"
