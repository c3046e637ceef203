"""No job compiles a config again that failed to compile for its kind of device."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from helpers import change_version, python

import quarantune
from quarantune.api.tuning_cache import TuningCache
from quarantune.cache.problems import CacheWarning
from quarantune.calls.key import ProblemId
from quarantune.host.process import in_sandbox
from quarantune.results.report import CompileReport
from quarantune.sweep.limits import SweepLimits
from quarantune.tuning.compile_verdicts import CompileVerdicts
from quarantune.values.options import Options
from quarantune.values.trial import Outcome, Phase, Route, Trial

LIMITS = SweepLimits(
    compile_timeout_s=10.0, timeout_s=5.0, memory_limit_bytes=10**9, compile_slots=1, configs_per_worker=None
)
KIND = "NVIDIA H200"
X = np.arange(4, dtype=np.float32)


def failures(directory: Path, *, kind: str = KIND, text: str = "key", **limits: Any) -> CompileVerdicts:
    call = SimpleNamespace(name="f", function=SimpleNamespace(options=Options()))
    keyed: Any = SimpleNamespace(call=call, id=ProblemId("f", kind, text), platform="cuda", arguments_hash="")
    return CompileVerdicts(keyed, dataclasses.replace(LIMITS, **limits), directory)


def failed(outcome: Outcome = Outcome.ERROR, message: str = "ValueError: no", **fields: Any) -> Trial:
    about: dict[str, Any] = {"phase": Phase.COMPILE, "route": Route.APART} | fields
    return Trial(config={"n": 1}, outcome=outcome, message=message, **about)


def remembered(directory: Path, trial: Trial) -> bool:
    before = len(failures(directory).known())
    failures(directory).note(trial, source="a sweep")
    return len(failures(directory).known()) > before


def test_later_jobs_know_a_failure_with_its_date_and_source(tmp_path: Path) -> None:
    failures(tmp_path).note(failed(), source="a compile check")
    ((text, trial),) = failures(tmp_path).known(start_over=True).items()
    assert (json.loads(text), trial.outcome, trial.phase) == ({"n": 1}, "error", "compile")
    origin, _, reason = trial.message.partition(f": failed to compile for {KIND} in a compile check: ")
    assert origin.startswith("known since 20")
    assert reason == "ValueError: no"


@pytest.mark.parametrize(
    "trial",
    [
        failed(phase=Phase.LOAD),
        failed(phase=Phase.CHECK),
        failed(message="FileNotFoundError: no tables.npy"),
        failed(message="ModuleNotFoundError: no module named 'kernels'"),
        failed(message="quarantune.worker.failures.UncheckableError: it calls jax.devices() and fails"),
        failed(message="jax.errors.JaxRuntimeError: INTERNAL: CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure"),
        failed(message="jax.errors.JaxRuntimeError: INTERNAL: ptxas: No space left on device"),
        failed(Outcome.DEVICE_OOM, "RESOURCE_EXHAUSTED: Out of memory", route=Route.TOGETHER),
        failed(Outcome.LOST),
        failed(Outcome.NOT_RUN),
        failed(Outcome.WRONG, phase=Phase.CHECK),
    ],
    ids=lambda trial: f"{trial.outcome}-{trial.phase}-{trial.message.rpartition(':')[2].strip()[:20]}",
)
def test_failures_not_due_to_the_config_are_not_remembered(tmp_path: Path, trial: Trial) -> None:
    assert not remembered(tmp_path, trial)
    assert not list(tmp_path.iterdir())


def test_a_compiler_that_lacks_device_memory_is_believed(tmp_path: Path) -> None:
    vmem = "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 20M of 16M"
    assert remembered(tmp_path / "apart", failed(Outcome.DEVICE_OOM, "RESOURCE_EXHAUSTED: out of memory"))
    assert remembered(tmp_path / "vmem", failed(Outcome.DEVICE_OOM, vmem, route=Route.TOGETHER))


def test_failures_count_for_one_device_call_and_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures(tmp_path).note(failed(), source="a sweep")
    assert failures(tmp_path).known()
    assert not failures(tmp_path, kind="NVIDIA A100").known()
    assert not failures(tmp_path, text="another shape, or other code").known()
    with monkeypatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0")
        assert not failures(tmp_path).known()
    change_version(tmp_path, "jaxlib", "99.0")
    assert not failures(tmp_path).known()


@pytest.mark.parametrize(
    ("outcome", "more", "less"),
    [
        (Outcome.TIMEOUT, {"compile_timeout_s": 10.1}, {"compile_timeout_s": 9.0}),
        (Outcome.OOM, {"memory_limit_bytes": 2 * 10**9}, {"memory_limit_bytes": 10**8}),
        (Outcome.OOM, {"memory_limit_bytes": None}, {}),
        (Outcome.CRASHED, {"memory_limit_bytes": 2 * 10**9}, {}),
    ],
)
def test_a_failure_of_limits_counts_under_no_larger_limits(
    tmp_path: Path, outcome: Outcome, more: dict[str, Any], less: dict[str, Any]
) -> None:
    failures(tmp_path).note(failed(outcome), source="a sweep")
    assert failures(tmp_path).known()
    assert failures(tmp_path, **less).known()
    assert not failures(tmp_path, **more).known()
    assert not failures(tmp_path).known(start_over=True), "a new start tries failures again"


def test_a_config_that_compiles_at_last_is_not_a_failure(tmp_path: Path) -> None:
    assert remembered(tmp_path, failed())
    failures(tmp_path).note(failed(Outcome.LOST), source="a sweep")
    assert failures(tmp_path).known()
    failures(tmp_path).note(failed(Outcome.WRONG, phase=Phase.CHECK), source="a sweep")
    assert not failures(tmp_path).known()
    assert remembered(tmp_path, failed())


def test_failures_elsewhere_count_until_the_config_compiles(tmp_path: Path) -> None:
    shared, own = tmp_path / "shared", tmp_path / "own"
    failures(shared).note(failed(), source="a compile check")
    before = [path.read_bytes() for path in shared.rglob("*.uncompiled")]
    job = failures(own)
    job._others = [failures(shared)._journal]
    assert job.known()
    job.note(failed(Outcome.WRONG, phase=Phase.CHECK), source="a sweep")
    later = failures(own)
    later._others = job._others
    assert not later.known()
    assert [path.read_bytes() for path in shared.rglob("*.uncompiled")] == before


def test_the_same_failure_is_written_once(tmp_path: Path) -> None:
    for _ in range(3):
        failures(tmp_path).note(failed(), source="a sweep")
    (file,) = tmp_path.glob("f.trials/*.uncompiled")
    assert len(file.read_text().splitlines()) == 1


def test_malformed_records_are_ignored_with_a_warning(tmp_path: Path) -> None:
    job = failures(tmp_path)
    job.note(failed(), source="a sweep")
    (good,) = job._journal.records()
    nonsense: list[dict[str, Any]] = [{}, {"trial": 3}, good | {"found": "soon"}, good | {"compilers": "all"}]
    for record in [*nonsense, good | {"trial": good["trial"] | {"config": {"n": 2}, "outcome": "ok", "time_ms": 1.0}}]:
        job._journal.append(record)
    with pytest.warns(CacheWarning, match="4 records of failed compilations .* compiled again"):
        assert list(failures(tmp_path).known()) == ['{"n":1}']


def test_deleting_a_problem_forgets_its_failures(tmp_path: Path) -> None:
    failures(tmp_path).note(failed(), source="a sweep")
    failures(tmp_path, text="other").note(failed(), source="a sweep")
    TuningCache(tmp_path).delete("f", "key", KIND)
    assert not failures(tmp_path).known()
    assert failures(tmp_path, text="other").known()
    TuningCache(tmp_path).clear("f")
    assert not failures(tmp_path, text="other").known()


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    return tmp_path / "notes"


def kernel(notes: Path, configs: list[int], *, factor: int = 1, **options: Any) -> quarantune.Autotuned:
    """Returns a function whose workers write each traced n to a file; odd n do not compile."""
    file = str(notes)

    @quarantune.autotune({"n": configs}, rep=1, name="kernel", **options)
    @functools.partial(jax.jit, static_argnames=["n"])
    def scale(x: Any, n: int = 1) -> Any:
        if in_sandbox():
            with open(file, "a") as opened:
                opened.write(f"{n} ")
        if n % 2:
            raise NotImplementedError(f"n={n} is odd")
        return x * factor + 0 * n

    return scale


def traced(notes: Path) -> set[str]:
    """Returns the configs traced since the last call."""
    found = set(notes.read_text().split()) if notes.exists() else set()
    notes.unlink(missing_ok=True)
    return found


@pytest.mark.slow
def test_another_sweep_does_not_compile_known_failures(
    notes: Path, cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kernel(notes, [1, 2, 3])(X)
    assert traced(notes) == {"1", "2", "3"}
    caplog.set_level("INFO", logger="quarantune")
    again = kernel(notes, [1, 2, 3, 4]).tune(X)
    assert traced(notes) == {"2", "4"}, "neither failed configs nor the equal defaults are traced"
    assert again.failures["error"] == 2
    assert "known since" in again.trials[0].message
    assert "NotImplementedError: n=1 is odd" in again.trials[2].message.replace("n=3", "n=1")
    assert "2 configs are known not to compile" in caplog.text
    changed = kernel(notes, [1, 2], factor=2).tune(X)
    assert traced(notes) == {"1", "2"}, "other code has other failures"
    assert "known since" not in changed.trials[0].message
    with pytest.raises(quarantune.TuningFailedError):
        kernel(notes, [1, 3]).tune(X)
    assert traced(notes) == {"1", "3"}, "a sweep without other configs tries them again"
    for record in TuningCache():
        TuningCache().delete(*record.key)
    assert "known since" not in kernel(notes, [1, 2]).tune(X).trials[0].message
    with quarantune.settings(disable_cache=True):
        kernel(notes, [1, 2]).tune(X)
    assert "1" in traced(notes)


@pytest.mark.long
@pytest.mark.slow
def test_a_search_retries_a_space_of_known_failures(notes: Path) -> None:
    fn = kernel(notes, [1, 2, 3], search="random", prune_fn=lambda config, x: config["n"] != 2)
    for _ in range(2):
        with pytest.raises(quarantune.TuningFailedError, match="All 2 configs failed"):
            fn.tune(X)
        assert traced(notes) == {"1", "3"}
    nothing = kernel(notes, [1, 2, 3], search="random", prune_fn=lambda config, x: False)
    with pytest.raises(quarantune.TuningFailedError, match=r"the search asked for no config.*prune_fn may drop all"):
        nothing.tune(X)


@pytest.mark.slow
def test_a_sweep_knows_what_a_compile_check_found(notes: Path, cache_dir: Path) -> None:
    fn, structs = kernel(notes, [1, 2, 3]), jax.ShapeDtypeStruct(X.shape, X.dtype)
    assert quarantune.compile_check(fn, [{"n": 1}, {"n": 2}], structs, target="cpu").failures == {"error": 1}
    with pytest.warns(UserWarning, match="did not compile"):
        quarantune.compile_configs(fn, [{"n": 3}], structs)
    assert traced(notes) == {"1", "2", "3"}
    result = fn.tune(X)
    assert traced(notes) >= {"2", "3"}, "compile_configs knows neither the name nor the options"
    assert "in a compile check: NotImplementedError: n=1 is odd" in result.trials[0].message
    assert result.best_config == {"n": 2}
    with quarantune.settings(cache_dir=notes.parent / "mine", cache_path=cache_dir):
        fn.tune(X)
    assert traced(notes) == {"2"}, "failures in a read-only directory are also known"


@pytest.mark.slow
def test_a_check_compiles_only_configs_without_a_verdict(notes: Path) -> None:
    def check(fn: quarantune.Autotuned, *values: int, **options: Any) -> CompileReport:
        structs = jax.ShapeDtypeStruct(X.shape, X.dtype)
        return quarantune.compile_check(fn, [{"n": n} for n in values], structs, target="cpu", **options)

    fn = kernel(notes, [1, 2, 3])
    first = check(fn, 1, 2)
    assert (traced(notes), first.known) == ({"1", "2"}, 0)
    second = check(fn, 1, 2, 4)
    assert (traced(notes), second.known) == ({"4"}, 2)
    assert [trial.outcome for trial in second.trials] == ["error", "ok", "ok"]
    assert first.trials[1].figures is not None
    assert second.trials[1].figures == first.trials[1].figures
    assert "in a compile check: NotImplementedError: n=1 is odd" in second.trials[0].message
    assert "known since" in second.trials[1].message
    assert "2 of 3 known from earlier checks" in second.table()
    assert (check(fn, 1, 2, 4, again=True).known, traced(notes)) == (0, {"1", "2", "4"})
    assert (check(kernel(notes, [1, 2], factor=2), 1, 2).known, traced(notes)) == (0, {"1", "2"})
    with quarantune.settings(disable_cache=True):
        assert (check(fn, 1, 2).known, traced(notes)) == (0, {"1", "2"})
    fn.tune(X)
    assert {"2", "3"} <= traced(notes), "a config that compiles is not a failure"
    assert (check(fn, 2, 3).known, traced(notes)) == (2, set()), "a check knows the failures of sweeps"


PROGRAM = """
import dataclasses, functools
import jax, jax.numpy as jnp, numpy as np, quarantune
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from quarantune.devices import targets
from quarantune.answers.answer import Situation
from quarantune.calls.key import keyed_to_tune
from quarantune.tuning.job import TuningJob
from quarantune.values.blocks import current

