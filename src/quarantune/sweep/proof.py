"""Compares the program that workers tune with the one that this process would run.

A value that the program has set travels to workers if the function's code names it. The comparison notices any other
value by its effect: this process traces the defaults after a worker has traced them, and the two programs must agree.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.experimental.xla_metadata import set_xla_metadata

from quarantune.functions.binding import jitted_with
from quarantune.host.interruptions import is_interruption
from quarantune.jax_internals import jax_functions, jax_traces
from quarantune.jax_internals.other_processes import questions
from quarantune.scheduler.plan import CompareProgram
from quarantune.sweep.request import SweepRequest
from quarantune.transport import assignment, differentiation
from quarantune.transport.payload import Call, call_as_structs
from quarantune.transport.programs import ProgramLines
from quarantune.values.codec import restore
from quarantune.values.configs import Config
from quarantune.values.errors import DifferentProgramError
from quarantune.values.texts import shown

_logger = logging.getLogger("quarantune")

_SHARED = 0
_numbers = itertools.count(_SHARED + 1)


def comparison(request: SweepRequest, call: Call) -> CompareProgram | None:
    """Returns the comparison for a sweep; None without `jax.jit`, on several devices, or for a compile check.

    Args:
        request: the sweep.
        call: its call, in the form for trials in this process.
    """
    on_one_device = call.devices_needed <= 1 and not jax_traces.bound_axes()
    if request.target is not None or not on_one_device or not jax_functions.is_jitted(call.fn):
        return None
    return functools.partial(_compare, request.problem.name, call, request.options.time_grad)


def _compare(name: str, call: Call, time_grad: bool, config: Config, theirs: Mapping[str, int]) -> None:
    """Raises if the program that a worker traced for a config is not the one of this process."""
    try:
        differ = _difference(functools.partial(_traced, call, config, time_grad), theirs)
    except Exception as error:  # of a function that a worker could trace
        if is_interruption(error):
            raise
        _logger.debug("%s: there is no proof that workers run its program: %r", name, error)
    else:
        if differ:
            raise DifferentProgramError(name, differ)


def _difference(trace: Callable[[int | None], ProgramLines], theirs: Mapping[str, int]) -> str:
    """Returns how the program of this process differs from a worker's, and where it is made.

    Returns:
        An empty text if the two are equal, or if the values of the program need not be the cause: the function calls
        kernels, which only this process tunes, asks for the devices of its process, or draws numbers, or JAX has traced
        an inner function earlier in one of the processes.
    """
    with assignment.without_tuning() as reached:
        if trace(_SHARED).counts == theirs or reached:
            return ""
        with questions() as asked:
            ours = trace(next(_numbers))
        if asked or theirs in (ours.counts, trace(None).counts) or trace(next(_numbers)).counts != ours.counts:
            return ""
    other = Counter(theirs)
    here, there = (next(iter(lines), "nothing") for lines in (ours.counts - other, other - ours.counts))
    return f"there is {shown(here)} only in this process and {shown(there)} only in a worker{ours.place(here)}"


def _traced(call: Call, config: Config, time_grad: bool, number: int | None) -> ProgramLines:
    """Traces a config as its workers do.

    Args:
        call: the call.
        config: the config.
        time_grad: whether workers compile the config together with its gradient.
        number: JAX reuses only a trace of the same number; None for a trace that calls use, or may have left.
    """
    config = restore(config, call.config_values)
    jitted, keywords = jitted_with(differentiation.with_gradient(call.fn) if time_grad else call.fn, config)
    args, kwargs = call_as_structs(call)
    # JAX keeps traces under different metadata apart.
    with (
        unheard(),
        jax.disable_jit(False),
        jax_traces.outside_of_traces(),
        set_xla_metadata(**({} if number is None else {"quarantune": str(number)})),
    ):
        return ProgramLines(jitted.trace(*args, **kwargs, **keywords).jaxpr)


class _Others:
    """A stream that discards the writes of the thread `unheard`."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.unheard: int | None = threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self.unheard else int(self._stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Discards this thread's prints in the block: tracing runs the function, which the user has not called yet."""
    before = sys.stdout
    sys.stdout = others = _Others(before)
    try:
        yield
    finally:
        others.unheard = None  # another thread may put it back later
        if sys.stdout is others:
            sys.stdout = before
