"""What a tuned result depends on, as short hashes part by part: code, closure, defaults, helpers, options."""

from __future__ import annotations
import __future__

import ast
import collections
import contextlib
import dataclasses
import dis
import enum
import functools
import hashlib
import inspect
import logging
import operator
import re
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from quarantune.cache import reach
from quarantune.cache.keys import canonical_json, short_hash

_LARGEST_HASHED_BYTES = 1 << 24
"""Larger arrays count by shape and dtype alone: hashing model weights would cost more than it tells."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """The parts that a tuned result depends on.

    Attributes:
        parts: a short hash for each part: `code`, `defaults`, `closure:x`, `helper:f`, `global:X`,
            `option:o`.
    """

    parts: dict[str, str]

    @property
    def digest(self) -> str:
        """A short hash of all parts."""
        return short_hash(canonical_json(self.parts))

    def differences(self, other: Fingerprint | Mapping[str, str]) -> list[str]:
        """Returns the names of the parts that differ, or that only one of the two has."""
        theirs = other.parts if isinstance(other, Fingerprint) else other
        return sorted(name for name in self.parts.keys() | theirs.keys() if self.parts.get(name) != theirs.get(name))


def fingerprint(fn: Callable[..., Any], *, options: Mapping[str, Any] | None = None) -> Fingerprint:
    """Returns the fingerprint of a function and the options that decide which config wins.

    It covers the function's code, its defaults and closure by value, and, transitively, the functions, classes
    and constants of the user's own modules that its code names: as globals, as attributes of modules
    (`kernels.body`), and as methods. Of an installed package only the name counts, as its version is recorded
    beside the fingerprint, and so it is with a module that the function imports itself. Comments, docstrings,
    whitespace, the decorators of `fn` itself and its place in the file do not count. It is the same in every
    process. Values count as they are now: take it once, before the function has run.

    Args:
        fn: the function or other callable, wrapped or not.
        options: the options, by name; functions among them count as `fn` does, and by their decorators too.
    """
    described = {f"option:{name}": _hash(_describe_option(value)) for name, value in (options or {}).items()}
    return Fingerprint(parts=_Walk(fn).parts | described)


def _describe_option(value: Any) -> Any:
    described = _describe(value)
    function = _root_function(value) if callable(value) else None
    if function is None or reach.is_library_file(function.__code__.co_filename):
        return described
    return [described, _Walk(value).parts]


def _root_function(fn: Any) -> types.FunctionType | None:
    """Returns the Python function that runs where `fn` is called, or None."""
    return _plain_function(fn) or _plain_function(inspect.getattr_static(type(fn), "__call__", None))


class _Walk:
    """Collects the parts of one callable, and of what it reaches in the user's own code.

    What is in the callable's own module is a `helper` or `class` by its plain name; what is in another of the
    user's modules goes by that module's name too.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.parts: dict[str, str] = {}
        self._seen: set[int] = set()
        self._followed: set[int] = set()
        function = _root_function(fn)
        self._module = function.__globals__ if function else {}
        if function is None:
            self.parts["code"] = _hash(_describe(fn))
            return
        if (wrapping := _describe_wrapping(fn)) is not None:
            self.parts["bound"] = _hash(wrapping)
        self._seen.add(id(function))
        self.parts["code"] = _hash(_code_text(function, with_decorators=False))
        self.parts["defaults"] = _hash(_describe_defaults(function))
        self._follow_bound(fn)
        self._visit_surroundings("closure", function, owner=_owner(fn))

    def _visit(self, kind: str, name: str, value: Any) -> None:
        function = _plain_function(value)
        if function is not None and function.__globals__ is self._module:
            self._visit_helper(f"helper:{name}", value, function)
        elif isinstance(value, type) and value.__module__ == self._module.get("__name__"):
            self._visit_class(value)
        else:
            self.parts[f"{kind}:{name}"] = _hash(_describe(value))
            self._follow(value)

    def _visit_helper(self, part: str, value: Any, function: types.FunctionType) -> None:
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        description = [_code_text(function), _describe_defaults(function), _describe_wrapping(value)]
        self.parts[part] = _hash(description)
        self._follow_bound(value)
        self._visit_surroundings(f"{part}:closure", function, owner=_owner(value))

    def _visit_class(self, cls: type) -> None:
        if id(cls) in self._seen:
            return
        self._seen.add(id(cls))
        is_own = cls.__module__ == self._module.get("__name__")
        label = cls.__qualname__ if is_own else f"{cls.__module__}.{cls.__qualname__}"
        self.parts[f"class:{label}"] = _hash([_type_name(base) for base in cls.__mro__])
        for name, member in vars(cls).items():
            if name not in _CLASS_MACHINERY and (is_own or _is_written_out(member)):
                self._visit("class", f"{label}.{name}", getattr(member, "fget", None) or member)
        if issubclass(cls, enum.Enum) and not is_own:
            values = {name: member.value for name, member in cls.__members__.items()}
            self.parts[f"class:{label}.values"] = _hash(_describe(values))
        for base in cls.__mro__[1:]:
            if reach.is_users_class(base):
                self._visit_class(base)

    def _visit_surroundings(self, kind: str, function: types.FunctionType, *, owner: type | None) -> None:
        is_own = function.__globals__ is self._module
        prefix = "" if is_own else f"{function.__module__}."
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._follow(default)
        free = dict(_closure(function))
        for name, value in free.items():
            if is_own:
                self._visit(kind, name, value)
            else:  # a description of the function has them by value
                self._follow(value)
        for name in sorted(set(_global_names(function.__code__))):
            if name in function.__globals__:
                self._visit("global", prefix + name, function.__globals__[name])
        for chain in reach.chains(function.__code__):
            if chain.kind == "first":
                self._visit_chain("class", owner, chain.path[:1], function)
            else:
                scope = function.__globals__ if chain.kind == "global" else free
                self._visit_chain("global", scope.get(chain.root, reach.NOTHING), chain.path, function)

    def _visit_chain(self, kind: str, value: Any, path: tuple[str, ...], function: types.FunctionType) -> None:
        """Visits what a dotted name stands for, where its root is a module, a class or an object of the user's own."""
        for name in path:
            if isinstance(value, types.ModuleType):
                if reach.is_library(value.__name__):
                    return
                found = reach.attribute(value, name)
                if found is not reach.NOTHING and not isinstance(found, types.ModuleType):
                    self._visit(kind, f"{value.__name__}.{name}", found)
            else:
                cls = value if isinstance(value, type) else type(value)
                if value is reach.NOTHING or not reach.is_users_class(cls):
                    return
                found = reach.attribute(value, name)
                if found is not reach.NOTHING and _is_written_out(reach.attribute(cls, name)):
                    label = cls.__qualname__ if self._is_own(cls) else f"{cls.__module__}.{cls.__qualname__}"
                    self._visit("class", f"{label}.{name}", getattr(found, "fget", None) or found)
            value = found
        if isinstance(value, types.ModuleType) and not reach.is_library(value.__name__):
            # Under another name, or handed on: any name in the code may be one of its attributes.
            for name in sorted(reach.names(function.__code__) & vars(value).keys()):
                self._visit_chain(kind, value, (name,), function)
        elif callable(value) and not isinstance(value, (type, types.FunctionType)):
            self._visit_chain("class", value, ("__call__",), function)

    def _is_own(self, cls: type) -> bool:
        return cls.__module__ == self._module.get("__name__")

    def _follow(self, value: Any, depth: int = 0) -> None:
        """Visits what a value that has been described reaches in turn, which no description of it shows."""
        function = _plain_function(value)
        if function is not None:
            self._follow_bound(value)
            if id(function) not in self._followed and not reach.is_library_file(function.__code__.co_filename):
                self._followed.add(id(function))
                self._visit_surroundings(f"{function.__qualname__}:closure", function, owner=_owner(value))
        elif isinstance(value, type):
            if reach.is_users_class(value):
                self._visit_class(value)
        elif type(value) in (list, tuple, dict) and depth < _DEEPEST_FOLLOWED:
            for item in value.values() if isinstance(value, dict) else value:
                if not isinstance(item, _LITERALS):
                    self._follow(item, depth + 1)

    def _follow_bound(self, value: Any) -> None:
        """Follows the arguments that partials have bound."""
        while isinstance(value, functools.partial):
            for item in (*value.args, *value.keywords.values()):
                self._follow(item)
            value = value.func


