"""`TuningCache` finds, changes, merges and exports entries, and functions of this process follow its changes."""

from __future__ import annotations

import json
import math
import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import quarantune
from quarantune.api.tuning_cache import TuningCache
from quarantune.cache import entries
from quarantune.cache.entries import CacheKey, MergeReport
from quarantune.cache.entry_file import SCHEMA
from quarantune.cache.journal import Journal
from quarantune.cache.problems import CacheWarning, CacheWriteError
from quarantune.cache.store import Store

X = np.arange(4, dtype=np.float32)


@pytest.fixture
def cache(tmp_path: Path) -> TuningCache:
    return TuningCache(tmp_path / "cache")


def test_all_names_of_the_cache_are_imported_from_its_package() -> None:
    names = ["Claim", "Holder", "wait", "Journal", "conclusions", "remember_trouble", "troublesome", "TuningCache"]
    names += ["CacheDiff", "CacheKey", "CacheRecord", "EntryPair", "MergeReport"]
    assert all(callable(getattr(quarantune.cache, name)) for name in names)
    assert quarantune.cache.TuningCache is quarantune.TuningCache


def test_a_config_is_found_by_kernel_problem_size_and_device(cache: TuningCache) -> None:
    assert cache.get("matmul", (1024, 512), "cuda:0") is None
    cache.put("matmul", (1024, 512), "cuda:0", {"BM": 64, "order": [0, 1]})
    assert cache.get("matmul", [1024, 512], "cuda:0") == {"BM": 64, "order": (0, 1)}
    assert cache.get("matmul", (1024, 513), "cuda:0") is None
    assert cache.get("matmul", (1024, 512), "cuda:1") is None
    assert cache.get("rmsnorm", (1024, 512), "cuda:0") is None


def test_another_process_finds_the_complete_entry_on_disk(cache: TuningCache) -> None:
    cache.put("matmul", (8,), "cpu", {"BM": 64}, time_ms=0.5)
    other = TuningCache(cache.directory)
    assert other.get("matmul", (8,), "cpu") == {"BM": 64}
    entry = other.entry("matmul", (8,), "cpu")
    assert entry is not None
    assert entry["time_ms"] == 0.5
    assert entry["key_values"] == [8]
    assert entry["schema"] == SCHEMA
    assert entry.keys() >= {"fingerprint", "space", "versions", "created", "trials"}


def test_a_config_in_memory_is_safe_from_the_callers_changes(cache: TuningCache) -> None:
    cache.put("f", 1, "cpu", {"BM": 64})
    Store(cache.directory).clear("f")
    config = cache.get("f", 1, "cpu")
    assert config == {"BM": 64}
    config["BM"] = 0
    assert cache.get("f", 1, "cpu") == {"BM": 64}


def test_a_result_of_an_autotuned_function_is_found_by_its_key(cache: TuningCache) -> None:
    key = '{"args":[["float32",[8,8]]]}'
    Store(cache.directory).put("m.make.<locals>.f", "cpu", key, {"config": {"BM": 8}})
    assert cache.get("m.make.<locals>.f", key, "cpu") == {"BM": 8}


def test_keys_and_iteration_cover_all_entries(cache: TuningCache) -> None:
    assert cache.keys() == []
    cache.put("g", (2,), "cpu", {"BM": 2})
    cache.put("Odd <name>", "text", "cpu", {"BM": 1})
    keys = cache.keys()
    assert [key.problem_size for key in keys] == ["text", "[2]"]
    assert keys[1] == CacheKey("g", "[2]", "cpu")
    configs = {key: cache.get(*key) for key in keys}
    assert list(configs.values()) == [{"BM": 1}, {"BM": 2}]
    assert {record.key: record.entry["config"] for record in TuningCache(cache.directory)} == configs


