"""Checks by doing: one real sweep of each kind, in the sandbox, and two ranks of one program that shall agree."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import socket
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import quarantune
from quarantune import jax_internals
from quarantune.api.tuner import AutoTuner
from quarantune.devices import discovery, targets
from quarantune.doctor.check import Check, first_line, judged, ok, warn
from quarantune.host import origins, variables
from quarantune.results.result import TuningResult
from quarantune.values.settings import SettingKeywords, Settings, settings
from quarantune.values.trial import Outcome, Trial, TuningFailedError

_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
_DEADLINE_S = 60.0
_SHAPE = (256, 256)
_PATIENCE_S = 60.0
_LAUNCHERS = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_PROGRAM = """
import sys
import jax
from quarantune.jax_internals import coordination

address, rank = sys.argv[1], int(sys.argv[2])
jax.distributed.initialize(address, num_processes=2, process_id=rank, initialization_timeout=40)
store = coordination()
won = store.write("quarantune/doctor", str(rank))
print("won" if won else "lost", store.read("quarantune/doctor"))
jax.distributed.shutdown()
"""
"""One of two processes that offer a value for one key; the first wins, and both read its value."""


@functools.partial(jax.jit, static_argnames=["scale"])
def _jitted(x: jax.Array, scale: int = 2) -> jax.Array:
    return x @ x * scale


def tpu_compiler() -> Iterator[Check]:
    """Yields what the compiler for TPUs gives without a TPU, where it is installed."""
    if targets.has_plugin("tpu"):
        x = jax.ShapeDtypeStruct(_SHAPE, np.float32)
        with settings(disable_cache=True):
            report = quarantune.compile_check(_jitted, {"scale": [1]}, x, target="TPU v5e", estimate=True)
        (trial,) = report.trials
        why = trial.message if trial.figures is None else trial.figures.no_estimate
        told = f"no estimates: {why}" if why else "it compiles for TPUs that are not here, and estimates cycles"
        yield judged("TPU compiler", told, "install another version of libtpu", is_good=not why)


def _plain(x: np.ndarray[Any, Any], scale: int = 2) -> np.ndarray[Any, Any]:
    return x * scale


class _Kind(NamedTuple):
    """One kind of trial.

    Attributes:
        fn: the function that is tuned.
        settings: the settings that choose this kind.
        is_needed: whether ordinary tuning needs it.
        remedy: the thing to do where it fails.
    """

    fn: Callable[..., Any]
    settings: SettingKeywords
    is_needed: bool
    remedy: str


_KEEP_LOGS = "set QUARANTUNE_LOG_DIR to a directory and run again: each worker's output is kept there"
_KINDS = {
    "trial of a jitted function": _Kind(_jitted, {"isolation": "process"}, True, _KEEP_LOGS),
    "trial in a spawned worker": _Kind(
        _jitted,
        {"isolation": "process", "start_method": "spawn"},
        False,
        "workers are forked by default, which may work; set QUARANTUNE_LOG_DIR and run again to see the whole output",
    ),
    "trial of a plain callable": _Kind(_plain, {"isolation": "process"}, True, _KEEP_LOGS),
    "trial compiled in a worker, measured here": _Kind(
        _jitted,
        {"isolation": "compile"},
        False,
        "QUARANTUNE_ISOLATION=compile, which a TPU needs, does not work here; on other devices leave it at auto",
    ),
}


def trials() -> Iterator[Check]:
    """Runs one sweep of each kind, and yields its finding.

    The last one initialises JAX's backend in this process.
    """
    for number, (name, kind) in enumerate(_KINDS.items()):
        began, ended = time.monotonic(), None
        try:
            swept = _swept(name, kind).trials
            ended = next((trial for trial in swept if trial.outcome in (Outcome.OK, Outcome.SLOW)), None)
            found = "no config was measured"
        except TuningFailedError as error:
            messages = {f"{it.outcome.value}: {(it.message or '').strip()}".splitlines()[0] for it in error.trials}
            found = "; ".join(sorted(messages)) or first_line(error)
        except Exception as error:  # any failure is a finding
            found = first_line(error)
        if ended is not None:
            route = f", {ended.route.value}" if ended.route else ""
            found = f"worked in {time.monotonic() - began:.1f} s ({ended.clock or 'no'} clock{route})"
        yield judged(name, found, kind.remedy, is_good=ended is not None, is_needed=kind.is_needed)
        if number == 0 and ended is not None:
            yield from _clock(ended)


def _swept(name: str, kind: _Kind) -> TuningResult:
    environment = settings(
        disable_cache=True,
        on_miss="tune",
        record=None,
        search="exhaustive",
        compile_timeout=_DEADLINE_S,
        timeout=_DEADLINE_S,
        progress=False,
    )
    # Keeps JAX from taking most of the device's memory, where this process initialises it.
    memory = variables.given({_PREALLOCATE: os.environ.get(_PREALLOCATE, "false")})
    with settings(**kind.settings), environment, memory, _quiet():
        tuner = AutoTuner(kind.fn, {"scale": [2, 3]}, ref_fn=None, rep=3, name=f"doctor.{name}")
        return tuner.run(np.ones(_SHAPE, np.float32))


def _clock(trial: Trial) -> list[Check]:
    """Returns whether the device's own clock could be read; nothing on a CPU, whose clock is the wall's."""
    backend = None if trial.clock == "wall" else discovery.accelerators()
    if backend is None or backend.devices[0].platform != "cuda":
        return []
    if trial.clock == "device":
        return [ok("device clock", "CUPTI gives the device's own times")]
    found = "so short kernels are timed by the wall clock"
    if importlib.util.find_spec("absl") is None:
        found = f"absl-py is not installed, so CUPTI is not used, and {found.removeprefix('so ')}"
        return [warn("device clock", found, "run `pip install 'quarantune[cuda]'`")]
    return [
        warn(
            "device clock",
            f"CUPTI cannot be used, {found}: another profiler has it, or the driver lets only root profile",
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


# --- ranks ---


def ranks(settings: Settings) -> Check:
    """Returns the ranks of this program, and whether two ranks on this machine agree."""
    if (here := jax_internals.coordination()) is not None:
        agree = "they agree on one config" if settings.agree else "QUARANTUNE_AGREE=0: each tunes for itself"
        return ok("ranks", f"this is rank {here.rank} of {here.ranks}; {agree}")
    said = _two_ranks() and _two_ranks()  # another program may take the port between choosing and using it
    if not said:
        return _alone(settings)
    return warn(
        "ranks",
        f"two processes with jax.distributed on this machine did not agree: {said}",
        "let programs of several processes share a QUARANTUNE_CACHE_DIR that was filled before, and see that this "
        "machine's processes can connect to 127.0.0.1",
    )


def _alone(settings: Settings) -> Check:
    found = "two processes with jax.distributed agreed on this machine"
    launched = [f"{name}={value}" for name in _LAUNCHERS if (value := os.environ.get(name, "")).isdigit()]
    if several := [entry for entry in launched if int(entry.partition("=")[2]) > 1]:
        found += f"; {several[0]}: call jax.distributed.initialize before the first tuned call"
    if not settings.agree:
        return warn(
            "ranks",
            f"{found}, but QUARANTUNE_AGREE=0: each rank chooses for itself, and ranks whose collectives depend on the "
            "config hang",
            "unset QUARANTUNE_AGREE",
        )
    return ok("ranks", found)


def _two_ranks() -> str:
    """Lets two processes offer a value each; returns the reason why they did not agree, or an empty text."""
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{chosen.getsockname()[1]}"
    path = os.pathsep.join([str(Path(quarantune.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep), "JAX_PLATFORMS": "cpu"}

    def run(rank: int) -> subprocess.CompletedProcess[str]:
        command = [origins.interpreter(), "-c", _PROGRAM, address, str(rank)]
        return subprocess.run(command, capture_output=True, text=True, env=environ, timeout=_PATIENCE_S, check=False)

    try:
        with ThreadPoolExecutor(2) as pool:
            said = list(pool.map(run, range(2)))
    except subprocess.TimeoutExpired:
        return f"they did not end within {_PATIENCE_S:g} s"
    answers = sorted(process.stdout.split() for process in said)
    if [answer[0] for answer in answers if answer] == ["lost", "won"] and answers[0][1] == answers[1][1]:
        return ""
    errors = [line for process in said for line in process.stderr.strip().splitlines()[-1:]]
    return errors[0][:200] if errors else f"they said {answers}"
