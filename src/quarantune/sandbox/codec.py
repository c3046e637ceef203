"""Turns frozen dataclasses into JSON-able frames and back, treating whatever does not fit as damage.

The receiver of a frame trusts nothing in it: a config may have written anything to its connection. `decode` therefore
checks every field against its annotation, down to the last element, before an object is made.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Frame = dict[str, Any]
_Message = TypeVar("_Message")
_Check = Callable[[Any], Any]
_KIND = "message"


class DamageError(ValueError):
    """A frame is not a message that was expected; the text says how it differs."""


def encode(message: Any) -> Frame:
    """Returns a message as a frame: its fields, and the name of its class under `message`.

    Args:
        message: a dataclass instance whose fields `decode` supports.
    """
    kind: Any = type(message)
    frame = {name: _plain(getattr(message, name)) for name in _fields(kind)}
    frame[_KIND] = kind.__name__
    return frame


def decode(frame: object, *expected: type[_Message]) -> _Message:
    """Returns the message that a frame holds.

    Args:
        frame: as parsed from JSON.
        expected: the classes that may arrive here.

    Raises:
        DamageError: the frame is none of these messages, or a field has a value that its annotation forbids.
    """
    if not isinstance(frame, dict):
        raise DamageError(f"a frame holds a {type(frame).__name__}, not an object")
    kind = frame.get(_KIND)
    for message_type in expected:
        if message_type.__name__ == kind:
            return typing.cast("_Message", _check_dataclass(message_type, {**frame, _KIND: None}, has_kind=True))
    names = ", ".join(message_type.__name__ for message_type in expected)
    raise DamageError(f"a message of kind {kind!r} arrived where one of these was expected: {names}")


def prepare(*message_types: type) -> None:
    """Compiles the checks of messages, so that forks of this process have them.

    Raises:
        TypeError: a message has a field that a frame cannot hold.
    """
    for message_type in message_types:
        _checks(message_type)


def _plain(value: Any) -> Any:
    """Returns a field's value as JSON can hold it."""
    if type(value) in _SCALARS:
        return value
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: _plain(getattr(value, name)) for name in _fields(type(value))}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value


_SCALARS = frozenset({str, int, float, bool, type(None)})


@functools.cache
def _fields(message_type: Any) -> dict[str, dataclasses.Field[Any]]:
    fields = {field.name: field for field in dataclasses.fields(message_type)}
    if _KIND in fields:
        raise TypeError(f"rename {message_type.__name__}.{_KIND}: in a frame, {_KIND!r} holds the name of the class")
    return fields


@functools.cache
def _checks(message_type: Any) -> dict[str, tuple[_Check, bool]]:
    """Returns a check for each field of a dataclass, and whether the field may be missing."""
    hints = typing.get_type_hints(message_type)
    return {
        name: (
            _check_for(hints[name]),
            field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING,
        )
        for name, field in _fields(message_type).items()
    }


def _check_dataclass(message_type: Any, value: Any, *, has_kind: bool = False) -> Any:
    if not isinstance(value, dict):
        raise DamageError(f"{message_type.__name__} is {value!r:.100}, not an object")
    checks = _checks(message_type)
    if unknown := value.keys() - checks.keys() - ({_KIND} if has_kind else set()):
        raise DamageError(f"{message_type.__name__} has no field {sorted(map(str, unknown))[0]!r}")
    fields = {}
    for name, (check, is_optional) in checks.items():
        if name in value:
            try:
                fields[name] = check(value[name])
            except DamageError as error:
                raise DamageError(f"{message_type.__name__}.{name}: {error}") from None
        elif not is_optional:
            raise DamageError(f"{message_type.__name__} lacks {name!r}")
    return message_type(**fields)


def _check_for(hint: Any) -> _Check:
    """Returns the check that an annotation stands for."""
    if hint is Any:
        return lambda value: value
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _union([_check_for(argument) for argument in arguments], hint)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return _sequence(_check_for(arguments[0]))
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(_check_for(arguments[1]))
    if dataclasses.is_dataclass(hint):
        return functools.partial(_check_dataclass, hint)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _member(hint)
    if hint is float:
        return _number
    if hint in (bool, int, str, type(None)):
        return _exactly(hint)
    raise TypeError(f"messages cannot hold fields of type {hint}")


def _exactly(kind: type) -> _Check:
    def check(value: Any) -> Any:
        if type(value) is not kind:
            raise DamageError(f"{value!r:.100} is no {kind.__name__}")
        return value

    return check


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise DamageError(f"{value!r:.100} is no number")
    try:
        number = float(value)
    except OverflowError:
        raise DamageError(f"{value!r:.30}... is beyond any float") from None
    if math.isnan(number):
        raise DamageError("NaN is no number")
    return number


def _member(kind: type[enum.Enum]) -> _Check:
    def check(value: Any) -> enum.Enum:
        try:
            return kind(value)
        except ValueError:
            raise DamageError(f"{value!r:.100} is no {kind.__name__}") from None

    return check


def _sequence(check_item: _Check) -> _Check:
    def check(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise DamageError(f"{value!r:.100} is no list")
        return tuple([check_item(item) for item in value])

    return check


def _mapping(check_item: _Check) -> _Check:
    def check(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise DamageError(f"{value!r:.100} is no object")
        return {key: check_item(item) for key, item in value.items()}

    return check


def _union(checks: list[_Check], hint: Any) -> _Check:
    def check(value: Any) -> Any:
        for check_one in checks:
            try:
                return check_one(value)
            except DamageError:
                continue
        raise DamageError(f"{value!r:.100} is no {hint}")

    return check
