"""A config's shared memory is removed with its worker; other processes keep theirs."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import textwrap
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from aftermath import eventually, shared_memory
from helpers import ends, run_python

import quarantune
from quarantune.sandbox import contain

X = np.ones(8, np.float32)
held: list[Any] = []


def hold(x: Any, name: str, n: int = 0) -> Any:
    """Config 1 attaches to the caller's shared memory, makes more under similar names, and never ends."""
    if n == 1:
        held.append(SharedMemory(name=name))
        resource_tracker.unregister(f"/{name}", "shared_memory")  # type: ignore[attr-defined]
        held.append(SharedMemory(name=f"{name}-own", create=True, size=1 << 20))
        held.append(SharedMemory(name=f"{name}-other", create=True, size=1 << 20))
        held[-1].unlink()
        subprocess.run(["touch", f"/dev/shm/{name}-other"], check=True)  # now another process's file
        os.mkdir(f"/dev/shm/{name}-folder")
        for path in (Path(f"/dev/shm/{name}-plain"), Path(f"/dev/shm/{name}-folder/plain")):
            path.write_text("plain")
        with open(file=f"/dev/shm/{name}", mode="r+b") as file:  # the caller's file existed before
            held.append(pickle.loads(pickle.dumps(open)) is open and file.read(1))
        assert held[-1]
        signal.pause()
    return x * 2 + n * 0


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_only_shared_memory_of_the_config_is_removed(start_method: str) -> None:
    name = f"shared-names-{os.getpid()}-{start_method}"
    ours = SharedMemory(name=name, create=True, size=1 << 12)
    try:
        with quarantune.settings(start_method=start_method, compile_timeout=10, disable_cache=True):
            jitted = jax.jit(hold, static_argnames=["name", "n"])
            result = quarantune.autotune({"n": [0, 1, 2]}, ref_fn=None, rep=1, warmup=0)(jitted).tune(X, name)
        assert ends(result.trials) == ["ok", "timeout", "ok"]
        assert eventually(lambda: {it for it in shared_memory() if it.startswith(name)} == {name, f"{name}-other"})
    finally:
        Path(f"/dev/shm/{name}-other").unlink(missing_ok=True)
        ours.close()
        ours.unlink()


MADE = {
    "shared memory": "SharedMemory(name, create=True, size=8)",
    "shared memory of a name with a slash": "SharedMemory('/' + name, create=True, size=8)",
    "open": "open('/dev/shm/' + name, 'w')",
    "open, exclusively": "open(file='/dev/shm/' + name, mode='xb', buffering=0)",
    "write_text": "Path('/dev/shm', name).write_text('text')",
    "os.open": "os.open(b'/dev/shm/' + name.encode(), flags=os.O_CREAT)",
    "mkdir": "os.mkdir('/dev/shm/' + name)",
    "mkdtemp": "tempfile.mkdtemp(prefix=name, dir='/dev/shm')",
}
BEGINNING = """
import builtins, io, os, re, signal, sys, tempfile
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
import _posixshmem
from quarantune.sandbox import contain

name, fd, begun = sys.argv[1], int(sys.argv[2]), set(os.listdir("/dev/shm"))

def replace(made):
    builtins.open = io.open = made(open)
    os.open, os.mkdir, _posixshmem.shm_open = made(os.open), made(os.mkdir), made(_posixshmem.shm_open)
"""
DIES = """
def dying(real):
    def made(*args, **kwargs):
        result = real(*args, **kwargs)
        # Other tests, which run at the same time, make files of other forms there.
        new = set(os.listdir("/dev/shm")) - begun
        if made := [it for it in new if name in it or re.fullmatch("quarantune-[0-9a-f]{16}", it)]:
            print(*made, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    return made
"""


