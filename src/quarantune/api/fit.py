"""Fits a rule on calls: tunes them, measures their good configs on each other, grows a tree, and saves it."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from quarantune.answers.answer import Situation
from quarantune.answers.layers import save
from quarantune.api.tuner import Tuner
from quarantune.cache import problems
from quarantune.calls.call import BoundCall
from quarantune.calls.key import KeyedCall, keyed_to_tune
from quarantune.engine.place import place_of
from quarantune.functions import versions
from quarantune.functions.binding import Arguments
from quarantune.results.result import TuningResult
from quarantune.rules import rule as rules
from quarantune.rules import tree
from quarantune.rules.rule import Rule
from quarantune.sweep.limits import SearchLimits
from quarantune.tuning.outcome import findings_now
from quarantune.tuning.verification import swept, times_of
from quarantune.values import blocks, options, texts
from quarantune.values.codec import JsonObject, as_json, is_number, is_whole, text_of
from quarantune.values.configs import Config
from quarantune.values.errors import TuningFailedError
from quarantune.values.settings import parse_setting
from quarantune.values.trial import Findings, Searched

_FEWEST = 3
"""Fewest calls of one kind that a rule is fitted on."""
_SMALL = 16
"""Size of the largest space that every call tries in full."""
_FIRST = 2
"""How many calls are searched widely, so that the others begin with good configs."""
_WIDE, _NARROW, _SHARE = 0.35, 0.1, 0.2
"""Shares of a larger space that these calls, and the others, try; and that all calls together try, with the configs
that they take over from each other. So fitting takes less than a quarter of the time of trying everything."""
_LEAST_TRIALS = 8
_ROUNDS = 3
"""How often the configs that a rule would choose are measured where they were not, before the next rule is fitted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitReport:
    """The rules that were fitted on some calls of one function.

    Attributes:
        name: the function's name in the cache.
        device: the kind of device.
        rules: the rules; one for each kind of call, which has the same parameters, ranks and JAX settings.
        skipped: the calls that no rule was fitted on, each with the reason.
        trials: how many configs were measured, over all calls.
        seconds: how long it took.
    """

    name: str
    device: str
    rules: tuple[Rule, ...]
    skipped: tuple[str, ...]
    trials: int
    seconds: float

    def __str__(self) -> str:
        """Returns the rules as indented conditions, with their expected losses."""
        lines = [f"  {line}" for rule in self.rules for line in rule.lines()]
        head = f"{self.name} on {self.device}: {self.trials} trials, {self.seconds:.0f} s"
        return "\n".join([head, *lines, *(f"  left out: {each}" for each in self.skipped)])


class _Row:
    """One call with its measured configs.

    Attributes:
        call: the call.
        weight: how much it counts.
        best: the text of its best config.
        times: the measured times by the text of the config, relative to the best; infinite for a failure.
        configs: the configs by their texts.
    """

    def __init__(self, call: KeyedCall, weight: float, result: TuningResult) -> None:
        self.call, self.weight, self.best = call, weight, text_of(result.best_config)
        found = times_of(result) | {self.best: result.time_ms}
        # A journal also has trials of earlier lists of configs.
        tried = {text_of(trial.config): trial.config for trial in result.trials} | {self.best: result.best_config}
        find = functools.partial(call.call.find, is_listed=True)
        self.configs: dict[str, Config] = {text: it for text, it in tried.items() if find(as_json(it)) is not None}
        self.times = {text: found[text] / result.time_ms for text in self.configs if text in found}

    def measure(self, wanted: Mapping[str, Config]) -> int:
        """Measures configs next to the best one, and returns how many."""
        bound = self.call.call
        here = {text: bound.find(as_json(config), is_listed=True) for text, config in wanted.items()}
        usable = {text: config for text, config in here.items() if config is not None and bound.keeps(config)}
        self.times |= dict.fromkeys(wanted, math.inf)
        if usable:
            try:
                found = times_of(swept(bound, [self.configs[self.best], *usable.values()], tune=tune_now))
            except TuningFailedError:
                found = {}
            if (best_ms := found.get(self.best, math.inf)) < math.inf:
                self.times |= {text: found.get(text, math.inf) / best_ms for text in usable}
        return len(usable)


