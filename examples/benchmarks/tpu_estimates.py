"""Compares estimates of the TPU compiler with published times and published tables of tuned configs.

    pip install 'quarantune[tpu]'
    python examples/benchmarks/tpu_estimates.py documented
    python examples/benchmarks/tpu_estimates.py tables estimates.jsonl --tpu-inference CLONE --tokamax CLONE
    python examples/benchmarks/tpu_estimates.py show estimates.jsonl
    python examples/benchmarks/tpu_estimates.py many matmul.json
    python examples/benchmarks/tpu_estimates.py search matmul.json

No TPU is needed. The first prints estimates of a matmul and the times in the guide "Matrix Multiplication" (Pallas on
TPU, in JAX's documentation; a v5e by `timeit`, launches included). The second takes problems from the tables of tuned
configs in vLLM's tpu-inference and OpenXLA's tokamax, small problems first. It estimates the published config and
random configs, adds a line to a file for each problem, and resumes after an interruption. All problems take hours. The
third prints a summary of the file for each family of kernels. The fourth estimates some 400 configs of a matmul,
including two that abort or hang their process, and prints the time and the disk space. The fifth replays searches over
these configs, with the estimates plus noise as times. It compares searches that begin with the estimates, and leave out
configs far behind, with searches without estimates.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import itertools
import json
import math
import os
import random
import re
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
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
"""Times from JAX's guide, docs/pallas/tpu/matmul.ipynb: bfloat16, by the matrices' size and the blocks."""


@functools.partial(jax.jit, static_argnames=["bm", "bk", "bn", "by_columns"])
def matmul(x: Any, y: Any, bm: int = 128, bk: int = 128, bn: int = 128, by_columns: bool = False) -> Any:
    """Multiplies matrices in blocks, with a float32 accumulator in VMEM, block row by block row or by columns."""

    def body(x_ref: Any, y_ref: Any, o_ref: Any, total: Any) -> None:
        @pl.when(pl.program_id(2) == 0)
        def clear() -> None:
            total[...] = jnp.zeros_like(total)

        total[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def store() -> None:
            o_ref[...] = total[...].astype(o_ref.dtype)

    def ordered(i: Any, j: Any) -> tuple[Any, Any]:
        return (j, i) if by_columns else (i, j)

    (m, k), n = x.shape, y.shape[1]
    return pl.pallas_call(
        body,
        grid=(*ordered(m // bm, n // bn), k // bk),
        in_specs=[
            pl.BlockSpec((bm, bk), lambda i, j, k: (ordered(i, j)[0], k)),
            pl.BlockSpec((bk, bn), lambda i, j, k: (k, ordered(i, j)[1])),
        ],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: ordered(i, j)),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
    )(x, y)


def documented() -> None:
    """Prints the estimates of JAX's documented matmuls and their times."""
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


@dataclasses.dataclass(frozen=True)
class Problem:
    """A problem from a published table.

    Attributes:
        family: the kernel and its device, in words.
        target: the device.
        sizes: the problem's sizes.
        published: the table's config.
        published_ms: the table's time of this config; None if unknown.
        make: makes the jitted function and its arguments.
        space: the configs to draw from.
    """

    family: str
    target: str
    sizes: tuple[int, ...]
    published: dict[str, Any]
    published_ms: float | None
    make: Callable[[], tuple[Any, tuple[Any, ...]]]
    space: list[dict[str, Any]]


