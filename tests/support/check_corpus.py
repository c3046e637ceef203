"""Programs that differ only by rounding, and programs with a bug, to see how well the check separates them.

Each family is one function of plain JAX with the variants of a kernel: block sizes, orders of summation and precisions
of intermediate values that an author would call equal, and mistakes of real kernels. Run as a script, this module
prints the table of docs/correctness.md:

    python tests/support/check_corpus.py [--seeds N] [--jobs N] [--all]
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import multiprocessing
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from quarantune.measure import compare, rounding

_HUGE = 3e38


@dataclasses.dataclass(frozen=True)
class Family:
    """One function with its variants.

    Attributes:
        name: its name and dtype.
        fn: the function; `how` are the keyword arguments of a variant.
        args: makes the arguments from a seed.
        honest: variants that differ only by rounding.
        bugs: variants that are wrong.
    """

    name: str
    fn: Callable[..., Any]
    args: Callable[[np.random.Generator], tuple[Any, ...]]
    honest: Sequence[dict[str, Any]]
    bugs: Sequence[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Judged:
    """The verdict on one variant.

    Attributes:
        family: the name of its family.
        how: the variant.
        is_bug: whether it is wrong.
        reason: the check's message for a wrong variant; None if it passed.
        ratio: the worst measure divided by its bound; below 1 if the variant passed.
    """

    family: str
    how: dict[str, Any]
    is_bug: bool
    reason: str | None
    ratio: float


# --- building blocks ------------------------------------------------------------------------------------------------


def _blocks(size: int, block: int) -> Iterator[slice]:
    for start in range(0, size, block):
        yield slice(start, min(size, start + block))


def _wide(x: Any) -> Any:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _noisy_tail(x: Any, count: int) -> Any:
    """Replaces the last rows by values that memory might hold."""
    return x.at[-count:].set(jnp.asarray(jnp.arange(x[-count:].size).reshape(x[-count:].shape) % 7, x.dtype))


# --- families -------------------------------------------------------------------------------------------------------


def matmul(a: Any, b: Any, *, k: int = 0, bug: str = "", precision: Any = None, reverse: bool = False) -> Any:
    out = a.dtype if a.dtype.itemsize > 1 else jnp.bfloat16
    rows, depth = a.shape
    if bug == "narrow accumulator":
        total = jnp.zeros((rows, b.shape[1]), a.dtype)
        for part in _blocks(depth, 8):
            total = (total + a[:, part] @ b[part]).astype(a.dtype)
        return total
    parts = list(_blocks(depth, k or depth))
    if bug == "lost last k tile":
        parts = parts[:-1]
    total: Any = jnp.zeros((rows, b.shape[1]), jnp.float32)
    for index, part in enumerate(reversed(parts) if reverse else parts):
        product = jnp.matmul(a[:, part], b[part], preferred_element_type=jnp.float32, precision=precision)
        if bug == "race" and index == 1:
            product = product.at[16:32, 16:32].set(0)
        total = total + product
    if bug == "stale accumulator":
        total = total.at[32:48].add(total[16:32])
    if bug == "scale of 1.02":
        total = total * 1.02
    if bug == "transposed tile":
        total = total.at[:16, :16].set(total[:16, :16].T)
    if bug == "zero row":
        total = total.at[rows // 3].set(0)
    if bug == "zero row tile":
        total = total.at[-rows // 8 :].set(0)
    if bug == "zeros":
        total = jnp.zeros_like(total)
    if bug == "offset":
        total = total + 0.02 * jnp.sqrt(jnp.mean(total**2))
    if bug == "garbage":
        total = _noisy_tail(total, 8)
    if bug == "one infinity":
        total = total.at[3, 5].set(jnp.inf)
    return total.astype(out)


def softmax(x: Any, *, block: int = 0, bug: str = "", base2: bool = False) -> Any:
    wide, columns = _wide(x), x.shape[-1]
    parts = list(_blocks(columns, block or columns))
    if bug == "lost last block":
        parts = parts[:-1]
    top = jnp.full(x.shape[:-1], 0.0 if bug == "not stabilised" else -jnp.inf, jnp.float32)
    total = jnp.zeros(x.shape[:-1], jnp.float32)
    for part in parts:
        new = top if bug == "not stabilised" else jnp.maximum(top, wide[..., part].max(-1))
        keep = total if bug == "missing rescale" else total * jnp.exp(top - new) if bug != "not stabilised" else total
        total = keep + jnp.exp(wide[..., part] - new[..., None]).sum(-1)
        top = new
    if bug == "padding counted":
        total = total + 24 * jnp.exp(0 - top)
    if bug == "zeros":
        return jnp.zeros_like(x)
    if base2:
        return jnp.exp2((wide - top[..., None]) * math.log2(math.e) - jnp.log2(total)[..., None]).astype(x.dtype)
    found = jnp.exp(wide - top[..., None]) / total[..., None]
    if bug == "rows left":
        found = _noisy_tail(found, 1)
    return found.astype(x.dtype)


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    block: int = 0,
    causal: bool = False,
    narrow: str = "",
    scaled: bool = True,
    bug: str = "",
) -> Any:
    """Blockwise attention; `narrow` rounds the logits or the probabilities to the dtype of the inputs."""
    keys, size = k.shape
    scale = (1 / math.sqrt(size) if scaled else 1.0) * (1.02 if bug == "scale of 1.02" else 1.0)
    top = jnp.full(q.shape[0], -jnp.inf, jnp.float32)
    total = jnp.zeros(q.shape[0], jnp.float32)
    out = jnp.zeros(q.shape, jnp.float32)
    parts = list(_blocks(keys, block or keys))
    if bug == "lost last block":
        parts = parts[:-1]
    for part in parts:
        logits = jnp.matmul(q, k[part].T, preferred_element_type=jnp.float32)
        if narrow in ("logits", "both"):
            logits = jax.lax.reduce_precision(logits, 8, 7)
        logits = logits * scale
        places = jnp.arange(part.start, part.stop)
        if causal:
            off = 1 if bug == "mask off by one" else 0
            logits = jnp.where(places[None] <= jnp.arange(q.shape[0])[:, None] + off, logits, -1e30)
        if bug.startswith("dropped"):
            count = int(bug.split()[1])
            logits = jnp.where((places >= keys // 2) & (places < keys // 2 + count), -1e30, logits)
        new = jnp.maximum(top, logits.max(-1))
        keep = jnp.ones_like(top) if bug == "missing rescale" else jnp.exp(top - new)
        p = jnp.exp(logits - new[:, None])
        total = total * keep + p.sum(-1)
        if narrow in ("p", "both"):
            p = p.astype(q.dtype)
        held = out if bug == "missing rescale of sums" else out * keep[:, None]
        out = held + jnp.matmul(p, v[part], preferred_element_type=jnp.float32)
        top = new
    found = out / total[:, None]
    if bug == "zero row":
        found = found.at[100].set(0)
    return found.astype(q.dtype)


def looped_attention(q: Any, k: Any, v: Any, *, rows: int = 128, keys: int = 128, bug: str = "") -> Any:
    """Attention by loops over blocks: a `scan` over keys inside a `map` over queries."""
    size = q.shape[-1]
    blocks = k.reshape(-1, keys, size), v.reshape(-1, keys, size), jnp.arange(len(k)).reshape(-1, keys)

    def of_rows(part: Any) -> Any:
        def step(carry: Any, block: Any) -> Any:
            top, total, out = carry
            logits = jnp.matmul(part, block[0].T).astype(jnp.float32)
            if bug:
                logits = jnp.where((block[2] >= 2000) & (block[2] < 2008), -1e30, logits)
            new = jnp.maximum(top, logits.max(-1))
            p = jnp.exp(logits - new[:, None])
            keep = jnp.exp(top - new)
            sums = jnp.matmul(p.astype(v.dtype), block[1]).astype(jnp.float32)
            return (new, total * keep + p.sum(-1), out * keep[:, None] + sums), None

        start = jnp.full(rows, -jnp.inf), jnp.zeros(rows), jnp.zeros((rows, size))
        (_, total, out), _ = jax.lax.scan(step, start, blocks)
        return (out / total[:, None]).astype(q.dtype)

    return jax.lax.map(of_rows, q.reshape(-1, rows, size)).reshape(q.shape)


def norm(x: Any, w: Any, *, kind: str = "layer", block: int = 0, fused: bool = False, bug: str = "") -> Any:
    wide, size = _wide(x), x.shape[-1]
    parts = list(_blocks(size, block or size))
    if bug == "lost last block":
        parts = parts[:-1]
    count = size if bug != "padding counted" else size + 24

    def mean(y: Any) -> Any:
        return sum(y[..., part].sum(-1) for part in parts)[..., None] / count

    middle = mean(wide) if kind == "layer" else 0.0
    variance = mean(wide**2) - middle**2 if kind == "layer" and fused else mean((wide - middle) ** 2)
    if bug == "no mean":
        middle = 0.0
    found = (wide - middle) * jax.lax.rsqrt(variance + 1e-6) * _wide(w)
    if bug == "grid without cdiv":
        found = found.at[-(len(x) % 64) :].set(jnp.nan)
    if bug == "weight of the neighbour":
        found = found / _wide(w) * _wide(jnp.roll(w, 1))
    return found.astype(x.dtype)


def logsumexp(x: Any, *, block: int = 0, bug: str = "") -> Any:
    parts = list(_blocks(x.shape[-1], block or x.shape[-1]))
    if bug == "lost last block":
        parts = parts[:-1]
    top = x.max(-1)
    total = sum(jnp.exp(x[..., part] - top[..., None]).sum(-1) for part in parts)
    if bug == "padding counted":
        total = total + 24
    return top + jnp.log(total)


def cumsum(x: Any, *, block: int = 0, how: str = "", bug: str = "") -> Any:
    if how == "tree":
        return jax.lax.associative_scan(jnp.add, x, axis=-1)
    if how == "one by one":
        return jnp.moveaxis(jax.lax.scan(lambda c, y: (c + y, c + y), jnp.zeros(x.shape[:-1], x.dtype), x.T)[1], 0, -1)
    if not block:
        return jnp.cumsum(x, -1)
    parts, carry = [], jnp.zeros(x.shape[:-1], x.dtype)
    for part in _blocks(x.shape[-1], block):
        local = jnp.cumsum(x[..., part], -1)
        parts.append(local + carry[..., None])
        last = 2 if bug == "carry of the element before" else 1
        if not (bug == "lost carry" and part.stop == x.shape[-1] - x.shape[-1] % block):
            carry = parts[-1][..., -last]
    found = jnp.concatenate(parts, -1)
    return jnp.roll(found, 1, -1) if bug == "exclusive" else found


def recurrence(a: Any, x: Any, *, block: int = 0, bug: str = "") -> Any:
    """h[t] = a[t] h[t-1] + x[t], one by one, or in blocks with combined carries."""

    def combine(left: Any, right: Any) -> Any:
        return left[0] * right[0], right[0] * left[1] + right[1]

    if not block:
        step = lambda h, ax: (ax[0] * h + ax[1],) * 2  # noqa: E731
        return jax.lax.scan(step, jnp.zeros(x.shape[1:], x.dtype), (a, x))[1]
    parts, carry = [], jnp.zeros(x.shape[1:], x.dtype)
    for part in _blocks(len(x), block):
        decay, local = jax.lax.associative_scan(combine, (a[part], x[part]))
        if bug == "no decay of the carry":
            decay = jnp.ones_like(decay)
        found = local + decay * carry
        parts.append(found)
        carry = jnp.zeros_like(carry) if bug == "lost carry" else found[-1]
    return jnp.concatenate(parts)


def convolution(x: Any, w: Any, *, how: str = "", block: int = 0, bug: str = "") -> Any:
    """Valid convolution of [n, length, channels] with [taps, channels, outputs]."""
    taps, length = w.shape[0], x.shape[1] - w.shape[0] + 1
    if not how:
        found = jax.lax.conv_general_dilated(x, w, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC"))
        return found.astype(x.dtype)
    used = range(taps - 1) if bug == "lost last tap" else range(taps)
    order = reversed(used) if how == "reversed" else used
    total = 0.0
    for tap in order:
        for part in _blocks(x.shape[-1], block or x.shape[-1]):
            place = tap + (1 if bug == "halo off by one" and tap == taps - 1 else 0)
            place = min(place, taps - 1) - (1 if place == taps else 0)
            total = total + jnp.matmul(
                x[:, place : place + length, part], w[tap, part], preferred_element_type=jnp.float32
            )
    if bug == "zero edge":
        total = total.at[:, -1].set(0)
    return total.astype(x.dtype)


def reduction(x: Any, *, kind: str = "mean", block: int = 0, how: str = "", bug: str = "") -> Any:
    flat = _wide(x).reshape(x.shape[0], -1)
    if kind == "variance":
        middle = flat.mean(-1, keepdims=True)
        flat = (flat - middle) ** 2
    if how == "one by one":
        total = jax.lax.scan(lambda c, y: (c + y, None), jnp.zeros(len(flat)), flat.T)[0]
    elif block:
        parts = list(_blocks(flat.shape[-1], block))
        total = sum(flat[:, part].sum(-1) for part in (parts[:-1] if bug == "lost last block" else parts))
    else:
        total = flat.sum(-1)
    if bug == "scale of 1.02":
        total = total * 1.02
    return total / flat.shape[-1]


def mlp(x: Any, up: Any, down: Any, *, block: int = 0, narrow: bool = True, bug: str = "") -> Any:
    total: Any = 0.0
    parts = list(_blocks(up.shape[1], block or up.shape[1]))
    if bug == "lost last block":
        parts = parts[:-1]
    for part in parts:
        hidden = jnp.matmul(x, up[:, part], preferred_element_type=jnp.float32)
        hidden = jax.nn.relu(hidden) if bug == "another activation" else jax.nn.gelu(hidden)
        hidden = hidden.astype(x.dtype) if narrow else hidden
        total = total + jnp.matmul(
            hidden, _wide(down[part]) if not narrow else down[part], preferred_element_type=jnp.float32
        )
    if bug == "zero row":
        total = total.at[7].set(0)
    return total.astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def trained_attention(q: Any, k: Any, v: Any, causal: bool, scaled: bool, block: int, bug: str) -> Any:
    """Attention with the backward pass of flash attention: it computes blocks of probabilities again."""
    return _attention_forward(q, k, v, causal, scaled, block, bug)[0]


def _probabilities(q: Any, k: Any, *, first: int, causal: bool, scaled: bool) -> Any:
    logits = jnp.matmul(q, k.T, preferred_element_type=jnp.float32) * (1 / math.sqrt(q.shape[1]) if scaled else 1.0)
    places = first + jnp.arange(len(k))
    return jnp.where(places[None] <= jnp.arange(len(q))[:, None], logits, -1e30) if causal else logits


def _attention_forward(q: Any, k: Any, v: Any, causal: bool, scaled: bool, block: int, bug: str) -> Any:
    logits = _probabilities(q, k, first=0, causal=causal, scaled=scaled)
    sums = jax.nn.logsumexp(logits, -1)
    out = jnp.matmul(jnp.exp(logits - sums[:, None]).astype(v.dtype), v, preferred_element_type=jnp.float32)
    return out.astype(q.dtype), (q, k, v, out.astype(q.dtype), sums)


def _attention_backward(causal: bool, scaled: bool, block: int, bug: str, kept: Any, do: Any) -> Any:
    q, k, v, out, sums = kept
    product = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
    mean = jnp.zeros(len(q)) if bug == "missing term" else (_wide(do) * _wide(out)).sum(-1)
    parts: list[Any] = []
    total = jnp.zeros(q.shape, jnp.float32)
    for part in _blocks(len(k), block or len(k)):
        p = jnp.exp(
            _probabilities(q, k[part], first=part.start - (bug == "mask off by one"), causal=causal, scaled=scaled)
            - sums[:, None]
        )
        ds = (p * (product(do, v[part].T) - mean[:, None])).astype(q.dtype)
        if bug == "dropped 8" and part.start == 0:
            ds = ds.at[:, :8].set(0)
        total = total + product(ds, k[part])
        parts.append((product(ds.T, q), product(p.astype(do.dtype).T, do)))
    scale = (1 / math.sqrt(q.shape[1]) if scaled else 1.0) * (2 if bug == "factor 2" else 1)
    dk, dv = (jnp.concatenate(each) for each in zip(*parts, strict=True))
    return tuple(each.astype(q.dtype) for each in (total * scale, dk * scale, dv))


trained_attention.defvjp(_attention_forward, _attention_backward)


def differentiated_attention(q: Any, k: Any, v: Any, *, causal: bool, scaled: bool, **how: Any) -> Any:
    """Attention in plain JAX, in blocks, or with a backward pass by hand."""
    if "by_hand" in how:
        return trained_attention(q, k, v, causal, scaled, how["by_hand"], how.get("bug", ""))
    if "block" in how:
        return attention(q, k, v, causal=causal, scaled=scaled, **how)
    logits = (q @ k.T) * (1 / math.sqrt(q.shape[1]) if scaled else 1.0)
    if causal:
        logits = jnp.where(jnp.tri(len(q), len(k), dtype=bool), logits, -1e30)
    return jax.nn.softmax(logits, -1) @ v


def gradient_of(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function for the gradients of a weighted mean of another function's output."""

    def gradients(*args: Any, **how: Any) -> Any:
        bug = "" if "by_hand" in how else how.pop("bug", "")

        def loss(*args: Any) -> Any:
            found = fn(*args, **how)
            weights = jnp.cos(jnp.arange(found.size, dtype=jnp.float32)).reshape(found.shape)
            return jnp.mean(_wide(found) * weights)

        found = jax.grad(loss, argnums=tuple(range(len(args))))(*args)
        if bug == "zeros":
            return jax.tree.map(jnp.zeros_like, found)
        if bug == "scale of 1.02":
            return (found[0] * jnp.asarray(1.02, found[0].dtype), *found[1:])
        if bug == "lost row":
            return (found[0].at[5].set(0), *found[1:])
        return found

    return gradients


