"""An entry or record that makes no sense costs a warning and a new measurement, and is never an error."""

from __future__ import annotations

import contextlib
import functools
import json
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from cached_functions import X, cache_file, edit, entry_of, one_warning, scaled

import quarantune
from quarantune import CacheMissError
from quarantune.cache.entry_file import SCHEMA

pytestmark = pytest.mark.usefixtures("two_slots")


def test_an_entry_whose_config_left_the_space_is_a_miss(name: str, swept: list[list[Any]]) -> None:
    scaled(name)(X)
    without_it = scaled(name, [{"n": 0}, {"n": 1}])
    with one_warning("config {'n': 2} is no longer in the config space"):
        np.testing.assert_array_equal(without_it(X), X)
    assert swept == [[1, 2]], "the defaults, n=0, were measured before"


BROKEN: list[dict[str, Any]] = [
    {"config": {"n": 2, "m": 3}},
    {"config": {"m": 2}},
    {"config": {}},
    {"config": {"n": 7}},
    {"config": {"n": "2"}},
    {"config": {"n": {"n": 2}}},
    {"config": {"n": [2]}},
    {"config": {"n": None}},
    {"config": [["n", 2]]},
    {"config": None},
]


@pytest.mark.slow
def test_an_entry_with_a_nonsensical_config_is_a_miss(name: str, swept: list[list[Any]], cache_dir: Path) -> None:
    np.testing.assert_array_equal(scaled(name)(X), X * 2)
    good = entry_of(cache_dir)
    for damage in BROKEN:
        edit(cache_dir, lambda entry, damage=damage: entry.update(damage))
        fn = scaled(name)
        outdated = (f"{name}: the cached config", "is no longer in the config space")
        with one_warning(*(outdated if isinstance(damage["config"], dict) else ("its config is", "sets it aside"))):
            assert fn.lookup(X) is None
            np.testing.assert_array_equal(fn(X), X * 2)
        assert entry_of(cache_dir)["config"] == good["config"]
    assert swept == [[1, 2]]


def test_a_cached_config_with_a_bad_number_is_a_miss(name: str, cache_dir: Path) -> None:
    scaled(name)(X)
    file = cache_file(cache_dir)
    file.write_text(file.read_text().replace('{"n": 2}', '{"n": 1e999}'))
    with one_warning(f"{name}: the cached config", "is no longer in the config space"):
        np.testing.assert_array_equal(scaled(name)(X), X * 2)
    assert entry_of(cache_dir)["config"] == {"n": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nonsense", "refused"),
    [
        (None, {"created"}),
        ([1], {"time_ms", "fingerprint", "space", "versions", "created", "trials"}),
        pytest.param(7, {"fingerprint", "space", "versions", "created", "trials"}, marks=pytest.mark.long),
        pytest.param("text", {"time_ms", "fingerprint", "space", "versions", "trials"}, marks=pytest.mark.long),
        pytest.param({"a": 1}, {"time_ms", "fingerprint", "versions", "created"}, marks=pytest.mark.long),
    ],
    ids=lambda value: None if isinstance(value, set) else repr(value),
)
@pytest.mark.filterwarnings("ignore:.*using results made under")
def test_nonsense_around_a_good_config_never_crashes_a_call(
    nonsense: Any, refused: set[str], name: str, cache_dir: Path, swept: list[list[Any]]
) -> None:
    scaled(name)(X)
    fields = ("time_ms", "key_values", "fingerprint", "space", "versions", "created", "trials")
    for field in fields:
        edit(cache_dir, lambda entry, field=field: entry.update({field: nonsense}))
        with one_warning(f"its {field} ", "sets it aside") if field in refused else contextlib.nullcontext():
            np.testing.assert_array_equal(scaled(name)(X), X * 2)
        with quarantune.settings(on_miss="error"), pytest.raises(CacheMissError):
            scaled(name)(X[:2])
    edit(cache_dir, lambda entry: [entry.pop(field, None) for field in fields])
    np.testing.assert_array_equal(scaled(name)(X), X * 2)
    assert swept == [[1, 2]], "the journal still has the refused values"


@pytest.mark.parametrize("content", ['{"cpu": {"k": {"config": ', "\x00\x01binary"])
def test_a_damaged_cache_file_is_set_aside_and_reported_once(content: str, name: str, cache_dir: Path) -> None:
    cache_dir.mkdir()
    (cache_dir / f"{name}.json").write_text(content)
    with one_warning("sets it aside as", ".corrupt-"):
        np.testing.assert_array_equal(scaled(name)(X), X * 2)
        np.testing.assert_array_equal(scaled(name)(X), X * 2)
    (aside,) = cache_dir.glob(f"{name}.json.corrupt-*")
    assert aside.read_text() == content
    assert entry_of(cache_dir)["config"] == {"n": 2}


def test_a_file_of_a_newer_schema_is_left_alone(name: str, cache_dir: Path) -> None:
    scaled(name)(X)
    edit(cache_dir, lambda entry: entry.update(schema=SCHEMA + 1))
    before = cache_file(cache_dir).read_bytes()
    with one_warning(f"schema {SCHEMA + 1}, newer than {SCHEMA}"):
        np.testing.assert_array_equal(scaled(name)(X), X * 2)
    assert cache_file(cache_dir).read_bytes() == before


@pytest.mark.parametrize("absurd_ms", [0.0, 10**400], ids=["zero", "huge"])
def test_an_impossible_time_in_the_journal_is_measured_again(
    name: str, cache_dir: Path, swept: list[list[Any]], absurd_ms: float
) -> None:
    @quarantune.autotune({"n": [20, 400_000]}, rep=3, name=name)
    @functools.partial(jax.jit, static_argnames=["n"])
    def work(x: Any, n: int = 20) -> Any:
        return x + 0 * jax.lax.fori_loop(0, n, lambda _, y: y * 1.01, x)

    work(X)
    (file,) = (cache_dir / f"{name}.trials").glob("*.jsonl")
    lines = []
    for line in file.read_text().splitlines():
        record = json.loads(line.partition(" ")[2])
        if record["trial"]["config"] == {"n": 400_000}:
            record["trial"] |= {"outcome": "ok", "time_ms": absurd_ms, "samples_ms": [absurd_ms] * 5}
        text = json.dumps(record)
        lines.append(f"{zlib.crc32(text.encode()):08x} {text}\n")
    file.write_text("".join(lines))
    (cache_dir / f"{name}.json").unlink()  # as if the sweep had been interrupted
    swept.clear()
    again = quarantune.autotune({"n": [20, 400_000]}, rep=3, name=name)(work.__wrapped__)
    with one_warning("1 records of the journal", "cannot be read as trials"):
        again(X)
    assert swept == [[400_000]]
    assert again.lookup(X) == {"n": 20}
