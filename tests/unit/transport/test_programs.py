"""Equal programs are recognised beyond their text, load without harm, and are judged by their first run."""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import os
import re
import socket
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aftermath import nothing_is_left, quiet_place  # noqa: F401
from helpers import ends, python
from jax.experimental.xla_metadata import set_xla_metadata

import quarantune
from quarantune.sandbox import messages, spool
from quarantune.sandbox.wire import Connection
from quarantune.scheduler.routes import apart
from quarantune.scheduler.workers import Worker, Workers, WorkerState
from quarantune.transport import payload, programs
from quarantune.transport.program_text import ProgramText
from quarantune.worker.arguments import BenchOptions
from quarantune.worker.bench import Bench
from quarantune.worker.main import WorkerRunner

pytestmark = pytest.mark.usefixtures("two_slots")

X = np.ones(8, np.float32)


def tuner(fn: Callable[..., Any], configs: list[Any], **options: Any) -> quarantune.AutoTuner:
    """Returns a tuner of `fn(*args, do=...)` over `configs`."""
    jitted = functools.partial(jax.jit, static_argnames=["do"])(fn)
    space = [{"do": config} for config in configs]
    return quarantune.AutoTuner(jitted, space, **{"warmup": 1, "rep": 3, "ref_fn": None, **options})


@pytest.mark.parametrize("impls", [["rbg", "unsafe_rbg"], pytest.param(["unsafe_rbg", "rbg"], marks=pytest.mark.slow)])
def test_programs_with_other_kinds_of_keys_are_different(impls: list[str]) -> None:
    def keys(data: Any, do: str = "") -> Any:
        return jax.random.wrap_key_data(data + jnp.uint32(1), impl=do)

    result = tuner(keys, impls, ref_fn=functools.partial(keys, do="rbg")).run(jnp.zeros(4, jnp.uint32))
    assert {trial.config["do"]: trial.outcome.value for trial in result.trials} == {"rbg": "ok", "unsafe_rbg": "wrong"}


def test_programs_with_weak_and_strong_outputs_are_different() -> None:
    @functools.partial(jax.jit, static_argnames=["weak"])
    def two(x: Any, weak: bool = False) -> Any:
        return x + 1, 2.0 if weak else jnp.float32(2.0)

    weak, strong = quarantune.compile_configs(two, [{"weak": True}, {"weak": False}], X)
    assert weak is not None
    assert strong is not None
    assert (weak(X)[1].weak_type, strong(X)[1].weak_type) == (True, False)


def noted(x: Any, do: str = "") -> Any:
    with set_xla_metadata(xla_metadata_payload=f'{{"config": "{do}"}}', inlineable="false"):
        return jax.lax.fori_loop(0, 2, lambda _, y: jnp.sin(y) * 2, x)


def test_programs_that_differ_in_notes_for_profilers_are_one() -> None:
    result = tuner(noted, ["one", "another"], ref_fn=noted).run(X)
    assert any("the same program as" in trial.message for trial in result.trials)


def test_notes_for_profilers_are_removed_and_nothing_else() -> None:
    lowered = jax.jit(noted).lower(X)
    text = lowered.as_text()
    programs.remove_notes(lowered)
    assert lowered.as_text() == text.replace(r', xla_metadata_payload = "{\22config\22: \22\22}"', "") != text
    np.testing.assert_array_equal(lowered.compile()(X), noted(X))


@pytest.mark.parametrize("target", ["__cudnn$fmhaSoftmax", "mosaic_gpu_v2"])
def test_a_program_that_calls_cudnn_differs_from_others(target: str) -> None:
    call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(X.shape, X.dtype), has_side_effect=True)
    text = jax.jit(call).trace(X).lower(lowering_platforms=("cuda",)).as_text()
    assert target in text
    assert programs.calls_cudnn(text) == target.startswith("__cudnn$")


def test_programs_whose_outputs_hold_functions_are_different() -> None:
    def identity(rate: float) -> str:
        def step(x: Any) -> Any:
            return x, jax.tree_util.Partial(lambda y: y - rate)

        traced = jax.jit(step).trace(X)
        lowered = traced.lower()
        return programs.identity(lowered, lowered.as_text(), ProgramText(traced.jaxpr), {})

    assert identity(0.1) == identity(0.1) != identity(0.2)


