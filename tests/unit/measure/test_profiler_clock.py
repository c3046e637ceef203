"""The clock of JAX's profiler: the right time of each run from a profile, or an error that names what it found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import SUPPORT, python, run_python
from made_up_profiles import plane, runs, tpu, xspace

from quarantune.measure.device_clock import NoDeviceClockError
from quarantune.measure.profiler_clock import profiler_clock, run_times_ms
from quarantune.measure.xspace import Plane, read


def _times(planes: list[str], count: int, **options: Any) -> list[float]:
    return run_times_ms(read(xspace(planes)), count, **options)


def test_a_run_on_a_tpu_has_the_time_of_its_program() -> None:
    overlapping = [("%copy-start.1", 0, 900_000_000)]
    planes = [tpu(0, runs("jit_f(7)", 3), asynchronous=overlapping), plane("/host:CPU", {"python": ()})]
    assert _times(planes, 3) == [0.0030005, 0.003000501, 0.003000502]


def test_a_thousand_runs_are_told_apart_in_any_order_of_the_file() -> None:
    shuffled = [*reversed(runs("jit_f(7)", 1000))]
    assert _times([tpu(0, shuffled)], 1000) == [(3_000_500 + at) / 1e9 for at in range(1000)]


def test_the_slowest_of_four_devices_ends_a_run() -> None:
    planes = [tpu(number, runs("jit_f(7)", 5, length_ps=1000 * (number + 1))) for number in range(4)]
    assert _times(planes, 5) == [(4000 + at) / 1e9 for at in range(5)]
    assert _times([planes[1], tpu(0, [])], 5) == [(2000 + at) / 1e9 for at in range(5)]  # an idle device


def test_a_device_that_missed_a_run_gives_no_time() -> None:
    planes = [tpu(0, runs("jit_f(7)", 5)), tpu(1, runs("jit_f(7)", 4))]
    with pytest.raises(NoDeviceClockError, match=r"TPU:1 ran jit_f\(7\) 4 times instead of 5"):
        _times(planes, 5)


def test_two_programs_of_one_name_give_no_time() -> None:
    one, other = runs("jit_f(7)", 2), runs("jit_f(8)", 2)
    with pytest.raises(NoDeviceClockError, match=r"several programs: 'jit_f\(7\)', 'jit_f\(8\)'"):
        _times([tpu(0, [*one, *other])], 4)


def test_other_lines_are_named() -> None:
    with pytest.raises(NoDeviceClockError, match="no line 'XLA Modules': its lines are 'Steps', 'TensorFlow Ops'"):
        _times([plane("/device:TPU:0", {"Steps": [("0", 0, 5)], "TensorFlow Ops": ()})], 1)
    with pytest.raises(NoDeviceClockError, match="its planes are '/host:CPU'"):
        _times([plane("/host:CPU", {"python": [("f", 0, 5)]})], 1)


def _gpu_run(start: int) -> dict[str, list[tuple[str, int, int]]]:
    """A flush, two kernels and a copy between them: 1100 ns, of which the gaps do not count."""
    at = 1000 * start
    kernels = [("flush", at, 90_000), ("gemm", at + 100_000, 500_000), ("softmax", at + 900_000, 300_000)]
    return {"Stream #13(Compute)": kernels, "Stream #14(MemcpyD2D)": [("MemcpyD2D", at + 550_000, 350_000)]}


def _gpu(starts: list[int], **changed: Any) -> str:
    lines: dict[str, list[Any]] = {}
    for start in starts:
        for name, events in _gpu_run(start).items():
            lines.setdefault(name, []).extend(events)
    return plane("/device:GPU:0", lines | changed)


def test_a_run_on_a_gpu_has_the_time_of_its_work_with_copies() -> None:
    planes = [_gpu([0, 5000, 10_000])]
    assert _times(planes, 3, flushing=["flush"]) == [0.0011, 0.0011, 0.0011]


def test_a_gpus_events_that_are_not_equal_runs_give_no_time() -> None:
    for planes, count, reason in (
        ([_gpu([0, 5000])], 3, "cannot be divided"),
        ([_gpu([0, 5000], **{"Stream #9": [("more", 1, 2), ("other", 6_000_000, 2)]})], 2, "cannot be divided"),
        ([_gpu([0, 1100])], 2, "overlap"),
        ([_gpu([0]), _gpu([0]).replace("GPU:0", "GPU:1")], 1, "2 GPUs worked"),
    ):
        with pytest.raises(NoDeviceClockError, match=reason):
            _times(planes, count, flushing=["flush"])
    with pytest.raises(NoDeviceClockError, match="does not begin with the flush"):
        _times([_gpu([0, 5000])], 2, flushing=["gemm"])


def test_a_clock_takes_few_traces_of_many_runs() -> None:
    made: list[int] = []

    def trace(make_runs: Callable[[], int]) -> tuple[int, list[Plane]]:
        made.append(make_runs())
        return made[-1], read(xspace([tpu(0, runs("jit_f(7)", made[-1]))]))

    clock = profiler_clock(lambda: np.zeros(1), trace=trace)
    assert clock.is_exact
    first = [*clock.take(1), *clock.take(5)]
    assert [sample.whole for sample in first] == [(3_000_500 + at) / 1e9 for at in range(len(first))]
    assert len(clock.take(40)) == 40
    assert made == [6, 40]


_IN_A_FRESH_PROCESS = """
import pytest, sys, tempfile, os, numpy as np
from quarantune.measure.device_clock import NoDeviceClockError
from quarantune.measure.profiler_clock import profiler_clock, traced
tempfile.tempdir = sys.argv[1]

