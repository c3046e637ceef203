"""Compile checks for this machine's processor; `test_compile_targets.py` checks accelerators."""

from __future__ import annotations

import functools
import json
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from aftermath import nothing_is_left, quiet_place  # noqa: F401
from helpers import deadline_s
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from misdeeds import kernel

import quarantune
from quarantune import CompileReport, Outcome, Phase, Trial, TuningFailedError
from quarantune.devices import targets
from quarantune.jax_internals.kernels import vmem_needs
from quarantune.results.report import briefly
from quarantune.values.trial import CompilerFigures
from quarantune.worker.compiler_figures import read_figures

X = jax.ShapeDtypeStruct((8, 128), jnp.float32)


@functools.partial(jax.jit, static_argnames=["n"])
def rolled(x: Any, n: int = 1) -> Any:
    return jnp.roll(x, n) * n


@functools.partial(jax.jit, static_argnames=["n", "mode"])
def moded(x: Any, mode: str = "up", *, n: int = 1) -> Any:
    return x * n if mode == "up" else x - n


@pytest.mark.usefixtures("two_slots")
@pytest.mark.parametrize(
    "configs",
    [
        lambda x: [{"n": len(x.shape)}],
        lambda x, mode: [{"n": 2 if mode == "down" else 3}],
        lambda *args, **kwargs: [{"n": 2}],
        lambda x, mode="down": iter([{"n": 2}]),
        lambda x: {"n": [2]},
    ],
)
@pytest.mark.parametrize("call", [((X, "down"), {}), ((X,), {"mode": "down"})])
def test_a_callable_of_configs_may_leave_static_arguments_out(configs: Any, call: Any) -> None:
    args, kwargs = call
    (ours,) = quarantune.compile_configs(moded, configs, *args, **kwargs)
    assert ours is not None
    x = jnp.zeros(X.shape)
    assert ours(x, *args[1:], **kwargs)[0, 0] == -2


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("quiet_place", "two_slots")
def test_a_check_names_how_each_config_ends_and_leaves_nothing() -> None:
    modes = ["good", "fail", "segfault", "hang", "starve", "exit_with_0"]
    space = tuple((mode, "tracing") for mode in modes)
    configs = [{"mode": mode, "when": when, "turn": turn} for turn, (mode, when) in enumerate(space)]
    with nothing_is_left():
        report = quarantune.compile_check(
            kernel,
            lambda x, space: configs,
            X,
            target="cpu",
            compile_timeout=deadline_s(8.0),
            prune_fn=lambda config, x, space: config["turn"] < 5,
            space=space,
        )
    assert [trial.outcome.value for trial in report.trials] == ["ok", "error", "crashed", "timeout", "oom", "pruned"]
    assert report.failures == {"error": 1, "crashed": 1, "timeout": 1, "oom": 1}
    assert not report.ok
    assert report.compiled == (configs[0],)
    report.raise_if_all_failed()
    good = report.trials[0]
    assert good.compile_s is not None
    assert good.figures is not None
    assert good.figures.argument_bytes == 8 * 128 * 4
    assert report.trials[3].phase is Phase.COMPILE
    assert "SIGSEGV" in report.trials[2].message


@pytest.mark.slow
def test_a_check_runs_nothing_and_remembers_nothing(cache_dir: Path) -> None:
    huge = jax.ShapeDtypeStruct((1 << 20, 1 << 16), jnp.float32)  # 256 GiB: no worker can make this argument
    report = quarantune.compile_check(rolled, {"n": [1, 2, 2]}, huge, target="cpu")
    assert report.ok
    assert [trial.config["n"] for trial in report.trials] == [1, 2]
    assert not list(cache_dir.glob("*.json"))


def test_a_check_of_configs_that_are_all_pruned_starts_nothing(no_process: None) -> None:
    report = quarantune.compile_check(rolled, {"n": [1, 2]}, X, target="cpu", prune_fn=lambda config, x: False)
    assert [trial.outcome for trial in report.trials] == [Outcome.PRUNED] * 2
    with pytest.raises(TuningFailedError, match="prune_fn dropped all 2 configs"):
        report.raise_if_all_failed()


def test_a_kernels_limit_of_vmem_is_not_taken_for_its_use() -> None:
    use = '"memory_space":"1","offset":"0","size":'
    text = f'"scoped_memory_configs":[{{{use}"25165824"}}],"used_scoped_memory_configs":[{{{use}"16384"}}]'
    program = types.SimpleNamespace(
        memory_analysis=lambda: None,
        cost_analysis=lambda: {"flops": -1.0, "bytes accessed": 64.0},
        as_text=lambda: text,
    )
    assert read_figures(program) == CompilerFigures(vmem_bytes=16384, moved_bytes=64.0)


