"""A tuned call computes the same as an untuned one: configs are compared with the defaults, or with each other."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import mmap
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aftermath import nothing_is_left, quiet_place  # noqa: F401
from helpers import ends, everywhere, isolated

import quarantune
from quarantune.measure import compare
from quarantune.measure.compare import Mismatches
from quarantune.measure.rounding import Allowance, RoundingNoise
from quarantune.sandbox import spool
from quarantune.scheduler.reference import Reference
from quarantune.values.options import Options, Tolerance
from quarantune.values.trial import ArrayKind

pytestmark = pytest.mark.usefixtures("two_slots")

X = np.linspace(-1, 1, 1000, dtype=np.float32)
_numbers = itertools.count()


def blocks(x: Any, rows: int) -> Any:
    """Returns the sine of x, block by block; rows after the last whole block are zero."""

    def fill(block: Any, out: Any) -> Any:
        part = jax.lax.dynamic_slice(x, (block * rows, 0), (rows, x.shape[1]))
        return jax.lax.dynamic_update_slice(out, jnp.sin(part), (block * rows, 0))

    return jax.lax.fori_loop(0, x.shape[0] // rows, fill, jnp.zeros_like(x))


def tuned(body: Callable[[Any, Any], Any], configs: list[Any], *, default: Any, **options: Any) -> Any:
    """Returns a function of x; the tunable is the second argument of `body`."""

    @quarantune.autotune(
        [{"do": config} for config in configs],
        **{"name": f"kernel-{next(_numbers)}", "warmup": 0, "rep": 3, **options},
    )
    @functools.partial(jax.jit, static_argnames=["do"])
    def kernel(x: Any, do: Any = default) -> Any:
        return body(x, do)

    return kernel


def offset(x: Any, do: Any) -> Any:
    """Adds the config's number; a negative one fails."""
    if do < 0:
        raise ArithmeticError("not for this call")
    return x + int(do)


# --- against the defaults -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("quiet_place")
def test_a_config_that_leaves_rows_out_never_wins() -> None:
    x = np.ones((256, 64), np.float32)
    with nothing_is_left():
        result = tuned(blocks, [32, 64, 192], default=32).tune(x)
    assert ends(result.trials) == ["ok", "ok", "wrong"]
    assert result.best_config in ({"do": 32}, {"do": 64})
    wrong = result.trials[2]
    assert "it does not agree with the defaults: 4096 of 16384 elements (25%) differ" in wrong.message
    assert wrong.log_tail == ""  # a traceback would show only quarantune's code
    assert result.default_time_ms == result.trials[0].time_ms
    assert result.speedup == pytest.approx(result.default_time_ms / result.time_ms)


@everywhere
def test_unlisted_defaults_are_run_and_timed_with_the_configs(isolation: str, tmp_path: Path) -> None:
    @functools.partial(jax.jit, static_argnames=["do"])
    def kernel(x: Any, do: float = 1.5) -> Any:
        return offset(x, do)

    tuner = quarantune.AutoTuner(kernel, {"do": [1, 2, 3]}, warmup=0, rep=2)
    with isolated(isolation):
        result = tuner.run(X)
    assert ends(result.trials) == ["ok", "wrong", "wrong"]
    assert result.trials[1].log_tail == ""
    assert result.default_time_ms is not None
    assert result.default_time_ms > 0
    assert result.speedup == result.default_time_ms / result.time_ms
    again = quarantune.AutoTuner(kernel, {"do": [1, 2, 3]}).run(X)
    assert again.from_cache
    result.save(tmp_path / "saved")
    loaded = quarantune.TuningResult.load(tmp_path / "saved")
    assert again.default_time_ms == loaded.default_time_ms == result.default_time_ms


def test_a_config_must_return_the_dtypes_of_the_defaults() -> None:
    result = tuned(lambda x, do: x.astype(jnp.float16) if do == 2 else x * do, [1, 2], default=1).tune(X)
    assert ends(result.trials) == ["ok", "wrong"]
    assert "output is float16[1000], expected float32[1000]" in result.trials[1].message


def test_no_reference_is_needed_if_configs_may_differ() -> None:
    result = tuned(offset, [1, 2], default=0, ref_fn=None).tune(X)
    assert ends(result.trials) == ["ok", "ok"]


