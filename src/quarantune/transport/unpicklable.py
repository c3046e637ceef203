"""Explains why pickle fails on an object: which part of it is to blame, the way to that part, and a remedy."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

from quarantune.functions.fingerprint import closure_of, code_within
from quarantune.host.interruptions import failure_of
from quarantune.jax_internals import jax_functions
from quarantune.values.texts import shown

_REMEDY = (
    "Create it inside the function, pass it as an argument, or move the function into a module that can be "
    "imported (it then travels by name)."
)


class CannotTravelError(TypeError):
    """Raised for an object of a kind that must not travel; the message is the advice for this kind."""


def explain(
    obj: object,
    error: Exception,
    dump: Callable[[object], object],
    failure: str = "sent to a worker process",
    remedy: str = _REMEDY,
) -> str:
    """Returns the message for an object that pickle failed on.

    Args:
        obj: the object.
        error: the exception from pickling it.
        dump: pickles a part of the object, or raises.
        failure: the purpose of pickling it, after "cannot be".
        remedy: the advice for parts whose kind has no specific advice.
    """
    trail, culprit, cause = _find_culprit(obj, error, dump)
    where = trail[-1] if trail else "it"
    through = f" (reached through {', then '.join(trail[:-1])})" if len(trail) > 1 else ""
    advice = str(cause) if isinstance(cause, CannotTravelError) else f"{str(cause).rstrip('.')}. {remedy}"
    return f"{where}{through} is {shown(culprit)}, which cannot be {failure}. {advice}"


def _find_culprit(
    obj: object, error: Exception, dump: Callable[[object], object]
) -> tuple[list[str], object, Exception]:
    """Returns the innermost part of `obj` that pickle fails on: the way to it, the part and its error."""
    trail: list[str] = []
    seen = {id(obj)}
    while True:
        for label, child in _parts(obj):
            if id(child) in seen:
                continue
            seen.add(id(child))
            if (failure := failure_of(dump, child)) is not None:
                trail.append(label)
                obj, error = child, failure
                break
        else:
            return trail, obj, error


def _parts(obj: Any) -> Iterator[tuple[str, Any]]:
    """Yields the parts of an object, each after a phrase that names it."""
    name = getattr(obj, "__qualname__", None) or type(obj).__qualname__
    if isinstance(obj, types.FunctionType):
        yield from _parts_of_function(obj, name)
    elif isinstance(obj, types.MethodType):
        yield f"the object that {name!r} is bound to", obj.__self__
    elif isinstance(obj, functools.partial):
        yield f"the function of the partial of {shown(obj.func)}", obj.func
        yield from ((f"partial argument {index}", value) for index, value in enumerate(obj.args))
        yield from ((f"partial argument {key!r}", value) for key, value in obj.keywords.items())
    elif hasattr(type(obj), "labelled_parts"):  # one of our classes that names its parts
        yield from obj.labelled_parts()
    elif isinstance(obj, dict):
        yield from ((f"the entry {shown(key)}", value) for key, value in obj.items())
    elif isinstance(obj, (list, tuple, set, frozenset)):
        yield from ((f"element {index}", value) for index, value in enumerate(obj))
    elif type(obj) is jax_functions.pjit_type:
        yield f"the function inside jax.jit({name!r})", obj.__wrapped__
    elif hasattr(obj, "__dict__") and not isinstance(obj, types.ModuleType):
        # Pickle never saves the members of a class that its author did not write.
        hidden = isinstance(obj, type)
        for key, value in dict(vars(obj)).items():
            if not (hidden and key.startswith("__")):
                yield f"attribute {key!r} of {name!r}", value


def _parts_of_function(function: types.FunctionType, name: str) -> Iterator[tuple[str, Any]]:
    for variable, value in closure_of(function):
        yield f"closure variable {variable!r} of {name!r}", value
    used = {name for code in code_within(function.__code__) for name in code.co_names}
    for variable in sorted(used & function.__globals__.keys()):
        yield f"global {variable!r} used by {name!r}", function.__globals__[variable]
    for index, value in enumerate(function.__defaults__ or ()):
        yield f"default value {index} of {name!r}", value
    for variable, value in (function.__kwdefaults__ or {}).items():
        yield f"default value of {variable!r} of {name!r}", value
    for variable, value in vars(function).items():
        yield f"attribute {variable!r} of {name!r}", value
