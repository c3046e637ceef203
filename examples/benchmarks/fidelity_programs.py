"""Programs in plain JAX whose products and convolutions XLA tunes on a GPU, each with configs that differ in speed."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import kernels
from jax import lax

Config = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """A program and its configs.

    Attributes:
        fn: the program; it takes the arguments and the tunables of a config as keywords.
        shapes: returns the kinds of the arguments; small ones on request.
        configs: the configs.
        scale: the standard deviation of the arguments' elements.
        off_by: the largest distance between two outputs that agree, as a share of the output's norm.
    """

    fn: Callable[..., Any]
    shapes: Callable[[bool], tuple[Any, ...]]
    configs: Sequence[Config]
    scale: float = 0.05
    off_by: float = 0.05

    def lowered(self, config: Config, *, small: bool, sharding: Any = None) -> Any:
        """Lowers the program of a config."""
        return self.traced(config, small=small, sharding=sharding).lower()

    def traced(self, config: Config, *, small: bool, sharding: Any = None) -> Any:
        """Traces the program of a config, with arguments of a sharding if there is one."""
        kinds = self.shapes(small)
        if sharding is not None:
            kinds = jax.tree.map(lambda kind: jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=sharding), kinds)
        return jax.jit(lambda *args: self.fn(*args, **config)).trace(*kinds)


def grid(**space: Sequence[Any]) -> list[Config]:
    """Returns every combination of the values."""
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())]


def ways(*plain: str, **parted: Sequence[int]) -> list[Config]:
    """Returns one config for each plain way, and for the other ways one for each number of parts."""
    return [{"way": way} for way in plain] + [
        {"way": way, "parts": parts} for way, counts in parted.items() for parts in counts
    ]


def kinds(dtype: Any, large: Sequence[Sequence[int]], small: Sequence[Sequence[int]]) -> Callable[[bool], Any]:
    """Returns a function that gives kinds of arrays of one dtype: large ones, or small ones on request."""
    return lambda is_small: tuple(
        jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype)) for shape in (small if is_small else large)
    )


def in_rows(fn: Callable[[Any], Any], x: Any, parts: int) -> Any:
    """Applies a function to the rows of an array, one part of them after another."""
    if parts == 1:
        return fn(x)
    out = lax.map(fn, x.reshape(parts, -1, *x.shape[1:]))
    return jax.tree.map(lambda leaf: leaf.reshape(x.shape[0], *leaf.shape[2:]), out)


# --- products ---


def product(a: Any, b: Any, *, way: str = "whole", parts: int = 1, precision: Any = None) -> Any:
    """Multiplies two matrices."""
    wide = jnp.int32 if a.dtype == jnp.int8 else jnp.float32
    narrow = {jnp.dtype(jnp.int8): jnp.int32, jnp.dtype(jnp.float8_e4m3fn): jnp.bfloat16}.get(a.dtype, a.dtype)
    (m, k), n = a.shape, b.shape[1]

    def dot(left: Any, right: Any) -> Any:
        return jnp.matmul(left, right, preferred_element_type=wide, precision=precision)

    match way:
        case "whole":
            out = dot(a, b)
        case "swapped":
            out = dot(b.T, a.T).T
        case "upcast":
            out = jnp.matmul(a.astype(wide), b.astype(wide), precision=precision)
        case "bfloat16":
            out = dot(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16))
        case "sums":
            out = (a[:, :, None].astype(wide) * b[None].astype(wide)).sum(1)
        case "rows":
            out = in_rows(lambda rows: dot(rows, b).astype(narrow), a, parts)
        case "columns":
            out = lax.map(lambda columns: dot(a, columns).astype(narrow), b.reshape(k, parts, -1).swapaxes(0, 1))
            out = out.swapaxes(0, 1).reshape(m, n)
        case "split":
            out = dot(a.reshape(m, parts, -1).swapaxes(0, 1), b.reshape(parts, -1, n)).sum(0)
        case "depth":
            pairs = a.reshape(m, parts, -1).swapaxes(0, 1), b.reshape(parts, -1, n)
            out, _ = lax.scan(lambda total, pair: (total + dot(*pair), None), jnp.zeros((m, n), wide), pairs)
        case _:
            raise ValueError(way)
    return out.astype(narrow)


def transposed(a: Any, b: Any, *, way: str = "whole", parts: int = 1) -> Any:
    """Multiplies two matrices, both stored transposed."""
    return product(a.T, b.T, way=way, parts=parts)


def scaled(a: Any, b: Any, by: Any, *, way: str = "whole", parts: int = 1) -> Any:
    """Multiplies two matrices of 8-bit numbers, with a scale for each."""
    return product(
        a.astype(jnp.bfloat16) * by[0].astype(jnp.bfloat16),
        b.astype(jnp.bfloat16) * by[1].astype(jnp.bfloat16),
        way=way,
        parts=parts,
    )


def scaled_kinds(is_small: bool) -> tuple[Any, ...]:
    """Returns the kinds of the arguments of `scaled`."""
    size = 128 if is_small else 4096
    matrix = jax.ShapeDtypeStruct((size, size), jnp.float8_e4m3fn)
    return matrix, matrix, jax.ShapeDtypeStruct((2,), jnp.float32)


def batched(a: Any, b: Any, *, way: str = "whole", parts: int = 1) -> Any:
    """Multiplies many pairs of matrices."""

    def dot(pair: tuple[Any, Any]) -> Any:
        return jnp.matmul(*pair, preferred_element_type=jnp.float32).astype(a.dtype)

    count, m, _ = a.shape
    match way:
        case "whole":
            return dot((a, b))
        case "swapped":
            return dot((b.swapaxes(1, 2), a.swapaxes(1, 2))).swapaxes(1, 2)
        case "upcast":
            return jnp.matmul(a.astype(jnp.float32), b.astype(jnp.float32)).astype(a.dtype)
        case "map":
            pieces = a.reshape(parts, -1, *a.shape[1:]), b.reshape(parts, -1, *b.shape[1:])
            return lax.map(dot, pieces).reshape(count, m, -1)
        case "unrolled":
            return jnp.concatenate([dot(pair) for pair in zip(jnp.split(a, parts), jnp.split(b, parts), strict=True)])
        case "rows":
            pieces = a.reshape(count, parts, -1, a.shape[2]).swapaxes(0, 1)
            return lax.map(lambda piece: dot((piece, b)), pieces).swapaxes(0, 1).reshape(count, m, -1)
    raise ValueError(way)


def bias_gelu(x: Any, w: Any, bias: Any, *, rows: int = 1, wide: bool = False) -> Any:
    """Multiplies, adds a bias and applies GELU, `rows` parts one after another."""

    def part(piece: Any) -> Any:
        out = jnp.matmul(piece, w, preferred_element_type=jnp.float32 if wide else None)
        return jax.nn.gelu(out + bias[0].astype(out.dtype)).astype(x.dtype)

    return in_rows(part, x, rows)


def swiglu(x: Any, gate: Any, up: Any, down: Any, *, form: str = "apart", rows: int = 1) -> Any:
    """A gated pair of layers."""

    def part(piece: Any) -> Any:
        if form == "joined":
            left, right = jnp.split(piece @ jnp.concatenate([gate, up], 1), 2, axis=1)
        elif form == "stacked":
            left, right = jnp.einsum("td,sdf->stf", piece, jnp.stack([gate, up]))
        else:
            left, right = piece @ gate, piece @ up
        return (jax.nn.silu(left) * right) @ down

    return in_rows(part, x, rows)


def projections(x: Any, w: Any, *, form: str = "apart", rows: int = 1) -> Any:
    """Projects tokens to queries, keys and values."""

    def part(piece: Any) -> Any:
        if form == "joined":
            out = piece @ w.swapaxes(0, 1).reshape(w.shape[1], -1)
            return out.reshape(piece.shape[0], 3, -1)
        if form == "stacked":
            return jnp.einsum("td,sdf->tsf", piece, w)
        return jnp.stack([piece @ matrix for matrix in w], 1)

    return in_rows(part, x, rows)


def chain(a: Any, b: Any, c: Any, d: Any, *, order: str = "left", rows: int = 1) -> Any:
    """Multiplies four matrices in one of five orders."""

    def part(piece: Any) -> Any:
        match order:
            case "left":
                return ((piece @ b) @ c) @ d
            case "right":
                return piece @ (b @ (c @ d))
            case "middle":
                return (piece @ (b @ c)) @ d
            case "pairs":
                return (piece @ b) @ (c @ d)
        return piece @ ((b @ c) @ d)

    return in_rows(part, a, rows)


def low_rank(x: Any, w: Any, a: Any, b: Any, *, form: str = "apart", rows: int = 1) -> Any:
    """A layer with an update of low rank."""

    def part(piece: Any) -> Any:
        if form == "merged":
            return piece @ (w + a @ b)
        if form == "joined":
            both = piece @ jnp.concatenate([w, a], 1)
            return both[:, : w.shape[1]] + both[:, w.shape[1] :] @ b
        return piece @ w + (piece @ a) @ b

    return in_rows(part, x, rows)


def cross_entropy(x: Any, table: Any, *, tokens: int = 1, words: int = 1) -> Any:
    """The loss of each token, in parts of the tokens and of the vocabulary."""
    labels = jnp.arange(x.shape[0]) * 7 % table.shape[0]

    def part(piece: Any) -> Any:
        def step(carry: Any, block: Any) -> Any:
            top, total = carry
            logits = jnp.matmul(piece, block.T, preferred_element_type=jnp.float32)
            new = jnp.maximum(top, logits.max(-1))
            return (new, total * jnp.exp(top - new) + jnp.exp(logits - new[:, None]).sum(-1)), None

        start = jnp.full(piece.shape[0], -jnp.inf), jnp.zeros(piece.shape[0])
        (top, total), _ = lax.scan(step, start, table.reshape(words, -1, table.shape[1]))
        return top + jnp.log(total)

    right = (x.astype(jnp.float32) * table[labels].astype(jnp.float32)).sum(-1)
    return in_rows(part, x, tokens) - right


# --- attention ---


def decode(q: Any, k: Any, v: Any, *, way: str = "whole", parts: int = 1) -> Any:
    """Attention of one query for each sequence and head."""
    count, _, heads, size = k.shape

    def part(pieces: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        query, keys, values = pieces
        if way == "sums":
            logits = (query[:, None].astype(jnp.float32) * keys.astype(jnp.float32)).sum(-1).swapaxes(1, 2)
        else:
            logits = jnp.einsum("bhd,bshd->bhs", query, keys, preferred_element_type=jnp.float32)
        top = logits.max(-1)
        weights = jnp.exp(logits - top[..., None])
        if way == "sums":
            out = (weights.swapaxes(1, 2)[..., None] * values.astype(jnp.float32)).sum(1)
        else:
            out = jnp.einsum("bhs,bshd->bhd", weights.astype(v.dtype), values, preferred_element_type=jnp.float32)
        return top, weights.sum(-1), out

    if way == "map":
        pieces = jax.tree.map(lambda leaf: leaf.reshape(parts, -1, *leaf.shape[1:]), (q, k, v))
        top, total, out = jax.tree.map(lambda leaf: leaf.reshape(count, *leaf.shape[2:]), lax.map(part, pieces))
    elif way in ("split", "scan"):
        blocks = jax.tree.map(lambda leaf: leaf.reshape(count, parts, -1, heads, size).swapaxes(0, 1), (k, v))
        over = jax.vmap if way == "split" else lambda fn: lambda block: lax.map(fn, block)
        tops, totals, outs = over(lambda block: part((q, *block)))(blocks)
        top = tops.max(0)
        keep = jnp.exp(tops - top)
        total, out = (totals * keep).sum(0), (outs * keep[..., None]).sum(0)
    else:
        top, total, out = part((q, k, v))
    return (out / total[..., None]).astype(q.dtype)


def linear_attention(q: Any, k: Any, v: Any, *, chunk: int = 128, ahead: bool = False) -> Any:
    """Causal attention without a softmax, in chunks; `ahead` computes the parts within the chunks all at once."""
    heads, length, size = q.shape
    mask = jnp.tril(jnp.ones((chunk, chunk), bool))
    parts = [array.reshape(heads, -1, chunk, size).swapaxes(0, 1) for array in (q, k, v)]

    def within(query: Any, keys: Any, values: Any) -> Any:
        weights = jnp.where(mask, jnp.einsum("hqd,hkd->hqk", query, keys), 0)
        return jnp.einsum("hqk,hkd->hqd", weights, values).astype(jnp.float32)

    def step(state: Any, block: Any) -> Any:
        query, keys, values, inner = block
        out = jnp.einsum("hqd,hde->hqe", query, state.astype(q.dtype)).astype(jnp.float32)
        out += inner if ahead else within(query, keys, values)
        update = jnp.einsum("hkd,hke->hde", keys, values, preferred_element_type=jnp.float32)
        return state + update, out.astype(q.dtype)

    inner = jax.vmap(within)(*parts) if ahead else jnp.zeros(parts[0].shape[0])
    _, out = lax.scan(step, jnp.zeros((heads, size, size), jnp.float32), (*parts, inner))
    return out.swapaxes(0, 1).reshape(heads, length, size)


def library(name: str) -> Any:
    """Imports and returns a module; None if that fails: an incompatible version may raise any exception."""
    try:
        return importlib.import_module(name)
    except Exception:
        return None


_HEADS = 16


def _attend(query: Any, keys: Any, values: Any) -> Any:
    logits = jnp.einsum("...qhd,...khd->...hqk", query / math.sqrt(query.shape[-1]), keys)
    return jnp.einsum("...hqk,...khd->...qhd", jax.nn.softmax(logits), values)


def flax_attention(x: Any, layers: Any, *, queries: int = 1, mapped: bool = False) -> Any:
    """Flax's self-attention, in parts of the queries, for all sequences at once or one after another."""
    flax = library("flax.linen")

    def attend(part: Any, whole: Any) -> Any:
        if flax is not None:
            module = flax.MultiHeadDotProductAttention(num_heads=_HEADS, dtype=part.dtype, param_dtype=part.dtype)
            return module.apply({"params": layers}, part, whole)

        def dense(name: str, inputs: Any) -> Any:
            return jnp.einsum("...d,dhe->...he", inputs, layers[name]["kernel"]) + layers[name]["bias"]

        out = _attend(dense("query", part), dense("key", whole), dense("value", whole))
        return jnp.einsum("...he,hed->...d", out, layers["out"]["kernel"]) + layers["out"]["bias"]

    return _in_queries(attend, x, queries, mapped)


