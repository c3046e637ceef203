"""Tuning works in unusual working directories, search paths, user accounts and command lines."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import python

import quarantune
from quarantune.cache.owner import Owner, this_host
from quarantune.host import machine

KERNEL = """
import functools, os, sys
import jax, numpy as np
import quarantune

@quarantune.autotune({"n": [2]}, rep=1, name="kernel", ref_fn=None)
@functools.partial(jax.jit, static_argnames=["n"])
def kernel(x, n: int = 1):
    if n != 2:  # the default fails, so that a result proves that it was tuned
        raise ArithmeticError(n)
    return x * 3

X = np.arange(3, dtype=np.float32)

def agree():
    np.testing.assert_array_equal(kernel(X), X * 3)
"""


def run(script: str, *args: str, cwd: Path, environ: dict[str, str | None] | None = None) -> None:
    """Runs a script with `python -c`, which puts the working directory on the import path."""
    python("-c", script, *args, cwd=cwd, **(environ or {}))


@pytest.mark.parametrize("where", [pytest.param("environment", marks=pytest.mark.slow), "module"])
def test_a_program_that_disables_jit_tunes(where: str, tmp_path: Path) -> None:
    disables = "import jax\njax.config.update('jax_disable_jit', True)\n" if where == "module" else ""
    (tmp_path / "without_jit.py").write_text(disables + KERNEL)
    environ = {"JAX_DISABLE_JIT": "1" if where == "environment" else None}
    run("import without_jit; without_jit.agree()", cwd=tmp_path, environ=environ)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_modules_of_the_working_directory_do_not_shadow_python_modules(method: str, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    for name in ("json", "re", "enum", "functools", "socket", "selectors", "numpy", "jax", "cloudpickle"):
        (tmp_path / f"{name}.py").write_text(f"open({str(ran)!r}, 'a').write(__name__ + ' ')\n")
    away = tmp_path / "away"
    away.mkdir()
    # The program changes into the directory after its own imports, like the kernel of a notebook.
    script = f"import os\n{KERNEL}\nos.chdir({str(tmp_path)!r})\nagree()"
    run(script, cwd=away, environ={"QUARANTUNE_START_METHOD": method})
    assert not ran.exists(), ran.read_text()


@pytest.mark.long
@pytest.mark.slow
def test_odd_paths_long_command_lines_and_missing_homes_work(tmp_path: Path) -> None:
    script = f"""{KERNEL}
import pathlib, pwd, tempfile
def nobody(uid):
    raise KeyError(uid)
pwd.getpwuid = nobody
sys.path.append(pathlib.Path({str(tmp_path)!r}))  # the import system ignores it, and so must the sandbox
sys.path.append("\\udcff")
sys.argv += ["x" * 100_000] * 3
agree()
place = pathlib.Path(tempfile.gettempdir()) / f"quarantune-{{os.getuid()}}"
assert (place / "kernel.json").exists()
with quarantune.settings(disable_cache=True):
    kernel.tune(X)
"""
    environ: dict[str, str | None] = {"HOME": None, "XDG_CACHE_HOME": None, "QUARANTUNE_CACHE_DIR": None}
    run(script, cwd=tmp_path, environ={**environ, "TMPDIR": str(tmp_path)})
    assert not (tmp_path / "~").exists()


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info[:3] == (3, 13, 0), reason="Python 3.13.0 imports no NumPy in a deleted directory")
def test_a_program_tunes_in_a_deleted_working_directory(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    with_helper = KERNEL.replace("    return x * 3", "    return HELPERS[0](x)")
    helper = "def triple(x): return x * 3\nHELPERS = (triple,)"
    run(f"import os\nos.rmdir({str(gone)!r})\n{helper}\n{with_helper}\nagree()", cwd=gone)


NAMED = """
import ctypes
name = "kernels-\u00e9\u00e9\u00e9\u00e9".encode()[:15]  # the kernel keeps 15 bytes, and so cuts a character in two
assert ctypes.CDLL(None).prctl(15, name, 0, 0, 0) == 0
try:
    name.decode()
