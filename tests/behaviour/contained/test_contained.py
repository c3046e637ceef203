"""Whatever a config does, it gets an outcome, every other config is measured, and nothing stays behind."""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import bad_payloads
import jax
import misdeeds
import numpy as np
import psutil
import pytest
from aftermath import eventually, left_of, nothing_is_left, quiet_place, running_templates  # noqa: F401
from deadlines import haste
from helpers import ends, python
from misdeeds import MISDEEDS, kernel

import quarantune
from quarantune.host.process import in_sandbox
from quarantune.scheduler.routes import base, choosing
from quarantune.sweep import routes
from quarantune.values.trial import Trial

pytestmark = pytest.mark.usefixtures("quiet_place")
X = np.ones(8, np.float32)


# The outcome and words of the message of each misdeed: while tracing, and while running, when XLA wraps exceptions.
ENDS = {
    "fail": (("error", "ArithmeticError: this config is bad"), ("error", "this config is bad")),
    "fail_unspeakably": (
        ("error", "UnspeakableError.*cannot be printed"),
        ("crashed|error", "SIGABRT|UnspeakableError|no words|CpuCallback"),
    ),
    "fail_namelessly": (("error", "NamelessError.*cannot be printed: RuntimeError"), ("crashed|error", "")),
    "fail_without_a_class": (("error", "ClasslessError.*cannot be printed: RuntimeError"), ("crashed|error", "")),
    "fail_oddly": (("error", "OddError.*cannot be printed: its parts are of odd types"), ("crashed|error", "")),
    "exit_politely": (("error", "SystemExit: that is enough"), ("error", "SystemExit")),
    "interrupt": (("error", "KeyboardInterrupt: no terminal"), ("error", "KeyboardInterrupt")),
    "segfault": (("crashed", "SIGSEGV"), ("crashed", "SIGSEGV")),
    "abort": (("crashed", "SIGABRT"), ("crashed", "SIGABRT")),
    "kill_itself": (("crashed", "SIGKILL"), ("crashed", "SIGKILL")),
    "kill_its_group": (("crashed", "SIGKILL"), ("crashed", "SIGKILL")),
    "kill_its_siblings": (("crashed", "SIGKILL"), ("crashed", "SIGKILL")),
    "kill_its_parent": (("lost", "started it died"), ("lost", "started it died")),
    "stop_its_template": (("ok", ""), ("ok", "")),
    "stop_itself": (("timeout", "compiling.*longer than"), ("timeout", "measuring.*longer than")),
    "hang": (("timeout", "compiling.*longer than"), ("timeout", "measuring.*longer than")),
    "hang_holding_the_gil": (("timeout", "compiling.*longer than"), ("timeout", "measuring.*longer than")),
    "hang_deaf_to_signals": (("timeout", "compiling.*longer than"), ("timeout", "measuring.*longer than")),
    "starve": (("oom", r"held [\d.]+ MB.*limit of 200.00 MB"), ("oom", r"held [\d.]+ MB.*limit of 200.00 MB")),
    "starve_in_a_child": (("oom", r"held [\d.]+ [MG]B.*limit"), ("oom", r"held [\d.]+ [MG]B.*limit")),
    "starve_in_shared_memory": (("oom", r"held [\d.]+ [MG]B.*limit"), ("oom", r"held [\d.]+ [MG]B.*limit")),
    "starve_in_a_memfd": (("oom", r"held [\d.]+ [MG]B.*limit"), ("oom", r"held [\d.]+ [MG]B.*limit")),
    "hold_shared_memory": (("ok", ""), ("ok", "")),
    "hold_shared_memory_and_die": (("crashed", "SIGKILL"), ("crashed", "SIGKILL")),
    "hold_shared_memory_and_hang": (("timeout", "compiling.*longer than"), ("timeout", "measuring.*longer than")),
    "hold_shared_memory_and_exit": (("crashed", "code 0"), ("crashed", "code 0")),
    "starve_as_a_daemon": (("oom", r"held [\d.]+ [MG]B.*limit"), ("oom", r"held [\d.]+ [MG]B.*limit")),
    "share_data_with_a_pool": (("ok", ""), ("ok", "")),
    "become_another_program": (("crashed", "code 0 without a result"), ("crashed", "code 0 without a result")),
    "ask_for_too_much": (("error", "MemoryError"), ("error", "MemoryError")),
    "exit_with_0": (("crashed", "code 0 without a result"), ("crashed", "code 0 without a result")),
    "exit_with_7": (("crashed", "code 7 without a result"), ("crashed", "code 7 without a result")),
    "leave_a_child": (("ok", ""), ("ok", "")),
    "leave_a_daemon": (("ok", ""), ("ok", "")),
    "flood": (("ok", ""), ("ok", "")),
    "flood_forever": (("timeout", "compiling.*longer than"), ("timeout", "measuring.*longer than")),
    "flood_and_seal": (("ok", ""), ("ok", "")),
    "scribble": (("crashed", "damaged its own connection"), ("crashed", "damaged its own connection")),
    "close_everything": (("crashed", "without a result"), ("crashed", "without a result")),
    "replace_stdout": (("ok", ""), ("ok", "")),
    "move_away": (("ok", ""), ("ok", "")),
    "leave_threads": (("ok", ""), ("ok", "")),
    "hang_at_exit": (("ok", ""), ("ok", "")),
}


