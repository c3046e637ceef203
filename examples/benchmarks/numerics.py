"""Shows which tunables change the bits of outputs, and what the bits of the defaults cost.

It makes the table of docs/determinism.md. `--check` runs every config in this process too, and compares its output with
that of the defaults, bit by bit. `--repeat` compares the time of bitwise sweeps with that of ordinary ones.

    python examples/benchmarks/numerics.py --check
    python examples/benchmarks/numerics.py --only matmul --repeat 5
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import kernels
import numpy as np
from jax.experimental.pallas.ops.gpu import attention as gpu_attention

import quarantune


@functools.partial(jax.jit, static_argnames=["bq", "bk", "nw", "ns"])
def flash_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, bq: int = 64, bk: int = 64, nw: int = 4, ns: int = 2
) -> jax.Array:
    """Runs JAX's own attention through Triton."""
    # Its backward pass takes blocks of its own; they are no tunables here.
    sizes = gpu_attention.BlockSizes(bq, bk, 32, 32, 32, 32)
    return gpu_attention.mha(q, k, v, None, block_sizes=sizes, num_warps=nw, num_stages=ns)


def _plain(name: str, size: int) -> Callable[[], tuple[Any, Any, Any]]:
    return lambda: (kernels.PROBLEMS[name].kernel, kernels.PROBLEMS[name].space, kernels.PROBLEMS[name].arguments(size))


def _attention(batch: int, length: int) -> tuple[Any, Any, Any]:
    shape, keys = (batch, length, 8, 64), jax.random.split(jax.random.key(0), 3)
    arguments = tuple(jax.random.normal(key, shape, jnp.bfloat16) for key in keys)
    return flash_attention, {"bq": [32, 64, 128], "bk": [32, 64, 128], "nw": [4, 8], "ns": [1, 2]}, arguments


PROBLEMS = {
    "gpu": {
        "matmul": _plain("gpu", 2048),
        "flash attention": functools.partial(_attention, 4, 1024),
        "mlp": _plain("mlp", 8192),
        "attention": _plain("attention", 4096),
    },
    "cpu": {
        "matmul": _plain("cpu", 256),
        "attention": _plain("attention", 2048),
    },
}


def bits_by_hand(kernel: Any, arguments: Any, result: quarantune.TuningResult) -> str:
    """Runs every config here, and returns how often `Trial.bits` agrees with a comparison of the outputs."""

    def words(config: dict[str, Any]) -> Any:
        output = np.asarray(kernel(*arguments, **config))
        return output.view(f"uint{8 * output.itemsize}")

    wanted, agree, known = words({}), 0, 0
    for trial in result.trials:
        if trial.bits is not None:
            is_same = bool((words(dict(trial.config)) == wanted).all())
            known, agree = known + 1, agree + (is_same == (trial.bits == "same"))
    return f"{agree} of {known} as compared by hand"


def sweep(kernel: Any, space: Any, arguments: Any, **options: Any) -> tuple[quarantune.TuningResult, float]:
    """Returns the result of a sweep that saves nothing, and its seconds."""
    with quarantune.settings(disable_cache=True, progress=False):
        began_s = time.perf_counter()
        result = quarantune.AutoTuner(kernel, space, **options).run(*arguments)
        return result, time.perf_counter() - began_s


def row(name: str, kernel: Any, space: Any, arguments: Any, *, checks: bool) -> list[str]:
    """Returns the row of one kernel."""
    result, _ = sweep(kernel, space, arguments)
    report, trials = result.bits(), result.trials
    told = report.lines[0].removeprefix("bits: ") if report.lines else ""
    same = f"{sum(trial.bits == 'same' for trial in trials)} of {sum(trial.bits is not None for trial in trials)}"
    price = "" if report.price is None else f"{report.price:.2f}x"
    gain = "" if result.speedup is None else f"{result.speedup:.2f}x"
    return [name, str(len(trials)), same, told, gain, price, bits_by_hand(kernel, arguments, result) if checks else ""]


def main() -> None:
    """Prints the table, row by row, and the times of sweeps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="the name of one kernel")
    parser.add_argument("--check", action="store_true", help="compare the outputs in this process, too")
    parser.add_argument("--repeat", type=int, default=0, metavar="N", help="time N bitwise and N ordinary sweeps")
    options = parser.parse_args()
    problems = PROBLEMS["cpu" if jax.default_backend() == "cpu" else "gpu"]
    chosen = {name: made for name, made in problems.items() if options.only in (None, name)}
    if not chosen:
        parser.error(f"--only {options.only}: give one of {', '.join(problems)}")
    heading = [
        "kernel",
        "configs",
        "with the defaults' bits",
        "bits change with",
        "best over defaults",
        "price",
        "check",
    ]
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, Python {sys.version.split()[0]}")
    print(f"| {' | '.join(heading)} |\n|{'---|' * len(heading)}")
    for name, made in chosen.items():
        print(f"| {' | '.join(row(name, *made(), checks=options.check))} |", flush=True)
    if options.repeat:
        for name, made in chosen.items():
            problem = made()
            sweep(*problem)  # the first sweep of a process starts its template
            times: dict[str, list[float]] = {"rounding": [], "bitwise": []}
            for _ in range(options.repeat):
                for numerics, taken_s in times.items():
                    taken_s.append(sweep(*problem, numerics=numerics)[1])
            medians = {numerics: statistics.median(taken_s) for numerics, taken_s in times.items()}
            ratio = medians["bitwise"] / medians["rounding"]
            told = ", ".join(f"{numerics} {median_s:.3f} s" for numerics, median_s in medians.items())
            print(f"{name}: {told}; bitwise / ordinary = {ratio:.3f}, medians of {options.repeat}")


if __name__ == "__main__":
    main()
