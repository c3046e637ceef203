"""A process that runs out of descriptors or disk gets advice, leaks nothing and keeps its results."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers import python

from quarantune.sandbox import pool, shortages, template, wire
from quarantune.sandbox.messages import Probe
from quarantune.values import codec
from quarantune.values.errors import SandboxError

PROGRAM = """
import functools, os, resource, sys
import jax, numpy as np
import quarantune
from quarantune.values.errors import SandboxError
from quarantune.sandbox import template

PAYLOAD = os.urandom(int(sys.argv[3]))

@quarantune.autotune({"n": list(range(int(sys.argv[4])))}, warmup=0, rep=1, name="kernel", ref_fn=None)
@functools.partial(jax.jit, static_argnames=["n"])
def kernel(x, n: int = 0):
    for _ in range(40):
        x = jax.numpy.tanh(x) + n
    return x + len(PAYLOAD)

def descriptors():
    return sorted(os.listdir("/proc/self/fd"))

def limited(kind, amount):
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (amount, hard))
    try:
        trials = kernel.tune(np.ones(8, np.float32)).trials
        return sum(not trial.outcome.is_failure for trial in trials)
    finally:
        resource.setrlimit(kind, (hard, hard))

if __name__ == "__main__":
    np.asarray(jax.numpy.ones(8) + 1)
    if sys.argv[1] == "RLIMIT_FSIZE":  # workers inherit the limit
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    template.shared()
    before = descriptors()
    try:
        print("tuned", limited(getattr(resource, sys.argv[1]), int(sys.argv[2])))
    except SandboxError as error:
        print("failed", error)
    assert descriptors() == before, (before, descriptors())
    print("then", len(kernel.tune(np.ones(8, np.float32)).trials))
"""


def run(tmp_path: Path, *argv: object) -> list[str]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    return python(program, *argv, JAX_PLATFORMS="cpu").splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("limit", [24, pytest.param(30, marks=pytest.mark.long)])
def test_running_out_of_descriptors_ends_the_sweep_with_advice(limit: int, tmp_path: Path) -> None:
    told, then = run(tmp_path, "RLIMIT_NOFILE", limit, 10, 6)
    assert re.match(rf"failed .*kernel: .*may have {limit} descriptors open.*ulimit -n.*are kept", told)
    assert then == "then 6"


@pytest.mark.slow
def test_a_file_size_limit_too_small_for_the_call_is_named(tmp_path: Path) -> None:
    told, then = run(tmp_path, "RLIMIT_FSIZE", 20_000, 100_000, 4)
    assert re.match(r"failed .*kernel: .*may not grow over 20000 bytes.*ulimit -f", told)
    assert then == "then 4"


@pytest.mark.long
@pytest.mark.slow
def test_configs_with_programs_too_large_to_save_are_measured(tmp_path: Path) -> None:
    tuned, then = run(tmp_path, "RLIMIT_FSIZE", 8_000, 10, 4)
    assert tuned == "tuned 4"
    assert then == "then 4"


FULL = """
import os, sys, tempfile, warnings
from pathlib import Path
import jax, numpy as np
import quarantune
from quarantune.host import machine
from quarantune.values.errors import SandboxError

@quarantune.autotune([{"n": 1}, {"n": 2}], warmup=0, rep=1, name="kernel", ref_fn=None, memory_limit="2GB")
@jax.jit(static_argnames=["n"])
def kernel(x, n: int = 0):
    return x + n

