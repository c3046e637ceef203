"""From a call to its key: the function with its configs, the call with its arguments, and their description."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import numpy as np

from quarantune.cache.fingerprint import Fingerprint, fingerprint
from quarantune.cache.store import Entry, canonical_json, report_once, short_hash
from quarantune.devices import discovery
from quarantune.host.process import cache_name, lazy
from quarantune.transport.problem import (
    SCALARS,
    Arguments,
    CallDescription,
    Problem,
    as_structs,
    assignment_in_force,
    check_configs,
    check_jit_options,
    describe_call,
    describe_function,
    describe_jax_state,
    fitted,
    is_array,
    key_part,
    named,
    signature_of,
    split_config,
)
from quarantune.values.codec import JsonObject, freeze, has_tag, text_of
from quarantune.values.configs import (
    COMPILER_OPTIONS,
    NO_OPTIONS,
    Config,
    checked_config,
    configs_made_by,
    format_config,
)
from quarantune.values.settings import Options
from quarantune.values.space import Space
from quarantune.values.texts import array_text, printable

if TYPE_CHECKING:
    from quarantune.devices.targets import Target
    from quarantune.transport.manual_axes import Axes

_MOST_KINDS = 3
_LAZY: Mapping[Callable[..., bool], str] = {
    inspect.iscoroutinefunction: "returns asyncio.run(...) of this one's result",
    inspect.isasyncgenfunction: "awaits all that this one yields, in asyncio.run(...)",
    inspect.isgeneratorfunction: "returns list(...) of this one's result",
}
"""Kinds of functions whose calls do no work, with the remedy."""
_STATE = "jax settings"
"""The name of JAX's settings in an entry, among those of the parameters."""


