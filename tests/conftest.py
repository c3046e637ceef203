"""Common setup: each test has a new cache and no progress output, and GPU tests run only with a GPU."""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import os
import re
import signal
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from helpers import SweepWatch
    from tuned_functions import Notes

    from quarantune.scheduler.reference import Reference
    from quarantune.sweep.request import SweepRequest, Swept
    from quarantune.values.configs import Config

pytest.register_assert_rewrite("agreeing", "cached_functions", "helpers", "scripted")
# Otherwise every process that a test starts compiles every module again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# A shell that starts the tests in the background lets them ignore Ctrl-C, which some of them press.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Lets each test process, and the processes it starts, measure without waiting for other test processes.
os.environ["_QUARANTUNE_LEASE_NAMESPACE"] = f"tests-{os.getpid()}-"


def pytest_configure(config: pytest.Config) -> None:
    """Makes test processes import all files in different orders, so that each finds files that others have compiled."""
    if not hasattr(config, "workerinput") or config.args != config.getini("testpaths"):
        return
    files = sorted(Path(__file__).parent.rglob("test_*.py"))
    sys.path[:0] = sorted({str(file.parent) for file in files})
    names = [file.stem for file in files]
    first = len(names) * int(config.workerinput["workerid"].removeprefix("gw")) // config.workerinput["workercount"]
    gc.disable()  # until `pytest_collection_finish`: hardly anything of all this is garbage
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in names[first:] + names[:first]:
            # pytest imports a file that fails again, and reports the reason.
            with contextlib.suppress(Exception, pytest.skip.Exception):
                importlib.import_module(name)


def pytest_collection_finish() -> None:
    """Keeps the garbage collector from looking through all modules and tests again and again."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Gives the test, and every process it starts, a new cache."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("QUARANTUNE_CACHE_DIR", str(directory))
    monkeypatch.setenv("QUARANTUNE_PROGRESS", "0")
    return directory


@pytest.fixture(autouse=True)
def results_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Checks every result that the test gets or shows: all that is told of it has to agree with its trials."""
    if "quarantune.results.result" not in sys.modules:
        yield
        return
    import agreeing

    from quarantune.results.report_data import PlainResult
    from quarantune.results.result import TuningResult

    made: dict[int, tuple[PlainResult, bool]] = {}
    of, table = PlainResult.of.__func__, TuningResult.table  # type: ignore[attr-defined]

    def noted(result: PlainResult, *, is_real: bool) -> Any:
        if len(made) < agreeing.MOST_RESULTS and len(result.trials) <= agreeing.MOST_TRIALS:
            made[id(result)] = agreeing.without_objects(result), is_real
        return result

    def noted_of(cls: type[PlainResult], *args: Any, **fields: Any) -> PlainResult:
        result = of(cls, *args, **fields)
        is_part = not agreeing.has_one_trial_per_config(result)  # a contextual result is made of it
        return result if is_part else noted(result, is_real=True)

    monkeypatch.setattr(PlainResult, "of", classmethod(noted_of))
    monkeypatch.setattr(TuningResult, "table", lambda self, **options: table(noted(self, is_real=False), **options))
    if (contextual := sys.modules.get("quarantune.tuning.contextual_job")) is not None:
        kind = contextual.ContextualResult
        monkeypatch.setattr(contextual, "ContextualResult", lambda **fields: noted(kind(**fields), is_real=True))
    yield
    for result, is_real in list(made.values()):  # a check may make further results
        agreeing.check_any(result, tmp_path, is_real=is_real)


@pytest.fixture(autouse=True)
def as_a_new_process() -> None:
    """Forgets the warnings and the recorded calls of earlier tests, which a process keeps until it ends."""
    if (frames := sys.modules.get("quarantune.host.frames")) is not None:
        frames.told.clear()
    if (recording := sys.modules.get("quarantune.answers.recording")) is not None:
        recording._writers.clear()


