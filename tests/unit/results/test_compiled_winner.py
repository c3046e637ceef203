"""A compiled winner runs its executable if it fits the call, and otherwise the jitted function."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import python

import quarantune
from quarantune.api import compile_check
from quarantune.results.compiled_winner import Winner

pytestmark = pytest.mark.usefixtures("two_slots")


def jitted(fn: Callable[..., Any]) -> Any:
    """Returns `fn` jitted, with the tunable `n` and the static `p`."""
    return functools.partial(jax.jit, static_argnames=["n", "p"])(fn)


@jitted
def scaled(x: Any, by: Any, p: Any = None, n: int = 1) -> Any:
    return x * by


@jitted
def times(x: Any, p: Any = None, n: int = 1) -> Any:
    return x if p is None else x * (100 if p is True else p)


@jitted
def cast(x: Any, p: Any = None, n: int = 1) -> Any:
    return x if p is None else x.astype(p)


@jitted
def by_first(x: Any, p: Any = None, n: int = 1) -> Any:
    return x * p[0]


@functools.cache
def compiled_for(fn: Any, example: str) -> Any:
    """Returns the winner for the arguments in `EXAMPLES`."""
    return compiled(fn, *EXAMPLES[example])


def compiled(fn: Any, *args: Any, **kwargs: Any) -> Any:
    (winner,) = quarantune.compile_configs(fn, [{"n": 1}], *args, **kwargs)
    return winner


BF16 = jnp.ones(3, jnp.bfloat16)
INTS = np.arange(3, dtype=np.int32)
X = np.arange(4, dtype=np.float32)
EXAMPLES = {
    "array": (BF16, jnp.float32(2)),
    "number": (BF16, 2.0),
    "static 1": (INTS, 1),
    "static True": (INTS, True),
    "static dtype": (INTS, np.float32),
    "static tuple": (INTS, (1,)),
}


@pytest.mark.parametrize(
    ("fn", "made_for", "called_with"),
    [
        (scaled, "array", (BF16, 2.0)),
        (scaled, "number", (BF16, np.float32(2))),
        (scaled, "number", (BF16, 3.0)),
        (times, "static 1", (INTS, 1.0)),
        (times, "static True", (INTS, 1)),
        (times, "static 1", (INTS, True)),
        (cast, "static dtype", (INTS, None)),
        (cast, "static dtype", (INTS, np.float32)),
        (cast, "static dtype", (INTS, np.int16)),
        (by_first, "static tuple", (INTS, (1.0,))),
    ],
)
def test_any_call_returns_the_jitted_functions_result(fn: Any, made_for: str, called_with: Any) -> None:
    ours, theirs = compiled_for(fn, made_for)(*called_with), fn(*called_with, n=1)
    assert (ours.dtype, ours.weak_type) == (theirs.dtype, theirs.weak_type)
    np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(theirs, np.float32))


def test_the_call_that_it_was_made_for_is_not_traced() -> None:
    traced = []

    @jitted
    def noting(x: Any, p: Any = None, n: int = 1) -> Any:
        traced.append(p)
        return x * n

    winner = compiled(noting, INTS, p=np.float32)
    traced.clear()
    np.testing.assert_array_equal(winner(INTS, p=np.float32), INTS)
    assert not traced
    winner(INTS, p=np.int16)
    assert traced == [np.int16]


@jitted
def by_names(x: Any, p: Any = None, n: int = 1) -> Any:
    return x["a"] - x["b"] if "a" in x else {"product": x["c"] * x["d"]}


def test_a_first_call_with_other_containers_gets_its_result() -> None:
    winner = compiled(by_names, {"a": X, "b": X})
    for _ in range(2):
        np.testing.assert_array_equal(winner({"c": X, "d": X})["product"], X * X)
        np.testing.assert_array_equal(winner({"a": X, "b": X}), 0 * X)


@jax.tree_util.register_pytree_node_class
class One:
    """A class of outputs; programs do not contain its tree."""

    def __init__(self, only: Any) -> None:
        self.only = only

    def tree_flatten(self) -> Any:
        return (self.only,), None

    @classmethod
    def tree_unflatten(cls, _: None, parts: Any) -> Any:
        return cls(*parts)


class Other(One):
    """Another class of outputs."""


jax.tree_util.register_pytree_node_class(Other)


@jitted
def by_length(x: Any, p: Any = None, n: int = 1) -> Any:
    return One(x) if len(x) == 3 else Other(x)


def test_a_call_with_other_shapes_decides_no_output_class() -> None:
    winner = compiled(by_length, INTS)
    assert [type(winner(it)) for it in (jnp.arange(4), INTS, INTS)] == [Other, One, One]


@pytest.mark.slow
def test_a_program_that_cannot_be_loaded_runs_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    read = compile_check.from_data
    for damage in (lambda program: program[:100], lambda _: b"", lambda program: b"\0" + program[1:]):
        monkeypatch.setattr(
            compile_check,
            "from_data",
            lambda blob, damage=damage: dataclasses.replace(whole := read(blob), program=damage(whole.program)),
        )
        winner = compiled(sensitive, SQUARE)
        assert isinstance(winner, Winner)
        for _ in range(2):
            TRACED.clear()
            jax.clear_caches()
            assert seen_of(winner, SQUARE) == seen_of(functools.partial(sensitive, n=1), SQUARE)
            assert TRACED, "the damaged program ran"


# --- settings of JAX, and places of arguments ------------------------------------------------------------------

TRACED: list[Any] = []


@jitted
def sensitive(x: Any, p: Any = None, n: int = 1) -> Any:
    """Depends on x64, on PRNG keys and on the rules of dtype promotion."""
    TRACED.append(x)
    return x @ x, jnp.arange(3), jax.random.normal(jax.random.PRNGKey(0), (2,)), x * jnp.arange(2), 0 * x / x


SETTINGS: dict[str, Callable[[], Any]] = {
    "x64": lambda: jax.enable_x64(True),
    "matmul precision": lambda: jax.default_matmul_precision("float32"),
    "PRNG": lambda: jax.default_prng_impl("rbg"),
    "partitionable": lambda: jax.threefry_partitionable(False),
    "promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "no jit": jax.disable_jit,
    "debug NaNs": lambda: jax.debug_nans(True),
    "debug infs": lambda: jax.debug_infs(True),
    "user's own": lambda: OWN_CONTEXT("mine"),
}
OWN_CONTEXT = jax.make_user_context(None)
SQUARE = np.ones((2, 2), np.float32)


def seen_of(fn: Callable[..., Any], *args: Any) -> Any:
    """Returns the results of a call with their types, or its exception."""
    try:
        leaves = jax.tree.leaves(fn(*args))
    except (TypeError, ValueError, FloatingPointError) as error:
        return type(error)
    return [(str(jax.typeof(leaf)), jax.typeof(leaf).weak_type, np.asarray(leaf).tolist()) for leaf in leaves]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A winner that was tuned under JAX's defaults, saved and loaded."""
    directory = tmp_path_factory.mktemp("saved")
    with quarantune.settings(cache_dir=directory / "cache", disable_cache=True):
        tuned = quarantune.autotune({"n": [1]}, rep=1, ref_fn=None)(sensitive)
        tuned.tune(SQUARE).save(directory)
    return quarantune.TuningResult.load(directory, trusted=True).fn


