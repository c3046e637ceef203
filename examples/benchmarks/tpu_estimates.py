"""What estimates of the TPU compiler are worth: beside published times and published tables of tuned configs.

    pip install 'quarantune[tpu]'
    python examples/benchmarks/tpu_estimates.py
    python examples/benchmarks/tpu_estimates.py --tpu-inference CLONE --problems 8 --candidates 30

Without a TPU. The first prints the estimates of a matmul beside the times in the guide "Matrix Multiplication" (Pallas
on TPU, in JAX's documentation; a v5e by `timeit`, launches included). The second needs a clone of vLLM's
tpu-inference, and ranks its published config of each problem of its quantized matmul among random ones.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import quarantune

SMALL, LARGE = {"bm": 128, "bk": 128, "bn": 128}, {"bm": 512, "bk": 1024, "bn": 1024}
PUBLISHED_MS = {
    (1024, "small"): 0.2977,
    (4096, "small"): 11.77,
    (8192, "small"): 91.84,
    (1024, "large"): 0.1271,
    (4096, "large"): 0.8891,
    (8192, "large"): 6.099,
}
"""JAX's guide, docs/pallas/tpu/matmul.ipynb: bfloat16, by the matrices' size and the blocks."""


@functools.partial(jax.jit, static_argnames=["bm", "bk", "bn"])
def matmul(x: Any, y: Any, bm: int = 128, bk: int = 128, bn: int = 128) -> Any:
    """Multiplies matrices in blocks, with a float32 accumulator in VMEM."""

    def body(x_ref: Any, y_ref: Any, o_ref: Any, total: Any) -> None:
        @pl.when(pl.program_id(2) == 0)
        def clear() -> None:
            total[...] = jnp.zeros_like(total)

        total[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def store() -> None:
            o_ref[...] = total[...].astype(o_ref.dtype)

    (m, k), n = x.shape, y.shape[1]
    return pl.pallas_call(
        body,
        grid=(m // bm, n // bn, k // bk),
        in_specs=[pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)), pl.BlockSpec((bk, bn), lambda i, j, k: (k, j))],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
    )(x, y)


def documented() -> None:
    """Prints the estimates of JAX's documented matmuls beside their times."""
    print("| size | blocks | estimate, ms | published, ms | ratio |\n|---|---|---|---|---|")
    estimates = {}
    for size in (1024, 4096, 8192):
        x = jax.ShapeDtypeStruct((size, size), jnp.bfloat16)
        report = quarantune.compile_check(matmul, [SMALL, LARGE], x, x, target="TPU v5e", estimate=True)
        for blocks, trial in zip(("small", "large"), report.trials, strict=True):
            estimates[size, blocks] = report.estimated_ms(trial) or 0.0
    for (size, blocks), published in PUBLISHED_MS.items():
        estimate = estimates[size, blocks]
        sizes = " x ".join(map(str, (SMALL if blocks == "small" else LARGE).values()))
        print(f"| {size} | {sizes} | {estimate:.3g} | {published:.3g} | {estimate / published:.2f} |")
    same = sorted(estimates, key=estimates.__getitem__) == sorted(PUBLISHED_MS, key=PUBLISHED_MS.__getitem__)
    print(f"\nThe order of all six is {'the same' if same else 'another'}.")


def quantized_matmul(clone: Path, place: Path) -> tuple[Any, dict[Any, Any], Any]:
    """Imports the kernel and its table of tuned configs from a clone, without the server around them."""
    package = place / "tpu_inference"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "logger.py").write_text("from logging import getLogger as init_logger\n")
    (package / "kernels").symlink_to(clone.resolve() / "tpu_inference" / "kernels")
    sys.path.insert(0, str(place))
    sizes = importlib.import_module("tpu_inference.kernels.quantized_matmul.tuned_block_sizes")
    kernel = importlib.import_module("tpu_inference.kernels.quantized_matmul.kernel")
    return kernel.quantized_matmul_kernel, sizes.TUNED_BLOCK_SIZES_RAW, sizes.TunedValue


