"""The reader of profiles: against JAX's own reader, and with files that are cut, damaged or hostile."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from helpers import python
from jax.profiler import ProfileData
from made_up_profiles import plane, runs, tpu, xspace

from quarantune.measure.xspace import MOST_BYTES, Plane, ProfileError, read, read_file

# JAX 0.12 warns so of its own class; as an error, the warning ends the process.
pytestmark = pytest.mark.filterwarnings("ignore:builtin type:DeprecationWarning")

_MAKE = """
import jax, jax.numpy as jnp, sys
f = jax.jit(lambda x: jnp.tanh(x @ x).sum())
x = jnp.ones((64, 64))
with jax.profiler.trace(sys.argv[1]):
    for _ in range(3):
        f(x).block_until_ready()
"""


def _events(planes: list[Plane]) -> int:
    return sum(len(events) for each in planes for _, events in each.lines)


def _tpu_profile() -> bytes:
    operation = ("%fusion.1 = f32[8] fusion()", 0, 2_000_000, {"device_duration_ps": 2_000_000})
    shared = {operation[0]: {"hlo_category": "loop fusion", "tf_op": "jit(f)/tanh"}, "jit_f(7)": {"program_id": 7}}
    return xspace([tpu(0, runs("jit_f(7)", 12), [operation], kinds=shared), plane("/host:CPU", {"python": ()})])


def test_a_profile_of_jax_is_read_as_jax_reads_it(tmp_path: Path) -> None:
    python("-c", _MAKE, str(tmp_path))
    mine = read_file(tmp_path)
    [file] = tmp_path.rglob("*.xplane.pb")
    theirs = list(ProfileData.from_file(str(file)).planes)
    assert [each.name for each in mine] == [each.name for each in theirs]
    compared = 0
    for own, other in zip(mine, theirs, strict=True):
        for (name, events), line in zip(own.lines, other.lines, strict=True):
            assert name == line.name
            for event, again in zip(events, line.events, strict=True):
                assert event.name == again.name
                assert (event.start_ps // 1000, event.duration_ps // 1000) == (again.start_ns, again.duration_ns)
                assert dict(again.stats).items() <= event.stats.items()
                compared += 1
    assert compared > 20
    assert any("hlo_op" in event.stats for each in mine for _, events in each.lines for event in events)


def test_figures_of_a_kind_belong_to_its_events_in_picoseconds() -> None:
    modules, operations, *_ = read(_tpu_profile())[0].lines
    assert [event.duration_ps for event in modules[1]][:2] == [3_000_500, 3_000_501]
    assert modules[1][0].stats == {"run_id": 0, "device_duration_ps": 3_000_500, "program_id": 7}
    assert operations[1][0].stats["hlo_category"] == "loop fusion"


def test_a_file_cut_anywhere_is_an_error_by_name() -> None:
    whole = _tpu_profile()
    assert _events(read(whole)) == 13
    for size in range(len(whole)):
        with pytest.raises(ProfileError):
            _events(read(whole[:size]))


def test_a_damaged_file_is_read_or_is_an_error_by_name() -> None:
    whole, rng, refused = _tpu_profile(), random.Random(0), 0
    for _ in range(1500):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 6)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            _events(read(bytes(damaged)))
        except ProfileError:
            refused += 1
    assert refused > 500


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "no planes"),
        (b"\xff" * 40, "more than 64 bits"),
        (b"\x0a\xff\xff\xff\xff\x7f", "within a field"),
        (b"\x0b\x0c", "type 3"),
        (b"\x08\x01", "number in the place of a message"),
        (b"PK\x03\x04 something else", "type"),
        (xspace([tpu(0, [("jit_f", 0, -5)])]), "takes -5 ps"),
        (xspace([tpu(0, [("jit_f", 0, 1 << 62)])]), "damaged"),
        (xspace(['planes { name: "p" lines { events { metadata_id: 3 } } }']), "unknown kind"),
        (xspace([tpu(0, runs("f", 1))], host=""), "end is missing"),
    ],
)
def test_what_is_not_a_whole_profile_is_refused_with_a_reason(data: bytes, reason: str) -> None:
    with pytest.raises(ProfileError, match=reason):
        _events(read(data))


def test_a_path_without_a_profile_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"jax\.profiler\.trace"):
        read_file(tmp_path)
    with pytest.raises(ProfileError, match="cannot be read"):
        read_file(tmp_path / "missing.xplane.pb")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ProfileError, match="is not a file"):
        read_file(tmp_path / "pipe")
    with open(tmp_path / "huge.xplane.pb", "wb") as sparse:
        sparse.truncate(MOST_BYTES + 1)
    with pytest.raises(ProfileError, match="profile fewer steps"):
        read_file(tmp_path)


def test_the_latest_profile_of_a_directory_counts(tmp_path: Path) -> None:
    for time, number in (("2026_01_01", 0), ("2026_01_02", 1)):
        (tmp_path / "plugins" / "profile" / time).mkdir(parents=True)
        for host in ("a", "b"):
            path = tmp_path / "plugins" / "profile" / time / f"{host}.xplane.pb"
            path.write_bytes(xspace([tpu(number, runs("f", 1))]))
    assert [each.name for each in read_file(tmp_path)] == ["/device:TPU:1"] * 2
