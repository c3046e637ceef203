"""Describes code and values for a fingerprint: what a function does, and the values it keeps, as JSON-able data.

A description is the same in every process and never raises: an object that shows nothing but its address counts by its
type. (The key of a call has a stricter describer, `values.describe`.)
"""

from __future__ import annotations
import __future__

import ast
import collections
import contextlib
import dataclasses
import enum
import functools
import hashlib
import inspect
import logging
import operator
import re
import textwrap
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from quarantune.cache import reach
from quarantune.cache.keys import canonical_json
from quarantune.values.texts import module_of

_LARGEST_HASHED_BYTES = 1 << 24
"""Larger arrays count by shape and dtype alone: hashing model weights would take too long."""

MOST_LAYERS = 32
"""A bound on the layers around a function, as an odd object may answer any attribute, endlessly."""

LITERALS = (type(None), bool, int, float, complex, str, bytes, type(...))
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}")


# --- values ----


def describe(value: Any, inside: tuple[int, ...] = ()) -> Any:
    """Describes a value: equal values alike in every process, different values differently.

    Args:
        value: the value.
        inside: the identities of the values that hold it.
    """
    if id(value) in inside:
        return ["cycle", len(inside) - inside.index(id(value))]
    try:
        return _describe_parts(value, (*inside, id(value)))
    except Exception:
        return ["object", type_name(type(value))]


def _describe_parts(value: Any, inside: tuple[int, ...]) -> Any:
    kind = type_name(type(value))
    if isinstance(value, enum.Enum):
        return [kind, value.name]
    if isinstance(value, LITERALS):
        return [kind, repr(value)]
    if isinstance(value, types.CodeType):
        return [kind, describe_code(value)]
    if isinstance(value, (list, tuple)):
        return [kind, [describe(item, inside) for item in value]]
    if isinstance(value, (set, frozenset)):
        return [kind, sorted(canonical_json(describe(item, inside)) for item in value)]
    if isinstance(value, Mapping):
        pairs = [[describe(key, inside), describe(item, inside)] for key, item in value.items()]
        return [kind, sorted(pairs, key=canonical_json)]
    if isinstance(value, type):
        return ["class", type_name(value)]
    if isinstance(value, types.ModuleType):
        return ["module", value.__name__]
    if isinstance(value, logging.Logger):
        return ["logger", value.name]
    if all(hasattr(value, name) for name in ("dtype", "shape", "__array__")):
        return [kind, *describe_array(value)]
    function = plain_function(value)
    if function is not None:
        return ["function", *_describe_function(function, inside), describe_wrapping(value)]
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return [kind, describe(fields, inside)]
    if _holds_set(value):  # a repr shows a set in an order that differs from process to process
        return [kind, describe(_state(value), inside)]
    return [kind, stable_repr(value)]


def stable_repr(value: Any) -> str:
    """Returns the repr of a value; an empty text if it shows an address."""
    text = repr(value)
    return "" if _ADDRESS.search(text) else text


def _state(value: Any) -> Any:
    """Returns the parts that a pickle of an object holds, or None."""
    try:
        _, arguments, *state = value.__reduce_ex__(4)
    except Exception:
        return None
    return [arguments, *[list(part) if isinstance(part, Iterator) else part for part in state]]


def _holds_set(value: Any, outer: tuple[int, ...] = ()) -> bool:
    if isinstance(value, (set, frozenset)):
        return len(value) > 1
    if id(value) in outer or isinstance(value, (type, types.FunctionType, types.ModuleType, *LITERALS)):
        return False
    outer = (*outer, id(value))
    if isinstance(value, (list, tuple)):
        return any(_holds_set(item, outer) for item in value)
    if isinstance(value, Mapping):
        return any(_holds_set(item, outer) for pair in value.items() for item in pair)
    if isinstance(value, (types.SimpleNamespace, collections.deque)) or reach.is_users_class(type(value)):
        return _holds_set(_state(value), outer)
    return False


def describe_array(value: Any, largest_bytes: int = _LARGEST_HASHED_BYTES) -> list[Any]:
    """Describes an array by shape and dtype, and up to a size by its elements."""
    description = [str(value.dtype), [int(size) for size in value.shape]]
    # The elements of a tracer cannot be read, and those of an array of objects are addresses.
    with contextlib.suppress(Exception):
        if value.nbytes <= largest_bytes and value.dtype.kind != "O":
            description.append(hashlib.sha256(value.__array__().tobytes()).hexdigest())
    return description


def _describe_function(function: types.FunctionType, inside: tuple[int, ...]) -> list[Any]:
    name = f"{function.__module__}.{function.__qualname__}"
    if reach.is_library_function(function):
        # A library's version stands for its code; cache entries record versions beside the fingerprint.
        return [name]
    closure = [[name, describe(value, inside)] for name, value in closure_of(function)]
    defaults = [describe(function.__defaults__, inside), describe(function.__kwdefaults__, inside)]
    return [code_text(function), closure, defaults]


def type_name(kind: type) -> str:
    """Returns the dotted name of a class."""
    return f"{module_of(kind)}.{kind.__qualname__}"


# --- functions and what wraps them ----

_HELD_AS = {"triton": "fn"}
"""The attribute in which kernels hold their function where it is not `__wrapped__`, by the package of their classes."""


def plain_function(value: Any) -> types.FunctionType | None:
    """Returns the Python function inside jit wrappers, decorators, methods and partials, or None."""
    for _ in range(MOST_LAYERS):
        inner = wrapped_by(value)
        if inner is None:
            return value if isinstance(value, types.FunctionType) else None
        value = inner
    return None


