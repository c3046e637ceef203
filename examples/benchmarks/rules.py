"""Compares rules with the nearest entry, the best single config and the defaults, on problems tuned exhaustively.

    python examples/benchmarks/rules.py measure oracle.jsonl --kernel matmul --problems 60
    python examples/benchmarks/rules.py table oracle.jsonl
    python examples/benchmarks/rules.py cost --kernel matmul

The first tunes random problems of a kernel exhaustively, and adds a line to a file for each; it resumes after an
interruption. The kernels are a matmul in plain JAX in blocks (`cpu`), and JAX's Triton attention and a Triton matmul.
The second draws problems to fit a rule on, five times, and shows the losses on all others. The third fits on 20
problems, tunes the same problems exhaustively, and compares the times of both.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import quarantune
from quarantune.rules import tree
from quarantune.values.codec import text_of


@functools.partial(jax.jit, static_argnames=["bm", "bk"])
def blocked(x: Any, y: Any, bm: int = 64, bk: int = 64) -> Any:
    """Multiplies matrices block row by block row, and adds up blocks of the inner dimension."""
    (m, k), n = x.shape, y.shape[1]
    x = jnp.pad(x, ((0, -m % bm), (0, -k % bk))).reshape(-(-m // bm), bm, -(-k // bk), bk).swapaxes(1, 2)
    y = jnp.pad(y, ((0, -k % bk), (0, 0))).reshape(-(-k // bk), bk, n)

    def row(blocks: Any) -> Any:
        return jax.lax.scan(lambda total, each: (total + each[0] @ each[1], None), jnp.zeros((bm, n)), (blocks, y))[0]

    return jax.lax.map(row, x).reshape(-1, n)[:m]


def kernel(name: str, number: int) -> tuple[Any, list[tuple[Any, ...]]]:
    """Returns a tuned function, and the arguments of random problems; ragged sizes, not powers of two."""
    rng, struct = random.Random(7), jax.ShapeDtypeStruct

    def size(low: int, high: int) -> int:
        return round(math.exp(rng.uniform(math.log(low), math.log(high))))

    if name == "cpu":
        function = quarantune.autotune({"bm": [8, 32, 128, 512], "bk": [16, 64, 256, 1024]}, name="blocked")(blocked)
        shapes = [(size(16, 700), size(32, 900), size(16, 300)) for _ in range(number)]
        return function, [(struct((m, k), jnp.float32), struct((k, n), jnp.float32)) for m, k, n in shapes]
    if name == "attention":
        from jax.experimental.pallas.ops.gpu import attention

        @quarantune.autotune({"q": [32, 64, 128], "k": [32, 64, 128], "warps": [4, 8], "stages": [1, 2, 3]}, name="mha")
        @functools.partial(jax.jit, static_argnames=["q", "k", "warps", "stages"])
        def mha(x: Any, q: int = 128, k: int = 128, warps: int = 4, stages: int = 2) -> Any:
            length = x.shape[1]
            padded = jnp.pad(x, ((0, 0), (0, -length % 128), (0, 0), (0, 0)))
            ids = (jnp.arange(padded.shape[1])[None] >= length).astype(jnp.int32).repeat(x.shape[0], 0)
            blocks = attention.BlockSizes(block_q=q, block_k=k)
            run = functools.partial(attention.mha, block_sizes=blocks, num_warps=warps, num_stages=stages)
            return run(padded, padded, padded, segment_ids=ids)[:, :length]

        shapes4 = [
            (2 ** rng.randrange(5), size(100, 5000), rng.choice([4, 8, 12, 16, 24, 32]), 64) for _ in range(number)
        ]
        return mha, [(struct(shape, jnp.bfloat16),) for shape in shapes4]
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    grid = {"bm": [32, 64, 128], "bn": [32, 64, 128, 256], "bk": [32, 64], "warps": [4, 8], "stages": [2, 4]}

    @quarantune.autotune(grid, name="matmul")
    @functools.partial(jax.jit, static_argnames=["bm", "bn", "bk", "warps", "stages"])
    def matmul(x: Any, y: Any, bm: int = 128, bn: int = 128, bk: int = 32, warps: int = 4, stages: int = 2) -> Any:
        (m, k), n = x.shape, y.shape[1]
        x, y = (jnp.pad(x, ((0, -m % bm), (0, -k % bk))), jnp.pad(y, ((0, -k % bk), (0, -n % bn))))

        def body(x_ref: Any, y_ref: Any, o_ref: Any) -> None:
            def step(at: Any, total: Any) -> Any:
                return total + pl.dot(x_ref[:, pl.ds(at * bk, bk)], y_ref[pl.ds(at * bk, bk), :])

            total = jax.lax.fori_loop(0, x.shape[1] // bk, step, jnp.zeros((bm, bn), jnp.float32))
            o_ref[...] = total.astype(o_ref.dtype)

        return pl.pallas_call(
            body,
            grid=(x.shape[0] // bm, y.shape[1] // bn),
            in_specs=[
                pl.BlockSpec((bm, x.shape[1]), lambda i, j: (i, 0)),
                pl.BlockSpec((x.shape[1], bn), lambda i, j: (0, j)),
            ],
            out_specs=pl.BlockSpec((bm, bn), lambda i, j: (i, j)),
            out_shape=jax.ShapeDtypeStruct((x.shape[0], y.shape[1]), x.dtype),
            compiler_params=triton.CompilerParams(num_warps=warps, num_stages=stages),
        )(x, y)[:m, :n]

    sizes = [(size(64, 5000), size(64, 5000), size(64, 4000)) for _ in range(number)]
    return matmul, [(struct((m, k), jnp.bfloat16), struct((k, n), jnp.bfloat16)) for m, n, k in sizes]


def measure(path: Path, name: str, number: int) -> None:
    """Tunes problems exhaustively, and adds their times to a file."""
    function, problems = kernel(name, number)
    done = len(path.read_text().splitlines()) if path.exists() else 0
    for args in problems[done:]:
        with quarantune.settings(search="exhaustive", disable_cache=True):
            result = function.tune(*args)
        ms = {text_of(trial.config): trial.time_ms or trial.merit for trial in result.trials}
        ms |= {text_of(trial.config): trial.time_ms for trial in result.finalists}
        line = {"sizes": [list(arg.shape) for arg in args], "ms": ms, "default": text_of(result.default_config)}
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def table(path: Path, train: int, draws: int) -> None:
    """Prints the losses on the problems that a rule was not fitted on."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    configs = list(dict.fromkeys(text for line in lines for text in line["ms"]))
    times = np.array([[line["ms"].get(text) or math.inf for text in configs] for line in lines])
    losses = times / times.min(1, keepdims=True) - 1
    flat = [[size for shape in line["sizes"] for size in shape] for line in lines]
    rows: list[Any] = [({("x", "shape", at): it for at, it in enumerate(each)}, "", 1.0) for each in flat]
    logs, found = np.log2([[*row.values()] for row, *_ in rows]), dict[str, list[float]]()
    expected = []
    for draw in range(draws):
        order = random.Random(draw).sample(range(len(rows)), len(rows))
        fitted, rest = order[:train], order[train:]
        rule, _ = tree.fit([rows[at] for at in fitted], losses[fitted], [{"config": it} for it in configs], 8, 0.03)
        single = int(np.log1p(np.minimum(losses[fitted], 10)).mean(0).argmin())
        expected.append(rule.loss)
        for at in rest:
            near = fitted[int(np.abs(logs[fitted] - logs[at]).sum(1).argmin())]
            default = configs.index(lines[at]["default"])
            ruled = [] if rule.why_not(rows[at][0]) else rule.ranked(rows[at][0])
            usable = [column for each in ruled if losses[at, column := configs.index(each["config"])] < math.inf]
            columns = {"rule": next(iter(usable), default), "nearest": losses[near].argmin()}
            for name, column in (columns | {"best single config": single, "defaults": default}).items():
                found.setdefault(name, []).append(float(losses[at, column]))
    told = f"{len(rows)} problems, {len(configs)} configs; fitted on {train}, {draws} draws"
    print(f"{told}; expected loss {np.mean(expected):.1%}")
    print("| answer | median loss | 90% within | worst | more than 5% below the defaults |\n|---|---|---|---|---|")
    for name, each in found.items():
        behind = sum((1 + own) > 1.05 * (1 + other) for own, other in zip(each, found["defaults"], strict=True))
        most = np.quantile(each, 0.9, method="higher")
        print(f"| {name} | {np.median(each):.1%} | {most:.1%} | {max(each):.1%} | {behind} of {len(each)} |")


def cost(name: str, number: int) -> None:
    """Compares the time of fitting with the time of tuning the same problems exhaustively."""
    function, problems = kernel(name, number)
    with tempfile.TemporaryDirectory() as cache, quarantune.settings(cache_dir=cache):
        report = function.fit(problems)
    began_s = time.monotonic()
    for args in problems:
        with quarantune.settings(search="exhaustive", disable_cache=True):
            function.tune(*args)
    exhaustive_s = time.monotonic() - began_s
    print(report)
    print(f"fit {report.seconds:.0f} s, exhaustively {exhaustive_s:.0f} s: {report.seconds / exhaustive_s:.0%}")


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("measure", "table", "cost"))
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--kernel", choices=("cpu", "attention", "matmul"), default="cpu")
    parser.add_argument("--problems", type=int, default=60)
    parser.add_argument("--train", type=int, default=20)
    parser.add_argument("--draws", type=int, default=5)
    options = parser.parse_args()
    if options.command == "cost":
        cost(options.kernel, options.train)
    elif options.command == "measure":
        measure(options.file, options.kernel, options.problems)
    else:
        table(options.file, options.train, options.draws)


if __name__ == "__main__":
    main()