@pytest.mark.parametrize(
    ("kernels", "flops", "moved"),
    [
        ([], 5.0, 64.0),
        ([None], None, None),
        ([{"flops": 1000, "bytes_accessed": "256"}, None], None, None),
        ([{"flops": 1000, "bytes_accessed": "256"}, {"flops": "7", "bytes_accessed": 1}], 1007.0, 257.0),
    ],
)
def test_kernels_cost_what_their_authors_say_or_are_unknown(kernels: Any, flops: Any, moved: Any) -> None:
    calls = [
        'custom-call(%x), custom_call_target="tpu_custom_call", backend_config={"custom_call_config":{"body":"TUw"'
        + ("" if estimate is None else f',"cost_estimate":{json.dumps(estimate)}')
        + "}}"
        for estimate in kernels
    ]
    program = types.SimpleNamespace(
        memory_analysis=lambda: None,
        cost_analysis=lambda: {"flops": 5.0, "bytes accessed": 64.0},
        as_text=lambda: "\n".join(calls),
    )
    assert read_figures(program) == CompilerFigures(flops=flops, moved_bytes=moved)


@pytest.mark.parametrize("line", ['custom-call(%x), custom_call_target="__gpu$xla.gpu.triton"', "(f32[]) while(%t)"])
def test_costs_the_compiler_counts_in_part_are_unknown(line: str) -> None:
    program = types.SimpleNamespace(
        memory_analysis=lambda: None,
        cost_analysis=lambda: {"flops": 5.0, "bytes accessed": 64.0},
        as_text=lambda: f"%a = {line}",
    )
    assert read_figures(program) == CompilerFigures()


