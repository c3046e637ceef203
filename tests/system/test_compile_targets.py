"""A machine without TPU or GPU compiles Pallas, Triton and Mosaic kernels for them with the real compilers.

Each test compiles few and small configs, because a busy machine takes several times as long.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import os
import re
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aftermath import eventually, nothing_is_left, quiet_place, shared_memory  # noqa: F401
from helpers import python
from jax.experimental import pallas as pl
from jax.extend import backend
from misdeeds import kernel as zoo

import quarantune
from quarantune import CompileReport, Outcome
from quarantune.devices import targets

pytestmark = [
    pytest.mark.target,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("two_slots"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]
needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the `tpu` extra")
needs_cuda = pytest.mark.skipif(not targets.has_plugin("cuda"), reason="needs the `cuda-compile` extra")


X = jax.ShapeDtypeStruct((64, 128), jnp.float32)


def struct(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def ends(report: CompileReport) -> list[str]:
    return [trial.outcome.value for trial in report.trials]


@needs_libtpu
def test_workers_for_another_device_share_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @functools.partial(jax.jit, static_argnames=["n"])
    def counted(x: Any, n: int = 1) -> Any:
        jax.devices("cpu")
        raise ValueError(f"{len(os.listdir('/proc/self/task'))} threads for {os.environ['NPROC']} cores")

    monkeypatch.delenv("NPROC", raising=False)
    shared = quarantune.compile_check(counted, {"n": [1, 2]}, X, target="v5e")
    monkeypatch.setenv("NPROC", "9")
    asked = quarantune.compile_check(counted, {"n": [1, 2]}, X, target="v5e", again=True)
    few, many = (int(re.findall(r"(\d+) threads", report.trials[0].message)[0]) for report in (shared, asked))
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert f"for {share} cores" in shared.trials[0].message
    assert "for 9 cores" in asked.trials[0].message
    assert few < many


@functools.partial(jax.jit, static_argnames=["bq", "bk"])
def flash(q: Any, k: Any, v: Any, bq: int = 128, bk: int = 128) -> Any:
    from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes, flash_attention

    return flash_attention(q, k, v, block_sizes=BlockSizes(bq, bk, bk, 1))


@functools.partial(jax.jit, static_argnames=["rows", "scratch", "path", "others"])
def scaled(x: Any, rows: int = 8, scratch: int = 8, path: str = "", others: int = 0) -> Any:
    """Doubles `x` in blocks. Its scratch buffer in VMEM costs no time to compile."""
    from jax.experimental.pallas import tpu as pltpu

    def body(x_ref: Any, o_ref: Any, scratch_ref: Any) -> None:
        scratch_ref[:8] = x_ref[:8]
        o_ref[...] = x_ref[...] * 2 + scratch_ref[0, 0]

    if path:
        wait_for_others(Path(path), others)
    return pl.pallas_call(
        body,
        grid=(x.shape[0] // rows,),
        in_specs=[pl.BlockSpec((rows, 128), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((rows, 128), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_shapes=[pltpu.VMEM((scratch, 128), x.dtype)],
    )(x)


def wait_for_others(directory: Path, count: int) -> None:
    """Waits until `count` workers are here at the same time."""
    (directory / str(os.getpid())).touch()
    deadline = time.monotonic() + 60
    while len(list(directory.iterdir())) < count:
        if time.monotonic() > deadline:
            raise TimeoutError("no other config compiled at the same time")
        time.sleep(0.01)


@needs_libtpu
def test_larger_blocks_of_jaxs_flash_attention_take_more_vmem() -> None:
    report = quarantune.compile_check(
        flash, {"bq": [128, 512], "bk": [128, 512]}, *[struct(1, 2, 1024, 128)] * 3, target="v5e"
    )
    figures = [trial.figures for trial in report.trials if trial.figures is not None]
    assert ends(report) == ["ok"] * 4, report.table()
    used = [each.vmem_bytes or 0 for each in figures]
    assert 0 < 2 * used[0] < used[3] < 16 << 20
    assert {each.flops for each in figures} == {figures[0].flops}
    assert (figures[0].flops or 0) > 4 * 2 * 1024**2 * 128
    assert {each.argument_bytes for each in figures} == {3 * 2 * 1024 * 128 * 2}


@needs_libtpu
@pytest.mark.usefixtures("quiet_place")
def test_a_hopeless_compilation_is_killed_at_its_deadline() -> None:
    with nothing_is_left():
        report = quarantune.compile_check(
            flash, {"bq": [4096], "bk": [4096]}, *[struct(1, 2, 4096, 128)] * 3, target="v5e", compile_timeout=3
        )
        assert ends(report) == ["timeout"]
        assert report.trials[0].message.startswith("compiling took longer than 3 s: ")
        assert quarantune.compile_check(scaled, {"rows": [8]}, X, target="v5e").ok


@needs_libtpu
def test_a_config_that_exceeds_vmem_names_the_amount() -> None:
    report = quarantune.compile_check(scaled, {"scratch": [8, 1 << 17, 1 << 18]}, X, target="TPU v5e")
    assert ends(report) == ["ok", "error", "error"], report.table()
    assert "over VMEM: 64." in report.table()
    assert "128.01 of 128.00 MiB" in report.table(), "more than a v5e has, which is known before compiling"
    assert report.trials[0].figures is not None
    assert report.trials[0].figures.vmem_bytes


@needs_libtpu
@pytest.mark.usefixtures("quiet_place")
def test_misdeeds_of_configs_for_a_tpu_are_contained_and_named() -> None:
    space = tuple((mode, "tracing") for mode in ["good", "fail", "segfault", "starve", "exit_with_0"])
    configs = [{"mode": mode, "when": when, "turn": turn} for turn, (mode, when) in enumerate(space)]
    with nothing_is_left():
        report = quarantune.compile_check(
            zoo,
            lambda x, space: configs,
            X,
            target="v5e",
            memory_limit="300MB",
            space=space,
        )
    assert ends(report) == ["ok", "error", "crashed", "oom", "crashed"], report.table()
    assert quarantune.compile_check(scaled, {"rows": [8]}, X, target="v5e").ok


@needs_libtpu
def test_two_configs_are_compiled_at_a_time(tmp_path: Path) -> None:
    report = quarantune.compile_check(scaled, {"rows": [8, 16]}, X, target="v6e", path=str(tmp_path), others=2)
    assert report.ok, report.table()


@needs_libtpu
def test_compile_configs_shows_which_compile_for_a_target() -> None:
    x = np.ones((64, 128), np.float32)
    with pytest.warns(UserWarning, match=r"scratch=262144.*did not compile: error"):
        small, large = quarantune.compile_configs(scaled, {"scratch": [8, 1 << 18]}, x, target="TPU v5e")
    assert small is not None
    assert large is None


@functools.partial(jax.jit, static_argnames=["asks"])
def asking(x: Any, asks: str = "memory") -> Any:
    if asks == "memory":
        return x * jax.devices()[0].memory_stats()["bytes_limit"]
    name, _, wanted = asks.partition("=")
    told = {
        "backend": jax.default_backend(),
        "kind": jax.devices()[0].device_kind,
        "local": jax.local_devices()[0].platform,
        "named": jax.devices(jax.default_backend())[0].platform,
        "default": backend.get_default_device().platform,
        "count": f"{jax.device_count()} {jax.local_device_count()}",
        "cpu": jax.devices("cpu")[0].platform,
    }[name]
    assert told == wanted
    return x @ x


@needs_libtpu
@needs_cuda
@pytest.mark.parametrize(
    ("target", "platform", "kind"), [("v5e", "tpu", "TPU v5 lite"), ("H100", "gpu", "NVIDIA H100 80GB HBM3")]
)
def test_code_that_asks_for_its_device_finds_the_target(target: str, platform: str, kind: str) -> None:
    asks = [f"backend={platform}", f"kind={kind}", f"local={platform}", f"named={platform}", f"default={platform}"]
    asks += ["count=1 1", "cpu=cpu"]
    report = quarantune.compile_check(asking, {"asks": [*asks, "memory"]}, struct(256, 256), target=target)
    assert ends(report) == ["ok"] * 7 + ["error"], report.table()
    assert "MemoryStats" in report.trials[-1].message


@needs_libtpu
@needs_cuda
@pytest.mark.parametrize(("target", "platform", "kind"), [("v5e", "tpu", "TPU v5"), ("H100", "gpu", "NVIDIA")])
def test_modules_that_ask_on_import_find_the_target(
    target: str, platform: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = import_written(
        """
        PLATFORM, KIND = jax.default_backend(), jax.devices()[0].device_kind
        TABLE = jnp.arange(256.0, dtype=jnp.bfloat16)  # an array that stays outside the program

        @functools.partial(jax.jit, static_argnames=["asks"])
        def asking(x, asks="cpu"):
            assert TABLE.device.platform == next(iter(TABLE.devices())).platform == PLATFORM
            assert f"{PLATFORM} {KIND}".startswith(asks), f"{PLATFORM} {KIND}"
            return x + TABLE[:256]
        """,
        f"asks_for_{platform}",
        tmp_path,
        monkeypatch,
    )
    configs = [{"asks": f"{platform} {kind}"}, {"asks": "cpu"}]
    report = quarantune.compile_check(module.asking, configs, struct(256, 256), target=target)
    assert ends(report) == ["ok", "error"], report.table()
    # The description lacks facts that only the device has, and the module may have asked for one.
    assert "perhaps only because the device is not here: it calls jax.devices()" in report.trials[1].message


@needs_libtpu
def test_modules_that_need_a_device_on_import_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_written(
        """
        TABLE = jax.device_put(np.arange(128.0, dtype=np.float32), jax.devices()[0])

        @functools.partial(jax.jit, static_argnames=["times"])
        def looked_up(x, times=1):
            return x + TABLE * times
        """,
        "needs_its_device",
        tmp_path,
        monkeypatch,
    )
    report = quarantune.compile_check(module.looked_up, {"times": [1, 2]}, X, target="v5e")
    assert ends(report) == ["ok", "ok"], report.table()


def import_written(code: str, name: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a user's module, and imports it."""
    imports = "import functools\nimport jax, jax.numpy as jnp\nimport numpy as np\n"
    (directory / f"{name}.py").write_text(imports + textwrap.dedent(code))
    monkeypatch.syspath_prepend(directory)
    return importlib.import_module(name)


