"""The operator's settings: `QUARANTUNE_*` variables and `with settings(...)` blocks, read and validated."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, Unpack

from quarantune.host import shared_files
from quarantune.host.process import warn
from quarantune.values import remembered
from quarantune.values.scoped_stack import ScopedStack
from quarantune.values.search_choice import Search, check_search
from quarantune.values.texts import check_options, did_you_mean, shown

if TYPE_CHECKING:
    from concurrent.futures import Executor

LONGEST_S = 1e9
"""The longest accepted time in seconds: thirty years."""
_LEAST_MEMORY = 16 * 2**20
_PREFIX = "QUARANTUNE_"
_DIRECTORY = (
    "a directory of a file system, not a URL: for a bucket, use a local directory, copy it there and back with the "
    "bucket's own tools, and combine results with `quarantune cache merge`"
)
_Place: TypeAlias = str | os.PathLike[str]
_Flag: TypeAlias = bool | int | str
_UNITS = {prefix: 1000**power for power, prefix in enumerate(("", "k", "m", "g", "t"))}
_UNITS |= {f"{prefix}i": 1024**power for power, prefix in enumerate(("", "k", "m", "g", "t")) if prefix}
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def parse_memory(value: int | str, *, least: int = _LEAST_MEMORY) -> int:
    """Returns an amount of memory in bytes.

    Args:
        value: a whole number of bytes, or a number with a unit: `"8GB"` is 8e9, `"8GiB"` is 8 * 2**30; the
            `B` may be left out, and case does not matter.
        least: the least amount; else that without which no process starts.

    Raises:
        ValueError: the value is not an amount of memory, or too little.
    """
    text = shown(value) if isinstance(value, int) else str(value)  # an int may have too many digits for str
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", text.strip().lower())
    amount = float(match[1]) * _UNITS[match[2] or ""] if match and not isinstance(value, bool) else 0
    if not 1 <= amount < 2**63:
        raise ValueError(
            f"{shown(value)} is no amount of memory: give bytes, or a number with a unit, as in '8GB' or '512MiB'"
        )
    if amount < least:
        raise ValueError(
            f"{shown(value)} is {amount:.0f} bytes, and no worker starts with less than 16 MiB: "
            "give a number with a unit, as in '8GB' or '512MiB'"
        )
    return int(amount)


def _flag(value: Any) -> bool:
    text = str(int(value) if isinstance(value, bool) else value).strip().lower()
    if text not in _TRUE + _FALSE:
        raise ValueError
    return text in _TRUE


def _number(*, above: float = -math.inf, least: float = -math.inf, most: float = math.inf) -> Callable[[Any], float]:
    def parse(value: Any) -> float:
        number = float("nan" if isinstance(value, bool) else value)
        if not (math.isfinite(number) and above < number and least <= number <= most):
            raise ValueError
        return number

    return parse


_SECONDS = _number(above=0, most=LONGEST_S), "a number of seconds above 0 and at most 1e9"


def _integer(*, least: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        number = int(value)
        if isinstance(value, bool) or number != float(value) or number < least:
            raise ValueError
        return number

    return parse


def _choice(*names: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        name = str(value).strip().lower()
        if name not in names:
            raise ValueError
        return name

    return parse


def _search(value: Any) -> str | Search:
    search = value.strip().lower() if isinstance(value, str) else value
    check_search(search)
    return search


def _executor(value: Any) -> Executor:
    from concurrent.futures import Executor

    if not isinstance(value, Executor):
        raise TypeError
    return value


def _path(value: Any) -> Path:
    if "://" in os.fspath(value):
        raise ValueError
    # Absolute, because a later chdir in the caller must not move the cache.
    return Path(value).expanduser().absolute()


def _names(value: Any) -> tuple[str, ...]:
    items: Iterable[Any] = value.split(",") if isinstance(value, str) else [value] if isinstance(value, int) else value
    names = tuple(str(item).strip() for item in items)
    if not names or not all(names) or len(set(names)) < len(names):
        raise ValueError
    return names


def _paths(value: Any) -> tuple[Path, ...]:
    if isinstance(value, str) and "://" in value:  # the colon of a URL separates no directories
        raise ValueError
    items: Iterable[Any] = (
        value.split(os.pathsep) if isinstance(value, str) else [value] if isinstance(value, os.PathLike) else value
    )
    paths = tuple(_path(item) for item in items if not isinstance(item, str) or item.strip())
    if not paths:
        raise ValueError
    return paths


def _setting(parse: Callable[[Any], Any], accepts: str, default: Any = None, *, unset: str | None = None) -> Any:
    """Returns a dataclass field with the parser of its value.

    Args:
        parse: turns a string or a Python value into the field's value; raises ValueError or TypeError.
        accepts: the values that `parse` accepts, for the error message.
        default: the value where nothing is set.
        unset: the word for the default.
    """
    accepts += f", or '{unset}'" if unset else ""
    return dataclasses.field(default=default, metadata={"parse": parse, "accepts": accepts, "unset": unset})


def _default_cache_dir() -> Path:
    import platformdirs

    if not os.environ.get("XDG_CACHE_HOME") and os.path.expanduser("~").startswith("~"):
        # A container may run its job as a user without a home.
        return shared_files.own_directory(Path(tempfile.gettempdir()))
    return platformdirs.user_cache_path("quarantune", appauthor=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The operator's settings; None leaves a choice to the author's options or to the machine.

    Attributes:
        cache_dir: the directory of the results.
        cache_path: directories that are asked after `cache_dir`, in order, and never written.
        disable_cache: whether the cache on disk is neither read nor written.
        always_tune: whether cached calls are tuned too, once per process and key.
        on_miss: `tune`, `default`, `nearest` or `error`.
        version_check: whether an entry that was made under other versions is a miss.
        cpu_utilization: the share of the available cores that may compile.
        cpu_count: how many configs compile at a time; -1 follows `cpu_utilization`.
        max_cpu_count: the upper bound for `cpu_count`; -1 sets none.
        compile_timeout: seconds for compiling one config.
        timeout: seconds for checking and measuring one config.
        memory_limit: bytes of host memory for one worker and its children.
        search: which configs are tried, as the option of that name.
        max_trials: at most this many configs are tried.
        time_budget: seconds after which no further config is tried.
        devices: the indices or UUIDs of the devices that may be used; None means all.
        configs_per_worker: how many configs one measuring worker may take; None chooses by platform.
        start_method: `fork` or `spawn`; None means fork where that is safe.
        isolation: `process`, `compile` or `none`: which steps of a trial run in workers; `auto` chooses by platform.
        agree: whether the ranks of one `jax.distributed` program use one config.
        progress: False shows no progress and no last line; None shows both, but without a terminal, a notebook or the
            variable `CI` only the last line; True writes a line every 10 s there, too.
        record: the directory in which calls without a saved result are written down, or the function of a `recording`
            block that is called for each; a miss is not tuned then.
        log_dir: the directory in which the output of each trial is kept.
        lock_timeout: the longest wait for the lock of the cache, in seconds.
        executor: the engine whose machines run sweeps; None for this machine. No variable can set it.
    """

    cache_dir: Path = dataclasses.field(
        default_factory=_default_cache_dir, metadata={"parse": _path, "accepts": _DIRECTORY, "unset": None}
    )
    cache_path: tuple[Path, ...] = _setting(_paths, f"directories separated by '{os.pathsep}', and none a URL", ())
    disable_cache: bool = _setting(_flag, "0 or 1", False)
    always_tune: bool = _setting(_flag, "0 or 1", False)
    on_miss: str = _setting(
        _choice("tune", "default", "nearest", "error"), "'tune', 'default', 'nearest' or 'error'", "tune"
    )
    version_check: bool = _setting(_flag, "0 or 1", False)
    cpu_utilization: float = _setting(_number(above=0, most=1), "a number above 0 and at most 1", 0.9)
    cpu_count: int = _setting(_integer(least=-1), "a whole number of workers, or -1 to choose one", -1)
    max_cpu_count: int = _setting(_integer(least=-1), "a whole number of workers, or -1 for no bound", -1)
    compile_timeout: float | None = _setting(*_SECONDS)
    timeout: float | None = _setting(*_SECONDS)
    memory_limit: int | None = _setting(parse_memory, "bytes, or a number with a unit such as '8GB' or '512MiB'")
    search: str | Search | None = _setting(  # noqa: RUF009 - makes a field
        _search, "'auto', 'exhaustive', 'random', 'surrogate', 'optuna:<sampler>', or an object with ask and tell"
    )
    max_trials: int | None = _setting(_integer(least=1), "a whole number of at least 1")
    time_budget: float | None = _setting(*_SECONDS)
    devices: tuple[str, ...] | None = _setting(_names, "different indices or UUIDs, as in '0,2'", unset="all")
    configs_per_worker: int | None = _setting(_integer(least=1), "a whole number of at least 1", unset="auto")
    start_method: str | None = _setting(_choice("fork", "spawn"), "'fork' or 'spawn'", unset="auto")
    isolation: str = _setting(
        _choice("auto", "process", "compile", "none"), "'auto', 'process', 'compile' or 'none'", "auto"
    )
    agree: bool = _setting(_flag, "0", True, unset="auto")
    progress: bool | None = _setting(_flag, "0, 1", unset="auto")
    record: Path | Callable[..., None] | None = _setting(  # noqa: RUF009 - makes a field
        lambda value: value if callable(value) else _path(value), _DIRECTORY
    )
    log_dir: Path | None = _setting(_path, _DIRECTORY)  # noqa: RUF009 - makes a field
    lock_timeout: float = _setting(_number(least=0, most=LONGEST_S), "a number of seconds from 0 to 1e9", 60.0)
    executor: Executor | None = _setting(  # noqa: RUF009 - makes a field
        _executor,
        "a concurrent.futures.Executor, given in Python: Dask's client.get_executor(pure=False), "
        "quarantune.ray.executor() or any other",
    )


