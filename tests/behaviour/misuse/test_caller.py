"""Warnings point to the line that called a tuned function, not to a line of quarantune."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import quarantune

X = np.ones(4, np.float32)


def kernel(name: str) -> quarantune.Autotuned:
    @quarantune.autotune({"n": [1, 2]}, name=name)
    @functools.partial(jax.jit, static_argnames=["n"])
    def double(x: Any, n: int = 1) -> Any:
        return x * 2

    return double


def whole(name: str) -> Any:
    return quarantune.contextual_autotune(name=name)(lambda x: x * 2)


@pytest.mark.parametrize(
    "make",
    [kernel, lambda name: kernel(name).lower, whole, lambda name: jax.jit(kernel(name))],
    ids=["called", "lowered", "contextual", "inside jit"],
)
def test_a_warning_names_the_callers_file_and_line(make: Callable[[str], Any], request: pytest.FixtureRequest) -> None:
    call = make(f"warned {request.node.name}")
    with quarantune.settings(on_miss="default"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line, _ = sys._getframe().f_lineno, call(X)
    (warning,) = [item for item in caught if "not tuned for this call" in str(item.message)]
    assert (warning.filename, warning.lineno) == (__file__, line)
