"""The only place that touches names JAX does not promise, each with the reason it has to."""

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from quarantune.host import locks


def backends_initialized() -> bool:
    """Returns whether this process has initialised a JAX backend.

    Private because every public way to ask (`jax.devices`, `jax.default_backend`) initialises one.
    """
    from jax._src import xla_bridge

    return bool(xla_bridge.backends_are_initialized())


def load_plugins() -> None:
    """Loads the plugins through which JAX reaches accelerators, and the libraries they need, but starts no backend.

    Private because JAX does it with whatever needs a backend first. It takes 0.08 s for CUDA, which forks of a process
    that has done it are spared. CUDA itself must not be touched here, since no fork could use it then: JAX's check of
    the libraries' versions would, which the caller's own JAX has made.
    """
    from jax._src import xla_bridge

    variable = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
    before = os.environ.get(variable)
    os.environ[variable] = "1"
    try:
        with contextlib.suppress(AttributeError):  # then every fork does it
            xla_bridge._discover_and_register_pjrt_plugins()
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


# --- jitted functions ---------------------------------------------------------------------------------------


def is_jitted(fn: object) -> bool:
    """Returns whether `fn` is what `jax.jit` returns, or something that behaves like it."""
    return isinstance(fn, jax.stages.Wrapped)


@functools.cache
def pjit_type() -> Any:
    """Returns the class of the objects `jax.jit` returns; creating one of them initialises nothing."""
    return type(jax.jit(_nothing))


def _nothing() -> None:
    pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class JitOptions:
    """What `jax.jit` was told about a function, as values that can travel.

    Attributes:
        static_names: the names of all static parameters, those given by position included.
        static_argnums: positions of static parameters, resolved by jit.
        static_argnames: names of static parameters, resolved by jit.
        donate_argnums: positions of donated parameters.
        donate_argnames: names of donated parameters.
        keep_unused: as for `jax.jit`.
        inline: as for `jax.jit`.
        compiler_options: as for `jax.jit`, as pairs.
        cannot_travel: the options given that are tied to devices of this process.
        takes_no_keywords: whether the function refuses keyword arguments, because it was given `in_shardings`.
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
        """Raises where the function cannot be rebuilt elsewhere from these options.

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
        # Both spellings as jit itself resolved them: given one alone, it would have to work the other out.
        options: dict[str, Any] = {}
        if self.static_argnums or self.static_argnames:
            options |= {"static_argnums": self.static_argnums, "static_argnames": self.static_argnames}
        if self.donate_argnums or self.donate_argnames:
            options |= {"donate_argnums": self.donate_argnums, "donate_argnames": self.donate_argnames}
        if self.keep_unused:
            options["keep_unused"] = True
        if self.inline is not False:
            options["inline"] = self.inline
        if self.compiler_options:
            options["compiler_options"] = dict(self.compiler_options)
        return jax.jit(plain, **options)


_recompiled: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def with_compiler_options(fn: Any, options: Mapping[str, Any]) -> Any:
    """Returns a jitted function with further options for the compiler: always the same one for the same options.

    Args:
        fn: the function.
        options: the options; they win over those that `jax.jit` was given.
    """
    made = _recompiled.setdefault(fn, {})
    described = tuple(sorted((name, type(value).__name__, value) for name, value in options.items()))  # True is 1
    if described not in made:
        own = jit_options(fn)
        merged = tuple({**dict(own.compiler_options), **options}.items())
        made.setdefault(described, dataclasses.replace(own, compiler_options=merged).rebuild(fn.__wrapped__))
    return made[described]


def without_compiler_options(fn: Any) -> Any:
    """Returns a jitted function as JAX takes it inside of another: it refuses compiler options there."""
    own = jit_options(fn)
    return dataclasses.replace(own, compiler_options=()).rebuild(fn.__wrapped__) if own.compiler_options else fn


def clear_caches(fn: Any) -> None:
    """Forgets what was compiled of a jitted function, with whatever options."""
    for each in (fn, *_recompiled.get(fn, {}).values()):
        each.clear_cache()


