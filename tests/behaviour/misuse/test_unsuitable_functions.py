"""Functions and arguments that cannot be tuned are refused before a worker starts, with the remedy."""

from __future__ import annotations

import contextlib
import datetime
import fractions
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

import quarantune

X = np.ones(4, np.float32)
CONFIGS = {"n": [1, 2]}


def times(x: Any, mode: Any = 1, n: int = 1) -> Any:
    return x * n


def here() -> SingleDeviceSharding:
    return SingleDeviceSharding(jax.devices()[0])


@pytest.mark.parametrize(
    "tune",
    [
        quarantune.autotune(CONFIGS),
        lambda fn: quarantune.AutoTuner(fn, CONFIGS),
        lambda fn: quarantune.compile_configs(fn, CONFIGS, X),
    ],
    ids=["autotune", "AutoTuner", "compile_configs"],
)
def test_in_shardings_are_refused_at_decoration_with_the_remedy(tune: Callable[[Any], Any]) -> None:
    jitted = jax.jit(times, static_argnames=["n"], in_shardings=here())
    with pytest.raises(TypeError, match=r"times: jax.jit accepts no keyword arguments with in_shardings.*device_put"):
        tune(jitted)


def test_options_tied_to_devices_need_an_importable_function() -> None:
    def local(x: Any, n: int = 1) -> Any:
        return x * n

    for name, option in {"out_shardings": here(), "backend": "cpu", "device": jax.devices()[0]}.items():
        with (
            pytest.warns(DeprecationWarning, match="backend and device")
            if name != "out_shardings"
            else contextlib.nullcontext()
        ):
            jitted = jax.jit(local, static_argnames=["n"], **{name: option})
        with pytest.raises(TypeError, match=rf"jax.jit was given {name} for .*local.*Move .* into a module"):
            quarantune.autotune(CONFIGS)(jitted)
    # A function that workers import finds its devices there.
    quarantune.autotune(CONFIGS)(jax.jit(times, static_argnames=["n"], out_shardings=here()))


def test_options_that_work_in_a_worker_are_accepted(sweeps: list[str]) -> None:
    jit = functools.partial(jax.jit, donate_argnums=0, keep_unused=True, inline=True, in_shardings=None)
    tuned = quarantune.autotune({"n": [1]}, rep=1)(jit(times, static_argnames=["n"]))
    assert tuned(jnp.array(X))[0] == 1
    assert len(sweeps) == 1


class Plain:
    @quarantune.autotune(CONFIGS)
    @functools.partial(jax.jit, static_argnames=["n"])
    def method(self, x: Any, n: int = 1) -> Any:
        return x * n


tuned_times = quarantune.autotune(CONFIGS)(jax.jit(times, static_argnames=["n"]))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: tuned_times(X, "relu"),
            r"times: argument 'mode' is 'relu', .*\(str\): make it static with static_argn",
        ),
        (lambda: tuned_times(X, mode={"kind": "relu"}), r"mode\['kind'\] is 'relu'.*separate static argument"),
        (lambda: tuned_times(X, fractions.Fraction(1, 2)), r"'mode' is Fraction\(1, 2\).*or register Fraction as a py"),
        (lambda: tuned_times(X, np.array(["relu"])), r"'mode' is array.*dtype <U4.*give an array of numbers"),
        (lambda: tuned_times(X, datetime.date(2020, 1, 1)), r"'mode' is datetime.date.*static_argnames=\['mode'\]"),
        (lambda: tuned_times.tune(X, times), r"'mode' is <function .*static_argnames=\['mode'\]"),
        (lambda: Plain().method(X), r"argument 'self' is <.*Plain.*or register Plain as a pytree"),
    ],
    ids=["string", "inside", "object", "array of strings", "date", "function", "self"],
)
def test_an_argument_that_jit_rejects_is_refused_early(
    call: Callable[[], Any], words: str, sweeps: list[str], cache_dir: Path
) -> None:
    with pytest.raises(TypeError, match=words):
        call()
    assert not sweeps
    assert not cache_dir.exists()


def test_arguments_that_jit_accepts_are_not_refused() -> None:
    for value in (
        None,
        1,
        2.5,
        True,
        np.float64(1),
        np.bool_(True),
        jnp.bfloat16(1),
        (X, [X, {"a": 1j}]),
        jax.random.key(0),
    ):
        assert tuned_times.lookup(X, value) is None
    assert quarantune.AutoTuner(lambda text, n=1: len(text), {"n": [1]}, rep=1).run("text").best_config == {"n": 1}
