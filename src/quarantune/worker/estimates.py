"""The cycles that the TPU compiler expects a program to take, without any TPU.

With `_OPTION`, libtpu writes one small text per operation while it compiles, from the static schedule of the innermost
code and the trip counts that it knows. That simulates the program, so it takes as long as there is work. So kernels get
only the first few steps of their grids, twice as many each time, and the rest is extrapolated. libtpu aborts on some
programs while it writes, or after it, so this happens in separate processes, and the texts are read as data.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import multiprocessing
import os
import re
import resource
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any

import jax
from jax.extend.core import jaxpr_as_fun

from quarantune.host import shared_files
from quarantune.jax_internals import jax_traces, kernels
from quarantune.sandbox import contain
from quarantune.values.codec import DamageError, Record, decode_json, within
from quarantune.values.trial import CompilerFigures, CompileTarget, CycleEstimate

_Trace = Callable[[], AbstractContextManager[tuple[Any, Any]]]
_OPTION = "--xla_jf_dump_static_llo_profile_to="
_LONGEST_S = 20.0
"""Seconds for all estimates of a program; a matmul of 8192 x 8192 takes 2 to 6 with the first steps of its grid."""
_LONG_S = 1.0
"""CPU seconds after which two programs are enough: the next one takes up to twice as long."""
_MOST_BYTES = 4 << 20
"""Most bytes of one file that libtpu or its process writes; an operation takes about 200."""
_MOST_FILES = 4096
_POINTS, _ERROR = "points", "error"
_ESTIMATE = re.compile(
    r'hlo_op_estimate \{\n  hlo_op_name: "([^"\\\n]{1,500})"\n  estimated_cycles: (\d{1,15})\n'
    r"(?:  num_equivalent_hlos: (\d{1,8})\n)?((?:  (?!num_equivalent_hlos).*\n)*)\}\n"
)
_COPY = re.compile(
    r"  dma_instruction_type: .*\n  hlo_instruction \{\n(?:    \w+: .*\n)*"
    r"    shape \{\n      element_type: [A-Z]+(\d*).*\n((?:      dimensions: \d{1,12}\n)*)"
)
_KERNEL = re.compile(r"kernel_(\d+)(?:\.\d+)*")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) .*\{\n((?:.*\n)*?)\}", re.MULTILINE)
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.-]+) = ", re.MULTILINE)
_CALLED = re.compile(
    r"(?:condition=%?([\w.-]+), )?(?:body|calls|to_apply|true_computation|false_computation)=%?([\w.-]+)"
)
_CONSTANT = re.compile(r" = s32\[\]\S* constant\((\d{1,9})\)")
_NO_END = "it has a loop whose end depends on data"


_Steps = Annotated[int, within(1, 1 << 50)]
_Amount = Annotated[float, within(0, 1e30)]


@dataclasses.dataclass(frozen=True)
class _Point(Record):
    """A program with some steps of its kernels' grids.

    Attributes:
        has_loops: whether it has loops outside of kernels.
        whole: how many steps each kernel has.
        steps: how many steps each kernel has in this program.
        moved_bytes: bytes that the whole kernels move, plus those that copies without cycles read and write.
        cycles: the cycles of each operation; empty until they are known.
    """

    has_loops: bool
    whole: tuple[_Steps, ...]
    steps: tuple[_Steps, ...]
    moved_bytes: _Amount
    cycles: dict[str, _Amount] = dataclasses.field(default_factory=dict)

    def with_cycles(self, directory: Path, turns: Mapping[str, float]) -> _Point:
        """Returns the point with libtpu's texts from a directory, and removes these."""
        cycles, moved_bytes = dict[str, float](), self.moved_bytes
        for path in directory.glob("*_static_llo_profile.textproto"):
            found, copied_bytes = _parsed(_content(path))
            cycles |= {name: count * turns.get(name, 1) for name, count in found.items()}
            moved_bytes += copied_bytes
            path.unlink()
        return dataclasses.replace(self, cycles=cycles, moved_bytes=moved_bytes)

    def note(self, directory: Path) -> None:
        """Appends the point to the file of points in a directory."""
        with (directory / _POINTS).open("a") as file:
            file.write(f"{json.dumps(self.to_json())}\n")


