"""Replays `auto` on recorded spaces until it ends, without a device: after how many trials, how near to the best?

python examples/benchmarks/search_ends.py                # the recordings in examples/spaces
python examples/benchmarks/search_ends.py my.json.gz     # your recordings, or Kernel Tuner's and KTT's
"""

from __future__ import annotations

import argparse
import collections
import math
import runpy
import statistics
from pathlib import Path

from quarantune.results import replay
from quarantune.sweep.limits import SearchLimits
from quarantune.sweep.searching import Searching
from quarantune.values.codec import text_of
from quarantune.values.options import Options
from quarantune.values.settings import Settings
from quarantune.values.space import Space
from quarantune.values.trial import Outcome, Trial

_EXAMPLES = Path(__file__).parents[1]
_SPACES = _EXAMPLES / "spaces"


def best_ms(trials: list[Trial]) -> float:
    """Returns the best time of some trials."""
    return min(trial.merit or math.inf for trial in trials if trial.outcome is Outcome.OK)


def ended(space: Space, recorded: dict[str, Trial], seed: int, batch: int) -> tuple[str, list[Trial]]:
    """Runs a search to its end; returns the reason for the end and the trials."""
    limits = SearchLimits.of(Options(seed=seed), Settings()).resolved(space)
    searching, trials = Searching(limits, space), []
    while taken := searching.take(batch):
        for index, config in taken.items():
            trials.append(recorded[text_of(config)])
            searching.ended(index, trials[-1])
    return searching.stopped, trials


def main() -> None:
    """Prints a row for each recording."""
    read = runpy.run_path(str(_EXAMPLES / "search_replay.py"))["read"]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recorded", nargs="*", type=Path, help=f"recordings; by default all in {_SPACES}")
    parser.add_argument("--seeds", type=int, default=20, help="searches of each recording")
    parser.add_argument("--batch", type=int, default=8, help="configs that a search is asked for at a time")
    options = parser.parse_args()
    header = ["space", "configs", "fail", "trials, median and most", "ended", "within 0.5%", "within 1%", "worst"]
    for row in (header, ["---"] * len(header)):
        print(f"| {' | '.join(row)} |")
    for path in options.recorded or sorted(_SPACES.glob("*.json.gz")):
        trials = replay.read(read(path))
        space, recorded = (
            Space([trial.config for trial in trials]),
            {text_of(trial.config): trial for trial in trials},
        )
        runs = [ended(space, recorded, seed, options.batch) for seed in range(options.seeds)]
        counts = [len(found) for _, found in runs]
        regrets = [best_ms(found) / best_ms(trials) - 1 for _, found in runs]
        ends = collections.Counter(stopped for stopped, _ in runs)
        failures = sum(trial.outcome.is_failure for trial in trials) / len(trials)
        row = [
            path.name.partition(".")[0],
            f"{len(trials):,}",
            f"{failures:.0%}",
            f"{statistics.median(counts):.0f}, {max(counts)}",
            ", ".join(f"{stopped} {count}" for stopped, count in ends.most_common()),
            *(f"{sum(regret <= share for regret in regrets)} of {len(runs)}" for share in (0.005, 0.01)),
            f"{max(regrets):.1%}",
        ]
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
