"""Calls to be tuned later: listed for a block of code or a program, or written down and made again from that."""

from __future__ import annotations

import ast
import atexit
import contextlib
import dataclasses
import inspect
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from quarantune import jax_internals
from quarantune.cache import journal
from quarantune.cache import store as cache
from quarantune.cache.journal import Journal
from quarantune.cache.store import CacheWriteError, short_text
from quarantune.host.process import cache_name, module_name, new_lock
from quarantune.host.shared_files import advice
from quarantune.resolve.call_key import KeyedCall, TunedFunction, keyed
from quarantune.transport import arrays, assignment
from quarantune.transport.arrays import dtype_from_name
from quarantune.transport.problem import Arguments, is_array, with_leaves
from quarantune.values import settings as environment
from quarantune.values.codec import IN_MEMORY, DamageError, JsonObject, Record, decode_json, within
from quarantune.values.describe import canonical_dtype, sharding_of
from quarantune.values.texts import call_text

if TYPE_CHECKING:
    from quarantune.resolve.resolver import Resolver
    from quarantune.results.result import TuningResult

_numbers = itertools.count()
_SEED = 0
_NUMBERS: Mapping[str, Any] = {"bool": True, "int": 1, "float": 1.0, "complex": 1j}
_KEY_IMPLEMENTATIONS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}
"""The implementations of PRNG keys by the names of their dtypes."""
_PLAIN_TREE = re.compile(r"PyTreeDef\((.*)\)", re.DOTALL)
_LEAF = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\*""")
"""A quoted key of a dict, or the star that stands for a leaf."""


@contextlib.contextmanager
def recording() -> Iterator[list[RecordedCall]]:
    """Lists the calls of a block of code, in this thread, that have no saved result; none of them is tuned.

    They run with the function's defaults, whatever `ON_MISS` says, unless that is `nearest` or `error`. Where
    `QUARANTUNE_RECORD` is set, they are written down there, too. Programs that JAX has compiled before are not traced
    again, so that the calls inside are not met.

    Yields:
        The calls so far, each once, in the order of their first calls; `tune_many` tunes them.

    Example:
        >>> with recording() as calls:  # doctest: +SKIP
        ...     train_step(state, batch)
        >>> quarantune.tune_many(calls)  # doctest: +SKIP
    """
    calls, add = _list_of_calls()
    outer = environment.current().record

    def note_both(described: KeyedCall, resolver: Resolver) -> None:
        add(described, resolver)
        note(described, resolver, outer)

    with environment.settings(record=note_both):
        yield calls


def calls_in(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[RecordedCall]:
    """Lists the calls of tuned functions inside a program, which is traced and neither compiled nor run.

    Tuned or not, each call is listed once, as `recording` would do it, with the number of times that the program's
    trace meets it. Where `QUARANTUNE_RECORD` is set, those without a saved result are written down there, too.

    Args:
        fn: the program: what `jax.jit` returned, or a function that it could take.
        *args: its positional arguments; arrays may be `jax.ShapeDtypeStruct`.
        **kwargs: its keyword arguments.

    Returns:
        The calls, in the order of their first calls; `tune_many` tunes them.

    Example:
        >>> quarantune.tune_many(quarantune.calls_in(jax.jit(train_step), state, batch))  # doctest: +SKIP
    """
    # JAX keeps traces. This one, with the defaults, serves no other call, as no other has the number.
    data = {"others": assignment.DEFAULT, "chosen": {}, "number": next(_numbers)}
    listing = assignment.Assignment(json.dumps(data))
    calls, listing.note = _list_of_calls()
    trace = getattr(fn, "trace", None) or getattr(fn, "lower", None) or jax.jit(fn).trace
    with listing.in_force():
        trace(*args, **kwargs)
    return calls


def _list_of_calls() -> tuple[list[RecordedCall], Callable[[KeyedCall, Resolver], None]]:
    """Returns a list of calls, and a function that adds a call to it, or counts it once more."""
    calls: list[RecordedCall] = []
    met: dict[Any, RecordedCall] = {}

    def add(described: KeyedCall, resolver: Resolver) -> None:
        about = call_of(described)
        known = met.get(about) or dataclasses.replace(RecordedCall.of(described, resolver), count=0)
        met[about] = dataclasses.replace(known, count=known.count + 1)
        calls[:] = met.values()

    return calls, add


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedCall(Record):
    """A call of a tuned function, without the elements of its arrays.

    Attributes:
        function: the function as `MODULE:NAME`.
        name: its name in the cache.
        device: the kind of device that the call runs on.
        arguments: descriptions of the arguments by parameter: shapes, dtypes and shardings; static arguments by value.
        bucket: the part of the key in place of the arguments where the function has a `key_fn`; else None.
        jax_settings: JAX's settings that are part of the key.
        count: how often the call was met.
        call: in the process that met it, its arguments with a `jax.ShapeDtypeStruct` for each array; else None.
    """

    function: Annotated[str, short_text]
    name: Annotated[str, short_text]
    device: Annotated[str, short_text]
    arguments: Mapping[str, Any]
    bucket: Mapping[str, Any] | None = None
    jax_settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    count: Annotated[int, within(1, 1 << 53)] = 1
    call: Arguments | None = dataclasses.field(default=None, compare=False, repr=False, metadata=IN_MEMORY)
    _resolver: Any = dataclasses.field(default=None, compare=False, repr=False, metadata=IN_MEMORY)

    @classmethod
    def of(cls, described: KeyedCall, resolver: Resolver | None = None) -> RecordedCall:
        """Returns the record of a call, which `tune` can tune if its resolver is given."""
        fn = described.call.function.fn
        module, name = module_name(fn), cache_name(fn)
        arguments = described.arguments
        return cls(
            function=f"{module}:{name.removeprefix(f'{module}.')}",
            name=described.call.name,
            device=described.key.device,
            arguments=arguments,
            bucket=None if described.values == arguments else described.values,
            jax_settings=described.jax_state,
            call=None if resolver is None else _without_values(described),
            _resolver=resolver,
        )

    @property
    def identity(self) -> str:
        """The call with its settings as text, whatever the function's code is and however often it was met."""
        return cache.canonical_json([self.name, self.device, self.arguments, self.bucket, self.jax_settings])

    def tune(self) -> TuningResult:
        """Returns the result for the call, from the cache or by tuning now.

        Raises:
            TypeError: another process met the call.
            ValueError: JAX's settings have changed since.
        """
        if self.call is None:
            raise TypeError(f"{self}: another process met this call: use `quarantune tune --recorded`")
        call = self._resolver.bind(*self.call)
        if (now := keyed(call).jax_state) != self.jax_settings:
            met = f"it was met under JAX's settings {self.jax_settings}, and now they are {now}"
            raise ValueError(f"{self}: {met}: tune it in the context in which it was met, or from QUARANTUNE_RECORD")
        return cast("TuningResult", self._resolver.result(call))

    def __str__(self) -> str:
        """Returns the call on one line."""
        return f"{self.name}({call_text(self.arguments)})"


