"""A first run that takes too long for its config to win is stopped; only its own time counts."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aftermath import nothing_is_left, quiet_place  # noqa: F401
from rivals import on_one_cpu_with_a_rival

import quarantune
from quarantune.host.process import in_sandbox
from quarantune.host.waits import Watch, run_limit
from quarantune.values.trial import Outcome

X = np.ones(8, np.float32)


def limited(work: str, limit_ms: float) -> subprocess.Popen[str]:
    """Starts a process that does some work under a limit, and then prints `done`."""
    code = f"""
        import sys, time
        from quarantune.host.waits import run_limit

        def spin(cpu_s):
            ends = time.thread_time() + cpu_s
            while time.thread_time() < ends:
                pass

        def report(taken):
            print(f"stopped {{taken.whole:.0f}} {{taken.cpu:.0f}}")

        print("begins", flush=True)
        with run_limit({limit_ms}, report):
            {work}
        print("done")
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "begins\n"
    return process


def said(process: subprocess.Popen[str]) -> list[str]:
    told, errors = process.communicate(timeout=280)
    assert (process.returncode, errors) == (0, "")
    return told.split()


def test_a_run_that_takes_too_long_ends_its_process() -> None:
    word, whole_ms, cpu_ms = said(limited("spin(50)", 300))
    assert word == "stopped"
    assert 300 <= float(cpu_ms) <= float(whole_ms) < 20_000


def test_a_run_that_ends_in_time_is_left_alone() -> None:
    assert said(limited("spin(0.05)", 30_000)) == ["done"]


def test_a_run_is_not_watched_if_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with run_limit(0.0, lambda taken: pytest.fail("it was watched")):
        pass


@pytest.mark.slow
def test_time_while_the_process_is_stopped_does_not_count() -> None:
    process = limited("time.sleep(0.3); spin(0.1)", 2_000)
    process.send_signal(signal.SIGSTOP)
    threading.Event().wait(3.0)  # no event marks the end of this wait
    process.send_signal(signal.SIGCONT)
    assert said(process) == ["done"]


@pytest.mark.slow
def test_waits_for_a_cpu_do_not_count() -> None:
    with Watch(spins=False) as watch:
        if not watch.read():
            pytest.skip("this system does not show how long threads wait for a CPU")
    with on_one_cpu_with_a_rival():
        process = limited("spin(1.0)", 1_600)  # twice that by the clock
        assert said(process) == ["done"]


@pytest.mark.long
@pytest.mark.slow
def test_a_run_is_stopped_however_many_rivals_its_cpu_has() -> None:
    with on_one_cpu_with_a_rival(3):
        assert said(limited("spin(10)", 300))[0] == "stopped"


@quarantune.autotune({"n": [20, 2_000_000_000, 21, 22]}, rep=2, timeout=100.0)
@functools.partial(jax.jit, static_argnames=["n"])
def counted(x: Any, n: int = 20) -> Any:
    """Returns `x`; a step takes about a nanosecond."""
    return x + 0 * jax.lax.fori_loop(0, n, lambda _, y: y * 0.5 + 1, x)


@pytest.mark.usefixtures("quiet_place")
def test_a_hopeless_first_run_ends_early_and_leaves_nothing() -> None:
    with nothing_is_left():
        result = counted.tune(X)
    slow = result.trials[1]
    assert (slow.outcome.value, slow.phase) == ("slow", "check"), result.table()
    assert "its first run was stopped, because another config is clearly faster" in slow.message
    assert slow.time_ms is not None
    assert slow.time_ms >= 200
    assert {trial.outcome.value for index, trial in enumerate(result.trials) if index != 1} <= {"ok", "slow"}
    assert result.best_config["n"] < 100


@pytest.mark.long
@pytest.mark.slow
def test_the_defaults_run_to_their_end_however_slow() -> None:
    def slow_by_default(x: Any, n: int = 600_000_000) -> Any:
        return x + 0 * jax.lax.fori_loop(0, n, lambda _, y: y * 0.5 + 1, x)

    fn = jax.jit(slow_by_default, static_argnames=["n"])
    configs = [{"n": 20}, {"n": 600_000_000}, {"n": 21}]  # the one in the middle runs last
    result = quarantune.AutoTuner(fn, configs, rep=1, ref_fn=lambda x: x, name="slow_by_default").run(X)
    assert result.best_config["n"] < 100
    assert "was stopped" not in result.trials[1].message, result.table()


@pytest.mark.parametrize("times", [200, 20_000], ids=["measured", "ruled_out_at_once"])
def test_slow_defaults_are_compiled_once(tmp_path: Path, times: int) -> None:
    """The final times them however slow they are. Its worker loads the program that the first run had."""
    traces = tmp_path / "traces"

    @quarantune.autotune({"n": [1, times]}, ref_fn=None, warmup=0, rep=3, name="looped")
    @functools.partial(jax.jit, static_argnames=["n"])
    def looped(x: Any, n: int = times) -> Any:
        if n == times and in_sandbox():
            with traces.open("a") as file:
                file.write(f"{os.getpid()}\n")
        return jax.lax.fori_loop(0, n, lambda _, y: jnp.sin(y) + x, x)

    result = looped.tune(np.ones(1024, np.float32))
    assert [trial.outcome for trial in result.trials] == [Outcome.OK, Outcome.OK]  # that of the final
    assert result.is_finalist(result.trials[1])
    assert len({*traces.read_text().split()}) == 1, "another worker has traced them again"
