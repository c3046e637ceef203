"""Functions that JAX has wrapped: options of `jax.jit`, and rules of `jax.custom_vjp` and its siblings."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

# Batching and partitioning are imported for their side effect: they add themselves to the classes with custom rules.
from jax._src import custom_api_util, custom_batching, custom_partitioning  # noqa: F401


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
    """Returns whether `fn` is a result of `jax.jit`, or has the same interface."""
    return isinstance(fn, jax.stages.Wrapped)


pjit_type: Any = type(jax.jit(lambda: None))
"""The class of the objects that `jax.jit` returns; making one of them initialises nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class JitOptions:
    """The options of a function's `jax.jit`, as values that pickle can carry.

    Attributes:
        static_names: the names of all static parameters, including those given by position.
        static_argnums: positions of static parameters, resolved by jit.
        static_argnames: names of static parameters, resolved by jit.
        donate_argnums: positions of donated parameters.
        donate_argnames: names of donated parameters.
        keep_unused: the option of `jax.jit`.
        inline: the option of `jax.jit`.
        compiler_options: the option of `jax.jit`, as pairs.
        cannot_travel: the names of the given options that are tied to devices of this process.
        takes_no_keywords: whether the function refuses keyword arguments, because it has `in_shardings`.
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
        options: the options; they override the options of its `jax.jit`.
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
    """Returns the custom rules of a function, such as its derivative, by name; empty if it has none.

    Private because JAX has no public way to read the rules back. A rule is a callable, or a dict of plain values for
    a sharding rule in text form. `fun` is the function itself, if `__wrapped__` does not lead to it.

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
