"""Executables of workers, with which JAX's compilation cache is seeded so that this process need not compile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from quarantune import jax_internals


class CompilationSeeds:
    """Executables that workers compiled, until a call has used them."""

    def __init__(self) -> None:
        self._waiting: dict[str, bytes] = {}

    def add(self, compiled: dict[str, bytes]) -> None:
        """Seeds JAX's compilation cache with a worker's executable, now or, without such a cache, with the next call.

        Args:
            compiled: the contents by JAX's own key.
        """
        if compiled and not jax_internals.seed_compilation_cache(compiled):
            self._waiting |= compiled

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Seeds a compilation cache in memory for one call, where the process has none of its own."""
        if not self._waiting or jax_internals.is_tracing():
            yield
            return
        with jax_internals.compilation_cache_in_memory(self._waiting):
            self._waiting = {}
            yield
