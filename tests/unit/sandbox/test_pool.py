"""Real workers and templates: their environment, their end, and recovery after crashes, hangs and lost templates."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import json
import mmap
import os
import pickle
import secrets
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import psutil
import pytest
from aftermath import is_of_multiprocessing
from helpers import SOURCE, deadline_s, python

from quarantune.host import machine
from quarantune.host.process import SANDBOX_MARK, in_sandbox
from quarantune.sandbox import spool, template
from quarantune.sandbox.messages import Compile, Measure
from quarantune.sandbox.pool import LoadError, Sandbox
from quarantune.sandbox.template_messages import Ended, describe_status
from quarantune.sandbox.workforce import Event
from quarantune.sweep import routes
from quarantune.transport import payload
from quarantune.values import codec
from quarantune.values.errors import SandboxError
from quarantune.values.options import Options
from quarantune.values.trial import CompileTarget
from quarantune.worker.arguments import BenchOptions

OPTIONS = BenchOptions.of("cpu", Options(warmup=0, rep=1))
PATIENCE_S = 60.0
"""Longest wait, in seconds, for steps that take milliseconds on a quiet machine."""

WORKLOAD = """
import ctypes, fcntl, json, mmap, os, signal, sys, time
from pathlib import Path

def tell(**facts):
    print("facts:" + json.dumps(facts), flush=True)

def act(x=None, do="nothing", path=""):
    if do != "nothing":
        globals()[do](x, path)
    return 0.0

def say_who_i_am(x, path):
    tell(pid=os.getpid(), parent=os.getppid(), session=os.getsid(0), group=os.getpgid(0), cwd=os.getcwd(),
         path_entry="path", mark="QUARANTUNE_SANDBOX" in os.environ, extra=os.environ.get("EXTRA"),
         preallocate=os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE"), stdin=os.read(0, 10).decode(),
         oom=Path("/proc/self/oom_score_adj").read_text().strip(), main="__main__" in sys.modules,
         fds=[target for link in Path("/proc/self/fd").iterdir() if link.exists()
              and not (target := os.readlink(link)).endswith("/schedstat")])

def say_what_signals_do(x, path):
    ignored = [number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN]
    tell(blocked=list(signal.pthread_sigmask(signal.SIG_BLOCK, ())), ignored=ignored)

def fail(x, path):
    raise ArithmeticError("no good")

def segfault(x, path):
    ctypes.memset(0, 1, 1)

def hang(x, path):
    Path(path).touch()
    while True:
        ctypes.PyDLL(None).pause()

def vanish(x, path):
    os._exit(0)

def flood(x, path):
    for _ in range(64):
        os.write(1, b"drivel " * 10_000)
    print("the end", flush=True)
    Path(path).touch()
    hang(x, path)

def stop_parent(x, path):
    os.kill(os.getppid(), signal.SIGSTOP)

def orphan(x, path, ending=lambda: None):
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        while not Path(path).exists():
            time.sleep(0.001)
        return ending()
    os.setsid()
    if os.fork():
        os._exit(0)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    Path(path + ".new").write_text(str(os.getpid()))
    os.rename(path + ".new", path)
    while True:
        time.sleep(60)

def orphan_and_vanish(x, path):
    orphan(x, path, lambda: os._exit(0))

def orphan_and_segfault(x, path):
    orphan(x, path, lambda: ctypes.memset(0, 1, 1))

def orphan_and_fail(x, path):
    orphan(x, path, lambda: 1 / 0)

def orphan_and_hang(x, path):
    def ending():
        while True:
            ctypes.PyDLL(None).pause()
    orphan(x, path, ending)

def write_to_the_inputs(x, path):
    attempts = {}
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            name = os.readlink(f"/proc/self/fd/{fd}").split(":")[-1].split(" ")[0]
        except OSError:
            continue
        if name not in ("quarantune-payload", "quarantune-arrays"):
            continue
        ways = {
            "write": lambda: os.pwrite(fd, b"evil" * 100, 0),
            "truncate": lambda: os.ftruncate(fd, 1),
            "map": lambda: mmap.mmap(fd, 16, prot=mmap.PROT_READ | mmap.PROT_WRITE),
            "reopen and write": lambda: os.pwrite(os.open(f"/proc/self/fd/{fd}", os.O_RDWR), b"evil" * 100, 0),
            "reopen and truncate": lambda: os.ftruncate(os.open(f"/proc/self/fd/{fd}", os.O_RDWR), 1),
            "reopen and map": lambda: mmap.mmap(os.open(f"/proc/self/fd/{fd}", os.O_RDWR), 16),
            "punch a hole": lambda: open(f"/proc/self/fd/{fd}", "r+b", 0).truncate(0),
        }
        for way, attempt in ways.items():
            try:
                attempt()
                attempts[f"{name}: {way}"] = "done"
            except OSError as error:
                attempts[f"{name}: {way}"] = type(error).__name__
    x[:] = -1.0
    tell(attempts=attempts)

def sum_up(x, path):
    tell(total=float(x.sum()))
"""

HOSTILE = """
import ctypes, os, threading, time
if "QUARANTUNE_SANDBOX" in os.environ:
{hostility}

