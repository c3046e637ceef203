"""Loads a command's function, and makes its calls: a `jax.ShapeDtypeStruct` for each array, or real arguments."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from quarantune.api.contextual import Contextual
from quarantune.api.tuner import Tuned
from quarantune.calls.call import TunedFunction
from quarantune.cli.call_texts import GivenCall, parse_statics
from quarantune.cli.output import InputError, message_of
from quarantune.functions.binding import lacking
from quarantune.functions.describe import canonical_dtype, describe_array
from quarantune.functions.description import as_structs, is_array
from quarantune.host.packages import is_installed
from quarantune.host.process import SANDBOX_MARK, environment_variables
from quarantune.values.texts import call_text, did_you_mean, shown
from quarantune.values.trial import ArrayKind


def load(text: str, *, option: str = "") -> Any:
    """Returns an object of a module. Imports the module as a program in its directory would.

    Args:
        text: `MODULE:NAME`; the module by its dotted name, or as the path of its file.
        option: the option with the text; empty for the command's argument.

    Raises:
        InputError: The module or the object does not exist, or the import fails.
    """
    label = f"{option} {shown(text)}".strip()
    module_name, separator, name = text.rpartition(":")
    if not (separator and module_name and name):
        raise InputError(f"{label} is not a function: write MODULE:FUNCTION, as in kernels:matmul or kernels.py:matmul")
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
        InputError: The object does not exist, or has no tuner.
    """
    found = load(text)
    if not isinstance(found, Tuned):
        raise InputError(
            f"{shown(text)} is a {type(found).__name__} without configs: put @quarantune.autotune(configs) on it, or "
            "name a quarantune.AutoTuner"
        )
    return found


def load_kernel(text: str, *, to_do: str) -> Any:
    """Returns a function with its own tuner, as `load_tuned` does, but refuses contextual functions.

    Args:
        text: `MODULE:FUNCTION`.
        to_do: the verb of the advice to take a kernel instead, for messages.

    Raises:
        InputError: The object does not exist, has no tuner, or tunes its kernels in their context.
    """
    if isinstance(found := load_tuned(text), Contextual):
        raise InputError(f"{shown(text)} tunes kernels in their context: {to_do} one of the kernels that it calls")
    return found


def _import_file(path: str, label: str) -> ModuleType:
    """Imports the module in a file under its full name in a program, with the names of its packages."""
    file = Path(path).expanduser().absolute()
    if not file.is_file():
        near = did_you_mean(file.name, [found.name for found in file.parent.glob("*.py")])
        raise InputError(f"{label}: there is no file {str(file)!r}.{near}" + ("" if near else " Give its path."))
    if not file.stem.isidentifier():
        name = re.sub(r"^(?=\d)|\W", "_", file.stem)
        raise InputError(f"{label}: {file.name!r} is not a module name: rename it, as in {name}.py")
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
        # As workers import it: with this mark, calls during the import run untuned.
        with environment_variables({SANDBOX_MARK: os.environ.get(SANDBOX_MARK, "importing")}):
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


