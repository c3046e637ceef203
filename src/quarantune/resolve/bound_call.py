"""One call of a tuned function, bound once: its arguments, and the answers of its author's functions about it."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax

from quarantune.host.process import lazy
from quarantune.resolve import layers, suitable
from quarantune.resolve.layers import space_of
from quarantune.resolve.tuned_function import TunedFunction
from quarantune.transport import binding
from quarantune.transport.problem import Arguments, as_structs, fitted, is_array, named
from quarantune.values import settings as environment
from quarantune.values.codec import JsonObject
from quarantune.values.configs import (
    COMPILER_OPTIONS,
    NO_OPTIONS,
    Config,
    checked_config,
    configs_made_by,
    freeze,
    has_tag,
    text_of,
)
from quarantune.values.space import Space


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
        """Whether the shape of an argument is symbolic, as in `jax.export`."""
        return suitable.has_symbolic_shapes(self.args, self.kwargs)

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
        return self.statics - inspect.signature(key_fn).parameters.keys()

    @lazy
    def configs(self) -> Space:
        """The configs to try, with those that `prune_fn` drops; those of a callable are read as far as needed."""
        function = self.function
        space = function.configs
        if callable(space):
            struct_args, struct_kwargs = self.fitted(space, *as_structs(self.args, self.kwargs))
            made = configs_made_by(space, struct_args, struct_kwargs, fn_name=function.name)
            space = Space(made, fn_name=function.name, parameters=function.signature, reads_all=False)
            function.check(space.examples())
        return space.where(None if function.options.prune_fn is None else self.keeps)

    @property
    def has_unread_configs(self) -> bool:
        """Whether a callable makes the configs, and the key of the call alone decides which.

        Results of such a call are found without the configs: the code of the callable stands for them.
        """
        options = self.function.options
        return callable(self.function.configs) and options.key_fn is None and not options.partial

    @lazy
    def space(self) -> JsonObject:
        """Values that distinguish the config space of the call from others."""
        if self.has_unread_configs:
            return self.function.maker
        return self.function.listed_space or space_of(self.configs)

    def find(self, raw: Any) -> Config | None:
        """Returns the config that is equal to an encoded one: of the configs, or the function's own defaults.

        One that lacks options for XLA is equal to one that has none. Where the configs are not read, a config that the
        function can take is taken for one of them.
        """
        if not isinstance(raw, Mapping):
            return None
        if not self.has_unread_configs or any(map(has_tag, raw.values())):
            if COMPILER_OPTIONS in self.configs.names:
                raw = {COMPILER_OPTIONS: NO_OPTIONS, **raw}
            self.configs.whole()
            index = self.configs.find(raw)
            if index is not None:
                return self.configs[index]
            return self.defaults if self.untuned is not None and text_of(raw) == text_of(self.defaults) else None
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
            self.function.tunables = self._saved_tunables() or frozenset(self.configs.names)
        return self.function.tunables

    def _saved_tunables(self) -> frozenset[str]:
        """Returns the names that the configs set, as saved results tell without the configs."""
        settings = environment.current()
        if not self.has_unread_configs or settings.disable_cache:
            return frozenset()
        for layer in layers.open_layers(settings, self.function.options.tables):
            for found in layers.entries_of(layer, self.name):
                if found.entry.get("space") == self.space and (config := self.find(found.entry.get("config"))):
                    return frozenset(config)
        return frozenset()

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

    def other_configs(self) -> list[Config]:
        """Returns configs without the tunables that the caller sets: those that agree with it, or all if none does."""
        arguments = self.function.signature.bind(*self.args, **self.kwargs).arguments
        given = {name: freeze(arguments[name]) for name in self.given}
        listed = [self.configs[index] for index in self.configs.listed()]
        agreeing = [config for config in listed if config == {**config, **given}] or listed
        kept = [config for config in agreeing if self.keeps({**config, **given})]
        return [{name: value for name, value in config.items() if name not in given} for config in kept]

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
        return index if index is not None and _same(self.configs[index], defaults) else None

    @property
    def untuned(self) -> Config | None:
        """The config that sets nothing, so that the function runs with its own defaults; None where it cannot."""
        keywords, _ = binding.split(self.function.fn, self.configs[0])
        tunables = [self.function.parameters.get(name) for name in keywords]
        if any(tunable is None or tunable.default is inspect.Parameter.empty for tunable in tunables):
            return None
        default = self.default_index
        return {} if default is None or self.configs.keeps(default) else None

    def fitted(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        """Returns the call as one of the author's functions takes it, which may leave static parameters out."""
        return fitted(function, self.function.signature, self.statics, args, kwargs)


def _same(config: Config, other: Mapping[str, Any]) -> bool:
    """Returns whether two configs are equal; 1 and True differ."""
    return config == other and [*map(type, config.values())] == [type(other[name]) for name in config]
