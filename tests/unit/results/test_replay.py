"""Searches replay against recorded trials of any format, and damaged recordings are refused."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import re
import runpy
import sys
import warnings
import zlib
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT, refused

import quarantune
from quarantune import CacheWarning, Outcome, Trial
from quarantune.cache.journal import Journal
from quarantune.cache.store import Store
from quarantune.host.frames import told
from quarantune.search import models
from quarantune.values.codec import FrozenDict
from quarantune.values.configs import Config

EXAMPLES = ROOT / "examples"
RECORDINGS = sorted((EXAMPLES / "spaces").glob("*.json.gz"))
read = runpy.run_path(str(EXAMPLES / "search_replay.py"))["read"]

SHARED_MEMORY_BYTES = 176 * 1024


def hopper_like() -> list[Trial]:
    """Returns 648 trials like a Hopper matmul's; 408 need too much shared memory."""
    trials = []
    sizes, names = (64, 128, 256), ("tile_m", "tile_n", "tile_k", "steps", "minor", "width", "wg")
    for values in itertools.product(sizes, sizes, (64, 128), (2, 4, 6), "MN", (1, 8, 16), "MN"):
        m, n, k, steps, minor, width, wg = values
        needed = steps * (m + n) * k * 2 + m * n * 2
        time_ms = (
            (1 + abs(math.log2(m * n / 2**15)) / 4 + 0.3 / steps + (k == 64) / 20)
            * (1.0, 1.02)[minor == "M"]
            * {1: 1.2, 8: 1.0, 16: 1.03}[width]
            * (1.0, 1.03)[(wg == "M") == (m > n)]
        )
        works = needed <= SHARED_MEMORY_BYTES and m * n <= 2**15
        outcome = Outcome.OK if works else Outcome.ERROR
        config = dict(zip(names, values, strict=True))
        trials.append(Trial(config=config, outcome=outcome, time_ms=time_ms if works else None))
    return trials


def t4(rows: list[tuple[Config, Any]], unit: str = "milliseconds") -> dict[str, Any]:
    results = []
    for config, time in rows:
        valid = not isinstance(time, str)
        measured = [{"name": "time", "value": time if valid else "RuntimeFailedConfig", "unit": unit if valid else ""}]
        results.append(
            {
                "configuration": config,
                "invalidity": "correct" if valid else time,
                "measurements": measured,
                "objectives": ["time"],
            }
        )
    return {"metadata": {"timeunit": "miliseconds"}, "results": results, "schema_version": "1.0.0"}


ROWS: list[tuple[Config, Any]] = [
    ({"BM": 16, "via": "a"}, 3.0),
    ({"BM": 32, "via": "a"}, 2.0),
    ({"BM": 16, "via": "b"}, "runtime"),
    ({"BM": 32, "via": "b"}, "compile"),
]


def expected(result: quarantune.ReplayResult) -> None:
    assert (result.size, result.invalid, result.optimum_ms) == (4, 0.5, 2.0)
    (run,) = result.runs["exhaustive"]
    assert (run.best_ms, run.evaluations, run.failures) == ((3.0, 2.0, 2.0, 2.0), 2, 2)


def test_the_example_reads_t4_json_with_and_without_compression(tmp_path: Path) -> None:
    for unit, scale in (("milliseconds", 1), ("", 1), ("us", 1000)):
        text = json.dumps(t4([(c, t if isinstance(t, str) else t * scale) for c, t in ROWS], unit))
        (tmp_path / "space.json").write_text(text)
        (tmp_path / "space.json.gz").write_bytes(gzip.compress(text.encode()))
        for name in ("space.json", "space.json.gz"):
            expected(quarantune.replay(read(tmp_path / name), "exhaustive", seeds=[0]))