@quarantune.autotune({"BM": [64, 256]}, name="product")
@functools.partial(jax.jit, static_argnames=["BM"])
def product(a, b, BM: int = 64):
    def body(a_ref, b_ref, c_ref):
        c_ref[...] = triton.dot(a_ref[...], b_ref[...]).astype(c_ref.dtype)

    row = pl.BlockSpec((BM, a.shape[1]), lambda i, j: (i, 0))
    column = pl.BlockSpec((b.shape[0], BM), lambda i, j: (0, j))
    return pl.pallas_call(
        body,
        grid=(a.shape[0] // BM, b.shape[1] // BM),
        in_specs=[row, column],
        out_specs=pl.BlockSpec((BM, BM), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), a.dtype),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
    )(a, b)

if __name__ == "__main__":
    x = jax.ShapeDtypeStruct((512, 512), jnp.float16)
    report = quarantune.compile_check(product, [{"BM": 64}, {"BM": 256}], x, x, target="H200")
    print(report.table())
    assert [trial.outcome.value for trial in report.trials] == ["ok", "error"], report.table()
    resolver, arrays = product._tuner, (np.ones((512, 512), np.float16),) * 2
    for target, known in (("H200", [1]), ("H100", [])):
        keyed = keyed_to_tune(resolver.bind(arrays, {}), targets.find(target))
        now = dataclasses.replace(Situation.of(keyed.call), start_over=True)
        job = TuningJob(keyed, now, resolver.rungs.tuning)
        assert list(job._known_not_to_compile()) == known, target
"""


@pytest.mark.target
def test_a_sweep_on_a_gpu_knows_findings_of_a_check_without_one(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    python(script, JAX_PLATFORMS="cpu")
