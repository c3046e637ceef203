"""Settings come from blocks, then variables, then defaults, and bad ones are refused by name."""

from __future__ import annotations

import asyncio
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quarantune.values.amounts import memory_text, parse_memory
from quarantune.values.blocks import current, settings
from quarantune.values.settings import Listen, Settings

BAD_PLACES = [
    *("8790", "host", "host:", ":0", ":65536", ":9-8", ":-8", ":8-", ":1-2-3", ":8790,8791", ":+8790", "fd00::5:8790"),
    *("a host:8790", "tcp://host:port", "host:\N{SUPERSCRIPT TWO}"),
]


def test_defaults_are_the_documented_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUARANTUNE_CACHE_DIR")
    monkeypatch.delenv("QUARANTUNE_PROGRESS")
    now = current()
    assert now == Settings()
    assert now.cache_dir.is_absolute()
    assert now.cache_dir.name == "quarantune"
    assert (now.on_miss, now.isolation, now.lock_timeout) == ("tune", "auto", 60.0)
    unset = [now.compile_timeout, now.timeout, now.memory_limit, now.devices, now.configs_per_worker]
    assert [*unset, now.start_method, now.progress, now.log_dir, now.num_workers] == [None] * 9
    assert [now.disable_cache, now.always_tune, now.version_check] == [False] * 3


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("cache_dir", "~/there", Path("~/there").expanduser()),
        ("disable_cache", "1", True),
        ("always_tune", "True", True),
        ("version_check", "off", False),
        ("on_miss", "Error", "error"),
        ("num_workers", "4", 4),
        ("num_workers", "1", 1),
        ("num_workers", " 50% ", 0.5),
        ("num_workers", "auto", None),
        ("compile_timeout", "2.5", 2.5),
        ("timeout", " 7 ", 7.0),
        ("memory_limit", "2GiB", 2 * 2**30),
        ("devices", "0, 2", ("0", "2")),
        ("devices", "all", None),
        ("configs_per_worker", "auto", None),
        ("configs_per_worker", "32", 32),
        ("start_method", "spawn", "spawn"),
        ("isolation", "none", "none"),
        ("progress", "auto", None),
        ("progress", "0", False),
        ("log_dir", "/somewhere", Path("/somewhere")),
        ("record", "/somewhere", Path("/somewhere")),
        ("lock_timeout", "0", 0.0),
        ("listen", ":8790", Listen("", 8790, 8790)),
        ("listen", "login-1:8790-8799", Listen("login-1", 8790, 8799)),
        ("listen", " 10.0.0.5:1 ", Listen("10.0.0.5", 1, 1)),
        ("listen", "[fd00::5]:65535", Listen("fd00::5", 65535, 65535)),
        ("timeout", "", None),
    ],
)
def test_a_variable_is_read_at_each_use(name: str, text: str, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"QUARANTUNE_{name.upper()}", text)
    assert getattr(current(), name) == expected