def test_the_files_of_ktt_and_of_kernel_tuners_cache_replay(tmp_path: Path) -> None:
    ktt = [
        {
            "Configuration": [{"Name": key, "Value": value, "ValueType": "Int"} for key, value in config.items()],
            "Status": "ComputationFailed" if isinstance(time, str) else "Ok",
            "TotalDuration": 0.0 if isinstance(time, str) else time * 1000,
        }
        for config, time in ROWS
    ]
    (tmp_path / "ktt.json").write_text(json.dumps({"Metadata": {"TimeUnit": "Microseconds"}, "Results": ktt}))
    cache = {
        str(at): {**c, "time": "RuntimeFailedConfig" if isinstance(t, str) else t} for at, (c, t) in enumerate(ROWS)
    }
    tuned = {"tune_params_keys": ["BM", "via"], "objective": "time", "cache": cache}
    (tmp_path / "cache.json").write_text(json.dumps(tuned))
    (tmp_path / "cache.json.gz").write_bytes(gzip.compress(json.dumps(tuned).encode()))
    for recorded in (read(tmp_path / "ktt.json"), read(tmp_path / "cache.json"), read(tmp_path / "cache.json.gz")):
        expected(quarantune.replay(recorded, "exhaustive", seeds=[0]))


def test_a_rate_that_is_recorded_as_a_negative_objective_replays(tmp_path: Path) -> None:
    cache = {str(at): {"BM": at, "GFLOP/s": -100.0 * at} for at in (1, 2, 4)}
    tuned = {"tune_params_keys": ["BM"], "objective": "GFLOP/s", "cache": cache}
    (tmp_path / "cache.json").write_text(json.dumps(tuned))
    assert quarantune.replay(read(tmp_path / "cache.json"), "exhaustive", seeds=[0]).optimum_ms == 1 / 400
    (tmp_path / "cache.json").write_text(json.dumps(tuned).replace("GFLOP/s", "time"))
    with pytest.raises(ValueError, match=r"cache.json is damaged: .*the time of"):
        read(tmp_path / "cache.json")


def test_our_journals_and_trials_in_memory_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = [
        Trial(
            config=config,
            outcome=Outcome.ERROR if isinstance(time, str) else Outcome.OK,
            time_ms=None if isinstance(time, str) else time,
        )
        for config, time in ROWS
    ]
    trials.append(Trial(config={"BM": 64, "via": "a"}, outcome=Outcome.NOT_RUN))
    expected(quarantune.replay(trials, "exhaustive", seeds=[0]))
    journal = Journal(tmp_path, "matmul", "cpu", "key")
    journal.append({"trial": Trial(config=ROWS[0][0], outcome=Outcome.CRASHED).to_json()})  # a later trial replaces it
    for trial in trials:
        journal.append({"trial": trial.to_json()})
    Journal(tmp_path, "matmul", "cpu", "trouble").append({"config": "{}", "outcome": "crashed"})
    expected(quarantune.replay(tmp_path / "matmul.trials", "exhaustive", seeds=[0]))
    Journal(tmp_path, "matmul", "cpu", "key", suffix=".uncompiled").append({"trial": trials[0].to_json()})
    expected(quarantune.replay(tmp_path / "matmul.trials", "exhaustive", seeds=[0]))
    Journal(tmp_path, "matmul", "cpu", "other").append({"trial": trials[0].to_json()})
    Store(tmp_path).put("matmul", "cpu", "key", {"config": {}, "key_values": {"x": {"shape": [8], "dtype": "int8"}}})
    monkeypatch.chdir(tmp_path / "matmul.trials")
    with pytest.raises(ValueError, match=r"^\. holds .* 2 problems; give the path of one: ") as error:
        quarantune.replay(".")
    assert re.search(r"matmul\(x s8\[8\]\) on cpu \(6 trials in \w+\.\w+\.jsonl\)", str(error.value))
    assert re.search(r"a call without a result \(1 trial in \w+\.\w+\.jsonl\)", str(error.value))
    (file,) = (path for path in (tmp_path / "matmul.trials").iterdir() if path.read_text().count('"trial"') > 1)
    expected(quarantune.replay(file, "exhaustive", seeds=[0]))


