"""Fingerprints: a short hash for each part that a tuned result depends on, such as code, closure, helpers, options.

The description of code or of a value is the same in every process. Describing never raises: an object whose repr shows
only its address counts by its type. (The key of a call uses a stricter describer, `functions.description`.)
"""

from __future__ import annotations
import __future__

import argparse
import ast
import collections
import contextlib
import dataclasses
import dis
import enum
import functools
import hashlib
import inspect
import json
import linecache
import logging
import marshal
import operator
import os
import re
import sys
import textwrap
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from quarantune.functions.names import PROGRAMS, is_runner, module_of
from quarantune.functions.object_parts import pickled_parts, without_caches
from quarantune.host.locks import new_lock
from quarantune.host.packages import is_installed
from quarantune.jax_internals import jax_functions
from quarantune.values.codec import Around, bounded, canonical_json, in_order, short_hash

_LARGEST_HASHED_BYTES = 1 << 24
"""Larger arrays count by shape and dtype alone: hashing model weights would take too long."""
MOST_LAYERS = 32
"""Most layers to look through around a function, because an odd object may answer any attribute, endlessly."""
_DEEPEST_FOLLOWED = 8
LITERALS = (type(None), bool, int, float, complex, str, bytes, type(...))
_LITERAL_NAMES = {kind: f"builtins.{kind.__qualname__}" for kind in LITERALS}
NOTHING = object()
"""The result of `attribute` for a missing attribute."""
_VERSIONED = frozenset({"jax", "jaxlib", "quarantune"})
"""Packages whose versions every entry records, even if they are not in a directory of installed packages."""
_HELD_AS = {"triton": "fn"}
"""The attribute that holds a kernel's function, by the package of the kernel's class; else it is `__wrapped__`."""
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}")
_CLASS_MACHINERY = frozenset(
    {"__module__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__qualname__", "__firstlineno__"}
    | {"__static_attributes__", "__abstractmethods__", "_abc_impl"}
)
_FUTURES = functools.reduce(
    operator.or_, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
)
_MANY = 1000
"""Number of plain values above which a container is hashed as a whole: describing 300,000 numbers takes 5 s."""
_PLAIN = frozenset(LITERALS) - {type(...)}
_SET_SHOWN = re.compile(r"\{[^:{}]+,[^:{}]*\}")
_MUTATORS = frozenset({"add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem"})
_MUTATORS |= {"popleft", "remove", "setdefault", "update"}
_AT_FIRST = frozenset({"__init__", "__new__", "__post_init__", "__setstate__"})
_texts: weakref.WeakKeyDictionary[types.FunctionType, dict[Any, str]] = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """The parts that a tuned result depends on.

    Attributes:
        parts: a short hash for each part: `code`, `defaults`, `closure:x`, `helper:f`, `global:X`, `rule:f.bwd`,
            `option:o`.
    """

    parts: dict[str, str]

    @property
    def digest(self) -> str:
        """A short hash of all parts."""
        return short_hash(canonical_json(self.parts))

    def differences(self, other: Fingerprint | Mapping[str, str]) -> list[str]:
        """Returns the names of parts that differ between the two fingerprints, or that one of them lacks."""
        theirs = other.parts if isinstance(other, Fingerprint) else other
        return sorted(name for name in self.parts.keys() | theirs.keys() if self.parts.get(name) != theirs.get(name))


def fingerprint(
    fn: Callable[..., Any], *, options: Mapping[str, Any] | None = None, is_proved: bool = False
) -> Fingerprint:
    """Returns the fingerprint of a function and the options that decide which config wins.

    It covers the function's code, and its defaults and closure by value. Transitively, it covers everything that the
    code names in the user's own modules:

    - functions, classes and constants: as globals, as attributes of modules (`kernels.body`,
      `getattr(kernels, "body")`), as methods and operators, and as registrations of `singledispatch`
    - fields of plain objects, and parsed flags of absl
    - rules of `jax.custom_vjp`, `jax.custom_jvp`, `custom_vmap` and `custom_partitioning` functions
    - the user's functions inside a library's function or object (`haiku.transform(f)`, `NUTS(model)`)

    Otherwise an installed package, or a module imported inside the function, counts by name only; cache entries record
    the versions of packages separately. Comments, docstrings, whitespace, the decorators of `fn` itself and its place
    in the file do not count. The fingerprint is the same in every process. It takes current values, so call this once,
    before the function has run.

    Args:
        fn: the function or other callable, wrapped or not.
        options: the options, by name. It covers functions among them in the same way, and their decorators too.
        is_proved: whether calls compare their programs before they use a result. If so, values that the user's code
            writes while it runs, such as memos, count by type: the key must not depend on earlier calls.
    """
    option_parts = {f"option:{name}": _hash(_describe_option(value)) for name, value in (options or {}).items()}
    return Fingerprint(parts=_Walk(fn, is_proved=is_proved).parts | option_parts)