def struct(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    """Returns an array's description."""
    return jax.ShapeDtypeStruct(shape, dtype)


def module_of(clone: Path, package: str, name: str, place: Path) -> Any:
    """Imports a module from a clone without the imports of its package."""
    if not (place / package).exists():
        shutil.copytree(clone / package, place / package)
        for path in (place / package).rglob("*.py"):  # `type` statements need Python 3.12
            path.write_text(re.sub(r"^type (\w+) =", r"\1 =", path.read_text(), flags=re.MULTILINE))
        (place / package / "__init__.py").write_text("")
        if package == "tpu_inference":
            (place / package / "logger.py").write_text("from logging import getLogger as init_logger\n")
            (place / package / "utils.py").write_text("def align_to(size, to): return -(-size // to) * to\n")
        sys.path.insert(0, str(place))
    return importlib.import_module(f"{package}.{name}")


def divisors(size: int, most: int) -> list[int]:
    """Returns the multiples of 128 that divide a size."""
    return [each for each in range(128, min(size, most) + 1, 128) if size % each == 0]


def quantized_matmuls(clone: Path, place: Path) -> Iterator[Problem]:
    """Yields the problems of tpu-inference's quantized matmul for a v6e (int8) and a 7x (float8)."""
    table = module_of(clone, "tpu_inference", "kernels.quantized_matmul.tuned_block_sizes", place)
    for key, blocks in sorted(table.TUNED_BLOCK_SIZES_RAW.items()):
        version, batch, out, into, x_dtype, w_dtype = key
        if x_dtype != w_dtype or not 128 <= batch <= 1024:  # the compiler takes long for larger batches
            continue

        def make(batch: int = batch, out: int = out, into: int = into, dtype: str = x_dtype) -> Any:
            kernel = module_of(clone, "tpu_inference", "kernels.quantized_matmul.kernel", place)

            @functools.partial(jax.jit, static_argnames=["batch_block", "out_block", "in_block"])
            def multiply(
                x: Any, w: Any, scale: Any, batch_block: int = 0, out_block: int = 0, in_block: int = 0
            ) -> Any:
                sizes = table.TunedValue(batch_block, out_block, in_block)
                return kernel.quantized_matmul_kernel(x, w, scale, None, None, jnp.dtype(dtype), tuned_value=sizes)

            return multiply, (struct(jnp.bfloat16, batch, into), struct(dtype, out, into), struct(jnp.float32, out))

        names = ("batch_block", "out_block", "in_block")
        space = itertools.product(divisors(batch, 4096), divisors(out, 8192), divisors(into, 8192))
        yield Problem(
            f"quantized matmul, {x_dtype}",
            {6: "TPU v6e", 7: "TPU 7x"}[version],
            (batch, out, into),
            dict(zip(names, blocks[:3], strict=True)),
            None,
            make,
            # The compiler takes long to simulate smaller blocks, and they are slow.
            [dict(zip(names, each, strict=True)) for each in space if each[0] * each[1] * each[2] >= 1 << 22],
        )


def flash_attentions(clone: Path, place: Path) -> Iterator[Problem]:
    """Yields the problems of tpu-inference's flash attention, whose table names no device."""
    table = module_of(clone, "tpu_inference", "kernels.flash_attention.tuned_params", place)
    for key, sizes in table.tuned_params_mapping.items():

        def make(key: Any = key) -> Any:
            kernel = module_of(clone, "tpu_inference", "kernels.flash_attention.kernel", place)

            @functools.partial(jax.jit, static_argnames=["block_q", "block_k_major", "block_k", "block_b"])
            def attend(
                q: Any, k: Any, v: Any, block_q: int = 0, block_k_major: int = 0, block_k: int = 0, block_b: int = 1
            ) -> Any:
                sizes = kernel.BlockSizes(block_q, block_k_major, block_k, block_b)
                return kernel.flash_attention(q, k, v, block_sizes=sizes, vmem_limit_bytes=96 << 20)

            x = struct(jnp.bfloat16, key.batch_size, key.num_heads, key.q_seq_len, key.head_dim)
            return attend, (x, x, x)

        names = ("block_q", "block_k_major", "block_k", "block_b")
        q_blocks, k_blocks = divisors(key.q_seq_len, 4096), divisors(key.kv_seq_len, 4096)
        yield Problem(
            "flash attention",
            "TPU v6e",
            (key.batch_size, key.num_heads, key.q_seq_len, key.head_dim),
            dataclasses.asdict(sizes),
            None,
            make,
            [
                dict(zip(names, each, strict=True))
                for each in itertools.product(q_blocks, k_blocks, k_blocks, (1,))
                if each[1] % each[2] == 0 and each[0] * each[2] >= 1 << 15
            ],
        )


def splash_attentions(clone: Path, place: Path) -> Iterator[Problem]:
    """Yields the problems of tokamax's splash attention for three TPUs; with a causal mask its grid depends on data."""
    kernels = "_src.ops.experimental.tpu.splash_attention."
    for folder, target in (("tpu_v5", "TPU v5p"), ("tpu_v6_lite", "TPU v6e"), ("tpu7x", "TPU 7x")):
        path = clone / "tokamax" / "data" / "autotuning" / folder / "pallas_mosaic_tpu_flash_attention.json"
        for text, entries in json.loads(path.read_text()).items():
            call = json.loads(text)
            shape = [int(size) for size in call["q"].partition("[")[2].strip("]").split(",")]
            others = [call[name] for name in ("bias", "logits_soft_cap", "return_residuals")]
            others += [call["mask"]["bool_mask"], call["mask"]["is_causal"], call["k"] != call["q"]]
            # The compiler takes long for longer sequences.
            if not entries or any(others) or shape[1] > 4096:
                continue
            ((config, found),) = entries.items()

            def make(shape: list[int] = shape) -> Any:
                kernel = module_of(clone, "tokamax", kernels + "splash_attention_kernel", place)
                masks = module_of(clone, "tokamax", kernels + "splash_attention_mask", place)
                mask = masks.FullMask((shape[1], shape[1]))

                @functools.partial(jax.jit, static_argnames=["options"])
                def attend(q: Any, k: Any, v: Any, options: str = "") -> Any:
                    fields = json.loads(options)
                    layouts = {
                        name: kernel.QKVLayout(fields.pop(name)) for name in ("q_layout", "k_layout", "v_layout")
                    }
                    sizes = dataclasses.replace(kernel.SplashConfig.get_default(), **fields, **layouts)
                    run = kernel.make_splash_mha(
                        mask=mask,
                        config=sizes,
                        save_residuals=False,
                        mask_value=float(jnp.finfo(jnp.float32).min),
                        downcast_smem_data=False,
                        q_seq_shards=1,
                    )
                    q, k, v = (jnp.swapaxes(each, 1, 2) for each in (q, k, v))
                    return jnp.swapaxes(jax.vmap(run)(q, k, v), 1, 2)

                x = struct(jnp.bfloat16, *shape)
                return attend, (x, x, x)

            tiles = [tile for tile in (256, 512, 1024, 2048) if tile <= shape[1]]
            large = [tile for tile in tiles if tile >= 1024] or tiles
            yield Problem(
                "splash attention, full mask",
                target,
                tuple(shape),
                {"options": config},
                statistics.median(found["evaluation_times_ms"]),
                make,
                [  # the space that tokamax's own tuner searches
                    {
                        "options": json.dumps(
                            {
                                "block_q": q,
                                "block_kv": kv,
                                "block_kv_compute": compute,
                                "q_layout": layouts[0],
                                "k_layout": layouts[1],
                                "v_layout": layouts[2],
                                "use_experimental_scheduler": scheduler,
                                "use_base2_exp": True,
                            },
                            separators=(",", ":"),
                        )
                    }
                    for q, kv, compute in itertools.product(large, large, [tile for tile in tiles if tile <= 1024])
                    for layouts in itertools.product((1, 2), repeat=3)
                    for scheduler in (True, False)
                    if kv % compute == 0
                ],
            )


def estimate_tables(results: Path, problems: list[Problem], number: int, most: int, seed: int) -> None:
    """Adds the missing problems' estimates to a file, from all families in turn."""
    done = (
        {tuple(json.loads(line)["problem"]) for line in results.read_text().splitlines()} if results.exists() else set()
    )
    families: dict[tuple[str, str], list[Problem]] = {}
    for problem in problems:
        if len(problem.space) > number:
            families.setdefault((problem.family, problem.target), []).append(problem)
    for family in families.values():
        family.sort(key=lambda problem: math.prod(problem.sizes))
        del family[most:]
    for problem in [each for turn in itertools.zip_longest(*families.values()) for each in turn if each is not None]:
        name = (problem.family, problem.target, " x ".join(map(str, problem.sizes)))
        if name in done:
            continue
        rng = random.Random(f"{seed} {name}")
        others = [config for config in problem.space if config != problem.published]
        # A tenth more than needed, because some do not compile.
        drawn = [problem.published, *rng.sample(others, min(len(others), number + number // 10))]
        function, args = problem.make()
        report = quarantune.compile_check(
            function, drawn, *args, target=problem.target, estimate=True, compile_timeout=60
        )
        line = {"problem": name, "published_ms": problem.published_ms, "trials": []}
        for trial in report.trials:
            figures = trial.figures
            estimate = figures.estimate if figures else None
            line["trials"].append(
                {
                    "config": trial.config,
                    "ms": report.estimated_ms(trial),
                    "cycles": estimate.cycles if estimate else None,
                    "why": trial.message or (figures.no_estimate if figures else ""),
                }
            )
        with results.open("a") as file:
            file.write(json.dumps(line, default=str) + "\n")
        print(summary([line]), flush=True)


def summary(lines: list[dict[str, Any]]) -> str:
    """Returns a row of a table about the problems of one family."""
    ranks, ratios, medians, worst, published = [], [], [], [], []
    for line in lines:
        own, *_ = line["trials"]
        by = "ms" if own["ms"] is not None else "cycles"
        known = sorted(trial[by] for trial in line["trials"] if trial[by] is not None)
        if own[by] is None:
            continue
        ranks.append((known.index(own[by]) + 1, len(known)))
        ratios.append(own[by] / known[0])
        medians.append(statistics.median(known) / known[0])
        worst.append(known[-1] / known[0])
        if line["published_ms"] and own["ms"]:
            published.append(own["ms"] / line["published_ms"])
    family, target, sizes = lines[0]["problem"]
    cells = [
        f"{family}, {target}" if len(lines) > 1 else f"{family}, {target}, {sizes}",
        f"{len(ratios)} of {len(lines)}",
    ]
    if ratios:
        cells += [
            f"{statistics.median(rank for rank, _ in ranks):g} of {statistics.median(of for _, of in ranks):g}",
            f"{statistics.median(ratios):.3f}",
            f"{max(ratios):.2f}",
            f"{statistics.median(medians):.2f}",
            f"{statistics.median(worst):.2f}",
            f"{min(published):.2f} to {max(published):.2f}" if published else "",
        ]
    return f"| {' | '.join(cells)} |"


def show(results: Path) -> None:
    """Prints a row for each family of kernels."""
    families: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for line in map(json.loads, results.read_text().splitlines()):
        families.setdefault(tuple(line["problem"][:2]), []).append(line)
    print(
        "| kernel, device | problems with estimates | published: median rank | over the best estimate: median | worst "
        "| median config over the best | worst config | estimate over published time |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    for lines in families.values():
        print(summary(lines))


@functools.partial(jax.jit, static_argnames=["bm", "bk", "bn", "by_columns"])
def unruly(x: Any, y: Any, bm: int = 128, bk: int = 128, bn: int = 128, by_columns: bool = False) -> Any:
    """Runs the matmul above, except two configs, which abort or hang the process that compiles them."""
    if bm == 1:
        os.abort()
    if bm == 2:
        time.sleep(10_000)
    return matmul(x, y, bm=bm, bk=bk, bn=bn, by_columns=by_columns)


def many(results: Path, target: str) -> None:
    """Estimates all configs of a matmul, and watches the disk space in use during the run and at its end.

    It does not repeat the estimates of an earlier run.
    """
    places = [Path("/dev/shm"), Path(tempfile.gettempdir())]
    sizes, names = divisors(1536, 1536), ("bm", "bk", "bn", "by_columns")
    space = [{"bm": bm, "bk": 128, "bn": 128, "by_columns": False} for bm in (1, 2)]
    space += [dict(zip(names, each, strict=True)) for each in itertools.product(sizes, sizes, sizes, (False, True))]
    before = {path for place in places for path in place.iterdir()}
    most, is_over = [0], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.2):
            found = [path for place in places for path in place.iterdir() if path not in before]
            most[0] = max(most[0], sum(map(size_of, found)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    x = struct(jnp.bfloat16, 1536, 1536)
    began = time.monotonic()
    report = quarantune.compile_check(
        unruly, space, x, x, target=target, estimate=True, compile_timeout=30, num_workers=2
    )
    took = time.monotonic() - began
    is_over.set()
    watcher.join()
    left = [path.name for place in places for path in place.iterdir() if path not in before]
    counts = {str(trial.outcome): 0 for trial in report.trials}
    for trial in report.trials:
        counts[str(trial.outcome)] += 1
    known = [trial for trial in report.trials if trial.figures and trial.figures.estimate]
    new = len(space) - report.known
    print(f"{new} configs in {took:.0f} s, {took / max(new, 1):.2f} s each; of all: {counts}, {len(known)} estimates")
    print(f"on disk at most {most[0] / 1e6:.0f} MB, and in the end {left or 'nothing'}")
    for trial in report.trials[:2]:
        print(f"{trial.config}: {trial.outcome}: {trial.message}")
    found = [{"config": trial.config, "ms": report.estimated_ms(trial)} for trial in known]
    results.write_text(json.dumps({"failed": len(space) - len(known), "estimates": found}))


def size_of(path: Path) -> int:
    """Returns the bytes of a file, or of all files in a directory; 0 for a deleted file."""
    total = 0
    with contextlib.suppress(OSError):
        for each in path.rglob("*") if path.is_dir() and not path.is_symlink() else [path]:
            total += each.lstat().st_size
    return total


def searches(results: Path, seeds: int) -> None:
    """Replays searches on estimates with noise; some searches know the estimates."""
    from quarantune.search.searches import make
    from quarantune.values.space import Space
    from quarantune.values.trial import Outcome, Trial

    found = json.loads(results.read_text())["estimates"]
    best = sorted(found, key=lambda each: each["ms"])
    near = [each["config"] for each in best if each["ms"] <= 4 * best[0]["ms"]]
    print(f"{len(found)} configs; {len(found) - len(near)} are estimated at more than 4 times the best and left out\n")

    def started(kind: str) -> Callable[[list[dict[str, Any]], int], Any]:
        def make_search(configs: list[dict[str, Any]], seed: int) -> Any:
            return make(kind, Space(near), seed=seed, starts=near[:16])

        make_search.__name__ = f"{kind}, with estimates"
        return make_search

    for noise in (0.2, 0.5):
        rows = []
        for draw in range(seeds):
            rng = random.Random(draw)
            trials = [
                Trial(config=each["config"], outcome=Outcome.OK, time_ms=ms, own_ms=ms)
                for each in found
                for ms in [each["ms"] * math.exp(rng.gauss(0, noise))]
            ]
            kinds = ("surrogate", started("surrogate"), "random", started("random"))
            replayed = quarantune.replay(trials, kinds, seeds=[draw], max_trials=400, batch=8, within=0.05)
            rows.append({name: runs[0].evaluations for name, runs in replayed.runs.items()})
        print(f"times are the estimates with {noise:.0%} of noise: trials until the first within 5% of the best")
        print("| search | median | worst of nine in ten | not found |\n|---|---|---|---|")
        for name in rows[0]:
            needed = sorted(math.inf if row[name] is None else row[name] for row in rows)
            lost = sum(map(math.isinf, needed))
            print(f"| {name} | {statistics.median(needed):g} | {needed[int(0.9 * len(needed)) - 1]:g} | {lost} |")
        print()


def main() -> None:
    """Prints one of the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("documented")
    tables = commands.add_parser("tables")
    tables.add_argument("results", type=Path)
    tables.add_argument("--tpu-inference", type=Path, metavar="CLONE", help="a clone of vLLM's tpu-inference")
    tables.add_argument("--tokamax", type=Path, metavar="CLONE", help="a clone of OpenXLA's tokamax")
    tables.add_argument("--family", default="", help="only families whose name contains this")
    tables.add_argument("--problems", type=int, default=1000, help="the most problems of each family")
    tables.add_argument("--candidates", type=int, default=30)
    tables.add_argument("--seed", type=int, default=0)
    commands.add_parser("show").add_argument("results", type=Path)
    several = commands.add_parser("many")
    several.add_argument("results", type=Path)
    several.add_argument("--target", default="TPU v6e")
    replayed = commands.add_parser("search")
    replayed.add_argument("results", type=Path)
    replayed.add_argument("--seeds", type=int, default=50)
    options = parser.parse_args()
    if options.command == "documented":
        documented()
    elif options.command == "show":
        show(options.results)
    elif options.command == "many":
        many(options.results, options.target)
    elif options.command == "search":
        searches(options.results, options.seeds)
    else:
        with tempfile.TemporaryDirectory() as place:
            problems: list[Problem] = []
            for clone, kinds in (
                (options.tpu_inference, (quantized_matmuls, flash_attentions)),
                (options.tokamax, (splash_attentions,)),
            ):
                for kind in kinds if clone is not None else ():
                    problems += kind(clone, Path(place))
            problems = [each for each in problems if options.family in f"{each.family}, {each.target}"]
            estimate_tables(options.results, problems, options.candidates, options.problems, options.seed)


if __name__ == "__main__":
    main()