def test_trials_with_tagged_objects_in_json_replay(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "matmul", "cpu", "key")
    for at, phase in enumerate(quarantune.Phase):
        config = {"alone": FrozenDict(a=(phase,)), "within": (phase,), "itself": phase}
        journal.append({"trial": Trial(config=config, outcome=Outcome.OK, time_ms=1.0 + at).to_json()})
    replayed = quarantune.replay(tmp_path / "matmul.trials", ("exhaustive", "surrogate"), seeds=[0])
    assert [runs[0].failures for runs in replayed.runs.values()] == [0, 0]
    assert (replayed.size, replayed.optimum_ms) == (len(quarantune.Phase), 1.0)


def test_a_journal_with_an_editors_line_ends_replays(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "matmul", "cpu", "key")
    for at in range(3):
        journal.append({"trial": Trial(config={"n": at}, outcome=Outcome.OK, time_ms=1.0 + at).to_json()})
    (file,) = (tmp_path / "matmul.trials").glob("*.jsonl")
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().replace(b"\n", b"\r\n"))
    assert quarantune.replay(file, "exhaustive", seeds=[0]).size == 3


@pytest.mark.parametrize("best", [0.0, -4.0])
def test_scores_of_zero_or_less_are_ordinary_figures(best: float) -> None:
    trials = [Trial(config={"n": at}, outcome=Outcome.OK, time_ms=1.0, score=best + at) for at in range(3)]
    result = quarantune.replay(trials, "exhaustive", seeds=[0])
    assert (result.optimum_ms, result.evaluations("exhaustive")) == (best, 1)
    assert f"{best:.4g}" in result.table().splitlines()[-1]
    alone = quarantune.replay(trials[:1], "exhaustive", seeds=[0])
    assert alone.runs["exhaustive"][0].best_ms == (best,)


def test_searches_are_compared_side_by_side() -> None:
    class Mine:
        def __init__(self, configs: list[Config], seed: int) -> None:
            self.left = configs

        def ask(self, n: int) -> list[Config]:
            return [self.left.pop() for _ in range(min(n, len(self.left)))]

        def tell(self, config: Config, trial: Trial) -> None:
            pass

    result = quarantune.replay(hopper_like(), ("surrogate", "random", Mine), seeds=range(2), max_trials=48)
    assert list(result.runs) == ["surrogate", "random", "Mine"]
    for runs in result.runs.values():
        assert [len(run.best_ms) for run in runs] == [48, 48]
        assert all(list(run.best_ms) == sorted(run.best_ms, reverse=True) for run in runs)
    title, _, header, *rows = result.table().splitlines()
    assert title.startswith("648 configs, 63% of them fail; best 1.")
    assert [row.split()[0] for row in (header, *rows)] == ["search", *result.runs]
    assert result.evaluations("surrogate", 0.5) <= 48


