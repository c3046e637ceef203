"""The template starts as soon as a call is known to need a sweep, and only then."""

from __future__ import annotations

import inspect
import os
import types
from pathlib import Path
from typing import Any

import pytest
from helpers import python

from quarantune.cache.claims import Claim
from quarantune.calls.key import ProblemId
from quarantune.sandbox import template
from quarantune.tuning import early
from quarantune.values import blocks
from quarantune.values.trial import SandboxError

ID = ProblemId("kernels.scale", "cpu", "a key")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list to which each start of a template adds an item; none really starts."""
    starts: list[str] = []
    monkeypatch.setattr(template, "shared", lambda: starts.append("started"))
    return starts


def call() -> Any:
    function = types.SimpleNamespace(fn=abs)
    bound = inspect.signature(abs).bind(1)
    return types.SimpleNamespace(id=ID, platform="cpu", call=types.SimpleNamespace(function=function, bound=bound))


def test_a_call_that_misses_starts_a_template(cache_dir: Path, started: list[str]) -> None:
    early.start_template(call(), blocks.current())
    assert started == ["started"]


def test_a_job_that_will_wait_starts_none(cache_dir: Path, started: list[str]) -> None:
    with Claim(cache_dir, *ID) as claim:
        assert claim.try_acquire()
        early.start_template(call(), blocks.current())
    assert started == []
    early.start_template(call(), blocks.current())
    assert started == ["started"]


def test_a_sweep_in_this_process_starts_none(cache_dir: Path, started: list[str]) -> None:
    with blocks.settings(isolation="none"):
        early.start_template(call(), blocks.current())
    assert started == []


def test_a_failed_start_is_left_to_the_sweep(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise SandboxError("no process")

    monkeypatch.setattr(template, "shared", fail)
    early.start_template(call(), blocks.current())


SCRIPT = """
import functools, sys
import jax, numpy as np
import quarantune
from quarantune.sandbox import template

start = template.Template.__init__

def noted(self):
    print("quarantune.tuning.job" in sys.modules, "quarantune.sweep.routes" in sys.modules)
    start(self)

template.Template.__init__ = noted

@quarantune.autotune({"n": [1, 2]}, ref_fn=None, warmup=0, rep=1)
@functools.partial(jax.jit, static_argnames=["n"])
def add(x, n: int = 1):
    return x + n

if __name__ == "__main__":
    add.lookup(np.ones(8, np.float32))
    print("looked up")
    add(np.ones(8, np.float32))
    add(np.ones(9, np.float32))
"""


def test_it_starts_before_the_modules_that_tune(cache_dir: Path, tmp_path: Path) -> None:
    script = tmp_path / f"script_{os.getpid()}.py"
    script.write_text(SCRIPT)
    assert python(script).splitlines() == ["looked up", "False False"]
