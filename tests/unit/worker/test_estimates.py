"""Cycle estimates of the TPU compiler read libtpu's files as data and extrapolate the rest of a grid."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from aftermath import eventually, shared_memory
from helpers import SUPPORT, child_environ, python
from jax.experimental import pallas as pl

import quarantune
from quarantune.jax_internals import kernels
from quarantune.sandbox import contain
from quarantune.values.codec import DamageError
from quarantune.worker import estimates

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the `tpu` extra")
compiles = [pytest.mark.target, pytest.mark.timeout(300), pytest.mark.usefixtures("two_slots")]


def struct(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


@functools.partial(jax.jit, static_argnames=["bm", "bk", "bn"])
def matmul(x: Any, y: Any, bm: int = 128, bk: int = 128, bn: int = 128) -> Any:
    from jax.experimental.pallas import tpu as pltpu

    def body(x_ref: Any, y_ref: Any, o_ref: Any, total: Any) -> None:
        @pl.when(pl.program_id(2) == 0)
        def clear() -> None:
            total[...] = jnp.zeros_like(total)

        total[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def store() -> None:
            o_ref[...] = total[...].astype(o_ref.dtype)

    (m, k), n = x.shape, y.shape[1]
    return pl.pallas_call(
        body,
        grid=(m // bm, n // bn, k // bk),
        in_specs=[
            pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)),
            pl.BlockSpec((bk, bn), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        out_shape=struct(m, n, dtype=x.dtype),
    )(x, y)


# --- grids ----------------------------------------------------------------------------------------------------


def test_a_grid_gives_its_steps_and_the_bytes_it_moves() -> None:
    jaxpr = matmul.trace(struct(1024, 512), struct(512, 1024)).jaxpr
    blocks = 128 * 128 * 2
    # Both inputs change their block at each of the 8 * 8 * 4 steps, the output only after the last step along k.
    assert (kernels.free_steps(jaxpr), kernels.moved_bytes(jaxpr)) == ([64], (2 * 256 + 64) * blocks)


def test_a_smaller_grid_keeps_the_dependencies_of_steps() -> None:
    jaxpr = matmul.trace(struct(1024, 512), struct(512, 1024)).jaxpr
    smaller, steps = kernels.with_smaller_grids(jaxpr, 16)
    (kernel,) = [each for each in kernels.equations(smaller) if each.primitive.name == "pallas_call"]
    assert kernel.params["grid_mapping"].grid == (2, 8, 4)
    assert steps == [16]
    assert kernels.free_steps(jaxpr) == [64]  # the original program is unchanged


def test_a_smaller_grid_keeps_all_cores_busy() -> None:
    from jax.experimental.pallas import tpu as pltpu

    call = pl.pallas_call(
        lambda x_ref, o_ref: None,
        grid=(64, 4),
        in_specs=[pl.BlockSpec((8, 128), lambda i, j: (i, j))],
        out_specs=pl.BlockSpec((8, 128), lambda i, j: (i, j)),
        out_shape=struct(512, 512),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
    )
    jaxpr = jax.jit(call).trace(struct(512, 512)).jaxpr
    assert [kernels.with_smaller_grids(jaxpr, steps, cores=2)[1] for steps in (1, 2, 8)] == [[2], [4], [16]]


def test_kernels_inside_other_functions_are_found_in_one_order() -> None:
    @jax.jit
    def program(x: Any) -> Any:
        return jax.lax.cond(x[0, 0] > 0, lambda: matmul(x, x), lambda: matmul(x, x, bm=256))

    jaxpr = program.trace(struct(512, 512)).jaxpr
    assert kernels.free_steps(jaxpr) == [8, 16]
    assert kernels.with_smaller_grids(jaxpr, 1000)[1] == [8, 16]


@pytest.mark.parametrize("turns", [3, "data"])
def test_a_loop_in_a_kernel_whose_end_is_data_is_named(turns: Any) -> None:
    def body(x_ref: Any, o_ref: Any) -> None:
        end = turns if turns == 3 else x_ref[0, 0].astype(jnp.int32)
        o_ref[...] = jax.lax.fori_loop(0, end, lambda i, total: total + 1.0, x_ref[...])

    call = pl.pallas_call(body, out_shape=struct(8, 128, dtype=jnp.float32))
    jaxpr = jax.jit(call).trace(struct(8, 128, dtype=jnp.float32)).jaxpr
    if turns == 3:
        assert kernels.free_steps(jaxpr) == [1]
    else:
        with pytest.raises(ValueError, match="it has a loop whose end depends on data"):
            kernels.free_steps(jaxpr)


# --- files of libtpu -----------------------------------------------------------------------------------------

WRITTEN = 'hlo_op_estimate {\n  hlo_op_name: "copy.1"\n  estimated_cycles: 31280\n  num_equivalent_hlos: 2\n}\n'


def test_an_operations_cycles_count_for_all_like_it() -> None:
    assert estimates._parsed(WRITTEN) == ({"copy.1": 62560.0}, 0)
    assert estimates._parsed(WRITTEN + WRITTEN.replace("copy.1", "add"))[0] == {"copy.1": 62560.0, "add": 62560.0}


COPY = WRITTEN.replace("31280", "0").replace(
    "2\n}",
    """2
  dma_instruction_type: DMA_INSTRUCTION_TYPE_REMOTE
  hlo_instruction {
    name: "copy.1"
    metadata: "{\\"a\\": {"
    shape {
      element_type: BF16
      dimensions: 8
      dimensions: 128
      layout {
        minor_to_major: 0
        tiles {
          dimensions: 8
        }
      }
    }
  }
}""",
)


def test_a_copy_without_cycles_counts_by_its_bytes() -> None:
    assert estimates._parsed(WRITTEN + COPY) == ({"copy.1": 0.0}, 2 * 2 * (2 * 8 * 128))


@pytest.mark.parametrize(
    "text",
    [
        COPY[:-10],
        WRITTEN[:40],
        WRITTEN + "{",
        "\0" * 100,
        WRITTEN.replace("31280", "-1"),
        WRITTEN.replace("31280", "9" * 400),
        WRITTEN.replace("31280", "nan"),
        WRITTEN.replace('"copy.1"', '""'),
        WRITTEN.replace("  estimated_cycles: 31280\n", ""),
        WRITTEN.replace("hlos: 2", "hlos: -2"),
        WRITTEN.replace("}\n", "") + WRITTEN,
        "<html>",
    ],
)
def test_torn_or_hostile_estimates_are_refused(text: str) -> None:
    with pytest.raises(DamageError, match="estimate cannot be read"):
        estimates._parsed(text)


PROGRAM = """
%body.1 (arg: (s32[], f32[8])) -> (s32[], f32[8]) {
  %fusion.2 = f32[8]{0} fusion(%p), kind=kLoop, calls=%fused.3
}
%fused.3 (p: f32[8]) -> f32[8] {
  ROOT %add.4 = f32[8]{0} add(%p, %p)
}
%cond.5 (arg: (s32[], f32[8])) -> pred[] {
  %constant.6 = s32[]{:T(128)} constant(10)
}
ENTRY %main (x: f32[8]) -> f32[8] {
  %copy.7 = f32[8]{0} copy(%x)
  ROOT %while = (s32[], f32[8]{0}) while(%t), condition=%cond.5, body=%body.1
}
"""


def test_operations_in_a_loop_count_for_each_turn() -> None:
    turns = estimates._turns(PROGRAM)
    assert (turns["copy.7"], turns["fusion.2"], turns["add.4"]) == (1.0, 10.0, 10.0)


def test_a_loop_without_a_constant_end_has_no_estimate() -> None:
    with pytest.raises(ValueError, match="a loop whose end depends on data"):
        estimates._turns(PROGRAM.replace("constant(10)", "parameter(0)"))


def test_operations_in_a_branchs_loop_count_for_each_turn() -> None:
    program = PROGRAM.replace("ENTRY %main", "%branch.8").replace(
        "condition=%cond.5, body=%body.1\n}",
        "condition=%cond.5, body=%body.1\n}\nENTRY %main (x: f32[8]) -> f32[8] {\n"
        "  ROOT %conditional = f32[8]{0} conditional(%p, %x), branch_computations={%branch.8}\n}",
    )
    turns = estimates._turns(program)
    assert (turns["copy.7"], turns["fusion.2"], turns["add.4"]) == (1.0, 10.0, 10.0)


def point(*, whole: tuple[int, ...] = (100,), steps: tuple[int, ...] = (), **cycles: float) -> Any:
    return estimates._Point(
        False, whole, steps, 5.0, {name.replace("__", "."): count for name, count in cycles.items()}
    )


def test_one_kernel_without_an_estimate_leaves_none(tmp_path: Path) -> None:
    def body(x_ref: Any, o_ref: Any) -> None:
        end = x_ref[0, 0].astype(jnp.int32)
        o_ref[...] = jax.lax.fori_loop(0, end, lambda i, total: total + 1.0, x_ref[...])

    @jax.jit
    def program(x: Any) -> Any:
        return pl.pallas_call(body, out_shape=struct(128, 128))(matmul(x, x))

    traced = contextlib.nullcontext((program.trace(struct(128, 128)), None))
    target: Any = None
    with pytest.raises(ValueError, match="it has a loop whose end depends on data"):
        estimates._compile_growing(lambda: traced, target, 1, tmp_path)


@pytest.mark.parametrize("points", ["", '{"whole": "', "[1]"])
def test_a_killed_process_costs_only_its_estimate(points: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(work: Any, directory: Path, deadline: float) -> int:
        (directory / "points").write_text(points)
        return 0

    monkeypatch.setattr(estimates, "_run_apart", write)
    trace: Any = None
    target: Any = SimpleNamespace(num_cores=1)
    assert estimates.estimate(trace, target).no_estimate


@pytest.mark.parametrize(("kernels", "status", "found"), [(0, -signal.SIGABRT, 1), (1, -signal.SIGABRT, 0), (0, 1, 0)])
def test_an_ended_processs_files_count_if_all_kernels_are_named(
    kernels: int, status: int, found: int, tmp_path: Path
) -> None:
    (tmp_path / "copy.7_static_llo_profile.textproto").write_text(WRITTEN)
    point(whole=(4,) * kernels, steps=(2,) * kernels).note(tmp_path)
    assert [each.cycles for each in estimates._points(tmp_path, status)] == [{"copy.1": 62560.0}] * found


def test_a_program_does_not_get_the_next_programs_steps(tmp_path: Path) -> None:
    (tmp_path / "kernel_0.1_static_llo_profile.textproto").write_text(WRITTEN.replace("copy", "kernel_0"))
    point(steps=(1,)).with_cycles(tmp_path, {}).note(tmp_path)
    point(steps=(2,)).note(tmp_path)
    assert [each.steps for each in estimates._points(tmp_path, -signal.SIGABRT)] == [(1,)]


def test_a_program_with_a_loop_that_was_ended_has_no_estimate(tmp_path: Path) -> None:
    (tmp_path / "copy.7_static_llo_profile.textproto").write_text(WRITTEN)
    estimates._Point(True, (), (), 0.0).note(tmp_path)
    with pytest.raises(ValueError, match="it has a loop, and libtpu was ended"):
        estimates._points(tmp_path, -signal.SIGABRT)


def test_further_steps_cost_what_the_last_ones_did() -> None:
    points = [point(steps=(2,), kernel_0__1=300.0, copy=7.0), point(steps=(4,), kernel_0__1=500.0, copy=7.0)]
    found = estimates._extrapolated(points)
    assert (found.kernel_cycles, found.cycles, found.moved_bytes) == (500 + 96 * 100, 507 + 96 * 100, 5.0)
    assert estimates._extrapolated(points[:1]).kernel_cycles == 300 * 50


@pytest.mark.parametrize(("steps", "told"), [(2, "it takes longer than 0 s"), (4, "")])
def test_the_first_steps_alone_do_not_estimate_more(steps: int, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(work: Any, directory: Path, deadline: float) -> int:
        point(whole=(4,), steps=(steps,), kernel_0__1=300.0).note(directory)
        return 0 if steps == 4 else -signal.SIGKILL

    monkeypatch.setattr(estimates, "_run_apart", write)
    monkeypatch.setattr(estimates, "_LONGEST_S", 0)
    trace: Any = None
    target: Any = SimpleNamespace(num_cores=1)
    assert estimates.estimate(trace, target).no_estimate == told


@pytest.mark.parametrize("is_used", [False, True], ids=["as soon as it is made", "while it is used"])
def test_a_killed_workers_directory_goes_with_its_names(is_used: bool, tmp_path: Path) -> None:
    fd = os.open(tmp_path / "names", os.O_RDWR | os.O_CREAT)
    code = textwrap.dedent(
        f"""
        import os
        from quarantune.sandbox import contain

        def die(path, mode=0o777, real=os.mkdir):
            real(path, mode)
            print(path, flush=True)
            os.kill(os.getpid(), 9)

        if not {is_used}:
            os.mkdir = die
        contain.note_in({fd})
        with contain.directory() as path:
            os.mkdir = die
            os.mkdir(path + "/another")
        """
    )
    done = subprocess.run([sys.executable, "-c", code], pass_fds=[fd], capture_output=True, text=True, check=False)
    made = Path(done.stdout.strip())
    path = made.parent if is_used else made
    assert done.returncode == -signal.SIGKILL
    assert made.is_dir()
    contain.remove_shared_memory(fd)
    assert not path.exists()


# --- the real compiler ------------------------------------------------------------------------------------------


@needs_libtpu
class TestRealCompiler:
    pytestmark = compiles

    def test_configs_are_ranked_by_the_compilers_cycles(self) -> None:
        x = struct(1024, 1024)
        space = [{"bm": 128, "bk": 128, "bn": 128}, {"bm": 512, "bk": 512, "bn": 512}, {"bm": 8, "bk": 8, "bn": 8}]
        before = set(shared_memory())
        report = quarantune.compile_check(matmul, space, x, x, target="v5e", estimate=True)
        assert [trial.config["bm"] for trial in report.ranked] == [512, 128, 8]
        slow, fast, failed = report.trials
        assert failed.outcome.is_failure
        # The compiler's whole simulation gives a ratio of 4.3, with 382,780 cycles for the small blocks.
        assert slow.figures is not None
        assert slow.figures.estimate is not None
        assert slow.figures.estimate.cycles == pytest.approx(382_780, rel=0.05)
        assert slow.figures.estimate.kernel_cycles == slow.figures.estimate.cycles
        assert report.estimated_ms(slow) == pytest.approx(0.2552, rel=0.05)
        assert (report.estimated_ms(fast) or 1) < (report.estimated_ms(slow) or 0) / 3
        assert "est. ms" in report.table()
        assert "nothing ran" in report.table()
        assert eventually(lambda: set(shared_memory()) <= before)
        again = quarantune.compile_check(matmul, space, x, x, target="v5e", estimate=True)
        assert again.known == 3
        assert [report.estimated_ms(trial) for trial in again.trials] == [*map(report.estimated_ms, report.trials)]

    def test_an_abort_of_the_compiler_costs_only_the_estimate(self) -> None:
        x = struct(256, 256)
        report = quarantune.compile_check(matmul, {"bm": [128]}, x, x, target="v4", estimate=True)
        assert report.ok
        assert report.trials[0].figures is not None
        assert "SIGABRT" in report.trials[0].figures.no_estimate
        assert "no estimate: " in report.table()

    def test_an_abort_after_the_estimate_was_written_costs_nothing(self) -> None:
        x = struct(512, 512)
        report = quarantune.compile_check(matmul, {"bm": [128, 256]}, x, x, target="7x", estimate=True)
        small, large = (trial.figures.estimate for trial in report.trials if trial.figures)
        assert small is not None
        assert large is not None
        assert 0 < large.cycles < small.cycles

    def test_loops_of_plain_jax_count_by_their_trips(self) -> None:
        @functools.partial(jax.jit, static_argnames=["turns"])
        def program(x: Any, turns: int = 1) -> Any:
            return jax.lax.scan(lambda c, _: (jnp.tanh(c @ x), None), x, length=turns)[0]

        @functools.partial(jax.jit, static_argnames=["step"])
        def until(x: Any, step: int = 1) -> Any:
            return jax.lax.while_loop(lambda c: c.sum() < 100, lambda c: c + step, x)

        x = struct(512, 512, dtype=jnp.float32)
        report = quarantune.compile_check(program, {"turns": [10, 40]}, x, target="v5e", estimate=True)
        few, many = (
            trial.figures.estimate.cycles for trial in report.trials if trial.figures and trial.figures.estimate
        )
        assert 3 < many / few < 4.1
        unknown = quarantune.compile_check(until, {"step": [1]}, x, target="v5e", estimate=True)
        assert unknown.trials[0].figures is not None
        assert unknown.trials[0].figures.no_estimate == "it has a loop whose end depends on data"

    @pytest.mark.parametrize(
        ("option", "environ", "told"),
        [
            (
                "--xla_jf_no_such_option=",
                {},
                "this version of libtpu takes no option for it: it ended with exit code 1",
            ),
            (estimates._OPTION, {"TMPDIR": "/proc"}, ""),
            (estimates._OPTION, {"ALLOW_MULTIPLE_LIBTPU_LOAD": "0"}, "libtpu multi-process lockfile"),
            (estimates._OPTION, {}, ""),
        ],
        ids=["a libtpu without the option", "a read-only temporary directory", "one libtpu at a time", "two libtpu"],
    )
    def test_obstacles_to_an_estimate_are_named(self, option: str, environ: dict[str, str], told: str) -> None:
        program = textwrap.dedent(
            f"""
            import contextlib, jax
            from quarantune.devices import targets
            from quarantune.worker import deviceless, estimates
            from test_estimates import matmul, struct

            target = targets.find("TPU v5e").for_compiling

            @contextlib.contextmanager
            def trace():
                with deviceless.checked_device(target) as sharding:
                    x = jax.ShapeDtypeStruct((256, 256), "bfloat16", sharding=sharding)
                    yield matmul.trace(x, x), sharding

            estimates._OPTION = {option!r}
            found = estimates.estimate(trace, target)
            print(found.no_estimate or found.estimate.cycles)
            """
        )
        with open("/tmp/libtpu_lockfile", "a") as lock:  # another process with libtpu would hold it
            for hold in (fcntl.flock, fcntl.lockf):
                with contextlib.suppress(BlockingIOError):  # another process with libtpu already holds it
                    hold(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            changes = {"ALLOW_MULTIPLE_LIBTPU_LOAD": None, "JAX_PLATFORMS": "cpu", **environ}
            answer = python("-c", program, path=[SUPPORT, Path(__file__).parent], **changes).strip()
        assert told in answer
        assert told or float(answer) > 0

    def test_a_killed_caller_leaves_no_directory(self, tmp_path: Path) -> None:
        (tmp_path / "program.py").write_text(
            textwrap.dedent(
                """
                import jax, quarantune
                from test_estimates import matmul, struct
                x = struct(2048, 2048)
                space = {"bm": [128, 256, 512], "bn": [128, 256, 512], "bk": [128, 256, 512]}
                quarantune.compile_check(matmul, space, x, x, target="v5e", estimate=True)
                """
            )
        )
        before = set(shared_memory())
        caller = subprocess.Popen(
            [sys.executable, "program.py"], cwd=tmp_path, env=child_environ(SUPPORT, Path(__file__).parent)
        )
        assert eventually(lambda: set(shared_memory()) - before or caller.poll() is not None, timeout_s=200)
        assert caller.poll() is None
        caller.kill()
        caller.wait()
        assert eventually(lambda: set(shared_memory()) <= before)


def test_estimates_for_a_gpu_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from quarantune.devices import targets

    monkeypatch.setattr(targets, "usable", targets.find)
    with pytest.raises(ValueError, match="NVIDIA H100 is not a TPU: leave it out"):
        quarantune.compile_check(matmul, {"bm": [128]}, struct(256, 256), target="h100", estimate=True)
