"""Fingerprints: a short hash for each part that a tuned result depends on, such as code, closure, helpers, options."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

from quarantune.cache import described, reach
from quarantune.cache.keys import canonical_json, short_hash


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
        """Returns the names of the parts that differ, or that only one of the two fingerprints has."""
        theirs = other.parts if isinstance(other, Fingerprint) else other
        return sorted(name for name in self.parts.keys() | theirs.keys() if self.parts.get(name) != theirs.get(name))


def fingerprint(fn: Callable[..., Any], *, options: Mapping[str, Any] | None = None) -> Fingerprint:
    """Returns the fingerprint of a function and the options that decide which config wins.

    It covers the function's code, its defaults and closure by value, and, transitively, the functions, classes
    and constants of the user's own modules that its code names: as globals, as attributes of modules
    (`kernels.body`, `getattr(kernels, "body")`), as methods and operators, and as registrations of `singledispatch`;
    the fields of plain objects, and parsed flags of absl. The rules of `jax.custom_vjp`, `jax.custom_jvp`,
    `custom_vmap` and `custom_partitioning` functions are covered too, and so are the user's functions that a library's
    function or object was given (`haiku.transform(f)`, `NUTS(model)`). Apart from these, an installed package, or a
    module imported inside the function, counts by name only; the versions of packages are recorded beside the
    fingerprint. Comments, docstrings, whitespace, the decorators of `fn` itself and its place in the file do not count.
    The fingerprint is the same in every process. Values count as they are at the time: take the fingerprint once,
    before the function has run.

    Args:
        fn: the function or other callable, wrapped or not.
        options: the options, by name. A function among them is covered as `fn` is, and its decorators count.
    """
    option_parts = {f"option:{name}": _hash(_describe_option(value)) for name, value in (options or {}).items()}
    return Fingerprint(parts=_Walk(fn).parts | option_parts)


def reached(fn: Callable[..., Any]) -> Mapping[tuple[str, ...], Any]:
    """Returns the values that a function and the user's own code below it name in modules, as they are now.

    Args:
        fn: the function or other callable, wrapped or not.

    Returns:
        The values by their places: the name of a module, followed by the attributes that lead to the value.
    """
    return _Walk(fn).reached


def _describe_option(value: Any) -> Any:
    description = described.describe(value)
    function = _root_function(value) if callable(value) else None
    if function is None:
        return description
    if reach.is_library_function(function):  # made by a call, such as `spaces.divides(...)`
        held = [[name, described.describe(item)] for name, item in described.closure_of(function)]
        return [description, held] if held else description
    return [description, _Walk(value).parts]


def _root_function(fn: Any) -> types.FunctionType | None:
    """Returns the Python function that a call of `fn` runs, or None."""
    return described.plain_function(fn) or described.plain_function(inspect.getattr_static(type(fn), "__call__", None))


class _Walk:
    """Collects the parts of one callable, and of the user's own code that it reaches.

    Functions and classes of the callable's own module are parts by their plain names (`helper:f`, `class:C`). Names
    from another of the user's modules start with the name of that module.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.parts: dict[str, str] = {}
        self.reached: dict[tuple[str, ...], Any] = {}
        self._seen: set[int] = set()
        self._followed: set[int] = set()
        function = _root_function(fn)
        self._module = function.__globals__ if function else {}
        self._visit_rules(fn)
        if function is None:
            self.parts["code"] = _hash(described.describe(fn))
            return
        if (wrapping := described.describe_wrapping(fn)) is not None:
            self.parts["bound"] = _hash(wrapping)
        self._seen.add(id(function))
        self.parts["code"] = _hash(described.code_text(function, with_decorators=False))
        self.parts["defaults"] = _hash(described.describe_defaults(function))
        self._follow_bound(fn)
        self._visit_surroundings("closure", function, owner=_owner(fn))

    def _visit(self, kind: str, name: str, value: Any) -> None:
        self._visit_rules(value)
        for cls, registered in _registrations(value):
            self._visit("closure", f"{name}[{described.type_name(cls)}]", registered)
        function = described.plain_function(value)
        if function is not None and function.__globals__ is self._module:
            self._visit_helper(f"helper:{name}", value, function)
        elif isinstance(value, type) and self._is_own(value):
            self._visit_class(value)
        else:
            self.parts[f"{kind}:{name}"] = _hash(described.describe(value))
            self._follow(value)

    def _visit_helper(self, part: str, value: Any, function: types.FunctionType) -> None:
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        description = [
            described.code_text(function),
            described.describe_defaults(function),
            described.describe_wrapping(value),
        ]
        self.parts[part] = _hash(description)
        self._follow_bound(value)
        self._visit_surroundings(f"{part}:closure", function, owner=_owner(value))

    def _visit_class(self, cls: type) -> None:
        if id(cls) in self._seen:
            return
        self._seen.add(id(cls))
        is_own = self._is_own(cls)
        label = cls.__qualname__ if is_own else described.type_name(cls)
        self.parts[f"class:{label}"] = _hash([described.type_name(base) for base in cls.__mro__])
        for name, member in list(vars(cls).items()):  # describing one may add another
            if name not in _CLASS_MACHINERY and (is_own or _is_written_out(member)):
                self.reached[cls.__module__, *cls.__qualname__.split("."), name] = member
                self._visit("class", f"{label}.{name}", getattr(member, "fget", None) or member)
        if issubclass(cls, enum.Enum) and not is_own:
            values = {name: member.value for name, member in cls.__members__.items()}
            self.parts[f"class:{label}.values"] = _hash(described.describe(values))
        for base in cls.__mro__[1:]:
            if reach.is_users_class(base):
                self._visit_class(base)

    def _visit_surroundings(self, kind: str, function: types.FunctionType, *, owner: type | None) -> None:
        is_own = function.__globals__ is self._module
        prefix = "" if is_own else f"{function.__module__}."
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._follow(default)
        free = dict(described.closure_of(function))
        for name, value in free.items():
            if is_own:
                self._visit(kind, name, value)
            else:  # their values are in the description of the function
                self._follow(value)
        chains = reach.chains(function.__code__)
        for name in sorted({chain.root for chain in chains if chain.kind == "global"}):
            if name in function.__globals__:
                self.reached[function.__globals__.get("__name__", ""), name] = function.__globals__[name]
                self._visit("global", prefix + name, function.__globals__[name])
        for name in reach.imports(function.__code__):
            # No part, as it may or may not be imported by now.
            for module in (sys.modules.get(name), sys.modules.get(f"{function.__globals__.get('__package__')}.{name}")):
                if module is not None and not reach.is_library(module.__name__):
                    used = reach.names(function.__code__) & vars(module).keys()
                    self.reached |= {(module.__name__, item): vars(module)[item] for item in used}
        for chain in chains:
            if chain.kind == "first":
                self._visit_chain("class", owner, chain.path[:1], function)
            else:
                scope = function.__globals__ if chain.kind == "global" else free
                value = scope.get(chain.root, reach.NOTHING)
                self._visit_chain("global", value, chain.path, function, prefix + chain.root)

    def _visit_chain(
        self, kind: str, value: Any, path: tuple[str, ...], function: types.FunctionType, label: str = ""
    ) -> None:
        """Visits the objects that a dotted name stands for, if its root is a module, class or object of the user's."""
        for name in path:
            if isinstance(value, types.ModuleType):
                found = reach.attribute(value, name)
                self.reached[value.__name__, name] = found
                label = f"{value.__name__}.{name}"
                if reach.is_library(value.__name__):
                    if not isinstance(found, types.ModuleType):
                        return
                elif found is not reach.NOTHING and not isinstance(found, types.ModuleType):
                    self._visit(kind, label, found)
            else:
                cls = value if isinstance(value, type) else type(value)
                self._visit_state(label, value, name)
                if value is reach.NOTHING or not reach.is_users_class(cls):
                    return
                found = reach.attribute(value, name)
                if found is not reach.NOTHING and _is_written_out(reach.attribute(cls, name)):
                    owner = cls.__qualname__ if self._is_own(cls) else described.type_name(cls)
                    self._visit("class", f"{owner}.{name}", getattr(found, "fget", None) or found)
                label = f"{label}.{name}"
            value = found
        if isinstance(value, types.ModuleType) and not reach.is_library(value.__name__):
            # The module has another name or is passed on: any name in the code may be one of its attributes.
            for name in sorted(reach.names(function.__code__) & vars(value).keys()):
                self._visit_chain(kind, value, (name,), function)
            return
        if not isinstance(value, (type, types.FunctionType)):
            self._visit_state(label, value)
            for name in _operators(type(value)):
                self._visit_chain("class", value, (name,), function)

    def _visit_state(self, label: str, value: Any, name: str = "") -> None:
        """Visits the state of an object that is described by its type alone: one field, or all where more is used."""
        try:
            fields = vars(value)
        except Exception:  # an object may raise anything for any attribute
            return
        if isinstance(value, (type, types.ModuleType)) or not isinstance(fields, dict) or not label:
            return
        if described.plain_function(value) or described.describe(value) != [described.type_name(type(value)), ""]:
            return
        if name in fields:
            self._visit("global", f"{label}.{name}", fields[name])
        elif reach.is_users_class(type(value)):
            self.parts[f"global:{label}.fields"] = _hash(described.describe_instance(value))
        elif name:
            with contextlib.suppress(Exception):  # a flag that is not parsed yet
                if isinstance(found := getattr(value, name), described.LITERALS):
                    self.parts[f"global:{label}.{name}"] = _hash(described.describe(found))

    def _visit_rules(self, value: Any) -> None:
        """Visits the user's own rules of a function, such as its derivative, in whatever is wrapped around it."""
        # Not imported above: a program that only reads the cache does not need JAX.
        from quarantune import jax_internals

        for _ in range(described.MOST_LAYERS):
            rules = {} if id(value) in self._seen else jax_internals.custom_rules(value)
            owner = ""
            if rules:
                self._seen.add(id(value))
                owner = getattr(value, "__qualname__", getattr(rules.get("fun"), "__qualname__", ""))
            for name, rule in rules.items():
                if _is_users(rule) or (isinstance(rule, dict) and any(map(_is_users, rules.values()))):
                    part = f"rule:{owner}.{name}"
                    same = sum(other.partition("#")[0] == part for other in self.parts)
                    self.parts[f"{part}#{same}" if same else part] = _hash(described.describe(rule))
                    self._follow(rule)
            value = described.wrapped_by(value)
            if value is None:
                return

    def _is_own(self, cls: type) -> bool:
        return cls.__module__ == self._module.get("__name__")

    def _follow(self, value: Any, depth: int = 0) -> None:
        """Visits the code that a described value reaches in turn, which its description does not show."""
        self._visit_rules(value)
        function = described.plain_function(value)
        if function is not None:
            self._follow_bound(value)
            if id(function) not in self._followed:
                self._followed.add(id(function))
                if reach.is_library_function(function):
                    held = dict(described.closure_of(function))
                    self._visit_held(f"{function.__module__}.{function.__qualname__}", held)
                    for item in held.values():
                        self._follow(item, depth)
                else:
                    self._visit_surroundings(f"{function.__qualname__}:closure", function, owner=_owner(value))
        elif isinstance(value, type):
            if reach.is_users_class(value):
                self._visit_class(value)
        elif (isinstance(value, tuple) or type(value) in (list, dict)) and depth < _DEEPEST_FOLLOWED:
            for item in value.values() if isinstance(value, dict) else value:
                if not isinstance(item, described.LITERALS):
                    self._follow(item, depth + 1)
        elif not (isinstance(value, types.ModuleType) or _is_jaxs(type(value)) or reach.is_users_class(type(value))):
            # What JAX's own objects hold are the rules above; one of the user's may keep what it has compiled.
            fields = getattr(value, "__dict__", None)
            if isinstance(fields, dict):
                self._visit_held(described.type_name(type(value)), {str(name): item for name, item in fields.items()})

    def _visit_held(self, holder: str, held: Mapping[str, Any]) -> None:
        """Visits the user's own functions that a library's function or object was given: `haiku.transform(f)`."""
        for name, value in sorted(held.items()):
            items = value if isinstance(value, (list, tuple)) else [value]
            for position, item in enumerate(items):
                function = described.plain_function(item)
                if function is not None and not reach.is_library_function(function):
                    place = f"[{position}]" if items is value else ""
                    self._visit("closure", f"{holder}.{name}{place}", item)

    def _follow_bound(self, value: Any) -> None:
        """Follows the arguments bound by partials."""
        while isinstance(value, functools.partial):
            for item in (*value.args, *value.keywords.values()):
                self._follow(item)
            value = value.func


