"""Documented programs of five other autotuners run here with changed names only, as docs/coming-from.md lists them."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import change_version
from jax.experimental import pallas as pl

import quarantune
from quarantune import Outcome, metrics, spaces
from quarantune.calls import given_inputs

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("two_slots")]

QUICK: dict[str, Any] = {"warmup": 1, "rep": 3}


def tiled_matmul() -> Callable[..., jax.Array]:
    """Returns a Pallas matmul. It is a nested function, so workers need not import this module."""

    def tile(a_ref: Any, b_ref: Any, out_ref: Any) -> None:
        out_ref[...] = jnp.dot(a_ref[...], b_ref[...])

    def pallas_matmul(a: Any, b: Any, *, BM: int, BN: int) -> Any:
        (m, k), n = a.shape, b.shape[1]
        return pl.pallas_call(
            tile,
            out_shape=jax.ShapeDtypeStruct((m, n), a.dtype),
            grid=(m // BM, n // BN),
            in_specs=[pl.BlockSpec((BM, k), lambda i, j: (i, 0)), pl.BlockSpec((k, BN), lambda i, j: (0, j))],
            out_specs=pl.BlockSpec((BM, BN), lambda i, j: (i, j)),
            interpret=True,
        )(a, b)

    return pallas_matmul


def matrices(m: int = 64, k: int = 32, n: int = 64) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.normal(size=(m, k)), jnp.float32), jnp.asarray(rng.normal(size=(k, n)), jnp.float32)


def entries(cache_dir: Path) -> list[dict[str, Any]]:
    """Returns the contents of the only cache file, in the layout for readers."""
    (file,) = cache_dir.glob("*.json")
    (by_key,) = json.loads(file.read_text()).values()
    return list(by_key.values())


# --- tonno ----------------------------------------------------------------------------------------------------


def test_tonnos_usage_tunes_once_per_shape(swept_configs: list[list[Any]], cache_dir: Path) -> None:
    pallas_matmul = tiled_matmul()
    configs = [{"BM": 32, "BN": 32}, {"BM": 32, "BN": 64}]

    @quarantune.autotune(configs=configs, warmup=1, rep=3)
    @jax.jit(static_argnames=["BM", "BN"])
    def matmul(a: jax.Array, b: jax.Array, BM: int = 32, BN: int = 64) -> jax.Array:
        assert isinstance(BM, int)
        return pallas_matmul(a, b, BM=BM, BN=BN)

    a, b = matrices()
    overridden = matmul(a, b, BM=16, BN=32)
    assert swept_configs == []
    for _ in range(2):
        np.testing.assert_allclose(matmul(a, b), a @ b, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(overridden, a @ b, rtol=1e-4, atol=1e-4)
    assert swept_configs == [configs]
    (entry,) = entries(cache_dir)
    assert entry["config"] in configs
    assert entry["time_ms"] > 0
    assert entry["key_values"]


@pytest.mark.long
@pytest.mark.slow
def test_tonnos_non_tunable_static_argument_is_part_of_the_key(swept_configs: list[list[Any]], cache_dir: Path) -> None:
    @quarantune.autotune(configs=[{"BM": 32}, {"BM": 64}], warmup=1, rep=3)
    @jax.jit(static_argnames=["BM", "transpose"])
    def matmul(a: jax.Array, b: jax.Array, transpose: bool = False, BM: int = 32) -> jax.Array:
        product = jnp.concatenate([a[:BM] @ b, a[BM:] @ b])
        return product.T if transpose else product

    a, b = matrices(m=96)
    np.testing.assert_allclose(matmul(a, b), a @ b, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(matmul(a, b, transpose=True), (a @ b).T, rtol=1e-4, atol=1e-4)
    assert len(swept_configs) == len(entries(cache_dir)) == 2


@pytest.mark.parametrize("transform", ["jit", "grad", "vmap"])
def test_tonnos_sweep_in_a_trace_puts_the_winner_in_it(transform: str, swept_configs: list[list[Any]]) -> None:
    @quarantune.autotune(configs=[{"BM": 1}, {"BM": 2}], warmup=1, rep=3)
    @jax.jit(static_argnames=["BM"])
    def scaled(a: jax.Array, BM: int = 0) -> jax.Array:
        if BM != 2:
            raise ArithmeticError("only the config 2 is any good")
        return a * BM

    a = jnp.ones((2, 8))
    calls: dict[str, Callable[..., Any]] = {
        "jit": jax.jit(lambda a: scaled(a) + 0),
        "grad": jax.jit(jax.grad(lambda a: scaled(a).sum())),
        "vmap": jax.vmap(scaled),
    }
    np.testing.assert_array_equal(calls[transform](a), np.full((2, 8), 2.0))
    assert swept_configs == [[{"BM": 1}, {"BM": 2}]]


# --- TileLang -------------------------------------------------------------------------------------------------


def tilelang_kernel() -> Callable[..., Any]:
    """Returns the guide's matmul: tunables with defaults, and a dtype that is not tuned."""
    pallas_matmul = tiled_matmul()

    @jax.jit(static_argnames=["block_M", "block_N", "accum_dtype"])
    def matmul(A: Any, B: Any, block_M: int = 64, block_N: int = 64, accum_dtype: str = "float32") -> Any:
        return pallas_matmul(A.astype(accum_dtype), B.astype(accum_dtype), BM=block_M, BN=block_N).astype(A.dtype)

    return matmul