SLOW = (
    "abort",
    "exit_politely",
    "fail_namelessly",
    "fail_without_a_class",
    "flood_and_seal",
    "hang",
    "hang_deaf_to_signals",
    "hold_shared_memory",
    "hold_shared_memory_and_die",
    "kill_its_parent",
    "leave_a_child",
    "share_data_with_a_pool",
    "starve_as_a_daemon",
    "starve_in_a_child",
    "starve_in_shared_memory",
    "stop_itself",
)
"""Misdeeds of the slow tier only, because the quick tier has others of their kind."""
LONG = (
    "become_another_program",
    "exit_with_7",
    "flood_forever",
    "hold_shared_memory_and_exit",
    "hold_shared_memory_and_hang",
    "kill_its_group",
    "starve_in_a_memfd",
)
"""Misdeeds of the long tier only, because the other tiers have others of their kind."""


def marks(misdeed: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] * (misdeed in SLOW + LONG) + [pytest.mark.long] * (misdeed in LONG)


def tune(*space: tuple[str, str]) -> list[Trial]:
    return list(kernel.tune(X, space=space).trials)


GOOD = ("good", "")
ENLARGING = ("enlarge", "enlarge_mapped")


def test_every_misdeed_is_tested() -> None:
    assert set(ENDS) | {"bomb", *ENLARGING} == set(MISDEEDS)
    assert not {*SLOW, *LONG} - {*ENDS}


@pytest.mark.parametrize("misdeed", [pytest.param(name, marks=marks(name)) for name in ENDS])
def test_a_misdeed_gets_its_outcome_and_harms_no_other_config(misdeed: str) -> None:
    limits = haste() if ENDS[misdeed][0][0] == "timeout" else {}
    with nothing_is_left(), quarantune.settings(**limits):
        tracing, between, running, after = tune((misdeed, "tracing"), GOOD, (misdeed, "running"), GOOD)
    assert ends((between, after)) == ["ok"] * 2
    for trial, phase, (outcome, words) in zip((tracing, running), ("compile", "check"), ENDS[misdeed], strict=True):
        assert re.fullmatch(outcome, ends([trial])[0])
        if outcome != "ok":
            assert trial.phase == phase
            assert re.search(words, trial.message, re.DOTALL), trial.message
        assert len(trial.log_tail) <= 2000


@pytest.mark.parametrize("misdeed", ENLARGING)
def test_an_enlarged_result_file_harms_no_other_config(misdeed: str) -> None:
    before = psutil.Process().memory_info().rss
    with nothing_is_left():
        tracing, between, running, after = tune((misdeed, "tracing"), GOOD, (misdeed, "running"), GOOD)
    assert ends((between, after)) == ["ok"] * 2
    for trial in (tracing, running):
        assert trial.outcome == "ok" or "enlarged" in trial.message
    assert psutil.Process().memory_info().rss < before + (1 << 28)


def test_a_fork_bomb_leaves_no_process() -> None:
    with nothing_is_left(), quarantune.settings(memory_limit="8GB"):
        trials = tune(("bomb", "tracing"), GOOD, ("bomb", "running"), GOOD)
    assert ends(trials) == ["ok"] * 4


@pytest.mark.parametrize("when", ["tracing", "running"])
def test_a_crash_reports_the_python_stack(when: str) -> None:
    _, crashed = tune(GOOD, ("segfault", when))
    assert "Segmentation fault" in crashed.log_tail
    assert "in segfault" in crashed.log_tail


