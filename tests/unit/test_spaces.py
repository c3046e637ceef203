"""Named spaces are full grids, and their rules drop the configs that a device cannot run."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import python

from quarantune import grid, spaces
from quarantune.devices import discovery
from quarantune.spaces import (
    DeviceLimits,
    device_limits,
    divides,
    filter_valid_configs,
    fits_registers,
    fits_shared_memory,
    generate_configs,
    get_default_config,
)

SPACES: dict[str, dict[str, list[int]]] = {
    "matmul": spaces.MATMUL_CONFIGS,
    "rmsnorm_rope": spaces.RMSNORM_ROPE_CONFIGS,
    "gated_mlp": spaces.GATED_MLP_CONFIGS,
    "fp8_gemm": spaces.FP8_GEMM_CONFIGS,
}
KIB = 1024
H100 = "NVIDIA H100 80GB HBM3"
UNKNOWN = "AMD EPYC (2 cores)"


@pytest.mark.parametrize(
    ("name", "size"), [("matmul", 48), ("rmsnorm_rope", 45), ("gated_mlp", 108), ("fp8_gemm", 216)]
)
def test_a_named_space_is_a_plain_dict_of_lists_with_a_full_grid(name: str, size: int) -> None:
    space = SPACES[name]
    assert type(space) is dict
    assert all(type(values) is list for values in space.values())
    assert generate_configs(space) == grid(**space)
    assert len(generate_configs(space)) == size


@pytest.mark.parametrize("name", SPACES)
def test_a_default_is_one_of_its_space(name: str) -> None:
    assert get_default_config(name) in generate_configs(SPACES[name])


def test_a_changed_default_changes_no_other_callers_default() -> None:
    get_default_config("matmul")["BLOCK_M"] = 7
    assert get_default_config("matmul")["BLOCK_M"] != 7


def test_an_unknown_kernel_type_has_no_defaults_of_its_own() -> None:
    assert get_default_config("softmax") == {}


def test_generated_configs_keep_the_order_of_names_and_values() -> None:
    assert generate_configs({"BLOCK": [2, 1], "fast": [True]}) == [
        {"BLOCK": 2, "fast": True},
        {"BLOCK": 1, "fast": True},
    ]
    with pytest.raises(ValueError, match="generate_configs"):
        generate_configs({"BLOCK": []})


@pytest.mark.parametrize(
    ("name", "sizes", "kept"),
    [
        ("BLOCK_SIZE", {"hidden_dim": 128}, [32, 64, 128]),
        ("BLOCK_M", {"M": 64}, [32, 64, 128]),
        ("BLOCK_N", {"N": 32}, [32, 64]),
        ("BLOCK_K", {"K": 64}, [32, 64]),
        ("BLOCK_N", {"intermediate_dim": 32}, [32, 64]),
        ("BLOCK_N", {"intermediate_dim": 32, "N": 128}, [32, 64, 128, 256]),
        ("BLOCK_K", {"hidden_dim": 64}, [32, 64]),
        ("BLOCK_K", {"hidden_dim": 64, "K": 128}, [32, 64, 128]),
    ],
)
def test_a_config_is_dropped_when_a_block_is_too_big(name: str, sizes: dict[str, int], kept: list[int]) -> None:
    configs = [{name: block, "num_warps": 4} for block in (32, 64, 128, 256)]
    assert [config[name] for config in filter_valid_configs(configs, **sizes)] == kept


@pytest.mark.parametrize("sizes", [{}, {"M": 1, "N": 1, "K": 1, "hidden_dim": 1, "intermediate_dim": 1}])
def test_names_without_a_rule_are_ignored(sizes: dict[str, int]) -> None:
    configs = [{"BM": 4096, "num_stages": 9}]
    assert filter_valid_configs(configs, **sizes) == configs


def test_without_sizes_every_config_is_kept() -> None:
    assert len(filter_valid_configs(spaces.FP8_GEMM_CONFIGS)) == 216


def test_all_rules_hold_together_and_may_leave_no_config() -> None:
    kept = filter_valid_configs(spaces.FP8_GEMM_CONFIGS, M=64, N=32, K=32)
    assert {(config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]) for config in kept} == {
        (64, 64, 32),
        (128, 64, 32),
    }
    assert filter_valid_configs(spaces.FP8_GEMM_CONFIGS, M=1, N=1, K=1) == []
    assert filter_valid_configs([], M=1) == []


def test_configs_may_come_from_a_generator_and_are_copied() -> None:
    config = {"BLOCK_K": 32}
    (kept,) = filter_valid_configs((made for made in [config]), K=32)
    kept["BLOCK_K"] = 64
    assert config == {"BLOCK_K": 32}


@pytest.mark.parametrize(
    ("kind", "most"),
    [
        (H100, 227 * KIB),
        ("NVIDIA H200", 227 * KIB),
        ("NVIDIA A100-SXM4-80GB", 163 * KIB),
        ("NVIDIA L4", 99 * KIB),
        ("NVIDIA GeForce RTX 4090", 99 * KIB),
        ("Tesla T4", 64 * KIB),
        ("AMD Instinct MI300X", 64 * KIB),
        ("TPU v5 lite", 128 * KIB * KIB),
    ],
)
def test_shared_memory_fits_up_to_the_last_byte(kind: str, most: int) -> None:
    assert fits_shared_memory(most, device_kind=kind)
    assert not fits_shared_memory(most + 1, device_kind=kind)


def test_registers_are_limited_by_thread_block_and_count() -> None:
    assert fits_registers(255 * 4 * 128, threads=128, device_kind=H100)
    assert not fits_registers(255 * 4 * 128 + 1, threads=128, device_kind=H100)
    assert fits_registers(65536 * 4, threads=1024, device_kind=H100)
    assert not fits_registers(65536 * 4 + 1, threads=1024, device_kind=H100)
    assert not fits_registers(0, threads=1025, device_kind=H100)


def test_a_device_outside_the_table_excludes_no_config() -> None:
    assert device_limits(UNKNOWN) == DeviceLimits()
    assert fits_shared_memory(2**40, device_kind=UNKNOWN)
    assert fits_registers(2**40, threads=2**20, device_kind=UNKNOWN)


def test_a_slice_of_a_gpu_has_the_limits_of_the_whole() -> None:
    assert device_limits(f"{H100} MIG 1g.10gb") == device_limits(H100) != DeviceLimits()


@pytest.mark.parametrize(
    ("value", "by", "expected"), [(4096, 128, True), (100, 64, False), (64, 128, False), (0, 8, True)]
)
def test_divides_checks_for_a_whole_number_of_blocks(value: int, by: int, expected: bool) -> None:
    assert divides(value, by) is expected


def test_blocks_and_thread_counts_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="by is 0; give the size of a block"):
        divides(64, 0)
    with pytest.raises(ValueError, match="threads is 0; give the number of threads"):
        fits_registers(1, threads=0, device_kind=UNKNOWN)


def test_without_a_kind_the_default_devices_limits_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def answer(hint: str | None) -> tuple[str, str]:
        asked.append(hint)
        return "cuda", H100

    monkeypatch.setattr(discovery, "platform_and_kind", answer)
    assert device_limits() == device_limits(H100)
    assert not fits_shared_memory(227 * KIB + 1)
    assert not fits_registers(4 * 65537, threads=1024)
    assert asked == [None] * 3


def test_asking_for_the_default_device_starts_no_backend_here() -> None:
    code = """
