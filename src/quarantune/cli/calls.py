"""The calls that a command is about, with a `jax.ShapeDtypeStruct` for each array or with real arguments."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

from quarantune.cli import functions
from quarantune.cli.call_texts import ArrayText, Call, parse_statics
from quarantune.cli.output import InputError, message_of
from quarantune.resolve.tuned_function import TunedFunction
from quarantune.transport.problem import as_structs, is_array
from quarantune.values.call_text import call_text
from quarantune.values.describe import canonical_dtype, describe_array
from quarantune.values.texts import did_you_mean, shown


def describe(call: Call, signature: inspect.Signature) -> str:
    """Returns the arguments of a call by name on one line."""
    import jax

    def leaf(value: Any) -> Any:
        return describe_array(value, canonical_dtype(value.dtype)) if is_array(value) else value

    args, kwargs = as_structs(call.args, call.kwargs)
    bound = signature.bind_partial(*args, **kwargs).arguments
    return call_text({name: jax.tree.map(leaf, value) for name, value in bound.items()})


def make(function: TunedFunction, options: argparse.Namespace) -> list[Call]:
    """Returns the calls of a function that the options give; `calls` are those of texts, None where there are none.

    Raises:
        InputError: the function does not take one of them, or the function for `--inputs` gives none.
    """
    if options.calls is None:
        statics = parse_statics(options.static)
        found = _inputs(functions.load(options.inputs, option="--inputs"), options.inputs)
        calls = [call.with_statics(statics) for call in found]
    else:
        calls = [_with_structs(call) for call in options.calls]
    for call in calls:
        _check(call, function, options.function)
    return calls


def _with_structs(call: Call) -> Call:
    args = tuple(_value(value, call.source) for value in call.args)
    kwargs = {name: _value(value, call.source) for name, value in call.kwargs.items()}
    return Call(args, kwargs, call.source)


def _value(value: Any, source: str) -> Any:
    if not isinstance(value, ArrayText):
        return value
    import jax
    import jax.numpy as jnp

    scalar_type = getattr(jnp, "bool_" if value.dtype == "bool" else value.dtype, None)
    if scalar_type is None:
        raise InputError(f"{source}: this version of JAX has no {value.dtype}: use another dtype")
    dtype = jnp.dtype(scalar_type)
    if canonical_dtype(dtype) != dtype:
        narrow = canonical_dtype(dtype)
        raise InputError(f"{source}: JAX makes {dtype} into {narrow}: write {narrow}, or set JAX_ENABLE_X64=1")
    return jax.ShapeDtypeStruct(value.shape, dtype)


def _inputs(make_inputs: Any, name: str) -> Iterator[Call]:
    if not callable(make_inputs):
        raise InputError(f"--inputs {name} is no function: name one that returns the arguments of a call")
    try:
        inspect.signature(make_inputs).bind()
    except TypeError as error:
        raise InputError(f"--inputs {name} needs arguments ({error}): give its parameters defaults") from None
    given = make_inputs()
    listed = list(given) if inspect.isgenerator(given) else [given]
    for number, arguments in enumerate(listed, start=1):
        if not isinstance(arguments, (Mapping, tuple, list)):
            raise InputError(
                f"--inputs {name} returned {shown(arguments)}: return a tuple of arguments, or a dict of them by name"
            )
        args, kwargs = ((), dict(arguments)) if isinstance(arguments, Mapping) else (tuple(arguments), {})
        yield Call(args, kwargs, f"--inputs, call {number}")
    if not listed:
        raise InputError(f"--inputs {name} yielded nothing: yield the arguments of each call")


def _check(call: Call, function: TunedFunction, name: str) -> None:
    """Raises where a function does not take a call; the most common mistakes are named before any work starts."""
    signature, static_names = function.signature, function.static_names
    parameters = signature.parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for keyword in () if takes_any else call.kwargs:
        if keyword not in parameters:
            near = did_you_mean(keyword, parameters) or f" Its parameters are: {', '.join(parameters)}."
            raise InputError(f"{call.source}: {name} has no parameter {keyword!r}.{near}")
    try:
        bound = signature.bind_partial(*call.args, **call.kwargs).arguments
    except TypeError as error:
        reason = message_of(error)
        if twice := re.fullmatch(r"multiple values for argument '(.*)'", reason):
            reason = f"two values for {twice[1]!r}, one by its place and one by its name"
        raise InputError(f"{call.source}: {reason}: {name} takes {_shown_signature(function)}") from None
    for parameter, value in bound.items():
        if parameter in function.tunables:
            raise InputError(f"{call.source}: {parameter} is tuned here: leave it out")
        if static_names is not None and parameter in static_names and is_array(value):
            raise InputError(
                f"{call.source}: {parameter} is a static parameter: give its value, as in --static {parameter}=4"
            )
        if static_names is not None and parameter not in static_names and isinstance(value, str):
            raise InputError(
                f"{call.source}: {parameter} is no static parameter: give an array, as in {parameter}=f32[8], or a "
                "number"
            )
    missing = [
        parameter.name
        for parameter in parameters.values()
        if parameter.name not in {*bound, *function.tunables}
        and parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    # Which parameters are tuned is not known yet where a function makes the configs; these need not be given.
    if function.tunables and missing:
        raise InputError(f"{call.source}: no value for {', '.join(missing)}: {name} takes {_shown_signature(function)}")


def _shown_signature(function: TunedFunction) -> str:
    names = [str(parameter) for name, parameter in function.parameters.items() if name not in function.tunables]
    return f"({', '.join(names)})"
