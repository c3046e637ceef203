"""Throughput and bandwidth of a measured kernel, and their shares of the device's peaks."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import ml_dtypes as ml_dtypes  # registers its dtypes with NumPy by name
import numpy as np

from quarantune.device_table import DevicePeaks as DevicePeaks
from quarantune.device_table import peaks_of as device_peaks

__all__ = [
    "DevicePeaks",
    "KernelMetrics",
    "compute_elementwise_metrics",
    "compute_gemm_metrics",
    "device_peaks",
    "from_counts",
]


def __dir__() -> list[str]:
    return __all__


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelMetrics:
    """The figures of one kernel; None means unknown.

    Attributes:
        latency_ms: the time of one run, in milliseconds.
        throughput_tflops: arithmetic in 10^12 operations per second.
        bandwidth_gbps: memory traffic in 10^9 bytes per second.
        flops_utilization: percent of the device's peak arithmetic.
        bandwidth_utilization: percent of its peak memory bandwidth; above 100 a cache served part of the traffic.
    """

    latency_ms: float
    throughput_tflops: float | None = None
    bandwidth_gbps: float | None = None
    flops_utilization: float | None = None
    bandwidth_utilization: float | None = None

    @property
    def tflops(self) -> float | None:
        """`throughput_tflops`, for short."""
        return self.throughput_tflops

    def __str__(self) -> str:
        parts = [f"{self.latency_ms:.4g} ms"]
        if self.throughput_tflops is not None:
            parts.append(f"{self.throughput_tflops:.4g} TFLOP/s{_of_peak(self.flops_utilization)}")
        if self.bandwidth_gbps is not None:
            parts.append(f"{self.bandwidth_gbps:.4g} GB/s{_of_peak(self.bandwidth_utilization)}")
        return ", ".join(parts)


def from_counts(
    latency_ms: float,
    *,
    flops: float | None = None,
    bytes: float | None = None,
    dtype: Any = None,
    device: str | None = None,
    peak_tflops: float | None = None,
    peak_bandwidth_gbps: float | None = None,
) -> KernelMetrics:
    """Returns the metrics of a kernel whose work is known.

    Throughput is `flops / time`, bandwidth `bytes / time`, and each utilization the percentage of the peak.

    Args:
        latency_ms: the time of one run, in milliseconds.
        flops: arithmetic operations in one run; None if unknown.
        bytes: bytes that one run must read and write; None if unknown.
        dtype: the dtype that the matrix units multiply, which decides the peak in the table; None gives no
            `flops_utilization` from the table.
        device: the kind of device, for its peaks in the table; None or an unknown kind gives no utilization.
        peak_tflops: the device's peak in 10^12 operations per second; beats the table.
        peak_bandwidth_gbps: its peak in 10^9 bytes per second; beats the table.

    Raises:
        ValueError: A time or a peak is not positive, or a count is negative.

    Example:
        >>> print(from_counts(2.0, flops=1e12, bytes=4e9, peak_tflops=1000, peak_bandwidth_gbps=4000))
        2 ms, 500 TFLOP/s (50.0% of peak), 2000 GB/s (50.0% of peak)
    """
    _check_positive("latency_ms", latency_ms)
    peaks = None if device is None else device_peaks(device)
    if peak_tflops is None and peaks is not None and dtype is not None:
        name = np.dtype(dtype).name
        peak_tflops = peaks.tflops.get("float8" if name.startswith("float8") else name)
    if peak_bandwidth_gbps is None and peaks is not None:
        peak_bandwidth_gbps = peaks.gbps
    tflops = _rate("flops", flops, per_s=1e-12, latency_ms=latency_ms)
    gbps = _rate("bytes", bytes, per_s=1e-9, latency_ms=latency_ms)
    return KernelMetrics(
        latency_ms=float(latency_ms),
        throughput_tflops=tflops,
        bandwidth_gbps=gbps,
        flops_utilization=_percent("peak_tflops", tflops, peak_tflops),
        bandwidth_utilization=_percent("peak_bandwidth_gbps", gbps, peak_bandwidth_gbps),
    )


def compute_gemm_metrics(
    M: int,
    N: int,
    K: int,
    latency_ms: float,
    peak_tflops: float | None = None,
    peak_bandwidth_gbps: float | None = None,
    *,
    dtype: Any = "bfloat16",
    out_dtype: Any = None,
    device: str | None = None,
) -> KernelMetrics:
    """Returns the metrics of a matrix product `[M, K] @ [K, N] -> [M, N]`.

    Operations: `2 * M * N * K`, a multiplication and an addition for each term. Bytes: `(M * K + K * N) * size +
    M * N * out_size`: each matrix moves once, the least possible. Both counts follow NVIDIA's "Matrix Multiplication
    Background User's Guide".

    Args:
        M: rows of the left matrix and of the result.
        N: columns of the right matrix and of the result.
        K: columns of the left matrix, rows of the right one.
        latency_ms: the time of one product, in milliseconds.
        peak_tflops: the device's peak in 10^12 operations per second; beats the table.
        peak_bandwidth_gbps: its peak in 10^9 bytes per second; beats the table.
        dtype: dtype of the two matrices.
        out_dtype: dtype of the result; None for `dtype`.
        device: the kind of device, for its peaks in the table; None or an unknown kind gives no utilization.

    Raises:
        TypeError: An argument is not a dtype.
        ValueError: A time or a peak is not positive, or a size is negative.

    Example:
        >>> compute_gemm_metrics(4096, 4096, 4096, 0.1718, device="NVIDIA H200").tflops  # doctest: +ELLIPSIS
        799.9...
    """
    for name, size in (("M", M), ("N", N), ("K", K)):
        _check_count(name, size)
    size = np.dtype(dtype).itemsize
    out_size = size if out_dtype is None else np.dtype(out_dtype).itemsize
    return from_counts(
        latency_ms,
        flops=2 * M * N * K,
        bytes=(M * K + K * N) * size + M * N * out_size,
        dtype=dtype,
        device=device,
        peak_tflops=peak_tflops,
        peak_bandwidth_gbps=peak_bandwidth_gbps,
    )


def compute_elementwise_metrics(
    numel: int,
    latency_ms: float,
    bytes_per_element: int | None = None,
    peak_bandwidth_gbps: float | None = None,
    *,
    dtype: Any = "bfloat16",
    reads: int = 1,
    writes: int = 1,
    flops_per_element: float | None = None,
    device: str | None = None,
) -> KernelMetrics:
    """Returns the metrics of a kernel that processes arrays of one size element by element.

    Bytes: `numel * (reads + writes) * bytes_per_element`, the effective bandwidth of NVIDIA's "CUDA C++ Best Practices
    Guide".
    The result has no `flops_utilization`: the table has the peaks of matrix units, which this kernel does not use.

    Args:
        numel: elements in each array.
        latency_ms: the time of one run, in milliseconds.
        bytes_per_element: the size of an element; None for the size of `dtype`.
        peak_bandwidth_gbps: the device's peak in 10^9 bytes per second; beats the table.
        dtype: dtype of the arrays.
        reads: number of arrays that the kernel reads.
        writes: number of arrays that it writes.
        flops_per_element: arithmetic operations for each element; None gives no throughput.
        device: the kind of device, for its peak in the table; None or an unknown kind gives no utilization.

    Raises:
        TypeError: An argument is not a dtype.
        ValueError: A time or a peak is not positive, or a count is negative.
    """
    size = np.dtype(dtype).itemsize if bytes_per_element is None else bytes_per_element
    for name, count in (("numel", numel), ("reads", reads), ("writes", writes), ("bytes_per_element", size)):
        _check_count(name, count)
    return from_counts(
        latency_ms,
        flops=None if flops_per_element is None else numel * flops_per_element,
        bytes=numel * (reads + writes) * size,
        device=device,
        peak_bandwidth_gbps=peak_bandwidth_gbps,
    )


def _rate(name: str, count: float | None, *, per_s: float, latency_ms: float) -> float | None:
    if count is None:
        return None
    _check_count(name, count)
    return float(count) * per_s / (latency_ms * 1e-3)


def _percent(name: str, reached: float | None, peak: float | None) -> float | None:
    if peak is None:
        return None
    _check_positive(name, peak)
    return None if reached is None else 100 * reached / peak


def _check_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} is {value!r}; give a number above zero.")


def _check_count(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} is {value!r}; give a count, zero or more.")


def _of_peak(percent: float | None) -> str:
    return "" if percent is None else f" ({percent:.1f}% of peak)"
