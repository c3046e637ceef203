"""Finds the function that `MODULE:FUNCTION` names."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from quarantune.cli.output import InputError, message_of
from quarantune.host.installed import is_installed
from quarantune.sandbox import MARK
from quarantune.values.texts import did_you_mean, shown


def load(text: str, *, option: str = "") -> Any:
    """Returns an object of a module, which is imported as a program in its directory would import it.

    Args:
        text: `MODULE:NAME`; the module by its dotted name, or as the path of its file.
        option: the option that the text was given for; empty for the command's argument.

    Raises:
        InputError: there is no such module or object, or the module cannot be imported.
    """
    label = f"{option} {shown(text)}".strip()
    module_name, separator, name = text.rpartition(":")
    if not (separator and module_name and name):
        raise InputError(f"{label} names no function: write MODULE:FUNCTION, as in kernels:matmul or kernels.py:matmul")
    is_file = module_name.endswith(".py") or os.sep in module_name
    module = _import_file(module_name, label) if is_file else _import(module_name, label, Path.cwd())
    found: Any = module
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise InputError(f"{label}: {_missing(module, found, part)}") from None
    return found


def load_tuned(text: str) -> Any:
    """Returns a function with a tuner.

    Args:
        text: `MODULE:FUNCTION`.

    Raises:
        InputError: there is none of that name.
    """
    from quarantune.api.ahead import is_tuned

    found = load(text)
    if not is_tuned(found):
        raise InputError(
            f"{shown(text)} is a {type(found).__name__} without configs: put @quarantune.autotune(configs) on it, or "
            "name a quarantune.AutoTuner"
        )
    return found


def load_kernel(text: str, *, to_do: str) -> Any:
    """Returns a function with a tuner of its own, as `load_tuned` does.

    Args:
        text: `MODULE:FUNCTION`.
        to_do: the thing to do with one that is tuned in its context, for messages.
    """
    from quarantune.api.contextual import Contextual

    if isinstance(found := load_tuned(text), Contextual):
        raise InputError(f"{shown(text)} tunes kernels in their context: {to_do} one of the kernels that it calls")
    return found


def _import_file(path: str, label: str) -> ModuleType:
    """Imports the module in a file under the name that it has in a program: with the packages that hold it."""
    file = Path(path).expanduser().absolute()
    if not file.is_file():
        near = did_you_mean(file.name, [found.name for found in file.parent.glob("*.py")])
        raise InputError(f"{label}: there is no file {str(file)!r}.{near}" + ("" if near else " Give its path."))
    if not file.stem.isidentifier():
        name = re.sub(r"^(?=\d)|\W", "_", file.stem)
        raise InputError(f"{label}: {file.name!r} is no name of a module: rename it, as in {name}.py")
    root, parts = file.parent, [] if file.stem == "__init__" else [file.stem]
    while (root / "__init__.py").is_file():
        root, parts = root.parent, [root.name, *parts]
    module = _import(".".join(parts), label, root)
    there = getattr(module, "__file__", None)
    if there is None or not os.path.samefile(there, file):
        raise InputError(
            f"{label}: another module is called {module.__name__!r} ({there or 'built into Python'}): rename the file"
        )
    return module


def _import(name: str, label: str, directory: Path) -> ModuleType:
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))
    importlib.invalidate_caches()
    try:
        with _tuning_nothing():
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise InputError(f"{label}: its import needs the module {error.name!r}: install it") from error
        near = did_you_mean(name, [found.stem for found in directory.glob("*.py")])
        hint = near or f" Give the path of its file, or its dotted name as seen from {str(directory)!r}."
        raise InputError(f"{label}: there is no module {error.name!r}.{hint}") from None
    except (Exception, SystemExit) as error:
        raise InputError(
            f"{label}: its import fails at {_place(error)} with {type(error).__name__}: {message_of(error)}"
        ) from error


@contextlib.contextmanager
def _tuning_nothing() -> Iterator[None]:
    """Lets a module be imported as workers import it: its own calls run untuned, and it is told not to tune."""
    was_inside = MARK in os.environ
    os.environ.setdefault(MARK, "importing")
    try:
        yield
    finally:
        if not was_inside:
            del os.environ[MARK]


def _place(error: BaseException) -> str:
    """Returns the last line of an error that is in a file of the author."""
    frames = [it for it in traceback.extract_tb(error.__traceback__) if not is_installed(it.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "its start"


def _missing(module: ModuleType, holder: Any, name: str) -> str:
    """Says that an object lacks an attribute, and which it has: of a module the functions that can be tuned."""
    where = getattr(holder, "__name__", type(holder).__name__)
    has_names = isinstance(holder, ModuleType) or inspect.isclass(holder)
    near = did_you_mean(name, [known for known in vars(holder) if not known.startswith("_")] if has_names else ())
    if near or holder is not module:
        return f"{where!r} has no {name!r}.{near}"
    from quarantune.api.ahead import is_tuned

    tuned = [known for known, value in vars(module).items() if is_tuned(value)]
    listed = f"Its autotuned functions are: {', '.join(tuned)}." if tuned else "It has no autotuned function."
    return f"{where!r} has no {name!r}. {listed}"
