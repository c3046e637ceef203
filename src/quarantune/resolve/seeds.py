"""Seeds JAX's compilation cache with the executables that workers have compiled."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from quarantune import jax_internals
from quarantune.jax_internals.other_processes import (
    compilation_cache_in_memory,
    has_compilation_cache,
    seed_compilation_cache,
)
from quarantune.transport import programs
from quarantune.transport.problem import jitted_with, split_config
from quarantune.values.configs import Config

_MODULE = re.compile(r"^module @([\w.-]+)", re.MULTILINE)


class CompilationSeeds:
    """Executables that workers compiled, until a call has used them."""

    def __init__(self) -> None:
        self._unused: list[tuple[dict[str, bytes], dict[str, bytes]]] = []

    def add(self, compiled: dict[str, bytes]) -> None:
        """Seeds JAX's compilation cache with a worker's executable, now or, without such a cache, with the next call.

        Args:
            compiled: the contents by JAX's own key; or, by the program's identity, the executable as serialised by XLA.
        """
        by_program = {key: value for key, value in compiled.items() if key.startswith(programs.PREFIX)}
        by_key = {key: value for key, value in compiled.items() if key not in by_program}
        if has_compilation_cache():
            by_program = {}
        if by_key and seed_compilation_cache(by_key):
            by_key = {}
        if by_key or by_program:
            self._unused.append((by_key, by_program))

    @contextlib.contextmanager
    def in_use(self, fn: Any, config: Config, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Seeds a compilation cache in memory for one call, where the process has none of its own.

        Args:
            fn: the function, jitted or not.
            config: its config.
            args: the call's positional arguments.
            kwargs: the call's keyword arguments.
        """
        if not self._unused or jax_internals.is_tracing():
            yield
            return
        unused, self._unused = self._unused, []
        # A process with one device has the worker's key for a program that was compiled with the device.
        has_one = jax.local_device_count() == 1
        by_key = {key: value for keys, _ in unused for key, value in keys.items()}
        by_program = {key: value for keys, whole in unused if not (keys and has_one) for key, value in whole.items()}
        modules = _module_of(fn, config, args, kwargs, by_program) if by_program else {}
        with compilation_cache_in_memory(by_key, modules=modules):
            yield


def _module_of(
    fn: Any, config: Config, args: tuple[Any, ...], kwargs: Mapping[str, Any], executables: Mapping[str, bytes]
) -> dict[str, bytes]:
    """Returns the executable of a call, by the name of the module that JAX compiles for it; nothing if there is none.

    A worker without the device compiled it, or with one of several, so that JAX has another key for it here. The
    program's text tells whether it is the same.
    """
    from quarantune.worker.judging import structure_of  # calls that find their result do not need it

    try:
        _, options = split_config(fn, config)
        jitted, keywords = jitted_with(fn, config)
        lowered = jitted.trace(*args, **kwargs, **keywords).lower()
        text = lowered.as_text()
        identity = programs.identity(lowered, text, options, structure_of)
    except Exception:
        return {}  # the call meets the same error, and reports it
    name = _MODULE.search(text)
    executable = executables.get(identity or "")
    return {name[1]: executable} if name and executable else {}
