"""The examples run as scripts, show the documented results, and leave nothing behind."""

from __future__ import annotations

import importlib.util
import os
import re
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from aftermath import MARK, carriers, eventually, shared_memory
from helpers import ROOT, deadline_s, python, selected

from quarantune.devices import targets

EXAMPLES = ROOT / "examples"


RELEASE = [pytest.mark.slow, pytest.mark.long]
TABLES = [
    pytest.param("matmul.py", 12, r"agrees with a @ b", marks=RELEASE),
    pytest.param("attention.py", 9, r"agrees with the direct formula", marks=RELEASE),
    pytest.param("callable.py", 8, r"agrees with distances taken one by one", marks=RELEASE),
    pytest.param("rmsnorm_rope.py", 18, r"the defaults take \d.*\nagrees with plain JAX", marks=RELEASE),
    pytest.param("gated_mlp.py", 32, r"the defaults take \d.*\nagrees with plain JAX", marks=RELEASE),
    pytest.param("fp8_matmul.py", 16, r"the defaults take \d.*\nagrees with plain JAX", marks=RELEASE),
]


def run(example: str, place: Path, *, timeout_s: float = 280, **environ: str) -> str:
    """Runs an example, asserts that it succeeds, and returns its output."""
    mark, tmpdir = uuid.uuid4().hex, place / "tmp"
    tmpdir.mkdir()
    before = set(shared_memory())
    about = {"TMPDIR": str(tmpdir), "QUARANTUNE_CACHE_DIR": str(place / "cache"), "QUARANTUNE_PROGRESS": "0"}
    about["COLUMNS"] = "120"  # pytest-xdist sets 80
    output = python("-W", "error", EXAMPLES / example, timeout_s=timeout_s, **{MARK: mark, **about, **environ})
    assert eventually(lambda: not carriers(MARK, mark))
    assert os.listdir(tmpdir) == []
    assert eventually(lambda: set(shared_memory()) <= before)
    return output


@pytest.fixture(scope="module")
def printed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Runs the examples that this session's tests ask for, two at a time: each leaves a core mostly idle."""
    with ThreadPoolExecutor(2) as pool:
        places = {name: tmp_path_factory.mktemp(Path(name).stem) for name in selected(request, "example")}
        yield {name: pool.submit(run, name, place) for name, place in places.items()}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("example", "configs", "verdict"), TABLES)
def test_an_example_tunes_every_config_and_checks_the_winner(
    example: str, configs: int, verdict: str, printed: dict[str, Future[str]]
) -> None:
    told = printed[example].result()
    assert len(re.findall(r"^.* (?:ok|slow)(?: \[\d+\])? +(?:> )?\d[\d.]* .*$", told, re.MULTILINE)) == configs
    assert len(re.findall(r"^\*  ", told, re.MULTILINE)) == 1, "one row of the table has the star"
    assert re.search(verdict, told)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("example", ["contextual.py"])
def test_the_contextual_example_reports_each_kernel(example: str, printed: dict[str, Future[str]]) -> None:
    told = printed[example].result()
    assert [line for line in told.splitlines() if line in ("normalize", "project")] == ["normalize", "project"]
    assert told.count("\n*  ") == 2
    assert "agrees with plain JAX" in told


@pytest.mark.long
@pytest.mark.slow
def test_the_hostile_example_shows_every_outcome(tmp_path: Path) -> None:
    deadline = str(deadline_s(2.0))
    printed = run("hostile.py", tmp_path, QUARANTUNE_TIMEOUT=deadline, QUARANTUNE_COMPILE_TIMEOUT=deadline)
    assert "all 32 outcomes are right; the best config is {'mode': 'good'}" in printed


@pytest.mark.target
@pytest.mark.timeout(300)
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the `tpu` extra")
def test_the_tpu_example_lists_failures_by_generation(tmp_path: Path) -> None:
    printed = run("tpu_flash_attention.py", tmp_path, timeout_s=280)
    assert re.findall(r"^TPU v\w+", printed, re.MULTILINE) == ["TPU v5e", "TPU v6e"]
    assert len(re.findall(r"^ +\d+ +\d+ +(?:ok|error \[\d\]|timeout)", printed, re.MULTILINE)) == 2 * 12
    # Its compiler takes seconds to fail: on a busy machine, longer than the example's deadline.
    assert re.search(r"^ +1024 +4096 +(?:error .* 20\.9\d of 16\.00 MiB|timeout)", printed, re.MULTILINE)
    assert re.search(r"\d of 12 block sizes compile for TPU v5e and TPU v6e", printed)


@pytest.mark.target
@pytest.mark.timeout(300)
@pytest.mark.skipif(not targets.has_plugin("cuda"), reason="needs the `cuda-compile` extra")
def test_the_hopper_example_lists_the_configs_that_compile(tmp_path: Path) -> None:
    printed = run("hopper_matmul.py", tmp_path, timeout_s=280)
    assert "14 of 24 configs compile for NVIDIA H100" in printed
    over = re.findall(r"^ +\d+ +\d+ +\d .*error \[1\] +[\d.]+ of 227 KiB$", printed, re.MULTILINE)
    assert len(over) == 10
