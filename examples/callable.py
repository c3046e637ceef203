"""Tunes a plain numpy function without JAX: nearest neighbours in blocks of rows, by one of two formulas."""

from __future__ import annotations

import sys

import numpy as np

import quarantune


def nearest(points: np.ndarray, queries: np.ndarray, *, rows: int, formula: str) -> np.ndarray:
    """Returns the distance of each query to its nearest point, `rows` queries at a time."""
    squares = np.einsum("pd,pd->p", points, points)
    found = []
    for start in range(0, len(queries), rows):
        block = queries[start : start + rows]
        if formula == "difference":
            distances = np.square(block[:, None] - points).sum(axis=-1)
        else:  # |q - p|^2 = |q|^2 - 2 q.p + |p|^2, where the products are one matrix multiplication
            distances = np.einsum("qd,qd->q", block, block)[:, None] - 2 * (block @ points.T) + squares
        found.append(np.sqrt(np.maximum(distances.min(axis=1), 0)))
    return np.concatenate(found)


def one_by_one(points: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Returns the expected output, computed for one query at a time."""
    return np.array([np.linalg.norm(points - query, axis=1).min() for query in queries], points.dtype)


def main() -> None:
    """Tunes, prints the outcome of every config, and checks the winner."""
    rng = np.random.default_rng(0)
    points, queries = (rng.normal(size=(1000, 8)).astype(np.float32) for _ in range(2))

    configs = quarantune.grid(rows=[1, 8, 64, 250], formula=["difference", "product"])
    result = quarantune.AutoTuner(nearest, configs, ref_fn=one_by_one).run(points, queries)
    print(result.table())

    error = np.abs(result.fn(points, queries) - one_by_one(points, queries)).max()
    if not error <= 0.01:
        sys.exit(f"a distance is off by {error:.2g}")
    print(f"agrees with distances taken one by one to {error:.1e}")


if __name__ == "__main__":
    main()
