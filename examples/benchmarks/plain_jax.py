"""Compares quarantune with the installed peers on functions in plain JAX, whose products XLA tunes on a GPU.

It takes the options of compare.py, and runs as README.md describes.
"""

from __future__ import annotations

import json
from typing import Any

import compare
import jobs
import kernels

_WORK = {
    "attention": "Attention over {} queries and keys in blocks",
    "mlp": "Two layers on {} rows in blocks",
    "step": "A step of training on {} rows, with an attention in blocks",
}
"""A heading for each problem."""


def main() -> None:
    """Prints a table for each function when it is complete."""
    options, contenders, machine = compare.prepare(__doc__)
    results: dict[str, Any] = {"machine": machine}
    for name, heading in _WORK.items():
        problem = kernels.PROBLEMS[name]
        (size,) = problem.quick_sizes if options.quick else problem.sizes
        results[name] = compare.compare_sweeps(
            f"{heading.format(size)}, {problem.dtype}", contenders, options, machine["platform"], name, size
        )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    jobs.run_main(main)
