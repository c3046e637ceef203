"""With `time_grad`, configs are timed with their gradients; errors without it name the option."""

from __future__ import annotations

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tuned_functions import here

import quarantune

pytestmark = pytest.mark.usefixtures("two_slots")

X = np.arange(1, 5, dtype=np.float32)


def pause(x: Any, ms: float) -> Any:
    def host(value: Any) -> Any:
        time.sleep(ms / 1000)
        return value

    return jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential")


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def squared(x: Any, kind: str) -> Any:
    return pause(x, 5 if kind == "slow forward" else 0) ** 2


def forward(x: Any, kind: str) -> tuple[Any, Any]:
    return squared(x, kind), x


def backward(kind: str, x: Any, cotangent: Any) -> tuple[Any]:
    if kind == "no backward":
        raise ValueError("x must be divided into the same number of blocks")
    if kind == "slow backward":
        cotangent = pause(cotangent, 50)
    return (cotangent * 2 * x * (3 if kind == "wrong backward" else 1),)


squared.defvjp(forward, backward)


@functools.partial(jax.jit, static_argnames=["kind", "power"])
def kernel(x: Any, steps: Any, power: int = 1, kind: str = "slow forward") -> Any:
    return {"y": squared(x, kind) ** power, "steps": steps + 1}


def loss(tuned: quarantune.Autotuned) -> Any:
    return jax.grad(lambda x: tuned(x, 3)["y"].sum())


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def attention_of_rows(q: Any, k: Any, v: Any, do: str) -> Any:
    return jax.nn.softmax(q @ k.T) @ v  # without 1/sqrt(d): saturated rows have gradients of terms that cancel


def attention_and_sums(q: Any, k: Any, v: Any, do: str) -> Any:
    output = attention_of_rows(q, k, v, do)
    return output, (q, k, v, output)


def attention_backward(do: str, kept: Any, given: Any) -> Any:
    q, k, v, output = kept
    p = jax.nn.softmax(q @ k.T)
    mean = 0 if do == "missing term" else (given * output).sum(-1, keepdims=True)
    ds = p * (given @ v.T - mean)
    ds = ds.at[:, :8].set(0) if do == "wrong mask" else ds
    return ds @ k * (2 if do == "factor 2" else 1), ds.T @ q, p.T @ given


attention_of_rows.defvjp(attention_and_sums, attention_backward)


@functools.partial(jax.jit, static_argnames=["do"])
def attention(q: Any, k: Any, v: Any, do: str = "plain") -> Any:
    if do == "plain":
        return jax.nn.softmax(q @ k.T) @ v
    return attention_of_rows(q, k, v, do)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
def test_only_wrong_gradients_of_saturated_attention_are_wrong(dtype: str) -> None:
    q, k, v = (jnp.asarray(each, dtype) for each in np.random.default_rng(0).normal(size=(3, 256, 64)))
    bugs = ["factor 2", "missing term", "wrong mask"]
    with here():
        result = quarantune.AutoTuner(attention, {"do": ["by hand", *bugs]}, time_grad=True, rep=1).run(q, k, v)
    told = {trial.config["do"]: trial for trial in result.trials}
    assert told["by hand"].outcome in ("ok", "slow"), told["by hand"].message
    assert {do: told[do].outcome for do in bugs} == dict.fromkeys(bugs, "wrong")


@pytest.mark.long
@pytest.mark.slow
def test_configs_are_timed_and_checked_with_their_gradients() -> None:
    kinds = ["no backward", "wrong backward", "slow backward", "slow forward"]
    tune = functools.partial(
        quarantune.autotune, {"kind": kinds}, rep=3, ref_fn=lambda x, steps: {"y": x**2, "steps": steps + 1}
    )
    result = tune(time_grad=True, name="together")(kernel).tune(X, 3)
    outcomes = {trial.config["kind"]: trial.outcome.value for trial in result.trials}
    assert outcomes["no backward"] == "error"
    assert outcomes["wrong backward"] == "wrong"
    assert result.best_config == {"kind": "slow forward"}
    message = next(trial.message for trial in result.trials if trial.config["kind"] == "no backward")
    assert "same number of blocks" in message

    by_forward = tune(name="forward")(kernel).tune(X, 3)
    assert by_forward.best_config != {"kind": "slow forward"}
    assert result.key.rpartition("code")[2] != by_forward.key.rpartition("code")[2]


