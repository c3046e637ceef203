"""The cost of a cached call, a first lookup, a large cache, the sandbox and the import stays within bounds.

Bounds hold for the best of a few attempts: a busy machine can make an attempt slow, never fast.
"""

from __future__ import annotations

import collections
import functools
import inspect
import itertools
import json
import statistics
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import python
from repeated import ATTEMPTS, best_of

import quarantune
from quarantune.answers import recording as recorded
from quarantune.cache import entry_file, store
from quarantune.cache.store import Store
from quarantune.calls import key
from quarantune.calls.call import BoundCall
from quarantune.calls.key import keyed
from quarantune.values import blocks


def run_code(code: str, *arguments: object) -> str:
    return python("-W", "error", "-c", textwrap.dedent(code), *arguments)


# --- cached calls -------------------------------------------------------------------------------------------


def test_a_cached_call_costs_little_more_than_the_jit() -> None:
    @functools.partial(jax.jit, static_argnames=["n"])
    def add(x: Any, y: Any, n: int = 1) -> Any:
        return x + n * y

    tuned = quarantune.autotune([{"n": 2}], warmup=0, rep=1, ref_fn=None)(add)
    by_hand = functools.partial(add, n=2)
    x, y = jnp.ones(8), jnp.ones(8)
    tuned(x, y)
    by_hand(x, y)

    def time_of(fn: Callable[..., Any]) -> float:
        started = time.perf_counter()
        for _ in range(300):
            fn(x, y)
        return time.perf_counter() - started

    def ratio() -> float:
        times = [(time_of(tuned), time_of(by_hand)) for _ in range(41)]
        return statistics.median(t for t, _ in times) / statistics.median(h for _, h in times)

    # A quiet machine has a ratio of about 1.3: see examples/benchmarks/compare.py.
    assert best_of(ratio, limit=1.3) <= 1.6


MODULE = """
import functools, jax, quarantune

@quarantune.autotune([{"n": 1}, {"n": 2}], warmup=0, rep=1, name="warm")
@functools.partial(jax.jit, static_argnames=["n"])
def kernel(x, n: int = 1):
    return x + n
"""


@pytest.mark.slow
def test_a_first_call_with_a_warm_cache_reads_one_file_once(tmp_path: Path, cache_dir: Path) -> None:
    (tmp_path / "warm_kernel.py").write_text(MODULE)
    call = """
        import os, sys
        import numpy as np
        events = []
        def note(event, arguments):
            if event in ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system"):
                events.append(event)
            if event in ("open", "os.listdir", "os.scandir", "os.mkdir", "os.rename", "os.remove"):
                path = str(arguments[0])
                # Files are opened relative to their directory.
                if path.startswith(os.environ["QUARANTUNE_CACHE_DIR"]) or path.endswith(".json"):
                    events.append(f"{event} {os.path.basename(path)}")
        sys.path.insert(0, sys.argv[1])
        from warm_kernel import kernel
        sys.addaudithook(note)
        kernel(np.zeros(4, np.float32))
        kernel(np.zeros(4, np.float32))
        print(events)
    """
    assert "subprocess.Popen" in run_code(call, tmp_path)
    assert run_code(call, tmp_path).strip() == "['open cache', 'open warm.json']"


@pytest.mark.long
@pytest.mark.slow
def test_a_lookup_and_a_write_are_quick_among_10_000_entries(tmp_path: Path, cache_dir: Path) -> None:
    (tmp_path / "warm_kernel.py").write_text(MODULE)
    run_code("import sys; sys.path.insert(0, sys.argv[1]); from warm_kernel import kernel; kernel(1.0)", tmp_path)
    store = Store(cache_dir)
    ((device, entries),) = store.read("warm").items()
    (entry,) = entries.values()
    store.merge("warm", {device: {json.dumps({"call": {"x": n}}): entry for n in range(10_000)}})
    measure = """
        import sys, time
        sys.path.insert(0, sys.argv[1])
        from warm_kernel import kernel
        kernel._tuner  # imports as the first call does
        from quarantune.values import settings as environment
        from quarantune.cache.store import Store
        started = time.process_time()  # CPU time, because others may want the CPU
        assert kernel.lookup(1.0) is not None
        looked_up = time.process_time()
        Store(environment.current().cache_dir).put("warm", "another", "key", {"config": {"n": 1}})
        print(looked_up - started, time.process_time() - looked_up)
    """
    times = [tuple(map(float, run_code(measure, tmp_path).split())) for _ in range(ATTEMPTS)]
    # The aim is 150 ms and 300 ms. The test allows twice that, because machines that run tests are slow and shared.
    assert min(lookup_s for lookup_s, _ in times) < 2 * 0.150
    assert min(write_s for _, write_s in times) < 2 * 0.300


