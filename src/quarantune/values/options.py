"""The options with which the author of a function decides how it is tuned."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypedDict

from quarantune.values import table_name
from quarantune.values.search_choice import AUTO, Search, check_search
from quarantune.values.settings import LONGEST_S, parse_memory
from quarantune.values.texts import check_options, shown
from quarantune.values.tolerance import Tolerance
from quarantune.values.trial import Trial

DEFAULTS = "defaults"
"""The `ref_fn` that stands for the function with its own defaults."""
TIME, ENERGY = "time", "energy"
"""The objectives that have names."""
_BUDGETS = {"max_trials": 1, "patience": 1}
_TOLERANCES = ("rtol", "atol", "max_mismatched_ratio")
"""Options that may be left out, and the least value of each."""
SUPPLIES = ("auto", "integer", "uniform", "normal", "randn", "zeros", "ones")


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
            `randn`, `zeros`, `ones`, or a callable that takes the call's positional arguments, arrays as
            `jax.ShapeDtypeStruct`, and returns them with arrays.
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
        search: which configs are tried: `auto` (all of up to 300 configs, else `surrogate` with 400 trials and a
            patience of 200), `exhaustive`, `random`, `surrogate`, `optuna:<sampler>`, or an object with the methods of
            `Search`, which serves one problem.
        max_trials: at most this many configs are tried, those of an interrupted sweep included.
        time_budget: seconds after which no further config is tried.
        patience: the search ends after this many trials without a gain of 0.5%.
        seed: the same seed and the same trials give the same search.
        devices_per_trial: how many accelerators one trial holds; arguments sharded over n of them need n. It has no
            effect on a CPU, where a worker has as many devices as this process, or as the arguments need.
        tables: `package:directory`, results that a package ships; they are looked up after the user's cache.
        partial: whether the other tunables are tuned where a call sets some by hand; if not, the tuner steps aside.
    """

    name: str | None = None
    key_fn: Callable[..., Any] | None = None
    prune_fn: Callable[..., bool] | None = None
    warmup: int = 1
    rep: int = 20
    compile_timeout: float = 120.0
    timeout: float = 30.0
    memory_limit: int | str | None = None
    max_device_memory: int | str | None = None
    objective: str | Callable[[Trial], float] = TIME
    supply: str | Callable[..., Any] = "auto"
    ref_fn: Callable[..., Any] | str | None = DEFAULTS
    check_fn: Callable[..., bool | None] | None = None
    rtol: float | None = None
    atol: float | None = None
    max_mismatched_ratio: float | None = None
    check_grad: bool = False
    time_grad: bool = False
    search: str | Search = AUTO
    max_trials: int | None = None
    time_budget: float | None = None
    patience: int | None = None
    seed: int = 0
    devices_per_trial: int = 1
    tables: str | None = None
    partial: bool = False

    def __post_init__(self) -> None:
        if self.name is not None and (not isinstance(self.name, str) or not self.name.strip()):
            raise ValueError(f"name={self.name!r} is not valid: give a non-empty string, or leave it out")
        if isinstance(self.ref_fn, str) and self.ref_fn != DEFAULTS:
            raise ValueError(f"ref_fn={self.ref_fn!r} is not valid: give a function, {DEFAULTS!r} or None")
        if self.ref_fn is not None and self.ref_fn != DEFAULTS and not callable(self.ref_fn):
            raise TypeError(f"ref_fn={self.ref_fn!r} is not callable: give a function, {DEFAULTS!r} or None")
        named: dict[str, tuple[str, ...]] = {"key_fn": (), "prune_fn": (), "check_fn": (), "objective": (TIME, ENERGY)}
        for field, names in named.items():
            value = getattr(self, field)
            if not callable(value) and value not in (names or (None,)):
                others = "".join(f"{name!r}, " for name in names)
                raise TypeError(f"{field}={value!r} is not callable: give {others}a function, or leave it out")
        check_search(self.search)
        for field, least in (("warmup", 0), ("rep", 1), ("devices_per_trial", 1), *_BUDGETS.items(), ("seed", 0)):
            value = getattr(self, field)
            if value is None and field in _BUDGETS:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{field}={shown(value)} is not valid: give a whole number of at least {least}")
        for field in ("compile_timeout", "timeout", *(["time_budget"] if self.time_budget is not None else [])):
            value = getattr(self, field)
            if not _is_number(value) or not 0 < value <= LONGEST_S:
                raise ValueError(
                    f"{field}={shown(value)} is not valid: give a number of seconds above 0 and at most {LONGEST_S:.0e}"
                )
        if self.memory_limit is not None:
            parse_memory(self.memory_limit)
        _ = self.device_memory_bytes  # raises where it is no amount
        if not callable(self.supply) and self.supply not in SUPPLIES:
            raise ValueError(f"supply={self.supply!r} is not valid: give one of {', '.join(SUPPLIES)}, or a function")
        if self.tables is not None:
            table_name.directory_of(self.tables)
        _ = self.tolerance  # raises where a value is out of range
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
    def compares_outputs(self) -> bool:
        """Whether the outputs of configs are compared with that of the defaults, or with each other."""
        return self.ref_fn == DEFAULTS and self.check_fn is None

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
        return {name: value for name in names if (value := getattr(self, name)) != defaults.get(name)}


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
    partial: bool


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


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