def test_existing_results_keep_their_keys() -> None:
    assert Options().deciding() == {}
    assert Options(ref_fn="defaults").deciding() == {}
    assert Options(ref_fn=None).deciding() == {"ref_fn": None}
    with pytest.raises(ValueError, match=r"ref_fn='default' is not valid: give a function, 'defaults' or None"):
        Options(ref_fn="default")


@everywhere
def test_the_largest_group_is_right_if_the_defaults_fail(isolation: str, caplog: pytest.LogCaptureFixture) -> None:
    kernel = tuned(offset, [3, 1, -1, 1.1, 1.2], default=-1)
    with isolated(isolation), caplog.at_level(logging.WARNING, "quarantune"):
        result = kernel.tune(X)
    assert ends(result.trials) == ["wrong", "ok", "error", "ok", "ok"]
    assert result.trials[0].message == "its output differs from the output of the configs that agree with each other"
    assert result.trials[0].time_ms is None
    told = next(text for text in caplog.messages if "defaults failed" in text)
    assert "its defaults failed (error: ArithmeticError: not for this call)" in told
    assert "3 taken to be right: do=1, do=1.1, do=1.2; 1 of another kind: do=3; give ref_fn" in told
    assert result.default_time_ms is None


def test_defaults_that_most_disagree_with_win_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "quarantune"):
        result = tuned(offset, [1, 2, 2.5, 3, 1.5], default=1).tune(X)
    assert ends(result.trials) == ["ok", "wrong", "wrong", "wrong", "ok"]
    told = next(text for text in caplog.messages if "most configs" in text)
    assert "(2 like the defaults: do=1, do=1.5; 2 of another kind: do=2, do=2.5; 1 of another kind: do=3)" in told
    assert told.endswith("if the defaults are not right, give ref_fn")


@jax.custom_jvp
def slipping(x: Any) -> Any:
    return x * 2.0


slipping.defjvp(lambda primals, tangents: (slipping(*primals), tangents[0] * 3.0))


@pytest.mark.slow
@everywhere
def test_gradients_are_compared_with_the_defaults_gradients(isolation: str) -> None:
    kernel = tuned(lambda x, do: slipping(x) if do == 3 else x * 2.0, [2, 3], default=1, check_grad=True)
    with isolated(isolation):
        result = kernel.tune(X)
    assert ends(result.trials) == ["ok", "wrong"]
    assert "its gradients differ" in result.trials[1].message


