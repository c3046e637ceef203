"""How a config reaches a function: reads signatures, binds calls to parameters, and binds configs to functions.

The values of a config are keyword arguments. Its compiler options are options of the jit.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import re
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from quarantune.host.frames import warn_once
from quarantune.jax_internals import jax_functions, jax_traces
from quarantune.values.configs import COMPILER_OPTIONS as OPTIONS
from quarantune.values.configs import NO_OPTIONS, Config
from quarantune.values.texts import shown

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a call: the positional ones, and the keyword arguments by name."""

_EMPTY = inspect.Parameter.empty
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def arguments_of(bound: inspect.BoundArguments) -> dict[str, Any]:
    """Returns the arguments of a bound call by name, with defaults for missing arguments."""
    complete = inspect.BoundArguments(bound.signature, dict(bound.arguments))
    complete.apply_defaults()
    return dict(named(complete))


def lacking(bound: inspect.BoundArguments) -> list[str]:
    """Returns the parameters without a default that a call leaves out."""
    required = [it for it in bound.signature.parameters.values() if it.default is _EMPTY and it.kind not in _VARIADIC]
    return [it.name for it in required if it.name not in bound.arguments]


def check_complete(bound: inspect.BoundArguments, tunables: Collection[str] = ()) -> None:
    """Raises Python's error if a call lacks an argument, unless it has a default or is tunable."""
    lacks = lacking(bound)
    if any(name not in tunables for name in lacks):
        bound.signature.bind(*bound.args, **bound.kwargs, **{name: None for name in lacks if name in tunables})


def describe_function(fn: Callable[..., Any]) -> tuple[Callable[..., Any], inspect.Signature, frozenset[str] | None]:
    """Returns the function to tune, its signature, and its static parameters (None if it is not jitted).

    Raises:
        TypeError: `fn` is not callable, or a method of an object that is jitted.
    """
    if not callable(fn):
        raise TypeError(f"{fn!r} cannot be called: give a function")
    if any(map(jax_functions.is_jitted, _functions_in(fn))):
        raise TypeError(
            f"{getattr(fn, '__qualname__', fn)!r} is a jitted method of an object: give the function of its class, and "
            f"the object as the first argument of each call"
        )
    inner = getattr(fn, "__wrapped__", None)
    if inner is not None and not jax_functions.is_jitted(fn) and jax_functions.is_jitted(inner):
        fn = inner  # `fn` is an autotuned function, and the caller tunes it with other configs
    static_names = jax_functions.jit_options(fn).static_names if jax_functions.is_jitted(fn) else None
    # The function inside a method's wrapper also takes the object.
    return fn, signature_of(fn if isinstance(fn, types.MethodType) else inspect.unwrap(fn)), static_names


def _functions_in(method: Any) -> list[Any]:
    """Returns the function of a bound method, tuned or not, and the function inside that; nothing for a function."""
    function = getattr(method, "__func__", None)
    return [] if function is None else [function, getattr(function, "__wrapped__", None)]


def signature_of(fn: Any) -> inspect.Signature:
    """Returns the signature of any callable; a built-in without a signature takes all arguments."""
    try:
        return inspect.signature(fn)
    except Exception:  # Python compares the callable, and its `__eq__` may return or raise anything
        return inspect.signature(fn.__call__)


