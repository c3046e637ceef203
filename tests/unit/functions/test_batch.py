"""The batch of a call is found in its arguments, halved, and found again in the outputs."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from quarantune.functions import batch


def fn(q: Any, k: Any = None, *, scale: float = 1.0) -> Any:
    return q


def shapes(arguments: Any) -> Any:
    return jax.tree.map(np.shape, arguments)


def test_every_argument_with_the_length_of_the_first_is_halved() -> None:
    args, kwargs = batch.halved(fn, (np.ones((7, 5)), {"k": np.ones((7, 2)), "w": np.ones((5, 5))}), {"scale": 2.0}, 0)
    assert shapes(args) == ((3, 5), {"k": (3, 2), "w": (5, 5)})
    assert kwargs == {"scale": 2.0}


def test_named_parameters_have_axes_of_their_own() -> None:
    args, _ = batch.halved(fn, (np.ones((4, 8)), np.ones((8, 8))), {}, {"q": 1})
    assert shapes(args) == ((4, 4), (8, 8))


@pytest.mark.parametrize("rows", [0, 1])
def test_a_batch_of_one_has_no_half(rows: int) -> None:
    assert batch.halved(fn, (np.ones((rows, 8)), np.ones((8, 8))), {}, {"q": 0}) is None


@pytest.mark.parametrize("axes", [2, {"x": 0}, {"q": 0, "k": 0}])
def test_axes_that_do_not_fit_are_refused_by_their_lengths(axes: Any) -> None:
    structs = jax.ShapeDtypeStruct((4, 1), "float32"), jax.ShapeDtypeStruct((3, 3), "float32")
    with pytest.raises(ValueError, match=r"check_batch=.* does not fit the call"):
        batch.bound_batch(fn, structs, {}, axes)


def test_rows_of_the_whole_are_those_of_the_half() -> None:
    whole, loss, half = np.arange(24).reshape(2, 6, 2), np.ones(()), np.zeros((2, 3, 2))
    rows, same = batch.first_rows([whole, loss], [half, loss])
    np.testing.assert_array_equal(rows, whole[:, :3])
    assert same is loss
    with pytest.raises(ValueError, match="no output has the batch"):
        batch.first_rows([loss], [loss])
