"""A call without a saved result obeys `on_miss`, set for its thread or in the environment."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from cached_functions import CONFIGS, X, cache_file, edit, one_warning, scaled

import quarantune
from quarantune import CacheMissError
from quarantune.cli.entry_point import main

pytestmark = pytest.mark.usefixtures("two_slots")


@pytest.mark.usefixtures("no_process")
def test_on_miss_default_runs_untuned_with_one_warning(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUARANTUNE_ON_MISS", "default")
    fn = scaled(name)
    with one_warning(name, "not tuned for this call, running with its defaults"):
        for x in (X, X, X[:2]):
            np.testing.assert_array_equal(fn(x), x)


def test_a_call_that_ran_untuned_is_tuned_once_allowed(name: str, swept: list[list[Any]]) -> None:
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


KERNELS = """
import jax, quarantune


@quarantune.autotune({"n": [1]}, ref_fn=None, rep=1)
@jax.jit(static_argnames=["mode", "n"])
def scale(x, y, mode="plain", *, factor=2.0, n: int = 1):
    return x * factor + y.sum()


@quarantune.autotune({"n": [1]}, ref_fn=None, rep=1)
@jax.jit(static_argnames=["n"])
def of_tree(tree, n: int = 1):
    return tree["x"]
"""


def test_a_miss_prints_the_command_that_tunes_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = f"missed_{abs(hash(tmp_path))}"
    (tmp_path / f"{module}.py").write_text(KERNELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    kernels = importlib.import_module(module)
    args = (jnp.ones((4, 8), jnp.bfloat16), np.ones(3, np.int32))

    def missed(fn: Any, *args: Any, **kwargs: Any) -> str:
        with quarantune.settings(on_miss="error"), pytest.raises(CacheMissError) as caught:
            fn(*args, **kwargs)
        return str(caught.value)

    text = missed(kernels.scale, *args, factor=3.0, mode="fast")
    command = re.search(r"tune it by `(.*?)`, or with QUARANTUNE_ON_MISS=tune", text)
    assert command, text
    assert command[1] == f"quarantune tune {module}:scale --args 'bf16[4,8] s32[3] mode=fast factor=3.0'"
    assert main(shlex.split(command[1])[1:]) == 0, capsys.readouterr()
    with quarantune.settings(on_miss="error"):
        kernels.scale(*args, factor=3.0, mode="fast")
    assert f"quarantune tune {module}:of_tree --inputs MODULE:FUNCTION" in missed(kernels.of_tree, {"x": args[0]})
    assert "quarantune tune" not in missed(scaled("local"), X), "no command can name a function in a function"


@pytest.mark.filterwarnings("ignore:QUARANTUNE_CACHE_PATH names")
def test_a_miss_names_directories_that_are_not_there(name: str, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    path = [tmp_path / "here", tmp_path / "gone"]
    with quarantune.settings(on_miss="error", cache_path=path), pytest.raises(CacheMissError) as caught:
        scaled(name)(X)
    assert f"(QUARANTUNE_CACHE_PATH names {str(path[1])!r}, which is not there)" in str(caught.value)


def test_on_miss_error_names_the_nearest_entrys_differences(name: str, cache_dir: Path) -> None:
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
        ("ON_MISS", "maybe", "'tune', 'default', 'nearest', 'rule' or 'error'"),
        ("TIMEOUT", "soon", "a number of seconds above 0"),
        ("DISABLE_CACHE", "perhaps", "0 or 1"),
        ("MEMORY_LIMIT", "lots", "bytes, or a number with a unit"),
    ],
)
def test_a_bad_variable_is_an_error_that_lists_good_values(
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


def test_default_runs_the_defaults_of_a_tuned_function(name: str) -> None:
    fn = scaled(name)
    np.testing.assert_array_equal(fn(X), X * 2)
    np.testing.assert_array_equal(fn.default(X), X)
