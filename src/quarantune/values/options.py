"""The options of a function's author, and the rules for their values."""

# ruff: noqa: RUF009 - `_option` makes fields
from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict, cast, runtime_checkable

from quarantune.values.amounts import LONGEST_S, parse_memory, unwrapped
from quarantune.values.codec import is_number, is_whole
from quarantune.values.configs import Config
from quarantune.values.texts import check_options, did_you_mean, shown
from quarantune.values.trial import ENERGY, TIME, Trial

DEFAULTS = "defaults"
"""The `ref_fn` that stands for the function with its own defaults."""
_TOLERANCES = ("rtol", "atol", "max_mismatched_ratio")
SUPPLIES = ("auto", "integer", "uniform", "normal", "zeros", "ones")
"""The kinds of made-up arrays."""


AUTO, EXHAUSTIVE, RANDOM, SURROGATE = "auto", "exhaustive", "random", "surrogate"
FULL = "full"
OPTUNA = "optuna:"
"""The prefix of the name of one of Optuna's samplers."""

SEARCHES = (AUTO, EXHAUSTIVE, RANDOM, SURROGATE)

ROUNDING, BITWISE, BATCH_INVARIANT = "rounding", "bitwise", "batch_invariant"
NUMERICS = (ROUNDING, BITWISE, BATCH_INVARIANT)
"""Values of `numerics`."""
NO_BATCH = (
    "cannot compare half of a batch with the whole (numerics='batch_invariant'): give its kernels check_batch, and "
    "tune each alone"
)
"""The end of the message that refuses batch-invariant numerics for a function of kernels."""

AUTO_EXHAUSTIVE_MOST = 300
"""Size of the largest space that `auto` tries in full."""
AUTO_MAX_TRIALS = 400
"""Most trials of `auto` in a larger space."""
LEAST_GAIN = 0.005
"""Share by which a new best must be faster to count as a gain."""
_TABLE = re.compile(r"(?P<package>[A-Za-z_]\w*(\.[A-Za-z_]\w*)*):(?P<directory>[\w-][\w.-]*(/[\w-][\w.-]*)*)")


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
    """Decides which configs are tried, and their order; it knows nothing of how they run."""

    def ask(self, n: int) -> list[Config]:
        """Returns up to `n` configs to try next.

        Fewer than `n`, or none, means to wait for the trials of configs that it returned earlier. If `tell` has
        received them all, it means that the search has ended.

        Args:
            n: the most configs to return.
        """
        ...

    def tell(self, config: Config, trial: Trial) -> None:
        """Takes note of the trial of a config, whether `ask` returned it or not.

        Args:
            config: the config.
            trial: its outcome, with its time if it has one.
        """
        ...


def check_search(search: Any) -> None:
    """Checks the option `search`.

    Args:
        search: a name, or an object with the methods of `Search`.

    Raises:
        TypeError: `search` is neither a string nor an object with these methods.
        ValueError: no search has this name.
    """
    if not isinstance(search, str):
        if isinstance(search, type) or not all(callable(getattr(search, name, None)) for name in ("ask", "tell")):
            raise TypeError(
                f"search={shown(search)} is not a search: give {_choices()}, or an object with the methods "
                "ask(n) -> list[Config] and tell(config, trial)"
            )
    elif search not in SEARCHES and not (search.startswith(OPTUNA) and len(search) > len(OPTUNA)):
        hint = did_you_mean(search, (*SEARCHES, f"{OPTUNA}tpe"))
        raise ValueError(
            f"search={shown(search)} is not valid.{hint} Give {_choices()}, or an object with ask and tell."
        )


def _choices() -> str:
    return f"{', '.join(map(repr, SEARCHES))}, '{OPTUNA}<sampler>' such as '{OPTUNA}tpe'"


