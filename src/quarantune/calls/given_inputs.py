"""The arguments that a sweep runs with: from a block, from the call, from a supplier, or made from shapes."""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from quarantune.functions.binding import Arguments, arguments_of, check_complete, describe_function, lacking, named
from quarantune.functions.description import as_structs, describe_arguments, is_array, with_leaves, without_arrays
from quarantune.jax_internals import jax_arrays
from quarantune.values.blocks import left
from quarantune.values.codec import JsonObject

_NUMBERS = (bool, int, float, complex)
_REAL = "with quarantune.set_autotune_inputs(...)"


class set_autotune_inputs:
    """Runs the sweeps of a block of code with these arguments, in this thread or task of asyncio only; blocks nest.

    Use it for calls inside `jit` and other transformations, which have no concrete arguments. Use it also for calls
    whose own arguments do not represent real speed, such as indices that are all zero. The cache stores the result for
    the call, so these arguments must have its shapes, dtypes and static values, positional or by keyword. A number
    stands for an array without dimensions, and any size for a symbolic size of `jax.export`.

    Args:
        *args: the tuned function's positional arguments, without tunables; or a single list or tuple that holds them.
        **kwargs: its keyword arguments.

    Example:
        >>> import jax, quarantune
        >>> import jax.numpy as jnp
        >>> @quarantune.autotune({"n": [1, 2]}, name="summed")
        ... @jax.jit(static_argnames=["n"])
        ... def total(x, n: int = 1):
        ...     return x.reshape(n, -1).sum()
        >>> with set_autotune_inputs(jnp.ones(8)):
        ...     print(jax.jit(lambda x: total(2 * x))(jnp.ones(8)))  # inside jit, x is a tracer
        16.0
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args
        self.kwargs = kwargs

    def __enter__(self) -> None:
        _blocks.set((*_blocks.get(), self))

    def __exit__(self, *_: object) -> None:
        _blocks.set(left(_blocks.get(), self))


_blocks: contextvars.ContextVar[tuple[set_autotune_inputs, ...]] = contextvars.ContextVar("_blocks", default=())
"""The `set_autotune_inputs` blocks of a thread or an asyncio task, outermost first."""


def _block() -> set_autotune_inputs | None:
    """Returns the innermost block; None outside of blocks."""
    return next(reversed(_blocks.get()), None)


def are_in_force() -> bool:
    """Returns whether a `set_autotune_inputs` block is around this code."""
    return _block() is not None


def are_given(supply: str | Callable[..., Any]) -> bool:
    """Returns whether the user chose the arguments that sweeps run with.

    Args:
        supply: the author's option.
    """
    return are_in_force() or callable(supply)


def arguments(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], supply: str | Callable[..., Any]
) -> Arguments:
    """Returns the arguments to run a call with. Workers generate arrays that still lack a value.

    Args:
        fn: the function of the call.
        args: the call's positional arguments.
        kwargs: its keyword arguments.
        supply: the author's option.

    Raises:
        ValueError: The arguments of the block or of the supplier do not fit the call.
    """
    call = args, dict(kwargs)
    if (block := _block()) is not None:
        *first, last = _readings(block)
        for given in first:
            with contextlib.suppress(ValueError):
                return _spelt_alike(given, call, fn, _REAL)
        return _spelt_alike(last, call, fn, _REAL)
    leaves = jax.tree.leaves(call)
    if not callable(supply) or not any(isinstance(leaf, (jax.core.Tracer, jax.ShapeDtypeStruct)) for leaf in leaves):
        return call
    structs, _ = as_structs(args, kwargs)
    with jax.ensure_compile_time_eval():  # the call may be inside a trace; the supplier must not be
        supplied = tuple(supply(structs))
    return _spelt_alike((supplied, dict(kwargs)), call, fn, "supply")


def in_place_of_symbolic(call: Arguments) -> Arguments | None:
    """Returns the arguments of the block for a call with symbolic shapes; None outside of a block.

    Raises:
        ValueError: Their dtypes or numbers of dimensions differ from the call's.
    """
    if (block := _block()) is None:
        return None
    for given in _readings(block):
        if _outline(given) == _outline(call):
            return given
    raise ValueError(f"{_REAL} gives {_outline(block.args)} for {_outline(call[0])}: make dtypes and dimensions alike")


def _outline(values: Any) -> Any:
    """Returns values with each array replaced by its dtype and number of dimensions."""
    return jax.tree.map(lambda leaf: f"{leaf.dtype}[{leaf.ndim}]" if is_array(leaf) else leaf, values)


def _readings(block: set_autotune_inputs) -> list[Arguments]:
    """Returns the readings of a block's arguments: as they are, and the items of a single list or tuple."""
    match block.args:
        case ((list() | tuple()) as one,) if not block.kwargs:
            return [(block.args, {}), (tuple(one), {})]
    return [(block.args, block.kwargs)]