def test_membership_and_length_use_the_key(cache: TuningCache) -> None:
    assert len(cache) == 0
    cache.put("matmul", (1024, 512), "cuda:0", {"BM": 64})
    cache.put("matmul", "text", "cuda:0", {"BM": 64})
    for found in (cache, TuningCache(cache.directory)):
        assert len(found) == 2
        assert all(map(found.__contains__, found.keys()))
        assert all(record in found for record in found)
        assert ("matmul", [1024, 512], "cuda:0") in found
        assert CacheKey("matmul", "text", "cuda:0") in found
        assert ("matmul", (1024, 513), "cuda:0") not in found
        assert ("matmul", "text") not in found
        assert "matmul" not in found


def test_delete_forgets_in_memory_and_on_disk(cache: TuningCache) -> None:
    cache.put("f", 1, "cpu", {"BM": 64})
    assert cache.delete("f", 1, "cpu")
    assert not cache.delete("f", 1, "cpu")
    assert cache.get("f", 1, "cpu") is None
    assert TuningCache(cache.directory).get("f", 1, "cpu") is None


def test_clear_forgets_one_kernel_type_with_its_journals_or_all(cache: TuningCache) -> None:
    for name in ("f", "g", "h.<locals>.i"):
        cache.put(name, 1, "cpu", {"BM": 64})
    journal, interrupted = (Journal(cache.directory, name, "cpu", "1") for name in ("f", "never finished"))
    journal.append({"n": 1})
    interrupted.append({"n": 1})
    cache.clear("f")
    assert journal.records() == []
    assert interrupted.records() == [{"n": 1}]
    assert cache.get("f", 1, "cpu") is None
    assert cache.get("g", 1, "cpu") == {"BM": 64}
    cache.clear()
    assert interrupted.records() == []
    assert cache.keys() == []
    assert TuningCache(cache.directory).keys() == []


def tuned(name: str, *, is_good: bool = True) -> quarantune.Autotuned:
    @quarantune.autotune([{"n": 2}], name=name, rep=1, ref_fn=None)
    @jax.jit(static_argnames=["n"])
    def fn(x: Any, n: int = 1) -> Any:
        if n == 2 and not is_good:
            raise ArithmeticError("n=2 is bad")
        return x * n

    return fn


FORGET: dict[str, Callable[[TuningCache], object]] = {
    "clear": lambda cache: cache.clear(),
    "clear one": lambda cache: cache.clear("first"),
    "clear another path": lambda cache: TuningCache(cache.directory / ".." / cache.directory.name).clear("first"),
    "delete": lambda cache: [cache.delete(*it.key) for it in cache if it.key.kernel_type == "first"],
}


@pytest.mark.parametrize("name", FORGET)
def test_functions_here_forget_what_is_cleared_or_deleted(name: str, cache_dir: Path) -> None:
    first, second, by_hand = (
        tuned("first"),
        tuned("second"),
        quarantune.AutoTuner(tuned("first").__wrapped__, [{"n": 2}], name="first", rep=1, ref_fn=None),
    )
    for fn in (first, second):
        np.testing.assert_array_equal(fn(X), 2 * X)
    assert by_hand.run(X).from_cache
    FORGET[name](TuningCache(cache_dir))
    assert first.lookup(X) is None
    assert second.lookup(X) == (None if name == "clear" else {"n": 2})
    with quarantune.settings(on_miss="error"):
        for call in (first, by_hand.run):
            with pytest.raises(quarantune.CacheMissError):
                call(X)
    np.testing.assert_array_equal(first(X), 2 * X)
    assert first.lookup(X) == {"n": 2}


def test_clearing_a_function_forgets_its_failure_in_memory(cache_dir: Path, sweeps: list[str]) -> None:
    fn = tuned("failing", is_good=False)
    counts = []
    for cleared in (None, "another", "failing"):
        if cleared is not None:
            TuningCache(cache_dir).clear(cleared)
        for _ in range(2):
            with pytest.raises(quarantune.TuningFailedError):
                fn(X)
            counts.append(len(sweeps))
    assert counts == [1, 1, 1, 1, 2, 2]