_FIELDS = {field.name: field for field in dataclasses.fields(Settings)}


class SettingKeywords(TypedDict, total=False):
    """The keyword arguments of `settings`: the fields of `Settings`, for editors and type checkers."""

    cache_dir: _Place | None
    cache_path: str | Iterable[_Place] | None
    disable_cache: _Flag | None
    always_tune: _Flag | None
    on_miss: str | None
    version_check: _Flag | None
    cpu_utilization: float | str | None
    cpu_count: int | str | None
    max_cpu_count: int | str | None
    compile_timeout: float | str | None
    timeout: float | str | None
    memory_limit: int | str | None
    search: str | Search | None
    max_trials: int | str | None
    time_budget: float | str | None
    devices: str | int | Iterable[str | int] | None
    configs_per_worker: int | str | None
    start_method: str | None
    isolation: str | None
    agree: _Flag | None
    progress: _Flag | None
    record: _Place | Callable[..., None] | None
    log_dir: _Place | None
    lock_timeout: float | str | None
    executor: Executor | None


class settings:
    """Sets options of the environment for a block of code, in this thread only; blocks nest.

    Attributes:
        values: the parsed overrides by name.
        tuned: what was tuned in the block because its `always_tune` demands it, once each.

    Args:
        **overrides: the settings by the names of their variables, in lower case and without the prefix; as Python
            values, or as the strings that the variables would hold; None for the default.

    Raises:
        TypeError: there is no such option.
        ValueError: an option does not accept its value.

    Example:
        >>> with settings(timeout=5, on_miss="default"):  # doctest: +SKIP
        ...     y = kernel(x)
    """

    def __init__(self, **overrides: Unpack[SettingKeywords]) -> None:
        check_options("settings", overrides, _FIELDS)
        self.values: Mapping[str, Any] = {name: _parse(name, name, value) for name, value in overrides.items()}
        self.tuned: set[Any] = set()

    def __enter__(self) -> None:
        _blocks.enter(self)
        if self.values.get("always_tune"):
            self.tuned.clear()
        if self.values.get("always_tune") or self.values.get("record"):
            remembered.forget()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _blocks.leave(self)


