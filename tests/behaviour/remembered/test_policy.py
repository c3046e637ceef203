"""Results and messages where cached results are missing, stale, damaged or not saved, under all settings."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import logging
import re
import subprocess
import textwrap
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers import change_version, deadline_s, python

import quarantune
from quarantune import CacheMissError, CacheWarning
from quarantune.cache.entry_file import SCHEMA
from quarantune.functions import versions
from quarantune.host.process import in_sandbox

pytestmark = pytest.mark.usefixtures("two_slots")

X = np.arange(4, dtype=np.float32)
CONFIGS = ({"n": 1}, {"n": 2})


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A name of its own for the function of each test, because a message that names it appears once per process."""
    return re.sub(r"\W+", "-", request.node.name).lower()


def scaled(name: str, configs: Any = CONFIGS, *, factor: float = 1.0, **options: Any) -> quarantune.Autotuned:
    """Returns a new function whose only good config is n=2; with its default, n=0, it returns its argument."""

    @quarantune.autotune(configs, **{"rep": 1, "name": name, "ref_fn": None, **options})
    @functools.partial(jax.jit, static_argnames=["n"])
    def scale(x: Any, n: int = 0) -> Any:
        if n not in (0, 2):
            raise ArithmeticError(f"n={n} is no good")
        return x * n * factor if n else x

    return scale


def cache_file(cache_dir: Path) -> Path:
    (file,) = cache_dir.glob("*.json")
    return file


