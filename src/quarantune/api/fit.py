"""Fits a rule on calls: tunes them, measures their good configs on each other, grows a tree, and saves it."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from quarantune.answers.answer import Situation
from quarantune.answers.layers import open_store
from quarantune.api.tune_for import TOTAL, WORST
from quarantune.api.tuner import Tuner
from quarantune.cache import problems
from quarantune.cache.problems import CacheWriteError
from quarantune.calls.key import KeyedCall, keyed_to_tune
from quarantune.engine.place import place_of
from quarantune.functions import versions
from quarantune.functions.binding import Arguments
from quarantune.results.result import TuningResult
from quarantune.rules import tree
from quarantune.rules.rule import FIELD, MOST_CONFIGS, Rule, leaves_in, rule_key
from quarantune.sweep.limits import SearchLimits
from quarantune.tuning.outcome import findings_now
from quarantune.tuning.verification import swept, times_of
from quarantune.values import blocks
from quarantune.values.codec import JsonObject, as_json, is_number, is_whole, text_of
from quarantune.values.configs import Config
from quarantune.values.options import AUTO, AUTO_MAX_TRIALS, EXHAUSTIVE, SURROGATE
from quarantune.values.settings import parse_setting
from quarantune.values.texts import call_text, printable, shown
from quarantune.values.trial import Findings, Searched, TuningFailedError

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
    skipped: tuple[tuple[str, str], ...] = ()
    trials: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        """Returns the rules as indented conditions, with their expected losses."""
        lines = [f"{self.name} on {self.device}: {self.trials} trials, {self.seconds:.0f} s"]
        for rule in self.rules:
            lines += [f"  {line}" for line in rule.lines()]
        return "\n".join([*lines, *(f"  left out: {call}: {reason}" for call, reason in self.skipped)])

    def to_dict(self) -> JsonObject:
        """Returns the report as JSON-able data."""
        fields = {name: getattr(self, name) for name in ("name", "device", "skipped", "trials", "seconds")}
        return fields | {"rules": [rule.to_json() for rule in self.rules]}


@dataclasses.dataclass(frozen=True)
class FitAim(tree.Aim):
    """The aim of a rule, and the seconds for fitting it."""

    time_budget_s: float = math.inf


def aim_of(max_configs: Any, max_loss: Any, by: Any, time_budget: Any = None) -> FitAim:
    """Returns the aim of a rule as a user gives it.

    Raises:
        ValueError: A value is not valid.
    """
    if not is_whole(max_configs, 1) or max_configs > MOST_CONFIGS:
        raise ValueError(f"max_configs={shown(max_configs)} is not valid: give a whole number from 1 to {MOST_CONFIGS}")
    share = max_loss
    if isinstance(max_loss, str) and max_loss.strip().endswith("%"):
        try:
            share = float(max_loss.strip()[:-1]) / 100
        except ValueError:
            share = None
    if not is_number(share) or not 0 <= share < 10:
        raise ValueError(f"max_loss={shown(max_loss)} is not valid: give percent, as '3%', or a share, as 0.03")
    if by not in (TOTAL, WORST):
        raise ValueError(f"by={shown(by)} is not valid: give {TOTAL!r} or {WORST!r}")
    budget_s = parse_setting("time_budget", "time_budget", time_budget)
    return FitAim(max_configs, float(share), by, math.inf if budget_s is None else budget_s)


class _Row:
    """One call with its measured configs.

    Attributes:
        call: the call.
        weight: how much it counts.
        times: the measured times by the text of the config, relative to the best; infinite for a failure.
        configs: the configs by their texts.
    """

    def __init__(self, call: KeyedCall, weight: float, result: TuningResult) -> None:
        self.call, self.weight, self.configs = call, weight, dict[str, Config]()
        self.best_ms = result.time_ms
        self.configs |= {text_of(trial.config): trial.config for trial in result.trials}
        self.times = {text: time_ms / result.time_ms for text, time_ms in times_of(result).items()}
        self.best = text_of(result.best_config)
        self.times[self.best] = 1.0
        self.configs.setdefault(self.best, result.best_config)

    def usable(self, config: Config) -> Config | None:
        """Returns a config if the call has it and `prune_fn` accepts it."""
        found = self.call.call.find(as_json(config), is_listed=True)
        return found if found is not None and self.call.call.keeps(found) else None

    def measure(self, wanted: Mapping[str, Config]) -> int:
        """Measures configs next to the best one, and returns how many."""
        usable = {text: found for text, config in wanted.items() if (found := self.usable(config)) is not None}
        self.configs |= usable
        self.times |= dict.fromkeys(wanted.keys() - self.times.keys(), math.inf)
        best = self.usable(self.configs[self.best])
        if not usable or best is None:
            return 0
        try:
            result = swept(self.call.call, [best, *usable.values()], lambda call: Tuner(call.function).tune(call))
        except TuningFailedError:
            return len(usable)
        times_ms = times_of(result)
        anchor_ms = times_ms.get(self.best, math.inf)
        if anchor_ms < math.inf:
            self.times |= {text: times_ms.get(text, math.inf) / anchor_ms for text in usable}
        return 1 + len(usable)

    def losses(self, columns: Iterable[str]) -> list[float]:
        """Returns the loss of each config; NaN for a config that was not measured."""
        least = min(self.times.values())
        return [self.times.get(text, math.nan) / least - 1 for text in columns]


class _Fitting:
    """Fits rules on calls, within a share of all trials and a time."""

    def __init__(self, tuner: Tuner, aim: tree.Aim, ends_s: float) -> None:
        self.tuner, self.aim, self.ends_s = tuner, aim, ends_s
        self.trials, self.most_trials = 0, 0
        self.skipped: list[tuple[str, str]] = []

    def rows(self, calls: Sequence[KeyedCall], weights: Sequence[float]) -> list[_Row]:
        """Returns the calls with the trials of a sweep each. Distant calls come first, to serve those between them."""
        rows = list[_Row]()
        for number, index in enumerate(_spread(calls, weights)):
            call = calls[index]
            size = call.call.configs.size or AUTO_MAX_TRIALS
            self.most_trials += size if size <= _SMALL else math.ceil(_SHARE * size)
            share = _WIDE if number < _FIRST else _NARROW
            limits: Any = {} if size <= _SMALL else self._limits(max(_LEAST_TRIALS, math.ceil(share * size)))
            if self.ends_s < math.inf:
                limits["time_budget"] = max(self.ends_s - time.monotonic(), 1e-3)
            if self.ends_s <= time.monotonic():
                self.skipped.append((call_text(call.arguments), "the time budget was over: fit again to continue"))
                continue
            try:
                with blocks.settings(on_miss="tune", record=None, **limits):
                    bound = self.tuner.bind(call.call.args, call.call.kwargs)
                    result = self.tuner.result(bound).with_trials()
            except TuningFailedError as error:
                self.skipped.append((call_text(call.arguments), f"no config works: {printable(str(error)):.200}"))
                continue
            self.trials += 0 if result.from_cache else len(result.trials)
            rows.append(_Row(call, weights[index], result))
        return rows

    def _limits(self, most: int) -> JsonObject:
        """Returns the settings of a search, which leave an author's or operator's own search and lower limit."""
        own = SearchLimits.of(self.tuner.function.options, blocks.current())
        search = {"search": SURROGATE} if own.search in (AUTO, EXHAUSTIVE) else {}
        return {"max_trials": most if own.max_trials is None else min(most, own.max_trials), **search}

    def rule(self, rows: Sequence[_Row]) -> Rule:
        """Returns a rule for rows of one kind, and measures what its choice depends on."""
        self._fill(rows, [self._promising(rows)] * len(rows))
        for _ in range(_ROUNDS):
            fitted, columns = self._fit(rows)
            if not self._fill(rows, [[columns[place] for place in wanted] for wanted in fitted.wanted]):
                break
        return self._fit(rows)[0].rule

    def _fit(self, rows: Sequence[_Row]) -> tuple[tree.Fitted, list[str]]:
        configs = {text: config for row in rows for text, config in row.configs.items()}
        columns = [text for text in configs if any(row.times.get(text, math.inf) < math.inf for row in rows)]
        table = np.array([row.losses(columns) for row in rows])
        by_total = self.aim.by == TOTAL
        fitted = tree.fit(
            [leaves_in(row.call.id.key) for row in rows],
            [call_text(row.call.readable)[:300] for row in rows],
            table,
            [as_json(configs[text]) for text in columns],
            [row.weight * (row.best_ms if by_total else 1.0) for row in rows],
            self.aim,
        )
        return fitted, columns

    def _promising(self, rows: Sequence[_Row]) -> list[str]:
        """Returns the configs that are good for the most calls."""
        good = Counter(
            text for row in rows for text, ratio in row.times.items() if ratio <= (1 + self.aim.max_loss) ** 2
        )
        return [text for text, _ in good.most_common(self.aim.max_configs)]

    def _fill(self, rows: Sequence[_Row], wanted: Sequence[Iterable[str]]) -> bool:
        """Measures configs for the calls that lack them, as long as the budgets last; returns whether any was."""
        configs, has_measured = {text: it for row in rows for text, it in row.configs.items()}, False
        for row, texts in zip(rows, wanted, strict=True):
            missing = {text: configs[text] for text in texts if text not in row.times}
            if missing and self.trials + len(missing) < self.most_trials and time.monotonic() < self.ends_s:
                self.trials += row.measure(missing)
                has_measured = True
        return has_measured


def fit(tuner: Tuner, calls: Sequence[Arguments], weights: Sequence[float], aim: FitAim) -> FitReport:
    """Fits rules on calls of a function, and saves them in the cache; see `Autotuned.fit`.

    Args:
        tuner: the tuner of the function.
        calls: the positional and keyword arguments of each call.
        weights: how much each call counts.
        aim: the aim of a rule, and the seconds after which nothing further is measured.

    Raises:
        TuningFailedError: No config works for any call.
        TypeError: A call sets a tunable, or the function does not take its arguments.
        ValueError: The calls are too few, the function is not tuned by its time, or nothing can be saved.
    """
    began_s, function = time.monotonic(), tuner.function
    if not function.options.is_by_time:
        raise ValueError(f"{function.name}: fit compares times: leave out objective, or use tune")
    described: dict[str, KeyedCall] = {}
    weighed: dict[str, float] = {}
    for args, weight in zip(calls, weights, strict=True):
        bound = tuner.bind(*args)
        now = Situation.of(bound)
        call = keyed_to_tune(bound, place_of(now.settings).device())
        described.setdefault(call.id.key, call)
        weighed[call.id.key] = weighed.get(call.id.key, 0.0) + weight
    if blocks.current().disable_cache:
        raise ValueError("the cache is off, so no rule could be saved: unset QUARANTUNE_DISABLE_CACHE")
    kinds: dict[str, list[KeyedCall]] = {}
    for call in described.values():
        kinds.setdefault(rule_key(call.id.key), []).append(call)
    if max(map(len, kinds.values())) < _FEWEST:
        raise ValueError(
            f"{function.name}: a rule needs {_FEWEST} different calls with the same parameters and ranks, not "
            f"{max(map(len, kinds.values()))}: give more calls"
        )
    fitting, rules = _Fitting(tuner, aim, began_s + aim.time_budget_s), list[Rule]()
    for key, alike in kinds.items():
        rows: Sequence[_Row] = ()
        if len(alike) >= _FEWEST:
            rows = fitting.rows(alike, [weighed[call.id.key] for call in alike])
        if len(rows) < _FEWEST:
            left = [row.call for row in rows] if len(alike) >= _FEWEST else alike
            reason = f"only {len(left)} calls have its parameters and ranks"
            fitting.skipped += [(call_text(it.arguments), reason) for it in left]
            continue
        rules.append(rule := fitting.rule(rows))
        _save(rows[0].call, key, rule)
    if not rules:
        reasons = "; ".join(dict.fromkeys(reason for _, reason in fitting.skipped))
        raise TuningFailedError(f"{function.name}: no rule was fitted: {reasons:.2000}", trials=(), key="")
    device, seconds = next(iter(described.values())).id.device, time.monotonic() - began_s
    return FitReport(
        name=function.name,
        device=device,
        rules=tuple(rules),
        skipped=tuple(fitting.skipped),
        trials=fitting.trials,
        seconds=seconds,
    )


def _save(call: KeyedCall, key: str, rule: Rule) -> None:
    found = findings_now(call.call, Findings(), (), Searched())
    entry = {
        "config": {},
        "fingerprint": call.call.function.fingerprint.parts,
        "space": call.call.space,
        "versions": versions.versions(),
        "created": found.created,
        **({"commit": found.commit} if found.commit else {}),
        FIELD: rule.to_json(),
    }
    try:
        open_store(blocks.current()).put(call.id.name, call.id.device, key, entry)
    except CacheWriteError as error:
        problems.report_once(str(error))


def _spread(calls: Sequence[KeyedCall], weights: Sequence[float]) -> list[int]:
    """Returns the positions of calls: the weightiest first, then each time the call farthest from all before."""
    rows = [leaves_in(call.id.key) for call in calls]
    sizes = [place for place, part in enumerate(tree.parts_of(rows)) if part.is_size]
    points = np.log2([[[*row.values()][place] for place in sizes] or [1] for row in rows])
    order = [int(np.argmax(weights))]
    away = np.full(len(rows), np.inf)
    while len(order) < len(rows):
        away = np.minimum(away, np.abs(points - points[order[-1]]).sum(1))
        away[order] = -1
        order.append(int(np.argmax(away)))
    return order
