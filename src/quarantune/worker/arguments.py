"""The arguments that a worker calls the tuned function with."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from quarantune import jax_internals
from quarantune.measure import rounding
from quarantune.transport import inputs
from quarantune.transport.arrays import restore_array
from quarantune.transport.call import Arguments, Call

_SEED = 0


class CallArguments:
    """Makes the arguments of one call, always with the same values.

    Attributes:
        jit: the function's jit options; None for a plain callable.
        may_be_overwritten: whether a run may write into its arguments, so that each run needs fresh ones.
    """

    def __init__(self, call: Call, *, arrays_fd: int, supply: Any) -> None:
        """Sets up the arguments; none is made yet.

        Args:
            call: the loaded payload.
            arrays_fd: the file that holds the concrete arrays' bytes; -1 for none.
            supply: how arrays without data are made, as `inputs.materialize` takes it.
        """
        self._call = call
        self._arrays_fd = arrays_fd
        self._supply = supply
        self._shared: Arguments | None = None
        self.jit: jax_internals.JitOptions | None = None
        self.may_be_overwritten = True  # a plain callable may write into its arguments
        if jax_internals.is_jitted(call.fn):
            self.jit = jax_internals.jit_options(call.fn)
            self.may_be_overwritten = bool(self.jit.donate_argnums or self.jit.donate_argnames)

    def shared(self) -> Arguments:
        """Returns the call's arguments, made once, and again after a run has taken them over (`donate_argnums`)."""
        if self._shared is None or (self.may_be_overwritten and any(map(_is_deleted, jax.tree.leaves(self._shared)))):
            self._shared = self.fresh()
        return self._shared

    def fresh(self) -> Arguments:
        """Returns newly made arguments of the call."""
        args, kwargs = inputs.materialize(self._call, self._arrays_fd, seed=_SEED, kind=self._supply)
        if self.jit is None:
            return args, kwargs
        # A jitted function's numpy arguments are carried to the device here and not with every timed call. jnp.asarray
        # would compile a program for that, which is half of the cost of a fresh worker.
        on_device = jax.tree.map(
            lambda leaf: jax.device_put(leaf, may_alias=False) if isinstance(leaf, np.ndarray) else leaf,
            (args, kwargs),
        )
        return on_device[0], on_device[1]

    def for_run(self) -> Arguments:
        """Returns unmodified arguments for one run: fresh ones where an earlier run may have overwritten its own."""
        return self.fresh() if self.may_be_overwritten else self.shared()

    def moved(self, run: int, coarsest: int | None, *, on_device: bool) -> tuple[Arguments, float] | None:
        """Returns the arguments with their floats moved at random by up to half a unit in the last place.

        Args:
            run: which run on moved arguments they are for.
            coarsest: as for `rounding.Motion`.
            on_device: whether arrays are moved on their device; to compile that there pays for many configs only.

        Returns:
            The arguments, and the share of the deviations that rounding explains; None where none holds floats.
        """
        arguments, static = self.for_run(), self.jit or jax_internals.JitOptions()
        names = {name for name in arguments[1] if name in static.static_argnames}
        held = {index for index in range(len(arguments[0])) if static.is_static_position(index, len(arguments[0]))}
        seeds = iter(range(run << 16, (run + 1) << 16))
        dynamic, count = self.dynamic(arguments), 0
        motion = rounding.Motion.of(dynamic, coarsest)

        def move(leaf: Any) -> Any:
            nonlocal count
            if not motion.takes(leaf):
                return leaf
            count += 1
            seed, units = np.uint32(next(seeds)), motion.units(leaf)
            if isinstance(leaf, np.ndarray):
                return rounding.moved(np, leaf, seed, units)
            if on_device:
                found = rounding.move(leaf, seed, units)
                return jax_internals.as_weak(found) if leaf.weak_type else found
            data = rounding.moved(np, np.asarray(leaf), seed, units)
            return restore_array(data, leaf.weak_type, None, leaf.sharding if leaf.committed else None)

        args = tuple(arg if index in held else jax.tree.map(move, arg) for index, arg in enumerate(arguments[0]))
        kwargs = {name: arg if name in names else jax.tree.map(move, arg) for name, arg in arguments[1].items()}
        return ((args, kwargs), motion.scale) if count else None

    def dynamic(self, arguments: Arguments) -> Arguments:
        """Returns the arguments without the static ones, as an executable takes them."""
        args, kwargs = arguments
        if self.jit is None:
            return args, kwargs
        static = self.jit
        return (
            tuple(arg for index, arg in enumerate(args) if not static.is_static_position(index, len(args))),
            {name: arg for name, arg in kwargs.items() if name not in static.static_argnames},
        )


def _is_deleted(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.is_deleted()