def jit_options(fn: Any) -> JitOptions:
    """Returns the options of a jitted function.

    Private (`_jit_info`) because a jitted function has no public record of them.

    Args:
        fn: what `jax.jit` returned.

    Raises:
        TypeError: `fn` carries no such record.
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


# --- custom derivative rules --------------------------------------------------------------------------------


@functools.cache
def custom_rule_types() -> tuple[type, ...]:
    """Returns the classes of functions with custom rules (`jax.custom_vjp` and its kin).

    Private because JAX's list of them is; each keeps all it knows in its `__dict__`.
    """
    # The last two only have to be imported: they add themselves to the first one's list.
    from jax._src import custom_api_util, custom_batching, custom_partitioning  # noqa: F401

    return (jax.custom_vjp, jax.custom_jvp, *custom_api_util._custom_wrapper_types)


@functools.cache
def primitive_type() -> type:
    """Returns the class of JAX's primitives; the public `jax.extend` that also shows it is slow to import."""
    from jax._src import core

    return core.Primitive


# --- pytree classes -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class PytreeRegistration:
    """How a class was registered as a pytree, as values that can be pickled.

    Attributes:
        data_fields: for a dataclass registration, its data fields; None for the other kinds.
        meta_fields: for a dataclass registration, its static fields.
        flatten: to children and static data; None where `flatten_with_keys` says it all.
        unflatten: from static data and children; None for a dataclass registration.
        flatten_with_keys: like `flatten`, with a key for each child; None where JAX kept no reference to it.
    """

    data_fields: tuple[str, ...] | None = None
    meta_fields: tuple[str, ...] = ()
    flatten: Callable[..., Any] | None = None
    unflatten: Callable[..., Any] | None = None
    flatten_with_keys: Callable[..., Any] | None = None


def pytree_registration(cls: type) -> PytreeRegistration | None:
    """Returns how `cls` was registered as a pytree, or None if it was not.

    Private (`tree_util._registry`, and the closures of what it holds) because JAX has no way to read a
    registration back. Keys given as a function of their own to `register_pytree_node` are kept by JAX in C++
    alone: for such a class the worker's key paths show positions instead of names, and nothing else differs.

    Args:
        cls: any class.
    """
    from jax._src import tree_util

    entry = tree_util._registry.get(cls)
    if entry is None:
        return None
    hidden = _closure(entry.to_iter)
    if "data_fields" in hidden and "meta_fields" in hidden:
        return PytreeRegistration(data_fields=tuple(hidden["data_fields"]), meta_fields=tuple(hidden["meta_fields"]))
    if "flatten_with_keys" in hidden:
        return PytreeRegistration(flatten_with_keys=hidden["flatten_with_keys"], unflatten=entry.from_iter)
    keyed = operator.methodcaller("tree_flatten_with_keys") if hasattr(cls, "tree_flatten_with_keys") else None
    return PytreeRegistration(flatten=entry.to_iter, unflatten=entry.from_iter, flatten_with_keys=keyed)


def register_pytree(cls: type, registration: PytreeRegistration) -> None:
    """Registers `cls` as `registration` says, unless it is registered already.

    Args:
        cls: a class that arrived by value.
        registration: what `pytree_registration` returned where it came from.
    """
    from jax._src import tree_util

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
    """Keeps whatever the block registers as a pytree class from JAX, which cannot forget a registration.

    Private (`tree_util._all_registries`) because a class that registers itself while it is made, in its metaclass or
    `__init_subclass__`, may call any of JAX's functions for it, and all of them end there.
    """
    from jax._src import tree_util

    real, held = getattr(tree_util, "_all_registries", None), HeldBack()
    if real is None:  # another version of JAX: the registration stays
        yield held
        return
    setattr(tree_util, "_all_registries", (held,))  # noqa: B010 - mypy is told nothing of it
    try:
        yield held
    finally:
        setattr(tree_util, "_all_registries", real)  # noqa: B010


