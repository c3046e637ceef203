"""The only package that uses JAX's private names, each with the reason why no public name will do.

Here is JAX around a call: arrays, traces, jitted functions, options, and the other processes of the program.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
import operator
import os
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax

# Batching and partitioning are imported for their side effect: they add themselves to the classes with custom rules.
from jax._src import (  # noqa: F401
    config,
    core,
    custom_api_util,
    custom_batching,
    custom_partitioning,
    literals,
    xla_bridge,
)
from jax._src.array import ArrayImpl

from quarantune.host.process import warn

OPTION_DEFAULTS: Mapping[str, Any] = {
    "jax_accurate_erf_inv": False,
    "jax_allow_f16_reductions": True,
    "jax_auto_pcast": True,
    "jax_check_static_indices": False,
    "jax_custom_jvp3": False,
    "jax_custom_vjp3": False,
    "jax_debug_key_reuse": False,
    "jax_default_matmul_precision": None,
    "jax_default_prng_impl": "threefry2x32",
    "jax_disable_most_optimizations": False,
    "jax_embedded_constants_max_bytes": 32,
    "jax_enable_x64": False,
    "jax_error_checking_behavior_divide": "ignore",
    "jax_error_checking_behavior_nan": "ignore",
    "jax_error_checking_behavior_oob": "ignore",
    "jax_exec_time_optimization_effort": 0.0,
    "jax_explicit_x64_dtypes": "warn",
    "jax_high_dynamic_range_gumbel": False,
    "jax_memory_fitting_effort": 0.0,
    "jax_memory_fitting_level": "O2",
    "jax_numpy_dtype_promotion": "standard",
    "jax_numpy_rank_promotion": "allow",
    "jax_optimization_level": "UNKNOWN",
    "jax_pallas_auto_assign_collective_ids": "no",
    "jax_pallas_auto_assign_collective_ids_limit": 25,
    "jax_pallas_enable_debug_checks": False,
    "jax_pallas_use_mosaic_gpu": True,
    "jax_ragged_dot_use_gpu_pallas_triton_lowering": False,
    "jax_raise_on_ppermute_sort_diff": True,
    "jax_random_seed_offset": 0,
    "jax_remat3": False,
    "jax_remat_barrier_no_cotangents": False,
    "jax_remove_size_one_mesh_axis_from_type": False,
    "jax_scan3": False,
    "jax_softmax_custom_jvp": False,
    "jax_threefry_gpu_kernel_lowering": False,
    "jax_threefry_partitionable": True,
    "jax_use_direct_linearize": True,
    "jax_use_emit_pipeline_primitive": False,
    "jax_use_hlo_logistic_lowering": None,
    "jax_use_shardy_partitioner": True,
    "jax_use_simplified_jaxpr_constants": False,
}
"""The options that change the program, with their defaults. JAX does not keep the defaults: the value of an option
includes its environment variable from the start."""

CONTEXTS = (
    "compute_on_context_manager",
    "pallas_tpu_interpret_mode_context_manager",
    "xla_metadata_context_manager",
)
"""JAX's contexts: values for a thread that are in JAX's key for a program but are not options; None unless set."""

# Options of a process rather than a program: its devices, caches, peers and debugging. The sandbox sets those of a
# worker.
_PROCESS_OPTIONS = (
    "jax_platforms",
    "jax_platform_name",
    "jax_xla_backend",
    "jax_backend_target",
    "jax_compilation_cache",
    "jax_enable_compilation_cache",
    "jax_persistent_cache",
    "jax_raise_persistent_cache",
    "jax_share_binary",
    "jax_cuda_",
    "jax_rocm_",
    "jax_oneapi_",
    "jax_mock_gpu",
    "mock_num_gpu",
    "jax_cross_host",
    "jax_force_dcn",
    "jax_distributed",
    "jax_mtls",
    "jax_enable_preemption",
    "jax_enable_recoverability",
    "jax_cpu_collectives",
    "jax_cpu_get_",
    "jax_dump_ir",
    "jax_pjrt_client",
    "jax_default_device",
    "jax_disable_jit",
    "jax_no_tracing",
    "jax_no_execution",
    "jax_transfer_guard",
    "jax_array_garbage_collection_guard",
    "jax_thread_guard",
)
_inherited: Any = None
"""The client that this process has from the process it was forked from, whose threads it lacks: calls would hang."""


# --- arrays, their types, and PRNG keys -----------------------------------------------------------------------


def as_weak(array: jax.Array) -> jax.Array:
    """Returns a weakly typed array with the same buffers.

    Private because every public way to make a weakly typed array that is not a scalar compiles a program.

    Args:
        array: an array whose shards are all in this process.
    """
    whole: Any = array
    buffers = [shard.data for shard in whole.addressable_shards] if len(whole.sharding.device_set) > 1 else [whole]
    weak: jax.Array = ArrayImpl(whole.aval.update(weak_type=True), whole.sharding, buffers, committed=whole.committed)
    return weak


typed_ndarray: type = literals.TypedNdArray
"""The class of the NumPy arrays that JAX uses for constants while it traces.

