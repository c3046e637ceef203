"""Compares `auto` with trying all configs, on JAX's own kernels; about half of their configs do not compile.

Each sweep has a fresh process. Before the clock starts, all imports are done and the arguments are on the device. Then
another process sweeps over the winners alone, several times. It needs an NVIDIA GPU of compute capability 9.0.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gzip
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jobs
import record_spaces
from record_spaces import Recipe

import quarantune

_ROUNDS = 9


def _ragged_dot() -> Callable[..., Any]:
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

    def ragged_dot(
        a: Any,
        b: Any,
        sizes: Any,
        block_m: int = 64,
        block_n: int = 64,
        block_k: int = 64,
        steps: int = 2,
        width: int = 1,
    ) -> Any:
        return ragged_dot_mgpu.ragged_dot(
            a,
            b,
            group_sizes=sizes,
            block_m=block_m,
            block_n=block_n,
            block_k=block_k,
            max_concurrent_steps=steps,
            grid_block_n=width,
        )

    return jax.jit(ragged_dot, static_argnames=["block_m", "block_n", "block_k", "steps", "width"])


def _mixed_matmul() -> Callable[..., Any]:
    from jax.experimental.pallas.ops.gpu import hopper_mixed_type_matmul_mgpu as mixed

    def matmul(
        a: Any,
        b: Any,
        tile_m: int = 64,
        tile_n: int = 64,
        tile_k: int = 64,
        steps: int = 2,
        minor: str = "N",
        width: int = 1,
        wg: str = "N",
    ) -> Any:
        config = mixed.TuningConfig(
            tile_m=tile_m,
            tile_n=tile_n,
            tile_k=tile_k,
            max_concurrent_steps=steps,
            grid_minor_dim=mixed.MatmulDimension[minor],
            grid_tile_width=width,
            wg_dimension=mixed.MatmulDimension[wg],
        )
        return mixed.mixed_matmul_kernel(a, b, out_dtype=b.dtype, config=config)

    return jax.jit(matmul, static_argnames=["tile_m", "tile_n", "tile_k", "steps", "minor", "width", "wg"])


def _attention() -> Callable[..., Any]:
    from jax.experimental.pallas.ops.gpu import attention

    def mha(q: Any, k: Any, v: Any, block_q: int = 64, block_k: int = 32, warps: int = 4, stages: int = 2) -> Any:
        blocks = attention.BlockSizes(block_q=block_q, block_k=block_k)
        return attention.mha(q, k, v, None, block_sizes=blocks, num_warps=warps, num_stages=stages)

    return jax.jit(mha, static_argnames=["block_q", "block_k", "warps", "stages"])


_HOPPER = record_spaces.RECIPES["hopper_matmul"]
_TILES = {name: values for name, values in _HOPPER.space.items() if name != "cluster"}
PROBLEMS = {
    "matmul": dataclasses.replace(_HOPPER, space=_TILES),
    "ragged dot": Recipe(
        kernel=_ragged_dot,
        space={
            "block_m": [64, 128, 192, 256],
            "block_n": [64, 128, 256],
            "block_k": [64, 128],
            "steps": [2, 4, 5, 6],
            "width": [1, 2, 4, 8, 16],
        },
        arrays=[((4096, 2048), "float16"), ((8, 2048, 4096), "float16"), ((8,), "int32")],
    ),
    "mixed matmul": Recipe(
        kernel=_mixed_matmul, space=_TILES, arrays=[((4096, 4096), "int8"), ((4096, 4096), "bfloat16")]
    ),
    "attention": Recipe(
        kernel=_attention,
        space={
            "block_q": [16, 32, 64, 128],
            "block_k": [16, 32, 64, 128, 256],
            "warps": [4, 8, 16],
            "stages": [1, 2, 3, 4, 5, 6],
        },
        arrays=[((2, 2048, 8, 256), "bfloat16")] * 3,
    ),
}


def sweep(*, name: str, options: dict[str, Any], keep: str = "") -> dict[str, Any]:
    """Tunes a kernel.

    Args:
        name: the kernel.
        options: the search, and its seed.
        keep: the file for the trials; empty to drop them.

    Returns:
        `sweep_s`, the seconds of the sweep, `config`, the winner, `tried`, `worked` and `stopped`.
    """
    problem = PROBLEMS[name]
    args = problem.arguments()
    tuner = quarantune.AutoTuner(problem.kernel(), problem.space, name="half_invalid", **options)
    start = time.perf_counter()
    result = tuner.run(*args)
    sweep_s = time.perf_counter() - start
    if keep:
        trials = [trial.to_json() | {"log_tail": "", "message": trial.message[:80]} for trial in result.trials]
        Path(keep).write_bytes(gzip.compress(json.dumps({"sweep_s": sweep_s, "trials": trials}).encode()))
    return {
        "sweep_s": sweep_s,
        "config": result.best_config,
        "tried": result.seen,
        "worked": sum(not trial.outcome.is_failure for trial in result.trials),
        "stopped": result.stopped,
        "size": result.space_size,
    }


def exhaust(*, name: str, configs: list[dict[str, Any]]) -> dict[str, Any]:
    """Times configs as a sweep does, with a cold cache, in several sweeps of these configs alone.

    Args:
        name: the kernel.
        configs: the configs.

    Returns:
        `configs` and `times_ms`, one list for each config, with its time in each sweep.
    """
    fn, args = PROBLEMS[name].kernel(), PROBLEMS[name].arguments()
    times: list[list[float]] = [[] for _ in configs]
    for turn in range(_ROUNDS):
        result = quarantune.AutoTuner(fn, configs, name=f"again_{turn}", ref_fn=None, search="exhaustive").run(*args)
        last = {str(trial.config): trial.time_ms for trial in (*result.trials, *result.finalists)}
        for config, of_one in zip(configs, times, strict=True):
            of_one.append(last[str(config)])
    return {"configs": configs, "times_ms": times}


def main() -> None:
    """Prints a line for each sweep, and at the end a row for each kernel."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="how often `auto` searches (default: 5)")
    parser.add_argument("--only", choices=list(PROBLEMS), action="append", help="one kernel; may be repeated")
    parser.add_argument("--keep", type=Path, metavar="DIRECTORY", help="keep the trials there")
    options = parser.parse_args()
    run = functools.partial(jobs.run, "half_invalid", platform="gpu")
    run("sweep", name="matmul", options={"search": "auto", "max_trials": 1})  # reads the files of all packages once
    header = ["kernel", "configs", "compile", "exhaustive", "`auto`, by seed", "ratio", "trials", "regret", "ended"]
    rows = [header, ["---"] * len(header)]
    for name in options.only or PROBLEMS:
        sweeps = []
        for turn in range(-1, options.seeds):
            chosen = {"search": "exhaustive"} if turn < 0 else {"search": "auto", "seed": turn}
            keep = str(options.keep.absolute() / f"{name.replace(' ', '_')}_{turn}.json.gz") if options.keep else ""
            sweeps.append(run("sweep", name=name, options=chosen, keep=keep))
            print(name, chosen, sweeps[-1], flush=True)
        configs = [each["config"] for each in sweeps]
        distinct = [config for at, config in enumerate(configs) if config not in configs[:at]]
        timed = run("exhaust", name=name, configs=distinct)
        times = [statistics.median(each) for each in timed["times_ms"]]
        print(name, dict(zip(map(str, distinct), times, strict=True)), flush=True)
        regrets = [times[distinct.index(config)] / min(times) - 1 for config in configs]
        whole, *searched = sweeps
        row = [
            name,
            str(whole["size"]),
            str(whole["worked"]),
            f"{whole['sweep_s']:.1f} s",
            ", ".join(f"{each['sweep_s']:.1f}" for each in searched) + " s",
            ", ".join(f"{each['sweep_s'] / whole['sweep_s']:.2f}" for each in searched),
            ", ".join(str(each["tried"]) for each in searched),
            ", ".join(f"{regret:.1%}" for regret in regrets[1:]) + f" (exhaustive {regrets[0]:.1%})",
            ", ".join(sorted({each["stopped"] for each in searched})),
        ]
        rows.append(row)
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    jobs.run_main(main)