def _without_values(described: KeyedCall) -> Arguments:
    call = described.call

    def has_shape(leaf: Any) -> bool:  # a struct in place of NumPy's array is another call of a plain function
        return is_array(leaf) and (call.function.is_jitted or not isinstance(leaf, np.ndarray))

    def struct(array: Any) -> jax.ShapeDtypeStruct:
        dtype, is_weak = canonical_dtype(array.dtype), bool(getattr(array, "weak_type", False))
        return jax.ShapeDtypeStruct(array.shape, dtype, weak_type=is_weak, sharding=sharding_of(array))

    return with_leaves(call.args, call.kwargs, has_shape, struct)


def note(described: KeyedCall, resolver: Resolver, record: Path | Callable[..., None] | None) -> None:
    """Notes a call where the setting `record` says: in a directory, or in the list of a block of code."""
    if callable(record):
        record(described, resolver)
    elif record is not None:
        _writers.setdefault((os.getpid(), record), _Writer(record)).add(described)  # a fork has met nothing yet


def call_of(described: KeyedCall) -> Any:
    """Returns a value by which a process tells calls apart, also those that share a key of `key_fn`."""
    has_bucket = described.call.function.options.key_fn is not None
    return described.call.name, described.key, cache.canonical_json(described.arguments) if has_bucket else ""


