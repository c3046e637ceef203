"""A winner that runs its worker's executable instead of compiling again, for calls that the executable fits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from quarantune import jax_internals
from quarantune.host.process import lazy
from quarantune.jax_internals.other_processes import ExecutableParts
from quarantune.transport.problem import bind_config, jitted_with
from quarantune.values.configs import Config

_Static = tuple[type, Any]


class Winner:
    """A function with a config bound, and the executable that a worker compiled from the two.

    Called with arguments of the same shapes, dtypes and statics, outside of any trace, it runs the executable. Any
    other call goes to the function, which JAX compiles as usual.
    """

    def __init__(
        self, fn: Callable[..., Any], config: Config, compiled: Any, *, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Binds a config to a function.

        Args:
            fn: the jitted function.
            config: the config.
            compiled: the executable, callable or as read from its file. XLA may end a process that loads a damaged
                program, so one that was read is loaded by the first call.
            args: the positional arguments that it was compiled for, with arrays or placeholders; where the executable
                is callable, only the places of arrays count.
            kwargs: the keyword arguments, likewise.
        """
        functools.update_wrapper(self, fn)
        self.config = config
        self._bound = bind_config(fn, config)
        self._jitted, self._keywords = jitted_with(fn, config)
        self._jit = jax_internals.jit_options(fn)
        _, self._statics = self._split(args, kwargs)
        self._read = compiled if isinstance(compiled, ExecutableParts) else None
        self._call = None if self._read else compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the executable, or the function where the executable does not fit the call."""
        (dynamic_args, dynamic_kwargs), statics = self._split(args, kwargs)
        if jax_internals.is_tracing() or statics != self._statics:
            return self._bound(*args, **kwargs)
        try:
            # An executable accepts weak types for strong ones and the reverse, and returns its own.
            if self._call is None:
                assert self._read is not None
                out_tree = self._read.out_tree
                if out_tree is None:
                    # Its outputs hold classes that only the function can name: trace it, as any first call does.
                    out_tree = self._jitted.trace(*args, **kwargs, **self._keywords).out_tree
                self._call = self._read.with_trees(_tree((dynamic_args, dynamic_kwargs)), out_tree)
            leaves = jax.tree.leaves((dynamic_args, dynamic_kwargs))
            if [jax.typeof(leaf).weak_type for leaf in leaves] != self._weak:
                return self._bound(*args, **kwargs)
            return self._call(*dynamic_args, **dynamic_kwargs)
        except (TypeError, ValueError):
            # Other shapes, dtypes or devices; if the call is wrong, the function raises a clearer error.
            return self._bound(*args, **kwargs)

    @lazy
    def _weak(self) -> list[bool]:
        """Whether each argument is weakly typed; only to be read once there is an executable to call."""
        assert self._call is not None
        return [aval.weak_type for aval in jax.tree.leaves(self._call.in_avals)]

    def _split(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[list[Any], dict[str, Any]], tuple[dict[int, _Static], dict[str, _Static]]]:
        positional, named = self._jit.dynamic(args, kwargs)
        statics = (  # with their types, as in JAX: 1 and 1.0 are two programs
            {index: (type(arg), arg) for index, arg in enumerate(args) if index not in positional},
            {name: (type(arg), arg) for name, arg in kwargs.items() if name not in named},
        )
        return (list(positional.values()), named), statics


def _tree(dynamic: tuple[list[Any], dict[str, Any]]) -> Any:
    args, kwargs = dynamic
    return jax.tree.structure((tuple(args), kwargs))