_DEEPEST_FOLLOWED = 8


def _owner(fn: Any) -> type | None:
    """Returns the class whose method runs where `fn` is called, or None."""
    if isinstance(fn, types.MethodType):
        return fn.__self__ if isinstance(fn.__self__, type) else type(fn.__self__)
    if isinstance(fn, functools.partial):
        return _owner(fn.func)
    function = _plain_function(fn)
    if function is None:
        return type(fn)
    return reach.defining_class(function)


def _is_written_out(member: Any) -> bool:
    """Returns whether a class's member is what its author wrote: functions, classes and constants, not machinery."""
    if isinstance(member, (type, property, *_LITERALS)):
        return True
    return _plain_function(member) is not None


_CLASS_MACHINERY = frozenset(
    {"__module__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__qualname__", "__firstlineno__"}
    | {"__static_attributes__", "__abstractmethods__", "_abc_impl"}
)


def _plain_function(value: Any) -> types.FunctionType | None:
    """Returns the Python function inside jit wrappers, decorators, methods and partials, or None."""
    # Bounded, as an odd object may have any attribute, which has any attribute, and so on.
    for _ in range(32):
        inner = _inside(value)
        if inner is None:
            return value if isinstance(value, types.FunctionType) else None
        value = inner
    return None


def _inside(value: Any) -> Any:
    if isinstance(value, (types.MethodType, staticmethod, classmethod)):
        return value.__func__
    if isinstance(value, functools.partial):
        return value.func
    try:
        return None if isinstance(value, type) else getattr(value, "__wrapped__", None)
    except Exception:
        return None


