"""Fits a rule to a table of losses: chooses few configs, and grows a decision tree over questions about sizes."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from quarantune.rules.rule import DEEPEST, EQUAL, MULTIPLE, FittedCall, Leaves, Node, Part, Rule, end_of
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
    questions, everyone = _questions(parts, values), np.arange(len(calls))

    def grown(some: npt.NDArray[Any], depth: int) -> tuple[list[Node], tuple[int, ...]]:
        chosen = choose(table[some], weights[some], max_configs, max_loss)
        costs = np.log1p(_or_unknown(table[:, list(chosen)])) * weights[:, None]
        return _grow(costs, some, questions, depth), chosen

    def answer(call: int, tree: Sequence[Node], chosen: Sequence[int], depth: int) -> int:
        """Returns the column of the first config in the answer of a tree that does not fail for a call."""
        ranked = [chosen[it] for it in end_of(tree, values[call], depth).configs]
        return next((column for column in ranked if table[call, column] != math.inf), ranked[0])

    left_out = np.zeros((DEEPEST + 1, len(calls)), int)
    for fold in np.array_split(everyone, min(len(calls), _MOST_FOLDS)):
        tree, chosen = grown(np.setdiff1d(everyone, fold), DEEPEST)
        for call, depth in itertools.product(fold.tolist(), range(DEEPEST + 1)):
            left_out[depth, call] = answer(call, tree, chosen, depth)
    losses = _or_unknown(table[everyone, left_out])
    means = losses @ weights / weights.sum()
    depth = int(np.argmin(means + _SIMPLER * np.arange(DEEPEST + 1)))
    tree, chosen = grown(everyone, depth)
    answers = [answer(call, tree, chosen, depth) for call in range(len(calls))]
    own = _or_unknown(table[everyone, answers]).tolist()
    fitted = []
    for (row, text, weight), loss in zip(calls, own, strict=True):
        sizes = tuple(row[part.path] for part in parts if part.least)
        fitted.append(FittedCall(call=text, sizes=sizes, weight=weight, loss=loss))
    rule = Rule(
        parts=parts,
        configs=tuple(configs[column] for column in chosen),
        nodes=tuple(node if node.is_answer else dataclasses.replace(node, configs=()) for node in tree),
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


def _questions(parts: Sequence[Part], values: Sequence[Sequence[Any]]) -> list[_Question]:
    """Returns the questions that distinguish calls, the simplest first, and each column of values once."""
    found: dict[bytes, _Question] = {}
    for question in _candidates(parts, values):
        if len(np.unique(question.column)) > 1:
            found.setdefault(question.column.tobytes(), question)
    return list(found.values())


def _candidates(parts: Sequence[Part], values: Sequence[Sequence[Any]]) -> Iterator[_Question]:
    distinct: dict[bytes, tuple[int, npt.NDArray[Any]]] = {}
    for place, part in enumerate(parts):
        if part.least:
            column = np.array([row[place] for row in values], float)
            distinct.setdefault(column.tobytes(), (place, column))
    sizes = list(distinct.values())
    for place, column in sizes:
        yield _Question("size", (place,), column)
    for place, part in enumerate(parts):
        for value in part.known:
            is_equal = [canonical_json(row[place]) == canonical_json(value) for row in values]
            yield _Question(EQUAL, (place,), np.array(is_equal), value)
    for (place, column), divisor in itertools.product(sizes[:_MOST_PAIRED], _DIVISORS):
        yield _Question(MULTIPLE, (place,), column % divisor == 0, divisor)
    for (one, first), (other, second) in itertools.combinations(sizes[:_MOST_PAIRED], 2):
        yield _Question("ratio", (one, other), first / second)
        yield _Question("product", (one, other), first * second)


def _grow(
    costs: Table, calls: npt.NDArray[Any], questions: Sequence[_Question], depth: int, place: int = 0
) -> list[Node]:
    """Grows a tree greedily: each question saves the most cost, and of equal ones it lies in the widest gap.

    Args:
        costs: a row for each call and a column for each config.
        calls: the rows of the calls that reach the tree.
        questions: the questions to choose from.
        depth: the most questions that the tree asks about one call.
        place: the position of its root. The tree is a part of another one.

    Returns:
        The nodes. Those with a question also have the best answer without it.
    """
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
        return [Node(configs=ranked)]
    _, _, (ask, of, column, value), low, high = best
    value = value if best[2].is_fixed else _between(ask, low, high)
    is_yes = column[calls] > 0 if best[2].is_fixed else column[calls] <= value
    yes = _grow(costs, calls[is_yes], questions, depth - 1, place + 1)
    no = _grow(costs, calls[~is_yes], questions, depth - 1, place + 1 + len(yes))
    node = Node(ask=ask, of=of, value=value, yes=place + 1, no=place + 1 + len(yes), configs=ranked)
    return [node, *yes, *no]


def _between(ask: str, low: float, high: float) -> float:
    """Returns a bound in the middle of two values, with few digits if possible."""
    middle = math.sqrt(low * high)
    short = float(f"{middle:.2g}")
    bound = short if low <= short < high else middle
    return bound if ask == "ratio" else max(int(low), int(bound))
