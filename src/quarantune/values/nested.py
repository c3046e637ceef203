"""Descriptions of values inside each other: each part once, in an order of its own, and within bounds."""

from __future__ import annotations

import collections
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

_DEEPEST, _LARGEST = 97, 1 << 22
"""The most levels of a description, as `decode_json` refuses files with more, and parts, as more take minutes."""


class Around(NamedTuple):
    """What is known while a value inside others is described.

    A value that has several places is described once. Else, a few lists that hold each other twice would take for ever.

    Attributes:
        outer: the identities of the values that hold it, outermost first.
        known: values and their descriptions, by identity; None for a value inside itself, whose description depends on
            what is around it.
    """

    outer: tuple[int, ...]
    known: dict[int, Any]

    def steps_to(self, value: Any) -> int:
        """Returns how many levels up a value inside itself begins; 0 for any other value."""
        if id(value) not in self.outer:
            return 0
        place = self.outer.index(id(value))
        self.known.update(dict.fromkeys(self.outer[place:]))
        return len(self.outer) - place

    def inside(self, value: Any) -> Around:
        """Returns the same for the parts of a value."""
        return Around((*self.outer, id(value)), self.known)

    def keep(self, value: Any, described: Any) -> Any:
        """Keeps a description, unless it depends on what is around the value; returns it."""
        self.known.setdefault(id(value), (value, described))
        return described


def in_order(pairs: list[Any], text_of: Callable[[Any], str]) -> list[Any]:
    """Returns described pairs in the order of their texts, of which those of the items may be very long."""
    by_key = {text_of(pair[0]): pair for pair in pairs}
    return [by_key[text] for text in sorted(by_key)] if len(by_key) == len(pairs) else sorted(pairs, key=text_of)


def bounded(described: Any, deepest: int = _DEEPEST) -> Any:
    """Returns a description, or a digest of it if it has too many levels, or too many parts for its text.

    The text has a list as often as it has places, which may be far more often than it is looked at here.

    Args:
        described: the description.
        deepest: the most levels.
    """
    layer: Mapping[int, Any] = {0: [described]}
    places, parts = {0: 1}, 0
    for _ in range(deepest + 1):
        below: dict[int, Any] = {}
        places_below: dict[int, int] = collections.defaultdict(int)
        for number, container in layer.items():
            parts += places[number] * len(container)
            for item in container.values() if type(container) is dict else container:
                if type(item) in (list, dict):
                    below[key := id(item)] = item
                    places_below[key] += places[number]
        if parts > _LARGEST:
            break
        if not below:
            return described
        layer, places = below, places_below
    return {"digest": _digest_of(described, {})}


def _digest_of(described: Any, known: dict[int, Any]) -> Any:
    """Returns a digest of a description of lists and dicts; any other as it is."""
    if type(described) not in (list, dict):
        return described
    if id(described) not in known:
        names, items = ([*described], described.values()) if type(described) is dict else (None, described)
        known[id(described)] = [digest(json.dumps([names, *[_digest_of(item, known) for item in items]]).encode())]
    return known[id(described)]


def digest(data: bytes) -> str:
    """Returns a short digest of some bytes."""
    return hashlib.sha256(data).hexdigest()[:16]
