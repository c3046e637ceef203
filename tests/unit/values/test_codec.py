"""Messages survive a round trip through JSON, and nothing else is accepted."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pytest

from quarantune.values.codec import IN_MEMORY, DamageError, Record, decode, encode, prepare, within


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
        (sent(MESSAGE) | {"trial": True}, "Drawn.trial: True is not of type int"),
        (sent(MESSAGE) | {"trial": 1.0}, "Drawn.trial: 1.0 is not of type int"),
        (sent(MESSAGE) | {"samples_ms": [1, "x"]}, "Drawn.samples_ms: 'x' is not a number"),
        (sent(MESSAGE) | {"samples_ms": [10**400]}, "beyond any float"),
        (sent(MESSAGE) | {"samples_ms": [float("nan")]}, "NaN is not allowed"),
        (sent(MESSAGE) | {"samples_ms": 1}, "1 is not a list"),
        (sent(MESSAGE) | {"color": "green"}, "'green' is not a member of Color"),
        (sent(MESSAGE) | {"color": ["red"]}, r"\['red'\] is not a member of Color"),
        (sent(MESSAGE) | {"point": {"x": "1"}}, "Drawn.point: Point.x: '1' is not of type int"),
        (sent(MESSAGE) | {"point": []}, "not an object"),
        (sent(MESSAGE) | {"environ": {"A": 1}}, "Drawn.environ: 1 is not of type str"),
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


# --- records ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sample(Record):
    name: str
    share: Annotated[float, within(0, 1)] = 0.5
    place: tuple[int, str] = (0, "a")
    kind: bool | Literal["near"] = False
    opened: Any = dataclasses.field(default=None, metadata=IN_MEMORY)


@dataclasses.dataclass(frozen=True)
class Forgiving(Sample):
    IS_LENIENT = True


FULL = Sample("x", 0.25, (3, "b"), "near", object())


def test_a_record_is_read_as_written_without_memory_fields() -> None:
    data = json.loads(json.dumps(FULL.to_json()))
    assert data == {"name": "x", "share": 0.25, "place": [3, "b"], "kind": "near"}
    assert Sample.from_json(data) == dataclasses.replace(FULL, opened=None)


def test_fields_that_another_version_wrote_are_left_out() -> None:
    assert Sample.from_json({"name": "x", "later": 1, "opened": "forged"}) == Sample("x")


ODD = [
    ("share", 1.0),
    ("share", 10**400),
    ("share", float("nan")),
    ("share", True),
    ("place", [3]),
    ("place", [3, "b", 4]),
    ("place", ["b", 3]),
    ("place", {"0": 3}),
    ("kind", "far"),
    ("kind", []),
    ("kind", 1),
]


@pytest.mark.parametrize(("name", "value"), ODD)
def test_a_misfit_value_is_damage_unless_the_record_is_lenient(name: str, value: Any) -> None:
    data = {"name": "x", "share": 0.25} | {name: value}
    with pytest.raises(DamageError, match=f"Sample.{name}"):
        Sample.from_json(data)
    found = Forgiving.from_json(data)
    assert getattr(found, name) == getattr(Forgiving("x"), name)
    assert found.share == (0.5 if name == "share" else 0.25)


@pytest.mark.parametrize("data", [None, 3, [], "x", {}, {"name": 3}])
def test_a_record_without_a_field_that_it_needs_is_damage(data: Any) -> None:
    for kind in (Sample, Forgiving):
        with pytest.raises(DamageError):
            kind.from_json(data)
