"""A function and its calls in the caller's process: what tells one call from another, and how a config is bound to one.

A call is described by the values that make up its key. Of a config, values are keyword arguments, and compiler options
are options of the jit.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dataclasses
import enum
import functools
import inspect
import re
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import AbstractMesh

from quarantune import jax_internals
from quarantune.host.process import warn
from quarantune.values import describe
from quarantune.values.codec import JsonObject, is_tagged, tagged
from quarantune.values.configs import COMPILER_OPTIONS as OPTIONS
from quarantune.values.configs import NO_OPTIONS, Config, check_parameters
from quarantune.values.texts import shown

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a call: the positional ones, and the keyword arguments by name."""

SCALARS = (float, int, str, bool, type(None))
_EMPTY = inspect.Parameter.empty


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallDescription:
    """The facts about a call that are known before it runs.

    Attributes:
        key_values: JSON-able descriptions of the arguments, equal for calls that share a tuned config.
        tunables_given: the tunable parameters that the caller passed by hand.
        has_tracers: whether an argument is a tracer, so that there is no data to tune with.
        platform: JAX's name for where the call's concrete JAX arrays are (`cpu`, `gpu` or `tpu`); None if it has none.
    """

    key_values: JsonObject
    tunables_given: frozenset[str]
    has_tracers: bool
    platform: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """A call to tune for.

    Attributes:
        fn: the function to tune, jitted or not.
        name: its name in messages.
        args: the call's positional arguments; arrays may be concrete, tracers or `jax.ShapeDtypeStruct`.
        kwargs: the call's keyword arguments, likewise.
        platform: the platform to tune for: `cpu`, `cuda`, `rocm` or `tpu`.
        device_kind: the kind of device to tune for, by its name in the cache.
        manual_mesh: the mesh of the enclosing `shard_map`, if the function communicates over it; else None.
        untuned: the config with the function's own defaults; None if a tunable has no default.
        default: the index of `untuned` among the configs; None if it is not one of them.
    """

    fn: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    platform: str
    device_kind: str
    manual_mesh: AbstractMesh | None = None
    untuned: Config | None = None
    default: int | None = None


def describe_call(
    signature: inspect.Signature,
    static_names: Iterable[str],
    tunable_names: Iterable[str],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    is_jitted: bool = True,
    optional: Collection[str] = (),
) -> CallDescription:
    """Describes a call, in the same way however it is spelt.

    `f(a)`, `f(a=a)` and, if `transpose` defaults to False, `f(a, transpose=False)` have one description. Arrays are
    described by shape, dtype and weak type, Python numbers in dynamic parameters by type, all else by value. A function
    that is not jitted receives NumPy arrays and numbers unchanged: they are described by their own dtype and by value.

    Args:
        signature: of the tuned function.
        static_names: its static parameters, which are described by value.
        tunable_names: the parameters that configs set, which are left out.
        args: positional arguments.
        kwargs: keyword arguments.
        is_jitted: whether the function is jitted.
        optional: static parameters that are left out where they have no description.

    Raises:
        TypeError: the arguments do not fit the signature, or another argument has no description that is the same in
            every process.
    """
    static, tunable = frozenset(static_names), frozenset(tunable_names)
    bound = _bind(signature, tunable, args, kwargs)
    given = tunable.intersection(name for name, _ in named(bound))
    bound.apply_defaults()
    values = {name: value for name, value in named(bound) if name not in tunable}
    key_values = {}
    for name, value in values.items():
        with contextlib.suppress(TypeError) if name in optional else contextlib.nullcontext():
            is_static = name in static
            key_values[name] = (
                describe.describe_static(value) if is_static else _describe_dynamic(value, is_jitted=is_jitted)
            )
    leaves = [leaf for name, value in values.items() if name not in static for leaf in jax.tree_util.tree_leaves(value)]
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)]
    return CallDescription(
        key_values=key_values,
        tunables_given=given,
        has_tracers=any(isinstance(leaf, jax.core.Tracer) for leaf in leaves),
        platform=min((device.platform for array in arrays for device in array.devices()), default=None),
    )


