"""Trials without a sandbox, in the caller's own process, and the steps that any trial in this process takes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import re
import statistics
from collections.abc import Callable, Iterator, Mapping

import jax

from quarantune import jax_internals
from quarantune.host import caller
from quarantune.measure import finals
from quarantune.sandbox import spool
from quarantune.sandbox.messages import BenchOptions
from quarantune.scheduler.plan import ConfigSource, one_by_one
from quarantune.scheduler.reference import Reference, unlike
from quarantune.sweep.events import SweepEvents
from quarantune.sweep.request import Finish
from quarantune.transport.call import Call
from quarantune.values.trial import Config, Outcome, Phase, ReferenceFailedError, Route, Trial
from quarantune.worker.bench import Bench, Measurement, Program
from quarantune.worker.error_report import describe_error, readable
from quarantune.worker.failures import WrongResultError, outcome_of

_logger = logging.getLogger("quarantune")


def run(
    call: Call,
    configs: Mapping[int, Config],
    *,
    arrays_fd: int,
    options: BenchOptions,
    finish: Finish,
    reference: Reference,
    reason: str,
    source: ConfigSource,
    events: SweepEvents,
) -> None:
    """Computes the reference, then runs the configs one after another in this process; only exceptions are contained.

    Args:
        call: the call.
        configs: the configs by index.
        arrays_fd: the file that holds the bytes of its arrays; -1 for none.
        options: as for `Bench`.
        finish: receives the trials.
        reference: the reference for outputs; the output of `ref_fn` is computed here and given to it.
        reason: why configs run here, for the warning.
        source: gives further configs.
        events: receives the phases.

    Raises:
        ReferenceFailedError: `ref_fn` raised.
    """
    _warn(reason)

    def bench() -> Bench:
        return Bench(call, arrays_fd=arrays_fd, options=options)

    if configs:
        with undisturbed():
            give_reference(call, bench(), reference)
    take = reference.hold(finish, events.untuned)
    reference.begin(configs.keys())
    ordered = sorted(configs, key=lambda index: not reference.is_default(index))
    for index, config in one_by_one({index: configs[index] for index in ordered}, source):
        with undisturbed():
            ended = _run_one(bench(), config, index, reference, functools.partial(events.on_phase, index))
        reference.ended(index)
        source.ended(index, ended)
        take(index, ended, ended.log_tail)
    reference.settle(finish)


@contextlib.contextmanager
def _file(label: str) -> Iterator[int]:
    fd = spool.create(label)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Runs a trial outside of the caller's traces, and compiled even if the caller has disabled jit."""
    with jax.disable_jit(False), jax_internals.outside_of_traces():
        yield


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Raises KeyboardInterrupt where JAX reports it as the error of a host callback in which Ctrl-C was pressed."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if re.search(r"^KeyboardInterrupt\b", str(error), re.MULTILINE):
            raise KeyboardInterrupt from error
        raise


def give_reference(call: Call, bench: Bench, reference: Reference) -> None:
    """Computes the output of `ref_fn`, if there is one, and gives it to the reference.

    Raises:
        ReferenceFailedError: `ref_fn` raised, or no config can agree with its output.
    """
    if "ref_fn" not in call.companions:
        return
    with _file("expected") as fd:
        try:
            with interruptible():
                bench.judge.compute_reference(fd)
        except (Exception, SystemExit) as error:
            about = describe_error(error)
            message = f"ref_fn failed, so no config can be judged: {about.message}"
            raise ReferenceFailedError(message) from error
        reference.give(fd)
        if differs := bench.judge.shapes_differ(fd):
            raise ReferenceFailedError(unlike(differs))


@functools.cache
def _warn(reason: str) -> None:
    caller.warn(
        f"{reason}: configs run in this process, so that one that crashes or hangs takes it along", RuntimeWarning
    )


def compare(call: Call, configs: Mapping[int, Config], *, arrays_fd: int, options: BenchOptions) -> finals.Final:
    """Times the finalists in alternation.

    Args:
        call: the call.
        configs: the finalists by index.
        arrays_fd: as for `run`.
        options: as for `run`.
    """
    if len(configs) < 2:
        return finals.Final()
    with undisturbed():
        bench = Bench(call, arrays_fd=arrays_fd, options=options)
        try:
            with interruptible():
                programs = [bench.compile(config, target=None) for config in configs.values()]
                rounds_ms, warm_ms = bench.compare(programs)
            return finals.Final.of(configs, rounds_ms, warm_ms)
        except (Exception, SystemExit) as error:
            _logger.warning("the finalists could not be compared, so their first measurements count: %r", error)
            return finals.Final()


def check(bench: Bench, program: Program, index: int, reference: Reference) -> None:
    """Checks the output of a config, and notes the outputs of others that it agrees with."""
    offer = reference.offer()
    with _file("output") as fd:
        output_fd = fd if offer.keeps else None
        found: dict[str, int | None] = {}
        try:
            group = bench.check(program, references=reference.fds, standard=offer.standard, output_fd=output_fd)
            found["group"] = group
        except WrongResultError as error:
            found["group"] = error.group
            raise
        finally:
            if found:
                reference.note(
                    index,
                    found["group"],
                    offered=offer.references,
                    fd=-1 if output_fd is None else output_fd,
                    noise=bench.judge.noise,
                )


def _run_one(bench: Bench, config: Config, index: int, reference: Reference, on_phase: Callable[[str], None]) -> Trial:
    so_far = Trial(config=config, outcome=Outcome.OK, phase=Phase.COMPILE, route=Route.IN_PROCESS)
    on_phase(Phase.COMPILE.value)
    try:
        with interruptible():
            program = bench.compile(config, target=None)
            so_far = dataclasses.replace(so_far, compile_s=program.compile_s, phase=Phase.CHECK)
            on_phase(Phase.CHECK.value)
            check(bench, program, index, reference)
            so_far = dataclasses.replace(so_far, phase=Phase.MEASURE)
            on_phase(Phase.MEASURE.value)
            measured = bench.measure(program, best_median_ms=None)
    except (Exception, SystemExit) as error:  # KeyboardInterrupt is for the caller
        return failed(so_far, error)
    return timed(so_far, measured)


def failed(trial: Trial, error: BaseException) -> Trial:
    """Returns a trial that ended with an error in its phase."""
    assert trial.phase is not None
    error = readable(error)
    about = describe_error(error)
    outcome = Outcome(outcome_of(error, trial.phase.value))
    is_wrong = outcome is Outcome.WRONG
    return dataclasses.replace(
        trial,
        outcome=outcome,
        message=about.text if is_wrong else about.message,
        log_tail="" if is_wrong else about.traceback,
    )


def timed(trial: Trial, measured: Measurement) -> Trial:
    """Returns a trial with the times of a measurement."""
    return dataclasses.replace(
        trial,
        time_ms=statistics.median(measured.samples_ms),
        samples_ms=measured.samples_ms,
        own_ms=measured.cpu_ms,
        clock=measured.clock,
    )
