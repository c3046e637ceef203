"""The errors that a config's worker raises, and the outcome that an exception stands for."""

from __future__ import annotations

import re

import jax

from quarantune.values.trial import Outcome

_ON_CHIP = re.compile(r"memory space [vs]mem")
"""In a compiler's complaint about a TPU's memory on the chip, which only a kernel's blocks can exhaust."""
_STATUS = re.compile(r"[A-Z_]+(?=:)")
"""What the message of an error of XLA begins with."""


class NeedsDeviceError(RuntimeError):
    """The program cannot be compiled well, or at all, without its device: compile it there."""


class UncheckableError(RuntimeError):
    """Nothing can be said here about a config for a device that is elsewhere; on that device it may well compile."""


class WrongResultError(Exception):
    """A config ran and returned a wrong result; the message says how it differs.

    Attributes:
        group: the position of the other config's output that it agrees with, as `Judge.check` returns it.
    """

    def __init__(self, reason: str, group: int | None = None) -> None:
        super().__init__(reason)
        self.group = group


def outcome_of(error: BaseException, phase: str) -> str:
    """Returns the outcome that an exception in `phase` stands for, or `unfit` for a program in the wrong worker."""
    if isinstance(error, NeedsDeviceError):
        return "unfit"
    if isinstance(error, WrongResultError):
        return Outcome.WRONG.value
    # While compiling, the same status also means that a kernel wants more shared memory than there is.
    exhausted = isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
    if exhausted and (
        phase != "compile" or ("out of memory" in str(error).lower() and not _ON_CHIP.search(str(error)))
    ):
        return Outcome.DEVICE_OOM.value
    return Outcome.ERROR.value


def place_of(error: BaseException, message: str, phase: str) -> str:
    """Returns an exception's type, and the file and line where it was raised; of an error of XLA its status instead.

    JAX raises all errors of XLA at the line that called it, which another route to the same program does not pass. Of
    those of a program that runs, which may be of any kind, it is the message without its numbers.

    Args:
        error: the exception.
        message: its text.
        phase: the phase that it ended.
    """
    status = _STATUS.match(message) if isinstance(error, jax.errors.JaxRuntimeError) else None
    if status:
        return f"{type(error).__qualname__} {status[0] if phase == 'compile' else re.sub('[0-9]+', 'N', message)}"
    entry = error.__traceback__
    while entry is not None and entry.tb_next is not None:
        entry = entry.tb_next
    where = "" if entry is None else f" at {entry.tb_frame.f_code.co_filename}:{entry.tb_lineno}"
    return f"{type(error).__qualname__}{where}"