def table_directory(name: object) -> Path:
    """Returns the directory of a table, whether or not it exists; finds the package without importing it.

    Args:
        name: `package:directory`, for example `mykernels:tables`; the directory is relative to the package's.

    Raises:
        TypeError: the name is not a string.
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
        reason = "no package of that name is installed" if found is None else f"{top!r} is a module, not a package"
        raise ValueError(f"tables={name!r} is not valid: {reason}; give a package that can be imported")
    places = [Path(root, *inner, match["directory"]) for root in found.submodule_search_locations]
    return next((place for place in places if place.is_dir()), places[0])


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
    lambda value: is_number(value) and 0 < value <= LONGEST_S,
    f"a number of seconds above 0 and at most {LONGEST_S:.0e}",
)
_DIFFERENCE = lambda value: is_number(value) and 0 <= value <= sys.float_info.max, "a number of at least 0"
_SHARE = lambda value: is_number(value) and 0 <= value <= 1, "a share of the elements, from 0 to 1, as a number"
_YES_OR_NO = lambda value: isinstance(value, int) and value in (0, 1), "True or False"
_NUMERICS = lambda value: value in NUMERICS, " or ".join(map(repr, NUMERICS))
_SUPPLY = f"one of {', '.join(SUPPLIES)}, or a function"


def _are_axes(value: Any) -> bool:
    return all(is_whole(axis, 0) for axis in (value.values() if isinstance(value, dict) and value else [value]))


_AXES = "the number of the axis with the batch, or a dict of parameters to such numbers"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of the author of a tuned function; the operator's settings override them.

    The first twelve are those that people use first; `autotune` groups the others.

    Attributes:
        key_fn: takes the function's arguments and returns a JSON-able value that replaces the shapes and dtypes of the
            arrays in the key: calls with the same value share an entry. In `jax.export` it takes symbolic shapes, and
            has to return the same value as for concrete ones, from the dimensions and dtypes that are not symbolic.
        prune_fn: `(config, *args, **kwargs) -> bool`; False drops the config before a worker is spent on it.
        ref_fn: takes the function's arguments without the tunables; the output of every config must agree with its
            output. With `"defaults"` they must agree with the output of the function's own defaults; with None they
            may differ.
        rtol: allowed difference of an element, relative to the expected one. If this, `atol` and `max_mismatched_ratio`
            are all None, outputs may differ by as much as rounding explains, which is measured. If only some are None,
            each of these is 1e-2.
        atol: allowed difference of an element, in addition to `rtol`; for None see `rtol`.
        numerics: the outputs that may win. `rounding`: those that agree with the reference as far as rounding explains.
            `bitwise`: only those with the very bits of the defaults' output, so that tuning changes no result.
            `batch_invariant`: only those whose rows have the same bits whatever batch they are in; see `check_batch`.
        time_grad: whether to compile, check and time a config together with its gradient with respect to the
            floating arguments, so that the winner suits training.
        search: which configs to try: `auto` (all of up to 300 configs, else `surrogate` until its model
            expects no gain, for at most 400 trials), `exhaustive`, `random`, `surrogate`, `optuna:<sampler>`, or an
            object with the methods of `Search`, which serves one problem.
        max_trials: the most configs to try, including an interrupted sweep's.
        time_budget: seconds after which the search tries no further config.
        compile_timeout: seconds for loading, tracing, lowering and compiling one config.
        timeout: seconds for checking and measuring one config, from the moment it holds the device.
        name: the cache file's name; None for the function's own.
        tables: `package:directory`, results that a package ships; the user's cache comes first.
        check_fn: `(output, expected_or_None, *args) -> bool or None`; a config is wrong if it returns False or
            raises, whatever other checks say. Unless `ref_fn` is a function, nothing else is compared, and the expected
            output is None.
        max_mismatched_ratio: the share of an output's elements that may exceed both tolerances; for None see `rtol`.
        check_grad: whether gradients must also agree with the gradients of `ref_fn` or of the defaults.
        check_batch: the axis of the batch in the array arguments, such as 0: a config's output for the first half of
            the batch alone must have the bits of the same rows in the whole. Arguments whose axis has another length
            than the first array's have no batch. A dict of parameters to axes names them one by one.
        warmup: untimed runs per config.
        rep: at most this many timed samples per config.
        objective: the quantity to minimise: `time`; `energy`, which an NVIDIA GPU takes for a call and which needs the
            extra `quarantune[energy]`; or a function that takes a `Trial` and returns a number, such as
            `lambda t: t.time_ms * t.energy_mj`, with the units of the trial's fields (milliseconds, millijoules). If
            the function raises for a config, or returns no finite number, the config ends as an `error`. Energy is
            measured if the function, tried before the sweep, returns no number for a made-up trial without energy.
        supply: how to make arguments if a call has no concrete ones: `auto`, `integer`, `uniform`, `normal`,
            `zeros`, `ones`, or a callable that takes the call's positional arguments, arrays as `jax.ShapeDtypeStruct`,
            and returns them with arrays.
        devices_per_trial: how many accelerators one trial holds; arguments sharded over n of them need n. It has no
            effect on a CPU, where a worker has as many devices as this process, or as the arguments need.
        fidelity: `auto` ranks configs whose products XLA tunes on an NVIDIA GPU by a cheap compile first, and fully
            compiles only configs that may win; `full` compiles, and times, all of them.
        patience: the search ends after this many trials without a gain of 0.5%; errors while a config is traced or
            compiled do not count.
        seed: the same seed and the same trials give the same search.
        memory_limit: host memory of one worker and its children, in bytes or as "8GB"; None for a fair share of
            the free memory.
        max_device_memory: the most device memory that the program of a config may take for its arguments, output and
            intermediate arrays, by the compiler's figures, in bytes or as "2GB". A config over it does not run
            (`device_oom`), and neither do the defaults.
    """

    key_fn: Callable[..., Any] | None = _option(None, *_FUNCTION)
    prune_fn: Callable[..., bool] | None = _option(None, *_FUNCTION)
    ref_fn: Callable[..., Any] | str | None = DEFAULTS
    rtol: float | None = _option(None, *_DIFFERENCE)
    atol: float | None = _option(None, *_DIFFERENCE)
    numerics: Literal["rounding", "bitwise", "batch_invariant"] = _option(ROUNDING, *_NUMERICS)
    time_grad: bool = _option(False, *_YES_OR_NO)
    search: str | Search = _option(AUTO, check_search)
    max_trials: int | None = _option(None, *_whole(1))
    time_budget: float | None = _option(None, *_DURATION)
    compile_timeout: float = _option(120.0, *_DURATION)
    timeout: float = _option(30.0, *_DURATION)
    name: str | None = _option(None, lambda name: isinstance(name, str) and bool(name.strip()), _NAME)
    tables: str | None = _option(None, table_directory)
    check_fn: Callable[..., bool | None] | None = _option(None, *_FUNCTION)
    max_mismatched_ratio: float | None = _option(None, *_SHARE)
    check_grad: bool = _option(False, *_YES_OR_NO)
    check_batch: int | Mapping[str, int] | None = _option(None, _are_axes, _AXES)
    warmup: int = _option(1, *_whole(0))
    rep: int = _option(20, *_whole(1))
    objective: str | Callable[[Trial], float] = _option(
        TIME, lambda it: callable(it) or it in (TIME, ENERGY), f"{TIME!r}, {ENERGY!r}, {_FUNCTION[1]}", "callable"
    )
    supply: str | Callable[..., Any] = _option("auto", lambda it: callable(it) or it in SUPPLIES, _SUPPLY)
    devices_per_trial: int = _option(1, *_whole(1))
    fidelity: Literal["auto", "full"] = _option(AUTO, lambda it: it in (AUTO, FULL), f"{AUTO!r} or {FULL!r}")
    patience: int | None = _option(None, *_whole(1))
    seed: int = _option(0, *_whole(0))
    memory_limit: int | str | None = _option(None, parse_memory)
    max_device_memory: int | str | None = _option(None, functools.partial(parse_memory, least=1))

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
        if self.numerics == BATCH_INVARIANT and self.check_batch is None:
            raise ValueError(
                f"{self.name or 'a function'}: numerics='batch_invariant' needs the axis of the batch: give "
                "check_batch=0, or another axis, to the function, or leave numerics (or QUARANTUNE_NUMERICS) out"
            )

    @property
    def tolerance(self) -> Tolerance | None:
        """How far outputs may differ; None means as far as rounding explains."""
        given = {name: value for name in _TOLERANCES if (value := getattr(self, name)) is not None}
        return Tolerance(**given) if given else None

    @property
    def device_memory_bytes(self) -> int | None:
        """The most bytes of device memory of a program; None for no bound."""
        return None if self.max_device_memory is None else int(parse_memory(self.max_device_memory, least=1))

    @property
    def is_by_time(self) -> bool:
        """Whether the fastest config wins."""
        return isinstance(self.objective, str) and self.objective == TIME

    @property
    def compares_outputs(self) -> bool:
        """Whether the sweep compares the outputs of configs with the output of the defaults, or with each other."""
        return isinstance(self.ref_fn, str) and self.check_fn is None

    @property
    def calibrates(self) -> bool:
        """Whether the defaults' output is kept, for its noise or its bits, although it does not say what is right."""
        is_noise_wanted = callable(self.ref_fn) and self.check_fn is None and self.tolerance is None
        return is_noise_wanted or (self.numerics == BITWISE and not self.compares_outputs)

    @property
    def judges_outputs(self) -> bool:
        """Whether anything decides which outputs are right. Only then may the defaults win."""
        return self.ref_fn is not None or self.check_fn is not None or self.numerics == BITWISE

    def deciding(self) -> Mapping[str, Any]:
        """Returns the options that affect which config wins; they are part of the fingerprint."""
        judging = ("ref_fn", "check_fn", *_TOLERANCES, "check_grad", "time_grad", "numerics", "check_batch")
        names = ("prune_fn", "objective", "supply", *judging, "devices_per_trial", "device_memory_bytes")
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        # A callable is never compared: its class may define equality in any way.
        return {name: value for name in names if callable(value := getattr(self, name)) or value != defaults.get(name)}


