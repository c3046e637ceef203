"""Fitting: the fewest configs that are good enough, and a tree that predicts calls it was not fitted on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from quarantune.rules.rule import DEEPEST, Rule
from quarantune.rules.tree import choose, fit

CONFIGS = [{"block": 2**power} for power in range(4, 10)]


def rows_of(sizes: Any, **more: Any) -> list[Any]:
    return [
        ({("x", "shape", 0): int(m), ("x", "shape", 1): int(n), ("x", "dtype"): "float32", **more}, f"{m} x {n}", 1.0)
        for m, n in sizes
    ]


def table_of(sizes: Any, best: Callable[[int, int], int]) -> Any:
    """Returns losses that grow with the distance from the best config: 20% for each step."""
    return np.array([[0.2 * abs(best(int(m), int(n)) - column) for column in range(len(CONFIGS))] for m, n in sizes])


def loss_of(rule: Rule, sizes: Any, table: Any) -> list[float]:
    calls = [leaves for leaves, *_ in rows_of(sizes)]
    assert not any(map(rule.why_not, calls))
    return [table[at, CONFIGS.index(rule.ranked(call)[0])] for at, call in enumerate(calls)]


@pytest.mark.parametrize(
    ("name", "best", "asks"),
    [
        ("size", lambda m, n: 0 if m <= 300 else 4, {"size"}),
        ("ratio", lambda m, n: 1 if m <= 2 * n else 4, {"ratio"}),
        ("product", lambda m, n: 1 if m * n <= 1 << 17 else 4, {"product"}),
        ("multiple", lambda m, n: 1 if m % 64 == 0 else 4, {"multiple"}),
    ],
)
def test_a_tree_finds_the_question_that_decides(name: str, best: Any, asks: set[str]) -> None:
    rng = np.random.default_rng(5)
    sizes = np.exp2(rng.uniform(5, 12, (54, 2))).astype(int)
    if name == "multiple":
        sizes[::2] = np.maximum(sizes[::2] // 64, 1) * 64
    train, test = sizes[:34], np.clip(sizes[34:], sizes[:34].min(0), sizes[:34].max(0))
    rule, _ = fit(rows_of(train), table_of(train, best), CONFIGS, 8, 0.03)
    assert {node.ask for node in rule.nodes} >= asks
    assert len(rule.configs) == 2
    assert np.mean(np.array(loss_of(rule, test, table_of(test, best))) > 0) <= 0.1
    assert rule.loss <= 0.1


def test_the_expected_loss_is_the_loss_on_calls_left_out() -> None:
    """If nothing about a call says which config is best, the loss must not look small."""
    rng = np.random.default_rng(3)
    sizes = np.exp2(rng.uniform(5, 12, (40, 2))).astype(int)
    table = np.where(rng.random((40, 2)) < 0.5, 0.0, 1.0)
    table[:, 1] = 1 - table[:, 0]
    rule, _ = fit(rows_of(sizes), table, CONFIGS[:2], 8, 0.03)
    assert 0.3 <= rule.loss <= 0.7
    assert rule.worst_loss == pytest.approx(1.0)


def test_a_constant_answer_needs_no_question() -> None:
    sizes = [(2**power, 64) for power in range(5, 12)]
    rule, wanted = fit(rows_of(sizes), table_of(sizes, lambda m, n: 3), CONFIGS, 8, 0.03)
    assert [node.configs for node in rule.nodes] == [(0,)]
    assert rule.configs == (CONFIGS[3],)
    assert rule.loss == rule.worst_loss == 0.0
    assert wanted == [{3}] * len(sizes)


def test_sizes_of_arrays_get_some_room_and_other_values_none() -> None:
    rows = [
        ({("x", "shape", 0): size, ("n",): 1 + at, ("dtype",): "f32"}, "", 1.0)
        for at, size in enumerate((64, 128, 256))
    ]
    rule, _ = fit(rows, np.zeros((3, 1)), CONFIGS[:1], 8, 0.03)
    bounds = {part.name: (part.least, part.most, part.known) for part in rule.parts}
    assert bounds == {"x.shape[0]": (32, 512, ()), "n": (1, 3, ()), "dtype": (0, 0, ("f32",))}


def test_a_config_that_fails_for_a_call_is_not_chosen_for_it() -> None:
    sizes = [(2**power, 64) for power in range(5, 12)]
    table = np.zeros((len(sizes), 2))
    table[:3, 0], table[3:, 1] = math.inf, 0.5
    rule, _ = fit(rows_of(sizes), table, CONFIGS[:2], 8, 0.03)
    assert [CONFIGS.index(rule.ranked(row)[0]) for row, *_ in rows_of(sizes)] == [1, 1, 1, 0, 0, 0, 0]


def test_the_smallest_set_of_configs_is_found() -> None:
    rng = np.random.default_rng(1)
    for _ in range(30):
        table = rng.choice([0.0, 0.02, 0.1, math.inf, math.nan], (8, 7), p=[0.15, 0.15, 0.4, 0.1, 0.2])
        table[np.arange(8), rng.integers(0, 7, 8)] = 0.0
        chosen = choose(table, np.ones(8), 7, 0.03)
        assert (table[:, chosen] <= 0.03).any(1).all()
        smaller = itertools.combinations(range(7), len(chosen) - 1)
        assert not any((table[:, list(few)] <= 0.03).any(1).all() for few in smaller if few)


def test_if_the_configs_are_too_few_the_weighted_loss_is_small() -> None:
    table = np.array([[0.0, 1.0, 0.4], [1.0, 0.0, 0.4], [1.0, 1.0, 0.0]])
    assert choose(table, np.array([1.0, 1.0, 1.0]), 1, 0.03) == (2,)
    assert choose(table, np.array([9.0, 1.0, 1.0]), 1, 0.03) == (0,)


def test_many_calls_and_configs_take_seconds_and_stay_within_the_depth() -> None:
    rng = np.random.default_rng(2)
    sizes = np.exp2(rng.uniform(5, 12, (66, 2))).astype(int)
    rule, _ = fit(rows_of(sizes), rng.exponential(0.2, (66, 24)), [{"n": at} for at in range(24)], 8, 0.03)
    assert len(rule.configs) <= 8
    assert len(rule.nodes) < 2 ** (DEEPEST + 1)
