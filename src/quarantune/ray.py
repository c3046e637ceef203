"""Sweeps on a Ray cluster: an executor whose tasks run there."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Executor, Future
from typing import Any

__all__ = ["executor"]


def __dir__() -> list[str]:
    return __all__


def executor(**options: Any) -> Executor:
    """Returns an executor for sweeps on this process's Ray cluster; connects to the cluster if necessary.

    Args:
        **options: the options of the tasks for `ray.remote`: `num_cpus=4`, `num_gpus=1`, `resources={"a100": 1}`.
            A shard of a sweep uses one device, and several cores for compiling. Give all cores and devices of a
            machine, so that two shards do not share a device.

    Raises:
        ImportError: This Python lacks Ray.

    Example:
        A cluster is needed, so no test runs this::

            with quarantune.settings(executor=quarantune.ray.executor(num_gpus=1)):
                matmul(a, b)
    """
    try:
        import ray
    except ImportError as error:
        raise ImportError("quarantune.ray needs Ray: pip install 'quarantune[ray]'") from error
    if not ray.is_initialized():
        ray.init()
    return _RayExecutor(ray, options)


class _RayExecutor(Executor):
    """Submits functions as Ray tasks. Ray does not repeat dead tasks, because sweeps repeat them."""

    def __init__(self, ray: Any, options: dict[str, Any]) -> None:
        self._ray = ray
        self._options = {"max_retries": 0, **options}
        self._functions: dict[Callable[..., Any], Any] = {}
        self._futures: weakref.WeakSet[_RayFuture] = weakref.WeakSet()
        self._is_shut = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Submits a task, and returns a future whose `cancel` also ends a running task."""
        if self._is_shut:
            raise RuntimeError("this executor was shut down: make another one")
        if fn not in self._functions:
            self._functions[fn] = self._ray.remote(**self._options)(fn)
        future = _RayFuture(self._ray, self._functions[fn].remote(*args, **kwargs))
        self._futures.add(future)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Takes no further tasks; Ray stays connected."""
        self._is_shut = True
        futures = list(self._futures)
        if cancel_futures:
            for future in futures:
                future.cancel()
        if wait:
            for future in futures:
                with contextlib.suppress(CancelledError):
                    future.exception()


class _RayFuture(Future[Any]):
    """The future of one task."""

    def __init__(self, ray: Any, reference: Any) -> None:
        super().__init__()
        self._ray = ray
        self._reference: Any = reference
        reference.future().add_done_callback(self._take)

    def cancel(self) -> bool:
        """Makes Ray end the task, even a running one."""
        reference = self._reference
        is_cancelled = super().cancel()
        if reference is not None:
            with contextlib.suppress(Exception):  # the task has ended, or Ray has
                self._ray.cancel(reference, force=False)
        return is_cancelled

    def _take(self, done: Future[Any]) -> None:
        """Stores the result in this future, in a thread of Ray."""
        self._reference = None  # Ray keeps the result while there is a reference
        if not self.set_running_or_notify_cancel():
            return
        if done.cancelled():
            self.set_exception(RuntimeError("the task was cancelled"))
        elif (error := done.exception()) is not None:
            self.set_exception(error)
        else:
            self.set_result(done.result())