@pytest.mark.parametrize("misdeed", ["hang", pytest.param("hang_holding_the_gil", marks=pytest.mark.slow)])
@pytest.mark.parametrize("when", ["tracing", pytest.param("running", marks=pytest.mark.slow)])
def test_a_timeout_reports_the_python_stack(misdeed: str, when: str) -> None:
    with nothing_is_left(), quarantune.settings(**haste()):
        _, hung = tune(GOOD, (misdeed, when))
    assert hung.outcome == "timeout"
    assert f"in {misdeed}" in hung.log_tail


def test_an_error_keeps_its_traceback_and_the_output() -> None:
    failed, flooded = tune(("fail", "tracing"), ("flood", "tracing"))
    assert "in fail" in failed.log_tail
    assert flooded.log_tail.endswith("the last word\n")


def test_an_oom_trial_reports_its_peak_memory() -> None:
    _, starved = tune(GOOD, ("starve", "tracing"))
    assert starved.peak_memory_bytes is not None
    assert starved.peak_memory_bytes > 200e6


@pytest.mark.slow
def test_a_config_over_its_memory_share_is_tried_again_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes.machine, "available_memory_bytes", lambda: 10**9)  # a share is 225 MB

    @quarantune.autotune({"n": [1, 2, 3]}, rep=1, warmup=0, ref_fn=None)
    @functools.partial(jax.jit, static_argnames=["n"])
    def hold(x: jax.Array, n: int = 1) -> jax.Array:
        if n == 2 and in_sandbox():
            misdeeds.hold_400_mb()
        return x + n

    with nothing_is_left():
        trials = hold.tune(X).trials
    assert ends(trials) == ["ok"] * 3
    assert trials[1].peak_memory_bytes is not None
    assert trials[1].peak_memory_bytes > 300e6


@pytest.mark.long
@pytest.mark.slow
def test_misdeeds_are_contained_in_spawned_workers() -> None:
    with nothing_is_left(), quarantune.settings(start_method="spawn"):
        trials = tune(("segfault", "tracing"), ("leave_a_daemon", "running"), GOOD)
    assert ends(trials) == ["crashed", "ok", "ok"]


def test_the_error_lists_every_config_when_all_processes_die() -> None:
    with nothing_is_left(), pytest.raises(quarantune.TuningFailedError, match="All 2 configs failed") as caught:
        tune(("segfault", "tracing"), ("exit_with_0", "running"))
    assert [trial.outcome for trial in caught.value.trials] == ["crashed", "crashed"]
    assert "SIGSEGV" in str(caught.value)


