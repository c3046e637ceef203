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

read_context = jax_internals.trace_context()
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
        self._array_type = jax_internals.array_type()

    def of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable | None:
        """Returns the key of a call; None where an argument needs a closer look each time, as a tracer does."""
        try:
            parts: list[Any] = []
            for index, arg in enumerate(args):
                is_static = self._jit is not None and self._jit.is_static_position(index, len(args))
                parts.append(self._token_of_static(arg) if is_static else self._token(arg))
            for name, arg in kwargs.items():
                is_static = self._jit is not None and name in self._jit.static_argnames
                parts += [name, self._token_of_static(arg) if is_static else self._token(arg)]
            key = tuple(parts)
            hash(key)
        except TypeError:
            return None
        return key

    def _token(self, arg: Any) -> Hashable:
        return self._token_of_value(arg) if self._jit is None else self._token_of_dynamic(arg)

    def _token_of_static(self, arg: Any) -> Hashable:
        return (arg.aval, arg.sharding) if type(arg) is self._array_type else (type(arg), arg)

    def _token_of_dynamic(self, arg: Any) -> Hashable:
        """Returns the token of an argument that jit traces."""
        if type(arg) is self._array_type:
            return (arg.aval, arg.sharding)
        # The dtype that JAX gives to a Python number or NumPy's float64 depends on x64.
        if isinstance(arg, (bool, int, float, complex)):
            return (type(arg), _is_x64())
        if isinstance(arg, (np.ndarray, np.generic)):
            return (np.ndarray, arg.shape, arg.dtype, _is_x64())
        return self._token_of_tree(arg)

    def _token_of_value(self, arg: Any) -> Hashable:
        """Returns the token of an argument of a plain function."""
        if type(arg) is self._array_type:
            return (arg.aval, arg.sharding)
        if type(arg) in (bool, int, str):
            return (type(arg), arg)
        return self._token_of_tree(arg)

    def _token_of_tree(self, arg: Any) -> Hashable:
        leaves, structure = jax.tree_util.tree_flatten(arg)
        if len(leaves) == 1 and leaves[0] is arg:
            raise TypeError(f"a {type(arg).__name__} has no token")
        return (structure, *map(self._token, leaves))


def _is_x64() -> bool:
    return bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]
