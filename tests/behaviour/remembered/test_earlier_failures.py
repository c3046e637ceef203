"""A config that failed at another shape runs last; a timed-out config runs again with a longer deadline."""

from __future__ import annotations

import functools
import logging
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from cached_functions import X
from helpers import deadline_s

import quarantune
from quarantune.host.process import in_sandbox

pytestmark = pytest.mark.usefixtures("two_slots")


@pytest.mark.slow
def test_a_config_that_failed_at_another_shape_runs_last(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("QUARANTUNE_NUM_WORKERS", "1")  # two compiles at once have no fixed order
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
        """Returns the n of all traced configs in order, without the repetitions for finalists."""
        traced = [note[2:] for note in Path(notes).read_text().split() if note.startswith(f"{size}:")]
        return list(dict.fromkeys(traced))

    with caplog.at_level(logging.INFO, logger="quarantune"):
        moody(np.zeros(4, np.float32))
        assert tried(4) == ["3", "1", "2"], "the order is from both ends of the list"
        moody(np.zeros(5, np.float32))
        assert tried(5) == ["3", "2", "1"], "the crashed config comes last"
        assert not [text for text in caplog.messages if "timeout" in text], "it ends within its deadline"
        moody(np.zeros(6, np.float32))
        assert tried(6) == ["3", "1", "2"], "a success clears it"
        moody.tune(np.zeros(7, np.float32))
        assert tried(7) == ["3", "1", "2"], "`tune` keeps the usual order of all configs"
        moody(np.zeros(8, np.float32))
        assert tried(8) == ["3", "1", "2"], "a success in `tune` clears it"


@pytest.mark.slow
def test_a_timed_out_config_runs_again_with_a_longer_deadline(name: str, tmp_path: Path) -> None:
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
