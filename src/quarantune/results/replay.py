"""Runs searches against recorded trials, without a device, to compare how fast they find the best config."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from quarantune.cache import journal
from quarantune.cache.entries import entries_of
from quarantune.cache.file_names import problem_hash
from quarantune.cache.store import Store
from quarantune.results.result import TuningResult
from quarantune.results.saved_files import JSON
from quarantune.search import searches
from quarantune.values.codec import has_tag, is_number, is_whole, text_of
from quarantune.values.configs import Config
from quarantune.values.options import Search, check_search
from quarantune.values.space import Space
from quarantune.values.texts import call_text, columns, shown
from quarantune.values.trial import Outcome, Trial

Strategy: TypeAlias = "str | Callable[[list[Config], int], Search]"
"""The name of a search, or a function of the configs and a seed that makes one."""

_ROUNDING = 1e-9


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchRun:
    """One search with one seed.

    Attributes:
        seed: the seed.
        best_ms: the best time after each trial, in milliseconds; infinite until a config worked.
        evaluations: the number of trials until a config was within the tolerance of the best; None if none was.
        failures: the number of trials that failed.
        cpu_ms: CPU time of the search per trial, in milliseconds.
    """

    seed: int
    best_ms: tuple[float, ...]
    evaluations: int | None
    failures: int
    cpu_ms: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """Searches that ran against the same recorded trials.

    Attributes:
        size: the number of recorded configs.
        invalid: the share of the configs that fails.
        optimum_ms: the best recorded time, in milliseconds.
        within: the tolerance: a config counts as found if it takes at most this share longer.
        max_trials: the most trials of a run.
        runs: the runs of each search, by its name, in the order of the seeds.
    """

    size: int
    invalid: float
    optimum_ms: float
    within: float
    max_trials: int
    runs: dict[str, tuple[SearchRun, ...]]

    def evaluations(self, search: str, share: float = 0.9) -> int | None:
        """Returns the trials until this share of a search's runs had found the best; None if fewer runs ever did."""
        found = sorted(math.inf if run.evaluations is None else run.evaluations for run in self.runs[search])
        after = found[max(math.ceil(share * len(found) - _ROUNDING), 1) - 1]
        return None if after == math.inf else int(after)

    def table(self) -> str:
        """Returns the searches side by side."""
        header = ["search", "50% of runs", "90% of runs", "found", "worst end", "failed", "CPU per trial"]
        rows = [header, *(self._row(name, runs) for name, runs in self.runs.items())]
        about = (
            f"{self.size:,} configs, {self.invalid:.0%} of them fail; best {self.optimum_ms:.4g} ms;\n"
            f"trials until a config within {self.within:.2g} of it was found, of at most {self.max_trials}:"
        )
        return "\n".join([about, *columns(rows)])

    def _row(self, name: str, runs: tuple[SearchRun, ...]) -> list[str]:
        trials, worst = sum(len(run.best_ms) for run in runs), max((math.inf, *run.best_ms)[-1] for run in runs)
        return [
            name,
            *(str(self.evaluations(name, share) or f"over {self.max_trials}") for share in (0.5, 0.9)),
            f"{sum(run.evaluations is not None for run in runs)} of {len(runs)}",
            f"{worst / self.optimum_ms:.3f} x" if self.optimum_ms > 0 else f"{worst:.4g}",
            f"{sum(run.failures for run in runs) / max(trials, 1):.0%}",
            f"{statistics.median(run.cpu_ms for run in runs):.1f} ms",
        ]