def act(x=None, do="nothing", path=""):
    print("facts:" + '{{"loaded": true}}', flush=True)
    return 0.0
"""


def processes_below_us() -> list[psutil.Process]:
    children = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE and not is_of_multiprocessing(child):
                children.append(child)
    return children


def is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        threading.Event().wait(0.005)


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Asserts that a test leaves no process, descriptor, thread or file behind."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr(tempfile, "tempdir", None)
    template.shared()
    fds = len(os.listdir("/proc/self/fd"))
    shared_memory = set(os.listdir("/dev/shm"))
    threads = threading.active_count()
    yield
    wait_for(lambda: len(processes_below_us()) <= 1, "only the template remains")
    assert len(os.listdir("/proc/self/fd")) == fds
    # Directories belong to compile checks for a TPU, which another process may be running.
    left = [name for name in os.listdir("/dev/shm") if "quarantune" in name and Path("/dev/shm", name).is_file()]
    assert set(left) <= shared_memory
    assert list(scratch.iterdir()) == []
    assert threading.active_count() == threads


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Writes a module where workers can import it, and imports it here."""
    names: list[str] = []

    def load(source: str) -> ModuleType:
        name = f"module_{len(names)}_of_{tmp_path.name.replace('-', '_')}"
        names.append(name)
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        return importlib.import_module(name)

    monkeypatch.syspath_prepend(str(tmp_path))
    yield load
    for name in names:
        sys.modules.pop(name, None)


@contextlib.contextmanager
def sandbox_for(
    fn: Callable[..., Any],
    *args: Any,
    method: str = "fork",
    load_timeout_s: float = PATIENCE_S,
    warm_up: codec.JsonObject | None = None,
) -> Iterator[Sandbox]:
    """Opens a sandbox for a call, with its payload and arrays sealed as in a sweep."""
    packed = payload.pack_call(fn, args, {})
    with contextlib.ExitStack() as stack:
        fds = [-1, -1]
        for position, (label, size) in enumerate((("payload", len(packed.blob)), ("arrays", packed.call.spool_bytes))):
            if size:
                fd = spool.create(label, size_bytes=size)
                stack.callback(os.close, fd)
                if position == 0:
                    spool.write_parts(fd, [packed.blob, pickle.dumps(OPTIONS)])
                else:
                    payload.write_arrays(packed, fd)
                fds[position] = spool.protect(fd)
                stack.callback(os.close, fds[position])
        sandbox = stack.enter_context(Sandbox(payload_fd=fds[0], arrays_fd=fds[1], method=method, warm_up=warm_up))
        sandbox.open(load_timeout_s=load_timeout_s)
        yield sandbox


@dataclasses.dataclass
class History:
    """The messages and the end of one worker."""

    number: int
    messages: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    damage: str = ""
    ended: bool = False
    status: int | None = None

    @property
    def types(self) -> list[str]:
        return [message["message"] for message in self.messages if message["message"] != "PhaseEntered"]

    def add(self, event: Event) -> None:
        assert not self.ended, "no event of a worker follows its end"
        if isinstance(event, Ended):
            self.ended, self.status = True, event.status
        elif isinstance(event.message, dict):
            self.messages.append(event.message)
        else:
            self.damage = str(event.message)


def listen(sandbox: Sandbox, histories: dict[int, History], until: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not until():
        assert time.monotonic() < deadline, f"received only {histories}"
        for event in sandbox.poll(0.05):
            histories[event.number].add(event)


def start(sandbox: Sandbox, *, environ: dict[str, str] | None = None, last: bool = False, **config: Any) -> History:
    task = Compile(trial=0, config=config, last=last)
    return History(sandbox.start(codec.encode(task), environ=environ))


def measure(sandbox: Sandbox, worker: History) -> None:
    fd = spool.create("executable")
    sandbox.send(worker.number, codec.encode(Measure(trial=0, config={}, load=False, last=True)), [fd])
    os.close(fd)


def run(sandbox: Sandbox, *, environ: dict[str, str] | None = None, **config: Any) -> History:
    """Runs one config in a new worker and waits for the worker's end."""
    worker = start(sandbox, environ=environ, **config)
    histories = {worker.number: worker}
    listen(sandbox, histories, lambda: worker.ended or worker.types)
    if worker.types == ["Compiled"]:
        measure(sandbox, worker)
    listen(sandbox, histories, lambda: worker.ended)
    return worker


def facts_of(sandbox: Sandbox, worker: History) -> dict[str, Any]:
    """Returns the facts that the config printed last."""
    lines = [line for line in sandbox.log(worker.number).splitlines() if line.startswith("facts:")]
    return dict(json.loads(lines[-1].removeprefix("facts:")))


def forks_loaded(sandbox: Sandbox) -> bool:
    """Returns whether workers are forks of the sweep's template, which has loaded the payload."""
    return sandbox.template_pid not in (None, template.shared().pid)


def sweep_template() -> psutil.Process:
    def running() -> list[psutil.Process]:
        children = psutil.Process(template.shared().pid).children()
        return [child for child in children if is_running(child.pid)]

    wait_for(lambda: len(running()) == 1, "an earlier sweep's template is gone")
    return running()[0]


METHODS = pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])


