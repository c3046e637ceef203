"""This process: the user's code in it, names, packages, locks, the environment, stops, and signal handlers."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.metadata
import inspect
import os
import signal
import subprocess
import sys
import sysconfig
import threading
import traceback
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

SANDBOX_MARK = "QUARANTUNE_SANDBOX"
"""The variable that every process of a sandbox has in its environment, with the token of its template."""
_PASSED_THROUGH = frozenset({"quarantune", "jax", "jaxlib", "contextlib", "functools"})
"""Packages whose frames may stand between a user's call and a warning."""
_OWN_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_NEEDED = ("jax", "jaxlib", "numpy", "ml_dtypes", "cloudpickle", "psutil", "platformdirs", "quarantune")
"""Packages that a process of ours imports before any module of the user's."""
PROGRAMS = ("__main__", "__mp_main__", "<run_path>")
"""The modules of programs: in their own process, in a child of `multiprocessing`, and where `runpy` runs a file."""
_adopted = ""
_GIT_PATIENCE_S = 2.0
_OTHER_REPOSITORY = frozenset({"GIT_DIR", "GIT_COMMON_DIR", "GIT_WORK_TREE"})
"""Variables that name a repository whatever the directory is, as git sets them for hooks and `git rebase --exec`."""
_STOPPED_S = 0.5
"""A longer gap between two looks means that this process was stopped: its loops look every twentieth of a second."""
_T = TypeVar("_T")


def in_sandbox() -> bool:
    """Returns whether this process runs in a sandbox, where tuning must not start another sandbox."""
    return SANDBOX_MARK in os.environ


# --- the user's line, from deep inside this package ---


def warn(message: str, category: type[Warning]) -> None:
    """Issues a warning that points to the user's line.

    `warnings.warn` needs the number of frames in between, which varies: the same warning may come from a plain call,
    from a trace that JAX makes, or from `lookup`.

    Args:
        message: the text.
        category: the class of the warning.
    """
    frame = _users_frame()
    names = frame.f_globals
    warnings.warn_explicit(
        message,
        category,
        filename=frame.f_code.co_filename,
        lineno=frame.f_lineno,
        module=str(names.get("__name__") or "<unknown>"),
        registry=names.setdefault("__warningregistry__", {}),
    )


class own_frames_hidden:
    """Has the traceback of a Ctrl-C in the block end at the user's line, unless it was in further code of the user's.

    For the outermost function of this package: an exception that passes a `with` does not note its frame again.
    """

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, KeyboardInterrupt):
            hide_own_frames(error)


def hide_own_frames(error: BaseException) -> None:
    """Removes the frames down to the first of the user's from a traceback, as `own_frames_hidden` does."""
    trace = error.__traceback__
    while trace is not None and _package(trace.tb_frame) in _PASSED_THROUGH | sys.stdlib_module_names:
        trace = trace.tb_next
    error.__traceback__ = trace


def _users_frame() -> types.FrameType:
    """Returns the innermost frame of the user's code, or the outermost frame where there is none."""
    frame = sys._getframe(1)
    while _package(frame) in _PASSED_THROUGH and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _package(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


# --- where code is from ---


@functools.cache
def is_installed(file: str) -> bool:
    """Returns whether a file is part of Python or of an installed package, so that its version stands for its code.

    A package that was installed into any directory (`pip install --target`) counts, if pip left its record beside it.
    One that was installed to be edited does not: its files are where its author works.
    """
    if file.startswith("<frozen "):  # a module of Python's own program, such as the one that imports others
        return True
    path = os.path.normpath(file)  # not `abspath`, which fails where the working directory is gone
    if path.startswith(_homes()) or not {"site-packages", "dist-packages"}.isdisjoint(path.split(os.sep)):
        return True
    for directory in import_path():
        name, _, _ = path.removeprefix(directory + os.sep).partition(os.sep)
        if path.startswith(directory + os.sep) and name in _recorded(directory):
            return True
    return False


def entry_points(group: str) -> importlib.metadata.EntryPoints:
    """Returns the entry points of a group; every package is read once, which takes 20 ms for 100 packages."""
    found: importlib.metadata.EntryPoints = _entry_points(tuple(sys.path)).select(group=group)
    return found


@functools.cache
def _entry_points(path: tuple[str, ...]) -> Any:
    return importlib.metadata.entry_points()


@functools.cache
def _homes() -> tuple[str, ...]:
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    return (*(os.path.abspath(sysconfig.get_path(kind)) + os.sep for kind in kinds), _OWN_PACKAGE)


@functools.cache
def _recorded(directory: str) -> frozenset[str]:
    """Returns the names of the files and directories in a directory that packages installed there have."""
    names: set[str] = set()
    for record in Path(directory).glob("*.dist-info/RECORD"):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            names.update(line.partition(",")[0].partition("/")[0] for line in record.read_text("utf-8").splitlines())
    return frozenset(names)


def commit_of(function: types.FunctionType | None) -> str:
    """Returns the commit of the repository that holds a function's file, as `3f2a9c1b04d7`.

    Args:
        function: a Python function; None where there is none. One that was typed into a notebook has no file: it
            counts as one of the working directory.

    Returns:
        The commit; empty where there is none, or no git, or the function is an installed package's.
    """
    file = "" if function is None else function.__code__.co_filename
    return "" if is_installed(file) else _commit(os.path.dirname(file) if os.path.isfile(file) else ".")


@functools.cache
def _commit(directory: str) -> str:
    """Returns the commit of a directory, as it was when this process asked first: that of the code it has loaded."""
    command = ["git", "-C", directory, "rev-parse", "--short=12", "HEAD"]
    variables = {name: value for name, value in os.environ.items() if name not in _OTHER_REPOSITORY}
    try:
        done = subprocess.run(
            command, env=variables, stdin=subprocess.DEVNULL, capture_output=True, timeout=_GIT_PATIENCE_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode(errors="replace").strip()


# --- names of functions, classes and programs ---


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
        module = str(_users_frame().f_globals.get("__name__") or "unknown")
    return _program_of(fn, module) if module in PROGRAMS else module


def module_of(thing: Any) -> str:
    """Returns the module of a function or class, for a key or a fingerprint."""
    module = getattr(thing, "__module__", None)
    return str(module) if module not in PROGRAMS else _program_of(thing, module)


def program_name() -> str:
    """Returns the name of the program that runs in this process, or for which it works."""
    return _adopted or _name_of(vars(sys.modules.get("__main__", object)))


def adopt_program_name(name: str) -> None:
    """Takes over the name of the program for which this process works."""
    global _adopted
    _adopted = name


def is_runner(names: Mapping[str, Any]) -> bool:
    """Returns whether globals are those of a module of Python's own that runs a program apart from it: cProfile."""
    return os.path.dirname(names.get("__file__") or "") == os.path.dirname(os.__file__)


def _program_of(thing: Any, module: str) -> str:
    """Returns the name of the program that a function or class is from."""
    for function in vars(thing).values() if isinstance(thing, type) else [inspect.unwrap(thing)]:
        names = getattr(function, "__globals__", {})
        if names.get("__name__") == module and not is_runner(names):
            return _name_of(names) or module
    return _adopted or _name_of(vars(sys.modules.get(module, object))) or module


def _name_of(names: Mapping[str, Any]) -> str:
    """Returns the name by which others import a program's file, given its globals; empty where it has no file."""
    if is_runner(names):
        return os.path.basename(sys.argv[0]).removesuffix(".py")  # `cProfile -m` puts a module there
    spec, file = names.get("__spec__"), names.get("__file__")
    package = names.get("__package__") if spec is None else spec.parent
    return ".".join(filter(None, (package, Path(file).stem))) if file else ""


# --- the import path and the interpreter of another process ---


def import_path() -> list[str]:
    """Returns `sys.path` with absolute entries, valid in any working directory.

    Left out are entries that are not strings, which the import system ignores, and relative ones where the working
    directory is gone.
    """
    absolute = []
    for entry in sys.path:
        if isinstance(entry, str):
            with contextlib.suppress(OSError):  # no working directory
                absolute.append(os.path.abspath(entry))
    return absolute


def startup_path() -> list[str]:
    """Returns `import_path()` with the directories of Python and of our own packages first.

    No module in the user's directories can then shadow one of the standard library, or JAX.
    """
    path = import_path()
    homes = {os.path.abspath(directory) for directory in _library_directories()}
    return [entry for entry in path if entry in homes] + [entry for entry in path if entry not in homes]


def content(module: object) -> Mapping[str, Any]:
    """Returns the globals of a module without running any code: one that its first use imports is not imported yet."""
    try:
        found: Mapping[str, Any] = object.__getattribute__(module, "__dict__")
    except AttributeError:
        return {}
    return found


def is_imported_early(name: str) -> bool:
    """Returns whether a module is Python's own, or belongs to a package that a process of ours imports first.

    Args:
        name: the name of a module that this process has imported.
    """
    package = name.partition(".")[0]
    if package in _NEEDED:
        return True
    file = content(sys.modules.get(name)).get("__file__")
    is_from_library = file is None or os.path.abspath(file).startswith(os.path.dirname(os.__file__) + os.sep)
    return package in sys.stdlib_module_names and is_from_library


def _library_directories() -> list[str]:
    library = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.dirname(os.__file__)]
    zipped = os.path.join(sys.base_prefix, sys.platlibdir, f"python{sys.version_info[0]}{sys.version_info[1]}.zip")
    files = [getattr(sys.modules.get(name), "__file__", None) for name in _NEEDED]
    packages = [os.path.dirname(os.path.dirname(file)) for file in files if file]
    return [*library, *(os.path.join(directory, "lib-dynload") for directory in library), zipped, *packages]


def interpreter() -> str:
    """Returns the path of this Python's interpreter.

    Raises:
        RuntimeError: there is none: Python is embedded, or frozen into an application, which would start itself again.
    """
    if getattr(sys, "frozen", False):
        raise RuntimeError(
            f"this is a frozen application, of which {sys.executable} would start another instance as a worker: tune "
            f"with an ordinary Python and ship the results (option tables, or QUARANTUNE_CACHE_PATH), set "
            f"QUARANTUNE_ON_MISS=default to run untuned where there is none, or set QUARANTUNE_ISOLATION=none to tune "
            f"in this process"
        )
    if not sys.executable:
        raise RuntimeError(
            "sys.executable is empty, so no worker can be started: set sys.executable to a Python interpreter "
            "or set QUARANTUNE_ISOLATION=none"
        )
    return sys.executable


def interpreter_command() -> list[str]:
    """Returns a command that runs code in a fresh interpreter with this one's flags for imports; the code is to follow.

    `-P`, because `-c` would put the working directory first on the path.

    Raises:
        RuntimeError: as for `interpreter`.
    """
    isolated = "-I" if sys.flags.isolated else "-E" if sys.flags.ignore_environment else ""
    user = "-s" if sys.flags.no_user_site and not sys.flags.isolated else ""
    flags = [flag for flag in ("-" + "O" * sys.flags.optimize, isolated, user) if len(flag) > 1]
    return [interpreter(), *flags, "-P", "-c"]


# --- locks, variables and stops ---

_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def new_lock() -> threading.RLock:
    """Returns a reentrant lock that is free in a fork of this process, unless the thread that forked holds it."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def _free_in_fork() -> None:
    for lock in list(_locks):
        if not lock._is_owned():
            lock._at_fork_reinit()


os.register_at_fork(after_in_child=_free_in_fork)


class lazy(functools.cached_property[_T]):
    """An attribute computed at its first use, like `functools.cached_property` but without its lock.

    Python 3.11 has one such lock for all instances, which stays held in a fork. Threads that read the attribute at the
    same time may compute it twice; all get the same value.
    """

    def __get__(self, instance: Any, owner: type | None = None) -> _T:  # type: ignore[override]
        """Returns the value, and keeps it in the instance's dictionary."""
        if instance is None:
            return self  # type: ignore[return-value]
        value: _T = vars(instance).setdefault(self.attrname, self.func(instance))
        return value


def pickled_parts(value: Any) -> list[Any]:
    """Returns the parts from which a pickle makes an object again: a function, its arguments, and its state.

    An object that is pickled by its name has the characters of that name. This raises what the object's own methods
    raise, which may be anything.
    """
    return [list(part) if isinstance(part, Iterator) else part for part in value.__reduce_ex__(4)]


def without_caches(value: Any, part: Any) -> Any:
    """Returns the fields of an object without those that hold its cached properties; anything else as it is."""
    if not isinstance(part, dict):
        return part
    kind, cached = type(value), functools.cached_property
    return {name: item for name, item in part.items() if not isinstance(getattr(kind, str(name), None), cached)}


@contextlib.contextmanager
def environment_variables(values: Mapping[str, str | None]) -> Iterator[None]:
    """Sets environment variables within the block; afterwards, they are as they were.

    Args:
        values: the variables by name; None for those that are not set.
    """
    before = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Keeps Python from searching for garbage, which would traverse all of JAX's objects again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Stops:
    """Measures for how long this process was stopped, by the gaps between its looks at the clock.

    While the process that keeps the deadlines does not run, its workers may not run either, and their messages are not
    read. That time counts toward no deadline.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Starts to watch the clock.

        Args:
            clock: seconds.
        """
        self._clock = clock
        self._last_look = clock()

    def begin(self) -> None:
        """Starts anew, after work of this process that may have taken long."""
        self._last_look = self._clock()

    def worked(self, taken_s: float) -> None:
        """Takes note of work of this process since its last look, which was no stop."""
        self._last_look += taken_s

    def lost_s(self) -> float:
        """Returns for how many seconds this process was stopped since its last look; 0.0 where it was not."""
        last, self._last_look = self._last_look, self._clock()
        passed_s = self._last_look - last
        return passed_s if passed_s > _STOPPED_S else 0.0


# --- exceptions of signal handlers ---


def is_interruption(error: BaseException) -> bool:
    """Returns whether an exception was raised by a signal handler, for example by a timeout of the caller's.

    Args:
        error: the exception, with its traceback.
    """
    handlers, trace = _handlers(), BaseException.__dict__["__traceback__"].__get__(error)  # whatever its class says
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(trace))


def answer_of(question: Callable[..., _T], *about: Any) -> _T | None:
    """Returns what a call of the user's code returns; None where it raises.

    Raises:
        Exception: a signal handler has raised it.
    """
    try:
        return question(*about)
    except Exception as error:
        if is_interruption(error):
            raise
        return None


def failure_of(call: Callable[..., object], *about: Any) -> Exception | None:
    """Returns the exception that a call of the user's code raises; None where it raises none.

    Raises:
        Exception: a signal handler has raised it.
    """
    try:
        call(*about)
    except Exception as error:
        if is_interruption(error):
            raise
        return error
    return None


def _handlers() -> set[types.CodeType]:
    found = set()
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        while isinstance(handler, functools.partial):
            handler = handler.func
        if callable(handler):
            function = handler if isinstance(handler, types.FunctionType) else getattr(handler, "__func__", None)
            code = getattr(function or inspect.getattr_static(type(handler), "__call__", None), "__code__", None)
            if isinstance(code, types.CodeType):
                found.add(code)
    return found
