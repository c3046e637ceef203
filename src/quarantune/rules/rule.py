"""A rule as data: a decision tree from the sizes and dtypes of a call to one of a few configs.

A rule may come from a file where anybody can write. So it holds no code, and reading it checks every part: a node
refers to later nodes only, and the depth of the tree has a bound.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeAlias

from quarantune.values import codec
from quarantune.values.codec import Record, canonical_json, within
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
"""The values of the arguments in the key of a call, by their paths."""
_Loss: TypeAlias = Annotated[float, within(0, 1e9)]
_Size: TypeAlias = Annotated[int, within(0, _LARGEST)]
_Place: TypeAlias = Annotated[int, within(0, _MOST_PARTS)]

_ANSWER, EQUAL, MULTIPLE = "answer", "equal", "multiple"
_QUESTIONS: Mapping[str, tuple[int, str, Callable[..., bool]]] = {
    "size": (1, "{} <= {}", lambda bound, size: size <= bound),
    "product": (2, "{} * {} <= {}", lambda bound, one, other: one * other <= bound),
    "ratio": (2, "{} / {} <= {}", lambda bound, one, other: one <= bound * other),
    MULTIPLE: (1, "{} is a multiple of {}", lambda divisor, size: size % divisor == 0),
    EQUAL: (1, "{} is {}", lambda value, other: canonical_json(value) == canonical_json(other)),
}
"""The questions of a rule: the number of parts in question, the text, and the test, which takes the node's value first.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part(Record):
    """One value in the keys of calls, with the values that a rule answers for.

    Attributes:
        path: its place in the key.
        least: the smallest size; 0 for a value that is not a size.
        most: the largest size.
        known: the values, unless it is a size.
    """

    path: Path
    least: _Size = 0
    most: _Size = 0
    known: tuple[Any, ...] = ()

    @property
    def name(self) -> str:
        """The value as people write it, such as `x.shape[0]`."""
        first, *rest = [item for item in self.path or ("",) if item != "leaves"]
        named = [f"[{it}]" if isinstance(it, int) else it if it[:1] == "[" else f".{it}" for it in rest]
        return printable("".join([str(first), *named]))

    def why_not(self, value: Any) -> str:
        """Returns why a rule does not answer for a value; empty if it does."""
        known = {canonical_json(each) for each in self.known}
        is_within = codec.is_whole(value, 1) and self.least <= value <= self.most
        if is_within if self.least else canonical_json(value) in known:
            return ""
        wanted = f"{self.least} to {self.most}" if self.least else " or ".join(sorted(known))
        return printable(f"{self.name} is {canonical_json(value):.80}, and the rule is for {wanted:.200}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Node(Record):
    """A question about a call, or an answer.

    Attributes:
        ask: the question: whether a size, or the product or the ratio of two, is at most `value`; whether a size is a
            `multiple` of it; whether a part is `equal` to it. Or `answer`.
        of: the positions of the parts in question.
        value: the bound, divisor or value of the question.
        yes: the position of the next node if the question holds.
        no: the position of the next node otherwise.
        configs: the positions of the configs of an answer, the best first.
    """

    ask: Annotated[str, codec.one_of(*_QUESTIONS, _ANSWER)] = _ANSWER
    of: tuple[_Place, ...] = ()
    value: Any = None
    yes: _Place = 0
    no: _Place = 0
    configs: tuple[_Place, ...] = ()

    @property
    def is_answer(self) -> bool:
        """Whether it asks nothing."""
        return self.ask == _ANSWER

    def holds(self, values: Sequence[Any]) -> bool:
        """Returns whether the question holds for the values of the parts."""
        return _QUESTIONS[self.ask][2](self.value, *(values[place] for place in self.of))

    def text(self, parts: Sequence[Part]) -> str:
        """Returns the question as people write it."""
        value = printable(canonical_json(self.value))
        return _QUESTIONS[self.ask][1].format(*(parts[place].name for place in self.of), f"{value:.80}")


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
    configs: tuple[codec.JsonObject, ...]
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
            raise codec.DamageError("it has no parts, configs or nodes, or too many")
        depths = [0] * len(self.nodes)
        for index, node in enumerate(self.nodes):
            if fault := self._fault(index, node) or ("it is too deep" if depths[index] > DEEPEST else ""):
                raise codec.DamageError(f"node {index}: {fault}")
            for after in () if node.is_answer else (node.yes, node.no):
                depths[after] = max(depths[after], depths[index] + 1)

    def _fault(self, index: int, node: Node) -> str:
        if node.is_answer:
            is_right = node.configs and max(node.configs) < len(self.configs)
            return "" if is_right else "it answers no config of the rule"
        if not all(index < after < len(self.nodes) for after in (node.yes, node.no)):
            return "it refers to itself, to an earlier node, or to none"
        if len(node.of) != _QUESTIONS[node.ask][0] or max(node.of) >= len(self.parts):
            return "it asks about parts that do not exist"
        is_number = codec.is_whole(node.value, 1) if node.ask == MULTIPLE else codec.is_number(node.value)
        is_right = is_number and abs(node.value) < _LARGEST**2 and all(self.parts[place].least for place in node.of)
        return "" if is_right or node.ask == EQUAL else "it asks for the size of something else"

    def why_not(self, leaves: Leaves) -> str:
        """Returns why the rule does not answer for a call; empty if it does."""
        if leaves.keys() != {part.path for part in self.parts}:
            return "the rule is for calls with other arguments"
        return next(filter(None, (part.why_not(leaves[part.path]) for part in self.parts)), "")

    def ranked(self, leaves: Leaves) -> list[codec.JsonObject]:
        """Returns the configs for a call that the rule answers for, the best first."""
        node = end_of(self.nodes, [leaves[part.path] for part in self.parts])
        return [self.configs[place] for place in node.configs]

    @property
    def expected(self) -> str:
        """The expected loss in words."""
        losses = f"expected loss {self.loss:.1%}, at worst {self.worst_loss:.1%}"
        return f"{losses} (leave-one-out over {len(self.calls)} calls)"

    def lines(self) -> Iterator[str]:
        """Yields the rule as indented conditions."""
        yield from self._lines(self.nodes[0], "")
        sizes = (f"{part.name} {part.least} to {part.most}" for part in self.parts if part.least)
        yield f"for {', '.join(sizes) or 'the fitted calls only'}; {self.expected}"

    def _lines(self, node: Node, indent: str) -> Iterator[str]:
        if node.is_answer:
            yield f"{indent}{printable(format_config(self.configs[node.configs[0]]))}"
            return
        for condition, after in ((f"if {node.text(self.parts)}:", node.yes), ("else:", node.no)):
            yield f"{indent}{condition}"
            yield from self._lines(self.nodes[after], f"{indent}  ")


def end_of(nodes: Sequence[Node], values: Sequence[Any], most: int = DEEPEST) -> Node:
    """Returns the node at the end of a walk through a tree that asks at most `most` questions."""
    node = nodes[0]
    while most and not node.is_answer:
        node, most = nodes[node.yes if node.holds(values) else node.no], most - 1
    return node


def leaves_in(key: str) -> Leaves:
    """Returns the values of the arguments in the key of a call."""
    return dict(codec.leaves_of(codec.decode_json(key)["call"]))


def rule_key(key: str) -> str:
    """Returns the key of the rule for a call: that of calls with the same parameters, ranks, code and JAX settings."""
    parts = codec.decode_json(key)
    code, alike = parts.pop("code"), sorted(map(canonical_json, leaves_in(key)))
    return canonical_json({"code": code, FIELD: codec.short_hash(canonical_json([alike, parts | {"call": None}]))})
