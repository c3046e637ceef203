"""The settings in effect, and blocks of code that change them."""

from __future__ import annotations

import contextvars
import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, TypeVar, Unpack, cast

from quarantune.host.frames import warn_once
from quarantune.values.forgetting import forget_choices
from quarantune.values.options import Search
from quarantune.values.settings import FIELDS, REMOVED, Settings, parse_setting
from quarantune.values.texts import check_options, did_you_mean

if TYPE_CHECKING:
    from concurrent.futures import Executor

_PREFIX = "QUARANTUNE_"
_Place: TypeAlias = str | os.PathLike[str]
_Flag: TypeAlias = bool | int | str
_T = TypeVar("_T")


class SettingKeywords(TypedDict, total=False):
    """The keyword arguments of `settings`: the fields of `Settings`, for editors and type checkers."""

    cache_dir: _Place | None
    cache_path: str | Iterable[_Place] | None
    push: str | None
    disable_cache: _Flag | None
    always_tune: _Flag | None
    on_miss: Literal["tune", "default", "nearest", "rule", "error"] | None
    version_check: _Flag | None
    num_workers: int | str | None
    compile_timeout: float | str | None
    timeout: float | str | None
    memory_limit: int | str | None
    numerics: Literal["rounding", "bitwise", "batch_invariant"] | None
    search: str | Search | None
    max_trials: int | str | None
    time_budget: float | str | None
    devices: str | int | Iterable[str | int] | None
    configs_per_worker: int | str | None
    start_method: Literal["auto", "fork", "spawn"] | None
    isolation: Literal["auto", "process", "compile", "none"] | None
    agree: _Flag | None
    progress: _Flag | None
    record: _Place | Callable[..., None] | None
    profile_scopes: _Flag | None
    log_dir: _Place | None
    lock_timeout: float | str | None
    executor: Executor | None
    listen: str | None


class settings:
    """Sets options of the environment for a block of code, in this thread or task of asyncio only; blocks nest.

    Attributes:
        values: the parsed overrides by name.
        tuned: the calls that the block's `always_tune` need not tune again.

    Args:
        **overrides: the settings by the names of their variables, in lower case and without the prefix; as Python
            values, or as the strings that the variables would hold; None for the default.

    Raises:
        TypeError: a keyword names an unknown setting.
        ValueError: a setting does not accept its value.

    Example:
        >>> import jax, quarantune
        >>> @quarantune.autotune({"n": [1, 2]}, name="untuned")
        ... @jax.jit(static_argnames=["n"])
        ... def add(x, n: int = 1):
        ...     return x + 1
        >>> import warnings
        >>> with warnings.catch_warnings(), settings(timeout=5, on_miss="default"):
        ...     warnings.simplefilter("ignore")  # it says that the call runs with the function's defaults
        ...     print(add(1.0))
        2.0
    """

    def __init__(self, **overrides: Unpack[SettingKeywords]) -> None:
        check_options("settings", overrides, FIELDS, REMOVED)
        self.values: Mapping[str, Any] = {name: parse_setting(name, name, value) for name, value in overrides.items()}
        self.tuned: set[Any] = set()

    def __enter__(self) -> None:
        _blocks.set((*_blocks.get(), self))
        if self.values.get("always_tune"):
            self.tuned.clear()
        if "numerics" in self.values:
            with_numerics.append(self)
        if self.values.get("always_tune") or self.values.get("record") or self.values.keys() & {"numerics", *_PLACES}:
            forget_choices()

    def __exit__(self, *_: object) -> None:
        _blocks.set(left(_blocks.get(), self))
        if not self.values.keys().isdisjoint(_PLACES):
            forget_choices()
        if "numerics" in self.values:
            with_numerics.remove(self)


def left(entered: tuple[_T, ...], scope: _T) -> tuple[_T, ...]:
    """Returns the entered scopes, outermost first, without the last entry of one of them."""
    for place in reversed(range(len(entered))):
        if entered[place] is scope:
            return entered[:place] + entered[place + 1 :]
    return entered  # a task of asyncio leaves a block that another task entered


_blocks: contextvars.ContextVar[tuple[settings, ...]] = contextvars.ContextVar("_blocks", default=())
"""The `settings` blocks of a thread, or of a task of asyncio, outermost first."""


with_numerics: list[settings] = []
"""The blocks of all threads that set `numerics`. In one, choices of other threads do not count, nor last after it."""


_PLACES = ("cache_dir", "cache_path")
"""The settings that name the places of results."""


def places_in_force() -> tuple[Any, ...]:
    """Returns the places of results that the blocks of this thread demand, equal for equal places."""
    return tuple(block and block.values[name] for name, block in ((name, block_of(name)) for name in _PLACES))


def numerics_in_force() -> str | None:
    """Returns the numerics that a block or the environment demands; None if neither does.

    Raises:
        ValueError: the variable has a bad value.
    """
    if (block := block_of("numerics")) is not None:
        return cast("str | None", block.values["numerics"])
    text = os.environ.get(variable := f"{_PREFIX}NUMERICS", "").strip()
    return cast("str", parse_setting("numerics", variable, text)) if text else None


def current() -> Settings:
    """Returns the settings in effect: blocks of this thread override the environment, which overrides the defaults.

    Raises:
        ValueError: a variable has a bad value.
    """
    values, blocks = {}, _blocks.get()
    for variable in os.environ:
        name = variable.removeprefix(_PREFIX)
        if name != variable and name.lower() not in FIELDS and not name.startswith("SANDBOX"):  # our own marks
            _warn_unknown(variable)
    for name in FIELDS:
        variable = _PREFIX + name.upper()
        text = os.environ.get(variable, "").strip()
        if text and not any(name in block.values for block in blocks):
            values[name] = parse_setting(name, variable, text)
    for block in blocks:
        values |= block.values
    if values.get("record") is not None and values.get("on_miss", "tune") == "tune":
        values["on_miss"] = "default"  # recorded now, tuned later
    return Settings(**values)


def block_of(name: str) -> settings | None:
    """Returns the innermost `settings` block of this thread that sets an option; None if none does."""
    return next((block for block in reversed(_blocks.get()) if name in block.values), None)


def _warn_unknown(variable: str) -> None:
    """Warns once of a variable that has no effect; a variable of another version may be set on purpose."""
    instead = REMOVED.get(variable.removeprefix(_PREFIX).lower())
    near = did_you_mean(variable, [_PREFIX + name.upper() for name in FIELDS])
    hint = f" Use {_PREFIX}{instead.upper()}." if instead else near
    warn_once(f"there is no variable {variable}, so it has no effect.{hint}", RuntimeWarning)
