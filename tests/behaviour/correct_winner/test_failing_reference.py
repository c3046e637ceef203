"""A reference that fails is the caller's error: no config passes, and no result is saved."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from aftermath import nothing_is_left, quiet_place  # noqa: F401
from helpers import ends, everywhere, isolated
from tuned_functions import Notes, X, boom, here, tuned

import quarantune
from quarantune.sandbox import template

pytestmark = pytest.mark.usefixtures("two_slots")


def crash(x: Any) -> Any:
    ctypes.memset(0, 1, 1)


def vanish(x: Any) -> Any:
    os._exit(0)


def hang(x: Any) -> Any:
    ctypes.PyDLL(None).pause()


def noting(notes: Notes) -> Callable[[Any, int], Any]:
    def body(x: Any, do: int) -> Any:
        notes.add("config", do)
        return x + do

    return body


@pytest.mark.usefixtures("quiet_place")
@pytest.mark.parametrize(
    ("ref_fn", "told"),
    [
        (boom, "error: ArithmeticError: there is no reference today"),
        (crash, "crashed: .*SIGSEGV"),
        (vanish, "crashed: .*code 0 without a result"),
        pytest.param(hang, "timeout: it took longer than 3 s", marks=pytest.mark.slow),
    ],
)
def test_a_failing_reference_is_an_error_and_nothing_runs(ref_fn: Any, told: str, notes: Notes) -> None:
    kernel = tuned(noting(notes), [1, 2], ref_fn=ref_fn)
    template.shared()
    started = time.monotonic()
    haste = {"timeout": 1.5, "compile_timeout": 1.5} if ref_fn is hang else {}
    with nothing_is_left(), quarantune.settings(**haste):
        with pytest.raises(quarantune.ReferenceFailedError, match=f"ref_fn failed, so no config can be judged: {told}"):
            kernel.tune(X)
        assert kernel.lookup(X) is None
    assert time.monotonic() - started < 100
    assert notes.lines() == []


@pytest.mark.usefixtures("no_process")
def test_a_reference_that_raises_in_process_is_an_error(notes: Notes) -> None:
    kernel = tuned(noting(notes), [1, 2], ref_fn=boom)
    with isolated("none"), pytest.raises(quarantune.ReferenceFailedError, match="ArithmeticError: there is no ref"):
        kernel.tune(X)
    assert notes.lines() == []


@everywhere
def test_a_reference_that_forgets_to_return_lets_nothing_pass(isolation: str) -> None:
    def forgetful(x: Any) -> None:
        jnp.square(x)

    with isolated(isolation), pytest.raises(quarantune.TuningFailedError, match=r"ref_fn returned None.* lack a "):
        tuned(lambda x, do: x * do, [1, 2], ref_fn=forgetful).tune(X)
    with isolated(isolation):
        assert ends(tuned(lambda x, do: None, [1, 2], ref_fn=forgetful).tune(X).trials) == ["ok"] * 2


def test_a_failed_reference_is_forgotten(sweeps: list[str]) -> None:
    moods = iter([boom, lambda x: x, lambda x: x])
    kernel = tuned(lambda x, do: x * do, [1], ref_fn=lambda x: next(moods)(x))
    with here():
        with pytest.raises(quarantune.ReferenceFailedError):
            kernel(X)
        np.testing.assert_array_equal(kernel(X), X)