@dataclasses.dataclass(eq=False)
class TunedFunction:
    """A function with its configs and its author's options.

    Attributes:
        fn: the function, jitted or not; configs reach it as keyword arguments.
        configs: the space of configs, or a callable that makes them for a call.
        name: the function's name in the cache.
        signature: its signature.
        static_names: its static parameters; None for a function that is not jitted, where every argument without an
            array counts by value.
        options: its author's options.
        need_defaults: whether every tunable must have a default, because the function is also called without it.
        tunables: the names that its configs set; empty for a callable that makes configs and has not been called.
        most_configs: how many configs a sweep may try; None for those of its config space.
    """

    fn: Callable[..., Any]
    configs: Space | Callable[..., Any]
    _: dataclasses.KW_ONLY
    name: str
    signature: inspect.Signature
    static_names: frozenset[str] | None
    options: Options
    need_defaults: bool = False
    tunables: frozenset[str] = dataclasses.field(init=False)
    most_configs: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        """Checks the options; nothing is read or started.

        Raises:
            TypeError: an option needs a jitted function, and it is none.
        """
        for option, does in (("time_grad", "differentiates"), ("max_device_memory", "bounds the compiled program of")):
            if getattr(self.options, option) and not self.is_jitted:
                raise TypeError(
                    f"{self.name}: {option} {does} the function, which jax.jit must have wrapped for that: put jax.jit "
                    f"on it, or leave {option} out"
                )
        self.tunables = frozenset() if callable(self.configs) else frozenset(self.configs.names)

    @classmethod
    def of(
        cls, fn: Any, configs: Any, options: Options, *, need_defaults: bool = False, compiled_by: str = ""
    ) -> TunedFunction:
        """Returns a function as its author gives it, checked as far as that is possible without a call.

        Args:
            fn: the function, autotuned or not.
            configs: its configs in any form.
            options: its author's options.
            need_defaults: as in `TunedFunction`.
            compiled_by: the function of ours that only compiles configs, for which `fn` must be jitted.

        Raises:
            TypeError: it cannot be called or jitted as it is, or the configs are of no usable type.
            ValueError: the configs are empty or without end, or the function cannot take them.
        """
        fn, signature, static_names = describe_function(fn)
        label = cache_name(fn)
        if compiled_by and static_names is None:
            raise TypeError(
                f"{compiled_by} compiles what jax.jit has wrapped, and {label!r} is not jitted: "
                "wrap it, with the tunables among its static_argnames"
            )
        if static_names is not None:
            check_jit_options(fn, options.name or label)
        for is_lazy, remedy in _LAZY.items() if static_names is None else ():
            if is_lazy(fn) or is_lazy(inspect.getattr_static(type(fn), "__call__")):
                raise TypeError(
                    f"{label}: a call of it does no work, but makes an object that does it later, so that the work "
                    f"would not be timed: tune a function that {remedy}"
                )
        function = cls(
            fn,
            configs if callable(configs) else Space.of(configs, fn_name=label, parameters=signature),
            name=options.name or label,
            signature=signature,
            static_names=static_names,
            options=options,
            need_defaults=need_defaults,
        )
        if isinstance(function.configs, Space):
            function.check(function.configs.examples())
        return function

    def with_options(self, options: Options, configs: Sequence[Config] | None = None) -> TunedFunction:
        """Returns the function with other options, and other configs if they are given."""
        space = self.configs if configs is None else Space.of(configs, fn_name=self.name, parameters=self.signature)
        return dataclasses.replace(self, options=options, configs=space)

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The function's parameters by name."""
        return self.signature.parameters

    @property
    def is_jitted(self) -> bool:
        """Whether `jax.jit` has wrapped the function."""
        return self.static_names is not None

    @property
    def compiled_fn(self) -> Any:
        """What takes a config, and is compiled with it."""
        return self.fn

    @lazy
    def fingerprint(self) -> Fingerprint:
        """The fingerprint of the function's code and of the options that affect which config wins."""
        return fingerprint(inspect.unwrap(self.fn), options=self.options.deciding())

    @lazy
    def identity(self) -> str:
        """Distinguishes the function from others of the same name in this process."""
        return f"{self.fingerprint.digest} {self.listed_space.get('hash', '')}"

    @lazy
    def listed_space(self) -> JsonObject:
        """Values that distinguish its config space from others; none for a callable that makes configs."""
        return {} if callable(self.configs) else space_of(self.configs)

    @lazy
    def maker(self) -> JsonObject:
        """Values that distinguish the callable that makes its configs, with the code and the values that it reaches."""
        assert callable(self.configs)
        return {"made_by": fingerprint(self.configs).digest}

    def config_of(self, entry: Entry, call: BoundCall, *, is_own: bool) -> Config | None:
        """Returns the config of an entry if it can be used for the config space of a call.

        Args:
            entry: the entry.
            call: the call.
            is_own: whether the entry is in the user's cache, so that the user should know why it is not used.
        """
        config = call.find(entry.get("config"))
        if config is None and is_own:
            report_once(
                f"{self.name}: the cached config {entry.get('config')!r} is not in the config space any more: it is "
                f"not used"
            )
        # A space of None was put there by hand. New configs must be measured; the journal holds the trials of others.
        return config if config is not None and entry.get("space") in (None, call.space) else None

    def config_from(self, encoded: JsonObject, call: BoundCall) -> Config | None:
        """Returns the config that another process has encoded, or None where it cannot be used here."""
        return call.find(encoded)

    def text_of(self, config: Config) -> str:
        """Returns a config as messages show it."""
        return format_config(config)

    def check(self, configs: Sequence[Config]) -> None:
        """Raises where the function cannot take the keys of a config."""
        signature, need_defaults = self.signature, self.need_defaults
        check_configs(self.fn, configs, name=self.name, signature=signature, need_defaults=need_defaults)


def space_of(configs: Space) -> JsonObject:
    """Returns values that distinguish one config space from another, whatever the order of the configs."""
    return {"configs": len(configs), "hash": short_hash("\n".join(sorted(configs.texts())))}


