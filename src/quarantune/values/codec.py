"""Turns frozen dataclasses and values of configs into JSON-able data and back. Data that does not fit is damage.

This module reads all data from outside of this process: the frames of workers, and the records of files, of other
machines and of other ranks. It trusts none of it: a config may have written anything to its connection, and anybody to
a shared directory. So it checks every field against its annotation, down to the last element, before it makes an
object. In `Annotated[T, rule]`, the rule takes a value of type T and returns the value to use, or raises `ValueError`.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import functools
import hashlib
import json
import math
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, NoReturn, Self, TypeAlias, TypeGuard, TypeVar

from quarantune.host.process import without_collections

JsonObject: TypeAlias = dict[str, Any]
"""A JSON object, decoded or ready to encode."""
_Message = TypeVar("_Message")
_Check = Callable[[Any], Any]
_KIND = "message"
_UNCOLLECTED_BYTES = 1 << 18
"""Size of a text above which the garbage collector rests during decoding."""
_DEEPEST_JSON = 100
SHORTEST_MS = 1e-6
"""Shortest plausible time of a call: a nanosecond."""
LONGEST_MS = 1e8
"""Bound above all plausible times. Longer samples are clock errors: a device clock has returned nearly 2^64 ns."""
_PLAIN = frozenset({int, str, float, bool, type(None)})
"""Types of most values of configs, which have no fields to look at."""


class DamageError(ValueError):
    """Data from outside is damaged or unexpected; the text says how."""


class Record:
    """The base of frozen dataclasses that files, other machines or other ranks hold as JSON.

    Reading ignores unknown fields, because another version may have written them. JSON does not hold a field that has
    `metadata=IN_MEMORY`.

    Attributes:
        IS_LENIENT: whether the default of a field replaces a malformed value; otherwise that is damage.
    """

    IS_LENIENT: ClassVar[bool] = False

    def to_json(self) -> JsonObject:
        """Returns the record as JSON-able data."""
        return _plain_fields(self)

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Returns the record that JSON data describes.

        Raises:
            DamageError: the data does not describe a record of this class.
        """
        return typing.cast("Self", _check_dataclass(cls, data))


IN_MEMORY: Mapping[str, bool] = {"in_memory": True}


def decode_json(content: str | bytes) -> Any:
    """Returns the value of a JSON text.

    Raises:
        ValueError: the text is not JSON, holds NaN or infinity, or is nested too deeply.
    """
    with without_collections() if len(content) > _UNCOLLECTED_BYTES else contextlib.nullcontext():
        try:
            value = json.loads(content, parse_constant=_refuse_constant)
        except RecursionError as error:
            raise ValueError(str(error)) from None
        _check_depth(value)
    return value


def _check_depth(value: Any) -> None:
    # One comprehension for each depth, for speed: a cache of ten thousand entries holds a hundred thousand dicts.
    layer: list[Any] = [value] if type(value) in (dict, list) else []
    for _ in range(_DEEPEST_JSON + 1):
        layer = [
            item
            for outer in layer
            for item in (outer.values() if type(outer) is dict else outer)
            if type(item) in (dict, list)
        ]
        if not layer:
            return
    raise ValueError(f"it is nested more than {_DEEPEST_JSON} deep")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def within(least: float, most: float) -> Callable[[Any], Any]:
    """Returns a rule for numbers from `least` to below `most`."""

    def rule(value: Any) -> Any:
        # Compared without conversion: a huge integer does not fit a float.
        if not least <= value < most:
            raise ValueError(f"{value!r:.30} is not from {least:g} to below {most:g}")
        return value

    return rule


def is_number(value: object) -> TypeGuard[float]:
    """Returns whether a value is a number. Booleans are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_whole(value: object, least: int) -> TypeGuard[int]:
    """Returns whether a value is a whole number of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_plausible_ms(time_ms: object) -> TypeGuard[float]:
    """Returns whether a value, which may be anything, can be the time of one call in milliseconds."""
    # Compared without conversion: a huge integer does not fit a float.
    return is_number(time_ms) and SHORTEST_MS <= time_ms < LONGEST_MS


# --- messages and records ---


def encode(message: Any) -> JsonObject:
    """Returns a message as a frame: its fields, and the name of its class under `message`.

    Args:
        message: a dataclass instance whose fields `decode` supports.
    """
    _check_name(type(message))
    return _plain_fields(message) | {_KIND: type(message).__name__}


