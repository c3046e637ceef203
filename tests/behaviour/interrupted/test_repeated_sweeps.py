"""Many sweeps, one after another or at the same time, leave nothing behind and do not disturb each other."""

from __future__ import annotations

import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import misdeeds
import numpy as np
import psutil
import pytest
from aftermath import eventually, nothing_is_left, quiet_place, running_templates  # noqa: F401
from helpers import SUPPORT, python

pytestmark = pytest.mark.usefixtures("quiet_place")
X = np.ones(8, np.float32)


def ends(*space: tuple[str, str]) -> list[str]:
    """Tunes, and returns how the configs ended; measured configs are `ok`."""
    trials = misdeeds.kernel.tune(X, space=space).trials
    return ["ok" if trial.outcome in misdeeds.MEASURED else trial.outcome.value for trial in trials]


def tune(turns: int, *, seed: int = 0) -> None:
    """Tunes over this number of good configs; each seed is a new problem."""
    assert ends(*[("good", str(seed))] * turns) == ["ok"] * turns


def holds_at_most(process: psutil.Process, fds: int) -> bool:
    return process.num_fds() <= fds


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_forty_sweeps_in_a_row_leave_the_process_as_it_was() -> None:
    for seed in range(5):  # create everything that is created only once
        tune(2, seed=seed)
    (process,) = running_templates()
    watched = (psutil.Process(), process)
    before = [(process.num_fds(), process.num_threads(), process.memory_info().rss) for process in watched]
    with nothing_is_left():
        for seed in range(5, 45):
            tune(1 + (seed % 5 == 0), seed=seed)  # two configs may have a final
    assert running_templates() == [process]
    for (fds, threads, rss), process in zip(before, watched, strict=True):
        # The template may still have been closing the last sweep's connection during the count.
        assert eventually(functools.partial(holds_at_most, process, fds))
        assert process.num_threads() == threads
        assert process.memory_info().rss - rss < 10e6


@pytest.mark.slow
def test_threads_tune_at_the_same_time() -> None:
    start = threading.Barrier(4)

    def work(seed: int) -> None:
        start.wait(200)
        tune(3, seed=seed)

    with nothing_is_left(), ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))


@pytest.mark.slow
def test_a_killed_template_harms_no_sweep_in_another_thread() -> None:
    start = threading.Barrier(2)

    def work(*space: tuple[str, str]) -> list[str]:
        start.wait(200)
        return ends(*space)

    good = ("good", "")
    with nothing_is_left(), ThreadPoolExecutor(2) as threads:
        hostile = threads.submit(work, good, ("kill_its_parent", "tracing"), good)
        peaceful = threads.submit(work, *[good] * 6)
        assert hostile.result(200) == ["ok", "lost", "ok"]
        assert peaceful.result(200) == ["ok"] * 6


DAEMONS = """
import multiprocessing, sys

def work(seed):
    import numpy as np
    sys.path.insert(0, {tests!r})
    import misdeeds
    result = misdeeds.kernel.tune(np.ones(8, np.float32), space=(("good", str(seed)),) * 2)
    sys.exit(sum(trial.outcome not in misdeeds.MEASURED for trial in result.trials))

if __name__ == "__main__":
    context = multiprocessing.get_context({method!r})
    children = [context.Process(target=work, args=(seed,), daemon=True) for seed in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(200)
    assert [child.exitcode for child in children] == [0, 0], [child.exitcode for child in children]
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    ["fork", "spawn", "forkserver"],
)
@pytest.mark.long
def test_daemonic_children_tune(tmp_path: Path, method: str) -> None:
    program = tmp_path / "daemons.py"
    program.write_text(DAEMONS.format(tests=str(SUPPORT), method=method), encoding="utf-8")
    python("-W", "error", program)
