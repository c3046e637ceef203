"""The files of /proc, as bytes: the names of processes, control groups, mounts and mapped files need not be text."""

from __future__ import annotations

import os
from pathlib import Path


def read(file: str | Path) -> bytes:
    """Returns the content of a file; empty where the process is gone, or the system has no such file."""
    try:
        with open(file, "rb", buffering=0) as opened:
            return opened.read()
    except OSError:
        return b""


def text(file: str | Path) -> str:
    """Returns the content of a file, with names that `os.fsencode` turns into the same bytes again."""
    return os.fsdecode(read(file))


def lines(file: str | Path) -> list[bytes]:
    """Returns the lines of a file; a name may hold any other character that ends a line elsewhere."""
    return [line for line in read(file).split(b"\n") if line]


def pids(root: Path = Path("/")) -> list[int]:
    """Returns the ids of all processes.

    Args:
        root: the root of the file system; another one in tests.
    """
    return [int(name) for name in os.listdir(root / "proc") if name.isdigit()]


def status(pid: int | str) -> list[bytes]:
    """Returns the fields of a process's `stat` from its state on; empty where the process is gone.

    The command's name before them stands in parentheses and may itself hold spaces and parentheses.
    """
    return read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