def _spelt_alike(given: Arguments, call: Arguments, fn: Callable[..., Any], source: str) -> Arguments:
    """Returns the given arguments in the form of the call: the same places (position or keyword) and weak types.

    Raises:
        ValueError: The given arguments do not fit the call.
    """
    from quarantune.values.codec import canonical_json

    _, signature, static = describe_function(fn)
    ours, theirs = _bind(signature, given, source), _bind(signature, call, "the call")
    if static is None:  # without jit, every argument without an array counts by value
        static = without_arrays(theirs)
    ours = {name: v if name in static else _as_arrays(v, theirs.get(name)) for name, v in ours.items()}
    given = _in_place_of(given, ours, signature)
    tunables = lacking(signature.bind_partial(*call[0], **call[1]))  # the configs set these

    def described(arguments: Arguments) -> JsonObject:
        structs = as_structs(*arguments)
        strong = with_leaves(*structs, _is_struct, lambda leaf: leaf.update(weak_type=False))
        bound = signature.bind_partial(*strong[0], **strong[1])
        check_complete(bound, tunables)
        return describe_arguments(arguments_of(bound), static)

    try:
        mine, its = described(given), described(call)
    except TypeError as error:
        raise ValueError(f"{source} gives arguments that cannot be compared with the call's: {error}") from error
    for name in [*its, *mine]:
        # Compares the texts in the key: 4 and 4.0 are equal, but give different programs.
        if canonical_json(mine.get(name)) != canonical_json(its.get(name)):
            show = _shown_static if name in static else _shown
            difference = f"{show(name, mine, ours)} where the call has {show(name, its, theirs)}"
            raise ValueError(f"{source} gives for {name!r} {difference}: make them alike")
    with jax.ensure_compile_time_eval():
        alike = {
            name: value if name in static else jax.tree.map(_as_weak_as, value, theirs[name])
            for name, value in ours.items()
            if name in theirs
        }
    return _in_place_of(call, alike, signature)


def _bind(signature: inspect.Signature, call: Arguments, source: str) -> Mapping[str, Any]:
    try:
        bound = signature.bind_partial(*call[0], **call[1])
    except TypeError as error:
        raise ValueError(f"{source} gives arguments that the function does not take: {error}") from None
    bound.apply_defaults()
    return dict(named(bound))


def _in_place_of(call: Arguments, values: Mapping[str, Any], signature: inspect.Signature) -> Arguments:
    """Returns a call with these values in the places of another call's arguments."""
    positional = signature.bind_partial(*call[0])
    positional.arguments = {name: values[name] for name in positional.arguments}
    return positional.args, {name: values[name] for name in call[1]}


def _is_struct(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _as_weak_as(given: Any, wanted: Any) -> Any:
    """Returns an array with the weak type of another, because users seldom give weakly typed arrays on purpose."""
    is_weak = bool(getattr(wanted, "weak_type", False))
    if not is_array(given) or is_weak == bool(getattr(given, "weak_type", False)):
        return given
    if _is_struct(given):
        return given.update(weak_type=is_weak)
    return jax_arrays.as_weak(jnp.asarray(given)) if is_weak else given.astype(given.dtype)


def _as_arrays(given: Any, wanted: Any) -> Any:
    """Converts a number to an array, or an array without dimensions to a number, to match `wanted`."""
    if isinstance(given, _NUMBERS) and is_array(wanted) and not wanted.shape:
        with jax.ensure_compile_time_eval():
            return jnp.asarray(given, wanted.dtype)
    is_concrete = isinstance(given, (np.ndarray, np.generic, jax.Array)) and not given.shape
    return given.item() if is_concrete and isinstance(wanted, _NUMBERS) else given


def _shown_static(name: str, described: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    return reprlib.repr(values[name]) if name in described else "nothing"


def _shown(name: str, described: Mapping[str, Any], _: Mapping[str, Any]) -> str:
    """Describes one argument in readable form."""
    if name not in described:
        return "nothing"
    value = described[name]
    if isinstance(value, dict) and {"shape", "dtype"} <= value.keys():
        return f"an array of {value['dtype']}{value['shape']}"
    return f"a Python {value['scalar']}" if isinstance(value, dict) and "scalar" in value else repr(value)
