"""Tunes repeatedly next to busy processes, and counts the wrong choices.

    python examples/benchmarks/busy.py                    # 200 sweeps, two busy processes
    python examples/benchmarks/busy.py --space callable   # 20 sweeps of examples/callable.py, one busy process

It measures the true time of each config before and after, while the machine is quiet. The exit code is 0 if no choice
was wrong, 95% of the choices were within 3% of the best, and no config within 10% of the best was ruled out by a single
sample.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import quarantune

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import callable as plain  # examples/callable.py

_WRONG = 0.10
"""Share by which a choice must be slower than the best to be wrong."""
_CLOSE = 0.03
_WANTED = 0.95
_ORACLE_ROUNDS = 200
_ORACLE_S = 20.0


@dataclasses.dataclass(frozen=True)
class Space:
    """A space of configs and the ways to run it.

    Attributes:
        configs: the configs.
        bound: returns a config's function of no arguments, which returns when its work is done.
        tune: runs one sweep.
        sweeps: the number of sweeps by default.
        busy: the number of busy processes by default.
    """

    configs: list[dict[str, Any]]
    bound: Callable[[Mapping[str, Any]], Callable[[], object]]
    tune: Callable[[], quarantune.TuningResult]
    sweeps: int
    busy: int


def iterations() -> Space:
    """Returns a space whose one fast config is so short that busy processes disturb most of its samples."""
    configs = [{"turns": turns} for turns in (60, 80, 100, 2, 120, 150)]
    x = jnp.asarray(np.random.default_rng(0).standard_normal((64, 64), np.float32))

    @functools.partial(jax.jit, static_argnames=["turns"])
    def work(x: jax.Array, turns: int = 60) -> jax.Array:
        return jax.lax.fori_loop(0, turns, lambda _, y: jnp.tanh(y @ y), x)

    def bound(config: Mapping[str, Any]) -> Callable[[], object]:
        compiled = work.lower(x, **config).compile()
        return lambda: jax.block_until_ready(compiled(x))

    tuned = quarantune.autotune(configs, rep=10, name="busy-iterations", **_unchecked())(work)
    return Space(configs, bound, lambda: tuned.tune(x), sweeps=200, busy=2)


def callables() -> Space:
    """Returns the space of `examples/callable.py`, whose numpy matrix products run in spinning threads."""
    configs = list(quarantune.grid(rows=[1, 8, 64, 250], formula=["difference", "product"]))
    rng = np.random.default_rng(0)
    points, queries = (rng.normal(size=(1000, 8)).astype(np.float32) for _ in range(2))

    def bound(config: Mapping[str, Any]) -> Callable[[], object]:
        return lambda: plain.nearest(points, queries, **config)

    def tune() -> quarantune.TuningResult:
        # A new tuner without a cache remembers nothing.
        with quarantune.settings(disable_cache=True):
            return quarantune.AutoTuner(plain.nearest, configs, ref_fn=plain.one_by_one).run(points, queries)

    return Space(configs, bound, tune, sweeps=20, busy=1)


def _unchecked() -> dict[str, Any]:
    """Returns options that allow each config of a space to compute a different result."""
    return {"ref_fn": None}


SPACES = {"iterations": iterations, "callable": callables}


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Runs processes that each keep one core busy."""
    code = "print('busy', flush=True)\nwhile True: pass"
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE))
            stack.callback(process.kill)
            assert process.stdout is not None
            process.stdout.readline()
        yield


def quiet_times_ms(space: Space) -> list[float]:
    """Returns each config's time, the fastest of many runs, with all configs run in turn."""
    runs = [space.bound(config) for config in space.configs]
    least = [float("inf")] * len(runs)
    ends = time.monotonic() + _ORACLE_S
    for _ in range(_ORACLE_ROUNDS):
        for index, run in enumerate(runs):
            started = time.perf_counter()
            run()
            least[index] = min(least[index], 1e3 * (time.perf_counter() - started))
        if time.monotonic() > ends:
            break
    return least


def main() -> None:
    """Parses the command line, runs the sweeps and exits."""
    parser = argparse.ArgumentParser(description="Tunes next to busy processes and counts wrong choices.")
    parser.add_argument("--space", choices=SPACES, default="iterations")
    parser.add_argument("--sweeps", type=int, help="how many sweeps; default: 200, callable: 20")
    parser.add_argument("--busy", type=int, help="how many busy processes; default: 2, callable: 1")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        os.environ["QUARANTUNE_CACHE_DIR"] = directory
        sys.exit(0 if compare(SPACES[options.space](), options.sweeps, options.busy) else 1)


def compare(space: Space, sweeps: int | None, busy: int | None) -> bool:
    """Runs the sweeps, prints their choices, and returns whether the choices were good enough.

    Args:
        space: the space to tune.
        sweeps: the number of sweeps; None for the space's default.
        busy: the number of busy processes; None for the space's default.
    """
    sweeps, busy = space.sweeps if sweeps is None else sweeps, space.busy if busy is None else busy
    before = quiet_times_ms(space)
    started = time.monotonic()
    with busy_processes(busy):
        results = [space.tune() for _ in range(sweeps)]
    seconds = (time.monotonic() - started) / sweeps
    times_ms = np.minimum(before, quiet_times_ms(space))
    for config, time_ms in zip(space.configs, times_ms, strict=True):
        print(f"{time_ms:9.4f} ms  {config}")

    chosen = [space.configs.index(dict(result.best_config)) for result in results]
    regrets = times_ms[chosen] / times_ms.min() - 1
    wrong, close = int((regrets > _WRONG).sum()), int((regrets <= _CLOSE).sum())
    by_one = [
        f"sweep {number}: {trial.config} by {trial.samples_ms[0]:.4g} ms"
        for number, result in enumerate(results)
        for trial, time_ms in zip(result.trials, times_ms, strict=True)
        if trial.outcome == "slow" and len(trial.samples_ms) < 2 and time_ms <= (1 + _WRONG) * times_ms.min()
    ]
    for number, (index, regret) in enumerate(zip(chosen, regrets, strict=True)):
        if regret > _CLOSE:
            print(f"sweep {number}: chose {space.configs[index]}, {regret:.1%} slower than the best")
            print(results[number].table(width=120))
    print("\n".join(by_one))
    print(
        f"{sweeps} sweeps next to {busy} busy processes, {seconds:.2f} s each: {wrong} chose wrong, "
        f"{close} within {_CLOSE:.0%} of the best, {len(by_one)} good configs ruled out by one sample"
    )
    return wrong == 0 and close >= _WANTED * sweeps and not by_one


if __name__ == "__main__":
    main()
