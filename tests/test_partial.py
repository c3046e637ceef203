"""`partial=True`: a call that sets some tunables by hand has the others tuned."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import quarantune

pytestmark = pytest.mark.usefixtures("two_slots")

X = np.arange(4, dtype=np.float32)
CONFIGS = [{"bm": bm, "bn": bn} for bm in (1, 2) for bn in (10, 20, 30) if (bm, bn) != (2, 10)]


def tiled(configs: Any = CONFIGS, **options: Any) -> quarantune.Autotuned:
    """Returns a function whose only good value of bn is ten times bm, or 30 for another bm; the result shows both."""

    @quarantune.autotune(configs, **{"rep": 1, "ref_fn": None, "name": "tiled", "partial": True, **options})
    @jax.jit(static_argnames=["bm", "bn"])
    def tile(x: Any, bm: int = 0, bn: int = 0) -> Any:
        if (bm or bn) and bn != (10 * bm if bm in (1, 2) else 30):
            raise ArithmeticError(f"{bm} and {bn} do not fit")
        return x * bm + bn

    return tile


def test_one_tunable_given_by_hand_has_the_others_tuned(swept_configs: list[Any], sweeps: list[str]) -> None:
    fn = tiled()
    np.testing.assert_array_equal(fn(X, bm=2), X * 2 + 20)
    assert swept_configs == [[{"bn": 20}, {"bn": 30}]], "those of the configs that agree with it"
    np.testing.assert_array_equal(jax.jit(lambda x: fn(x, bm=2))(X), X * 2 + 20)
    np.testing.assert_array_equal(tiled()(X, 2), X * 2 + 20)
    np.testing.assert_array_equal(fn.lower(X, bm=2).compile()(X), X * 2 + 20)
    assert fn.lookup(X, bm=2) == {"bn": 20}
    assert fn.lookup(X, bm=1) is None
    assert fn.lookup(X) is None
    assert fn.eval_shape(X, bm=2).shape == X.shape
    assert len(sweeps) == 1
    np.testing.assert_array_equal(fn(X, bm=1), X + 10)
    np.testing.assert_array_equal(fn(X, bm=7), X * 7 + 30)
    assert swept_configs[1:] == [[{"bn": 10}, {"bn": 20}, {"bn": 30}], [{"bn": 10}, {"bn": 20}, {"bn": 30}]]
    np.testing.assert_array_equal(fn(X), fn(X))
    assert len(sweeps) == 4, "a call without any is tuned as ever"
    assert fn.tune(X, bm=2).best_config == {"bn": 20}
    np.testing.assert_array_equal(fn(X, bm=2, bn=20), X * 2 + 20)
    np.testing.assert_array_equal(fn(X, bm=0, bn=0), X * 0)
    assert len(sweeps) == 5


def test_configs_that_are_made_and_pruned_for_a_call_may_be_given_in_part(swept_configs: list[Any]) -> None:
    def make(x: Any) -> Any:
        return CONFIGS

    fn = tiled(make, prune_fn=lambda config, x: config["bm"] * config["bn"] < 60, name="made")
    np.testing.assert_array_equal(fn(X, bm=2), X * 2 + 20)
    assert swept_configs == [[{"bn": 20}]]


def test_without_the_option_the_tuner_steps_aside(sweeps: list[str]) -> None:
    fn = tiled(partial=False)
    with pytest.raises(ArithmeticError, match="2 and 0"):
        fn(X, bm=2)
    with pytest.raises(TypeError, match="bm is tuned here"):
        fn.tune(X, bm=2)
    assert sweeps == []


def test_a_tunable_given_by_hand_chooses_the_configs_with_the_same_value(swept_configs: list[Any]) -> None:
    """Not those whose value is only equal in Python; a number of NumPy's is one of Python's."""
    fn = tiled([{"bm": bm, "bn": bn} for bm, bn in ((1, 10), (1.0, 20), (True, 10), (2, 20))], name="alike")
    for bm in (True, 1, np.int64(2)):
        fn(X, bm=bm)
    assert swept_configs == [[{"bn": 10}], [{"bn": 10}], [{"bn": 20}]]
