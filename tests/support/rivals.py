"""Processes that compete for a CPU."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def on_one_cpu_with_a_rival(rivals: int = 1) -> Iterator[None]:
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(rivals):  # they inherit the CPU
                rival = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
                stack.callback(rival.kill)
            yield
    finally:
        os.sched_setaffinity(0, cpus)
