"""Decides whether two programs are the same: by a hash of lowered programs, and line by line for traced programs.

A hash is equal in all processes that lower a program for one kind of device. Two programs share it only if they do the
same.

Lines show where two processes trace different programs. They may omit a difference, but must never differ for one
program. They form a multiset, because the order of equations may come from a set of strings. They contain only stable
values: shapes, dtypes, numbers, texts and their containers. They omit names, functions, objects, places on devices and
large integers, which may be seeds.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import hashlib
import math
import re
import sys
from collections.abc import Mapping, Sequence
from inspect import ismodule
from typing import Any

import numpy as np

from quarantune.functions.description import describe_structure
from quarantune.host.packages import content
from quarantune.jax_internals import jax_functions
from quarantune.transport.program_text import ADDRESS, ProgramText, is_program
from quarantune.values.codec import text_of

PREFIX = "program:"
"""Prefix of every identity; no key of JAX's compilation cache has it."""
# JAX writes the place of an array that is committed to its device; on the only device, this changes nothing.
_PLACE = r"sdy\.sharding = #sdy\.sharding<@empty_mesh, \[[^\]]*\]>"
_ATTRIBUTES, _METADATA = "mhlo.frontend_attributes", "xla_metadata_payload"
# Notes for profilers, such as the text of a config, and names of results; they do not change the program.
_NOTES = re.compile(rf'(?:{_METADATA}|jax\.result_info) = "(?:[^"\\]|\\.)*"(?:, )?')
_PLACES = re.compile(rf" \{{{_PLACE}\}}|{_PLACE}, |, {_PLACE}|\n *sdy\.mesh @empty_mesh = .*")
_KERNELS = ("tpu_custom_call", "__gpu$xla.gpu.triton", "mosaic_gpu")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_SYMBOL = re.compile(r'@("(?:[^"\\]|\\.)*"|[\w.$-]+)')
_MODULE = re.compile(r"module @\S+")
_DEFINED = re.compile(rf"func\.func \w+ {_SYMBOL.pattern}")


def calls_back(text: str) -> bool:
    """Returns whether a program calls back into Python, so that only the process that lowered it can use it."""
    return "callback" in text


def calls_cudnn(text: str) -> bool:
    """Returns whether a program calls cuDNN directly, as `jax.nn.dot_product_attention` does on request.

    XLA plans the call only if it compiles with the device. A program without the plan loads, and fails when it runs.
    """
    return "__cudnn$" in text


def remove_notes(lowered: Any) -> None:
    """Removes notes for profilers from a lowered program, before compiling it without its device.

    XLA keeps the notes in a table. An executable compiled without its device lacks the table, so it would not load
    ("Invalid metadata payload id", jaxlib 0.11).
    """
    from jax.extend.mlir import ir  # only workers need it

    def remove(operation: Any) -> ir.WalkResult:
        attributes = operation.operation.attributes
        if _ATTRIBUTES in attributes:
            notes = ir.DictAttr(attributes[_ATTRIBUTES])
            all_of_them = [notes[position] for position in range(len(notes))]
            kept = {note.name: note.attr for note in all_of_them if note.name != _METADATA}
            attributes[_ATTRIBUTES] = ir.DictAttr.get(kept, context=operation.operation.context)
        return ir.WalkResult.ADVANCE

    lowered.compiler_ir().operation.walk(remove)


def identity(
    lowered: Any, text: str, traced: ProgramText, compiler_options: Mapping[str, Any], *, is_shared: bool = True
) -> str:
    """Returns a hash that two programs share only if they do the same, whatever the names of their functions.

    It has two halves: a hash of the traced program, and a hash of the program's text, its interface and the compiler
    options. The text of a kernel contains line numbers of its source, so the traced program stands for kernels.

    Args:
        lowered: the program.
        text: its text.
        traced: the text of the traced program.
        compiler_options: the options to compile it with, in addition to its function's options.
        is_shared: whether its trial depends only on the program.

    Returns:
        The hash. Its second half is empty if `is_shared` is false, or if the text does not show the whole program: the
        program calls back into Python, so that its text shows only an index in a table of functions, or JAX does not
        show its interface.
    """
    interface = jax_functions.hidden_interface(lowered)
    if calls_back(text) or interface is None or not is_shared:
        return f"{PREFIX}{traced.hash}."
    try:
        tree = describe_structure(lowered.out_tree)
    except TypeError:  # a class whose repr shows only an address
        tree = ADDRESS.sub("", str(lowered.out_tree))
    kernels = traced.hash if _has_kernels(text) else ""
    whole = f"{interface} {tree} {text_of(compiler_options)} {kernels} {_normal(text)}"
    return f"{PREFIX}{traced.hash}.{hashlib.sha256(whole.encode()).hexdigest()[:24]}"


