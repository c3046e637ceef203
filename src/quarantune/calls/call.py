"""A function with its configs, and a call of it with its arguments."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import numpy as np

from quarantune.cache.entry_file import Entry
from quarantune.cache.problems import report_once
from quarantune.functions.binding import (
    Arguments,
    arguments_of,
    check_compiler_options,
    check_complete,
    describe_function,
    fitted,
    signature_of,
    split_config,
)
from quarantune.functions.description import as_structs, without_arrays
from quarantune.functions.fingerprint import Fingerprint, fingerprint
from quarantune.functions.names import cache_name
from quarantune.host.frames import callers_mistake
from quarantune.host.locks import lazy
from quarantune.jax_internals import jax_functions
from quarantune.values import blocks
from quarantune.values.codec import JsonObject, freeze, has_tag, short_hash, text_of
from quarantune.values.configs import (
    COMPILER_OPTIONS,
    NO_OPTIONS,
    Config,
    check_parameters,
    checked_config,
    configs_made_by,
    format_config,
)
from quarantune.values.options import Options
from quarantune.values.space import Space

if TYPE_CHECKING:
    from quarantune.transport.manual_axes import Axes

_LAZY: Mapping[Callable[..., bool], str] = {
    inspect.iscoroutinefunction: "returns asyncio.run(...) of this one's result",
    inspect.isasyncgenfunction: "awaits all that this one yields, in asyncio.run(...)",
    inspect.isgeneratorfunction: "returns list(...) of this one's result",
}
"""Kinds of functions whose calls only make an object that works later, with the remedy."""


@dataclasses.dataclass(eq=False)
class TunedFunction:
    """A function with its configs and its author's options.

    Attributes:
        fn: the function, jitted or not; configs reach it as keyword arguments.
        configs: the space of configs, or a callable that makes them for a call.
        options: its author's options.
        need_defaults: whether every tunable must have a default, because callers may leave tunables out.
        name: the function's name in the cache, also in `options`.
        signature: its signature.
        static_names: its static parameters. None for a function that is not jitted: its arguments without an array
            count by value.
        tunables: the names that its configs set; empty while a callable that makes configs has not run.
        most_configs: how many configs a sweep may try; None for the size of its config space.
    """

    fn: Callable[..., Any]
    configs: Space | Callable[..., Any]
    _: dataclasses.KW_ONLY
    options: Options
    need_defaults: bool = False
    name: str = dataclasses.field(init=False)
    signature: inspect.Signature = dataclasses.field(init=False)
    static_names: frozenset[str] | None = dataclasses.field(init=False)
    tunables: frozenset[str] = dataclasses.field(init=False)
    most_configs: ClassVar[int | None] = None
    _by_numerics: dict[str, TunedFunction] = dataclasses.field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        """Checks the options, without reading or starting anything.

        Raises:
            TypeError: `fn` is not callable, or an option needs a jitted function and `fn` is not jitted.
        """
        self.fn, self.signature, self.static_names = describe_function(self.fn)
        self.name = self.options.name or cache_name(self.fn)
        self.options = dataclasses.replace(self.options, name=self.name)
        for option, does in (("time_grad", "differentiates"), ("max_device_memory", "bounds the compiled program of")):
            if getattr(self.options, option) and not self.is_jitted:
                raise TypeError(
                    f"{self.name}: {option} {does} the function, so the function must be jitted: put jax.jit on it, "
                    f"or leave {option} out"
                )
        self.tunables = frozenset() if callable(self.configs) else frozenset(self.configs.names)

    @classmethod
    def of(
        cls, fn: Any, configs: Any, options: Options, *, need_defaults: bool = False, compiled_by: str = ""
    ) -> TunedFunction:
        """Returns a function as its author gives it, after all checks that need no call.

        Args:
            fn: the function, autotuned or not.
            configs: its configs in any form.
            options: its author's options.
            need_defaults: see `TunedFunction`.
            compiled_by: the name of the public function that only compiles configs, so that `fn` must be jitted.

        Raises:
            TypeError: `fn` is not callable or not a kind of function that can be tuned, or the configs have an
                unusable type.
            ValueError: The configs are empty or without end, or the function cannot take them.
        """
        fn, signature, static_names = describe_function(fn)
        label = cache_name(fn)
        if compiled_by and static_names is None:
            raise TypeError(
                f"{compiled_by} compiles only jitted functions, and {label!r} is not jitted: "
                "jit it, with the tunables among its static_argnames"
            )
        if static_names is not None:
            check_jit_options(fn, options.name or label)
        for is_lazy, remedy in _LAZY.items() if static_names is None else ():
            if is_lazy(fn) or is_lazy(inspect.getattr_static(type(fn), "__call__")):
                raise TypeError(
                    f"{label}: a call only makes an object that does the work later, so timings would miss the work: "
                    f"tune a function that {remedy}"
                )
        function = cls(
            fn,
            configs if callable(configs) else Space.of(configs, fn_name=label, parameters=signature),
            options=options,
            need_defaults=need_defaults,
        )
        if isinstance(function.configs, Space):
            function.check(function.configs.examples())
        return function

    def with_options(self, options: Options, configs: Sequence[Config] | None = None) -> TunedFunction:
        """Returns the function with other options, and other configs unless `configs` is None."""
        space = self.configs if configs is None else Space.of(configs, fn_name=self.name, parameters=self.signature)
        return dataclasses.replace(self, options=options, configs=space)

    def under(self, numerics: str | None) -> TunedFunction:
        """Returns the function as it is tuned under an operator's `numerics`; None leaves the author's choice.

        Raises:
            ValueError: its options do not fit these numerics.
        """
        if numerics is None or numerics == self.options.numerics:
            return self
        if numerics not in self._by_numerics:
            options: Any = {"numerics": numerics}
            self._by_numerics[numerics] = self.with_options(dataclasses.replace(self.options, **options))
        return self._by_numerics[numerics]

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
        """The function that takes a config, and that JAX compiles with it."""
        return self.fn

    @lazy
    def fingerprint(self) -> Fingerprint:
        """The fingerprint of the function's code and of the options that affect which config wins."""
        return fingerprint(inspect.unwrap(self.fn), options=self.options.deciding(), is_proved=self.is_jitted)

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
        """Values that distinguish the callable that makes its configs, including the code and values it reaches."""
        assert callable(self.configs)
        return {"made_by": fingerprint(self.configs).digest}

    def config_of(self, entry: Entry, call: BoundCall, *, is_own: bool) -> Config | None:
        """Returns the config of an entry if it fits the config space of a call.

        Args:
            entry: the entry.
            call: the call.
            is_own: whether the entry is in the user's cache, so that a message explains why it is ignored.
        """
        config = call.find(entry.get("config"))
        if config is None and is_own:
            report_once(
                f"{self.name}: the cached config {entry.get('config')!r} is no longer in the config space and is "
                f"ignored"
            )
        # An entry made by hand has no space. For another space a sweep must run, as new configs need measurements;
        # the journal holds the trials of the old ones.
        return config if config is not None and entry.get("space") in (None, call.space) else None

    def config_from(self, encoded: JsonObject, call: BoundCall) -> Config | None:
        """Returns the config that another process has encoded, or None if it does not fit the call."""
        return call.find(encoded)

    def text_of(self, config: Config) -> str:
        """Returns a config as messages show it."""
        return format_config(config)

    def check(self, configs: Sequence[Config]) -> None:
        """Raises if the function cannot take the keys of its configs.

        Args:
            configs: its configs, or a few that together contain every value.

        Raises:
            TypeError: A key is not a parameter that takes a keyword argument, or lacks a default.
            ValueError: A key is not static.
        """
        # Configs are keyword arguments, so parameters that jit knows as static only by position do not count.
        statics = frozenset(jax_functions.jit_options(self.fn).static_argnames) if self.is_jitted else None
        check_parameters(
            configs,
            parameters=self.signature,
            static_names=statics,
            fn_name=self.name,
            need_defaults=self.need_defaults,
        )
        if self.is_jitted:
            check_compiler_options(self.fn, configs, name=self.name)


