"""`key_fn` decides which calls share a result, and may leave out arguments that cannot be described or sent."""

from __future__ import annotations

import functools
import json
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tuned_functions import tuned

import quarantune

pytestmark = pytest.mark.usefixtures("two_slots")

X = np.ones(20, np.float32)


class Context:
    """Cannot be pickled, and its repr differs from process to process."""

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


def test_a_context_that_key_fn_leaves_out_may_be_anything(sweeps: list[str]) -> None:
    fn = scaled(lambda x: x.shape)
    for context in (Context(), Context(), threading.Lock()):
        np.testing.assert_array_equal(fn(X, context), X * 2)
        np.testing.assert_array_equal(fn(X, context=context), X * 2)
    assert len(sweeps) == 1
    np.testing.assert_array_equal(fn(X, Context(), mode="down"), X / 2)
    np.testing.assert_array_equal(jax.jit(lambda x: fn(x, Context(), "down"))(X), X / 2)
    assert len(sweeps) == 2, "arguments that can be described still count"
    fn(X)
    assert len(sweeps) == 3


def test_a_plain_function_may_take_a_context_left_out(sweeps: list[str]) -> None:
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


def test_calls_of_one_bucket_share_one_sweep(sweeps: list[str], cache_dir: Path) -> None:
    kernel = tuned(lambda x, do: x * 2 + 0 * do, [1, 2], key_fn=lambda x: {"rows": max(16, x.shape[0])})
    for size in (3, 9, 16):
        np.testing.assert_array_equal(kernel(X[:size]), 2 * X[:size])
    np.testing.assert_array_equal(jax.jit(kernel)(X[:5]), 2 * X[:5])
    assert len(sweeps) == 1
    kernel(X[:17])
    assert len(sweeps) == 2
    (file,) = cache_dir.glob("*.json")
    assert '"rows":16' in json.dumps(json.loads(file.read_text()), separators=(",", ":")).replace("\\", "")


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize("bucket", [{1, 2}, X, object(), float("nan")], ids=["set", "array", "object", "nan"])
def test_a_bucket_that_json_cannot_hold_is_refused_by_value(bucket: Any) -> None:
    kernel = tuned(lambda x, do: x * do, [1, 2], key_fn=lambda x: bucket)
    with pytest.raises(TypeError, match=r"(?s)key_fn returned .*, which JSON cannot hold"):
        kernel(X)
