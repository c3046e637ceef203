"""The programs that a worker runs, the arguments that it calls them with, and its options."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from quarantune.functions.binding import Arguments
from quarantune.jax_internals import jax_arrays, jax_functions
from quarantune.measure import rounding
from quarantune.transport.arrays import restore_array
from quarantune.transport.payload import Call, materialize
from quarantune.values.configs import Config
from quarantune.values.options import ROUNDING, Options, Tolerance
from quarantune.values.trial import CompilerFigures

_SEED = 0
_MOST_BYTES = 512 << 20
"""Bytes above which arguments are not widened."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Options of a sweep that its workers need; they travel with the call.

    Attributes:
        platform: the platform that configs run on; None for the platform of this process.
        warmup: untimed runs of each config.
        rep: the largest number of timed samples of each config.
        supply: how missing arguments are made.
        tolerance: how far outputs may differ; None for as far as rounding explains.
        check_grad: whether gradients are also compared.
        time_grad: whether a config is compiled and timed together with its gradient.
        compilation_cache: the directory of the caller's JAX compilation cache; None if workers use no cache. On a
            GPU, the workers of all sweeps of a process share another directory instead, for XLA's findings about the
            device.
        observers: the names of the observers of each config.
        compares_outputs: whether outputs are compared with the defaults' output, or with each other.
        numerics: which outputs may win.
        check_batch: the axis of the batch; None if no half of it is compared with the whole.
    """

    platform: str | None
    warmup: int
    rep: int
    supply: str
    tolerance: Tolerance | None
    check_grad: bool = False
    time_grad: bool = False
    compilation_cache: str | None = None
    observers: tuple[str, ...] = ()
    compares_outputs: bool = True
    numerics: str = ROUNDING
    check_batch: int | Mapping[str, int] | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether configs run on a GPU."""
        return self.platform in ("cuda", "rocm")

    @classmethod
    def of(cls, platform: str | None, options: Options, *, observers: Sequence[str] = ()) -> BenchOptions:
        """Returns the author's options that a worker needs.

        Args:
            platform: the platform that configs run on; None for the platform of this process.
            options: the author's options.
            observers: the names of observers.
        """
        return cls(
            platform=platform,
            warmup=options.warmup,
            rep=options.rep,
            supply="auto" if callable(options.supply) else options.supply,
            tolerance=options.tolerance,
            check_grad=options.check_grad or options.time_grad,
            time_grad=options.time_grad,
            # On a GPU, XLA itself would write to the directory, and a killed worker would leave torn files.
            compilation_cache=jax.config.values["jax_compilation_cache_dir"] if platform == "cpu" else None,
            observers=tuple(observers),
            compares_outputs=options.compares_outputs,
            numerics=options.numerics,
            check_batch=options.check_batch,
        )


@dataclasses.dataclass(frozen=True)
class Program:
    """A config made ready to run.

    Attributes:
        config: the config.
        call: takes the dynamic arguments.
        compile_s: seconds spent tracing, lowering and compiling it here.
        cache_entries: the executable as JAX's compilation cache holds it, by its key there. Empty if the caller's
            process would not find it under that key, for example if it was compiled without its device.
        calls_back: whether it is known to call back into Python.
        identity: its hash from `programs.identity`, if it is for an accelerator: a process that has the accelerator, or
            several, may have another key for it. None without a hash.
        coarsest: the bits in the mantissas of the coarsest type that it computes with; None if unknown.
        figures: the needs of its kernels, as far as they are known.
        digests: the digests of what its runs on the call's arguments have returned.
    """

    config: Config
    call: Any
    compile_s: float
    cache_entries: dict[str, bytes] = dataclasses.field(default_factory=dict)
    calls_back: bool = False
    identity: str | None = None
    coarsest: int | None = None
    figures: CompilerFigures | None = None
    digests: set[str] = dataclasses.field(default_factory=set, compare=False)