@functools.partial(jax.jit, static_argnames=["block", "spread"])
def particular(x: Any, block: int = 1, spread: bool = False) -> Any:
    """Asks for its device as most TPU kernels do, and accepts only some blocks."""
    assert jax.devices()[0].device_kind.startswith("TPU")
    if x.shape[0] % block:
        raise ValueError(f"blocks of {block} do not divide {x.shape[0]}")
    if spread:
        mesh, split = jax.sharding.AbstractMesh((4,), ("x",)), jax.sharding.PartitionSpec("x")
        return jax.shard_map(lambda part: part * 2, mesh=mesh, in_specs=split, out_specs=split)(x)
    return x * block


@needs_libtpu
def test_an_error_starts_with_its_reason_and_ends_with_doubt() -> None:
    configs = [{"block": 8}, {"block": 5}, {"spread": True}]
    report = quarantune.compile_check(particular, configs, struct(64, 128), target="v5e")
    assert ends(report) == ["ok", "error", "error"], report.table()
    doubtful, spread = (trial.message.partition("UncheckableError: ")[2] for trial in report.trials[1:])
    assert doubtful.startswith("ValueError: blocks of 5 do not divide 64 (perhaps only because the device is not here")
    assert "jax.devices()" in doubtful
    assert spread.startswith("a check is for one device, and the function has its own mesh: ValueError")


