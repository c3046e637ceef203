"""A config's executable as a function: loaded, not compiled, wherever the call is the one that it was compiled for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from quarantune import jax_internals
from quarantune.host import locks
from quarantune.transport import binding, executable_data
from quarantune.transport.problem import is_array
from quarantune.values.trial import Config

_Static = tuple[type, Any]


class Winner:
    """A function with a config bound, and the executable that a worker compiled of the two.

    Called with arguments of the same shapes, dtypes and statics, outside of any trace, it runs the executable. Any
    other call goes to the function, which JAX compiles as usual.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        config: Config,
        compiled: Any,
        *,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Binds a config to a function.

        Args:
            fn: the jitted function.
            config: the config.
            compiled: the executable, callable or as it was read.
            args: the positional arguments it was compiled for, arrays or what stands for them; where the executable is
                callable, of arrays only the place counts.
            kwargs: the keyword arguments, likewise.

        Raises:
            ValueError: what was read is not an executable for such arguments.
        """
        functools.update_wrapper(self, fn)
        self.config = config
        self._bound = binding.bind(fn, config)
        self._jitted, self._keywords = binding.applied(fn, config)
        self._jit = jax_internals.jit_options(fn)
        dynamic, self._statics = self._split(args, kwargs)
        self._read: executable_data.Loaded | None = None
        if isinstance(compiled, executable_data.Loaded):
            self._read = compiled
            self._call = None if compiled.out_tree is None else compiled.with_trees(_tree(dynamic), compiled.out_tree)
        else:
            self._call = compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the executable, or the function where the call is another one."""
        (dynamic_args, dynamic_kwargs), statics = self._split(args, kwargs)
        if jax_internals.is_tracing() or statics != self._statics:
            return self._bound(*args, **kwargs)
        try:
            # An executable takes strong types for weak ones and weak for strong, and answers in its own.
            if self._call is None:
                assert self._read is not None
                # Its outputs hold classes, which only the function can name: it is traced, as by any first call.
                out_tree = self._jitted.trace(*args, **kwargs, **self._keywords).out_tree
                self._call = self._read.with_trees(_tree((dynamic_args, dynamic_kwargs)), out_tree)
            leaves = jax.tree.leaves((dynamic_args, dynamic_kwargs))
            if [jax.typeof(leaf).weak_type for leaf in leaves] != self._weak:
                return self._bound(*args, **kwargs)
            return self._call(*dynamic_args, **dynamic_kwargs)
        except (TypeError, ValueError):
            # Not the shapes, dtypes or devices it was compiled for; the function says it better if it is wrong.
            return self._bound(*args, **kwargs)

    @locks.lazy
    def _weak(self) -> list[bool]:
        """Which of the arguments are weakly typed; not to be asked before there is something to call."""
        assert self._call is not None
        return [aval.weak_type for aval in jax.tree.leaves(self._call.in_avals)]

    def _split(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[list[Any], dict[str, Any]], tuple[dict[int, _Static], dict[str, _Static]]]:
        is_static = [self._jit.is_static_position(index, len(args)) for index in range(len(args))]
        names = self._jit.static_argnames
        dynamic = (
            [arg for arg, static in zip(args, is_static, strict=True) if not static],
            {name: arg for name, arg in kwargs.items() if name not in names},
        )
        statics = (  # with their types, as JAX has it: 1 and 1.0 are two programs
            {index: (type(arg), arg) for index, arg in enumerate(args) if is_static[index]},
            {name: (type(arg), arg) for name, arg in kwargs.items() if name in names},
        )
        return dynamic, statics


def _tree(dynamic: tuple[list[Any], dict[str, Any]]) -> Any:
    args, kwargs = dynamic
    return jax.tree.structure((tuple(args), kwargs))


def without_arrays(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns a call with None for every argument that holds an array: its statics, which cost nothing to keep.

    Arguments are not rebuilt around something else: the class of one may look at what it is given.
    """

    def emptied(arg: Any) -> Any:
        return None if any(map(is_array, jax.tree.leaves(arg))) else arg

    return tuple(map(emptied, args)), {name: emptied(arg) for name, arg in kwargs.items()}
