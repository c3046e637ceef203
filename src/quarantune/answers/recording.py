"""Records of calls to tune later: as a list for a block of code or a program, or in a directory."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import jax
import numpy as np

from quarantune.cache import journal, problems
from quarantune.cache.journal import Journal
from quarantune.cache.owner import short_text
from quarantune.cache.problems import CacheWriteError
from quarantune.calls.call import BoundCall, TunedFunction
from quarantune.calls.key import KeyedCall, keyed, readable
from quarantune.functions.binding import Arguments
from quarantune.functions.describe import sharding_of
from quarantune.functions.description import is_array, struct_of, with_leaves
from quarantune.functions.names import cache_name, module_name
from quarantune.host.locks import new_lock
from quarantune.host.shared_files import advice
from quarantune.transport import assignment
from quarantune.values import blocks
from quarantune.values.codec import IN_MEMORY, JsonObject, Record, canonical_json, within
from quarantune.values.texts import call_text

if TYPE_CHECKING:
    from quarantune.results.result import TuningResult

Tune: TypeAlias = "Callable[[BoundCall], TuningResult]"
"""Returns the result for a call, from the cache or by tuning now."""
RECORDED, RULED = ".calls", ".ruled"
"""Suffixes of the records of calls without a result, and of calls that rules have answered."""
_numbers = itertools.count()


@contextlib.contextmanager
def recording() -> Iterator[list[RecordedCall]]:
    """Lists the calls of a block of code, in this thread, that have no saved result; tunes none of them.

    They run with the function's defaults, unless `ON_MISS` is `nearest` or `error`. If `QUARANTUNE_RECORD` is set, its
    directory also gets them. JAX does not trace a compiled program again, so this misses the calls inside.

    Yields:
        The calls so far, each once, in the order of their first calls; `tune_many` tunes them.

    Example:
        >>> import jax, quarantune, warnings
        >>> @quarantune.autotune({"batch": [1, 64]})
        ... @jax.jit(static_argnames=["batch"])
        ... def scale(x, batch: int = 1):
        ...     return jax.lax.map(lambda each: 2 * each + 1, x, batch_size=batch)
        >>> with quarantune.recording() as calls, warnings.catch_warnings(action="ignore"):
        ...     y = scale(jax.numpy.ones(128))  # warns that it runs with the defaults
        >>> print(*calls)
        quarantune.answers.recording.scale(x f32[128])
    """
    calls, add = _list_of_calls()
    outer = blocks.current().record

    def note_both(call: KeyedCall, tune: Tune) -> None:
        add(call, tune)
        note(call, tune, outer)

    with blocks.settings(record=note_both):
        yield calls


def calls_in(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[RecordedCall]:
    """Lists the calls of tuned functions inside a program; traces the program, and neither compiles nor runs it.

    The list has each call once, tuned or not, with its number of occurrences in the program's trace. If
    `QUARANTUNE_RECORD` is set, it also records the calls without a saved result.

    Args:
        fn: the program: a jitted function, or a function that `jax.jit` accepts.
        *args: its positional arguments; arrays may be `jax.ShapeDtypeStruct`.
        **kwargs: its keyword arguments.

    Returns:
        The calls, in the order of their first calls; `tune_many` tunes them.

    Example:
        >>> import jax, quarantune
        >>> @quarantune.autotune({"batch": [1, 64]})
        ... @jax.jit(static_argnames=["batch"])
        ... def scale(x, batch: int = 1):
        ...     return jax.lax.map(lambda each: 2 * each + 1, x, batch_size=batch)
        >>> program = jax.jit(lambda x: scale(scale(x)) + scale(x[:64]).sum())
        >>> for call in quarantune.calls_in(program, jax.ShapeDtypeStruct((128,), "float32")):
        ...     print(call, call.count)
        quarantune.answers.recording.scale(x f32[128]) 2
        quarantune.answers.recording.scale(x f32[64]) 1
    """
    # JAX keeps traces. The number makes sure that no other call uses this one, which has the defaults.
    data = {"others": assignment.DEFAULT, "chosen": {}, "number": next(_numbers)}
    listing = assignment.Assignment(json.dumps(data))
    calls, listing.note = _list_of_calls()
    trace = getattr(fn, "trace", None) or getattr(fn, "lower", None) or jax.jit(fn).trace
    with listing.in_force():
        trace(*args, **kwargs)
    return calls


def _list_of_calls() -> tuple[list[RecordedCall], Callable[[KeyedCall, Tune], None]]:
    """Returns a list of calls, and a function that adds a call to it, or counts it once more."""
    calls: list[RecordedCall] = []
    met: dict[Any, RecordedCall] = {}

    def add(call: KeyedCall, tune: Tune) -> None:
        about = call_of(call)
        known = met.get(about) or dataclasses.replace(RecordedCall.of(call, tune), count=0)
        met[about] = dataclasses.replace(known, count=known.count + 1)
        calls[:] = met.values()

    return calls, add


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedCall(Record):
    """A call of a tuned function, without the elements of its arrays.

    Attributes:
        function: the function as `MODULE:NAME`.
        name: its name in the cache.
        device: the kind of device of the call.
        arguments: descriptions of the arguments by parameter: shapes, dtypes and shardings; static arguments by value.
        bucket: the part of the key that replaces the arguments if the function has a `key_fn`; else None.
        jax_settings: JAX's settings that are part of the key.
        count: the number of occurrences.
        call: in the recording process, its arguments with a `jax.ShapeDtypeStruct` for each array; else None.
    """

    function: Annotated[str, short_text]
    name: Annotated[str, short_text]
    device: Annotated[str, short_text]
    arguments: Mapping[str, Any]
    bucket: Mapping[str, Any] | None = None
    jax_settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    count: Annotated[int, within(1, 1 << 53)] = 1
    call: Arguments | None = dataclasses.field(default=None, compare=False, repr=False, metadata=IN_MEMORY)
    _function: TunedFunction | None = dataclasses.field(default=None, compare=False, repr=False, metadata=IN_MEMORY)
    _tune: Any = dataclasses.field(default=None, compare=False, repr=False, metadata=IN_MEMORY)
    _axes: Any = dataclasses.field(default=None, compare=False, repr=False, metadata=IN_MEMORY)

    @classmethod
    def of(cls, call: KeyedCall, tune: Tune | None = None) -> RecordedCall:
        """Returns the record of a call. With `tune`, the record can tune the call."""
        fn = call.call.function.fn
        module, name = module_name(fn), cache_name(fn)
        return cls(
            function=f"{module}:{name.removeprefix(f'{module}.')}",
            name=call.id.name,
            device=call.id.device,
            arguments=call.arguments,
            bucket=None if call.values == call.arguments else call.values,
            jax_settings=call.jax_state,
            call=None if tune is None else _without_values(call),
            _function=call.call.function,
            _tune=tune,
            _axes=call.axes,
        )

    @property
    def identity(self) -> str:
        """The call with its settings as text, without the function's code and the count."""
        return canonical_json([self.name, self.device, self.arguments, self.bucket, self.jax_settings])

    @property
    def readable(self) -> JsonObject:
        """The values of its key in readable form, as an entry of the cache holds them."""
        return readable(dict(self.arguments if self.bucket is None else self.bucket), dict(self.jax_settings))

    def tune(self) -> TuningResult:
        """Returns the result for the call, from the cache or by tuning now.

        Raises:
            TypeError: Another process recorded the call, so its arguments are not available here.
            ValueError: JAX's settings have changed since.
        """
        if self.call is None or self._function is None or self._tune is None:
            raise TypeError(f"{self}: another process recorded this call: use `quarantune tune --recorded`")
        call = BoundCall(self._function, *self.call, axes=self._axes)
        if (now := keyed(call).jax_state) != self.jax_settings:
            met = f"it was recorded under JAX's settings {self.jax_settings}, and now they are {now}"
            raise ValueError(f"{self}: {met}: tune it under the recorded settings, or from QUARANTUNE_RECORD")
        result: TuningResult = self._tune(call)
        return result

    def __str__(self) -> str:
        """Returns the call on one line."""
        return f"{self.name}({call_text(self.arguments)})"


