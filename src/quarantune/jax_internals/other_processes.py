"""Objects for other processes: programs for a device that may not be here, compiled programs, and pytree classes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
import operator
import os
import pathlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax._src import compilation_cache, tree_util, xla_bridge
from jax._src.array import ArrayImpl
from jax._src.compilation_cache_interface import CacheInterface

from quarantune.host.locks import new_lock
from quarantune.host.process import environment_variables

_ASKING = frozenset({"default_backend", "devices", "device_count", "local_device_count"})
"""The functions of JAX that report on the backend that `get_backend` returned."""
_PLATFORM_NAMES = {"gpu": ("cuda", "rocm")}
"""Other names that callers use for the devices of a platform."""
_KERNELS_OF_JAX = "jax.experimental.pallas.ops."
_CACHE_DIRECTORY = "jax_compilation_cache_dir"
_XLA_CACHE = "xla_gpu_per_fusion_autotune_cache_dir"
_LONGER_THAN_ANY_S = 1e9
"""Seconds, more than compiling any program takes."""
_CACHE_OPTIONS: Mapping[str, Any] = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


# --- devices ---


@functools.cache
def load_plugins() -> None:
    """Loads JAX's plugins for accelerators, and the libraries they need, without initialising a backend.

    It does so once, in this process or in the process that forked it.

    Private because JAX loads plugins only when it initialises a backend. Loading CUDA's takes 0.08 s, which forks of
    this process then save. JAX's check of CUDA library versions is skipped: it would initialise CUDA, which no fork
    could use afterwards, and the caller's JAX has made it already.
    """
    missing = contextlib.suppress(AttributeError)  # another version of JAX: every fork loads the plugins
    with environment_variables({"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}), missing:
        xla_bridge._discover_and_register_pjrt_plugins()


@contextlib.contextmanager
def answer_for_device(device: Any, asked: Callable[[str], None]) -> Iterator[None]:
    """Makes JAX answer for one device that this process does not have, while it traces a program for that device.

    A kernel may choose its code by `jax.default_backend()` or by the kind of `jax.devices()[0]`. In a process without
    the device, both describe the CPU. They must describe the device that the kernel is compiled for, and so must the
    device of an array that the kernel closes over. Calls from JAX's own code are unaffected, apart from the kernels
    that come with it.

    Private (`xla_bridge.get_backend`) because nearly all the public functions get their answer from it, however a
    module has imported them. The calling frames show the function, and whose code called it. `ArrayImpl`, because
    the public `jax.Array` only declares its methods.

    Args:
        device: JAX's description of the device.
        asked: called with the name of each function that returned the device, or the number of devices, to code outside
            of JAX. That code may ask the device for facts that its description lacks. JAX, and the kernels that come
            with it, only ask for its kind and its number of cores.
    """
    from jax.extend import backend as extension

    real, real_local_devices = xla_bridge.get_backend, jax.local_devices
    names = {device.platform, *_PLATFORM_NAMES.get(device.platform, ())}
    backend = types.SimpleNamespace(
        platform=device.platform,
        devices=lambda: [device],
        device_count=lambda: 1,
        local_device_count=lambda: 1,
    )

    def tell(name: str, asker: types.FrameType) -> None:
        if not _comes_with_jax(asker):
            asked(name)

    def get_backend(platform: Any = None) -> Any:
        function = sys._getframe(1)
        name, asker = function.f_code.co_name, function.f_back
        if platform not in (None, *names) or name not in _ASKING or asker is None or _is_jax(asker):
            return real(platform)
        if name != "default_backend":
            tell(name, asker)
        return backend

    def local_devices(process_index: int | None = None, backend: Any = None, host_id: int | None = None) -> Any:
        # JAX remembers its own answer, whoever asked.
        if backend not in (None, *names) or _is_jax(sys._getframe(1)):
            return real_local_devices(process_index, backend, host_id)
        tell("local_devices", sys._getframe(1))
        return [device]

    def get_default_device() -> Any:
        tell("extend.backend.get_default_device", sys._getframe(1))
        return device

    array_type: Any = ArrayImpl
    real_devices, real_device = array_type.devices, array_type.device

    def devices(array: Any) -> Any:
        if _is_jax(asker := sys._getframe(1)):
            return real_devices(array)
        tell("Array.devices", asker)
        return {device}

    def device_of(array: Any) -> Any:
        if _is_jax(asker := sys._getframe(1)):
            return real_device.fget(array)
        tell("Array.device", asker)
        return device

    with (
        _replaced(xla_bridge, get_backend=get_backend),
        _replaced(jax, local_devices=local_devices),
        _replaced(extension, get_default_device=get_default_device),
        _replaced(ArrayImpl, devices=devices, device=property(device_of)),
    ):
        yield


@contextlib.contextmanager
def _replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Gives a module or class other attributes while the block runs."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def _is_jax(frame: types.FrameType) -> bool:
    return _comes_with_jax(frame) and not _module(frame).startswith(_KERNELS_OF_JAX)


def _comes_with_jax(frame: types.FrameType) -> bool:
    return _module(frame).startswith(("jax.", "jaxlib."))


def _module(frame: types.FrameType) -> str:
    return f"{frame.f_globals.get('__name__', '')}."


@contextlib.contextmanager
def questions() -> Iterator[set[str]]:
    """Yields a set that collects the names of JAX's functions that code asks about devices while the block runs.

    Private because the public functions belong to a private module, whose file identifies them.
    """
    asked: set[str] = set()
    before = sys.getprofile()

    def note(frame: types.FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename == xla_bridge.__file__:
            asked.add(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        yield asked
    finally:
        sys.setprofile(before)


# --- compiled programs ---


def prepare_to_load(executable: bytes) -> None:
    """Initialises the LAPACK kernels of JAX if a program calls them.

    Private because JAX initialises them only when it lowers a program: a program lowered elsewhere would jump
    to address 0.

    Args:
        executable: the serialised program, which contains the names of the kernels it calls.
    """
    if b"lapack_" in executable:
        from jax._src.lax import linalg

        linalg.initialize_lapack()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExecutableParts:
    """The parts of a compiled program, except the tree of its arguments.

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
        out_tree: the tree of its outputs; None if that has pytree classes, which only the function itself provides.
        devices: the devices of this process to load it onto, in the program's order; empty where it was compiled.
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
    out_tree: Any
    devices: Sequence[Any] = ()

    def with_trees(self, in_tree: Any, out_tree: Any) -> Any:
        """Returns the program as a callable, loaded onto its devices.

        Private because the public `deserialize_and_load` takes only a pickle.

        Args:
            in_tree: the tree of its arguments: a pair of the positional ones and the keyword arguments.
            out_tree: the tree of its outputs.

        Raises:
            ValueError: the trees belong to another program, or XLA cannot load this program.
        """
        if (in_tree.num_leaves, out_tree.num_leaves) != (len(self.all_in_avals), len(self.out_avals)):
            raise ValueError("the compiled program has another number of arguments or outputs than its function")
        prepare_to_load(self.program)
        try:
            return self._loaded(in_tree, out_tree)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"the compiled program cannot be loaded: {error}") from error

    def _loaded(self, in_tree: Any, out_tree: Any) -> Any:
        from jax._src import core
        from jax._src.interpreters import pxla
        from jax._src.lib import xla_client  # type: ignore[attr-defined]

        client, device_list = self.devices[0].client, xla_client.DeviceList(tuple(self.devices))
        names = tuple("" for _ in self.all_in_avals)
        unloaded = pxla.UnloadedMeshExecutable(
            xla_executable=client.deserialize_executable(self.program, executable_devices=device_list),
            device_list=device_list,
            backend=client,
            input_avals=self.in_avals,
            input_shardings=self.in_shardings,
            output_avals=self.out_avals,
            output_shardings=self.out_shardings,
            committed=self.committed,
            name=self.name,
            unordered_effects=[],
            ordered_effects=[],
            keepalive=[],
            host_callbacks=[],
            kept_var_idx=set(self.kept),
            mut=None,
            xla_in_layouts=self.in_layouts,
            dispatch_in_layouts=[None] * len(self.in_layouts),
            xla_out_layouts=self.out_layouts,
            all_args_info=pxla.AllArgsInfo(self.all_in_avals, core.DebugInfo("jit", self.name, names, None)),
            pgle_profiler=None,
        )
        infos = [jax.stages.ArgInfo(aval, index in self.donated) for index, aval in enumerate(self.all_in_avals)]
        return jax.stages.Compiled(unloaded.load(), [], in_tree.unflatten(infos), out_tree)


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
        raise ValueError("it has constants among its arguments, takes no keyword arguments, or has its own layouts")
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
        out_tree=compiled.out_tree,
    )