class ContextualKeywords(TypedDict, total=False):
    """The keyword arguments of `contextual_autotune`: the fields of `Options` that apply to a function of kernels."""

    name: str | None
    key_fn: Callable[..., Any] | None
    warmup: int
    rep: int
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
    numerics: Literal["rounding", "bitwise", "batch_invariant"]
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
    check_batch: int | Mapping[str, int] | None
    max_device_memory: int | str | None
    objective: str | Callable[[Trial], float]


def checked_options(caller: str, options: Mapping[str, Any], *, lacking: Mapping[str, str] | None = None) -> Options:
    """Returns the options given to a public function.

    Args:
        caller: the name of that function, for the message.
        options: the options by name.
        lacking: names of options that this function does not have, and the advice for each.

    Raises:
        TypeError: `options` has the name of an unknown option.
        ValueError: an option does not accept its value.
    """
    absent = lacking or {}
    known = [field.name for field in dataclasses.fields(Options) if field.name not in absent]
    check_options(caller, options, known, absent)
    return Options(**options)


def show_options(function: Callable[..., Any], *, lacking: Iterable[str] = (), **defaults: Any) -> None:
    """Makes `help` and editors show the options of a public function by name, in place of `**options`.

    Args:
        function: the function, which takes the other options as keyword arguments.
        lacking: names of options that it does not have.
        **defaults: other defaults than those of `Options`.
    """
    signature = inspect.signature(function)
    own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    options = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(field.name, field.default))
        for field in dataclasses.fields(Options)
        if field.name not in lacking
    ]
    cast("Any", function).__signature__ = signature.replace(parameters=[*own, *options])
