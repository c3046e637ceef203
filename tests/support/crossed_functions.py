"""The functions, configs and options of the rows in `crossings.py`. Workers import this file, so it imports little."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import linecache
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

import quarantune

Row = Mapping[str, str]
NAME = "crossed"
PACKAGE = "crossed_package"
TUNED: Any = None
"""The tuned object of the row that runs: `quarantune tune --recorded` finds it in this module."""


class How(enum.Enum):
    """A number of parts."""

    ONE = 1
    TWO = 2


@dataclasses.dataclass(frozen=True)
class Parts:
    """A number of parts, as an enum in a tuple in a dataclass."""

    how: tuple[How, ...]


@dataclasses.dataclass(frozen=True)
class Model:
    """Holds a tuned method."""

    factor: float
    apply: ClassVar[Any] = None


def in_parts(xp: Any, x: Any, n: Any, fails: bool) -> Any:
    """Computes the same with every config, by another program; if `fails`, only the default works."""
    if fails and n != 4:
        raise ArithmeticError(f"n={n} is bad")
    parts = x.reshape(n if isinstance(n, int) else n.how[0].value, -1)
    return (xp.sin(parts) * 2 + parts).reshape(x.shape)


def jax_function(x: Any, m: int = 0, n: Any = 4) -> Any:
    return in_parts(jnp, x, n, False)


def failing_jax_function(x: Any, m: int = 0, n: Any = 4) -> Any:
    return in_parts(jnp, x, n, True)


def numpy_function(x: Any, m: int = 0, n: Any = 4) -> Any:
    return in_parts(np, x, n, False)


def failing_numpy_function(x: Any, m: int = 0, n: Any = 4) -> Any:
    return in_parts(np, x, n, True)


def method(self: Model, x: Any, m: int = 0, n: Any = 4) -> Any:
    return in_parts(jnp, x, n, False) * self.factor


def failing_method(self: Model, x: Any, m: int = 0, n: Any = 4) -> Any:
    return in_parts(jnp, x, n, True) * self.factor


_IN_MODULE = {
    (jnp, False): jax_function,
    (jnp, True): failing_jax_function,
    (np, False): numpy_function,
    (np, True): failing_numpy_function,
}
_CELL = """\
def in_a_cell(x, m: int = 0, n=4):
    return in_parts(xp, x, n, fails)
"""


def is_plain(row: Row) -> bool:
    """Returns whether the tuned function is not jitted. A contextual function may be plain, but its kernel is not."""
    return row["kind"] == "plain" and row["ask"] != "contextual"


def is_of_numpy(row: Row) -> bool:
    """Returns whether the function computes with NumPy: JAX differentiates only its own operations."""
    return is_plain(row) and row["gradient"] != "check_grad"


def function_of(row: Row) -> Any:
    """Returns the function to tune, not jitted yet."""
    xp, fails = np if is_of_numpy(row) else jnp, row["source"] == "failure"
    if row["kind"] == "method":
        if row["origin"] == "module":
            return failing_method if fails else method
        return lambda self, x, m=0, n=4: in_parts(jnp, x, n, fails) * self.factor
    if row["origin"] == "module":
        return _IN_MODULE[xp, fails]
    if row["origin"] == "closure":
        return lambda x, m=0, n=4: in_parts(xp, x, n, fails)
    file = "<ipython-input-1>"
    linecache.cache[file] = (len(_CELL), None, _CELL.splitlines(keepends=True), file)
    names = {"__name__": "__main__", "in_parts": in_parts, "xp": xp, "fails": fails}
    exec(compile(_CELL, file, "exec"), names)
    return names["in_a_cell"]


def divisors(x: Any) -> list[dict[str, int]]:
    return [{"n": n} for n in (1, 2) if x.shape[-1] % n == 0]


def methods_divisors(self: Model, x: Any) -> list[dict[str, int]]:
    return divisors(x)


def configs_of(row: Row) -> Any:
    """Returns the configs as a user gives them. The default is among them only in the grid."""
    match row["space"]:
        case "grid":
            return {"n": [1, 2] if row["source"] == "failure" else [1, 4]}
        case "callable":
            return methods_divisors if row["kind"] == "method" else divisors
        case "objects":
            return [{"n": Parts((how,))} for how in How]
        case "compiler_options":
            return [{"n": 1, "compiler_options": {"xla_cpu_enable_fast_math": False}}, {"n": 2}]
        case "over300":
            return {"n": [1, 2, 8, 16], "m": range(80)}
    return [{"n": 1}, {"n": 2}]


def listed(row: Row) -> list[dict[str, Any]]:
    """Returns the first configs as a list, for a search and for compiling."""
    configs: Any = configs_of(row)
    if isinstance(configs, dict):
        return [dict(zip(configs, values, strict=True)) for values in itertools.product(*configs.values())][:3]
    return divisors(np.zeros(16)) if callable(configs) else configs


class InOrder:
    """A user's search, which tries configs in their order."""

    def __init__(self, configs: list[dict[str, Any]]) -> None:
        self._left = configs

    def ask(self, n: int) -> list[Any]:
        asked, self._left = self._left[:n], self._left[n:]
        return asked

    def tell(self, config: Any, trial: Any) -> None: ...