class _Fitting:
    """Fits rules on calls, within a share of all trials and a time."""

    def __init__(self, tuner: Tuner, max_configs: int, max_loss: float, ends_s: float) -> None:
        self._tuner, self._max_configs, self._max_loss, self._ends_s = tuner, max_configs, max_loss, ends_s
        self.trials, self._most_trials = 0, 0
        self.skipped: list[str] = []

    def rows(self, calls: Sequence[tuple[KeyedCall, float]]) -> list[_Row]:
        """Returns the calls with the trials of a sweep each, those between the smallest and the largest last."""
        ordered = sorted(calls, key=lambda each: texts.call_size(each[0].arguments))
        rows = []
        for number, (call, weight) in enumerate([*ordered[-1:], *ordered[:-1]]):
            size, limits = call.call.configs.size or options.AUTO_MAX_TRIALS, JsonObject()
            self._most_trials += size if size <= _SMALL else math.ceil(_SHARE * size)
            if size > _SMALL:
                share = _WIDE if number < _FIRST else _NARROW
                limits = self._limits(max(_LEAST_TRIALS, math.ceil(share * size)))
            if self._ends_s < math.inf:
                limits["time_budget"] = max(self._ends_s - time.monotonic(), 1e-3)
            reason = "the time budget was over: fit again to continue"
            if time.monotonic() < self._ends_s:
                try:
                    with blocks.settings(on_miss="tune", record=None, **limits):
                        bound = self._tuner.bind(call.call.args, call.call.kwargs)
                        result = self._tuner.result(bound).with_trials()
                    self.trials += 0 if result.from_cache else len(result.trials)
                    rows.append(_Row(call, weight, result))
                    continue
                except TuningFailedError as error:
                    reason = f"no config works: {texts.first_line(error):.200}"
            self.skipped.append(f"{texts.call_text(call.arguments)}: {reason}")
        return rows

    def _limits(self, most: int) -> JsonObject:
        """Returns the settings of a search, which leave an author's or operator's own search and lower limit."""
        own = SearchLimits.of(self._tuner.function.options, blocks.current())
        search = {"search": options.SURROGATE} if own.search in (options.AUTO, options.EXHAUSTIVE) else {}
        return {"max_trials": min(most, own.max_trials or most), **search}

    def rule(self, rows: Sequence[_Row]) -> Rule:
        """Returns a rule for rows of one kind, and measures the times that its choice depends on."""
        good = Counter(text for row in rows for text, ratio in row.times.items() if ratio <= (1 + self._max_loss) ** 2)
        wanted: Sequence[Iterable[str]] = [[text for text, _ in good.most_common(self._max_configs)]] * len(rows)
        self._fill(rows, wanted)
        rule, wanted = self._fitted(rows)
        for _ in range(_ROUNDS):
            if self._fill(rows, wanted):
                rule, wanted = self._fitted(rows)
        return rule

    def _fitted(self, rows: Sequence[_Row]) -> tuple[Rule, list[list[str]]]:
        """Returns a rule, and for each row the configs that it answers, now and if the row is left out."""
        configs = {text: config for row in rows for text, config in row.configs.items()}
        columns = [text for text in configs if any(row.times.get(text, math.inf) < math.inf for row in rows)]
        times = np.array([[row.times.get(text, math.nan) for text in columns] for row in rows])
        rule, wanted = tree.fit(
            [(rules.leaves_in(it.call.id.key), texts.call_text(it.call.readable)[:300], it.weight) for it in rows],
            times / np.nanmin(times, axis=1, keepdims=True) - 1,
            [as_json(configs[text]) for text in columns],
            self._max_configs,
            self._max_loss,
        )
        return rule, [[columns[place] for place in places] for places in wanted]

    def _fill(self, rows: Sequence[_Row], wanted: Sequence[Iterable[str]]) -> bool:
        """Measures configs for the rows that lack them, as long as the budgets last; returns whether any was."""
        configs, before = {text: it for row in rows for text, it in row.configs.items()}, self.trials
        for row, those in zip(rows, wanted, strict=True):
            missing = {text: configs[text] for text in those if text not in row.times}
            if missing and self.trials + len(missing) < self._most_trials and time.monotonic() < self._ends_s:
                self.trials += row.measure(missing)
        return self.trials > before


