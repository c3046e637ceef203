"""Replays the choice of configs to compile fully, on the times from fidelity.py.

    python examples/benchmarks/fidelity_replay.py examples/benchmarks/fidelity_h100.json.gz [--set cheap] [--at-once 4]

For each program and margin it prints the number of configs to compile fully, and the regret: by how much the fastest of
them is slower than the fastest of all.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from quarantune.scheduler.screening import Screening
from quarantune.values.trial import Outcome, Trial

MARGINS = (1.0, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5)
_ALLOWED_REGRET = 0.01


class Replayed(NamedTuple):
    """One replay.

    Attributes:
        taken: the indices of the fully compiled configs.
        regret: by how much the fastest of them is slower than the fastest of all, as a share; None if none works.
        share: their share of the compile seconds of all full programs.
        paid: whether any config was ruled out.
    """

    taken: list[int]
    regret: float | None
    share: float
    paid: bool


def replay(configs: Sequence[Mapping[str, Any]], name: str, *, margin: float, at_once: int) -> Replayed:
    """Replays the choice among the configs of one program.

    Args:
        configs: the program's configs from the file of fidelity.py.
        name: the set of compiler options that ranks them.
        margin: factor on the smallest ratio of full to cheap time.
        at_once: the number of configs that compile at a time; they end in the order of their compile times.
    """
    full_ms = {index: config["ms"].get("full") for index, config in enumerate(configs)}
    full_s = {index: config["compile_s"].get("full") or 0.0 for index, config in enumerate(configs)}
    cheap_ms = {index: ms for index, config in enumerate(configs) if (ms := config["ms"].get(name)) is not None}
    # The first config of each program stands for the function's own defaults.
    screening = Screening(
        {index: config["config"] for index, config in enumerate(configs)}, cheap_ms, defaults=0, margin=margin
    )
    running: dict[int, float] = {}
    taken: list[int] = []
    now_s = 0.0
    while running or not screening.is_closed:
        for index in screening.take(at_once - len(running)):
            running[index] = now_s + full_s[index]
            taken.append(index)
        index = min(running, key=lambda each: running[each])
        now_s = running.pop(index)
        time_ms = full_ms[index]
        outcome = Outcome.ERROR if time_ms is None else Outcome.OK
        screening.ended(index, Trial(config=configs[index]["config"], outcome=outcome, time_ms=time_ms))
    works = {index: ms for index, ms in full_ms.items() if ms is not None}
    found = [works[index] for index in taken if index in works]
    regret = min(found) / min(works.values()) - 1 if found else None
    share = sum(full_s[index] for index in taken) / (sum(full_s.values()) or 1.0)
    return Replayed(taken, regret, share, any(screening.left.values()))


def main() -> None:
    """Prints a row for each program, and the worst and the sum of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--set", default="cheap", metavar="NAME", help="the compiler options that rank the configs")
    parser.add_argument("--at-once", type=int, default=4, metavar="N", help="configs that compile at a time")
    options = parser.parse_args()
    data = options.file.read_bytes()
    written = json.loads(gzip.decompress(data) if options.file.suffix == ".gz" else data)
    print(f"{written['device']}, jax {written['jax']}: full compiles and regret by margin, ranked by `{options.set}`")
    print(f"{'program':18} {'configs':>7}", *(f"{margin:>12}" for margin in MARGINS))
    studies = [
        study for study in written["programs"] if any(config["ms"].get(options.set) for config in study["configs"])
    ]
    sums: dict[float, list[Replayed]] = {margin: [] for margin in MARGINS}
    for study in studies:
        configs = study["configs"]
        for margin, replays in sums.items():
            replays.append(replay(configs, options.set, margin=margin, at_once=options.at_once))
        cells = (f"{len(replays[-1].taken):4}{_percent(replays[-1]):>8}" for replays in sums.values())
        print(f"{study['program']:18} {len(configs):7}", *cells)
    if not studies:
        return
    total = sum(len(study["configs"]) for study in studies)
    print(f"{'all':18} {total:7}", *(f"{sum(len(each.taken) for each in found):12}" for found in sums.values()))
    lines = {
        "share of compiling": lambda found: f"{sum(each.share for each in found) / len(found):.0%}",
        "worst regret": lambda found: f"{100 * max(each.regret or 0.0 for each in found):.1f}%",
        "regret above 1%": lambda found: str(sum((each.regret or 0.0) > _ALLOWED_REGRET for each in found)),
        "did not pay": lambda found: str(sum(not each.paid for each in found)),
    }
    for title, text in lines.items():
        print(f"{title:26}", *(f"{text(found):>12}" for found in sums.values()))


def _percent(replayed: Replayed) -> str:
    return "no time" if replayed.regret is None else f"{100 * replayed.regret:.1f}%"


if __name__ == "__main__":
    main()
