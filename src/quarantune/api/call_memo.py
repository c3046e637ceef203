"""The call memo: how a tuned function finds the choice for a call that it has already made in this process."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, TypeAlias, TypeVar

import jax
import numpy as np

from quarantune import jax_internals

_T = TypeVar("_T")

Memo: TypeAlias = dict[Any, dict[Hashable, _T]]
"""Choices by the key of the call, for each state of JAX's settings."""

read_context = jax_internals.trace_context
"""Returns the state of JAX's settings, under which a choice is remembered."""


class MemoKeys:
    """Makes keys that are equal for the calls of one function that JAX, and the function, do not tell apart."""

    def __init__(self, jit: jax_internals.JitOptions | None) -> None:
        """Prepares keys for a function.

        Args:
            jit: the options that the function was jitted with; None for a plain function, which sees the values of
                Python's numbers and strings.
        """
        self._jit = jit
        self._array_type = jax_internals.array_type

    def of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable | None:
        """Returns the key of a call; None where an argument needs a closer look each time, as a tracer does."""
        jit, count = self._jit, len(args)
        try:
            parts: list[Any] = [
                self._token(arg, is_static=jit is not None and jit.is_static_position(index, count))
                for index, arg in enumerate(args)
            ]
            for name, arg in kwargs.items():
                parts += [name, self._token(arg, is_static=jit is not None and name in jit.static_argnames)]
            key = tuple(parts)
            hash(key)
        except TypeError:
            return None
        return key

    def _token(self, arg: Any, *, is_static: bool = False) -> Hashable:
        if type(arg) is self._array_type:
            return (arg.aval, arg.sharding)
        # A plain function sees the values of its arguments, and jit those of static ones.
        if is_static or (self._jit is None and type(arg) in (bool, int, str)):
            return (type(arg), arg)
        if self._jit is not None:
            # The dtype that JAX gives to a Python number or NumPy's float64 depends on x64.
            if isinstance(arg, (bool, int, float, complex)):
                return (type(arg), _is_x64())
            if isinstance(arg, (np.ndarray, np.generic)):
                return (np.ndarray, arg.shape, arg.dtype, _is_x64())
        leaves, structure = jax.tree_util.tree_flatten(arg)
        if len(leaves) == 1 and leaves[0] is arg:
            raise TypeError(f"a {type(arg).__name__} has no token")
        return (structure, *map(self._token, leaves))


def _is_x64() -> bool:
    config: Any = jax.config  # its options are typed in some versions
    return bool(config.jax_enable_x64)
