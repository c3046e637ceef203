"""Tunes JAX's own Hopper matmul on an H100 or H200; elsewhere, finds the configs that compile for an H100.

On a machine without a GPU it needs JAX's CUDA plugin: `pip install 'quarantune[cuda-compile]'`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu as hopper

import quarantune

TILES = {"tile_m": [64, 128], "tile_n": [128, 256], "steps": [2, 4, 6], "group_m": [False, True]}


@quarantune.autotune(TILES, ref_fn=lambda a, b: a @ b)
@functools.partial(jax.jit, static_argnames=["tile_m", "tile_n", "steps", "group_m"])
def matmul(a, b, tile_m: int = 128, tile_n: int = 128, steps: int = 4, group_m: bool = False):
    """Returns a @ b; two warpgroups share a tile's rows (`group_m`) or columns, and `steps` loads are in flight."""
    config = hopper.TuningConfig(
        tile_m=tile_m,
        tile_n=tile_n,
        tile_k=64,
        max_concurrent_steps=steps,
        grid_tile_width=8,
        wg_dimension=hopper.MatmulDimension.M if group_m else hopper.MatmulDimension.N,
    )
    return hopper.matmul(a, b, None, config)


def main() -> None:
    """Tunes on a Hopper GPU; elsewhere, checks which configs compile."""
    size = 4096
    here = [target.device_kind for target in quarantune.targets() if target.is_here]
    if not any(kind.startswith(("NVIDIA H1", "NVIDIA H2")) for kind in here):
        x = jax.ShapeDtypeStruct((size, size), jnp.float16)
        report = quarantune.compile_check(matmul, TILES, x, x, target="NVIDIA H100")
        print(report.table())
        print(f"{len(report.compiled)} of {len(report.trials)} configs compile for {report.target.name}")
        report.raise_if_all_failed()
        return
    a, b = (jax.random.normal(jax.random.key(seed), (size, size), jnp.float16) for seed in range(2))
    result = matmul.tune(a, b)
    print(result.table(flops=2 * size**3))
    print(f"{result.speedup:.2f} times as fast as the defaults" if result.speedup else "the defaults do not run")


if __name__ == "__main__":
    main()