def read(directory: Path) -> list[RecordedCall]:
    """Returns the calls that are written down in a directory, each once, the most frequent first.

    Anybody may have written to it: whatever is no record is left out, and reported once.
    """
    found: dict[str, RecordedCall] = {}
    damaged = 0
    for data in journal.records_below(directory, ".calls"):
        try:
            call = RecordedCall.from_json(data)
        except DamageError:
            damaged += 1
            continue
        before = found[call.identity].count if call.identity in found else 0
        found[call.identity] = dataclasses.replace(call, count=before + call.count)
    if damaged:
        cache.report_once(f"{damaged} lines below {str(directory)!r} are no records of calls, and are left out")
    return sorted(found.values(), key=lambda call: -call.count)


class _Writer:
    """Writes the calls of this process into a directory: each at once, and how often it was met now and then."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = new_lock()
        self._met: dict[Any, tuple[RecordedCall, int]] = {}

    def add(self, described: KeyedCall) -> None:
        """Counts a call, and writes that down where it is new or was met twice as often since."""
        about = call_of(described)
        with self._lock:
            record, written = self._met.get(about) or (dataclasses.replace(RecordedCall.of(described), count=0), 0)
            record = dataclasses.replace(record, count=record.count + 1)
            self._met[about] = record, written
            if record.count >= 2 * written:  # a process that is killed has told of half of its calls
                self.flush([about])

    def flush(self, those: Iterable[Any] = ()) -> None:
        """Writes down how often some calls, or all, were met since."""
        with self._lock:
            for about in those or [*self._met]:
                record, written = self._met[about]
                try:
                    if more := record.count - written:  # one file for all calls of a function
                        calls = Journal(self._directory, record.name, record.device, "calls", suffix=".calls")
                        calls.append(dataclasses.replace(record, count=more).to_json())
                        self._met[about] = record, record.count
                except CacheWriteError as error:
                    cause = error.__cause__ if isinstance(error.__cause__, OSError) else OSError(0, str(error))
                    fault = f"calls cannot be recorded in {str(self._directory)!r} ({cause.strerror})"
                    cache.report_once(f"{fault}: {advice(cause)}, or set QUARANTUNE_RECORD to another directory")


_writers: dict[tuple[int, Path], _Writer] = {}


@atexit.register
def _flush() -> None:
    for (process, _), writer in list(_writers.items()):
        if process == os.getpid():
            writer.flush()


class CannotRebuildError(Exception):
    """The key does not tell enough about an argument; the message names it."""


def rebuilt(key: str, function: TunedFunction) -> Arguments:
    """Returns arguments like those of the call that a key describes, without tunables.

    Arrays of a jitted function are given as `jax.ShapeDtypeStruct`, so that the sweep makes their elements by `supply`.
    Those of any other callable are NumPy arrays with such elements, unless `supply` is a function. A Python number, of
    which the key holds the type only, is 1.

    Args:
        key: the key of an entry.
        function: the function that it is for.

    Raises:
        CannotRebuildError: the key does not hold a value, but only a description of it.
    """
    try:
        values = dict(decode_json(key)["call"].items())
    except (ValueError, TypeError, KeyError, AttributeError):
        raise CannotRebuildError("its key is not one of a tuned function") from None
    if function.options.key_fn is not None:
        raise CannotRebuildError("its key holds the result of key_fn and not the shapes")
    return described_arguments(values, function)


def described_arguments(values: JsonObject, function: TunedFunction) -> Arguments:
    """Returns arguments of a function that have these descriptions by parameter, as `rebuilt` does.

    Raises:
        CannotRebuildError: a description does not tell enough about an argument.
    """
    maker = _Maker(function)
    parameters, made = function.parameters, dict[str, Any]()
    rest = next((name for name, it in parameters.items() if it.kind is inspect.Parameter.VAR_KEYWORD), None)
    for name, described in values.items():
        if name in parameters and (name != rest):
            made[name] = maker.value(name, described)
        elif rest is not None and name != "communicates over":
            made.setdefault(rest, {})[name.removeprefix("**")] = maker.value(name, described)
        else:
            raise CannotRebuildError(f"{name!r} is no parameter of the function")
    ordered = {name: made[name] for name in parameters if name in made}
    bound = inspect.BoundArguments(function.signature, ordered)
    return bound.args, bound.kwargs


@contextlib.contextmanager
def described_settings(described: Mapping[str, Any]) -> Iterator[None]:
    """Puts the settings of JAX's that have a description in a key in force for a block, if JAX accepts them."""
    with contextlib.ExitStack() as block:
        for name, value in jax_internals.other_options(described).items():
            block.callback(jax.config.update, name, jax.config.values[name])
            jax.config.update(name, value)
        if (mesh := described.get("mesh")) is not None:
            kinds = tuple(AxisType[name] for name in mesh["types"])
            abstract = AbstractMesh(tuple(mesh["shape"]), tuple(mesh["axes"]), axis_types=kinds)
            block.enter_context(jax.sharding.use_abstract_mesh(abstract))
        yield


