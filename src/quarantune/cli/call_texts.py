"""Reads the arguments of a call as people write them: `bf16[4096,4096] f32[] 3 causal=true`. Needs no JAX."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from quarantune.cli.output import InputError
from quarantune.values.texts import did_you_mean, shown
from quarantune.values.trial import ArrayKind

_FLOAT8 = ("e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")
_NAMES = [
    *("bool", "bfloat16", "float16", "float32", "float64", "complex64", "complex128", "float4_e2m1fn"),
    *(f"float8_{kind}" for kind in _FLOAT8),
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (2, 4, 8, 16, 32, 64)),
]
_SHORT = (("bfloat", "bf"), ("float", "f"), ("complex", "c"), ("uint", "u"), ("int", "i"), ("int", "s"))
_DTYPES = {name: name for name in _NAMES} | {"pred": "bool"}
_DTYPES |= {name.replace(long, short): name for long, short in _SHORT for name in _NAMES if name.startswith(long)}
"""Dtypes by the names of NumPy, JAX (`i32`) and XLA (`s32`, `pred`)."""

_ARGUMENT = re.compile(
    r"(?P<all>(?:(?P<name>[^\W\d]\w*)\s*=\s*)?"
    r"(?:(?P<dtype>[A-Za-z]\w*)\s*\[(?P<sizes>[^\[\]]*)\]|(?P<word>\([^()]*\)|[^\s,=\[\]()]+)))(?:[\s,]+|$)"
)
"""Pattern of an array or a word, with or without a name, up to the next argument."""
_WORDS = {"true": True, "false": False, "none": None}
_HOW = "write arrays as bf16[4096,4096] or f32[], numbers as 3 or 0.5, and keywords as name=value"


@dataclasses.dataclass(frozen=True)
class GivenCall:
    """The arguments of one call.

    Attributes:
        args: the positional arguments: `ArrayKind`, numbers, booleans and None; or real arguments of the function.
        kwargs: the keyword arguments, which may also be strings.
        source: the option with the call, for messages.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    source: str = "--args"

    def with_statics(self, statics: Mapping[str, Any]) -> GivenCall:
        """Returns the call with the static parameters of all calls.

        Raises:
            InputError: The call already sets one of them.
        """
        if twice := sorted(statics.keys() & self.kwargs.keys()):
            raise InputError(f"{self.source} and --static both give {twice[0]}: leave one out")
        return dataclasses.replace(self, kwargs={**self.kwargs, **statics})


def read(options: argparse.Namespace) -> list[GivenCall] | None:
    """Returns the calls of a command before the import of JAX; None if another option gives them.

    Raises:
        InputError: An option does not describe a call.
    """
    statics = parse_statics(options.static)
    for name in ("recorded", "profile"):
        if getattr(options, name, None) is not None:
            if statics or getattr(options, "estimate_for", None) is not None:
                raise InputError(f"--{name} goes with neither --static nor --estimate-for: leave them out")
            return None
    if options.function is None:
        command = f"quarantune {options.command} MODULE:FUNCTION"
        raise InputError(f"the function is missing: write {command}, or --recorded DIR for all")
    if options.inputs is not None:
        return None
    found = [parse_call(options.args)] if options.args is not None else read_calls(options.shapes)
    return [call.with_statics(statics) for call in found]


def parse_call(text: str, *, source: str = "--args") -> GivenCall:
    """Returns the arguments that a text describes.

    Args:
        text: the text.
        source: its origin, for the message of an error.

    Raises:
        InputError: The text does not describe arguments.
    """
    try:
        return GivenCall(*_arguments(text.removeprefix("\ufeff")))  # a byte order mark from `$(cat FILE)`
    except ValueError as error:
        raise InputError(f"{source} {shown(text.strip())}: {error}") from None


def _arguments(text: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    rest = text.strip().rstrip(",")
    while rest:
        found = _ARGUMENT.match(rest)
        if found is None:
            raise ValueError(f"{shown(rest)} is not an argument: {_HOW}")
        name, word = found["name"], found["word"]
        value = _array(found["dtype"], found["sizes"]) if word is None else parse_value(word)
        if name is None:
            if word is not None and isinstance(value, str):
                hint = f"write {value}[] for an array without dimensions" if value.lower() in _DTYPES else _HOW
                raise ValueError(f"{shown(value)} is not an argument: {hint}")
            if kwargs:
                raise ValueError(f"{shown(found['all'])} comes after a keyword argument: put it first, or name it")
            args.append(value)
        elif name in kwargs:
            raise ValueError(f"{name} is given twice: leave one out")
        else:
            kwargs[name] = value
        rest = rest[found.end() :]
    return tuple(args), kwargs


def parse_value(text: str) -> Any:
    """Returns the value of a text: a Python literal, true, false or none; else the text itself."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return _hashable(ast.literal_eval(text))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def parse_statics(given: Iterable[str]) -> Mapping[str, Any]:
    """Returns the static parameters that texts such as `causal=true` set.

    Raises:
        InputError: A text has another form, or sets a parameter again.
    """
    statics: dict[str, Any] = {}
    for text in given:
        name, is_given, value = text.partition("=")
        if not (is_given and name.strip().isidentifier()):
            raise InputError(f"--static {shown(text)} is not valid: write NAME=VALUE, as in causal=true")
        if name.strip() in statics:
            raise InputError(f"--static gives {name.strip()} twice: leave one out")
        statics[name.strip()] = parse_value(value.strip())
    return statics


def read_calls(path: str) -> list[GivenCall]:
    """Returns the calls in a file, one per line; skips empty lines and lines that begin with `#`.

    Args:
        path: the file, or `-` for stdin.

    Raises:
        InputError: The file is not readable or has no calls, or a line is not a call.
    """
    name = "stdin" if path == "-" else path
    try:
        lines = (sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()).decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InputError(f"--shapes {shown(path)} cannot be read ({reason}): name a text file") from error
    given = {number: line for number, line in enumerate(lines, start=1) if line.partition("#")[0].strip()}
    if not given:
        raise InputError(f"{name} holds no call: write the arguments of a call on each line, as f32[8,128] f32[128]")
    calls = [parse_call(line, source=f"{name}, line {number}") for number, line in given.items()]
    return [dataclasses.replace(call, source=f"--shapes, call {at}") for at, call in enumerate(calls, start=1)]


def _array(dtype: str, sizes: str) -> ArrayKind:
    name = _DTYPES.get(dtype.lower())
    if name is None:
        hint = did_you_mean(dtype, _DTYPES) or " Known are bf16, f16, f32, i8, i32, u8, bool and others."
        raise ValueError(f"there is no dtype {shown(dtype)}.{hint}")
    shape = []
    for size in sizes.split(",") if sizes.strip() else ():
        if not re.fullmatch(r"\s*\d{1,18}\s*", size, flags=re.ASCII):
            raise ValueError(f"{shown(size.strip())} is not a size: write whole numbers, as in {dtype}[4096,128]")
        shape.append(int(size))
    return ArrayKind(tuple(shape), name)


def _hashable(value: Any) -> Any:
    """Returns a literal with tuples instead of lists, because jit hashes static values."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_hashable, value))
    if isinstance(value, (dict, set, bytes)):
        raise ValueError("jit cannot hash it")
    return value