# --- the corpus -----------------------------------------------------------------------------------------------------


def _normal(*shapes: tuple[int, ...], dtype: Any = "float32", scale: float = 1.0) -> Callable[..., tuple[Any, ...]]:
    def make(generator: np.random.Generator) -> tuple[Any, ...]:
        return tuple(jnp.asarray(generator.standard_normal(shape) * scale, dtype) for shape in shapes)

    return make


def _cancelling(generator: np.random.Generator) -> tuple[Any, ...]:
    """Returns factors; intermediate products exceed float16, and cancel in the end."""
    a, b = (np.abs(generator.standard_normal(shape)) * 24 for shape in ((64, 512), (512, 64)))
    b[256:] *= -1
    return jnp.asarray(a, "float16"), jnp.asarray(b, "float16")


def _variants(**choices: Sequence[Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{}]
    for name, values in choices.items():
        found = [{**how, name: value} for how in found for value in values]
    return found


def _bugs(*names: str, **how: Any) -> list[dict[str, Any]]:
    return [{**how, "bug": name} for name in names]


def families(scale: int = 1) -> list[Family]:
    """Returns the corpus.

    Args:
        scale: size of its arrays, as a multiple of the sizes for a CPU.
    """
    n = 256 * scale
    blocks = [64 * scale, 128 * scale, 256 * scale, 512 * scale]
    found: list[Family] = []
    tile_bugs = ("lost last k tile", "race", "stale accumulator", "scale of 1.02", "transposed tile", "zero row")
    more = ("zero row tile", "zeros", "offset", "garbage", "one infinity")
    for dtype, extra in (
        ("float32", [{"precision": "highest", "k": 32}]),
        ("bfloat16", []),
        ("float16", []),
        ("float8_e4m3fn", []),
    ):
        found.append(
            Family(
                f"matmul {dtype}",
                matmul,
                _normal((n, 4 * n), (4 * n, n), dtype=dtype),
                [*_variants(k=[64 * scale, 128 * scale, 256 * scale, 512 * scale], reverse=[False, True]), *extra],
                _bugs(*tile_bugs, *(more if dtype == "bfloat16" else ()), k=64),
            )
        )
    found.append(
        Family(
            "tall matmul bfloat16",
            matmul,
            _normal((10_000, 64), (64, 32), dtype="bfloat16"),
            _variants(k=[16, 32]),
            _bugs("zero row"),
        )
    )
    found.append(
        Family(
            "matmul that overflows float16",
            matmul,
            _cancelling,
            _variants(k=[32, 64, 128]),
            [{"bug": "narrow accumulator"}],
        )
    )
    for dtype in ("float32", "bfloat16"):
        found.append(
            Family(
                f"softmax {dtype}",
                softmax,
                _normal((n, 1000), dtype=dtype),
                _variants(block=[0, 100, 128, 256, 512], base2=[False, True]),
                _bugs("lost last block", "missing rescale", "padding counted", "zeros", "rows left", block=128),
            )
        )
    found.append(
        Family(
            "softmax of large logits",
            softmax,
            _normal((n, 512), scale=60),
            _variants(block=[64, 128]),
            _bugs("not stabilised"),
        )
    )
    dropped = "dropped 8 of"
    for dtype in ("float32", "bfloat16"):
        for causal in (False, True):
            found.append(
                Family(
                    f"{'causal ' if causal else ''}attention {dtype}",
                    functools.partial(attention, causal=causal),
                    _normal(*[(4 * n if not causal else 2 * n, 64)] * 3, dtype=dtype),
                    _variants(block=blocks, narrow=["", "p", "logits", "both"] if dtype == "bfloat16" else [""]),
                    _bugs(
                        "lost last block",
                        "missing rescale",
                        "missing rescale of sums",
                        "scale of 1.02" if dtype == "float32" else dropped,
                        *(["mask off by one"] if causal else [dropped, "zero row"]),
                        block=64 * scale,
                    ),
                )
            )
    found.append(
        Family(
            "attention of large logits bfloat16",
            functools.partial(attention, scaled=False),
            _normal(*[(4 * n, 128)] * 3, dtype="bfloat16"),
            _variants(block=blocks, narrow=["", "p", "logits", "both"]),
            _bugs(dropped, "lost last block", "zero row", block=64 * scale),
        )
    )
    for name, size, spread in (("looped attention", 1024, 1.0), ("looped attention of large logits", 1024, 2.0)):
        found.append(
            Family(
                f"{name} bfloat16",
                looped_attention,
                _normal(*[(max(2048, size * scale), 128)] * 3, dtype="bfloat16", scale=spread / 3),
                _variants(rows=[64, 128, 256], keys=[32, 64, 128, 256, 512, 1024] if scale > 1 else [64, 256]),
                _bugs("dropped 8", rows=128),
            )
        )
    for kind in ("layer", "rms"):
        for dtype in ("float32", "bfloat16"):
            found.append(
                Family(
                    f"{kind} norm {dtype}",
                    functools.partial(norm, kind=kind),
                    lambda g, dtype=dtype: (
                        jnp.asarray(g.standard_normal((1000, 768)) + 0.5, dtype),
                        jnp.asarray(1 + 0.1 * g.standard_normal(768), dtype),
                    ),
                    _variants(block=[0, 64, 128, 256], fused=[False, True]),
                    _bugs(
                        "lost last block", "padding counted", "grid without cdiv", "weight of the neighbour", block=128
                    )
                    + (_bugs("no mean") if kind == "layer" else []),
                )
            )
    found.append(
        Family(
            "logsumexp float32",
            logsumexp,
            _normal((n, 2000)),
            _variants(block=[64, 100, 128, 256, 500, 1000]),
            _bugs("lost last block", "padding counted", block=100),
        )
    )
    found.append(
        Family(
            "cumsum float32",
            cumsum,
            lambda g: (jnp.asarray(g.random((8, 5000)), "float32"),),
            [*_variants(block=[500, 625, 1000, 1250, 2500]), {"how": "tree"}, {"how": "one by one"}],
            _bugs("lost carry", "carry of the element before", "exclusive", block=612),
        )
    )
    found.append(
        Family(
            "recurrence float32",
            recurrence,
            lambda g: (
                jnp.asarray(g.random((1024, 64)), "float32"),
                jnp.asarray(g.standard_normal((1024, 64)), "float32"),
            ),
            _variants(block=[64, 128, 256, 512]),
            _bugs("lost carry", "no decay of the carry", block=128),
        )
    )
    for dtype in ("float32", "bfloat16"):
        found.append(
            Family(
                f"convolution {dtype}",
                convolution,
                _normal((4, 300, 64), (5, 64, 96), dtype=dtype),
                _variants(how=["taps", "reversed"], block=[0, 16, 32]),
                _bugs("lost last tap", "zero edge", "halo off by one", how="taps"),
            )
        )
        for kind in ("mean", "variance"):
            found.append(
                Family(
                    f"{kind} {dtype}",
                    functools.partial(reduction, kind=kind),
                    lambda g, dtype=dtype: (jnp.asarray(g.standard_normal((16, 128, 128)) + 1, dtype),),
                    [*_variants(block=[1024, 2048, 4096, 8192]), {"how": "one by one"}],
                    _bugs("lost last block", "scale of 1.02", block=1024),
                )
            )
        found.append(
            Family(
                f"MLP {dtype}",
                mlp,
                lambda g, dtype=dtype: tuple(
                    jnp.asarray(g.standard_normal(s) / math.sqrt(s[0]), dtype)
                    for s in ((n, 256), (256, 1024), (1024, 256))
                ),
                _variants(block=[64, 128, 256, 512], narrow=[True, False]),
                _bugs("lost last block", "zero row", "another activation", block=128),
            )
        )
    for fn, args, honest in (
        (attention, _normal(*[(512, 64)] * 3, dtype="bfloat16"), _variants(block=[64, 128, 256])),
        (attention, _normal(*[(512, 64)] * 3), _variants(block=[64, 128, 256])),
        (mlp, _normal((64, 128), (128, 512), (512, 128), scale=0.1), _variants(block=[64, 128, 256])),
        (norm, _normal((64, 512), (512,)), _variants(block=[64, 128], fused=[False, True])),
    ):
        dtype = jax.eval_shape(lambda make=args: make(np.random.default_rng(0)))[0].dtype
        found.append(
            Family(
                f"gradient of {fn.__name__} {dtype}",
                gradient_of(fn),
                args,
                honest,
                _bugs("zeros", "scale of 1.02", "lost row"),
            )
        )
    for dtype, scaled, causal in itertools.product(("float32", "bfloat16"), (True, False), (False, True)):
        kind = f"{'causal ' if causal else ''}attention{'' if scaled else ' of large logits'} {dtype}"
        found.append(
            Family(
                f"gradient by hand of {kind}",
                gradient_of(functools.partial(differentiated_attention, causal=causal, scaled=scaled)),
                _normal(*[(n, 64)] * 3, dtype=dtype),
                [*_variants(block=[n // 4, n]), *_variants(by_hand=[n // 4, n])],
                [
                    *_bugs("missing term", "dropped 8", "factor 2", by_hand=n // 4),
                    *(_bugs("mask off by one", by_hand=n // 4) if causal else []),
                    *_bugs("zeros", "scale of 1.02" if dtype == "float32" else "lost row", block=n),
                ],
            )
        )
    return found


def judged(family: Family, seed: int) -> Iterator[Judged]:
    """Judges all variants of a family as a sweep would, with the function's defaults as the reference."""
    args = family.args(np.random.default_rng([seed, len(family.name)]))
    defaults = jax.jit(family.fn)
    coarsest = rounding.coarsest_mantissa(defaults.trace(*args).jaxpr.jaxpr, jax.default_backend())
    wanted = [np.asarray(leaf) for leaf in jax.tree.leaves(defaults(*args))]
    is_gradient = family.name.startswith("gradient")
    noises = [compare.noise_of(leaf, coarsest=coarsest, is_gradient=is_gradient) for leaf in wanted]
    motion = rounding.Motion.of(args, coarsest)
    for run in range(1, rounding.RUNS + 1):
        moved = [
            jnp.asarray(rounding.moved(np, np.asarray(arg), np.uint32(1000 * run + place), motion.units(arg)))
            if motion.takes(arg)
            else arg
            for place, arg in enumerate(args)
        ]
        for noise, leaf in zip(noises, jax.tree.leaves(defaults(*moved)), strict=True):
            noise.add(np.asarray(leaf), motion.scale)
    allowances = [noise.allowance() for noise in noises]
    truths = _wider(family, args)
    for is_bug, variants in ((False, family.honest), (True, family.bugs)):
        for how in variants:
            bug = how.get("bug", "")
            if bug == "dropped 8 of":
                how = {**how, "bug": "dropped 8"}
            got = [np.asarray(leaf) for leaf in jax.tree.leaves(jax.jit(functools.partial(family.fn, **how))(*args))]
            reasons = [
                compare.compare_numbers(mine, its, allowance, "output", is_exact=False)
                for mine, its, allowance in zip(got, wanted, allowances, strict=True)
            ]
            ratio = max(
                _ratio(mine, its, allowance) for mine, its, allowance in zip(got, wanted, allowances, strict=True)
            )
            reason = next(filter(None, reasons), None)
            if reason and all(
                why is None or compare.is_as_near(mine, its, truth, allowance)
                for why, mine, its, truth, allowance in zip(reasons, got, wanted, truths, allowances, strict=True)
            ):
                reason = None
            yield Judged(family.name, how, is_bug, reason, ratio)


def _wider(family: Family, args: tuple[Any, ...]) -> list[Any]:
    """Returns the output of a family's defaults on wider inputs."""
    to = "float32" if min(arg.dtype.itemsize for arg in args) < 4 else "float64"
    with jax.enable_x64(to == "float64"), jax.default_matmul_precision("highest"):
        wide = [jnp.asarray(np.asarray(arg), to) for arg in args]
        return [np.asarray(leaf) for leaf in jax.tree.leaves(jax.jit(family.fn)(*wide))]


def _ratio(got: Any, wanted: Any, allowance: rounding.Allowance) -> float:
    """Returns the worst of an output's measures divided by its bound."""
    with np.errstate(all="ignore"):
        mine, its = got.astype(np.float64).reshape(-1), wanted.astype(np.float64).reshape(-1)
        if not np.array_equal(np.isfinite(mine), np.isfinite(its)):
            return math.inf
        columns = got.shape[-1] if got.ndim else 1
        limit = rounding.allowed(np, allowance.block, allowance.column, allowance.limits, its, start=0, columns=columns)
        each = np.nan_to_num(np.abs(mine - its) / limit)
        # The element at the edge of the share that may differ more.
        usual = float(np.sort(each)[-1 - math.floor(allowance.share * each.size)])
        _, sums = rounding.deviations(np, mine, its)
        rms = math.sqrt(sums[3] / its.size) or 1.0
        together = (
            abs(sums[1] / (sums[3] or 1.0)) / allowance.together[0],
            abs(sums[0] / its.size / rms) / allowance.together[1],
            math.sqrt(sums[2] / its.size) / rms / allowance.together[2],
        )
    return max(usual, float(each.max()) / allowance.far, *together)


_GROUPS = (
    "matmul",
    "softmax",
    "logsumexp",
    "gradient",
    "attention",
    "norm",
    "cumsum",
    "recurrence",
    "convolution",
    "MLP",
)


def _of_family(place: int, scale: int, seeds: int) -> list[Judged]:
    return [found for seed in range(seeds) for found in judged(families(scale)[place], seed)]


def main() -> None:
    """Prints the misjudged variants, and the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=1, help="sets of inputs for each program")
    parser.add_argument("--scale", type=int, default=1, help="how much larger than for a CPU the arrays are")
    parser.add_argument("--only", default="", help="families whose name holds this")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--all", action="store_true", help="print each variant")
    asked = parser.parse_args()
    places = [place for place, family in enumerate(families(asked.scale)) if asked.only in family.name]
    table: dict[str, list[Judged]] = defaultdict(list)
    with ProcessPoolExecutor(asked.jobs, multiprocessing.get_context("spawn")) as pool:
        work = functools.partial(_of_family, scale=asked.scale, seeds=asked.seeds)
        for found in itertools.chain.from_iterable(pool.map(work, places)):
            table[next((group for group in _GROUPS if group in found.family), "mean, variance")].append(found)
            is_misjudged = found.is_bug != bool(found.reason)
            if asked.all or is_misjudged:
                kind, mark = "bug" if found.is_bug else "honest", "MISJUDGED " if is_misjudged else ""
                print(
                    f"{mark}{found.family:36} {kind:6} {found.ratio:8.3g} {found.how} {found.reason or ''}", flush=True
                )
    table["all"] = [row for rows in table.values() for row in rows]
    print(f"JAX {jax.__version__}, {jax.devices()[0].device_kind}")
    print("| programs | honest, of them wrong | largest distance | bugs, of them found | smallest distance |")
    print("|---|---|---|---|---|")
    for group in sorted(table, key=[*_GROUPS, "mean, variance", "all"].index):
        honest, bugs = ([row for row in table[group] if row.is_bug is is_bug] for is_bug in (False, True))
        wrong, caught = sum(bool(row.reason) for row in honest), sum(bool(row.reason) for row in bugs)
        most, least = max(row.ratio for row in honest), min(row.ratio for row in bugs)
        print(f"| {group} | {len(honest)}, {wrong} | {most:.2g} | {len(bugs)}, {caught} | {least:.2g} |")


if __name__ == "__main__":
    main()