def blocks(*sizes: int) -> list[dict[str, int]]:
    return [{"block_M": size, "block_N": 64} for size in sizes]


@pytest.mark.slow
def test_tilelangs_decorator_takes_a_space_and_inputs(
    swept_configs: list[list[Any]],
) -> None:
    def matmul_configs(A: Any, B: Any) -> Iterator[dict[str, int]]:
        (M, K), N = A.shape, B.shape[1]
        large = min(M, N, K) >= 32
        for BM in [64] if large else [16, 32]:
            for BN in [32, 64]:
                yield {"block_M": BM, "block_N": BN}

    given = jnp.full((64, 16), 2.0)

    def saw_the_given_inputs(C: Any, _: Any, A: Any, B: Any) -> bool:
        return bool((np.asarray(A) == 2).all())

    matmul = quarantune.autotune(configs=matmul_configs, warmup=2, rep=5, timeout=60, check_fn=saw_the_given_inputs)(
        tilelang_kernel()
    )

    A, B = jnp.ones((64, 16)), jnp.ones((16, 64))
    with quarantune.set_autotune_inputs(given, B):
        np.testing.assert_array_equal(matmul(A, B), np.full((64, 64), 16.0))
        np.testing.assert_array_equal(matmul(A, B), np.full((64, 64), 16.0))
    assert [[config["block_M"] for config in configs] for configs in swept_configs] == [[16, 16, 32, 32]]
    with quarantune.set_autotune_inputs([jnp.full((64, 32), 2.0), jnp.ones((32, 64))]):
        matmul(jnp.ones((64, 32)), jnp.ones((32, 64)))
    assert [config["block_M"] for config in swept_configs[1]] == [64, 64]


@pytest.mark.parametrize("form", [list, tuple])
def test_tilelangs_inputs_may_be_set_as_one_list(form: Any) -> None:
    ones, twos = jnp.ones(4), jnp.full(4, 2.0)
    given = form([twos, twos])
    with quarantune.set_autotune_inputs(given):
        spread, _ = given_inputs.arguments(jax.jit(lambda A, B: A + B), (ones, ones), {}, "auto")
        whole, _ = given_inputs.arguments(jax.jit(lambda pair: pair[0] + pair[1]), (form([ones, ones]),), {}, "auto")
        with pytest.raises(ValueError, match=r"gives for 'A' an array of float32\[4\] where the call has"):
            given_inputs.arguments(jax.jit(lambda A, B: A + B), (jnp.ones(8), ones), {}, "auto")
    assert [float(array[0]) for array in spread] == [2, 2]
    assert [float(array[0]) for array in whole[0]] == [2, 2]