def test_tuning_anew_looks_for_one_entry_only(monkeypatch: pytest.MonkeyPatch) -> None:
    many = trivial(2)
    many.tune(np.zeros(4, np.float32))
    read: list[str] = []
    monkeypatch.setattr(Store, "read", lambda store, name: read.append(name))
    many.tune(np.zeros(4, np.float32))
    assert read == [], "reading 5,000 entries takes 150 ms, and looking for one 0.3 ms"


FIRST_CALL = """
import functools, json, os, sys, threading
import jax, jax.numpy as jnp, quarantune

HOME = os.path.dirname(quarantune.__file__)
ran = set()

def note(frame, event, arg):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(HOME) and code.co_flags & 2:  # no module and no class body
        ran.add(os.path.relpath(code.co_filename, HOME))

@quarantune.autotune([{"n": 1}, {"n": 2}], warmup=0, rep=1)
@functools.partial(jax.jit, static_argnames=["n"])
def add(x, n: int = 1):
    return x + n

if __name__ == "__main__":
    x = jnp.ones(8).block_until_ready()
    threading.setprofile(note)
    sys.setprofile(note)
    add(x)
    sys.setprofile(None)
    threading.setprofile(None)
    imported = [name.removeprefix("quarantune.") for name in sys.modules if name.startswith("quarantune.")]
    print(json.dumps({"imported": imported, "ran": sorted(ran)}))
"""


class FirstCall:
    """The first call of a process: quarantune's modules imported after it, and quarantune's files that it ran."""

    def __init__(self, program: Path, **environ: str) -> None:
        about = json.loads(python(program, **environ).splitlines()[-1])
        self.imported = set(about["imported"])
        self.ran = about["ran"]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("first call") / "program.py"
    file.write_text(FIRST_CALL)
    return file


@pytest.fixture(scope="module")
def miss_and_hit(program: Path) -> tuple[FirstCall, FirstCall]:
    """The first call of a process that tunes, and the first call of the next process."""
    where = {"QUARANTUNE_CACHE_DIR": str(program.with_name("cache")), "QUARANTUNE_PROGRESS": "0"}
    return FirstCall(program, **where), FirstCall(program, **where)


@pytest.mark.slow
def test_a_first_call_runs_code_of_few_files(miss_and_hit: tuple[FirstCall, FirstCall]) -> None:
    miss, hit = miss_and_hit
    # Modules that tell one story each are smaller and more: 26 and 91 before they were split.
    assert len(hit.ran) <= 41, hit.ran
    assert len(miss.ran) <= 116, miss.ran


def test_a_cached_call_is_bound_and_described_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.zeros(4, np.float32)
    trivial(2).tune(x)
    found, done = trivial(2), collections.Counter[str]()

    def counted(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **kwargs: Any) -> Any:
            if name != "bound" or args[0] is found.function.signature:  # JAX has other signatures
                done[name] += 1
            return fn(*args, **kwargs)

        return count

    for name in ("bind", "bind_partial"):
        monkeypatch.setattr(inspect.Signature, name, counted("bound", getattr(inspect.Signature, name)))
    monkeypatch.setattr(key, "describe_arguments", counted("described", key.describe_arguments))
    monkeypatch.setattr(blocks, "current", counted("situated", blocks.current))
    found(x)
    assert done == {"bound": 1, "described": 1, "situated": 1}


