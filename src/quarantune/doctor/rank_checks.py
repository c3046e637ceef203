"""Checks whether the processes of one `jax.distributed` program can agree on a config."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from pathlib import Path

import quarantune
from quarantune import jax_internals
from quarantune.doctor.check import Check, ok, warn
from quarantune.host import interpreter
from quarantune.values.settings import Settings

_NAME = "ranks"
_PATIENCE_S = 60.0
_ATTEMPTS = 2
"""Another program may take the port in the moment between choosing and using it."""
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


def ranks(settings: Settings) -> Check:
    """Returns the ranks of this program, and whether two ranks on this machine agree."""
    if (here := jax_internals.coordination()) is not None:
        agree = "they agree on one config" if settings.agree else "QUARANTUNE_AGREE=0: each tunes for itself"
        return ok(_NAME, f"this is rank {here.rank} of {here.ranks}; {agree}")
    said = ""
    for _ in range(_ATTEMPTS):
        said = _two_ranks()
        if not said:
            return _alone(settings)
    return warn(
        _NAME,
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
            _NAME,
            f"{found}, but QUARANTUNE_AGREE=0: each rank chooses for itself, and ranks whose collectives depend on the "
            "config hang",
            "unset QUARANTUNE_AGREE",
        )
    return ok(_NAME, found)


def _two_ranks() -> str:
    """Lets two processes offer a value each; returns the reason why they did not agree, or an empty text."""
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{chosen.getsockname()[1]}"
    path = os.pathsep.join([str(Path(quarantune.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep), "JAX_PLATFORMS": "cpu"}
    with contextlib.ExitStack() as ending:
        started = []
        for rank in range(2):
            process = subprocess.Popen(
                [interpreter.path(), "-c", _PROGRAM, address, str(rank)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environ,
            )
            ending.callback(process.wait)
            ending.callback(process.kill)
            started.append(process)
        try:
            said = [process.communicate(timeout=_PATIENCE_S) for process in started]
        except subprocess.TimeoutExpired:
            return f"they did not end within {_PATIENCE_S:g} s"
    answers = sorted(output.split() for output, _ in said)
    if [answer[0] for answer in answers if answer] == ["lost", "won"] and answers[0][1] == answers[1][1]:
        return ""
    errors = [line for _, text in said for line in text.strip().splitlines()[-1:]]
    return errors[0][:200] if errors else f"they said {answers}"
