"""The options of a function's author, and the settings of an operator that override them."""

# ruff: noqa: RUF009 - `_option` and `_setting` make fields
from __future__ import annotations

import contextvars
import dataclasses
import enum
import functools
import importlib.util
import math
import os
import re
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypedDict, TypeVar, Unpack, runtime_checkable

from quarantune.host import shared_files
from quarantune.host.process import warn
from quarantune.values.codec import is_number, is_whole
from quarantune.values.configs import Config
from quarantune.values.texts import check_options, did_you_mean, shown
from quarantune.values.trial import ENERGY, TIME, Trial

if TYPE_CHECKING:
    from concurrent.futures import Executor

_LONGEST_S = 1e9
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
DEFAULTS = "defaults"
"""The `ref_fn` that stands for the function with its own defaults."""
_TOLERANCES = ("rtol", "atol", "max_mismatched_ratio")
SUPPLIES = ("auto", "integer", "uniform", "normal", "zeros", "ones")
"""The kinds of made-up arrays."""


class Isolation(enum.Enum):
    """The steps of a trial that run in workers."""

    PROCESS = "process"
    """All of them."""
    COMPILE = "compile"
    """All until there is an executable; this process, which has the device, loads, checks and measures."""
    NONE = "none"
    """None: this process does everything."""


AUTO, EXHAUSTIVE, RANDOM, SURROGATE = "auto", "exhaustive", "random", "surrogate"
FULL = "full"
OPTUNA = "optuna:"
"""The prefix of the name of one of Optuna's samplers."""

SEARCHES = (AUTO, EXHAUSTIVE, RANDOM, SURROGATE)

AUTO_EXHAUSTIVE_MOST = 300
"""With `auto`, up to so many configs are all tried."""
AUTO_MAX_TRIALS = 400
"""The number of trials of `auto` in a larger space."""
LEAST_GAIN = 0.005
"""A new best counts as a gain if it is faster by this share."""
_TABLE = re.compile(r"(?P<package>[A-Za-z_]\w*(\.[A-Za-z_]\w*)*):(?P<directory>[\w-][\w.-]*(/[\w-][\w.-]*)*)")


# --- parts of options ---


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """How far an output may be from the expected output.

    Attributes:
        rtol: the allowed difference of an element, relative to the expected element.
        atol: the allowed absolute difference, added to the relative one.
        max_mismatched_ratio: the share of a leaf's elements that may differ by more than both together.
    """

    rtol: float = 1e-2
    atol: float = 1e-2
    max_mismatched_ratio: float = 0.01


@runtime_checkable
class Search(Protocol):
    """Decides which configs are tried, and their order; it knows nothing of how they are run."""

    def ask(self, n: int) -> list[Config]:
        """Returns up to `n` configs to try next.

        Fewer than `n`, or none, means to wait for the trials of configs that were returned earlier; where all of them
        were told already, it means that the search has ended.

        Args:
            n: the most configs to return.
        """
        ...

    def tell(self, config: Config, trial: Trial) -> None:
        """Takes note of a trial, of a config that `ask` returned or of any other one of the space.

        Args:
            config: the config.
            trial: its outcome, with its time where it has one.
        """
        ...


def check_search(search: Any) -> None:
    """Checks the option `search`.

    Args:
        search: a name, or an object with the methods of `Search`.

    Raises:
        TypeError: it is neither a string nor such an object.
        ValueError: no search has this name.
    """
    if not isinstance(search, str):
        if isinstance(search, type) or not all(callable(getattr(search, name, None)) for name in ("ask", "tell")):
            raise TypeError(
                f"search={shown(search)} is no search: give {_choices()}, or an object with the methods "
                "ask(n) -> list[Config] and tell(config, trial)"
            )
    elif search not in SEARCHES and not (search.startswith(OPTUNA) and len(search) > len(OPTUNA)):
        hint = did_you_mean(search, (*SEARCHES, f"{OPTUNA}tpe"))
        raise ValueError(
            f"search={shown(search)} is not valid.{hint} Give {_choices()}, or an object with ask and tell."
        )


