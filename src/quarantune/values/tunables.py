"""Checks that a function takes the keys of its configs."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from quarantune.values.config_space import BY_KEYWORD, examples_of
from quarantune.values.config_values import COMPILER_OPTIONS
from quarantune.values.texts import did_you_mean, shown
from quarantune.values.trial import Config


def check_parameters(
    configs: Sequence[Config],
    *,
    parameters: inspect.Signature,
    static_names: frozenset[str],
    fn_name: str,
    need_defaults: bool = True,
) -> None:
    """Checks that every tunable is a static keyword parameter with a default.

    Args:
        configs: the configs that `expand` returned.
        parameters: the signature of the function being tuned.
        static_names: the parameters that `jax.jit` treats as static where they are given by keyword.
        fn_name: the function's name, for error messages.
        need_defaults: whether the function is also called without a config, as a decorated one is.

    Raises:
        TypeError: a key is no parameter that can be passed by keyword, or has no default.
        ValueError: a key is not static.
    """
    tunable = {name: item for name, item in parameters.parameters.items() if item.kind in BY_KEYWORD}
    examples = examples_of(configs)
    if COMPILER_OPTIONS not in parameters.parameters:
        examples = {key: example for key, example in examples.items() if key != COMPILER_OPTIONS}
    for key, example in examples.items():
        if key in parameters.parameters and key not in tunable:
            raise TypeError(
                f"{fn_name}: config key {key!r} cannot be passed by keyword; make it an ordinary "
                f"parameter, as in `def {fn_name}(..., *, {key}={shown(example)})`."
            )
        if key not in tunable:
            raise TypeError(
                f"{fn_name}: config key {key!r} is no parameter of {fn_name}{parameters}.{did_you_mean(key, tunable)} "
                f"Add it to the function, as in `{key}={shown(example)}`, or take it out of the configs."
            )
    moving = [key for key in examples if key not in static_names]
    if moving:
        names = sorted(static_names | examples.keys(), key=list(parameters.parameters).index)
        raise ValueError(
            f"{fn_name}: config keys {moving} are not static, so jit would trace them; "
            f"decorate with `@jax.jit(static_argnames={names})`."
        )
    required = [key for key in examples if tunable[key].default is inspect.Parameter.empty]
    if required and need_defaults:
        defaults = ", ".join(f"{key}={shown(examples[key])}" for key in required)
        raise TypeError(
            f"{fn_name}: config keys {required} have no default, so {fn_name} cannot be called without them; "
            f"give them one, as in `def {fn_name}(..., {defaults})`."
        )


def check_keywords(configs: Sequence[Config], *, parameters: inspect.Signature, fn_name: str) -> None:
    """Checks that a function which is not jitted takes every tunable as a keyword argument.

    Args:
        configs: the configs that `expand` returned.
        parameters: the signature of the function being tuned.
        fn_name: the function's name, for error messages.

    Raises:
        TypeError: a key is no parameter that can be passed by keyword.
    """
    items = parameters.parameters.values()
    if any(item.kind is inspect.Parameter.VAR_KEYWORD for item in items):
        return
    by_keyword = {item.name for item in items if item.kind in BY_KEYWORD}
    for key in examples_of(configs):
        if key == COMPILER_OPTIONS and key not in by_keyword:
            raise TypeError(
                f"{fn_name}: configs have {COMPILER_OPTIONS}, and {fn_name} is not jitted: put jax.jit on it, or "
                f"make {COMPILER_OPTIONS!r} a parameter of {fn_name}, to do with it what it means there."
            )
        if key not in by_keyword:
            raise TypeError(
                f"{fn_name}: config key {key!r} is no parameter of {fn_name}{parameters} that can be passed by keyword."
                f"{did_you_mean(key, by_keyword)} Add it to the function, or take it out of the configs."
            )