class _Maker:
    """Makes the arguments of one call."""

    def __init__(self, function: TunedFunction) -> None:
        self._function = function
        self._arrays = 0

    def value(self, name: str, described: Any) -> Any:
        """Returns an argument that has a description.

        Args:
            name: the parameter.
            described: the description.
        """
        statics = self._function.static_names
        if statics is not None and name in statics:
            return _static(name, described)
        if isinstance(described, dict) and described.keys() == {"structure", "leaves"}:
            return self._tree(name, described["structure"], described["leaves"])
        return self._leaf(name, described)

    def _tree(self, name: str, structure: Any, leaves: JsonObject) -> Any:
        match = _PLAIN_TREE.fullmatch(structure) if isinstance(structure, str) else None
        values = iter([self._leaf(name, leaf) for leaf in leaves.values()])
        try:
            if match is None:
                raise ValueError
            count = iter(range(len(leaves)))
            text = _LEAF.sub(lambda found: str(next(count)) if found[0] == "*" else found[0], match[1])
            treedef = jax.tree.structure(ast.literal_eval(text))
            return jax.tree.unflatten(treedef, values)
        except (ValueError, SyntaxError, StopIteration, RecursionError, MemoryError):
            raise CannotRebuildError(f"{name!r} is a container of another type than dict, list and tuple") from None

    def _leaf(self, name: str, described: Any) -> Any:
        match described:
            case {"shape": list() as shape, "dtype": str() as dtype, **rest}:
                return self._array(name, tuple(shape), dtype, rest)
            case {"scalar": str() as kind} if kind in _NUMBERS:
                return _NUMBERS[kind]
        return _static(name, described)

    def _array(self, name: str, shape: tuple[int, ...], dtype: str, about: Mapping[Any, Any]) -> Any:
        function = self._function
        self._arrays += 1
        try:
            sharding = _sharding(about["sharding"]) if "sharding" in about else None
            if (implementation := _KEY_IMPLEMENTATIONS.get(dtype)) is not None:
                return jax.ShapeDtypeStruct(shape, jax_internals.key_dtype(implementation), sharding=sharding)
            if function.is_jitted or callable(function.options.supply):
                is_weak = bool(about.get("weak_type"))
                return jax.ShapeDtypeStruct(shape, dtype_from_name(dtype), weak_type=is_weak, sharding=sharding)
            return arrays.elements(
                shape, dtype_from_name(dtype), kind=function.options.supply, seed=_SEED, index=self._arrays
            )
        except (TypeError, ValueError, KeyError, AttributeError):
            raise CannotRebuildError(f"{name!r} is an array of {dtype} that cannot be made here") from None


def _sharding(described: Any) -> NamedSharding:
    """Returns the sharding that a description in a key is of, over a mesh without devices."""
    mesh, explicit = described["mesh"], described.get("explicit", ())
    kinds = tuple(AxisType.Explicit if axis in explicit else AxisType.Auto for axis in mesh)
    spec = PartitionSpec(*(tuple(axis) if isinstance(axis, list) else axis for axis in described["spec"]))
    return NamedSharding(AbstractMesh(tuple(mesh.values()), tuple(mesh), axis_types=kinds), spec)


def _static(name: str, described: Any) -> Any:
    """Returns a value that its description holds; lists become tuples, which jit can hash."""
    builders: dict[str, Callable[[str], Any]] = {"float": float, "complex": complex, "dtype": dtype_from_name}
    match described:
        case None | bool() | int() | float() | str():
            return described
        case list():
            return tuple(_static(name, item) for item in described)
        case dict() if len(described) == 1:
            ((kind, text),) = described.items()
            if kind in builders and isinstance(text, str):
                try:
                    return np.dtype(dtype_from_name(text)) if kind == "dtype" else builders[kind](text)
                except (TypeError, ValueError):
                    pass
    raise CannotRebuildError(f"the value of {name!r} is not in its key, only a description of it")