Private because users rarely see it, but the rules of a `jax.custom_vjp` function are called with such arrays.
"""


def key_impl(dtype: Any) -> str:
    """Returns the name of the implementation behind the dtype of a PRNG key array.

    Private because `jax.random.key_impl` needs an array, and a call may have only a `ShapeDtypeStruct` or a tracer.
    """
    return str(dtype._impl.name)


def key_dtype(impl: str) -> Any:
    """Returns the dtype of PRNG key arrays of an implementation, without making a key.

    Private because `jax.random.key(...).dtype` initialises a backend.
    """
    from jax._src.random import prng

    return prng.KeyTy(prng.prngs[impl])


def key_data_shape(impl: str) -> tuple[int, ...]:
    """Returns the shape of the data of one PRNG key of an implementation."""
    return tuple(key_dtype(impl)._impl.key_shape)


array_type: type[Any] = ArrayImpl
"""The concrete class of JAX arrays.

Private because `isinstance(x, jax.Array)` is true for tracers too, and several times slower than comparing types,
which would be half the time of a cached call. Making an array to get its type would initialise a backend.
"""
aval_of = operator.attrgetter("aval")
raw_sharding_of = operator.attrgetter("_sharding")
"""Reads the sharding of a JAX array; the public `sharding` takes three times as long, in every cached call."""


def aval(shape: Sequence[int], dtype: Any, *, weak_type: bool) -> Any:
    """Returns the type of an array.

    Private because JAX has no public way to make a weak type.
    """
    return core.ShapedArray(tuple(shape), dtype, weak_type=weak_type)


def is_plain_aval(item: Any) -> bool:
    """Returns whether `aval` can make a type: that of an array in device memory, without explicit mesh axes."""
    if type(item) is not core.ShapedArray:
        return False
    mesh = item.sharding.mesh
    if not mesh.empty and not mesh.are_all_axes_auto:
        return False
    # A mesh with automatic axes alone adds nothing to the sharding of the argument.
    return item == core.ShapedArray(item.shape, item.dtype, weak_type=item.weak_type, sharding=item.sharding)


# --- traces in progress, and the programs that they make ------------------------------------------------------

primitive_type: type = core.Primitive
"""The class of JAX's primitives; private because the public `jax.extend`, which has it too, is slow to import."""


def equations(jaxpr: Any, *, closed: Collection[str] = ()) -> Iterator[Any]:
    """Yields the equations of a jaxpr, and those of all jaxprs among their parameters.

    Args:
        jaxpr: the jaxpr.
        closed: the names of primitives whose parameters are not looked into.
    """
    for equation in jaxpr.eqns:
        yield equation
        for value in () if equation.primitive.name in closed else equation.params.values():
            for item in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(item, "jaxpr", item)
                if hasattr(inner, "eqns"):
                    yield from equations(inner, closed=closed)