def space_of(configs: Space) -> JsonObject:
    """Returns values that distinguish one config space from another, whatever the order of the configs."""
    return {"configs": len(configs), "hash": short_hash("\n".join(sorted(configs.texts())))}


class BoundCall:
    """One call of a tuned function.

    It calls the author's functions on first use and at most once: the callable that makes configs, and `prune_fn` for
    each config.

    Attributes:
        function: the function, under the numerics in force.
        args: the positional arguments of the call.
        kwargs: its keyword arguments.
        axes: for a recorded call, the axes of `KeyedCall.axes` that were around it.
    """

    def __init__(
        self, function: TunedFunction, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, axes: Axes | None = None
    ) -> None:
        self.function = function.under(blocks.numerics_in_force())
        self.args = args
        self.kwargs = dict(kwargs)
        self.axes = axes

    @property
    def name(self) -> str:
        """The function's name in the cache."""
        return self.function.name

    @lazy
    def is_symbolic(self) -> bool:
        """Whether an argument has a symbolic shape, from `jax.export`, and so no data."""
        leaves = jax.tree.leaves((self.args, self.kwargs))
        arrays = [leaf for leaf in leaves if isinstance(leaf, (jax.core.Tracer, jax.ShapeDtypeStruct))]
        return any(not isinstance(size, (int, np.integer)) for array in arrays for size in array.shape)

    @property
    def has_no_key(self) -> bool:
        """Whether the call cannot have a cached result, because its shapes are symbolic."""
        return self.function.options.key_fn is None and self.is_symbolic

    @lazy
    def bound(self) -> inspect.BoundArguments:
        """The arguments by parameter, without defaults; never changed.

        Raises:
            TypeError: The function does not take them.
        """
        with self._callers_mistakes():
            return self.function.signature.bind_partial(*self.args, **self.kwargs)

    @lazy
    def values(self) -> Mapping[str, Any]:
        """The arguments by name, with defaults and without tunables.

        Raises:
            TypeError: An argument is missing.
        """
        bound, tunables = self.bound, self.tunables
        with self._callers_mistakes():
            check_complete(bound, tunables)
        return {name: value for name, value in arguments_of(self.bound).items() if name not in self.tunables}

    @lazy
    def statics(self) -> frozenset[str]:
        """The parameters that count by value."""
        if self.function.static_names is not None:
            return self.function.static_names
        # Making the configs may need the statics, so the tunables may still be unknown here.
        return without_arrays(arguments_of(self.bound))

    @lazy
    def optional(self) -> frozenset[str]:
        """The static arguments that `key_fn` does not take. They count only if they have a description."""
        key_fn = self.function.options.key_fn
        if key_fn is None or self.fitted(key_fn, self.args, self.kwargs) == (self.args, self.kwargs):
            return frozenset()
        return self.statics - signature_of(key_fn).parameters.keys()

    @lazy
    def configs(self) -> Space:
        """The configs to try, including configs that `prune_fn` drops; reads a callable's configs as needed."""
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
        """Whether a callable makes the configs, and the key of the call decides which.

        The code of the callable then stands for the configs, so finding a result does not need them.
        """
        return callable(self.function.configs) and self.function.options.key_fn is None

    @lazy
    def space(self) -> JsonObject:
        """Values that distinguish the config space of the call from others."""
        if self.has_unread_configs:
            return self.function.maker
        return self.function.listed_space or space_of(self.configs)

    def find(self, raw: Any, *, is_listed: bool = False) -> Config | None:
        """Decodes a config: one of the configs, or the function's own defaults; None for any other value.

        A missing dict of XLA's options counts as an empty dict. If the configs are unread, any config that the function
        can take is accepted.

        Args:
            raw: the encoded config, which may be anything.
            is_listed: whether to read the configs in any case, because the key of the call does not vouch for `raw`.
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
            # An empty config stands for defaults that JSON cannot hold.
            return found if found or (self.untuned is not None and not self.defaults) else None
        return None

    @lazy
    def pruned(self) -> frozenset[int]:
        """The indices of the configs that `prune_fn` drops; calls it for every config."""
        return frozenset(index for index in self.configs.listed() if not self.configs.keeps(index))

    def keeps(self, config: Config) -> bool:
        """Returns whether `prune_fn` accepts a config, or there is no `prune_fn`."""
        return self.function.options.prune_fn is None or self._prune_fn(config)

    @lazy
    def _prune_fn(self) -> Callable[[Config], bool]:
        prune_fn = self.function.options.prune_fn
        assert prune_fn is not None
        args, kwargs = self.fitted(functools.partial(prune_fn, {}), *as_structs(self.args, self.kwargs))

        def keeps(config: Config) -> bool:
            try:
                return bool(prune_fn(config, *args, **kwargs))
            except Exception as error:
                error.add_note(f"prune_fn of {self.name} raised this for the config {format_config(config)}")
                raise

        return keeps

    @contextlib.contextmanager
    def _callers_mistakes(self) -> Iterator[None]:
        """Names the function in an error about the arguments, and lets its traceback end at the caller's line."""
        try:
            yield
        except TypeError as error:
            function = self.function
            names = [str(it.replace(annotation=it.empty)) for it in function.parameters.values()]
            takes = ", ".join(name for name in names if name.partition("=")[0] not in function.tunables)
            raise callers_mistake(TypeError(f"{self.name}: {error}: it takes ({takes})")) from None

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
            TypeError: The function does not take the call's arguments.
        """
        if callable(self.function.configs) and self.has_no_key:
            return frozenset()  # it runs with its defaults anyway, and the callable cannot handle symbolic shapes
        bound = self.bound
        with self._callers_mistakes():
            check_complete(bound)
        given = bound.arguments
        may_be = [name for name in given if self.function.parameters[name].default is not inspect.Parameter.empty]
        return self.tunables.intersection(may_be) if may_be else frozenset()

    @lazy
    def defaults(self) -> Config:
        """The function's own defaults as a config; empty, so that it sets nothing, if JSON cannot hold them."""
        parameters = self.function.parameters
        defaults = {name: parameters[name].default for name in self.configs.names if name in parameters}
        try:
            return checked_config(defaults, fn_name=self.name)
        except (TypeError, ValueError):
            return {}

    @property
    def own_defaults(self) -> Config | None:
        """The function's own defaults as a config, listed or not. None if a tunable has no default."""
        if self.default_index is not None:
            return self.configs[self.default_index]
        return None if self.untuned is None else self.defaults

    @lazy
    def default_index(self) -> int | None:
        """The index of the config that equals the function's own defaults; None if no config read so far does."""
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
        """The config that sets nothing, so that the function runs with its own defaults; None if it cannot."""
        keywords, _ = split_config(self.function.fn, self.configs[0])
        tunables = [self.function.parameters.get(name) for name in keywords]
        if any(tunable is None or tunable.default is inspect.Parameter.empty for tunable in tunables):
            return None
        default = self.default_index
        return {} if default is None or self.configs.keeps(default) else None

    def fitted(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        """Returns the call's arguments for one of the author's functions, which may lack static parameters."""
        return fitted(function, self.function.signature, self.statics, args, kwargs)


def check_jit_options(fn: Callable[..., Any], name: str) -> None:
    """Raises if the options of a jitted function prevent tuning.

    Args:
        fn: the jitted function.
        name: its name in messages.

    Raises:
        TypeError: The function does not accept configs, or a worker cannot rebuild it.
    """
    options = jax_functions.jit_options(fn)
    if options.takes_no_keywords:
        raise TypeError(
            f"{name}: jax.jit accepts no keyword arguments with in_shardings, and tunables are keyword arguments: "
            "leave in_shardings out and lay out the arguments (jax.device_put(x, sharding)), or call "
            "jax.lax.with_sharding_constraint inside the function"
        )
    if options.cannot_travel:
        from quarantune.functions import importable  # few functions need it

        if not importable.may_travel_by_name(fn):
            options.check_can_travel(name)