def code_digest(arguments: Mapping[str, Any]) -> str:
    """Returns a hash of the user's code inside arguments; empty if they contain none.

    Args:
        arguments: by name: functions, classes, and objects and containers that hold them.
    """
    walk = _Walk(None)
    for name, value in arguments.items():
        walk.visit_argument(name, value)
    return short_hash(canonical_json(walk.parts)) if walk.parts else ""


def reached(fn: Callable[..., Any]) -> Mapping[tuple[str, ...], Any]:
    """Returns the values in modules that a function and the user's own code below it name, as they are now.

    Args:
        fn: the function or other callable, wrapped or not.

    Returns:
        The values by their places: the name of a module, followed by the attributes that lead to the value.
    """
    return _Walk(fn, has_parts=False).reached


def _describe_option(value: Any) -> Any:
    description = describe(value)
    function = _root_function(value) if callable(value) else None
    if function is None:
        return description
    if is_library_function(function):  # the result of a library call, such as `spaces.divides(...)`
        held = [[name, describe(item)] for name, item in closure_of(function)]
        return [description, held] if held else description
    return [description, _Walk(value).parts]


def _root_function(fn: Any) -> types.FunctionType | None:
    """Returns the Python function that a call of `fn` runs, or None."""
    return plain_function(fn) or plain_function(inspect.getattr_static(type(fn), "__call__", None))


