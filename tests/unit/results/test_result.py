"""`TuningResult.lowered_text`: the winner's compiled program, for those who want to read it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import quarantune

X = np.ones((8, 8), np.float32)


def test_the_text_shows_the_winner_for_the_tuned_call(tmp_path: Path) -> None:
    @functools.partial(jax.jit, static_argnames=["n", "mode"])
    def scale(x: Any, mode: str = "add", n: int = 5) -> Any:
        if n != 7:
            raise ArithmeticError(f"n={n} is no good")
        return x + n

    result = quarantune.AutoTuner(scale, {"n": [6, 7]}, rep=1, ref_fn=None).run(X, mode="add")
    assert result.lowered_text() == scale.lower(X, mode="add", n=7).compile().as_text()
    assert "f32[8,8]" in result.lowered_text()
    again = quarantune.AutoTuner(scale, {"n": [6, 7]}, rep=1, ref_fn=None).run(X, mode="add")
    assert again.from_cache
    assert again.lowered_text() == result.lowered_text()
    result.save(tmp_path / "saved")
    loaded = quarantune.TuningResult.load(tmp_path / "saved", trusted=True)
    with pytest.raises(ValueError, match="shapes are not saved"):
        loaded.lowered_text()


def test_a_plain_callable_has_no_program_text() -> None:
    result = quarantune.AutoTuner(np.sum, {"axis": [0]}, rep=1, ref_fn=None).run(X)
    with pytest.raises(TypeError, match="not jitted"):
        result.lowered_text()