def fit(
    tuner: Tuner,
    calls: Sequence[Arguments],
    weights: Sequence[float],
    max_configs: int,
    max_loss: float | str,
    time_budget: float | None,
) -> FitReport:
    """Fits rules on calls of a function, and saves them in the cache; see `Autotuned.fit`.

    Args:
        tuner: the tuner of the function.
        calls: the positional and keyword arguments of each call.
        weights: how much each call counts.
        max_configs: the most configs that a rule may choose between.
        max_loss: the largest loss of a call, in percent as a text, or as a share.
        time_budget: seconds after which nothing further is measured; None for no limit.

    Raises:
        TuningFailedError: No config works for any call.
        TypeError: A call sets a tunable, or the function does not take its arguments.
        ValueError: An argument is not valid, the calls are too few, or nothing can be saved.
    """
    began_s, name, kinds = time.monotonic(), tuner.function.name, dict[str, dict[str, tuple[KeyedCall, float]]]()
    share, budget_s = _share(max_loss), parse_setting("time_budget", "time_budget", time_budget)
    if not is_whole(max_configs, 1) or max_configs > rules.MOST_CONFIGS:
        wanted = f"a whole number from 1 to {rules.MOST_CONFIGS}"
        raise ValueError(f"max_configs={texts.shown(max_configs)} is not valid: give {wanted}")
    if not tuner.function.options.is_by_time:
        raise ValueError(f"{name}: fit compares times: leave out objective, or use tune")
    numerics = tuner.function.under(blocks.numerics_in_force()).options.numerics
    if numerics != options.ROUNDING:
        raise ValueError(
            f"{name}: fit makes rules for other calls than those it measures, and numerics={numerics!r} takes only "
            "configs that were compared for the call itself: leave out numerics (or QUARANTUNE_NUMERICS), or use tune"
        )
    if blocks.current().disable_cache:
        raise ValueError("the cache is off, so no rule could be saved: unset QUARANTUNE_DISABLE_CACHE")
    for args, weight in zip(calls, weights, strict=True):
        bound = tuner.bind(*args)
        call = keyed_to_tune(bound, place_of(Situation.of(bound).settings).device())
        alike = kinds.setdefault(rules.rule_key(call.id.key), {})
        alike[call.id.key] = call, weight + (alike[call.id.key][1] if call.id.key in alike else 0.0)
    if (most := max(map(len, kinds.values()))) < _FEWEST:
        raise ValueError(
            f"{name}: a rule needs {_FEWEST} different calls with the same parameters, not {most}: give more"
        )
    fitting, found = _Fitting(tuner, max_configs, share, began_s + (budget_s or math.inf)), list[Rule]()
    for key, alike in kinds.items():
        if len(alike) < _FEWEST or len(rows := fitting.rows([*alike.values()])) < _FEWEST:
            few = f"fewer than {_FEWEST} calls with its parameters and ranks have times"
            fitting.skipped += [f"{texts.call_text(call.arguments)}: {few}" for call, _ in alike.values()]
            continue
        found.append(fitting.rule(rows))
        _save(rows[0].call, key, found[-1])
    if not found:
        raise TuningFailedError(f"{name}: no rule was fitted: {'; '.join(fitting.skipped):.2000}", trials=(), key="")
    return FitReport(
        name=name,
        device=call.id.device,
        rules=tuple(found),
        skipped=tuple(fitting.skipped),
        trials=fitting.trials,
        seconds=time.monotonic() - began_s,
    )


def _share(max_loss: Any) -> float:
    """Returns a loss as a share.

    Raises:
        ValueError: It is neither percent nor a share.
    """
    share = max_loss
    if isinstance(max_loss, str):
        number, is_percent, _ = max_loss.partition("%")
        share = float(number) / 100 if is_percent and number.strip().replace(".", "", 1).isdigit() else None
    if not is_number(share) or not 0 <= share < 10:
        raise ValueError(f"max_loss={texts.shown(max_loss)} is not valid: give percent, as '3%', or a share, as 0.03")
    return share


def tune_now(call: BoundCall) -> TuningResult:
    """Tunes for a call of a function, and remembers nothing of it in other calls."""
    return Tuner(call.function).tune(call)


def _save(call: KeyedCall, key: str, rule: Rule) -> None:
    now = findings_now(call.call, Findings(), (), Searched())
    entry = {
        "config": {},
        "fingerprint": call.call.function.fingerprint.parts,
        "versions": versions.versions(),
        "created": now.created,
        rules.FIELD: rule.to_json(),
    }
    try:
        save(blocks.current(), call.id._replace(key=key), entry)
    except problems.CacheWriteError as error:
        problems.report_once(str(error))
