"""The operator's setting selects devices, and the platform's visibility variable shows them to workers."""

from __future__ import annotations

import dataclasses
import importlib.util
import types

import jax
import pytest

from quarantune.devices import discovery, targets
from quarantune.devices.discovery import cheap_context, visible_devices
from quarantune.jax_internals import jax_backends
from quarantune.values.blocks import current
from quarantune.values.trial import CompileTarget


def probed(count: int, platform: str = "cuda") -> list[CompileTarget]:
    return [CompileTarget(platform=platform, device_kind=f"kind {index}") for index in range(count)]


@pytest.mark.parametrize(
    ("visible", "allowed", "tokens"),
    [
        (None, None, ["0", "1", "2"]),
        ("", None, ["0", "1", "2"]),
        ("5,3,1", None, ["5", "3", "1"]),
        (" 5 , 3 ,1 ", None, ["5", "3", "1"]),
        ("GPU-aa,GPU-bb,MIG-cc", None, ["GPU-aa", "GPU-bb", "MIG-cc"]),
        (None, ["2", "0"], ["2", "0"]),
        ("5,3,1", ["0", "2"], ["5", "1"]),
        ("GPU-aa,GPU-bb,MIG-cc", ["1"], ["GPU-bb"]),
        ("GPU-aa,GPU-bb,MIG-cc", ["MIG-cc", "GPU-aa"], ["MIG-cc", "GPU-aa"]),
        ("GPU-aa,GPU-bb,MIG-cc", ["1", "GPU-aa", "GPU-bb", "0"], ["GPU-bb", "GPU-aa"]),
    ],
)
def test_devices_have_the_names_of_the_visibility_variable(
    visible: str | None, allowed: list[str] | None, tokens: list[str]
) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    devices = visible_devices(probed(3), environ=environ, allowed=allowed)
    assert [device.token for device in devices] == tokens
    assert [device.environ for device in devices] == [{"CUDA_VISIBLE_DEVICES": token} for token in tokens]
    assert [device.name for device in devices] == [f"cuda:{token}" for token in tokens]
    everything = visible_devices(probed(3), environ=environ, allowed=None)
    assert [everything[device.position(environ)] for device in devices] == devices


def hip_sees(environ: dict[str, str], there: int = 8) -> list[str]:
    """Returns the devices HIP shows a process; HIP chooses among those the lower runtime, ROCr, leaves."""
    left = [name for name in environ.get("ROCR_VISIBLE_DEVICES", "").split(",") if name] or list(map(str, range(there)))
    listed = environ.get("HIP_VISIBLE_DEVICES") or environ.get("CUDA_VISIBLE_DEVICES") or ""
    seen = []
    for name in (name.strip() for name in listed.split(",") if name):
        if name not in left and not (name.isdigit() and int(name) < len(left)):
            break  # entries after it do not count
        seen.append(name if name.startswith("GPU-") else left[int(name)])
    return seen if listed else left


@pytest.mark.parametrize(
    ("environ", "meant"),
    [
        ({}, ["0", "1", "2", "3", "4", "5", "6", "7"]),
        ({"ROCR_VISIBLE_DEVICES": "7,4"}, ["7", "4"]),
        ({"HIP_VISIBLE_DEVICES": "2,3"}, ["2", "3"]),
        ({"CUDA_VISIBLE_DEVICES": "5"}, ["5"]),
        ({"HIP_VISIBLE_DEVICES": "1, 0", "CUDA_VISIBLE_DEVICES": "6"}, ["1", "0"]),
        ({"ROCR_VISIBLE_DEVICES": "7,4,6", "HIP_VISIBLE_DEVICES": "2,1"}, ["6", "4"]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-a,GPU-b", "HIP_VISIBLE_DEVICES": "1"}, ["GPU-b"]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-a,GPU-b", "HIP_VISIBLE_DEVICES": "GPU-b,GPU-a"}, ["GPU-b", "GPU-a"]),
    ],
)
def test_a_worker_sees_its_amd_device_whatever_the_caller_set(environ: dict[str, str], meant: list[str]) -> None:
    assert hip_sees(environ) == meant
    devices = visible_devices(probed(len(meant), "rocm"), environ=environ, allowed=None)
    assert [hip_sees(environ | device.environ) for device in devices] == [[name] for name in meant]
    assert [device.name for device in devices] == [f"rocm:{name}" for name in meant]
    assert [device.position(environ) for device in devices] == list(range(len(meant)))
    same = [dataclasses.replace(device, kind="MI300X") for device in devices]
    for pair in discovery.grouped(same, 2) if len(meant) > 1 else ():
        assert hip_sees(environ | pair.environ) == [member.token for member in pair.members]


def test_each_device_keeps_its_kind() -> None:
    devices = visible_devices(probed(3), environ={"CUDA_VISIBLE_DEVICES": "5,3,1"}, allowed=["2", "0"])
    assert [device.kind for device in devices] == ["kind 2", "kind 0"]


@pytest.mark.parametrize("name", ["3", "-1", "GPU-zz", "5", "²"])
def test_a_missing_device_is_refused_with_a_list_of_devices(name: str) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "5,3,1"}
    with pytest.raises(ValueError, match="QUARANTUNE_DEVICES") as caught:
        visible_devices(probed(3), environ=environ, allowed=["0", name])
    assert repr(name) in str(caught.value)
    assert "0 (5), 1 (3), 2 (1)" in str(caught.value)


@pytest.mark.parametrize("probes", [[], probed(8, "cpu")])
def test_a_machine_without_accelerators_is_one_device(probes: list[CompileTarget]) -> None:
    (device,) = visible_devices(probes, environ={"CUDA_VISIBLE_DEVICES": "0,1"}, allowed=None)
    assert device.platform == device.name == "cpu"
    assert device.environ == {}
    assert "cores)" in device.kind


@pytest.mark.parametrize(
    ("platform", "environ", "expected"),
    [
        ("cuda", {}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        ("cuda", {"CUDA_DEVICE_MAX_CONNECTIONS": "4"}, {}),
        ("cpu", {}, {}),
    ],
    ids=["cuda", "the caller decides", "cpu"],
)
def test_a_cuda_worker_asks_for_one_queue_unless_configured(
    platform: str, environ: dict[str, str], expected: dict[str, str]
) -> None:
    assert cheap_context(platform, environ) == expected


def test_a_look_up_has_xla_describe_no_gpu_for_its_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    client = types.SimpleNamespace(platform_version="cuda 13")
    gpu = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H100", client=client)
    monkeypatch.setattr(jax_backends, "backends_initialized", lambda: True)
    monkeypatch.setattr(jax_backends, "target_config", lambda devices: pytest.fail("it does"))
    monkeypatch.setattr(jax, "local_devices", lambda backend: [gpu])
    assert discovery.platform_and_kind("gpu") == ("cuda", "NVIDIA H100")


def test_all_tpus_of_a_machine_are_one_device_with_one_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    chip = CompileTarget(platform="tpu", device_kind="TPU v5 lite", num_cores=1)
    monkeypatch.setattr(discovery, "_describe", lambda platform: (chip,) * 4)
    (device,), target = discovery.devices_and_target("tpu", current(), 4)
    assert (device.name, device.has_one_owner, device.environ, target) == ("tpu", True, {}, None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    known = targets.of_tpu(device.kind)
    assert known is not None
    assert known.topology == "v5e:2x2"
    assert targets.of_tpu("TPU of tomorrow") is None