def test_clearing_forgets_estimates_and_contextual_choices(cache_dir: Path) -> None:
    inner = tuned("inner")

    @quarantune.contextual_autotune(rep=1, ref_fn=None, name="outer")
    @jax.jit
    def outer(x: Any) -> Any:
        return inner(x) + 1

    outer(X)
    assert outer.lookup(X)
    TuningCache(cache_dir).clear("outer")
    assert outer.lookup(X) is None
    fn = tuned("estimated")
    fn(X)
    (key,) = (it.key for it in TuningCache(cache_dir) if it.key.kernel_type == "estimated")
    Store(cache_dir).put(
        key.kernel_type, key.device, key.problem_size, {"config": {"n": 2}, "search": {"stopped": "estimated"}}
    )
    again = tuned("estimated")
    assert again.lookup(X) == {"n": 2}
    TuningCache(cache_dir).delete(*key)
    assert again.lookup(X) is None


def test_functions_use_merged_entries_despite_their_memory(cache_dir: Path, tmp_path: Path, sweeps: list[str]) -> None:
    with quarantune.settings(cache_dir=tmp_path / "other"):
        other = tuned("merged")
        other(X)
    fn = tuned("merged")
    fn(X)
    (key,) = TuningCache(tmp_path / "other").keys()
    entry = TuningCache(tmp_path / "other").entry(*key)
    assert entry is not None
    del entry["program"]  # it identifies another config
    Store(tmp_path / "other").put(
        key.kernel_type,
        key.device,
        key.problem_size,
        {**entry, "config": {"n": 1}, "created": "2999-01-01T00:00:00+00:00"},
    )
    in_memory, failing = tuned("in memory"), tuned("failing", is_good=False)
    with quarantune.settings(disable_cache=True):
        in_memory(X)
        with pytest.raises(quarantune.TuningFailedError):
            failing(X)
    TuningCache(cache_dir).merge(tmp_path / "other")
    assert fn.lookup(X) == {"n": 1}
    with quarantune.settings(on_miss="error"):  # results in no file are kept
        np.testing.assert_array_equal(in_memory(X), 2 * X)
    with pytest.raises(quarantune.TuningFailedError):
        failing(X)
    assert sweeps.count("failing") == 1


def test_merge_adds_new_entries_and_keeps_the_newer_of_two(cache: TuningCache, tmp_path: Path) -> None:
    mine, theirs = Store(cache.directory), Store(tmp_path / "other")
    mine.put("f", "cpu", "[1]", {"config": {"BM": 1}, "created": "2025-01-02T00:00:00Z"})
    mine.put("f", "cpu", "[2]", {"config": {"BM": 1}, "created": "2025-01-01T00:00:00Z"})
    for key in ("[1]", "[2]", "[3]"):
        theirs.put("f", "cpu", key, {"config": {"BM": 2}, "created": "2025-01-01T12:00:00Z"})
    assert cache.get("f", [2], "cpu") == {"BM": 1}
    report = cache.merge(tmp_path / "other")
    assert report.added == (CacheKey("f", "[3]", "cpu"),)
    found = {key: entry["config"]["BM"] for key, entry in mine.read("f")["cpu"].items()}
    assert found == {"[1]": 1, "[2]": 2, "[3]": 2}
    assert cache.get("f", [2], "cpu") == {"BM": 2}
    both = {conflict.key.problem_size: (conflict.kept, conflict.other) for conflict in report.conflicts}
    assert {key: [entry["config"]["BM"] for entry in pair] for key, pair in both.items()} == {
        "[1]": [1, 2],
        "[2]": [2, 1],
    }
    assert "1 added, 0 updated, 0 unchanged, 2 in conflict" in str(report)
    assert 'f on cpu, [2]: {"BM":2} and {"BM":1}' in str(report)
    assert cache.merge(TuningCache(tmp_path / "empty")) == MergeReport()
    with pytest.raises(ValueError, match="it is not a directory"):
        cache.merge(tmp_path / "missing")