def replay(
    recorded: Any,
    search: Strategy | Iterable[Strategy] = ("surrogate", "random"),
    *,
    seeds: Iterable[int] = range(20),
    max_trials: int = 400,
    batch: int = 8,
    within: float = 0.01,
) -> ReplayResult:
    """Runs searches against recorded trials: each config that a search asks gets its recorded outcome.

    Args:
        recorded: a `TuningResult`, a list of trials, the directory of a saved result or of a function's journals, or
            one journal.
        search: names such as `"surrogate"` or `"optuna:tpe"`, or functions of the configs and a seed that return an
            object with `ask` and `tell`.
        seeds: the seeds of the runs of each search.
        max_trials: the most trials of a run.
        batch: the number of configs that a search is asked for at a time.
        within: the tolerance: a config counts as found if it takes at most this share longer than the best.

    Returns:
        The runs; `table()` shows them side by side.

    Raises:
        TypeError: `recorded` or `search` is of another type.
        ValueError: nothing was recorded, a file is damaged, or an argument is out of range.
        OSError: a file cannot be read.

    Example:
        >>> trials = [Trial(config={"n": n}, outcome=Outcome.OK, time_ms=1.0 + abs(n - 20)) for n in range(64)]
        >>> found = replay(trials, ("surrogate", "random"), max_trials=64)
        >>> found.evaluations("surrogate") < found.evaluations("random")  # trials until 90 % of the runs found n=20
        True
    """
    strategies = _checked(search)
    if isinstance(seeds, str) or not isinstance(seeds, Iterable):
        raise TypeError(f"seeds is {shown(seeds)}: give several whole numbers, such as range(20)")
    seeds = list(seeds)
    for name, value in (("max_trials", max_trials), ("batch", batch), ("the number of seeds", len(seeds))):
        if not is_whole(value, 1):
            raise ValueError(f"{name} is {shown(value)}: give a whole number of at least 1")
    if odd := [seed for seed in seeds if not is_whole(seed, 0)]:
        raise ValueError(f"seeds holds {shown(odd[0])}: give whole numbers of at least 0, such as range(20)")
    if not is_number(within) or not 0 <= within < 1:
        raise ValueError(f"within is {shown(within)}: give a share from 0 to 1, such as 0.01")
    trials = read(recorded)
    space = Space([trial.config for trial in trials], fn_name="replay")
    by_config = {text_of(trial.config): trial for trial in trials}
    optimum_ms = min(map(_figure, trials))
    enough_ms = optimum_ms + abs(optimum_ms) * (within + _ROUNDING)

    def run(strategy: Strategy, seed: int) -> SearchRun:
        began = time.process_time()
        made = searches.make(strategy if isinstance(strategy, str) else strategy(list(space), seed), space, seed=seed)
        told: list[Trial] = []
        while len(told) < max_trials and (asked := made.ask(min(batch, max_trials - len(told)))):
            for config in asked:
                told.append(by_config[text_of(config)])
                made.tell(config, told[-1])
        spent_ms = 1e3 * (time.process_time() - began)
        figures = [_figure(trial) for trial in told]
        return SearchRun(
            seed=seed,
            best_ms=tuple(itertools.accumulate(figures, min)),
            evaluations=next((number for number, figure in enumerate(figures, 1) if figure <= enough_ms), None),
            failures=sum(trial.outcome.is_failure for trial in told),
            cpu_ms=spent_ms / max(len(told), 1),
        )

    runs = {name: tuple(run(strategy, seed) for seed in seeds) for name, strategy in strategies.items()}
    return ReplayResult(
        size=len(trials),
        invalid=sum(trial.outcome.is_failure for trial in trials) / len(trials),
        optimum_ms=optimum_ms,
        within=within,
        max_trials=max_trials,
        runs=runs,
    )


def _figure(trial: Trial) -> float:
    """Returns the figure of an `ok` trial, less is better; infinity for other trials. A figure may be negative."""
    return math.inf if trial.outcome is not Outcome.OK or trial.merit is None else trial.merit


def _checked(search: Strategy | Iterable[Strategy]) -> dict[str, Strategy]:
    """Returns the searches by their names.

    Raises:
        TypeError, ValueError: a search is neither a name nor a function, or two have the same name.
    """
    given: Sequence[Any] = [search] if isinstance(search, str) or not isinstance(search, Iterable) else list(search)
    if not given:
        raise ValueError("search is empty: give at least one name, such as ('surrogate', 'random')")
    named: dict[str, Strategy] = {}
    for strategy in given:
        if not callable(strategy):
            if not isinstance(strategy, str):
                raise TypeError(
                    f"search holds {shown(strategy)}: an object serves one run only, so give its name, or a function "
                    "of the configs and a seed that makes the object"
                )
            check_search(strategy)
        name = strategy if isinstance(strategy, str) else getattr(strategy, "__name__", str(strategy))
        if name in named:
            raise ValueError(f"search holds {name!r} twice: give each function another name, with def")
        named[name] = strategy
    return named