class HeldBack:
    """Stands in for a pytree registry of JAX: notes registrations and makes none."""

    def __init__(self) -> None:
        self._noted: list[tuple[type, str, tuple[Any, ...]]] = []

    def register_node(self, nodetype: type, *functions: Any) -> None:
        """Notes a class with the functions that flatten and unflatten it."""
        self._noted.append((nodetype, "register_node", functions))

    def register_dataclass_node(self, nodetype: type, *fields: Any) -> None:
        """Notes a class with its fields."""
        self._noted.append((nodetype, "register_dataclass_node", fields))

    def release(self, *, but: type) -> None:
        """Makes the registrations after all, except those of one class, which JAX is not to know.

        Args:
            but: the class.
        """
        from jax._src import tree_util

        for nodetype, method, arguments in self._noted:
            if nodetype is but:
                tree_util._registry.pop(nodetype, None)
            else:
                for registry in tree_util._all_registries:
                    getattr(registry, method)(nodetype, *arguments)


def _closure(function: Any) -> Mapping[str, Any]:
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    if code is None:
        return {}
    return {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}


# --- arrays -------------------------------------------------------------------------------------------------


def as_weak(array: jax.Array) -> jax.Array:
    """Returns the same buffers as a weakly typed array.

    Private because the public ways to a weakly typed array that is not a scalar compile a program for it.

    Args:
        array: an array, all of it in this process.
    """
    from jax._src.array import ArrayImpl

    whole: Any = array
    buffers = [shard.data for shard in whole.addressable_shards] if len(whole.sharding.device_set) > 1 else [whole]
    weak: jax.Array = ArrayImpl(whole.aval.update(weak_type=True), whole.sharding, buffers, committed=whole.committed)
    return weak


@functools.cache
def typed_ndarray() -> type:
    """Returns the class of numpy arrays that stand in for JAX's own where it evaluates while it traces.

    Private because users are not meant to meet it, but the rules of a `jax.custom_vjp` are given some.
    """
    from jax._src import literals

    return literals.TypedNdArray


def key_impl(dtype: Any) -> str:
    """Returns the name of the implementation behind the dtype of a PRNG key array.

    Private because `jax.random.key_impl` wants an array, and a `ShapeDtypeStruct` or a tracer may be all
    there is.
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


# --- configuration ------------------------------------------------------------------------------------------


def config_values() -> dict[str, Any]:
    """Returns every JAX option by name, as it stands in this thread (`with jax.enable_x64():` included).

    Private-ish because `jax.config` publishes `update` and single attributes, not the list of them.
    """
    return dict(jax.config.values)


CONTEXTS = (
    "compute_on_context_manager",
    "pallas_tpu_interpret_mode_context_manager",
    "xla_metadata_context_manager",
)
"""What JAX keeps for a thread beside its options, and has in its own key for programs; each is None unless set."""


@functools.cache
def trace_context() -> Callable[[], tuple[Any, ...]]:
    """Returns the function that returns all that JAX has in its own key beside the call, as it stands in this thread.

    Private because nothing public tells whether a program that was traced earlier would be traced alike now.
    """
    from jax._src import config

    read: Callable[[], tuple[Any, ...]] = config.trace_context
    return read


def trace_context_names() -> tuple[str, ...]:
    """Returns a name for each part of what `trace_context` reads; none where JAX does not tell them."""
    from jax._src import config

    with contextlib.suppress(AttributeError, NotImplementedError):
        return tuple(config.trace_context_names())
    return ()


def contexts() -> dict[str, Any]:
    """Returns what is set of `CONTEXTS` in this thread, or in the process.

    Private because JAX has public means to enter them, such as `pltpu.force_tpu_interpret_mode`, and none to read them.
    """
    from jax._src import config

    values = {name: holder.value for name in CONTEXTS if (holder := getattr(config, name, None)) is not None}
    return {name: value for name, value in values.items() if value is not None}


def set_contexts(values: Mapping[str, Any]) -> None:
    """Sets some of `CONTEXTS` for the whole process.

    Args:
        values: what `contexts` returned elsewhere.
    """
    from jax._src import config

    for name, value in values.items():
        getattr(config, name).set_global(value)


def user_contexts() -> list[Any]:
    """Returns the values of the contexts made by `jax.make_user_context`, None where one is not set."""
    named = zip(trace_context_names(), trace_context()(), strict=False)
    return [value for name, value in named if name == "user_context"]


@functools.cache
def array_type() -> type[Any]:
    """Returns the concrete class of JAX arrays.

    `isinstance(x, jax.Array)` is true of tracers too and several times slower than comparing types, which
    would be half of a cached call's cost; making an array to ask for its type would initialise a backend.
    """
    from jax._src.array import ArrayImpl

    return ArrayImpl


aval_of = operator.attrgetter("aval")
sharding_of = operator.attrgetter("_sharding")
"""Of a JAX array; the public `sharding` is three times as slow, and this is on the path of every cached call."""


@contextlib.contextmanager
def answer_for_device(platform: str, refuse: Callable[[str], None]) -> Iterator[None]:
    """Makes JAX speak for a device that this process does not have, while a program is traced for it.

    A kernel may choose its code by `jax.default_backend()`, which in a process without the device would name the CPU:
    it must hear of the device it is compiled for. Whoever asks for the devices themselves cannot be answered. JAX's own
    calls are left alone. All these public functions, however a module has imported them, get their answer from one
    private one, so that is where they are told apart, by who calls.

    Args:
        platform: what `jax.default_backend()` returns meanwhile.
        refuse: called, with its name, when the user's code calls another function about devices; it must raise.
    """
    from jax._src import xla_bridge

    real = xla_bridge.get_backend
    asking = {"default_backend", "devices", "local_devices", "device_count", "local_device_count"}

    def get_backend(*args: Any, **kwargs: Any) -> Any:
        asked = sys._getframe(1)
        name = asked.f_code.co_name
        asker = asked.f_back
        if name in asking and asker is not None and not _is_jax(asker):
            if name == "default_backend":
                return types.SimpleNamespace(platform=platform)
            refuse(name)
        return real(*args, **kwargs)

    xla_bridge.get_backend = get_backend
    try:
        yield
    finally:
        xla_bridge.get_backend = real


def _is_jax(frame: types.FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in ("jax", "jaxlib")


# --- compiled programs ------------------------------------------------------------------------------------------


def interface(lowered: jax.stages.Lowered) -> str | None:
    """Returns what a lowered program takes and gives that its text does not tell.

    That is which of its arguments, counted flat, it takes, without those it has no use for, and the types of its
    outputs: whether they are weak, and what makes keys of them. Private because nothing public tells: the text numbers
    the arguments that are left anew, and `out_info` calls every type strong.

    Returns:
        A text; None where it cannot be told, or does not tell all, because there are constants among the arguments.
    """
    lowering: Any = getattr(lowered, "_lowering", None)
    about = getattr(lowering, "compile_args", {})
    if getattr(lowering, "const_args", []) or not {"kept_var_idx", "global_out_avals"} <= set(about):
        return None
    return f"{sorted(about['kept_var_idx'])} {about['global_out_avals']} {lowered.out_tree}"


def prepare_to_load(executable: bytes) -> None:
    """Makes ready what a program needs of this process that only lowers such programs otherwise.

    Private because JAX gives its LAPACK kernels their functions while it lowers: a program that is only loaded would
    jump to address 0.

    Args:
        executable: the program, serialised; the names of what it calls are in it.
    """
    if b"lapack_" in executable:
        from jax._src.lax import linalg

        linalg.initialize_lapack()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExecutableParts:
    """What a compiled program consists of, apart from the trees of its arguments and outputs.

    Attributes:
        program: XLA's own serialisation of it.
        name: as error messages have it.
        committed: whether its outputs stay on their devices.
        kept: which arguments it takes, counted flat.
        donated: which arguments it overwrites, counted flat.
        all_in_avals: the types of all arguments, also of those it has no use for.
        in_avals: the types of the arguments that it takes.
        out_avals: the types of its outputs.
        in_shardings: where its arguments lie.
        out_shardings: where its outputs lie.
        in_layouts: how its arguments lie there.
        out_layouts: how its outputs lie there.
    """

    program: bytes
    name: str
    committed: bool
    kept: Sequence[int]
    donated: Sequence[int]
    all_in_avals: Sequence[Any]
    in_avals: Sequence[Any]
    out_avals: Sequence[Any]
    in_shardings: Sequence[Any]
    out_shardings: Sequence[Any]
    in_layouts: Sequence[Any]
    out_layouts: Sequence[Any]


def executable_parts(compiled: jax.stages.Compiled) -> ExecutableParts:
    """Returns the parts of a compiled program.

    Private because the public `serialize_executable` gives a pickle of them, which runs code where it is loaded.

    Raises:
        ValueError: there is more to it, such as effects, callbacks or constants.
    """
    whole: Any = compiled
    found = getattr(whole._executable, "_unloaded_executable", None)
    if found is None or found.all_args_info is None:
        raise ValueError("this kind of program cannot be taken to parts")
    more = ("unordered_effects", "ordered_effects", "keepalive", "host_callbacks", "mut", "pgle_profiler")
    if extra := [name for name in more if getattr(found, name, None)]:
        raise ValueError(f"it has {', '.join(extra)}")
    if whole._params.const_args or whole._no_kwargs or any(item is not None for item in found.dispatch_in_layouts):
        raise ValueError("it has constants among its arguments, takes none by keyword, or layouts of its own")
    executable = found.xla_executable
    client = getattr(executable, "client", None)
    infos = jax.tree.leaves(compiled.args_info, is_leaf=lambda item: isinstance(item, jax.stages.ArgInfo))
    return ExecutableParts(
        program=executable.serialize() if client is None else client.serialize_executable(executable),
        name=found.name,
        committed=bool(found.committed),
        kept=sorted(found.kept_var_idx),
        donated=[index for index, info in enumerate(infos) if info.donated],
        all_in_avals=[info._aval for info in infos],
        in_avals=found.input_avals,
        out_avals=found.output_avals,
        in_shardings=found.input_shardings,
        out_shardings=found.output_shardings,
        in_layouts=found.xla_in_layouts,
        out_layouts=found.xla_out_layouts,
    )


def executable_from_parts(parts: ExecutableParts, *, in_tree: Any, out_tree: Any, devices: Sequence[Any]) -> Any:
    """Returns the compiled program that consists of these parts, loaded onto devices of this process.

    Args:
        parts: what `executable_parts` returned, rebuilt for this process.
        in_tree: the tree of its arguments, as a pair of those by position and those by keyword.
        out_tree: the tree of its outputs.
        devices: the devices it runs on, in the order it knows them in.
    """
    from jax._src import core
    from jax._src.interpreters import pxla
    from jax._src.lib import xla_client  # type: ignore[attr-defined]

    client, device_list = devices[0].client, xla_client.DeviceList(tuple(devices))
    names = tuple("" for _ in parts.all_in_avals)
    unloaded = pxla.UnloadedMeshExecutable(
        xla_executable=client.deserialize_executable(parts.program, executable_devices=device_list),
        device_list=device_list,
        backend=client,
        input_avals=parts.in_avals,
        input_shardings=parts.in_shardings,
        output_avals=parts.out_avals,
        output_shardings=parts.out_shardings,
        committed=parts.committed,
        name=parts.name,
        unordered_effects=[],
        ordered_effects=[],
        keepalive=[],
        host_callbacks=[],
        kept_var_idx=set(parts.kept),
        mut=None,
        xla_in_layouts=parts.in_layouts,
        dispatch_in_layouts=[None] * len(parts.in_layouts),
        xla_out_layouts=parts.out_layouts,
        all_args_info=pxla.AllArgsInfo(parts.all_in_avals, core.DebugInfo("jit", parts.name, names, None)),
        pgle_profiler=None,
    )
    infos = [jax.stages.ArgInfo(aval, index in parts.donated) for index, aval in enumerate(parts.all_in_avals)]
    return jax.stages.Compiled(unloaded.load(), [], in_tree.unflatten(infos), out_tree)


def aval(shape: Sequence[int], dtype: Any, *, weak_type: bool) -> Any:
    """Returns the type of an array; private because nothing public makes one that is weak."""
    from jax._src import core

    return core.ShapedArray(tuple(shape), dtype, weak_type=weak_type)


def is_plain_aval(item: Any) -> bool:
    """Returns whether `aval` can make such a type: one of an array in a device's memory, under no explicit mesh."""
    from jax._src import core

    if type(item) is not core.ShapedArray:
        return False
    mesh = item.sharding.mesh
    if not mesh.empty and not mesh.are_all_axes_auto:
        return False
    # A mesh whose axes are JAX's to use says nothing that the sharding of the argument does not say.
    return item == core.ShapedArray(item.shape, item.dtype, weak_type=item.weak_type, sharding=item.sharding)