def _choices() -> str:
    return f"{', '.join(map(repr, SEARCHES))}, '{OPTUNA}<sampler>' such as '{OPTUNA}tpe'"


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


def table_directory(name: object) -> Path:
    """Returns the directory of a table, whether or not it exists; the package is found, and not imported.

    Args:
        name: `package:directory`, as in `mykernels:tables`; the directory is relative to that of the package.

    Raises:
        TypeError: the name is no text.
        ValueError: it does not have that form, or the package is not installed.
    """
    if not isinstance(name, str):
        raise TypeError(f"tables={name!r} is not valid: give 'package:directory', as in 'mykernels:tables'")
    match = _TABLE.fullmatch(name)
    if match is None:
        raise ValueError(
            f"tables={name!r} is not valid: give 'package:directory', as in 'mykernels:tables', with the directory "
            "relative to the package's own"
        )
    top, *inner = match["package"].split(".")
    try:
        found = importlib.util.find_spec(top)
    except ValueError:  # a module without a specification, such as `__main__`
        found = None
    if found is None or not found.submodule_search_locations:
        reason = "no package of that name is installed" if found is None else f"{top!r} is a module and no package"
        raise ValueError(f"tables={name!r} is not valid: {reason}; give a package that can be imported")
    places = [Path(root, *inner, match["directory"]) for root in found.submodule_search_locations]
    return next((place for place in places if place.is_dir()), places[0])