def edit(cache_dir: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the only entry of the only cache file."""
    file = cache_file(cache_dir)
    contents = json.loads(file.read_text())
    ((entry,),) = [entries.values() for entries in contents.values()]
    change(entry)
    file.write_text(json.dumps(contents))


def entry_of(cache_dir: Path) -> dict[str, Any]:
    contents = json.loads(cache_file(cache_dir).read_text())
    ((entry,),) = [entries.values() for entries in contents.values()]
    return dict(entry)


@contextlib.contextmanager
def one_warning(*parts: str) -> Iterator[None]:
    """Asserts that the block emits exactly one warning of the cache, with all these texts."""
    with pytest.warns(CacheWarning) as caught:
        yield
    (warning,) = [str(warning.message) for warning in caught]
    assert [part for part in parts if part not in warning] == [], warning


def plain(x: Any, *rest: Any, n: int) -> Any:
    return x * n


def test_calls_of_a_plain_function_share_no_result_over_dtypes_and_numbers(name: str) -> None:
    def from_cache(*args: Any) -> bool:
        return quarantune.AutoTuner(plain, CONFIGS, rep=1, name=name).run(*args).from_cache

    assert not from_cache(np.ones(3, np.float32), X, 5)
    assert from_cache(np.zeros(3, np.float32), X, 5)
    assert not from_cache(np.ones(3, np.float64), X, 5)
    assert not from_cache(np.ones(3, np.float32), X, 6)


def keywords(x: Any, **config: Any) -> Any:
    return x * config["n"]


@pytest.mark.usefixtures("no_process")
def test_tune_refuses_a_tunable_given_by_hand_before_any_work(name: str) -> None:
    jitted = scaled(name)
    says = re.escape("n is tuned here: leave it out")
    for fn in (plain, keywords, jitted.__wrapped__):
        with pytest.raises(TypeError, match=says):
            quarantune.AutoTuner(fn, CONFIGS, name=name).run(X, n=2)
    with pytest.raises(TypeError, match=says):
        quarantune.AutoTuner(jitted.__wrapped__, lambda x: list(CONFIGS), name=name).run(X, n=2)
    with pytest.raises(TypeError, match=says):
        jitted.tune(X, 2)
    with pytest.raises(TypeError, match=says):
        quarantune.compile_configs(jitted.__wrapped__, CONFIGS, X, n=2)
    with pytest.raises(TypeError, match="m, n are tuned here: leave them out"):
        quarantune.AutoTuner(keywords, [{"n": 1, "m": 2}], name=name).run(X, n=2, m=3)


# --- on a miss ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_process")
def test_on_miss_default_runs_untuned_with_one_warning(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUARANTUNE_ON_MISS", "default")
    fn = scaled(name)
    with one_warning(name, "not tuned for this call, running with its defaults"):
        for x in (X, X, X[:2]):
            np.testing.assert_array_equal(fn(x), x)


def test_a_call_that_ran_untuned_is_tuned_when_that_is_allowed_again(name: str, swept: list[list[Any]]) -> None:
    fn = scaled(name)
    with quarantune.settings(on_miss="default"), one_warning("not tuned"):
        fn(X)
    np.testing.assert_array_equal(fn(X), X * 2)
    with quarantune.settings(on_miss="default"):
        np.testing.assert_array_equal(fn(X), X * 2)
    assert swept == [[1, 2]]


@pytest.mark.usefixtures("no_process")
def test_on_miss_error_reports_an_empty_cache_with_a_remedy(
    name: str, monkeypatch: pytest.MonkeyPatch, cache_dir: Path
) -> None:
    monkeypatch.setenv("QUARANTUNE_ON_MISS", "error")
    with pytest.raises(CacheMissError) as caught:
        scaled(name)(X)
    assert isinstance(caught.value, LookupError)
    for part in (name, '"shape":[4]', "holds no entry", "QUARANTUNE_ON_MISS=tune", str(cache_dir)):
        assert part in str(caught.value)
    monkeypatch.setenv("QUARANTUNE_DISABLE_CACHE", "1")
    with pytest.raises(CacheMissError, match="the cache is off"):
        scaled(name)(X)


def test_on_miss_error_names_the_nearest_entry_and_the_differences(name: str, cache_dir: Path) -> None:
    scaled(name)(X)
    scaled(name, factor=7.0)(X[None])

    def reason(fn: quarantune.Autotuned, x: Any) -> str:
        with quarantune.settings(on_miss="error"), pytest.raises(CacheMissError) as caught:
            fn(x)
        return str(caught.value).partition("the nearest entry differs in ")[2]

    assert reason(scaled(name), X[:3]).startswith(
        'x: {"dtype":"float32","shape":[4]}, not {"dtype":"float32","shape":[3]};'
    )
    assert '"dtype":"float32"' in reason(scaled(name), X.astype(np.int32))
    assert reason(scaled(name, factor=2.0), X).startswith("the function's closure:factor;")
    both = reason(scaled(name, factor=2.0), X[:3])
    assert "x: " in both
    assert "closure:factor" in both
    assert reason(scaled(name, [*CONFIGS, {"n": 3}]), X).startswith("the list of configs (2 then, 3 now);")
    with one_warning("{'n': 2} is no longer in the config space"):
        assert reason(scaled(name, [{"n": 1}, {"n": 3}]), X).startswith("the list of configs (2 then, 2 now);")
    file = cache_file(cache_dir)
    ((device, entries),) = json.loads(file.read_text()).items()
    file.write_text(json.dumps({"Abacus": entries}))
    assert reason(scaled(name), X).startswith(f"device: 'Abacus', not {device!r};")


def test_on_miss_error_names_versions_that_count(name: str, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scaled(name)(X)
    edit(cache_dir, lambda entry: entry["versions"].update(jax="0.0.1"))
    monkeypatch.setenv("QUARANTUNE_VERSION_CHECK", "1")
    with quarantune.settings(on_miss="error"), pytest.raises(CacheMissError, match=r"jax 0\.0\.1 .now "):
        scaled(name)(X)


# --- tuning anyway, or without the disk ---------------------------------------------------------------------


def test_always_tune_starts_over_once_per_process_and_key(
    name: str, swept: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    scaled(name)(X)
    monkeypatch.setenv("QUARANTUNE_ALWAYS_TUNE", "1")
    fn = scaled(name)
    for _ in range(3):
        np.testing.assert_array_equal(fn(X), X * 2)
        np.testing.assert_array_equal(fn.lower(X).compile()(X), X * 2)
    assert swept == [[1, 2], [2]], "a config that does not compile is not compiled again"
    fn(X[:2])
    assert len(swept) == 3


def test_always_tune_repeats_neither_a_failure_nor_a_success(
    name: str, swept: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUARANTUNE_ALWAYS_TUNE", "1")
    fn = scaled(name, [{"n": 1}])
    for _ in range(2):
        with pytest.raises(quarantune.TuningFailedError):
            fn(X)
    assert swept == [[1]]


def test_disable_cache_touches_no_file_and_remembers_in_memory(
    name: str, swept: list[list[Any]], cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaled(name)(X)
    before = {file: file.read_bytes() for file in cache_dir.rglob("*") if file.is_file()}
    monkeypatch.setenv("QUARANTUNE_DISABLE_CACHE", "1")
    fn = scaled(name)
    assert fn.lookup(X) is None
    for x in (X, X, X[:2]):
        np.testing.assert_array_equal(fn(x), x * 2)
    assert fn.lookup(X) == {"n": 2}
    assert swept == [[1, 2]] * 3
    assert {file: file.read_bytes() for file in cache_dir.rglob("*") if file.is_file()} == before


# --- versions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version_check", ["0", "1"])
def test_results_of_other_versions_warn_once_or_are_measured_again(
    version_check: str, name: str, swept: list[list[Any]], monkeypatch: pytest.MonkeyPatch, cache_dir: Path
) -> None:
    scaled(name)(X)
    change_version(cache_dir, "jax", "0.0.1")
    monkeypatch.setenv("QUARANTUNE_VERSION_CHECK", version_check)
    if version_check == "1":
        np.testing.assert_array_equal(scaled(name)(X), X * 2)
        assert swept == [[1, 2], [1, 2]]
        assert entry_of(cache_dir)["versions"] == versions.versions()
    else:
        with one_warning(f"jax 0.0.1 (now {jax.__version__})", "VERSION_CHECK=1"):
            for _ in range(2):
                np.testing.assert_array_equal(scaled(name)(X), X * 2)
        assert swept == [[1, 2]]


# --- settings -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_process")
def test_settings_beat_the_environment_in_their_own_thread_only(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUARANTUNE_ON_MISS", "error")
    fn = scaled(name)
    with (
        ThreadPoolExecutor(1) as pool,
        quarantune.settings(on_miss="default"),
        one_warning("running with its defaults"),
    ):
        np.testing.assert_array_equal(fn(X), X)
        with pytest.raises(CacheMissError):
            pool.submit(fn, X).result()
    with pytest.raises(CacheMissError):
        fn(X)


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize(
    ("variable", "value", "accepted"),
    [
        ("ON_MISS", "maybe", "'tune', 'default', 'nearest' or 'error'"),
        ("TIMEOUT", "soon", "a number of seconds above 0"),
        ("DISABLE_CACHE", "perhaps", "0 or 1"),
        ("MEMORY_LIMIT", "lots", "bytes, or a number with a unit"),
    ],
)
def test_a_bad_variable_is_an_error_at_the_first_call_with_accepted_values(
    variable: str, value: str, accepted: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"QUARANTUNE_{variable}", value)
    fn = scaled(name)
    with pytest.raises(ValueError, match=re.escape(accepted)) as caught:
        fn(X)
    assert f"QUARANTUNE_{variable}={value!r}" in str(caught.value)
    np.testing.assert_array_equal(fn(X, n=2), X * 2)


def test_a_bad_variable_does_not_affect_cached_calls(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fn = scaled(name)
    fn(X)
    monkeypatch.setenv("QUARANTUNE_ON_MISS", "maybe")
    np.testing.assert_array_equal(fn(X), X * 2)


# --- looking up, and the defaults ---------------------------------------------------------------------------


@pytest.mark.usefixtures("no_process")
def test_lookup_and_default_start_no_process_under_any_settings(
    name: str, monkeypatch: pytest.MonkeyPatch, cache_dir: Path
) -> None:
    fn = scaled(name)
    for variable, value in (("ON_MISS", "error"), ("ALWAYS_TUNE", "1"), ("DISABLE_CACHE", "1")):
        monkeypatch.setenv(f"QUARANTUNE_{variable}", value)
        assert fn.lookup(X) is None
        np.testing.assert_array_equal(fn.default(X), X)
    assert not cache_dir.exists()


def test_default_runs_the_defaults_of_a_tuned_function_too(name: str) -> None:
    fn = scaled(name)
    np.testing.assert_array_equal(fn(X), X * 2)
    np.testing.assert_array_equal(fn.default(X), X)


# --- code that changed --------------------------------------------------------------------------------------

ORIGINAL = """
import functools
import jax
import quarantune

OFFSET = 3.0

def helper(x):
    return x + OFFSET

def make(factor):
    @quarantune.autotune([{"n": 1}, {"n": 2}], rep=1, name="changing")
    @functools.partial(jax.jit, static_argnames=["n", "flip"])
    def kernel(x, flip=False, n: int = 1):
        "Scales x."
        return helper(x) * n * factor
    return kernel

kernel = make(5.0)
"""

CHANGES = {
    "same": ("", "", True),
    "comment": ("    return x + OFFSET", "    # adds\n    return x + OFFSET  # the offset", True),
    "layout": (
        "return helper(x) * n * factor",
        "return (\n            helper(x)\n            * n * factor\n        )",
        True,
    ),
    "docstring": ("Scales x.", "Scales x by n.", True),
    "lines above": ("import functools\n", "import functools\nimport os\n\nUNUSED = 1\n\n", True),
    "body": ("* n * factor", "* factor * n", False),
    "default": ("flip=False", "flip=0.5", False),
    "closure": ("make(5.0)", "make(6.0)", False),
    "helper": ("x + OFFSET", "x - OFFSET", False),
    "helper's constant": ("OFFSET = 3.0", "OFFSET = 4.0", False),
}

LOOK_UP = """
import importlib, json, sys
import numpy as np
answers = {}
for directory in sys.argv[1:]:
    sys.path.insert(0, directory)
    sys.modules.pop("changing_kernel", None)
    importlib.invalidate_caches()
    module = importlib.import_module("changing_kernel")
    assert module.__file__.startswith(directory)
    answers[directory] = module.kernel.lookup(np.ones(4, np.float32), False)
print(json.dumps(answers))
"""


def run_code(code: str, *arguments: object) -> str:
    return python("-W", "error", "-c", textwrap.dedent(code), *arguments)


def test_changed_code_is_a_miss_and_a_changed_comment_is_not(tmp_path: Path) -> None:
    wanted = {}
    for change, (old, new, hits) in CHANGES.items():
        directory = tmp_path / change.replace(" ", "-")
        directory.mkdir()
        assert old in ORIGINAL
        (directory / "changing_kernel.py").write_text(ORIGINAL.replace(old, new) if old else ORIGINAL)
        wanted[str(directory)] = hits
    tune = """
        import sys
        import numpy as np
        sys.path.insert(0, sys.argv[1])
        from changing_kernel import kernel
        kernel(np.ones(4, np.float32), False)
    """
    run_code(tune, tmp_path / "same")
    found = json.loads(run_code(LOOK_UP, *wanted))
    assert {directory: config is not None for directory, config in found.items()} == wanted


# --- entries that cannot be used ----------------------------------------------------------------------------


def test_an_entry_whose_config_left_the_space_is_a_miss_with_a_warning(name: str, swept: list[list[Any]]) -> None:
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
def test_an_entry_with_a_nonsensical_config_is_a_miss_with_a_warning(
    name: str, swept: list[list[Any]], cache_dir: Path
) -> None:
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


def test_a_cached_config_with_a_bad_number_is_a_miss_with_a_warning(name: str, cache_dir: Path) -> None:
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
    assert swept == [[1, 2]], "what was refused is found again in the journal"


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


# --- results that cannot be saved ---------------------------------------------------------------------------


@contextlib.contextmanager
def read_only(directory: Path) -> Iterator[None]:
    """Makes a directory that even root cannot write to."""
    directory.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", str(directory)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a read-only filesystem is not allowed here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


@contextlib.contextmanager
def a_file(path: Path) -> Iterator[None]:
    path.write_text("I am no directory")
    yield
    assert path.read_text() == "I am no directory"


@pytest.mark.parametrize("obstacle", [read_only, a_file])
def test_a_result_that_cannot_be_saved_is_returned_with_one_warning(
    obstacle: Callable[[Path], contextlib.AbstractContextManager[None]],
    name: str,
    cache_dir: Path,
    swept: list[list[Any]],
) -> None:
    with obstacle(cache_dir):
        fn = scaled(name)
        with one_warning(name, "not saved", str(cache_dir), "QUARANTUNE_CACHE_DIR"):
            for _ in range(2):
                np.testing.assert_array_equal(fn(X), X * 2)
    assert swept == [[1, 2]]


def vandal(name: str, cache_dir: Path, *, leaves_a_file: bool) -> quarantune.Autotuned:
    """Returns a function whose second config removes the cache directory while it is traced."""
    directory = str(cache_dir)

    @quarantune.autotune([{"n": 1}, {"n": 2}, {"n": 3}], rep=1, name=name)
    @functools.partial(jax.jit, static_argnames=["n"])
    def scale(x: Any, n: int = 0) -> Any:
        if n == 2 and in_sandbox():
            import os
            import shutil

            os.rename(directory, directory + ".gone")
            if leaves_a_file:
                shutil.copyfile(__file__, directory)
        return x + 0 * n

    return scale


@pytest.mark.filterwarnings("error")
def test_a_directory_that_vanishes_during_a_sweep_is_made_again(name: str, cache_dir: Path) -> None:
    fn = vandal(name, cache_dir, leaves_a_file=False)
    np.testing.assert_array_equal(fn(X), X)
    assert entry_of(cache_dir)["config"] == fn.lookup(X)


def test_a_directory_that_turns_read_only_costs_one_warning(name: str, cache_dir: Path) -> None:
    fn = vandal(name, cache_dir, leaves_a_file=True)
    with one_warning("nothing was saved", str(cache_dir), "QUARANTUNE_CACHE_DIR"):
        np.testing.assert_array_equal(fn(X), X)
    assert fn.lookup(X) is not None


def test_a_lock_that_times_out_costs_one_warning_but_not_the_result(name: str, cache_dir: Path) -> None:
    cache_dir.mkdir()
    with open(cache_dir / f".{name}.json.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with quarantune.settings(lock_timeout=0.1), one_warning("held by others for 0.1 s", "QUARANTUNE_LOCK_TIMEOUT"):
            np.testing.assert_array_equal(scaled(name)(X), X * 2)
    assert not list(cache_dir.glob("*.json"))


# --- what can be watched ------------------------------------------------------------------------------------


def talking(name: str) -> quarantune.Autotuned:
    @quarantune.autotune(CONFIGS, rep=1, name=name, ref_fn=None)
    @functools.partial(jax.jit, static_argnames=["n"])
    def talk(x: Any, n: int = 0) -> Any:
        print(f"n={n} sees {x.shape}")
        if n == 1:
            raise ArithmeticError("n=1 is no good")
        return x + n

    return talk


def test_log_dir_keeps_the_output_of_every_trial(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUARANTUNE_LOG_DIR", str(tmp_path / "logs"))
    fn = talking(name)
    fn(X)
    fn(X[:3])
    texts = sorted(file.read_text() for file in (tmp_path / "logs" / name).iterdir())
    assert len(texts) == 4
    for n in (1, 2):
        for shape in ("(4,)", "(3,)"):
            (text,) = [text for text in texts if f"n={n} sees {shape}" in text]
            assert text.startswith(f"# n={n}\n# {'error' if n == 1 else 'ok'}: ")
            assert ("ArithmeticError: n=1 is no good" in text) == (n == 1)


def test_a_log_dir_that_cannot_be_written_costs_nothing_but_log_lines(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "logs").write_text("I am no directory")
    monkeypatch.setenv("QUARANTUNE_LOG_DIR", str(tmp_path / "logs"))
    np.testing.assert_array_equal(scaled(name)(X), X * 2)
    assert "cannot keep a trial's log" in caplog.text


def test_a_sweep_ends_with_one_line_on_stderr_unless_switched_off(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scaled(name)(X)
    assert capsys.readouterr().err == ""
    monkeypatch.delenv("QUARANTUNE_PROGRESS")
    scaled(name)(X[:3])
    shown = capsys.readouterr()
    assert shown.out == ""
    label = re.escape(f"{name.rpartition('.')[2]} f32[3]")
    assert re.fullmatch(rf"{label}: 2 configs in \S+ s \(1 failed\), best n=2, .*\d ms\); saved\n", shown.err)


def test_progress_counts_the_trials_of_an_interrupted_sweep(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scaled(name)(X)
    monkeypatch.setenv("QUARANTUNE_PROGRESS", "1")
    scaled(name, [*CONFIGS, {"n": 3}])(X)
    *_, last = capsys.readouterr().err.splitlines()
    assert ": 3 configs in " in last
    assert "(2 failed, 2 recalled), best n=2, " in last


def test_the_logger_reports_every_config_and_the_winner(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="quarantune"):
        scaled(name)(X)
    said = [record.getMessage() for record in caplog.records if record.name == "quarantune"]
    assert any(re.search(r"n=1: error .*ArithmeticError: n=1 is no good", line) for line in said)
    assert any(re.search(r"n=2: ok \S+ ms", line) for line in said)
    assert any(re.search(r"best of 2 is n=2: \S+ ms", line) for line in said)


def test_nothing_is_printed_unless_wanted(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    talking(name)(X)
    assert capfd.readouterr() == ("n=2 sees (4,)\n", "")  # the caller's own tracing; what workers print is kept apart


@pytest.mark.slow
def test_a_config_with_trouble_at_another_shape_runs_last(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("QUARANTUNE_CPU_COUNT", "1")  # two that compile at once may be traced in either order
    notes = str(tmp_path / "notes")

    @quarantune.autotune({"n": [1, 2, 3]}, rep=1, name=name, compile_timeout=deadline_s(4.0), ref_fn=None)
    @functools.partial(jax.jit, static_argnames=["n"])
    def moody(x: Any, n: int = 2) -> Any:
        if in_sandbox():
            with open(notes, "a") as file:
                file.write(f"{x.shape[0]}:{n} ")
            if n == 1 and x.shape[0] in (4, 6):
                import ctypes

                ctypes.memset(0, 1, 1)
            if n == 1 and x.shape[0] == 5:
                threading.Event().wait(1.3)
        return x

    def tried(size: int) -> list[str]:
        """Returns the n of all traced configs in order; finalists are traced again."""
        traced = [note[2:] for note in Path(notes).read_text().split() if note.startswith(f"{size}:")]
        return list(dict.fromkeys(traced))

    with caplog.at_level(logging.INFO, logger="quarantune"):
        moody(np.zeros(4, np.float32))
        assert tried(4) == ["3", "1", "2"], "from both ends of the list"
        moody(np.zeros(5, np.float32))
        assert tried(5) == ["3", "2", "1"], "it comes last"
        assert not [text for text in caplog.messages if "timeout" in text], "a third of its deadline is enough for it"
        moody(np.zeros(6, np.float32))
        assert tried(6) == ["3", "1", "2"], "a success clears it"
        moody.tune(np.zeros(7, np.float32))
        assert tried(7) == ["3", "1", "2"], "who asks for it gets all configs in their usual order"
        moody(np.zeros(8, np.float32))
        assert tried(8) == ["3", "1", "2"], "and that success clears it too"


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


@pytest.mark.slow
def test_a_config_that_timed_out_runs_again_under_a_longer_deadline(name: str, tmp_path: Path) -> None:
    quick = tmp_path / "quick"

    @quarantune.autotune({"n": [1, 2]}, rep=1, name=name, ref_fn=None)
    @functools.partial(jax.jit, static_argnames=["n"])
    def slow(x: Any, n: int = 2) -> Any:
        if n == 1 and in_sandbox() and not quick.exists():
            threading.Event().wait()
        return x

    with quarantune.settings(compile_timeout=deadline_s(1.5)):
        assert slow.tune(X).trials[0].outcome == "timeout"
    quick.touch()
    with quarantune.settings(compile_timeout=100.0):
        assert not slow.tune(X).trials[0].outcome.is_failure
