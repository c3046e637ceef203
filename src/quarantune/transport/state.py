"""Pickles a value of one of the caller's modules for a worker that finds another value there."""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
import types
from typing import Any

import jax
import numpy as np

from quarantune.transport import classes, unpicklable
from quarantune.transport.pickling import Pickler, dump_with, home_in, load_by_name, set_attributes

_LARGEST_BYTES, _LARGEST_ARRAY_BYTES = 1 << 26, 1 << 24


class _LeftOut: ...


LEFT_OUT = _LeftOut()
"""Stands for a part of a value that cannot travel."""


def dump_state(value: object, place: str) -> tuple[bytes | None, str]:
    """Pickles a value, with its parts as far as they can travel.

    Args:
        value: the value.
        place: the dotted name of its place; a function of this name travels by value.

    Returns:
        Bytes for `pickling.loads`, in which `LEFT_OUT` stands for parts that cannot travel, None where nothing of the
        value can; and the reason for the first part that cannot.
    """
    reasons: list[str] = []

    def make(file: io.BytesIO, cleanup: contextlib.ExitStack) -> Pickler:
        return _StatePickler(file, cleanup, place, value, reasons)

    try:
        blob = dump_with(make, value, _BoundedFile())
    except Exception as error:
        if unpicklable.is_interruption(error):
            raise
        return None, str(error)
    return blob, next(iter(reasons), "")


class _BoundedFile(io.BytesIO):
    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > _LARGEST_BYTES:
            raise OSError(f"it has more than {_LARGEST_BYTES >> 20} MiB")
        return super().write(data)


def home_of(obj: Any) -> tuple[str, str] | None:
    """Returns the module and the name of an object that cannot be copied, and travels by name; else None."""
    module = sys.modules.get(type(obj).__module__)
    if module is None or type(obj).__module__ == "builtins" or not classes.refuses_to_be_copied(obj):
        return None
    return home_in(module, obj)


class _StatePickler(Pickler):
    """Pickles objects by their parts, and leaves out the parts that cannot travel."""

    def __init__(
        self, file: io.BytesIO, cleanup: contextlib.ExitStack, place: str, value: object, reasons: list[str]
    ) -> None:
        super().__init__(file, cleanup)
        self._place = place
        self._value = value
        self._reasons = reasons

    def reducer_override(self, obj: Any) -> Any:
        try:
            if isinstance(obj, (np.ndarray, jax.Array)) and obj.nbytes > _LARGEST_ARRAY_BYTES:
                raise unpicklable.CannotTravelError("It is too large.")
            reduced = super().reducer_override(obj)
            is_by_parts = not isinstance(obj, (type, types.FunctionType)) and type(obj) not in self.dispatch_table
            if reduced is NotImplemented and is_by_parts:
                reduced = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            cannot_travel = isinstance(error, unpicklable.CannotTravelError) or not hasattr(obj, "__dict__")
            if unpicklable.is_interruption(error) or (obj is self._value and cannot_travel):
                raise
            if cannot_travel:
                self._reasons.append(str(error))
                return load_by_name, (__name__, "LEFT_OUT", 0)
            # An object that refuses to be copied, as the parsed flags of absl do: it is not copied but made alike.
            object.__new__(type(obj))  # raises where the fields are not all
            return object.__new__, (type(obj),), dict(vars(obj)), None, None, set_attributes
        return reduced

    def _refuses(self, obj: Any) -> bool:
        return False

    def _by_name(self, obj: Any) -> Any:
        return NotImplemented if self._has_place(obj) else super()._by_name(obj)

    def _reduced(self, function: types.FunctionType) -> Any:
        return self._dynamic_function_reduce(function) if self._has_place(function) else super()._reduced(function)

    def _has_place(self, obj: Any) -> bool:
        return f"{getattr(obj, '__module__', None)}.{getattr(obj, '__qualname__', None)}" == self._place