def unwrapped(value: Any) -> Any:
    """Returns the number or flag in a scalar of NumPy's or JAX's; any other value as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 and not isinstance(value, float) else value


# --- options ---


def _option(default: Any, accepts: Callable[[Any], Any], accepted: str = "", fault: str = "valid") -> Any:
    """Returns a dataclass field with the rule for its values.

    Args:
        default: the value if none is given, which the rule need not accept.
        accepts: returns False for a value that the option does not accept, or raises the error for it.
        accepted: the values that it accepts, for the error message.
        fault: the property that other values lack.
    """
    return dataclasses.field(default=default, metadata={"accepts": accepts, "accepted": accepted, "fault": fault})


def _whole(least: int) -> tuple[Callable[[Any], bool], str]:
    return lambda value: is_whole(value, least), f"a whole number of at least {least}"


_NAME = "a non-empty string, or leave it out"
_FUNCTION = callable, "a function, or leave it out", "callable"
_DURATION = (
    lambda value: is_number(value) and 0 < value <= _LONGEST_S,
    f"a number of seconds above 0 and at most {_LONGEST_S:.0e}",
)
_DIFFERENCE = lambda value: is_number(value) and 0 <= value <= sys.float_info.max, "a number of at least 0"
_SHARE = lambda value: is_number(value) and 0 <= value <= 1, "a share of the elements, from 0 to 1, as a number"
_YES_OR_NO = lambda value: isinstance(value, int) and value in (0, 1), "True or False"
_SUPPLY = f"one of {', '.join(SUPPLIES)}, or a function"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of the author of a tuned function; the operator's settings override them.

    Attributes:
        name: the cache file's name; None for the function's own.
        key_fn: takes the function's arguments and returns a JSON-able value that replaces the shapes and dtypes of the
            arrays in the key: calls with the same value share an entry. In `jax.export` it takes symbolic shapes, and
            has to return the same value as for concrete ones, from the dimensions and dtypes that are not symbolic.
        prune_fn: `(config, *args, **kwargs) -> bool`; False drops the config before a worker is spent on it.
        warmup: untimed runs per config.
        rep: at most this many timed samples per config.
        compile_timeout: seconds for loading, tracing, lowering and compiling one config.
        timeout: seconds for checking and measuring one config, from the moment it holds the device.
        memory_limit: host memory of one worker and its children, in bytes or as "8GB"; None for a fair share of
            the free memory.
        max_device_memory: the most device memory that the program of a config may take for its arguments, output and
            intermediate arrays, by the compiler's figures, in bytes or as "2GB". A config over it does not run
            (`device_oom`), and neither do the defaults.
        objective: what the winner has least of: `time`; `energy`, that an NVIDIA GPU takes for a call, which needs the
            extra `quarantune[energy]`; or a function that takes a `Trial` and returns a number, such as
            `lambda t: t.time_ms * t.energy_mj`. Its units are those of the trial's fields, as milliseconds and
            millijoules. A config for which it raises, or returns no finite number, ends as an `error`. Energy is
            measured if it makes no number of a trial without: it is tried with a made-up one before the sweep.
        supply: how arguments are made where there are no concrete ones: `auto`, `integer`, `uniform`, `normal`,
            `zeros`, `ones`, or a callable that takes the call's positional arguments, arrays as `jax.ShapeDtypeStruct`,
            and returns them with arrays.
        ref_fn: takes the function's arguments without the tunables; the output of every config must agree with its
            output. With `"defaults"` they must agree with the output of the function's own defaults; with None they
            may differ.
        check_fn: `(output, expected_or_None, *args) -> bool or None`; a config is wrong where it returns False or
            raises, whatever other checks say. Unless `ref_fn` is a function, nothing else is compared, and the expected
            output is None.
        rtol: allowed difference of an element, relative to the expected one. Where this and the two below are all
            None, outputs may differ by as much as rounding explains, which is measured; else None is 1e-2.
        atol: allowed difference of an element, in addition to `rtol`; None as above.
        max_mismatched_ratio: the share of an output's elements that may exceed both tolerances; None as above, or 0.01.
        check_grad: whether gradients must agree too, with those of `ref_fn` or of the defaults.
        time_grad: whether a config is compiled, checked and timed together with its gradient with respect to the
            floating arguments, so that the winner suits training.
        fidelity: `auto` ranks configs whose products XLA tunes on an NVIDIA GPU by a cheap compile first, and compiles
            only those fully that may win; `full` compiles, and times, all of them.
        search: which configs are tried: `auto` (all of up to 300 configs, else `surrogate` until its model
            expects no gain, for at most 400 trials), `exhaustive`, `random`, `surrogate`, `optuna:<sampler>`, or an
            object with the methods of `Search`, which serves one problem.
        max_trials: at most this many configs are tried, those of an interrupted sweep included.
        time_budget: seconds after which no further config is tried.
        patience: the search ends after this many trials without a gain of 0.5%; errors while a config is traced or
            compiled do not count.
        seed: the same seed and the same trials give the same search.
        devices_per_trial: how many accelerators one trial holds; arguments sharded over n of them need n. It has no
            effect on a CPU, where a worker has as many devices as this process, or as the arguments need.
        tables: `package:directory`, results that a package ships; they are looked up after the user's cache.
    """

    name: str | None = _option(None, lambda name: isinstance(name, str) and bool(name.strip()), _NAME)
    key_fn: Callable[..., Any] | None = _option(None, *_FUNCTION)
    prune_fn: Callable[..., bool] | None = _option(None, *_FUNCTION)
    warmup: int = _option(1, *_whole(0))
    rep: int = _option(20, *_whole(1))
    compile_timeout: float = _option(120.0, *_DURATION)
    timeout: float = _option(30.0, *_DURATION)
    memory_limit: int | str | None = _option(None, parse_memory)
    max_device_memory: int | str | None = _option(None, functools.partial(parse_memory, least=1))
    objective: str | Callable[[Trial], float] = _option(
        TIME, lambda it: callable(it) or it in (TIME, ENERGY), f"{TIME!r}, {ENERGY!r}, {_FUNCTION[1]}", "callable"
    )
    supply: str | Callable[..., Any] = _option("auto", lambda it: callable(it) or it in SUPPLIES, _SUPPLY)
    ref_fn: Callable[..., Any] | str | None = DEFAULTS
    check_fn: Callable[..., bool | None] | None = _option(None, *_FUNCTION)
    rtol: float | None = _option(None, *_DIFFERENCE)
    atol: float | None = _option(None, *_DIFFERENCE)
    max_mismatched_ratio: float | None = _option(None, *_SHARE)
    check_grad: bool = _option(False, *_YES_OR_NO)
    time_grad: bool = _option(False, *_YES_OR_NO)
    fidelity: Literal["auto", "full"] = _option(AUTO, lambda it: it in (AUTO, FULL), f"{AUTO!r} or {FULL!r}")
    search: str | Search = _option(AUTO, check_search)
    max_trials: int | None = _option(None, *_whole(1))
    time_budget: float | None = _option(None, *_DURATION)
    patience: int | None = _option(None, *_whole(1))
    seed: int = _option(0, *_whole(0))
    devices_per_trial: int = _option(1, *_whole(1))
    tables: str | None = _option(None, table_directory)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = unwrapped(getattr(self, field.name))
            object.__setattr__(self, field.name, value)
            about = field.metadata
            if value is not field.default and about and about["accepts"](value) is False:
                error = TypeError if about["fault"] == "callable" else ValueError
                raise error(f"{field.name}={shown(value)} is not {about['fault']}: give {about['accepted']}")
        if not callable(self.ref_fn) and self.ref_fn not in (None, DEFAULTS):
            fault, error = ("valid", ValueError) if isinstance(self.ref_fn, str) else ("callable", TypeError)
            raise error(f"ref_fn={self.ref_fn!r} is not {fault}: give a function, {DEFAULTS!r} or None")
        if self.check_grad and not callable(self.ref_fn) and not self.compares_outputs:
            raise ValueError("check_grad=True needs a reference whose gradients are right: give a function as ref_fn")

    @property
    def tolerance(self) -> Tolerance | None:
        """How far outputs may differ; None for as far as rounding explains."""
        given = {name: value for name in _TOLERANCES if (value := getattr(self, name)) is not None}
        return Tolerance(**given) if given else None

    @property
    def device_memory_bytes(self) -> int | None:
        """The most bytes of device memory of a program; None for no bound."""
        return None if self.max_device_memory is None else parse_memory(self.max_device_memory, least=1)

    @property
    def is_by_time(self) -> bool:
        """Whether the fastest config wins."""
        return isinstance(self.objective, str) and self.objective == TIME

    @property
    def compares_outputs(self) -> bool:
        """Whether the outputs of configs are compared with that of the defaults, or with each other."""
        return isinstance(self.ref_fn, str) and self.check_fn is None

    @property
    def calibrates(self) -> bool:
        """Whether the defaults run for their noise alone, as `ref_fn` says what is right."""
        return callable(self.ref_fn) and self.check_fn is None and self.tolerance is None

    @property
    def judges_outputs(self) -> bool:
        """Whether anything decides which outputs are right, so that whatever agrees may take the place of the rest."""
        return self.ref_fn is not None or self.check_fn is not None

    def deciding(self) -> Mapping[str, Any]:
        """Returns the options that affect which config wins; they are part of the fingerprint."""
        judging = ("ref_fn", "check_fn", *_TOLERANCES, "check_grad", "time_grad")
        names = ("prune_fn", "objective", "supply", *judging, "devices_per_trial", "device_memory_bytes")
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        # A callable is never compared, as its class may say anything of equality.
        return {name: value for name in names if callable(value := getattr(self, name)) or value != defaults.get(name)}


