"""Fits a rule to a table of losses: chooses few configs, and grows a decision tree over questions about sizes."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from quarantune.rules.rule import DEEPEST, EQUAL, MULTIPLE, FittedCall, Leaves, Node, Part, Rule
from quarantune.values.codec import JsonObject, canonical_json, is_whole

_UNKNOWN = 1.0
"""Loss of a config that was not measured for a call, or failed: twice the time."""
_SLACK = 2
"""Factor by which a dimension of an array may lie beyond the fitted ones, if these differ."""
_MOST_STEPS = 20_000
"""Most steps of the exact search for the smallest set of configs; it takes about 0.1 s. Beyond, a greedy set serves."""
_MOST_PAIRED = 8
"""Most sizes whose products and ratios a tree asks about."""
_DIVISORS = (8, 16, 32, 64, 128, 256, 512, 1024)
_MOST_FOLDS = 64
"""Most parts of the calls that are left out in turn; with more calls, several are left out at a time."""
_SIMPLER = 0.001
"""Mean loss that one more level of the tree must save on calls left out."""

Table: TypeAlias = npt.NDArray[np.float64]
"""Losses, a row for each call and a column for each config; NaN for an unknown loss, infinity for a failure."""


class _Question(NamedTuple):
    """A question about a column of the calls' values: at most which bound, or with a fixed value, whether it holds."""

    ask: str
    of: tuple[int, ...]
    column: npt.NDArray[Any]
    value: Any = None

    @property
    def is_fixed(self) -> bool:
        return self.ask in (EQUAL, MULTIPLE)


class _Grown(NamedTuple):
    """A node of a tree whose depth is not decided yet: its answer, and its question with two branches if it has one."""

    ranked: tuple[int, ...]
    node: Node | None = None
    branches: tuple[_Grown, ...] = ()