def flax_kinds(is_small: bool) -> tuple[Any, ...]:
    """Returns the kinds of the arguments of `flax_attention`."""
    count, length, width = (2, 64, 64) if is_small else (4, 2048, 1024)

    def kind(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    size = width // _HEADS
    layer = {"kernel": kind(width, _HEADS, size), "bias": kind(_HEADS, size)}
    last = {"kernel": kind(_HEADS, size, width), "bias": kind(width)}
    return kind(count, length, width), {"query": layer, "key": layer, "value": layer, "out": last}


def equinox_attention(x: Any, weights: Any, *, queries: int = 1, mapped: bool = False) -> Any:
    """Equinox's self-attention, in parts of the queries, for all sequences at once or one after another."""
    equinox = library("equinox")
    width = x.shape[-1]

    def attend_one(part: Any, whole: Any) -> Any:
        if equinox is not None:
            key = jax.random.key(0)
            module = equinox.filter_eval_shape(equinox.nn.MultiheadAttention, _HEADS, width, key=key)
            module = equinox.tree_at(_projections_of, module, tuple(weights))
            return module(part, whole, whole)
        query, keys, values = (
            jax.vmap(lambda token, weight=weight: weight @ token)(inputs).reshape(-1, _HEADS, width // _HEADS)
            for weight, inputs in zip(weights[:3], (part, whole, whole), strict=True)
        )
        return jax.vmap(lambda token: weights[3] @ token)(_attend(query, keys, values).reshape(-1, width))

    return _in_queries(jax.vmap(attend_one), x, queries, mapped)


def _projections_of(module: Any) -> Any:
    return tuple(getattr(module, f"{name}_proj").weight for name in ("query", "key", "value", "output"))


def _in_queries(attend: Callable[[Any, Any], Any], x: Any, queries: int, mapped: bool) -> Any:
    def of(whole: Any) -> Any:
        if queries == 1:
            return attend(whole, whole)
        parts = whole.reshape(whole.shape[0], queries, -1, whole.shape[2]).swapaxes(0, 1)
        return lax.map(lambda part: attend(part, whole), parts).swapaxes(0, 1).reshape(whole.shape)

    return lax.map(lambda one: of(one[None])[0], x) if mapped else of(x)


# --- convolutions ---


def conv(x: Any, w: Any, *, way: str = "whole", parts: int = 1, groups: int = 1, stride: int = 1) -> Any:
    """Convolves images in the layout NHWC with HWIO weights; the output is as large if the stride is 1."""
    padding = "SAME" if stride == 1 else "VALID"
    height, width = w.shape[:2]

    def convolve(images: Any, weights: Any, layout: str = "NHWC") -> Any:
        return lax.conv_general_dilated(
            images,
            weights,
            (stride, stride),
            padding,
            dimension_numbers=(layout, "HWIO" if layout == "NHWC" else "OIHW", layout),
            feature_group_count=groups,
        )

    def taps() -> list[Any]:
        rows, columns = height // 2, width // 2
        padded = jnp.pad(x, ((0, 0), (rows, rows), (columns, columns), (0, 0)))
        return [padded[:, i : i + x.shape[1], j : j + x.shape[2]] for i in range(height) for j in range(width)]

    match way:
        case "whole":
            return convolve(x, w)
        case "channels_first":
            return convolve(x.transpose(0, 3, 1, 2), w.transpose(3, 2, 0, 1), "NCHW").transpose(0, 2, 3, 1)
        case "upcast":
            return convolve(x.astype(jnp.float32), w.astype(jnp.float32)).astype(x.dtype)
        case "map":
            return in_rows(lambda images: convolve(images, w), x, parts)
        case "taps" if groups == 1:
            flat = w.reshape(-1, *w.shape[2:])
            terms = [jnp.matmul(tap, flat[i], preferred_element_type=jnp.float32) for i, tap in enumerate(taps())]
            return sum(terms[1:], terms[0]).astype(x.dtype)
        case "taps":
            flat = w.reshape(-1, w.shape[-1])
            terms = [tap.astype(jnp.float32) * flat[i] for i, tap in enumerate(taps())]
            return sum(terms[1:], terms[0]).astype(x.dtype)
        case "gathered":
            return jnp.concatenate(taps(), -1) @ w.reshape(-1, w.shape[-1])
        case "blocks":  # for a stride as large as the window
            blocks = x.reshape(x.shape[0], x.shape[1] // height, height, x.shape[2] // width, width, x.shape[3])
            return jnp.einsum("nhiwjc,ijco->nhwo", blocks, w)
        case "flat":  # for a window of one pixel, or as large as the stride
            blocks = x.reshape(x.shape[0], x.shape[1] // height, height, x.shape[2] // width, width, x.shape[3])
            rows = blocks.transpose(0, 1, 3, 2, 4, 5).reshape(-1, math.prod(w.shape[:3]))
            return (rows @ w.reshape(rows.shape[1], -1)).reshape(*blocks.shape[:2], blocks.shape[3], -1)
    raise ValueError(way)


def patches(x: Any, w: Any, **config: Any) -> Any:
    """Embeds the patches of images."""
    return conv(x, w, stride=w.shape[0], **config)


def depthwise(x: Any, w: Any, **config: Any) -> Any:
    """Convolves each channel."""
    return conv(x, w, groups=w.shape[-1], **config)


def conv_gradients(x: Any, w: Any, **config: Any) -> Any:
    """The gradients of a convolution's images and weights."""
    return jax.grad(lambda *args: (conv(*args, **config).astype(jnp.float32) ** 2).sum(), argnums=(0, 1))(x, w)


# --- networks ---


def layers(x: Any, weights: Any, *, unroll: int = 1, rows: int = 1) -> Any:
    """A scan over layers."""

    def part(piece: Any) -> Any:
        out, _ = lax.scan(lambda hidden, w: (jax.nn.gelu(hidden @ w), None), piece, weights, unroll=unroll)
        return out

    return in_rows(part, x, rows)


def train(x: Any, weights: Any, *, pieces: int = 1, remat: bool = False, unroll: int = 1) -> Any:
    """The gradients of a scan over layers, added up over pieces of the batch."""

    def layer(hidden: Any, w: Any) -> Any:
        return jax.nn.gelu(hidden @ w) + hidden, None

    def gradient(piece: Any) -> Any:
        def loss(ws: Any) -> Any:
            body = jax.checkpoint(layer) if remat else layer
            out, _ = lax.scan(body, piece, ws, unroll=unroll)
            return (out.astype(jnp.float32) ** 2).sum()

        return jax.grad(loss)(weights).astype(jnp.float32)

    if pieces == 1:
        return gradient(x)
    start = jnp.zeros(weights.shape, jnp.float32)
    return lax.scan(lambda total, piece: (total + gradient(piece), None), start, x.reshape(pieces, -1, x.shape[1]))[0]


def experts(x: Any, gate: Any, up: Any, down: Any, *, way: str = "whole", parts: int = 1) -> Any:
    """A mixture of experts, one for each token."""
    count = up.shape[0]

    def expert(piece: Any, first: Any, second: Any) -> Any:
        return jax.nn.gelu(piece @ first) @ second

    def part(piece: Any) -> Any:
        chosen = jnp.argmax(piece.astype(jnp.float32) @ gate.astype(jnp.float32), -1)
        mask = jax.nn.one_hot(chosen, count, dtype=x.dtype)
        places = (jnp.cumsum(mask.astype(jnp.float32), 0) * mask).sum(-1).astype(jnp.int32) - 1
        room = 2 * piece.shape[0] // count
        match way:
            case "whole":
                return jnp.einsum("etd,te->td", jax.vmap(expert, (None, 0, 0))(piece, up, down), mask)
            case "scan":

                def step(total: Any, layer: Any) -> Any:
                    return total + expert(piece, *layer[:2]) * layer[2][:, None], None

                return lax.scan(step, jnp.zeros_like(piece), (up, down, mask.T))[0]
            case "unrolled":
                terms = [expert(piece, up[i], down[i]) * mask[:, i, None] for i in range(count)]
                return sum(terms[1:], terms[0])
            case "dispatch":
                sent = mask[:, :, None] * jax.nn.one_hot(places, room, dtype=x.dtype)[:, None]
                out = jax.vmap(expert)(jnp.einsum("tec,td->ecd", sent, piece), up, down)
                return jnp.einsum("tec,ecd->td", sent, out)
            case "gathered":
                inputs = jnp.zeros((count, room, piece.shape[1]), x.dtype).at[chosen, places].set(piece, mode="drop")
                return jax.vmap(expert)(inputs, up, down).at[chosen, places].get(mode="fill", fill_value=0)
            case "ragged":
                order = jnp.argsort(chosen)
                sizes = jnp.bincount(chosen, length=count).astype(jnp.int32)
                hidden = jax.nn.gelu(lax.ragged_dot(piece[order], up, sizes))
                return jnp.zeros_like(piece).at[order].set(lax.ragged_dot(hidden, down, sizes).astype(x.dtype))
        raise ValueError(way)

    return in_rows(part, x, parts)


# --- the list ---


def _issue(name: str, small: Sequence[tuple[int, int]], **space: Sequence[int]) -> Recipe:
    """Returns a program of plain_jax.py with some of its configs."""
    problem = kernels.PROBLEMS[name]
    kernel = problem.kernel.__wrapped__

    shapes = kinds(problem.dtype, problem.shapes(problem.sizes[0]), small)
    return Recipe(fn=kernel, shapes=shapes, configs=grid(**space), scale=problem.scale, off_by=0.1)


def _square(dtype: Any, size: int = 4096, small: int = 128) -> Callable[[bool], Any]:
    return kinds(dtype, [(size, size)] * 2, [(small, small)] * 2)


_WAYS = ways("whole", "swapped", split=(2, 4, 8), rows=(2, 8), columns=(4,), depth=(2, 8))
_CONV_WAYS = ways("whole", "channels_first", "upcast", "taps", "gathered", map=(2, 4))
_MOE = [(2048, 1024), (1024, 8), (8, 1024, 2048), (8, 2048, 1024)]
_SMALL_MOE = [(512, 32), (32, 8), (8, 32, 64), (8, 64, 32)]

PROGRAMS: dict[str, Recipe] = {
    "attention": _issue("attention", [(2048, 32)] * 3, rows=(256, 512, 1024), keys=(128, 512, 1024, 2048)),
    "mlp": _issue("mlp", [(4096, 8), (8, 8192), (8192, 8)], rows=(512, 1024, 2048, 4096), hidden=(1024, 2048, 8192)),
    "step": _issue(
        "step", [(4096, 16), (16, 24), (24, 32), (32, 24), (24, 16)], rows=(128, 256, 512, 1024, 2048, 4096)
    ),
    "bf16": Recipe(fn=product, shapes=_square("bfloat16"), configs=_WAYS),
    "fp16": Recipe(
        fn=product, shapes=kinds("float16", [(2048, 8192), (8192, 3072)], [(64, 128), (128, 64)]), configs=_WAYS
    ),
    "fp8": Recipe(fn=product, shapes=_square("float8_e4m3fn"), configs=_WAYS, scale=1.0),
    "fp8_scaled": Recipe(
        fn=scaled,
        shapes=scaled_kinds,
        configs=ways("whole", "swapped", split=(2, 4), rows=(2, 8), columns=(4,), depth=(4,)),
        scale=1.0,
    ),
    "int8": Recipe(fn=product, shapes=_square("int8"), configs=_WAYS, scale=30.0),
    "f32": Recipe(
        fn=product,
        shapes=_square("float32", 2048),
        configs=[
            *ways("whole", "swapped", "bfloat16", split=(2, 4), rows=(2,), columns=(4,), depth=(4,)),
            {"precision": "highest"},
            {"precision": "tensorfloat32"},
        ],
    ),
    "batched": Recipe(
        fn=batched,
        shapes=kinds("bfloat16", [(64, 1024, 128), (64, 128, 1024)], [(16, 64, 32), (16, 32, 64)]),
        configs=ways("whole", "swapped", "upcast", map=(4, 16), unrolled=(4, 16), rows=(2, 8)),
    ),
    "bias_gelu": Recipe(
        fn=bias_gelu,
        shapes=kinds("bfloat16", [(4096, 2048), (2048, 8192), (1, 8192)], [(64, 32), (32, 64), (1, 64)]),
        configs=grid(rows=(1, 2, 4, 8), wide=(False, True)),
    ),
    "swiglu": Recipe(
        fn=swiglu,
        shapes=kinds(
            "bfloat16",
            [(2048, 2048), (2048, 4096), (2048, 4096), (4096, 2048)],
            [(64, 32), (32, 64), (32, 64), (64, 32)],
        ),
        configs=grid(form=("apart", "joined", "stacked"), rows=(1, 2, 8)),
    ),
    "projections": Recipe(
        fn=projections,
        shapes=kinds("bfloat16", [(4096, 1536), (3, 1536, 1536)], [(64, 32), (3, 32, 32)]),
        configs=grid(form=("apart", "joined", "stacked"), rows=(1, 2, 8)),
    ),
    "transposed": Recipe(
        fn=transposed,
        shapes=kinds("bfloat16", [(4096, 2048), (4096, 4096)], [(128, 64), (128, 128)]),
        configs=_WAYS,
    ),
    "skinny_1": Recipe(
        fn=product,
        shapes=kinds("bfloat16", [(1, 8192), (8192, 8192)], [(1, 256), (256, 256)]),
        configs=ways("whole", "swapped", "upcast", "sums", split=(2, 8, 32), columns=(4,), depth=(4,)),
    ),
    "skinny_8": Recipe(
        fn=product,
        shapes=kinds("bfloat16", [(8, 8192), (8192, 8192)], [(8, 256), (256, 256)]),
        configs=ways("whole", "swapped", "upcast", "sums", split=(2, 8, 32), rows=(2, 8), columns=(4,), depth=(4,)),
    ),
    "chain": Recipe(
        fn=chain,
        shapes=kinds("bfloat16", [(4096, 512), (512, 4096)] * 2, [(64, 32), (32, 64)] * 2),
        configs=grid(order=("left", "right", "middle", "pairs", "inner"), rows=(1, 4)),
    ),
    "low_rank": Recipe(
        fn=low_rank,
        shapes=kinds(
            "bfloat16",
            [(2048, 4096), (4096, 4096), (4096, 64), (64, 4096)],
            [(64, 128), (128, 128), (128, 16), (16, 128)],
        ),
        configs=grid(form=("apart", "merged", "joined"), rows=(1, 2, 8)),
    ),
    "cross_entropy": Recipe(
        fn=cross_entropy,
        shapes=kinds("bfloat16", [(4096, 1024), (32768, 1024)], [(64, 32), (256, 32)]),
        configs=grid(tokens=(1, 2, 4, 8), words=(1, 4, 16)),
    ),
    "decode": Recipe(
        fn=decode,
        shapes=kinds("bfloat16", [(16, 8, 128), *[(16, 4096, 8, 128)] * 2], [(4, 2, 32), *[(4, 64, 2, 32)] * 2]),
        configs=ways("whole", "sums", map=(4,), split=(2, 8, 32), scan=(4, 16)),
        scale=0.3,
    ),
    "linear_attention": Recipe(
        fn=linear_attention,
        shapes=kinds("bfloat16", [(16, 8192, 128)] * 3, [(2, 1024, 32)] * 3),
        configs=grid(chunk=(64, 128, 256, 512, 1024), ahead=(False, True)),
        scale=0.3,
    ),
    "flax_attention": Recipe(
        fn=flax_attention, shapes=flax_kinds, configs=grid(queries=(1, 2, 4, 8), mapped=(False, True)), off_by=0.1
    ),
    "equinox_attention": Recipe(
        fn=equinox_attention,
        shapes=lambda is_small: (
            *kinds("bfloat16", [(4, 2048, 1024)], [(2, 64, 64)])(is_small),
            kinds("bfloat16", [(1024, 1024)] * 4, [(64, 64)] * 4)(is_small),
        ),
        configs=grid(queries=(1, 2, 4, 8), mapped=(False, True)),
        off_by=0.1,
    ),
    "conv_3x3": Recipe(
        fn=conv,
        shapes=kinds("bfloat16", [(32, 56, 56, 128), (3, 3, 128, 128)], [(4, 8, 8, 16), (3, 3, 16, 16)]),
        configs=_CONV_WAYS,
    ),
    "conv_f32": Recipe(
        fn=conv,
        shapes=kinds("float32", [(32, 28, 28, 128), (3, 3, 128, 256)], [(4, 8, 8, 16), (3, 3, 16, 16)]),
        configs=_CONV_WAYS,
    ),
    "conv_1x1": Recipe(
        fn=conv,
        shapes=kinds("bfloat16", [(32, 56, 56, 256), (1, 1, 256, 512)], [(4, 8, 8, 16), (1, 1, 16, 16)]),
        configs=ways("whole", "channels_first", "upcast", "taps", "gathered", "flat", map=(2, 4)),
    ),
    "conv_patches": Recipe(
        fn=patches,
        shapes=kinds("bfloat16", [(64, 224, 224, 3), (16, 16, 3, 768)], [(8, 64, 64, 3), (16, 16, 3, 32)]),
        configs=ways("whole", "channels_first", "upcast", "blocks", "flat", map=(2, 8)),
    ),
    "conv_depthwise": Recipe(
        fn=depthwise,
        shapes=kinds("bfloat16", [(32, 56, 56, 256), (3, 3, 1, 256)], [(4, 8, 8, 16), (3, 3, 1, 16)]),
        configs=ways("whole", "channels_first", "upcast", "taps", map=(2, 4)),
    ),
    "conv_gradients": Recipe(
        fn=conv_gradients,
        shapes=kinds("bfloat16", [(32, 28, 28, 128), (3, 3, 128, 128)], [(4, 8, 8, 16), (3, 3, 16, 16)]),
        configs=_CONV_WAYS,
    ),
    "layers": Recipe(
        fn=layers,
        shapes=kinds("bfloat16", [(2048, 1024), (8, 1024, 1024)], [(64, 32), (8, 32, 32)]),
        configs=grid(unroll=(1, 2, 8), rows=(1, 2, 8)),
        scale=1 / 32,
    ),
    "train": Recipe(
        fn=train,
        shapes=kinds("bfloat16", [(2048, 1024), (8, 1024, 1024)], [(64, 32), (8, 32, 32)]),
        configs=grid(pieces=(1, 2, 4), remat=(False, True), unroll=(1, 4)),
        scale=1 / 32,
        off_by=0.1,
    ),
    "moe_dense": Recipe(
        fn=experts,
        shapes=kinds("bfloat16", _MOE, _SMALL_MOE),
        configs=ways("unrolled", "scan", whole=(1, 4), dispatch=(1, 2, 4), gathered=(1, 2, 4)),
        off_by=0.15,
    ),
    "moe_ragged": Recipe(
        fn=experts,
        shapes=kinds("bfloat16", _MOE, _SMALL_MOE),
        configs=ways("whole", "scan", ragged=(1, 2, 4, 8), gathered=(1, 4)),
        off_by=0.15,
    ),
}
