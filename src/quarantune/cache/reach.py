"""Finds the attributes that a function's code names, and tells the user's own code from that of libraries."""

from __future__ import annotations

import dataclasses
import dis
import functools
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

from quarantune.host.process import is_installed
from quarantune.values.texts import PROGRAMS, is_runner

NOTHING = object()
"""Returned by `attribute` if there is no such attribute."""
_VERSIONED = frozenset({"jax", "jaxlib", "quarantune"})
"""Packages whose versions an entry records, wherever they are installed."""


@dataclasses.dataclass(frozen=True, order=True)
class Chain:
    """A dotted name in a function's code: `kernels.body` is the root `kernels` and the path `("body",)`.

    Attributes:
        kind: `global`, `closure` for a free variable, or `first` for the function's first parameter.
        root: the variable.
        path: the attributes that follow; empty if the variable is used by itself.
    """

    kind: str
    root: str
    path: tuple[str, ...]


def nested_code(code: types.CodeType) -> list[types.CodeType]:
    """Returns the code of the functions defined directly in a function."""
    return [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]


@functools.lru_cache(maxsize=4096)
def chains(code: types.CodeType) -> list[Chain]:
    """Returns the dotted names in a function's code and in the functions within it, sorted and each once."""
    first = code.co_varnames[0] if code.co_argcount else None
    return sorted(set(_chains(code, first)))


def _chains(code: types.CodeType, first: str | None, *, nested: bool = False) -> Iterator[Chain]:
    open_chain: tuple[str, str] | None = None
    path: list[str] = []
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        if name in ("LOAD_ATTR", "LOAD_METHOD") and open_chain:
            path.append(instruction.argval)
            continue
        if open_chain:
            yield Chain(*open_chain, tuple(path))
        open_chain, path = None, []
        if name in ("LOAD_GLOBAL", "LOAD_NAME"):
            open_chain = ("global", instruction.argval)
        elif name in ("LOAD_DEREF", "LOAD_CLASSDEREF"):
            open_chain = ("first" if instruction.argval == first else "closure", instruction.argval)
        elif name.startswith("LOAD_FAST") and not nested:
            # Newer versions of Python load two variables at once; an attribute belongs to the second.
            last = instruction.argval[-1] if isinstance(instruction.argval, tuple) else instruction.argval
            open_chain = ("first", last) if last == first else None
    if open_chain:
        yield Chain(*open_chain, tuple(path))
    for inner in nested_code(code):
        yield from _chains(inner, first, nested=True)


@functools.lru_cache(maxsize=4096)
def imports(code: types.CodeType) -> frozenset[str]:
    """Returns the names of modules in the import statements of a function's code, including nested functions."""
    inner = map(imports, nested_code(code))
    own = (item.argval for item in dis.get_instructions(code) if item.opname == "IMPORT_NAME")
    return frozenset(own).union(*inner)


def names(code: types.CodeType) -> frozenset[str]:
    """Returns all names of globals and attributes in a function's code, also as texts, including nested functions."""
    inner = map(names, nested_code(code))
    texts = (constant for constant in code.co_consts if isinstance(constant, str))
    return frozenset(code.co_names).union(texts, *inner)


def attribute(value: Any, name: str) -> Any:
    """Returns an attribute of a module, a class or an object without running any code, or `NOTHING`."""
    try:
        if isinstance(value, types.ModuleType):
            return value.__dict__.get(name, NOTHING)
        return inspect.getattr_static(value, name, NOTHING)
    except Exception:
        return NOTHING


def defining_class(function: types.FunctionType) -> type | None:
    """Returns the class in whose body a method was written; None if that is inside a function."""
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
    """Returns whether a module is Python's own or installed, so that its version stands for its code."""
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
    """Returns whether a function is from a module that `is_library` names."""
    return is_installed(function.__code__.co_filename)
