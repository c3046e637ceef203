"""Metrics of a time are right, and unknown if a count or a peak is unknown."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import python

from quarantune.metrics import (
    KernelMetrics,
    compute_elementwise_metrics,
    compute_gemm_metrics,
    device_peaks,
    from_counts,
)

UNKNOWN = "AMD EPYC (2 cores)"


def test_a_matrix_product_counts_two_operations_for_each_term() -> None:
    metrics = compute_gemm_metrics(1000, 2000, 3000, 2.0, dtype="float32")
    assert metrics.latency_ms == 2.0
    assert metrics.throughput_tflops == pytest.approx(2 * 1000 * 2000 * 3000 / 2e-3 / 1e12)
    assert metrics.bandwidth_gbps == pytest.approx(4 * (3_000_000 + 6_000_000 + 2_000_000) / 2e-3 / 1e9)


def test_a_result_of_another_dtype_moves_its_own_bytes() -> None:
    metrics = compute_gemm_metrics(100, 200, 300, 1.0, dtype="float8_e4m3fn", out_dtype="float32")
    assert metrics.bandwidth_gbps == pytest.approx((30_000 + 60_000 + 4 * 20_000) / 1e-3 / 1e9)


def test_an_elementwise_kernel_moves_every_array_once() -> None:
    metrics = compute_elementwise_metrics(10**6, 0.5, dtype="float16", reads=2, writes=1)
    assert metrics.bandwidth_gbps == pytest.approx(3 * 2 * 10**6 / 0.5e-3 / 1e9)
    assert metrics.throughput_tflops is None


def test_an_elementwise_kernel_has_a_throughput_by_operations() -> None:
    metrics = compute_elementwise_metrics(10**6, 1.0, flops_per_element=5, device="NVIDIA H200")
    assert metrics.throughput_tflops == pytest.approx(0.005)
    assert metrics.flops_utilization is None
    assert metrics.bandwidth_utilization == pytest.approx(100 * 4e9 / 4800e9)


def test_utilization_is_a_percentage_of_the_dtypes_peak() -> None:
    in_bf16 = compute_gemm_metrics(4096, 4096, 4096, 0.2, device="NVIDIA H200")
    in_fp8 = compute_gemm_metrics(4096, 4096, 4096, 0.2, device="NVIDIA H200", dtype=jnp.float8_e5m2)
    assert in_bf16.flops_utilization == pytest.approx(100 * 2 * 4096**3 / 0.2e-3 / 989.4e12)
    assert in_fp8.flops_utilization == pytest.approx(100 * 2 * 4096**3 / 0.2e-3 / 1978.9e12)
    assert in_bf16.bandwidth_utilization == pytest.approx(100 * 3 * 2 * 4096**2 / 0.2e-3 / 4800e9)


def test_a_peak_that_is_given_beats_the_table() -> None:
    metrics = compute_gemm_metrics(
        1000, 1000, 1000, 1.0, device="NVIDIA H200", peak_tflops=4.0, peak_bandwidth_gbps=12.0
    )
    assert metrics.flops_utilization == pytest.approx(50)
    assert metrics.bandwidth_utilization == pytest.approx(50)
    assert compute_elementwise_metrics(10**6, 1.0, peak_bandwidth_gbps=8.0).bandwidth_utilization == pytest.approx(50)


@pytest.mark.parametrize("device", [None, UNKNOWN, "NVIDIA H100", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"])
def test_a_device_outside_the_table_has_no_utilization(device: str | None) -> None:
    metrics = compute_gemm_metrics(64, 64, 64, 1.0, device=device)
    assert metrics.throughput_tflops is not None
    assert (metrics.flops_utilization, metrics.bandwidth_utilization) == (None, None)


def test_a_dtype_without_a_known_peak_has_no_utilization() -> None:
    metrics = compute_gemm_metrics(64, 64, 64, 1.0, dtype="complex64", device="NVIDIA H200")
    assert metrics.flops_utilization is None
    assert metrics.bandwidth_utilization is not None


def test_operations_have_no_peak_without_a_dtype() -> None:
    assert from_counts(1.0, flops=1e12, device="NVIDIA H200").flops_utilization is None
    told = from_counts(1.0, flops=989.4e9, device="NVIDIA H200", dtype="bfloat16")
    assert told.flops_utilization == pytest.approx(100)


def test_a_missing_count_gives_none() -> None:
    nothing = from_counts(3, device="NVIDIA H200", dtype="bfloat16")
    assert nothing == KernelMetrics(latency_ms=3.0)
    only_bytes = from_counts(1.0, bytes=4.8e9, device="NVIDIA H200")
    assert only_bytes.throughput_tflops is None
    assert only_bytes.bandwidth_utilization == pytest.approx(100)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn", jnp.bfloat16, np.float16, np.dtype("float32")])
def test_a_dtype_may_be_a_name_a_type_or_a_dtype(dtype: Any) -> None:
    size = jnp.dtype(dtype).itemsize
    metrics = compute_gemm_metrics(10, 10, 10, 1.0, dtype=dtype, device="NVIDIA H200")
    assert metrics.bandwidth_gbps == pytest.approx(300 * size / 1e-3 / 1e9)
    assert metrics.flops_utilization is not None


def test_a_value_that_is_not_a_dtype_is_refused() -> None:
    with pytest.raises(TypeError, match="bf17"):
        compute_gemm_metrics(1, 1, 1, 1.0, dtype="bf17")


@pytest.mark.parametrize("latency_ms", [0, -1.0, math.nan, math.inf])
def test_an_impossible_time_is_refused(latency_ms: float) -> None:
    with pytest.raises(ValueError, match=r"latency_ms is .*; give a number above zero"):
        from_counts(latency_ms, flops=1)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: compute_gemm_metrics(1, -2, 1, 1.0), "N"),
        (lambda: compute_elementwise_metrics(-1, 1.0), "numel"),
        (lambda: compute_elementwise_metrics(1, 1.0, reads=-1), "reads"),
        (lambda: from_counts(1.0, flops=-1), "flops"),
        (lambda: from_counts(1.0, bytes=math.nan), "bytes"),
        (lambda: from_counts(1.0, peak_bandwidth_gbps=0), "peak_bandwidth_gbps"),
        (lambda: from_counts(1.0, peak_tflops=-3), "peak_tflops"),
    ],
)
def test_an_impossible_number_is_refused_by_name(call: Any, name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name} is "):
        call()


def test_metrics_print_their_known_figures_in_one_line() -> None:
    full = from_counts(2.0, flops=1e12, bytes=4e9, peak_tflops=1000, peak_bandwidth_gbps=4000)
    assert str(full) == "2 ms, 500 TFLOP/s (50.0% of peak), 2000 GB/s (50.0% of peak)"
    assert str(from_counts(0.25, bytes=1e6)) == "0.25 ms, 4 GB/s"


def test_metrics_are_frozen_and_have_a_short_name() -> None:
    metrics = from_counts(1.0, flops=3e9)
    assert metrics.tflops == metrics.throughput_tflops == pytest.approx(3.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        metrics.latency_ms = 2.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("kind", "bf16_tflops", "gbps"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4, 3350),
        ("NVIDIA H100 PCIe", 756, 2000),
        ("NVIDIA A100-SXM4-80GB", 312, 2039),
        ("NVIDIA L4", 121, 300),
        ("NVIDIA GeForce RTX 4090", 165.2, 1008),
        ("AMD Instinct MI300X", 1307.4, 5300),
        ("TPU v4", 275, 1200),
        ("TPU v5 lite", 197, 819),
        ("TPU v5", 459, 2765),
        ("TPU v6 lite", 918, 1638),
    ],
)
def test_the_peaks_equal_the_datasheets(kind: str, bf16_tflops: float, gbps: float) -> None:
    peaks = device_peaks(kind)
    assert peaks is not None
    assert (peaks.tflops["bfloat16"], peaks.gbps) == (bf16_tflops, gbps)


def test_metrics_and_spaces_do_not_import_jax() -> None:
    # The modules are loaded by path, because the package imports JAX.
    code = """
import importlib.util, pathlib, sys, types
package = types.ModuleType("quarantune")
package.__path__ = [sys.argv[1]]
sys.modules["quarantune"] = package
import quarantune.metrics, quarantune.spaces
print("jax" in sys.modules)
"""
    import quarantune

    assert python("-c", code, *quarantune.__path__).strip() == "False"
