"""A rule as data: a decision tree from the sizes and dtypes of a call to one of a few configs.

A rule may come from a file where anybody can write. So it holds no code, and reading it checks every part: a node
refers to later nodes only, and the depth of the tree has a bound.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from quarantune.values.codec import (
    DamageError,
    JsonObject,
    Record,
    canonical_json,
    decode_json,
    is_number,
    is_whole,
    leaves_of,
    short_hash,
    within,
)
from quarantune.values.configs import format_config
from quarantune.values.texts import printable

DEEPEST = 6
"""Most questions that a rule asks about one call."""
MOST_CONFIGS = 32
_MOST_NODES, _MOST_PARTS, _MOST_CALLS, _LARGEST = 1 << 8, 1 << 10, 1 << 14, 1 << 53
FIELD = "rule"
"""The field of an entry that holds a rule. No call has the key of such an entry."""

Path: TypeAlias = tuple[str | int, ...]
Leaves: TypeAlias = Mapping[Path, Any]
"""The values in the key of a call, by their paths."""
_Loss: TypeAlias = Annotated[float, within(0, 1e9)]
_Size: TypeAlias = Annotated[int, within(0, _LARGEST)]
_Place: TypeAlias = Annotated[int, within(0, _MOST_PARTS)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part(Record):
    """One value in the keys of calls, with the values that a rule answers for.

    Attributes:
        path: its place in the key.
        least: the smallest size; None for other values.
        most: the largest size; None for other values.
        known: the values, unless it is a size.
    """

    path: Path
    least: _Size | None = None
    most: _Size | None = None
    known: tuple[Any, ...] = ()

    @property
    def is_size(self) -> bool:
        """Whether it is a size, which may lie anywhere within the bounds."""
        return self.least is not None and self.most is not None

    @property
    def name(self) -> str:
        """The value as people write it, such as `x.shape[0]`."""
        first, *rest = self.path or ("",)
        named = [f"[{it}]" if isinstance(it, int) else it if it[:1] == "[" else f".{it}" for it in rest]
        return printable("".join([str(first), *(it for it in named if it != ".leaves")]))

    def why_not(self, value: Any) -> str:
        """Returns why a rule does not answer for a value; empty if it does."""
        if self.least is not None and self.most is not None:
            if is_whole(value, 0) and self.least <= value <= self.most:
                return ""
            return f"{self.name} is {printable(repr(value)):.40}, and the rule is for {self.least} to {self.most}"
        text = canonical_json(value)
        if text in map(canonical_json, self.known):
            return ""
        known = printable(" or ".join(map(canonical_json, self.known)))
        return f"{self.name} is {printable(text):.80}, and the rule is for {known:.200}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Node(Record):
    """A question about a call, or an answer.

    Attributes:
        ask: `size`, `product` and `ratio` ask whether a size, or the product or the ratio of two, is at most `value`;
            `multiple` whether a size is a multiple of it; `equal` whether a part equals it; `answer` asks nothing.
        of: the positions of the parts in question.
        value: the bound, divisor or value of the question.
        yes: the position of the next node if the answer to the question is yes.
        no: the position of the next node otherwise.
        configs: the positions of the configs of an answer, the best first.
    """

    ask: Literal["size", "product", "ratio", "multiple", "equal", "answer"]
    of: tuple[_Place, ...] = ()
    value: Any = None
    yes: _Place = 0
    no: _Place = 0
    configs: tuple[_Place, ...] = ()

    def holds(self, values: Sequence[Any]) -> bool:
        """Returns the answer to the question for the values of the parts."""
        first, last = values[self.of[0]], values[self.of[-1]]
        match self.ask:
            case "size":
                return bool(first <= self.value)
            case "product":
                return bool(first * last <= self.value)
            case "ratio":
                return bool(first <= self.value * last)
            case "multiple":
                return bool(first % self.value == 0)
        return canonical_json(first) == canonical_json(self.value)

    def text(self, parts: Sequence[Part]) -> str:
        """Returns the condition as people write it."""
        names = [parts[place].name for place in self.of]
        value = printable(canonical_json(self.value))
        if self.ask == "multiple":
            return f"{names[0]} is a multiple of {value}"
        sign = {"product": " * ", "ratio": " / "}.get(self.ask, "")
        return f"{sign.join(names)} {'is' if self.ask == 'equal' else '<='} {value:.80}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FittedCall(Record):
    """A call that a rule was fitted on.

    Attributes:
        call: its arguments as text.
        sizes: its sizes, in the order of the rule's parts.
        weight: how much it counts.
        loss: how much longer the rule's config takes than the best config of this call, as a share.
    """

    call: str
    sizes: tuple[_Size, ...]
    weight: _Loss
    loss: _Loss


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule(Record):
    """A decision tree from the key of a call to a config.

    Attributes:
        parts: the values in the key.
        configs: the configs that it may answer.
        nodes: the tree, with its root first and each node before the nodes that it refers to.
        calls: the calls that it was fitted on.
        loss: the mean loss of a call that the rule was not fitted on: each was left out in turn.
        worst_loss: the largest of these losses.
    """

    parts: tuple[Part, ...]
    configs: tuple[dict[str, Any], ...]
    nodes: tuple[Node, ...]
    calls: tuple[FittedCall, ...]
    loss: _Loss
    worst_loss: _Loss

    def __post_init__(self) -> None:
        """Checks that every walk through the tree ends soon, in a config.

        Raises:
            DamageError: The parts do not fit together.
        """
        bounds = ((self.parts, _MOST_PARTS), (self.configs, MOST_CONFIGS), (self.nodes, _MOST_NODES))
        if not all(0 < len(them) <= most for them, most in bounds) or len(self.calls) > _MOST_CALLS:
            raise DamageError("it has no parts, configs or nodes, or too many")
        depths = [0] * len(self.nodes)
        for index, node in enumerate(self.nodes):
            if fault := self._fault(index, node) or ("it is too deep" if depths[index] > DEEPEST else ""):
                raise DamageError(f"node {index}: {fault}")
            for after in () if node.ask == "answer" else (node.yes, node.no):
                depths[after] = max(depths[after], depths[index] + 1)

    def _fault(self, index: int, node: Node) -> str:
        if node.ask == "answer":
            is_right = node.configs and all(place < len(self.configs) for place in node.configs)
            return "" if is_right else "it answers no config of the rule"
        if not all(index < after < len(self.nodes) for after in (node.yes, node.no)):
            return "it refers to itself, to an earlier node, or to none"
        if len(node.of) != (2 if node.ask in ("product", "ratio") else 1) or max(node.of) >= len(self.parts):
            return "it asks about parts that do not exist"
        if node.ask == "equal":
            return ""
        if not all(self.parts[place].is_size for place in node.of):
            return "it asks for the size of something else"
        is_right = is_whole(node.value, 1) if node.ask == "multiple" else is_number(node.value)
        return "" if is_right and abs(node.value) < _LARGEST**2 else "its value is not a number"

    def why_not(self, leaves: Leaves) -> str:
        """Returns why the rule does not answer for a call; empty if it does."""
        if leaves.keys() != {part.path for part in self.parts}:
            return "the rule is for calls with other arguments"
        return next(filter(None, (part.why_not(leaves[part.path]) for part in self.parts)), "")

    def answers(self, values: Sequence[Any]) -> tuple[int, ...]:
        """Returns the positions of the configs for the values of the parts, the best first."""
        node = self.nodes[0]
        while node.ask != "answer":
            node = self.nodes[node.yes if node.holds(values) else node.no]
        return node.configs

    def ranked(self, leaves: Leaves) -> list[JsonObject]:
        """Returns the configs for a call, the best first; none if the rule does not answer for it."""
        if self.why_not(leaves):
            return []
        return [self.configs[place] for place in self.answers([leaves[part.path] for part in self.parts])]

    @property
    def expected(self) -> str:
        """The expected loss in words."""
        return (
            f"expected loss {self.loss:.1%}, at worst {self.worst_loss:.1%} (leave-one-out over {len(self.calls)} "
            f"calls)"
        )

    def lines(self) -> Iterator[str]:
        """Yields the rule as indented conditions."""
        yield from self._lines(0, "")
        yield self.expected
        sizes = (f"{part.name} {part.least} to {part.most}" for part in self.parts if part.is_size)
        yield f"answers for {', '.join(sizes) or 'the fitted calls only'}"

    def _lines(self, place: int, indent: str) -> Iterator[str]:
        node = self.nodes[place]
        if node.ask == "answer":
            yield f"{indent}{printable(format_config(self.configs[node.configs[0]]))}"
            return
        yield f"{indent}if {node.text(self.parts)}:"
        yield from self._lines(node.yes, f"{indent}  ")
        yield f"{indent}else:"
        yield from self._lines(node.no, f"{indent}  ")


def leaves_in(key: str) -> Leaves:
    """Returns the values of the arguments in the key of a call."""
    return dict(leaves_of(decode_json(key)["call"]))


def rule_key(key: str) -> str:
    """Returns the key of the rule for a call: that of calls with the same parameters, ranks, code and JAX settings."""
    parts = decode_json(key)
    code = parts.pop("code")
    alike = [sorted(map(canonical_json, leaves_in(key))), {**parts, "call": None}]
    return canonical_json({"code": code, FIELD: short_hash(canonical_json(alike))})
