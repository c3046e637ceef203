"""Tunes functions on the cluster of its arguments, one for each line on stdin; see `emulated_fleets.py`."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from concurrent.futures import Executor
from typing import Any

import engine_kernels
import jax.numpy as jnp

import quarantune


class Notes(logging.Handler):
    """Notes the warnings of a sweep with their times."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.told: list[tuple[float, str]] = []
        self.began = time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append((time.monotonic() - self.began, record.getMessage()))


ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # Ray prints news of its nodes


def say(**words: Any) -> None:
    print(json.dumps(words), file=ANSWERS, flush=True)


def engine(kind: str, address: str) -> Executor:
    """Returns the executor of a cluster."""
    if kind == "dask":
        import distributed

        return distributed.Client(address, timeout=30).get_executor(pure=False)
    import ray

    ray.init(address=address, log_to_driver=False)
    return quarantune.ray.executor(num_cpus=1)


def tuned(order: dict[str, Any], executor: Executor | None) -> dict[str, Any]:
    """Tunes as ordered, and returns the result."""
    ended = 0

    def follow(index: int, phase: str) -> None:
        nonlocal ended
        ended += phase == "end"
        if phase == "end" and ended == order["at"]:
            say(at=ended)

    space = {"n": [30, 20, 10, 0], "same": list(range(order["configs"] // 4))}
    tuner = quarantune.AutoTuner(
        engine_kernels.plain, space, rep=2, ref_fn=None, name=order["name"], on_progress=follow
    )
    with quarantune.settings(**order["settings"]):
        try:
            result = tuner.run(jnp.ones((8, 128)), executor=executor)
        except RuntimeError as error:
            return {"error": f"{type(error).__name__}: {error}"}
    return {
        "best": result.best_config["n"],
        "outcomes": sorted({trial.outcome.value for trial in result.trials}),
        "trials": len(result.trials),
        "machines": sorted({trial.device.partition(" on ")[2] for trial in result.trials}),
    }


def main() -> None:
    notes = Notes()
    logging.getLogger("quarantune").addHandler(notes)
    executor = engine(*sys.argv[1:])
    say(ready=True)
    for line in sys.stdin:
        order = json.loads(line)
        notes.told, notes.began = [], time.monotonic()
        answer = tuned(order, None if order["is_here"] else executor)
        say(**answer, told=notes.told, took_s=time.monotonic() - notes.began)


if __name__ == "__main__":
    main()
