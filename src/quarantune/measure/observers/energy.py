"""The energy of a call on an NVIDIA GPU, by the counter of NVML.

`nvmlDeviceGetTotalEnergyConsumption` returns the millijoules that a GPU has taken since its driver was loaded (NVML
API reference, device queries; from Volta on). The counter advances in steps, a tenth of a second apart on an H200,
while calls take microseconds. So the program runs over and over, as with Kernel Tuner's NVML observer (Schoonhoven et
al., Going green: optimizing GPUs for energy efficiency through model-steered auto-tuning, PMBS 2022), and the time
between two steps counts. The energy between them is exact; only the times of the steps are uncertain.
"""

from __future__ import annotations

import ctypes
import importlib.util
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

WHAT = "the energy of a call"
FIELDS = {
    "energy_mj": ("mJ", "energy of one call, by the GPU's own counter"),
    "watts": ("W", "mean power of the GPU while the config runs over and over"),
}
_RESOLUTION = 0.01
"""Largest uncertainty of a step's time, as a share of the time between the two steps."""
_LEAST_S = 0.45
"""Least seconds between the two steps, as steps may come late: by 2 of 100 ms on an H200."""
_SKIPPED = 1
"""First steps that do not count: their mean power is from a GPU that only begins to work."""
_LONGEST_S = 5.0
"""Seconds after which the measurement ends, however coarse it is."""
_QUEUED_S = 0.01
"""Seconds that a batch of queued runs takes. Another batch waits behind it, so that the GPU is not idle while the
counter is read: 3.4 ms on an H200."""
_MOST_QUEUED = 1000
"""Most runs in a batch."""
_PAUSE_S = 2e-4
"""Seconds between two readings of the counter: a small part of `_QUEUED_S`."""


def why_not(platform: str, kind: str) -> str:
    """Returns the reason why energy cannot be measured on this machine; empty if it can, as far as NVML knows.

    Args:
        platform: the platform of the call.
        kind: the name of its device.
    """
    if platform != "cuda" or " MIG " in kind:
        return f"only whole NVIDIA GPUs measure it, and this call runs on {platform} ({kind})"
    if importlib.util.find_spec("pynvml") is None:
        return "the package nvidia-ml-py is not installed: pip install 'quarantune[energy]'"
    import pynvml

    try:
        pynvml.nvmlInit()
        for handle in map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount())):
            if pynvml.nvmlDeviceGetName(handle) == kind:
                pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return f"NVML cannot read the energy counter of {kind} (GPUs have one from Volta on): {error}"
    return ""


def observe(dispatch: Callable[[], Any], ordinal: int, run_s: float) -> Mapping[str, float]:
    """Returns the energy of one run in millijoules, and the GPU's mean power in watts.

    Args:
        dispatch: queues one run and returns its outputs without waiting.
        ordinal: the number of the GPU among those that CUDA shows to this process.
        run_s: about the seconds that a run takes.

    Raises:
        RuntimeError: the energy counter of the GPU cannot be read, or stands still.
    """
    return dict(zip(FIELDS, per_call(dispatch, counter(ordinal), run_s), strict=True))


def counter(ordinal: int) -> Callable[[], int]:
    """Returns a function that reads the energy counter of a GPU, in millijoules.

    It finds the GPU by its UUID, because NVML and CUDA number the GPUs in different ways.

    Args:
        ordinal: its number among those that CUDA shows to this process.

    Raises:
        RuntimeError: CUDA does not give the UUID of the GPU.
        pynvml.NVMLError: NVML does not know that GPU.
    """
    import pynvml

    cuda, device, found = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), (ctypes.c_ubyte * 16)()
    if cuda.cuDeviceGet(ctypes.byref(device), ordinal) or cuda.cuDeviceGetUuid_v2(found, device):
        raise RuntimeError("CUDA does not give the UUID of this GPU")
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.UUID(bytes=bytes(found))}")
    return lambda: int(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle))


def per_call(dispatch: Callable[[], Any], read: Callable[[], int], run_s: float) -> tuple[float, float]:
    """Returns the energy of one run in millijoules, and the power between two steps of the counter in watts.

    The energy is the power times the mean time of these runs. A GPU at its power limit lowers its clocks, so these runs
    take longer than timed ones.

    Args:
        dispatch: queues one run and returns its outputs without waiting.
        read: reads the counter in millijoules.
        run_s: about the seconds that a run takes.

    Raises:
        RuntimeError: the counter stands still.
    """
    import jax  # not at the top: tables import this file for its headings

    count = max(1, min(_MOST_QUEUED, round(_QUEUED_S / run_s)))
    steps: list[tuple[float, float, int]] = []  # when each was seen, how uncertain that is, and the counter after it
    last, total, queued = read(), 0, list[Any]()
    began_s = looked_s = time.perf_counter()
    while time.perf_counter() - began_s < _LONGEST_S:
        for _ in range(count):
            outputs = dispatch()
        queued, total = [*queued, outputs], total + count
        while len(queued) > 1:
            before_s, value = time.perf_counter(), read()
            if value != last:
                now_s = time.perf_counter()
                steps.append(((looked_s + now_s) / 2, (now_s - looked_s) / 2, value))
            looked_s, last = before_s, value
            if all(leaf.is_ready() for leaf in jax.tree.leaves(queued[0]) if hasattr(leaf, "is_ready")):
                jax.block_until_ready(queued.pop(0))
            else:
                time.sleep(_PAUSE_S)
        if len(steps) <= _SKIPPED + 1:
            continue
        first, end = steps[_SKIPPED], steps[-1]
        if end[0] - first[0] >= max(_LEAST_S, first[1] / _RESOLUTION, end[1] / _RESOLUTION):
            break
    jax.block_until_ready(queued)
    run_s = (time.perf_counter() - began_s) / total
    if len(steps) <= _SKIPPED + 1:
        raise RuntimeError(f"the energy counter of the GPU advanced {len(steps)} times in {_LONGEST_S:g} s")
    watts = (end[2] - first[2]) / (end[0] - first[0]) / 1e3
    return watts * run_s * 1e3, watts
