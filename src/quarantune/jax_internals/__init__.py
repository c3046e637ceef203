"""The only package that uses JAX's private names, each with the reason why no public name will do.

Here are arrays, traces, jitted functions and pytrees; larger subjects have modules of their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import operator
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax

# Batching and partitioning are imported for their side effect: they add themselves to the classes with custom rules.
from jax._src import core, custom_api_util, custom_batching, custom_partitioning, literals, tree_util  # noqa: F401
from jax._src.array import ArrayImpl

from quarantune.jax_internals.backends import Coordination as Coordination
from quarantune.jax_internals.backends import answer_for_device as answer_for_device
from quarantune.jax_internals.backends import backends_initialized as backends_initialized
from quarantune.jax_internals.backends import coordination as coordination
from quarantune.jax_internals.backends import load_plugins as load_plugins
from quarantune.jax_internals.backends import target_config as target_config
from quarantune.jax_internals.executables import ExecutableParts as ExecutableParts
from quarantune.jax_internals.executables import compilation_cache_in_memory as compilation_cache_in_memory
from quarantune.jax_internals.executables import executable_from_parts as executable_from_parts
from quarantune.jax_internals.executables import executable_parts as executable_parts
from quarantune.jax_internals.executables import has_compilation_cache as has_compilation_cache
from quarantune.jax_internals.executables import interface as interface
from quarantune.jax_internals.executables import prepare_to_load as prepare_to_load
from quarantune.jax_internals.executables import seed_compilation_cache as seed_compilation_cache
from quarantune.jax_internals.state import contexts as contexts
from quarantune.jax_internals.state import set_contexts as set_contexts
from quarantune.jax_internals.state import trace_context as trace_context
from quarantune.jax_internals.state import trace_context_names as trace_context_names

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


@contextlib.contextmanager
def questions() -> Iterator[set[str]]:
    """Yields a set that collects the names of JAX's functions that are asked about devices while the block runs.

    Private because the public functions are those of a private module, by whose file they are known.
    """
    from jax._src import xla_bridge

    asked: set[str] = set()
    before = sys.getprofile()

    def note(frame: types.FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename == xla_bridge.__file__:
            asked.add(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        yield asked
    finally:
        sys.setprofile(before)


# --- functions that JAX has wrapped: their options, and the rules of jax.custom_vjp and such ------------------


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


@functools.cache
def custom_rule_types() -> tuple[type, ...]:
    """Returns the classes of functions with custom rules: `jax.custom_vjp` and the like.

    Private because JAX's list of these classes is. An object of any of them has all its state in its `__dict__`.
    """
    return (jax.custom_vjp, jax.custom_jvp, *custom_api_util._custom_wrapper_types)


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
    if not issubclass(kind, tuple(custom_api_util._custom_wrapper_types)):
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


# --- classes registered as pytrees ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class PytreeRegistration:
    """The registration of a class as a pytree, as values that can be pickled.

    Attributes:
        data_fields: for a dataclass registration, its data fields; None for the other kinds.
        meta_fields: for a dataclass registration, its static fields.
        flatten: returns children and static data; None if only `flatten_with_keys` was given.
        unflatten: takes static data and children; None for a dataclass registration.
        flatten_with_keys: like `flatten`, with a key for each child; None if JAX kept no reference to it.
    """

    data_fields: tuple[str, ...] | None = None
    meta_fields: tuple[str, ...] = ()
    flatten: Callable[..., Any] | None = None
    unflatten: Callable[..., Any] | None = None
    flatten_with_keys: Callable[..., Any] | None = None


def pytree_registration(cls: type) -> PytreeRegistration | None:
    """Returns the registration of `cls` as a pytree, or None if there is none.

    Private (`tree_util._registry`, and the closures of its functions) because JAX has no public way to read a
    registration back. A key function given to `register_pytree_node` is kept in C++ alone: for such a class the
    worker's key paths show positions instead of names, and nothing else differs.

    Args:
        cls: any class.
    """
    entry = tree_util._registry.get(cls)
    if entry is None:
        return None
    hidden = inspect.getclosurevars(entry.to_iter).nonlocals if inspect.isfunction(entry.to_iter) else {}
    if "data_fields" in hidden and "meta_fields" in hidden:
        return PytreeRegistration(data_fields=tuple(hidden["data_fields"]), meta_fields=tuple(hidden["meta_fields"]))
    if "flatten_with_keys" in hidden:
        return PytreeRegistration(flatten_with_keys=hidden["flatten_with_keys"], unflatten=entry.from_iter)
    keyed = operator.methodcaller("tree_flatten_with_keys") if hasattr(cls, "tree_flatten_with_keys") else None
    return PytreeRegistration(flatten=entry.to_iter, unflatten=entry.from_iter, flatten_with_keys=keyed)


def register_pytree(cls: type, registration: PytreeRegistration) -> None:
    """Registers `cls` as a pytree, unless it is registered already.

    Args:
        cls: a class that was unpickled by value.
        registration: what `pytree_registration` returned in the sending process.
    """
    if cls in tree_util._registry:
        return
    if registration.data_fields is not None:
        jax.tree_util.register_dataclass(cls, registration.data_fields, registration.meta_fields)
    elif registration.flatten is None:
        assert registration.flatten_with_keys is not None
        assert registration.unflatten is not None
        jax.tree_util.register_pytree_with_keys(cls, registration.flatten_with_keys, registration.unflatten)
    else:
        assert registration.unflatten is not None
        jax.tree_util.register_pytree_node(
            cls, registration.flatten, registration.unflatten, registration.flatten_with_keys
        )


@contextlib.contextmanager
def pytree_registrations_held_back() -> Iterator[HeldBack]:
    """Notes the pytree classes that the block registers instead of registering them, as JAX cannot undo that.

    Private (`tree_util._all_registries`) because a class that registers itself while it is made, in its metaclass or
    `__init_subclass__`, may use any of JAX's functions for this, and all of them use these registries.
    """
    real, held = getattr(tree_util, "_all_registries", None), HeldBack()
    if real is None:  # another version of JAX: the registration stays
        yield held
        return
    setattr(tree_util, "_all_registries", (held,))  # noqa: B010 - mypy does not know the name
    try:
        yield held
    finally:
        setattr(tree_util, "_all_registries", real)  # noqa: B010


class HeldBack:
    """Stands in for a pytree registry of JAX: notes registrations without making them."""

    def __init__(self) -> None:
        self._noted: list[tuple[type, str, tuple[Any, ...]]] = []

    def register_node(self, nodetype: type, *functions: Any) -> None:
        """Notes a class with the functions that flatten and unflatten it."""
        self._noted.append((nodetype, "register_node", functions))

    def register_dataclass_node(self, nodetype: type, *fields: Any) -> None:
        """Notes a class with its fields."""
        self._noted.append((nodetype, "register_dataclass_node", fields))

    def release(self, *, but: type) -> None:
        """Makes the noted registrations, except those of one class.

        Args:
            but: the class.
        """
        for nodetype, method, arguments in self._noted:
            if nodetype is but:
                tree_util._registry.pop(nodetype, None)
            else:
                for registry in tree_util._all_registries:
                    getattr(registry, method)(nodetype, *arguments)