def parts_of(rows: Sequence[Leaves]) -> tuple[Part, ...]:
    """Returns the values in the keys of calls with the bounds that a rule for them has."""
    parts = []
    for path in rows[0]:
        values = {canonical_json(row[path]): row[path] for row in rows}
        if len(values) > 1 and all(is_whole(value, 1) for value in values.values()):
            slack = _SLACK if path[-2:-1] == ("shape",) else 1
            least, most = min(values.values()), max(values.values())
            parts.append(Part(path=path, least=max(1, least // slack), most=most * slack))
        else:
            parts.append(Part(path=path, known=tuple(values.values())))
    return tuple(parts)


def fit(
    calls: Sequence[tuple[Leaves, str, float]],
    table: Table,
    configs: Sequence[JsonObject],
    max_configs: int,
    max_loss: float,
) -> tuple[Rule, list[set[int]]]:
    """Fits a rule, and measures its loss on calls that it was not fitted on.

    Args:
        calls: for each call the values in its key, all with the same paths, its text and its weight.
        table: the loss of each config for each call.
        configs: the configs in JSON form, by column.
        max_configs: see `choose`.
        max_loss: see `choose`.

    Returns:
        The rule; and for each call, the columns of the configs that the rule answers, now and if it is left out.
    """
    parts, weights = parts_of([row for row, *_ in calls]), np.array([weight for *_, weight in calls])
    values = [[row[part.path] for part in parts] for row, *_ in calls]
    questions, everyone = list(_questions(parts, values)), np.arange(len(calls))

    def grown(some: npt.NDArray[Any], depth: int) -> tuple[_Grown, tuple[int, ...]]:
        chosen = choose(table[some], weights[some], max_configs, max_loss)
        costs = np.log1p(_or_unknown(table[:, list(chosen)])) * weights[:, None]
        return _grow(costs, some, questions, depth), chosen

    left_out = np.zeros((DEEPEST + 1, len(calls)), int)
    for fold in np.array_split(everyone, min(len(calls), _MOST_FOLDS)):
        tree, chosen = grown(np.setdiff1d(everyone, fold), DEEPEST)
        for call, depth in itertools.product(fold, range(DEEPEST + 1)):
            left_out[depth, call] = _first(tree, values[call], depth, chosen, table[call])
    losses = _or_unknown(table[everyone, left_out])
    means = losses @ weights / weights.sum()
    depth = int(np.argmin(means + _SIMPLER * np.arange(DEEPEST + 1)))
    tree, chosen = grown(everyone, depth)
    answers = [_first(tree, values[call], depth, chosen, table[call]) for call in everyone]
    own = _or_unknown(table[everyone, answers]).tolist()
    fitted = []
    for (row, text, weight), loss in zip(calls, own, strict=True):
        sizes = tuple(row[part.path] for part in parts if part.least)
        fitted.append(FittedCall(call=text, sizes=sizes, weight=weight, loss=loss))
    rule = Rule(
        parts=parts,
        configs=tuple(configs[column] for column in chosen),
        nodes=tuple(_nodes(tree, 0)),
        calls=tuple(fitted),
        loss=float(means[depth]),
        worst_loss=float(losses[depth].max()),
    )
    return rule, [set(pair) for pair in zip(left_out[depth].tolist(), answers, strict=True)]


def choose(table: Table, weights: Table, max_configs: int, max_loss: float) -> tuple[int, ...]:
    """Returns the smallest set of configs with which no call loses too much, as columns of a table of losses.

    If that takes too many configs, it is the set with the least total loss.

    Args:
        table: the losses.
        weights: how much each call counts.
        max_configs: the most configs.
        max_loss: the largest loss of a call, as a share.
    """
    within = table <= max_loss
    calls = [frozenset(np.flatnonzero(row).tolist()) for row in within]
    steps = itertools.count()
    for size in range(1, max_configs + 1):
        if (found := _cover(calls, size, within.sum(0), steps)) is not None:
            return tuple(sorted(found))
    chosen: list[int] = []
    best = np.full(len(table), np.inf)
    while len(chosen) < min(max_configs, table.shape[1]):
        left = np.minimum(best[:, None], _or_unknown(table))
        chosen.append(int(np.argmin(weights @ left)))
        best = left[:, chosen[-1]]
    return tuple(sorted({*chosen}))


def _cover(calls: list[frozenset[int]], size: int, covered: Any, steps: Iterator[int]) -> list[int] | None:
    """Returns at most `size` columns with one of every call, or None; gives up after many steps."""
    if not calls:
        return []
    if size == 0 or next(steps) > _MOST_STEPS:
        return None
    hardest: frozenset[int] = min(calls, key=len)
    for column in sorted(hardest, key=lambda column: (-covered[column], column)):
        rest = _cover([call for call in calls if column not in call], size - 1, covered, steps)
        if rest is not None:
            return [column, *rest]
    return None


def _or_unknown(losses: Table) -> Table:
    return np.where(np.isfinite(losses), losses, _UNKNOWN)


def _questions(parts: Sequence[Part], values: Sequence[Sequence[Any]]) -> Iterator[_Question]:
    """Yields the questions that distinguish calls, the simplest first, and each column of values once."""
    found: dict[bytes, _Question] = {}

    def add(ask: str, of: tuple[int, ...], column: npt.NDArray[Any], value: Any = None) -> None:
        if len(np.unique(column)) > 1:
            found.setdefault(column.tobytes(), _Question(ask, of, column, value))

    sizes = {place: np.array([row[place] for row in values], float) for place, it in enumerate(parts) if it.least}
    for place, column in sizes.items():
        add("size", (place,), column)
    single = [question.of[0] for question in found.values()][:_MOST_PAIRED]
    for place, part in enumerate(parts):
        for value in part.known:
            add(
                EQUAL,
                (place,),
                np.array([canonical_json(row[place]) == canonical_json(value) for row in values]),
                value,
            )
    for place, divisor in itertools.product(single, _DIVISORS):
        add(MULTIPLE, (place,), sizes[place] % divisor == 0, divisor)
    for one, other in itertools.combinations(single, 2):
        add("ratio", (one, other), sizes[one] / sizes[other])
        add("product", (one, other), sizes[one] * sizes[other])
    yield from found.values()


def _grow(costs: Table, calls: npt.NDArray[Any], questions: Sequence[_Question], depth: int) -> _Grown:
    """Grows a tree greedily: each question saves the most cost, and of equal ones it lies in the widest gap."""
    totals = costs[calls].sum(0)
    ranked = tuple(np.argsort(totals, kind="stable").tolist())
    best: tuple[float, float, _Question, float, float] | None = None
    for question in questions if depth else ():
        column = question.column[calls].astype(float)
        order = np.argsort(column, kind="stable")
        ordered, sums = column[order], np.cumsum(costs[calls][order], axis=0)
        for cut in np.flatnonzero(ordered[1:] > ordered[:-1]):
            saved = round(float(totals.min() - sums[cut].min() - (totals - sums[cut]).min()), 6)
            low, high = float(ordered[cut]), float(ordered[cut + 1])
            gap = 1.0 if question.is_fixed else math.log(high / low)
            if saved > 0 and (best is None or (saved, gap) > best[:2]):
                best = saved, gap, question, low, high
    if best is None:
        return _Grown(ranked)
    _, _, (ask, of, column, value), low, high = best
    value = value if best[2].is_fixed else _between(ask, low, high)
    is_yes = column[calls] > 0 if best[2].is_fixed else column[calls] <= value
    branches = tuple(_grow(costs, calls[which], questions, depth - 1) for which in (is_yes, ~is_yes))
    return _Grown(ranked, Node(ask=ask, of=of, value=value), branches)


def _between(ask: str, low: float, high: float) -> float:
    """Returns a bound in the middle of two values, with few digits if possible."""
    middle = math.sqrt(low * high)
    short = float(f"{middle:.2g}")
    bound = short if low <= short < high else middle
    return bound if ask == "ratio" else max(int(low), int(bound))


def _first(tree: _Grown, values: Sequence[Any], depth: int, chosen: Sequence[int], losses: Table) -> int:
    """Returns the column of the first config in the answer of a tree that does not fail for the call."""
    while depth and tree.node is not None:
        tree, depth = tree.branches[not tree.node.holds(values)], depth - 1
    return next((chosen[it] for it in tree.ranked if losses[chosen[it]] != math.inf), chosen[tree.ranked[0]])


def _nodes(tree: _Grown, place: int) -> list[Node]:
    """Returns the nodes of a tree from a position on. Branches with one answer become that answer."""
    if tree.node is None:
        return [Node(configs=tree.ranked)]
    yes = _nodes(tree.branches[0], place + 1)
    no = _nodes(tree.branches[1], place + 1 + len(yes))
    if len(yes) == len(no) == 1 and yes[0].configs[0] == no[0].configs[0]:
        return yes
    return [dataclasses.replace(tree.node, yes=place + 1, no=place + 1 + len(yes)), *yes, *no]