def _without_values(keyed: KeyedCall) -> Arguments:
    call, axes = keyed.call, keyed.axes

    def has_shape(leaf: Any) -> bool:  # to a plain function, a struct is not NumPy's array
        return is_array(leaf) and (call.function.is_jitted or not isinstance(leaf, np.ndarray))

    def described(array: Any) -> Any:
        return struct_of(array).update(sharding=sharding_of(array) if axes is None else axes.sharding_of(array))

    return with_leaves(call.args, call.kwargs, has_shape, described)


def note(
    call: KeyedCall, tune: Tune | None, record: Path | Callable[..., None] | None, *, suffix: str = RECORDED
) -> None:
    """Notes a call as the setting `record` demands: in a directory, or in the list of a block of code."""
    if callable(record):
        record(call, tune)
    elif record is not None:
        # A fork has met nothing yet.
        _writers.setdefault((os.getpid(), record, suffix), _Writer(record, suffix)).add(call)


def call_of(call: KeyedCall) -> Any:
    """Returns an identity of a call. Calls that `key_fn` maps to one key have different identities."""
    has_bucket = call.call.function.options.key_fn is not None
    return call.id, canonical_json(call.arguments) if has_bucket else ""


def read(directory: Path, suffix: str = RECORDED) -> list[RecordedCall]:
    """Returns the recorded calls in a directory, each once, the most frequent first.

    Anybody may have written to the directory. This skips lines that are not records, and reports them once.
    """
    found: dict[str, RecordedCall] = {}

    def complaint(damaged: int) -> str:
        return f"{damaged} lines below {str(directory)!r} are not records of calls and are ignored"

    for call in journal.understood(journal.records_below(directory, suffix), RecordedCall.from_json, complaint):
        before = found[call.identity].count if call.identity in found else 0
        found[call.identity] = dataclasses.replace(call, count=before + call.count)
    return sorted(found.values(), key=lambda call: -call.count)


