"""Compares quarantune with the installed peers on this machine in one run, as README.md describes."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jobs
import kernels
import tables

_OURS = "quarantune"
_PEERS = {"tonno": "tonno", "tune-jax": "tune_jax"}
"""The name of each peer's distribution and of its module."""
_ROUNDS, _QUICK_ROUNDS = 15, 6
"""Number of rounds that time the configs close to the best."""


def main() -> None:
    """Runs every job, one after another, and prints each table when it is complete."""
    options, contenders, machine = prepare(__doc__)
    platform = machine["platform"]
    if platform not in kernels.PROBLEMS:
        sys.exit(f"these benchmarks have no kernel for a {platform}: give --platform cpu or --platform gpu")
    results: dict[str, Any] = {"machine": machine}
    problem = kernels.PROBLEMS[platform]
    for size in problem.quick_sizes if options.quick else problem.sizes:
        heading = f"A product of two {size} x {size} matrices of {problem.dtype}"
        results[str(size)] = compare_sweeps(heading, contenders, options, platform, platform, size)

    results["cached_calls"] = _run_in_turn(
        "cached_call", contenders, options.repeat, platform=platform, problem=platform
    )
    _print("A call that is tuned already, of two small arrays", tables.cached_calls(results["cached_calls"]))

    _say("what the sandbox costs")
    results["sandbox"] = jobs.run("overhead", "per_config", platform=platform, problem=platform, repeat=options.repeat)
    _print("What the sandbox costs, for a config that does next to nothing", tables.sandbox(results["sandbox"]))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


def compare_sweeps(
    heading: str, contenders: Sequence[str], options: argparse.Namespace, platform: str, problem: str, size: int
) -> dict[str, Any]:
    """Runs each contender's sweeps of a problem, prints their tables, and returns every number."""
    first, later = (
        _run_in_turn(
            "sweep", contenders, options.repeat, platform=platform, problem=problem, size=size, is_first=is_first
        )
        for is_first in (True, False)
    )
    _say(f"{size}: timing every config")
    rounds = _QUICK_ROUNDS if options.quick else _ROUNDS
    oracle = jobs.run("oracle", "exhaust", platform=platform, problem=problem, size=size, rounds=rounds)
    _print(
        heading,
        "A process's first sweep:",
        tables.sweeps(first, oracle, baseline=_OURS),
        "A later one:",
        tables.sweeps(later, oracle, baseline=_OURS),
        tables.about(oracle),
    )
    return {"first": first, "later": later, "oracle": oracle}


def prepare(description: str | None) -> tuple[argparse.Namespace, list[str], dict[str, Any]]:
    """Reads the options, and returns them with the contenders and the machine, which it describes."""
    options = _parse_arguments(description)
    if not importlib.util.find_spec(_OURS):
        sys.exit(f"{_OURS} is not installed here: run `pip install .` in its checkout")
    contenders = [_OURS, *(peer for peer, module in _PEERS.items() if importlib.util.find_spec(module))]
    try:
        machine = jobs.run("machine", "describe", platform=options.platform, distributions=contenders)
    except jobs.JobError as error:
        sys.exit(f"JAX has no device here for --platform {options.platform}: {error}")
    _introduce(machine, options)
    return options, contenders, machine


def _parse_arguments(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--platform", choices=["auto", "cpu", "gpu"], default="auto", help="default: JAX's choice")
    parser.add_argument("--repeat", type=_count, default=3, metavar="N", help="how often each tunes (default: 3)")
    parser.add_argument("--quick", action="store_true", help="small matrices, and fewer rounds to find the best config")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep every number there")
    return parser.parse_args()


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return count


def _introduce(machine: dict[str, Any], options: argparse.Namespace) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    print(f"{machine['device']}, {machine['cores']} CPU cores; Python {machine['python']}; {versions}")
    for peer in _PEERS:
        if peer not in machine["versions"]:
            print(f"{peer} is not installed here and left out: pip install {peer}")
    print(f"Medians of {options.repeat}" + (", quick mode" if options.quick else ""))


def _run_in_turn(
    function: str, contenders: Sequence[str], repeat: int, *, platform: str, **arguments: Any
) -> dict[str, list[dict[str, Any]]]:
    """Runs a job `repeat` times for each contender, in rotating order, and returns all results."""
    runs: dict[str, list[dict[str, Any]]] = {contender: [] for contender in contenders}
    about = "".join(f"{name} {value}: " for name, value in arguments.items())
    for turn in range(repeat):
        first = turn % len(contenders)
        for contender in [*contenders[first:], *contenders[:first]]:
            _say(f"{about}{contender}, {function.replace('_', ' ')} {turn + 1} of {repeat}")
            try:
                run = jobs.run("contenders", function, platform=platform, contender=contender, **arguments)
            except jobs.JobError as error:
                _say(str(error))
                run = {"error": str(error)}
            runs[contender].append(run)
    return runs


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _print(heading: str, *paragraphs: str) -> None:
    print(f"\n### {heading}", *paragraphs, sep="\n\n", flush=True)


if __name__ == "__main__":
    jobs.run_main(main)
