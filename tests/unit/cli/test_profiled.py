"""`tune --profile` and `cache verify --profile`, with the profiles of a training step whose kernels are tuned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import python, run_python
from jax.profiler import ProfileData
from made_up_profiles import plane, xspace

from quarantune.functions.profile_scope import config_id

# JAX 0.12 warns so of its own class; as an error, the warning ends the process.
pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore:builtin type:DeprecationWarning")]

_KERNELS = """
import jax, jax.numpy as jnp, quarantune

def tuned(name, work):
    def fn(x, parts: int = 64):
        return jax.lax.map(work, x.reshape(parts, -1, x.shape[-1])).reshape(x.shape)
    fn.__name__ = fn.__qualname__ = name
    fn.__module__ = __name__
    return quarantune.autotune({"parts": [64, 1]}, rep=5)(jax.jit(fn, static_argnames=["parts"]))

project = tuned("project", lambda x: jnp.tanh(x @ jnp.full((x.shape[-1], x.shape[-1]), 0.01)))
attend = tuned("attend", lambda x: jax.nn.softmax(x))
normalize = tuned("normalize", lambda x: x / (1e-6 + jnp.linalg.norm(x, axis=-1, keepdims=True)))
activate = tuned("activate", lambda x: jax.nn.gelu(x))
"""
_JOB = """
import sys, jax, jax.numpy as jnp, kernels as k

@jax.jit
def step(w, x):
    def loss(w):
        h = k.activate(k.normalize(k.attend(k.project(x * w))))
        return jnp.sort(h[:2].ravel()).sum()
    return w - 0.1 * jax.grad(loss)(w)

x = jax.random.normal(jax.random.key(0), (256, 256))
w = step(jnp.ones(()), x).block_until_ready()
with jax.profiler.trace(sys.argv[1]):
    for _ in range(3):
        w = step(w, x).block_until_ready()
"""
_NAMES = {"kernels.project", "kernels.attend", "kernels.normalize", "kernels.activate"}


def _by_hand_ms(profile: Path) -> float:
    """Returns the time of all operations, without the loops around others."""
    [file] = profile.rglob("*.xplane.pb")
    profile_data = ProfileData.from_file(str(file))
    events = (event for each in profile_data.planes for line in each.lines for event in line.events)
    ran = [event for event in events if "hlo_op" in dict(event.stats) and not event.name.startswith(("while", "call"))]
    return sum(event.duration_ns for event in ran) / 1e6


@pytest.mark.long
@pytest.mark.slow
def test_a_job_is_tuned_and_verified_by_its_own_profile(tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text(_KERNELS)
    (tmp_path / "job.py").write_text(_JOB)
    record, cache = str(tmp_path / "recorded"), str(tmp_path / "tuned")

    def cli(*words: str, code: int = 0, **environ: str) -> Any:
        done = run_python(*("-m", "quarantune", *words, "--json"), cwd=tmp_path, QUARANTUNE_CACHE_DIR=cache, **environ)
        assert done.returncode == code, done.stdout + done.stderr
        return json.loads(done.stdout) if code < 2 else done.stderr

    def profile(name: str, **environ: str) -> Path:
        python("-W", "ignore", "job.py", name, cwd=tmp_path, path=[tmp_path], QUARANTUNE_CACHE_DIR=cache, **environ)
        return tmp_path / name

    before = profile("before", QUARANTUNE_RECORD=record)
    table = cli("tune", "--profile", "before", "--dry-run", QUARANTUNE_RECORD=record)
    assert {row["function"] for row in table["calls"]} == _NAMES
    assert {row["origin"] for row in table["calls"]} == {"the defaults, not tuned"}
    times = [row["time_ms"] for row in table["calls"]]
    assert times == sorted(times, reverse=True)
    assert table["total_ms"] == pytest.approx(sum(times) + sum(table["rest_ms"].values()))
    assert table["total_ms"] == pytest.approx(_by_hand_ms(before), rel=0.05)
    assert "sort" in table["rest_ms"]
    assert not (tmp_path / "tuned").exists() or not list((tmp_path / "tuned").glob("*.json"))

    # A budget tunes the calls with most device time.
    ended = cli("tune", "--profile", "before", "--time-budget", "5", QUARANTUNE_RECORD=record)["tuned"]
    assert [it["function"] for it in ended] == [row["function"] for row in table["calls"]]
    done = [it["status"] for it in ended]
    assert done == sorted(done, key=("tuned", "left for the next run").index)
    ended = cli("tune", "--profile", "before", QUARANTUNE_RECORD=record)["tuned"]
    assert {it["status"] for it in ended} <= {"tuned", "tuned before"}

    profile("after")
    table = cli("tune", "--profile", "after", "--dry-run")
    assert {row["function"] for row in table["calls"]} == _NAMES
    assert all(row["origin"].endswith(", saved") and row["gain"].startswith("has ") for row in table["calls"])
    # A sweep that saw a very fast default: the winner does not win in its place.
    _edit(tmp_path / "tuned" / "kernels.attend.json", default_time_ms=1e-6)
    verified = cli("cache", "verify", "--profile", "after", code=1)
    verdicts = {it["function"]: it["verdict"] for it in verified["in_place"]}
    assert verdicts.keys() == _NAMES
    assert verdicts["kernels.attend"] == "loses in place"


def _edit(file: Path, **fields: float) -> None:
    content = json.loads(file.read_text())

    def edited(value: Any) -> Any:
        if isinstance(value, dict):
            value = {key: edited(item) for key, item in value.items()}
            return value | fields if "default_time_ms" in value else value
        return value

    file.write_text(json.dumps(edited(content)))


def _cli(*words: str, **environ: str) -> str:
    done = run_python("-m", "quarantune", *words, **environ)
    assert done.returncode == 2, done.stdout + done.stderr
    return done.stderr


@pytest.mark.slow
def test_bad_profiles_and_options_are_refused_before_any_work(tmp_path: Path) -> None:
    environ = {"QUARANTUNE_CACHE_DIR": str(tmp_path / "tuned")}
    torn = tmp_path / "torn.xplane.pb"
    torn.write_bytes(xspace([plane("/device:TPU:0", {"XLA Ops": [("%a.1 = f32[] a()", 0, 5)]})])[:-12])
    for words, reason in (
        (["tune", "--profile", str(torn)], "is not a whole profile"),
        (["tune", "--profile", str(tmp_path)], "is not a whole profile"),
        (["tune", "--profile", str(tmp_path / "missing")], "cannot be read"),
        (["tune", "--recorded", str(tmp_path), "--dry-run"], "--dry-run belongs to --profile"),
        (["tune", "--profile", str(torn), "--static", "a=1"], "--profile goes with neither"),
        (["cache", "verify", "--profile", str(torn)], "is not a whole profile"),
    ):
        assert reason in _cli(*words, **environ)


def test_the_config_of_an_entry_has_the_id_of_the_call_that_runs_it() -> None:
    assert config_id({"parts": 1}) == config_id({"parts": 1, "compiler_options": {}})
    assert config_id({"parts": 1}) != config_id({"parts": 1, "compiler_options": {"xla_cpu_enable_fast_math": True}})
