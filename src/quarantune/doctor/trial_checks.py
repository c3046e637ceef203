"""Runs one real sweep of each kind, in the sandbox, and tells whether it worked."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from quarantune.api.tuner import AutoTuner
from quarantune.devices import discovery
from quarantune.doctor.check import Check, fail, first_line, ok, warn
from quarantune.results.result import TuningResult
from quarantune.values.settings import settings
from quarantune.values.trial import Outcome, Trial, TuningFailedError

_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
_DEADLINE_S = 60.0
_SHAPE = (256, 256)


@functools.partial(jax.jit, static_argnames=["scale"])
def _jitted(x: jax.Array, scale: int = 2) -> jax.Array:
    return x @ x * scale


def _plain(x: np.ndarray[Any, Any], scale: int = 2) -> np.ndarray[Any, Any]:
    return x * scale


class _Kind(NamedTuple):
    """One kind of trial.

    Attributes:
        name: its name.
        fn: the function that is tuned.
        settings: the settings that choose this kind.
        is_essential: whether ordinary tuning needs it.
        remedy: the thing to do where it fails.
    """

    name: str
    fn: Callable[..., Any]
    settings: dict[str, str]
    is_essential: bool
    remedy: str


_KINDS = (
    _Kind(
        "trial of a jitted function",
        _jitted,
        {"isolation": "process"},
        True,
        "set QUARANTUNE_LOG_DIR to a directory and run again: each worker's output is kept there",
    ),
    _Kind(
        "trial in a spawned worker",
        _jitted,
        {"isolation": "process", "start_method": "spawn"},
        False,
        "workers are forked by default, which may work; set QUARANTUNE_LOG_DIR and run again to see the whole output",
    ),
    _Kind(
        "trial of a plain callable",
        _plain,
        {"isolation": "process"},
        True,
        "set QUARANTUNE_LOG_DIR to a directory and run again: each worker's output is kept there",
    ),
    _Kind(
        "trial compiled in a worker, measured here",
        _jitted,
        {"isolation": "compile"},
        False,
        "QUARANTUNE_ISOLATION=compile, which a TPU needs, does not work here; on other devices leave it at auto",
    ),
)


def trials() -> Iterator[Check]:
    """Runs one sweep of each kind, and yields its finding.

    The last one initialises JAX's backend in this process.
    """
    for kind in _KINDS:
        check, ended = _try(kind)
        yield check
        if kind is _KINDS[0] and ended:
            yield from _clock(ended[0])


def _try(kind: _Kind) -> tuple[Check, list[Trial]]:
    """Runs one sweep; returns the finding, and its trials that were measured."""
    judge = fail if kind.is_essential else warn
    began = time.monotonic()
    try:
        ended = _measured(_swept(kind))
    except TuningFailedError as error:
        return judge(kind.name, "; ".join(_reasons(error)), kind.remedy), []
    except Exception as error:  # any failure is a finding
        return judge(kind.name, first_line(error), kind.remedy), []
    if not ended:
        return judge(kind.name, "no config was measured", kind.remedy), []
    first = ended[0]
    route = f", {first.route.value}" if first.route else ""
    return ok(kind.name, f"worked in {time.monotonic() - began:.1f} s ({first.clock or 'no'} clock{route})"), ended


def _swept(kind: _Kind) -> TuningResult:
    array = np.ones(_SHAPE, np.float32)
    environment = settings(
        **kind.settings,
        disable_cache=True,
        on_miss="tune",
        search="exhaustive",
        compile_timeout=_DEADLINE_S,
        timeout=_DEADLINE_S,
        progress=False,
    )
    with environment, _without_preallocation(), _quiet():
        return AutoTuner(kind.fn, {"scale": [2, 3]}, ref_fn=None, rep=3, name=f"doctor.{kind.name}").run(array)


def _measured(result: TuningResult) -> list[Trial]:
    return [trial for trial in result.trials if trial.outcome in (Outcome.OK, Outcome.SLOW)]


def _reasons(error: TuningFailedError) -> list[str]:
    messages = {f"{trial.outcome.value}: {(trial.message or '').strip()}".splitlines()[0] for trial in error.trials}
    return sorted(messages) or [first_line(error)]


def _clock(trial: Trial) -> list[Check]:
    """Returns whether the device's own clock could be read; nothing on a CPU, whose clock is the wall's."""
    if trial.clock == "wall" or (backend := discovery.accelerators()) is None:
        return []
    if backend.devices[0].platform != "cuda":
        return []
    if trial.clock == "device":
        return [ok("device clock", "CUPTI gives the device's own times")]
    if importlib.util.find_spec("absl") is None:
        return [
            warn(
                "device clock",
                "absl-py is not installed, so CUPTI is not used, and short kernels are timed by the wall clock",
                "run `pip install 'quarantune[cuda]'`",
            )
        ]
    return [
        warn(
            "device clock",
            "CUPTI cannot be used, so short kernels are timed by the wall clock: another profiler has it, or the "
            "driver lets only root profile",
            "end nsys, ncu or JAX's profiler, or load the driver with NVreg_RestrictProfilingToAdminUsers=0",
        )
    ]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drops the warnings of a sweep, which are no findings of their own."""
    logger = logging.getLogger("quarantune")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def _without_preallocation() -> Iterator[None]:
    """Keeps JAX from taking most of the device's memory, where this process initialises it within the block."""
    if _PREALLOCATE in os.environ:
        yield
        return
    os.environ[_PREALLOCATE] = "false"
    try:
        yield
    finally:
        os.environ.pop(_PREALLOCATE, None)