def estimate(trace: _Trace, target: CompileTarget) -> CompilerFigures:
    """Returns the cycles that the compiler expects, or the reason why they are unknown.

    Call it before libtpu is loaded: that starts threads, and this forks.

    Args:
        trace: traces the config, as `compiling.traced_for` does.
        target: the TPU.
    """
    deadline, most_steps, points = time.monotonic() + _LONGEST_S, 1, list[_Point]()
    try:
        while True:
            with contain.directory() as name:
                directory = Path(name)
                work = functools.partial(_compile_growing, trace, target, most_steps)
                status = _run_apart(work, directory, deadline)
                found = _points(directory, status)
                points += found
                # The first steps alone cost more than later ones.
                if len(points) > 1 or (points and points[0].steps == points[0].whole):
                    return CompilerFigures(estimate=_extrapolated(points))
                if not found or status == 0 or time.monotonic() > deadline:
                    return CompilerFigures(no_estimate=_why_none(directory, status))
            most_steps *= 2
    except (ValueError, OSError) as error:  # it says why, or a process left a torn file
        return CompilerFigures(no_estimate=str(error))


def _run_apart(work: Callable[[Path], None], directory: Path, deadline: float) -> int:
    """Runs work in a fork; returns its exit code, or minus the signal that ended it."""
    process = multiprocessing.get_context("fork").Process(target=_confined, args=(work, directory))
    process.start()
    try:
        while process.is_alive() and time.monotonic() < deadline and len(os.listdir(directory)) < _MOST_FILES:
            process.join(0.01)
    finally:
        process.kill()
        process.join()
    return process.exitcode or 0


def _confined(work: Callable[[Path], None], directory: Path) -> None:
    """Restricts this process to small files in one directory and to no output, then works: aborts print gigabytes."""
    contain.redirect_output(os.open(os.devnull, os.O_RDWR))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_MOST_BYTES, _MOST_BYTES))
    os.environ["TMPDIR"] = str(directory)
    os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {_OPTION}{directory}"
    try:
        work(directory)
    except BaseException as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        (directory / _ERROR).write_text(f"{kind}{error}"[:500])
        os._exit(1)


def _compile_growing(trace: _Trace, target: CompileTarget, most_steps: int, directory: Path) -> None:
    """Compiles a program with more and more steps of its grids, and notes the cycles of each in a directory."""
    with trace() as (traced, sharding):
        whole, moved_bytes = tuple(kernels.free_steps(traced.jaxpr)), kernels.moved_bytes(traced.jaxpr)
        outside = {each.primitive.name for each in jax_traces.equations(traced.jaxpr, closed={"pallas_call"})}
        if "while" in outside:
            raise ValueError(_NO_END)
        # The CPU time counts all threads, and no other program.
        cores, began_s = target.num_cores or 1, time.process_time()
        for further in itertools.count():
            if all(steps <= 2 * most_steps * cores for steps in whole):
                most_steps *= 2
            smaller, steps = kernels.with_smaller_grids(traced.jaxpr, most_steps, cores)
            args = [jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=sharding) for each in smaller.in_avals]
            lowered = jax.jit(jaxpr_as_fun(smaller)).trace(*args).lower(lowering_platforms=(target.platform,))
            point = _Point("scan" in outside, whole, tuple(steps), moved_bytes)
            point.note(directory)
            point.with_cycles(directory, _turns(lowered.compile().as_text())).note(directory)
            if point.steps == whole or (further and time.process_time() - began_s > _LONG_S):
                return
            most_steps *= 2