def varying_axes(array: Any) -> frozenset[str]:
    """Returns the axes of a `shard_map` along which an array may differ from device to device.

    Private because the public attribute of an array's type has changed its name between versions.

    Args:
        array: an array or a tracer. Nothing is known of one inside a `shard_map` with `check_vma=False`.
    """
    kind: Any = jax.typeof(array)
    return frozenset(kind.mat.varying if hasattr(kind, "mat") else getattr(kind, "vma", ()))


def bound_axes() -> dict[str, int]:
    """Returns the size of each axis that collectives can name here, by its name.

    Private because the public `jax.lax.axis_size` needs the name of an axis, and nothing public lists the names.
    """
    return dict(core.get_axis_env().axis_sizes)


def is_differentiated(value: Any) -> bool:
    """Returns whether a value is a tracer of `jax.grad`, `jax.vjp` or `jax.linearize`.

    Private because JAX has no public way to tell one kind of tracer from another.
    """
    from jax._src.interpreters import ad

    return isinstance(value, getattr(ad, "LinearizeTracer", ()))


@contextlib.contextmanager
def outside_of_traces() -> Iterator[None]:
    """Suspends the trace in progress in this thread, if there is one, while the block runs.

    Private because the public `jax.ensure_compile_time_eval` evaluates as much as it can of a function traced inside
    it: callbacks with constant arguments, such as those of Pallas's interpreters, would run during tracing.
    """
    with core.eval_context():
        yield


def is_tracing() -> bool:
    """Returns whether this thread is inside a trace."""
    return not core.trace_state_clean()


def origin_of(equation: Any) -> tuple[types.CodeType, int] | None:
    """Returns the innermost code outside of JAX that made an equation, and the line in its file; None for none.

    Private because nothing public tells the frames of JAX from others.

    Args:
        equation: an equation of a jaxpr.
    """
    from jax._src import source_info_util

    traceback = equation.source_info.traceback
    for code, position in zip(*traceback.raw_frames(), strict=True) if traceback else ():
        if source_info_util.is_user_filename(code.co_filename):
            return code, source_info_util.raw_frame_to_frame(code, position).start_line
    return None


# --- functions that JAX has wrapped: their options, and the rules of jax.custom_vjp and such ------------------


def hidden_interface(lowered: jax.stages.Lowered) -> str | None:
    """Returns the properties of a lowered program's arguments and outputs that its text does not show.

    These are the flat indices of the arguments that the program uses, and the types of its outputs with weak types and
    PRNG keys. Private because the text numbers the remaining arguments anew, and `out_info` has every type strong.

    Returns:
        A text; None if JAX does not say, or the program has constants among its arguments.
    """
    lowering: Any = getattr(lowered, "_lowering", None)
    about = getattr(lowering, "compile_args", {})
    if getattr(lowering, "const_args", []) or not {"kept_var_idx", "global_out_avals"} <= set(about):
        return None
    return f"{sorted(about['kept_var_idx'])} {about['global_out_avals']}"


def is_jitted(fn: object) -> bool:
    """Returns whether `fn` was returned by `jax.jit`, or has the same interface."""
    return isinstance(fn, jax.stages.Wrapped)