@pytest.mark.parametrize(
    ("recorded", "options", "message"),
    [
        (7, {}, r"recorded is 7: give a path"),
        ([7], {}, r"recorded holds 7, which is not a quarantune.Trial"),
        ([], {}, r"the list holds no measured trial"),
        (hopper_like(), {"search": "surrogat"}, r"Did you mean 'surrogate'\?"),
        (hopper_like(), {"search": ()}, r"search is empty"),
        (hopper_like(), {"search": [7]}, r"search holds 7: an object serves one run only"),
        (hopper_like(), {"batch": 0}, r"batch is 0: give a whole number of at least 1"),
        (hopper_like(), {"seeds": []}, r"the number of seeds is 0"),
        (hopper_like(), {"within": 2}, r"within is 2: give a share"),
        (hopper_like(), {"within": "2"}, r"within is '2': give a share"),
        (hopper_like(), {"search": None}, r"search holds None: an object serves one run only"),
        (hopper_like(), {"search": [lambda configs, seed: None] * 2}, r"search holds '<lambda>' twice: give each"),
        (hopper_like(), {"seeds": 20}, r"seeds is 20: give several whole numbers, such as range"),
        (hopper_like(), {"seeds": [0.5]}, r"seeds holds 0.5: give whole numbers of at least 0"),
    ],
)
def test_replays_of_nonsense_are_refused(recorded: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        quarantune.replay(recorded, **options)


def test_damaged_recordings_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "space.json"
    for text, message in (
        ("{", "is not JSON"),
        ("{}", "is neither T4 JSON.* nor a cache file of Kernel Tuner"),
        ("[]", "is neither T4 JSON.* nor a cache file of Kernel Tuner"),
        ('{"tune_params_keys": ["BM"], "cache": {"0": {}}}', "is damaged"),
        ('{"tune_params_keys": ["BM"], "cache": [1]}', "is damaged"),
        ('{"tune_params_keys": ["BM"], "cache": {"0": {"BM": 1, "time": -1}}}', "is damaged.*the time of"),
        (f'{{"tune_params_keys": ["BM"], "cache": {{"0": {{"BM": 1, "time": {10**400}}}}}}}', "is damaged.*too large"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            read(file)
    with pytest.raises(ValueError, match=r"space.json is neither a journal .* reads files of other tuners"):
        quarantune.replay(file)
    file.write_bytes(b"\x1f\x8b gzip?")
    with pytest.raises(ValueError, match="cannot be decompressed"):
        read(file)
    with pytest.raises(ValueError, match="holds neither a saved result nor a journal"):
        quarantune.replay(tmp_path)
    for name in ("missing.json", "missing.jsonl"):
        with pytest.raises(FileNotFoundError, match=name):
            quarantune.replay(tmp_path / name)


def test_only_the_damaged_journal_is_named(tmp_path: Path) -> None:
    for host, trial in (("one", {"config": {"BM": 1}, "outcome": "ok", "time_ms": 1.0}), ("two", {"config": 1})):
        text = json.dumps({"trial": trial}).encode()
        line = b"%08x %b\n" % (zlib.crc32(text), text)
        (tmp_path / f"problem.{host}.jsonl").write_bytes(line)
    with pytest.raises(ValueError, match=r"^the journal \S*/problem\.two\.jsonl is damaged: \S") as raised:
        quarantune.replay(tmp_path)
    assert "problem.one" not in str(raised.value)
    (tmp_path / "problem.two.jsonl").unlink()
    assert quarantune.replay(tmp_path, "exhaustive", seeds=[0]).size == 1


def recorded(directory: Path) -> Path:
    """Records ROWS in a function's journal, and returns its file."""
    journal = Journal(directory, "matmul", "cpu", "key")
    for config, time in ROWS:
        ended = {"outcome": Outcome.ERROR} if isinstance(time, str) else {"outcome": Outcome.OK, "time_ms": time}
        journal.append({"trial": Trial(config=config, **ended).to_json()})
    (file,) = (directory / "matmul.trials").iterdir()
    return file


def test_omitted_lines_are_counted_and_their_file_is_named(tmp_path: Path) -> None:
    file = recorded(tmp_path)
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines, lines[0].replace(b"3.0", b"0.3"), b"\xff garbage \0\n"]))
    for path in (file, file.parent):
        told.clear()
        with pytest.warns(
            CacheWarning, match=f"^2 damaged lines of the journal '{re.escape(str(file))}' are left out$"
        ):
            expected(quarantune.replay(path, "exhaustive", seeds=[0]))
    file.write_bytes(b"".join([*lines, b"garbage\n"]))
    with pytest.warns(CacheWarning, match="^1 damaged line of the journal .* is left out$"):
        expected(quarantune.replay(file, "exhaustive", seeds=[0]))


@pytest.mark.parametrize(("garbage", "lines"), [(b"\0" * 5000, 0), (bytes(range(256)) * 20, 20), (b"\xff\n", 1)])
def test_a_journal_of_garbage_holds_no_trials(garbage: bytes, lines: int, tmp_path: Path) -> None:
    file = tmp_path / "problem.host.jsonl"
    file.write_bytes(garbage)
    for path in (file, tmp_path):
        told.clear()
        error = pytest.raises(ValueError, match=f"^{re.escape(str(path))} holds n")
        with warnings.catch_warnings(record=True, action="always") as caught, error:
            quarantune.replay(path)
        assert [str(each.message).split()[0] for each in caught] == [str(lines)] * bool(lines)