class ContextualKeywords(TypedDict, total=False):
    """The keyword arguments of `contextual_autotune`: the fields of `Options` that apply to a function of kernels."""

    name: str | None
    key_fn: Callable[..., Any] | None
    compile_timeout: float
    timeout: float
    memory_limit: int | str | None
    supply: str | Callable[..., Any]
    ref_fn: Callable[..., Any] | str | None
    check_fn: Callable[..., bool | None] | None
    rtol: float | None
    atol: float | None
    max_mismatched_ratio: float | None
    check_grad: bool
    time_grad: bool
    fidelity: Literal["auto", "full"]
    search: str | Search
    max_trials: int | None
    time_budget: float | None
    patience: int | None
    seed: int
    devices_per_trial: int
    tables: str | None


class OptionKeywords(ContextualKeywords, total=False):
    """The keyword arguments of `autotune` and `AutoTuner`: the fields of `Options`, for editors and type checkers."""

    prune_fn: Callable[..., bool] | None
    max_device_memory: int | str | None
    objective: str | Callable[[Trial], float]
    warmup: int
    rep: int


def checked_options(caller: str, options: Mapping[str, Any]) -> Options:
    """Returns the options given to a public function.

    Args:
        caller: the name of that function, for the message.
        options: the options by name.

    Raises:
        TypeError: there is no such option.
        ValueError: an option does not accept its value.
    """
    check_options(caller, options, [field.name for field in dataclasses.fields(Options)])
    return Options(**options)