pjit_type: Any = type(jax.jit(lambda: None))
"""The class of the objects that `jax.jit` returns; making one of them initialises nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class JitOptions:
    """The options that `jax.jit` was given for a function, as values that can be pickled.

    Attributes:
        static_names: the names of all static parameters, including those given by position.
        static_argnums: positions of static parameters, resolved by jit.
        static_argnames: names of static parameters, resolved by jit.
        donate_argnums: positions of donated parameters.
        donate_argnames: names of donated parameters.
        keep_unused: as for `jax.jit`.
        inline: as for `jax.jit`.
        compiler_options: as for `jax.jit`, as pairs.
        cannot_travel: the names of the given options that are tied to devices of this process.
        takes_no_keywords: whether the function refuses keyword arguments, because `in_shardings` was given.
    """

    static_names: frozenset[str] = frozenset()
    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    donate_argnums: tuple[int, ...] = ()
    donate_argnames: tuple[str, ...] = ()
    keep_unused: bool = False
    inline: Any = False
    compiler_options: tuple[tuple[str, Any], ...] = ()
    cannot_travel: tuple[str, ...] = ()
    takes_no_keywords: bool = False

    def is_static_position(self, index: int, count: int) -> bool:
        """Returns whether positional argument `index` of `count` is static; negative positions count from the end."""
        return index in self.static_argnums or index - count in self.static_argnums

    def dynamic(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[dict[int, Any], dict[str, Any]]:
        """Returns the arguments of a call that are not static: the positional ones by position, the others by name."""
        return (
            {index: arg for index, arg in enumerate(args) if not self.is_static_position(index, len(args))},
            {name: arg for name, arg in kwargs.items() if name not in self.static_argnames},
        )

    def check_can_travel(self, name: str) -> None:
        """Raises if the function cannot be rebuilt from these options in another process.

        Args:
            name: the function's name, for the message.

        Raises:
            TypeError: the options hold devices, shardings or layouts of this process.
        """
        if self.cannot_travel:
            raise TypeError(
                f"jax.jit was given {' and '.join(self.cannot_travel)} for {name!r}, and these are tied to "
                f"the devices of this process. Move {name!r} into a module that can be imported (it then "
                f"travels by name), or leave them out and put shardings on the arguments instead."
            )

    def rebuild(self, plain: Callable[..., Any]) -> Any:
        """Returns `plain` jitted with these options.

        Args:
            plain: the function inside the jitted one.
        """
        # Both spellings, as jit has resolved them: from one alone it would have to derive the other again.
        names = ["static_argnums", "static_argnames", "keep_unused", "inline"]
        if self.donate_argnums or self.donate_argnames:  # names need a signature, which not every function has
            names += ["donate_argnums", "donate_argnames"]
        options = {name: getattr(self, name) for name in names}
        return jax.jit(plain, **options, compiler_options=dict(self.compiler_options) or None)


_recompiled: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def with_compiler_options(fn: Any, options: Mapping[str, Any]) -> Any:
    """Returns a jitted function with further compiler options: the same function each time for the same options.

    Args:
        fn: the function.
        options: the options; they override those that `jax.jit` was given.
    """
    made = _recompiled.setdefault(fn, {})
    described = tuple(sorted((name, type(value).__name__, value) for name, value in options.items()))  # True is 1
    if described not in made:
        own = jit_options(fn)
        merged = tuple({**dict(own.compiler_options), **options}.items())
        made.setdefault(described, dataclasses.replace(own, compiler_options=merged).rebuild(fn.__wrapped__))
    return made[described]


def without_compiler_options(fn: Any) -> Any:
    """Returns a jitted function without compiler options, which JAX refuses inside another jitted function."""
    own = jit_options(fn)
    return dataclasses.replace(own, compiler_options=()).rebuild(fn.__wrapped__) if own.compiler_options else fn


def clear_caches(fn: Any) -> None:
    """Clears the compiled programs of a jitted function, and of its variants with further compiler options."""
    for each in (fn, *_recompiled.get(fn, {}).values()):
        each.clear_cache()


def cleared_with_caches(clear: Callable[[], None]) -> object:
    """Makes `jax.clear_caches` call a function too, for as long as the returned object exists.

    Private because JAX has no public way to take part.
    """
    from jax._src import util

    cache: Any = functools.partial(clear)
    cache.cache_clear = clear
    with contextlib.suppress(AttributeError):  # another version of JAX
        util.register_cache(cache, "quarantune")
    return cache


def jit_options(fn: Any) -> JitOptions:
    """Returns the options of a jitted function.

    Private (`_jit_info`) because a jitted function has no public record of its options.

    Args:
        fn: the jitted function.

    Raises:
        TypeError: `fn` has no such record.
    """
    info = getattr(fn, "_jit_info", None)
    if info is None:
        raise TypeError(f"expected a function wrapped by jax.jit, got {fn!r}; put @jax.jit directly on it")
    return JitOptions(
        static_names=_static_names(fn, info),
        static_argnums=tuple(info.static_argnums),
        static_argnames=tuple(info.static_argnames),
        donate_argnums=tuple(info.donate_argnums),
        donate_argnames=tuple(info.donate_argnames),
        keep_unused=bool(info.keep_unused),
        inline=info.inline,
        compiler_options=tuple(info.compiler_options_kvs),
        cannot_travel=_device_bound_options(info),
        takes_no_keywords=bool(info.user_specified_in_shardings),
    )


def _static_names(fn: Any, info: Any) -> frozenset[str]:
    signature = info.fun_signature or inspect.signature(fn)
    by_position_kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [name for name, item in signature.parameters.items() if item.kind in by_position_kinds]
    by_position = {parameters[index] for index in info.static_argnums if -len(parameters) <= index < len(parameters)}
    return frozenset(info.static_argnames) | by_position


def _device_bound_options(info: Any) -> tuple[str, ...]:
    from jax._src.named_sharding import UnspecifiedValue

    def given(leaves: tuple[Any, ...]) -> bool:
        return any(leaf is not None and not isinstance(leaf, UnspecifiedValue) for leaf in leaves)

    groups = {
        "in_shardings": info.in_shardings_leaves,
        "out_shardings": info.out_shardings_leaves,
        "input layouts": info.in_layouts_leaves,
        "output layouts": info.out_layouts_leaves,
        "device": (info.device,),
        "backend": (info.backend,),
    }
    return tuple(name for name, leaves in groups.items() if given(leaves))


def custom_rule_types() -> tuple[type, ...]:
    """Returns the classes of functions with custom rules, as far as they are imported: `jax.custom_vjp` and the like.

    Private because JAX's list of these classes is. An object of any of them has all its state in its `__dict__`.
    """
    return tuple(custom_api_util._custom_wrapper_types)


def custom_rules(fn: object) -> Mapping[str, Any]:
    """Returns the rules of a function of one of these classes, such as its derivative, by name; empty for any other.

    Private because JAX has no public way to read the rules back. A rule is a callable, or a dict of plain values for
    a sharding rule that was given as text. `fun` is the function itself, where `__wrapped__` does not lead to it.

    Args:
        fn: any object.
    """
    kind = type(fn)
    if issubclass(kind, (jax.custom_vjp, jax.custom_jvp)):
        return _derivative_rules(fn)
    if not issubclass(kind, custom_rule_types()):
        return {}
    # `custom_vmap`, `custom_partitioning` and the like keep each rule, and the function itself, in an attribute.
    state = dict(vars(fn))
    if state.pop("__wrapped__", None) is not None:
        state.pop("fun", None)
    text_rule = state.get("sharding_rule")
    if text_rule is not None and not callable(text_rule):
        state["sharding_rule"] = vars(text_rule)
    return {name: rule for name, rule in state.items() if callable(rule) or isinstance(rule, dict)}


def _derivative_rules(fn: object) -> Mapping[str, Any]:
    """Returns the rules of a `jax.custom_vjp` or `jax.custom_jvp` function.

    `defjvps` combines one rule for each argument into a function of JAX's, whose closure keeps them.
    """
    rules = {name: getattr(fn, name, None) for name in ("fwd", "bwd", "jvp")}
    jvp = rules["jvp"]
    if inspect.isfunction(jvp) and "jvps" in jvp.__code__.co_freevars and jvp.__module__.startswith("jax."):
        combined = inspect.getclosurevars(jvp).nonlocals["jvps"]
        rules = {f"jvp{index}": rule for index, rule in enumerate(combined)}
    return {name: rule for name, rule in rules.items() if rule is not None}


# --- options and contexts -------------------------------------------------------------------------------------


def describe_options(describe_value: Callable[[Any], Any], *, own: str | None = None) -> dict[str, Any]:
    """Returns the settings that change the program of a call made here and now: those that differ from JAX's defaults.

    Args:
        describe_value: makes a JSON-able description of a value.
        own: the value of this package's own user context, which is left out.

    Returns:
        JSON-able descriptions by name; empty if nothing has been set.
    """
    values = jax.config.values
    options = {
        name: values[name] for name, default in OPTION_DEFAULTS.items() if not _is(values.get(name, default), default)
    }

    def described(value: Any) -> Any:
        try:
            return describe_value(value)
        except TypeError:  # a value of some library's, without a description
            return {"type": type(value).__qualname__}

    found = {name: described(value) for name, value in {**options, **contexts()}.items()}
    # The contexts made by `jax.make_user_context`; None for each that is not set.
    named_values = zip(trace_context_names(), trace_context(), strict=False)
    set_by_users = (value for name, value in named_values if name == "user_context" and value is not None)
    if users := [value for value in set_by_users if value != own]:
        found["user_context"] = [described(value) for value in users]
    return found


def _is(value: Any, default: Any) -> bool:
    if isinstance(default, str):  # some options are members of an enum, in all or some versions of JAX
        return str(getattr(value, "name", value)).lower() == default.lower()
    return type(value) is type(default) and bool(value == default)


def other_options(described: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the options that differ here from those of a description, with the values that they have there."""
    values = jax.config.values
    wanted = {name: described.get(name, default) for name, default in OPTION_DEFAULTS.items() if name in values}
    return {name: value for name, value in wanted.items() if not _is(values[name], value)}