@pytest.mark.slow
def test_a_function_that_needs_its_device_gets_it_at_once_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("QUARANTUNE_CONFIGS_PER_WORKER", "4")
    caplog.set_level(logging.INFO, "quarantune")

    def called_back(x: Any, do: int = 1) -> Any:
        return jax.pure_callback(lambda value: np.asarray(value * 1.0), x, x) * do

    calls_back = tuner(called_back, [1, 2])
    for size, times in ((8, 1), (16, 1)):
        result = calls_back.run(jnp.ones(size))
        assert {trial.route for trial in result.trials} == {"together"}
        assert len([text for text in caplog.messages if "another route" in text]) == times


# --- loading -------------------------------------------------------------------------------------


@pytest.fixture(params=["1", "4"], ids=["together", "apart"])
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets one worker compile and measure, or two workers."""
    monkeypatch.setenv("QUARANTUNE_CONFIGS_PER_WORKER", request.param)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("route")
def test_programs_that_call_lapack_are_tuned_and_compared(caplog: pytest.LogCaptureFixture) -> None:
    def factor(x: Any, do: int = 1) -> Any:
        return jnp.linalg.cholesky(x) * do

    with caplog.at_level(logging.WARNING):
        assert ends(tuner(factor, [1, 2]).run(4 * jnp.eye(8)).trials) == ["ok", "ok"]
    assert "could not be compared" not in caplog.text


def factor_by_hand(x: Any, do: int = 1) -> Any:
    """Calls a function of a library that the process loads only here, like a user's library."""
    from jaxlib.cpu import _lapack

    _lapack.initialize()
    jax.ffi.register_ffi_target("factor_by_hand", _lapack.registrations()["lapack_spotrf_ffi"], platform="cpu")
    result = (jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((), jnp.int32))
    call = jax.ffi.ffi_call("factor_by_hand", result, input_layouts=[(0, 1)], output_layouts=[(0, 1), ()])
    return call(x * do, uplo=np.uint8(ord("L")))[0]


