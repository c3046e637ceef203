"""A training step with tuned kernels computes the same bits as the untuned one, if the job demands them."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import PROGRAMS, python

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]


@pytest.mark.long
def test_fifty_steps_of_flax_have_the_bits_of_the_untuned_ones(tmp_path: Path) -> None:
    pytest.importorskip("flax")
    changes = {"QUARANTUNE_NUMERICS": "bitwise", "QUARANTUNE_CACHE_DIR": str(tmp_path), "QUARANTUNE_PROGRESS": "0"}
    assert python(PROGRAMS / "exact_training.py", 50, **changes).endswith("same bits\n")
