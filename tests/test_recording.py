"""Calls without a saved result are written down, without values and without tuning, and tuned later."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quarantune
from quarantune.cache import CacheWarning, Journal
from quarantune.resolve import recorded
from quarantune.resolve.bound_call import BoundCall
from quarantune.resolve.call_key import keyed

pytestmark = pytest.mark.filterwarnings("ignore:.*recorded, to be tuned later", "ignore:.*ON_MISS=nearest")

X = jnp.arange(8.0)


def plus(name: str, **options: Any) -> Any:
    """Returns a tuned function that shows the config that it runs with."""

    @quarantune.autotune([{"n": 1}, {"n": 2}], name=name, ref_fn=None, **options)
    @functools.partial(jax.jit, static_argnames=["n", "mode"])
    def add(x: Any, mode: str = "up", n: int = 0) -> Any:
        return x + n

    return add


def save(function: Any, x: Any, n: int) -> None:
    """Saves a config for a call."""
    now = keyed(BoundCall(function._resolver.function, (x,), {}))
    values = {"key_values": now.readable, "space": now.call.space}
    quarantune.cache.Store(quarantune.TuningCache().directory).put(
        function.name, now.key.device, now.key.text, {"config": {"n": n}, **values}
    )


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[quarantune.RecordedCall]]:
    """Has calls recorded, and returns a function that reads them."""
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
    save(unknown, jnp.arange(4.0), 1)  # near enough for ON_MISS=nearest
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
    recorded._flush()  # as at the end of the process
    eager, inside = calls()
    assert (eager.name, eager.count) == (f"unknown_{on_miss}", 5)
    assert eager.function == f"{__name__}:plus.<locals>.add"
    assert eager.arguments == {"x": {"shape": [8], "dtype": "float32"}, "mode": "up"}
    assert (inside.arguments["mode"], inside.count) == ("down", 5 if on_miss == "error" else 1)
    assert inside.device == eager.device == keyed(BoundCall(known._resolver.function, (X,), {})).key.device


def test_a_record_has_all_of_the_key_and_no_value_of_an_array(calls: Any, tmp_path: Path) -> None:
    bucketed = plus("bucketed", key_fn=lambda x, mode="up": x.shape[0] // 8)
    secret = np.full((3, 5), 1234.5625, np.float16)
    with jax.default_matmul_precision("highest"):
        bucketed(secret, mode="quietly")
    (call,) = calls()
    assert call.arguments == {"x": {"shape": [3, 5], "dtype": "float16"}, "mode": "quietly"}
    assert call.bucket == {"mode": "quietly", "key_fn": 0}
    assert call.jax_settings == {"jax_default_matmul_precision": "highest"}
    assert str(call) == "bucketed(x f16[3,5], mode quietly)"
    assert "1234" not in "".join(path.read_text() for path in (tmp_path / "recorded").rglob("*") if path.is_file())


@pytest.mark.filterwarnings("ignore:os.fork")
def test_what_a_fork_meets_is_recorded_beside_its_parents(calls: Any) -> None:
    add = plus("forked")
    add(np.ones(2, np.float32))
    recorded._flush()
    context = multiprocessing.get_context("fork")
    # A fork of a process with a backend may hang in JAX: this one only writes down what is met.
    described = keyed(BoundCall(add._resolver.function, (np.ones(3, np.float32),), {}))
    directory = Path(os.environ["QUARANTUNE_RECORD"])
    child = context.Process(target=recorded.note, args=(described, add._resolver, directory))
    child.start()
    child.join(200)
    assert child.exitcode == 0
    assert sorted((call.arguments["x"]["shape"], call.count) for call in calls()) == [([2], 1), ([3], 1)]


@pytest.mark.parametrize("in_its_place", ["a link to a folder", "a link to a file", "a pipe", "a file"])
def test_no_link_or_pipe_keeps_a_call_from_running_and_none_is_followed(
    in_its_place: str, calls: Any, tmp_path: Path
) -> None:
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
    with pytest.warns(CacheWarning, match="calls cannot be recorded in .*: make it writable, or set QUARANTUNE_RECORD"):
        assert add(X[:5])[0] == 0
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the journal .* cannot be used")
        assert calls() == []
    assert [path.read_text() for path in victim.iterdir()] == ["mine"]


def test_lines_that_are_no_records_are_left_out_and_reported(calls: Any, tmp_path: Path) -> None:
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
    with pytest.warns(CacheWarning, match="10 lines below .* are no records of calls"):
        (read,) = calls()
    assert read.count == 42
    add(X)  # and the torn line spoils none that follow
    recorded._flush()
    with pytest.warns(CacheWarning, match="11 lines below"):
        assert calls()[0].count == 43


@pytest.mark.usefixtures("no_process")
def test_a_block_lists_its_calls_and_a_traced_program_has_the_same(calls: Any, compiles: list[str]) -> None:
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
    assert repr(listed) == "listed(x f32[4], mode up), met 2 times\nlisted(x f32[4], mode down), met 2 times"
    assert listed[0].call == ((abstract[0],), {})
    recorded._flush()
    assert [call.count for call in calls()] == [6, 6], "the directory of the environment has all of them, too"


@pytest.mark.usefixtures("no_process")
def test_a_program_that_was_only_traced_is_tuned_when_it_runs() -> None:
    add = plus("later")
    step = jax.jit(lambda x: add(x))
    assert [str(call) for call in quarantune.calls_in(step, X)] == ["later(x f32[8], mode up)"]
    save(add, X, 2)
    assert [call.count for call in quarantune.calls_in(step, X)] == [1], "those with a result are listed, too"
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