def run_noting(code: str, name: str, directory: Path) -> tuple[subprocess.CompletedProcess[str], int]:
    """Runs a process that notes names like a worker; returns it and the file with the names."""
    fd = os.open(directory / "names", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    command = [sys.executable, "-c", BEGINNING + code, name, str(fd)]
    return subprocess.run(command, pass_fds=[fd], capture_output=True, text=True, check=False), fd


@pytest.mark.parametrize("moment", ["as soon as it is there", "when it has been made"])
@pytest.mark.parametrize("made", MADE)
def test_shared_memory_goes_whenever_its_worker_is_killed(made: str, moment: str, tmp_path: Path) -> None:
    name = f"shared-names-{os.getpid()}-{os.urandom(4).hex()}"
    steps = ["replace(dying)", "contain.note_in(fd)"]
    steps = steps if moment == "as soon as it is there" else steps[::-1]
    done, fd = run_noting("\n".join([DIES, *steps, MADE[made]]), name, tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    contain.remove_shared_memory(fd)
    assert done.stdout
    assert eventually(lambda: not set(done.stdout.split()) & set(shared_memory()))


NOTES = {
    "nothing": "pass",
    "names": "contain.note_in(fd)",
    "names, without renameat2 of the C library": "contain._libc = object(); contain.note_in(fd)",
    "names, on a system that knows no RENAME_NOREPLACE": "contain._libc.renameat2 = lambda *_: -1; contain.note_in(fd)",
}


@pytest.mark.slow
@pytest.mark.parametrize("made", MADE)
def test_noting_names_does_not_change_how_they_are_made(made: str, tmp_path: Path) -> None:
    name = f"shared-names-{os.getpid()}-{os.urandom(4).hex()}"
    code = f"""
        os.umask(0o027)
        try:
            result = {MADE[made]}
        except Exception as error:
            print(type(error), error, error.filename)
        else:
            print(getattr(result, "name", None))
        for path in Path("/dev/shm").glob(name + "*"):
            about = path.lstat()
            print(oct(about.st_mode), about.st_nlink, about.st_size)
        print([path for path in set(os.listdir("/dev/shm")) - begun if re.fullmatch("quarantune-[0-9a-f]{{16}}", path)])
    """
    for before in ("", "open('/dev/shm/' + name, 'w')"):
        said = {}
        for notes, begin in NOTES.items():
            done, fd = run_noting("\n".join([before, begin, textwrap.dedent(code)]), name, tmp_path)
            assert done.returncode == 0, done.stderr
            said[notes] = done.stdout
            contain.remove_shared_memory(fd)
            for path in Path("/dev/shm").glob(name + "*"):
                path.rmdir() if path.is_dir() else path.unlink()
        assert said == dict.fromkeys(NOTES, said["nothing"])


def test_a_directory_too_deep_to_remove_keeps_no_other_name(tmp_path: Path) -> None:
    name = f"shared-names-{os.getpid()}-{os.urandom(4).hex()}"
    code = f"""
        contain.note_in(fd)
        os.mkdir("/dev/shm/{name}-deep")
        inner = os.open("/dev/shm/{name}-deep", os.O_RDONLY)
        for _ in range(1500):
            os.mkdir("inner", dir_fd=inner)
            outer, inner = inner, os.open("inner", os.O_RDONLY, dir_fd=inner)
            os.close(outer)
        Path("/dev/shm/{name}-plain").touch()
    """
    done, fd = run_noting(textwrap.dedent(code), name, tmp_path)
    try:
        assert done.returncode == 0, done.stderr
        contain.remove_shared_memory(fd)
        assert not Path(f"/dev/shm/{name}-plain").exists()
    finally:
        subprocess.run(["rm", "-rf", f"/dev/shm/{name}-deep", f"/dev/shm/{name}-plain"], check=True)


@pytest.mark.parametrize("made", [made for made in MADE if made != "mkdtemp"])
def test_shared_memory_of_other_processes_stays(made: str, tmp_path: Path) -> None:
    name = f"shared-names-{os.getpid()}-{os.urandom(4).hex()}"
    code = f"""
really_open = os.open

def slow(real):
    def made(*args, **kwargs):
        os.close(really_open(f"/dev/shm/{{name}}", os.O_CREAT))
        return real(*args, **kwargs)
    return made

replace(slow)
contain.note_in(fd)
try:
    {MADE[made]}
except FileExistsError as error:
    print(error)
"""
    path = Path("/dev/shm", name)
    try:
        done, fd = run_noting(code, name, tmp_path)
        assert done.returncode == 0, done.stderr
        contain.remove_shared_memory(fd)
        assert path.exists()
    finally:
        path.unlink(missing_ok=True)


KILLED = """
import os, signal, sys
from multiprocessing.shared_memory import SharedMemory
import jax
import numpy as np
import quarantune

def hold(x, n=0):
    if n:
        held = SharedMemory(name=sys.argv[1], create=True, size=1 << 20)
        os.kill(int(os.environ["CALLER"]), signal.SIGKILL)
        signal.pause()
    return x * 2

if __name__ == "__main__":
    os.environ["CALLER"] = str(os.getpid())
    jitted = jax.jit(hold, static_argnames=["n"])
    quarantune.autotune({"n": [0, 1]}, ref_fn=None, rep=1, warmup=0)(jitted).tune(np.ones(8, np.float32))
"""


@pytest.mark.long
@pytest.mark.slow
def test_a_killed_callers_config_leaves_no_shared_memory(tmp_path: Path) -> None:
    name = f"shared-names-{os.getpid()}-killed"
    (tmp_path / "script.py").write_text(KILLED)
    assert run_python(tmp_path / "script.py", name).returncode == -signal.SIGKILL
    assert eventually(lambda: name not in shared_memory())


SHARES_A_DIRECTORY = """
import os, signal, sys, time
from quarantune.sandbox import contain, template
from quarantune.sandbox.template_messages import Open

if __name__ == "__main__":
    here = template.shared()
    directory = contain.common_directory(here.token)
    for _ in range(2):
        here.open(Open({}, None, loads_plugins=False, has_directory=True), payload_fd=-1, arrays_fd=-1)
    while not os.path.isdir(directory):
        time.sleep(0.005)
    assert os.stat(directory).st_mode & 0o777 == 0o700
    open(f"{directory}/product", "x").close()
    print(directory, flush=True)
    if sys.argv[1] != "nobody":
        os.kill(os.getpid() if sys.argv[1] == "caller" else here.pid, signal.SIGKILL)
"""


@pytest.mark.parametrize("killed", ["nobody", "caller", "template"])
def test_the_sweeps_shared_directory_ends_with_their_process(killed: str) -> None:
    done = run_python("-c", SHARES_A_DIRECTORY, killed)
    assert done.returncode == (-signal.SIGKILL if killed == "caller" else 0), done.stderr
    assert eventually(lambda: not Path(done.stdout.strip()).exists())