# --- workers ------------------------------------------------------------------------------------------------


@METHODS
def test_a_worker_reports_each_phase_and_exits(method: str, load: Callable[..., ModuleType]) -> None:
    with sandbox_for(load(WORKLOAD).act, method=method) as sandbox:
        assert forks_loaded(sandbox) == (method == "fork")
        worker = run(sandbox, do="nothing")
        said = [(message["message"], message["phase"], message["trial"]) for message in worker.messages]
        loads_it_itself = [("PhaseEntered", "load", 0)] if method == "spawn" else []
        assert said == [
            *loads_it_itself,
            ("PhaseEntered", "compile", 0),
            ("Compiled", "compile", 0),
            ("PhaseEntered", "check", 0),
            ("PhaseEntered", "measure", 0),
            ("Measured", "measure", 0),
        ]
        assert worker.status == 0


@METHODS
def test_a_worker_has_its_own_session_environment_and_files(
    method: str, load: Callable[..., ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with sandbox_for(load(WORKLOAD).act, method=method) as sandbox:
        worker = run(sandbox, do="say_who_i_am", environ={"EXTRA": "for this worker only"})
        facts = facts_of(sandbox, worker)
    assert facts["session"] == facts["group"] == facts["pid"]
    assert facts["mark"] is True
    assert facts["extra"] == "for this worker only"
    assert facts["preallocate"] == "false"
    assert facts["stdin"] == ""
    assert facts["oom"] == "1000"
    assert facts["cwd"] == str(tmp_path)
    assert len(facts["fds"]) < 15, "the list leaves out descriptors for threads' waiting times"
    assert "EXTRA" not in os.environ
    assert SANDBOX_MARK not in os.environ


@pytest.mark.parametrize(("do", "status"), [("fail", 0), ("segfault", -int(signal.SIGSEGV)), ("vanish", 0)])
def test_a_failing_config_does_not_affect_the_next(do: str, status: int, load: Callable[..., ModuleType]) -> None:
    with sandbox_for(load(WORKLOAD).act) as sandbox:
        worker = run(sandbox, do=do)
        assert worker.status == status
        if do == "fail":
            assert worker.messages[-1]["error"] == "ArithmeticError"
            assert worker.messages[-1]["text"] == "no good"
            assert "no good" in worker.messages[-1]["traceback"]
        else:
            assert worker.types == ["Compiled"]
        if do == "segfault":
            assert "Segmentation fault" in sandbox.log(worker.number)
            assert "in segfault" in sandbox.log(worker.number)
        assert run(sandbox, do="nothing").types == ["Compiled", "Measured"]


@METHODS
def test_workers_do_not_inherit_blocked_or_ignored_signals(method: str, load: Callable[..., ModuleType]) -> None:
    template.close_shared()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
    hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        template.shared()
    finally:
        signal.signal(signal.SIGHUP, hangup)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    with sandbox_for(load(WORKLOAD).act, method=method) as sandbox:
        worker = run(sandbox, do="say_what_signals_do")  # only SIGCHLD reports its exit
        python_ignores = [signal.SIGPIPE, signal.SIGXFSZ]
        assert facts_of(sandbox, worker) == {"blocked": [], "ignored": python_ignores}


def test_a_module_that_blocks_sigchld_hides_no_exit(load: Callable[..., ModuleType]) -> None:
    blocks = "    import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})"
    with sandbox_for(load(HOSTILE.format(hostility=blocks)).act) as sandbox:
        assert forks_loaded(sandbox)
        assert run(sandbox).types == ["Compiled", "Measured"]


def test_a_long_last_message_is_received_in_full(load: Callable[..., ModuleType]) -> None:
    module = load(
        """
        import functools, sys
        import jax

        @functools.partial(jax.jit, static_argnames=["count"])
        def act(x, count=0):
            sys.modules.update({f"a_module_that_was_never_there_{number}": sys for number in range(count)})
            return x + 1
        """
    )
    with sandbox_for(module.act, np.ones(3, np.float32)) as sandbox:
        worker = start(sandbox, count=20_000, last=True)
        listen(sandbox, {worker.number: worker}, lambda: worker.ended)
        assert "Compiled" in worker.types
        assert len(worker.messages[-1]["modules"]) >= 20_000
        assert len(json.dumps(worker.messages[-1])) > 4 << 16


def test_templates_of_later_sweeps_have_the_decorator_already(load: Callable[..., ModuleType], tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    act = load(
        f"""
        import os, sys
        if "QUARANTUNE_SANDBOX" in os.environ:
            with open({str(seen)!r}, "a") as file:
                print("quarantune.api.autotune" in sys.modules, file=file)

        def act(x=None):
            return 0.0
        """
    ).act
    for _ in range(2):
        with sandbox_for(act):
            pass
    assert seen.read_text().split()[-1] == "True"


def test_the_process_id_of_a_fast_template_is_known(load: Callable[..., ModuleType]) -> None:
    act = load(WORKLOAD).act
    for _ in range(20):
        with sandbox_for(act) as sandbox:
            assert sandbox.template_pid == sweep_template().pid


@METHODS
def test_leaving_the_sandbox_kills_hanging_workers(
    method: str, load: Callable[..., ModuleType], tmp_path: Path
) -> None:
    with sandbox_for(load(WORKLOAD).act, method=method) as sandbox:
        workers = [start(sandbox, do="hang", path=str(tmp_path / f"up-{number}")) for number in range(2)]
        histories = {worker.number: worker for worker in workers}
        listen(sandbox, histories, lambda: all(worker.types for worker in workers))
        for worker in workers:
            measure(sandbox, worker)
        wait_for(lambda: all((tmp_path / f"up-{number}").exists() for number in range(2)), "the workers hang")
        pids = [sandbox.pid(worker.number) for worker in workers]
        assert all(pid is not None and is_running(pid) for pid in pids)
        leaves = time.monotonic()
    assert time.monotonic() - leaves < PATIENCE_S, "leaving does not wait for the workers to end"
    assert not any(pid is not None and is_running(pid) for pid in pids)


def test_sweeps_of_several_threads_are_independent(load: Callable[..., ModuleType]) -> None:
    act = load(WORKLOAD).act
    totals: dict[int, list[float]] = {}

    def sweep(number: int) -> None:
        with sandbox_for(act, np.full(10, float(number))) as sandbox:
            totals[number] = [facts_of(sandbox, run(sandbox, do="sum_up"))["total"] for _ in range(3)]

    threads = [threading.Thread(target=sweep, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert totals == {number: [10.0 * number] * 3 for number in range(4)}


def test_a_template_survives_a_worker_that_cannot_start(load: Callable[..., ModuleType]) -> None:
    with sandbox_for(load(WORKLOAD).act, method="spawn") as sandbox:
        before = template.shared().pid
        worker = start(sandbox, do="nothing", environ={"TOO_LARGE_FOR_EXEC": "x" * 200_000})
        listen(sandbox, {worker.number: worker}, lambda: worker.ended)
        assert worker.status is None
        assert run(sandbox, do="nothing").types == ["Compiled", "Measured"]
        assert template.shared().pid == before


# --- loading the payload ------------------------------------------------------------------------------------

SCRIBBLE = """for fd in range(3, 64):
        if "socket:" in os.path.realpath(f"/proc/self/fd/{fd}"):
            os.write(fd, bytes(64))
    time.sleep(600)"""

FORGE = """from quarantune.sandbox import wire
    for fd in range(3, 64):
        if "socket:" in os.path.realpath(f"/proc/self/fd/{fd}"):
            os.write(fd, wire.encode({"message": "LoadFailed", "text": "", "error": "", "outcome": "ok"}))
    time.sleep(600)"""

LOAD_TROUBLES = {
    "raise ValueError('not here')": ("error", "not here"),
    "raise SystemExit(3)": ("error", "3"),
    "ctypes.memset(0, 1, 1)": ("crashed", "was killed by SIGSEGV while it loaded"),
    "os.abort()": ("crashed", "was killed by SIGABRT while it loaded"),
    "os._exit(0)": ("crashed", "exited with code 0 while it loaded"),
    "ctypes.PyDLL(None).pause()": ("timeout", "took longer than"),
    SCRIBBLE: ("crashed", "damaged its own connection while it loaded"),
    FORGE: ("crashed", "damaged its own connection while it loaded"),
}


@pytest.mark.parametrize("hostility", LOAD_TROUBLES)
def test_a_failed_load_is_reported_and_the_next_sweep_works(hostility: str, load: Callable[..., ModuleType]) -> None:
    outcome, said = LOAD_TROUBLES[hostility]
    module = load(HOSTILE.format(hostility=f"    print('loading', flush=True)\n    {hostility}"))
    with (
        pytest.raises(LoadError, match=said) as caught,
        sandbox_for(module.act, load_timeout_s=deadline_s(1.0) if outcome == "timeout" else PATIENCE_S),
    ):
        pass
    assert caught.value.outcome.value == outcome
    assert "loading" in caught.value.log
    with sandbox_for(load(WORKLOAD).act) as sandbox:
        assert run(sandbox, do="nothing").types == ["Compiled", "Measured"]


@pytest.mark.parametrize(
    ("victim", "kills", "is_loaded"), [("os.getpid()", 2, True), ("os.getpid()", 9, False), ("os.getppid()", 2, True)]
)
def test_a_load_that_is_killed_twice_is_tried_a_third_time(
    victim: str, kills: int, is_loaded: bool, load: Callable[..., ModuleType], tmp_path: Path
) -> None:
    loads = tmp_path / "loads"
    noting = f"""    with open({str(loads)!r}, "a") as loads:
        loads.write("x")
    if os.path.getsize({str(loads)!r}) <= {kills}:
        os.kill({victim}, 9); time.sleep(600)"""
    act = load(HOSTILE.format(hostility=noting)).act
    refused = pytest.raises(LoadError, match="3 times in a row: does another program kill processes")
    with contextlib.nullcontext() if is_loaded else refused, sandbox_for(act) as sandbox:
        assert run(sandbox, do="nothing").types == ["Compiled", "Measured"]
    assert loads.read_text() == "xxx"


@pytest.mark.parametrize(
    "hostility",
    [
        "    import jax.numpy as jnp\n    TABLE = jnp.arange(4)",
        "    threading.Thread(target=time.sleep, args=[600], daemon=True).start()",
    ],
    ids=["a module-level array", "a module-level thread"],
)
def test_a_module_that_makes_forks_unsafe_is_loaded_by_workers(hostility: str, load: Callable[..., ModuleType]) -> None:
    with sandbox_for(load(HOSTILE.format(hostility=hostility)).act) as sandbox:
        assert not forks_loaded(sandbox)
        for _ in range(2):
            worker = run(sandbox, do="nothing")
            assert worker.types == ["Compiled", "Measured"]
            assert facts_of(sandbox, worker) == {"loaded": True}
        assert sandbox.baseline_bytes > 10 << 20  # the template's memory, including JAX, does not count for workers


SENDS_DESCRIPTORS = """
    import socket
    from quarantune.sandbox import wire
    fds = [int(fd) for fd in os.listdir("/proc/self/fd")]
    links = [fd for fd in fds if "socket:" in os.path.realpath(f"/proc/self/fd/{fd}")]

    def send():
        frame = wire.encode({"message": "Started", "number": 99, "pid": 1, "fds": 1})
        for fd in links:
            with socket.socket(fileno=os.dup(fd)) as link:
                socket.send_fds(link, [frame], [0])

    os.register_at_fork(before=send)
"""


def test_descriptors_that_a_template_sends_are_closed(load: Callable[..., ModuleType]) -> None:
    with sandbox_for(load(HOSTILE.format(hostility=SENDS_DESCRIPTORS)).act) as sandbox:
        assert forks_loaded(sandbox)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            sandbox.forget(run(sandbox, do="nothing").number)
        assert len(os.listdir("/proc/self/fd")) == before


LAZY = """
    import importlib.abc, importlib.util

    class Missing(importlib.abc.Loader):
        def create_module(self, spec):
            return None

        def exec_module(self, module):
            raise ModuleNotFoundError("an optional package is not installed")

    def import_lazily(name):
        spec = importlib.util.spec_from_loader(name, importlib.util.LazyLoader(Missing()))
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])

    import_lazily("imported_at_its_first_use")
"""


def test_preparing_forks_touches_no_lazily_imported_module(load: Callable[..., ModuleType]) -> None:
    with sandbox_for(load(HOSTILE.format(hostility=f"    import sys{LAZY}")).act) as sandbox:
        assert forks_loaded(sandbox)
        assert run(sandbox, do="nothing").types == ["Compiled", "Measured"]


# --- orphans ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "ending"),
    [
        ("fork", "orphan"),
        ("fork", "orphan_and_vanish"),
        ("fork", "orphan_and_segfault"),
        ("fork", "orphan_and_fail"),
        pytest.param("spawn", "orphan", marks=pytest.mark.slow),
    ],
)
def test_grandchildren_in_other_sessions_die_before_the_exit(
    method: str, ending: str, load: Callable[..., ModuleType], tmp_path: Path
) -> None:
    path = tmp_path / "grandchild"
    with sandbox_for(load(WORKLOAD).act, method=method) as sandbox:
        run(sandbox, do=ending, path=str(path))
        assert not psutil.pid_exists(int(path.read_text()))
        assert run(sandbox, do="nothing").types == ["Compiled", "Measured"]


def test_killing_a_worker_kills_its_grandchild(load: Callable[..., ModuleType], tmp_path: Path) -> None:
    path = tmp_path / "grandchild"
    with sandbox_for(load(WORKLOAD).act) as sandbox:
        worker = start(sandbox, do="orphan_and_hang", path=str(path))
        histories = {worker.number: worker}
        listen(sandbox, histories, lambda: worker.types)
        measure(sandbox, worker)
        wait_for(path.exists, "the grandchild runs")
        grandchild = int(path.read_text())
        assert is_running(grandchild)
        sandbox.kill(worker.number)
        listen(sandbox, histories, lambda: worker.ended)
        assert worker.status == -signal.SIGKILL
        assert not psutil.pid_exists(grandchild)


# --- templates that die -------------------------------------------------------------------------------------


def start_hanging(sandbox: Sandbox, tmp_path: Path, count: int = 2) -> dict[int, History]:
    paths = [tmp_path / f"hangs-{number}-{time.monotonic_ns()}" for number in range(count)]
    workers = [start(sandbox, do="hang", path=str(path)) for path in paths]
    histories = {worker.number: worker for worker in workers}
    listen(sandbox, histories, lambda: all(worker.types for worker in workers))
    for worker in workers:
        measure(sandbox, worker)
    wait_for(lambda: all(path.exists() for path in paths), "the workers hang")
    return histories


@pytest.mark.parametrize("victims", ["the sweep's template", "the process's template", "both", "stopped and killed"])
def test_a_sweep_continues_after_its_template_is_killed(
    victims: str, load: Callable[..., ModuleType], tmp_path: Path
) -> None:
    with sandbox_for(load(WORKLOAD).act) as sandbox:
        histories = start_hanging(sandbox, tmp_path)
        pids = [sandbox.pid(number) for number in histories]
        sweeps, process = sweep_template(), psutil.Process(template.shared().pid)
        if victims == "stopped and killed":
            sweeps.suspend()
        if victims != "the process's template":
            sweeps.kill()
        if victims in ("the process's template", "both"):
            process.kill()
        listen(sandbox, histories, lambda: all(worker.ended for worker in histories.values()))
        assert [worker.status for worker in histories.values()] == [None, None]
        wait_for(lambda: not any(pid is not None and is_running(pid) for pid in pids), "its workers died with it")
        for number in histories:
            sandbox.forget(number)
            sandbox.finish(number)  # a scheduler does this if its idle worker died under another scheduler
        worker = run(sandbox, do="nothing")
        if victims == "both" and worker.status is None:  # the dead template took the order unnoticed
            worker = run(sandbox, do="nothing")
        assert worker.types == ["Compiled", "Measured"]
        assert (template.shared().pid == process.pid) == (victims in ("the sweep's template", "stopped and killed"))
        assert not forks_loaded(sandbox)
    with sandbox_for(load(WORKLOAD).act) as sandbox:
        assert forks_loaded(sandbox)
        assert run(sandbox, do="nothing").types == ["Compiled", "Measured"]


def test_a_dying_template_is_not_used_again(load: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    with sandbox_for(load(WORKLOAD).act) as sandbox:
        dying = template.shared().pid
        monkeypatch.setattr(template.Template, "is_alive", property(lambda self: True))
        process = psutil.Process(dying)
        process.suspend()  # suspended, it cannot fork a template for the sweep
        for each in (*process.children(), process):
            each.kill()
        for _ in range(3):
            if (worker := run(sandbox, do="nothing")).status is not None:
                break
        assert worker.types == ["Compiled", "Measured"]
        assert template.shared().pid != dying


def test_a_template_is_asked_to_end_before_the_wait_for_it(load: Callable[..., ModuleType]) -> None:
    with sandbox_for(load(WORKLOAD).act) as sandbox:
        assert run(sandbox, do="nothing").types == ["Compiled", "Measured"]
        running = template.shared()
        template.close_shared()
    assert running._process.returncode == 0, "the wait ended with a kill"
    template.shared()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plugin", "is_spoiled"),
    [
        ("threading.Thread(target=threading.Event().wait, daemon=True).start()", True),
        ("os.environ['EXTRA'] = 'left by a plugin'; raise SystemExit(3)", False),
    ],
)
def test_no_later_template_loads_a_plugin_that_spoils_one(
    plugin: str, is_spoiled: bool, load: Callable[..., ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, loads = tmp_path / "path" / "jax_plugins", tmp_path / "loads"
    folder.mkdir(parents=True)
    note = f"open({str(loads)!r}, 'a').write(f'{{os.getpid()}} ')"
    (folder / "odd.py").write_text(f"import os, threading\n{note}\n{plugin}\n")
    target = CompileTarget(platform="cuda", config_text="", device_kind="none", num_cores=None)
    warmed = []
    template.close_shared()
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(folder.parent))
        patch.setattr(template, "_is_spoiled_by_warmth", False)
        for _ in range(2):
            with sandbox_for(load(WORKLOAD).act, warm_up=codec.encode(target)) as sandbox:
                assert forks_loaded(sandbox)
                assert run(sandbox, do="nothing").types == ["Compiled", "Measured"]
                assert facts_of(sandbox, run(sandbox, do="say_who_i_am"))["extra"] is None
                warmed.append(str(template.shared().pid))
        assert template._is_spoiled_by_warmth is is_spoiled
    (first,) = loads.read_text().split()
    assert warmed[0] == warmed[1]
    assert (first != warmed[0]) is is_spoiled
    template.close_shared()
    template.shared()  # the next tests need a template without the plugin


@pytest.mark.parametrize(("is_installed", "imports"), [(True, 3), pytest.param(False, 4, marks=pytest.mark.slow)])
def test_later_sweeps_do_not_import_an_installed_package_again(
    is_installed: bool, imports: int, load: Callable[..., ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, notes = f"library_{secrets.token_hex(4)}", tmp_path / "notes"
    folder = tmp_path / "site"
    (folder / "some-1.0.dist-info").mkdir(parents=True)
    (folder / "some-1.0.dist-info" / "RECORD").write_text(f"{library if is_installed else 'another'}.py,,\n")
    (folder / f"{library}.py").write_text(
        f"import os\nos.environ['EXTRA'] = 'theirs'\n"
        f"with open({str(notes)!r}, 'a') as notes:\n    notes.write(f'{{os.getpid()}} ')\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    act = load(f"import {library}\n{WORKLOAD}").act
    monkeypatch.delenv("EXTRA")  # usually only workers import the package
    template.close_shared()
    for _ in range(3):
        with sandbox_for(act) as sandbox:
            assert forks_loaded(sandbox)
            facts = facts_of(sandbox, run(sandbox, do="say_who_i_am"))
    assert facts["extra"] == ("theirs" if is_installed else None), "workers do not import it after the template"
    shared_pid = str(template.shared().pid)
    pids = notes.read_text().split()
    assert len(set(pids)) == len(pids) == imports, (
        "this process, the first sweep's template, and the shared template or two more"
    )
    assert (shared_pid in pids) is is_installed
    template.close_shared()
    template.shared()  # the next tests need a template without the package


def test_templates_that_keep_dying_end_the_sweep_with_an_error(load: Callable[..., ModuleType]) -> None:
    def is_noticed(sandbox: Sandbox, dead: int) -> bool:
        sandbox.poll(0.01)
        return template.shared().pid != dead

    def kill_and_poll(sandbox: Sandbox) -> None:
        for _ in range(10):
            dead = template.shared().pid
            psutil.Process(dead).kill()
            wait_for(functools.partial(is_noticed, sandbox, dead), "the death is noticed")

    with sandbox_for(load(WORKLOAD).act) as sandbox, pytest.raises(SandboxError, match="died 4 times"):
        kill_and_poll(sandbox)


def test_a_config_that_stops_its_template_delays_nothing(load: Callable[..., ModuleType]) -> None:
    with sandbox_for(load(WORKLOAD).act) as sandbox:
        worker = start(sandbox, do="stop_parent")
        histories = {worker.number: worker}
        listen(sandbox, histories, lambda: worker.types)
        measure(sandbox, worker)
        listen(sandbox, histories, lambda: "Measured" in worker.types)
        sandbox.kill(worker.number)
        listen(sandbox, histories, lambda: worker.ended)
        assert run(sandbox, do="nothing").types == ["Compiled", "Measured"]


def test_a_stopped_template_is_woken_and_starts_workers(load: Callable[..., ModuleType]) -> None:
    act = load(WORKLOAD).act
    with sandbox_for(act) as sandbox:
        sweep_template().suspend()
        assert run(sandbox, do="nothing").types == ["Compiled", "Measured"]
        assert forks_loaded(sandbox), "the sweep's template keeps its payload"
        psutil.Process(template.shared().pid).suspend()
    with sandbox_for(act) as sandbox:
        assert run(sandbox, do="nothing").types == ["Compiled", "Measured"]


@pytest.mark.parametrize("seems", ["stopped", "silent"])
def test_a_template_that_cannot_be_woken_is_replaced(
    seems: str, load: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with sandbox_for(load(WORKLOAD).act) as sandbox:
        with monkeypatch.context() as patch:
            patch.setattr(template, "wake", lambda pids: None)
            patch.setattr(template, "SILENT_CHECKS", 3)
            patch.setattr(template, "STOPPED_CHECKS", 3)
            if seems == "silent":  # a sound template is never silent, so that it is also stopped
                patch.setattr(machine, "activity", lambda pid: ("S", 0))
            sweep_template().suspend()
            assert run(sandbox, do="nothing").status is None
        assert "does not answer" in caplog.text if seems == "silent" else "stays stopped" in caplog.text
        assert run(sandbox, do="nothing").types == ["Compiled", "Measured"]
        assert not forks_loaded(sandbox)


# --- a forked owner -----------------------------------------------------------------------------------------

FORKING_OWNER = """
import dataclasses, os, pickle, signal, sys, time
from pathlib import Path
from quarantune.transport import payload
from quarantune.worker.arguments import BenchOptions
from quarantune.values.options import Options
from quarantune.sandbox.messages import Compile
from quarantune.host.process import in_sandbox
from quarantune.sandbox import pool, spool, template
from quarantune.values import codec
from quarantune.sandbox.template_messages import Ended
import workload

TASK = Compile(trial=0, config={}, last=True)

def one_sweep(sandbox):
    number = sandbox.start(codec.encode(TASK))
    said = []
    while not any(isinstance(event, Ended) for event in said):
        said += sandbox.poll(5)
    assert [event.message["message"] for event in said[:-1]] == ["PhaseEntered", "Compiled"], said
    sandbox.forget(number)

def opened():
    packed = payload.pack_call(workload.act, (), {})
    fd = spool.create("payload")
    spool.write_parts(fd, [packed.blob, pickle.dumps(BenchOptions.of("cpu", Options()))])
    sandbox = pool.Sandbox(payload_fd=fd, arrays_fd=-1, method="fork")
    sandbox.open(load_timeout_s=100)
    return sandbox

mode, path = sys.argv[1:]
ours = opened()
one_sweep(ours)
child = os.fork()
if child == 0 and mode == "both sweep":
    theirs = opened()
    one_sweep(theirs)
    theirs.close()
    assert template.shared().pid != int(os.environ.get("OWNERS", 0))
    sys.exit(0)  # runs atexit functions, unlike a child of multiprocessing
if child == 0:
    Path(path).write_text(f"{os.getpid()} {os.getppid()}")
    signal.pause()
if mode == "both sweep":
    one_sweep(ours)
    _, status = os.waitpid(child, 0)
    assert status == 0, status
    one_sweep(ours)
    ours.close()
    print("both did")
else:
    ours.start(codec.encode(dataclasses.replace(TASK, last=False)))
    Path(path + ".template").write_text(str(template.shared().pid))
    signal.pause()
"""


@pytest.fixture
def owner_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    (tmp_path / "workload.py").write_text(WORKLOAD)
    script = tmp_path / "owner.py"
    script.write_text(FORKING_OWNER)
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))
    return [sys.executable, "-W", "ignore::DeprecationWarning", str(script)]


@pytest.mark.slow
def test_a_process_and_its_fork_both_sweep(owner_script: list[str], tmp_path: Path) -> None:
    assert python(*owner_script[1:], "both sweep", tmp_path / "pids") == "both did\n"


def test_a_killed_owners_workers_die_despite_its_fork(owner_script: list[str], tmp_path: Path) -> None:
    path, template_path = tmp_path / "pids", tmp_path / "pids.template"
    with subprocess.Popen([*owner_script, "child stays", str(path)]) as owner:
        wait_for(lambda: path.exists() and path.read_text(), "the fork runs")
        wait_for(lambda: template_path.exists() and template_path.read_text(), "the template runs")
        child = int(path.read_text().split()[0])
        family = psutil.Process(int(template_path.read_text())).children(recursive=True)
        family.append(psutil.Process(int(template_path.read_text())))
        owner.kill()
        owner.wait(PATIENCE_S)
        wait_for(lambda: not any(is_running(process.pid) for process in family), "all its processes end")
        assert is_running(child)
        os.kill(child, signal.SIGKILL)
    wait_for(lambda: not is_running(child), "the fork ends")


# --- logs and inputs ----------------------------------------------------------------------------------------


def test_a_log_that_grows_too_large_keeps_only_its_end(load: Callable[..., ModuleType], tmp_path: Path) -> None:
    path = tmp_path / "flooded"
    with sandbox_for(load(WORKLOAD).act) as sandbox:
        worker = start(sandbox, do="flood", path=str(path))
        histories = {worker.number: worker}
        listen(sandbox, histories, lambda: worker.types)
        measure(sandbox, worker)
        wait_for(path.exists, "all output is printed")
        assert len(sandbox.log(worker.number)) > 1_000_000
        sandbox.trim_logs()
        log = sandbox.log(worker.number)
        assert len(log) < 20_000
        assert log.startswith("[...]\n")
        assert log.endswith("drivel the end\n")


def test_shortening_a_log_loses_nothing_written_at_that_time() -> None:
    for _ in range(20):
        fd = spool.create_log()
        code = "import os; [os.write(1, b'blah' * (16 << 10)) for _ in range(256)]; os.write(1, b'the last word')"
        writer = subprocess.Popen([sys.executable, "-SIc", code], stdout=fd)
        while writer.poll() is None:
            spool.trim_log(fd)
        assert spool.read_log(fd).endswith("blahthe last word")
        spool.trim_log(fd)
        assert os.fstat(fd).st_blocks * 512 < 1_100_000
        os.close(fd)


def test_writing_after_a_log_was_cleared_begins_a_new_log() -> None:
    fd = spool.create_log()
    other = os.dup(fd)
    os.write(other, b"of the first config\n" * 200_000)
    spool.trim_log(fd)
    os.ftruncate(fd, 0)
    assert spool.read_log(fd) == ""
    os.write(other, b"of the second\n")
    assert spool.read_log(fd) == "of the second\n"
    assert os.fstat(fd).st_blocks * 512 <= 1 << 16
    os.close(fd)
    os.close(other)


def test_a_log_is_shortened_even_if_files_have_no_holes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_REMOVE")
    fd = spool.create_log()
    os.write(fd, b"blah\n" * 1_000_000 + b"the last word\n")
    spool.trim_log(fd)
    assert os.fstat(fd).st_size < 20_000
    assert spool.read_log(fd).startswith("[...]\n")
    assert spool.read_log(fd).endswith("the last word\n")
    os.close(fd)


def test_a_log_cut_while_it_is_shortened_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    fd = spool.create_log()
    os.write(fd, b"blah\n" * 1_000_000)
    about = os.fstat(fd)
    os.ftruncate(fd, 0)
    with monkeypatch.context() as as_before:
        as_before.setattr(os, "fstat", lambda _: about)
        spool.trim_log(fd)
    assert spool.read_log(fd) == "[...]\n"
    os.close(fd)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_no_worker_can_change_the_payload_or_the_arrays(method: str, load: Callable[..., ModuleType]) -> None:
    with sandbox_for(load(WORKLOAD).act, np.ones(100_000), method=method) as sandbox:
        worker = run(sandbox, do="write_to_the_inputs")
        attempts = facts_of(sandbox, worker)["attempts"]
        assert {name.partition(":")[0] for name in attempts} == {"quarantune-payload", "quarantune-arrays"}
        assert len(attempts) >= 14
        assert "done" not in attempts.values(), attempts
        assert worker.types == ["Compiled", "Measured"]
        assert facts_of(sandbox, run(sandbox, do="sum_up")) == {"total": 100_000.0}


def test_configs_compile_from_both_ends_and_troubled_ones_last() -> None:
    configs = {index: {"id": index} for index in range(7)}
    assert list(routes._from_both_ends(configs, last={1})) == [6, 0, 5, 2, 4, 3, 1]
    assert routes._from_both_ends(configs, last=()) == configs
    assert routes._from_both_ends({}, last={1}) == {}


def test_exit_statuses_are_described_in_words() -> None:
    assert not in_sandbox()
    assert describe_status(-11) == "was killed by SIGSEGV"
    assert describe_status(-200) == "was killed by signal 200"
    assert describe_status(3) == "exited with code 3"
