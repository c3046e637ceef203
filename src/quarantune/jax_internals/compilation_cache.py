"""JAX's persistent compilation cache: replaced by one in memory for a while, and seeded with compiled programs."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax._src import compilation_cache

from quarantune.host import locks


@functools.cache
def _memory_cache_type() -> type[Any]:
    """Returns the class of compilation caches in memory.

    Private because the interface of JAX's persistent compilation cache is.
    """
    import pathlib

    from jax._src.compilation_cache_interface import CacheInterface

    class MemoryCache(CacheInterface):
        """Compiled programs by JAX's key."""

        _path = pathlib.Path("memory")

        def __init__(self, programs: Mapping[str, bytes]) -> None:
            self.programs = dict(programs)
            self.modules: dict[str, bytes] = {}
            self.used: set[str] = set()

        def get(self, key: str) -> bytes | None:
            found = self.programs.get(key) or self.modules.pop(key.rpartition("-")[0], None)
            if found is not None:
                self.used.add(key)
            return found

        def put(self, key: str, value: bytes) -> None:
            self.programs[key] = value

    return MemoryCache


class _MemoryCacheBlocks:
    """The cache in use and the state of JAX before it, shared by overlapping `compilation_cache_in_memory` blocks."""

    def __init__(self) -> None:
        self.lock = locks.new()
        self.open_count = 0
        self.cache: Any = None
        self.before: Mapping[str, Any] = {}
        self.options_before: Mapping[str, Any] = {}


_blocks = _MemoryCacheBlocks()


def _restore_in_fork() -> None:
    """Restores JAX's cache in a fork, where a block that was open in another thread never ends."""
    if _blocks.open_count:
        _blocks.open_count = 0
        _restore_compilation_cache()


os.register_at_fork(after_in_child=_restore_in_fork)


_CACHE_OPTIONS: Mapping[str, Any] = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


@contextlib.contextmanager
def compilation_cache_in_memory(
    programs: Mapping[str, bytes], *, modules: Mapping[str, bytes] | None = None, named: str | None = None
) -> Iterator[Any]:
    """Replaces JAX's persistent compilation cache by one in memory while the block runs.

    Private because JAX's public options can only name a directory: programs would have to be written to files, which
    would stay behind when a worker is killed. Blocks in several threads may overlap; they share one cache, and the last
    to end restores JAX's own.

    Args:
        programs: compiled programs by JAX's key, to start with.
        modules: executables as serialised by XLA, by the name of the module that JAX will look for first, whatever its
            key.
        named: the cache directory that JAX's options name meanwhile, as some versions make it part of the key; None
            leaves the option unchanged. Nothing is read or written there.

    Yields:
        The cache, with attributes `programs` (by key) and `used` (the keys that were found).
    """
    names = ("_cache", "_cache_initialized", "_cache_checked", "_cache_used")
    with _blocks.lock:
        if not _blocks.open_count:
            _blocks.before = {name: getattr(compilation_cache, name) for name in names}
            options = _CACHE_OPTIONS if named is None else {**_CACHE_OPTIONS, "jax_compilation_cache_dir": named}
            _blocks.options_before = {name: jax.config.values[name] for name in options}
            _blocks.cache = _memory_cache_type()({})
            for name, value in zip(names, (_blocks.cache, True, True, True), strict=True):
                setattr(compilation_cache, name, value)
            for name, value in options.items():
                jax.config.update(name, value)
        _blocks.open_count += 1
        cache = _blocks.cache
        cache.programs.update(programs)
        for name, executable in (modules or {}).items():
            whole = compilation_cache.combine_executable_and_time(executable, 0)
            cache.modules[name] = compilation_cache.compress_executable(whole)
    try:
        yield cache
    finally:
        with _blocks.lock:
            if _blocks.cache is cache:  # False in a fork, which has restored JAX's cache already
                _blocks.open_count -= 1
                if not _blocks.open_count:
                    _restore_compilation_cache()


def _restore_compilation_cache() -> None:
    for name, value in _blocks.before.items():
        setattr(compilation_cache, name, value)
    for name, value in _blocks.options_before.items():
        jax.config.update(name, value)
    _blocks.cache = None


def has_compilation_cache() -> bool:
    """Returns whether the caller has configured a persistent compilation cache."""
    return bool(jax.config.values["jax_compilation_cache_dir"] and jax.config.values["jax_enable_compilation_cache"])


def seed_compilation_cache(programs: Mapping[str, bytes]) -> bool:
    """Seeds JAX's compilation cache with programs that workers compiled.

    Private because JAX has no public way to add a program to its cache.

    Args:
        programs: compiled programs by JAX's key.

    Returns:
        Whether the caller has configured a persistent compilation cache, and it accepted the programs.
    """
    if not has_compilation_cache():
        return False
    try:
        cache = compilation_cache._get_cache(jax.local_devices()[0].client)
        if cache is None:
            return False
        for key, value in programs.items():
            cache.put(key, value)
    except OSError as error:  # a full or read-only disk; JAX itself only warns
        logging.getLogger("quarantune").info("JAX's compilation cache cannot be written: %s", error)
        return False
    return True