def test_tilelangs_tuner_returns_kernel_latency_and_config() -> None:
    def allclose(C: Any, _: Any, A: Any, B: Any) -> bool:
        return np.allclose(C, np.asarray(A) @ np.asarray(B), rtol=1e-2, atol=1e-2)

    phases: list[tuple[int, str]] = []
    tuner = quarantune.AutoTuner(
        tilelang_kernel(),
        blocks(32, 64),
        warmup=2,
        rep=5,
        timeout=60,
        supply="auto",
        check_fn=allclose,
        on_progress=lambda index, phase: phases.append((index, phase)),
    )
    A, B = matrices()
    artifact = tuner.run(A, B)
    (winner,) = [trial for trial in artifact.trials if trial.config == artifact.best_config]
    assert winner.outcome is Outcome.OK
    assert winner.time_ms == artifact.time_ms > 0
    assert [trial.config for trial in artifact.trials] == blocks(32, 64)
    for config in (0, 1):
        entered = dict.fromkeys(phase for index, phase in phases if index == config)
        assert [*entered] == ["compile", "check", "measure", "end"]
    np.testing.assert_allclose(artifact.fn(A, B), A @ B, rtol=1e-4, atol=1e-4)


KINDS: dict[str, Callable[[Any], Any]] = {
    "integer": lambda A: (np.round(A) == A).all(),
    "normal": lambda A: (np.abs(A) > 1).any(),
}


@pytest.mark.parametrize("kind", [*KINDS, "a function"])
def test_tilelangs_inputs_follow_supply_or_come_from_a_function(kind: str) -> None:
    is_right = KINDS.get(kind, lambda A: (A == 7).all())

    def supply_prog(signature: Any) -> list[Any]:
        return [jnp.full(param.shape, 7, param.dtype) for param in signature]

    @jax.jit(static_argnames=["block"])
    def doubled(A: Any, block: int = 1) -> Any:
        return A * 2

    tuner = quarantune.AutoTuner(
        doubled,
        [{"block": 1}],
        supply=supply_prog if kind == "a function" else kind,
        check_fn=lambda C, _, A: bool(is_right(np.asarray(A))),
        **QUICK,
    )
    assert tuner.run(jax.ShapeDtypeStruct((32, 32), jnp.float32)).best_config == {"block": 1}


def drifting() -> Callable[..., Any]:
    """Returns a kernel; one element in a hundred is off by `drift`."""

    @jax.jit(static_argnames=["drift"])
    def shifted(A: Any, drift: float = 0.0) -> Any:
        return A.at[0].add(drift)

    return shifted


CHECKS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "ref_prog": ({"ref_fn": lambda A: A, "max_mismatched_ratio": 0}, ["ok", "ok", "wrong"]),
    "rtol and atol": (
        {"ref_fn": lambda A: A, "max_mismatched_ratio": 0, "rtol": 0, "atol": 1e-4},
        ["ok", "wrong", "wrong"],
    ),
    "manual_check_prog": (
        {"check_fn": lambda C, _, A: bool((np.asarray(C) == np.asarray(A)).all())},
        ["ok", "wrong", "wrong"],
    ),
    "skip_check": ({"ref_fn": None}, ["ok", "ok", "ok"]),
    "no word about it": ({}, ["ok", "wrong", "wrong"]),
}


@pytest.mark.parametrize("check", CHECKS)
def test_tilelangs_checks_keep_wrong_results_from_winning(check: str) -> None:
    options, outcomes = CHECKS[check]
    result = quarantune.AutoTuner(drifting(), {"drift": [0.0, 1e-3, 1.0]}, **options, **QUICK).run(jnp.ones(100))
    assert ["wrong" if trial.outcome is Outcome.WRONG else "ok" for trial in result.trials] == outcomes
    assert not any(trial.outcome.is_failure for trial in result.trials if trial.outcome is not Outcome.WRONG)


def test_tilelangs_check_may_raise_if_a_result_is_wrong() -> None:
    def manual_check_prog(C: Any, _: Any, A: Any) -> None:
        np.testing.assert_array_equal(C, A)

    tuner = quarantune.AutoTuner(drifting(), {"drift": [1.0, 0.0]}, check_fn=manual_check_prog, **QUICK)
    result = tuner.run(jnp.ones(100))
    assert result.best_config == {"drift": 0.0}
    assert result.failures == {"wrong": 1}