def interface_of(compiled: Any) -> tuple[list[Any], list[Any], list[Any], bool]:
    """Returns the interface of a compiled program.

    Private because the public `input_shardings` puts shardings into the user's pytree classes, which may refuse them,
    and nothing public shows whether outputs are committed.

    Returns:
        The types of all arguments; their shardings, None for an argument that the program does not use; its devices;
        and whether its outputs are committed to them.

    Raises:
        ValueError: JAX does not show the parts of this kind of program.
    """
    found = getattr(compiled._executable, "_unloaded_executable", None)
    if found is None:
        raise ValueError("this kind of program cannot be taken apart")
    infos = jax.tree.leaves(compiled.args_info, is_leaf=lambda item: isinstance(item, jax.stages.ArgInfo))
    used = dict(zip(sorted(found.kept_var_idx), found.input_shardings, strict=True))
    places, devices = [used.get(index) for index in range(len(infos))], compiled.runtime_executable().local_devices()
    return [info._aval for info in infos], places, devices, bool(found.committed)


# --- the persistent compilation cache ---


class _MemoryCache(CacheInterface):
    """Compiled programs by JAX's key, in place of JAX's cache while a `compilation_cache_in_memory` block runs.

    Private because the interface of JAX's persistent compilation cache is.
    """

    _path = pathlib.Path("memory")

    def __init__(self) -> None:
        self.programs: dict[str, bytes] = {}
        self.modules: dict[str, bytes] = {}
        self.find_modules: list[Callable[[], Mapping[str, bytes]]] = []
        self.used: set[str] = set()
        self.open_blocks = 0
        self.before = contextlib.ExitStack()

    def get(self, key: str) -> bytes | None:
        found = self.programs.get(key)
        while found is None and self.find_modules:  # which may compile in turn
            for name, executable in self.find_modules.pop()().items():
                whole = compilation_cache.combine_executable_and_time(executable, 0)
                self.modules[name] = compilation_cache.compress_executable(whole)
        found = found or self.modules.pop(key.rpartition("-")[0], None)
        if found is not None:
            self.used.add(key)
        return found

    def put(self, key: str, value: bytes) -> None:
        self.programs[key] = value