def decode(frame: object, *expected: type[_Message]) -> _Message:
    """Returns the message that a frame holds.

    Args:
        frame: the data parsed from JSON.
        expected: the classes that may arrive here.

    Raises:
        DamageError: the frame is not one of these messages, or a field has a value that its annotation forbids.
    """
    if not isinstance(frame, dict):
        raise DamageError(f"a frame holds a {type(frame).__name__}, not an object")
    kind = frame.get(_KIND)
    for message_type in expected:
        if message_type.__name__ == kind:
            _check_name(message_type)
            return typing.cast("_Message", _check_dataclass(message_type, frame, has_kind=True))
    names = ", ".join(message_type.__name__ for message_type in expected)
    raise DamageError(f"a message of kind {kind!r} arrived where one of these was expected: {names}")


def prepare(*message_types: type) -> None:
    """Compiles the checks of messages, so that forks of this process have them.

    Raises:
        TypeError: a message has a field that a frame cannot hold.
    """
    for message_type in message_types:
        _check_name(message_type)
        _checks(message_type)


def _plain_fields(value: Any) -> JsonObject:
    kind: Any = type(value)
    return {name: _plain(getattr(value, name)) for name in _fields(kind)}


def _plain(value: Any) -> Any:
    """Returns the JSON form of a field's value."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Record):
        return value.to_json()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain_fields(value)
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value


@functools.cache
def _fields(kind: Any) -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(kind) if "in_memory" not in field.metadata}


def _check_name(message_type: Any) -> None:
    if _KIND in _fields(message_type):
        raise TypeError(f"rename {message_type.__name__}.{_KIND}: in a frame, {_KIND!r} holds the name of the class")


@functools.cache
def _checks(kind: Any) -> dict[str, tuple[_Check, bool]]:
    """Returns a check for each field of a dataclass, and whether the field may be missing."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {
        name: (
            _check_for(hints[name]),
            field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING,
        )
        for name, field in _fields(kind).items()
    }


def _check_dataclass(kind: Any, value: Any, *, has_kind: bool = False) -> Any:
    if not isinstance(value, dict):
        raise DamageError(f"{kind.__name__} is {value!r:.100}, not an object")
    checks, is_record = _checks(kind), issubclass(kind, Record)
    if not is_record and (unknown := value.keys() - checks.keys() - ({_KIND} if has_kind else set())):
        raise DamageError(f"{kind.__name__} has no field {sorted(map(str, unknown))[0]!r}")
    fields = {}
    for name, (check, is_optional) in checks.items():
        if name in value:
            try:
                fields[name] = check(value[name])
            except ValueError as error:
                if not (is_optional and is_record and kind.IS_LENIENT):
                    raise DamageError(f"{kind.__name__}.{name}: {error}") from None
        elif not is_optional:
            raise DamageError(f"{kind.__name__} lacks {name!r}")
    return kind(**fields)


def _check_for(hint: Any) -> _Check:
    """Returns the check that an annotation stands for."""
    if hint is Any:
        return lambda value: value
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        check_type, rule = _check_for(arguments[0]), arguments[1]
        return lambda value: rule(check_type(value))
    if origin is Literal:
        return one_of(*arguments)
    if origin in (typing.Union, types.UnionType):
        return functools.partial(_any_of, [_check_for(argument) for argument in arguments], hint)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return functools.partial(_sequence, _check_for(arguments[0]))
    if origin is tuple:
        return functools.partial(_row, [_check_for(argument) for argument in arguments])
    if origin is not None and issubclass(origin, Mapping):
        return functools.partial(_mapping, _check_for(arguments[1]))
    if dataclasses.is_dataclass(hint):
        return getattr(hint, "from_json", None) or functools.partial(_check_dataclass, hint)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return functools.partial(_member, hint)
    if hint is float:
        return _number
    if hint in (bool, int, str, type(None)):
        return functools.partial(_exactly, hint)
    raise TypeError(f"messages cannot hold fields of type {hint}")


def one_of(*known: str) -> _Check:
    """Returns a rule for a few texts."""

    def check(value: Any) -> Any:
        if not isinstance(value, str) or value not in known:
            raise DamageError(f"{value!r:.100} is not one of {known}")
        return value

    return check


