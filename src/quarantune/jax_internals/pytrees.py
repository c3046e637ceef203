"""Classes registered as pytrees: reads a registration, repeats it in another process, and delays it."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax._src import tree_util


@dataclasses.dataclass(frozen=True, kw_only=True)
class PytreeRegistration:
    """The registration of a class as a pytree, as values that can be pickled.

    Attributes:
        data_fields: for a dataclass registration, its data fields; None for the other kinds.
        meta_fields: for a dataclass registration, its static fields.
        flatten: returns children and static data; None if only `flatten_with_keys` was given.
        unflatten: takes static data and children; None for a dataclass registration.
        flatten_with_keys: like `flatten`, with a key for each child; None if JAX kept no reference to it.
    """

    data_fields: tuple[str, ...] | None = None
    meta_fields: tuple[str, ...] = ()
    flatten: Callable[..., Any] | None = None
    unflatten: Callable[..., Any] | None = None
    flatten_with_keys: Callable[..., Any] | None = None


def pytree_registration(cls: type) -> PytreeRegistration | None:
    """Returns the registration of `cls` as a pytree, or None if there is none.

    Private (`tree_util._registry`, and the closures of its functions) because JAX has no public way to read a
    registration back. A key function given to `register_pytree_node` is kept in C++ alone: for such a class the
    worker's key paths show positions instead of names, and nothing else differs.

    Args:
        cls: any class.
    """
    entry = tree_util._registry.get(cls)
    if entry is None:
        return None
    hidden = _closure(entry.to_iter)
    if "data_fields" in hidden and "meta_fields" in hidden:
        return PytreeRegistration(data_fields=tuple(hidden["data_fields"]), meta_fields=tuple(hidden["meta_fields"]))
    if "flatten_with_keys" in hidden:
        return PytreeRegistration(flatten_with_keys=hidden["flatten_with_keys"], unflatten=entry.from_iter)
    keyed = operator.methodcaller("tree_flatten_with_keys") if hasattr(cls, "tree_flatten_with_keys") else None
    return PytreeRegistration(flatten=entry.to_iter, unflatten=entry.from_iter, flatten_with_keys=keyed)


def register_pytree(cls: type, registration: PytreeRegistration) -> None:
    """Registers `cls` as a pytree, unless it is registered already.

    Args:
        cls: a class that was unpickled by value.
        registration: what `pytree_registration` returned in the sending process.
    """
    if cls in tree_util._registry:
        return
    if registration.data_fields is not None:
        jax.tree_util.register_dataclass(cls, registration.data_fields, registration.meta_fields)
    elif registration.flatten is None:
        assert registration.flatten_with_keys is not None
        assert registration.unflatten is not None
        jax.tree_util.register_pytree_with_keys(cls, registration.flatten_with_keys, registration.unflatten)
    else:
        assert registration.unflatten is not None
        jax.tree_util.register_pytree_node(
            cls, registration.flatten, registration.unflatten, registration.flatten_with_keys
        )


@contextlib.contextmanager
def pytree_registrations_held_back() -> Iterator[HeldBack]:
    """Notes the pytree classes that the block registers instead of registering them, as JAX cannot undo that.

    Private (`tree_util._all_registries`) because a class that registers itself while it is made, in its metaclass or
    `__init_subclass__`, may use any of JAX's functions for this, and all of them use these registries.
    """
    real, held = getattr(tree_util, "_all_registries", None), HeldBack()
    if real is None:  # another version of JAX: the registration stays
        yield held
        return
    setattr(tree_util, "_all_registries", (held,))  # noqa: B010 - mypy does not know the name
    try:
        yield held
    finally:
        setattr(tree_util, "_all_registries", real)  # noqa: B010


class HeldBack:
    """Stands in for a pytree registry of JAX: notes registrations without making them."""

    def __init__(self) -> None:
        self._noted: list[tuple[type, str, tuple[Any, ...]]] = []

    def register_node(self, nodetype: type, *functions: Any) -> None:
        """Notes a class with the functions that flatten and unflatten it."""
        self._noted.append((nodetype, "register_node", functions))

    def register_dataclass_node(self, nodetype: type, *fields: Any) -> None:
        """Notes a class with its fields."""
        self._noted.append((nodetype, "register_dataclass_node", fields))

    def release(self, *, but: type) -> None:
        """Makes the noted registrations, except those of one class.

        Args:
            but: the class.
        """
        for nodetype, method, arguments in self._noted:
            if nodetype is but:
                tree_util._registry.pop(nodetype, None)
            else:
                for registry in tree_util._all_registries:
                    getattr(registry, method)(nodetype, *arguments)


def _closure(function: Any) -> Mapping[str, Any]:
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    if code is None:
        return {}
    return {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}
