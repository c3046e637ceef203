"""The GPU's own clock, read by its profiler."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from quarantune.host.waits import RunTime
from quarantune.measure.clocks import Clock


class NoDeviceClockError(RuntimeError):
    """The device's own clock cannot be read here."""


def device_clock(dispatch: Callable[[], object], flush: Flush | None) -> Clock:
    """Returns a clock for the GPU's time in the kernels of a run, with the L2 cache flushed before each or not.

    Launching a kernel often takes longer than the kernel, so that wall-clock time hardly distinguishes fast ones.

    Args:
        dispatch: queues one run and returns its outputs without waiting.
        flush: flushes the cache before each run; None leaves the cache as the last run left it.

    Raises:
        NoDeviceClockError: the profiler sees no kernel.
    """
    run = _ProfiledRun(dispatch, None if flush is None else flush.dispatch)
    own = 0 if flush is None else flush.kernels
    # The run that shows that there are kernels is also a sample: profiling takes longer than most runs.
    first = _kernels(run, 1)
    if len(first[0]) <= own:
        raise NoDeviceClockError("the profiler saw no kernel")

    def take(count: int) -> Sequence[RunTime]:
        runs = first[:count]
        first.clear()
        runs += _kernels(run, count - len(runs)) if count > len(runs) else []
        return [RunTime.exactly(sum(ms for _, ms in kernels[own:])) for kernels in runs]

    return Clock("device", take)


class Flush:
    """Flushes the L2 cache by writing more than it holds; made once for all clocks."""

    def __init__(self, dispatch: Callable[[], object]) -> None:
        """Profiles one flush, which loads and attaches the profiler: half of a fresh worker's time.

        Other threads may use the device during this time. The profiler then also sees their kernels.

        Args:
            dispatch: queues the write and returns its output without waiting.

        Raises:
            NoDeviceClockError: JAX has no profiler here.
        """
        self.dispatch = dispatch
        _kernels(_ProfiledRun(dispatch, None), 1)

    @functools.cached_property
    def kernels(self) -> int:
        """How many kernels a flush launches; nothing else may run on the device when this is first read."""
        return len(_kernels(_ProfiledRun(self.dispatch, None), 1)[0])

    def detach(self) -> None:
        """Detaches the profiler from this process, so that other tools can use it: 0.13 s."""
        _kernels(_ProfiledRun(self.dispatch, None), 1, detaches=True)


def _kernels(run: _ProfiledRun, count: int, *, detaches: bool = False) -> list[list[tuple[str, float]]]:
    """Returns the name and the milliseconds of each kernel of each of `count` runs."""
    try:
        from jax.experimental.mosaic.gpu import profiler
    except ImportError as error:
        raise NoDeviceClockError(str(error)) from error
    # Detaching the profiler after each measurement would cost 0.13 s.
    cupti = profiler.Cupti(finalize=detaches)  # type: ignore[call-arg]
    try:
        _, timings = cupti.measure(run, aggregate=False, iterations=count)()
    except RuntimeError as error:
        raise NoDeviceClockError(str(error)) from error
    finally:
        run.release()
    if timings is None:
        return [[]] * count
    return [timings] if count == 1 else timings


class _ProfiledRun(jax.stages.Wrapped):
    """A flush and a run, in the form of the jitted function that the profiler requires.

    The profiler keeps the results of all runs until the last one has ended, which may be more than the device's memory
    holds. It gets a stand-in for them, and each run's outputs are free before the next run needs memory.
    """

    def __init__(self, dispatch: Callable[[], object], flush: Callable[[], object] | None) -> None:
        self._dispatch = dispatch
        self._flush = flush
        self._outputs: object = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._outputs = None
        flushed = None if self._flush is None else self._flush()
        self._outputs = self._dispatch()
        del flushed  # one flush's buffer is free before the next needs it
        return self

    def block_until_ready(self) -> None:
        """Waits for the latest run, and so, in the order of the device, for all."""
        jax.block_until_ready(self._outputs)

    def release(self) -> None:
        """Frees the latest outputs."""
        self._outputs = None

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError
