"""The default check accepts programs that differ by rounding, and finds bugs."""

from __future__ import annotations

import contextlib
import functools
import os
import types
from typing import Any

import check_corpus
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import ends

import quarantune
from quarantune.measure import compare, rounding
from quarantune.measure.rounding import Motion
from quarantune.sandbox import spool
from quarantune.transport import payload
from quarantune.values.trial import ArrayKind
from quarantune.worker.arguments import BenchOptions
from quarantune.worker.bench import Bench
from quarantune.worker.compiling import compile_here

ONCE: dict[str, Any] = {"warmup": 0, "rep": 1}


def swept(fn: Any, values: list[Any], *args: Any, **options: Any) -> quarantune.TuningResult:
    return quarantune.AutoTuner(fn, {"do": values}, **ONCE, **options).run(*args)


# --- the corpus -----------------------------------------------------------------------------------------------------

FAMILIES = {family.name: family for family in check_corpus.families()}


def misjudged(name: str, seed: int = 0) -> list[check_corpus.Judged]:
    found = list(check_corpus.judged(FAMILIES[name], seed))
    assert {row.is_bug for row in found} == {False, True}
    return [row for row in found if row.is_bug != bool(row.reason)]


SLOW = ("softmax float32",)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in SLOW else pytest.mark.corpus) for name in FAMILIES],
)
def test_honest_programs_pass_and_bugs_are_found(name: str) -> None:
    assert misjudged(name) == []


def test_the_corpus_is_large_enough() -> None:
    assert sum(len(family.honest) for family in FAMILIES.values()) >= 200
    assert sum(len(family.bugs) for family in FAMILIES.values()) >= 40


# --- cases that fixed tolerances got wrong --------------------------------------------------------------------------

CASES: dict[str, tuple[Any, Any]] = {}


def case(*args: Any) -> Any:
    def take(fn: Any) -> Any:
        CASES[fn.__name__] = (fn, lambda seed=0: [make(seed) for make in args])
        return fn

    return take


def normal(*shape: int, dtype: str = "float32") -> Any:
    return lambda seed=0: jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape), dtype)


@case(normal(1000, 64))
def a_grid_that_forgets_the_last_rows(x: Any, do: str = "right") -> Any:
    found = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    return found if do == "right" else found.at[-8:].set(jnp.nan)


@case(normal(8, 32), normal(16384, 32), normal(16384, 32))
def attention_that_drops_its_last_keys(q: Any, k: Any, v: Any, do: str = "right") -> Any:
    if do != "right":
        k, v = k[:-1024], v[:-1024]
    return jax.nn.softmax(q @ k.T / 32**0.5) @ v


@case(normal(16, 1000))
def zeros_where_outputs_are_small(x: Any, do: str = "right") -> Any:
    found = jax.nn.softmax(x)
    return found if do == "right" else jnp.zeros_like(found)


@case(normal(64, 64), normal(64, 64))
def zeros_for_the_gradient_of_a_mean(x: Any, w: Any, do: str = "right") -> Any:
    found = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w)))(w)
    return found if do == "right" else jnp.zeros_like(found)


@case(lambda seed=0: jnp.arange(100) * 151 + seed)
def tokens_that_are_nearly_right(x: Any, do: str = "right") -> Any:
    return x if do == "right" else x.at[-1].add(-99)


@case(normal(10_000, 8, dtype="bfloat16"))
def one_row_of_zeros_in_ten_thousand(x: Any, do: str = "right") -> Any:
    found = x * 2
    return found if do == "right" else found.at[5000].set(0)


@case(normal(64, 64))
def a_mask_of_huge_numbers_beside_a_wrong_element(x: Any, do: str = "right") -> Any:
    found = jnp.where(jnp.arange(64) < jnp.arange(64)[:, None], x + 1, -1e30)
    return found if do == "right" else found.at[40, 3].mul(1.01)


