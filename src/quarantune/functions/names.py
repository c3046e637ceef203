"""Names of functions, classes and programs, the same in every process."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quarantune.host.frames import users_frame

PROGRAMS = ("__main__", "__mp_main__", "<run_path>")
"""The modules of programs: in their own process, in a child of `multiprocessing`, and under `runpy`."""
_adopted = ""


def cache_name(fn: Callable[..., Any]) -> str:
    """Returns a callable's name in the cache: its module and its qualified name."""
    inner = fn.func if isinstance(fn, functools.partial) else fn
    return f"{module_name(inner)}.{getattr(inner, '__qualname__', type(inner).__qualname__)}"


def module_name(fn: Callable[..., Any]) -> str:
    """Returns the function's module; for a script the stem of its file, because `__main__` is the same for all.

    For a jitted `functools.partial`, whose module is given as `functools`, returns the module that tunes it.
    """
    module = getattr(fn, "__module__", None) or "unknown"
    if module == functools.__name__ and isinstance(inspect.unwrap(fn), functools.partial):
        module = str(users_frame().f_globals.get("__name__") or "unknown")
    return _program_of(fn, module) if module in PROGRAMS else module


def module_of(thing: Any) -> str:
    """Returns the module of a function or class, for a key or a fingerprint."""
    module = getattr(thing, "__module__", None)
    return str(module) if module not in PROGRAMS else _program_of(thing, module)


def program_name() -> str:
    """Returns the name of the program that runs in this process, or that this process works for."""
    return _adopted or _name_of(vars(sys.modules.get("__main__", object)))


def adopt_program_name(name: str) -> None:
    """Takes over the name of the program that this process works for."""
    global _adopted
    _adopted = name


def is_runner(names: Mapping[str, Any]) -> bool:
    """Returns whether globals belong to a module of the standard library that runs programs, such as cProfile."""
    return os.path.dirname(names.get("__file__") or "") == os.path.dirname(os.__file__)


def _program_of(thing: Any, module: str) -> str:
    """Returns the name of the program that a function or class is from."""
    for function in vars(thing).values() if isinstance(thing, type) else [inspect.unwrap(thing)]:
        names = getattr(function, "__globals__", {})
        if names.get("__name__") == module and not is_runner(names):
            return _name_of(names) or module
    return _adopted or _name_of(vars(sys.modules.get(module, object))) or module


def _name_of(names: Mapping[str, Any]) -> str:
    """Returns the name that others import a program's file under, given its globals; empty if it has no file."""
    if is_runner(names):
        return os.path.basename(sys.argv[0]).removesuffix(".py")  # `cProfile -m` puts a module there
    spec, file = names.get("__spec__"), names.get("__file__")
    package = names.get("__package__") if spec is None else spec.parent
    return ".".join(filter(None, (package, Path(file).stem))) if file else ""