def test_merge_keeps_the_entry_with_more_samples_of_one_config(cache: TuningCache, tmp_path: Path) -> None:
    mine, theirs = Store(cache.directory), Store(tmp_path / "other")
    for key, samples in (("[1]", 5), ("[2]", 20), ("[3]", 5)):
        mine.put("f", "cpu", key, {"config": {"BM": 1}, "samples": samples, "time_ms": 1.0})
    for key, samples in (("[1]", 10), ("[2]", 10), ("[3]", 5)):
        theirs.put("f", "cpu", key, {"config": {"BM": 1}, "samples": samples, "time_ms": 2.0})
    report = cache.merge(tmp_path / "other")
    assert [key.problem_size for key in report.updated] == ["[1]"]
    assert [key.problem_size for key in report.unchanged] == ["[2]", "[3]"]
    assert {key: entry["time_ms"] for key, entry in mine.read("f")["cpu"].items()} == {
        "[1]": 2.0,
        "[2]": 1.0,
        "[3]": 1.0,
    }
    assert not report.conflicts


def test_merging_changes_nothing_in_the_other_cache(cache: TuningCache, tmp_path: Path) -> None:
    other = tmp_path / "other"
    Store(other).put("f", "cpu", "[1]", {"config": {"BM": 1}})
    (other / "torn.json").write_text('{\n"cpu": {')
    before = {path.name: path.read_bytes() for path in other.iterdir()}
    with pytest.warns(CacheWarning, match="the file stays"):
        assert len(cache.merge(other).added) == 1
    assert {path.name: path.read_bytes() for path in other.iterdir()} == before


def test_diff_shows_how_two_caches_differ(cache: TuningCache, tmp_path: Path) -> None:
    other = TuningCache(tmp_path / "other")
    for number in (1, 2, 3):
        cache.put("f", number, "cpu", {"BM": 1})
    for number, block in ((2, 1), (3, 7), (4, 1)):
        other.put("f", number, "cpu", {"BM": block}, time_ms=1.0)
    diff = cache.diff(other)
    assert [[key.problem_size for key in keys] for keys in (diff.only_here, diff.only_there, diff.same)] == [
        ["1"],
        ["4"],
        ["2"],
    ]
    assert [(pair.key.problem_size, pair.kept["config"], pair.other["config"]) for pair in diff.different] == [
        ("3", {"BM": 1}, {"BM": 7})
    ]
    assert "1 only here, 1 only there, 1 different, 1 the same" in str(diff)
    assert cache.diff(cache.directory).different == ()
    with pytest.raises(ValueError, match="not a directory"):
        cache.diff(tmp_path / "missing")


def test_export_writes_chosen_entries_and_nothing_else(cache: TuningCache, tmp_path: Path) -> None:
    table = tmp_path / "table"
    for name, device in (("lib.f", "A"), ("lib.f", "B"), ("lib.Odd <g>", "A"), ("mine", "A")):
        for number in (2, 1):
            cache.put(name, number, device, {"BM": number})
    assert len(cache.export(table, names=["lib.*"], devices="A")) == 4
    assert sorted(path.name for path in table.iterdir()) == sorted(
        path.name for path in cache.directory.glob("*.json") if path.name != "mine.json"
    )
    shipped = TuningCache(table)
    assert {record.key.device for record in shipped} == {"A"}
    assert shipped.get("lib.f", 2, "A") == {"BM": 2}
    assert list(Store(table).read("lib.f")["A"]) == ["1", "2"], "sorted, for version control"
    cache.put("lib.f", 1, "A", {"BM": 99})
    assert cache.export(table, names="lib.f", devices=["A", "B"])
    assert {record.entry["config"]["BM"] for record in TuningCache(table)} == {1, 2, 99}
    assert TuningCache(table).get("lib.Odd <g>", 1, "A") == {"BM": 1}, "what was there stays"
    for wrong, fragment in (({"names": "lib.h"}, "lib.f"), ({"devices": ["C"]}, "results for: A, B")):
        with pytest.raises(ValueError, match=fragment):
            cache.export(table, **wrong)  # type: ignore[arg-type]
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheWriteError, match="nothing was exported"):
        cache.export(tmp_path / "file")