def test_the_tunables_of_made_configs_are_found_in_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    whole = entry_file.decode_entries
    for module in (entry_file, store):
        monkeypatch.setattr(module, "decode_entries", lambda data, path: decoded.append(len(data)) or whole(data, path))

    def make() -> quarantune.Autotuned:
        @quarantune.autotune(lambda x: [{"n": 1}, {"n": 2}], warmup=0, rep=1, ref_fn=None, name="made")
        @functools.partial(jax.jit, static_argnames=["n"])
        def add(x: Any, n: int = 1) -> Any:
            return x + n

        return add

    first = make()
    for size in range(1, 6):
        first.tune(np.zeros(size, np.float32))
    file = blocks.current().cache_dir / "made.json"
    again = make()
    decoded.clear()
    assert again._tuner.bind((np.zeros(3, np.float32),), {}).function.tunables == {"n"}
    assert len(decoded) == 1
    assert decoded[0] < file.stat().st_size / 3
    file.write_text(json.dumps(json.loads(file.read_text()), indent=1))
    edited = make()
    assert edited._tuner.bind((np.zeros(3, np.float32),), {}).function.tunables == {"n"}


@pytest.mark.slow
def test_a_cached_call_imports_nothing_for_tuning(
    miss_and_hit: tuple[FirstCall, FirstCall], program: Path, tmp_path: Path
) -> None:
    miss, hit = miss_and_hit
    assert "scheduler.loop" in miss.imported, "the first call tunes"
    ours = hit.imported
    optional = {"buckets", "cli", "doctor", "engine", "measure", "rules", "scheduler", "search", "worker"}
    assert {name for name in ours if name.partition(".")[0] in optional} == set()
    assert not {name for name in ours if name.startswith("tuning.")}
    rungs = ("assigned", "by_rule", "nearest", "ranks", "recording", "why_missed")
    assert not ours & {f"answers.{name}" for name in rungs}
    assert not ours & {f"api.{name}" for name in ("compile_check", "contextual", "fit", "tune_many", "tuning_cache")}
    assert not [name for name in ours if name.startswith(("sandbox.", "results.", "sweep", "transport.pickling"))]
    assert len(ours) <= 63
    recording = {"answers.recording", "cache.journal"}
    assert not recording & ours
    cached = {"QUARANTUNE_CACHE_DIR": str(program.with_name("cache"))}
    record = {"QUARANTUNE_RECORD": str(tmp_path / "recorded")}
    assert not recording & FirstCall(program, **cached, **record).imported, "the call has a result"
    assert not (tmp_path / "recorded").exists()
    unsaved = {"QUARANTUNE_ON_MISS": "default"}
    assert not recording & FirstCall(program, **unsaved).imported, "nothing is recorded"
    assert recording & FirstCall(program, **unsaved, **record).imported