@pytest.mark.parametrize("name", CASES)
def test_bugs_smaller_than_fixed_tolerances_are_found(name: str) -> None:
    fn, make = CASES[name]
    result = swept(jax.jit(fn, static_argnames=["do"]), ["wrong", "right"], *make())
    assert ends(result.trials) == ["wrong", "ok"]
    assert result.best_config == {"do": "right"}


def judged_as(
    fn: Any, args: list[Any], *values: str, on_device: bool, programs: int | None = None, told: Any = lambda: None
) -> list[bool]:
    """Returns which configs a worker judges right.

    Args:
        fn: the function.
        args: its arguments.
        *values: its configs.
        on_device: whether outputs are compared on the device, which a CPU does not do by default.
        programs: a file with the programs that compare on the device.
        told: called before and after the worker receives the expected outputs.
    """
    packed = payload.pack_call(jax.jit(fn, static_argnames=["do"]), tuple(args), {}, {})
    options = BenchOptions(platform="cpu", warmup=0, rep=1, supply="auto", tolerance=None)
    found: list[bool] = []
    with contextlib.ExitStack() as files:
        arrays, standard, other = (spool.create(label, size_bytes=packed.call.spool_bytes) for label in ("a", "b", "c"))
        for fd in (arrays, standard, other):
            files.callback(os.close, fd)
        payload.write_arrays(packed, arrays)
        bench = Bench(packed.call, arrays_fd=arrays, options=options)
        if on_device:
            bench.judge._shortcut = compare.Comparer()
        defaults = compile_here(bench, {})
        outputs = [ArrayKind(info.shape, info.dtype.name) for info in jax.tree.leaves(defaults.call.out_info)]
        told()
        bench.judge.expect(outputs, programs)
        told()
        assert bench.check(defaults, output_fd=standard).wrong is None
        for value in values:
            program = compile_here(bench, {"do": value})
            found.append(bench.check(program, references=[standard], standard=0).wrong is None)
    return found


def test_a_config_whose_reference_cannot_be_read_is_wrong() -> None:
    packed = payload.pack_call(jax.jit(lambda x: x + 1), (np.ones(8, np.float32),), {}, {})
    options = BenchOptions(platform="cpu", warmup=0, rep=1, supply="auto", tolerance=None)
    arrays, torn = (spool.create(label, size_bytes=packed.call.spool_bytes) for label in ("arrays", "torn"))
    try:
        payload.write_arrays(packed, arrays)
        bench = Bench(packed.call, arrays_fd=arrays, options=options)
        judgement = bench.check(compile_here(bench, {}), references=[torn], standard=0)
        assert judgement.wrong is not None
        assert "the output to compare with cannot be read" in judgement.wrong
    finally:
        for fd in (arrays, torn):
            os.close(fd)


def test_later_sweeps_compare_with_earlier_sweeps_programs(compiles: list[str]) -> None:
    def halved(x: Any, do: str = "right") -> Any:
        return x / 2 if do == "right" else x / 2.2

    x, counts = np.sin(np.arange(96.0, dtype=np.float32)).reshape(2, 48), list[int]()
    programs = spool.create("comparisons")
    try:
        for content in ("none", "its own", "torn"):
            if content == "torn":
                os.ftruncate(programs, 100)
            found = judged_as(
                halved,
                [x],
                "right",
                "wrong",
                on_device=True,
                programs=programs,
                told=lambda: counts.append(len(compiles)),
            )
            assert found == [True, False], content
    finally:
        os.close(programs)
    first, later, _ = (after - before for before, after in zip(counts[::2], counts[1::2], strict=True))
    assert first > 0
    assert later == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "on_device", [pytest.param(False, marks=pytest.mark.long, id="host"), pytest.param(True, id="device")]
)
@pytest.mark.parametrize("name", CASES)
def test_small_bugs_are_found_whatever_the_inputs(name: str, on_device: bool) -> None:
    fn, make = CASES[name]
    found = [judged_as(fn, make(seed), "wrong", "right", on_device=on_device) for seed in range(8)]
    assert found == [[False, True]] * 8


