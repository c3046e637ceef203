"""Runs a program on a pseudo-terminal and keeps its output, with the time of each piece."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence

_TAKE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Makes the terminal control a program, which then gets its Ctrl-C. With a `preexec_fn`, JAX would warn of the fork."""


@dataclasses.dataclass
class Recording:
    """A program's output to its terminal: seconds since its start and bytes of each piece."""

    pieces: list[tuple[float, bytes]]
    status: int

    @property
    def text(self) -> str:
        return b"".join(piece for _, piece in self.pieces).decode()


def record(
    command: Sequence[str],
    *,
    columns: int,
    lines: int = 40,
    environ: Mapping[str, str],
    interrupt_when: Callable[[str], bool] | None = None,
    timeout_s: float = 250.0,
) -> Recording:
    """Returns the recording of a program. The program gets Ctrl-C once its output meets a condition."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-c", _TAKE_TERMINAL, *command],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=dict(environ),
        start_new_session=True,
    )
    os.close(theirs)
    pieces: list[tuple[float, bytes]] = []
    is_interrupted = interrupt_when is None
    try:
        while time.monotonic() - started < timeout_s:
            if not select.select([ours], [], [], 0.2)[0]:
                continue
            try:
                piece = os.read(ours, 1 << 16)
            except OSError:  # the last process on the terminal closed it
                break
            if not piece:
                break
            pieces.append((time.monotonic() - started, piece))
            so_far = b"".join(piece for _, piece in pieces).decode(errors="replace")
            if not is_interrupted and interrupt_when is not None and interrupt_when(so_far):
                os.write(ours, b"\x03")
                is_interrupted = True
        return Recording(pieces, process.wait(timeout=30))
    finally:
        os.close(ours)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()


def python(program: str, *arguments: str) -> list[str]:
    return [sys.executable, program, *arguments]
