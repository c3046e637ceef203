"""The examples do what they say, as scripts, and leave nothing behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from aftermath import MARK, carriers, eventually, shared_memory

import quarantune

SOURCE = Path(quarantune.__file__).parents[1]
EXAMPLES = Path(__file__).parents[1] / "examples"


def run(example: str, tmp_path: Path) -> str:
    """Runs an example to its good end and returns what it printed."""
    mark, tmpdir = uuid.uuid4().hex, tmp_path / "tmp"
    tmpdir.mkdir()
    before = set(shared_memory())
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / example)],
        env={**os.environ, "PYTHONPATH": str(SOURCE), "TMPDIR": str(tmpdir), MARK: mark},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert eventually(lambda: not carriers(MARK, mark), timeout_s=2)
    assert os.listdir(tmpdir) == []
    assert eventually(lambda: set(shared_memory()) <= before)
    return done.stdout


@pytest.mark.parametrize(
    ("example", "configs", "verdict"),
    [
        ("matmul.py", 12, r"agrees with a @ b"),
        ("attention.py", 9, r"agrees with the direct formula"),
        ("callable.py", 8, r"agrees with distances taken one by one"),
        ("rmsnorm_rope.py", 18, r"the defaults take \d.*\nagrees with plain JAX"),
        ("gated_mlp.py", 32, r"the defaults take \d.*\nagrees with plain JAX"),
        ("fp8_matmul.py", 16, r"the defaults take \d.*\nagrees with plain JAX"),
    ],
)
def test_an_example_tunes_every_config_and_checks_the_winner(
    example: str, configs: int, verdict: str, tmp_path: Path
) -> None:
    printed = run(example, tmp_path)
    assert len(re.findall(r"^.* (?:ok|slow) .*$", printed, re.MULTILINE)) == configs
    assert len(re.findall(r"^\*", printed, re.MULTILINE)) == 1
    assert re.search(verdict, printed)


def test_the_hostile_example_names_every_outcome_and_leaves_nothing(tmp_path: Path) -> None:
    start = time.monotonic()
    printed = run("hostile.py", tmp_path)
    # Its longest timeout is 2 s, and 3 s are allowed besides for each of its 18 rounds of one worker.
    assert time.monotonic() - start < 2 + 3 * 18
    assert "all 18 outcomes are right; the best config is {'mode': 'good'}" in printed