def _describe_wrapping(value: Any) -> Any:
    """Returns what the layers around a plain function add to it."""
    if isinstance(value, functools.partial):
        return ["partial", _describe(value.args), _describe(value.keywords), _describe_wrapping(value.func)]
    if isinstance(value, types.MethodType):
        return ["method", _describe_instance(value.__self__)]
    if isinstance(value, types.FunctionType):
        is_wrapper = hasattr(value, "__wrapped__") and not reach.is_library_file(value.__code__.co_filename)
        return ["function", _code_text(value)] if is_wrapper else None
    if isinstance(value, (staticmethod, classmethod)):
        return _describe_wrapping(value.__func__)
    # A jit wrapper's options are in the decorator's text; its type is its version's affair.
    return None if _plain_function(value) else ["callable", _describe_instance(value)]


def _describe_instance(value: Any, seen: dict[int, Any] | None = None) -> Any:
    """Describes what a method is bound to, or an object that is called: by its fields where its repr tells nothing."""
    described, seen = _describe(value), {} if seen is None else seen
    if described != [_type_name(type(value)), ""]:
        return described
    if id(value) in seen:  # each once, as there may be very many ways to one
        return [*described, list(seen).index(id(value))]
    seen[id(value)] = value
    try:
        state = value.__getstate__()
        # A dict, or with slots a pair of them.
        parts = [part for part in (state if isinstance(state, tuple) else (state,)) if isinstance(part, dict)]
        fields = {name: field for part in parts for name, field in part.items() if not _is_cached(value, name)}
        return [*described, [[name, _describe_instance(fields[name], seen)] for name in sorted(fields)]]
    except Exception:
        return described


def _is_cached(value: Any, name: str) -> bool:
    return isinstance(getattr(type(value), name, None), functools.cached_property)


def _describe_defaults(function: types.FunctionType) -> Any:
    return _describe([function.__defaults__, function.__kwdefaults__])


