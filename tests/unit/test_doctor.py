"""The doctor finds every obstacle to tuning, provoked for real, and names its remedy."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import shutil
import subprocess
import types
from pathlib import Path
from typing import Any

import jax
import pytest
from helpers import SOURCE, python, run_python

import quarantune
from quarantune import doctor
from quarantune.devices import discovery, targets
from quarantune.doctor import failed
from quarantune.values.settings import Settings
from quarantune.values.trial import CompilerFigures, CompileTarget, CycleEstimate, Outcome, Trial

PROGRAM = """
import json, resource, sys
if sys.argv[2] != "any":
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
from quarantune import doctor
if sys.argv[1] == "quick":  # the checks that take seconds
    doctor.ranks, doctor.trials = lambda settings: [], lambda: []
checks = doctor.run()
print(json.dumps([check.to_dict() for check in checks]))
sys.exit(doctor.failed(checks))
"""
NO_LOCKS = """
import fcntl
fcntl.flock = lambda fd, operation: None
"""
SMALL_SHM = "mount -t tmpfs -o size=1m none /dev/shm"


@functools.cache
def can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    done = subprocess.run(["unshare", "-rm", "sh", "-c", SMALL_SHM], capture_output=True)
    return done.returncode == 0


def diagnose(
    directory: Path, *, parts: str = "quick", mounts: str = "", descriptors: object = "any", **environ: str
) -> tuple[int, dict[str, dict[str, str]]]:
    """Runs the doctor in a new process, and returns its exit status and its findings by name."""
    program = directory / "program.py"
    program.write_text(PROGRAM)
    before: list[str] = []
    if mounts:
        if not can_mount():
            pytest.skip("users of this machine cannot have private mounts (unshare -rm)")
        before = ["unshare", "-rm", "sh", "-c", f'{mounts} && exec "$@"', "sh"]
    changes = {**dict.fromkeys(name for name in os.environ if name.endswith("_NUM_THREADS")), **environ}
    changes["PYTHONPATH"] = os.pathsep.join([environ.get("PYTHONPATH", ""), str(SOURCE)]).lstrip(os.pathsep)
    done = run_python(program, parts, descriptors, before=before, **changes)
    assert done.stdout, done.stderr
    return done.returncode, {found["name"]: found for found in json.loads(done.stdout)}


@pytest.mark.slow
def test_a_healthy_machine_has_a_working_trial_of_each_kind(tmp_path: Path, cache_dir: Path) -> None:
    status, found = diagnose(tmp_path, parts="all")
    trials = [name for name in found if name.startswith("trial ")]
    assert len(trials) == 4
    assert {found[name]["status"] for name in [*trials, "ranks", "cache directory", "cache locks"]} == {"ok"}
    assert all(entry["remedy"] for entry in found.values() if entry["status"] != "ok")
    assert status == 0
    assert not cache_dir.exists(), "the doctor leaves nothing behind"


@pytest.mark.slow
def test_directories_of_the_cache_path_that_are_not_there_are_found(tmp_path: Path, cache_dir: Path) -> None:
    gone = tmp_path / "gone"
    found = doctor.cache_directory(Settings(cache_dir=cache_dir, cache_path=(tmp_path, gone)))
    (check,) = [check for check in found if check.name == "cache path"]
    assert (check.status, repr(str(gone)) in check.found) == (doctor.Status.WARN, True)
    assert "mount it" in check.remedy


def test_a_read_only_cache_directory_is_found(tmp_path: Path, cache_dir: Path) -> None:
    cache_dir.mkdir()
    status, found = diagnose(
        tmp_path, mounts=f"mount --bind '{cache_dir}' '{cache_dir}' && mount -o remount,ro,bind '{cache_dir}'"
    )
    assert found["cache directory"]["status"] == "fail"
    assert "Read-only file system" in found["cache directory"]["found"]
    assert "QUARANTUNE_CACHE_DIR" in found["cache directory"]["remedy"]
    assert status == 1


@pytest.mark.slow
def test_the_doctor_finds_what_is_slow_or_unsafe_but_works(tmp_path: Path) -> None:
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "sitecustomize.py").write_text(NO_LOCKS)
    told = {
        "descriptors": ("may have 64 open", "ulimit -n 1024"),
        "cache locks": ("a lock has no effect", ""),
    }
    if doctor.machine.available_cpus() > 1:  # one core can run only one thread
        told["thread variables"] = ("OMP_NUM_THREADS=1", "")
    if can_mount():
        told["/dev/shm"] = ("1.0 MiB of 1.0 MiB", "--shm-size")
    status, found = diagnose(
        tmp_path,
        mounts=SMALL_SHM if can_mount() else "",
        descriptors=64,
        OMP_NUM_THREADS="1",
        PYTHONPATH=str(tmp_path / "without"),
    )
    for name, (what, remedy) in told.items():
        assert found[name]["status"] == "warn", name
        assert what in found[name]["found"]
        assert remedy in found[name]["remedy"]
    assert status == 0, "tuning itself works"


@pytest.mark.slow
def test_too_few_descriptors_are_found(tmp_path: Path) -> None:
    status, found = diagnose(tmp_path, descriptors=32)
    assert (status, found["descriptors"]["status"]) == (1, "fail")


@pytest.mark.slow
def test_a_missing_cuda_plugin_is_found_if_there_is_a_driver(tmp_path: Path) -> None:
    if any("cuda" in plugin.name for plugin in importlib.metadata.entry_points(group="jax_plugins")):
        pytest.skip("JAX's CUDA plugin is installed")
    (tmp_path / "driver" / "nvidia").mkdir(parents=True)
    (tmp_path / "driver" / "nvidia" / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module 570.1\n")
    mounts = f"mount --bind '{tmp_path / 'driver'}' /proc/driver"
    status, found = diagnose(tmp_path, mounts=mounts, JAX_PLATFORMS="")
    assert found["NVIDIA GPU"]["status"] == "fail"
    assert "pip install 'jax[cuda13]'" in found["NVIDIA GPU"]["remedy"]
    assert status == 1
    status, found = diagnose(tmp_path, mounts=mounts, JAX_PLATFORMS="cpu")
    assert (status, found["NVIDIA GPU"]["status"]) == (0, "ok"), "the user asked for the CPU"


@pytest.mark.slow
@pytest.mark.parametrize(("device", "is_tpu"), [("0x0042", False), ("0x0063", True)], ids=["a NIC of Google's", "v5e"])
def test_a_tpu_is_found_on_the_pci_bus(device: str, is_tpu: bool, tmp_path: Path) -> None:
    for address, vendor, id_ in (("0000:00:04.0", "0x10de", "0x0063"), ("0000:00:05.0", "0x1ae0", device)):
        (tmp_path / "devices" / address).mkdir(parents=True)
        (tmp_path / "devices" / address / "vendor").write_text(f"{vendor}\n")
        (tmp_path / "devices" / address / "device").write_text(f"{id_}\n")
    mounts = f"mount --bind '{tmp_path / 'devices'}' /sys/bus/pci/devices"
    status, found = diagnose(tmp_path, mounts=mounts, JAX_PLATFORMS="cpu")
    assert (status, "TPU" in found) == (0, is_tpu)


@pytest.mark.slow
def test_a_plugin_that_does_not_load_is_found_with_a_driver(tmp_path: Path) -> None:
    (tmp_path / "driver" / "nvidia").mkdir(parents=True)
    (tmp_path / "driver" / "nvidia" / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module 570.1\n")
    about = tmp_path / "site" / "broken_plugin-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-plugin\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[jax_plugins]\ncuda = broken_plugin\n")
    (tmp_path / "site" / "broken_plugin.py").write_text("def initialize():\n    raise RuntimeError('no cuDNN')\n")
    mounts = f"mount --bind '{tmp_path / 'driver'}' /proc/driver"
    status, found = diagnose(tmp_path, mounts=mounts, PYTHONPATH=str(tmp_path / "site"), JAX_PLATFORMS="")
    assert found["NVIDIA GPU"]["status"] == "ok"
    assert found["devices"]["status"] == "fail"
    assert "although the driver and JAX's plugin" in found["devices"]["found"]
    assert status == 1


@pytest.mark.slow
def test_a_bad_variable_is_one_finding_among_the_others(tmp_path: Path) -> None:
    status, found = diagnose(tmp_path, QUARANTUNE_TIMEOUT="soon")
    assert found["settings"]["status"] == "fail"
    assert "QUARANTUNE_TIMEOUT" in found["settings"]["found"]
    assert "cores" in found
    assert status == 1


@pytest.mark.slow
def test_a_sandbox_that_does_not_work_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = tmp_path / "sitecustomize.py"
    module.write_text("import os\nif 'QUARANTUNE_SANDBOX' in os.environ:\n    os._exit(3)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{SOURCE}")
    from quarantune.sandbox import template

    template.close_shared()
    try:
        found = next(iter(doctor.trials()))
    finally:
        template.close_shared()
    assert found.status is doctor.Status.FAIL
    assert failed([found])
    assert "QUARANTUNE_LOG_DIR" in found.remedy


SMI = """#!/bin/sh
case "$1" in
--query-gpu*throttle*) printf '%s\\n' '{gpu}' ;;
--query-compute*) printf '%s\\n' '{app}' ;;
*) exit 6 ;;
esac
"""


@pytest.mark.parametrize(
    ("gpu", "app", "status", "words"),
    [
        ("0, H200, 570.1, 1980, 1980, 0x0000000000000001, 4, 0", "", "ok", "1980 of 1980 MHz"),
        ("0, H200, 570.1, 900, 1980, 0x0000000000000060, 4, 0", "", "warn", "heat"),
        ("0, H200, 570.1, 1980, 1980, 0x0, 90000, 99", "GPU-1, 77, 89000", "warn", "processes 77"),
    ],
)
def test_slow_clocks_and_other_tenants_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: str, app: str, status: str, words: str
) -> None:
    (tmp_path / "nvidia-smi").write_text(SMI.format(gpu=gpu, app=app))
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (found,) = doctor.nvidia()
    assert (found.status.value, words in found.found) == (status, True)


def test_of_each_gpu_its_own_tenants_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text("""#!/bin/sh
case "$*" in
--query-gpu*throttle*) printf '0, H200, 570.1, 1980, 1980, 0x0, 2000, 9\n1, H200, 570.1, 1980, 1980, 0x0, 2000, 9\n' ;;
--query-compute*--id=0*) echo 'GPU-a, 77, 2000' ;;
--query-compute*--id=1*) echo 'GPU-b, 78, 2000' ;;
--query-compute*) printf 'GPU-a, 77, 2000\nGPU-b, 78, 2000\n' ;;
esac
""")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    first, second = (check.found for check in doctor.nvidia())
    assert ("processes 77," in first, "processes 78," in second) == (True, True)


def test_damaged_results_are_found(cache_dir: Path) -> None:
    cache_dir.mkdir()
    (cache_dir / "matmul.json").write_text('{\n"cpu": {')
    found = {entry.name: entry for entry in doctor.cache_directory(Settings(cache_dir=cache_dir))}
    assert found["cached results"].status is doctor.Status.WARN
    assert "matmul.json" in found["cached results"].found
    assert [path.name for path in cache_dir.iterdir()] == ["matmul.json"]


@pytest.mark.parametrize(
    ("kind", "status"), [("ext4", "ok"), ("nfs4", "ok"), ("fuse.sshfs", "warn"), ("fuse.gcsfuse", "warn")]
)
def test_a_filesystem_whose_locks_bind_one_host_is_named(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, kind: str, status: str
) -> None:
    monkeypatch.setattr(doctor, "filesystem", lambda path: kind)
    found = {check.name: check for check in doctor.cache_directory(Settings(cache_dir=cache_dir))}["cache locks"]
    assert (found.status, kind in found.found) == (status, True)
    assert ("binds this machine only" in found.found) == (status == "warn")


@pytest.mark.slow
def test_a_filesystem_has_the_type_of_its_last_nearest_mount(tmp_path: Path) -> None:
    odd = tmp_path / "\u00e9 \v\u2028\udcff"
    program = (
        "import os, pathlib, subprocess, sys\n"
        "from quarantune.doctor import filesystem\n"
        "odd = pathlib.Path(sys.argv[1])\n"
        "before = filesystem(odd)\n"
        "def mounted(kind):\n"
        "    subprocess.run(['mount', '-t', kind, 'none', odd], check=True)\n"
        "    return filesystem(odd), filesystem(odd / 'cache')\n"
        "print(mounted('ramfs'), mounted('tmpfs'), filesystem(odd.parent) == before != '')\n"
    )
    if not can_mount():
        pytest.skip("users of this machine cannot have private mounts (unshare -rm)")
    odd.mkdir()
    said = python("-c", program, odd, before=["unshare", "-rm"])
    assert said == "('ramfs', 'ramfs') ('tmpfs', 'tmpfs') True\n"


def test_no_limit_on_processes_allows_any_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = tmp_path / "sys/fs/cgroup/job"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    (group / "pids.current").write_text("30\n")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    for limit, left in (("max", None), ("100", 70), ("20", 0)):
        (group / "pids.max").write_text(f"{limit}\n")
        found = doctor.machine.processes_left(root=tmp_path)
        assert found == (None if left is None else (left, f"pids.max of the control group is {limit}"))


def test_the_findings_are_plain_data() -> None:
    found: Any = doctor.warn("cores", "1 of 2", "more")
    assert json.loads(json.dumps(found.to_dict())) == {
        "name": "cores",
        "status": "warn",
        "found": "1 of 2",
        "remedy": "more",
    }


@pytest.mark.parametrize(
    ("platforms", "chosen"),
    [
        (None, ["NVIDIA GPU", "TPU"]),
        ("gpu", ["NVIDIA GPU"]),
        ("cuda,cpu", ["NVIDIA GPU"]),
        ("tpu,cpu", ["TPU"]),
        ("cpu", []),
    ],
)
def test_an_unused_plugin_differs_from_a_broken_one(
    monkeypatch: pytest.MonkeyPatch, platforms: str | None, chosen: list[str]
) -> None:
    hardware = {kind: (lambda: True, *rest) for kind, (_, *rest) in doctor._HARDWARE.items()}
    monkeypatch.setattr(doctor, "_HARDWARE", hardware)
    monkeypatch.setattr(targets, "has_plugin", lambda plugin: True)
    monkeypatch.setattr(discovery, "accelerators", lambda: (CompileTarget(platform="cpu", device_kind="cpu"),))
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", platforms)
    try:
        found = {check.name: check.status for check in doctor.plugins()}
        (check,) = doctor.devices()
    finally:
        jax.config.update("jax_platforms", before)
    assert found == {kind: "ok" if kind in chosen else "warn" for kind in ("NVIDIA GPU", "TPU")}
    assert check.status == ("fail" if chosen else "ok")
    assert not chosen or f"for the {chosen[0]} are here" in check.found


@pytest.mark.parametrize(
    ("figures", "message", "status", "told"),
    [
        (CompilerFigures(estimate=CycleEstimate(cycles=5.0)), "", "ok", "estimates cycles"),
        (CompilerFigures(no_estimate="it has no option"), "", "warn", "no estimates: it has no option"),
        (None, "it has ended", "warn", "no estimates: it has ended"),
    ],
)
def test_the_tpu_compilers_findings_are_reported(
    figures: CompilerFigures | None, message: str, status: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = Trial(config={"scale": 1}, outcome=Outcome.OK, figures=figures, message=message)
    report = types.SimpleNamespace(trials=[trial])
    monkeypatch.setattr(quarantune, "compile_check", lambda *_, **__: report)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: True)
    (check,) = doctor.tpu_compiler()
    assert check.status == status
    assert told in check.found
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    assert [*doctor.tpu_compiler()] == []