def test_the_next_config_of_a_used_worker_is_judged_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUARANTUNE_CONFIGS_PER_WORKER", "8")
    fn, make = CASES["zeros_where_outputs_are_small"]
    result = swept(jax.jit(fn, static_argnames=["do"]), ["right", "wrong"], *make())
    assert ends(result.trials) == ["ok", "wrong"]


@pytest.mark.long
@pytest.mark.slow
def test_rounding_passes_if_the_function_is_that_sensitive() -> None:
    family = FAMILIES["attention of large logits bfloat16"]

    @functools.partial(jax.jit, static_argnames=["do"])
    def kernel(q: Any, k: Any, v: Any, do: Any = (0, "")) -> Any:
        return family.fn(q, k, v, block=do[0], narrow=do[1])

    args = family.args(np.random.default_rng(0))
    result = swept(kernel, [(256, "logits"), (256, "both"), (512, "")], *args)
    assert ends(result.trials) == ["ok"] * 3
    fixed = swept(kernel, [(256, "logits"), (256, "both"), (512, "")], *args, rtol=1e-2)
    assert "wrong" in ends(fixed.trials)


def test_a_wider_reference_uses_the_noise_of_the_defaults() -> None:
    @functools.partial(jax.jit, static_argnames=["do"])
    def kernel(a: Any, b: Any, do: str = "right") -> Any:
        found = (a @ b).astype(a.dtype)
        return found * jnp.bfloat16(1.02) if do == "scaled" else found

    a, b = normal(64, 256, dtype="bfloat16")(), normal(256, 64, dtype="bfloat16")()
    result = swept(
        kernel, ["right", "scaled"], a, b, ref_fn=lambda a, b: np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    )
    assert ends(result.trials) == ["ok", "wrong"]


def test_the_reason_says_where_and_by_how_much_and_what_to_do() -> None:
    fn, make = CASES["one_row_of_zeros_in_ten_thousand"]
    result = swept(jax.jit(fn, static_argnames=["do"]), ["right", "wrong"], *make())
    told = result.trials[1].message
    assert "7 of 80000 elements (0.00875%) differ by more than rounding explains; the worst is at [5000, " in told
    assert ": got 0.0, expected " in told
    assert " within 0.2" in told
    assert "rounding of the inputs moves the output by 0.0" in told
    assert told.endswith("give rtol and atol to allow more")
    assert result.noise is not None
    assert 0.001 < result.noise < 0.005


def test_the_reason_also_says_what_all_elements_have_in_common() -> None:
    @functools.partial(jax.jit, static_argnames=["do"])
    def kernel(x: Any, do: float = 1.0) -> Any:
        return x * do

    told = swept(kernel, [1.0, 1.5], normal(64, 64)()).trials[1].message
    assert (
        "of 4096 elements (100%) differ by more than rounding explains, and all elements together are 1.5 times" in told
    )
    assert "; the worst is at [" in told


# --- structure ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("forgotten", [None, (), {}, []], ids=repr)
def test_an_output_without_the_defaults_arrays_is_wrong(forgotten: Any) -> None:
    @functools.partial(jax.jit, static_argnames=["do"])
    def kernel(x: Any, do: int = 1) -> Any:
        return forgotten if do == 2 else x * 2

    result = swept(kernel, [2, 1], np.ones(8, np.float32))
    assert ends(result.trials) == ["wrong", "ok"]
    assert result.best_config == {"do": 1}


@pytest.mark.parametrize("kind", ["list", "float", "string", "none", "lock"])
def test_plain_callables_must_return_arrays_if_defaults_do(kind: str) -> None:
    def plain(x: Any, do: str = "right") -> Any:
        import threading

        other = {"list": x.tolist(), "float": float(x[0]), "string": "x", "none": None, "lock": threading.Lock()}
        return other[do] if do in other else {"output": x * 2}["output"]

    result = swept(plain, [kind, "right"], np.ones(3, np.float32))
    assert ends(result.trials) == ["wrong", "ok"]