def options_to_travel() -> Mapping[str, Any]:
    """Returns the JAX options that a worker takes over, by name."""
    return {
        name: value
        for name, value in jax.config.values.items()
        if not name.startswith(_PROCESS_OPTIONS) and isinstance(value, (bool, int, float, str, type(None)))
    }


def adopt_options(options: Mapping[str, Any]) -> None:
    """Sets JAX's options in this process to those of the caller's, as far as they are registered here.

    Args:
        options: what `options_to_travel` returned in the caller's process.
    """
    here = jax.config.values
    for name, value in options.items():
        if name not in here:
            logging.getLogger("quarantune").debug(
                "JAX has no option %s in this process; the caller's value %r is left out", name, value
            )
        elif here[name] != value:
            jax.config.update(name, value)


def is_debugging() -> bool:
    """Returns whether JAX runs functions step by step or checks their outputs: no program is then like the usual one.

    Private because the type checker does not know the attributes of `jax.config`.
    """
    return bool(config.disable_jit.value or config.debug_nans.value or config.debug_infs.value)


trace_context: Callable[[], tuple[Any, ...]] = config.trace_context
"""Returns the part of JAX's key for a program that does not come from the call.

Private because there is no public way to know whether a program traced earlier would be traced the same now.
"""


def trace_context_names() -> tuple[str, ...]:
    """Returns a name for each part of the tuple that `trace_context()` returns; none if JAX does not publish them."""
    with contextlib.suppress(AttributeError, NotImplementedError):
        return tuple(config.trace_context_names())
    return ()