class _Walk:
    """Collects the parts of one callable, and of the user's own code that it reaches.

    The parts of the callable's own module have plain names (`helper:f`, `class:C`). Names from the user's other modules
    start with the name of the module.
    """

    def __init__(self, fn: Any, *, has_parts: bool = True, is_proved: bool = False) -> None:
        self._has_parts = has_parts
        self._is_proved = is_proved
        self.parts: dict[str, str] = {}
        self.reached: dict[tuple[str, ...], Any] = {}
        self._seen: set[int] = set()
        self._followed: dict[int, Any] = {}  # holds the objects, so that no new object gets their addresses
        function = _root_function(fn)
        self._module = function.__globals__ if function else {}
        self._visit_rules(fn)
        if function is None:
            if fn is not None:
                self.parts["code"] = _hash(describe(fn))
            return
        if (wrapping := _describe_wrapping(fn)) is not None:
            self.parts["bound"] = _hash(wrapping)
        self._seen.add(id(function))
        self.parts["code"] = _hash(code_text(function, with_decorators=False))
        self.parts["defaults"] = _hash(_describe_defaults(function))
        self._follow_bound(fn)
        self._visit_surroundings("closure", function, owner=_owner(fn))

    def _visit(self, kind: str, name: str, value: Any) -> None:
        self._visit_rules(value)
        for cls, registered in _registrations(value):
            self._visit("closure", f"{name}[{type_name(cls)}]", registered)
        function = plain_function(value)
        if function is not None and function.__globals__ is self._module:
            self._visit_helper(f"helper:{name}", value, function)
        elif isinstance(value, type) and self._is_own(value):
            self._visit_class(value)
        else:
            self.parts[f"{kind}:{name}"] = _hash(describe(self._from_here(value))) if self._has_parts else ""
            self._follow(value)

    def _from_here(self, value: Any) -> Any:
        """Returns a path in the checkout relative to the module, so that the checkout may move; else the value."""
        home = os.path.dirname(os.path.abspath(self._module.get("__file__") or os.devnull))
        if isinstance(value, PurePath) and (value.is_relative_to(home) or PurePath(home).is_relative_to(value)):
            return ["path", os.path.relpath(value, home)]
        return value

    def _visit_helper(self, part: str, value: Any, function: types.FunctionType) -> None:
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        self.parts[part] = _hash([code_text(function), _describe_defaults(function), _describe_wrapping(value)])
        self._follow_bound(value)
        self._visit_surroundings(f"{part}:closure", function, owner=_owner(value))

    def _visit_class(self, cls: type) -> None:
        if id(cls) in self._seen:
            return
        self._seen.add(id(cls))
        is_own = self._is_own(cls)
        label = cls.__qualname__ if is_own else type_name(cls)
        self.parts[f"class:{label}"] = _hash([type_name(base) for base in cls.__mro__])
        for name, member in list(vars(cls).items()):  # describing a member may add another
            if name not in _CLASS_MACHINERY and (is_own or _is_written_out(member)):
                self.reached[cls.__module__, *cls.__qualname__.split("."), name] = member
                self._visit("class", f"{label}.{name}", _getter_of(member))
        if issubclass(cls, enum.Enum) and not is_own:
            values = {name: member.value for name, member in cls.__members__.items()}
            self.parts[f"class:{label}.values"] = _hash(describe(values))
        for base in cls.__mro__[1:]:
            if is_users_class(base):
                self._visit_class(base)

    def _visit_surroundings(self, kind: str, function: types.FunctionType, *, owner: type | None) -> None:
        is_own = function.__globals__ is self._module
        prefix = "" if is_own else f"{function.__module__}."
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._follow(default)
        free = dict(closure_of(function))
        for name, value in free.items():
            if is_own:
                self._visit(kind, name, value)
            else:  # the description of the function contains the values
                self._follow(value)
        chains = _chains_of(function.__code__)
        for name in sorted({chain.root for chain in chains if chain.kind == "global"}):
            if name in function.__globals__:
                value = function.__globals__[name]
                self.reached[function.__globals__.get("__name__", ""), name] = value
                if self._is_proved and _may_be_written(value) and name in _written_in(function).names:
                    self.parts[f"global:{prefix}{name}"] = _hash(["written", type_name(type(value))])
                elif not _is_read_by_fields(value, [each.path for each in chains if each[:2] == ("global", name)]):
                    self._visit("global", prefix + name, value)
        for name in (chain.root for chain in chains if chain.kind == "import"):
            # Not a part, because the module may be imported already or not.
            for module in (sys.modules.get(name), sys.modules.get(f"{function.__globals__.get('__package__')}.{name}")):
                if module is not None and not is_library(module.__name__):
                    used = _names(function.__code__) & vars(module).keys()
                    self.reached |= {(module.__name__, item): vars(module)[item] for item in used}
        for chain in chains:
            if chain.kind == "first":
                self._visit_chain("class", owner, chain.path[:1], function)
            elif chain.kind != "import":
                scope = function.__globals__ if chain.kind == "global" else free
                value = scope.get(chain.root, NOTHING)
                self._visit_chain("global", value, chain.path, function, prefix + chain.root)

    def _visit_chain(
        self, kind: str, value: Any, path: tuple[str, ...], function: types.FunctionType, label: str = ""
    ) -> None:
        """Visits the objects along a dotted name, if its root is one of the user's modules, classes or objects."""
        for name in path:
            if isinstance(value, types.ModuleType):
                found = attribute(value, name)
                self.reached[value.__name__, name] = found
                label = f"{value.__name__}.{name}"
                if is_library(value.__name__):
                    if not isinstance(found, types.ModuleType):
                        return
                elif found is not NOTHING and not isinstance(found, types.ModuleType):
                    self._visit(kind, label, found)
            else:
                cls = value if isinstance(value, type) else type(value)
                self._visit_state(label, value, name)
                if value is NOTHING or not is_users_class(cls):
                    return
                member = attribute(cls, name)
                found = member if isinstance(member, functools.cached_property) else attribute(value, name)
                if found is not NOTHING and _is_written_out(member):
                    owner = cls.__qualname__ if self._is_own(cls) else type_name(cls)
                    self._visit("class", f"{owner}.{name}", _getter_of(found))
                label = f"{label}.{name}"
            value = found
        if isinstance(value, types.ModuleType) and not is_library(value.__name__):
            # The code renames the module or passes it on: any name in the code may be an attribute of it.
            for name in sorted(_names(function.__code__) & vars(value).keys()):
                self._visit_chain(kind, value, (name,), function)
            return
        if not isinstance(value, (type, types.FunctionType)):
            self._visit_state(label, value)
            for name in _operators(type(value)):
                self._visit_chain("class", value, (name,), function)

    def _visit_state(self, label: str, value: Any, name: str = "") -> None:
        """Visits the state of an open object, or one described only by its type: field `name`, or all fields."""
        try:
            fields = vars(value)
        except Exception:  # an object may raise anything for any attribute
            return
        if isinstance(value, (type, types.ModuleType)) or not isinstance(fields, dict) or not label:
            return
        if plain_function(value) or not (_is_open(value) or describe(value) == [type_name(type(value)), ""]):
            return
        if self._is_proved and name in _written_in(value).attributes:
            return
        if name in fields and not isinstance(attribute(type(value), name), functools.cached_property):
            self._visit("global", f"{label}.{name}", fields[name])
        elif is_users_class(type(value)):
            left_out = _written_in(value).attributes if self._is_proved else frozenset()
            self.parts[f"global:{label}.fields"] = _hash(_describe_instance(value, left_out=left_out))
        elif name:
            with contextlib.suppress(Exception):  # absl has not parsed the flag yet
                if isinstance(found := getattr(value, name), LITERALS):
                    self.parts[f"global:{label}.{name}"] = _hash(describe(found))

    def _visit_rules(self, value: Any) -> None:
        """Visits the user's own rules of a function, such as its derivative, in all layers around it."""
        for _ in range(MOST_LAYERS):
            rules = {} if id(value) in self._seen else jax_functions.custom_rules(value)
            owner = ""
            if rules:
                self._seen.add(id(value))
                owner = getattr(value, "__qualname__", getattr(rules.get("fun"), "__qualname__", ""))
            for name, rule in rules.items():
                if _is_users(rule) or (isinstance(rule, dict) and any(map(_is_users, rules.values()))):
                    part = f"rule:{owner}.{name}"
                    same = sum(other.partition("#")[0] == part for other in self.parts)
                    self.parts[f"{part}#{same}" if same else part] = _hash(describe(rule))
                    self._follow(rule)
            value = wrapped_by(value)
            if value is None:
                return

    def _is_own(self, cls: type) -> bool:
        return cls.__module__ == self._module.get("__name__")

    def _follow(self, value: Any, depth: int = 0) -> None:
        """Visits the code that a described value reaches but its description does not show."""
        self._visit_rules(value)
        function = plain_function(value)
        if function is not None:
            self._follow_bound(value)
            if id(function) not in self._followed:
                self._followed[id(function)] = function
                if is_library_function(function):
                    held = dict(closure_of(function))
                    self._visit_held(f"{function.__module__}.{function.__qualname__}", held)
                    for item in held.values():
                        self._follow(item, depth)
                else:
                    self._visit_surroundings(f"{function.__qualname__}:closure", function, owner=_owner(value))
        elif isinstance(value, type):
            if is_users_class(value):
                self._visit_class(value)
        elif (items := _items(value)) is not None:
            if id(value) not in self._followed and depth < _DEEPEST_FOLLOWED:
                self._followed[id(value)] = value
                for item in items:
                    if not isinstance(item, LITERALS):
                        self._follow(item, depth + 1)
        elif not (isinstance(value, types.ModuleType) or is_users_class(type(value))):
            # JAX's objects hold only the rules above. An object of the user's class may keep programs it has compiled.
            is_jaxs = type(value).__module__.partition(".")[0] in ("jax", "jaxlib")
            fields = None if is_jaxs else getattr(value, "__dict__", None)
            if isinstance(fields, dict):
                self._visit_held(type_name(type(value)), {str(name): item for name, item in fields.items()})

    def visit_argument(self, name: str, value: Any, depth: int = 0) -> None:
        """Visits the user's code in an argument: all methods, because the callee may use any of them."""
        if isinstance(value, LITERALS) or id(value) in self._followed or depth > _DEEPEST_FOLLOWED:
            return
        if isinstance(value, type) or plain_function(value) is not None:
            if is_users_class(value) if isinstance(value, type) else _is_users(value):
                self._visit("argument", name, value)
            return
        self._followed[id(value)] = value
        items = _items(value)
        if is_users_class(type(value)):
            self._visit_class(type(value))
            items = items or getattr(value, "__dict__", {}).values()
        for item in items or ():
            self.visit_argument(name, item, depth + 1)

    def _visit_held(self, holder: str, held: Mapping[str, Any]) -> None:
        """Visits the user's own functions inside a library's function or object, such as `haiku.transform(f)`."""
        for name, value in sorted(held.items()):
            items = value if isinstance(value, (list, tuple)) else [value]
            for position, item in enumerate(items):
                function = plain_function(item)
                if function is not None and not is_library_function(function):
                    place = f"[{position}]" if items is value else ""
                    self._visit("closure", f"{holder}.{name}{place}", item)

    def _follow_bound(self, value: Any) -> None:
        """Follows the arguments bound by partials."""
        while isinstance(value, functools.partial):
            for item in (*value.args, *value.keywords.values()):
                self._follow(item)
            value = value.func


