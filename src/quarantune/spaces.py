"""Ready-made config spaces, rules that drop configs from them, and the device limits behind the rules."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from quarantune import device_table
from quarantune.device_table import DeviceLimits
from quarantune.values.configs import Config, Configs
from quarantune.values.space import expand

__all__ = [
    "FP8_GEMM_CONFIGS",
    "GATED_MLP_CONFIGS",
    "MATMUL_CONFIGS",
    "RMSNORM_ROPE_CONFIGS",
    "TPU_VMEM_BYTES",
    "DeviceLimits",
    "device_limits",
    "divides",
    "filter_valid_configs",
    "fits_registers",
    "fits_shared_memory",
    "generate_configs",
    "get_default_config",
    "tpu_configs",
]


def __dir__() -> list[str]:
    return __all__


MATMUL_CONFIGS: dict[str, list[int]] = {
    "BLOCK_M": [64, 128],
    "BLOCK_N": [64, 128, 256],
    "BLOCK_K": [32, 64],
    "num_warps": [4, 8],
    "num_stages": [2, 3],
}
"""For a 16-bit matrix product on a GPU: the 48 configs of this project's measurements."""

RMSNORM_ROPE_CONFIGS: dict[str, list[int]] = {
    "BLOCK_SIZE": [64, 128, 256, 512, 1024],
    "num_warps": [2, 4, 8],
    "num_stages": [1, 2, 3],
}
"""For RMSNorm fused with rotary embedding: the values in the documentation of triton_ops."""

GATED_MLP_CONFIGS: dict[str, list[int]] = {
    "BLOCK_M": [32, 64, 128],
    "BLOCK_N": [32, 64, 128],
    "BLOCK_K": [32, 64],
    "num_warps": [4, 8],
    "num_stages": [2, 3, 4],
}
"""For a gated MLP: the values in the documentation of triton_ops."""

FP8_GEMM_CONFIGS: dict[str, list[int]] = {
    "BLOCK_M": [64, 128, 256],
    "BLOCK_N": [64, 128, 256],
    "BLOCK_K": [32, 64],
    "GROUP_SIZE_M": [4, 8],
    "num_warps": [4, 8],
    "num_stages": [3, 4, 5],
}
"""For an 8-bit float matrix product: the values in the documentation of triton_ops."""

_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "matmul": {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 32, "num_warps": 4, "num_stages": 3},
    "rmsnorm_rope": {"BLOCK_SIZE": 128, "num_warps": 4, "num_stages": 2},
    "gated_mlp": {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "num_warps": 4, "num_stages": 3},
    "fp8_gemm": {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 32, "GROUP_SIZE_M": 8, "num_warps": 4, "num_stages": 4},
}


def get_default_config(kernel_type: str) -> Config:
    """Returns a config to start with, from the named space of a kernel.

    Args:
        kernel_type: `matmul`, `rmsnorm_rope`, `gated_mlp` or `fp8_gemm`.

    Returns:
        The config; an empty one for any other kernel type, so that the kernel's own defaults apply.
    """
    return dict(_DEFAULTS.get(kernel_type, {}))


_MEGACORE = ("TPU v4", "TPU v5", "TPU v5p")
"""Chips whose two cores JAX shows as one device; a kernel uses both if its parallel grid divides by two."""
_LANES, _SMALLEST_TILE = 128, 128
_TILES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
TPU_VMEM_BYTES = 16 << 20
"""The least of the limits that compilers for TPUs set for a kernel by default, on a v5e."""
# By kernel: the names of its blocks, of which all but the first are in the last dimension of an array; how many of them
# are parallel in the grid; and the bytes of its blocks for elements of `size` bytes: each block twice, because the next
# is copied meanwhile, and what is computed in float32.
_TPU_KERNELS: Mapping[str, tuple[Sequence[str], int, Callable[..., int]]] = {
    "matmul": (("BLOCK_M", "BLOCK_N", "BLOCK_K"), 2, lambda size, _, m, n, k: _product_bytes(size, m, n, k)),
    "grouped_matmul": (("TILE_M", "TILE_N", "TILE_K"), 2, lambda size, _, m, n, k: _product_bytes(size, m, n, k)),
    "attention": (("BLOCK_Q", "BLOCK_KV"), 1, lambda size, width, q, kv: _attention_bytes(size, width or 128, q, kv)),
    "elementwise": (("BLOCK_M", "BLOCK_N"), 2, lambda size, width, m, n: 2 * size * (width or 2) * m * n),
}


