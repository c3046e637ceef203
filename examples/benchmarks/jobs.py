"""Runs one job in a fresh process; this file has the code of the parent and of the child."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

_TIMEOUT_S = 1800.0
_PREFIXES = ("QUARANTUNE_", "TONNO_", "JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE", "JAX_ENABLE_COMPILATION_CACHE")


class JobError(RuntimeError):
    """A job raised, died or took too long."""


def run(module: str, function: str, *, platform: str, **arguments: Any) -> Any:
    """Runs a function of a module in this directory in a fresh process with empty, temporary caches.

    Args:
        module: the module's name.
        function: the function's name.
        platform: `cpu`, `gpu`, or `auto` for JAX's own choice.
        **arguments: the function's arguments; like its result, they must be JSON-able.

    Returns:
        The function's result.

    Raises:
        JobError: the function raised, or the process ended or took too long without a result.
    """
    with tempfile.TemporaryDirectory(prefix="quarantune-benchmark-") as directory:
        answer, log = Path(directory, "answer.json"), Path(directory, "log")
        command = [sys.executable, __file__, module, function, json.dumps(arguments), str(answer)]
        with log.open("wb") as output:
            try:
                child = subprocess.run(
                    command,
                    env=_environment(platform, Path(directory)),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    timeout=_TIMEOUT_S,
                )
            except subprocess.TimeoutExpired:
                raise JobError(f"no answer within {_TIMEOUT_S:.0f} s") from None
        if not answer.exists():
            lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
            raise JobError(f"exit code {child.returncode}: {lines[-1].strip()}")
        returned = json.loads(answer.read_text())
        if "error" in returned:
            raise JobError(returned["error"])
        return returned["result"]


def run_main(main: Callable[[], None]) -> None:
    """Runs a comparison; if a necessary job fails, the program ends with one line."""
    try:
        main()
    except JobError as error:
        sys.exit(f"the comparison cannot continue: {error}")


def _environment(platform: str, directory: Path) -> dict[str, str]:
    """Returns a job's environment: the caller's, with all caches in the job's directory."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_PREFIXES)}
    if platform != "auto":
        kept["JAX_PLATFORMS"] = {"cpu": "cpu", "gpu": "cuda"}[platform]
    return kept | {
        "QUARANTUNE_CACHE_DIR": str(directory / "quarantune"),
        "TONNO_CACHE_DIR": str(directory / "tonno"),
        "CUDA_CACHE_PATH": str(directory / "cuda"),
    }


def _main(module: str, function: str, arguments: str, answer: str) -> None:
    try:
        returned = {"result": getattr(importlib.import_module(module), function)(**json.loads(arguments))}
    except Exception as error:
        returned = {"error": f"{type(error).__name__}: {error}"}
    Path(answer).write_text(json.dumps(returned))


if __name__ == "__main__":
    _main(*sys.argv[1:])
