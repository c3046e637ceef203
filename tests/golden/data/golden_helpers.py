"""A helper that `golden_kernels` imports by name; it may not change: results recorded for it must be found."""

from __future__ import annotations

from typing import Any


def shifted(x: Any, by: int = 3) -> Any:
    return (lambda y: y * 2)(x) + by