def _normal(text: str) -> str:
    """Returns the text of a program without notes, places and names of functions."""
    if "@empty_mesh" in text:
        text = _PLACES.sub("", text)
    if _has_kernels(text):
        text = "\n".join(map(_without_source, text.split("\n")))
    text = _NOTES.sub("", text)
    numbers = {name: f"@{number}" for number, name in enumerate(dict.fromkeys(_DEFINED.findall(text)))}
    return _SYMBOL.sub(lambda symbol: numbers.get(symbol[1], symbol[0]), _MODULE.sub("", text, count=1))


def _without_source(line: str) -> str:
    """Returns a line without the text of a kernel, if it calls one."""
    return _QUOTED.sub("", line) if _has_kernels(line) else line


def _has_kernels(text: str) -> bool:
    return any(f"custom_call @{kernel}" in text for kernel in _KERNELS)


# --- line by line ---


_UNSAID = frozenset({"takes", "debug_callback", "debug_print"})
_LARGEST_INTEGER = 1 << 20
_MOST_ELEMENTS = 16
_MOST_CHARS = 300


class ProgramLines(ProgramText):
    """The lines of a program, without details that may differ between processes.

    Attributes:
        counts: the number of equations or constants that each line describes.
    """

    left_out = ProgramText.left_out | {"backend"}

    def __init__(self, jaxpr: Any) -> None:
        """Describes a closed jaxpr."""
        super().__init__(jaxpr)
        self.counts = collections.Counter(self.lines)

    def place(self, line: str) -> str:
        """Returns the code that makes the first equation of a line, and the values that it uses; empty if unknown."""
        place, code = self._place(self.lines.index(line)) if line in self.counts else ("", None)
        if code is None:
            return ""
        spaces = map(content, list(sys.modules.values()))
        names = next((space for space in spaces if space.get("__file__") == code.co_filename), {})
        values = [name for name in code.co_names if not callable(value := names.get(name, len)) and not ismodule(value)]
        used = ", ".join([*code.co_freevars, *values])
        return f"{place}{used and f', which uses {used}'}"

    def _add(self, what: str, parts: Sequence[str], equation: Any = None) -> None:
        if what not in _UNSAID and parts:
            super()._add(_shortened(" ".join([what, *parts])), (), equation)

    def _program(self, jaxpr: Any) -> str:
        self._write(jaxpr)
        return ""

    def _typed(self, variable: Any, names: dict[Any, str]) -> str:
        return _type(variable.aval)

    def _constant(self, variable: Any, value: Any, names: dict[Any, str]) -> Sequence[str]:
        names[variable] = _array(value)
        return [names[variable]] if getattr(value, "shape", ()) else []  # a scalar may be a literal in another process

    def _operand(self, operand: Any, names: dict[Any, str]) -> str:
        return _array(operand.val) if hasattr(operand, "val") else names.get(operand) or _type(operand.aval)

    def _text_of_leaf(self, value: Any) -> str | None:
        if isinstance(value, (str, enum.Enum, np.dtype)):
            return ADDRESS.sub("", str(getattr(value, "name", value)))
        if isinstance(value, (int, float, complex, np.number, np.bool_)):
            return _number(value)
        if is_program(value):
            return self._program(value)
        is_object = isinstance(value, type) or not dataclasses.is_dataclass(value)
        return "" if is_object and not isinstance(value, (tuple, list, set, frozenset, Mapping)) else None


def _type(aval: Any) -> str:
    is_array = hasattr(aval, "shape")
    return f"{getattr(aval, 'dtype', '')}[{','.join(map(str, aval.shape))}]" if is_array else type(aval).__name__


def _array(value: Any) -> str:
    """Returns the shape of a constant, and its value if it is small and not the rounded result of a device.

    The text omits the width of its dtype, because JAX keeps a NumPy array as it was at its first use in a program.
    """
    shape = np.shape(value)
    text = f"[{','.join(map(str, shape))}]" if shape else ""
    try:
        kind = np.dtype(getattr(value, "dtype", type(value))).kind
        if (size := math.prod(shape)) <= 1 or (kind in "biu" and size <= _MOST_ELEMENTS):
            return text + ",".join(map(_number, np.asarray(value).reshape(-1).tolist()))
        return kind + text
    except Exception:  # a key, or a deleted array
        return text


def _number(value: Any) -> str:
    if isinstance(value, (int, np.integer, np.bool_)):
        return str(value) if abs(int(value)) <= _LARGEST_INTEGER else "large"
    return f"{value:.3g}"  # the last bits of a constant may differ between the devices that computed it


def _shortened(line: str) -> str:
    rest = line[_MOST_CHARS:]
    return line if not rest else f"{line[:_MOST_CHARS]}... {hashlib.sha256(rest.encode()).hexdigest()[:8]}"
