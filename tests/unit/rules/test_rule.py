"""Rules as data: what a file may hold, and what a rule answers."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from quarantune.rules.rule import DEEPEST, Rule, leaves_in, rule_key
from quarantune.values.codec import DamageError, canonical_json

RULE: dict[str, Any] = {
    "parts": [
        {"path": ["x", "shape", 0], "least": 32, "most": 8192},
        {"path": ["x", "shape", 1], "least": 16, "most": 512},
        {"path": ["x", "dtype"], "known": ["float32", "bfloat16"]},
    ],
    "configs": [{"block": 64}, {"block": 128}, {"block": 256}],
    "nodes": [
        {"ask": "size", "of": [0], "value": 512, "yes": 1, "no": 2},
        {"ask": "answer", "configs": [0, 1]},
        {"ask": "multiple", "of": [1], "value": 64, "yes": 3, "no": 4},
        {"ask": "answer", "configs": [1]},
        {"ask": "equal", "of": [2], "value": "float32", "yes": 1 + 4, "no": 6},
        {"ask": "answer", "configs": [2]},
        {"ask": "answer", "configs": [0]},
    ],
    "calls": [{"call": "x f32[64,64]", "sizes": [64, 64], "weight": 1.0, "loss": 0.0}],
    "loss": 0.012,
    "worst_loss": 0.05,
}


def leaves(rows: Any = 1024, columns: Any = 100, dtype: str = "float32") -> dict[Any, Any]:
    return {("x", "shape", 0): rows, ("x", "shape", 1): columns, ("x", "dtype"): dtype}


def changed(*path: Any, to: Any) -> dict[str, Any]:
    data: Any = copy.deepcopy(RULE)
    place = data
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = to
    return dict(data)


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "block"),
    [(512, 100, "float32", 64), (513, 128, "float32", 128), (1024, 100, "float32", 256), (1024, 100, "bfloat16", 64)],
)
def test_a_rule_answers_by_its_questions(rows: int, columns: int, dtype: str, block: int) -> None:
    rule = Rule.from_json(RULE)
    assert rule.why_not(leaves(rows, columns, dtype)) == ""
    assert rule.ranked(leaves(rows, columns, dtype))[0] == {"block": block}


def test_a_rule_survives_its_json() -> None:
    rule = Rule.from_json(RULE)
    assert Rule.from_json(json.loads(json.dumps(rule.to_json()))) == rule


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (leaves(rows=31), "x.shape[0] is 31, and the rule is for 32 to 8192"),
        (leaves(rows=8193), "x.shape[0] is 8193, and the rule is for 32 to 8192"),
        (leaves(rows=True), "x.shape[0] is true"),
        (leaves(rows="64"), 'x.shape[0] is "64"'),
        (leaves(dtype="int8"), 'x.dtype is "int8", and the rule is for "bfloat16" or "float32"'),
        ({("x", "dtype"): "float32"}, "other arguments"),
        (leaves() | {("y", "dtype"): "float32"}, "other arguments"),
    ],
)
def test_a_rule_does_not_answer_beyond_its_bounds(call: Any, reason: str) -> None:
    assert reason in Rule.from_json(RULE).why_not(call)


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {},
        "rule",
        changed("nodes", to=[]),
        changed("configs", to=[]),
        changed("parts", to=[]),
        changed("configs", to=[{}] * 33),
        changed("configs", to=["import os"]),
        changed("nodes", to=RULE["nodes"] * 100),
        changed("nodes", 0, "yes", to=0),  # it would never end
        changed("nodes", 2, "no", to=1),
        changed("nodes", 0, "yes", to=99),
        changed("nodes", 0, "yes", to=-1),
        changed("nodes", 0, "of", to=[7]),
        changed("nodes", 0, "of", to=[]),
        changed("nodes", 0, "of", to=[2]),  # a dtype has no size
        changed("nodes", 0, "of", to=[0, 1]),
        changed("nodes", 0, "ask", to="__import__"),
        changed("nodes", 0, "value", to="512"),
        changed("nodes", 0, "value", to=None),
        changed("nodes", 0, "value", to=10**400),
        changed("nodes", 0, "value", to=True),
        changed("nodes", 2, "value", to=0),  # it would divide by zero
        changed("nodes", 2, "value", to=0.5),
        changed("nodes", 1, "configs", to=[]),
        changed("nodes", 1, "configs", to=[3]),
        changed("nodes", 1, "configs", to=[-1]),
        changed("parts", 0, "least", to=1.5),
        changed("parts", 0, "path", to=[None]),
        changed("loss", to=-1),
        changed("loss", to=float("nan")),
        changed("calls", 0, "sizes", to=["many"]),
    ],
)
def test_a_hostile_rule_is_refused_when_it_is_read(data: Any) -> None:
    with pytest.raises(DamageError):
        Rule.from_json(data)


@pytest.mark.parametrize("depth", [DEEPEST, DEEPEST + 1])
def test_the_depth_of_a_rule_has_a_bound(depth: int) -> None:
    ask = [{"ask": "size", "of": [0], "value": 1, "yes": 1 + index, "no": 1 + index} for index in range(depth)]
    data = changed("nodes", to=[*ask, {"ask": "answer", "configs": [0]}])
    if depth == DEEPEST:
        assert Rule.from_json(data).ranked(leaves())
    else:
        with pytest.raises(DamageError, match="too deep"):
            Rule.from_json(data)


def test_every_torn_rule_is_refused_or_answers_configs_of_its_own() -> None:
    text, read = json.dumps(RULE), 0
    for end in range(0, len(text), 7):
        with pytest.raises(ValueError, match=r".*"):
            Rule.from_json(json.loads(text[:end]))
    for field in RULE:
        with pytest.raises(DamageError, match=field):
            Rule.from_json({name: value for name, value in RULE.items() if name != field})
        read += 1
    assert read == len(RULE)


def test_a_rule_reads_as_indented_conditions() -> None:
    assert list(Rule.from_json(RULE).lines()) == [
        "if x.shape[0] <= 512:",
        "  block=64",
        "else:",
        "  if x.shape[1] is a multiple of 64:",
        "    block=128",
        "  else:",
        '    if x.dtype is "float32":',
        "      block=256",
        "    else:",
        "      block=64",
        "for x.shape[0] 32 to 8192, x.shape[1] 16 to 512; expected loss 1.2%, at worst 5.0% "
        "(leave-one-out over 1 calls)",
    ]


def test_control_characters_of_a_rule_do_not_reach_a_terminal() -> None:
    data = changed("parts", 0, "path", to=["x\x1b[2J"]) | {"configs": [{"\x1b[2J": "\x07"}] * 3}
    assert "\x1b" not in "".join(Rule.from_json(data).lines())


def key(shape: list[int], **more: Any) -> str:
    return canonical_json({"call": {"x": {"shape": shape, "dtype": "float32"}}, "code": "abc", **more})


def test_calls_of_one_kind_share_the_key_of_their_rule() -> None:
    assert rule_key(key([8, 8])) == rule_key(key([64, 2]))
    others = [
        key([8]),
        key([8, 8], jax={"matmul": "high"}),
        key([8, 8], jax={"matmul": "low"}),
        key([8, 8], code="abd"),
    ]
    assert len({rule_key(key([8, 8])), *map(rule_key, others)}) == 5
    assert leaves_in(key([8, 9])) == {("x", "shape", 0): 8, ("x", "shape", 1): 9, ("x", "dtype"): "float32"}
