"""Devices to compile for, here or not: TPUs by their topology, GPUs by XLA's description of them.

A description of a GPU is text. It belongs to the version of JAX that wrote it, because others may refuse fields that
they do not know. The package holds short descriptions, with the fields that all versions know, and complete ones for
single versions. Sweeps leave further descriptions in the cache directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.resources
import importlib.util
import logging
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import jax

from quarantune.cache.file_names import safe_name
from quarantune.devices import discovery
from quarantune.devices.discovery import Device, cpu_device
from quarantune.host import shared_files
from quarantune.host.packages import entry_points
from quarantune.host.shared_files import Directory
from quarantune.values import blocks
from quarantune.values.errors import SandboxError
from quarantune.values.settings import Settings
from quarantune.values.texts import did_you_mean, printable, shown
from quarantune.values.trial import CompileTarget

_logger = logging.getLogger("quarantune")

_TPUS = (
    ("TPU v4", "TPU v4", "v4:2x2x1", 1),
    ("TPU v5e", "TPU v5 lite", "v5e:2x2", 1),
    ("TPU v5p", "TPU v5", "v5p:2x2x1", 2),
    ("TPU v6e", "TPU v6 lite", "v6e:2x2", 1),
    ("TPU 7x", "TPU7x", "tpu7x:2x2x1", 1),
)
"""For each generation: its name, JAX's name of the device, the smallest topology that libtpu knows, and its cores."""
_GPUS = {
    "NVIDIA A100": "nvidia_a100",
    "NVIDIA H100": "nvidia_h100",
    "NVIDIA H200": "nvidia_h200",
    "NVIDIA B200": "nvidia_b200",
}
"""The name of each GPU whose description the package holds, with the description's file."""
_COMPILERS = {
    "tpu": ("libtpu", "pip install 'quarantune[tpu]'"),
    "cuda": ("JAX's CUDA plugin", "pip install 'quarantune[cuda-compile]'"),
    "rocm": ("JAX's ROCM plugin", "install jax-rocm7-plugin"),
}
"""The compiler for each platform, and how to install it."""

_TEXTS_FOLDER = "targets"
_ORIGIN = "# Origin: "
_KIND = re.compile(r'^device_description_str: "([^"\\\n]{1,200})"', re.MULTILINE)
_PLATFORM = re.compile(r'^platform_name: "(CUDA|ROCM)"', re.MULTILINE)
_CORES = re.compile(r"^\s*core_count: (\d{1,6})$", re.MULTILINE)
_LARGEST_BYTES = 1 << 18
"""The largest accepted description, in bytes; an H200's has 5 KB."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target(CompileTarget):
    """A device to compile programs for; it need not be here.

    Attributes:
        name: its name for `compile_check`.
        platform: `cpu`, `cuda`, `rocm` or `tpu`.
        device_kind: JAX's name of the device, which is also its name in the cache.
        topology: libtpu's name of a TPU's topology; empty for other devices.
        config_text: XLA's description of a GPU; empty for other devices.
        num_cores: the number of its cores, as JAX counts them; None if unknown.
        origin: the source of its description.
        is_here: whether this machine has one.
        estimates: whether its compiler also estimates the cycles of a program.
    """

    name: str
    origin: str = ""
    is_here: bool = False

    @property
    def device(self) -> Device:
        """The device as the scheduler sees it; nothing runs on it."""
        return Device(self.platform, self.device_kind)

    @property
    def for_compiling(self) -> CompileTarget | None:
        """Its description for a compile worker; None for the CPU, since every process can compile for it."""
        if self.platform == "cpu":
            return None
        return CompileTarget(**{field.name: getattr(self, field.name) for field in dataclasses.fields(CompileTarget)})


def targets() -> tuple[Target, ...]:
    """Returns every device that `compile_check` can compile for: this machine's first, then the others by name.

    These include GPUs whose description for the running JAX version a sweep has left in the cache directory. A saved
    description has priority over the package's.
    """
    here = list(_here())
    kinds = {target.device_kind for target in here}
    return (*here, *(target for target in _by_name() if target.device_kind not in kinds))


def find(name: str | Target) -> Target:
    """Returns the target of a name; JAX's name of the device will also do, in any letter case, without its vendor.

    Raises:
        ValueError: no target has this name; the message lists the known ones.
        TypeError: the name is not a string.
    """
    if isinstance(name, Target):
        return name
    if not isinstance(name, str):
        raise TypeError(f"target={shown(name)} is not valid: give a name, or one of quarantune.targets()")
    # Devices that are here come last, because finding them may take a worker.
    for offered in (_by_name, _here):
        for target in offered():
            if _folded(name) in (_folded(target.name), _folded(target.device_kind)):
                return target
    known = [target.name for target in targets()]
    raise ValueError(f"target={shown(name)} is not known.{did_you_mean(name, known)} Known are: {', '.join(known)}.")


def of_tpu(kind: str) -> CompileTarget | None:
    """Returns the target of a kind of TPU for compile workers; None if no worker can compile for it."""
    known = next((target for target in _by_name() if target.device_kind == kind), None)
    return known.for_compiling if known is not None and has_plugin("tpu") else None


def usable(name: str | Target) -> Target:
    """Returns the target of a name, as `find` does, if this Python has a compiler for it.

    Raises:
        ValueError: no target has this name.
        TypeError: the name is not a string.
        ImportError: JAX's plugin for it is not installed; the message says how to install it.
    """
    target = find(name)
    if not has_plugin(target.platform):
        needed, remedy = _COMPILERS[target.platform]
        raise ImportError(f"compiling for {target.name} needs {needed}, which is not installed: {remedy}")
    return target


def has_plugin(platform: str) -> bool:
    """Returns whether JAX would find an installed plugin for a platform; for TPUs, the plugin is libtpu."""
    if platform in ("cpu", "tpu"):
        return platform == "cpu" or importlib.util.find_spec("libtpu") is not None
    names = {entry.name for entry in entry_points("jax_plugins")}
    if (spec := importlib.util.find_spec("jax_plugins")) is not None:
        names |= {module.name for module in pkgutil.iter_modules(spec.submodule_search_locations)}
    return any(platform in name for name in names)


def remember(target: CompileTarget | None, settings: Settings) -> None:
    """Leaves the description of a GPU in the cache directory, so that jobs without that GPU can compile for it.

    An unwritable directory does not fail the sweep: the description is only of use elsewhere.
    """
    if target is None or not target.config_text or settings.disable_cache:
        return
    try:
        save(settings.cache_dir, target.device_kind, target.config_text)
    except OSError as error:
        _logger.info("the description of %s is not kept: %s", target.device_kind, error)


def _by_name() -> Iterator[Target]:
    """Yields the targets that need not be here."""
    for name, kind, topology, cores in _TPUS:
        yield Target(
            name=name,
            platform="tpu",
            device_kind=kind,
            topology=topology,
            num_cores=cores,
            origin=f"the topology {topology} of libtpu",
        )
    settings = blocks.current()
    left = {} if settings.disable_cache else {target.device_kind: target for target in saved(settings.cache_dir)}
    for name, stem in _GPUS.items():
        known = packaged(stem)
        yield dataclasses.replace(left.pop(known.device_kind, known), name=name)
    yield from left.values()


# --- XLA's descriptions of GPUs ---


def of_text(content: str) -> Target:
    """Returns the GPU that a text describes.

    Raises:
        ValueError: the text does not describe a GPU.
    """
    kind, platform, cores = _KIND.search(content), _PLATFORM.search(content), _CORES.search(content)
    if kind is None or printable(kind[1]) != kind[1]:
        raise ValueError("it does not name a GPU")
    if platform is None:
        raise ValueError("it does not name a platform")
    first, _, rest = content.partition("\n")
    has_origin = first.startswith(_ORIGIN)
    return Target(
        name=kind[1],
        platform=platform[1].lower(),
        device_kind=kind[1],
        config_text=rest if has_origin else content,
        num_cores=None if cores is None else int(cores[1]),
        origin=printable(first.removeprefix(_ORIGIN).strip()) if has_origin else "unknown",
    )


@functools.cache
def packaged(stem: str, jax_version: str = jax.__version__) -> Target:
    """Returns a GPU by the package's description: the complete one for a version of JAX, else the short one."""
    folder = importlib.resources.files("quarantune.devices") / "target_texts"
    complete = folder / f"{stem}.jax{jax_version}.textproto"
    file = complete if complete.is_file() else folder / f"{stem}.textproto"
    return of_text(file.read_text(encoding="utf-8"))