except UnicodeDecodeError:
    pass
else:
    raise AssertionError("the name is text")
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_a_process_whose_name_is_no_text_tunes(method: str, tmp_path: Path) -> None:
    """Names are cut after 15 bytes, also in the middle of a character."""
    again = "with quarantune.settings(always_tune=True): agree()\nassert kernel.lookup(X) == {'n': 2}"
    run(f"{NAMED}{KERNEL}\nagree()\n{again}", cwd=tmp_path, environ={"QUARANTUNE_START_METHOD": method})


def test_the_owner_of_a_claim_may_have_a_name_that_is_no_text(tmp_path: Path) -> None:
    script = f"{NAMED}\nimport sys\nfrom quarantune.cache.owner import Owner\n"
    script += "me = Owner.this_process()\nprint(me.pid, me.started, flush=True)\nsys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=-1, stdout=-1) as holder:
        assert holder.stdout is not None
        pid, started = map(int, holder.stdout.readline().split())
        owner = Owner(host=this_host(), pid=pid, started=started)
        assert started > 0
        assert machine.activity(pid)[0] in "SR"
        assert machine.resident_bytes(pid)[0] > 1 << 20
        assert pid in machine.descendants(os.getpid())
        assert not owner.is_dead()
        assert Owner(host=this_host(), pid=pid, started=started + 1).is_dead()
        holder.kill()
    assert owner.is_dead()


@pytest.mark.long
@pytest.mark.slow
def test_a_frozen_application_is_told_what_to_do_and_never_started_again(tmp_path: Path) -> None:
    application, started = tmp_path / "application", tmp_path / "started"
    application.write_text(f"#!/bin/sh\necho again >> {started}\n")
    application.chmod(0o755)
    cache = tmp_path / "cache"
    environ: dict[str, str | None] = {"QUARANTUNE_CACHE_DIR": str(cache)}
    freeze = f"import sys\nsys.frozen, sys.executable = True, {str(application)!r}\n"
    refused = f"""{KERNEL}
{freeze}
import quarantune
from quarantune.host import machine
from quarantune.sandbox.template import SandboxError

for _ in range(2):
    try:
        kernel(X)
    except SandboxError as error:
        said = str(error)
    else:
        raise AssertionError("it was tuned")
    assert "frozen application" in said and {str(application)!r} in said, said
    for remedy in ("tables", "QUARANTUNE_CACHE_PATH", "QUARANTUNE_ON_MISS=default", "QUARANTUNE_ISOLATION=none"):
        assert remedy in said, said
    assert not machine.descendants(os.getpid())
with quarantune.settings(on_miss="error"):
    try:
        kernel(X)
    except quarantune.CacheMissError:
        pass
with quarantune.settings(isolation="none", disable_cache=True):
    assert kernel.tune(X).best_config == {{"n": 2}}
"""
    run(refused, cwd=tmp_path, environ=environ)
    assert not list(cache.glob("*.json"))
    run(f"{KERNEL}\nagree()", cwd=tmp_path, environ=environ)  # an ordinary Python
    run(f"{KERNEL}\n{freeze}\nagree()", cwd=tmp_path, environ=environ)
    assert not started.exists()


@pytest.mark.slow
@pytest.mark.parametrize("is_cached", [pytest.param(True, marks=pytest.mark.long), False])
def test_a_program_whose_standard_streams_are_closed_tunes(is_cached: bool, tmp_path: Path) -> None:
    report = "import traceback\ntry:\n    agree()\nexcept BaseException:\n"
    report += "    open(sys.argv[1], 'w').write(traceback.format_exc())"
    end = "else:\n    left = [fd for fd in range(3) if os.path.exists(f'/proc/self/fd/{fd}')]"
    end += "\n    open(sys.argv[1], 'w').write(f'agreed {left}')"
    (tmp_path / "program.py").write_text(f"{KERNEL}\n{report}\n{end}\n")
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
    disabled = str(int(not is_cached))
    python(tmp_path / "program.py", tmp_path / "said", before=closed, QUARANTUNE_DISABLE_CACHE=disabled)
    assert (tmp_path / "said").read_text() == "agreed []"