def _bind(
    signature: inspect.Signature, tunables: frozenset[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments:
    """Binds a call that may lack tunables, with or without a default."""
    missing = tunables & signature.parameters.keys() - signature.bind_partial(*args, **kwargs).arguments.keys()
    bound = signature.bind(*args, **kwargs, **dict.fromkeys(missing))
    for name in missing:
        del bound.arguments[name]
    return bound


def describe_function(
    fn: Callable[..., Any],
) -> tuple[Callable[..., Any], inspect.Signature, frozenset[str] | None]:
    """Returns the function to tune, its signature, and its static parameters (None if it is not jitted).

    Raises:
        TypeError: `fn` cannot be called.
    """
    if not callable(fn):
        raise TypeError(f"{fn!r} cannot be called: give a function")
    inner = getattr(fn, "__wrapped__", None)
    if inner is not None and not jax_internals.is_jitted(fn) and jax_internals.is_jitted(inner):
        fn = inner  # an autotuned function, to be tuned with other configs
    static_names = jax_internals.jit_options(fn).static_names if jax_internals.is_jitted(fn) else None
    return fn, signature_of(inspect.unwrap(fn)), static_names


def signature_of(fn: Any) -> inspect.Signature:
    """Returns the signature of any callable; a built-in without one takes all arguments."""
    try:
        return inspect.signature(fn)
    except Exception:  # Python compares the callable, and its class may say anything of equality
        return inspect.signature(fn.__call__)


def named(bound: inspect.BoundArguments) -> Iterator[tuple[str, Any]]:
    """Yields the arguments by name; `**` precedes the name of one in `**kwargs` that is also a parameter's."""
    parameters = bound.signature.parameters
    for name, value in bound.arguments.items():
        if parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            yield from ((f"**{key}" if key in parameters else key, item) for key, item in value.items())
        else:
            yield name, value


def fitted(
    function: Callable[..., Any],
    signature: inspect.Signature,
    statics: Iterable[str],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Arguments:
    """Returns the arguments of a call as another function takes them, which may have fewer static parameters or more.

    Args:
        function: `key_fn`, `prune_fn` or a function that makes configs.
        signature: of the tuned function.
        statics: its static parameters.
        args: the call's positional arguments.
        kwargs: its keyword arguments.
    """
    expected = signature_of(function)
    try:
        expected.bind(*args, **kwargs)
    except TypeError:
        bound = signature.bind_partial(*args, **kwargs)
        for name in statics:
            default = signature.parameters[name].default if name in signature.parameters else _EMPTY
            if name not in expected.parameters:
                bound.arguments.pop(name, None)
            elif default is not _EMPTY:
                bound.arguments.setdefault(name, default)
        return bound.args, bound.kwargs
    return args, dict(kwargs)


def key_part(value: Any) -> Any:
    """Returns the value of a `key_fn` with dtypes by their names, and enums and dataclasses as they are in a config."""
    if isinstance(value, (type, np.dtype)):
        return describe.describe_plain(value).get("dtype", value)
    if is_tagged(value):
        value = tagged(value)
    if isinstance(value, Mapping):
        return {key: key_part(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [key_part(item) for item in value]
    return value


def as_structs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
    """Returns the same call with a `jax.ShapeDtypeStruct` in place of every array.

    Args:
        args: positional arguments.
        kwargs: keyword arguments.
    """

    def struct(array: Any) -> jax.ShapeDtypeStruct:
        is_weak = bool(getattr(array, "weak_type", False))
        return jax.ShapeDtypeStruct(array.shape, describe.canonical_dtype(array.dtype), weak_type=is_weak)

    return with_leaves(args, kwargs, is_array, struct)


def with_leaves(
    args: Sequence[Any], kwargs: Mapping[str, Any], is_wanted: Callable[[Any], bool], change: Callable[[Any], Any]
) -> Arguments:
    """Returns the arguments of a call with some leaves changed.

    An argument without such leaves stays the very same object, as it may be compared by identity.
    """

    def changed(value: Any) -> Any:
        if not any(map(is_wanted, jax.tree.leaves(value))):
            return value
        return jax.tree.map(lambda leaf: change(leaf) if is_wanted(leaf) else leaf, value)

    return tuple(map(changed, args)), {name: changed(value) for name, value in kwargs.items()}


def describe_jax_state(args: tuple[Any, ...], kwargs: Mapping[str, Any], *, own: str | None = None) -> JsonObject:
    """Returns a JSON-able description of JAX's settings that change the program of a call, and of the mesh in force.

    Args:
        args: the call's positional arguments.
        kwargs: the call's keyword arguments.
        own: the value of this package's own user context, which is left out.
    """
    state = jax_internals.describe_options(describe.describe_static, own=own)
    mesh = describe.describe_context_mesh(args, kwargs)
    return state if mesh is None else {**state, "mesh": mesh}


# --- dynamic arguments --------------------------------------------------------------------------------------


def _describe_dynamic(value: Any, *, is_jitted: bool) -> Any:
    """Describes a dynamic argument: a leaf by itself, any other pytree by its structure and its leaves by path."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(value)
    if len(leaves) == 1 and not leaves[0][0]:
        return _describe_leaf(value, is_jitted=is_jitted)
    described: JsonObject = {}
    for index, (path, leaf) in enumerate(leaves):
        name = jax.tree_util.keystr(path)
        described[name if name not in described else f"{name}#{index}"] = _describe_leaf(leaf, is_jitted=is_jitted)
    return {"structure": _describe_structure(treedef), "leaves": described}


def _describe_structure(treedef: Any) -> Any:
    if _is_shown_by_repr(treedef):
        return str(treedef)
    kind, data = treedef.node_data()
    children = [_describe_structure(child) for child in treedef.children()]
    try:
        described = describe.describe_static(data)
    except TypeError:
        described = describe.stable_repr(data)
    return {"type": describe.name_of(kind), "data": described, "children": children}


def _is_shown_by_repr(treedef: Any) -> bool:
    """Returns whether a structure has plain containers alone: its repr is complete and in a stable order."""
    node = treedef.node_data()
    if node is None:
        return True
    kind, data = node
    if kind in (dict, collections.OrderedDict):
        if not all(type(key) in (str, int) for key in data):
            return False
    elif data is not None or not issubclass(kind, (list, tuple, type(None))):  # named tuples have no data
        return False
    return all(map(_is_shown_by_repr, treedef.children()))


def _describe_leaf(leaf: Any, *, is_jitted: bool) -> Any:
    if not is_jitted and not isinstance(leaf, jax.ShapeDtypeStruct):  # a struct stands for a JAX array
        return describe.describe_array(leaf, leaf.dtype) if is_array(leaf) else describe.describe_static(leaf)
    if is_array(leaf) or isinstance(leaf, np.generic):
        return describe.describe_array(leaf, describe.canonical_dtype(leaf.dtype))
    if isinstance(leaf, (bool, int, float, complex)) and not isinstance(leaf, enum.Enum):
        kind = next(kind.__name__ for kind in (bool, int, float, complex) if isinstance(leaf, kind))
        is_wide = kind != "bool" and describe.canonical_dtype(np.dtype(np.float64)) == np.float64
        return {"scalar": kind} | ({"x64": True} if is_wide else {})
    return describe.describe_static(leaf)


def is_array(leaf: Any) -> bool:
    """Returns whether a leaf is an array, or a `jax.ShapeDtypeStruct`."""
    # JAX takes long to say so, and there may be very many numbers.
    return type(leaf) not in SCALARS and isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))


# --- a function with a config ---


def split_config(fn: Callable[..., Any], config: Config) -> tuple[Config, Mapping[str, Any]]:
    """Returns a config's keyword arguments and its compiler options.

    Args:
        fn: the function. If it is not jitted, all values of the config are keyword arguments.
        config: the config.
    """
    if OPTIONS not in config or not jax_internals.is_jitted(fn) or OPTIONS in inspect.signature(fn).parameters:
        return config, NO_OPTIONS
    keywords = {name: value for name, value in config.items() if name != OPTIONS}
    return keywords, config[OPTIONS]


def jitted_with(fn: Any, config: Config) -> tuple[Any, Config]:
    """Returns the function to call for a config, with its compiler options, and the keyword arguments for the call.

    Args:
        fn: the function. If the config has compiler options, it is jitted again, once for the same options.
        config: the config.
    """
    keywords, options = split_config(fn, config)
    return (jax_internals.with_compiler_options(fn, options) if options else fn), keywords


def bind_config(fn: Callable[..., Any], config: Config) -> Callable[..., Any]:
    """Returns a function that takes the arguments of a call and runs with a config.

    Args:
        fn: the function, jitted or not.
        config: the config. Inside a trace its compiler options are left out with a warning: JAX
            refuses them for all but the outermost jit.
    """
    jitted, keywords = jitted_with(fn, config)
    return functools.partial(fn, **keywords) if jitted is fn else _WithOptions(fn, jitted, keywords, config[OPTIONS])


def function_inside(bound: Callable[..., Any]) -> Any:
    """Returns the function inside a bound function or another wrapper.

    Args:
        bound: a function from `bind_config`, or any wrapper.
    """
    if isinstance(bound, (functools.partial, _WithOptions)):
        return bound.func
    return getattr(bound, "__wrapped__", bound)


def check_jit_options(fn: Callable[..., Any], name: str) -> None:
    """Raises where a jitted function has options with which it cannot be tuned.

    Args:
        fn: the jitted function.
        name: its name in messages.

    Raises:
        TypeError: the function accepts no config, or cannot be rebuilt in a worker.
    """
    options = jax_internals.jit_options(fn)
    if options.takes_no_keywords:
        raise TypeError(
            f"{name}: jax.jit accepts no keyword arguments with in_shardings, and that is how the tunables are passed: "
            "leave in_shardings out and lay out the arguments (jax.device_put(x, sharding)), or call "
            "jax.lax.with_sharding_constraint inside the function"
        )
    if options.cannot_travel:
        from quarantune.transport import importable  # few functions need it

        if not importable.may_travel_by_name(fn):
            options.check_can_travel(name)


def check_configs(
    fn: Callable[..., Any], configs: Sequence[Config], *, name: str, signature: inspect.Signature, need_defaults: bool
) -> None:
    """Raises where a function cannot take the keys of its configs.

    Args:
        fn: the function.
        configs: its configs, or a few in which every value occurs.
        name: its name in messages.
        signature: its signature.
        need_defaults: whether every tunable must have a default, because the function is also called without it.

    Raises:
        TypeError: a key is no parameter that can be passed by keyword, or has no default.
        ValueError: a key is not static.
    """
    is_jitted = jax_internals.is_jitted(fn)
    # Configs are passed by keyword, so parameters that jit knows as static only by position do not count.
    static_names = frozenset(jax_internals.jit_options(fn).static_argnames) if is_jitted else None
    check_parameters(
        configs, parameters=signature, static_names=static_names, fn_name=name, need_defaults=need_defaults
    )
    if is_jitted:
        check_compiler_options(fn, configs, name=name)


def check_compiler_options(fn: Callable[..., Any], configs: Sequence[Config], *, name: str) -> None:
    """Checks the compiler options of configs, and that the function can be jitted with them.

    Args:
        fn: a jitted function.
        configs: its configs.
        name: the function's name, for error messages.

    Raises:
        TypeError: the options are no dict of plain values, or the function was jitted with options tied to devices.
    """
    if OPTIONS in inspect.signature(fn).parameters:
        return
    given = [config[OPTIONS] for config in configs if OPTIONS in config]
    for options in given:
        if not isinstance(options, Mapping):
            raise TypeError(
                f"{name}: {OPTIONS} is {shown(options)}; give a dict of XLA's options, as in {{{OPTIONS!r}: "
                f"{{'xla_cpu_enable_fast_math': True}}}}, or make {OPTIONS!r} a parameter of the function."
            )
        for option, value in options.items():
            if not isinstance(value, (bool, int, float, str)):
                raise TypeError(
                    f"{name}: {OPTIONS}[{option!r}] is {shown(value)}; XLA's options are booleans, numbers and strings."
                )
    bound = jax_internals.jit_options(fn).cannot_travel
    if bound and any(given):
        raise TypeError(
            f"{name}: its configs have {OPTIONS}, for which it has to be jitted again, and jax.jit was given "
            f"{' and '.join(bound)}, which would be lost: leave one or the other out."
        )


class _WithOptions:
    """A jitted function with a config that has compiler options.

    Attributes:
        func: the function that was given, like `functools.partial.func`.
        keywords: the keyword arguments bound to it, like `functools.partial.keywords`.
    """

    def __init__(self, fn: Callable[..., Any], jitted: Callable[..., Any], keywords: Config, options: Any) -> None:
        self.func = fn
        self.keywords = keywords
        self._options = options
        self._compiled = functools.partial(jitted, **keywords)
        self._traced = functools.partial(fn, **keywords)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function, compiled with the options; inside a trace without them."""
        if not jax_internals.is_tracing():
            return self._compiled(*args, **kwargs)
        name, options = getattr(self.func, "__qualname__", repr(self.func)), dict(self._options)
        _warn_once(
            f"{name}: its config {self.keywords} runs without its {OPTIONS} inside a trace, because JAX takes them at "
            f"the outermost jit alone: give them to that one, jax.jit(..., {OPTIONS}={options})"
        )
        return self._traced(*args, **kwargs)

    def __reduce__(self) -> Any:
        """Pickles the function and the config."""
        return bind_config, (self.func, {**self.keywords, OPTIONS: self._options})


@functools.cache
def _warn_once(message: str) -> None:
    warn(message, RuntimeWarning)


# --- configs that contextual tuning assigns ---

assignment_in_force: contextvars.ContextVar[Any] = contextvars.ContextVar("assignment_in_force", default=None)
"""The assignment of configs to kernels (`transport.assignment`) that is in force in a thread; None for none."""
_NUMBER = re.compile(r" #\d+$")
_kernels: dict[str, weakref.WeakSet[Any]] = {}


def register_kernel(kernel: Any) -> None:
    """Registers an autotuned function under its name."""
    _kernels.setdefault(kernel.name, weakref.WeakSet()).add(kernel)


def kernels(name: str) -> Sequence[Any]:
    """Returns the autotuned functions of a name; there may be several from one factory."""
    return list(_kernels.get(_NUMBER.sub("", name), ()))
