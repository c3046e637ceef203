"""Tunes tokamax's operations for Hopper GPUs with quarantune and with tokamax's own autotuner, over tokamax's configs.

Each sweep has a fresh process. Before the clock starts, all imports are done and the arguments are on the device. Then
another process times both choices in turn by device time. It needs tokamax (Python 3.12, JAX 0.11 or newer) and an
NVIDIA GPU of compute capability 9.0.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jobs
import numpy as np
import oracle
import tables

import quarantune

_SHAPES = {
    "Mosaic attention": [(2, 4096, 16, 128)] * 3,
    "Triton attention": [(2, 2048, 16, 64)] * 3,
    "Mosaic ragged dot": [(8192, 2048), (8, 2048, 4096)],
}
_OPS = {
    "Mosaic attention": ("attention.pallas_mosaic_gpu", "PallasMosaicGpuFlashAttention"),
    "Triton attention": ("attention.pallas_triton", "PallasTritonFlashAttention"),
    "Mosaic ragged dot": ("ragged_dot.pallas_mosaic_gpu", "PallasMosaicGpuRaggedDot"),
}
"""The module and the class of each operation."""
_ROUNDS = 5
_PREPARED_S = 3.0
"""After a sweep, quarantune imports tokamax once more, for all later ones."""


def _problem(name: str) -> tuple[Any, tuple[jax.Array, ...], dict[str, Any]]:
    """Returns an operation with its arguments and keyword arguments, on the device."""
    module, cls = _OPS[name]
    op = getattr(importlib.import_module(f"tokamax._src.ops.{module}"), cls)()
    rng = np.random.default_rng(0)
    args = tuple(jax.device_put(rng.standard_normal(shape, np.float32).astype("bfloat16")) for shape in _SHAPES[name])
    if "ragged" not in name:
        return op, args, {}
    (rows, _), (groups, _, _) = _SHAPES[name]
    return op, args, {"group_sizes": jax.device_put(np.full(groups, rows // groups, np.int32))}


def _function(op: Any, configs: Sequence[Any], keywords: dict[str, Any]) -> Any:
    """Returns the operation as a function whose tunable is the place of a config; -1 leaves the choice to tokamax."""

    @functools.partial(jax.jit, static_argnames=["place"])
    def run(*args: Any, place: int = -1) -> Any:
        return op.replace(config=configs[place] if place >= 0 else None)(*args, **keywords)

    return run


def sweep(*, contender: str, name: str, is_first: bool) -> dict[str, Any]:
    """Tunes an operation.

    Args:
        contender: `quarantune` or `tokamax`.
        name: the operation's name.
        is_first: whether this is the process's first sweep; otherwise the contender has tuned one config before.

    Returns:
        `sweep_s`, the sweep's seconds, `config`, the choice's place among the configs, and `working`, the number of
        configs that work.
    """
    op, args, keywords = _problem(name)
    bound = op.bind(*args, **keywords)
    configs = sorted(bound.autotuning_configs, key=repr)
    run = _function(op, configs, keywords)
    if not is_first:
        if contender == "tokamax":
            bound.autotune(set(configs[:1]), cache_results=False)
        else:
            quarantune.autotune({"place": [0]}, name="warm-up")(run).tune(*args)
            time.sleep(_PREPARED_S)
    start = time.perf_counter()
    if contender == "tokamax":
        data = bound.autotune(set(configs), cache_results=False)
        working = sum(not isinstance(found, Exception) for found in data.values())
        place = configs.index(data.fastest_config)
    else:
        result = quarantune.autotune({"place": range(len(configs))}, name=name)(run).tune(*args)
        working = sum(trial.outcome in ("ok", "slow", "pruned") for trial in result.trials)
        place = result.best_config["place"]
    return {"sweep_s": time.perf_counter() - start, "config": {"place": place}, "working": working}


def exhaust(*, name: str, configs: list[dict[str, Any]]) -> dict[str, Any]:
    """Times configs in turn, by device time; returns `configs` and `times_ms`, one list of rounds for each."""
    op, args, keywords = _problem(name)
    run = _function(op, sorted(op.bind(*args, **keywords).autotuning_configs, key=repr), keywords)
    compiled = [run.lower(*args, **config).compile() for config in configs]
    times: list[list[float]] = [[] for _ in configs]
    for _ in range(_ROUNDS):
        for program, of_one in zip(compiled, times, strict=True):
            of_one.append(oracle.device_ms(program, args))
    return {"configs": configs, "times_ms": times}


def main() -> None:
    """Prints a table for each operation when it is complete."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="how often each tunes (default: 3)")
    parser.add_argument("--only", choices=list(_OPS), help="one operation")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep every number there")
    options = parser.parse_args()
    contenders = ["quarantune", "tokamax"]
    print(json.dumps(jobs.run("machine", "describe", platform="gpu", distributions=["tokamax", *contenders[:1]])))
    results: dict[str, Any] = {}
    for name in [options.only] if options.only else _OPS:
        runs: dict[bool, dict[str, list[Any]]] = {
            is_first: {who: [] for who in contenders} for is_first in (True, False)
        }
        for turn in range(options.repeat):
            for is_first, of_kind in runs.items():
                for contender in contenders[:: -1 if turn % 2 else 1]:
                    try:
                        found = jobs.run(
                            "tokamax_ops", "sweep", platform="gpu", contender=contender, name=name, is_first=is_first
                        )
                    except jobs.JobError as error:
                        found = {"error": str(error)}
                    of_kind[contender].append(found)
        chosen = [
            run["config"]
            for of_kind in runs.values()
            for of_one in of_kind.values()
            for run in of_one
            if "config" in run
        ]
        distinct = [config for index, config in enumerate(chosen) if config not in chosen[:index]]
        timed = jobs.run("tokamax_ops", "exhaust", platform="gpu", name=name, configs=distinct)
        results[name] = {"runs": {str(key): value for key, value in runs.items()}, "timed": timed}
        working = {who: [run.get("working") for run in of_one] for who, of_one in runs[False].items()}
        best = [f"{statistics.median(times):.4f} ms" for times in timed["times_ms"]]
        print(f"\n### {name}: configs that work: {working}; the choices take {', '.join(best)}")
        for is_first, of_kind in runs.items():
            print("\nA process's first sweep:\n" if is_first else "\nA later one:\n")
            print(tables.sweeps(of_kind, timed, baseline="quarantune"), flush=True)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    jobs.run_main(main)