def _is_open(value: Any) -> bool:
    """Returns whether an object is a record with public fields, so that code names the fields that it reads."""
    return isinstance(value, (types.SimpleNamespace, argparse.Namespace)) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    )


def _is_read_by_fields(value: Any, paths: Sequence[tuple[str, ...]]) -> bool:
    """Returns whether code uses only fields of an open object."""
    return _is_open(value) and hasattr(value, "__dict__") and all(path and path[0] in vars(value) for path in paths)


def _may_be_written(value: Any) -> bool:
    return not (callable(value) or isinstance(value, (type, types.ModuleType)))


class _Written(NamedTuple):
    """The names that the functions of a module write while they run.

    Attributes:
        names: globals.
        attributes: attributes of objects, except writes in `__init__` and similar methods.
    """

    names: frozenset[str] = frozenset()
    attributes: frozenset[str] = frozenset()


def _written_in(thing: Any) -> _Written:
    """Returns the names written in the module of a function, or of an object's class."""
    names = getattr(thing, "__globals__", None) or vars(sys.modules.get(type(thing).__module__, object))
    file = names.get("__file__")
    return _written_in_file(file) if isinstance(file, str) and not is_installed(file) else _Written()


_parsing = new_lock()
_MOST_PARSED = 100


def _parsed(text: str) -> ast.Module:
    """Returns the syntax tree of a source text, even if other threads parse at the same time.

    Python 3.11 counts the depth of trees for all threads together, and raises SystemError if two threads build a tree.
    """
    with _parsing:
        for _ in range(_MOST_PARSED):
            with contextlib.suppress(SystemError):
                return ast.parse(text)
        return ast.parse(text)


