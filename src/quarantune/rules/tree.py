"""Fits a rule to a table of losses: chooses few configs, and grows a decision tree over questions about sizes."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from quarantune.rules.rule import DEEPEST, FittedCall, Leaves, Node, Part, Rule
from quarantune.values.codec import JsonObject, canonical_json, is_whole

UNKNOWN = 1.0
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


@dataclasses.dataclass(frozen=True)
class Aim:
    """The aim of a rule.

    Attributes:
        max_configs: the most configs that it may answer.
        max_loss: the largest loss that its configs may have, as a share.
        by: `worst` bounds the loss of each call, `total` the weighted mean.
    """

    max_configs: int
    max_loss: float
    by: str


@dataclasses.dataclass(frozen=True)
class _Question:
    """A column of the calls' values. A node asks if a value is at most a bound; or 1, if it is exact."""

    ask: Any
    of: tuple[int, ...]
    column: npt.NDArray[np.float64]
    value: Any = None

    @property
    def is_exact(self) -> bool:
        return self.ask in ("equal", "multiple")


@dataclasses.dataclass(frozen=True)
class _Grown:
    """A node of a tree whose depth is not decided yet: its answer, and its question if it asks one."""

    ranked: tuple[int, ...]
    node: Node | None = None
    yes: _Grown | None = None
    no: _Grown | None = None


@dataclasses.dataclass(frozen=True)
class Fitted:
    """A rule with the answers behind its losses.

    Attributes:
        rule: the rule.
        wanted: for each call, the columns of the configs that the rule answers for it, or would if it were left out.
    """

    rule: Rule
    wanted: tuple[frozenset[int], ...]


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
    rows: Sequence[Leaves],
    labels: Sequence[str],
    table: Table,
    configs: Sequence[JsonObject],
    weights: Sequence[float],
    aim: Aim,
) -> Fitted:
    """Fits a rule, and measures its loss on calls that it was not fitted on.

    Args:
        rows: the values in the key of each call, all with the same paths.
        labels: the calls as text.
        table: the loss of each config for each call.
        configs: the configs in JSON form, by column.
        weights: how much each call counts.
        aim: the aim.
    """
    parts, weighed = parts_of(rows), np.asarray(weights, float)
    values = [[row[part.path] for part in parts] for row in rows]
    questions, everyone = list(_questions(parts, values)), np.arange(len(rows))
    left_out = np.zeros((DEEPEST + 1, len(rows)), int)
    for fold in np.array_split(everyone, min(len(rows), _MOST_FOLDS)):
        rest = np.setdiff1d(everyone, fold)
        chosen = choose(table[rest], weighed[rest], aim)
        tree = _grow(_costs(table, chosen, weighed, aim), rest, questions, DEEPEST)
        for call, depth in itertools.product(fold, range(DEEPEST + 1)):
            left_out[depth, call] = _first(tree, values[call], depth, chosen, table[call])
    losses = _or_unknown(table[everyone, left_out])
    means = np.average(losses, axis=1, weights=weighed if aim.by == "total" else None)
    depth = int(np.argmin(means + _SIMPLER * np.arange(DEEPEST + 1)))
    chosen = choose(table, weighed, aim)
    tree = _grow(_costs(table, chosen, weighed, aim), everyone, questions, depth)
    answers = [_first(tree, values[call], depth, chosen, table[call]) for call in everyone]
    sizes = [tuple(value for part, value in zip(parts, row, strict=True) if part.is_size) for row in values]
    own = _or_unknown(table[everyone, answers]).tolist()
    known = [
        FittedCall(call=label, sizes=size, weight=float(weight), loss=loss)
        for label, size, weight, loss in zip(labels, sizes, weighed, own, strict=True)
    ]
    rule = Rule(
        parts=parts,
        configs=tuple(configs[column] for column in chosen),
        nodes=tuple(_nodes(tree, 0)),
        calls=tuple(known),
        loss=float(means[depth]),
        worst_loss=float(losses[depth].max()),
    )
    return Fitted(rule, tuple(map(frozenset, zip(left_out[depth].tolist(), answers, strict=True))))


def choose(table: Table, weights: npt.NDArray[np.float64], aim: Aim) -> tuple[int, ...]:
    """Returns the smallest set of configs that reaches an aim, as columns; if none does, the set with the least loss.

    By `worst`, it is the smallest set with a config within the largest loss for every call that any config works for.
    """
    losses = _or_unknown(table)
    if aim.by == "worst":
        within = table <= aim.max_loss
        calls = [frozenset(np.flatnonzero(row).tolist()) for row in within if row.any()]
        steps = itertools.count()
        for size in range(1, aim.max_configs + 1):
            if (found := _cover(calls, size, within.sum(0), steps)) is not None:
                return tuple(sorted(found))
    chosen: list[int] = []
    best = np.full(len(table), np.inf)
    while len(chosen) < aim.max_configs:
        totals = weights @ np.minimum(best[:, None], losses)
        column = int(np.argmin(totals))
        if column in chosen or (chosen and totals[column] >= weights @ best):
            break
        chosen.append(column)
        best = np.minimum(best, losses[:, column])
        if aim.by == "total" and weights @ best <= aim.max_loss * weights.sum():
            break
    return tuple(sorted(chosen))


