"""`key_fn` may leave out arguments that cannot be described or sent, such as a context with a lock."""

from __future__ import annotations

import functools
import threading
from typing import Any

import jax
import numpy as np
import pytest

import quarantune

pytestmark = pytest.mark.usefixtures("two_slots")

X = np.ones(4, np.float32)


class Context:
    """Has neither a pickle nor a repr that is the same everywhere."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


def scaled(key_fn: Any, *, is_jitted: bool = True) -> Any:
    def scale(x: Any, context: Any = None, mode: str = "up", n: int = 1) -> Any:
        return x * 2 if mode == "up" else x / 2

    options = {"rep": 1, "ref_fn": None, "name": "scaled", "key_fn": key_fn}
    if not is_jitted:
        return quarantune.AutoTuner(scale, {"n": [1, 2]}, **options).run
    jitted = functools.partial(jax.jit, static_argnames=["context", "mode", "n"])(scale)
    return quarantune.autotune({"n": [1, 2]}, **options)(jitted)


def test_a_context_that_key_fn_leaves_out_need_not_be_described_or_sent(sweeps: list[str]) -> None:
    fn = scaled(lambda x: x.shape)
    for context in (Context(), Context(), threading.Lock()):
        np.testing.assert_array_equal(fn(X, context), X * 2)
        np.testing.assert_array_equal(fn(X, context=context), X * 2)
    assert len(sweeps) == 1
    np.testing.assert_array_equal(fn(X, Context(), mode="down"), X / 2)
    np.testing.assert_array_equal(jax.jit(lambda x: fn(x, Context(), "down"))(X), X / 2)
    assert len(sweeps) == 2, "what can be described still counts"
    fn(X)
    assert len(sweeps) == 3


def test_a_plain_function_may_be_called_with_such_a_context_too(sweeps: list[str]) -> None:
    run = scaled(lambda x: x.shape, is_jitted=False)
    for _ in range(2):
        result = run(X, Context())
        np.testing.assert_array_equal(result.fn(X, Context()), X * 2)
    assert len(sweeps) == 1


@pytest.mark.parametrize("key_fn", [None, lambda x, context=None: "any", lambda *args: "any"])
def test_a_context_that_key_fn_takes_is_still_refused_by_name(key_fn: Any, sweeps: list[str]) -> None:
    with pytest.raises(TypeError, match=r"Context|lock"):
        scaled(key_fn)(X, Context())
    assert sweeps == []