def test_tilelangs_par_compile_returns_kernels_in_config_order() -> None:
    cfgs = blocks(64, 48, 32)  # 64 is not a multiple of 48
    A, B = matrices()
    impl = tilelang_kernel()

    @jax.jit(static_argnames=["block_M", "block_N"])
    def factory(A: Any, B: Any, block_M: int = 64, block_N: int = 64) -> Any:
        if A.shape[0] % block_M:
            raise ValueError("blocks must divide")
        return impl(A, B, block_M=block_M, block_N=block_N) + block_M

    with pytest.warns(UserWarning, match=r"block_M=48.* did not compile: error: .*blocks must divide"):
        kernels = quarantune.compile_configs(factory, cfgs, A, B, num_workers=2)
    assert kernels[1] is None
    for size, kernel in ((64, kernels[0]), (32, kernels[2])):
        assert kernel is not None
        np.testing.assert_allclose(kernel(A, B), A @ B + size, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_made", [False, True])
def test_par_compile_returns_a_kernel_for_each_repeated_config(is_made: bool) -> None:
    times = jax.jit(lambda A, n=1: A * n, static_argnames=["n"])
    configs = [{"n": n} for n in (1, 2, 1, 3)]
    kernels = quarantune.compile_configs(times, (lambda A: iter(configs)) if is_made else configs, jnp.ones(2))
    assert [float(kernel(jnp.ones(2))[0]) for kernel in kernels if kernel] == [1, 2, 1, 3]


def test_tilelangs_artifact_loads_without_compiling(tmp_path: Path) -> None:
    traced = tmp_path / "traced"

    @jax.jit(static_argnames=["block"])
    def doubled(A: Any, block: int = 1) -> Any:
        with traced.open("a", encoding="utf-8") as file:
            file.write("traced\n")
        return A * 2

    A = jnp.arange(64.0)
    artifact = quarantune.AutoTuner(doubled, {"block": [1, 2]}, **QUICK).run(A)
    save_dir = tmp_path / "out" / "best" / "doubled_64"
    artifact.save(save_dir)
    said = json.loads((save_dir / "result.json").read_text())
    assert (said["best_config"], said["time_ms"]) == (artifact.best_config, artifact.time_ms)

    before = traced.read_text()
    restored = quarantune.TuningResult.load(save_dir, trusted=True)
    assert restored == artifact
    np.testing.assert_array_equal(restored.fn(A), A * 2)
    assert traced.read_text() == before
    with pytest.raises(quarantune.SavedResultError, match="trusted=True"):
        quarantune.TuningResult.load(save_dir).fn(A)


# --- TritonAutoTuner ------------------------------------------------------------------------------------------


def test_triton_auto_tuners_example_tunes_and_caches(
    cache_dir: Path,
) -> None:
    def dummy_kernel(x: Any, BLOCK_SIZE: int = 64, num_warps: int = 4) -> Any:
        return x * 2

    tuner = quarantune.AutoTuner(
        dummy_kernel,
        {
            "BLOCK_SIZE": [64, 128],
            "num_warps": [4, 8],
        },
        name="dummy",
        key_fn=lambda x: x.shape,
        warmup=2,
        rep=5,
    )
    x = np.ones(1024, np.float32)
    result = tuner.run(x)

    assert result.best_config in spaces.generate_configs({"BLOCK_SIZE": [64, 128], "num_warps": [4, 8]})
    assert len(result.trials) == 4
    assert result.metrics(bytes=2 * x.nbytes).bandwidth_gbps == pytest.approx(2 * x.nbytes / result.time_ms / 1e6)
    assert quarantune.TuningCache(cache_dir).get("dummy", result.key, result.device) == result.best_config
    assert tuner.run(x).from_cache


@pytest.mark.parametrize("on_disk", [True, False])
def test_triton_auto_tuners_cache_gets_puts_lists_and_clears(on_disk: bool, tmp_path: Path) -> None:
    with quarantune.settings(disable_cache=not on_disk):
        cache = quarantune.TuningCache(tmp_path / "configs" if on_disk else None)
        cache.put("gated_mlp", (1024, 4096), "cuda:0", {"BLOCK_M": 64})
        cache.put("gated_mlp", (1024, 4096), "cuda:1", {"BLOCK_M": 32})
        assert cache.get("gated_mlp", (1024, 4096), "cuda:0") == {"BLOCK_M": 64}
        assert cache.get("gated_mlp", (1024, 4096), "cuda:1") == {"BLOCK_M": 32}
        assert cache.get("gated_mlp", (2048, 4096), "cuda:0") is None
        assert [(key.kernel_type, key.device) for key in sorted(cache.keys())] == [
            ("gated_mlp", "cuda:0"),
            ("gated_mlp", "cuda:1"),
        ]
        assert bool(list(tmp_path.glob("configs/*.json"))) == on_disk
        cache.clear()
        assert cache.keys() == []
        assert cache.get("gated_mlp", (1024, 4096), "cuda:0") is None


def test_triton_auto_tuner_raises_if_no_config_succeeds() -> None:
    def broken_kernel(x: Any, BLOCK_SIZE: int = 64) -> Any:
        raise ArithmeticError(f"no luck with {BLOCK_SIZE}")

    with pytest.raises(quarantune.TuningFailedError, match="no luck with 64") as caught:
        quarantune.AutoTuner(broken_kernel, {"BLOCK_SIZE": [64, 128]}, **QUICK).run(np.ones(8))
    assert [trial.outcome for trial in caught.value.trials] == [Outcome.ERROR] * 2


def test_triton_auto_tuners_spaces_and_metrics_keep_their_names() -> None:
    for kernel_type in ("rmsnorm_rope", "gated_mlp", "fp8_gemm"):
        space = getattr(spaces, f"{kernel_type.upper()}_CONFIGS")
        configs = spaces.generate_configs(space)
        assert len(configs) == math.prod(map(len, space.values()))
        assert spaces.get_default_config(kernel_type) in configs
    valid = spaces.filter_valid_configs(configs, hidden_dim=None, intermediate_dim=None, M=32, N=4096, K=4096)
    assert {config["BLOCK_M"] for config in valid} == {64}
    assert spaces.get_default_config("another") == {}
    gemm = metrics.compute_gemm_metrics(1024, 1024, 1024, 1.0, peak_tflops=312.0, peak_bandwidth_gbps=2039.0)
    assert gemm.bandwidth_utilization == pytest.approx(100 * 3 * 2 * 1024**2 / 1e6 / 2039.0)  # percent
    assert gemm.tflops == pytest.approx(2 * 1024**3 / 1e9)
    assert metrics.compute_elementwise_metrics(10**6, 1.0).bandwidth_gbps == pytest.approx(4.0)
    assert isinstance(gemm, metrics.KernelMetrics)


def test_triton_auto_tuners_spaces_need_not_fill_every_key() -> None:
    def dummy_kernel(x: Any, BLOCK_SIZE: int = 64, num_warps: int = 4) -> Any:
        return x * 2

    configs = [{"BLOCK_SIZE": 64}, {"num_warps": 8}]
    result = quarantune.AutoTuner(dummy_kernel, configs, **QUICK).run(np.ones(8))
    assert [trial.config for trial in result.trials] == [
        {"BLOCK_SIZE": 64, "num_warps": 4},
        {"BLOCK_SIZE": 64, "num_warps": 8},
    ]


# --- Triton-distributed ---------------------------------------------------------------------------------------


def gemm_function() -> quarantune.Autotuned:
    """Returns the function-level example: named configs, with key and prune functions of the arguments."""
    pallas_matmul = tiled_matmul()

    def get_config_space() -> list[dict[str, int]]:
        return [{"BLOCK_SIZE_M": BM, "BLOCK_SIZE_K": BK} for BM in [32, 64] for BK in [32, 64]]

    def key_fn(A: Any, B: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return (A.shape[0] <= 128, B.shape, A.dtype)

    def prune_fn(config: Any, A: Any, B: Any, *args: Any, **kwargs: Any) -> bool:
        shared_mem = config["BLOCK_SIZE_M"] * config["BLOCK_SIZE_K"] * A.dtype.itemsize
        return bool(shared_mem < 12 * 1024)

    @quarantune.autotune(get_config_space(), key_fn=key_fn, prune_fn=prune_fn, name="my_gemm_function", **QUICK)
    @functools.partial(jax.jit, static_argnames=["BLOCK_SIZE_M", "BLOCK_SIZE_K"])
    def my_gemm_function(A: Any, B: Any, BLOCK_SIZE_M: int = 32, BLOCK_SIZE_K: int = 32) -> Any:
        return pallas_matmul(A, B, BM=BLOCK_SIZE_M, BN=32)

    return my_gemm_function


def test_triton_distributeds_space_is_pruned_and_keyed(swept_configs: list[list[Any]], cache_dir: Path) -> None:
    my_gemm_function = gemm_function()
    for rows in (64, 128):
        A, B = matrices(m=rows)
        np.testing.assert_allclose(my_gemm_function(A, B), A @ B, rtol=1e-4, atol=1e-4)
    assert swept_configs == [[{"BLOCK_SIZE_M": BM, "BLOCK_SIZE_K": BK} for BM, BK in ((32, 32), (32, 64), (64, 32))]]
    (entry,) = entries(cache_dir)
    assert entry["key_values"] == {"key_fn": [True, [32, 64], "float32"]}
    assert entry["trials"]["pruned"] == 1


@pytest.mark.long
@pytest.mark.slow
def test_triton_distributeds_key_and_prune_fn_may_omit_statics(swept_configs: list[list[Any]]) -> None:
    def configs(A: Any) -> list[dict[str, int]]:
        return [{"BLOCK": size} for size in (1, 2) if size <= A.size]

    @quarantune.autotune(configs, key_fn=lambda A: (A.ndim, A.dtype), prune_fn=lambda config, A: True, **QUICK)
    @jax.jit(static_argnames=["transpose", "BLOCK"])
    def doubled(A: Any, transpose: bool = False, BLOCK: int = 1) -> Any:
        return (A.T if transpose else A) * 2

    for call in (lambda A: doubled(A, transpose=True), lambda A: doubled(A, True), doubled):
        for size in (2, 4):  # one key for all sizes
            np.testing.assert_array_equal(call(jnp.ones((size, 2))).sum(), size * 4)
    assert len(swept_configs) == 2  # the static argument still counts


def test_triton_distributeds_config_objects_run_as_listed() -> None:
    @dataclasses.dataclass(frozen=True)
    class Config:  # like triton.Config
        kwargs: dict[str, int]
        num_stages: int = 3
        num_warps: int = 4

    def get_config_space() -> list[Config]:
        return [Config({"BLOCK_SIZE_M": BM}, num_stages=s) for BM in [16, 32, 128] for s in [3, 4]]

    def prune_fn(config: Any, A: Any, B: Any, *args: Any, **kwargs: Any) -> bool:
        return bool(config["gemm_config"].kwargs["BLOCK_SIZE_M"] * A.dtype.itemsize < 256)

    def my_gemm_function(A: Any, B: Any, gemm_config: Config) -> Any:
        assert isinstance(gemm_config, Config)
        size = gemm_config.kwargs["BLOCK_SIZE_M"]
        return np.concatenate([A[start : start + size] @ B for start in range(0, len(A), size)])

    configs = [{"gemm_config": config} for config in get_config_space()]
    tuner = quarantune.AutoTuner(my_gemm_function, configs, prune_fn=prune_fn, **QUICK)
    A, B = map(np.asarray, matrices())
    result = tuner.run(A, B)
    assert [trial.config for trial in result.trials] == configs
    assert result.failures.get("pruned") == 2
    assert tuner.run(A, B).from_cache
    assert tuner.run(A, B).best_config == result.best_config
    np.testing.assert_allclose(result.fn(A, B), A @ B, rtol=1e-4, atol=1e-4)


@pytest.mark.long
@pytest.mark.slow
def test_triton_distributeds_plain_function_needs_no_defaults() -> None:
    def my_gemm_function(A: Any, B: Any, gemm_config: Any, straggler_option: int = 0, **context: int) -> Any:
        BLOCK_SIZE_M, _ = gemm_config
        rows = range(0, len(A), BLOCK_SIZE_M)
        return np.concatenate([A[start : start + BLOCK_SIZE_M] @ B for start in rows])

    tuner = quarantune.AutoTuner(my_gemm_function, {"gemm_config": [(16, "x"), (32, "y")]}, **QUICK)
    A, B = map(np.asarray, matrices())
    result = tuner.run(A, B)
    assert [trial.config["gemm_config"] for trial in result.trials] == [(16, "x"), (32, "y")]
    np.testing.assert_allclose(result.fn(A, B), A @ B, rtol=1e-4, atol=1e-4)
    assert tuner.run(A, B, straggler_option=0).from_cache
    for other in ({"straggler_option": 3}, {"num_ranks": 2}, {"num_ranks": 4}):
        assert not tuner.run(A, B, **other).from_cache
    with pytest.raises(TypeError, match="'B'"):
        tuner.run(A)


@pytest.mark.long
@pytest.mark.slow
def test_triton_distributeds_variables_retune_and_check_versions(
    swept_configs: list[list[Any]], cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def double(A: Any, BLOCK: int = 1) -> Any:
        return A * 2

    def call() -> None:
        tuned = quarantune.autotune([{"BLOCK": 1}], ref_fn=None, name="double", **QUICK)
        np.testing.assert_array_equal(tuned(jax.jit(double, static_argnames=["BLOCK"]))(jnp.ones(4)), 2)

    call()
    change_version(cache_dir, "jax", "0.0.1")
    assert len(swept_configs) == 1
    with monkeypatch.context() as strict:
        strict.setenv("QUARANTUNE_VERSION_CHECK", "1")
        call()
        assert len(swept_configs) == 2
        call()
        assert len(swept_configs) == 2
    monkeypatch.setenv("QUARANTUNE_ALWAYS_TUNE", "1")
    call()
    assert len(swept_configs) == 3


@pytest.mark.long
@pytest.mark.slow
def test_triton_distributeds_per_call_switches_work(
    swept_configs: list[list[Any]], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    my_gemm_function = gemm_function()
    A, B = matrices()
    np.testing.assert_allclose(my_gemm_function.default(A, B), A @ B, rtol=1e-4, atol=1e-4)
    assert swept_configs == []
    with quarantune.settings(progress=1), caplog.at_level(logging.INFO, logger="quarantune"):
        np.testing.assert_allclose(my_gemm_function(A, B), A @ B, rtol=1e-4, atol=1e-4)
    assert ": 4 configs in " in capsys.readouterr().err
    assert re.search("my_gemm_function: BLOCK_SIZE_M=32 BLOCK_SIZE_K=32: (ok|slow) ", caplog.text)


@pytest.mark.long
@pytest.mark.slow
def test_triton_distributeds_contextual_example_tunes_all(
    swept_configs: list[list[Any]],
) -> None:
    pallas_matmul = tiled_matmul()

    @quarantune.autotune([{"BLOCK": 8}, {"BLOCK": 16}], name="gather")
    @jax.jit(static_argnames=["BLOCK"])
    def copy_and_gather(a: Any, BLOCK: int = 8) -> Any:
        return jnp.concatenate([a[start : start + BLOCK] for start in range(0, a.shape[0], BLOCK)])

    @quarantune.autotune([{"BM": 32, "BN": 32}, {"BM": 64, "BN": 64}], name="consumer")
    @jax.jit(static_argnames=["BM", "BN"])
    def kernel_consumer_gemm(a: Any, b: Any, BM: int = 32, BN: int = 32) -> Any:
        return pallas_matmul(a, b, BM=BM, BN=BN)

    @quarantune.contextual_autotune(warmup=1, rep=3)
    def run_ag_gemm(a: Any, b: Any) -> Any:
        return kernel_consumer_gemm(copy_and_gather(a), b)

    A, B = matrices()
    result = run_ag_gemm.tune(A, B)
    assert [kernel.name for kernel in result.kernels] == ["gather", "consumer"]
    assert [len(kernel.trials) for kernel in result.kernels] == [2, 2]
    assert run_ag_gemm.lookup(A, B) == {(kernel.name, kernel.key): kernel.config for kernel in result.kernels}
    assert "consumer" in result.table()

    found_out = len(swept_configs)
    for fn in (run_ag_gemm, run_ag_gemm.default):
        np.testing.assert_allclose(fn(A, B), A @ B, rtol=1e-4, atol=1e-4)
    assert len(swept_configs) == found_out > 0