@pytest.mark.slow
def test_a_program_that_may_make_no_files_in_memory_tunes(tmp_path: Path) -> None:
    refuse = """
import os
def memfd_create(*args, **kwargs):
    raise PermissionError(1, "Operation not permitted")
os.memfd_create = memfd_create
"""
    place = tmp_path / "temporary"
    place.mkdir()
    run(f"{refuse}{KERNEL}\nagree()", cwd=tmp_path, environ={"TMPDIR": str(place)})
    assert not os.listdir(place)


@pytest.mark.slow
def test_a_program_that_may_write_no_file_is_told_so_and_tunes_later(tmp_path: Path) -> None:
    limited = """
import resource
limit = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
try:
    kernel.tune(X)
except quarantune.SandboxError as error:
    assert "may not grow over 0 bytes: raise the limit with `ulimit -f`" in str(error)
else:
    raise AssertionError("it was tuned")
resource.setrlimit(resource.RLIMIT_FSIZE, limit)
"""
    silent = "import warnings\nwarnings.simplefilter('ignore')"  # nothing can be saved either
    run(f"{KERNEL}\n{silent}\n{limited}\nagree()", cwd=tmp_path)


@pytest.mark.slow
def test_a_program_without_proc_tunes(tmp_path: Path) -> None:
    hide = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*hide, "true"], capture_output=True).returncode:
        pytest.skip("this machine gives no mounts of its own to a user (unshare -rm)")
    python("-c", f"{KERNEL}\nagree()", before=hide)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("unreachable", marks=pytest.mark.long), "full"])
def test_tuning_works_with_an_unwritable_compilation_cache(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    directory = file / "cache" if kind == "unreachable" else tmp_path / "cache"
    # Files of this process cannot grow, which looks like a full disk to JAX's cache.
    full = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (64, -1))\n" if kind == "full" else ""
    script = f"""{KERNEL}
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from quarantune.tuning.reuse import CompilationSeeds
add = CompilationSeeds.add
def add_on_full_disk(self, compiled):
    assert compiled
    {full.replace(chr(10), chr(10) + "    ")}
    add(self, compiled)
CompilationSeeds.add = add_on_full_disk
agree()
"""
    environ: dict[str, str | None] = {
        "JAX_COMPILATION_CACHE_DIR": str(directory),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "QUARANTUNE_DISABLE_CACHE": "1",
    }
    run(script, cwd=tmp_path, environ=environ)


@pytest.mark.slow
def test_every_lock_is_free_in_a_fork(tmp_path: Path) -> None:
    script = f"""{KERNEL}
import signal, threading, types, warnings
import cloudpickle
lock_of_cloudpickle = cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_LOCK
from quarantune.cache import store
from quarantune.host import locks
from quarantune.transport import pickling
from quarantune.sandbox import template
assert cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_LOCK is lock_of_cloudpickle

made_up = sys.modules["made_up"] = types.ModuleType("made_up")
exec("def helper(): pass", vars(made_up))
inside, go_on = threading.Event(), threading.Event()

class Slow:  # its pickling waits for `go_on`
    def __reduce__(self):
        inside.set()
        assert go_on.wait(100)
        return int, ()

class Lazy:
    @locks.lazy
    def value(self):
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            assert go_on.wait(100)
        return 5

def fork_while(busy, work):
    inside.clear(), go_on.clear()
    thread = threading.Thread(target=busy)
    thread.start()
    assert inside.wait(100)
    warnings.simplefilter("ignore")  # this test forks while threads run
    if (pid := os.fork()) == 0:
        signal.alarm(200)  # ends a child that hangs
        work()
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    go_on.set()
    thread.join()
    assert status == 0, status

def pack():
    pickling.dumps(lambda: 1)
    assert not cloudpickle.list_registry_pickle_by_value()

def pickle_a_class():
    with lock_of_cloudpickle:
        inside.set()
        assert go_on.wait(100)

fork_while(lambda: pickling.dumps([made_up.helper, Slow()]), pack)
fork_while(pickle_a_class, lambda: pickling.dumps(type("Plain", (), {{"__module__": "__main__"}})))
lazy = Lazy()
fork_while(lambda: lazy.value, lambda: Lazy().value)

# Every lock of the package.
ours = [lock for name, module in list(sys.modules.items()) if name.startswith("quarantune")
        for lock in vars(module).values() if type(lock) in (type(threading.Lock()), type(threading.RLock()))]
ours += list(locks._locks)
def hold_all():
    for lock in ours:
        lock.acquire()
    inside.set()
    assert go_on.wait(100)
    for lock in reversed(ours):
        lock.release()
def take_all():
    for lock in ours:
        assert lock.acquire(timeout=60)
ours = list(dict.fromkeys(ours))
assert len(ours) >= 3, ours
fork_while(hold_all, take_all)
"""
    run(script, cwd=tmp_path)