def test_callables_that_return_nothing_agree() -> None:
    def writes(x: Any, do: int = 1) -> None:
        x[:] = do

    assert ends(swept(writes, [1, 2], np.ones(3)).trials) == ["ok", "ok"]


def test_static_parts_of_outputs_are_compared_by_value() -> None:
    @jax.tree_util.register_pytree_node_class
    class State:
        def __init__(self, x: Any, static: Any) -> None:
            self.x, self.static = x, static

        def tree_flatten(self) -> Any:
            return (self.x,), (self.static,)

        @classmethod
        def tree_unflatten(cls, static: Any, children: Any) -> Any:
            return cls(*children, *static)

    def update(rate: float) -> Any:
        return lambda x: x - rate

    @functools.partial(jax.jit, static_argnames=["do"])
    def step(x: Any, do: float = 0.1) -> Any:
        # Two functions differ only in identity; a third has another closure.
        return State(
            x * 2, types.SimpleNamespace(update=update(0.1)) if do == 0.3 else update(0.5 if do == 0.2 else 0.1)
        )

    result = swept(step, [0.1, 0.15, 0.2], np.ones(3, np.float32))
    assert ends(result.trials) == ["ok", "ok", "wrong"], result.table()


# --- the parts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float64"])
def test_inputs_are_moved_by_up_to_a_unit_and_zeros_stay(name: str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    values = np.random.default_rng(0).standard_normal(20_000).astype(dtype)
    values[:3] = 0
    motion = Motion.of(values, None)
    found = rounding.moved(np, values, np.uint32(5), motion.units(values))
    unit = 2.0 ** -int(jnp.finfo(dtype).nmant)
    before, after = values.astype(np.float64), found.astype(np.float64)
    assert found.dtype == dtype
    assert (found[:3] == values[:3]).all()
    normal = np.abs(before) > 0.02
    assert (np.abs(after - before) <= unit * np.abs(before))[normal].all()
    assert 0.2 < (after != before).mean() < 0.3
    assert abs(np.mean((after - before)[normal] / before[normal])) < unit / 30


def test_float32_moves_by_the_units_of_its_rounded_factors() -> None:
    x = jnp.ones((8, 8))
    plain, exact = (jax.make_jaxpr(lambda a, p=p: jnp.matmul(a, a, precision=p))(x) for p in (None, "highest"))
    assert rounding.coarsest_mantissa(plain.jaxpr, "cuda") == 10
    assert rounding.coarsest_mantissa(plain.jaxpr, "tpu") == 7
    assert rounding.coarsest_mantissa(plain.jaxpr, "cpu") == rounding.coarsest_mantissa(exact.jaxpr, "cuda") == 23
    narrowed = jax.make_jaxpr(lambda a: jax.jit(lambda a: a.astype(jnp.bfloat16) + 1)(a))(x)
    assert rounding.coarsest_mantissa(narrowed.jaxpr, "cpu") == 7
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    found = rounding.moved(np, values, np.uint32(1), Motion.of(values, 10).units(values))
    assert 2.0**-12.5 < np.max(np.abs(found / values - 1)) <= 2.0**-11


def test_non_finite_inputs_are_not_moved() -> None:
    values = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0], np.float32)
    found = rounding.moved(np, values, np.uint32(1), np.int32(0))
    np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize("is_gradient", [False, True])
