"""Which arguments a sweep runs with: given for the block, the call's own, a supplier's, or made from shapes."""

from __future__ import annotations

import inspect
import reprlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from quarantune import jax_internals
from quarantune.transport.call import Arguments
from quarantune.transport.problem import as_structs, describe_call, describe_function, is_array, named

_REAL = "with quarantune.set_autotune_inputs(...)"


class _Blocks(threading.local):
    """The inputs of the `set_autotune_inputs` blocks that this thread is in, innermost last."""

    def __init__(self) -> None:
        self.entered: list[set_autotune_inputs] = []


_blocks = _Blocks()


class set_autotune_inputs:
    """Has the sweeps of a block of code run with these arguments, in this thread only; blocks nest.

    It serves calls inside `jit` and its kin, which have no concrete arguments, and calls whose own arguments say little
    about speed, such as indices that are all zero. What is tuned for is still the call: its shapes, dtypes and static
    values must be those of these arguments, in whichever way either is spelt.

    Args:
        *args: the tuned function's positional arguments, without tunables; or one list or tuple of them.
        **kwargs: its keyword arguments.

    Example:
        >>> with set_autotune_inputs(a, b):  # doctest: +SKIP
        ...     c = matmul(x, y)
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args
        self.kwargs = kwargs

    def __enter__(self) -> None:
        _blocks.entered.append(self)

    def __exit__(self, *_: object) -> None:
        # The last one: the same block may have been entered further out, too.
        del _blocks.entered[max(place for place, block in enumerate(_blocks.entered) if block is self)]


def arguments(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], supply: str | Callable[..., Any]
) -> Arguments:
    """Returns what a sweep for a call is to run with; what is still without a value is made from shape and dtype.

    Args:
        fn: the function that is called, which says what is static and what stands where.
        args: the call's positional arguments.
        kwargs: its keyword arguments.
        supply: the author's option.

    Raises:
        ValueError: the arguments given for the block, or the supplier's, are not those of a call like this one.
    """
    call = args, dict(kwargs)
    if _blocks.entered:
        return _given_for_block(_blocks.entered[-1], call, fn)
    leaves = jax.tree.leaves(call)
    if not callable(supply) or not any(_has_no_value(leaf) for leaf in leaves):
        return call
    structs, _ = as_structs(args, kwargs)
    with jax.ensure_compile_time_eval():  # the call may be inside a trace, which this is not part of
        supplied = tuple(supply(structs))
    return _spelt_alike((supplied, dict(kwargs)), call, fn, "supply")


def _given_for_block(given: set_autotune_inputs, call: Arguments, fn: Callable[..., Any]) -> Arguments:
    """Returns the block's inputs; a single list or tuple holds all of them, unless the call has such an argument."""
    try:
        return _spelt_alike((given.args, given.kwargs), call, fn, _REAL)
    except ValueError:
        if given.kwargs or len(given.args) != 1 or not isinstance(given.args[0], (list, tuple)):
            raise
    return _spelt_alike((tuple(given.args[0]), {}), call, fn, _REAL)


def _has_no_value(leaf: Any) -> bool:
    return isinstance(leaf, (jax.core.Tracer, jax.ShapeDtypeStruct))


def _spelt_alike(given: Arguments, call: Arguments, fn: Callable[..., Any], source: str) -> Arguments:
    """Returns the arguments given, each where the call has its own, and as weakly typed.

    Raises:
        ValueError: they are not those of a call like this one.
    """
    from quarantune.cache import canonical_json

    _, signature, static = describe_function(fn)
    ours, theirs = _bind(signature, given, source), _bind(signature, call, "the call")
    if static is None:  # of a function that is not jitted all counts by value but arrays
        static = frozenset(name for name, value in theirs.items() if not any(map(is_array, jax.tree.leaves(value))))
    # What has no default and is not there is set by the configs.
    spelt = signature.bind_partial(*call[0], **call[1]).arguments
    tunables = [
        name
        for name, item in signature.parameters.items()
        if name not in spelt and item.default is item.empty and item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD)
    ]

    def described(arguments: Arguments) -> dict[str, Any]:
        return describe_call(signature, static, tunables, *_without_weak_types(arguments)).key_values

    try:
        mine, its = described(given), described(call)
    except TypeError as error:
        raise ValueError(f"{source} gives arguments that cannot be compared with the call's: {error}") from error
    for name in [*its, *mine]:
        # As text, as the key has them: 4 and 4.0 are equal and give different programs.
        if canonical_json(mine.get(name)) != canonical_json(its.get(name)):
            tell = _tell_static if name in static else _tell
            difference = f"{tell(name, mine, ours)} where the call has {tell(name, its, theirs)}"
            raise ValueError(f"{source} gives for {name!r} {difference}: make them alike")
    with jax.ensure_compile_time_eval():
        alike = {
            name: value if name in static else jax.tree.map(_as_weak_as, value, theirs[name])
            for name, value in ours.items()
            if name in theirs
        }
    return _in_place_of(call, alike, signature)


def _bind(signature: inspect.Signature, call: Arguments, source: str) -> dict[str, Any]:
    try:
        bound = signature.bind_partial(*call[0], **call[1])
    except TypeError as error:
        raise ValueError(f"{source} gives arguments that the function does not take: {error}") from None
    bound.apply_defaults()
    return dict(named(bound))


def _in_place_of(call: Arguments, values: Mapping[str, Any], signature: inspect.Signature) -> Arguments:
    """Returns a call that gives these values where another gives its own."""
    positional = signature.bind_partial(*call[0])
    positional.arguments = {name: values[name] for name in positional.arguments}
    return positional.args, {name: values[name] for name in call[1]}


def _without_weak_types(call: Arguments) -> Arguments:
    args, kwargs = as_structs(*call)

    def strong(leaf: Any) -> Any:
        return leaf.update(weak_type=False) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf

    def fill(value: Any) -> Any:
        has_struct = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(value))
        return jax.tree.map(strong, value) if has_struct else value

    return tuple(map(fill, args)), {name: fill(value) for name, value in kwargs.items()}


def _as_weak_as(given: Any, wanted: Any) -> Any:
    """Returns an array as weakly typed as another: what a person gives is seldom so on purpose."""
    is_weak = bool(getattr(wanted, "weak_type", False))
    if not is_array(given) or is_weak == bool(getattr(given, "weak_type", False)):
        return given
    if isinstance(given, jax.ShapeDtypeStruct):
        return given.update(weak_type=is_weak)
    return jax_internals.as_weak(jnp.asarray(given)) if is_weak else given.astype(given.dtype)


def _tell_static(name: str, described: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    return reprlib.repr(values[name]) if name in described else "nothing"


def _tell(name: str, described: Mapping[str, Any], _: Mapping[str, Any]) -> str:
    """Returns one argument's part of a description for people."""
    if name not in described:
        return "nothing"
    value = described[name]
    if isinstance(value, dict) and {"shape", "dtype"} <= value.keys():
        return f"an array of {value['dtype']}{value['shape']}"
    return f"a Python {value['scalar']}" if isinstance(value, dict) and "scalar" in value else repr(value)
