"""Scripts that define and tune a kernel; this file contains no test."""

from __future__ import annotations

from pathlib import Path

from helpers import python

KERNEL = """
import functools, os, sys
import jax, numpy as np
import quarantune

@quarantune.autotune({"n": [2]}, rep=1, name="kernel", ref_fn=None)
@functools.partial(jax.jit, static_argnames=["n"])
def kernel(x, n: int = 1):
    if n != 2:  # the default fails, so that a result proves that it was tuned
        raise ArithmeticError(n)
    return x * 3

X = np.arange(3, dtype=np.float32)

def agree():
    np.testing.assert_array_equal(kernel(X), X * 3)
"""


def run(script: str, *args: str, cwd: Path, environ: dict[str, str | None] | None = None) -> None:
    """Runs a script with `python -c`, which puts the working directory on the import path."""
    python("-c", script, *args, cwd=cwd, **(environ or {}))