@pytest.mark.slow
def test_a_cached_call_with_made_configs_imports_no_more(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(FIRST_CALL.replace('[{"n": 1}, {"n": 2}]', 'lambda x: [{"n": 1}, {"n": 2}]'))
    miss, hit = (FirstCall(program, QUARANTUNE_CACHE_DIR=str(tmp_path / "cache")) for _ in range(2))
    assert "scheduler.loop" in miss.imported, "the first call tunes"
    assert not hit.imported & {"scheduler.loop", "cache.entries", "cache.journal"}


@pytest.mark.slow
def test_recording_a_new_call_costs_at_most_a_millisecond(tmp_path: Path) -> None:
    described = [keyed(BoundCall(trivial(1).function, (np.zeros(n, np.float32),), {})) for n in range(500)]

    def cpu_ms(calls: list[Any]) -> float:
        started = time.thread_time()
        for call in calls:
            recorded.note(call, None, tmp_path / "recorded")  # type: ignore[arg-type]
        return 1000 * (time.thread_time() - started) / len(calls)

    assert min(cpu_ms(described[first::5]) for first in range(5)) < 1
    assert len(recorded.read(tmp_path / "recorded")) == 500


# --- sweeps -------------------------------------------------------------------------------------------------


def trivial(count: int) -> quarantune.Autotuned:
    @quarantune.autotune([{"n": n} for n in range(count)], warmup=0, rep=3, ref_fn=None)
    @functools.partial(jax.jit, static_argnames=["n"])
    def add(x: Any, n: int = 0) -> Any:
        return x + n

    return add


def share_of_a_core() -> float:
    """Returns the share of a core that a busy machine gives to a process that wants all of it."""
    started, cpu_started = time.perf_counter(), time.process_time()
    while time.perf_counter() - started < 0.2:
        pass
    return min(1.0, (time.process_time() - cpu_started) / (time.perf_counter() - started))


@pytest.mark.slow
def test_the_sandbox_adds_at_most_60_ms_per_config() -> None:
    x = np.zeros(4, np.float32)
    few, many = trivial(4), trivial(24)
    numbers = itertools.count(100)  # JAX has compiled earlier numbers
    few.tune(x)  # starts the template, with a worker's imports

    def in_process_s(n: int) -> float:
        started = time.perf_counter()
        compiled = many.__wrapped__.trace(x, n=n).lower().compile()
        for _ in range(4):
            jax.block_until_ready(compiled(x))
        return time.perf_counter() - started

    def overhead_ms() -> float:
        """Compares two sizes, so that fixed costs of a sweep, such as its final, drop out."""
        share = share_of_a_core()
        in_process = statistics.median(in_process_s(next(numbers)) for _ in range(20))
        started = time.perf_counter()
        few.tune(x)
        between = time.perf_counter()
        many.tune(x)
        ended = time.perf_counter()
        sandboxed = ((ended - between) - (between - started)) / 20
        return 1e3 * (sandboxed - in_process) * min(share, share_of_a_core())

    assert best_of(overhead_ms, limit=60) <= 60


@pytest.mark.long
@pytest.mark.slow
def test_a_config_costs_the_callers_process_little_cpu() -> None:
    # A new process, because garbage collection takes longer in a process that has run two thousand tests.
    measure = """
        import functools, sys, time
        import jax, numpy as np, quarantune

        def trivial(count):
            configs = [{"n": n} for n in range(count)]

            @quarantune.autotune(configs, warmup=0, rep=3, ref_fn=None, name=f"trivial-{count}")
            @functools.partial(jax.jit, static_argnames=["n"])
            def add(x, n=0):
                return x + n
            return add

        x = np.zeros(4, np.float32)
        trivial(2).tune(x)
        fn = trivial(30)
        for _ in range(int(sys.argv[1])):
            cpu_started, started = time.process_time(), time.perf_counter()
            fn.tune(x)
            cpu_ms = 1e3 * (time.process_time() - cpu_started) / 30
            took_ms = 1e3 * (time.perf_counter() - started) / 30
            # On a quiet machine a config takes 70 ms at most. On a busy machine it takes longer, and watching the
            # workers' memory and waking up with cold caches cost time that is not work for the config.
            print(cpu_ms := cpu_ms / max(1.0, took_ms / 70))
            if cpu_ms < float(sys.argv[2]):
                break
    """
    # The aim is 2 ms; a quiet machine takes 1.6. The test allows twice that, because machines that run tests are slow
    # and shared: one took 2.3 an hour later.
    limit_ms = 2 * 2
    assert min(map(float, run_code(measure, ATTEMPTS, limit_ms).split())) < limit_ms


# --- importing ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_importing_quarantune_costs_at_most_1_2_times_jax() -> None:
    script = "import time; t = time.process_time(); {}; print(time.process_time() - t)"
    imports = ("from quarantune import autotune", "import jax")

    def ratio() -> float:
        times = [[float(run_code(script.format(statement))) for statement in imports] for _ in range(2)]
        ours, theirs = zip(*times, strict=True)
        return min(ours) / min(theirs)  # a busy machine makes times longer, never shorter

    assert best_of(ratio, limit=1.2) <= 1.2


def test_jax_is_imported_with_the_first_name_that_needs_it() -> None:
    found = run_code(
        """
        import sys
        import quarantune
        quarantune.TuningCache, quarantune.settings, quarantune.Outcome
        print("jax" in sys.modules, "numpy" in sys.modules)
        quarantune.spaces.generate_configs, quarantune.metrics.KernelMetrics, quarantune.cache.Store
        quarantune.autotune
        print("jax" in sys.modules)
        """
    )
    assert found.split() == ["False", "False", "True"]


def test_every_public_name_is_found_and_others_are_not() -> None:
    assert [name for name in quarantune.__all__ if getattr(quarantune, name, None) is None] == []
    assert sorted({*quarantune._MODULES, "__version__"}) == sorted(quarantune.__all__)
    assert set(quarantune.__all__) <= set(dir(quarantune))
    with pytest.raises(AttributeError, match="has no attribute 'autotuned'"):
        quarantune.autotuned  # noqa: B018