# --- compiled programs that another process compiled --------------------------------------------------------


@functools.cache
def _memory_cache_type() -> type[Any]:
    """Returns a persistent compilation cache that lies in memory; JAX's own interface to one is private."""
    import pathlib

    from jax._src.compilation_cache_interface import CacheInterface

    class MemoryCache(CacheInterface):
        """Compiled programs by JAX's key for them."""

        _path = pathlib.Path("memory")

        def __init__(self, programs: Mapping[str, bytes]) -> None:
            self.programs = dict(programs)
            self.used: set[str] = set()

        def get(self, key: str) -> bytes | None:
            found = self.programs.get(key)
            if found is not None:
                self.used.add(key)
            return found

        def put(self, key: str, value: bytes) -> None:
            self.programs[key] = value

    return MemoryCache


class _Swapped:
    """What stands in for JAX's compilation cache, and what was there before; shared by the blocks that overlap."""

    def __init__(self) -> None:
        self.lock = locks.new()
        self.blocks = 0
        self.cache: Any = None
        self.before: dict[str, Any] = {}
        self.options_before: dict[str, Any] = {}


_swapped = _Swapped()


def _restore_in_fork() -> None:
    """Undoes, in a fork, what a block that was open in another thread will not undo there."""
    if _swapped.blocks:
        _swapped.blocks = 0
        _restore_compilation_cache()