@pytest.mark.parametrize("name", SETTINGS)
def test_under_other_settings_a_winner_runs_its_function(loaded: Any, name: str) -> None:
    usual = seen_of(loaded, SQUARE)
    jax.clear_caches()
    with SETTINGS[name]():
        TRACED.clear()
        ours = seen_of(loaded, SQUARE)
        assert TRACED, "the saved program ran"
        assert ours == seen_of(functools.partial(sensitive, n=1), SQUARE)
    TRACED.clear()
    assert seen_of(loaded, SQUARE) == usual
    assert not TRACED


def test_a_winner_runs_under_the_settings_it_was_compiled_for() -> None:
    with jax.enable_x64(True):
        winner = compiled(sensitive, SQUARE)
        TRACED.clear()
        assert winner(SQUARE)[1].dtype == np.int64
        assert not TRACED
    assert winner(SQUARE)[1].dtype == np.int32


@pytest.mark.slow
@pytest.mark.parametrize("made_for", [("free", "split"), ("first", "explicit")])
@pytest.mark.long
def test_a_winner_returns_arrays_where_its_function_returns_them(
    made_for: tuple[str, str], tmp_path: Path, run_on_devices: Callable[[Path, str, int], None]
) -> None:
    program = """
        import contextlib, functools
        import jax, jax.numpy as jnp, numpy as np, quarantune
        from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

        traced = []

        @jax.jit(static_argnames=["n"])
        def added(x, y, n=1):
            traced.append(n)
            return x + n, jnp.arange(2)

        def mesh(kind, *devices):
            return jax.make_mesh((len(devices),), ("a",), axis_types=(kind,), devices=devices)

        first, second = jax.devices()
        auto, explicit = mesh(AxisType.Auto, first, second), mesh(AxisType.Explicit, first, second)
        lone = mesh(AxisType.Explicit, first)
        ones = np.ones(4, np.float32)

        def on(place):
            return lambda: (jax.device_put(ones, place), ones)

        calls = {
            "numpy": lambda: (ones, ones),
            "free": lambda: (jnp.ones(4), ones),
            "first": on(first),
            "second": on(second),
            "unused on second": lambda: (ones, jax.device_put(ones, second)),
            "split": on(NamedSharding(auto, P("a"))),
            "copied": on(NamedSharding(auto, P())),
            "explicit": on(NamedSharding(explicit, P("a"))),
            "lone": on(NamedSharding(lone, P("a"))),
        }
        states = {
            "usual": contextlib.nullcontext,
            "second": lambda: jax.default_device(second),
            "auto": lambda: jax.set_mesh(auto),
            "lone": lambda: jax.set_mesh(lone),
        }

        def seen(fn, args):
            try:
                return [(str(jax.typeof(out)), out.committed, out.sharding, out.tolist()) for out in fn(*args)]
            except ValueError as error:  # arguments on other devices than the mesh's
                return str(error)[:40]

        for made_for in MADE_FOR:
            tuned = quarantune.autotune({"n": [1]}, rep=1, ref_fn=None, name=made_for)(added)
            tuned.tune(*calls[made_for]()).save(PLACE + made_for)
            winner = quarantune.TuningResult.load(PLACE + made_for, trusted=True).fn
            traced.clear()
            winner(*calls[made_for]())
            assert not traced, made_for
            for call, make in calls.items():
                for state, enter in states.items():
                    with enter():
                        args = make()
                        jax.clear_caches()
                        ours, theirs = seen(winner, args), seen(functools.partial(added, n=1), args)
                    assert ours == theirs, (made_for, call, state, ours, theirs)
    """
    program = program.replace("PLACE", repr(f"{tmp_path}/")).replace("MADE_FOR", repr(made_for))
    run_on_devices(tmp_path, program, 2)


