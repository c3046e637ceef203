"""Log files, the logger and progress lines report a sweep, which prints nothing else."""

from __future__ import annotations

import functools
import logging
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from cached_functions import CONFIGS, X, scaled

import quarantune

pytestmark = pytest.mark.usefixtures("two_slots")


def talking(name: str) -> quarantune.Autotuned:
    @quarantune.autotune(CONFIGS, rep=1, name=name, ref_fn=None)
    @functools.partial(jax.jit, static_argnames=["n"])
    def talk(x: Any, n: int = 0) -> Any:
        print(f"n={n} sees {x.shape}")
        if n == 1:
            raise ArithmeticError("n=1 is bad")
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
            assert ("ArithmeticError: n=1 is bad" in text) == (n == 1)


def test_an_unwritable_log_dir_costs_only_log_lines(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "logs").write_text("I am no directory")
    monkeypatch.setenv("QUARANTUNE_LOG_DIR", str(tmp_path / "logs"))
    np.testing.assert_array_equal(scaled(name)(X), X * 2)
    assert "cannot keep a trial's log" in caplog.text


def test_a_sweep_ends_with_one_line_on_stderr_by_default(
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
    assert any(re.search(r"n=1: error .*ArithmeticError: n=1 is bad", line) for line in said)
    assert any(re.search(r"n=2: ok \S+ ms", line) for line in said)
    assert any(re.search(r"best of 2 is n=2: \S+ ms", line) for line in said)


def test_nothing_is_printed_unless_wanted(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    talking(name)(X)
    assert capfd.readouterr() == ("n=2 sees (4,)\n", "")  # printed by the caller's own trace, not by workers