def fails():
    raise ZeroDivisionError

def nested():
    with pytest.raises(NoDeviceClockError, match="does not start"):
        traced(lambda: 1)
    return 1

with pytest.raises(NoDeviceClockError, match="no device worked in the profile: its planes are .*host"):
    profiler_clock(lambda: np.zeros(1))
with pytest.raises(ZeroDivisionError):
    traced(fails)
assert traced(nested)[0] == 1
assert not os.listdir(sys.argv[1])
"""


def test_without_a_device_or_beside_a_profile_there_is_no_clock(tmp_path: Path) -> None:
    python("-c", _IN_A_FRESH_PROCESS, str(tmp_path))


_ON_A_PLATFORM = """
import os, sys, jax, jax.numpy as jnp, numpy as np
from made_up_profiles import runs, tpu, xspace
from quarantune.measure import profiler_clock
from quarantune.measure.xspace import read
from quarantune.sandbox import spool
from quarantune.transport import payload
from quarantune.worker.arguments import BenchOptions
from quarantune.worker.bench import Bench
from quarantune.worker.compiling import compile_here

packed = payload.pack_call(jax.jit(lambda x, do=0: x + do, static_argnames=["do"]), (np.ones(8, np.float32),), {}, {})
fd = spool.create("arrays", size_bytes=packed.call.spool_bytes)
payload.write_arrays(packed, fd)
options = BenchOptions(platform="tpu", warmup=0, rep=1, supply="auto", tolerance=None)
bench = Bench(packed.call, arrays_fd=fd, options=options)
program = compile_here(bench, {"do": 1})
print([bench.clock(program).name for _ in range(2)])
if len(sys.argv) > 1:
    def traced(make_runs):
        made = make_runs()
        return made, read(xspace([tpu(0, runs("jit_f(7)", made))]))
    profiler_clock.traced = traced
    clock = bench.clock(program)
    print(clock.name, clock.take(1)[0].whole)
"""


def test_a_tpu_has_the_profilers_clock_or_the_queued_one_with_a_reason() -> None:
    done = run_python("-c", _ON_A_PLATFORM, "with profiles", path=[SUPPORT])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["['queued', 'queued']", "device 0.0030005"]
    assert done.stderr.count("a clock of the device is not used: no device worked in the profile") == 1


_BOTH_CLOCKS = """
import statistics, jax, jax.numpy as jnp
from quarantune.measure import device_clock, profiler_clock
x = jnp.ones((2048, 2048), jnp.bfloat16)
program = jax.jit(lambda x: jnp.tanh(x @ x)).lower(x).compile()
write = jax.jit(lambda: jnp.zeros(64 << 20, jnp.int32)).lower().compile()
flush = device_clock.Flush(write)
by_cupti = statistics.median(it.whole for it in device_clock.device_clock(lambda: program(x), flush).take(10))
flush.detach()
by_profiler = statistics.median(it.whole for it in profiler_clock.profiler_clock(lambda: program(x), write).take(10))
again = statistics.median(it.whole for it in device_clock.device_clock(lambda: program(x), flush).take(10))
assert 0.9 < by_profiler / by_cupti < 1.1, (by_profiler, by_cupti)
assert 0.8 < again / by_cupti < 1.25, (again, by_cupti)
"""


@pytest.mark.gpu
def test_on_a_gpu_the_profilers_clock_agrees_with_cupti_in_turn() -> None:
    python("-c", _BOTH_CLOCKS, JAX_PLATFORMS=None, CUDA_VISIBLE_DEVICES="0")
