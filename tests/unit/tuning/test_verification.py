"""Verification measures a cache's winners again, with arguments made from their keys, and finds stale ones."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quarantune
from quarantune import Outcome, Trial, TuningFailedError, TuningResult
from quarantune.api.tuner import Tuner
from quarantune.calls.call import BoundCall
from quarantune.calls.key import keyed
from quarantune.calls.rebuilt import CannotRebuildError, rebuilt
from quarantune.cli.entry_point import main
from quarantune.tuning import verification
from quarantune.values import blocks

X = np.arange(12, dtype=np.float32)
CONFIGS = [{"n": 1}, {"n": 400_000}, {"n": -1}]


def chained(name: str, configs: Any = None, **options: Any) -> quarantune.Autotuned:
    """Returns a function whose defaults take 20,000 steps: n=1 is far faster, n=400,000 slower."""

    @quarantune.autotune(configs or CONFIGS, **{"rep": 3, "ref_fn": None, "name": name, **options})
    @functools.partial(jax.jit, static_argnames=["n", "mode"])
    def chain(x: Any, scale: float = 1.0, *, mode: str = "up", n: int = 20_000) -> Any:
        if n < 0:
            raise ArithmeticError(f"n={n} is bad")
        return jax.lax.fori_loop(0, n, lambda _, y: jnp.tanh(y) * scale, x)

    return chain


def edit(cache_dir: Path, name: str, change: Callable[[str, dict[str, Any]], tuple[str, str, dict[str, Any]]]) -> None:
    """Changes a function's only entry to that of another version or machine."""
    file = cache_dir / f"{name}.json"
    ((device, entries),) = json.loads(file.read_text()).items()
    ((key, entry),) = entries.items()
    entry.pop("program", None)  # earlier versions had no program
    new_device, new_key, new_entry = change(key, entry)
    file.write_text(json.dumps({new_device or device: {new_key: new_entry}}))


