"""Compares sweeps that rank configs by a cheap compile with sweeps that compile all of them fully, and with tonno.

Each sweep is the first of a fresh process, with separate caches. The first full sweep is the oracle. If another sweep
has another winner, other processes time both winners in turn.

    python examples/benchmarks/fidelity_sweeps.py --repeat 3 attention_24 mlp_18   # one NVIDIA GPU, about 4 minutes
    python examples/benchmarks/fidelity_sweeps.py                                  # all other programs
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fidelity
import jobs

_ISSUE = {"attention_24": "attention", "mlp_18": "mlp"}
"""The programs of kernels.py by their names here."""
_ORACLES = 3
"""Number of processes that time two different winners."""


def _program(name: str) -> tuple[Any, list[dict[str, Any]], Any]:
    """Returns a jitted function, its configs, and arguments on the device."""
    import jax
    import kernels
    from fidelity_programs import PROGRAMS

    if name in _ISSUE:
        case = kernels.PROBLEMS[_ISSUE[name]]
        (size,) = case.sizes
        return case.kernel, kernels.grid(case.space), case.arguments(size)
    recipe = PROGRAMS[name]
    names = dict.fromkeys(each for config in recipe.configs for each in config)
    own = {each: inspect.signature(recipe.fn).parameters[each].default for each in names}
    configs = [{**own, **config} for config in recipe.configs]
    jitted = jax.jit(recipe.fn, static_argnames=[*names])
    return jitted, configs, fidelity.arguments(recipe, small=False)


def sweep(*, program: str, how: str) -> dict[str, Any]:
    """Makes the first call of a tuned function.

    Args:
        program: the program's name.
        how: the fidelity, or `tonno`.

    Returns:
        The seconds, the winner, and the trials with their times.
    """
    import jax

    import quarantune

    fn, configs, args = _program(program)
    if how == "tonno":
        tuned = importlib.import_module("tonno").autotune(configs)(fn)
        start = time.perf_counter()
        jax.block_until_ready(tuned(*args))
        return {"sweep_s": time.perf_counter() - start, "trials": []}
    tuned = quarantune.autotune(configs, fidelity=how)(fn)
    start = time.perf_counter()
    result = tuned.tune(*args)
    jax.block_until_ready(tuned(*args))
    return {
        "sweep_s": time.perf_counter() - start,
        "config": dict(result.best_config),
        "trials": [[trial.outcome.value, trial.time_ms, trial.cheap_ms, trial.message] for trial in result.trials],
    }


def in_turn(*, program: str, configs: Sequence[dict[str, Any]]) -> list[float]:
    """Times configs in turn, and returns their median milliseconds."""
    import jax

    fn, _, args = _program(program)
    programs = {index: jax.jit(_bound(fn, config)).lower(*args).compile() for index, config in enumerate(configs)}
    for each in programs.values():
        jax.block_until_ready(each(*args))
    times = fidelity.time_in_turn(programs, args, until=time.monotonic() + 3)
    return [times[index] for index in programs]


def _bound(fn: Any, config: dict[str, Any]) -> Any:
    return lambda *args: fn(*args, **config)


def _compare(program: str, hows: Sequence[str], platform: str, oracle: dict[str, Any] | None) -> dict[str, Any]:
    """Runs one sweep of each kind, and returns their times and winners; `oracle` is an earlier full sweep."""
    found = {how: jobs.run("fidelity_sweeps", "sweep", platform=platform, program=program, how=how) for how in hows}
    best = (oracle or found["full"])["config"]
    found["regret"] = _regret(program, found["auto"]["config"], best, platform)
    return found


def _regret(program: str, ours: dict[str, Any], best: dict[str, Any], platform: str) -> float:
    """Returns the share by which our winner is slower than another: the median of processes that compile both anew.

    XLA chooses kernels by their times: two compilations of one program differed by 3% in time.
    """
    if ours == best:
        return 0.0
    arguments: dict[str, Any] = {"program": program, "configs": [ours, best], "platform": platform}
    rounds = [jobs.run("fidelity_sweeps", "in_turn", **arguments) for _ in range(_ORACLES)]
    return statistics.median(ours_ms / best_ms - 1 for ours_ms, best_ms in rounds)


def _row(program: str, rounds: Sequence[dict[str, Any]], hows: Sequence[str]) -> str:
    seconds = {how: statistics.median(found[how]["sweep_s"] for found in rounds if how in found) for how in hows}
    trials = rounds[-1]["auto"]["trials"]
    ratios = sorted(ms / cheap_ms for _, ms, cheap_ms, _ in trials if ms and cheap_ms)
    fully = sum(cheap_ms is None or ms is not None for _, ms, cheap_ms, _ in trials)
    outcomes = [outcome for outcome, *_ in trials if outcome not in ("ok", "slow")]
    spread = f"{ratios[0]:.2f} {statistics.median(ratios):.2f} {ratios[-1]:.2f}" if ratios else "not ranked"
    return " ".join(
        [
            f"{program:18} {len(trials):7} {fully:6} {spread:>15}",
            *(f"{seconds[how]:7.2f}" for how in hows),
            *(f"{seconds['auto'] / seconds[how]:6.2f}" for how in hows if how != "auto"),
            f"{100 * max(found['regret'] for found in rounds):+7.1f}%",
            *outcomes,
        ]
    )


def main() -> None:
    """Measures the programs and prints a row for each."""
    from fidelity_programs import PROGRAMS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", metavar="PROGRAM")
    parser.add_argument("--platform", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--repeat", type=int, default=1, help="sweeps of each kind; the table shows medians")
    parser.add_argument("--budget", type=float, default=1e9, metavar="S", help="seconds for all programs")
    parser.add_argument("--json", type=Path, help="write every number to this file")
    options = parser.parse_args()
    hows = ["auto", "full"]
    if importlib.util.find_spec("tonno") is not None:
        hows.append("tonno")
    else:
        print("tonno is not installed", file=sys.stderr)
    titles = [*(f"{how:>7}" for how in (f"{how} s" for how in hows)), *(f"/{how:>5}" for how in hows[1:])]
    print(f"{'program':18} {'configs':>7} {'fully':>6} {'full/cheap':>15}", *titles, f"{'regret':>8}", flush=True)
    everything: dict[str, list[dict[str, Any]]] = {}
    for program in options.programs or [*PROGRAMS]:
        these = hows if program in _ISSUE else hows[:2]
        try:
            oracle = None
            for _ in range(options.repeat):
                if time.monotonic() - _BEGAN > options.budget:
                    break
                # Next to tonno, one full sweep suffices.
                now = [how for how in these if how != "full" or oracle is None or "tonno" not in these]
                found = _compare(program, now, options.platform, oracle)
                oracle = oracle or found["full"]
                everything.setdefault(program, []).append(found)
        except jobs.JobError as error:
            print(f"{program}: {error}", flush=True)
        if program in everything:
            print(_row(program, everything[program], these), flush=True)
        if options.json:
            options.json.write_text(json.dumps(everything) + "\n")


_BEGAN = time.monotonic()

if __name__ == "__main__":
    jobs.run_main(main)
