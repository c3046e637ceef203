"""After an edit of a kernel, no other program runs a saved result, and no unchanged program is measured again."""

from __future__ import annotations

import pytest
from check_edits import EDITS, KERNELS, run


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention", "jax rms_norm"])
@pytest.mark.long
def test_edits_neither_misuse_nor_repeat_a_result(name: str) -> None:
    (counts,) = run([name], 24, seed=7).values()
    assert counts["misused"] == 0, counts
    assert counts["measured again"] == 0, counts
    assert counts["equal"] >= 4
    assert counts["different"] >= 2


def test_there_are_edits_of_twelve_kernels() -> None:
    assert len(KERNELS) == 12
    assert len(set(EDITS)) >= 15