def test_quiet_rows_of_a_gradient_have_the_rounding_of_the_others(is_gradient: bool) -> None:
    generator = np.random.default_rng(0)
    wanted = generator.standard_normal((64, 64)).astype(np.float32)
    wanted[5] *= 1e-2
    noise = rounding.RoundingNoise(wanted, coarsest=23, is_gradient=is_gradient)
    for _ in range(rounding.RUNS):  # the deviations do not show that terms cancel in a row
        noise.add(wanted * (1 + 1e-7 * generator.standard_normal(wanted.shape)).astype(np.float32))
    allowance = noise.allowance()

    def reason(row: int, **change: float) -> str | None:
        got = wanted.copy()
        got[row] = got[row] * change.get("times", 1) + change.get("plus", 0)
        return compare.compare_numbers(got, wanted, allowance, "output", is_exact=False)

    assert (reason(5, plus=1e-5) is None) == is_gradient
    for row in (5, 6):
        assert reason(row, times=2)
        assert reason(row, times=0)
        assert reason(row, plus=1e-3)
    assert reason(slice(None), times=1.02)  # type: ignore[arg-type]


def test_one_infinity_or_nan_is_wrong_whatever_the_noise() -> None:
    wanted = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    noise = rounding.RoundingNoise(wanted, coarsest=None)
    noise.add(wanted * 1.5)
    allowance = noise.allowance()
    for odd in (np.nan, np.inf, -np.inf):
        got = wanted.copy()
        got[77] = odd
        assert compare.compare_numbers(got, wanted, allowance, "output", is_exact=False) is not None
        assert compare.compare_numbers(wanted, got, allowance, "output", is_exact=False) is not None
        both = got.copy()
        assert compare.compare_numbers(both, got, allowance, "output", is_exact=False) is None


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("size", [1e15, 1e20, 1e26])
def test_large_numbers_have_the_noise_of_small_ones(size: float, on_device: bool) -> None:
    small = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    wanted, comparer = small * np.float32(size), compare.Comparer()
    run, place = (comparer.run, jnp.asarray) if on_device else (None, np.asarray)
    noise = rounding.RoundingNoise(place(wanted), coarsest=None, run=run)
    for seed in range(4):
        noise.add(place(rounding.moved(np, wanted, np.uint32(seed), np.int32(0))))
    allowance = noise.allowance()
    assert allowance.noise == pytest.approx(4.4e-8, rel=0.1)

    def differs(got: Any) -> bool:
        found = comparer(place(got), wanted, allowance) if on_device else None
        if found is not None:
            return found.disagree(got.size, allowance)
        return compare.compare_numbers(got, wanted, allowance, "output", is_exact=False) is not None

    assert not differs(rounding.moved(np, wanted, np.uint32(9), np.int32(0)))
    assert differs(wanted * np.float32(1.001))
    assert differs(np.where(np.arange(10_000) < 9_900, wanted, 0))


def test_numbers_beyond_the_range_of_float32_differ() -> None:
    wanted = 1e40 * np.random.default_rng(0).standard_normal(10_000)
    noise = rounding.RoundingNoise(wanted, coarsest=None)
    with np.errstate(all="raise"):  # the author's module may set this
        for seed in range(4):
            noise.add(rounding.moved(np, wanted, np.uint32(seed), np.int32(0)))
        allowance = noise.allowance()
        near = rounding.moved(np, wanted, np.uint32(9), np.int32(0))
        assert compare.compare_numbers(near, wanted, allowance, "output", is_exact=False) is None
        assert compare.compare_numbers(wanted * 1.001, wanted, allowance, "output", is_exact=False) is not None


def test_neighbouring_numbers_below_the_normal_range_agree() -> None:
    wanted = np.repeat(np.array([3 * 2.0**-24, 0.01], np.float16), 640)
    noise = rounding.RoundingNoise(wanted, coarsest=None)
    noise.add(wanted)
    for steps, agree in ((1, True), (10, False)):
        got = np.where(wanted < 0.001, wanted + np.float16(steps * 2.0**-24), wanted)
        assert (compare.compare_numbers(got, wanted, noise.allowance(), "output", is_exact=False) is None) == agree
