"""Messages become JSON and messages again, and nothing else does."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Mapping
from typing import Any

import pytest

from quarantune.values.codec import DamageError, decode, encode, prepare


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass(frozen=True)
class Point:
    x: int
    y: float | None = None


@dataclasses.dataclass(frozen=True)
class Drawn:
    trial: int
    samples_ms: tuple[float, ...]
    color: Color
    is_last: bool
    point: Point
    environ: Mapping[str, str]
    config: Any = None


@dataclasses.dataclass(frozen=True)
class Ended: ...


MESSAGE = Drawn(3, (1.0, 2.5), Color.RED, False, Point(1, 0.5), {"A": "1"}, {"BM": [1, None]})


def sent(message: Any) -> Any:
    return json.loads(json.dumps(encode(message)))


@pytest.mark.parametrize("message", [MESSAGE, Ended(), dataclasses.replace(MESSAGE, point=Point(2))])
def test_a_message_arrives_as_it_was_sent(message: Any) -> None:
    assert decode(sent(message), Ended, Drawn) == message


@pytest.mark.parametrize("whole", [True, False])
def test_a_field_with_a_default_may_be_missing(whole: bool) -> None:
    frame = sent(MESSAGE)
    if not whole:
        del frame["config"]
    assert decode(frame, Drawn).config == (MESSAGE.config if whole else None)


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (3, "a frame holds a int"),
        ([], "a frame holds a list"),
        ({}, "of kind None"),
        ({"message": "Ended", "more": 1}, "Ended has no field 'more'"),
        (sent(MESSAGE) | {"trial": True}, "Drawn.trial: True is no int"),
        (sent(MESSAGE) | {"trial": 1.0}, "Drawn.trial: 1.0 is no int"),
        (sent(MESSAGE) | {"samples_ms": [1, "x"]}, "Drawn.samples_ms: 'x' is no number"),
        (sent(MESSAGE) | {"samples_ms": [10**400]}, "beyond any float"),
        (sent(MESSAGE) | {"samples_ms": [float("nan")]}, "NaN is no number"),
        (sent(MESSAGE) | {"samples_ms": 1}, "1 is no list"),
        (sent(MESSAGE) | {"color": "green"}, "'green' is no Color"),
        (sent(MESSAGE) | {"color": ["red"]}, r"\['red'\] is no Color"),
        (sent(MESSAGE) | {"point": {"x": "1"}}, "Drawn.point: Point.x: '1' is no int"),
        (sent(MESSAGE) | {"point": []}, "not an object"),
        (sent(MESSAGE) | {"environ": {"A": 1}}, "Drawn.environ: 1 is no str"),
        ({key: value for key, value in sent(MESSAGE).items() if key != "is_last"}, "Drawn lacks 'is_last'"),
    ],
)
def test_a_frame_that_does_not_fit_is_damage(frame: Any, said: str) -> None:
    with pytest.raises(DamageError, match=said):
        decode(frame, Ended, Drawn)


def test_a_message_that_is_not_expected_here_is_damage() -> None:
    with pytest.raises(DamageError, match="'Drawn' arrived where one of these was expected: Ended"):
        decode(sent(MESSAGE), Ended)


def test_a_message_class_with_a_field_named_message_is_refused() -> None:
    @dataclasses.dataclass(frozen=True)
    class Told:
        message: str

    for use in (prepare, lambda kind: encode(kind("x")), lambda kind: decode({"message": "Told"}, kind)):
        with pytest.raises(TypeError, match=r"rename Told\.message"):
            use(Told)
