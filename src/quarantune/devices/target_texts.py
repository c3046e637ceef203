"""XLA's descriptions of GPUs as text: those that the package holds, and those that sweeps left in a cache directory.

A description belongs to the version of JAX that wrote it, because others may refuse fields that they do not know. The
package holds short ones, with the fields that all versions know, and complete ones for single versions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.resources
import re
from collections.abc import Iterator
from pathlib import Path

import jax

from quarantune.cache.keys import safe_name
from quarantune.host import shared_files
from quarantune.host.shared_files import Directory
from quarantune.values.texts import printable

_FOLDER = "targets"
_ORIGIN = "# Origin: "
_KIND = re.compile(r'^device_description_str: "([^"\\\n]{1,200})"', re.MULTILINE)
_PLATFORM = re.compile(r'^platform_name: "(CUDA|ROCM)"', re.MULTILINE)
_CORES = re.compile(r"^\s*core_count: (\d{1,6})$", re.MULTILINE)
_LARGEST_BYTES = 1 << 18
"""The largest description accepted; one of an H200 has 5 KB."""


@dataclasses.dataclass(frozen=True)
class TargetText:
    """One description.

    Attributes:
        kind: JAX's name of the GPU.
        platform: `cuda` or `rocm`.
        num_cores: the number of its cores; None where the description does not state it.
        text: the description, as XLA reads it.
        origin: where it comes from.
    """

    kind: str
    platform: str
    num_cores: int | None
    text: str
    origin: str

    @classmethod
    def of(cls, content: str) -> TargetText:
        """Reads the content of a file.

        Raises:
            ValueError: it is no description of a GPU.
        """
        kind, platform, cores = _KIND.search(content), _PLATFORM.search(content), _CORES.search(content)
        if kind is None or platform is None or printable(kind[1]) != kind[1]:
            raise ValueError("it names no GPU and no platform")
        first, _, rest = content.partition("\n")
        has_origin = first.startswith(_ORIGIN)
        return cls(
            kind=kind[1],
            platform=platform[1].lower(),
            num_cores=None if cores is None else int(cores[1]),
            text=rest if has_origin else content,
            origin=printable(first.removeprefix(_ORIGIN).strip()) if has_origin else "unknown",
        )


def packaged(stem: str) -> TargetText:
    """Returns the package's description of a GPU: the complete one for the JAX that is running, else the short one."""
    folder = importlib.resources.files("quarantune.devices") / "target_texts"
    complete = folder / f"{stem}.jax{jax.__version__}.textproto"
    file = complete if complete.is_file() else folder / f"{stem}.textproto"
    return TargetText.of(file.read_text(encoding="utf-8"))


def saved(directory: Path) -> Iterator[TargetText]:
    """Yields the descriptions in a cache directory that the JAX that is running can read; others are passed over."""
    for path in shared_files.paths(directory, f"{_FOLDER}/*.jax{jax.__version__}.textproto"):
        try:
            yield TargetText.of(shared_files.read(path, below=directory, largest_bytes=_LARGEST_BYTES).decode())
        except (OSError, ValueError):  # anybody may have written it
            continue


def save(directory: Path, kind: str, text: str) -> None:
    """Leaves the description of a GPU in a cache directory, for the JAX that is running.

    Raises:
        OSError: it cannot be written.
    """
    if _KIND.search(text) is None:  # JAX's name of the device and XLA's are the same
        text = f'{text.rstrip()}\ndevice_description_str: "{kind}"\n'
    written = f"{_ORIGIN}read from {kind} by JAX {jax.__version__}\n{text}".encode()
    name = f"{safe_name(kind)}.jax{jax.__version__}.textproto"
    with Directory(directory, _FOLDER, make=True) as place:
        with contextlib.suppress(OSError):
            if place.read(name, largest_bytes=_LARGEST_BYTES) == written:
                return
        place.replace(name, written)