_cache_lock = new_lock()
_cache: _MemoryCache | None = None


def _restore_compilation_cache() -> None:
    """Restores JAX's cache after the last block, or in a fork, where another thread's open block would never end."""
    global _cache
    if _cache is not None:
        _cache.before.close()
        _cache = None


os.register_at_fork(after_in_child=_restore_compilation_cache)


@contextlib.contextmanager
def compilation_cache_in_memory(
    programs: Mapping[str, bytes],
    *,
    find_modules: Callable[[], Mapping[str, bytes]] | None = None,
    named: str | None = None,
) -> Iterator[Any]:
    """Replaces JAX's persistent compilation cache by one in memory while the block runs.

    Private because JAX's public options can only name a directory: programs would have to be written to files, which
    would stay behind when a worker dies. Blocks in several threads may overlap; they share one cache, and the last
    to end restores JAX's own.

    Args:
        programs: compiled programs by JAX's key, to start with.
        find_modules: called when a key is first not found; returns executables as serialised by XLA, by the name of
            the module that JAX looks for, whatever its key. May be None.
        named: the cache directory that JAX's options name within the block, as some versions make it part of the key;
            None leaves the option unchanged. JAX reads and writes nothing there; XLA only its autotuning results on a
            GPU.

    Yields:
        The cache, with attributes `programs` (by key) and `used` (the keys that were found).
    """
    global _cache
    with _cache_lock:
        if _cache is None:
            _cache = _MemoryCache()
            state = {"_cache": _cache, "_cache_initialized": True, "_cache_checked": True, "_cache_used": True}
            _cache.before.enter_context(_replaced(compilation_cache, **state))
            for name, value in {**_CACHE_OPTIONS, **({} if named is None else {_CACHE_DIRECTORY: named})}.items():
                _cache.before.callback(jax.config.update, name, jax.config.values[name])
                jax.config.update(name, value)
        cache = _cache
        cache.open_blocks += 1
        cache.programs.update(programs)
        cache.find_modules += [] if find_modules is None else [find_modules]
    try:
        yield cache
    finally:
        with _cache_lock:
            cache.open_blocks -= 1
            if _cache is cache and not cache.open_blocks:  # a fork has restored JAX's cache already
                _restore_compilation_cache()