_COMPILER_OPTIONS = tuple(sorted(OPTION_DEFAULTS.keys() - trace_context_names()))


def program_state() -> tuple[Any, ...]:
    """Returns the values of all settings that `describe_options` describes, which takes a tenth of its time.

    Private (`_read`) because some options, such as the PRNG, are neither in JAX's key for a program nor attributes.
    """
    options: Any = jax.config
    return (*trace_context(), *(options._read(name) for name in _COMPILER_OPTIONS if name in options.meta))


def contexts() -> Mapping[str, Any]:
    """Returns the values of those `CONTEXTS` that are set in this thread or in the process.

    Private because JAX has public ways to enter them (`pltpu.force_tpu_interpret_mode`), but none to read them.
    """
    values = {name: holder.value for name in CONTEXTS if (holder := getattr(config, name, None)) is not None}
    return {name: value for name, value in values.items() if value is not None}


def set_contexts(values: Mapping[str, Any]) -> None:
    """Sets some of `CONTEXTS` for the whole process.

    Args:
        values: the values that `contexts` returned in another process.
    """
    for name, value in values.items():
        getattr(config, name).set_global(value)


# --- backends, and the processes of one program ---------------------------------------------------------------


def backends_initialized() -> bool:
    """Returns whether this process has initialised a JAX backend.

    Private because every public way to ask (`jax.devices`, `jax.default_backend`) initialises one.
    """
    return bool(xla_bridge.backends_are_initialized())


