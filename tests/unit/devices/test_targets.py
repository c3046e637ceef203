"""Targets are found by name without the device, with descriptions in the package and in cache directories."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

import quarantune
from quarantune.devices import targets
from quarantune.values import blocks
from quarantune.values.trial import CompileTarget
from quarantune.worker.failures import outcome_of, place_of

TEXT = 'gpu_device_info {\n  core_count: 58\n}\nplatform_name: "CUDA"\ndevice_description_str: "NVIDIA L4"\n'


@pytest.mark.parametrize("name", ["TPU v5e", "v5e", "tpu V5E", "TPU v5 lite", "tpu-v5e"])
def test_a_tpu_is_found_by_its_name_and_jaxs_name(name: str) -> None:
    found = targets.find(name)
    assert (found.name, found.platform, found.device_kind, found.topology) == (
        "TPU v5e",
        "tpu",
        "TPU v5 lite",
        "v5e:2x2",
    )


@pytest.mark.usefixtures("cpu_only")
def test_no_two_targets_have_the_same_short_name() -> None:
    listed = quarantune.targets()
    assert [targets.find(target.name) for target in listed] == list(listed)
    assert [targets.find(target.device_kind) for target in listed] == list(listed)
    assert targets.find("7x") == targets.find("v7x") == targets.find("TPU7x")


@pytest.mark.parametrize("name", ["NVIDIA H100", "h100", "Nvidia h100", "NVIDIA H100 80GB HBM3"])
def test_a_gpu_is_found_by_its_name_and_jaxs_name(name: str) -> None:
    found = targets.find(name)
    assert (found.name, found.platform, found.num_cores) == ("NVIDIA H100", "cuda", 132)
    assert targets.find(found) is found


def test_an_unknown_target_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match=r"target='TPU v6' is not known\. Did you mean 'TPU v.*Known are: cpu, TPU v4,"
    ):
        targets.find("TPU v6")
    with pytest.raises(TypeError, match=r"give a name, or one of quarantune\.targets"):
        targets.find(5)  # type: ignore[arg-type]


@pytest.mark.usefixtures("cpu_only")
def test_every_target_states_where_its_description_comes_from() -> None:
    listed = quarantune.targets()
    names = [target.name for target in listed]
    assert names[:2] == ["cpu", "TPU v4"]
    assert {"TPU v5e", "TPU v5p", "TPU v6e", "NVIDIA A100", "NVIDIA H100", "NVIDIA H200", "NVIDIA B200"} <= set(names)
    assert all(target.origin and len(target.origin) < 130 for target in listed)
    assert all(target.config_text and target.num_cores for target in listed if target.platform == "cuda")


def test_a_complete_description_is_used_by_its_jax_alone() -> None:
    short = targets.packaged("nvidia_h200", "0.10.2")
    assert "scalar_unit_description" not in short.config_text
    complete = targets.packaged("nvidia_h200", "0.11.2")
    assert "scalar_unit_description" in complete.config_text
    assert complete.device_kind == short.device_kind == "NVIDIA H200"


def test_a_sweep_leaves_its_gpu_for_jobs_without_it(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = CompileTarget(platform="cuda", config_text=TEXT, device_kind="NVIDIA L4", num_cores=58)
    targets.remember(seen, blocks.current())
    (file,) = (cache_dir / "targets").iterdir()
    before = file.stat().st_mtime_ns, file.stat().st_ino
    targets.remember(seen, blocks.current())
    assert (file.stat().st_mtime_ns, file.stat().st_ino) == before, "the description is not written again"
    found = targets.find("l4")
    assert found.for_compiling == seen
    assert found.origin == f"read from NVIDIA L4 by JAX {jax.__version__}"
    monkeypatch.setattr(jax, "__version__", "0.0.1")
    with pytest.raises(ValueError, match="'l4' is not known"):
        targets.find("l4")  # another version of JAX may not be able to read it


def test_a_description_left_by_a_sweep_replaces_the_packages(cache_dir: Path) -> None:
    targets.save(cache_dir, "NVIDIA H200", TEXT.replace("NVIDIA L4", "NVIDIA H200"))
    assert targets.find("H200").num_cores == 58
    with quarantune.settings(disable_cache=True):
        assert targets.find("H200").num_cores == 132


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"{}", b"x" * (1 << 19)])
def test_damaged_descriptions_are_passed_over(cache_dir: Path, content: bytes) -> None:
    folder = cache_dir / "targets"
    folder.mkdir(parents=True)
    (folder / f"a.jax{jax.__version__}.textproto").write_bytes(content)
    (folder / f"b.jax{jax.__version__}.textproto").mkdir()
    assert list(targets.saved(cache_dir)) == []


def test_the_devices_of_this_machine_are_listed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    device = CompileTarget(platform="cuda", device_kind="NVIDIA L4", config_text=TEXT, num_cores=58)
    monkeypatch.setattr(targets.discovery, "accelerators", lambda: (device, device))
    listed = quarantune.targets()
    assert [target.name for target in listed[:3]] == ["cpu", "NVIDIA L4", "TPU v4"]
    assert listed[1].config_text == TEXT
    assert [target.is_here for target in listed[:3]] == [True, True, False]


@pytest.mark.parametrize(("target", "extra"), [("v5e", r"quarantune\[tpu\]"), ("H100", r"quarantune\[cuda-compile\]")])
def test_a_missing_compiler_names_the_extra_that_installs_it(
    target: str, extra: str, monkeypatch: pytest.MonkeyPatch, no_process: None
) -> None:
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(targets, "entry_points", lambda group: ())
    with pytest.raises(ImportError, match=f"which is not installed: pip install '{extra}'"):
        quarantune.compile_check(jax.jit(lambda x, n=1: x, static_argnames=["n"]), [{"n": 1}], 1.0, target=target)


@pytest.mark.parametrize(
    ("memory", "outcome"), [("vmem", "error"), ("smem", "error"), ("hbm", "device_oom"), ("shared", "error")]
)
def test_only_the_devices_main_memory_can_be_out_of_memory(memory: str, outcome: str) -> None:
    text = "Shared memory size limit exceeded" if memory == "shared" else f"Ran out of memory in memory space {memory}"
    assert outcome_of(jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {text}"), "compile") == outcome


def caught(act: Callable[[], Any]) -> Exception:
    try:
        act()
    except Exception as error:
        return error
    raise AssertionError("it raised nothing")


def refuses(about: str) -> None:
    if about == "a type":
        raise TypeError(about)
    raise ValueError(about)


def fails_in_xla(status: str) -> None:
    raise jax.errors.JaxRuntimeError(status)


def test_exceptions_have_a_place_per_line_and_status_of_xla() -> None:
    def place(act: Callable[..., None], *args: str) -> str:
        error = caught(functools.partial(act, *args))
        return place_of(error, str(error), "compile")

    one, other = place(refuses, "8 warps"), place(refuses, "16 warps")
    assert one == other
    assert re.fullmatch(r"ValueError at .*test_targets\.py:\d+", one)
    assert place(refuses, "a type") != one
    memory = place(fails_in_xla, "RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 274432")
    assert memory == "JaxRuntimeError RESOURCE_EXHAUSTED"
    assert memory == place(fails_in_xla, "RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 409600")
    assert place(fails_in_xla, "INTERNAL: 274432") == memory.replace("RESOURCE_EXHAUSTED", "INTERNAL")
    assert re.fullmatch(r"JaxRuntimeError at .*test_targets\.py:\d+", place(fails_in_xla, "no status here"))
    assert place_of(ValueError("never raised"), "never raised", "compile") == "ValueError"
    exhausted = jax.errors.JaxRuntimeError("INTERNAL: it wants 4096 bytes of 227")
    assert place_of(exhausted, str(exhausted), "check") == "JaxRuntimeError INTERNAL: it wants N bytes of N"


def test_no_description_brings_escapes_to_the_terminal(cache_dir: Path) -> None:
    folder = cache_dir / "targets"
    folder.mkdir(parents=True)
    file = folder / f"a.jax{jax.__version__}.textproto"
    file.write_text(f"# Origin: \x1b[2J\x1b]0;title\x07\n{TEXT}")
    (found,) = targets.saved(cache_dir)
    assert found.origin == r"\x1b[2J\x1b]0;title\x07"
    file.write_text(TEXT.replace("NVIDIA L4", "NVIDIA\x1b[2J L4"))
    assert list(targets.saved(cache_dir)) == []