def _place(error: BaseException) -> str:
    """Returns the last line of the author's code in an error's traceback."""
    frames = [it for it in traceback.extract_tb(error.__traceback__) if not is_installed(it.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "its start"


def _missing(module: ModuleType, holder: Any, name: str) -> str:
    """Returns a message about a missing attribute: with similar names, or the autotuned functions of a module."""
    where = getattr(holder, "__name__", type(holder).__name__)
    has_names = isinstance(holder, ModuleType) or inspect.isclass(holder)
    near = did_you_mean(name, [known for known in vars(holder) if not known.startswith("_")] if has_names else ())
    if near or holder is not module:
        return f"{where!r} has no {name!r}.{near}"
    tuned = [known for known, value in vars(module).items() if isinstance(value, Tuned)]
    listed = f"Its autotuned functions are: {', '.join(tuned)}." if tuned else "It has no autotuned function."
    return f"{where!r} has no {name!r}. {listed}"


# --- calls ---


def describe(call: GivenCall, signature: inspect.Signature) -> str:
    """Returns the arguments of a call by name on one line."""

    def leaf(value: Any) -> Any:
        return describe_array(value, canonical_dtype(value.dtype)) if is_array(value) else value

    args, kwargs = as_structs(call.args, call.kwargs)
    bound = signature.bind_partial(*args, **kwargs).arguments
    return call_text({name: jax.tree.map(leaf, value) for name, value in bound.items()})


def make(function: TunedFunction, options: argparse.Namespace) -> list[GivenCall]:
    """Returns the calls of a function that the options give: from texts in `options.calls`, or from `--inputs`.

    Raises:
        InputError: The function does not accept a call, or the function for `--inputs` gives no calls.
    """
    if options.calls is None:
        statics = parse_statics(options.static)
        found = _inputs(load(options.inputs, option="--inputs"), options.inputs)
        calls = [call.with_statics(statics) for call in found]
    else:
        calls = [_with_structs(call) for call in options.calls]
    for call in calls:
        _check(call, function, options.function)
    return calls


def _with_structs(call: GivenCall) -> GivenCall:
    args = tuple(_value(value, call.source) for value in call.args)
    kwargs = {name: _value(value, call.source) for name, value in call.kwargs.items()}
    return GivenCall(args, kwargs, call.source)


def _value(value: Any, source: str) -> Any:
    if not isinstance(value, ArrayKind):
        return value
    scalar_type = getattr(jnp, "bool_" if value.dtype == "bool" else value.dtype, None)
    if scalar_type is None:
        raise InputError(f"{source}: this version of JAX has no {value.dtype}: use another dtype")
    dtype = jnp.dtype(scalar_type)
    if canonical_dtype(dtype) != dtype:
        narrow = canonical_dtype(dtype)
        raise InputError(f"{source}: JAX makes {dtype} into {narrow}: write {narrow}, or set JAX_ENABLE_X64=1")
    return jax.ShapeDtypeStruct(value.shape, dtype)


def _inputs(make_inputs: Any, name: str) -> Iterator[GivenCall]:
    if not callable(make_inputs):
        raise InputError(f"--inputs {name} is not a function: name a function that returns the arguments of a call")
    try:
        inspect.signature(make_inputs).bind()
    except TypeError as error:
        raise InputError(f"--inputs {name} needs arguments ({error}): give its parameters defaults") from None
    given = make_inputs()
    listed = list(given) if inspect.isgenerator(given) else [given]
    for number, arguments in enumerate(listed, start=1):
        if not isinstance(arguments, (Mapping, tuple, list)):
            raise InputError(
                f"--inputs {name} returned {shown(arguments)}: return a tuple of arguments, or a dict of them by name"
            )
        args, kwargs = ((), dict(arguments)) if isinstance(arguments, Mapping) else (tuple(arguments), {})
        yield GivenCall(args, kwargs, f"--inputs, call {number}")
    if not listed:
        raise InputError(f"--inputs {name} yielded nothing: yield the arguments of each call")


def _check(call: GivenCall, function: TunedFunction, name: str) -> None:
    """Checks that a function accepts a call, so that common mistakes fail before any work starts.

    Raises:
        InputError: The function does not accept the call.
    """
    signature, static_names = function.signature, function.static_names
    parameters = signature.parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for keyword in () if takes_any else call.kwargs:
        if keyword not in parameters:
            near = did_you_mean(keyword, parameters) or f" Its parameters are: {', '.join(parameters)}."
            raise InputError(f"{call.source}: {name} has no parameter {keyword!r}.{near}")
    try:
        bound = signature.bind_partial(*call.args, **call.kwargs)
    except TypeError as error:
        reason = message_of(error)
        if twice := re.fullmatch(r"multiple values for argument '(.*)'", reason):
            reason = f"two values for {twice[1]!r}, one by its place and one by its name"
        raise InputError(f"{call.source}: {reason}: {name} takes {_shown_signature(function)}") from None
    for parameter, value in bound.arguments.items():
        if parameter in function.tunables:
            raise InputError(f"{call.source}: {parameter} is tuned here: leave it out")
        if static_names is not None and parameter in static_names and is_array(value):
            raise InputError(
                f"{call.source}: {parameter} is a static parameter: give its value, as in --static {parameter}=4"
            )
        if static_names is not None and parameter not in static_names and isinstance(value, str):
            raise InputError(
                f"{call.source}: {parameter} is not a static parameter: give an array, as in {parameter}=f32[8], or a "
                "number"
            )
    missing = [name for name in lacking(bound) if name not in function.tunables]
    # Tunables may be missing. If a function makes the configs, their names are not known yet.
    if function.tunables and missing:
        raise InputError(f"{call.source}: no value for {', '.join(missing)}: {name} takes {_shown_signature(function)}")


def _shown_signature(function: TunedFunction) -> str:
    names = [str(parameter) for name, parameter in function.parameters.items() if name not in function.tunables]
    return f"({', '.join(names)})"