# --- settings ---


def _flag(value: Any) -> bool:
    text = str(value).strip().lower()
    if text not in _TRUE + _FALSE:
        raise ValueError
    return text in _TRUE


def _number(
    kind: Callable[[Any], float] = float, *, above: float = -math.inf, least: float = -math.inf, most: float = math.inf
) -> Callable[[Any], float]:
    def parse(value: Any) -> float:
        number = kind(value)
        if isinstance(value, bool) or number != float(value) or not above < number or not least <= number <= most:
            raise ValueError
        return number

    return parse


_SECONDS = _number(above=0, most=_LONGEST_S), "a number of seconds above 0 and at most 1e9"


def _choice(*names: str) -> tuple[Callable[[Any], str], str]:
    def parse(value: Any) -> str:
        name = str(value).strip().lower()
        if name not in names:
            raise ValueError
        return name

    return parse, f"{', '.join(map(repr, names[:-1]))} or {names[-1]!r}"


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
    text = os.fspath(value)
    if "://" in text or not text.strip():
        raise ValueError
    # Absolute, because a later chdir in the caller must not move the cache.
    return Path(value).expanduser().absolute()


def _names(value: Any) -> tuple[str, ...]:
    given: Iterable[Any] = value.split(",") if isinstance(value, str) else [value] if isinstance(value, int) else value
    items = [] if isinstance(value, (bytes, bytearray)) else [*map(unwrapped, given)]
    names = tuple(str(item).strip() for item in items if isinstance(item, str) or is_whole(item, 0))
    if not names or not all(names) or len(set(names)) < len(items):
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
        record: the directory where calls without a saved result are written down, or the function of a `recording`
            block that is called for each; a miss is not tuned then.
        log_dir: the directory where the output of each trial is kept.
        lock_timeout: the longest wait for the lock of the cache, in seconds.
        executor: the engine whose machines run sweeps; None for this machine. No variable can set it.
    """

    cache_dir: Path = dataclasses.field(
        default_factory=_default_cache_dir, metadata={"parse": _path, "accepts": _DIRECTORY, "unset": None}
    )
    cache_path: tuple[Path, ...] = _setting(_paths, f"directories separated by '{os.pathsep}', and none a URL", ())
    disable_cache: bool = _setting(_flag, "0 or 1", False)
    always_tune: bool = _setting(_flag, "0 or 1", False)
    on_miss: str = _setting(*_choice("tune", "default", "nearest", "error"), "tune")
    version_check: bool = _setting(_flag, "0 or 1", False)
    cpu_utilization: float = _setting(_number(above=0, most=1), "a number above 0 and at most 1", 0.9)
    cpu_count: int = _setting(_number(int, least=-1), "a whole number of workers, or -1 to choose one", -1)
    max_cpu_count: int = _setting(_number(int, least=-1), "a whole number of workers, or -1 for no bound", -1)
    compile_timeout: float | None = _setting(*_SECONDS)
    timeout: float | None = _setting(*_SECONDS)
    memory_limit: int | None = _setting(parse_memory, "at least 16 MiB: bytes, or a number with a unit as in '8GB'")
    search: str | Search | None = _setting(
        _search, "'auto', 'exhaustive', 'random', 'surrogate', 'optuna:<sampler>', or an object with ask and tell"
    )
    max_trials: int | None = _setting(_number(int, least=1), "a whole number of at least 1")
    time_budget: float | None = _setting(*_SECONDS)
    devices: tuple[str, ...] | None = _setting(_names, "different indices or UUIDs, as in '0,2'", unset="all")
    configs_per_worker: int | None = _setting(_number(int, least=1), "a whole number of at least 1", unset="auto")
    start_method: str | None = _setting(*_choice("fork", "spawn"), unset="auto")
    isolation: str = _setting(*_choice("auto", "process", "compile", "none"), "auto")
    agree: bool = _setting(_flag, "0", True, unset="auto")
    progress: bool | None = _setting(_flag, "0, 1", unset="auto")
    record: Path | Callable[..., None] | None = _setting(
        lambda value: value if callable(value) else _path(value), _DIRECTORY
    )
    log_dir: Path | None = _setting(_path, _DIRECTORY)
    lock_timeout: float = _setting(_number(least=0, most=_LONGEST_S), "a number of seconds from 0 to 1e9", 60.0)
    executor: Executor | None = _setting(
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
    """Sets options of the environment for a block of code, in this thread or task of asyncio only; blocks nest.

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
        _blocks.set((*_blocks.get(), self))
        if self.values.get("always_tune"):
            self.tuned.clear()
        if self.values.get("always_tune") or self.values.get("record"):
            forget_choices()

    def __exit__(self, *_: object) -> None:
        _blocks.set(left(_blocks.get(), self))