@pytest.mark.parametrize("content", ['{"A": {"1": {"schema": 99, "config": {}}}}', '{"A": {"1": {"config"'])
def test_export_replaces_no_file_that_it_cannot_read(cache: TuningCache, tmp_path: Path, content: str) -> None:
    cache.put("a", 1, "A", {"BM": 1})
    cache.put("f", 1, "A", {"BM": 1})
    file = tmp_path / "f.json"
    file.write_text(content)
    with pytest.raises(CacheWriteError, match=r"nothing was exported: .*f\.json.* would be lost, so move it away"):
        cache.export(tmp_path)
    assert file.read_text() == content
    assert not (tmp_path / "a.json").exists()


def test_a_cache_in_memory_is_not_merged_compared_or_exported(
    cache: TuningCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUARANTUNE_DISABLE_CACHE", "1")
    in_memory = TuningCache()
    calls = [
        lambda: in_memory.merge(cache),
        lambda: cache.merge(in_memory),
        lambda: cache.diff(in_memory),
        lambda: in_memory.diff(cache),
        lambda: in_memory.export(tmp_path),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"is in memory only.* give it a directory"):
            call()


def test_problems_lists_every_problem_and_changes_nothing(cache: TuningCache) -> None:
    assert cache.problems() == []
    cache.put("good", 1, "cpu", {"BM": 1})
    assert cache.problems() == []
    files = {
        "torn.json": '{\n"cpu": {',
        "newer.json": json.dumps({"cpu": {"k": {"schema": SCHEMA + 1, "config": {}}}}),
        "odd.json": json.dumps({"cpu": {"k": {"config": 3, "time_ms": "fast"}}}),
        "old.json.corrupt-20250101T000000": "junk",
        "odd.trials/0123456789ab.0123456789ab.jsonl": "junk\nmore junk\n",
    }
    for name, content in files.items():
        (cache.directory / name).parent.mkdir(exist_ok=True)
        (cache.directory / name).write_text(content)
    problems = cache.problems()
    assert len(problems) == 7
    for fragment in (
        "torn.json' is not JSON",
        "newer than",
        "schema is None",
        "config is 3",
        "'fast'",
        "set aside",
    ):
        assert sum(fragment in problem for problem in problems) == 1, fragment
    assert {name: (cache.directory / name).read_text() for name in files} == files


FOREIGN = {
    "package.json": '{\n  "name": "of another program",\n  "scripts": {"test": "x"}\n}\n',
    "tsconfig.json": '{\n  // with a comment\n  "compilerOptions": {"strict": true}\n}\n',
    "list.json": "[1, 2]",
    "empty.json": "",
    "nothing.json": "{}",
    "no_dependencies.json": '{"dependencies": {}}',
    "binary.json": "\x00\x01",
    "folder.json/inside.json": "{}",
    "f.json.corrupt-by-me": "mine",
    ".f.json.bak.tmp": "mine",
    "f.trials/notes.jsonl": "of another program\n",
    "f.trials/notes.tmp": "mine",
    "other.trials/results.final": "mine",
    "other.trials/results.corrupt-1": "mine",
    "other.entries/readme.json": "mine",
}


def test_files_of_other_programs_stay_and_are_not_damage(cache: TuningCache, tmp_path: Path) -> None:
    Store(cache.directory).put("f", "cpu", "1", {"config": {"BM": 1}, "created": "2020-01-01T00:00:00+00:00"})
    for name, content in FOREIGN.items():
        (cache.directory / name).parent.mkdir(exist_ok=True)
        (cache.directory / name).write_text(content)
        os.utime(cache.directory / name, (1e9, 1e9))
    (cache.directory / "link.json").symlink_to(tmp_path / "elsewhere")

    def foreign() -> dict[str, str]:
        paths = [path for path in cache.directory.rglob("*") if path.is_file() and path.name != ".f.json.lock"]
        return {str(path.relative_to(cache.directory)): path.read_text() for path in paths}

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [record.key.kernel_type for record in cache] == ["f"]
        assert cache.problems() == []
        assert cache.export(tmp_path / "table") == cache.keys()
        assert not TuningCache(tmp_path / "merged").merge(cache.directory).conflicts
        assert not cache.diff(tmp_path / "table").only_here
        removed, files = entries.prune(Store(cache.directory), older_than_s=3600.0)
    assert (len(removed), files) == (1, [])
    assert foreign().items() >= FOREIGN.items()
    cache.clear()
    assert foreign() == FOREIGN
    assert (cache.directory / "link.json").is_symlink()


@pytest.mark.filterwarnings("ignore::quarantune.cache.CacheWarning")
@pytest.mark.parametrize("entry", [{"config": 3}, {}, {"config": None}])
def test_an_entry_without_a_usable_config_is_a_miss(cache: TuningCache, entry: dict[str, object]) -> None:
    cache.directory.mkdir()
    Store(cache.directory).path("f").write_text(json.dumps({"cpu": {"[1]": {"schema": SCHEMA} | entry}}))
    assert cache.get("f", [1], "cpu") is None


def test_a_config_no_reader_accepts_stays_in_memory_only(cache: TuningCache) -> None:
    cache.put("f", 1, "cpu", {"BM": 1})
    with pytest.warns(CacheWarning, match="kept in memory only: .* its time_ms is 0, not a time"):
        cache.put("f", 2, "cpu", {"BM": 2}, time_ms=0)
    assert cache.get("f", 2, "cpu") == {"BM": 2}
    other = TuningCache(cache.directory)
    assert other.get("f", 1, "cpu") == {"BM": 1}
    assert other.problems() == []


def test_a_config_that_cannot_be_saved_warns_once_and_stays(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = TuningCache(tmp_path / "file")
    with pytest.warns(CacheWarning, match="kept in memory only: nothing was saved"):
        cache.put("f", 1, "cpu", {"BM": 1})
    cache.put("f", 2, "cpu", {"BM": 2})
    assert cache.get("f", 1, "cpu") == {"BM": 1}
    assert cache.keys() == [("f", "1", "cpu"), ("f", "2", "cpu")]


def test_a_value_json_cannot_hold_is_refused_before_it_is_kept(cache: TuningCache) -> None:
    for config in ({"BM": math.nan}, {"BM": object()}):
        with pytest.raises((ValueError, TypeError), match="cannot be kept in the cache"):
            cache.put("f", 1, "cpu", config)
    assert cache.get("f", 1, "cpu") is None


def test_a_newer_file_is_not_cleared(cache: TuningCache) -> None:
    cache.directory.mkdir()
    content = json.dumps({"cpu": {"k": {"schema": SCHEMA + 1}}})
    (cache.directory / "f.json").write_text(content)
    with pytest.raises(CacheWriteError, match="newer"):
        cache.clear()
    assert (cache.directory / "f.json").read_text() == content


def test_without_a_directory_the_operators_setting_applies(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert TuningCache().directory == cache_dir
    TuningCache().put("f", 1, "cpu", {"BM": 1})
    assert TuningCache().get("f", 1, "cpu") == {"BM": 1}
    monkeypatch.setenv("QUARANTUNE_DISABLE_CACHE", "1")
    memory = TuningCache()
    assert memory.get("f", 1, "cpu") is None
    memory.put("f", 2, "cpu", {"BM": 2})
    assert memory.get("f", 2, "cpu") == {"BM": 2}
    assert memory.keys() == [("f", "2", "cpu")]
    assert memory.problems() == []
    assert list(memory) == []
    memory.clear()
    assert memory.keys() == []
    monkeypatch.delenv("QUARANTUNE_DISABLE_CACHE")
    assert TuningCache().get("f", 2, "cpu") is None


def test_threads_share_one_cache(cache: TuningCache) -> None:
    def use(thread: int) -> None:
        for number in range(10):
            cache.put("f", (thread, number), "cpu", {"BM": number})
            assert cache.get("f", (thread, number), "cpu") == {"BM": number}

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(cache.keys()) == 40