def one_bucket(*_: Any, **__: Any) -> str:
    return "all"


def by_length(*args: Any, **_: Any) -> int:
    return int(args[-1].shape[-1])


def keeps_all_but_eight(config: Mapping[str, Any], *_: Any, **__: Any) -> bool:
    return bool(config["n"] != 8)


def reference(x: Any) -> Any:
    return jnp.sin(x) * 2 + x


def numpy_reference(x: Any) -> Any:
    return np.sin(x) * 2 + x


def methods_reference(self: Model, x: Any) -> Any:
    return reference(x) * self.factor


def is_close(output: Any, _: Any, *args: Any) -> bool:
    factor = args[0].factor if len(args) > 1 else 1.0
    return bool(np.allclose(output, factor * numpy_reference(np.asarray(args[-1])), rtol=1e-4))


def time_of(trial: quarantune.Trial) -> float:
    return float(trial.time_ms or 0)


def options_of(row: Row) -> dict[str, Any]:
    """Returns the options of `autotune`."""
    ref_fn = methods_reference if row["kind"] == "method" else numpy_reference if is_of_numpy(row) else reference
    chosen: dict[str, dict[str, Any]] = {
        "check": {"ref_fn": {"ref_fn": ref_fn}, "check_fn": {"check_fn": is_close}, "nothing": {"ref_fn": None}},
        # A rule needs calls with different keys.
        "key_fn": {"yes": {"key_fn": by_length if row["source"] == "rule" else one_bucket}},
        "prune_fn": {"yes": {"prune_fn": keeps_all_but_eight}},
        "gradient": {"check_grad": {"check_grad": True}, "time_grad": {"time_grad": True}},
        "objective": {"function": {"objective": time_of}},
        "max_device_memory": {"yes": {"max_device_memory": "1GB"}},
        "numerics": {
            "bitwise": {"numerics": "bitwise"},
            "batch_invariant": {"numerics": "batch_invariant", "check_batch": 0},
        },
        "search": {
            "random": {"search": "random"},
            "surrogate": {"search": "surrogate"},
            "object": {"search": InOrder(listed(row))},
        },
        "space": {"over300": {"max_trials": 3}},
        "source": {"table": {"tables": f"{PACKAGE}:tables"}},
    }
    options: dict[str, Any] = {"name": NAME, "rep": 1, "warmup": 0}
    for feature, by_value in chosen.items():
        options |= by_value.get(row[feature], {})
    return options


@dataclasses.dataclass(frozen=True)
class Made:
    """The objects of a row.

    Attributes:
        tuned: the tuned function, an `AutoTuner`, or a contextual function.
        kernel: the tuned kernel; the same unless `tuned` is a contextual function.
        untuned: the function, which runs with its defaults.
        configs: its configs.
        owner: the arguments before the array: the object of a method.
    """

    tuned: Any
    kernel: Any
    untuned: Any
    configs: Any
    owner: tuple[Any, ...]

    def args(self, x: Any) -> tuple[Any, ...]:
        return (*self.owner, x)


_OF_KERNELS = ("objective", "max_device_memory", "prune_fn", "check_batch", "numerics", "name")


def make(row: Row) -> Made:
    """Returns new objects for a row, which remember nothing."""
    global TUNED
    fn, configs, options = function_of(row), configs_of(row), options_of(row)
    is_method = row["kind"] == "method"
    untuned = fn
    if not is_plain(row):
        of_jit: dict[str, Any] = {"static_argnames": ["m", "n", *(["self"] if is_method else [])]}
        untuned = jax.jit(fn, **of_jit)
        fn = jax.jit(fn, **of_jit, **({"donate_argnames": ["x"]} if row["donation"] == "yes" else {}))
    if row["ask"] == "run" or (is_plain(row) and row["ask"] in ("tune_many", "recorded", "verify")):
        kernel: Any = quarantune.AutoTuner(fn, configs, **options)
    else:
        own_name = {"name": "kernel"} if row["ask"] == "contextual" else {}
        kernel = quarantune.autotune(configs, **(options | own_name))(fn)
        if is_method:
            Model.apply = kernel
    TUNED = kernel
    if row["ask"] == "contextual":
        outer: Any = (lambda self, x: kernel(self, x)) if is_method else (lambda x: kernel(x))
        if row["kind"] != "plain":
            outer = jax.jit(outer, static_argnames=["self"] if is_method else [])
        ours = {name: value for name, value in options.items() if name not in _OF_KERNELS}
        if row["search"] == "object":
            ours["search"] = InOrder(listed(row))
        TUNED = quarantune.contextual_autotune(outer, **ours, name=NAME)
    return Made(TUNED, kernel, untuned, configs, (Model(1.5),) if is_method else ())
