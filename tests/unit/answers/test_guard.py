"""Which answers a call may use: calls of one key by `key_fn`, and configs that were not measured for the call."""

from __future__ import annotations

import functools
import math
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from tuned_functions import here

import quarantune
from quarantune.answers import guard
from quarantune.answers.answer import Answer, Origin, Situation
from quarantune.answers.layers import save
from quarantune.cache.joining import joined_by_sweep
from quarantune.calls.key import KeyedCall, keyed
from quarantune.transport import assignment
from quarantune.tuning.claim_and_journal import ClaimAndJournal
from quarantune.tuning.job import TuningJob
from quarantune.tuning.outcome import entry_for
from quarantune.values import blocks
from quarantune.values.codec import canonical_json
from quarantune.values.trial import Findings, Outcome, Searched, Trial

QUICK: Any = {"rep": 1, "warmup": 0, "ref_fn": None}
BIG, SMALL = np.ones(128, np.float32), np.ones(80, np.float32)


def divides(config: Any, x: Any) -> bool:
    return bool(x.shape[0] % config["block"] == 0)


def whole_blocks(name: str, **options: Any) -> quarantune.Autotuned[..., Any]:
    """Returns a function that leaves out the last elements if the config does not divide their number."""

    @quarantune.autotune(
        [{"block": 64}, {"block": 16}],
        **{**QUICK, "name": name, "key_fn": lambda x: "bucket", "prune_fn": divides, **options},
    )
    @functools.partial(jax.jit, static_argnames=["block"])
    def total(x: Any, block: int = 1) -> Any:
        return x[: x.shape[0] // block * block].sum()

    return total


def call_of(function: Any, x: Any) -> KeyedCall:
    return keyed(function._tuner.bind((x,), {}))


def save_winner(function: Any, config: Any, x: Any, time_ms: float = 1.0) -> None:
    call = call_of(function, x)
    save(blocks.current(), call.id, entry_for(call, config, Findings(time_ms, 2.0), {"name": "all"}))


def entries(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.glob("*.json")}


def test_a_config_that_prune_fn_drops_for_a_call_does_not_run(name: str, cache_dir: Path) -> None:
    save_winner(whole_blocks(name), {"block": 64}, BIG)
    before, total = entries(cache_dir), whole_blocks(name)
    with pytest.warns(quarantune.CacheWarning, match="the call runs with its defaults") as caught:
        sums = [float(total(x)) for x in (BIG, SMALL, BIG, SMALL)]
    assert sums == [128, 80, 128, 80]
    (text,) = (str(warning.message) for warning in caught)
    assert "key_fn gives" in text
    assert "prune_fn drops the config of that key, block=64" in text
    assert "let key_fn keep such calls apart, or give them all to tune_for" in text
    assert (total.lookup(BIG), total.lookup(SMALL)) == ({"block": 64}, None)
    assert entries(cache_dir) == before, "shapes that alternate do not replace each other's result"


def test_a_dropped_config_of_a_bucket_is_a_miss_in_production(name: str) -> None:
    total = whole_blocks(name)
    save_winner(total, {"block": 64}, BIG)
    with (
        quarantune.settings(on_miss="default"),
        pytest.warns(quarantune.CacheWarning, match="prune_fn drops"),
        pytest.warns(quarantune.CacheWarning, match="not tuned for this call"),
    ):
        assert float(total(SMALL)) == 80
    with quarantune.settings(on_miss="error"):
        assert float(total(BIG)) == 128
        with pytest.raises(quarantune.CacheMissError, match="differs in prune_fn, which drops its config"):
            total(SMALL)


def test_a_result_of_a_call_with_a_dropped_config_has_defaults(name: str) -> None:
    def plain(x: Any, block: int = 1) -> Any:
        return x[: len(x) // block * block].sum()

    def strict(x: Any, block: int) -> Any:
        return plain(x, block)

    options: Any = {**QUICK, "key_fn": lambda x: "bucket", "prune_fn": divides}
    tuner = quarantune.AutoTuner(plain, [{"block": 64}, {"block": 16}], name=name, **options)
    save_winner(tuner, {"block": 64}, BIG)
    with pytest.warns(quarantune.CacheWarning, match="prune_fn drops"):
        result = tuner.run(SMALL)
    assert (result.from_cache, result.best_config) == ("default", {"block": 1})
    tuner = quarantune.AutoTuner(strict, [{"block": 64}, {"block": 16}], name=f"{name} strict", **options)
    save_winner(tuner, {"block": 64}, BIG)
    with (
        pytest.warns(quarantune.CacheWarning, match="prune_fn drops"),
        pytest.raises(quarantune.TuningFailedError, match="block=64, for it: let key_fn keep such calls apart"),
    ):
        tuner.run(SMALL)


def test_explicit_tuning_finds_a_config_for_its_own_call(name: str) -> None:
    total = whole_blocks(name)
    save_winner(total, {"block": 64}, BIG)
    with here():
        assert total.tune(SMALL).best_config in ({"block": 16}, {"block": 1})
        assert float(total(SMALL)) == 80


def test_a_waiting_job_takes_no_config_that_it_may_not_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other job tunes a call of the same key that `prune_fn` treats in another way."""
    total = whole_blocks(name)
    taken: list[Any] = []

    def claim(records: ClaimAndJournal, stack: Any, *, done: Any, **_: Any) -> Any:
        save_winner(total, {"block": 64}, BIG, 1.0 + len(taken))
        taken.append(done(False))
        return taken[-1]

    monkeypatch.setattr(ClaimAndJournal, "claim", claim)
    with here(), pytest.warns(quarantune.CacheWarning, match="prune_fn drops"):
        assert float(total(SMALL)) == 80
    with here():
        assert total.tune(SMALL).best_config != {"block": 64}, "it sweeps after the other job"
    assert [found is None for found in taken] == [False, True]


@pytest.mark.parametrize(("size", "wanted"), [(16, {"block": 16}), (24, None)])
def test_an_exported_function_has_configs_that_prune_fn_keeps(size: int, wanted: Any, name: str) -> None:
    """`prune_fn` decides by the static dimension, or by a symbolic one, which it cannot."""

    def keeps(config: Any, x: Any) -> bool:
        return bool(x.shape[1] % config["block"] == 0) if size == 16 else math.gcd(x.shape[0], config["block"]) > 1

    total = whole_blocks(name, key_fn=lambda x: x.shape[1], prune_fn=keeps)
    save_winner(total, {"block": 16}, np.ones((32, size), np.float32))
    symbolic = jax.ShapeDtypeStruct(jax.export.symbolic_shape(f"b, {size}"), np.float32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert total.lookup(symbolic) == wanted
    assert len(caught) == (wanted is None)


@pytest.mark.parametrize("on_miss", ["nearest", "rule"])
@pytest.mark.parametrize("options", [{"max_device_memory": "1MB"}, {"numerics": "bitwise"}])
def test_a_call_with_promises_takes_no_unmeasured_config(on_miss: Any, options: Any, name: str) -> None:
    total = whole_blocks(name, key_fn=None, prune_fn=None, **options)
    save_winner(total, {"block": 16}, BIG)
    with (
        quarantune.settings(on_miss=on_miss),
        pytest.warns(
            quarantune.CacheWarning, match=f"ON_MISS={on_miss}: {next(iter(options))}.* needs a config"
        ) as told,
    ):
        assert float(total(SMALL)) == 80
    assert len(told) == 1, "no other warning names the nearest entry, or the rule"


def test_each_unmeasured_origin_is_judged_by_the_promises(name: str) -> None:
    def refused(**options: Any) -> set[Origin]:
        call = call_of(whole_blocks(name, **options), BIG)
        return {origin for origin in Origin if guard.why_not(origin, call)}

    assert refused() == set()
    assert refused(numerics="bitwise") == {Origin.ESTIMATED, Origin.RULE, Origin.NEAREST}
    assert refused(max_device_memory="1MB") == {Origin.RULE, Origin.NEAREST}, "an estimate was compiled for the call"
    assert refused(objective=lambda trial: trial.time_ms) == {Origin.ESTIMATED}


def test_the_nearest_entry_of_a_contextual_function_is_not_named(name: str) -> None:
    kernel = whole_blocks(f"{name} kernel", key_fn=None, prune_fn=None)
    layer = quarantune.contextual_autotune(jax.jit(lambda x: kernel(x) + 1), name=name)
    save_winner(layer, {"assignment": "{}"}, BIG)
    save_winner(kernel, {"block": 16}, BIG)
    with quarantune.settings(on_miss="nearest"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert float(layer(SMALL)) == 81
    told = [str(warning.message) for warning in caught]
    assert not [text for text in told if "does not use the nearest entry" in text]
    assert [text for text in told if f"{name}: not tuned" in text and "its kernels have configs" in text]
    assert [text for text in told if f"{name} kernel: nothing is cached" in text], "a kernel takes its nearest entry"


def test_an_assigned_config_that_prune_fn_drops_does_not_run(name: str) -> None:
    """Calls of one key in a contextual function share a slot."""
    total = whole_blocks(name)
    call = call_of(total, BIG)
    text = assignment.encode({assignment.Slot(name, canonical_json(call.values)): {"block": 64}}, others="default")
    with assignment.Assignment(text).in_force(), pytest.warns(quarantune.CacheWarning, match="prune_fn drops"):
        assert [float(total(x)) for x in (BIG, SMALL)] == [128, 80]


# --- calls of one key ----------------------------------------------------------------------------------------------


def rows(name: str, configs: Any, **options: Any) -> quarantune.Autotuned[..., Any]:
    """Returns a function that fails unless the config divides the size."""

    @quarantune.autotune(configs, **{**QUICK, "name": name, "key_fn": lambda x: "all", **options})
    @functools.partial(jax.jit, static_argnames=["n"])
    def sums(x: Any, n: int = 1) -> Any:
        return x.reshape(n, -1).sum(0)

    return sums


def test_a_failure_is_repeated_for_its_own_call_only(name: str) -> None:
    sums = rows(name, [{"n": 3}])
    with here():
        for _ in range(2):
            with pytest.raises(quarantune.TuningFailedError, match=r"\(16,\)"):
                sums(np.ones(16, np.float32))
        assert sums(np.ones(24, np.float32)).shape == (8,)
        assert sums.lookup(np.ones(24, np.float32)) == {"n": 3}


@pytest.mark.parametrize("on_miss", ["default", "nearest", "rule", "error"])
def test_a_failure_is_repeated_only_by_calls_that_tune(on_miss: Any, name: str) -> None:
    sums, x = rows(name, [{"n": 3}], key_fn=None), np.ones(16, np.float32)
    with here(), pytest.raises(quarantune.TuningFailedError):
        sums(x)
    with quarantune.settings(on_miss=on_miss), warnings.catch_warnings(action="ignore"):
        if on_miss == "error":
            with pytest.raises(quarantune.CacheMissError):
                sums(x)
        else:
            assert sums(x).shape == (16,)
    with here(), pytest.raises(quarantune.TuningFailedError):
        sums(x)


def test_a_longer_list_is_measured_for_its_own_call(name: str) -> None:
    """A journal holds the trials of all calls of a key."""

    def work(x: Any, mode: int = 1) -> int:
        seen.append((mode, len(x)))
        return len(x)

    seen: list[tuple[int, int]] = []
    options: Any = {**QUICK, "name": name, "key_fn": lambda x: "all"}
    with here():
        quarantune.AutoTuner(work, [{"mode": 1}], **options).run(np.ones(4))
        seen.clear()
        result = quarantune.AutoTuner(work, [{"mode": 1}, {"mode": 2}], **options).run(np.ones(9))
    assert {(1, 9), (2, 9)} <= set(seen)
    assert [trial.recalled_from for trial in result.trials] == [None, None]


def test_trials_and_failures_count_for_equal_arguments_only(name: str) -> None:
    sums = rows(name, [{"n": 1}, {"n": 2}])
    calls = [call_of(sums, np.ones(size, np.float32)) for size in (16, 24, 16)]
    assert calls[0].id == calls[1].id
    jobs = [TuningJob(call, Situation.of(call.call), sums._tuner.rungs.tuning) for call in calls]
    failed = tuple(Trial(config={"n": n}, outcome=Outcome.ERROR) for n in (1, 2))
    about = {**jobs[0]._terms(), "trials": [trial.to_json() for trial in failed]}
    assert [job._failure_of(about) is None for job in jobs] == [False, True, False]
    jobs[0]._records.append(Trial(config={"n": 1}, outcome=Outcome.ERROR), reference=None)
    assert [len(job._records.read(calls[0].call.configs)) for job in jobs] == [1, 0, 1]
    (journal,) = blocks.current().cache_dir.glob("*/*.jsonl")
    text = journal.read_text()
    assert f'"arguments":"{calls[0].arguments_hash}"' in text


def test_records_without_arguments_do_not_count_with_key_fn(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier version has written them for any of the calls of the key."""
    sums, x = rows(name, [{"n": 1}, {"n": 2}]), np.ones(16, np.float32)
    call = call_of(sums, x)
    job = TuningJob(call, Situation.of(call.call), sums._tuner.rungs.tuning)
    with monkeypatch.context() as patch:
        patch.setattr(job._records._journal, "_arguments", "")
        job._records.append(Trial(config={"n": 1}, outcome=Outcome.ERROR), reference=None)
    assert job._records.read(call.call.configs) == {}


def test_a_faster_result_of_another_call_of_a_key_is_no_rival(name: str) -> None:
    sums = rows(name, [{"n": 1}, {"n": 2}])

    def entry(size: int, time_ms: float, seen: int) -> Any:
        call = call_of(sums, np.ones(size, np.float32))
        found = Findings(time_ms, None, search=Searched("exhausted", seen, 9))
        return entry_for(call, {"n": 1}, found, {"name": "random"})

    thorough = entry(16, 1.0, seen=9)
    assert joined_by_sweep("cpu", "key", thorough, entry(16, 2.0, seen=3))["time_ms"] == 1.0
    assert joined_by_sweep("cpu", "key", thorough, entry(24, 2.0, seen=3))["time_ms"] == 2.0


def test_calls_without_key_fn_need_no_hash_of_their_arguments(name: str) -> None:
    call = call_of(rows(name, [{"n": 1}], key_fn=None), jnp.ones(4))
    assert call.identity == (call.id, "")


def test_a_remembered_answer_passes_the_guard(name: str) -> None:
    total = whole_blocks(name)
    call = call_of(total, SMALL)
    total._tuner.rungs.memory.remember(call, Answer(Origin.SAVED, {"block": 64}))
    with pytest.warns(quarantune.CacheWarning, match="prune_fn drops"):
        assert float(total(SMALL)) == 80