@pytest.mark.slow
def test_an_exception_of_a_signal_handler_while_packing_is_raised_unchanged(tmp_path: Path) -> None:
    script = f"""{KERNEL}
import signal, types
import cloudpickle

class TooLong(Exception): ...
def handler(number, frame):
    raise TooLong("the caller's own deadline")
signal.signal(signal.SIGUSR1, handler)

made_up = sys.modules["made_up"] = types.ModuleType("made_up")
exec("def helper(): pass", vars(made_up))
armed = True

class Interrupted:  # a signal arrives while it is pickled
    def __reduce__(self):
        if armed:
            os.kill(os.getpid(), signal.SIGUSR1)
        return Interrupted, ()

class Finder:  # a signal arrives while a module is searched for
    def find_spec(self, name, path=None, target=None):
        if armed:
            os.kill(os.getpid(), signal.SIGUSR1)

def attempt(fn):
    before = len(os.listdir("/proc/self/fd"))
    try:
        quarantune.AutoTuner(fn, [{{"n": 1}}, {{"n": 2}}], name="fn").run(X)
    except TooLong:
        assert armed
    else:
        assert not armed
    assert len(os.listdir("/proc/self/fd")) == before or not armed
    assert not cloudpickle.list_registry_pickle_by_value()

part = Interrupted()
def fn(x, n):
    return x * n if made_up.helper and part else x
attempt(fn)
sys.meta_path.insert(0, Finder())
attempt(lambda x, n: made_up.helper())
sys.meta_path.pop(0)
armed = False
attempt(fn)  # the next sweep is not affected
"""
    run(script, cwd=tmp_path)


@pytest.mark.parametrize(
    "handler", ["handler", pytest.param("functools.partial(functools.partial(handler))", marks=pytest.mark.long)]
)
@pytest.mark.slow
def test_an_exception_of_a_signal_handler_while_the_caller_traces_is_raised_unchanged(
    tmp_path: Path, handler: str
) -> None:
    script = f"""{KERNEL}
import functools, signal

class TooLong(Exception): ...
def handler(number, frame):
    raise TooLong("the caller's own deadline")
signal.signal(signal.SIGUSR1, {handler})
caller, armed = os.getpid(), True

@quarantune.autotune({{"n": [1, 2]}}, rep=1, warmup=0)
@functools.partial(jax.jit, static_argnames=["n"])
def interrupted(x, n: int = 1):
    if armed and os.getpid() == caller:
        os.kill(caller, signal.SIGUSR1)
    return x * 2 * n / n

for isolation in ("process", "none"):
    with quarantune.settings(isolation=isolation):
        try:
            interrupted.tune(X)
        except TooLong:
            continue
    raise AssertionError(isolation)
armed = False
interrupted.tune(X)
"""
    run(script, cwd=tmp_path)


