"""A call that fails with every config raises the error of the untuned call, and the failure is forgotten."""

from __future__ import annotations

import functools
import re
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aftermath import nothing_is_left, quiet_place  # noqa: F401
from helpers import everywhere, isolated

import quarantune

pytestmark = pytest.mark.usefixtures("two_slots")

X = np.arange(4, dtype=np.float32)


def moved(configs: Any = ({"n": 1}, {"n": 2}), **options: Any) -> quarantune.Autotuned:
    @quarantune.autotune(configs, **{"rep": 1, "name": "moved", **options})
    @functools.partial(jax.jit, static_argnames=["by", "n"])
    def move(x: Any, by: Any = (0, 0), n: int = 1) -> Any:
        return x + jnp.ones(4, x.dtype) * (by[0] + by[1])

    return move


@pytest.mark.usefixtures("quiet_place")
@everywhere
def test_a_list_as_a_static_argument_fails_and_a_tuple_tunes(isolation: str, cache_dir: Path) -> None:
    fn = moved()
    with isolated(isolation), pytest.raises(ValueError, match="on-hashable static"):
        fn(X, [0, 1])  # starts the template and threads that stay
    for spoilt in (moved([{"n": 1}, {"n": 2}, {"n": 3}]), fn):
        with nothing_is_left(), isolated(isolation), pytest.raises(ValueError, match=r"on-hashable static") as caught:
            spoilt(X, [0, 1])
        assert traceback.extract_tb(caught.value.__traceback__)[0].line == "spoilt(X, [0, 1])"
        assert str(caught.value).count("on-hashable static") == 1
    assert fn.lookup(X, (0, 1)) is None
    result = moved([{"n": 1}, {"n": 2}, {"n": 3}, {"n": 4}]).tune(X, (0, 1))
    assert set(result.counts) <= {"ok", "slow"}, "the earlier failures are forgotten"
    np.testing.assert_array_equal(fn(X, (0, 1)), X + 1)
    np.testing.assert_array_equal(moved()(X, (0, 1)), X + 1)


def test_wrong_shapes_raise_the_error_of_the_untuned_call() -> None:
    fn, x = moved(), np.ones(3, np.float32)
    for call in (fn, fn.tune, fn.lower, jax.jit(fn), jax.grad(lambda x: fn(x).sum())):
        with pytest.raises(TypeError, match=r"incompatible shapes for broadcasting: .3.*4") as caught:
            call(x)
        assert any("moved: every config fails in this way, and so do the defaults" in note for note in _notes(caught))
    np.testing.assert_array_equal(fn(X), X)


def test_a_tuner_raises_the_error_of_a_wrong_call() -> None:
    tuner = quarantune.AutoTuner(moved().__wrapped__, {"n": [1, 2]}, rep=1)
    for _ in range(2):
        with pytest.raises(TypeError, match="incompatible shapes"):
            tuner.run(np.ones(3, np.float32))
    assert set(tuner.run(X).counts) <= {"ok", "slow"}


def test_failures_in_workers_alone_are_not_the_calls_error(tmp_path: Path) -> None:
    here = [True]

    @quarantune.autotune({"n": [1, 2]}, rep=1)
    @functools.partial(jax.jit, static_argnames=["n"])
    def choosy(x: Any, n: int = 1) -> Any:
        if not here:
            raise ArithmeticError("not in a worker")
        return x

    class Gone(list):  # type: ignore[type-arg]
        """Arrives empty in another process."""

        def __reduce__(self) -> Any:
            return Gone, ()

    here = Gone(here)
    with pytest.raises(quarantune.TuningFailedError, match=r"All 2 configs failed.*\n.*not in a worker"):
        choosy(X)


def _notes(caught: pytest.ExceptionInfo[Any]) -> list[str]:
    return getattr(caught.value, "__notes__", [])


# --- results whose work is still to be done ---


async def awaits(x: Any, do: int = 1) -> Any:
    return x


async def yields_later(x: Any, do: int = 1) -> Any:
    yield x


def yields(x: Any, do: int = 1) -> Any:
    yield x


class Awaits:
    async def __call__(self, x: Any, do: int = 1) -> Any:
        return x


@pytest.mark.parametrize(
    "fn",
    [awaits, yields_later, yields, Awaits(), Awaits().__call__, functools.partial(awaits)],
    ids=["coroutine", "asynchronous generator", "generator", "object", "method", "partial"],
)
def test_a_function_whose_calls_do_no_work_is_refused_at_once(fn: Any) -> None:
    with pytest.raises(TypeError, match=r"timings would miss the work: tune a function that (returns|awaits) "):
        quarantune.AutoTuner(fn, [{"do": 1}, {"do": 2}])


LAZY: dict[str, tuple[Callable[[Any], Any], str]] = {
    "coroutine": (lambda x: {"a": (x, awaits(x))}, r"coroutine.* await it"),
    "generator": (lambda x: [x, yields(x)], r"generator.* exhaust it"),
    "asynchronous generator": (yields_later, r"async_generator.* await it"),
    "map": (lambda x: map(abs, x), r"map.* exhaust it"),
    "zip": (lambda x: (zip(x, x, strict=True),), r"zip.* exhaust it"),
    "future": (lambda x: ThreadPoolExecutor(1).submit(len, x), r"Future.* wait for it"),
}


@pytest.mark.parametrize("isolation", ["process", "none"])
@pytest.mark.parametrize("kind", LAZY)
@pytest.mark.filterwarnings("ignore:Python iterable type", "ignore:QUARANTUNE_ISOLATION")
def test_a_result_that_defers_its_work_never_wins(kind: str, isolation: str) -> None:
    make, told = LAZY[kind]

    def work(x: Any, do: str = "work") -> Any:
        return make(x) if do == "later" else x * 2

    with quarantune.settings(isolation=isolation):
        tuner = quarantune.AutoTuner(work, {"do": ["later", "work"]}, ref_fn=None, warmup=0, rep=2)
        later, done = tuner.run(np.ones(3)).trials
    assert (later.outcome, done.outcome) == (quarantune.Outcome.ERROR, quarantune.Outcome.OK)
    assert re.search(told, later.message)
