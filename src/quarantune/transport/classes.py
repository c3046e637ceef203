"""Classes that travel by value: a worker rebuilds them together with their registrations.

cloudpickle makes a class in two steps: first an empty class, so that objects that refer to it can load, then its
attributes. A metaclass or an `__init_subclass__` runs in the first step and sees a class without fields. It then makes
wrong entries in JAX's pytree registry and in its own weak tables, so the worker uses the caller's entries instead.
"""

from __future__ import annotations

import abc
import contextlib
import importlib
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from quarantune.host.interruptions import failure_of
from quarantune.jax_internals.other_processes import made_unregistered, pytree_registration, register_pytree

_PLAIN = ("builtins", "abc", "typing", "enum", "dataclasses", "collections.abc")
"""Modules whose metaclasses and base classes do not keep tables of classes."""


def reduce_class(cls: type, reduced: tuple[Any, ...], can_import: Callable[[str], bool]) -> tuple[Any, ...]:
    """Returns the reduction of a class together with its registrations.

    Args:
        cls: the class.
        reduced: cloudpickle's reduction of the class.
        can_import: returns whether a worker can import a module.
    """
    make, arguments, state, _, _, set_state = reduced
    about = (set_state, state, pytree_registration(cls), list(_table_entries(cls, can_import)))
    return _make_class, (make, *arguments), about, None, None, _complete_class


def _table_entries(cls: type, can_import: Callable[[str], bool]) -> Iterator[tuple[str, str, Any]]:
    """Yields a class's entries in weak tables of its metaclass and bases: module, name of the table, value."""
    makers = [*inspect.getmro(type(cls)), *inspect.getmro(cls)[1:]]
    for name in dict.fromkeys(str(getattr(maker, "__module__", "")) for maker in makers):
        module = sys.modules.get(name)
        if module is None or name in _PLAIN or not can_import(name):
            continue
        for label, table in list(vars(module).items()):
            with contextlib.suppress(TypeError):  # tables cannot contain an unhashable class
                if isinstance(table, weakref.WeakKeyDictionary) and cls in table:
                    yield name, label, table[cls]
                elif isinstance(table, weakref.WeakSet) and cls in table:
                    yield name, label, None


def _make_class(make: Callable[..., type], metaclass: Any, *arguments: Any) -> type:
    """Makes an empty class with its metaclass, or without the user's code if the metaclass fails on an empty class."""
    try:
        return made_unregistered(lambda: make(metaclass, *arguments))
    except Exception:
        return make(_bare(metaclass), *arguments)


def _bare(metaclass: Any) -> Callable[..., type]:
    """Returns a function that makes classes of a metaclass without running the user's code."""
    new: Any = abc.ABCMeta.__new__ if issubclass(metaclass, abc.ABCMeta) else type.__new__

    def make(name: str, bases: tuple[type, ...], namespace: Mapping[str, Any]) -> type:
        with _without_init_subclass(bases):
            cls: type = new(metaclass, name, bases, namespace)
            return cls

    return make


@contextlib.contextmanager
def _without_init_subclass(bases: tuple[type, ...]) -> Iterator[None]:
    name = "__init_subclass__"
    owners = {owner: vars(owner)[name] for base in bases for owner in base.__mro__[:-1] if name in vars(owner)}
    with contextlib.ExitStack() as stack:
        for owner, own in owners.items():
            with contextlib.suppress(TypeError):  # a class written in C
                type.__setattr__(owner, name, classmethod(lambda cls, **keywords: None))
                stack.callback(type.__setattr__, owner, name, own)
        yield


def _complete_class(cls: type, about: tuple[Any, ...]) -> None:
    set_state, state, registration, entries = about
    set_state(cls, state)
    for module, label, value in entries:
        table = getattr(importlib.import_module(module), label, None)
        if isinstance(table, weakref.WeakSet):
            table.add(cls)
        elif isinstance(table, weakref.WeakKeyDictionary):
            table[cls] = value
    if registration is not None:
        register_pytree(cls, registration)


def is_sentinel(obj: object) -> bool:
    """Returns whether an object has no state, only its identity, like a marker for a missing value."""
    kind = type(obj)
    return (
        kind.__eq__ is object.__eq__
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ is object.__reduce__
        and kind.__basicsize__ <= _BARE_BYTES
        and not any(vars(base).get("__slots__") for base in kind.__mro__)  # a single slot may not add to the size
        and not getattr(obj, "__dict__", None)
        and not isinstance(obj, types.ModuleType)
    )


def refuses_to_be_copied(obj: object) -> bool:
    """Returns whether an object's class forbids pickling, for example because a process should have one instance."""
    if getattr(type(obj), "__getstate__", None) is object.__getstate__:
        return False
    return failure_of(lambda: obj.__reduce_ex__(4)) is not None


_BARE_BYTES = type("_Bare", (), {}).__basicsize__
"""Size of an object without slots and without C fields."""
