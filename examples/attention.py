"""Tunes the chunk sizes of blockwise attention in plain JAX, which decide how well the CPU's caches are used."""

from __future__ import annotations

import functools
import sys

import jax
import jax.numpy as jnp

import quarantune


@quarantune.autotune({"q_chunk": [16, 128, 1024], "k_chunk": [16, 128, 1024]})
@functools.partial(jax.jit, static_argnames=["q_chunk", "k_chunk"])
def attention(q, k, v, q_chunk: int = 128, k_chunk: int = 128):
    """Attends q to k and v, all (heads, length, depth), without storing the length x length scores."""
    heads, length, depth = q.shape

    def chunks(x, size):
        return x.reshape(heads, length // size, size, depth).swapaxes(0, 1)

    keys, values = chunks(k, k_chunk), chunks(v, k_chunk)

    def attend(q_block):
        def fold(state, block):
            """Adds a block of keys to the running softmax: its maximum, denominator and weighted sum."""
            peak, denominator, total = state
            k_block, v_block = block
            scores = jnp.einsum("hqd,hkd->hqk", q_block, k_block) / depth**0.5
            new_peak = jnp.maximum(peak, scores.max(-1))
            weights = jnp.exp(scores - new_peak[..., None])
            shrink = jnp.exp(peak - new_peak)
            denominator = denominator * shrink + weights.sum(-1)
            total = total * shrink[..., None] + jnp.einsum("hqk,hkd->hqd", weights, v_block)
            return (new_peak, denominator, total), None

        rows = q_block.shape[:2]
        start = (jnp.full(rows, -jnp.inf), jnp.zeros(rows), jnp.zeros(q_block.shape))
        (_, denominator, total), _ = jax.lax.scan(fold, start, (keys, values))
        return total / denominator[..., None]

    return jax.lax.map(attend, chunks(q, q_chunk)).swapaxes(0, 1).reshape(q.shape)


def direct_attention(q, k, v):
    """Computes attention by the textbook formula."""
    scores = jnp.einsum("hqd,hkd->hqk", q, k) / q.shape[-1] ** 0.5
    return jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(scores), v)


def main() -> None:
    """Tunes, prints the outcome of every config, and checks the winner."""
    q, k, v = (jax.random.normal(jax.random.key(seed), (4, 1024, 64)) for seed in range(3))

    print(attention.tune(q, k, v).table())

    error = jnp.max(jnp.abs(attention(q, k, v) - direct_attention(q, k, v)))
    if not error <= 1e-4:
        sys.exit(f"the result is off by {error:.3g}")
    print(f"agrees with the direct formula to {error:.1e}")


if __name__ == "__main__":
    main()