def _product_bytes(size: int, m: int, n: int, k: int) -> int:
    return 2 * size * (m * k + k * n + m * n) + 12 * m * n


def _attention_bytes(size: int, width: int, q: int, kv: int) -> int:
    return 4 * size * width * (q + kv) + 4 * q * (3 * kv + width + 2 * _LANES)


def tpu_configs(
    kernel: str,
    sizes: Sequence[int],
    *,
    itemsize: int = 2,
    width: int | None = None,
    device_kind: str,
    vmem_bytes: int = TPU_VMEM_BYTES,
) -> list[Config]:
    """Returns a space for a Pallas kernel on a TPU: tiles that its layout, VMEM and cores suit.

    Blocks are powers of two that divide the sizes, in multiples of the layout of the dtype: (8, 128) for 4 bytes,
    (16, 128) for 2 and (32, 128) for 1. Double-buffered, they fit into the memory. On chips with two cores in one
    device (v4, v5p) the parallel grid divides by two if it can.

    Args:
        kernel: `matmul` or `grouped_matmul` with sizes (M, N, K), `attention` with (queries, keys), or `elementwise`
            with (rows, columns).
        sizes: the sizes of the problem.
        itemsize: the bytes of an element.
        width: for `attention` the width of a head, by default 128; for `elementwise` the number of arrays that it
            reads and writes, by default 2.
        device_kind: JAX's name of the chip, such as `TPU v6 lite`, or `TPU v6e`.
        vmem_bytes: the VMEM that the kernel may use; more than the default only with its own `vmem_limit_bytes`.

    Returns:
        The configs; none if no block divides the sizes.

    Raises:
        ValueError: There is no such kernel or chip, or the sizes do not fit the kernel.

    Example:
        >>> tpu_configs("elementwise", (256, 256), itemsize=4, device_kind="TPU v5e")[0]
        {'BLOCK_M': 128, 'BLOCK_N': 128}
    """
    if kernel not in _TPU_KERNELS:
        raise ValueError(f"there is no space for {kernel!r}: choose from {', '.join(_TPU_KERNELS)}")
    names, parallel, needed = _TPU_KERNELS[kernel]
    most = device_table.limits_of(device_kind).shared_memory_per_block_bytes
    if not device_kind.startswith("TPU") or most is None:
        raise ValueError(f"{device_kind!r} is not a known TPU: give a `device_kind`, such as 'TPU v6 lite'")
    if len(sizes) != len(names) or min(sizes) < 1 or itemsize not in (1, 2, 4):
        raise ValueError(f"{kernel} takes {len(names)} sizes of at least 1, and elements of 1, 2 or 4 bytes")
    units = [32 // itemsize, *[_LANES] * (len(names) - 1)]
    choices = [
        [tile for tile in _TILES if tile >= min(_SMALLEST_TILE, size) and size % tile == 0 and tile % unit == 0]
        for size, unit in zip(sizes, units, strict=True)
    ]
    most = min(most, vmem_bytes)
    fitting = [tiles for tiles in itertools.product(*choices) if needed(itemsize, width, *tiles) <= most]
    if device_kind in _MEGACORE:
        blocks = [math.prod(map(operator.floordiv, sizes[:parallel], tiles)) for tiles in fitting]
        fitting = [it for it, count in zip(fitting, blocks, strict=True) if count % 2 == 0] or fitting
    return [dict(zip(names, tiles, strict=True)) for tiles in fitting]


def generate_configs(config_space: Mapping[str, Any]) -> list[Config]:
    """Returns every combination of a space's values, the last name varying fastest, as `quarantune.grid(**space)` does.

    Args:
        config_space: from names to lists of values.

    Raises:
        TypeError: A value is not a list of config values.
        ValueError: The space has no names, or a name without values.
    """
    return expand(config_space, fn_name="generate_configs")


def filter_valid_configs(
    configs: Configs,
    hidden_dim: int | None = None,
    intermediate_dim: int | None = None,
    M: int | None = None,
    N: int | None = None,
    K: int | None = None,
) -> list[Config]:
    """Returns the configs whose blocks are not too big for the problem, in order.

    Each rule holds for configs with its name, if the caller gives its size. A config must satisfy all rules:

    - `BLOCK_SIZE <= hidden_dim`
    - `BLOCK_M <= 2 * M` and `BLOCK_N <= 2 * N`: a masked block may reach over the edge, but not be mostly outside
    - `BLOCK_K <= K`

    These are the rules of triton_ops, with one addition for a gated MLP, `[M, hidden] @ [hidden, intermediate]`:
    `N` defaults to `intermediate_dim`, and `K` to `hidden_dim`. Blocks under other names do not matter. For kernels
    without masks, whose blocks must divide the problem, prune with `divides`.

    Args:
        configs: dicts, or a dict of lists for its full grid.
        hidden_dim: the model's width.
        intermediate_dim: the width inside its MLP.
        M: rows of a matrix product's result.
        N: columns of its result.
        K: the length summed over.

    Returns:
        The configs that satisfy all rules, possibly none.
    """
    listed: Iterable[Mapping[str, Any]] = generate_configs(configs) if isinstance(configs, Mapping) else configs
    n = intermediate_dim if N is None else N
    k = hidden_dim if K is None else K
    most = {"BLOCK_SIZE": hidden_dim, "BLOCK_M": M and 2 * M, "BLOCK_N": n and 2 * n, "BLOCK_K": k}
    limits = {name: limit for name, limit in most.items() if limit is not None}
    return [
        dict(config)
        for config in listed
        if all(config[name] <= limit for name, limit in limits.items() if name in config)
    ]


def device_limits(kind: str | None = None) -> DeviceLimits:
    """Returns the limits of a kind of device; all None for one not in the table, such as a CPU.

    Args:
        kind: JAX's `device_kind`. None asks a worker process for JAX's default device, so this process initialises no
            backend.

    Raises:
        SandboxError: `kind` is None, and the worker could not find the default device.
    """
    if kind is None:
        from quarantune.devices import discovery  # it imports JAX, which the rest of this module does not need

        _, kind = discovery.platform_and_kind(None)
    return device_table.limits_of(kind)


def fits_shared_memory(bytes_needed: int, *, device_kind: str | None = None) -> bool:
    """Returns whether a block may have that much shared memory; True if the limit is unknown.

    Args:
        bytes_needed: the shared memory of one block, all pipeline stages together.
        device_kind: JAX's name of the device; None for the default device, see `device_limits`.

    Raises:
        SandboxError: `device_kind` is None, and the worker could not find the default device.

    Example:
        >>> def prune(config, a, b):  # a prune_fn
        ...     tiles = (config["BLOCK_M"] + config["BLOCK_N"]) * config["BLOCK_K"] * a.dtype.itemsize
        ...     return fits_shared_memory(tiles * config["num_stages"])
    """
    return _at_most(bytes_needed, device_limits(device_kind).shared_memory_per_block_bytes)


def fits_registers(bytes_needed: int, *, threads: int, device_kind: str | None = None) -> bool:
    """Returns whether a block can hold that much in registers; True if the limits are unknown.

    This assumes the same number of bytes in each thread. A block that needs more works but is slow, because the
    compiler spills registers to memory. Count only data that must stay in registers, such as accumulators
    (`BLOCK_M * BLOCK_N * 4` for float32).

    Args:
        bytes_needed: the data that one block keeps in registers.
        threads: the number of threads in the block: `num_warps` times 32, on AMD's data centre GPUs times 64.
        device_kind: JAX's name of the device; None for the default device, see `device_limits`.

    Raises:
        SandboxError: `device_kind` is None, and the worker could not find the default device.
        ValueError: `threads` is not positive.
    """
    if threads < 1:
        raise ValueError(f"threads is {threads!r}; give the number of threads in a block, at least 1.")
    limits = device_limits(device_kind)
    registers_each = -(-bytes_needed // (4 * threads))
    return (
        _at_most(threads, limits.threads_per_block)
        and _at_most(registers_each, limits.registers_per_thread)
        and _at_most(registers_each * threads, limits.registers_per_block)
    )


def divides(value: int, by: int) -> bool:
    """Returns whether `value` is a whole number of blocks of size `by`.

    Args:
        value: a size of the problem.
        by: a size of the block.

    Raises:
        ValueError: `by` is not positive.

    Example:
        >>> divides(4096, 128), divides(100, 64)
        (True, False)
    """
    if by < 1:
        raise ValueError(f"by is {by!r}; give the size of a block, at least 1.")
    return value % by == 0


def _at_most(value: int, limit: int | None) -> bool:
    return limit is None or value <= limit