os.register_at_fork(after_in_child=_restore_in_fork)


_CACHE_OPTIONS: dict[str, Any] = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


@contextlib.contextmanager
def compilation_cache_in_memory(programs: Mapping[str, bytes], *, named: str | None = None) -> Iterator[Any]:
    """Has JAX look for compiled programs in memory, and leave new ones there, while the block runs.

    JAX has public means to put its persistent cache into a directory, and none to hand it one program: files would have
    to be written, and would stay behind when a worker is killed. What JAX had before is restored with the last of the
    blocks that overlap, in whatever threads.

    Args:
        programs: compiled programs by JAX's key.
        named: the directory that JAX is to believe its cache is in, as some versions make its name part of the key;
            None leaves it as it is. Nothing is read or written there.

    Yields:
        The cache: `programs` that it holds, and the keys that were `used`.
    """
    from jax._src import compilation_cache

    names = ("_cache", "_cache_initialized", "_cache_checked", "_cache_used")
    with _swapped.lock:
        if not _swapped.blocks:
            _swapped.before = {name: getattr(compilation_cache, name) for name in names}
            options = _CACHE_OPTIONS if named is None else {**_CACHE_OPTIONS, "jax_compilation_cache_dir": named}
            _swapped.options_before = {name: jax.config.values[name] for name in options}
            _swapped.cache = _memory_cache_type()({})
            for name, value in zip(names, (_swapped.cache, True, True, True), strict=True):
                setattr(compilation_cache, name, value)
            for name, value in options.items():
                jax.config.update(name, value)
        _swapped.blocks += 1
        cache = _swapped.cache
        cache.programs.update(programs)
    try:
        yield cache
    finally:
        with _swapped.lock:
            if _swapped.cache is cache:  # not in a fork, where it is undone already
                _swapped.blocks -= 1
                if not _swapped.blocks:
                    _restore_compilation_cache()


