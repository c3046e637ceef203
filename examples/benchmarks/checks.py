"""Shows that a wrong config never wins, and measures the cost of comparing every config with the defaults.

Run it with `python examples/benchmarks/checks.py`; it uses a GPU if there is one. It fails if a wrong config wins or if
the comparison costs too much. The fastest sweep of each kind counts: other work, and the samples that
its noise costs, only make sweeps longer.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import kernels

import quarantune

REPEATS = 20
PAIRS = 7
MOST_SHARE = 0.10
MOST_SHARE_ON_A_GPU = 0.03
MOST_MS = 10.0
SIZE = 4096


def example(name: str) -> Any:
    """Returns an example from the parent directory as a module."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def covered(x, rows: int = 32):
    """Returns the sine of x for all full blocks of `rows` rows; the other rows stay zero."""

    def fill(block, out):
        part = jax.lax.dynamic_slice(x, (block * rows, 0), (rows, x.shape[1]))
        return jax.lax.dynamic_update_slice(out, jnp.sin(part), (block * rows, 0))

    return jax.lax.fori_loop(0, x.shape[0] // rows, fill, jnp.zeros_like(x))


def wrong_wins() -> int:
    """Returns the number of wins of the config that leaves out a quarter of the rows."""
    tuned = quarantune.autotune({"rows": [32, 64, 192]}, rep=5)(jax.jit(covered, static_argnames=["rows"]))
    x = jnp.ones((256, 256))
    return sum(tuned.tune(x).best_config == {"rows": 192} for _ in range(REPEATS))


def costs(fn: Any, space: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[float], list[float], int]:
    """Returns the seconds of sweeps without and with the comparison, taken in turn, and the number of configs."""
    kinds = {None: quarantune.autotune(space, name="free", ref_fn=None)(fn)}
    kinds["defaults"] = quarantune.autotune(space, name="compared")(fn)
    seconds: dict[Any, list[float]] = {None: [], "defaults": []}
    ran = 0
    for pair in range(PAIRS + 1):
        for kind, tuned in kinds.items():
            started = time.perf_counter()
            result = tuned.tune(*args, **kwargs)
            if pair:  # the first pair includes one-time start-up costs
                seconds[kind].append(time.perf_counter() - started)
            assert not set(result.failures) - {"slow"}, result.table()
            ran = len(result.trials)
    return seconds[None], seconds["defaults"], ran


def scaled(x, passes: int = 1, sign: int = 1):
    """Scales x back and forth: all configs compute the same, and their times differ like the times of kernels."""
    for _ in range(passes):
        x = jax.lax.optimization_barrier(x * jnp.asarray(2.0 * sign, x.dtype))  # keeps XLA from dropping and fusing
        x = jax.lax.optimization_barrier(x / jnp.asarray(2.0 * sign, x.dtype))
    return x


def main() -> int:
    """Prints the measurements, and returns the number of exceeded bounds."""
    exceeded = 0
    wins = wrong_wins()
    print(f"a config that computes 192 rows of 256 lost {REPEATS - wins} of {REPEATS} times")
    exceeded += wins > 0
    if jax.default_backend() == "cpu":
        matmul, attention = example("matmul").matmul.__wrapped__, example("attention").attention.__wrapped__
        a, b = (jax.random.normal(jax.random.key(seed), (512, 512)) for seed in (0, 1))
        heads = tuple(jax.random.normal(jax.random.key(seed), (4, 1024, 64)) for seed in range(3))
        sizes = {"BM": [32, 64, 128], "BN": [32, 128], "BK": [32, 64]}
        chunks = {"q_chunk": [16, 128, 1024], "k_chunk": [16, 128, 1024]}
        for name, fn, space, args, kwargs in (
            ("matmul", matmul, sizes, (a, b), {"interpret": True}),
            ("attention", attention, chunks, heads, {}),
        ):
            free, compared, ran = costs(fn, space, args, kwargs)
            share = min(compared) / min(free) - 1
            print(
                f"{name}: {ran} configs, {min(free):.2f} s without the comparison, "
                f"{min(compared):.2f} s with it: {share:+.1%}"
            )
            exceeded += share > MOST_SHARE
    else:
        args = kernels.PROBLEMS["gpu"].arguments(SIZE)
        free, compared, ran = costs(kernels.matmul_gpu, kernels.PROBLEMS["gpu"].space, args, {})
        share = min(compared) / min(free) - 1
        print(
            f"matmul of {SIZE}: {ran} configs, {min(free):.2f} s without the comparison, "
            f"{min(compared):.2f} s with it: {share:+.1%}"
        )
        exceeded += share > MOST_SHARE_ON_A_GPU
        fn = jax.jit(scaled, static_argnames=["passes", "sign"])
        x = jax.random.normal(jax.random.key(0), (SIZE, SIZE), jnp.float32)
        free, compared, ran = costs(fn, {"passes": list(range(1, 17)), "sign": [1, -1]}, (x,), {})
        ms = 1e3 * (min(compared) - min(free)) / ran
        print(f"{SIZE} x {SIZE}: {ran} configs, {min(free):.2f} s, and {ms:.1f} ms more for each compared")
        exceeded += ms > MOST_MS
    return exceeded


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        os.environ["QUARANTUNE_CACHE_DIR"] = directory
        os.environ.setdefault("QUARANTUNE_PROGRESS", "0")
        sys.exit(main())