class _Writer:
    """Writes the calls of this process into a directory: each new call at once, and its count now and then."""

    def __init__(self, directory: Path, suffix: str) -> None:
        self._directory, self._suffix = directory, suffix
        self._lock = new_lock()
        self._met: dict[Any, tuple[RecordedCall, int]] = {}

    def add(self, call: KeyedCall) -> None:
        """Counts a call, and writes the count if the call is new or the count has doubled since the last write."""
        about = call_of(call)
        with self._lock:
            record, written = self._met.get(about) or (dataclasses.replace(RecordedCall.of(call), count=0), 0)
            record = dataclasses.replace(record, count=record.count + 1)
            self._met[about] = record, written
            if record.count >= 2 * written:  # a killed process has written at least half
                self.flush([about])

    def flush(self, those: Iterable[Any] = ()) -> None:
        """Writes the counts of some calls, or of all, since the last write."""
        with self._lock:
            for about in those or [*self._met]:
                record, written = self._met[about]
                try:
                    if more := record.count - written:  # one file for all calls of a function
                        calls = Journal(self._directory, record.name, record.device, "calls", suffix=self._suffix)
                        calls.append(dataclasses.replace(record, count=more).to_json())
                        self._met[about] = record, record.count
                except CacheWriteError as error:
                    cause = error.__cause__ if isinstance(error.__cause__, OSError) else OSError(0, str(error))
                    fault = f"calls cannot be recorded in {str(self._directory)!r} ({cause.strerror})"
                    problems.report_once(f"{fault}: {advice(cause)}, or set QUARANTUNE_RECORD to another directory")


_writers: dict[tuple[int, Path, str], _Writer] = {}


@atexit.register
def _flush() -> None:
    for (process, *_), writer in list(_writers.items()):
        if process == os.getpid():
            writer.flush()