@pytest.mark.slow
@pytest.mark.usefixtures("two_slots")
def test_winners_are_compared_with_defaults_and_stale_ones_named(cache_dir: Path) -> None:
    good, slow, broken = (chained(name) for name in ("good", "slow", "broken"))
    for function in (good, slow, broken):
        function.tune(X, 0.5, mode="up")
    edit(cache_dir, "slow", lambda key, entry: ("", key, entry | {"config": {"n": 400_000}}))
    edit(cache_dir, "broken", lambda key, entry: ("", key, entry | {"config": {"n": -1}}))
    before = {path: path.read_bytes() for path in cache_dir.iterdir() if path.is_file()}

    report = quarantune.TuningCache(cache_dir).verify(good, slow, broken)

    found = {entry.key.kernel_type: entry for entry in report.entries}
    assert found.keys() == {"good", "slow", "broken"}
    assert found["good"].verdict in ("current", "unclear"), "the latter on a busy machine"
    assert {entry.key.kernel_type for entry in report.stale} == {"slow", "broken"}
    assert found["good"].config == {"n": 1}
    assert (found["good"].speedup or 0) > 1
    assert found["good"].saved_time_ms is not None
    assert "the defaults are faster" in found["slow"].reason
    assert "error: n=-1 is bad" in found["broken"].reason.replace("ArithmeticError: ", "")
    assert re.match("1 (current|unclear), 2 stale|2 stale, 1 unclear", str(report))
    assert len(json.dumps([entry.to_dict() for entry in report.entries])) > 0
    assert {path: path.read_bytes() for path in cache_dir.iterdir() if path.is_file()} == before, "nothing is saved"


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("two_slots")
def test_winners_of_plain_callables_and_key_fns_are_measured(
    cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "verified_kernels.py").write_text(
        "import quarantune\n"
        "def slept(x, steps):\n"
        "    for _ in range(steps):\n"
        "        x = x.copy() + x.dot(x.T)\n"  # numpy arrays; the key has their shape and dtype
        "    return x\n"
        "tuner = quarantune.AutoTuner(slept, {'steps': [1, 40]}, ref_fn=None, rep=2, name='plain')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import verified_kernels  # type: ignore[import-not-found]

    verified_kernels.tuner.run(np.zeros((4, 4)))
    bucketed = chained("bucketed", key_fn=lambda x, scale=1.0, mode="up": len(x) // 8)
    bucketed.tune(X, 0.5)
    cache = quarantune.TuningCache(cache_dir)

    report = cache.verify("verified_kernels:tuner", bucketed)
    assert {entry.verdict.value for entry in report.entries} <= {"current", "unclear"}, report

    report = cache.verify(bucketed, arguments=lambda key: ((X,), {}))
    assert {entry.key.kernel_type: entry.verdict.value for entry in report.entries} == {
        "plain": "unknown",
        "bucketed": "current",
    }
    report = cache.verify(bucketed, arguments=lambda key: ((np.ones(99, np.float32),), {}))
    assert "another key" in report.of("unknown")[0].reason


@pytest.mark.slow
@pytest.mark.usefixtures("two_slots")
def test_functions_of_one_name_are_verified_separately(cache_dir: Path) -> None:
    @quarantune.autotune([{"n": 1}, {"n": 30_000}], name="chained", rep=3, ref_fn=None)
    @jax.jit(static_argnames=["n"])
    def other(x: Any, n: int = 20_000) -> Any:
        return jax.lax.fori_loop(0, n, lambda _, y: jnp.cos(y), x)

    first, fewer = chained("chained"), chained("chained", [{"n": 1}])
    first.tune(X)
    other.tune(X)
    fewer.tune(X[:4])
    report = quarantune.TuningCache(cache_dir).verify(fewer, other, first)
    measured = {"current", "unclear", "stale"}  # a busy machine may slow a winner of a few microseconds down
    assert len(report.entries) == 3
    assert {entry.verdict.value for entry in report.entries} <= measured, report
    report = quarantune.TuningCache(cache_dir).verify(fewer, other)
    assert len(report.of("unused")) == 1
    assert sum(entry.verdict.value in measured for entry in report.entries) == 2, report
    assert "the list of configs" in report.of("unused")[0].reason, "not the code, which `fewer` shares"


@pytest.mark.usefixtures("no_process")
def test_entries_that_no_call_finds_are_not_measured(cache_dir: Path) -> None:
    code, listed, dropped, elsewhere = (chained(name) for name in ("code", "listed", "dropped", "elsewhere"))
    cache = quarantune.TuningCache(cache_dir)
    for function in (code, listed, dropped, elsewhere):
        now = keyed(BoundCall(function.function, (X,), {}))
        cache.put(function.name, now.id.key, now.id.device, {"n": 1})
    edit(cache_dir, "code", lambda key, entry: ("", key.replace('"code":"', '"code":"0'), entry))
    edit(cache_dir, "dropped", lambda key, entry: ("", key, entry | {"config": {"n": 7}}))
    edit(cache_dir, "elsewhere", lambda key, entry: ("NVIDIA H200", key, entry))
    cache.put("by hand", (1, 2), "here", {"n": 1})

    report = quarantune.TuningCache(cache_dir).verify(code, listed, dropped, elsewhere)
    found = {entry.key.kernel_type: (entry.verdict.value, entry.reason) for entry in report.entries}
    assert found["code"][0] == "unused"
    assert "code has changed" in found["code"][1]
    assert found["listed"] == ("unused", "the list of configs has changed, so a call tunes again")
    assert found["dropped"] == ("unused", "its config is not in the list of configs any more")
    assert found["elsewhere"][0] == "unknown"
    assert "another device" in found["elsewhere"][1]
    assert [reason for name, (_, reason) in found.items() if name.startswith("by")] == [
        "no function of this name was given"
    ]


def saved_as(function: Any, cache_dir: Path, time_ms: float) -> quarantune.TuningCache:
    """Saves n=1 and a time as a function's winner."""
    call = BoundCall(function.function, (X,), {})
    cache, key = quarantune.TuningCache(cache_dir), keyed(call).id
    cache.put(function.name, key.key, key.device, {"n": 1}, time_ms=time_ms)
    edit(cache_dir, function.name, lambda key, entry: ("", key, entry | {"space": call.space}))
    return cache


@pytest.fixture
def measured_as(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Gives winners and defaults fixed times, and perhaps scores."""

    def give(time_ms: float, default_ms: float, *, scores: tuple[float | None, float | None] = (None, None)) -> None:
        ours, own = (
            Trial(config={"n": n}, outcome=Outcome.OK, time_ms=ms, score=score)
            for n, ms, score in zip((1, 2_000), (time_ms, default_ms), scores, strict=True)
        )
        best = min((ours, own), key=lambda trial: trial.figure or 0)
        result = TuningResult(
            best_config=best.config,
            time_ms=best.time_ms or 0,
            default_config=own.config,
            default_time_ms=default_ms,
            score=best.score,
            default_score=own.score,
            trials=(ours, own),
            key="",
            device="",
        )
        monkeypatch.setattr(verification, "swept", lambda call, configs, tune: result)

    return give


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize(("scores", "told"), [((1.0, 0.0), "1 against 0"), ((0.0, -2.0), "0 against -2")])
def test_a_score_of_0_is_a_score(
    scores: tuple[float, float], told: str, cache_dir: Path, measured_as: Callable[..., None]
) -> None:
    function = chained("scored")
    measured_as(1.2, 5.0, scores=scores)
    (entry,) = saved_as(function, cache_dir, 1.0).verify(function).entries
    assert entry.reason == f"the defaults are better: {told}"


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize(("most", "verdict"), [(None, "current"), (70, "current"), (10, "stale"), (55, "unclear")])
def test_a_winner_that_lost_more_than_the_bound_is_stale(
    most: float | None, verdict: str, cache_dir: Path, measured_as: Callable[..., None]
) -> None:
    function = chained("losing")
    measured_as(1.6, 5.0)
    (entry,) = saved_as(function, cache_dir, 1.0).verify(function, max_loss_percent=most).entries
    assert entry.verdict == verdict
    assert entry.to_dict()["loss_percent"] == pytest.approx(60)
    assert ("60% longer than when it was saved: 1.6 ms against 1 ms" in entry.reason) == (verdict == "stale")
    assert ("a later run may take" in entry.reason) == (verdict == "unclear")


@pytest.mark.usefixtures("no_process")
def test_the_command_shows_losses_exits_with_1_and_tunes_again(
    cache_dir: Path,
    measured_as: Callable[[float, float], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    function = chained("losing")
    monkeypatch.setattr("quarantune.cli.calls.load_kernel", lambda *_, **__: function)
    saved_as(function, cache_dir, 1.0)
    command = ["cache", "verify", "kernels:losing"]
    measured_as(1.6, 5.0)
    assert main([*command, "--max-loss", "70"]) == 0
    assert "saved ms" not in capsys.readouterr().out
    assert main([*command, "--max-loss", "55"]) == 0, "unclear is no failure"
    assert "1 result looked at: 1 unclear" in capsys.readouterr().out
    assert main([*command, "--max-loss", "10"]) == 1
    out = capsys.readouterr().out
    head, row = out[out.index("function  call") :].splitlines()[:2]
    assert head.split() == ["function", "call", "config", "saved", "ms", "now", "ms", "loss"]
    assert row.split()[0] == "losing"
    assert row.split()[-4:] == ["n=1", "1", "1.6", "60%"]
    measured_as(1.2, 0.5)
    assert main(command) == 1
    assert "the defaults are faster" in capsys.readouterr().out

    tuned: list[Path] = []

    def tune(resolver: Any, call: Any) -> TuningResult:
        tuned.append(blocks.current().cache_dir)
        if len(tuned) == 1:
            raise TuningFailedError("All 3 configs failed", trials=(), key="")
        saved_as(function, cache_dir, 0.4)
        return TuningResult(best_config={"n": 20_000}, time_ms=0.4, trials=(), key="", device="")

    monkeypatch.setattr(Tuner, "tune", tune)
    with quarantune.settings(cache_dir=cache_dir):
        assert main([*command, "--again"]) == 1
        assert "tuning again failed: All 3 configs failed" in capsys.readouterr().out
        assert main([*command, "--again"]) == 0
    assert "tuned again: n=20000, 0.4 ms" in capsys.readouterr().out
    assert tuned == [cache_dir, cache_dir]
    assert main(["cache", "verify", "--again"]) == 2
    assert "need functions" in capsys.readouterr().err
    assert main([*command, "--max-loss", "none"]) == 2


@pytest.mark.parametrize(
    ("functions", "error", "words"),
    [
        ([], ValueError, "verify needs the tuned functions"),
        (["matmul"], ValueError, "write it as 'module:function'"),
        (["no_such_module_here:f"], ValueError, "cannot be imported"),
        (["json:no_such_function"], ValueError, "does not name a function"),
        (["json:dumps"], TypeError, "is not a tuned function"),
        ([len], TypeError, "is not a tuned function"),
    ],
)
def test_functions_that_cannot_be_verified_are_refused(
    functions: list[Any], error: type[Exception], words: str, cache_dir: Path
) -> None:
    with pytest.raises(error, match=words):
        quarantune.TuningCache(cache_dir).verify(*functions)


def taking(*arrays: Any, tree: Any = None, scale: float = 1.0, mode: Any = None, n: int = 0, **rest: Any) -> Any: ...


def tuned(**options: Any) -> Any:
    jitted = jax.jit(taking, static_argnames=["mode", "n"])
    return quarantune.autotune([{"n": 1}], name="taking", **options)(jitted).function


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        ((X, jnp.zeros((2, 3), jnp.bfloat16), np.ones((), np.int8)), {"scale": 2}),
        ((X,), {"tree": {"w": [X, (X, None)], "b*": 3.0}, "mode": (1, "a", None, (2.5,))}),
        ((jax.random.key(0), jnp.asarray(1.0)), {"mode": "fast", "other": X}),
        ((X,), {"tree": (), "mode": np.dtype("float32"), "flag": True}),
        ((jax.ShapeDtypeStruct((3,), np.float32, weak_type=True),), {"mode": float("inf")}),
    ],
)
def test_arguments_made_from_a_key_have_that_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    function = tuned()
    key = keyed(BoundCall(function, args, kwargs)).id
    again = rebuilt(key.key, function)
    assert keyed(BoundCall(function, *again)).id == key


@pytest.mark.parametrize(
    ("kwargs", "options", "words"),
    [
        ({"mode": len}, {}, "'mode' is not in its key"),
        ({"mode": Path("x")}, {}, "'mode' is not in its key"),
        ({"tree": jax.tree_util.Partial(len)}, {}, "container of another type"),
        ({}, {"key_fn": lambda *args, **kwargs: 1}, "key_fn"),
    ],
)
def test_arguments_that_a_key_does_not_hold_are_named(
    kwargs: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    function = tuned(**options)
    key = keyed(BoundCall(function, (X,), kwargs)).id
    with pytest.raises(CannotRebuildError, match=words):
        rebuilt(key.key, function)


@pytest.mark.parametrize(
    "key", ["", "[]", "{}", '{"call": 3}', "[" * 5000, '{"call": {"tree": {"structure": "PyTreeDef(*"}}}']
)
def test_a_key_that_is_none_is_refused(key: str) -> None:
    with pytest.raises(CannotRebuildError):
        rebuilt(key, tuned())
