"""Keys, fingerprints, entries and journals of earlier versions, recorded in `data/`, are still found."""

from __future__ import annotations

import dataclasses
import importlib
import json
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import quarantune
from quarantune.cache.journal import Journal
from quarantune.cache.store import Store
from quarantune.devices import discovery
from quarantune.values.trial import Trial

DATA = Path(__file__).parent / "data"
NAMES = ["plain", "closing", "by_name", "pallas"]
BY_BYTECODE = ["closing", "pallas"]
"""Those whose code counts as compiled, as they call what their module imports: recorded by each version of Python."""


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(DATA))
    yield importlib.import_module("golden_kernels")
    for name in ("golden_kernels", "golden_helpers"):
        sys.modules.pop(name, None)


def recorded(name: str) -> Path:
    directory = DATA / "golden_cache"
    if name in BY_BYTECODE:
        directory /= f"python{sys.version_info.major}.{sys.version_info.minor}"
        if not directory.is_dir():
            pytest.skip("nothing was recorded with this version of Python")
    (path,) = directory.glob(f"golden_kernels.*{name}*.json")
    return path


@pytest.mark.filterwarnings("ignore::quarantune.cache.CacheWarning")  # entries of other versions of JAX
@pytest.mark.parametrize("name", NAMES)
def test_results_of_earlier_versions_are_found(kernels: Any, name: str, cache_dir: Path, sweeps: list[str]) -> None:
    ((entries),) = json.loads(recorded(name).read_text()).values()
    here = discovery.platform_and_kind(None)[1]
    cache_dir.mkdir()
    (cache_dir / recorded(name).name).write_text(json.dumps({here: entries}))
    tuned = quarantune.autotune(kernels.SPACE, rep=1, **kernels.OPTIONS[name])(getattr(kernels, name))
    (entry,) = entries.values()
    assert tuned.lookup(jnp.arange(16.0)) == entry["config"]
    tuned(jnp.arange(16.0))
    assert sweeps == []


def test_journals_of_earlier_versions_are_read(tmp_path: Path) -> None:
    shutil.copytree(DATA / "golden_cache" / "golden_kernels.plain.trials", tmp_path / "golden_kernels.plain.trials")
    ((device, entries),) = Store(DATA / "golden_cache").read("golden_kernels.plain").items()
    (key,) = entries
    trials = [
        Trial.from_json(record["trial"]) for record in Journal(tmp_path, "golden_kernels.plain", device, key).records()
    ]
    assert [(trial.config, trial.outcome, len(trial.samples_ms)) for trial in trials] == [
        ({"block": 4}, "ok", 2),
        ({"block": 8}, "ok", 2),
    ]


FIELDS_OF_A_TRIAL = (
    "config outcome phase time_ms samples_ms own_ms compile_s peak_memory_bytes message log_tail route device clock "
    "ended_s"
)
FIELDS_OF_AN_ENTRY = (
    "schema config time_ms default_time_ms speedup_interval key_values fingerprint space versions created trials "
    "search program samples"
)
FIELDS_OF_A_RESULT = (
    "schema name best_config time_ms default_config default_time_ms speedup_interval noise finalists counts created "
    "commit device versions stopped seen space_size tie key from_cache trials files"
)


def test_new_files_have_the_fields_of_earlier_versions(kernels: Any, cache_dir: Path, tmp_path: Path) -> None:
    tuned = quarantune.autotune(kernels.SPACE, rep=1, **kernels.OPTIONS["plain"])(kernels.plain)
    with quarantune.settings(isolation="none"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        tuned.tune(jnp.arange(16.0)).save(tmp_path)
    (path,) = cache_dir.glob("*.json")
    ((device, entries),) = json.loads(path.read_text()).items()
    ((key, entry),) = entries.items()
    assert entry["bits"] in ("same", "other"), "the defaults have worked"
    later = ("bits", "commit", "exact")  # only repositories have commits
    assert " ".join(name for name in entry if name not in later) == FIELDS_OF_AN_ENTRY
    assert " ".join(entry["search"]) == "name seed stopped seen space_size budget"
    for record in Journal(cache_dir, path.stem, device, key).records():
        assert " ".join(record) == "trial limits versions reference"
        assert " ".join(record["trial"]) == f"{FIELDS_OF_A_TRIAL} figures program bits digest"
    about = json.loads((tmp_path / "result.json").read_text())
    assert " ".join(about) == FIELDS_OF_A_RESULT
    assert {" ".join(trial) for trial in about["trials"]} == {f"{FIELDS_OF_A_TRIAL} figures program bits digest"}
    bare = dataclasses.replace(
        Trial.from_json(about["trials"][0]), figures=None, program="", bits=None, digest=""
    )  # like a trial of a plain function
    assert " ".join(bare.to_json()) == FIELDS_OF_A_TRIAL
