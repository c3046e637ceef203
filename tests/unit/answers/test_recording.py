"""Calls without a saved result are recorded, without values and without tuning, and tuned later."""

from __future__ import annotations

import functools
import importlib
import json
import logging
import multiprocessing
import os
import re
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PROGRAMS, python, run_python

import quarantune
from quarantune.answers import recording as recorded
from quarantune.cache.journal import Journal
from quarantune.cache.problems import CacheWarning
from quarantune.calls.call import BoundCall
from quarantune.calls.key import keyed
from quarantune.cli import entry_point as main

pytestmark = pytest.mark.filterwarnings("ignore:.*recorded, to be tuned later", "ignore:.*ON_MISS=nearest")

X = np.arange(8, dtype=np.float32)


def plus(name: str, **options: Any) -> Any:
    """Returns a tuned function that shows the config that it runs with."""

    @quarantune.autotune([{"n": 1}, {"n": 2}], name=name, ref_fn=None, **options)
    @functools.partial(jax.jit, static_argnames=["n", "mode"])
    def add(x: Any, mode: str = "up", n: int = 0) -> Any:
        return x + n

    return add


def save(function: Any, x: Any, n: int) -> None:
    """Saves a config for a call."""
    now = keyed(BoundCall(function.function, (x,), {}))
    values = {"key_values": now.readable, "space": now.call.space}
    quarantune.cache.Store(quarantune.TuningCache().directory).put(
        function.name, now.id.device, now.id.key, {"config": {"n": n}, **values}
    )


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[quarantune.RecordedCall]]:
    """Records calls, and returns a function that reads them."""
    monkeypatch.setenv("QUARANTUNE_RECORD", str(tmp_path / "recorded"))
    return lambda: recorded.read(tmp_path / "recorded")


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize("on_miss", ["tune", "default", "nearest", "error"])
def test_a_call_without_a_result_is_recorded_once_and_not_tuned(
    on_miss: str, calls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUARANTUNE_ON_MISS", on_miss)
    known, unknown = plus(f"known_{on_miss}"), plus(f"unknown_{on_miss}")
    save(known, X, 2)
    save(unknown, jnp.arange(4.0), 1)  # the nearest entry for ON_MISS=nearest
    traced = jax.jit(lambda x: unknown(x, mode="down"))
    for _ in range(5):
        assert known(X)[0] == 2
        if on_miss == "error":
            with pytest.raises(quarantune.CacheMissError):
                unknown(X)
            with pytest.raises(quarantune.CacheMissError):
                traced(X)
        else:
            assert unknown(X)[0] == (1 if on_miss == "nearest" else 0)
            assert traced(X)[0] == 0
    recorded._flush()  # a process does this at its end
    eager, inside = calls()
    assert (eager.name, eager.count) == (f"unknown_{on_miss}", 5)
    assert eager.function == f"{__name__}:plus.<locals>.add"
    assert eager.arguments == {"x": {"shape": [8], "dtype": "float32"}, "mode": "up"}
    assert (inside.arguments["mode"], inside.count) == ("down", 5 if on_miss == "error" else 1)
    assert inside.device == eager.device == keyed(BoundCall(known.function, (X,), {})).id.device


def test_a_record_has_the_whole_key_but_no_array_values(calls: Any, tmp_path: Path) -> None:
    bucketed = plus("bucketed", key_fn=lambda x, mode="up": x.shape[0] // 8)
    secret = np.full((3, 5), 1234.5625, np.float16)
    with jax.default_matmul_precision("highest"), quarantune.recording() as listed:
        bucketed(secret, mode="quietly")
        bucketed(secret[:2], mode="quietly")
        bucketed(secret[:2], mode="quietly")
    other, call = calls()
    assert (other.count, other.arguments["x"]["shape"], other.bucket) == (2, [2, 5], call.bucket), "tune_for needs both"
    assert call.arguments == {"x": {"shape": [3, 5], "dtype": "float16"}, "mode": "quietly"}
    assert call.bucket == {"mode": "quietly", "key_fn": 0}
    with pytest.raises(ValueError, match="tune it under the recorded settings"):
        listed[0].tune()
    assert call.jax_settings == {"jax_default_matmul_precision": "highest"}
    assert str(call) == "bucketed(x f16[3,5], mode quietly)"
    assert "1234" not in "".join(path.read_text() for path in (tmp_path / "recorded").rglob("*") if path.is_file())


@pytest.mark.filterwarnings("ignore:os.fork")
def test_a_forks_calls_are_recorded_with_its_parents(calls: Any) -> None:
    add = plus("forked")
    add(np.ones(2, np.float32))
    recorded._flush()
    context = multiprocessing.get_context("fork")
    # A fork of a process with a backend may hang in JAX: this fork only records a call.
    described = keyed(BoundCall(add.function, (np.ones(3, np.float32),), {}))
    directory = Path(os.environ["QUARANTUNE_RECORD"])
    child = context.Process(target=recorded.note, args=(described, add._tuner.result, directory))
    child.start()
    child.join(200)
    assert child.exitcode == 0
    assert sorted((call.arguments["x"]["shape"], call.count) for call in calls()) == [([2], 1), ([3], 1)]


@pytest.mark.parametrize("in_its_place", ["a link to a folder", "a link to a file", "a pipe", "a file"])
def test_links_and_pipes_neither_block_a_call_nor_are_followed(in_its_place: str, calls: Any, tmp_path: Path) -> None:
    add = plus(in_its_place.replace(" ", "_"))
    directory, victim = tmp_path / "recorded", tmp_path / "victim"
    file = Journal(directory, add.name, jax.devices()[0].device_kind, "calls").directory
    victim.mkdir()
    (victim / "mine").write_text("mine")
    directory.mkdir()
    if in_its_place == "a link to a folder":
        file.symlink_to(victim)
    elif in_its_place == "a file":
        file.write_text("")
    else:
        add(X)
        (path,) = file.iterdir()
        path.unlink()
        path.symlink_to(victim / "mine") if "link" in in_its_place else os.mkfifo(path)
    with pytest.warns(CacheWarning, match="calls cannot be recorded in .*: (make|move) .*, or set QUARANTUNE_RECORD"):
        assert add(X[:5])[0] == 0
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the journal .* cannot be used")
        assert calls() == []
    assert [path.read_text() for path in victim.iterdir()] == ["mine"]


def test_lines_that_are_not_records_are_omitted_and_reported(calls: Any, tmp_path: Path) -> None:
    add = plus("shared")
    add(X)
    (call,) = calls()
    (path,) = (tmp_path / "recorded").rglob("*.calls")
    good = call.to_json()
    bad: list[Any] = [
        {"count": 0},
        {"count": 1e9},
        {"function": 3},
        {"name": "\x1b[31m"},
        {"arguments": []},
        {"jax_settings": "no"},
    ]
    journal = Journal(path.parent.parent, "another", "cpu", "calls", suffix=".calls")
    for change in bad:
        journal.append(good | change)
    journal.append(good | {"a later version": 1, "count": 41})
    with path.open("ab") as file:
        file.write(b"00000000 {}\nnothing\n\xff\xfe\n" + json.dumps(good).encode() + b"\n12345678 torn")
    with pytest.warns(CacheWarning, match="10 lines below .* are not records of calls"):
        (read,) = calls()
    assert read.count == 42
    add(X)  # the torn line does not spoil the next one
    recorded._flush()
    with pytest.warns(CacheWarning, match="11 lines below"):
        assert calls()[0].count == 43


@pytest.mark.usefixtures("no_process")
def test_a_block_and_its_traced_program_list_the_same_calls(calls: Any, compiles: list[str]) -> None:
    add = plus("listed")
    step = jax.jit(lambda tree: sum(add(add(x), mode="down") for x in tree))
    tree = [np.ones(4, np.float32), np.ones(4, np.float32)]
    abstract = [jax.ShapeDtypeStruct((4,), np.float32)] * 2
    before = quarantune.calls_in(step, abstract)
    assert not [event for event in compiles if "trace" not in event]
    with quarantune.recording() as listed:
        step(tree)
        step(tree)
    assert before == quarantune.calls_in(step, tree) == list(listed)
    assert [(call.arguments["mode"], call.count) for call in listed] == [("up", 2), ("down", 2)]
    assert [str(call) for call in listed] == ["listed(x f32[4], mode up)", "listed(x f32[4], mode down)"]
    assert listed[0].call == ((abstract[0],), {})
    recorded._flush()
    assert [call.count for call in calls()] == [6, 6], "QUARANTUNE_RECORD's directory also has all calls"


@pytest.mark.usefixtures("no_process")
def test_a_program_that_was_only_traced_is_tuned_when_it_runs() -> None:
    add = plus("later")
    step = jax.jit(lambda x: add(x))
    assert [str(call) for call in quarantune.calls_in(step, X)] == ["later(x f32[8], mode up)"]
    save(add, X, 2)
    assert [call.count for call in quarantune.calls_in(step, X)] == [1], "calls with a result are also listed"
    assert step(X)[0] == 2
    assert quarantune.calls_in(add, X, mode="down")[0].arguments["mode"] == "down"


@pytest.mark.usefixtures("no_process")
def test_functions_of_kernels_are_listed_with_their_kernels() -> None:
    add = plus("kernel")

    @quarantune.contextual_autotune(name="layer")
    def layer(x: Any) -> Any:
        return 2 * add(x)

    with quarantune.recording() as listed:
        layer(X)
    assert [call.name for call in listed] == ["layer", "kernel"]
    assert quarantune.calls_in(layer, X) == list(listed)


@pytest.mark.slow
@pytest.mark.usefixtures("two_slots")
def test_calls_that_were_listed_can_be_tuned() -> None:
    add, double = plus("later_tuned"), quarantune.AutoTuner(lambda x, n: x * n, [{"n": 1}, {"n": 2}], name="plain")
    calls = quarantune.calls_in(lambda x: add(x) + add(x, mode="down"), X)
    with quarantune.recording() as listed, pytest.raises(quarantune.CacheMissError):
        double.run(np.ones(4))  # it has no defaults to run with
    results = quarantune.tune_many([*calls, *listed])
    assert [result.from_cache for result in results] == [False] * 3
    with quarantune.settings(on_miss="error"):
        assert add(X)[0] == results[0].best_config["n"]
        double.run(np.ones(4))
    with pytest.raises(TypeError, match="use `quarantune tune --recorded`"):
        quarantune.RecordedCall.from_json(calls[0].to_json()).tune()


@pytest.mark.usefixtures("calls")
def test_listed_calls_are_tuned_although_the_program_records() -> None:
    add = plus("tuned_now", rep=1)
    with quarantune.recording() as listed:
        add(X)
    with quarantune.settings(isolation="none"), warnings.catch_warnings(action="ignore"):
        (result,) = quarantune.tune_many(listed)
    assert not result.from_cache
    assert add.lookup(X) == result.best_config


# --- quarantune tune --recorded -----------------------------------------------------------------------------


def command(*words: object, cwd: Path, **environ: str) -> tuple[int, str, str]:
    """Runs the command line in a new process."""
    done = run_python("-m", "quarantune", *words, cwd=cwd, **{"JAX_PLATFORMS": "cpu", **environ})
    return done.returncode, done.stdout, done.stderr


@pytest.mark.usefixtures("no_process")
def test_untunable_recorded_calls_are_named_and_nothing_runs(
    calls: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"kernels_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(
        "import functools, jax, quarantune\n"
        "@quarantune.autotune([{'n': 1}, {'n': 2}], ref_fn=None)\n"
        "@functools.partial(jax.jit, static_argnames=['n', 'mode'])\n"
        "def add(x, mode='up', n: int = 0):\n    return x + n\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    add = importlib.import_module(name).add
    for mode in ("up", "up", "up", "up", "down", len):
        add(X, mode=mode)
    save(add, X, 2)
    known, *_ = calls()
    journal = Journal(tmp_path / "recorded", "others", "cpu", "calls", suffix=".calls")
    for change in (
        {"function": "no.such_module:f", "name": "no.such_module.f"},
        {"function": "os:system", "name": "os.system"},
        {"function": f"{name}:made.<locals>.add", "name": "made.add"},
        {"function": f"{tmp_path}/evil.py:add", "name": "evil.add"},
        {"device": "NVIDIA H100"},
        {"jax_settings": {"jax_enable_x64": "maybe"}},
        {"jax_settings": {"mesh": {"shape": [2], "axes": 3}}},
        {"arguments": {"x": {"shape": [1], "dtype": "float32", "sharding": {"mesh": {"d": "2"}, "spec": 3}}}},
        {"arguments": {"y": 3}},
        {"arguments": {"x": {"shape": [1], "dtype": "\x1b[2J"}}},
    ):
        journal.append(known.to_json() | change)
    (tmp_path / "evil.py").write_text("raise SystemExit('a record was run')")
    monkeypatch.setattr(os, "system", lambda words: pytest.fail("a record was run"))

    code = main.main(["tune", "--recorded", "recorded", "--time-budget", "1e-6", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == 1
    assert [found[0][key] for key in ("function", "call", "count", "status", "config")] == [
        f"{name}.add", "x f32[8], mode up", 4, "tuned before", {"n": 2}
    ]  # fmt: skip
    reasons = {entry["error"] for entry in found if entry["status"] == "not possible here"}
    for words in (
        "there is no module 'no'",
        "'os' tunes nothing of the name 'os.system'",
        "made.<locals>.add' is not at the top of a module: tune it in Python",
        "'mode' is not in its key, only a description of it): tune it with --inputs",
        "evil.py:add' is not at the top of a module",
        "another key",
        "float32 that cannot be made here",
        "'y' is not a parameter",
    ):
        assert sum(words in reason for reason in reasons) == 1, words
    assert {entry["status"] for entry in found[1:]} == {
        "not possible here",
        "left for the next run",
        f"for NVIDIA H100, and not for {known.device}",
    }
    assert not jax.config.jax_enable_x64  # type: ignore[attr-defined]

    assert main.main(["tune", f"{name}.py:add", "--recorded", "recorded", "--time-budget", "1e-6"]) == 1
    said = capsys.readouterr().out
    assert re.search(r"9 calls recorded in 'recorded': 1 tuned before, ", said), "4 of 13 calls are of other functions"
    assert said.replace("\n", "").isprintable()
    sys.modules.pop(name)


PROGRAM = """
import functools, sys
import jax, jax.numpy as jnp, numpy as np, quarantune
from jax.sharding import NamedSharding, PartitionSpec

QUICK = {"warmup": 0, "rep": 1, "ref_fn": None}

@quarantune.autotune([{"n": 1}, {"n": 2}], **QUICK)
@functools.partial(jax.jit, static_argnames=["n", "mode"])
def add(x, mode="up", n: int = 0):
    return x + n

@quarantune.autotune([{"n": 1}], key_fn=lambda x: len(x) // 16, devices_per_trial=2, **QUICK)
@functools.partial(jax.jit, static_argnames=["n"])
def bucketed(x, n: int = 0):
    return x + n

@quarantune.autotune([{"n": 1}], **QUICK)
@jax.jit(static_argnames=["n"])
def broken(x, n: int = 0):
    if n:
        raise RuntimeError("no good")
    return x

plain = quarantune.AutoTuner(lambda x, n=0: x + n, [{"n": 1}], name="plain", **QUICK)

if __name__ == "__main__":
    wrong = []
    def want(out):
        if "tuned" in sys.argv and not (np.asarray(out) != 0).all():
            wrong.append(out)
    step = jax.jit(lambda x: add(x) + bucketed(x))
    want(step(jnp.zeros(20)))
    for _ in range(3):
        want(bucketed(jnp.zeros(25)))
        want(add(np.zeros((2, 4), np.int8), mode="down"))
    with jax.default_matmul_precision("highest"), jax.enable_x64(True):
        want(add(jnp.zeros(6)))
    mesh = jax.make_mesh((2,), ("d",))
    want(bucketed(jax.device_put(jnp.zeros((64, 4)), NamedSharding(mesh, PartitionSpec("d")))))
    plain.run(np.zeros(4))
    if "tuned" not in sys.argv:
        broken(jnp.zeros(2))
    sys.exit(len(wrong))
"""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("two_slots")
def test_a_program_needs_no_tuning_after_its_record_is_tuned(tmp_path: Path) -> None:
    two = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    (tmp_path / "program.py").write_text(PROGRAM)

    def program(*words: str, **environ: str) -> None:
        python("program.py", *words, cwd=tmp_path, **two, **environ)

    program(QUARANTUNE_RECORD="recorded")
    assert not list((tmp_path / "cache").glob("*.json")), "recording tunes nothing"
    code, out, err = command("tune", "--recorded", "recorded", "--json", cwd=tmp_path, **two)
    found = json.loads(out)
    assert code == 1, err
    counts = [(it["function"], it["count"]) for it in found]
    assert sorted(counts[:2]) == [("program.add", 3), ("program.bucketed", 3)]
    assert not counts[2:] or max(count for _, count in counts[2:]) == 1
    assert [it["function"] for it in found if it["status"] == "failed"] == ["program.broken"]
    ends = sorted(it["status"] for it in found if it["function"] != "program.broken")
    assert ends == ["tuned"] * (len(ends) - 1) + ["tuned before"], "two sizes share a key"
    program("tuned", QUARANTUNE_ON_MISS="error")

    code, out, _ = command("tune", "program.py:add", "--recorded", "recorded", "--again", cwd=tmp_path, **two)
    assert (code, len(out.splitlines())) == (0, 4)
    assert out.endswith("3 calls recorded in 'recorded': 3 tuned\n")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_process_that_is_killed_while_it_records_loses_no_call(tmp_path: Path) -> None:
    program = tmp_path / "killed.py"
    program.write_text(
        "import functools, os, sys\n"
        "import jax, numpy as np, quarantune\n"
        "@quarantune.autotune([{'n': 1}])\n"
        "@functools.partial(jax.jit, static_argnames=['n'])\n"
        "def add(x, n: int = 0):\n"
        "    return x\n"
        "while line := sys.stdin.readline():\n"
        "    report, told = os.pipe()\n"
        "    if (child := os.fork()) == 0:\n"
        "        for size in range(1, 1000):\n"
        "            shape = jax.ShapeDtypeStruct((int(line), size), np.float32)\n"
        "            jax.eval_shape(lambda x: add(x), shape)\n"
        "            os.write(told, b'.')\n"
        "        os._exit(0)\n"
        "    os.close(told)\n"
        "    acknowledged = 0\n"
        "    while acknowledged < int(line) % 7 + 1:\n"
        "        acknowledged += len(os.read(report, 1))\n"
        "    os.kill(child, 9)\n"
        "    os.waitpid(child, 0)\n"
        "    while more := os.read(report, 1000):\n"
        "        acknowledged += len(more)\n"
        "    os.close(report)\n"
        "    print(acknowledged, flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, program],
        input="".join(f"{number}\n" for number in range(1, 36)),
        env={**os.environ, "QUARANTUNE_RECORD": str(tmp_path / "recorded"), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    acknowledged = [int(line) for line in done.stdout.split()]
    assert len(acknowledged) == 35, done.stderr
    found = {tuple(call.arguments["x"]["shape"]) for call in recorded.read(tmp_path / "recorded")}
    for number, count in enumerate(acknowledged, start=1):
        assert {(number, size) for size in range(1, count + 1)} <= found
    assert min(acknowledged) >= 1


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.clients
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")  # warnings of other libraries
def test_a_cluster_tunes_what_two_training_processes_record(tmp_path: Path) -> None:
    pytest.importorskip("flax")
    distributed = pytest.importorskip("distributed")
    logging.getLogger("distributed").setLevel(logging.CRITICAL)

    def train(**environ: str) -> list[str]:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        ranks = [
            subprocess.Popen(
                [sys.executable, PROGRAMS / "recorded_training.py", str(rank), str(port)],
                env={**os.environ, "JAX_PLATFORMS": "cpu", **environ},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            ended = [rank.communicate(timeout=250) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        assert [rank.returncode for rank in ranks] == [0, 0], ended[0][1] + ended[1][1]
        return [out.splitlines()[-1] for out, _ in ended]

    directory = tmp_path / "recorded"
    assert train(QUARANTUNE_RECORD=str(directory), QUARANTUNE_ON_MISS="default") == [str([None] * 4)] * 2
    found = recorded.read(directory)
    kernels = sorted(call.function.partition(":")[2] for call in found)
    assert kernels == ["mean", "project", "project", "square"]
    assert {call.count for call in found if call.function.endswith("square")} == {10}, "five calls by each process"
    assert not (tmp_path / "cache").exists()
    with distributed.LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as cluster:
        address = cluster.scheduler_address.replace("tcp://", "dask://")
        code, out, err = command("tune", "--recorded", directory, "--executor", address, "--json", cwd=PROGRAMS)
        assert code == 0, err
        assert {it["status"] for it in json.loads(out)} == {"tuned"}
    first, second = train(QUARANTUNE_ON_MISS="error")
    assert first == second
    assert "None" not in first