_blocks: ScopedStack[settings] = ScopedStack()
"""The `settings` blocks of a thread."""


def current() -> Settings:
    """Returns the settings in effect: blocks of this thread override the environment, which overrides the defaults.

    Raises:
        ValueError: a variable has a bad value.
    """
    values = {}
    for variable in os.environ:
        name = variable.removeprefix(_PREFIX)
        if name != variable and name.lower() not in _FIELDS and not name.startswith("SANDBOX"):  # our own marks
            _warn_unknown(variable)
    for name in _FIELDS:
        variable = _PREFIX + name.upper()
        text = os.environ.get(variable, "").strip()
        if text and not any(name in block.values for block in _blocks.entered):
            values[name] = _parse(name, variable, text)
    for block in _blocks.entered:
        values |= block.values
    if values.get("record") is not None and values.get("on_miss", "tune") == "tune":
        values["on_miss"] = "default"  # recorded now, tuned later
    return Settings(**values)


def blocks() -> list[settings]:
    """Returns the `settings` blocks of this thread, outermost first, for `adopt_blocks`."""
    return [*_blocks.entered]


def adopt_blocks(blocks: list[settings]) -> None:
    """Puts this thread into the `settings` blocks of another one, for good."""
    _blocks.entered[:] = blocks


def block_of(name: str) -> settings | None:
    """Returns the innermost `settings` block of this thread that sets an option; None where none does."""
    return next((block for block in reversed(_blocks.entered) if name in block.values), None)


@functools.cache
def _warn_unknown(variable: str) -> None:
    """Warns once of a variable that has no effect; a variable of another version may be set on purpose."""
    hint = did_you_mean(variable, [_PREFIX + name.upper() for name in _FIELDS])
    warn(f"there is no variable {variable}, so it has no effect.{hint}", RuntimeWarning)


def _parse(name: str, label: str, value: Any) -> Any:
    """Returns the parsed value of the field `name`, which messages call `label`."""
    field = _FIELDS[name]
    unset = field.metadata["unset"]
    if value is None or (unset and isinstance(value, str) and value.strip().lower() == unset):
        return field.default_factory() if callable(field.default_factory) else field.default
    try:
        return field.metadata["parse"](value)
    except (ValueError, TypeError, OverflowError):
        raise ValueError(f"{label}={shown(value)} is not valid: it must be {field.metadata['accepts']}.") from None