def _exactly(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise DamageError(f"{value!r:.100} is not of type {kind.__name__}")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise DamageError(f"{value!r:.100} is not a number")
    try:
        number = float(value)
    except OverflowError:
        raise DamageError(f"{value!r:.30}... is beyond any float") from None
    if math.isnan(number):
        raise DamageError("NaN is not allowed")
    return number


def _member(kind: type[enum.Enum], value: Any) -> enum.Enum:
    try:
        return kind(value)
    except ValueError:
        raise DamageError(f"{value!r:.100} is not a member of {kind.__name__}") from None


def _sequence(check_item: _Check, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise DamageError(f"{value!r:.100} is not a list")
    return tuple([check_item(item) for item in value])


def _row(checks: list[_Check], value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list) or len(value) != len(checks):
        raise DamageError(f"{value!r:.100} is not a list of {len(checks)}")
    return tuple([check_item(item) for check_item, item in zip(checks, value, strict=True)])


def _mapping(check_item: _Check, value: Any) -> JsonObject:
    if not isinstance(value, dict):
        raise DamageError(f"{value!r:.100} is not an object")
    return {key: check_item(item) for key, item in value.items()}


def _any_of(checks: list[_Check], hint: Any, value: Any) -> Any:
    if value is None and type(None) in typing.get_args(hint):  # at once, since most optional fields are
        return None
    for check_one in checks:
        try:
            return check_one(value)
        except ValueError:
            continue
    raise DamageError(f"{value!r:.100} is not of type {hint}")


# --- values of configs: in memory, as JSON, and restored ---


class FrozenDict(dict[str, Any]):
    """A dict that cannot change. It has a hash, which `jax.jit` needs of every static argument."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> Any:
        """Pickles like an ordinary dict."""
        return FrozenDict, (dict(self),)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("a config's dict cannot be changed: change a copy, dict(...)")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse


def freeze(value: Any) -> Any:
    """Returns a config value with lists turned into tuples and dicts into `FrozenDict`, so that jit can hash it."""
    if isinstance(value, (list, tuple)) and not is_tagged(value):
        return tuple(map(freeze, value))
    return FrozenDict({key: freeze(item) for key, item in value.items()}) if isinstance(value, Mapping) else value


def frozen(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config from JSON with values that jit can hash."""
    return {name: freeze(value) for name, value in config.items()}


def is_tagged(value: Any) -> bool:
    """Returns whether JSON needs a tag for a value: an enum's member, a dtype, a dataclass or a named tuple."""
    return isinstance(value, enum.Enum) or field_names(value) is not None or dtype_name(value) is not None


def dtype_name(value: Any) -> str | None:
    """Returns the name of a numeric dtype, or of a type such as `jnp.bfloat16`; None for anything else."""
    if (np := sys.modules.get("numpy")) is None:
        return None  # no dtype can exist without NumPy, and reading a cache does not import it
    dtype = value
    if isinstance(value, type):
        dtype = np.dtype(value) if issubclass(value, np.generic) else getattr(value, "dtype", None)
    if not isinstance(dtype, np.dtype) or not dtype.isnative:
        return None
    return dtype.name if dtype.kind in "biufc" or dtype.type.__module__ == "ml_dtypes" else None


def field_names(value: Any) -> list[str] | None:
    """Returns the names of a dataclass's or a named tuple's fields; None for anything else."""
    if type(value) in _PLAIN:
        return None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [field.name for field in dataclasses.fields(value)]
    return list(value._fields) if isinstance(value, tuple) and hasattr(value, "_fields") else None


def tagged(value: Any) -> JsonObject:
    """Returns a dict in place of an enum's member, a dtype, a dataclass or a named tuple, with unchanged fields.

    It names the type by its qualified name without the module: one file may be `__main__` here and a module there.
    """
    name = type(value).__qualname__
    if isinstance(value, enum.Enum):
        return {"$enum": f"{name}.{value.name if value.name is not None else value.value}"}
    if (dtype := dtype_name(value)) is not None:
        return {"$dtype": dtype}
    return {"$type": name} | {field: getattr(value, field) for field in field_names(value) or ()}


def as_json(value: Any) -> Any:
    """Returns the JSON form of a config, or of one of its values."""
    if type(value) in _PLAIN:
        return value
    if is_tagged(value):
        value = tagged(value)
    if isinstance(value, Mapping):
        return {key: as_json(item) for key, item in value.items()}
    return [as_json(item) for item in value] if isinstance(value, (list, tuple)) else value


def text_of(value: Any) -> str:
    """Returns a text that equal configs, or values, share; 1 and True are not equal."""
    return json.dumps(as_json(value), sort_keys=True, separators=(",", ":"))


def equal(value: Any, other: Any) -> bool:
    """Returns whether two configs, or values, are equal. 1, True and 1.0 differ, as do an enum's member and value."""
    try:
        return bool(value == other) and text_of(value) == text_of(other)
    except TypeError:  # JSON cannot hold an argument that a caller passes in place of a config's value
        return True


def originals(configs: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the values that JSON alone does not preserve, by their texts, for `restore`."""
    values = (value for config in configs for value in config.values())
    return {text_of(value): value for value in values if has_tag(as_json(value))}


def restore(config: Mapping[str, Any], originals: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config with the values that it had before it went through JSON.

    It imports and builds nothing by name: a file can only select one of the values that already exist here.

    Args:
        config: the result of `as_json`.
        originals: the values to restore, by their texts.
    """
    return {
        name: originals[text] if (text := text_of(value)) in originals else freeze(value)
        for name, value in config.items()
    }


def has_tag(value: Any) -> bool:
    """Returns whether `tagged` made a part of an encoded value, so that JSON alone cannot restore it."""
    if isinstance(value, Mapping):
        return any(str(key).startswith("$") for key in value) or any(map(has_tag, value.values()))
    return isinstance(value, (list, tuple)) and any(map(has_tag, value))


# --- descriptions of values inside each other ---

_DEEPEST, _LARGEST = 97, 1 << 22
"""Most levels of a description, because `decode_json` refuses more, and most parts, because more take minutes."""


class Around(NamedTuple):
    """The surroundings of a value inside others, for describing it.

    It keeps descriptions, because a few lists that hold each other twice would otherwise take for ever.

    Attributes:
        outer: the identities of the values that hold it, outermost first.
        known: values and their descriptions, by identity. None for a value inside itself, because its description
            depends on the values around it.
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
        """Returns the surroundings of a value's parts."""
        return Around((*self.outer, id(value)), self.known)

    def keep(self, value: Any, described: Any) -> Any:
        """Keeps a description, unless it depends on the values around; returns it."""
        self.known.setdefault(id(value), (value, described))
        return described


def in_order(pairs: list[Any], text_of: Callable[[Any], str]) -> list[Any]:
    """Returns described pairs sorted by text. If all keys differ, it makes no texts of items, which may be long."""
    by_key = {text_of(pair[0]): pair for pair in pairs}
    return [by_key[text] for text in sorted(by_key)] if len(by_key) == len(pairs) else sorted(pairs, key=text_of)


def bounded(described: Any, deepest: int = _DEEPEST) -> Any:
    """Returns a description, or a digest of it if it has too many levels, or too many parts for its text.

    The text repeats a list for each of its places. This function visits it once for each level.

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
    """Returns a digest of a list or dict of descriptions; any other description unchanged."""
    if type(described) not in (list, dict):
        return described
    if id(described) not in known:
        names, items = ([*described], described.values()) if type(described) is dict else (None, described)
        known[id(described)] = [digest(json.dumps([names, *[_digest_of(item, known) for item in items]]).encode())]
    return known[id(described)]


def digest(data: bytes) -> str:
    """Returns a short digest of some bytes."""
    return hashlib.sha256(data).hexdigest()[:16]


# --- JSON in files ---


def leaves_of(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yields the leaves of a value, each with its path of names and indices."""
    if isinstance(value, (Mapping, list, tuple)) and value:
        for name, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from leaves_of(item, (*path, name))
    else:
        yield path, value


def canonical_json(value: Any) -> str:
    """Returns the canonical JSON text for a value: sorted keys, no whitespace, ASCII.

    NumPy scalars count as the Python scalars they hold, and tuples as lists. True, 1 and 1.0 differ.

    Args:
        value: JSON-able data.

    Raises:
        TypeError: JSON cannot hold a part of the value.
        ValueError: a part of the value is NaN or infinite.
    """
    return json.dumps(plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False)


def plain(value: Any, *, finite_only: bool = True) -> Any:
    """Returns a value in the types that JSON returns: None, bool, int, float, str, list and dict with text keys.

    Args:
        value: JSON-able data.
        finite_only: whether to refuse NaN and infinity; else they become None.

    Raises:
        TypeError: JSON cannot hold a part of the value.
        ValueError: a part of the value is NaN or infinite.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        if finite_only:
            raise ValueError(f"{value!r} cannot be kept in the cache: JSON has no NaN or infinity; use None")
        return None
    if isinstance(value, (list, tuple)):
        return [plain(item, finite_only=finite_only) for item in value]
    if isinstance(value, Mapping):
        return {_plain_key(key): plain(item, finite_only=finite_only) for key, item in value.items()}
    if _is_numpy_scalar(value):
        item = value.item()
        return plain(float(item) if _is_numpy_scalar(item) else item, finite_only=finite_only)
    raise TypeError(
        f"{value!r} of type {type(value).__name__} cannot be kept in the cache: "
        "use None, bool, int, float, str, or lists, tuples and dicts of them"
    )


def _plain_key(key: Any) -> str:
    if not isinstance(key, str):
        raise TypeError(f"the dict key {key!r} cannot be kept in the cache: use text, str({key!r})")
    return str.__str__(key)


def _is_numpy_scalar(value: Any) -> bool:
    # Without an import of NumPy, the value cannot be a NumPy scalar, and importing NumPy here would take time.
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def short_hash(text: str) -> str:
    """Returns a hash of a text, in 12 hexadecimal digits."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]
