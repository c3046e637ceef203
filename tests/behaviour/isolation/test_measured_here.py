"""`ISOLATION=compile` compiles configs in workers and measures them in this process, which may hold the only TPU."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import logging
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aftermath import nothing_is_left, quiet_place  # noqa: F401
from helpers import child_environ, deadline_s, ends, isolated, run_python
from misdeeds import kernel

import quarantune
from quarantune.cache import journal
from quarantune.devices import discovery
from quarantune.devices.discovery import Device
from quarantune.jax_internals import jax_backends
from quarantune.measure import finals
from quarantune.sweep import sweep
from quarantune.sweep.ledger import Ledger
from quarantune.sweep.limits import SweepLimits, isolation_of
from quarantune.sweep.request import Problem, SweepRequest, Swept
from quarantune.sweep.this_process import Watched
from quarantune.transport import executable
from quarantune.tuning import claim_and_journal
from quarantune.tuning.claim_and_journal import ended_processes
from quarantune.values.blocks import current
from quarantune.values.configs import Config
from quarantune.values.options import Options
from quarantune.values.settings import Isolation
from quarantune.values.trial import Outcome, Route, Trial

X = np.ones(8, np.float32)
GOOD = ("good", "")
in_this_process = quarantune.settings(isolation="compile")


@pytest.mark.parametrize(
    ("setting", "platform", "is_held", "is_jitted", "chosen"),
    [
        ("auto", "cpu", True, True, "process"),
        ("auto", "cuda", True, True, "process"),
        ("auto", "tpu", False, True, "process"),
        ("auto", "tpu", True, True, "compile"),
        ("auto", "tpu", True, False, "none"),
        ("compile", "cpu", False, True, "compile"),
        ("compile", "cuda", True, False, "none"),
        ("process", "tpu", True, True, "process"),
        ("none", "cpu", False, True, "none"),
    ],
)
def test_the_isolation_follows_the_platform_and_its_holder(
    setting: str, platform: str, is_held: bool, is_jitted: bool, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax_backends, "backends_initialized", lambda: is_held)
    fn: Callable[..., Any] = jax.jit(jnp.negative) if is_jitted else lambda x: -x
    assert isolation_of(dataclasses.replace(current(), isolation=setting), platform, fn) is Isolation(chosen)


def test_a_watchdog_reports_overdue_work_repeatedly() -> None:
    reports: list[float] = []
    twice = threading.Event()

    def report(taken_s: float) -> None:
        reports.append(taken_s)
        if len(reports) == 2:
            twice.set()

    threads = threading.active_count()
    with Watched(100.0, report) as short:
        pass
    with Watched(0.1, report) as watched:
        assert twice.wait(60)
    assert (short.is_overdue, watched.is_overdue) == (False, True)
    assert 0.1 <= reports[0] < reports[1]
    assert reports[1] >= 0.2
    assert threading.active_count() == threads


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("quiet_place")
def test_misdeeds_while_compiling_end_as_with_workers_alone(tmp_path: Path) -> None:
    space = (GOOD, ("segfault", "tracing"), ("hang", "tracing"), ("starve", "tracing"), ("exit_with_0", "tracing"))
    space += (("fail", "tracing"), ("leave_a_daemon", "tracing"), GOOD)
    # Caches are separate, because a config that failed to compile is not compiled again.
    deadline = deadline_s(5.0)
    with quarantune.settings(compile_timeout=deadline, isolation="process", cache_dir=tmp_path / "apart"):
        apart = kernel.tune(X, space=space).trials
    jnp.ones(3).block_until_ready()  # this process holds its device
    with nothing_is_left(), quarantune.settings(compile_timeout=deadline), in_this_process:
        here = kernel.tune(X, space=space).trials
    assert ends(here) == ends(apart) == ["ok", "crashed", "timeout", "oom", "crashed", "error", "ok", "ok"]
    assert [trial.phase for trial in here[1:6]] == [trial.phase for trial in apart[1:6]]
    for ours, theirs in zip(here[1:6], apart[1:6], strict=True):
        # The two saw different memory use.
        assert ours.message.split(" held ")[0] == theirs.message.split(" held ")[0]
    assert {trial.route for trial in here if trial.time_ms} == {Route.COMPILED_APART}


@quarantune.autotune({"n": [200, 1, 2, 3]}, ref_fn="defaults")
@functools.partial(jax.jit, static_argnames=["n", "unused"])
def product(x: jax.Array, n: int = 200, unused: int = 0) -> jax.Array:
    """Takes longer with n; 2 is wrong, and 3 has the program of 1."""
    n, is_wrong = (1, False) if n == 3 else (n, n == 2)
    y = jax.lax.fori_loop(0, n, lambda _, y: y @ x, x)
    return jnp.where(jnp.isnan(y), y, 1.0) + is_wrong


@pytest.mark.slow
def test_results_are_the_same_as_with_workers_alone(tmp_path: Path) -> None:
    x = jnp.eye(256)
    entries, results = [], []
    for isolation in ("process", "compile"):
        with quarantune.settings(isolation=isolation, cache_dir=tmp_path / isolation):
            results.append(product.tune(x))
        (file,) = (tmp_path / isolation).glob("*product.json")
        (of_device,) = (value for value in json.loads(file.read_text()).values() if isinstance(value, dict))
        entries.append(of_device)
    for result in results:
        assert ends(result.trials) == ["ok", "ok", "wrong", "ok"]
        assert result.best_config == {"n": 1}
        # Either of the two compiles first.
        assert [index for index in (1, 3) if "the same program as" in result.trials[index].message] in ([1], [3])
    assert results[0].trials[2].message == results[1].trials[2].message
    (of_workers,), (of_both,) = (list(entry.items()) for entry in entries)
    assert of_workers[0] == of_both[0]
    both = of_workers, of_both
    for name in of_workers[1].keys() | of_both[1].keys():
        if name not in ("time_ms", "default_time_ms", "speedup_interval", "created", "trials", "samples"):
            mine, theirs = ({**entry[1][name], "time_ms": 0} if name == "exact" else entry[1][name] for entry in both)
            assert mine == theirs
    # Both find the result of either.
    with quarantune.settings(cache_dir=tmp_path / "compile", isolation="process", on_miss="error"):
        assert product.lookup(x) == {"n": 1}


@pytest.mark.slow
def test_a_config_is_timed_and_checked_with_its_gradient() -> None:
    @jax.custom_vjp
    def bad(x: jax.Array) -> jax.Array:
        return jnp.sin(x)

    bad.defvjp(lambda x: (jnp.sin(x), None), lambda _, g: (2 * g,))

    @quarantune.autotune({"kind": ["good", "bad gradient", "bad"]}, time_grad=True)
    @functools.partial(jax.jit, static_argnames=["kind"])
    def sine(x: jax.Array, kind: str = "good") -> jax.Array:
        return {"good": jnp.sin, "bad gradient": bad, "bad": jnp.cos}[kind](x)

    with in_this_process:
        result = sine.tune(jnp.linspace(0, 1, 64))
    assert ends(result.trials) == ["ok", "wrong", "wrong"]
    assert {trial.route for trial in result.trials} == {Route.COMPILED_APART}


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Pair:
    """A pytree class; programs do not name it."""

    first: jax.Array
    second: jax.Array


@pytest.mark.slow
def test_arguments_of_every_kind_are_measured_here() -> None:
    @quarantune.autotune({"n": [1, 2]}, time_grad=True, rep=3)
    @functools.partial(jax.jit, static_argnames=["n", "kind"], donate_argnums=[0])
    def structured(pair: Pair, key: jax.Array, *, kind: str, n: int = 1) -> Any:
        noise = jax.random.normal(key, pair.first.shape) if kind == "noise" else 0
        return {"pair": Pair(pair.first + noise, pair.second * n / n)}, [pair.first.sum(), None]

    with in_this_process:
        result = structured.tune(Pair(X, jnp.asarray(X)), jax.random.key(0), kind="noise")
    assert ends(result.trials) == ["ok", "ok"], result.table()
    assert {trial.route for trial in result.trials} == {Route.COMPILED_APART}


@pytest.mark.slow
def test_a_program_that_cannot_leave_its_worker_is_compiled_here(caplog: pytest.LogCaptureFixture) -> None:
    @quarantune.autotune({"n": [1, 2, 3]})
    @functools.partial(jax.jit, static_argnames=["n"])
    def calls_back(x: jax.Array, n: int = 1) -> jax.Array:
        def fails(value: Any) -> Any:
            assert n != 2, "two is bad"
            return value

        return jax.pure_callback(fails, jax.ShapeDtypeStruct(x.shape, x.dtype), x) + 0 * n

    with in_this_process, caplog.at_level(logging.WARNING, "quarantune"):
        result = calls_back.tune(jnp.ones(8))
    assert ends(result.trials) == ["ok", "error", "ok"]
    assert "two is bad" in result.trials[1].message
    assert {trial.route for trial in result.trials} == {Route.IN_PROCESS}
    assert caplog.text.count("is compiled in this process, without containment") == 1


def last_records(directory: Path) -> dict[int, list[str]]:
    """Returns the outcomes for each `n` in the journals of a cache directory, in order."""
    found: dict[int, list[str]] = {}
    for path in directory.glob("*.trials/*.jsonl"):
        for record in journal.read(path):
            found.setdefault(record["trial"]["config"]["n"], []).append(record["trial"]["outcome"])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["compile", "none"])
def test_control_c_in_a_host_callback_blames_no_config(isolation: str, tmp_path: Path) -> None:
    def press(value: Any) -> Any:
        raise KeyboardInterrupt

    @functools.partial(jax.jit, static_argnames=["n"])
    def pressed(x: jax.Array, n: int = 1) -> jax.Array:
        return jax.pure_callback(press, jax.ShapeDtypeStruct(x.shape, x.dtype), x) + 0 * n

    tuner = quarantune.AutoTuner(pressed, {"n": [1, 2]}, ref_fn=None)
    with quarantune.settings(isolation=isolation, cache_dir=tmp_path), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # configs run in this process
        with pytest.raises(KeyboardInterrupt):
            tuner.run(jnp.ones(8))
    assert list(last_records(tmp_path).values()) == ([["lost", "not_run"]] if isolation == "compile" else [])


def test_a_plain_callable_runs_in_this_process_with_a_warning() -> None:
    tuner = quarantune.AutoTuner(lambda x, n: x * n, {"n": [1, 2]}, ref_fn=None, rep=2)
    with in_this_process, pytest.warns(RuntimeWarning, match=r"ISOLATION=compile.*has no jax.jit.*in this process"):
        result = tuner.run(np.ones(4))
    assert {trial.route for trial in result.trials} == {Route.IN_PROCESS}


class TracelessError(Exception):
    """An exception without a readable traceback."""

    @property
    def __traceback__(self) -> Any:
        raise RuntimeError("no trace")

    @__traceback__.setter
    def __traceback__(self, trace: object) -> None: ...


def test_an_exception_without_a_traceback_ends_only_its_config() -> None:
    def hides(x: Any, n: int = 1) -> Any:
        if n == 2:
            raise TracelessError
        return x + n

    with isolated("none"):
        result = quarantune.AutoTuner(hides, [{"n": 1}, {"n": 2}], ref_fn=None, rep=1).run(X)
    assert ends(result.trials) == ["ok", "error"]


@pytest.mark.long
@pytest.mark.slow
def test_a_hang_or_crash_here_ends_only_one_sweep(tmp_path: Path) -> None:
    program = tmp_path / "hangs.py"
    program.write_text(
        textwrap.dedent(
            """
            import ctypes, functools, jax, jax.numpy as jnp, quarantune

            def crash(x):
                ctypes.memset(0, 1, 1)

            @quarantune.autotune({"n": [0, 1, 2, 3]}, ref_fn=None, rep=2)
            @functools.partial(jax.jit, static_argnames=["n"])
            def loop(x, n: int = 0):
                if n == 2:
                    return jax.pure_callback(crash, x, x)
                return jax.lax.while_loop(lambda y: (y.sum() >= 0) & (n == 1), lambda y: y + n, x)

            loop(jnp.ones(8))
            """
        )
    )
    changes = {"QUARANTUNE_ISOLATION": "compile", "QUARANTUNE_TIMEOUT": str(deadline_s(2.0)), "JAX_PLATFORMS": "cpu"}
    environ = child_environ(**changes)
    with subprocess.Popen([sys.executable, str(program)], env=environ, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        reports = (line for line in process.stderr if "which cannot end it" in line)
        first, second = next(reports), next(reports)  # the second report is of the same work
        process.kill()
    assert "the config n=1 has run for" in first
    assert "the config n=1 has run for" in second
    # The next process leaves it out and has another problem. The process after that runs the suspect last.
    ended = []
    for _ in range(3):
        done = run_python(program, **changes)
        ended.append(done.returncode)
        assert "n=1" not in done.stderr
    assert ended == [-signal.SIGSEGV, -signal.SIGSEGV, 0], done.stderr
    (entry,) = tmp_path.rglob("*loop.json")
    assert '"crashed": 1' in entry.read_text()
    assert '"timeout": 1' in entry.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("last_compiled", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_crash_here_is_blamed_on_the_config_that_runs_alone(last_compiled: int, tmp_path: Path) -> None:
    seen: list[dict[int, list[str]]] = []

    @functools.partial(jax.jit, static_argnames=["n"])
    def powers(x: jax.Array, *, n: int) -> jax.Array:
        if n == last_compiled:
            time.sleep(1)

        def look(y: Any) -> Any:
            seen.append(last_records(tmp_path))
            return y

        # 0 runs last, when one config has been compared with the others and 300 waits for further runs.
        y = jax.pure_callback(look, jax.ShapeDtypeStruct(x.shape, x.dtype), x) if n == 0 else x
        return jax.lax.fori_loop(0, n, lambda _, y: jnp.sin(y @ y), y) * 0

    with in_this_process, quarantune.settings(cache_dir=tmp_path, num_workers=3):
        result = quarantune.AutoTuner(powers, {"n": [1, 300, 0]}, rep=2).run(jnp.ones((400, 400)))
    assert ends(result.trials) == ["ok", "ok", "ok"], result.table()
    assert {n: outcomes[-1] for n, outcomes in seen[0].items()} == {300: "not_run", 1: "not_run", 0: "lost"}
    assert {n: outcomes[-1] for n, outcomes in last_records(tmp_path).items()} == {300: "ok", 1: "ok", 0: "ok"}


def test_a_config_is_blamed_after_it_ended_two_processes() -> None:
    def record(outcome: Outcome) -> Trial:
        return Trial(config={}, outcome=outcome, route=Route.COMPILED_APART)

    lost, paused = record(Outcome.LOST), record(Outcome.NOT_RUN)
    for records, ended in (
        ([lost], 1),
        ([lost, paused], 0),
        ([lost, paused, lost, paused], 0),
        ([lost, paused, lost, lost, paused], 1),
        ([lost, paused, lost, lost, paused, lost], 2),
        ([lost, lost], 2),
        ([lost, record(Outcome.OK), lost], 1),
    ):
        assert functools.reduce(ended_processes, records, 0) == ended, records
    assert claim_and_journal._FATAL == 2


@pytest.mark.long
@pytest.mark.slow
def test_configs_compared_in_several_sweeps_have_not_crashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Earlier configs are in every final, however noisy the machine is.
    monkeypatch.setattr(finals, "MARGINS", {"wall": 1e9})

    @functools.partial(jax.jit, static_argnames=["n"])
    def shifted(x: jax.Array, n: int = 1) -> jax.Array:
        return x + n - n

    x = jnp.ones(8)
    with in_this_process, quarantune.settings(cache_dir=tmp_path):
        for most in (3, 4, 5, 6):
            tuner = quarantune.AutoTuner(shifted, {"n": list(range(1, most))}, rep=2)
            trials = tuner.run(x).trials
    assert ends(trials) == ["ok"] * 5
    assert "lost" in last_records(tmp_path)[1][1:]  # the final loaded it again


def holding_a_tpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[dict[int, Trial], Swept]]:
    """Makes this process seem to hold a TPU; returns a function that sweeps on it."""
    monkeypatch.setattr(jax_backends, "backends_initialized", lambda: True)
    device = Device("tpu", "TPU v5 lite")
    monkeypatch.setattr(discovery, "devices_and_target", lambda *_: ([device], None))

    def run(configs: dict[int, Config], **more: Any) -> tuple[dict[int, Trial], Swept]:
        problem = Problem(
            fn=kernel.__wrapped__, name="zoo", args=(X,), kwargs={}, platform="tpu", device_kind="TPU v5 lite"
        )
        options = Options(ref_fn=None, compile_timeout=60)
        limits, ledger = SweepLimits.of(options, current()), Ledger()
        request = SweepRequest(
            problem=problem, options=options, settings=current(), limits=limits, ledger=ledger, **more
        )
        swept = sweep.run(request, configs)
        return dict(ledger.trials), swept

    return run


def test_workers_refuse_to_measure_on_a_tpu_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    run = holding_a_tpu(monkeypatch)
    with quarantune.settings(isolation="process"), pytest.raises(ValueError, match="set QUARANTUNE_ISOLATION=compile"):
        run({0: {}})


@pytest.mark.target
@pytest.mark.timeout(300)
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the `tpu` extra")
@pytest.mark.usefixtures("quiet_place")
def test_workers_compile_for_a_tpu_that_this_process_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    run = holding_a_tpu(monkeypatch)
    modes = ["good", "segfault", "exit_with_0", "fail", "good"]
    with nothing_is_left():
        configs = {turn: {"mode": mode, "when": "tracing", "turn": turn} for turn, mode in enumerate(modes)}
        trials, swept = run(configs, compile_only=True)
    assert ends(trials[turn] for turn in range(5)) == ["ok", "crashed", "crashed", "error", "ok"]
    assert {trial.phase for trial in trials.values()} == {"compile"}
    programs = swept.executables
    assert programs.keys() == {0, 4}
    args, output = jax.tree.structure(((0,), {})), jax.tree.structure(0)
    for program in programs.values():  # data for a device that this process lacks
        read = executable.from_data(program)
        with pytest.raises(ValueError, match="cannot be loaded"):
            read.with_trees(args, output)


def test_a_function_that_cannot_travel_runs_without_isolation() -> None:
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    @quarantune.autotune({"n": [1, 2]}, rep=1, warmup=0)
    @functools.partial(jax.jit, static_argnames=["n", "across"])
    def total(x: Any, across: Any, n: int = 1) -> Any:
        def shard(part: Any) -> Any:
            return jax.lax.psum(part * 2 * n / n, "x")

        assert across == mesh
        return jax.shard_map(shard, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P())(x)

    with isolated("none"):
        assert ends(total.tune(jnp.ones(8), mesh).trials) == ["ok", "ok"]
        np.testing.assert_array_equal(total(jnp.ones(8), mesh), 2 * np.ones(8))
