"""The program that a call runs with a config, as this process traces and lowers it."""

from __future__ import annotations

import logging
from typing import NamedTuple

import jax

from quarantune.calls.key import KeyedCall
from quarantune.functions.binding import jitted_with, split_config
from quarantune.host.interruptions import is_interruption
from quarantune.jax_internals import jax_backends, jax_traces
from quarantune.transport import programs
from quarantune.transport.program_text import ProgramText
from quarantune.values.codec import text_of
from quarantune.values.configs import Config

_logger = logging.getLogger("quarantune")


class CallProgram(NamedTuple):
    """The program of a call.

    Attributes:
        identity: its identity, empty if tracing failed. Inside a trace it lacks its second half, because JAX lowers the
            call only with the code around it.
        text: its text; None if tracing failed.
        error: why tracing failed.
    """

    identity: str
    text: ProgramText | None = None
    error: str = ""


def program_of(call: KeyedCall, config: Config, *, lowers: bool = True) -> CallProgram | None:
    """Returns the program that a call runs with a config; makes it once for each config of a call.

    JAX keeps the trace and the lowered program for the call that follows, so no work is wasted. A function whose time
    includes its gradient is an exception: workers measure another program than the call runs. This traces the measured
    program, but does not lower it.

    Args:
        call: the call.
        config: the config.
        lowers: whether to lower the program too, unless lowering would initialise a backend, or JAX is tracing.

    Returns:
        The program. None if the function is not jitted or inside `shard_map`, if a shape is symbolic, or if its text
        or identity could not be made.
    """
    if (name := text_of(config)) not in call.programs:
        call.programs[name] = None
        try:
            call.programs[name] = _program_of(call, config, lowers=lowers)
        except Exception as error:
            if is_interruption(error):
                raise
            _logger.debug("%s: the call's program could not be made: %r", call.id.name, error)
    found: CallProgram | None = call.programs[name]
    return found


def _program_of(call: KeyedCall, config: Config, *, lowers: bool) -> CallProgram | None:
    function, args, kwargs = call.call.function, call.call.args, call.call.kwargs
    if not function.is_jitted or call.call.is_symbolic or call.axes is not None:
        return None
    if jax_traces.bound_axes() and any(map(_varies, jax.tree.leaves((args, kwargs)))):
        return None  # inside `shard_map`, JAX adds casts, which the program of one shard lacks
    jitted, keywords = jitted_with(function.fn, config)
    _, options = split_config(function.fn, config)
    lowers = lowers and jax_backends.backends_initialized() and not jax_traces.is_tracing()
    is_part = function.options.time_grad or not lowers
    if function.options.time_grad:
        from quarantune.transport import differentiation  # few functions need it

        jitted = differentiation.with_gradient(function.fn)
    elif is_part:
        jitted = function.fn  # JAX takes compiler options only at the outermost jit
    try:
        with jax.disable_jit(False):  # as in workers: otherwise functions inside lose their own `jit`
            traced = jitted.trace(*args, **kwargs, **keywords)
    except Exception as error:
        if is_interruption(error):
            raise
        return CallProgram("", error=f"{type(error).__name__}: {error}")
    text = ProgramText(traced.jaxpr)
    if is_part:
        return CallProgram(f"{programs.PREFIX}{text.hash}.", text)
    lowered = traced.lower()
    return CallProgram(programs.identity(lowered, lowered.as_text(), text, options), text)


def _varies(leaf: object) -> bool:
    """Returns whether an argument may differ between the devices of a `shard_map`."""
    return isinstance(leaf, jax.Array) and bool(jax_traces.varying_axes(leaf))