@functools.lru_cache(maxsize=256)
def _written_in_file(file: str) -> _Written:
    try:
        tree = _parsed("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return _Written()
    names, attributes = set[str](), set[str]()
    for function in ast.walk(tree):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        nodes = list(ast.walk(function))
        outer = {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
        stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        names |= stored & outer
        for node in nodes:
            target: Any = None
            if isinstance(node, (ast.Subscript, ast.Attribute)) and not isinstance(node.ctx, ast.Load):
                target = node if isinstance(node, ast.Attribute) else node.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _MUTATORS:
                target = node.func.value
            if isinstance(target, ast.Name) and target.id not in stored - outer:
                names.add(target.id)
            elif isinstance(target, ast.Attribute) and function.name not in _AT_FIRST:
                attributes.add(target.attr)
    return _Written(frozenset(names), frozenset(attributes))


def _items(value: Any) -> Iterable[Any] | None:
    """Returns the values in a container or in one of the user's dataclasses; None for anything else."""
    if isinstance(value, tuple) or type(value) is list:
        return value
    if type(value) is dict:
        return value.values()
    if dataclasses.is_dataclass(value) and is_users_class(type(value)):
        with contextlib.suppress(Exception):  # an object may raise anything for any attribute
            return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return None


def _owner(fn: Any) -> type | None:
    """Returns the class whose method a call of `fn` runs, or None."""
    if isinstance(fn, types.MethodType):
        return fn.__self__ if isinstance(fn.__self__, type) else type(fn.__self__)
    if isinstance(fn, functools.partial):
        return _owner(fn.func)
    function = plain_function(fn)
    return type(fn) if function is None else _defining_class(function)


def _is_users(fn: Any) -> bool:
    """Returns whether a callable is the user's own code."""
    function = plain_function(fn)
    return is_users_class(type(fn)) if function is None else not is_library_function(function)


def _is_written_out(member: Any) -> bool:
    """Returns whether a class's author wrote a member: a function, class or constant, or a container of functions."""
    if isinstance(member, (type, property, functools.cached_property, *LITERALS)):
        return True
    if isinstance(member, (list, tuple, dict)):
        return any(map(plain_function, member.values() if isinstance(member, dict) else member))
    return plain_function(member) is not None


def _getter_of(member: Any) -> Any:
    """Returns the function of a property or cached property; any other member of a class as it is."""
    is_cached = isinstance(member, functools.cached_property)
    return member.func if is_cached else getattr(member, "fget", None) or member


def _registrations(value: Any) -> list[tuple[type, Any]]:
    """Returns the types and functions registered with a `functools.singledispatch` function, without its default."""
    if not isinstance(value, types.FunctionType) or value.__code__.co_filename != functools.__file__:
        return []
    return [(cls, registered) for cls, registered in getattr(value, "registry", {}).items() if cls is not object]


def _operators(cls: type) -> list[str]:
    """Returns the special methods that the user has written for a class. Python calls them without naming them."""
    written = {name for base in cls.__mro__ if is_users_class(base) for name in vars(base)}
    special = {name for name in written if name.startswith("__") and name.endswith("__")}
    return sorted(special - vars(object).keys() - _CLASS_MACHINERY)


_json = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode
"""Like `canonical_json`, but faster: descriptions contain only JSON types, and may have very many parts."""


def _hash(description: Any) -> str:
    return short_hash(_json(bounded(description, deepest=sys.maxsize)))


# --- the names in code, and whose code it is ---


class _Chain(NamedTuple):
    """A dotted name in a function's code: `kernels.body` is the root `kernels` and the path `("body",)`.

    Attributes:
        kind: `global`, `closure` for a free variable, `first` for the function's first parameter, or `import` for a
            module in an import statement.
        root: the variable, or the module.
        path: the attributes that follow; empty if the code uses the variable alone.
    """

    kind: str
    root: str
    path: tuple[str, ...] = ()


def _nested_code(code: types.CodeType) -> list[types.CodeType]:
    """Returns the code of the functions defined directly in a function."""
    return [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]


def code_within(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yields the code of a function or a file, and of all functions in it."""
    yield code
    for inner in _nested_code(code):
        yield from code_within(inner)


@functools.lru_cache(maxsize=4096)
def _chains_of(code: types.CodeType) -> list[_Chain]:
    """Returns the dotted names in a function's code and in the functions within it, sorted and each once."""
    first = code.co_varnames[0] if code.co_argcount else None
    return sorted({chain for inner in code_within(code) for chain in _chains(inner, first, nested=inner is not code)})


def _chains(code: types.CodeType, first: str | None, *, nested: bool) -> Iterator[_Chain]:
    chain: _Chain | None = None
    for instruction in dis.get_instructions(code):
        name, argument = instruction.opname, instruction.argval
        if name in ("LOAD_ATTR", "LOAD_METHOD") and chain:
            chain = chain._replace(path=(*chain.path, argument))
            continue
        if chain:
            yield chain
        chain = None
        if name in ("LOAD_GLOBAL", "LOAD_NAME"):
            chain = _Chain("global", argument)
        elif name in ("LOAD_DEREF", "LOAD_CLASSDEREF"):
            chain = _Chain("first" if argument == first else "closure", argument)
        elif name.startswith("LOAD_FAST") and not nested:
            # Newer versions of Python load two variables at once; an attribute belongs to the second.
            last = argument[-1] if isinstance(argument, tuple) else argument
            chain = _Chain("first", last) if last == first else None
        elif name == "IMPORT_NAME":
            yield _Chain("import", argument)
    if chain:
        yield chain


def _names(code: types.CodeType) -> set[str]:
    """Returns names and texts in a function's code and nested functions that may name globals or attributes."""
    texts = {text for inner in code_within(code) for text in inner.co_consts if isinstance(text, str)}
    return texts.union(*(inner.co_names for inner in code_within(code)))


def attribute(value: Any, name: str) -> Any:
    """Returns an attribute of a module, a class or an object without running any code, or `NOTHING`."""
    try:
        return inspect.getattr_static(value, name, NOTHING)
    except Exception:
        return NOTHING


def _defining_class(function: types.FunctionType) -> type | None:
    """Returns the class whose body contains a method; None if the class is inside a function."""
    path = function.__qualname__.split(".")[:-1]
    if not path or "<locals>" in path:
        return None
    found: Any = function.__globals__.get(path[0])
    for name in path[1:]:
        found = attribute(found, name)
    return found if isinstance(found, type) else None


def is_users_class(cls: type) -> bool:
    """Returns whether a class is the user's own code."""
    return not is_library(cls.__module__)


def is_library(module: str) -> bool:
    """Returns whether a module is part of Python or installed, so that its version stands for its code."""
    root = module.partition(".")[0]
    if root in _VERSIONED:
        return True
    found = sys.modules.get(module)
    if module in PROGRAMS and is_runner(vars(found or object)):
        return False
    file = getattr(found, "__file__", None) or next(iter(getattr(found, "__path__", ())), None)
    if isinstance(file, str):
        return is_installed(file)
    return root in sys.stdlib_module_names


def is_library_function(function: types.FunctionType) -> bool:
    """Returns whether a function comes from an installed file, so that a version stands for its code."""
    return is_installed(function.__code__.co_filename)


# --- descriptions ---


def describe(value: Any, inside: Around | None = None) -> Any:
    """Describes a value: equal values have equal descriptions in every process, different values different ones.

    Args:
        value: the value.
        inside: the values that contain it.
    """
    inside = inside or Around((), {})
    try:
        if (literal := type(value)) in _LITERAL_NAMES:  # there may be very many
            return [_LITERAL_NAMES[literal], repr(value)]
        if steps := inside.steps_to(value):
            return ["cycle", steps]
        if found := inside.known.get(id(value)):
            return found[1]
        return inside.keep(value, _describe_parts(value, inside.inside(value)))
    except Exception:
        return ["object", type_name(type(value))]


def _describe_parts(value: Any, inside: Around) -> Any:
    kind = type_name(type(value))
    if isinstance(value, enum.Enum):
        return [kind, value.name]
    if isinstance(value, LITERALS):
        return [kind, repr(value)]
    if isinstance(value, types.CodeType):
        return [kind, describe_code(value)]
    if isinstance(value, (list, tuple, dict)) and len(value) > _MANY and _are_literals(value):
        return [kind, hashlib.sha256(marshal.dumps(value, 0)).hexdigest()]
    if isinstance(value, (list, tuple)):
        return [kind, [describe(item, inside) for item in value]]
    if isinstance(value, (set, frozenset)):
        return [kind, sorted(_json(describe(item, inside)) for item in value)]
    if isinstance(value, Mapping):
        pairs = [[describe(key, inside), describe(item, inside)] for key, item in value.items()]
        return [kind, in_order(pairs, _json)]
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
        return ["function", *_describe_function(function, inside), _describe_wrapping(value)]
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return [kind, describe(fields, inside)]
    # A repr shows a set in an order that differs from process to process.
    if _holds_set(value) or _SET_SHOWN.search(stable_repr(value)):
        return [kind, describe(_state(value), inside)]
    return [kind, stable_repr(value)]


def _are_literals(value: Any) -> bool:
    """Returns whether a container has an exact built-in type and only plain values."""
    items = [*value, *value.values()] if isinstance(value, dict) else value
    return type(value) in (list, tuple, dict) and set(map(type, items)) <= _PLAIN


def stable_repr(value: Any) -> str:
    """Returns the repr of a value; an empty text if it shows an address."""
    text = repr(value)
    return "" if _ADDRESS.search(text) else text


def _state(value: Any) -> Any:
    """Returns the arguments and the state in a pickle of an object, or None."""
    try:
        return pickled_parts(value)[1:]
    except Exception:
        return None


def _holds_set(value: Any, seen: dict[int, Any] | None = None) -> bool:
    if isinstance(value, (set, frozenset)):
        return len(value) > 1
    seen = {} if seen is None else seen
    if id(value) in seen or isinstance(value, (type, types.FunctionType, types.ModuleType, *LITERALS)):
        return False
    seen[id(value)] = value
    if isinstance(value, (list, tuple)):
        return any(_holds_set(item, seen) for item in value)
    if isinstance(value, Mapping):
        return any(_holds_set(item, seen) for pair in value.items() for item in pair)
    if isinstance(value, (types.SimpleNamespace, collections.deque)) or is_users_class(type(value)):
        return _holds_set(_state(value), seen)
    return False


def describe_array(value: Any, largest_bytes: int = _LARGEST_HASHED_BYTES) -> list[Any]:
    """Describes an array by shape and dtype, and by its elements unless it is larger than `largest_bytes`."""
    description = [str(value.dtype), [int(size) for size in value.shape]]
    # A tracer's elements are unreadable, and an object array's elements are addresses.
    with contextlib.suppress(Exception):
        if value.nbytes <= largest_bytes and value.dtype.kind != "O":
            description.append(hashlib.sha256(value.__array__().tobytes()).hexdigest())
    return description


def _describe_function(function: types.FunctionType, inside: Around) -> list[Any]:
    name = f"{function.__module__}.{function.__qualname__}"
    if is_library_function(function):
        # A library's version stands for its code; cache entries record versions separately.
        return [name]
    closure = [[name, describe(value, inside)] for name, value in closure_of(function)]
    defaults = [describe(function.__defaults__, inside), describe(function.__kwdefaults__, inside)]
    return [code_text(function), closure, defaults]


def type_name(kind: type) -> str:
    """Returns the dotted name of a class."""
    return f"{module_of(kind)}.{kind.__qualname__}"


# --- functions and what wraps them ---


def plain_function(value: Any) -> types.FunctionType | None:
    """Returns the Python function inside jit wrappers, decorators, methods and partials, or None."""
    for _ in range(MOST_LAYERS):
        inner = wrapped_by(value)
        if inner is None:
            return value if isinstance(value, types.FunctionType) else None
        value = inner
    return None


def wrapped_by(value: Any) -> Any:
    """Returns the function one layer inside a jit wrapper, decorator, method or partial; else None."""
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


def _describe_wrapping(value: Any) -> Any:
    """Describes the layers around a plain function: bound arguments, the object of a method, decorators."""
    if isinstance(value, functools.partial):
        return ["partial", describe(value.args), describe(value.keywords), _describe_wrapping(value.func)]
    if isinstance(value, types.MethodType):
        return ["method", _describe_instance(value.__self__)]
    if isinstance(value, types.FunctionType):
        is_wrapper = hasattr(value, "__wrapped__") and not is_library_function(value)
        return ["function", code_text(value)] if is_wrapper else None
    if isinstance(value, (staticmethod, classmethod)):
        return _describe_wrapping(value.__func__)
    # The decorator's text shows the options of a jit wrapper, and JAX's version stands for the wrapper's type.
    return None if plain_function(value) else ["callable", _describe_instance(value)]


def _describe_instance(
    value: Any, seen: dict[int, Any] | None = None, *, left_out: Collection[str] = frozenset()
) -> Any:
    """Describes the object of a method, or a callable object: by its fields if its repr shows only an address."""
    described, seen = describe(value), {} if seen is None else seen
    if described != [type_name(type(value)), ""]:
        return described
    if id(value) in seen:  # each object once, because many paths may lead to it
        return [*described, list(seen).index(id(value))]
    seen[id(value)] = value
    try:
        state = value.__getstate__()
        # A dict, or a pair of dicts for a class with slots.
        parts = [part for part in (state if isinstance(state, tuple) else (state,)) if isinstance(part, dict)]
        fields = {name: field for part in parts for name, field in without_caches(value, part).items()}
        kept = sorted(fields.keys() - left_out)
        return [*described, [[name, _describe_instance(fields[name], seen)] for name in kept]]
    except Exception:
        return described


def _describe_defaults(function: types.FunctionType) -> Any:
    """Describes the default values of a function's parameters."""
    return describe([function.__defaults__, function.__kwdefaults__])


def closure_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yields the names and values of a function's free variables, except variables without a value."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        with contextlib.suppress(ValueError):  # an empty cell: the variable has no value yet
            yield name, cell.cell_contents


# --- code as text ---


def code_text(function: types.FunctionType, *, with_decorators: bool = True) -> str:
    """Returns the code of a function as text; makes it once.

    The text is the normalised source, which is the same in all versions of Python, if it compiles to the loaded code.
    Otherwise (the file has changed, or the lines contain several lambdas) it is a description of the compiled code.

    Args:
        function: the function.
        with_decorators: whether to include its decorators.
    """
    known = _texts.setdefault(function, {})
    key = function.__code__, with_decorators
    if key not in known:
        known[key] = _code_text(function, with_decorators=with_decorators)
    return known[key]


def _code_text(function: types.FunctionType, *, with_decorators: bool) -> str:
    with contextlib.suppress(Exception):
        (definition,) = _parsed(textwrap.dedent(inspect.getsource(function))).body
        if isinstance(definition, (ast.FunctionDef, ast.AsyncFunctionDef)) and _is_source_of(definition, function):
            if not with_decorators:
                definition.decorator_list = []
            for node in ast.walk(definition):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and ast.get_docstring(node):
                    node.body = node.body[1:] or [ast.Pass()]
            return ast.unparse(definition)
    return canonical_json(describe_code(function.__code__))


def _is_source_of(definition: ast.FunctionDef | ast.AsyncFunctionDef, function: types.FunctionType) -> bool:
    code = function.__code__
    # A shell with the free variables as parameters makes the definition compile to the same code as in its module.
    shell = _parsed(f"def shell({', '.join(code.co_freevars)}): pass")
    body: list[ast.stmt] = [definition]
    if definition.name not in code.co_freevars:
        body.insert(0, ast.Global(names=[definition.name]))
    shell.body[0].body = body  # type: ignore[attr-defined]
    compiled = compile(
        ast.fix_missing_locations(shell), "shell", "exec", flags=code.co_flags & _FUTURES, dont_inherit=True
    )
    candidates = [found for found in _nested_code(_nested_code(compiled)[0]) if found.co_name == code.co_name]
    return describe_code(code) in [describe_code(found) for found in candidates]


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