_NOT_TRIED = (Outcome.PRUNED, Outcome.NOT_RUN, Outcome.LOST)


def read(recorded: Any) -> list[Trial]:
    """Returns the trials of one problem, each config once, without those that were never tried.

    Args:
        recorded: a `TuningResult`; trials; the directory of a saved result or of a function's journals
            (`<name>.trials`), or one of its files.

    Raises:
        TypeError: `recorded` has another type.
        ValueError: it holds no times, it is damaged, or a directory holds the journals of several problems.
        OSError: it cannot be read.
    """
    if isinstance(recorded, TuningResult):
        trials, source = list(recorded.trials), "the result"
    elif isinstance(recorded, (str, os.PathLike)):
        trials, source = _read_path(Path(recorded)), str(recorded)
    elif isinstance(recorded, Iterable) and not isinstance(recorded, Mapping):
        trials, source = list(recorded), "the list"
        if odd := [trial for trial in trials if not isinstance(trial, Trial)]:
            raise TypeError(f"recorded holds {shown(odd[0])}, which is not a quarantune.Trial")
    else:
        raise TypeError(f"recorded is {shown(recorded)}: give a path, a TuningResult or a list of trials")
    last = {text_of(trial.config): trial for trial in trials if trial.outcome not in _NOT_TRIED}
    if all(_figure(trial) == math.inf for trial in last.values()):
        raise ValueError(f"{source} holds no measured trial, so there is nothing to search for")
    return [dataclasses.replace(trial, config=_plain(trial.config)) for trial in last.values()]


def _read_path(path: Path) -> list[Trial]:
    if path.is_dir():
        is_result = (path / JSON).exists()
        return list(TuningResult.load(path).trials) if is_result else _read_journals(path)
    if path.suffix == ".jsonl" or not path.exists():
        return _read_journal(path)
    raise ValueError(
        f"{path} is neither a journal (.jsonl) nor a directory: examples/search_replay.py reads files of other tuners"
    )


def _read_journals(directory: Path) -> list[Trial]:
    problems: dict[str, tuple[str, list[Trial]]] = {}
    # A glob would find nothing, and raise nothing, if the directory cannot be read.
    for file in sorted(file for file in directory.iterdir() if file.suffix == ".jsonl"):
        if trials := _read_journal(file):
            problems.setdefault(file.name.partition(".")[0], (file.name, []))[1].extend(trials)
    if not problems:
        raise ValueError(f"{directory} holds neither a saved result nor a journal of trials")
    if len(problems) > 1:
        place = directory.absolute()
        name = place.name.removesuffix(".trials")
        entries = entries_of(name, Store(place.parent, read_only=True).read(name))
        calls = {
            problem_hash(key.device, key.problem_size): f"{name}({call_text(entry.get('key_values'))}) on {key.device}"
            for key, entry in entries
        }
        listed = "; ".join(
            f"{calls.get(problem, 'a call without a result')} "
            f"({len(trials)} trial{'' if len(trials) == 1 else 's'} in {file})"
            for problem, (file, trials) in problems.items()
        )
        raise ValueError(f"{directory} holds the journals of {len(problems)} problems; give the path of one: {listed}")
    ((_, trials),) = problems.values()
    return trials


def _read_journal(file: Path) -> list[Trial]:
    """Returns the trials of a journal; it skips other records, such as notes on configs that hung."""
    try:
        return [Trial.from_json(record["trial"]) for record in journal.read(file) if "trial" in record]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the journal {file} is damaged: {error}") from error


def _plain(config: Config) -> Config:
    """Returns a config with text in place of values that JSON alone cannot restore, such as enum members."""
    return {name: text_of(value) if has_tag(value) else value for name, value in config.items()}