def candidates(problem: Any, published: Any, number: int, rng: random.Random) -> Iterator[tuple[int, int, int]]:
    """Yields the published blocks, and then random ones that divide the problem."""
    _, batch, out, into, *_ = problem
    yield tuple(published[:3])
    seen = {tuple(published[:3])}
    sizes = [
        [size for size in range(128, most + 1, 128) if most % size == 0 and size <= limit]
        for most, limit in ((batch, 4096), (out, 4096), (into, 8192))
    ]
    for _ in range(1000):
        blocks = tuple(rng.choice(each) for each in sizes)
        # Smaller ones than these take the compiler long to simulate, and are slow.
        if blocks not in seen and blocks[0] * blocks[1] * blocks[2] >= 1 << 25 and len(seen) <= number:
            seen.add(blocks)
            yield blocks


def tabled(clone: Path, place: Path, problems: int, number: int, version: int, seed: int) -> None:
    """Prints where the published config of each problem stands among random ones by the compiler's estimates."""
    kernel, table, tuned = quantized_matmul(clone, place)
    target = {6: "TPU v6e", 7: "TPU 7x"}[version]
    rng = random.Random(seed)
    chosen = rng.sample(
        # Larger batches take the compiler minutes.
        sorted(key for key in table if key[0] == version and key[1] in (128, 256, 512, 1024) and key[4] == "int8"),
        problems,
    )
    ratios = []
    print(f"| problem ({target}) | published blocks | rank among valid ones | over the best estimate | median |")
    print("|---|---|---|---|---|")
    for problem in chosen:
        _, batch, out, into, *_ = problem
        space = [{"blocks": blocks} for blocks in candidates(problem, table[problem], number, rng)]

        @functools.partial(jax.jit, static_argnames=["blocks"])
        def multiply(x: Any, w: Any, scale: Any, blocks: tuple[int, int, int] = (128, 128, 128)) -> Any:
            return kernel(x, w, scale, None, None, jnp.int8, tuned_value=tuned(*blocks))

        args = (
            jax.ShapeDtypeStruct((batch, into), jnp.bfloat16),
            jax.ShapeDtypeStruct((out, into), jnp.int8),
            jax.ShapeDtypeStruct((out,), jnp.float32),
        )
        report = quarantune.compile_check(multiply, space, *args, target=target, estimate=True)
        found = {
            trial.config["blocks"]: trial.figures.estimate.cycles if version == 7 else report.estimated_ms(trial)
            for trial in report.trials
            if trial.figures and trial.figures.estimate
        }
        own = found.get(space[0]["blocks"])
        if own is None:
            print(f"| {batch} x {out} x {into} | {space[0]['blocks']} | {report.trials[0].message[:60]} | | |")
            continue
        ordered = sorted(found.values())
        ratios.append(own / ordered[0])
        print(
            f"| {batch} x {out} x {into} | {space[0]['blocks']} | {ordered.index(own) + 1} of {len(ordered)} "
            f"| {ratios[-1]:.3f} | {statistics.median(ordered) / ordered[0]:.2f} |",
            flush=True,
        )
    if ratios:
        print(f"\nThe published config is at {statistics.median(ratios):.3f} times the best estimate (median).")


def main() -> None:
    """Prints one of the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tpu-inference", type=Path, metavar="CLONE", help="a clone of vLLM's tpu-inference")
    parser.add_argument("--problems", type=int, default=8)
    parser.add_argument("--candidates", type=int, default=30)
    parser.add_argument("--version", type=int, default=6, choices=[6, 7], help="the TPU's version")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.tpu_inference is None:
        documented()
    else:
        with tempfile.TemporaryDirectory() as place:
            tabled(
                options.tpu_inference, Path(place), options.problems, options.candidates, options.version, options.seed
            )


if __name__ == "__main__":
    main()