# --- arguments of classes, and files ---------------------------------------------------------------------------


@jax.tree_util.register_pytree_node_class
class Pair:
    """Validates its contents."""

    def __init__(self, first: Any, second: Any) -> None:
        assert first.shape == second.shape
        self.both = (first, second)

    def tree_flatten(self) -> tuple[Any, None]:
        return self.both, None

    @classmethod
    def tree_unflatten(cls, _: None, both: Any) -> Pair:
        return cls(*both)


def test_a_class_that_validates_its_arrays_may_be_an_argument(tmp_path: Path) -> None:
    @jitted
    def summed(pair: Any, p: Any = None, n: int = 1) -> Any:
        return pair.both[0] + pair.both[1]

    tuned = quarantune.autotune({"n": [2]}, rep=1, ref_fn=None)(summed)
    pair = Pair(jnp.ones(3), jnp.ones(3))
    np.testing.assert_array_equal(tuned(pair), 2)
    tuned.tune(pair).save(tmp_path)
    np.testing.assert_array_equal(quarantune.TuningResult.load(tmp_path, trusted=True).fn(pair), 2)


def test_a_result_without_its_function_replaces_no_complete_one(tmp_path: Path) -> None:
    quarantune.autotune({"n": [2]}, rep=1, ref_fn=None)(times).tune(INTS, 2).save(tmp_path)
    with pytest.raises(quarantune.SavedResultError, match="trusted=True"):
        quarantune.TuningResult.load(tmp_path).save(tmp_path)
    np.testing.assert_array_equal(quarantune.TuningResult.load(tmp_path, trusted=True).fn(INTS, 2), 2 * INTS)


@pytest.mark.long
@pytest.mark.slow
def test_a_program_with_lapack_is_loaded_in_a_fresh_process(tmp_path: Path) -> None:
    (tmp_path / "lapack.py").write_text(
        """
import functools, sys
import jax, jax.numpy as jnp, quarantune

@functools.partial(jax.jit, static_argnames=["n"])
def factor(x, n=1):
    return n * jnp.linalg.cholesky(x)

if __name__ == "__main__":
    one, two = quarantune.compile_configs(factor, [{"n": 1}, {"n": 2}], 4 * jnp.eye(3))
    print(one(4 * jnp.eye(3))[0, 0], two(4 * jnp.eye(3))[0, 0])
""",
        encoding="utf-8",
    )
    assert python(tmp_path / "lapack.py").split() == ["2.0", "4.0"]