class BoundCall:
    """One call of a tuned function.

    The author's functions are called when their answers are first needed, and at most once per call: the callable that
    makes configs, and `prune_fn` for each config.

    Attributes:
        function: the function.
        args: the positional arguments of the call.
        kwargs: its keyword arguments.
    """

    def __init__(self, function: TunedFunction, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.function = function
        self.args = args
        self.kwargs = dict(kwargs)

    @property
    def name(self) -> str:
        """The function's name in the cache."""
        return self.function.name

    @lazy
    def is_symbolic(self) -> bool:
        """Whether the shape of an argument is symbolic, as in `jax.export`: no data has such a shape."""
        leaves = jax.tree.leaves((self.args, self.kwargs))
        arrays = [leaf for leaf in leaves if isinstance(leaf, (jax.core.Tracer, jax.ShapeDtypeStruct))]
        return any(not isinstance(size, (int, np.integer)) for array in arrays for size in array.shape)

    @property
    def has_no_key(self) -> bool:
        """Whether nothing can be remembered for the call, because its shapes are symbolic."""
        return self.function.options.key_fn is None and self.is_symbolic

    @lazy
    def statics(self) -> frozenset[str]:
        """The parameters that count by value."""
        if self.function.static_names is not None:
            return self.function.static_names
        # The tunables are left out of the call, and need not have a default.
        bound = self.function.signature.bind_partial(*self.args, **self.kwargs)
        bound.apply_defaults()
        return frozenset(name for name, value in named(bound) if not any(map(is_array, jax.tree.leaves(value))))

    @lazy
    def optional(self) -> frozenset[str]:
        """The static arguments that `key_fn` leaves out, which count only where they can be described."""
        key_fn = self.function.options.key_fn
        if key_fn is None or self.fitted(key_fn, self.args, self.kwargs) == (self.args, self.kwargs):
            return frozenset()
        return self.statics - signature_of(key_fn).parameters.keys()

    @lazy
    def configs(self) -> Space:
        """The configs to try, with those that `prune_fn` drops; those of a callable are read as far as needed."""
        function = self.function
        space = function.configs
        if callable(space):
            struct_args, struct_kwargs = self.fitted(space, *as_structs(self.args, self.kwargs))
            configs = configs_made_by(space, struct_args, struct_kwargs, fn_name=function.name)
            space = Space(configs, fn_name=function.name, parameters=function.signature, reads_all=False)
            function.check(space.examples())
        return space.where(None if function.options.prune_fn is None else self.keeps)

    @property
    def has_unread_configs(self) -> bool:
        """Whether a callable makes the configs, and the key of the call alone decides which.

        Results of such a call are found without the configs: the code of the callable stands for them.
        """
        return callable(self.function.configs) and self.function.options.key_fn is None

    @lazy
    def space(self) -> JsonObject:
        """Values that distinguish the config space of the call from others."""
        if self.has_unread_configs:
            return self.function.maker
        return self.function.listed_space or space_of(self.configs)

    def find(self, raw: Any, *, is_listed: bool = False) -> Config | None:
        """Returns the config that is equal to an encoded one: of the configs, or the function's own defaults.

        One that lacks options for XLA is equal to one that has none. Where the configs are not read, a config that the
        function can take is taken for one of them.

        Args:
            raw: the encoded config, which may be anything.
            is_listed: whether the configs are read in any case, because the key of the call does not vouch for it.
        """
        if not isinstance(raw, Mapping):
            return None
        if is_listed or not self.has_unread_configs or any(map(has_tag, raw.values())):
            whole = {COMPILER_OPTIONS: NO_OPTIONS, **raw} if COMPILER_OPTIONS in self.configs.names else raw
            self.configs.whole()
            if (index := self.configs.find(whole)) is not None:
                return self.configs[index]
            own = {name: value for name, value in raw.items() if name != COMPILER_OPTIONS or value}
            return self.defaults if self.untuned is not None and text_of(own) == text_of(self.defaults) else None
        with contextlib.suppress(TypeError, ValueError):  # a file may hold anything
            found = checked_config(raw, fn_name=self.name)
            self.function.check([found])
            return found or None
        return None

    @lazy
    def pruned(self) -> frozenset[int]:
        """The indices of the configs that `prune_fn` drops, which is called for all of them."""
        return frozenset(index for index in self.configs.listed() if not self.configs.keeps(index))

    def keeps(self, config: Config) -> bool:
        """Returns whether `prune_fn` accepts a config, or there is no `prune_fn`."""
        return self.function.options.prune_fn is None or self._prune_fn(config)

    @lazy
    def _prune_fn(self) -> Callable[[Config], bool]:
        prune_fn = self.function.options.prune_fn
        assert prune_fn is not None
        args, kwargs = self.fitted(functools.partial(prune_fn, {}), *as_structs(self.args, self.kwargs))
        return lambda config: bool(prune_fn(config, *args, **kwargs))

    @property
    def tunables(self) -> frozenset[str]:
        """The names that the configs set."""
        if not self.function.tunables:  # a callable makes the configs, and this is its first call
            self.function.tunables = frozenset(self.configs.names)
        return self.function.tunables

    @property
    def given(self) -> frozenset[str]:
        """The tunable parameters that the caller sets by hand.

        Raises:
            TypeError: the function does not take such arguments.
        """
        if callable(self.function.configs) and self.has_no_key:
            return frozenset()  # it runs with its defaults anyway, and configs for symbolic shapes could not be made
        given = self.function.signature.bind(*self.args, **self.kwargs).arguments
        may_be = [name for name in given if self.function.parameters[name].default is not inspect.Parameter.empty]
        return self.tunables.intersection(may_be) if may_be else frozenset()

    @lazy
    def defaults(self) -> Config:
        """The function's own defaults as a config; an empty one, which sets nothing, where JSON cannot hold them."""
        parameters = self.function.parameters
        defaults = {name: parameters[name].default for name in self.configs.names if name in parameters}
        try:
            return checked_config(defaults, fn_name=self.name)
        except (TypeError, ValueError):
            return {}

    @property
    def own_defaults(self) -> Config | None:
        """The config of the function's own defaults, be it in the list or not; None where it cannot run with them."""
        if self.default_index is not None:
            return self.configs[self.default_index]
        return None if self.untuned is None else self.defaults

    @lazy
    def default_index(self) -> int | None:
        """The index of the config that equals the function's own defaults; None where none that is read by now does."""
        parameters, names = self.function.parameters, self.configs.names
        defaults = {name: freeze(parameters[name].default) for name in names if name in parameters}
        if COMPILER_OPTIONS in names:
            defaults.setdefault(COMPILER_OPTIONS, NO_OPTIONS)
        index = self.configs.find(defaults)
        found = {} if index is None else self.configs[index]  # 1 and True differ
        is_same = found == defaults and all(type(value) is type(defaults[name]) for name, value in found.items())
        return index if is_same else None

    @property
    def untuned(self) -> Config | None:
        """The config that sets nothing, so that the function runs with its own defaults; None where it cannot."""
        keywords, _ = split_config(self.function.fn, self.configs[0])
        tunables = [self.function.parameters.get(name) for name in keywords]
        if any(tunable is None or tunable.default is inspect.Parameter.empty for tunable in tunables):
            return None
        default = self.default_index
        return {} if default is None or self.configs.keeps(default) else None

    def fitted(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        """Returns the call as one of the author's functions takes it, which may leave static parameters out."""
        return fitted(function, self.function.signature, self.statics, args, kwargs)


@dataclasses.dataclass(frozen=True)
class CallKey:
    """One problem on one kind of device.

    Attributes:
        device: the kind of device.
        text: the description of the problem as canonical JSON.
    """

    device: str
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyedCall:
    """A call together with its key.

    Attributes:
        call: the call.
        key: its key.
        platform: the platform that the call runs on: `cpu`, `cuda`, `rocm` or `tpu`.
        values: the values of the call that the key holds, by parameter.
        jax_state: JAX's settings that the key holds.
        axes: the axes of the mesh that the function communicates over, where it does so inside `shard_map`.
    """

    call: BoundCall
    key: CallKey
    platform: str
    values: JsonObject
    jax_state: JsonObject
    axes: Axes | None

    @property
    def readable(self) -> JsonObject:
        """The values of the key in a form that people can read."""
        return self.values | ({_STATE: self.jax_state} if self.jax_state else {})

    @property
    def arguments(self) -> JsonObject:
        """The descriptions of the arguments by parameter, also where `key_fn` stands for the arrays in the key."""
        return _description(self.call).key_values

    @property
    def label(self) -> str:
        """The function and the kinds of its arrays, for progress: `matmul f32[512,512]`."""
        leaves = jax.tree.leaves((self.call.args, self.call.kwargs))
        kinds = dict.fromkeys(array_text(leaf.shape, leaf.dtype) for leaf in leaves if is_array(leaf))
        few = [*kinds][:_MOST_KINDS] + (["..."] if len(kinds) > _MOST_KINDS else [])
        return " ".join([printable(self.call.name.rpartition(".")[2]), *few])

    def problem(self) -> Problem:
        """Returns the call as a sweep takes it.

        An argument that `key_fn` leaves out and that has no description is not sent: workers use its default.
        """
        call = self.call
        sent = call.function.signature.bind_partial(*call.args, **call.kwargs)
        for name in call.optional - self.values.keys():
            if call.function.parameters[name].default is not inspect.Parameter.empty:
                sent.arguments.pop(name, None)
        args, kwargs = (sent.args, sent.kwargs) if call.optional else (call.args, call.kwargs)
        return Problem(
            fn=call.function.fn,
            name=call.name,
            args=args,
            kwargs=kwargs,
            platform=self.platform,
            device_kind=self.key.device,
            manual_mesh=self.axes.mesh if self.axes is not None else None,
            untuned=call.untuned,
            default=call.default_index,
        )


def keyed(call: BoundCall, target: Target | None = None) -> KeyedCall:
    """Returns a call with its key, in the current state of JAX's settings.

    Args:
        call: the call.
        target: the device that the call is for; None for the one that it would run on here.

    Raises:
        TypeError: an argument cannot be described, or `key_fn` returned a value that JSON cannot hold.
    """
    function = call.function
    bound = dict(named(function.signature.bind_partial(*call.args, **call.kwargs)))
    _check_no_references(bound, call.name)
    if function.is_jitted:
        _check_arguments({name: value for name, value in bound.items() if name not in call.statics}, call.name)
    description = _description(call)
    if target is None:
        platform, kind = discovery.platform_and_kind(description.platform)
    else:
        platform, kind = target.platform, target.device_kind
    axes = None
    if description.has_tracers and function.is_jitted:
        from quarantune.transport import manual_axes  # calls outside a trace do not need it

        axes = manual_axes.communicated_over(function.fn, call.args, call.kwargs)
    values = _key_values(call, description)
    if axes is not None:
        values = {**values, "communicates over": axes.sizes}
    assignment = assignment_in_force.get()
    state = describe_jax_state(call.args, call.kwargs, own=None if assignment is None else assignment.text)
    return KeyedCall(
        call=call,
        key=CallKey(kind, _text(values, call, state)),
        platform=platform,
        values=values,
        jax_state=state,
        axes=axes,
    )


def keyed_to_tune(call: BoundCall, target: Target | None = None) -> KeyedCall:
    """Returns a call to tune with its key.

    Args:
        call: the call.
        target: as for `keyed`.

    Raises:
        TypeError: its shapes are symbolic, or it sets a tunable by hand, and every config would run with that.
    """
    if call.is_symbolic:
        raise TypeError(f"{call.name}: symbolic shapes have no data to measure with: tune it with concrete shapes")
    described = keyed(call, target)
    if given := _description(call).tunables_given:
        verb, them = ("is", "it") if len(given) == 1 else ("are", "them")
        raise TypeError(f"{call.name}: {', '.join(sorted(given))} {verb} tuned here: leave {them} out")
    return described


def _description(call: BoundCall) -> CallDescription:
    function = call.function
    return describe_call(
        function.signature,
        call.statics,
        call.tunables,
        call.args,
        call.kwargs,
        is_jitted=function.is_jitted,
        optional=call.optional,
    )


def _text(values: JsonObject, call: BoundCall, state: JsonObject) -> str:
    parts = {"call": values, "code": call.function.fingerprint.digest} | ({"jax": state} if state else {})
    return canonical_json(parts)


def _key_values(call: BoundCall, description: CallDescription) -> JsonObject:
    """Returns the part of the key that describes the arguments; `key_fn` describes the arrays where there is one."""
    key_fn = call.function.options.key_fn
    if key_fn is None:
        return description.key_values
    args, kwargs = call.fitted(key_fn, call.args, call.kwargs)
    returned = key_fn(*args, **kwargs)
    bucket = key_part(returned)
    try:
        canonical_json(bucket)
    except (TypeError, ValueError) as error:
        hint = "; for symbolic shapes return what it returns for the concrete ones" if call.is_symbolic else ""
        raise TypeError(f"{call.name}: key_fn returned {returned!r}, which JSON cannot hold: {error}{hint}") from None
    static = {name: value for name, value in description.key_values.items() if name in call.statics}
    return {**static, "key_fn": bucket}


def _check_no_references(arguments: Mapping[str, Any], name: str) -> None:
    """Raises where an argument is a mutable array: every config would write to it, and each in another process.

    Args:
        arguments: the arguments by parameter.
        name: the function's name in messages.

    Raises:
        TypeError: an argument is, or contains, a `jax.Ref`.
    """
    for parameter, value in arguments.items():
        if any(type(leaf) not in SCALARS and isinstance(leaf, jax.Ref) for leaf in jax.tree.leaves(value)):
            raise TypeError(
                f"{name}: argument {parameter!r} is a jax.Ref, to which every config would write: tune a function that "
                f"takes its value and returns the new one, as in {parameter}[...] = fn({parameter}[...]), or give the "
                f"tunables by hand"
            )


def _check_arguments(arguments: Mapping[str, Any], name: str) -> None:
    """Raises where `jax.jit` would refuse an argument.

    Args:
        arguments: the arguments that are not static, by parameter.
        name: the function's name in messages.

    Raises:
        TypeError: an argument is, or contains, something that is neither array nor number.
    """
    for parameter, value in arguments.items():
        for path, leaf in jax.tree_util.tree_flatten_with_path(value)[0]:
            if (reason := _why_not_dynamic(leaf)) is not None:
                where = f"argument {parameter!r}" if not path else f"{parameter}{jax.tree_util.keystr(path)}"
                raise TypeError(
                    f"{name}: {where} is {reprlib.repr(leaf)}, which jax.jit does not take as a dynamic argument "
                    f"({reason}): {_remedy(parameter, leaf, is_inside=bool(path))}"
                )


def _why_not_dynamic(leaf: Any) -> str | None:
    if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, bool, int, float, complex)):
        return None
    try:
        jax.typeof(leaf)
    except (TypeError, ValueError):
        return f"dtype {leaf.dtype}" if isinstance(leaf, (np.ndarray, np.generic)) else type(leaf).__name__
    return None


def _remedy(parameter: str, leaf: Any, *, is_inside: bool) -> str:
    if isinstance(leaf, (np.ndarray, np.generic)):
        return "give an array of numbers"
    static = (
        f"pass it as a static argument of its own, or make it a static field of the pytree that {parameter!r} is"
        if is_inside
        else f"make it static with static_argnames=[{parameter!r}] in jax.jit"
    )
    kind = type(leaf)
    if kind.__module__ == "builtins":
        return static
    return f"{static}, or register {kind.__qualname__} as a pytree (jax.tree_util.register_dataclass)"