@pytest.mark.slow
def test_tuning_during_an_import_is_refused_with_advice(tmp_path: Path) -> None:
    calls = {
        "tune_module": "kernel.tune(X)",
        "run_module": "quarantune.AutoTuner(plain, [{'n': 1}, {'n': 2}]).run(X)",
        "compile_module": "quarantune.compile_configs(kernel, [{'n': 1}], X)",
    }
    begin = "import warnings\nwarnings.simplefilter('error')\ndef plain(x, n):\n    return x * n\n"
    for name, call in calls.items():
        (tmp_path / f"{name}.py").write_text(f"{KERNEL}\n{begin}\n{call}\n")
    script = f"""
import importlib, sys
sys.path.insert(0, {str(tmp_path)!r})
for name in {list(calls)}:
    text = ""
    try:
        importlib.import_module(name)
    except UserWarning as warning:
        assert name == "compile_module"
        text = str(warning)
    except Exception as error:
        assert name != "compile_module"
        text = str(error)
        assert "__name__" in text, text
    assert "imports the module of a function to tune it" in text, text
"""
    run(script, cwd=tmp_path)


def test_a_config_too_large_for_a_message_is_refused_with_its_largest_key() -> None:
    def fn(x: int, table: str) -> int:
        return x

    tuner = quarantune.AutoTuner(fn, [{"table": "ab"}, {"table": "x" * (5 << 20)}])
    with pytest.raises(ValueError, match=r"5,242,\d+ bytes as JSON, most of them its 'table'"):
        tuner.run(1)


@pytest.mark.long
@pytest.mark.slow
def test_an_outdated_template_is_replaced(tmp_path: Path) -> None:
    script = """
import os
import psutil, quarantune
from quarantune.sandbox import template
from quarantune.sandbox.template_messages import Open

def look(n, expected):
    found = [sorted(os.sched_getaffinity(0)), sorted(os.getgroups()), os.environ.get("LD_BIND_NOW")]
    if found != expected:
        raise AssertionError(f"{found} in a worker, {expected} in its caller")

def sweep():
    expected = [sorted(os.sched_getaffinity(0)), sorted(os.getgroups()), os.environ.get("LD_BIND_NOW")]
    quarantune.AutoTuner(look, [{"n": 1}, {"n": 2}], rep=1, name="look").run(expected=expected)
    (child,) = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    assert child.pid == template.shared().pid
    return child.pid

with quarantune.settings(disable_cache=True):
    pids = [sweep()]
    assert sweep() == pids[0]
    cpus = os.sched_getaffinity(0)
    if len(cpus) > 1:
        os.sched_setaffinity(0, {min(cpus)})
        pids.append(sweep())
    os.environ["LD_BIND_NOW"] = "1"
    pids.append(sweep())
    if os.geteuid() == 0:
        os.setgroups([12345])
        pids.append(sweep())
    assert len(set(pids)) == len(pids), pids

    # A template that a sweep of another thread uses stays until the end of that sweep.
    used = template.shared()
    null = os.open(os.devnull, os.O_RDONLY)
    sweep = Open(environ={}, cwd=None, loads_plugins=False)
    connection = used.open(sweep, payload_fd=null, arrays_fd=null)
    os.environ["LD_BIND_NOW"] = "2"
    assert template.shared() is not used and used.is_alive
    connection.hang_up()
    template.close_unused()
    assert not used.is_alive
"""
    run(script, cwd=tmp_path)


