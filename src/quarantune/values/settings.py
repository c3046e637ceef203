"""The settings of an operator, which override the options of a function's author, and the rules for their values."""

# ruff: noqa: RUF009 - `_setting` makes fields
from __future__ import annotations

import dataclasses
import enum
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from quarantune.host import shared_files
from quarantune.values.amounts import LONGEST_S, parse_memory, unwrapped
from quarantune.values.codec import is_whole
from quarantune.values.options import AUTO, NUMERICS, Search, check_search
from quarantune.values.texts import BUCKET_URL, STORE_URL, shown

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from quarantune.values.store_url import StoreURL

_DIRECTORY = (
    "a directory of a file system, not a URL: results at a URL are read with QUARANTUNE_CACHE_PATH, and copied with "
    "`quarantune cache push` and `quarantune cache pull`"
)
SHARE = "share"
"""The value of `agree` with which ranks share every sweep."""
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


class Isolation(enum.Enum):
    """The steps of a trial that run in workers."""

    PROCESS = "process"
    """All of them."""
    COMPILE = "compile"
    """All until there is an executable; this process, which has the device, loads, checks and measures."""
    NONE = "none"
    """None: this process does everything."""


class Listen(NamedTuple):
    """Where the submitter of a sweep on an engine listens for the machines of the engine.

    Attributes:
        host: an address or a name of this machine; empty for all addresses.
        first: the first port to try.
        last: the last port to try.
    """

    host: str
    first: int
    last: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.first}" + (f"-{self.last}" if self.last > self.first else "")


_PLACE = re.compile(r"(?:\[([^\s\]]+)\]|([^\s:/\[\]]*)):(\d{1,5})(?:-(\d{1,5}))?", re.ASCII)


def _listen(value: Any) -> Listen:
    if not (found := _PLACE.fullmatch(str(value).strip())):
        raise ValueError
    host_6, host, first, last = found.groups()
    if not 1 <= int(first) <= int(last or first) < 1 << 16:
        raise ValueError
    return Listen(host_6 or host, int(first), int(last or first))


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


_SECONDS = _number(above=0, most=LONGEST_S), "a number of seconds above 0 and at most 1e9"


def _workers(value: Any) -> int | float:
    """Returns a number of workers, or a share of the cores as a float."""
    if isinstance(value, str) and value.strip().endswith("%"):
        return _number(above=0, most=100)(value.strip().removesuffix("%")) / 100
    return int(_number(int, least=1)(value))


def _choice(*names: str) -> tuple[Callable[[Any], str], str]:
    def parse(value: Any) -> str:
        name = str(value).strip().lower()
        if name not in names:
            raise ValueError
        return name

    return parse, f"{', '.join(map(repr, names[:-1]))} or {names[-1]!r}"


def _agreement(value: Any) -> bool | str:
    is_share = isinstance(value, str) and value.strip().lower() == SHARE
    return SHARE if is_share else _flag(value)


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


def _places(value: Any) -> tuple[Path | StoreURL, ...]:
    if isinstance(value, str) and "://" in value:
        from quarantune.values.store_url import split_places  # few programs name a URL

        value = split_places(value)
    items: Iterable[Any] = (
        value.split(os.pathsep) if isinstance(value, str) else [value] if isinstance(value, os.PathLike) else value
    )
    places = tuple(
        _url(item) if isinstance(item, str) and "://" in item else _path(item)
        for item in items
        if not isinstance(item, str) or item.strip()
    )
    if not places:
        raise ValueError
    return places


def _url(value: Any) -> StoreURL:
    from quarantune.values.store_url import StoreURL

    return StoreURL.parse(os.fspath(value))


def _bucket(value: Any) -> StoreURL:
    if not (url := _url(value)).is_bucket:
        raise ValueError
    return url