def shares_what_xla_finds() -> bool:
    """Returns whether processes that compile with a GPU share XLA's autotuning results if they share a cache directory.

    They do by JAX's default. Versions before 0.11 make the directory part of the key for a program.
    """
    kinds = jax.config.values["jax_persistent_cache_enable_xla_caches"]
    return jax.__version_info__ >= (0, 11) and kinds == _XLA_CACHE and _XLA_CACHE not in os.environ.get("XLA_FLAGS", "")


def share_what_xla_finds(directory: str) -> None:
    """Makes XLA keep its autotuning results on a GPU in a directory, and look for them there at every compile.

    JAX offers this as part of its persistent compilation cache. The second option makes JAX keep no programs there.
    """
    jax.config.update(_CACHE_DIRECTORY, directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _LONGER_THAN_ANY_S)


def has_compilation_cache() -> bool:
    """Returns whether the caller has configured a persistent compilation cache."""
    return bool(jax.config.values[_CACHE_DIRECTORY] and jax.config.values["jax_enable_compilation_cache"])


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


# --- classes registered as pytrees ---


def pytree_registration(cls: type) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """Returns the registration of `cls` as a pytree, or None.

    Private (`tree_util._registry`, and the closures of its functions) because JAX has no public way to read a
    registration back. A key function given to `register_pytree_node` is kept in C++ alone: for such a class the
    worker's key paths show positions instead of names, and nothing else differs.

    Args:
        cls: any class.

    Returns:
        JAX's function that registers the class, and its arguments after the class, which can be pickled.
    """
    entry = tree_util._registry.get(cls)
    if entry is None:
        return None
    hidden = inspect.getclosurevars(entry.to_iter).nonlocals if inspect.isfunction(entry.to_iter) else {}
    if "data_fields" in hidden and "meta_fields" in hidden:
        return jax.tree_util.register_dataclass, (tuple(hidden["data_fields"]), tuple(hidden["meta_fields"]))
    if "flatten_with_keys" in hidden:
        return jax.tree_util.register_pytree_with_keys, (hidden["flatten_with_keys"], entry.from_iter)
    keyed = operator.methodcaller("tree_flatten_with_keys") if hasattr(cls, "tree_flatten_with_keys") else None
    return jax.tree_util.register_pytree_node, (entry.to_iter, entry.from_iter, keyed)


def register_pytree(cls: type, registration: tuple[Callable[..., Any], tuple[Any, ...]]) -> None:
    """Registers `cls` as a pytree, unless it is registered already.

    Args:
        cls: a class unpickled by value.
        registration: the result of `pytree_registration` in the sending process.
    """
    if cls not in tree_util._registry:
        register, arguments = registration
        register(cls, *arguments)


def made_unregistered(make: Callable[[], type]) -> type:
    """Makes a class that is not a pytree, even if it registers itself while it is made; it may register other classes.

    Private (`tree_util._all_registries`) because a class may register itself in its metaclass or `__init_subclass__`
    with any of JAX's functions. All of them use these registries, and nothing can be removed from these.

    Args:
        make: makes the class.
    """
    noted: list[tuple[str, type, tuple[Any, ...]]] = []

    def noting(method: str) -> Callable[..., None]:
        return lambda nodetype, *arguments: noted.append((method, nodetype, arguments))

    methods = ("register_node", "register_dataclass_node")
    stand_in = types.SimpleNamespace(**{method: noting(method) for method in methods})
    is_known = hasattr(tree_util, "_all_registries")
    # If another version of JAX has other registries, the registration stays.
    with _replaced(tree_util, _all_registries=(stand_in,)) if is_known else contextlib.nullcontext():
        cls = make()
    for method, nodetype, arguments in noted:
        if nodetype is cls:
            tree_util._registry.pop(cls, None)
        else:
            for registry in tree_util._all_registries:
                getattr(registry, method)(nodetype, *arguments)
    return cls
