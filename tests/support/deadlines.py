"""Deadlines for configs that hang, as short as a busy machine allows."""

from __future__ import annotations

from aftermath import eventually, left_of, nothing_is_left, quiet_place, running_templates  # noqa: F401
from helpers import deadline_s


def haste() -> dict[str, float]:
    """Returns deadlines for a hanging config; other configs may need several times as long on a busy machine."""
    return dict.fromkeys(("timeout", "compile_timeout"), deadline_s(1.5))