POOLS = """
from __future__ import annotations
import concurrent.futures, dataclasses, multiprocessing, os, pickle, sys, typing
import numpy as np
import quarantune

cannot_travel = (number for number in range(3))
SCALE = 2.0

class Box:
    class Inner:
        value = 3

@dataclasses.dataclass
class Holds:
    box: Box

def part(value): return value * SCALE

def in_processes(x, method, workers=1):
    context = multiprocessing.get_context(method)
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        return np.array(list(pool.map(part, x.tolist())))

def in_pool(x, method, workers=1):
    with multiprocessing.get_context(method).Pool(workers) as pool:
        return np.array(pool.map(part, x.tolist()))

def by_name(x, box, workers: Number = 1) -> Box:
    import __main__
    assert typing.get_type_hints(by_name) == {"workers": int, "return": Box}
    assert typing.get_type_hints(Holds) == {"box": Box}
    assert type(pickle.loads(pickle.dumps(box))) is Box.Inner
    return x * sys.modules["__main__"].SCALE * __main__.SCALE

Number = int

def tuned(function, *args):
    expected = function(*args)
    result = quarantune.AutoTuner(function, {"workers": [1, 2]}, warmup=0, rep=1).run(*args)
    assert [trial.outcome for trial in result.trials] == ["ok", "ok"], result.trials
    np.testing.assert_array_equal(result.fn(*args), expected)

if __name__ == "__main__":
    for method in sys.argv[1:]:
        tuned(in_processes, np.arange(4.0), method)
        tuned(in_pool, np.arange(4.0), method)
    tuned(by_name, np.arange(4.0), Box.Inner())
    print("done")
"""


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(("program/pools.py", "fork"), marks=pytest.mark.slow),
        pytest.param(("-m", "program.pools", "spawn", "forkserver"), marks=pytest.mark.long),
        pytest.param(("program/pools.py", "spawn", "forkserver"), marks=pytest.mark.long),
    ],
)
def test_configs_of_a_program_start_pools_and_find_what_it_defines(command: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "pools.py").write_text(POOLS)
    output = python(*command, cwd=tmp_path, path=[tmp_path], QUARANTUNE_CACHE_DIR=str(tmp_path / "cache"))
    assert output.splitlines()[-1] == "done"


OF_ONE_NAME = """
import sys
import numpy as np
import quarantune

SCALE = {scale}
def helper(x): return x * SCALE

def kernel(x, path, n=1):
    if path:
        assert quarantune.TuningResult.load(path, trusted=True).fn(x, "")[0] == 200
    assert helper(1) == {scale}
    return helper(x) + SCALE

path = sys.argv[1] if {scale} == 2 else ""
result = quarantune.AutoTuner(kernel, {{"n": [1, 2]}}, warmup=0, rep=1).run(np.ones(3), path)
print([trial.outcome.value for trial in result.trials])
if not path:
    result.save(sys.argv[1])
"""


@pytest.mark.slow
def test_a_config_may_load_what_a_program_with_functions_of_the_same_names_saved(tmp_path: Path) -> None:
    for scale in (100, 2):
        (script := tmp_path / f"by_{scale}.py").write_text(OF_ONE_NAME.format(scale=scale))
        output = python(script, tmp_path / "saved", QUARANTUNE_CACHE_DIR=str(tmp_path / "cache"))
        assert output.splitlines()[-1] == "['ok', 'ok']"


UNGUARDED = """
import multiprocessing, os, sys
import numpy as np
import quarantune

with open(sys.argv[1], "a") as file:
    print(__name__, file=file)

def part(value): return value * 2

def pool(x, method, workers=1):
    with multiprocessing.get_context(method).Pool(workers) as pool:
        return np.array(pool.map_async(part, x.tolist()).get(20))

for method in ("fork", "spawn"):
    try:
        tuner = quarantune.AutoTuner(pool, {"workers": [1]}, warmup=0, rep=1, timeout=40)
        print([trial.outcome.value for trial in tuner.run(np.arange(4.0), method).trials])
    except quarantune.TuningFailedError as error:
        print("refused" if "was asked to tune" in error.trials[0].log_tail else error)
"""


@pytest.mark.long
@pytest.mark.slow
def test_children_that_run_a_program_again_start_no_sweeps(tmp_path: Path) -> None:
    (script := tmp_path / "unguarded.py").write_text(UNGUARDED)
    ran = tmp_path / "ran"
    output = python(script, ran, QUARANTUNE_CACHE_DIR=str(tmp_path / "cache"))
    assert output.splitlines() == ["['ok']", "refused"]
    assert set(ran.read_text().split()) == {"__main__", "__mp_main__"}
    assert ran.read_text().split().count("__main__") == 1
