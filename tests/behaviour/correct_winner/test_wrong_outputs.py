"""A config with a wrong output or gradient is found and cannot win, however fast it is."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import ends, everywhere, isolated
from tuned_functions import Notes, X, after, boom, by_config, here, host, tuned

import quarantune
from quarantune import Outcome

pytestmark = pytest.mark.usefixtures("two_slots")


def double_or_not(x: Any, do: tuple[int, str]) -> Any:
    """Doubles x after some turns, with the config's slip. The wrong configs are the fastest."""
    turns, slip = do
    doubled = 2 * after(turns, x)
    match slip:
        case "off":
            return {"doubled": doubled + 1, "parts": (x, jnp.nan * x[:2])}
        case "one block":
            return {"doubled": doubled.at[:128].set(0), "parts": (x, jnp.nan * x[:2])}
        case "nan":
            return {"doubled": doubled.at[7].set(jnp.nan), "parts": (x.at[:500].set(jnp.nan), jnp.nan * x[:2])}
        case "dtype":
            return {"doubled": doubled.astype(jnp.int32), "parts": (x, jnp.nan * x[:2])}
        case "structure":
            return {"doubled": doubled}
    return {"doubled": doubled, "parts": (x, jnp.nan * x[:2])}


SLIPS = {
    "off": r"1000 of 1000 elements \(100%\) differ.*worst is at \[\d+\] of output\['doubled'\]: got \S+, expected \S+",
    "one block": r"12\d of 1000 elements \(12\.\d%\) differ.*worst is at \[0\] of output\['doubled'\].*expected -2.0",
    "nan": r"1 of 1000 elements \(0.1%\) differ.*at \[7\] of output\['doubled'\]: got nan, expected -1.97",
    "dtype": r"output\['doubled'\] is int32\[1000\], expected float32\[1000\]",
    "structure": r"structure of output differs",
}


@everywhere
def test_if_the_fastest_third_is_wrong_the_winner_is_still_right(isolation: str, notes: Notes) -> None:
    def doubled(x: Any) -> Any:
        notes.add("reference")
        return {"doubled": 2 * x, "parts": (x, jnp.full(2, jnp.nan))}

    right = [(turns, "") for turns in (8000, 4000, 20, 10)]
    kernel = tuned(double_or_not, [*right[:2], *((1, slip) for slip in SLIPS), *right[2:]], ref_fn=doubled)
    with isolated(isolation):
        result = kernel.tune(X)
    trials = by_config(result.trials)
    for slip, told in SLIPS.items():
        wrong = trials[1, slip]
        assert (wrong.outcome, wrong.phase, wrong.time_ms) == (Outcome.WRONG, "check", None)
        assert re.match(told, wrong.message) or re.search(told, wrong.message), wrong.message
    assert ends(tuple(trials[config] for config in right)) == ["ok"] * 4
    assert result.best_config["do"] in right[-2:]
    assert notes.lines() == ["reference"]
    np.testing.assert_array_equal(kernel(X)["doubled"], 2 * X)


@pytest.mark.slow
def test_the_author_sets_how_far_results_may_be_off() -> None:
    def off(x: Any, do: tuple[float, int]) -> Any:
        share, count = do
        return jnp.where(jnp.arange(1000) < count, x + share, x)

    configs = [(0.0, 0), (0.005, 1000), (0.5, 9), (0.5, 300)]

    def judged(**tolerance: float) -> list[str]:
        with here():
            return ends(tuned(off, configs, ref_fn=lambda x: x, **tolerance).tune(X).trials)

    assert judged() == ["ok", "wrong", "wrong", "wrong"]
    assert judged(rtol=1e-2) == judged(atol=1e-2) == ["ok", "ok", "ok", "wrong"]
    assert judged(rtol=1e-4, atol=1e-4) == ["ok", "wrong", "ok", "wrong"]
    assert judged(rtol=1.0, atol=1.0) == ["ok"] * 4
    assert judged(max_mismatched_ratio=0.5) == ["ok"] * 4
    assert judged(max_mismatched_ratio=0) == ["ok", "ok", "wrong", "wrong"]


def choosy(output: Any, expected: Any, x: Any) -> Any:
    assert expected is None, "there is no reference"
    first = float(host(output)[0]) + 1
    assert (host(x) == X).all()
    if first == 3:
        raise ValueError("three is right out")
    return None if first == 4 else first != 2


@everywhere
def test_a_check_without_a_reference_rejects_wrong_results(isolation: str) -> None:
    kernel = tuned(lambda x, do: x + do, [1, 2, 3, 4], check_fn=choosy)
    with isolated(isolation):
        trials = kernel.tune(X).trials
    assert ends(trials) == ["ok", "wrong", "wrong", "ok"]
    assert [trial.message for trial in trials[1:3]] == [
        "check_fn returned False",
        "check_fn raised ValueError: three is right out",
    ]


@everywhere
def test_a_check_that_fails_in_a_callback_hides_its_frames(isolation: str) -> None:
    def calls_back(output: Any, expected: Any, x: Any) -> None:
        jax.block_until_ready(jax.pure_callback(boom, output, output))

    kernel = tuned(lambda x, do: x + do, [1], check_fn=calls_back)
    with isolated(isolation), pytest.raises(quarantune.TuningFailedError) as failed:
        kernel.tune(X)
    (trial,) = failed.value.trials
    assert re.match(r"check_fn raised .*ArithmeticError: there is no ref", trial.message)
    assert ", line " not in trial.message


@everywhere
def test_a_check_that_says_true_or_nothing_beats_the_reference(isolation: str) -> None:
    def lenient(output: Any, expected: Any, x: Any) -> Any:
        assert (host(expected) == host(x)).all()
        return {1.0: True, 2.0: None}.get(float(host(output)[0] - host(expected)[0]), False)

    kernel = tuned(lambda x, do: x + do, [0, 1, 2], ref_fn=lambda x: x, check_fn=lenient)
    with isolated(isolation):
        assert ends(kernel.tune(X).trials) == ["wrong", "ok", "ok"]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def squared(x: Any, factor: float) -> Any:
    return x * x


squared.defvjp(lambda x, factor: (x * x, x), lambda factor, x, g: (factor * x * g,))


@pytest.mark.slow
@everywhere
def test_check_grad_finds_a_wrong_gradient_behind_a_right_output(isolation: str) -> None:
    configs = [2.0, 3.0, 2.00001]
    with here():
        unchecked = tuned(squared, configs, default=2.0, ref_fn=jnp.square).tune(X)
    with isolated(isolation):
        checked = tuned(squared, configs, default=2.0, ref_fn=jnp.square, check_grad=True).tune(X)
    assert ends(unchecked.trials) == ["ok"] * 3
    assert ends(checked.trials) == ["ok", "wrong", "ok"]
    told = checked.trials[1].message
    assert re.match(r"its gradients differ: \d+ of 1000 elements.*\['args\[0\]'\]: got \S+, expected \S+", told), told