if __name__ == "__main__":
    disk = Path(sys.argv[1])
    (disk / "filling").write_bytes(bytes(200_000))
    try:
        (disk / "filling 2").write_bytes(bytes(1_000_000))
    except OSError as error:
        print("full", error.strerror)
    x = np.ones(8, np.float32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = kernel.tune(x)
    print("tuned", len(result.trials), int(kernel(x)[0]) == 1 + result.best_config["n"])
    print("failed", *{str(warning.message) for warning in caught})
    # Large arguments go to the disk, which was found to be usable before it was full.
    available, machine.available_memory_bytes = machine.available_memory_bytes, lambda **_: 1 << 20
    tempfile.tempdir = str(disk)
    try:
        kernel.tune(np.ones(1 << 20, np.float32))
    except SandboxError as error:
        print("remedy", error)
    machine.available_memory_bytes = available
    for filling in disk.glob("filling*"):
        filling.unlink()
    kernel.tune(x)
    cache = quarantune.TuningCache()
    print("then", len(cache), cache.problems())
"""


@pytest.mark.slow
def test_a_full_disk_costs_neither_the_result_nor_the_next_one(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "program.py").write_text(FULL)
    mount = ["unshare", "-rm", "sh", "-c", f'mount -t tmpfs -o size=500k none {tmp_path}/disk && exec "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*mount, "true"], capture_output=True).returncode:
        pytest.skip("this machine lets no user mount (unshare -rm)")
    disk = {"QUARANTUNE_CACHE_DIR": str(tmp_path / "disk" / "cache"), "TMPDIR": str(tmp_path / "disk")}
    said = python(tmp_path / "program.py", tmp_path / "disk", before=mount, JAX_PLATFORMS="cpu", **disk)
    full, tuned, told, remedy, then = said.splitlines()
    assert full == "full No space left on device"
    assert tuned == "tuned 2 True"
    assert "No space left on device" in told
    assert "QUARANTUNE_CACHE_DIR" in told
    assert "no room left in memory and in" in remedy
    assert "set TMPDIR" in remedy
    assert then == "then 1 []"


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.EMFILE, "ulimit -n"),
        (errno.EFBIG, "ulimit -f"),
        (errno.ENOSPC, "set TMPDIR"),
        (errno.EDQUOT, "set TMPDIR"),
        (errno.ENFILE, "fs.file-max"),
        (errno.ENODEV, "XLA_PYTHON_CLIENT_MEM_FRACTION"),
        (errno.ENOMEM, "smaller arguments"),
    ],
)
def test_each_shortage_has_its_own_advice(number: int, advice: str) -> None:
    with (
        pytest.raises(SandboxError, match=f"^kernel: the sweep had to end .*{advice}"),
        shortages.with_advice("kernel"),
    ):
        raise OSError(number, os.strerror(number))


def test_other_errors_are_raised_unchanged() -> None:
    with pytest.raises(FileNotFoundError), shortages.with_advice("kernel"):
        raise FileNotFoundError(errno.ENOENT, "no such file")


def test_no_descriptor_leaks_wherever_they_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    same = template.inherited_state()
    monkeypatch.setattr(template, "inherited_state", lambda: same)  # a new limit needs no new template here
    template.shared()
    highest = max(map(int, os.listdir("/proc/self/fd")))
    taken = [os.dup(2)]
    while taken[-1] < highest:
        taken.append(os.dup(2))  # until no lower number is free
    before = sorted(os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def start_a_worker(spare: int) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken[-1] + 1 + spare, hard))
        try:
            with pool.Sandbox(payload_fd=-1, arrays_fd=-1, method="fork") as sandbox:
                sandbox.open(load_timeout_s=None)
                sandbox.start(codec.encode(Probe(platforms="cpu", last=True)))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    try:
        succeeded = []
        for spare in range(12):
            with contextlib.suppress(OSError):
                start_a_worker(spare)
                succeeded.append(spare)
            assert sorted(os.listdir("/proc/self/fd")) == before
        assert 3 <= min(succeeded) <= 10, "some runs had too few descriptors and others enough"
    finally:
        wire.close_all(taken)


HEAVY = """
import functools, threading
import jax, numpy as np
import quarantune

BALLAST = np.ones(40_000_000)  # 320 MB
threading.Thread(target=threading.Event().wait, daemon=True).start()  # no worker can be forked after this module

def double(x, n: int = 1):
    return x * 2.0
"""
LIMITED = """
import os
import jax, numpy as np
import heavy, quarantune

def tuner(jitted=True, **options):
    fn = jax.jit(heavy.double, static_argnames="n") if jitted else heavy.double
    return quarantune.AutoTuner(fn, [{"n": 1}, {"n": 2}], warmup=0, rep=1, **options)

def refused(label, tuned):
    try:
        tuned.run(np.ones(8, np.float32))
    except ValueError as error:
        print(label, error)

if __name__ == "__main__":
    refused("option", tuner(memory_limit="150MB"))
    refused("plain", tuner(jitted=False, memory_limit="150MB"))
    for settings in ({}, {"isolation": "compile"}, {"start_method": "spawn"}):
        with quarantune.settings(memory_limit="150MB", **settings):
            refused(f"settings {settings}", tuner())
    os.environ["QUARANTUNE_MEMORY_LIMIT"] = "150MB"
    refused("variable", tuner())
    os.environ["QUARANTUNE_MEMORY_LIMIT"] = "650MB"
    print(len(tuner().run(np.ones(8, np.float32)).trials))
"""


@pytest.mark.long
@pytest.mark.slow
def test_a_limit_that_no_worker_keeps_is_refused(tmp_path: Path, cache_dir: Path) -> None:
    (tmp_path / "heavy.py").write_text(HEAVY)
    (tmp_path / "program.py").write_text(LIMITED)
    *refusals, trials = python(tmp_path / "program.py", JAX_PLATFORMS="cpu").splitlines()
    assert trials == "2"
    assert len(refusals) == 6
    for refusal in refusals:
        found = re.search(r"memory_limit=150.00 MB is too little: a worker holds (3[0-9]{2}\.[0-9]{2}) MB", refusal)
        assert found, refusal
