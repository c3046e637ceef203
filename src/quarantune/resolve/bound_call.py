"""One call of a tuned function, bound once: its arguments, and the answers of its author's functions about it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from quarantune.host import locks
from quarantune.resolve import suitable
from quarantune.resolve.entries import find_config
from quarantune.resolve.tuned_function import TunedFunction
from quarantune.transport import binding
from quarantune.transport.call import Arguments
from quarantune.transport.problem import as_structs, fitted, is_array, named
from quarantune.values import config_space
from quarantune.values.config_values import COMPILER_OPTIONS, NO_OPTIONS, freeze
from quarantune.values.grid import Grid
from quarantune.values.trial import Config


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
        self._pruned: dict[int, bool] = {}

    @property
    def name(self) -> str:
        """The function's name in the cache."""
        return self.function.name

    @locks.lazy
    def is_symbolic(self) -> bool:
        """Whether the shape of an argument is symbolic, as in `jax.export`."""
        return suitable.has_symbolic_shapes(self.args, self.kwargs)

    @property
    def has_no_key(self) -> bool:
        """Whether nothing can be remembered for the call, because its shapes are symbolic."""
        return self.function.options.key_fn is None and self.is_symbolic

    @locks.lazy
    def statics(self) -> frozenset[str]:
        """The parameters that count by value."""
        if self.function.static_names is not None:
            return self.function.static_names
        # The tunables are left out of the call, and need not have a default.
        bound = self.function.signature.bind_partial(*self.args, **self.kwargs)
        bound.apply_defaults()
        return frozenset(name for name, value in named(bound) if not any(map(is_array, jax.tree.leaves(value))))

    @locks.lazy
    def optional(self) -> frozenset[str]:
        """The static arguments that `key_fn` leaves out, which count only where they can be described."""
        key_fn = self.function.options.key_fn
        if key_fn is None or self.fitted(key_fn, self.args, self.kwargs) == (self.args, self.kwargs):
            return frozenset()
        return self.statics - inspect.signature(key_fn).parameters.keys()

    @locks.lazy
    def configs(self) -> Sequence[Config]:
        """The configs to try, with those that `prune_fn` drops."""
        function = self.function
        if not callable(function.configs):
            return function.configs
        struct_args, struct_kwargs = self.fitted(function.configs, *as_structs(self.args, self.kwargs))
        configs = config_space.expand_callable(
            function.configs, struct_args, struct_kwargs, fn_name=function.name, parameters=function.signature
        )
        function.check(configs)
        return configs

    @locks.lazy
    def pruned(self) -> frozenset[int]:
        """The indices of the configs that `prune_fn` drops, which is called for all of them."""
        if self.function.options.prune_fn is None:
            return frozenset()
        return frozenset(filter(self.is_pruned, range(len(self.configs))))

    def is_pruned(self, index: int) -> bool:
        """Returns whether `prune_fn` drops the config at an index."""
        if self.function.options.prune_fn is None:
            return False
        if index not in self._pruned:
            self._pruned[index] = not self.keeps(self.configs[index])
        return self._pruned[index]

    def keeps(self, config: Config) -> bool:
        """Returns whether `prune_fn` accepts a config, or there is no `prune_fn`."""
        return self.function.options.prune_fn is None or self._keep(dict(config))

    @locks.lazy
    def _keep(self) -> Callable[[Config], bool]:
        prune_fn = self.function.options.prune_fn
        assert prune_fn is not None
        args, kwargs = self.fitted(functools.partial(prune_fn, {}), *as_structs(self.args, self.kwargs))
        return lambda config: bool(prune_fn(config, *args, **kwargs))

    @property
    def tunables(self) -> frozenset[str]:
        """The names that the configs set."""
        if not self.function.tunables:  # a callable makes the configs, and this is its first call
            self.function.tunables = frozenset(self.configs[0])
        return self.function.tunables

    @property
    def given(self) -> frozenset[str]:
        """The tunable parameters that the caller sets by hand.

        Raises:
            TypeError: the function does not take such arguments.
        """
        if callable(self.function.configs) and self.has_no_key:
            return frozenset()  # it runs with its defaults anyway, and configs for symbolic shapes could not be made
        return self.tunables.intersection(self.function.signature.bind(*self.args, **self.kwargs).arguments)

    def other_configs(self) -> list[Config]:
        """Returns configs without the tunables that the caller sets: those that agree with it, or all if none does."""
        arguments = self.function.signature.bind(*self.args, **self.kwargs).arguments
        given = {name: freeze(arguments[name]) for name in self.given}
        agreeing = [config for config in self.configs if config == {**config, **given}] or self.configs
        kept = [config for config in agreeing if self.keeps({**config, **given})]
        return [{name: value for name, value in config.items() if name not in given} for config in kept]

    def find(self, raw: Any) -> Config | None:
        """Returns the config that is equal to an encoded one: of the configs, or the function's own defaults."""
        found = find_config(raw, self.configs)
        return found if found is not None or self.untuned is None else find_config(raw, [self.defaults])

    @locks.lazy
    def defaults(self) -> Config:
        """The function's own defaults as a config; an empty one, which sets nothing, where JSON cannot hold them."""
        parameters = self.function.parameters
        defaults = {name: parameters[name].default for name in self.configs[0] if name in parameters}
        try:
            return config_space.expand([defaults], fn_name=self.name, parameters=None)[0]
        except (TypeError, ValueError):
            return {}

    @locks.lazy
    def default_index(self) -> int | None:
        """The index of the config that equals the function's own defaults, or None."""
        parameters = self.function.parameters
        defaults = {name: freeze(parameters[name].default) for name in self.configs[0] if name in parameters}
        if COMPILER_OPTIONS in self.configs[0]:
            defaults.setdefault(COMPILER_OPTIONS, NO_OPTIONS)
        if isinstance(self.configs, Grid):
            index = self.configs.index_of(defaults)
            return index if index is not None and _same(self.configs[index], defaults) else None
        return next((index for index, config in enumerate(self.configs) if _same(config, defaults)), None)

    @property
    def untuned(self) -> Config | None:
        """The config that sets nothing, so that the function runs with its own defaults; None where it cannot."""
        keywords, _ = binding.split(self.function.fn, self.configs[0])
        tunables = [self.function.parameters.get(name) for name in keywords]
        if any(tunable is None or tunable.default is inspect.Parameter.empty for tunable in tunables):
            return None
        return None if self.default_index is not None and self.is_pruned(self.default_index) else {}

    def fitted(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        """Returns the call as one of the author's functions takes it, which may leave static parameters out."""
        return fitted(function, self.function.signature, self.statics, args, kwargs)


def _same(config: Config, other: Mapping[str, Any]) -> bool:
    """Returns whether two configs are equal; 1 and True differ."""
    return config == other and [*map(type, config.values())] == [type(other[name]) for name in config]