def wrapped_by(value: Any) -> Any:
    """Returns the function one layer inside a jit wrapper, decorator, method or partial; None if there is none."""
    if isinstance(value, (types.MethodType, staticmethod, classmethod)):
        return value.__func__
    if isinstance(value, functools.partial):
        return value.func
    if isinstance(value, type):
        return None
    attribute = _HELD_AS.get(type(value).__module__.partition(".")[0], "__wrapped__")
    try:
        return getattr(value, attribute, None)
    except Exception:
        return None


def describe_wrapping(value: Any) -> Any:
    """Describes the layers around a plain function: bound arguments, the object of a method, decorators."""
    if isinstance(value, functools.partial):
        return ["partial", describe(value.args), describe(value.keywords), describe_wrapping(value.func)]
    if isinstance(value, types.MethodType):
        return ["method", describe_instance(value.__self__)]
    if isinstance(value, types.FunctionType):
        is_wrapper = hasattr(value, "__wrapped__") and not reach.is_library_function(value)
        return ["function", code_text(value)] if is_wrapper else None
    if isinstance(value, (staticmethod, classmethod)):
        return describe_wrapping(value.__func__)
    # The options of a jit wrapper are in the decorator's text, and JAX's version stands for the wrapper's type.
    return None if plain_function(value) else ["callable", describe_instance(value)]


def describe_instance(value: Any, seen: dict[int, Any] | None = None) -> Any:
    """Describes the object of a method, or a callable object: by its fields if its repr shows only an address."""
    described, seen = describe(value), {} if seen is None else seen
    if described != [type_name(type(value)), ""]:
        return described
    if id(value) in seen:  # every object once, as it may be reachable in very many ways
        return [*described, list(seen).index(id(value))]
    seen[id(value)] = value
    try:
        state = value.__getstate__()
        # A dict, or a pair of them for a class with slots.
        parts = [part for part in (state if isinstance(state, tuple) else (state,)) if isinstance(part, dict)]
        fields = {name: field for part in parts for name, field in without_caches(value, part).items()}
        return [*described, [[name, describe_instance(fields[name], seen)] for name in sorted(fields)]]
    except Exception:
        return described


def without_caches(value: Any, part: Any) -> Any:
    """Returns the fields of an object without those that hold its cached properties; anything else as it is."""
    if not isinstance(part, dict):
        return part
    kind, cached = type(value), functools.cached_property
    return {name: item for name, item in part.items() if not isinstance(getattr(kind, str(name), None), cached)}


def describe_defaults(function: types.FunctionType) -> Any:
    """Describes the default values of a function's parameters."""
    return describe([function.__defaults__, function.__kwdefaults__])


def closure_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yields the names and values of a function's free variables, as far as they are assigned."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        with contextlib.suppress(ValueError):  # an empty cell: the variable is not assigned yet
            yield name, cell.cell_contents


# --- code ----


def code_text(function: types.FunctionType, *, with_decorators: bool = True) -> str:
    """Returns the code of a function as text, made once.

    That is the normalised source, the same in all versions of Python, if it compiles to the code that is loaded.
    Otherwise (the file was edited since, or the lines hold several lambdas) it is the compiled code.

    Args:
        function: the function.
        with_decorators: whether its decorators are part of the text.
    """
    known = _texts.setdefault(function, {})
    key = function.__code__, with_decorators
    if key not in known:
        known[key] = _code_text(function, with_decorators=with_decorators)
    return known[key]


_texts: weakref.WeakKeyDictionary[types.FunctionType, dict[Any, str]] = weakref.WeakKeyDictionary()


def _code_text(function: types.FunctionType, *, with_decorators: bool) -> str:
    with contextlib.suppress(Exception):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
        if isinstance(definition, (ast.FunctionDef, ast.AsyncFunctionDef)) and _is_source_of(definition, function):
            if not with_decorators:
                definition.decorator_list = []
            return ast.unparse(_WithoutDocstrings().visit(definition))
    return canonical_json(describe_code(function.__code__))


def _is_source_of(definition: ast.FunctionDef | ast.AsyncFunctionDef, function: types.FunctionType) -> bool:
    code = function.__code__
    # In a shell whose parameters are its free variables, the definition compiles to the code it has in its module.
    shell = ast.parse(f"def shell({', '.join(code.co_freevars)}): pass")
    body: list[ast.stmt] = [definition]
    if definition.name not in code.co_freevars:
        body.insert(0, ast.Global(names=[definition.name]))
    shell.body[0].body = body  # type: ignore[attr-defined]
    compiled = compile(
        ast.fix_missing_locations(shell), "shell", "exec", flags=code.co_flags & _FUTURES, dont_inherit=True
    )
    candidates = [found for found in reach.nested_code(reach.nested_code(compiled)[0]) if found.co_name == code.co_name]
    return describe_code(code) in [describe_code(found) for found in candidates]


_FUTURES = functools.reduce(
    operator.or_, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
)


def describe_code(code: types.CodeType) -> Any:
    """Describes a code object without its name, its file and its docstring."""
    constants = list(code.co_consts)
    if constants and isinstance(constants[0], str) and constants[0] and code.co_flags & inspect.CO_NEWLOCALS:
        constants[0] = None  # the docstring
    return [
        hashlib.sha256(code.co_code).hexdigest(),
        [describe(constant) for constant in constants],
        [list(names) for names in (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)],
        [code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount],
    ]


class _WithoutDocstrings(ast.NodeTransformer):
    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
        return node