def _points(directory: Path, status: int) -> list[_Point]:
    """Returns the programs in a directory that have cycles by libtpu, the one with the smallest grids first.

    Args:
        directory: the directory of the notes.
        status: how the process that compiled them ended.

    Raises:
        ValueError: a signal ended it in a program with loops, whose turns are then unknown.
    """
    points = [_Point.from_json(decode_json(line)) for line in _content(directory / _POINTS).splitlines()]
    if status < 0 and points and (last := points[-1].with_cycles(directory, {})).cycles:  # ended after it had written
        if last.has_loops:
            raise ValueError("it has a loop, and libtpu was ended while it wrote")
        if len({match[1] for name in last.cycles if (match := _KERNEL.fullmatch(name))}) == len(last.whole):
            points.append(last)
    return [point for point in points if point.cycles]


def _content(path: Path) -> str:
    return shared_files.read(path, largest_bytes=_MOST_BYTES).decode(errors="replace") if path.exists() else ""


def _parsed(text: str) -> tuple[dict[str, float], float]:
    """Returns the cycles of each operation in a text of libtpu, with all like it, and the bytes of copies.

    Raises:
        DamageError: the text is torn, or not from libtpu.
    """
    if rest := _ESTIMATE.sub("", text).strip():
        raise DamageError(f"libtpu's estimate cannot be read: {rest[:80]!r}")
    cycles, copied_bytes = dict[str, float](), 0.0
    for name, count, alike, more in _ESTIMATE.findall(text):
        cycles[name] = float(int(count) * int(alike or 1))
        if (copy := _COPY.match(more)) is not None:  # a copy reads and writes each element
            elements = math.prod(map(int, re.findall(r"\d+", copy[2])))
            copied_bytes += 2.0 * int(alike or 1) * elements * int(copy[1] or 8) / 8
    return cycles, copied_bytes


def _turns(text: str) -> dict[str, float]:
    """Returns how often each operation of a compiled program runs. Its loops are scans: from zero in steps of one.

    Raises:
        ValueError: the end of a loop is not a constant.
    """
    bodies = dict(_COMPUTATION.findall(text))
    calls = [(called, at, condition) for at, body in bodies.items() for condition, called in _CALLED.findall(body)]

    @functools.cache
    def of(computation: str) -> float:
        found = [of(at) * trips(condition) for called, at, condition in calls if called == computation]
        return sum(found) if found else 1.0  # the program itself, or a branch

    def trips(condition: str) -> int:
        ends = _CONSTANT.findall(bodies.get(condition, ""))
        if condition and len(ends) != 1:
            raise ValueError(_NO_END)
        return int(ends[0]) if condition else 1

    return {name: of(at) for at, body in bodies.items() for name in _INSTRUCTION.findall(body)}


def _extrapolated(points: list[_Point]) -> CycleEstimate:
    """Returns the cycles with all steps of all grids: each further step costs as much as the last ones did."""
    before, last = points[-2:][0], points[-1]
    total = of_kernels = 0.0
    for name, cycles in last.cycles.items():
        kernel = _KERNEL.fullmatch(name)
        if kernel is not None and (number := int(kernel[1])) < len(last.whole):
            whole, steps, earlier = last.whole[number], last.steps[number], before.steps[number]
            if name in before.cycles and earlier < steps:
                cycles += (whole - steps) * (cycles - before.cycles[name]) / (steps - earlier)
            else:
                cycles *= whole / steps
            of_kernels += cycles
        total += cycles
    return CycleEstimate(cycles=total, kernel_cycles=of_kernels if last.whole else None, moved_bytes=last.moved_bytes)


def _why_none(directory: Path, status: int) -> str:
    if status == -signal.SIGKILL:
        return f"it takes longer than {_LONGEST_S:g} s"
    if status < 0:
        return f"libtpu was ended by {signal.Signals(-status).name} before it wrote one"
    if error := _content(directory / _ERROR):
        return error
    if not _content(directory / _POINTS):
        return f"this version of libtpu takes no option for it: it ended with exit code {status}"
    return "this version of libtpu writes no cycles"
