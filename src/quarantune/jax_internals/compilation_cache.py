"""JAX's persistent compilation cache: held in memory for a while, and seeded with programs."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from quarantune.host import locks


@functools.cache
def _memory_cache_type() -> type[Any]:
    """Returns a persistent compilation cache that lies in memory; JAX's own interface to one is private."""
    import pathlib

    from jax._src.compilation_cache_interface import CacheInterface

    class MemoryCache(CacheInterface):
        """Compiled programs by JAX's key for them."""

        _path = pathlib.Path("memory")

        def __init__(self, programs: Mapping[str, bytes]) -> None:
            self.programs = dict(programs)
            self.used: set[str] = set()

        def get(self, key: str) -> bytes | None:
            found = self.programs.get(key)
            if found is not None:
                self.used.add(key)
            return found

        def put(self, key: str, value: bytes) -> None:
            self.programs[key] = value

    return MemoryCache


class _Swapped:
    """What stands in for JAX's compilation cache, and what was there before; shared by the blocks that overlap."""

    def __init__(self) -> None:
        self.lock = locks.new()
        self.blocks = 0
        self.cache: Any = None
        self.before: dict[str, Any] = {}
        self.options_before: dict[str, Any] = {}


_swapped = _Swapped()


def _restore_in_fork() -> None:
    """Undoes, in a fork, what a block that was open in another thread will not undo there."""
    if _swapped.blocks:
        _swapped.blocks = 0
        _restore_compilation_cache()


os.register_at_fork(after_in_child=_restore_in_fork)


_CACHE_OPTIONS: dict[str, Any] = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


@contextlib.contextmanager
def compilation_cache_in_memory(programs: Mapping[str, bytes], *, named: str | None = None) -> Iterator[Any]:
    """Has JAX look for compiled programs in memory, and leave new ones there, while the block runs.

    JAX has public means to put its persistent cache into a directory, and none to hand it one program: files would have
    to be written, and would stay behind when a worker is killed. What JAX had before is restored with the last of the
    blocks that overlap, in whatever threads.

    Args:
        programs: compiled programs by JAX's key.
        named: the directory that JAX is to believe its cache is in, as some versions make its name part of the key;
            None leaves it as it is. Nothing is read or written there.

    Yields:
        The cache: `programs` that it holds, and the keys that were `used`.
    """
    from jax._src import compilation_cache

    names = ("_cache", "_cache_initialized", "_cache_checked", "_cache_used")
    with _swapped.lock:
        if not _swapped.blocks:
            _swapped.before = {name: getattr(compilation_cache, name) for name in names}
            options = _CACHE_OPTIONS if named is None else {**_CACHE_OPTIONS, "jax_compilation_cache_dir": named}
            _swapped.options_before = {name: jax.config.values[name] for name in options}
            _swapped.cache = _memory_cache_type()({})
            for name, value in zip(names, (_swapped.cache, True, True, True), strict=True):
                setattr(compilation_cache, name, value)
            for name, value in options.items():
                jax.config.update(name, value)
        _swapped.blocks += 1
        cache = _swapped.cache
        cache.programs.update(programs)
    try:
        yield cache
    finally:
        with _swapped.lock:
            if _swapped.cache is cache:  # not in a fork, where it is undone already
                _swapped.blocks -= 1
                if not _swapped.blocks:
                    _restore_compilation_cache()


def _restore_compilation_cache() -> None:
    from jax._src import compilation_cache

    for name, value in _swapped.before.items():
        setattr(compilation_cache, name, value)
    for name, value in _swapped.options_before.items():
        jax.config.update(name, value)
    _swapped.cache = None


def keep_compiled(programs: Mapping[str, bytes]) -> bool:
    """Puts compiled programs where this process's JAX looks for them.

    Args:
        programs: compiled programs by JAX's key.

    Returns:
        Whether there is such a place, and it takes them: a persistent compilation cache that the caller has
        configured.
    """
    from jax._src import compilation_cache

    if not jax.config.values["jax_compilation_cache_dir"] or not jax.config.values["jax_enable_compilation_cache"]:
        return False
    try:
        cache = compilation_cache._get_cache(jax.local_devices()[0].client)
        if cache is None:
            return False
        for key, value in programs.items():
            cache.put(key, value)
    except OSError as error:  # a full or read-only disk, of which JAX itself only warns
        logging.getLogger("quarantune").info("JAX's compilation cache cannot be written: %s", error)
        return False
    return True