def test_a_tuner_compares_only_the_arrays_of_an_output() -> None:
    def timed(x: Any, do: int = 1) -> Any:
        return {"sum": x + do // 10, "seconds": time.perf_counter(), "how": f"with {do}", "lock": None}

    result = quarantune.AutoTuner(timed, {"do": [2, 30]}, warmup=0, rep=2).run(X)
    assert ends(result.trials) == ["ok", "wrong"]

    def writes(x: Any, do: int = 1) -> Any:
        x[:] = do

    assert ends(quarantune.AutoTuner(writes, {"do": [1, 2]}, warmup=0, rep=2).run(X.copy()).trials) == ["ok", "ok"]

    def free(x: Any, do: int) -> Any:
        return x * do

    assert ends(quarantune.AutoTuner(free, {"do": [1, 2]}, warmup=0, rep=2).run(X).trials) == ["ok", "ok"]


def test_configs_are_compared_if_the_defaults_are_pruned(caplog: pytest.LogCaptureFixture) -> None:
    kernel = tuned(offset, [0, 2, 1, 1.5], default=0, prune_fn=lambda config, x: config["do"] > 0)
    with caplog.at_level(logging.WARNING, "quarantune"):
        assert ends(kernel.tune(X).trials) == ["pruned", "wrong", "ok", "ok"]
    assert any("configs compute different things: 2 taken to be right" in text for text in caplog.messages)


@pytest.mark.slow
def test_kernels_tuned_together_keep_the_whole_output() -> None:
    kernel = tuned(blocks, [192, 64], default=32)

    def whole(x: Any) -> Any:
        return kernel(x) + 1

    @quarantune.contextual_autotune(name="whole")
    def together(x: Any) -> Any:
        return whole(x)

    x = np.ones((256, 16), np.float32)
    np.testing.assert_allclose(together(x), np.sin(x) + 1, rtol=1e-5)


# --- against ref_fn -----------------------------------------------------------------------------------------


@everywhere
def test_a_reference_may_be_wider_than_the_kernel(isolation: str) -> None:
    kernel = tuned(lambda x, do: (x * do).astype(jnp.float16), [2, 3], default=2, ref_fn=lambda x: x * jnp.float32(2))
    with isolated(isolation):
        assert ends(kernel.tune(X).trials) == ["ok", "wrong"]


@everywhere
def test_a_reference_of_another_shape_is_refused_before_tracing(isolation: str, tmp_path: Path) -> None:
    notes = tmp_path / "notes"

    def noted(x: Any, do: Any) -> Any:
        if do:
            notes.touch()
        return x * 2

    kernel = tuned(noted, [1, 2], default=0, ref_fn=lambda x: (x * 2)[:, None])
    told = r"output is float32\[1000\], expected float32\[1000, 1\]; return arrays of the same shapes"
    with isolated(isolation), pytest.raises(quarantune.ReferenceFailedError, match=told):
        kernel.tune(X)
    assert not notes.exists()


def test_a_reference_that_jax_cannot_trace_is_only_run() -> None:
    kernel = tuned(offset, [0, 1], default=0, ref_fn=lambda x: np.asarray(x).copy())
    assert ends(kernel.tune(X).trials) == ["ok", "wrong"]


def scribble(*_: Any) -> Any:
    """Overwrites and empties every file of the sweep that this process can write to."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            path = f"/proc/self/fd/{name}"
            if "memfd:quarantune" not in os.readlink(path):
                continue
            for fd in (int(name), os.open(path, os.O_RDWR)):
                with contextlib.suppress(OSError):
                    os.pwrite(fd, b"scribble", 0)
                with contextlib.suppress(OSError):
                    os.ftruncate(fd, 0)
                with contextlib.suppress(OSError, ValueError), mmap.mmap(fd, 8) as mapped:
                    mapped[:] = b"scribble"


@pytest.mark.usefixtures("quiet_place")
@pytest.mark.parametrize("options", [{"ref_fn": lambda x: x * 2}, {}], ids=["ref_fn", "defaults"])
def test_no_config_can_write_to_the_expected_outputs(options: dict[str, Any]) -> None:
    def double_or_scribble(x: Any, do: int = 1) -> Any:
        if do in (2, 3):
            scribble()
        return x * (7 if do == 3 else 2)

    tuner = quarantune.AutoTuner(double_or_scribble, {"do": [2, 3, 4]}, warmup=0, rep=2, **options)
    with nothing_is_left():
        assert ends(tuner.run(X).trials) == ["ok", "wrong", "ok"]


# --- the parts ----------------------------------------------------------------------------------------------


@pytest.fixture
def fd() -> Iterator[int]:
    made = spool.create("test")
    yield made
    os.close(made)


def test_a_protected_file_stays_as_it_is_whoever_writes(fd: int) -> None:
    spool.write(fd, b"expected")
    protected = spool.protect(fd)
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    with open(f"/proc/self/fd/{protected}", "r+b") as opened, pytest.raises(PermissionError):
        os.ftruncate(opened.fileno(), 0)
    assert spool.read(protected) == b"expected"
    os.close(protected)


def test_a_file_that_others_can_write_to_is_copied(fd: int) -> None:
    spool.write(fd, b"expected")
    with mmap.mmap(fd, 8) as mapped:
        protected = spool.protect(fd)
        mapped[:] = b"scribble"
        assert spool.read(protected) == b"expected"
        with open(f"/proc/self/fd/{protected}", "r+b") as opened, pytest.raises(PermissionError):
            os.ftruncate(opened.fileno(), 0)
    os.close(protected)


@pytest.mark.parametrize("group", [2, -2, 1.0, True, "0", [0]])
def test_an_impossible_group_is_refused(group: Any) -> None:
    reference = Reference(compares=True)
    with pytest.raises(ValueError, match="there is no output"):
        reference.note(0, group, offered=1, fd=0)
    with pytest.raises(ValueError, match="there is no output"):
        reference.note(0, 1, offered=1, fd=-1)


def _cases() -> Iterator[tuple[str, Any, Any]]:
    rng = np.random.default_rng(0)
    base = rng.normal(size=(64, 33)).astype(np.float32)
    off = base.copy()
    off[::5] += 1.0
    yield "equal", base, base
    yield "many off", off, base
    few = base.copy()
    few[3, 4] += 1.0
    yield "few off", few, base
    for name, value, other in (
        ("nan for nan", np.nan, np.nan),
        ("nan for a number", np.nan, 1.0),
        ("a number for nan", 1.0, np.nan),
        ("inf for inf", np.inf, np.inf),
        ("inf for minus inf", np.inf, -np.inf),
        ("inf for a number", np.inf, 1.0),
        ("zeros of both signs", 0.0, -0.0),
        ("no more than a float holds", 3e38, -3e38),
    ):
        mine, its = base.copy(), base.copy()
        mine[:, 7], its[:, 7] = value, other
        yield name, mine, its
    yield "half for single", base.astype(np.float16), base
    yield "bfloat16", off.astype(jnp.bfloat16), base.astype(jnp.bfloat16)
    yield "whole", (base * 100).astype(np.int32), (base * 100).astype(np.int32)
    yield "whole off", (off * 100).astype(np.int8), (base * 100).astype(np.int8)
    yield "true and false", off > 0, base > 0
    yield "complex", off + 1j * base, base + 1j * base
    yield "one", np.float32(2), np.float32(1)
    yield "none", base[:0], base[:0]


@pytest.mark.parametrize(("name", "got", "wanted"), list(_cases()), ids=[case[0] for case in _cases()])
@pytest.mark.parametrize("ratio", [0.0, 0.01])
def test_device_and_host_find_the_same_differences(name: str, got: Any, wanted: Any, ratio: float) -> None:
    allowance = Allowance.fixed(Tolerance(max_mismatched_ratio=ratio))
    got = jnp.asarray(got)
    asked: list[Any] = []
    comparer = compare.Comparer()

    def shortcut(mine: Any, its: Any, allowance: Allowance) -> compare.Mismatches | None:
        asked.append(comparer(mine, its, allowance))
        return asked[-1]

    flat, expected = compare.Flat.of(got), compare.Flat.of(np.asarray(wanted))
    said = compare.compare(flat, expected, [allowance], shortcut=shortcut)
    assert said == compare.compare(flat, expected, [allowance])
    is_float = jnp.issubdtype(got.dtype, jnp.floating)
    assert (asked[0] is not None) == (got.size > 0 and (is_float or (said is None and name != "whole off")))


def test_the_host_compares_outputs_that_jax_cannot() -> None:
    got = jnp.arange(6).astype(jnp.float4_e2m1fn)
    found = compare.Comparer()(got, np.asarray(got), Allowance.fixed(Tolerance()))
    assert found in (None, Mismatches(0)), "JAX 0.10 cannot compare floats of 4 bits; 0.12 can"


def test_a_prepared_comparison_compiles_nothing_again(monkeypatch: pytest.MonkeyPatch, compiles: list[str]) -> None:
    comparer, allowance = compare.Comparer(), Allowance.fixed(Tolerance())
    wanted = np.arange(24, dtype=np.float16).reshape(4, 6)
    comparer.prepare([wanted, "no array"], [allowance, allowance])
    got = jnp.asarray(wanted)
    compiles.clear()
    monkeypatch.setattr(compare.jax, "device_put", None)
    assert comparer(got, wanted, allowance) == compare.Mismatches(0)
    assert not compiles


def test_a_kept_output_is_compared_by_programs_compiled_ahead() -> None:
    comparer, allowance = compare.Comparer(), Allowance.fixed(Tolerance())
    output = [jnp.arange(30, dtype=jnp.float16).reshape(5, 6), jnp.arange(3)]
    on_host = [np.asarray(array) for array in output]
    comparer.expect([ArrayKind(array.shape, array.dtype.name) for array in output])
    comparer.keep(output, on_host)
    ahead = set(comparer.programs)
    noise = RoundingNoise(output[0], coarsest=None, run=comparer.run)
    noise.add(output[0])
    assert comparer(output[0], on_host[0], noise.allowance()) == Mismatches(0)
    assert set(comparer.programs) == ahead
    assert comparer(output[1], on_host[1], allowance) == Mismatches(0)
    double = output[0] * 2
    found = comparer(double, on_host[0], allowance)
    assert found == Mismatches(29, 29, np.float16(58), np.float16(29), allowed=found.allowed)