@needs_cuda
def test_an_error_after_asking_for_the_device_blames_no_config() -> None:
    code = """
        import jax
        import jax.extend
        from quarantune.devices import targets
        from quarantune.worker import deviceless
        target = targets.find("H100").for_compiling

        ask = "assert jax.local_devices()[0].platform == jax.extend.backend.get_default_device().platform == 'gpu'"

        def end_of(asker, stand_in):
            try:
                with stand_in(target):
                    if asker:
                        exec(ask, {"__name__": asker, "jax": jax})
                    raise ValueError("it fails")
            except Exception as error:
                return type(error).__name__

        # JAX's own kernels ask for nothing that a description cannot answer.
        askers = ("someones.kernels", "", "jax.experimental.pallas.ops.gpu.a_matmul")
        stand_ins = deviceless.abstract_device, deviceless.checked_device
        print(*(end_of(asker, stand_in) for asker in askers for stand_in in stand_ins))
        print(jax.local_devices()[0].platform)
    """
    ends = ["ValueError", "UncheckableError", *["ValueError"] * 4]
    assert python("-c", textwrap.dedent(code)).split() == [*ends, "cpu"]


@needs_cuda
def test_only_products_compile_cheaply_without_the_device() -> None:
    code = """
        import jax
        import jax.numpy as jnp
        from quarantune.devices import targets
        from quarantune.transport import payload
        from quarantune.values.options import Options
        from quarantune.worker.arguments import BenchOptions
        from quarantune.worker.bench import Bench
        from quarantune.worker.compiling import CHEAP_OPTIONS, compile_for
        from quarantune.worker.failures import NeedsDeviceError
        target = targets.find("H100").for_compiling

        def end_of(fn, *shapes, dtype=jnp.bfloat16, config=(), **options):
            args = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
            packed = payload.pack_call(jax.jit(fn), tuple(args), {}, {})
            bench = Bench(packed.call, arrays_fd=-1, options=BenchOptions.of("cuda", Options(), observers=[]))
            try:
                program = compile_for(bench, dict(config), target, **options)
            except NeedsDeviceError as error:
                return str(error).split(" better")[0]
            text = program.call.as_text()
            return "Triton" if "__triton" in text else "cuBLAS" if "cublas" in text else "neither"

        square = (512, 512), (512, 512)
        print(end_of(jnp.matmul, *square))
        print(end_of(jnp.matmul, *square, is_cheap=True))
        own = {"compiler_options": {"xla_gpu_enable_triton_gemm": True}}
        print(end_of(jnp.matmul, *square, is_cheap=True, config=own))
        print(end_of(jnp.sort, (512, 512), is_cheap=True))
        conv = lambda x, y: jax.lax.conv(x, y, (1, 1), "SAME")
        print(end_of(conv, (8, 8, 32, 32), (8, 8, 3, 3), is_cheap=True))
    """
    assert python("-c", textwrap.dedent(code)).splitlines() == [
        "XLA compiles its dot_general",
        "cuBLAS",
        "Triton",
        "XLA compiles its sort",
        "XLA compiles its conv_general_dilated",
    ]