def has_tpu() -> bool:
    """Returns whether this machine has TPUs on its PCI bus, which says nothing of their driver.

    Private because JAX has no public way to look for them without initialising a backend, and files such as
    `/dev/accel0` and `/dev/vfio/0` differ between kinds of TPUs, or are those of other devices.
    """
    from jax._src import hardware_utils

    return bool(hardware_utils.num_available_tpu_chips_and_device_id()[0])


def target_config(devices: Sequence[Any]) -> str:
    """Returns the description of a GPU that XLA needs to compile for it elsewhere; empty if there is none.

    Private because the public `jax.experimental.topologies` accepts such a description but cannot produce one.

    Args:
        devices: this process's devices.
    """
    from jax._src.lib import xla_client  # type: ignore[attr-defined]

    with contextlib.suppress(AttributeError, RuntimeError, TypeError):
        if devices[0].platform == "gpu":
            return str(xla_client.get_topology_for_devices(list(devices)).target_config)
    return ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Coordination:
    """This process's access to the key-value store of its program.

    Attributes:
        client: JAX's client of the coordination service.
        rank: the number of this process in the program.
        ranks: how many processes the program has.
    """

    client: Any
    rank: int
    ranks: int

    def read(self, key: str) -> str | None:
        """Returns the value of a key; None where it has none. Never waits for one.

        Raises:
            RuntimeError: the service did not answer.
        """
        with _answered(without="NOT_FOUND"):
            return str(self.client.key_value_try_get(key))
        return None

    def write(self, key: str, value: str) -> bool:
        """Gives a key its value, unless it has one; returns whether this was the first writer.

        Raises:
            RuntimeError: the service did not answer.
        """
        with _answered(without="ALREADY_EXISTS"):
            self.client.key_value_set(key, value, allow_overwrite=False)
            return True
        return False

    def count(self, directory: str) -> int:
        """Returns how many keys begin with `directory` and a slash.

        Raises:
            RuntimeError: the service did not answer.
        """
        with _answered(without="NOT_FOUND"):
            return len(self.client.key_value_dir_get(f"{directory}/"))
        return 0


def coordination() -> Coordination | None:
    """Returns this process's access to the key-value store; None in a program of one process.

    Private (`distributed.global_state`) because JAX makes public only whether it is initialised: neither the client nor
    the number of processes, for which `jax.process_count` would initialise a backend.
    """
    from jax._src import distributed

    try:
        state = distributed.global_state
        client = state.client
        if client is None or client is _inherited:
            return None
        client.key_value_try_get, client.key_value_set, client.key_value_dir_get  # noqa: B018 - are they there?
        rank, ranks = int(state.process_id), int(state.num_processes)
    except (AttributeError, TypeError, ValueError):
        if jax.distributed.is_initialized():
            _warn_missing()
        return None
    return Coordination(client=client, rank=rank, ranks=ranks) if ranks > 1 else None


@functools.cache
def _warn_missing() -> None:
    warn(
        f"quarantune finds no key-value store in jax.distributed of jax {jax.__version__}: each process of this "
        f"program tunes for itself, and a program whose collectives depend on the config may hang; let the processes "
        f"share a QUARANTUNE_CACHE_DIR that has been tuned before, or set QUARANTUNE_AGREE=0 to silence this warning",
        RuntimeWarning,
    )


@contextlib.contextmanager
def _answered(*, without: str) -> Iterator[None]:
    """Ends the block at an answer of the service that says so, and raises an error where there is none."""
    try:
        yield
    except Exception as error:
        if without not in str(error):
            raise RuntimeError(
                f"the coordination service of this jax.distributed program did not answer, so its processes cannot "
                f"agree on a config ({str(error).partition(chr(10))[0]}): see whether process 0 still runs, or set "
                f"QUARANTUNE_AGREE=0 in all processes"
            ) from error


def _forget_inherited() -> None:
    global _inherited
    distributed = sys.modules.get("jax._src.distributed")
    _inherited = getattr(getattr(distributed, "global_state", None), "client", None)


os.register_at_fork(after_in_child=_forget_inherited)