def test_a_journal_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    file = recorded(tmp_path)
    expected(quarantune.replay(file, "exhaustive", seeds=[0]))
    for path, mode in ((file, 0), (file.parent, 0), (file.parent, 0o111)):
        with refused(path, mode):
            for given in {file if mode == 0 else file.parent, file.parent}:
                with pytest.raises(PermissionError) as raised:
                    quarantune.replay(given)
                assert str(raised.value.filename).startswith(str(file.parent))
    (file.parent / "another.host.jsonl").mkdir()
    for given in (file.parent / "another.host.jsonl", file.parent):
        with pytest.raises((OSError, ValueError), match=r"another\.host\.jsonl"):
            quarantune.replay(given)


def test_the_example_prints_a_table_for_each_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [({"BM": m, "BN": n}, float(m + n)) for m in range(1, 9) for n in range(1, 9)]
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(json.dumps(t4(rows)))
    example = EXAMPLES / "search_replay.py"
    given = [str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--seeds=2", "--search=surrogate,random"]
    monkeypatch.setattr(sys, "argv", [str(example), *given, "--max-trials=32"])
    runpy.run_path(str(example), run_name="__main__")
    printed = capsys.readouterr().out
    assert len(re.findall(r"^[ab]\.json: 64 configs, 0% of them fail; best 2 ms", printed, re.MULTILINE)) == 2
    assert len(re.findall(r"^(surrogate|random) .* of 2 ", printed, re.MULTILINE)) == 4
    assert "| space | configs | fail | surrogate | random |" in printed
    assert len(re.findall(r"^\| [ab] \| 64 \| 0% \| \d+ / \d+ \| (\d+|-) / (\d+|-) \|$", printed, re.MULTILINE)) == 2


@pytest.mark.slow
def test_asking_costs_little_at_400_trials() -> None:
    sizes = {name: list(range(1, 11)) for name in "abcd"}
    trials = [
        Trial(config=config, outcome=Outcome.OK, time_ms=1 + sum((value - 6) ** 2 for value in config.values()) / 9)
        for config in quarantune.grid(**sizes)
    ]
    result = quarantune.replay(trials, "surrogate", seeds=range(2), max_trials=400)
    assert [len(run.best_ms) for run in result.runs["surrogate"]] == [400] * 2
    assert min(run.cpu_ms for run in result.runs["surrogate"]) <= 5


@pytest.mark.long
@pytest.mark.slow
def test_asking_one_by_one_costs_little_at_1000_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    real = models.Models.forecast

    def counted(*given: Any) -> Any:
        made.append(len(given[2]))
        return real(*given)

    monkeypatch.setattr(models.Models, "forecast", counted)
    sizes = {name: list(range(1, 11)) for name in "abcd"}
    trials = [
        Trial(config=config, outcome=Outcome.OK, time_ms=1 + sum((value - 6) ** 2 for value in config.values()) / 9)
        for config in quarantune.grid(**sizes)
    ]
    run = quarantune.replay(trials, "surrogate", seeds=range(1), max_trials=1000, batch=1).runs["surrogate"][0]
    better = sum(after < before for before, after in itertools.pairwise(run.best_ms))
    assert len(run.best_ms) == 1000
    assert len(made) <= 1000 / 8 + better + 1
    assert run.cpu_ms <= 6  # some 2 on a quiet machine


@pytest.mark.slow
def test_few_tried_configs_fail_in_a_space_that_mostly_fails() -> None:
    trials = hopper_like()
    assert sum(trial.outcome is Outcome.ERROR for trial in trials) == 408
    result = quarantune.replay(trials, seeds=range(8), max_trials=150)
    tried = {name: sum(run.failures for run in runs) / (150 * len(runs)) for name, runs in result.runs.items()}
    assert tried["surrogate"] <= 0.35
    assert tried["random"] > 0.5
    assert all(run.evaluations for run in result.runs["surrogate"])
    assert result.evaluations("surrogate") < (result.evaluations("random", 0.5) or math.inf)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda path: path.name)
def test_the_surrogate_beats_random_in_each_recorded_space(recording: Path) -> None:
    result = quarantune.replay(read(recording), seeds=range(6), max_trials=150)
    assert result.size > 1000
    assert (result.evaluations("surrogate") or math.inf) < (result.evaluations("random") or 151)
