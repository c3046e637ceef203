"""Lists the calls of tuned functions: those of a block of code, and those inside a program that is only traced."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import jax

from quarantune.resolve import recorded
from quarantune.resolve.call_key import KeyedCall
from quarantune.resolve.recorded import RecordedCall
from quarantune.resolve.resolver import Resolver
from quarantune.transport import assignment
from quarantune.values import settings as environment

_numbers = itertools.count()


@contextlib.contextmanager
def recording() -> Iterator[list[RecordedCall]]:
    """Lists the calls of a block of code, in this thread, that have no saved result; none of them is tuned.

    They run with the function's defaults, whatever `ON_MISS` says, unless that is `nearest` or `error`. Where
    `QUARANTUNE_RECORD` is set, they are written down there, too. Programs that JAX has compiled before are not traced
    again, so that the calls inside are not met.

    Yields:
        The calls so far, each once, in the order in which they were first met; `tune_many` tunes them.

    Example:
        >>> with recording() as calls:  # doctest: +SKIP
        ...     train_step(state, batch)
        >>> quarantune.tune_many(calls)  # doctest: +SKIP
    """
    calls, add = _list_of_calls()
    outer = environment.current().record

    def note(described: KeyedCall, resolver: Resolver) -> None:
        add(described, resolver)
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
        about = recorded.call_of(described)
        known = met.get(about) or dataclasses.replace(RecordedCall.of(described, resolver), count=0)
        met[about] = dataclasses.replace(known, count=known.count + 1)
        calls[:] = met.values()

    return calls, add