def named(bound: inspect.BoundArguments) -> Iterator[tuple[str, Any]]:
    """Yields the arguments by name. A name in `**kwargs` that equals a parameter's name gets the prefix `**`."""
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
    """Returns the arguments of a call for another function, which may have other static parameters.

    Args:
        function: `key_fn`, `prune_fn` or a function that makes configs.
        signature: the signature of the tuned function.
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


# --- a function with a config ---


def split_config(fn: Callable[..., Any], config: Config) -> tuple[Config, Mapping[str, Any]]:
    """Returns a config's keyword arguments and its compiler options.

    Args:
        fn: the function. If it is not jitted, all values of the config are keyword arguments.
        config: the config.
    """
    if OPTIONS not in config or not jax_functions.is_jitted(fn) or OPTIONS in inspect.signature(fn).parameters:
        return config, NO_OPTIONS
    keywords = {name: value for name, value in config.items() if name != OPTIONS}
    return keywords, config[OPTIONS]


def jitted_with(fn: Any, config: Config) -> tuple[Any, Config]:
    """Returns the function to call for a config, with its compiler options, and the keyword arguments for the call.

    Args:
        fn: the function. If the config has compiler options, this jits it again, once for equal options.
        config: the config.
    """
    keywords, options = split_config(fn, config)
    return (jax_functions.with_compiler_options(fn, options) if options else fn), keywords


def bind_config(fn: Callable[..., Any], config: Config, *, is_exact: bool = False) -> Callable[..., Any]:
    """Returns a function that takes the arguments of a call and runs with a config.

    Args:
        fn: the function, jitted or not.
        config: the config. Inside a trace the function warns and ignores its compiler options, because JAX accepts
            them only at the outermost jit.
        is_exact: whether the function runs with its defaults where the options would be ignored, because the bits of
            the config without its options are unknown.
    """
    jitted, keywords = jitted_with(fn, config)
    return functools.partial(fn, **keywords) if jitted is fn else _WithOptions(fn, config, is_exact=is_exact)


def function_inside(bound: Callable[..., Any]) -> Any:
    """Returns the function inside a bound function or another wrapper.

    Args:
        bound: a function from `bind_config`, or any wrapper.
    """
    if isinstance(bound, (functools.partial, _WithOptions)):
        return bound.func
    return getattr(bound, "__wrapped__", bound)


def check_compiler_options(fn: Callable[..., Any], configs: Sequence[Config], *, name: str) -> None:
    """Raises if configs have invalid compiler options, or options that the function cannot be jitted with.

    Args:
        fn: a jitted function.
        configs: its configs.
        name: the function's name, for error messages.

    Raises:
        TypeError: The options are not a dict of plain values, or the function's own jit has options tied to devices.
    """
    if OPTIONS in inspect.signature(fn).parameters:
        return
    given = [config[OPTIONS] for config in configs if OPTIONS in config]
    for options in given:
        if not isinstance(options, Mapping):
            raise TypeError(
                f"{name}: {OPTIONS} is {shown(options)}; give a dict of XLA's options, such as {{{OPTIONS!r}: "
                f"{{'xla_cpu_enable_fast_math': True}}}}, or make {OPTIONS!r} a parameter of the function."
            )
        for option, value in options.items():
            if not isinstance(value, (bool, int, float, str)):
                raise TypeError(
                    f"{name}: {OPTIONS}[{option!r}] is {shown(value)}; XLA's options are booleans, numbers and strings."
                )
    bound = jax_functions.jit_options(fn).cannot_travel
    if bound and any(given):
        raise TypeError(
            f"{name}: its configs have {OPTIONS}, so it must be jitted again, and jax.jit was given "
            f"{' and '.join(bound)}, which would be lost: leave one or the other out."
        )


class _WithOptions:
    """A jitted function with a config that has compiler options.

    Attributes:
        func: the original function, like `functools.partial.func`.
        keywords: its keyword arguments from the config, like `functools.partial.keywords`.
    """

    def __init__(self, fn: Callable[..., Any], config: Config, *, is_exact: bool) -> None:
        self.func = fn
        self._config = config
        self._is_exact = is_exact
        jitted, self.keywords = jitted_with(fn, config)
        self._compiled = functools.partial(jitted, **self.keywords)
        self._traced = fn if is_exact else functools.partial(fn, **self.keywords)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function, compiled with the options; inside a trace without them."""
        if not jax_traces.is_tracing():
            return self._compiled(*args, **kwargs)
        name, options = getattr(self.func, "__qualname__", repr(self.func)), dict(self._config[OPTIONS])
        runs = f"its config {self.keywords} runs without its {OPTIONS} inside a trace"
        remedy = f"give them to that jit, jax.jit(..., {OPTIONS}={options})"
        if self._is_exact:
            runs = (
                f"its defaults run inside a trace in place of {self.keywords}, whose bits hold with its {OPTIONS} only"
            )
            remedy = f"list configs without {OPTIONS}, or call {name} outside of jax.jit"
        warn_once(f"{name}: {runs}, because JAX accepts them only at the outermost jit: {remedy}", RuntimeWarning)
        return self._traced(*args, **kwargs)

    def __reduce__(self) -> Any:
        """Pickles the function and the config."""
        return functools.partial(bind_config, is_exact=self._is_exact), (self.func, self._config)


# --- configs that contextual tuning assigns ---

assignment_in_force: contextvars.ContextVar[Any] = contextvars.ContextVar("assignment_in_force", default=None)
"""The assignment of configs to kernels (`transport.assignment`) in force in a thread, if any."""
_NUMBER = re.compile(r" #\d+$")
_kernels: dict[str, weakref.WeakSet[Any]] = {}


def register_kernel(kernel: Any) -> None:
    """Registers an autotuned function under its name."""
    _kernels.setdefault(kernel.name, weakref.WeakSet()).add(kernel)


def kernels(name: str) -> Sequence[Any]:
    """Returns the autotuned functions of a name; one factory may make several."""
    return list(_kernels.get(_NUMBER.sub("", name), ()))