@pytest.mark.slow
@pytest.mark.usefixtures("route")
def test_programs_that_call_what_tracing_registers_are_tuned(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert ends(tuner(factor_by_hand, [1, 2]).run(4 * jnp.eye(8)).trials) == ["ok", "ok"]
    assert "could not be compared" not in caplog.text


# --- workers with many configs ------------------------------------------------------------------------

_traced: list[str] = []
"""Configs that this process has traced; each worker has its list."""


def refuse(x: Any, do: str = "") -> Any:
    with open(os.environ["PIDS"], "a") as pids:
        print(do, os.getpid(), file=pids)
    print(f"tracing {do}")
    _traced.append(do)
    if do.startswith("refuse"):
        raise ValueError("not this one")
    if do == "first only" and len(_traced) > 1:
        raise ValueError("not after another one")
    return x + 1


@pytest.mark.usefixtures("quiet_place")
def test_a_worker_survives_an_exception_a_fresh_one_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A CPU would give each config a new compile worker.
    monkeypatch.setattr(apart, "compiles_apart", lambda given: 100)
    monkeypatch.setenv("QUARANTUNE_CONFIGS_PER_WORKER", "100")
    monkeypatch.setenv("QUARANTUNE_NUM_WORKERS", "1")  # one at a time
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    configs = ["good", *(f"refuse {i}" for i in range(6)), "first only", "good too"]
    with nothing_is_left():
        trials = tuner(refuse, configs).run(X).trials
    assert ends(trials) == ["ok", *["error"] * 6, "ok", "ok"]
    assert all("not this one" in trial.log_tail for trial in trials[1:7])
    for trial in trials:
        assert set(re.findall("tracing (.*)", trial.log_tail)) <= {trial.config["do"]}, "another config's output"
    pids = collections.defaultdict(set)
    for line in (tmp_path / "pids").read_text().splitlines():
        config, pid = line.rsplit(" ", 1)  # the defaults have an empty name
        pids[config].add(pid)
    used = set.union(*(pids[f"refuse {i}"] for i in range(6)))
    assert len(used) <= 4, "workers that had raised the exception took most configs"


def misread(x: Any, do: str = "") -> Any:
    x = jnp.linalg.cholesky(x)
    if not do.startswith("fail"):
        return x
    result = (jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((), jnp.int32))
    return jax.ffi.ffi_call("lapack_spotrf_ffi", result)(x * int(do[-1]))[0]  # this call lacks its attribute


@pytest.mark.slow
@pytest.mark.usefixtures("quiet_place")
def test_a_measuring_worker_survives_an_error_repeated_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUARANTUNE_CONFIGS_PER_WORKER", "100")
    started: list[WorkerState] = []
    start = Workers.start

    def noted(self: Workers, task: Any, state: WorkerState, **more: Any) -> Worker:
        started.append(state)
        return start(self, task, state, **more)

    monkeypatch.setattr(Workers, "start", noted)
    with nothing_is_left():
        trials = tuner(misread, ["good", *(f"fail {i}" for i in range(2, 8)), "good too"]).run(4 * jnp.eye(8)).trials
    assert ends(trials) == ["ok", *["error"] * 6, "ok"]
    assert {(trial.phase, trial.message) for trial in trials[1:7]} == {("check", trials[1].message)}
    assert "attribute" in trials[1].message
    assert started.count(WorkerState.PREPARING) <= 5, "most errors end no worker"


def switch(x: Any, do: str = "") -> Any:
    with open(os.environ["SEEN"], "a") as seen:
        print(do, jax.config.jax_default_matmul_precision, os.getpid(), file=seen)
    if do.startswith("switch"):
        jax.config.update("jax_default_matmul_precision", "float32")
    if do.endswith("refuse"):
        raise ValueError("not this one")
    return x + int(do[-1])


@pytest.mark.slow
@pytest.mark.usefixtures("quiet_place")
def test_no_config_meets_settings_another_left_in_its_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    monkeypatch.setattr(apart, "compiles_apart", lambda given: 100)
    monkeypatch.setenv("QUARANTUNE_CONFIGS_PER_WORKER", "100")
    configs = [f"good {i}" for i in range(8)]
    configs += [text for i in range(4) for text in (f"{i} refuse", f"switch {i} refuse", f"switch and work {i}")]
    with nothing_is_left():
        trials = tuner(switch, configs).run(X).trials
    refused = [trial for trial in trials if trial.config["do"].endswith("refuse")]
    assert ends(refused) == ["error"] * 8
    assert {trial.message for trial in refused} == {"ValueError: not this one"}
    assert {trial.outcome.value for trial in trials if trial not in refused} <= {"ok", "slow"}
    seen = [line.split()[-2:] for line in (tmp_path / "seen").read_text().splitlines()]
    assert {setting for setting, _ in seen} == {"None"}
    assert len({pid for _, pid in seen}) < len(seen), "some workers took several configs"


# --- first runs ----------------------------------------------------------------------------------

_made: list[object] = []


def busy(seconds: float) -> None:
    started = time.process_time()
    while time.process_time() - started < seconds:
        pass


def quick_once_made(x: Any) -> Any:
    if not _made:
        busy(0.3)
        _made.append(x)
    return x


def steady(x: Any) -> Any:
    busy(0.03)
    return x


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("order", [["steady", "quick"], ["quick", "steady"]])
def test_setup_in_a_first_run_rules_no_config_out(order: list[str]) -> None:
    def called_back(x: Any, do: str = "") -> Any:
        function = steady if do == "steady" else quick_once_made
        return jax.pure_callback(function, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    assert tuner(called_back, order).run(X).best_config == {"do": "quick"}


@pytest.mark.filterwarnings("ignore:QUARANTUNE_ISOLATION=none")
def test_a_config_that_exits_does_not_end_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUARANTUNE_ISOLATION", "none")

    def leaving(x: Any, do: int = 1) -> Any:
        if do == 1:
            sys.exit(3)
        return x

    first, second = tuner(leaving, [1, 2]).run(X).trials
    assert (first.outcome.value, first.message) == ("error", "SystemExit: 3")
    assert second.outcome.value == "ok"


# --- which program is tuned ---------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=["factor", "do"])
def scaled(x: Any, factor: int = 4, do: int = 1) -> Any:
    return x * factor


def test_a_blocks_inputs_match_the_call_or_are_refused() -> None:
    tuned = quarantune.autotune([{"do": 1}, {"do": 2}], warmup=1, rep=3)(scaled)
    with quarantune.set_autotune_inputs(X, factor=5):
        np.testing.assert_array_equal(tuned(2 * X, 5), 10)
        with pytest.raises(ValueError, match="'factor' 5 where the call has 1000: make them alike"):
            tuned(2 * X, 1000)
    assert tuned.lookup(X, 5) is not None
    assert tuned.lookup(X, 1000) is None


_NAMES_OF_A_STEP = """
import jax, jax.numpy as jnp
from quarantune.worker.deviceless import products
def step(weights, x, rows):
    wide = jnp.tanh(x @ weights)
    kernel = jax.lax.conv_general_dilated(x[None, None], weights[None, None], (1, 1), "SAME")
    return jax.lax.map(lambda part: part @ weights, wide.reshape(rows, -1, 16)).sum() + kernel.sum()
for rows in (1, 2, 2):
    traced = jax.make_jaxpr(jax.grad(lambda *args: step(*args, rows)))(jnp.ones((16, 16)), jnp.ones((64, 16)))
    print(*products(traced.jaxpr))
"""


@pytest.mark.slow
def test_products_have_the_same_names_in_every_process() -> None:
    told = [python("-c", _NAMES_OF_A_STEP, PYTHONHASHSEED=seed).splitlines() for seed in ("1", "2")]
    assert told[0] == told[1]
    whole, half, again = (set(line.split()) for line in told[0])
    assert half == again
    # Programs share the products outside the loop; each also has products of one or two rows.
    assert len(whole & half) >= 4
    assert whole - half
    assert half - whole


def test_names_of_results_do_not_distinguish_programs() -> None:
    # A worker knows only the positions of fields in a class that a script has registered, not their names.
    traced = jax.jit(lambda x: {"twice": 2 * x, "thrice": 3 * x}).trace(1.0)
    lowered = traced.lower()
    named = lowered.as_text()
    numbered = named.replace("result['thrice']", "result[0]").replace("result['twice']", "result[1]")
    assert named != numbered
    of = functools.partial(programs.identity, lowered, traced=ProgramText(traced.jaxpr), compiler_options={})
    assert of(named) == of(numbered)


@pytest.mark.parametrize("is_check", [False, True], ids=["a sweep", "a check or a confirmation"])
def test_a_program_with_products_compiles_once_it_may_proceed(is_check: bool, tmp_path: Path) -> None:
    packed = payload.pack_call(jax.jit(lambda x: x @ x), (np.ones((8, 8), np.float32),), {}, {})
    cache = str(tmp_path)
    options = BenchOptions(platform="cuda", warmup=0, rep=1, supply="auto", tolerance=None, compilation_cache=cache)
    fd = spool.create("arrays", size_bytes=packed.call.spool_bytes)
    payload.write_arrays(packed, fd)
    here, there = map(Connection, socket.socketpair())
    about: Any = types.SimpleNamespace(arrays_fd=fd)
    runner = WorkerRunner(there, about, functools.partial(Bench, packed.call, options=options))
    replies: list[messages.Reply] = []

    def work() -> None:
        kind = messages.CompileAlone if is_check else messages.Compile
        replies.extend(runner.do(kind(trial=1, config={}), []))

    def lowered() -> messages.Lowered:
        while True:  # both messages may come together
            for message, _ in here.receive_messages(messages.PhaseEntered, messages.Lowered):
                if isinstance(message, messages.Lowered):
                    return message

    worker = threading.Thread(target=work, daemon=True)
    try:
        worker.start()
        assert len(lowered().products) == (not is_check)
        if not is_check:
            assert not any(isinstance(reply, messages.Compiled) for reply in replies)
            here.send_message(messages.Proceed(trial=1))
        worker.join(120)
        assert isinstance(replies[-1], messages.Compiled)
        if not is_check:  # no config waits for products that XLA has already tried
            work()
            assert lowered().products == ()
            assert isinstance(replies[-1], messages.Compiled)
    finally:
        for end in (here, there):
            end.close()
        os.close(fd)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_a_worker_reports_its_contexts_memory_before_a_config(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = payload.pack_call(jax.jit(lambda x: x + 1), (jax.ShapeDtypeStruct((8,), "float32"),), {}, {})
    options = BenchOptions(platform=platform, warmup=0, rep=1, supply="auto", tolerance=None)
    here, there = map(Connection, socket.socketpair())
    about: Any = types.SimpleNamespace(arrays_fd=-1)
    runner = WorkerRunner(there, about, functools.partial(Bench, packed.call, options=options))
    context: list[bytes] = []
    devices = jax.local_devices

    def with_context() -> list[jax.Device]:
        context.append(b"\xff" * (200 << 20))
        return devices()

    monkeypatch.setattr(jax, "local_devices", with_context)
    begins = next(runner.do(messages.Compile(trial=1, config={}), []))
    with contextlib.closing(here), contextlib.closing(there):
        assert (begins.phase, len(context)) == ("compile", int(platform == "cuda"))
        if platform == "cuda":
            ((loads, _),) = here.receive_messages(messages.PhaseEntered)
            assert loads.phase == "load"
            assert begins.held_bytes - loads.held_bytes > 150 << 20