def _closure(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        # A cell is empty while the variable has not been assigned yet.
        with contextlib.suppress(ValueError):
            yield name, cell.cell_contents


def _global_names(code: types.CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for nested in _nested(code):
        yield from _global_names(nested)


def _nested(code: types.CodeType) -> list[types.CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]


def _code_text(function: types.FunctionType, *, with_decorators: bool = True) -> str:
    """Returns a text for what a function's code does.

    The source, normalised, is the same for all versions of Python. It counts only if it compiles to what is
    loaded: a file edited since then shows the wrong one, and the lines of a lambda may show several. Else it
        is the compiled code.
    """
    with contextlib.suppress(Exception):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
        if isinstance(definition, (ast.FunctionDef, ast.AsyncFunctionDef)) and _is_source_of(definition, function):
            if not with_decorators:
                definition.decorator_list = []
            return ast.unparse(_WithoutDocstrings().visit(definition))
    return canonical_json(_describe_code(function.__code__))


def _is_source_of(definition: ast.FunctionDef | ast.AsyncFunctionDef, function: types.FunctionType) -> bool:
    code = function.__code__
    # Inside a shell whose parameters are the free variables, the definition compiles as it did where it
    # stands.
    shell = ast.parse(f"def shell({', '.join(code.co_freevars)}): pass")
    body: list[ast.stmt] = [definition]
    if definition.name not in code.co_freevars:
        body.insert(0, ast.Global(names=[definition.name]))
    shell.body[0].body = body  # type: ignore[attr-defined]
    compiled = compile(
        ast.fix_missing_locations(shell), "shell", "exec", flags=code.co_flags & _FUTURES, dont_inherit=True
    )
    candidates = [found for found in _nested(_nested(compiled)[0]) if found.co_name == code.co_name]
    return _describe_code(code) in [_describe_code(found) for found in candidates]


_FUTURES = functools.reduce(
    operator.or_, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
)


def _describe_code(code: types.CodeType) -> Any:
    constants = list(code.co_consts)
    if constants and isinstance(constants[0], str) and constants[0] and code.co_flags & inspect.CO_NEWLOCALS:
        constants[0] = None  # The docstring's place.
    return [
        hashlib.sha256(code.co_code).hexdigest(),
        [_describe(constant) for constant in constants],
        [list(names) for names in (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)],
        [code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount],
    ]


class _WithoutDocstrings(ast.NodeTransformer):
    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
        return node


def _describe(value: Any, inside: tuple[int, ...] = ()) -> Any:
    """Returns a value as JSON-able data: the same in every process, and different for different values.

    Never raises; an object that shows nothing of itself but its address counts by its type.
    """
    if id(value) in inside:
        return ["cycle", len(inside) - inside.index(id(value))]
    try:
        return _describe_parts(value, (*inside, id(value)))
    except Exception:
        return ["object", _type_name(type(value))]


def _describe_parts(value: Any, inside: tuple[int, ...]) -> Any:
    kind = _type_name(type(value))
    if isinstance(value, enum.Enum):
        return [kind, value.name]
    if isinstance(value, _LITERALS):
        return [kind, repr(value)]
    if isinstance(value, types.CodeType):
        return [kind, _describe_code(value)]
    if isinstance(value, (list, tuple)):
        return [kind, [_describe(item, inside) for item in value]]
    if isinstance(value, (set, frozenset)):
        return [kind, sorted(canonical_json(_describe(item, inside)) for item in value)]
    if isinstance(value, Mapping):
        pairs = [[_describe(key, inside), _describe(item, inside)] for key, item in value.items()]
        return [kind, sorted(pairs, key=canonical_json)]
    if isinstance(value, type):
        return ["class", _type_name(value)]
    if isinstance(value, types.ModuleType):
        return ["module", value.__name__]
    if isinstance(value, logging.Logger):
        return ["logger", value.name]
    if all(hasattr(value, name) for name in ("dtype", "shape", "__array__")):
        return [kind, *_describe_array(value)]
    function = _plain_function(value)
    if function is not None:
        return ["function", *_describe_function(function, inside), _describe_wrapping(value)]
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return [kind, _describe(fields, inside)]
    if _holds_set(value):  # a repr shows it in an order of this process
        return [kind, _describe(_state(value), inside)]
    text = repr(value)
    return [kind, "" if _ADDRESS.search(text) else text]


def _state(value: Any) -> Any:
    """Returns what an object would be built from again, or None."""
    try:
        _, arguments, *state = value.__reduce_ex__(4)
    except Exception:
        return None
    return [arguments, *[list(part) if isinstance(part, Iterator) else part for part in state]]


def _holds_set(value: Any, outer: tuple[int, ...] = ()) -> bool:
    if isinstance(value, (set, frozenset)):
        return len(value) > 1
    if id(value) in outer or isinstance(value, (type, types.FunctionType, types.ModuleType, *_LITERALS)):
        return False
    outer = (*outer, id(value))
    if isinstance(value, (list, tuple)):
        return any(_holds_set(item, outer) for item in value)
    if isinstance(value, Mapping):
        return any(_holds_set(item, outer) for pair in value.items() for item in pair)
    if isinstance(value, (types.SimpleNamespace, collections.deque)) or reach.is_users_class(type(value)):
        return _holds_set(_state(value), outer)
    return False


_LITERALS = (type(None), bool, int, float, complex, str, bytes, type(...))
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}")


def _describe_array(value: Any) -> list[Any]:
    description = [str(value.dtype), [int(size) for size in value.shape]]
    # Asking a tracer for its elements raises, and an array of objects holds addresses.
    with contextlib.suppress(Exception):
        if value.nbytes <= _LARGEST_HASHED_BYTES and value.dtype.kind != "O":
            description.append(hashlib.sha256(value.__array__().tobytes()).hexdigest())
    return description


def _describe_function(function: types.FunctionType, inside: tuple[int, ...]) -> list[Any]:
    name = f"{function.__module__}.{function.__qualname__}"
    if reach.is_library_file(function.__code__.co_filename):
        # The code of libraries is their versions' affair, which entries record beside the fingerprint.
        return [name]
    closure = [[name, _describe(value, inside)] for name, value in _closure(function)]
    defaults = [_describe(function.__defaults__, inside), _describe(function.__kwdefaults__, inside)]
    return [_code_text(function), closure, defaults]


def _type_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _hash(description: Any) -> str:
    return short_hash(canonical_json(description))
