"""Shared memory that a config made goes with its worker; that of other processes stays."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
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

X = np.ones(8, np.float32)
held: list[Any] = []


def hold(x: Any, name: str, n: int = 0) -> Any:
    """Config 1 attaches to shared memory of the caller, makes some of the same name elsewhere, and never ends."""
    if n == 1:
        held.append(SharedMemory(name=name))
        resource_tracker.unregister(f"/{name}", "shared_memory")  # type: ignore[attr-defined]
        held.append(SharedMemory(name=f"{name}-own", create=True, size=1 << 20))
        held.append(SharedMemory(name=f"{name}-other", create=True, size=1 << 20))
        held[-1].unlink()
        subprocess.run(["touch", f"/dev/shm/{name}-other"], check=True)  # another process has made it anew
        os.mkdir(f"/dev/shm/{name}-folder")
        for path in (Path(f"/dev/shm/{name}-plain"), Path(f"/dev/shm/{name}-folder/plain")):
            path.write_text("plain")
        with open(file=f"/dev/shm/{name}", mode="r+b") as file:  # which was there before
            held.append(pickle.loads(pickle.dumps(open)) is open and file.read(1))
        assert held[-1]
        signal.pause()
    return x * 2 + n * 0


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_only_what_a_config_made_is_removed(start_method: str) -> None:
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
def test_what_a_config_made_goes_although_the_caller_is_killed(tmp_path: Path) -> None:
    name = f"shared-names-{os.getpid()}-killed"
    (tmp_path / "script.py").write_text(KILLED)
    assert run_python(tmp_path / "script.py", name).returncode == -signal.SIGKILL
    assert eventually(lambda: name not in shared_memory())
