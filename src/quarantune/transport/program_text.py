"""A traced program as text: two processes that trace the same program write the same lines.

Unlike `programs.ProgramLines`, which may omit a difference, the text contains everything that JAX lowers: each equation
with its operands by number, each constant by its bytes, and the programs inside it. It omits dead code, names, the
functions in rules and callbacks, and the place of an array on a single device.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np
from jax.interpreters import partial_eval
from jax.sharding import NamedSharding, PartitionSpec

from quarantune.functions import describe
from quarantune.jax_internals import jax_traces

_MOVES_NOTHING = "reshard"
"""A primitive that does nothing on one device. Up to JAX 0.11, a worker that traces for a described device adds it."""
ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_DEEPEST = 12
_SHORT, _MOST_LINES = 4, 512
"""Number of digits of a line's hash in a cache entry, and of lines that have a hash there."""


class ProgramText:
    """The text of a closed jaxpr.

    Attributes:
        lines: the lines, in the order of the equations; a program inside an equation comes before it.
        left_out: names of parameters of equations, and of fields inside them, that do not count.
    """

    left_out: ClassVar = frozenset(
        {"debug", "debug_info", "device", "devices", "name", "name_and_src_info", "origin", "platforms"}
    )

    def __init__(self, jaxpr: Any) -> None:
        """Writes the text."""
        self.lines: list[str] = []
        self._equations: dict[int, Any] = {}
        self._written: dict[int, tuple[str, Any]] = {}
        self._avals: dict[Any, str] = {}
        self._program(jaxpr)

    @property
    def hash(self) -> str:
        """A hash of the text."""
        return hashlib.sha256("\n".join(self.lines).encode()).hexdigest()[:24]

    @property
    def short(self) -> str:
        """The first digits of the hashes of the first lines; `difference` compares them."""
        return "".join(map(_short, self.lines[:_MOST_LINES]))

    def difference(self, short: str) -> str:
        """Returns the first line that differs from another program's, and the place where the code makes it.

        Args:
            short: `short` of the other program.
        """
        theirs = [short[start : start + _SHORT] for start in range(0, len(short), _SHORT)]
        pairs = enumerate(self.lines[:_MOST_LINES])
        first = next((number for number, line in pairs if theirs[number : number + 1] != [_short(line)]), None)
        if first is None:
            return "it has fewer lines" if len(theirs) > len(self.lines) else "its last lines differ"
        return f"its line {first + 1} is {self.lines[first][:120]!r}{self._place(first)[0]}"

    def _place(self, number: int) -> tuple[str, types.CodeType | None]:
        """Returns the place that makes a line, as text and as code; empty and None if unknown."""
        origin = jax_traces.origin_of(self._equations[number]) if number in self._equations else None
        if origin is None:
            return "", None
        code, at = origin
        return f", made by {code.co_filename}:{at} in {code.co_qualname}", code

    def _program(self, jaxpr: Any) -> str:
        """Writes a program once, and returns its number."""
        if id(jaxpr) not in self._written:
            self._write(jaxpr)
            self._written[id(jaxpr)] = f"program {len(self._written)}", jaxpr  # no new object gets its address
        return self._written[id(jaxpr)][0]

    def _write(self, jaxpr: Any) -> None:
        consts, open_jaxpr = getattr(jaxpr, "consts", ()), getattr(jaxpr, "jaxpr", jaxpr)
        names: dict[Any, str] = {}
        self._add("takes", [self._typed(each, names) for each in [*open_jaxpr.constvars, *open_jaxpr.invars]])
        for variable, const in zip(open_jaxpr.constvars, consts, strict=False):
            self._add("constant", self._constant(variable, const, names))
        for equation in _live(open_jaxpr).eqns:
            operands = [self._operand(each, names) for each in equation.invars]
            if equation.primitive.name == _MOVES_NOTHING and describe.sharding_of(equation.outvars[0].aval) is None:
                names[equation.outvars[0]] = operands[0]
                continue
            made = [self._typed(each, names) for each in equation.outvars]
            self._add(equation.primitive.name, [*operands, "->", *made, *self._params(equation.params)], equation)
        self._add("return", [self._operand(each, names) for each in open_jaxpr.outvars])

    def _add(self, what: str, parts: Sequence[str], equation: Any = None) -> None:
        """Adds a line, and remembers its equation."""
        if equation is not None:
            self._equations[len(self.lines)] = equation
        self.lines.append(" ".join([what, *parts]))

    def _name(self, variable: Any, names: dict[Any, str]) -> str:
        return names.setdefault(variable, f"%{len(names)}")

    def _typed(self, variable: Any, names: dict[Any, str]) -> str:
        return f"{self._name(variable, names)}:{self._aval(variable.aval)}"

    def _constant(self, variable: Any, value: Any, names: dict[Any, str]) -> Sequence[str]:
        return self._name(variable, names), _bytes_of(value, variable.aval)

    def _operand(self, operand: Any, names: dict[Any, str]) -> str:
        if hasattr(operand, "val"):
            return f"{_bytes_of(operand.val, operand.aval)}:{self._aval(operand.aval)}"
        return self._name(operand, names)

    def _aval(self, aval: Any) -> str:
        if aval not in self._avals:
            text = ADDRESS.sub("", str(aval))
            if isinstance(aval, jax.core.ShapedArray):
                described = describe.describe_array(aval, aval.dtype)
                text = f"{described.pop('dtype')}{described.pop('shape')}{described or ''}"
            self._avals[aval] = text
        return self._avals[aval]

    def _params(self, params: Mapping[str, Any]) -> Iterator[str]:
        for name, value in sorted(params.items()):
            if name not in self.left_out and (text := self._text(value, 0)):
                yield f"{name}={text}"

    def _text(self, value: Any, depth: int) -> str:
        """Returns a parameter as text; writes the programs in it."""
        if (text := self._text_of_leaf(value)) is not None:
            return text
        if depth == _DEEPEST:
            return type(value).__qualname__
        within = functools.partial(self._text, depth=depth + 1)
        if dataclasses.is_dataclass(value):
            names = (field.name for field in dataclasses.fields(value) if field.name not in self.left_out)
            fields = ((name, within(getattr(value, name, None))) for name in names)
            return f"{type(value).__qualname__}({', '.join(f'{name}={text}' for name, text in fields if text)})"
        if isinstance(value, Mapping):
            return f"{{{', '.join(sorted(f'{within(key)}: {within(item)}' for key, item in value.items()))}}}"
        if isinstance(value, (tuple, list)):
            return f"({', '.join(map(within, value))})"
        if isinstance(value, (set, frozenset)):
            return f"{{{', '.join(sorted(map(within, value)))}}}"
        return "" if callable(value) else type(value).__qualname__

    def _text_of_leaf(self, value: Any) -> str | None:
        if isinstance(value, (enum.Enum, np.dtype)):
            return str(value.name)
        if isinstance(value, (types.NoneType, str, bool, int, float, complex)):
            return ADDRESS.sub("", repr(value))
        if isinstance(value, (np.generic, np.ndarray, jax.Array)):
            return _bytes_of(value, value)
        if isinstance(value, bytes):
            return hashlib.sha256(value).hexdigest()
        if isinstance(value, jax.core.AbstractValue):
            return self._aval(value)
        if isinstance(value, PartitionSpec):
            return str(describe.describe_spec(value))
        if isinstance(value, NamedSharding):
            is_spread = value.mesh.size > 1
            return f"{dict(value.mesh.shape)} {describe.describe_spec(value.spec)}" if is_spread else ""
        if isinstance(value, jax.tree_util.PyTreeDef):
            return ADDRESS.sub("", str(value))
        if isinstance(value, type):
            return value.__qualname__
        return self._program(value) if is_program(value) else None


def is_program(value: Any) -> bool:
    """Returns whether a value is a jaxpr, closed or not."""
    return hasattr(getattr(value, "jaxpr", value), "eqns")


def _live(jaxpr: Any) -> Any:
    """Returns a program without its dead code, which JAX does not lower either."""
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


def _short(line: str) -> str:
    return hashlib.sha256(line.encode()).hexdigest()[:_SHORT]


def _bytes_of(value: Any, like: Any) -> str:
    """Returns a constant as text: a number in full, an array by its bytes; `traced` for a tracer."""
    if isinstance(value, jax.core.Tracer):
        return "traced"
    if isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
        value, like = jax.random.key_data(value), jax.random.key_data(value)
    try:
        array = np.asarray(value)
        # JAX keeps a NumPy array as it was at its first use in a program.
        array = array.astype(like.dtype) if isinstance(like.dtype, np.dtype) else array
        return repr(array.item()) if array.ndim == 0 else f"{array.shape} {hashlib.sha256(array.tobytes()).hexdigest()}"
    except Exception:  # a deleted array, or an array on devices of other processes
        return type(value).__qualname__
