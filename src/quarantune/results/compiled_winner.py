"""A winner that runs its worker's executable instead of compiling again, for calls that the executable fits."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.extend import backend

from quarantune.functions.binding import Arguments, bind_config, jitted_with
from quarantune.functions.description import describe_jax_state, describe_static
from quarantune.jax_internals import jax_functions, jax_options, jax_traces
from quarantune.jax_internals.other_processes import ExecutableParts, interface_of
from quarantune.values.codec import canonical_json, decode_json
from quarantune.values.configs import Config

_Dynamic = tuple[tuple[Any, ...], dict[str, Any]]
_WITHOUT_PARTS = (bool, int, str, type(None))


class Winner:
    """A function with a config bound, and the executable that a worker compiled from the two.

    A call runs the executable if JAX would compile the same program for it: outside of any trace, under the same
    settings of JAX, with arguments of the same structure and types in the same places, and with the same static values.
    Any other call goes to the function, which JAX compiles as usual.
    """

    def __init__(self, fn: Callable[..., Any], config: Config, compiled: Any, call: Arguments, key: str) -> None:
        """Binds a config to a function.

        Args:
            fn: the jitted function.
            config: the config.
            compiled: the executable: callable, or the parts from its file. The first call loads the parts, because XLA
                may end a process that loads a damaged program.
            call: the arguments that it was compiled for, with arrays or placeholders; if the executable is callable,
                only the places of arrays count.
            key: the key of the call; it contains the settings of JAX.

        Raises:
            ValueError: the key is not JSON.
        """
        functools.update_wrapper(self, fn)
        self.config = config
        self._bound = bind_config(fn, config)
        self._jitted, self._keywords = jitted_with(fn, config)
        self._jit = jax_functions.jit_options(fn)
        self._state = canonical_json(decode_json(key.encode()).get("jax", {}))
        self._settings: Any = None
        dynamic, self._statics = self._split(*call)
        self._program = compiled
        self._tree = jax.tree.structure(dynamic) if isinstance(compiled, ExecutableParts) else compiled.in_tree
        self._interface: tuple[list[Any], list[Any], list[Any], bool] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the executable if JAX would compile the same program for this call, else the function."""
        try:
            dynamic, statics = self._split(args, kwargs)
            leaves, tree = jax.tree.flatten(dynamic)
            if tree == self._tree and statics == self._statics and self._is_same_state(args, kwargs):
                program = self._program
                if isinstance(program, ExecutableParts):
                    out_tree = program.out_tree
                    if out_tree is None:
                        # Its outputs contain classes that only the function knows: trace it, like any first call.
                        out_tree = self._jitted.trace(*args, **kwargs, **self._keywords).out_tree
                    program = program.with_trees(tree, out_tree)
                if self._takes(program, leaves):
                    outputs = program(*dynamic[0], **dynamic[1])
                    self._program = program  # not earlier: the trace of another call may give another output tree
                    return outputs
        except (TypeError, ValueError):
            pass  # Other shapes, dtypes or layouts. For a wrong call, the function raises a clearer error.
        return self._bound(*args, **kwargs)

    def _is_same_state(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Returns whether JAX has the settings under which the executable was compiled."""
        mesh = jax.sharding.get_abstract_mesh()
        if jax_traces.is_tracing() or jax_options.is_debugging() or (mesh.size == 1 and not mesh.empty):
            return False  # descriptions omit a one-device mesh, and outputs are on it
        if (settings := jax_options.program_state()) != self._settings:
            if canonical_json(describe_jax_state(args, kwargs)) != self._state:
                return False
            # The description of an active mesh depends on the arguments, and the next call may have others.
            self._settings = settings if mesh.empty else None
        return True

    def _takes(self, program: Any, leaves: list[Any]) -> bool:
        """Returns whether JAX would compile the executable for arguments of these types in these places.

        The executable also accepts weak types for strong types and the reverse, and other arrays on its devices. Its
        outputs then keep the types and the places from its compilation.
        """
        self._interface = self._interface or interface_of(program)
        avals, places, devices, is_committed = self._interface
        # Outputs are committed if an argument was. If the function commits them, no argument fits, and JAX compiles.
        is_placed, is_any_committed = is_committed and any(place is not None for place in places), False
        for leaf, aval, place in zip(leaves, avals, places, strict=True):
            if type(kind := jax.typeof(leaf)) is not type(aval) or kind.weak_type != aval.weak_type:
                return False
            if place is not None and isinstance(leaf, jax.Array) and leaf.committed:
                is_any_committed = True
                if leaf.sharding != place:
                    return False
            elif place is not None and is_placed and not place.is_fully_replicated:
                return False
        if is_any_committed or is_placed:
            return is_any_committed and is_placed
        return (is_committed or devices == [backend.get_default_device()]) and jax.sharding.get_abstract_mesh().empty

    def _split(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[_Dynamic, dict[Any, Any]]:
        positional, named = self._jit.dynamic(args, kwargs)
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        statics = {place: _exact(given[place]) for place in given.keys() - positional.keys() - named.keys()}
        return (tuple(positional.values()), named), statics


def _exact(static: Any) -> tuple[type, Any, str]:
    """Returns a static value with its type, as in JAX, and a text that distinguishes 1 from 1.0 inside it."""
    text = ""
    with contextlib.suppress(TypeError):  # without a description, only equality counts
        text = "" if type(static) in _WITHOUT_PARTS else canonical_json(describe_static(static))
    return type(static), static, text
