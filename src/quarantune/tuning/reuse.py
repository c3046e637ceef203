"""Seeds JAX's compilation cache with the executables that workers have compiled."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from quarantune.functions.binding import jitted_with, split_config
from quarantune.jax_internals import jax_traces
from quarantune.jax_internals.other_processes import (
    compilation_cache_in_memory,
    has_compilation_cache,
    seed_compilation_cache,
)
from quarantune.transport import programs
from quarantune.transport.program_text import ProgramText
from quarantune.values.configs import Config

_MODULE = re.compile(r"^module @([\w.-]+)", re.MULTILINE)


class CompilationSeeds:
    """Executables that workers compiled, until a call has used them."""

    def __init__(self) -> None:
        self._by_key: dict[str, bytes] = {}
        self._by_program: dict[str, bytes] = {}

    def add(self, compiled: dict[str, bytes]) -> None:
        """Seeds JAX's compilation cache with a worker's executable, now or, for lack of a cache, at the next call.

        Args:
            compiled: the cache's contents by JAX's key, or XLA's serialised executable by the program's identity.
        """
        by_program = {key: value for key, value in compiled.items() if key.startswith(programs.PREFIX)}
        by_key = {key: value for key, value in compiled.items() if key not in by_program}
        if by_program and not has_compilation_cache():
            self._by_program |= by_program
        if by_key and not seed_compilation_cache(by_key):
            self._by_key |= by_key

    @contextlib.contextmanager
    def in_use(self, fn: Any, config: Config, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Seeds a compilation cache in memory for one call, if the process has no compilation cache.

        Args:
            fn: the function, jitted or not.
            config: its config.
            args: the call's positional arguments.
            kwargs: the call's keyword arguments.
        """
        if not (self._by_key or self._by_program) or jax_traces.is_tracing():
            yield
            return
        by_key, by_program = self._by_key, self._by_program
        self._by_key, self._by_program = {}, {}
        find = functools.partial(_module_of, fn, config, args, kwargs, by_program)
        with compilation_cache_in_memory(by_key, find_modules=find if by_program else None):
            yield


def _module_of(
    fn: Any, config: Config, args: tuple[Any, ...], kwargs: Mapping[str, Any], executables: Mapping[str, bytes]
) -> dict[str, bytes]:
    """Returns the executable of a call, by the name of the module that JAX compiles for it; empty if unknown.

    JAX's key may differ here: the worker may have compiled it without the device, with one of several devices, or with
    other names for the parts of a class that was sent by value. The program's text shows whether it is the same.
    """
    try:
        _, options = split_config(fn, config)
        jitted, keywords = jitted_with(fn, config)
        traced = jitted.trace(*args, **kwargs, **keywords)
        lowered = traced.lower()
        text = lowered.as_text()
        identity = programs.identity(lowered, text, ProgramText(traced.jaxpr), options)
    except Exception:
        return {}  # the call meets the same error, and reports it
    name = _MODULE.search(text)
    executable = executables.get(identity)
    return {name[1]: executable} if name and executable else {}