@pytest.mark.slow
def test_a_function_tuned_with_its_gradient_returns_its_output(sweeps: list[str]) -> None:
    tuned = quarantune.autotune({"kind": ["slow forward", "no backward"]}, rep=1, time_grad=True)(kernel)
    np.testing.assert_array_equal(tuned(X, 3)["y"], X**2)
    np.testing.assert_array_equal(jax.jit(loss(tuned))(X), 2 * X)
    assert tuned.lookup(X, 3) == {"kind": "slow forward"}


@pytest.mark.parametrize("outer", [lambda fn: fn, jax.jit, jax.value_and_grad], ids=["grad", "jit", "second"])
def test_a_winner_without_a_gradient_names_time_grad(outer: Any) -> None:
    tuned = quarantune.autotune([{"kind": "no backward"}], rep=1)(kernel)
    differentiated = loss(tuned)
    call = outer(differentiated) if outer is not jax.value_and_grad else outer(lambda x: differentiated(x).sum())
    with pytest.raises(ValueError, match="same number of blocks") as raised:
        call(X)
    assert "time_grad=True" in "".join(raised.value.__notes__)
    assert "no backward" in "".join(raised.value.__notes__)


def test_a_function_without_any_gradient_can_still_be_linearized() -> None:
    @quarantune.autotune({"n": [1, 2]}, rep=1)
    @functools.partial(jax.jit, static_argnames=["n"])
    def fn(x: Any, n: int = 1) -> Any:
        rounds = 3 + 0 * x.sum().astype(int)  # unknown while tracing, so reverse mode fails
        return jax.lax.fori_loop(0, rounds, lambda _, value: value * 2, x)

    _, linear = jax.linearize(fn, X)
    np.testing.assert_array_equal(linear(X), 8 * X)


def test_time_grad_wants_a_jitted_function() -> None:
    with pytest.raises(TypeError, match=r"time_grad differentiates .* jax\.jit"):
        quarantune.AutoTuner(lambda x, n=1: x, {"n": [1]}, time_grad=True)


@pytest.mark.long
@pytest.mark.slow
def test_the_attention_of_jax_is_tuned_to_be_trained_with() -> None:
    attention = pytest.importorskip("jax.experimental.pallas.ops.gpu.attention")

    @functools.partial(jax.jit, static_argnames=["bq", "bk"])
    def mha(q: Any, k: Any, v: Any, bq: int = 32, bk: int = 32) -> Any:
        blocks = attention.BlockSizes(
            block_q=bq, block_k=bk, block_q_dkv=bq, block_kv_dkv=bk, block_q_dq=bq, block_kv_dq=bk
        )
        return attention.mha(q, k, v, segment_ids=None, block_sizes=blocks, interpret=True)

    q = jnp.ones((1, 64, 1, 16), jnp.float32)
    tuned = quarantune.autotune([{"bq": 32, "bk": 64}, {"bq": 64, "bk": 64}], rep=1, time_grad=True)(mha)
    result = tuned.tune(q, q, q)
    failed = [trial.config for trial in result.trials if trial.outcome.value == "error"]
    assert failed == [{"bq": 32, "bk": 64}], result.table()
    gradient = jax.grad(lambda q: tuned(q, q, q).sum())(q)
    assert np.isfinite(gradient).all()

    by_forward = quarantune.autotune([{"bq": 32, "bk": 64}], rep=1, ref_fn=None)(mha)
    with pytest.raises(ValueError, match="same number of blocks") as raised:
        jax.grad(lambda q: by_forward(q, q, q).sum())(q)
    assert "time_grad=True" in "".join(raised.value.__notes__)
