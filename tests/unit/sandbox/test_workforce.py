"""Every workforce keeps its promises to the scheduler: a sandbox, this process, both together, and the fake."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from helpers import deadline_s
from scripted import Clock, FakeSandbox

from quarantune.devices.discovery import Device
from quarantune.host.interruptions import Stops
from quarantune.sandbox import messages, spool
from quarantune.sandbox.pool import Sandbox
from quarantune.sandbox.template_messages import Ended
from quarantune.sandbox.workforce import Event, Said, Workforce
from quarantune.scheduler.plan import Mode
from quarantune.sweep import processes, sweep
from quarantune.sweep.ledger import Ledger
from quarantune.sweep.limits import SweepLimits
from quarantune.sweep.request import Problem, SweepRequest
from quarantune.sweep.this_process import MeasuringProcess, ThisProcess
from quarantune.values import codec
from quarantune.values.blocks import current
from quarantune.values.options import Options
from quarantune.worker.arguments import BenchOptions

TRIAL = 3


@functools.partial(jax.jit, static_argnames=["n"])
def scaled(x: Any, n: int = 1) -> Any:
    return x * n


@contextlib.contextmanager
def _made(kind: str) -> Iterator[Workforce]:
    if kind == "scripted":
        yield FakeSandbox(Clock(), lambda worker: None)
        return
    problem = Problem(
        fn=scaled, name="scaled", args=(np.ones(8, np.float32),), kwargs={}, platform="cpu", device_kind="any"
    )
    options = Options(warmup=0, rep=1, ref_fn=None)
    limits = SweepLimits.of(options, current())
    request = SweepRequest(problem=problem, options=options, settings=current(), limits=limits, ledger=Ledger())
    assert request.mode is Mode.IN_WORKERS
    packed, of_bench = sweep.pack(problem, [{"n": 2}], options), BenchOptions.of("cpu", options)
    with contextlib.ExitStack() as stack:
        payload_fd, arrays_fd = stack.enter_context(processes._spooled(packed, of_bench))
        device = Device("", "") if kind == "this process" else Device("cpu", "any")
        own = (request, packed.call, device, Stops(time.monotonic), of_bench, arrays_fd)
        if kind == "this process":
            yield stack.enter_context(contextlib.closing(ThisProcess(*own)))
            return
        sandbox = stack.enter_context(Sandbox(payload_fd=payload_fd, arrays_fd=arrays_fd, method="fork"))
        if kind == "sandbox":
            yield sandbox
        else:
            yield stack.enter_context(contextlib.closing(MeasuringProcess(sandbox, *own)))


@pytest.fixture(params=["scripted", "sandbox", "this process", "this process and a sandbox"])
def workforce(request: pytest.FixtureRequest) -> Iterator[Workforce]:
    with _made(request.param) as made:
        made.open(load_timeout_s=60.0)
        yield made


@pytest.fixture
def file() -> Iterator[int]:
    fd = spool.create("executable")
    yield fd
    os.close(fd)


def events_until(workforce: Workforce, is_last: Callable[[Event], bool]) -> list[Event]:
    """Returns all events up to the first that `is_last` accepts."""
    found: list[Event] = []
    latest = time.monotonic() + deadline_s(60.0)
    while not any(map(is_last, found)):
        assert time.monotonic() < latest, found
        found += workforce.poll(0.05)
    return found


def said(kind: str) -> Callable[[Event], bool]:
    return lambda event: (
        isinstance(event, Said) and isinstance(event.message, dict) and event.message["message"] == kind
    )


def is_end(event: Event) -> bool:
    return isinstance(event, Ended)


def compiling(*, last: bool = False) -> codec.JsonObject:
    return codec.encode(messages.Compile(trial=TRIAL, config={"n": 2}, last=last))


def test_a_worker_replies_to_its_tasks_and_ends_once_after_that(workforce: Workforce, file: int) -> None:
    number = workforce.start(compiling())
    replies = events_until(workforce, said("Compiled"))
    measuring = messages.Measure(trial=TRIAL, config={"n": 2}, load=False)
    workforce.send(number, codec.encode(measuring), [file])
    replies += events_until(workforce, said("Measured"))
    assert {event.number for event in replies} == {number}
    assert all(isinstance(event, Said) and event.message["trial"] == TRIAL for event in replies)  # type: ignore[index]
    workforce.finish(number)
    assert [event.number for event in events_until(workforce, is_end)] == [number]
    workforce.forget(number)
    assert workforce.poll(0.0) == []


def test_a_worker_that_is_killed_ends_once(workforce: Workforce) -> None:
    number = workforce.start(compiling())
    workforce.kill(number)
    assert [event.number for event in events_until(workforce, is_end) if is_end(event)] == [number]
    # Until it is forgotten, requests for it do no harm, and it does not end again.
    workforce.finish(number)
    workforce.clear_log(number)
    assert isinstance(workforce.log(number), str)
    workforce.trim_logs()
    workforce.forget(number)
    assert not any(map(is_end, workforce.poll(0.2)))


def test_each_worker_has_its_own_number(workforce: Workforce) -> None:
    numbers = [workforce.start(compiling()) for _ in range(3)]
    assert len(set(numbers)) == 3
    for number in numbers:
        workforce.kill(number)
    ends: list[Event] = []
    while len(ends) < 3:
        ends += [event for event in events_until(workforce, is_end) if is_end(event)]
    assert sorted(event.number for event in ends) == sorted(numbers)


def test_the_memory_all_workers_share_is_known(workforce: Workforce) -> None:
    workforce.share_modules(["json"])
    assert workforce.baseline_bytes >= 0
    assert all(len(each) == 2 for each in workforce.common_files())


def test_in_process_measuring_leaves_compiling_to_the_sandbox(file: int) -> None:
    with _made("this process and a sandbox") as workforce:
        workforce.open(load_timeout_s=60.0)
        compiler = workforce.start(compiling(last=True), fds=[file])
        events_until(workforce, said("Compiled"))
        measurer = workforce.start(codec.encode(messages.Prepare()))
        events_until(workforce, said("Ready"))
        assert workforce.pid(measurer) is None
        assert compiler > 0 > measurer
