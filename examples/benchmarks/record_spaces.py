"""Measures every config of a few spaces and writes the times as T4 JSON, for replays of searches without a device.

Run on a GPU of the Hopper generation; the spaces have more than 1,000 configs each:

    python examples/benchmarks/record_spaces.py DIRECTORY             # all spaces
    python examples/benchmarks/record_spaces.py DIRECTORY gated_mlp   # one of them
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gzip
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the examples' own kernels

import gated_mlp
import jax
import kernels
import numpy as np
from jax.experimental.pallas.ops.gpu import decode_attention

import quarantune

_INVALIDITY = {"ok": "correct", "slow": "correct", "wrong": "correctness", "timeout": "timeout"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """A kernel, its space and one problem.

    Attributes:
        kernel: returns a jitted function of the arguments.
        space: the values of each of its tunables.
        arrays: the shapes and dtypes of its arguments.
        statics: further arguments by keyword.
    """

    kernel: Callable[[], Callable[..., Any]]
    space: Mapping[str, Sequence[Any]]
    arrays: Sequence[tuple[tuple[int, ...], str]]
    statics: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def arguments(self) -> list[jax.Array]:
        """Returns the arguments, on the device."""
        rng = np.random.default_rng(0)

        def drawn(shape: tuple[int, ...], dtype: str) -> np.ndarray:
            if dtype == "int8":
                return rng.integers(-128, 127, shape, np.int8)
            if dtype == "int32":  # the sizes of groups of rows, as JAX's own benchmark draws them
                rows = self.arrays[0][0][0]
                return np.diff(np.sort(rng.integers(0, rows, shape[0] - 1)), prepend=0, append=rows).astype(np.int32)
            return (rng.standard_normal(shape, np.float32) / 8).astype(dtype)

        return jax.block_until_ready([jax.device_put(drawn(*array)) for array in self.arrays])


def hopper_matmul() -> Callable[..., Any]:
    """Returns JAX's matmul for Hopper GPUs with the fields of its config as tunables, each in plain JSON values."""
    from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu  # needs absl-py

    names = ["tile_m", "tile_n", "tile_k", "steps", "minor", "width", "wg", "cluster"]

    @functools.partial(jax.jit, static_argnames=names)
    def matmul(
        a: jax.Array,
        b: jax.Array,
        tile_m: int = 128,
        tile_n: int = 128,
        tile_k: int = 64,
        steps: int = 4,
        minor: str = "N",
        width: int = 1,
        wg: str = "N",
        cluster: str = "none",
    ) -> Any:
        dimension = hopper_matmul_mgpu.MatmulDimension
        config = hopper_matmul_mgpu.TuningConfig(
            tile_m=tile_m,
            tile_n=tile_n,
            tile_k=tile_k,
            max_concurrent_steps=steps,
            grid_minor_dim=dimension[minor],
            grid_tile_width=width,
            wg_dimension=dimension[wg],
            cluster_dimension=None if cluster == "none" else dimension[cluster],
        )
        return hopper_matmul_mgpu.matmul(a, b, None, config)

    return matmul


_TRITON_MATMUL = {
    "bm": [32, 64, 128, 256],
    "bn": [32, 64, 128, 256],
    "bk": [16, 32, 64, 128],
    "warps": [1, 2, 4, 8],
    "stages": [1, 2, 3, 4, 5],
}

RECIPES = {
    "matmul_bf16": Recipe(
        kernel=lambda: kernels.matmul_gpu,
        space=_TRITON_MATMUL,
        arrays=[((2048, 2048), "bfloat16")] * 2,
    ),
    "matmul_f32_wide": Recipe(
        kernel=lambda: kernels.matmul_gpu,
        space=_TRITON_MATMUL,
        arrays=[((512, 2048), "float32"), ((2048, 8192), "float32")],
    ),
    "gated_mlp": Recipe(
        kernel=lambda: gated_mlp.gated_mlp.__wrapped__,
        space={
            "BM": [32, 64, 128, 256],
            "BN": [32, 64, 128, 256],
            "BK": [16, 32, 64, 128],
            "warps": [2, 4, 8, 16],
            "stages": [1, 2, 3, 4, 5],
        },
        arrays=[((2048, 2048), "bfloat16"), *[((2048, 4096), "bfloat16")] * 2],
        statics={"interpret": False},
    ),
    "decode_attention": Recipe(
        kernel=lambda: decode_attention.mqa,
        space={
            "block_h": [16, 32, 64],
            "block_k": [16, 32, 64, 128, 256],
            "k_splits": [1, 2, 4, 8, 16, 32],
            "num_warps": [1, 2, 4, 8],
            "num_stages": [1, 2, 3, 4],
        },
        arrays=[((8, 64, 128), "bfloat16"), *[((8, 8192, 128), "bfloat16")] * 2],
    ),
    "hopper_matmul": Recipe(
        kernel=hopper_matmul,
        space={
            "tile_m": [64, 128, 256],
            "tile_n": [64, 128, 256],
            "tile_k": [64, 128],
            "steps": [2, 4, 6],
            "minor": ["M", "N"],
            "width": [1, 8, 16],
            "wg": ["M", "N"],
            "cluster": ["none", "M", "N"],
        },
        arrays=[((4096, 4096), "float16")] * 2,
    ),
}


def record(name: str, recipe: Recipe, directory: Path) -> None:
    """Measures every config of a space and writes `<name>.json.gz`."""
    args = recipe.arguments()
    # Outputs are not compared: the comparison would take most of the time, and the kernels are not in question.
    tuner = quarantune.AutoTuner(recipe.kernel(), recipe.space, name=f"record_{name}", ref_fn=None, search="exhaustive")
    began = time.monotonic()
    result = tuner.run(*args, **recipe.statics)
    took_s = time.monotonic() - began
    path = directory / f"{name}.json.gz"
    path.write_bytes(gzip.compress(json.dumps(described(result), separators=(",", ":")).encode(), mtime=0))
    print(
        f"{name}: {len(result.trials)} configs in {took_s:.0f} s, {result.failures}, best {result.time_ms:.4g} ms, "
        f"{path.stat().st_size / 1024:.0f} KiB",
        flush=True,
    )


def described(result: quarantune.TuningResult) -> dict[str, Any]:
    """Returns a result as T4 describes it, the format that Kernel Tuner writes."""
    rows = []
    for trial in result.trials:
        invalidity = _INVALIDITY.get(trial.outcome, "compile" if trial.phase == "compile" else "runtime")
        valid = invalidity == "correct" and trial.merit is not None
        value = float(f"{trial.merit:.5g}") if valid else math.inf
        measured = [{"name": "time", "value": value, "unit": "milliseconds"}] if valid else []
        rows.append({"configuration": trial.config, "invalidity": invalidity, "measurements": measured})
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    metadata = {"device": result.device, "versions": versions, "objectives": ["time"]}
    return {"schema_version": "1.0.0", "metadata": metadata, "results": rows}


def main() -> None:
    """Records the spaces named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="where to write the recordings")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(RECIPES)}; all if left out")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in RECIPES]:
        parser.error(f"there is no space {unknown[0]!r}: give one of {', '.join(RECIPES)}")
    options.directory.mkdir(parents=True, exist_ok=True)
    for name in options.names or RECIPES:
        record(name, RECIPES[name], options.directory)


if __name__ == "__main__":
    main()
