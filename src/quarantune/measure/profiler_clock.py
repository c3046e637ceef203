"""The device's own clock, read from traces of JAX's profiler: on TPUs, and on GPUs whose times CUPTI does not give.

A run takes the time of its program on a TPU. On a GPU it takes the time in which the device works for it, copies
included; gaps in which the device waits for the host do not count. A trace has many runs, because starting and ending
it takes longer than most of them.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from quarantune.host.waits import RunTime
from quarantune.measure.clocks import Clock
from quarantune.measure.device_clock import NoDeviceClockError
from quarantune.measure.xspace import Event, Plane, ProfileError, read_file

_FIRST_RUNS = 6
"""Runs of the first trace: as many as a sweep takes of a config before it decides whether to take more."""
_FIRST_TRACE_S = 0.2
"""The first trace begins no further run after this many seconds."""
_FREE_BYTES = 1 << 30
"""Least free space on the disk for a trace. One of a few runs takes some MB."""
_NAMED = 5

Trace = Callable[[Callable[[], int]], tuple[int, list[Plane]]]
"""Calls a function that makes runs and returns their number; returns the number and the planes of the profile."""


def profiler_clock(
    dispatch: Callable[[], object], flush: Callable[[], object] | None = None, *, trace: Trace | None = None
) -> Clock:
    """Returns a clock for the device's time in a run.

    Args:
        dispatch: queues one run and returns its outputs without waiting.
        flush: on a GPU, queues a program that flushes the device's cache before each run.
        trace: traces runs; None for JAX's profiler.

    Raises:
        NoDeviceClockError: the profiler does not work here, or its profile is not of the expected form.
    """
    trace = trace or traced
    flushing = () if flush is None else _flushing(flush, trace)

    def times(count: int, budget_s: float = float("inf")) -> list[float]:
        def make_runs() -> int:
            ends_s, made = time.monotonic() + budget_s, 0
            while made < count and (not made or time.monotonic() < ends_s):
                flushed = None if flush is None else flush()
                outputs = dispatch()
                jax.block_until_ready((flushed, outputs))
                del flushed, outputs  # free before the next run needs the memory
                made += 1
            return made

        made, planes = trace(make_runs)
        return run_times_ms(planes, made, flushing=flushing)

    stock = times(_FIRST_RUNS, _FIRST_TRACE_S)

    def take(count: int) -> Sequence[RunTime]:
        taken = stock[:count]
        del stock[:count]
        taken += times(count - len(taken)) if count > len(taken) else []
        return [RunTime.exactly(ms) for ms in taken]

    return Clock("device", take)


def traced(make_runs: Callable[[], int]) -> tuple[int, list[Plane]]:
    """Profiles runs with JAX's profiler, in a private directory that is removed.

    Raises:
        NoDeviceClockError: the profiler does not work here, or the disk is full.
    """
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0
    options.enable_hlo_proto = False
    try:
        with tempfile.TemporaryDirectory(prefix="quarantune-profile-") as directory:
            if shutil.disk_usage(directory).free < _FREE_BYTES:
                raise NoDeviceClockError(f"a profile needs {_FREE_BYTES >> 30} GiB of free space in {directory!r}")
            try:
                jax.profiler.start_trace(directory, profiler_options=options)
            except Exception as error:  # another profile is being made, in this process or of this device
                raise NoDeviceClockError(f"JAX's profiler does not start: {error}") from error
            try:
                made = make_runs()
            except BaseException:
                with contextlib.suppress(Exception):
                    jax.profiler.stop_trace()
                raise
            try:
                jax.profiler.stop_trace()
            except Exception as error:  # the disk is full, for one
                raise NoDeviceClockError(f"JAX's profiler wrote no profile: {error}") from error
            planes = read_file(Path(directory))
            _ = [plane.lines for plane in planes]
            return made, planes
    except (OSError, ProfileError) as error:
        raise NoDeviceClockError(f"JAX's profiler wrote no profile: {error}") from error


def run_times_ms(planes: Sequence[Plane], runs: int, *, flushing: Sequence[str] = ()) -> list[float]:
    """Returns the milliseconds of each run of one program, from a profile of nothing else.

    Args:
        planes: the profile.
        runs: the number of runs.
        flushing: the names of the events of a flush, which begin each run on a GPU.

    Raises:
        NoDeviceClockError: the profile has no device, or other events than those of the runs.
    """
    tpus = [plane for plane in planes if plane.name.startswith("/device:TPU:")]
    gpus = [plane for plane in planes if plane.name.startswith("/device:GPU:")]
    if tpus:
        each = [found for plane in tpus if (found := _module_times_ms(plane, runs))]
        if not each:
            raise NoDeviceClockError(f"no program ran on the devices of the profile: {_names(p.name for p in tpus)}")
        return [max(times_ms) for times_ms in zip(*each, strict=True)]  # the slowest device ends a run
    if len(busy := [events for plane in gpus if (events := _stream_events(plane))]) == 1:
        return _busy_times_ms(busy[0], runs, flushing)
    if busy:
        raise NoDeviceClockError(f"{len(busy)} GPUs worked, and a run has the time of one")
    raise NoDeviceClockError(f"no device worked in the profile: its planes are {_names(p.name for p in planes)}")


def _module_times_ms(plane: Plane, runs: int) -> list[float]:
    """Returns the times of the runs on one TPU core; empty if nothing ran there."""
    found = [events for name, events in plane.lines if name == "XLA Modules"]
    if not found:
        if not any(events for _, events in plane.lines):
            return []
        lines = _names(name for name, _ in plane.lines)
        raise NoDeviceClockError(f"{plane.name} has no line 'XLA Modules': its lines are {lines}")
    events = sorted((event for line in found for event in line), key=lambda event: event.start_ps)
    if not events:
        return []
    if len(names := dict.fromkeys(sorted(event.name for event in events))) > 1:
        raise NoDeviceClockError(f"{plane.name} ran several programs: {_names(names)}")
    if len(events) != runs:
        raise NoDeviceClockError(f"{plane.name} ran {events[0].name} {len(events)} times instead of {runs}")
    return [_device_ps(event) / 1e9 for event in events]


def _device_ps(event: Event) -> int:
    told = event.stats.get("device_duration_ps")
    return told if isinstance(told, int) and told > 0 else event.duration_ps


def _stream_events(plane: Plane) -> list[Event]:
    streams = [events for name, events in plane.lines if name.startswith("Stream")]
    if not streams and any(events for _, events in plane.lines):
        raise NoDeviceClockError(f"{plane.name} has no stream: its lines are {_names(name for name, _ in plane.lines)}")
    return sorted((event for events in streams for event in events), key=lambda event: event.start_ps)


def _busy_times_ms(events: Sequence[Event], runs: int, flushing: Sequence[str]) -> list[float]:
    """Divides a GPU's events into runs, which do not overlap because the host waits after each."""
    size, left = divmod(len(events), runs)
    each = [events[at * size : (at + 1) * size] for at in range(runs)]
    if (
        left
        or size <= len(flushing)
        or any(sorted(it.name for it in run) != sorted(it.name for it in each[0]) for run in each)
    ):
        raise NoDeviceClockError(f"{len(events)} events of {runs} runs cannot be divided into equal runs")
    if any(run[0].start_ps < max(event.end_ps for event in last) for last, run in itertools.pairwise(each)):
        raise NoDeviceClockError("the events of successive runs overlap")
    if any([event.name for event in run[: len(flushing)]] != list(flushing) for run in each):
        raise NoDeviceClockError("a run does not begin with the flush of the cache")
    return [busy_ps(run[len(flushing) :]) / 1e9 for run in each]


def busy_ps(events: Sequence[Event]) -> int:
    """Returns the picoseconds in which at least one event lasts; the events are in the order of their starts."""
    busy, end = 0, 0
    for event in events:
        busy += max(0, event.end_ps - max(end, event.start_ps))
        end = max(end, event.end_ps)
    return busy


def _flushing(flush: Callable[[], object], trace: Trace) -> list[str]:
    """Returns the names of the events of a flush, in their order."""

    def once() -> int:
        jax.block_until_ready(flush())
        return 1

    _, planes = trace(once)
    return [event.name for plane in planes if plane.name.startswith("/device:GPU:") for event in _stream_events(plane)]


def _names(names: Any) -> str:
    return ", ".join(repr(name[:80]) for name in [*names][:_NAMED]) or "none"
