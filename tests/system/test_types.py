"""Type checkers accept right programs and refuse wrong lines."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from helpers import ROOT
from mypy import api

import quarantune

PROGRAMS = ROOT / "tests" / "programs" / "typed"
PYRIGHT = shutil.which("pyright", path=str(Path(sys.executable).parent)) or shutil.which("pyright")


def _refused(report: str) -> set[tuple[str, int]]:
    """Returns the file and line of every error in the report of a type checker."""
    return {(name, int(line)) for name, line in re.findall(r"(\w+\.py):(\d+)(?::\d+)?\W+error\b", report)}


def _marked() -> set[tuple[str, int]]:
    lines = {path.name: path.read_text(encoding="utf-8").splitlines() for path in PROGRAMS.glob("*.py")}
    return {(name, i) for name, text in lines.items() for i, line in enumerate(text, 1) if line.endswith("# refused")}


def test_the_typed_jit_is_jax_jit() -> None:
    assert quarantune.jit is jax.jit


@pytest.mark.slow
def test_mypy_accepts_right_calls_and_refuses_wrong_ones() -> None:
    report, errors, _ = api.run(
        ["--strict", "--no-pretty", "--config-file", str(ROOT / "pyproject.toml"), str(PROGRAMS)]
    )
    assert not errors
    assert _refused(report) == _marked(), report


@pytest.mark.slow
@pytest.mark.skipif(PYRIGHT is None, reason="needs pyright (pip install pyright) and node")
def test_pyright_accepts_right_calls_and_refuses_wrong_ones() -> None:
    done = subprocess.run(
        [str(PYRIGHT), "--pythonpath", sys.executable, PROGRAMS], capture_output=True, text=True, timeout=280
    )
    assert _refused(done.stdout) == _marked(), done.stdout + done.stderr
