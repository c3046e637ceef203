"""The file that carries a compiled program from one process to another; only this module writes and reads it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Annotated

from quarantune.sandbox import spool
from quarantune.values.codec import DamageError, Record, decode_json, within

_VERSION = 1


@dataclasses.dataclass(frozen=True)
class _Head(Record):
    """The first part of the file; the executable and the cache's values follow, in the order of `keys`."""

    version: int
    coarsest: Annotated[int, within(1, 1 << 16)] | None = None
    keys: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class ProgramFile:
    """A compiled program as it travels.

    Attributes:
        executable: the program as `transport.executable` writes it, a pickle for workers or data for the caller. For a
            function that runs several programs, it is the report of `transport.assignment`.
        coarsest: the bits in the mantissas of the coarsest type that it computes with; None if unknown.
        cache_entries: the contents for JAX's compilation cache, by key.
    """

    executable: bytes
    coarsest: int | None = None
    cache_entries: Mapping[str, bytes] = dataclasses.field(default_factory=dict)

    def write(self, fd: int) -> None:
        """Writes the program into an empty file."""
        head = _Head(_VERSION, self.coarsest, tuple(self.cache_entries))
        spool.write_parts(fd, [json.dumps(head.to_json()).encode(), self.executable, *self.cache_entries.values()])

    @classmethod
    def read(cls, fd: int) -> ProgramFile:
        """Reads a program. A config may have written anything into the file.

        Raises:
            DamageError: the file holds no program of this version.
        """
        try:
            text, executable, *values = spool.read_parts(fd)
            head = _Head.from_json(decode_json(text))
            if head.version != _VERSION:
                raise DamageError(f"the program is of version {head.version}, not {_VERSION}")
            return cls(executable, head.coarsest, dict(zip(head.keys, values, strict=True)))
        except (ValueError, MemoryError) as error:
            raise DamageError(f"the file holds no program: {error}") from error
