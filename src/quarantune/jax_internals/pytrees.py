"""Classes registered as pytrees: reads their registrations, repeats them, and holds them back."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class PytreeRegistration:
    """How a class was registered as a pytree, as values that can be pickled.

    Attributes:
        data_fields: for a dataclass registration, its data fields; None for the other kinds.
        meta_fields: for a dataclass registration, its static fields.
        flatten: to children and static data; None where `flatten_with_keys` says it all.
        unflatten: from static data and children; None for a dataclass registration.
        flatten_with_keys: like `flatten`, with a key for each child; None where JAX kept no reference to it.
    """

    data_fields: tuple[str, ...] | None = None
    meta_fields: tuple[str, ...] = ()
    flatten: Callable[..., Any] | None = None
    unflatten: Callable[..., Any] | None = None
    flatten_with_keys: Callable[..., Any] | None = None


def pytree_registration(cls: type) -> PytreeRegistration | None:
    """Returns how `cls` was registered as a pytree, or None if it was not.

    Private (`tree_util._registry`, and the closures of what it holds) because JAX has no way to read a
    registration back. Keys given as a function of their own to `register_pytree_node` are kept by JAX in C++
    alone: for such a class the worker's key paths show positions instead of names, and nothing else differs.

    Args:
        cls: any class.
    """
    from jax._src import tree_util

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
    """Registers `cls` as `registration` says, unless it is registered already.

    Args:
        cls: a class that arrived by value.
        registration: what `pytree_registration` returned where it came from.
    """
    from jax._src import tree_util

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
    """Keeps whatever the block registers as a pytree class from JAX, which cannot forget a registration.

    Private (`tree_util._all_registries`) because a class that registers itself while it is made, in its metaclass or
    `__init_subclass__`, may call any of JAX's functions for it, and all of them end there.
    """
    from jax._src import tree_util

    real, held = getattr(tree_util, "_all_registries", None), HeldBack()
    if real is None:  # another version of JAX: the registration stays
        yield held
        return
    setattr(tree_util, "_all_registries", (held,))  # noqa: B010 - mypy is told nothing of it
    try:
        yield held
    finally:
        setattr(tree_util, "_all_registries", real)  # noqa: B010


class HeldBack:
    """Stands in for a pytree registry of JAX: notes registrations and makes none."""

    def __init__(self) -> None:
        self._noted: list[tuple[type, str, tuple[Any, ...]]] = []

    def register_node(self, nodetype: type, *functions: Any) -> None:
        """Notes a class with the functions that flatten and unflatten it."""
        self._noted.append((nodetype, "register_node", functions))

    def register_dataclass_node(self, nodetype: type, *fields: Any) -> None:
        """Notes a class with its fields."""
        self._noted.append((nodetype, "register_dataclass_node", fields))

    def release(self, *, but: type) -> None:
        """Makes the registrations after all, except those of one class, which JAX is not to know.

        Args:
            but: the class.
        """
        from jax._src import tree_util

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