_T = TypeVar("_T")


def left(entered: tuple[_T, ...], scope: _T) -> tuple[_T, ...]:
    """Returns the scopes that were entered, outermost first, without one of them where it was entered last."""
    for place in reversed(range(len(entered))):
        if entered[place] is scope:
            return entered[:place] + entered[place + 1 :]
    return entered  # a task of asyncio leaves what another one has entered


Which: TypeAlias = Callable[[str, str, str], bool]
"""Whether the result for a function's name, a kind of device and a key is meant."""
_forgetting: weakref.WeakKeyDictionary[Any, Callable[[Any, Which | None], None]] = weakref.WeakKeyDictionary()
"""The functions of the registered methods, by their objects."""


def on_forgetting(forget: Any) -> None:
    """Registers a method, for as long as its object exists, that forgets choices for calls which it keeps in memory.

    Args:
        forget: as `forget_choices`.
    """
    _forgetting[forget.__self__] = forget.__func__


def forget_choices(of: Which | None = None) -> None:
    """Makes all calls ask for their choices again.

    Args:
        of: accepts the results to forget too, because files have changed; None for none.
    """
    for keeper, forget in list(_forgetting.items()):
        forget(keeper, of)


_blocks: contextvars.ContextVar[tuple[settings, ...]] = contextvars.ContextVar("_blocks", default=())
"""The `settings` blocks of a thread, or of a task of asyncio, outermost first."""


def current() -> Settings:
    """Returns the settings in effect: blocks of this thread override the environment, which overrides the defaults.

    Raises:
        ValueError: a variable has a bad value.
    """
    values, blocks = {}, _blocks.get()
    for variable in os.environ:
        name = variable.removeprefix(_PREFIX)
        if name != variable and name.lower() not in _FIELDS and not name.startswith("SANDBOX"):  # our own marks
            _warn_unknown(variable)
    for name in _FIELDS:
        variable = _PREFIX + name.upper()
        text = os.environ.get(variable, "").strip()
        if text and not any(name in block.values for block in blocks):
            values[name] = _parse(name, variable, text)
    for block in blocks:
        values |= block.values
    if values.get("record") is not None and values.get("on_miss", "tune") == "tune":
        values["on_miss"] = "default"  # recorded now, tuned later
    return Settings(**values)


def block_of(name: str) -> settings | None:
    """Returns the innermost `settings` block of this thread that sets an option; None where none does."""
    return next((block for block in reversed(_blocks.get()) if name in block.values), None)


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
        return field.metadata["parse"](unwrapped(value))
    except (ValueError, TypeError, OverflowError, RuntimeError):  # the last where `~` names no user
        raise ValueError(f"{label}={shown(value)} is not valid: it must be {field.metadata['accepts']}.") from None