class TestReusedWorkers:
    """One process measures four configs; it or another process compiles them."""

    @pytest.fixture(autouse=True, params=["apart", pytest.param("together", marks=pytest.mark.slow)])
    def route(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.setenv("QUARANTUNE_CONFIGS_PER_WORKER", "4")
        if request.param == "together":
            monkeypatch.setattr(choosing, "without_device", lambda *_, **__: None)
            monkeypatch.setattr(base, "_CPU_PARKED", 1)  # so that configs follow one another in one worker
            monkeypatch.setenv("QUARANTUNE_NUM_WORKERS", "1")
        return str(request.param)

    @pytest.fixture
    def tune(self, route: str) -> Callable[..., dict[str, Trial]]:
        def tune(*acts: str) -> dict[str, Trial]:
            result = bad_payloads.kernel.tune(X, space=acts)
            assert {trial.route for trial in result.trials} == {route}
            return {trial.config["act"]: trial for trial in result.trials}

        return tune

    def test_a_failure_in_a_poisoned_worker_is_tried_again_afresh(self, tune: Callable[..., dict[str, Trial]]) -> None:
        with nothing_is_left():
            trials = tune("good", "poison", "victim", "good again")
        assert ends(trials.values()) == ["ok"] * 4

    def test_a_crash_counts_only_when_repeated_in_a_fresh_worker(
        self, tune: Callable[..., dict[str, Trial]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        journal = tmp_path / "crashes"
        monkeypatch.setenv(bad_payloads.CRASHES, str(journal))
        with nothing_is_left():
            trials = tune("good", "segfault", "good again")
        assert ends(trials.values()) == ["ok", "crashed", "ok"]
        assert trials["segfault"].phase == "check"
        assert len(set(journal.read_text().split())) == 2  # in two processes

    @pytest.mark.parametrize(
        ("act", "outcome"),
        [
            pytest.param("hang", "timeout", marks=pytest.mark.slow),
            ("exit", "crashed"),
            ("fail", "error"),
            ("starve", "oom"),
        ],
    )
    def test_a_failure_in_a_reused_worker_affects_only_its_config(
        self, tune: Callable[..., dict[str, Trial]], act: str, outcome: str
    ) -> None:
        with nothing_is_left(), quarantune.settings(**haste() if act == "hang" else {}):
            trials = tune("good", act, "good again")
        assert ends(trials.values()) == ["ok", outcome, "ok"]

    @pytest.mark.parametrize(
        "misdeed", ["segfault", "leave_a_daemon", "close_everything", pytest.param("hang", marks=pytest.mark.slow)]
    )
    def test_misdeeds_during_tracing_are_contained(self, misdeed: str) -> None:
        (outcome, _), _ = ENDS[misdeed]
        with nothing_is_left(), quarantune.settings(**haste() if outcome == "timeout" else {}):
            trials = tune((misdeed, "tracing"), GOOD)
        assert ends(trials) == [outcome, "ok"]


def test_the_template_outlives_every_sweep() -> None:
    tune(GOOD)
    (process,) = running_templates()
    tune(GOOD, ("segfault", "tracing"))
    assert eventually(lambda: left_of(psutil.Process()) == [process.pid])


NAMES = """
import glob, multiprocessing, os, sys
import multiprocessing.util
import numpy as np
import quarantune

def hold(x, method, place, n=1):
    global held
    context = multiprocessing.get_context(method)
    held = [context.Lock(), context.Queue(), context.Value("i"), context.Manager()]
    child = context.Process(target=hold_in_child, args=(place,))
    child.start()
    child.join()
    note([held[0]._semlock.name, held[1]._rlock._semlock.name], place)
    if n == 2:
        os.kill(os.getpid(), 9)
    return x

def hold_in_child(place):
    held = multiprocessing.get_context("spawn").Lock()
    note([held._semlock.name], place)
    os._exit(0)

def note(names, place):
    paths = [f"/dev/shm/sem.{name[1:]}" for name in names if name]
    paths.append(multiprocessing.util.get_temp_dir())
    with open(place, "a") as file:
        file.writelines(f"{path}\\n" for path in paths)

if __name__ == "__main__":
    result = quarantune.AutoTuner(hold, {"n": [2, 3]}, warmup=0, rep=1).run(np.ones(3), sys.argv[1], sys.argv[2])
    print([trial.outcome.value for trial in result.trials])
"""


@pytest.mark.parametrize(
    "method",
    [
        pytest.param("fork", marks=pytest.mark.slow),
        pytest.param("spawn", marks=pytest.mark.long),
        pytest.param("forkserver", marks=pytest.mark.long),
    ],
)
def test_named_semaphores_and_sockets_of_configs_are_removed(method: str, tmp_path: Path) -> None:
    (script := tmp_path / "names.py").write_text(NAMES)
    made = tmp_path / "made"
    output = python(script, method, made, QUARANTUNE_CACHE_DIR=str(tmp_path / "cache"), TMPDIR=str(tmp_path))
    assert output.splitlines()[-1] == "['crashed', 'ok']"
    names = made.read_text().split()
    assert len(names) > 6
    assert [name for name in names if os.path.exists(name)] == []
    assert list(tmp_path.glob("pymp-*")) == []


KILLS_ITS_OWNER = NAMES.replace("import glob,", "import time,").replace(
    "os.getpid(), 9)", "int(os.environ['OWNER']), 9)"
)
KILLS_ITS_OWNER = KILLS_ITS_OWNER.replace("    return x", "        time.sleep(60)\n    return x", 1)


@pytest.mark.long
@pytest.mark.slow
def test_a_killed_program_leaves_no_semaphores_or_sockets(tmp_path: Path) -> None:
    (script := tmp_path / "killed.py").write_text(
        f"import os\nos.environ.setdefault('OWNER', str(os.getpid()))\n{KILLS_ITS_OWNER}"
    )
    made = tmp_path / "made"
    environ = {**os.environ, "QUARANTUNE_CACHE_DIR": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, script, "fork", made], env=environ, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    names = made.read_text().split()
    assert len(names) > 3
    assert eventually(lambda: not any(map(os.path.exists, names)))
