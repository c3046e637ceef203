"""Lists the calls of tuned functions: those of a block of code, and those inside a program that is only traced."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import jax

from quarantune.resolve import recorded
from quarantune.resolve.call_key import KeyedCall
from quarantune.resolve.recorded import RecordedCall
from quarantune.resolve.resolver import Resolver
from quarantune.transport import assignment
from quarantune.values import settings as environment

_numbers = itertools.count()


class RecordedCalls(Sequence[RecordedCall]):
    """The calls that were met so far, each once, in the order in which they were first met."""

    def __init__(self) -> None:
        self._calls: dict[Any, RecordedCall] = {}

    def note(self, described: KeyedCall, resolver: Resolver) -> None:
        """Adds a call, or counts it once more."""
        about = described.call.name, described.key
        known = self._calls.get(about)
        self._calls[about] = (
            RecordedCall.of(described, resolver) if known is None else dataclasses.replace(known, count=known.count + 1)
        )

    @overload
    def __getitem__(self, index: int) -> RecordedCall: ...

    @overload
    def __getitem__(self, index: slice) -> list[RecordedCall]: ...

    def __getitem__(self, index: int | slice) -> RecordedCall | list[RecordedCall]:
        return list(self._calls.values())[index]

    def __len__(self) -> int:
        return len(self._calls)

    def __repr__(self) -> str:
        """Returns a line for each call."""
        return "\n".join(f"{call}, met {call.count:,} times" for call in self) or "no calls"


@contextlib.contextmanager
def recording() -> Iterator[RecordedCalls]:
    """Lists the calls of a block of code, in this thread, that have no saved result; none of them is tuned.

    They run with the function's defaults, whatever `ON_MISS` says, unless that is `nearest` or `error`. Where
    `QUARANTUNE_RECORD` is set, they are written down there, too. Programs that JAX has compiled before are not traced
    again, so that the calls inside are not met.

    Yields:
        The calls so far, which `tune_many` tunes.

    Example:
        >>> with recording() as calls:  # doctest: +SKIP
        ...     train_step(state, batch)
        >>> quarantune.tune_many(calls)  # doctest: +SKIP
    """
    calls, outer = RecordedCalls(), environment.current().record

    def note(described: KeyedCall, resolver: Resolver) -> None:
        calls.note(described, resolver)
        recorded.note(described, resolver, outer)

    with environment.settings(record=note):
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
        The calls, in the order in which they are first met; `tune_many` tunes them.

    Example:
        >>> quarantune.tune_many(quarantune.calls_in(jax.jit(train_step), state, batch))  # doctest: +SKIP
    """
    calls = RecordedCalls()
    # JAX keeps traces. This one, with the defaults, serves no other call, as no other has the number.
    data = {"others": assignment.DEFAULT, "chosen": {}, "number": next(_numbers)}
    listing = assignment.Assignment(json.dumps(data))
    listing.note = calls.note
    trace = getattr(fn, "trace", None) or jax.jit(fn).trace
    with listing.in_force():
        trace(*args, **kwargs)
    return [*calls]
