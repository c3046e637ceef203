"""Compares the compile times of Triton and Mosaic kernels at several levels of optimisation; it needs no GPU.

Each set of options has a separate process, because JAX keeps its compiled Mosaic kernels.

    JAX_PLATFORMS=cpu python examples/benchmarks/kernel_levels.py      # with the extra cuda-compile; about 2 minutes
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jobs

SETS: dict[str, dict[str, Any]] = {
    "full": {},
    "level 1": {"xla_backend_optimization_level": 1},
    "level 0": {"xla_backend_optimization_level": 0},
    "no expensive passes": {"xla_llvm_disable_expensive_passes": True},
}
"""The compiler options of each set. None is for ptxas: XLA takes no options for it with a single compile."""


def compile_times(*, kernel: str, options: dict[str, Any]) -> list[float]:
    """Returns the compile time in seconds of each config of a kernel except the first.

    Args:
        kernel: `triton` or `mosaic`.
        options: the compiler options.
    """
    import jax
    import jax.numpy as jnp

    from quarantune.devices import targets
    from quarantune.worker.deviceless import abstract_device

    target = targets.find("H100").for_compiling
    seconds = []
    for fn, rest in {"triton": _triton, "mosaic": _mosaic}[kernel]():
        with abstract_device(target) as sharding:
            matrix = jax.ShapeDtypeStruct((4096, 4096), jnp.float16, sharding=sharding)
            lowered = fn.trace(matrix, matrix, *rest).lower(lowering_platforms=("cuda",))
        began = time.perf_counter()
        lowered.compile(compiler_options=options)
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


def _triton() -> Iterator[tuple[Any, tuple[Any, ...]]]:
    import jax
    import kernels

    problem = kernels.PROBLEMS["gpu"]
    for config in kernels.grid(problem.space)[::5]:
        yield jax.jit(functools.partial(problem.kernel, **config)), ()


def _mosaic() -> Iterator[tuple[Any, tuple[Any, ...]]]:
    import jax
    from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu

    for m, n, steps in itertools.product((64, 128), (64, 128), (2, 4)):
        config = hopper_matmul_mgpu.TuningConfig(tile_m=m, tile_n=n, tile_k=64, max_concurrent_steps=steps)
        yield jax.jit(functools.partial(hopper_matmul_mgpu.matmul, config=config)), (None,)


def main() -> None:
    """Prints the median compile time of each kernel with each set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3, help="processes for each set; the table shows medians")
    options = parser.parse_args()
    print(f"{'kernel':8} {'options':20} {'seconds':>8} {'/ full':>7}")
    for kernel in ("triton", "mosaic"):
        times: dict[str, list[float]] = {name: [] for name in SETS}
        for _ in range(options.repeat):
            for name, chosen in SETS.items():
                found = jobs.run("kernel_levels", "compile_times", platform="cpu", kernel=kernel, options=chosen)
                times[name].append(statistics.median(found))
        for name, medians in times.items():
            median = statistics.median(medians)
            print(f"{kernel:8} {name:20} {median:8.3f} {median / statistics.median(times['full']):7.2f}", flush=True)


if __name__ == "__main__":
    jobs.run_main(main)
