"""Compiled programs: taken apart, rebuilt in another process, and kept in JAX's persistent cache of them."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax._src import compilation_cache
from jax._src.compilation_cache_interface import CacheInterface

from quarantune.host.process import new_lock


def interface(lowered: jax.stages.Lowered) -> str | None:
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


def prepare_to_load(executable: bytes) -> None:
    """Initialises the LAPACK kernels of JAX if a program calls them.

    Private because JAX initialises them only when it lowers a program: a program that was lowered elsewhere would jump
    to address 0.

    Args:
        executable: the serialised program, which contains the names of the kernels it calls.
    """
    if b"lapack_" in executable:
        from jax._src.lax import linalg

        linalg.initialize_lapack()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExecutableParts:
    """The parts of a compiled program, except the trees of its arguments and outputs.

    Attributes:
        program: the executable as serialised by XLA.
        name: its name in error messages.
        committed: whether its outputs stay on their devices.
        kept: the flat indices of the arguments that it uses.
        donated: the flat indices of the arguments that it overwrites.
        all_in_avals: the types of all arguments, used or not.
        in_avals: the types of the arguments that it uses.
        out_avals: the types of its outputs.
        in_shardings: the shardings of its arguments.
        out_shardings: the shardings of its outputs.
        in_layouts: the memory layouts of its arguments.
        out_layouts: the memory layouts of its outputs.
    """

    program: bytes
    name: str
    committed: bool
    kept: Sequence[int]
    donated: Sequence[int]
    all_in_avals: Sequence[Any]
    in_avals: Sequence[Any]
    out_avals: Sequence[Any]
    in_shardings: Sequence[Any]
    out_shardings: Sequence[Any]
    in_layouts: Sequence[Any]
    out_layouts: Sequence[Any]


def executable_parts(compiled: jax.stages.Compiled) -> ExecutableParts:
    """Returns the parts of a compiled program.

    Private because the public `serialize_executable` returns a pickle, which runs code when it is loaded.

    Raises:
        ValueError: the program has further parts, such as effects, callbacks or constants.
    """
    whole: Any = compiled
    found = getattr(whole._executable, "_unloaded_executable", None)
    if found is None or found.all_args_info is None:
        raise ValueError("this kind of program cannot be taken apart")
    more = ("unordered_effects", "ordered_effects", "keepalive", "host_callbacks", "mut", "pgle_profiler")
    if extra := [name for name in more if getattr(found, name, None)]:
        raise ValueError(f"it has {', '.join(extra)}")
    if whole._params.const_args or whole._no_kwargs or any(item is not None for item in found.dispatch_in_layouts):
        raise ValueError("it has constants among its arguments, takes no keyword arguments, or has layouts of its own")
    executable = found.xla_executable
    client = getattr(executable, "client", None)
    infos = jax.tree.leaves(compiled.args_info, is_leaf=lambda item: isinstance(item, jax.stages.ArgInfo))
    return ExecutableParts(
        program=executable.serialize() if client is None else client.serialize_executable(executable),
        name=found.name,
        committed=bool(found.committed),
        kept=sorted(found.kept_var_idx),
        donated=[index for index, info in enumerate(infos) if info.donated],
        all_in_avals=[info._aval for info in infos],
        in_avals=found.input_avals,
        out_avals=found.output_avals,
        in_shardings=found.input_shardings,
        out_shardings=found.output_shardings,
        in_layouts=found.xla_in_layouts,
        out_layouts=found.xla_out_layouts,
    )


def executable_from_parts(parts: ExecutableParts, *, in_tree: Any, out_tree: Any, devices: Sequence[Any]) -> Any:
    """Returns the compiled program with the given parts, loaded onto devices of this process.

    Private because the public `deserialize_and_load` takes only a pickle.

    Args:
        parts: the parts from `executable_parts`, with shardings on devices of this process.
        in_tree: the tree of its arguments: a pair of the positional ones and the keyword arguments.
        out_tree: the tree of its outputs.
        devices: the devices it runs on, in the program's order.
    """
    from jax._src import core
    from jax._src.interpreters import pxla
    from jax._src.lib import xla_client  # type: ignore[attr-defined]

    client, device_list = devices[0].client, xla_client.DeviceList(tuple(devices))
    names = tuple("" for _ in parts.all_in_avals)
    unloaded = pxla.UnloadedMeshExecutable(
        xla_executable=client.deserialize_executable(parts.program, executable_devices=device_list),
        device_list=device_list,
        backend=client,
        input_avals=parts.in_avals,
        input_shardings=parts.in_shardings,
        output_avals=parts.out_avals,
        output_shardings=parts.out_shardings,
        committed=parts.committed,
        name=parts.name,
        unordered_effects=[],
        ordered_effects=[],
        keepalive=[],
        host_callbacks=[],
        kept_var_idx=set(parts.kept),
        mut=None,
        xla_in_layouts=parts.in_layouts,
        dispatch_in_layouts=[None] * len(parts.in_layouts),
        xla_out_layouts=parts.out_layouts,
        all_args_info=pxla.AllArgsInfo(parts.all_in_avals, core.DebugInfo("jit", parts.name, names, None)),
        pgle_profiler=None,
    )
    infos = [jax.stages.ArgInfo(aval, index in parts.donated) for index, aval in enumerate(parts.all_in_avals)]
    return jax.stages.Compiled(unloaded.load(), [], in_tree.unflatten(infos), out_tree)


# --- the persistent compilation cache -------------------------------------------------------------------------


class _MemoryCache(CacheInterface):
    """Compiled programs by JAX's key.

    Private because the interface of JAX's persistent compilation cache is.
    """

    _path = pathlib.Path("memory")

    def __init__(self) -> None:
        self.programs: dict[str, bytes] = {}
        self.modules: dict[str, bytes] = {}
        self.used: set[str] = set()

    def get(self, key: str) -> bytes | None:
        found = self.programs.get(key) or self.modules.pop(key.rpartition("-")[0], None)
        if found is not None:
            self.used.add(key)
        return found

    def put(self, key: str, value: bytes) -> None:
        self.programs[key] = value


class _MemoryCacheBlocks:
    """The cache in use and the state of JAX before it, shared by overlapping `compilation_cache_in_memory` blocks."""

    def __init__(self) -> None:
        self.lock = new_lock()
        self.open_count = 0
        self.cache: Any = None
        self.before = contextlib.ExitStack()


_blocks = _MemoryCacheBlocks()


def _restore_in_fork() -> None:
    """Restores JAX's cache in a fork, where a block that was open in another thread never ends."""
    if _blocks.open_count:
        _blocks.open_count = 0
        _restore_compilation_cache()


os.register_at_fork(after_in_child=_restore_in_fork)


_CACHE_OPTIONS: dict[str, Any] = {
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
    with _blocks.lock:
        if not _blocks.open_count:
            _blocks.cache = _MemoryCache()
            state = {"_cache": _blocks.cache, "_cache_initialized": True, "_cache_checked": True, "_cache_used": True}
            for name, value in state.items():
                _blocks.before.callback(setattr, compilation_cache, name, getattr(compilation_cache, name))
                setattr(compilation_cache, name, value)
            for name, value in (
                _CACHE_OPTIONS | ({} if named is None else {"jax_compilation_cache_dir": named})
            ).items():
                _blocks.before.callback(jax.config.update, name, jax.config.values[name])
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
    _blocks.before.close()
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
