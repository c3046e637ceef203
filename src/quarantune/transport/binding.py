"""Binds a config to its function, and tells whether the function can take it.

Values are keyword arguments, and compiler options are options of the jit.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quarantune import jax_internals
from quarantune.host.process import warn
from quarantune.values.configs import COMPILER_OPTIONS as KEY
from quarantune.values.configs import NO_OPTIONS, Config, check_parameters
from quarantune.values.texts import shown


def split(fn: Callable[..., Any], config: Config) -> tuple[Config, Mapping[str, Any]]:
    """Returns a config's keyword arguments and its compiler options.

    Args:
        fn: the function. If it is not jitted, all values of the config are keyword arguments.
        config: the config.
    """
    if KEY not in config or not jax_internals.is_jitted(fn) or KEY in inspect.signature(fn).parameters:
        return config, NO_OPTIONS
    keywords = {name: value for name, value in config.items() if name != KEY}
    return keywords, config[KEY]


def applied(fn: Any, config: Config) -> tuple[Any, Config]:
    """Returns the function to call for a config, with its compiler options, and the keyword arguments for the call.

    Args:
        fn: the function. If the config has compiler options, it is jitted again, once for the same options.
        config: the config.
    """
    keywords, options = split(fn, config)
    return (jax_internals.with_compiler_options(fn, options) if options else fn), keywords


def bind(fn: Callable[..., Any], config: Config) -> Callable[..., Any]:
    """Returns a function that takes the arguments of a call and runs with a config.

    Args:
        fn: the function, jitted or not.
        config: the config. Inside a trace its compiler options are left out with a warning: JAX
            refuses them for all but the outermost jit.
    """
    jitted, keywords = applied(fn, config)
    return functools.partial(fn, **keywords) if jitted is fn else _WithOptions(fn, jitted, keywords, config[KEY])


def function_of(bound: Callable[..., Any]) -> Any:
    """Returns the function inside a bound function or another wrapper.

    Args:
        bound: a function from `bind`, or any wrapper.
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
        check(fn, configs, name=name)


def check(fn: Callable[..., Any], configs: Sequence[Config], *, name: str) -> None:
    """Checks the compiler options of configs, and that the function can be jitted with them.

    Args:
        fn: a jitted function.
        configs: its configs.
        name: the function's name, for error messages.

    Raises:
        TypeError: the options are no dict of plain values, or the function was jitted with options tied to devices.
    """
    if KEY in inspect.signature(fn).parameters:
        return
    given = [config[KEY] for config in configs if KEY in config]
    for options in given:
        if not isinstance(options, Mapping):
            raise TypeError(
                f"{name}: {KEY} is {shown(options)}; give a dict of XLA's options, as in "
                f"{{{KEY!r}: {{'xla_cpu_enable_fast_math': True}}}}, or make {KEY!r} a parameter of the function."
            )
        for option, value in options.items():
            if not isinstance(value, (bool, int, float, str)):
                raise TypeError(
                    f"{name}: {KEY}[{option!r}] is {shown(value)}; XLA's options are booleans, numbers and strings."
                )
    bound = jax_internals.jit_options(fn).cannot_travel
    if bound and any(given):
        raise TypeError(
            f"{name}: its configs have {KEY}, for which it has to be jitted again, and jax.jit was given "
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
            f"{name}: its config {self.keywords} runs without its {KEY} inside a trace, because JAX takes them at the "
            f"outermost jit alone: give them to that one, jax.jit(..., {KEY}={options})"
        )
        return self._traced(*args, **kwargs)

    def __reduce__(self) -> Any:
        """Pickles the function and the config."""
        return bind, (self.func, {**self.keywords, KEY: self._options})


@functools.cache
def _warn_once(message: str) -> None:
    warn(message, RuntimeWarning)