_DEEPEST_FOLLOWED = 8


def _is_jaxs(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in ("jax", "jaxlib")


def _owner(fn: Any) -> type | None:
    """Returns the class whose method a call of `fn` runs, or None."""
    if isinstance(fn, types.MethodType):
        return fn.__self__ if isinstance(fn.__self__, type) else type(fn.__self__)
    if isinstance(fn, functools.partial):
        return _owner(fn.func)
    function = described.plain_function(fn)
    if function is None:
        return type(fn)
    return reach.defining_class(function)


def _is_users(fn: Any) -> bool:
    """Returns whether a callable is the user's own code."""
    function = described.plain_function(fn)
    if function is None:
        return reach.is_users_class(type(fn))
    return not reach.is_library_function(function)


def _is_written_out(member: Any) -> bool:
    """Returns whether a member of a class was written by its author: a function, class, constant or list of such."""
    if isinstance(member, (type, property, *described.LITERALS)):
        return True
    if isinstance(member, (list, tuple, dict)):
        return any(map(described.plain_function, member.values() if isinstance(member, dict) else member))
    return described.plain_function(member) is not None


def _registrations(value: Any) -> list[tuple[type, Any]]:
    """Returns what was registered with a function of `functools.singledispatch`, beside the function itself."""
    if not isinstance(value, types.FunctionType) or value.__code__.co_filename != functools.__file__:
        return []
    return [(cls, registered) for cls, registered in getattr(value, "registry", {}).items() if cls is not object]


def _operators(cls: type) -> list[str]:
    """Returns the special methods that the user has written for a class; nobody calls them by name."""
    written = {name for base in cls.__mro__ if reach.is_users_class(base) for name in vars(base)}
    special = {name for name in written if name.startswith("__") and name.endswith("__")}
    return sorted(special - vars(object).keys() - _CLASS_MACHINERY)


_CLASS_MACHINERY = frozenset(
    {"__module__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__qualname__", "__firstlineno__"}
    | {"__static_attributes__", "__abstractmethods__", "_abc_impl"}
)


def _hash(description: Any) -> str:
    return short_hash(canonical_json(description))
