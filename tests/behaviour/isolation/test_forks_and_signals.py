"""Wherever a fork or a signal handler interrupts tuning, no lock stays held and no exception changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from kernel_scripts import KERNEL, run


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

class Slow:  # pickling it waits for `go_on`
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
def test_a_handlers_exception_while_packing_is_raised_unchanged(tmp_path: Path) -> None:
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

class Interrupted:  # a signal arrives during its pickling
    def __reduce__(self):
        if armed:
            os.kill(os.getpid(), signal.SIGUSR1)
        return Interrupted, ()

class Finder:  # a signal arrives during the search for a module
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
def test_a_handlers_exception_while_tracing_is_raised_unchanged(tmp_path: Path, handler: str) -> None:
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
