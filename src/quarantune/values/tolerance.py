"""How far a config's output may be from the expected output."""

from __future__ import annotations

import dataclasses
import sys

from quarantune.values.texts import shown


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """How far an output may be from the expected output.

    Attributes:
        rtol: the allowed difference of an element, relative to the expected element.
        atol: the allowed absolute difference, added to the relative one.
        max_mismatched_ratio: the share of a leaf's elements that may differ by more than both together.

    Raises:
        ValueError: a value is out of range; the message names it.
    """

    rtol: float = 1e-2
    atol: float = 1e-2
    max_mismatched_ratio: float = 0.01

    def __post_init__(self) -> None:
        for name, most, accepts in (
            ("rtol", sys.float_info.max, "a number of at least 0"),
            ("atol", sys.float_info.max, "a number of at least 0"),
            ("max_mismatched_ratio", 1.0, "a share of the elements, from 0 to 1, as a number"),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
                raise ValueError(f"{name}={shown(value)} is not valid: give {accepts}")