def _restore_compilation_cache() -> None:
    from jax._src import compilation_cache

    for name, value in _swapped.before.items():
        setattr(compilation_cache, name, value)
    for name, value in _swapped.options_before.items():
        jax.config.update(name, value)
    _swapped.cache = None


def keep_compiled(programs: Mapping[str, bytes]) -> bool:
    """Puts compiled programs where this process's JAX looks for them.

    Args:
        programs: compiled programs by JAX's key.

    Returns:
        Whether there is such a place, and it takes them: a persistent compilation cache that the caller has
        configured.
    """
    from jax._src import compilation_cache

    if not jax.config.values["jax_compilation_cache_dir"] or not jax.config.values["jax_enable_compilation_cache"]:
        return False
    try:
        cache = compilation_cache._get_cache(jax.local_devices()[0].client)
        if cache is None:
            return False
        for key, value in programs.items():
            cache.put(key, value)
    except OSError as error:  # a full or read-only disk, of which JAX itself only warns
        logging.getLogger("quarantune").info("JAX's compilation cache cannot be written: %s", error)
        return False
    return True


def inner_jaxprs(params: Mapping[str, Any]) -> Iterator[Any]:
    """Yields the programs among an equation's parameters."""
    for value in params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            item = getattr(item, "jaxpr", item)
            if hasattr(item, "eqns"):
                yield item


def varying_axes(array: Any) -> frozenset[str]:
    """Returns the axes of a `shard_map` along which an array may differ from device to device.

    Private because the public attribute of an array's type that tells has changed its name.

    Args:
        array: an array or a tracer; of one inside a `shard_map` with `check_vma=False` nothing is known.
    """
    kind: Any = jax.typeof(array)
    return frozenset(kind.mat.varying if hasattr(kind, "mat") else getattr(kind, "vma", ()))


def bound_axes() -> dict[str, int]:
    """Returns the size of each axis that collectives can name here, by its name.

    Private because `jax.lax.axis_size` tells of one whose name is known, and nothing public of all.
    """
    from jax._src import core

    return dict(core.get_axis_env().axis_sizes)


def is_differentiated(value: Any) -> bool:
    """Returns whether a value is a tracer of `jax.grad`, `jax.vjp` or `jax.linearize`.

    Private because nothing public tells one tracer from another.
    """
    from jax._src.interpreters import ad

    return isinstance(value, getattr(ad, "LinearizeTracer", ()))


@contextlib.contextmanager
def outside_of_traces() -> Iterator[None]:
    """Leaves the trace that this thread may be inside of, while the block runs.

    Private because the public `jax.ensure_compile_time_eval` has whatever is traced within it evaluated where it can
    be: callbacks with constant arguments, such as those of Pallas's interpreters, would run while they are traced.
    """
    from jax._src import core

    with core.eval_context():
        yield


def is_tracing() -> bool:
    """Returns whether this thread is inside a trace."""
    from jax._src import core

    return not core.trace_state_clean()


def target_config(devices: Sequence[Any]) -> str | None:
    """Returns what XLA's compiler must know of a GPU to compile for it without having it; None where it cannot be had.

    The public `jax.experimental.topologies` takes such a description and gives none; the client's own topology has it.

    Args:
        devices: this process's devices.
    """
    from jax._src.lib import xla_client  # type: ignore[attr-defined]

    if devices[0].platform != "gpu":
        return None
    try:
        return str(xla_client.get_topology_for_devices(list(devices)).target_config)
    except (AttributeError, RuntimeError, TypeError):
        return None