@pytest.fixture
def two_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets at most two configs compile at a time, for tests whose results no timing affects."""
    monkeypatch.setenv("QUARANTUNE_NUM_WORKERS", "2")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "long" not in str(config.option.markexpr):  # a tier's command takes long tests only if it names them
        long = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]
    if _has_cuda():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device and JAX's CUDA plugin"))


def _has_cuda() -> bool:
    """Asks the driver and the installed packages, because asking JAX would start a backend in this process."""
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    return Path("/proc/driver/nvidia/version").exists() and any("cuda" in plugin.name for plugin in plugins)


@pytest.fixture
def sweep_watch(monkeypatch: pytest.MonkeyPatch) -> SweepWatch:
    """Watches the sweeps of this process. No other fixture stands between a call and its sweep."""
    from helpers import SweepWatch

    from quarantune.sweep import sweep

    watch, run = SweepWatch(), sweep.run

    def watched(request: SweepRequest, configs: Mapping[int, Config], **rest: Any) -> Swept:
        for listen in watch.on_begin:
            listen(request, configs)
        found = run(request, configs, **rest)
        for listen in watch.on_end:
            listen(found)
        return found

    monkeypatch.setattr(sweep, "run", watched)
    return watch


@pytest.fixture
def sweeps(sweep_watch: SweepWatch) -> list[str]:
    """Notes the function of every sweep that starts."""
    started: list[str] = []
    sweep_watch.on_begin.append(lambda request, configs: started.append(request.problem.name))
    return started


@pytest.fixture
def swept_configs(sweep_watch: SweepWatch) -> list[list[Config]]:
    """Notes the configs of every sweep."""
    started: list[list[Config]] = []
    sweep_watch.on_begin.append(lambda request, configs: started.append(list(configs.values())))
    return started


@pytest.fixture
def swept(sweep_watch: SweepWatch) -> list[list[Any]]:
    """Notes the values of n that every sweep measures, without programs that were measured before."""
    started: list[list[Any]] = []
    running: list[SweepRequest] = []

    def note(request: SweepRequest, configs: Mapping[int, Config]) -> None:
        running.append(request)
        started.append([config["n"] for config in configs.values()])

    def leave_out_recalled(_: Swept) -> None:
        trials = running.pop().ledger.trials.values()
        recalled = [trial.config["n"] for trial in trials if trial.recalled_from is not None]
        started[-1] = [n for n in started[-1] if n not in recalled]
        if not started[-1]:
            started.pop()

    sweep_watch.on_begin.append(note)
    sweep_watch.on_end.append(leave_out_recalled)
    return started


@pytest.fixture
def findings(sweep_watch: SweepWatch) -> list[Swept]:
    """Notes the findings of every sweep."""
    done: list[Swept] = []
    sweep_watch.on_end.append(done.append)
    return done


@pytest.fixture
def notes(tmp_path: Path) -> Notes:
    """A file for notes of workers."""
    from tuned_functions import Notes

    return Notes(tmp_path / "notes")


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A different name for each test's function: a message that names the function appears once per process."""
    return re.sub(r"\W+", "-", request.node.name).lower()


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails the test if it starts a process or asks for the template, which another test may have started."""
    import jax
    import psutil

    from quarantune.sandbox import template

    jax.devices()  # otherwise a process looks for the devices, unless an earlier test did

    def children() -> set[int]:
        return {child.pid for child in psutil.Process().children(recursive=True)}

    before = children()
    monkeypatch.setattr(template, "shared", lambda: pytest.fail("the test starts a process"))
    yield
    assert children() <= before


@pytest.fixture
def cpu_only() -> Iterator[None]:
    """Makes JAX choose the CPU, so that no process looks for other devices."""
    import jax

    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", "cpu")
    yield
    jax.config.update("jax_platforms", before)


@pytest.fixture(scope="module")
def run_on_devices() -> Iterator[Callable[[Path, str, int], None]]:
    """Runs programs with warnings as errors. Programs for equal numbers of CPU devices share a process."""
    from helpers import SUPPORT, child_environ
    from shared_python import SharedPython

    processes: dict[int, SharedPython] = {}

    def run(directory: Path, program: str, devices: int) -> None:
        script = directory / "program.py"
        script.write_text(textwrap.dedent(program))
        environ = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
        if devices not in processes:
            processes[devices] = SharedPython("-W", "error", environ=child_environ(SUPPORT, **environ))
        done = processes[devices].run(script, **environ)
        assert done.returncode == 0, done.stdout + done.stderr

    yield run
    for process in processes.values():
        process.close()


@pytest.fixture
def compiles() -> Iterator[list[str]]:
    """Notes everything that JAX compiles in this process."""
    import jax

    noted: list[str] = []

    def listen(event: str, seconds: float, **_: object) -> None:
        if "compile" in event:
            noted.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.jit(lambda x: x * 3.25)(2.0)
        assert noted, "the listener hears no compiles"
        noted.clear()
        yield noted
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture
def worker_memory(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """The memory that each scripted worker holds, by its number, which is also its process id."""
    from quarantune.host import machine

    held: dict[int, int] = {}
    monkeypatch.setattr(machine, "resident_bytes", lambda pid: (held.get(pid, 0), 0))
    monkeypatch.setattr(machine, "shared_bytes", lambda family, *, since, foreign, thorough: 0)
    monkeypatch.setattr(machine, "proportional_bytes", lambda family: None)
    monkeypatch.setattr(machine, "descendants", lambda pid: [])
    monkeypatch.setattr(machine, "oom_kills", lambda: 0)
    return held


@pytest.fixture
def reference() -> Iterator[Reference]:
    """The outputs that a scheduler compares others with; config 5 is the defaults."""
    from quarantune.scheduler.reference import Reference

    made = Reference(compares=True, default=5)
    yield made
    made.close()