from quarantune import spaces
from quarantune.jax_internals import jax_backends
print(spaces.device_limits() == spaces.DeviceLimits(), jax_backends.backends_initialized())
"""
    assert python("-c", code, JAX_PLATFORMS="cpu").split() == ["True", "False"]


TPUS = ["TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x"]


@pytest.mark.parametrize("kind", TPUS)
@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_tiles_for_tpus_divide_the_sizes_and_suit_the_layout(kind: str, itemsize: int) -> None:
    configs = spaces.tpu_configs("matmul", (4096, 2048, 1536), itemsize=itemsize, device_kind=kind)
    assert len(configs) > 20
    for config in configs:
        m, n, k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
        assert (m % (32 // itemsize), n % 128, k % 128) == (0, 0, 0)
        assert (4096 % m, 2048 % n, 1536 % k) == (0, 0, 0)
        assert 2 * itemsize * (m * k + k * n + m * n) < spaces.TPU_VMEM_BYTES


def test_two_cores_of_a_chip_get_the_same_number_of_blocks() -> None:
    def odd(kind: str) -> list[Any]:
        configs = spaces.tpu_configs("attention", (2048, 2048), device_kind=kind)
        return [config for config in configs if (2048 // config["BLOCK_Q"]) % 2]

    assert odd("TPU v6 lite")
    assert not odd("TPU v5")


def test_more_memory_makes_a_larger_space_within_the_chip() -> None:
    small, large, whole = (
        spaces.tpu_configs("matmul", (8192,) * 3, device_kind="TPU v5", vmem_bytes=mib << 20) for mib in (16, 64, 512)
    )
    assert len(small) < len(large) == len(whole)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("convolution", (8, 8)), "choose from matmul"),
        (("matmul", (8, 8)), "takes 3 sizes"),
        (("matmul", (8, 8, 0)), "at least 1"),
        (("elementwise", (256, 256), "NVIDIA H200"), "not a known TPU"),
        (("elementwise", (256, 256), "TPU v99"), "not a known TPU"),
    ],
)
def test_a_wrong_demand_for_a_space_names_the_remedy(arguments: tuple[Any, ...], reason: str) -> None:
    kernel, sizes, *kinds = arguments
    with pytest.raises(ValueError, match=reason):
        spaces.tpu_configs(kernel, sizes, device_kind=next(iter(kinds), "TPU v6 lite"))