def _cover(calls: list[frozenset[int]], size: int, covered: Any, steps: Iterator[int]) -> list[int] | None:
    """Returns at most `size` columns with one of every call, or None; gives up after many steps."""
    if not calls:
        return []
    if size == 0 or next(steps) > _MOST_STEPS:
        return None
    hardest = min(calls, key=len)
    for column in sorted(hardest, key=lambda column: (-covered[column], column)):
        rest = _cover([call for call in calls if column not in call], size - 1, covered, steps)
        if rest is not None:
            return [column, *rest]
    return None


def _costs(table: Table, chosen: Sequence[int], weights: npt.NDArray[np.float64], aim: Aim) -> Table:
    return np.log1p(_or_unknown(table[:, list(chosen)])) * (weights[:, None] if aim.by == "total" else 1.0)


def _or_unknown(losses: Table) -> Table:
    return np.where(np.isfinite(losses), losses, UNKNOWN)


def _questions(parts: Sequence[Part], values: Sequence[Sequence[Any]]) -> Iterator[_Question]:
    """Yields the questions that tell calls apart, the simplest first, and each column once."""
    columns = {place: np.array([row[place] for row in values], float) for place, it in enumerate(parts) if it.is_size}
    found: dict[bytes, _Question] = {}
    for place, column in columns.items():
        found.setdefault(column.tobytes(), _Question("size", (place,), column))
    single = [question.of[0] for question in found.values()][:_MOST_PAIRED]
    for place, part in enumerate(parts):
        if not part.is_size and len(part.known) > 1:
            for value in part.known:
                same = [canonical_json(row[place]) == canonical_json(value) for row in values]
                found.setdefault(np.array(same, float).tobytes(), _Question("equal", (place,), np.array(same), value))
    for place, divisor in itertools.product(single, _DIVISORS):
        is_multiple = columns[place] % divisor == 0
        found.setdefault(is_multiple.tobytes(), _Question("multiple", (place,), is_multiple, divisor))
    for one, other in itertools.combinations(single, 2):
        for ask, column in (("ratio", columns[one] / columns[other]), ("product", columns[one] * columns[other])):
            found.setdefault(column.tobytes(), _Question(ask, (one, other), column))
    yield from (question for question in found.values() if len(np.unique(question.column)) > 1)


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
            saved = totals.min() - sums[cut].min() - (totals - sums[cut]).min()
            low, high = ordered[cut], ordered[cut + 1]
            rank = round(float(saved), 6), 1.0 if question.is_exact else math.log(high / low)
            if rank[0] > 0 and (best is None or rank > best[:2]):
                best = (*rank, question, float(low), float(high))
    if best is None:
        return _Grown(ranked)
    _, _, question, low, high = best
    value = question.value if question.is_exact else _between(question.ask, low, high)
    is_yes = question.column[calls] > 0 if question.is_exact else question.column[calls] <= value
    yes, no = (_grow(costs, calls[which], questions, depth - 1) for which in (is_yes, ~is_yes))
    return _Grown(ranked, Node(ask=question.ask, of=question.of, value=value), yes, no)


def _between(ask: str, low: float, high: float) -> float:
    """Returns a bound in the middle of two values, with few digits if possible."""
    middle = math.sqrt(low * high)
    short = float(f"{middle:.2g}")
    bound = short if low <= short < high else middle if ask == "ratio" else max(low, math.floor(middle))
    return bound if ask == "ratio" else int(bound)


def _first(tree: _Grown, values: Sequence[Any], depth: int, chosen: Sequence[int], losses: Table) -> int:
    """Returns the column of the first config in the answer of a tree that does not fail for the call."""
    while depth and tree.node is not None and tree.yes is not None and tree.no is not None:
        tree, depth = tree.yes if tree.node.holds(values) else tree.no, depth - 1
    return next((chosen[it] for it in tree.ranked if losses[chosen[it]] != math.inf), chosen[tree.ranked[0]])


def _nodes(tree: _Grown, place: int) -> list[Node]:
    """Returns the nodes of a tree from a position on; branches with one answer become that answer."""
    if tree.node is None or tree.yes is None or tree.no is None:
        return [Node(ask="answer", configs=tree.ranked)]
    yes = _nodes(tree.yes, place + 1)
    no = _nodes(tree.no, place + 1 + len(yes))
    if len(yes) == len(no) == 1 and yes[0].configs[0] == no[0].configs[0]:
        return yes
    return [dataclasses.replace(tree.node, yes=place + 1, no=place + 1 + len(yes)), *yes, *no]
