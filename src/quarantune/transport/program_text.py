"""The identity of a lowered program: by its text, equal in all processes that lower it for one kind of device."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from quarantune import jax_internals
from quarantune.values.config_values import text_of

PREFIX = "program:"
"""Begins every identity, and no key of JAX's compilation cache."""
# JAX writes where an array is if it is bound to its device; on the only device, that changes nothing.
_PLACE = r"sdy\.sharding = #sdy\.sharding<@empty_mesh, \[[^\]]*\]>"
_ATTRIBUTES, _METADATA = "mhlo.frontend_attributes", "xla_metadata_payload"
# Notes for profilers, such as the text of a config, which say nothing about the program.
_NOTES = re.compile(rf'{_METADATA} = "(?:[^"\\]|\\.)*"(?:, )?')
_PLACES = re.compile(rf" \{{{_PLACE}\}}|{_PLACE}, |, {_PLACE}|\n *sdy\.mesh @empty_mesh = .*")


def calls_back(text: str) -> bool:
    """Returns whether a program calls back into Python: it then belongs to the process that lowered it."""
    return "callback" in text


def calls_cudnn(text: str) -> bool:
    """Returns whether a program calls cuDNN by itself, as `jax.nn.dot_product_attention` does if asked to.

    XLA plans such a call only where it compiles with the device; a program without the plan loads, and fails when it
    runs.
    """
    return "__cudnn$" in text


def remove_notes(lowered: Any) -> None:
    """Removes notes for profilers from a lowered program that is to be compiled without its device.

    XLA keeps the notes in a table that such an executable lacks, so that it could not be loaded ("Invalid metadata
    payload id", jaxlib 0.11).
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
    lowered: Any, text: str, compiler_options: Mapping[str, Any], structure: Callable[[Any], object]
) -> str | None:
    """Returns a hash that two programs share only if they do the same.

    It covers the program's text, its interface and the compiler options.

    Args:
        lowered: the program.
        text: its text.
        compiler_options: the options that it is to be compiled with, in addition to those of its function.
        structure: describes the structure of its output with the static parts, which are no part of the program.

    Returns:
        The hash; None where the program calls back into Python, as its text holds only the index of the function in a
        table, or where JAX does not tell its interface.
    """
    interface = jax_internals.interface(lowered)
    if calls_back(text) or interface is None:
        return None
    program = _NOTES.sub("", _PLACES.sub("", text))
    whole = f"{interface} {structure(lowered.out_tree)} {text_of(compiler_options)} {program}"
    return PREFIX + hashlib.sha256(whole.encode()).hexdigest()