def saved(directory: Path) -> Iterator[Target]:
    """Yields the GPUs that a cache directory describes for the JAX that is running; skips other files."""
    for path in shared_files.paths(directory, f"{_TEXTS_FOLDER}/*.jax{jax.__version__}.textproto"):
        try:
            yield of_text(shared_files.read(path, below=directory, largest_bytes=_LARGEST_BYTES).decode())
        except (OSError, ValueError):  # anybody may have written it
            continue


def save(directory: Path, kind: str, text: str) -> None:
    """Leaves the description of a GPU in a cache directory, for the JAX that is running.

    Raises:
        OSError: the directory or the file is not writable.
    """
    if _KIND.search(text) is None:  # JAX's name of the device and XLA's are the same
        text = f'{text.rstrip()}\ndevice_description_str: "{kind}"\n'
    written = f"{_ORIGIN}read from {kind} by JAX {jax.__version__}\n{text}".encode()
    name = f"{safe_name(kind)}.jax{jax.__version__}.textproto"
    with Directory(directory, _TEXTS_FOLDER, make=True) as place:
        with contextlib.suppress(OSError):
            if place.read(name, largest_bytes=_LARGEST_BYTES) == written:
                return
        place.replace(name, written)


# --- the devices of this machine ---


def _here() -> Iterator[Target]:
    """Yields the devices of this machine, one of each kind."""
    yield Target(name="cpu", platform="cpu", device_kind=cpu_device().kind, origin="this machine", is_here=True)
    try:
        there = discovery.accelerators() or ()
    except SandboxError as error:
        _logger.warning("the devices of this machine are not listed: %s", error)
        return
    for device in {each.device_kind: each for each in there if each.platform != "cpu"}.values():
        known = next((target for target in _by_name() if target.device_kind == device.device_kind), None)
        if device.config_text:
            name = device.device_kind if known is None else known.name
            yield Target(name=name, **vars(device), origin="read from this machine's device", is_here=True)
        elif known is not None:
            yield dataclasses.replace(known, is_here=True)


def _folded(name: str) -> str:
    """Returns the letters and digits of a name without its vendor and the `v` of a version, in lower case."""
    return re.sub(r"^(nvidia|amd|tpu)?(v(?=\d))?", "", re.sub(r"[^a-z0-9]+", "", name.casefold()))