def _setting(parse: Callable[[Any], Any], accepts: str, default: Any = None, *, unset: str | None = None) -> Any:
    """Returns a dataclass field with the parser of its value.

    Args:
        parse: turns a string or a Python value into the field's value; raises ValueError or TypeError.
        accepts: the values that `parse` accepts, for the error message.
        default: the value if nothing is set.
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
        cache_path: directories and URLs to read after `cache_dir`, in order; they are never written.
        push: the bucket that receives this job's results when it ends.
        disable_cache: whether the cache on disk is neither read nor written.
        always_tune: whether to tune cached calls also, once per process and key.
        on_miss: `tune`, `default`, `nearest`, `rule` or `error`.
        version_check: whether an entry that was made under other versions is a miss.
        num_workers: how many configs compile at a time; a float is a share of the available cores, and None stands
            for 0.9 of them. Never more than these cores.
        compile_timeout: seconds for compiling one config.
        timeout: seconds for checking and measuring one config.
        memory_limit: bytes of host memory for one worker and its children.
        numerics: which outputs may win; see `Options`.
        search: which configs to try; see `Options`.
        max_trials: the most configs to try.
        time_budget: seconds after which the search tries no further config.
        devices: the indices or UUIDs of the devices to use; None means all.
        configs_per_worker: how many configs one measuring worker may take; None chooses by platform.
        start_method: `fork` or `spawn`; None means fork where that is safe.
        isolation: `process`, `compile` or `none`: which steps of a trial run in workers; `auto` chooses by platform.
        agree: how the ranks of one `jax.distributed` program use one config: with `auto`, they share long sweeps; with
            `share`, all sweeps; with True, one rank tunes. False lets each tune for itself.
        progress: False shows neither progress nor the last line. None shows both, but only the last line without a
            terminal, a notebook or the variable `CI`. True also writes a line every 10 s there.
        record: the directory to record calls without a saved result in, or the function of a `recording` block
            to call for each. A miss is not tuned then.
        profile_scopes: whether profiles show traced calls under the name `quarantune/NAME/ID`.
        log_dir: the directory where the output of each trial is kept.
        lock_timeout: the longest wait for the lock of the cache, in seconds.
        executor: the engine whose machines run sweeps; None for this machine. No variable can set it.
        listen: where the machines of an engine reach this process; None for a free port at all addresses.
    """

    cache_dir: Path = dataclasses.field(
        default_factory=_default_cache_dir, metadata={"parse": _path, "accepts": _DIRECTORY, "unset": None}
    )
    cache_path: tuple[Path | StoreURL, ...] = _setting(
        _places, f"directories or URLs separated by '{os.pathsep}', as /DIRECTORY, {STORE_URL}", ()
    )
    push: StoreURL | None = _setting(_bucket, f"the URL of a bucket: {BUCKET_URL}")
    disable_cache: bool = _setting(_flag, "0 or 1", False)
    always_tune: bool = _setting(_flag, "0 or 1", False)
    on_miss: str = _setting(*_choice("tune", "default", "nearest", "rule", "error"), "tune")
    version_check: bool = _setting(_flag, "0 or 1", False)
    num_workers: int | float | None = _setting(
        _workers, "a whole number of at least 1, or a share of the available cores as in '50%'", unset="auto"
    )
    compile_timeout: float | None = _setting(*_SECONDS)
    timeout: float | None = _setting(*_SECONDS)
    memory_limit: int | None = _setting(parse_memory, "at least 16 MiB: bytes, or a number with a unit as in '8GB'")
    numerics: str | None = _setting(*_choice(*NUMERICS))
    search: str | Search | None = _setting(
        _search, "'auto', 'exhaustive', 'random', 'surrogate', 'optuna:<sampler>', or an object with ask and tell"
    )
    max_trials: int | None = _setting(_number(int, least=1), "a whole number of at least 1")
    time_budget: float | None = _setting(*_SECONDS)
    devices: tuple[str, ...] | None = _setting(_names, "different indices or UUIDs, as in '0,2'", unset="all")
    configs_per_worker: int | None = _setting(_number(int, least=1), "a whole number of at least 1", unset="auto")
    start_method: str | None = _setting(*_choice("fork", "spawn"), unset="auto")
    isolation: str = _setting(*_choice("auto", "process", "compile", "none"), "auto")
    agree: bool | str = _setting(_agreement, "0, 1, 'share'", AUTO, unset=AUTO)
    progress: bool | None = _setting(_flag, "0, 1", unset="auto")
    record: Path | Callable[..., None] | None = _setting(
        lambda value: value if callable(value) else _path(value), _DIRECTORY
    )
    profile_scopes: bool = _setting(_flag, "0 or 1", True)
    log_dir: Path | None = _setting(_path, _DIRECTORY)
    lock_timeout: float = _setting(_number(least=0, most=LONGEST_S), "a number of seconds from 0 to 1e9", 60.0)
    executor: Executor | None = _setting(
        _executor,
        "a concurrent.futures.Executor, given in Python: Dask's client.get_executor(pure=False), "
        "quarantune.ray.executor() or any other",
    )
    listen: Listen | None = _setting(
        _listen,
        "an address of this machine and a port or ports from 1 to 65535, as in '10.0.0.5:8790', "
        "'[fd00::5]:8790-8799', or ':8790' for all addresses",
    )

    @property
    def read_directories(self) -> list[Path]:
        """The directories of `cache_path`."""
        return [place for place in self.cache_path if isinstance(place, Path)]


FIELDS = {field.name: field for field in dataclasses.fields(Settings)}
REMOVED = dict.fromkeys(("cpu_count", "cpu_utilization", "max_cpu_count"), "num_workers")
"""Settings that do not exist any more, and the setting to use in place of each."""


def parse_setting(name: str, label: str, value: Any) -> Any:
    """Returns the parsed value of the field `name`, which messages call `label`."""
    field = FIELDS[name]
    unset = field.metadata["unset"]
    if value is None or (unset and isinstance(value, str) and value.strip().lower() == unset):
        return field.default_factory() if callable(field.default_factory) else field.default
    try:
        return field.metadata["parse"](unwrapped(value))
    except (ValueError, TypeError, OverflowError, RuntimeError):  # the last if `~` names no user
        raise ValueError(f"{label}={shown(value)} is not valid: it must be {field.metadata['accepts']}.") from None
