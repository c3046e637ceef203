"""The device time of a job: right sums by tuned call and by category, from profiles of every platform."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from helpers import python
from jax.profiler import ProfileData
from made_up_profiles import plane, tpu, xspace

from quarantune.measure.xspace import ProfileError, read, read_file
from quarantune.results.job_profile import JobTime, TunedWork, job_time

# JAX 0.12 warns so of its own class; as an error, the warning ends the process.
pytestmark = pytest.mark.filterwarnings("ignore:builtin type:DeprecationWarning")

_SCOPE = "jit(step)/quarantune/kernels.mm/3f2a99aa1b77"
_WORK = TunedWork("kernels.mm", "3f2a99aa", "1b77")


def _operation(name: str, start: int, length: int, **figures: Any) -> tuple[str, int, int, dict[str, Any]]:
    return f"%{name} = f32[8] op()", start, length, figures


def _job(planes: list[str]) -> JobTime:
    return job_time(read(xspace(planes)))


def test_work_on_tpus_is_summed_by_scope_and_category() -> None:
    operations = [
        _operation("while.1", 0, 1000, tf_op=f"{_SCOPE}/while", hlo_category="while"),
        _operation("fusion.2", 100, 300, tf_op=f"{_SCOPE}/while/body/dot_general", hlo_category="convolution fusion"),
        _operation("fusion.2", 500, 300, tf_op=f"{_SCOPE}/while/body/dot_general", hlo_category="convolution fusion"),
        _operation("fusion.3", 2000, 70, tf_op=f"{_SCOPE}/tanh", hlo_category="loop fusion"),
        _operation("fusion.4", 3000, 40, tf_op="jit(step)/add", hlo_category="loop fusion"),
        _operation("copy-done.1", 4000, 5, hlo_category="copy-done"),
        _operation("fusion.5", 5000, 9, tf_op=_SCOPE.replace("quarantune", "transpose(jvp(quarantune") + "))/mul"),
    ]
    asynchronous = [("%copy-start.1 = f32[8] copy-start()", 0, 10**9)]
    job = _job([tpu(number, [("jit_step(1)", 0, 9000)], operations, asynchronous) for number in range(2)])
    work = job.tuned[_WORK]
    assert work.time_ms == pytest.approx(2 * (300 + 300 + 70 + 9) / 1e9)
    assert work.calls == 2
    assert work.each_ms == pytest.approx((300 + 300 + 70) / 1e9)
    assert dict(job.rest_ms) == {"loop fusion": 2 * 40 / 1e9, "copy-done": 2 * 5 / 1e9}
    assert job.total_ms == pytest.approx(2 * (679 + 45) / 1e9)


def _field(number: int, value: bytes | int) -> bytes:
    if isinstance(value, int):
        return bytes([number << 3 & 0x7F | 0x80, number >> 4, value]) if number > 15 else bytes([number << 3, value])
    return bytes([number << 3 | 2, len(value) & 0x7F | 0x80, len(value) >> 7]) + value


def _hlo(*instructions: tuple[str, str, str]) -> bytes:
    """Returns a serialised `HloProto` of instructions: their names, opcodes and names in JAX."""
    listed = b"".join(
        _field(2, _field(1, name.encode()) + _field(2, opcode.encode()) + _field(7, _field(2, op_name.encode())))
        for name, opcode, op_name in instructions
    )
    return _field(1, _field(1, b"jit_step") + _field(3, listed + _field(5, 1)))


def test_programs_of_one_name_are_told_apart_by_their_numbers() -> None:
    programs = {
        "jit_step(4)": {"Hlo Proto": _hlo(("fusion.1", "fusion", f"{_SCOPE}/dot_general"))},
        "jit_step(5)": {
            "Hlo Proto": _hlo(("fusion.1", "fusion", "jit(step)/add"), ("sort.0", "sort", "jit(step)/sort"))
        },
    }
    module = {"hlo_module": "jit_step"}
    events = [
        ("gemm_kernel", 0, 700, {"hlo_op": "fusion.1", "program_id": 4} | module),
        ("add_kernel", 1000, 30, {"hlo_op": "fusion.1", "program_id": 5} | module),
        ("sort_kernel", 2000, 8, {"hlo_op": "sort.0", "program_id": 5} | module),
        ("unknown_kernel", 3000, 2, {"hlo_op": "fusion.1"} | module),
    ]
    metadata = plane("/host:metadata", {}, programs)
    job = _job([plane("/device:GPU:0", {"Stream #13(Compute)": events}), metadata])
    assert job.tuned[_WORK].time_ms == pytest.approx(700 / 1e9)
    assert dict(job.rest_ms) == {"fusion": 32 / 1e9, "sort": 8 / 1e9}


def test_the_number_of_calls_is_not_that_of_the_trips_of_a_loop() -> None:
    for loop, calls in (("while", 0), ("fusion", 3)):
        body = f"{_SCOPE}/while/body/dot_general"
        programs = {"jit_step(4)": {"Hlo Proto": _hlo(("while.1", loop, f"{_SCOPE}/while"), ("dot.1", "dot", body))}}
        events = [("gemm", 1000 * at, 700, {"hlo_op": "dot.1", "program_id": 4}) for at in range(3)]
        job = _job([plane("/device:GPU:0", {"Stream #1": events}), plane("/host:metadata", {}, programs)])
        assert job.tuned[_WORK].calls == calls
        assert (job.tuned[_WORK].each_ms is None) == (calls == 0)


def test_a_profile_without_operations_is_refused_by_name() -> None:
    with pytest.raises(ProfileError, match="its parts are '/host:CPU'"):
        _job([plane("/host:CPU", {"python": [("f", 0, 5)]})])
    with pytest.raises(ProfileError, match="no line of operations: its lines are 'Steps'"):
        _job([plane("/device:TPU:0", {"Steps": [("0", 0, 5)]})])


_JOB = """
import jax, jax.numpy as jnp, sys
@jax.jit
def step(x):
    with jax.named_scope("quarantune/kernels.mm/3f2a99aa1b77"):
        y = jnp.tanh(x @ x)
    return jnp.sort(y.ravel())
x = jnp.ones((128, 128))
with jax.profiler.trace(sys.argv[1]):
    for _ in range(4):
        step(x).block_until_ready()
"""


def test_the_sums_of_a_profile_of_jax_are_those_made_by_hand(tmp_path: Path) -> None:
    python("-c", _JOB, str(tmp_path))
    job = job_time(read_file(tmp_path))
    [file] = tmp_path.rglob("*.xplane.pb")
    by_hand: Counter[str] = Counter()
    for each in ProfileData.from_file(str(file)).planes:
        for event in (event for line in each.lines for event in line.events):
            stats = dict(event.stats)
            if stats.get("hlo_module") == "jit_step" and "hlo_op" in stats:
                by_hand["sort" if event.name.startswith("sort") else "other"] += event.duration_ns
    assert job.rest_ms["sort"] == pytest.approx(by_hand["sort"] / 1e6, rel=1e-3)
    assert job.tuned[_WORK].time_ms + sum(job.rest_ms.values()) == pytest.approx(by_hand.total() / 1e6, rel=0.02)
    assert job.tuned[_WORK].calls == 4