@pytest.mark.parametrize(
    ("name", "text", "accepted"),
    [
        ("disable_cache", "maybe", "0 or 1"),
        ("on_miss", "panic", "'tune', 'default', 'nearest', 'rule' or 'error'"),
        ("cache_dir", "~no such user/there", "a directory of a file system"),
        ("cache_path", ":", "directories or URLs separated by ':'"),
        ("num_workers", "150%", "'50%', or 'auto'"),
        ("num_workers", "0%", "a share of the available cores"),
        ("num_workers", "half", "a share of the available cores"),
        ("num_workers", "2.5", "whole number"),
        ("num_workers", "-1", "whole number"),
        ("compile_timeout", "nan", "seconds above 0"),
        ("timeout", "inf", "seconds above 0"),
        ("timeout", "-1", "seconds above 0"),
        ("memory_limit", "8 elephants", "'8GB'"),
        ("memory_limit", "0", "'8GB'"),
        ("memory_limit", "10MB", "at least 16 MiB"),
        ("devices", "0,,2", "indices or UUIDs"),
        ("devices", "0,0", "different"),
        ("configs_per_worker", "0", "or 'auto'"),
        ("start_method", "forkserver", "'fork' or 'spawn'"),
        ("isolation", "docker", "'auto', 'process', 'compile' or 'none'"),
        ("progress", "2", "0, 1, or 'auto'"),
        ("lock_timeout", "-0.1", "from 0 to 1e9"),
        ("timeout", "1e10", "at most 1e9"),
        ("memory_limit", "1", "a number with a unit"),
        *(("listen", text, "as in '10.0.0.5:8790'") for text in BAD_PLACES),
    ],
)
def test_a_bad_value_is_refused_with_its_name_and_the_choices(
    name: str, text: str, accepted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = f"QUARANTUNE_{name.upper()}"
    monkeypatch.setenv(variable, text)
    with pytest.raises(ValueError, match=variable) as caught:
        current()
    assert repr(text) in str(caught.value)
    assert accepted in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("timeout", 5, 5.0),
        ("timeout", "5", 5.0),
        ("memory_limit", 2**25, 2**25),
        ("devices", [0, 2], ("0", "2")),
        ("devices", 1, ("1",)),
        ("progress", True, True),
        ("cache_dir", Path("/x"), Path("/x")),
        ("configs_per_worker", 1, 1),
        ("devices", np.int64(1), ("1",)),
        ("devices", np.array([0, 2]), ("0", "2")),
        ("max_trials", np.int32(3), 3),
        ("timeout", np.float32(2.5), 2.5),
        ("disable_cache", np.True_, True),
    ],
)
def test_a_block_takes_python_values_and_strings(name: str, value: Any, expected: Any) -> None:
    with settings(**{name: value}):
        assert getattr(current(), name) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("timeout", True),
        ("num_workers", False),
        ("num_workers", 0.5),
        ("cache_dir", ""),
        ("log_dir", " "),
        ("devices", []),
        ("on_miss", 3),
        ("timeout", 10**400),
        pytest.param("timeout", 10**5000, id="very long"),
        pytest.param("memory_limit", 10**5000, id="very much"),
        ("memory_limit", 1),
        ("devices", True),
        ("devices", [True]),
        ("devices", [0, None]),
        ("devices", [1.5]),
        ("devices", -1),
        ("devices", b"0"),
        ("timeout", np.True_),
        ("max_trials", np.True_),
        ("num_workers", np.True_),
        ("lock_timeout", np.float64("nan")),
        ("configs_per_worker", math.nan),
        ("memory_limit", np.True_),
        ("disable_cache", math.nan),
    ],
)
def test_a_block_refuses_a_bad_value_before_it_is_entered(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        settings(**{name: value})


def test_blocks_override_the_variable_and_outer_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUARANTUNE_TIMEOUT", "1")
    monkeypatch.setenv("QUARANTUNE_NUM_WORKERS", "3")
    with settings(timeout=2, on_miss="default"):
        with settings(timeout=3):
            inner = current()
        outer = current()
    after = current()
    assert (inner.timeout, inner.on_miss, inner.num_workers) == (3.0, "default", 3)
    assert outer.timeout == 2.0
    assert (after.timeout, after.on_miss) == (1.0, "tune")


def test_a_block_may_be_entered_inside_itself() -> None:
    block = settings(timeout=2)
    with block:
        with block:
            pass
        assert current().timeout == 2.0
    assert current().timeout is None


def test_a_block_entered_twice_ends_where_it_was_entered_last() -> None:
    outer, inner = settings(timeout=2), settings(timeout=3)
    with outer, inner:
        with outer:
            assert current().timeout == 2.0
        assert current().timeout == 3.0
    assert current().timeout is None


def test_none_in_a_block_stands_for_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUARANTUNE_TIMEOUT", "1")
    with settings(timeout=None):
        assert current().timeout is None


def test_a_block_hides_a_bad_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUARANTUNE_TIMEOUT", "soon")
    with settings(timeout=4):
        assert current().timeout == 4.0


def test_a_block_ends_when_its_body_raises() -> None:
    with pytest.raises(KeyError), settings(timeout=2):
        raise KeyError
    assert current().timeout is None


def test_a_block_holds_in_its_own_thread_only() -> None:
    seen: list[float | None] = []
    with settings(timeout=2):
        thread = threading.Thread(target=lambda: seen.append(current().timeout))
        thread.start()
        thread.join()
    assert seen == [None]


def test_a_block_holds_in_its_task_and_ends_in_any_order() -> None:
    async def main() -> list[float | None]:
        entered, read = asyncio.Event(), asyncio.Event()

        async def enters() -> None:
            with settings(timeout=2):
                entered.set()
                await read.wait()

        task = asyncio.create_task(enters())
        await entered.wait()
        seen = [current().timeout]
        read.set()
        await task
        return seen

    assert asyncio.run(main()) == [None]
    first, second = settings(timeout=3), settings(compile_timeout=4)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert (current().timeout, current().compile_timeout) == (None, 4.0)
    second.__exit__(None, None, None)
    assert current().compile_timeout is None


@pytest.mark.parametrize(
    ("written", "shown"),
    [("2GiB", "1.00 GiB"), ("2GB", "1.07 GB"), ("4000 mb", "1073.74 MB"), (2**31, "1,073,741,824 bytes")],
)
def test_amounts_are_shown_in_the_unit_that_was_given(written: str | int, shown: str) -> None:
    given = parse_memory(written)
    assert memory_text(2**30, given) == shown
    assert memory_text(2**30, parse_memory(given)) == shown
    assert memory_text(2**30, 2**31) == "1.07 GB", "nobody wrote this one"


def test_an_unknown_option_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(TypeError, match="Did you mean 'timeout'") as caught:
        settings(time_out=5)
    assert "lock_timeout" in str(caught.value)


@pytest.mark.parametrize("name", ["cpu_count", "max_cpu_count", "cpu_utilization"])
def test_a_former_setting_is_refused_and_names_its_successor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match=rf"settings\(\) has no option '{name}': use num_workers"):
        settings(**{name: 2})  # type: ignore[misc]
    monkeypatch.setenv(variable := f"QUARANTUNE_{name.upper()}", "2")
    with pytest.warns(RuntimeWarning, match=f"no variable {variable}, so .* Use QUARANTUNE_NUM_WORKERS"):
        assert current().num_workers is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("16777216", 2**24),
        (2**30, 2**30),
        ("8GB", 8 * 10**9),
        ("8gib", 8 * 2**30),
        ("64000.5k", 64000500),
        ("32 MiB", 2**25),
        ("3T", 3 * 10**12),
    ],
)
def test_memory_is_parsed(text: int | str, expected: int) -> None:
    assert parse_memory(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "-1", "1e9", "nan", "8 XB", True, 0, "0.2", "9" * 400, 10**400])
def test_an_invalid_amount_of_memory_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match="amount of memory"):
        parse_memory(text)


@pytest.mark.parametrize("text", [1, "512", "8k"])
def test_a_tiny_amount_of_memory_is_refused_as_lacking_a_unit(text: Any) -> None:
    with pytest.raises(ValueError, match="no worker starts with less than 16 MiB: give a number with a unit"):
        parse_memory(text)


def test_an_unknown_variable_is_reported_once_with_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUARANTUNE_TIMEOUTT", "5")
    with pytest.warns(RuntimeWarning, match="no variable QUARANTUNE_TIMEOUTT.*Did you mean 'QUARANTUNE_TIMEOUT'"):
        assert current().timeout is None
    current()  # silent the second time: a warning would raise


def test_a_relative_cache_directory_stays_when_the_process_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with settings(cache_dir="here"):
        monkeypatch.chdir("/")
        assert current().cache_dir == tmp_path / "here"