@pytest.mark.parametrize(
    ("dtype", "options", "needs"),
    [
        (jnp.float32, {}, [(3 * 16 * 128 * 4, None)]),
        (jnp.int4, {}, [(3 * 16 * 128 // 2, None)]),
        (jnp.bool_, {}, [(0, None)]),
        (jnp.float32, {"compiler_params": pltpu.CompilerParams(vmem_limit_bytes=1000)}, [(3 * 16 * 128 * 4, 1000)]),
        (jnp.float32, {"interpret": True}, []),
    ],
)
def test_a_tpus_kernel_needs_its_blocks_and_scratch_once(dtype: Any, options: dict[str, Any], needs: Any) -> None:
    def body(x_ref: Any, in_place_ref: Any, o_ref: Any, scratch_ref: Any) -> None:
        o_ref[...] = x_ref[...]

    block = pl.BlockSpec((16, 128), lambda i: (i, 0))
    call = pl.pallas_call(
        body,
        grid=(2,),
        in_specs=[block, pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct((32, 128), dtype),
        scratch_shapes=[pltpu.VMEM((16, 128), dtype)],
        **options,
    )
    x = jax.ShapeDtypeStruct((32, 128), dtype)
    assert vmem_needs(jax.jit(call).trace(x, x).jaxpr) == needs


def report_of(*trials: Trial) -> CompileReport:
    return CompileReport(name="matmul", target=targets.find("v5e"), trials=trials, key="{}")


def test_the_table_has_the_compilers_figures_and_reasons() -> None:
    figures = CompilerFigures(vmem_bytes=5 << 20, flops=2e9, temporary_bytes=0)
    wanted = "Scoped allocation with size 73.39M and limit 16.00M exceeded scoped vmem limit by 57.39M"
    table = report_of(
        Trial(config={"BM": 8}, outcome=Outcome.OK, compile_s=1.25, figures=figures),
        Trial(config={"BM": 16}, outcome=Outcome.ERROR, message=wanted),
    ).table()
    header, ok, _, _, over = table.splitlines()[:5]
    assert header.split() == ["BM", "outcome", "compile", "s", "VMEM", "MiB", "GFLOP", "over", "VMEM"]
    assert ok.split() == ["8", "ok", "1.25", "5", "2"]
    assert "over VMEM: 73.39 of 16.00 MiB" in over


def test_no_spills_are_shown_if_another_config_has_some() -> None:
    each = [
        CompilerFigures(registers=168, spilled_bytes=spilled, shared_bytes=8320, occupancy=0.1875) for spilled in (0, 8)
    ]
    trials = [Trial(config={"BM": n}, outcome=Outcome.OK, figures=figures) for n, figures in enumerate(each)]
    same, *lines = report_of(*trials).table().splitlines()[:4]
    header, *rows = map(str.split, lines)
    assert same == "all that compile: regs 168, shared KiB 8.125, occupancy 19%"
    assert header == ["BM", "outcome", "compile", "s", "spilled", "B"]
    assert rows == [["0", "ok", "0"], ["1", "ok", "8"]]


@pytest.mark.parametrize("width", [120, 80])
def test_each_config_of_four_tunables_has_one_line(width: int) -> None:
    message = "Mosaic GPU kernel exceeds available shared memory: smem_bytes=278624 > max_smem_bytes=232448"
    configs = [{"tile_m": 64 << (n % 2), "tile_n": 128 << n, "steps": n, "group_m": n > 2} for n in range(5)]
    ended = [
        {"outcome": Outcome.ERROR, "message": message}
        if n == 4
        else {
            "outcome": Outcome.OK,
            "compile_s": 0.5,
            "figures": CompilerFigures(registers=168 - n, spilled_bytes=n, shared_bytes=8320 * n, occupancy=n / 10),
        }
        for n in range(5)
    ]
    trials: list[Any] = [Trial(config=config, **end) for config, end in zip(configs, ended, strict=True)]
    lines = report_of(*trials).table(width=width).partition("\n\n")[0].splitlines()
    assert max(map(len, lines)) <= width
    assert [line.split()[:4] for line in lines[-5:]] == [list(map(str, config.values())) for config in configs]


def test_configs_that_need_too_much_share_a_note() -> None:
    wanted = "Scoped allocation with size {}.00M and limit 16.00M exceeded scoped vmem limit"
    trials = [Trial(config={"BM": n}, outcome=Outcome.ERROR, message=wanted.format(n)) for n in (32, 64)]
    table = report_of(*trials).table(width=100)
    assert table.count("[1] error, 2 configs, for BM=32: over VMEM: 32.00 of 16.00 MiB; Scoped") == 1
    assert all(f"  {n}.00 of 16.00 MiB" in table.split("\n\n")[0] for n in (32, 64))


def test_shared_memory_overflows_state_their_amounts_first() -> None:
    triton = "RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 524288, available: 232448, context: []"
    mosaic = "Mosaic GPU kernel exceeds available shared memory: smem_bytes=297048 > max_smem_bytes=232448"
    assert briefly(triton).startswith("over shared memory: 512 of 227 KiB; RESOURCE")
    assert briefly(mosaic).startswith("over shared memory: 290.1 of 227 KiB; Mosaic")
    assert briefly("TypeError: no") == "TypeError: no"


def test_one_allocation_that_exceeds_vmem_states_its_amount() -> None:
    v4 = "RESOURCE_EXHAUSTED: Allocation (size={}) would exceed memory (size=16777216) :: #a [space=vmem, scoped]"
    assert briefly(v4.format(64 << 20)).startswith("over VMEM: 64.00 of 16.00 MiB; RESOURCE")
    assert briefly(v4.format(8 << 20)).startswith("RESOURCE"), "it does not fit with others, whose sum is unknown"


def test_a_report_raises_only_where_every_config_failed() -> None:
    failed = Trial(config={"BM": 8}, outcome=Outcome.TIMEOUT, message="compiling took longer than 5 s")
    with pytest.raises(TuningFailedError, match=r"All 1 configs failed for matmul on TPU v5e:\n.*longer than 5 s"):
        report_of(failed).raise_if_all_failed()
    report_of(failed, Trial(config={"BM": 16}, outcome=Outcome.OK)).raise_if_all_failed()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"fn": lambda x, n=1: x}, TypeError, "is not jitted: jit it, with the tunables among its static_argnames"),
        ({"num_workers": 0}, ValueError, "num_workers=0 is not valid: give a whole number of at least 1"),
        ({"num_workers": 1.5}, ValueError, "num_workers=1.5 is not valid"),
        ({"num_workers": "2"}, ValueError, "num_workers='2' is not valid"),
        ({"target": "H300"}, ValueError, "target='H300' is not known"),
        ({"compile_timeout": 0}, ValueError, "compile_timeout=0 is not valid"),
        ({"configs": {"m": [1]}}, TypeError, "'m'"),
    ],
)
def test_a_bad_request_is_refused_before_any_work(
    change: dict[str, Any], error: type[Exception], message: str, cpu_only: None, no_process: None
) -> None:
    request: dict[str, Any] = {"fn": rolled, "configs": {"n": [1]}, "target": "cpu"} | change
    fn, configs = request.pop("fn"), request.pop("configs")
    with pytest.raises(error, match=message):
        quarantune.compile_check(fn, configs, X, **request)
