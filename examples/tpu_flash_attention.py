"""Finds the block sizes with which JAX's TPU flash attention compiles on two generations; tunes it on a TPU.

On a machine without a TPU it needs libtpu: `pip install 'quarantune[tpu]'`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes, flash_attention

import quarantune

BLOCKS = {"block_q": [128, 512, 1024, 2048], "block_k": [128, 1024, 4096]}
GENERATIONS = ("TPU v5e", "TPU v6e")


@quarantune.autotune(BLOCKS, compile_timeout=10)
@functools.partial(jax.jit, static_argnames=["block_q", "block_k"])
def attention(q, k, v, block_q: int = 128, block_k: int = 128):
    """Attends q to k and v, all (batch, heads, length, depth)."""
    blocks = BlockSizes(block_q=block_q, block_k_major=block_k, block_k=block_k, block_b=1)
    return flash_attention(q, k, v, block_sizes=blocks)


def check(shape: tuple[int, ...]) -> None:
    """Compiles every config for each generation, and prints which of them both can use."""
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    compiled = []
    for generation in GENERATIONS:
        report = quarantune.compile_check(attention, BLOCKS, x, x, x, target=generation)
        print(f"{generation}, {report.target.topology}")
        print(report.table())
        print()
        report.raise_if_all_failed()
        compiled.append(report.compiled)
    both = [config for config in compiled[0] if config in compiled[1]]
    print(f"{len(both)} of {len(report.trials)} block sizes compile for {' and '.join(GENERATIONS)}")


def main() -> None:
    """Tunes on a TPU; elsewhere, checks which configs compile."""
    shape = (1, 8, 4096, 128)
    if not any(target.is_here and target.platform == "tpu" for target in quarantune.targets()):
        check(shape)
        return
    q, k, v = (jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) for seed in range(3))
    print(attention.tune(q, k, v).table(flops=4 * shape[0] * shape[1] * shape[2] ** 2 * shape[3]))


if __name__ == "__main__":
    main()