@functools.partial(jax.jit, static_argnames=["version"])
def for_version(x: Any, version: int = 0) -> Any:
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import tuned_block_sizes

    assert tuned_block_sizes.get_tpu_version() == version
    return x + version


@needs_libtpu
def test_kernels_that_come_with_jax_find_the_target() -> None:
    report = quarantune.compile_check(for_version, {"version": [6, 5]}, struct(8, 8), target="v6e")
    assert ends(report) == ["ok", "error"], report.table()


def matmul_body(a_ref: Any, b_ref: Any, o_ref: Any, *, step: int) -> None:
    def add(index: Any, total: Any) -> Any:
        a = a_ref[:, pl.ds(index * step, step)]
        return total + jnp.dot(a, b_ref[pl.ds(index * step, step), :], preferred_element_type=jnp.float32)

    steps = a_ref.shape[1] // step
    o_ref[...] = jax.lax.fori_loop(0, steps, add, jnp.zeros(o_ref.shape, jnp.float32)).astype(o_ref.dtype)


@functools.partial(jax.jit, static_argnames=["tile", "stages"])
def triton_matmul(a: Any, b: Any, tile: int = 64, stages: int = 2) -> Any:
    from jax.experimental.pallas import triton as plt

    rows, inner, columns = a.shape[0], a.shape[1], b.shape[1]
    return pl.pallas_call(
        functools.partial(matmul_body, step=64),
        grid=(rows // tile, columns // tile),
        in_specs=[pl.BlockSpec((tile, inner), lambda i, j: (i, 0)), pl.BlockSpec((inner, tile), lambda i, j: (0, j))],
        out_specs=pl.BlockSpec((tile, tile), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((rows, columns), a.dtype),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=stages),
    )(a, b)


@needs_cuda
@pytest.mark.parametrize(("target", "expected"), [("H100", ["ok", "ok", "error"]), ("A100", ["ok", "error", "error"])])
def test_triton_kernels_are_held_to_each_gpus_shared_memory(target: str, expected: list[str]) -> None:
    configs = [{"tile": 64, "stages": 2}, {"tile": 128, "stages": 7}, {"tile": 256, "stages": 6}]
    report = quarantune.compile_check(triton_matmul, configs, *[struct(1024, 1024)] * 2, target=target)
    assert ends(report) == expected, report.table()
    assert "over shared memory: " in report.table()
    figures = report.trials[0].figures
    assert figures is not None
    assert (figures.shared_bytes, figures.spilled_bytes) == (2 * 2 * 64 * 64 * 2 if target == "H100" else 16384, 0)
    assert 32 <= (figures.registers or 0) <= 255
    assert figures.occupancy in [blocks * 4 / 64 for blocks in range(3, 12)]


@functools.partial(jax.jit, static_argnames=["steps"])
def hopper_matmul(a: Any, b: Any, steps: int = 2) -> Any:
    from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu as hopper

    config = hopper.TuningConfig(tile_m=64, tile_n=128, tile_k=64, max_concurrent_steps=steps)
    return hopper.matmul(a, b, None, config)


@functools.partial(jax.jit, static_argnames=["block"])
def mosaic_attention(q: Any, k: Any, v: Any, block: int = 64) -> Any:
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    config = attention_mgpu.TuningConfig(block_q=64, block_kv=block, max_concurrent_steps=2)
    return attention_mgpu.attention(q, k, v, config)


@functools.partial(jax.jit, static_argnames=["block"])
def triton_attention(q: Any, k: Any, v: Any, block: int = 64) -> Any:
    from jax.experimental.pallas.ops.gpu import attention

    return attention.mha(q, k, v, None, block_sizes=attention.BlockSizes(block_q=block, block_k=64))


@needs_cuda
@pytest.mark.filterwarnings("ignore:.*is deprecated. Please use tokamax:DeprecationWarning")  # also in workers
@pytest.mark.parametrize(
    ("fn", "configs", "x", "expected"),
    [
        (hopper_matmul, {"steps": [2, 6]}, struct(512, 512, dtype=jnp.float16), ["ok", "error"]),
        (mosaic_attention, {"block": [64, 256]}, struct(1, 512, 2, 128, dtype=jnp.float16), ["ok", "error"]),
        (triton_attention, {"block": [64, 48]}, struct(1, 512, 2, 64, dtype=jnp.float16), ["ok", "error"]),
    ],
    ids=["hopper_matmul_mgpu", "attention_mgpu", "attention"],
)
def test_jaxs_gpu_kernels_compile_or_fail_by_config(
    fn: Callable[..., Any], configs: dict[str, list[int]], x: Any, expected: list[str]
) -> None:
    operands = 2 if fn is hopper_matmul else 3
    before = shared_memory()
    report = quarantune.compile_check(fn, configs, *[x] * operands, target="NVIDIA H200")
    assert ends(report) == expected, report.table()
    new = set(shared_memory()) - set(before)
    assert eventually(lambda: not new & set(shared_memory())), "the new files in shared memory should go"
    figures = report.trials[0].figures
    assert figures is not None
    assert 32 <= (figures.registers or 0) <= 255
    assert 1 << 10 < (figures.shared_bytes or 0) < 227 << 10
    assert 0 < (figures.occupancy or 0) < 1
    assert all(heading in report.table(width=200) for heading in ("regs", "shared KiB", "occupancy"))


@needs_cuda
def test_a_description_that_jax_cannot_read_fails_with_its_name(cache_dir: Path) -> None:
    (target,) = [target for target in quarantune.targets() if target.name == "NVIDIA H100"]
    damaged = dataclasses.replace(target, config_text="no_such_field: 1\n")
    report = quarantune.compile_check(triton_matmul, {"tile": [64]}, *[struct(512, 512)] * 2, target=damaged)
    assert report.trials[0].outcome is Outcome.ERROR
    assert f"JAX {jax.__version__} cannot compile for NVIDIA H100 80GB HBM3 here: " in report.trials[0].message


@functools.partial(jax.jit, static_argnames=["steps"])
def blackwell_matmul(a: Any, b: Any, steps: int = 4) -> Any:
    from jax.experimental.pallas.ops.gpu import blackwell_matmul_mgpu as blackwell

    config = blackwell.TuningConfig(tile_m=128, tile_n=128, tile_k=64, max_concurrent_steps=steps, collective=False)
    return blackwell.matmul_kernel(a, b, config)


@needs_cuda
def test_a_compilers_error_for_another_gpu_is_in_the_message() -> None:
    arrays = (struct(1024, 1024, dtype=jnp.float16),) * 2
    report = quarantune.compile_check(blackwell_matmul, {"steps": [4]}, *arrays, target="H100")
    (trial,) = report.trials
    if trial.outcome is Outcome.ERROR:
        assert "Pass pipeline failed: 'nvvm.tcgen05.alloc' op is not supported on sm_90a" in trial.message
    else:  # the compiler of jaxlib 0.12 aborts
        assert trial.outcome is Outcome.CRASHED
        assert "LLVM ERROR: Cannot select: intrinsic %llvm.nvvm.tcgen05" in trial.log_tail
