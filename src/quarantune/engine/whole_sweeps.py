"""An executor for many problems at a time, where each machine gets the whole sweep of one problem."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class InterruptedSweepError(Exception):
    """The sweep was interrupted with all others of its group."""


class WholeSweeps(Executor):
    """An executor whose tasks are whole sweeps.

    Attributes:
        executor: the engine.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self._is_over = threading.Event()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Submits a task to the engine."""
        return self.executor.submit(fn, *args, **kwargs)

    def interrupt(self) -> None:
        """Ends the sweeps that are running."""
        self._is_over.set()

    def check(self) -> WholeSweeps:
        """Returns itself.

        Raises:
            InterruptedSweepError: the sweeps were interrupted.
        """
        if self._is_over.is_set():
            raise InterruptedSweepError
        return self