class CallArguments:
    """Makes the arguments of one call, always with the same values.

    Attributes:
        is_plain: whether the function is not jitted.
        jit: its jit options; empty for a plain callable.
        may_be_overwritten: whether a run may write into its arguments, so that each run needs fresh ones.
    """

    def __init__(self, call: Call, *, arrays_fd: int, supply: Any) -> None:
        """Sets up the arguments without making any.

        Args:
            call: the loaded payload.
            arrays_fd: the file that holds the concrete arrays' bytes; -1 for none.
            supply: how arrays without data are made; see `payload.materialize`.
        """
        self._call = call
        self._arrays_fd = arrays_fd
        self._supply = supply
        self._shared: Arguments | None = None
        self.is_plain = not jax_functions.is_jitted(call.fn)
        self.jit = jax_functions.JitOptions() if self.is_plain else jax_functions.jit_options(call.fn)
        # A plain callable may write into its arguments.
        self.may_be_overwritten = self.is_plain or bool(self.jit.donate_argnums or self.jit.donate_argnames)

    def shared(self) -> Arguments:
        """Returns the call's arguments, made once, and again after a run has taken them over (`donate_argnums`)."""
        if self._shared is None or (self.may_be_overwritten and any(map(_is_deleted, jax.tree.leaves(self._shared)))):
            self._shared = self.fresh()
        return self._shared

    def fresh(self) -> Arguments:
        """Returns newly made arguments of the call."""
        args, kwargs = materialize(self._call, self._arrays_fd, seed=_SEED, kind=self._supply)
        if self.is_plain:
            return args, kwargs
        # A jitted function's numpy arguments go to the device here, and not with every timed call. jnp.asarray would
        # compile a program for that: half of the cost of a fresh worker.
        on_device = jax.tree.map(
            lambda leaf: jax.device_put(leaf, may_alias=False) if isinstance(leaf, np.ndarray) else leaf,
            (args, kwargs),
        )
        return on_device[0], on_device[1]

    def for_run(self) -> Arguments:
        """Returns unmodified arguments for one run: fresh ones if an earlier run may have overwritten its own."""
        return self.fresh() if self.may_be_overwritten else self.shared()

    def moved(
        self, run: int, coarsest: int | None, on_device: Callable[..., Any] | None, *, is_quick: bool = False
    ) -> tuple[Arguments, float]:
        """Returns the arguments with their floats moved at random by up to half a unit in the last place.

        Args:
            run: the number of the run on moved arguments.
            coarsest: see `rounding.Motion`.
            on_device: moves arrays on their device; None to move them here.
            is_quick: whether time matters more than how far they move, if they are moved here.

        Returns:
            The arguments, and the share of the deviations that rounding explains.

        Raises:
            ValueError: no argument holds floats that can be moved.
        """
        arguments, seeds = self.for_run(), iter(range(run << 16, (run + 1) << 16))
        leaves = jax.tree.leaves(self.dynamic(arguments))
        motion = rounding.Motion.of(leaves, coarsest)
        if not any(map(motion.takes, leaves)):
            raise ValueError("the arguments cannot be moved")

        def move(leaf: Any) -> Any:
            seed, units = np.uint32(next(seeds)), motion.units(leaf)
            if on_device is not None and isinstance(leaf, jax.Array):
                found = on_device(rounding.move, leaf, seed, units)
                return jax_arrays.as_weak(found) if leaf.weak_type else found
            if is_quick:
                return _with_data(leaf, rounding.nudged(np.asarray(leaf)))
            return _with_data(leaf, rounding.moved(np, np.asarray(leaf), seed, units))

        return self._changed(arguments, motion.takes, move), motion.scale

    def widened(self) -> tuple[Arguments, contextlib.AbstractContextManager[Any]]:
        """Returns the arguments with wider floats, and the mode of JAX that takes them.

        Floats of less than 32 bits become float32; without any, float32 becomes float64.

        Raises:
            ValueError: the arguments hold neither, or would take too much memory.
        """
        arguments = self.fresh()
        floats = [leaf for leaf in jax.tree.leaves(self.dynamic(arguments)) if rounding.is_movable(leaf)]
        least = min((leaf.dtype.itemsize for leaf in floats), default=8)
        to = np.dtype("float32" if least < 4 else "float64")

        def takes(leaf: Any) -> bool:
            return rounding.is_movable(leaf) and leaf.dtype.itemsize < to.itemsize

        if least == 8 or sum(leaf.nbytes for leaf in floats) > _MOST_BYTES:
            raise ValueError("the arguments cannot be widened")
        wide = self._changed(arguments, takes, lambda leaf: _with_data(leaf, np.asarray(leaf).astype(to)))
        return wide, jax.enable_x64(True) if to.itemsize == 8 else contextlib.nullcontext()

    def _changed(self, arguments: Arguments, takes: Callable[[Any], bool], change: Callable[[Any], Any]) -> Arguments:
        """Returns the arguments after `change` has replaced the leaves that `takes` accepts; static ones stay."""
        args, kwargs = arguments
        changed = jax.tree.map(lambda leaf: change(leaf) if takes(leaf) else leaf, self.jit.dynamic(*arguments))
        return tuple(changed[0].get(index, arg) for index, arg in enumerate(args)), {**kwargs, **changed[1]}

    def dynamic(self, arguments: Arguments) -> Arguments:
        """Returns the arguments without the static ones, as an executable takes them."""
        args, kwargs = self.jit.dynamic(*arguments)
        return tuple(args.values()), kwargs


def _with_data(like: Any, data: Any) -> Any:
    """Returns an array with other data, of the same kind and on the same devices."""
    if isinstance(like, np.ndarray):
        return data
    return restore_array(data, like.weak_type, None, like.sharding if like.committed else None)


def _is_deleted(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.is_deleted()
