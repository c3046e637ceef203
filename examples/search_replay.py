"""Compares searches on recorded GPU spaces, without a device: how many trials until the best config is found?

    python examples/search_replay.py                                      # the recordings in examples/spaces
    python examples/search_replay.py my.json.gz cache_dir/matmul.trials   # one's own, or those of Kernel Tuner and KTT

At the end, one table has a row for each recording. Those in `examples/spaces` were made on an NVIDIA H200 by
`examples/benchmarks/record_spaces.py`.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

import quarantune

SPACES = Path(__file__).parent / "spaces"


def main() -> None:
    """Prints a table for each recording."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recorded", nargs="*", type=Path, help=f"recordings; without any, those in {SPACES}")
    parser.add_argument("--search", help="names of searches, separated by commas")
    parser.add_argument("--seeds", type=int, default=20, help="runs of each search")
    parser.add_argument("--batch", type=int, default=8, help="configs that are asked before they are told")
    parser.add_argument("--max-trials", type=int, default=400, help="trials of each run")
    options = parser.parse_args()
    recordings = options.recorded or sorted(SPACES.glob("*.json.gz"))
    if not recordings:
        sys.exit(
            f"there are no recordings in {SPACES}: make them with examples/benchmarks/record_spaces.py, or name some"
        )
    has_optuna = importlib.util.find_spec("optuna") is not None
    searches = options.search.split(",") if options.search else ["surrogate", "random", *["optuna:tpe"] * has_optuna]
    summary = []
    for recorded in recordings:
        result = quarantune.replay(
            recorded, searches, seeds=range(options.seeds), max_trials=options.max_trials, batch=options.batch
        )
        print(f"{recorded.name}: {result.table()}\n", flush=True)
        cells = [" / ".join(str(result.evaluations(name, share) or "-") for share in (0.5, 0.9)) for name in searches]
        summary.append([recorded.name.partition(".")[0], f"{result.size:,}", f"{result.invalid:.0%}", *cells])
    print(f"Trials until 50% / 90% of {options.seeds} runs had found a config within 1% of the best:\n")
    header = ["space", "configs", "fail", *searches]
    for row in (header, ["---"] * len(header), *summary):
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
