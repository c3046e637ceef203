"""The function that is tuned, with its configs and its author's options; the same for all of its calls."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quarantune import cache
from quarantune.cache import Fingerprint
from quarantune.host.process import lazy
from quarantune.resolve import suitable
from quarantune.resolve.layers import space_of
from quarantune.transport.problem import describe_function
from quarantune.values.codec import JsonObject
from quarantune.values.configs import Config
from quarantune.values.settings import Options
from quarantune.values.space import Space
from quarantune.values.texts import cache_name, is_former


class TunedFunction:
    """A function with its configs and its author's options.

    Attributes:
        fn: the function, jitted or not; configs reach it as keyword arguments.
        configs: the space of configs, or a callable that makes them for a call.
        name: the function's name in the cache.
        signature: its signature.
        static_names: its static parameters; None where it is not jitted.
        options: its author's options.
        tunables: the names that its configs set; empty for a callable that makes configs and has not been called.
        most_configs: how many configs a sweep may try; None for those of its config space.
    """

    most_configs: int | None = None

    def __init__(
        self,
        fn: Callable[..., Any],
        configs: Sequence[Config] | Callable[..., Any],
        *,
        name: str,
        signature: inspect.Signature,
        static_names: frozenset[str] | None,
        options: Options,
        need_defaults: bool = False,
    ) -> None:
        """Describes a function; nothing is read or started.

        Args:
            fn: the function.
            configs: the configs, or a callable that makes them for a call.
            name: the function's name in the cache.
            signature: its signature.
            static_names: its static parameters; None for a function that is not jitted, where every argument without
                an array counts by value.
            options: its author's options.
            need_defaults: whether every tunable must have a default, because the function is also called without it.

        Raises:
            TypeError: an option needs a jitted function, and it is none.
        """
        for option, does in (("time_grad", "differentiates"), ("max_device_memory", "bounds the compiled program of")):
            if getattr(options, option) and static_names is None:
                raise TypeError(
                    f"{name}: {option} {does} the function, which jax.jit must have wrapped for that: put jax.jit on "
                    f"it, or leave {option} out"
                )
        self.fn = fn
        self.configs: Space | Callable[..., Any] = (
            configs if callable(configs) else Space.of(configs, fn_name=name, parameters=signature)
        )
        self.name = name
        self.signature = signature
        self.static_names = static_names
        self.options = options
        self.tunables: frozenset[str] = frozenset() if callable(self.configs) else frozenset(self.configs.names)
        self._need_defaults = need_defaults
        self._fingerprints: dict[bool, Fingerprint] = {}

    @classmethod
    def of(cls, fn: Any, configs: Any, options: Options, *, compiled_by: str = "") -> TunedFunction:
        """Returns a function as its author gives it, checked as far as that is possible without a call.

        Args:
            fn: the function, autotuned or not.
            configs: its configs in any form.
            options: its author's options.
            compiled_by: the function of ours that only compiles configs, for which `fn` must be jitted.

        Raises:
            TypeError: it cannot be called or jitted as it is, or the configs are of no usable type.
            ValueError: the configs are empty or without end, or the function cannot take them.
        """
        fn, signature, static_names = describe_function(fn)
        label = cache_name(fn)
        if compiled_by:
            suitable.check_is_jitted(fn, label, for_what=compiled_by)
        if static_names is not None:
            suitable.check_jit_options(fn, label)
        listed = configs if callable(configs) else Space.of(configs, fn_name=label, parameters=signature)
        name = options.name or label
        function = cls(fn, listed, name=name, signature=signature, static_names=static_names, options=options)
        if isinstance(listed, Space):
            function.check(listed.examples())
        return function

    def with_options(self, options: Options, configs: Sequence[Config] | None = None) -> TunedFunction:
        """Returns the function with other options, and other configs if they are given."""
        return TunedFunction(
            self.fn,
            self.configs if configs is None else configs,
            name=self.name,
            signature=self.signature,
            static_names=self.static_names,
            options=options,
        )

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The function's parameters by name."""
        return self.signature.parameters

    @property
    def is_jitted(self) -> bool:
        """Whether `jax.jit` has wrapped the function."""
        return self.static_names is not None

    @property
    def fingerprint(self) -> Fingerprint:
        """The fingerprint of the function's code and of the options that affect which config wins."""
        kept, version = self._fingerprints, is_former()
        if version not in kept:
            kept[version] = cache.fingerprint(inspect.unwrap(self.fn), options=self.options.deciding())
        return kept[version]

    @functools.cached_property
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
        return {"made_by": cache.fingerprint(self.configs).digest}

    def check(self, configs: Sequence[Config]) -> None:
        """Raises where the function cannot take the keys of a config."""
        signature, need_defaults = self.signature, self._need_defaults
        suitable.check_configs(self.fn, configs, name=self.name, signature=signature, need_defaults=need_defaults)
