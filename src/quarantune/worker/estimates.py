"""The cycles that the TPU compiler expects a program to take, without any TPU.

With the option of `_OPTION`, libtpu writes one small text per operation while it compiles, from the static schedule of
the innermost code and the trip counts that it knows. That simulates the program, so it takes as long as there is work:
kernels are given the first few steps of their grids, twice as many each time, and the rest is extrapolated. libtpu
aborts on some programs while it writes, or after it, so this happens in processes of their own, and the texts are read
as data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import re
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import jax
from jax.extend.core import jaxpr_as_fun

from quarantune import jax_internals
from quarantune.host import shared_files
from quarantune.jax_internals import kernels
from quarantune.sandbox import shared_names
from quarantune.values.codec import DamageError, Record, within
from quarantune.values.compiling import CompilerFigures, CompileTarget, CycleEstimate
from quarantune.values.trial import Config

if TYPE_CHECKING:
    from quarantune.worker.bench import Bench

_OPTION = "--xla_jf_dump_static_llo_profile_to="
_SUFFIX = "_static_llo_profile.textproto"
_LONGEST_S = 20.0
"""Seconds for all estimates of a program; a matmul of 8192 x 8192 takes 2 to 6 with the first steps of its grid."""
_LONG_S = 1.0
"""After so much CPU time, no further program is compiled if there are two: the next takes up to twice as long."""
_MOST_BYTES = 4 << 20
"""Of one file that libtpu or a process of it writes; an operation takes about 200."""
_MOST_FILES = 4096
_PAUSE_S = 0.01
_ABOUT, _TEXT = "about", "text"
_ESTIMATE = re.compile(r"hlo_op_estimate \{([^{}]*)\}")
_FIELD = re.compile(r"\s*(\w+): (\"[^\"\\\n]{1,500}\"|\w{1,40})\n")
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*[{}\\](?:[^"\\\n]|\\.)*"')
_PART = re.compile(r"^ +\w+ \{[^{}]*\}\n", re.MULTILINE)
_DEEPEST = 20
_COPY = re.compile(
    r"^  num_equivalent_hlos: (\d{1,9})\n  dma_instruction_type: .*\n  hlo_instruction \{\n(?:    \w+: .*\n)*"
    r"    shape \{\n      element_type: [A-Z]+(\d*).*\n((?:      dimensions: \d{1,12}\n)*)",
    re.MULTILINE,
)
_KERNEL = re.compile(r"kernel_(\d+)(?:\.\d+)*")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) .*\{$", re.MULTILINE)
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.-]+) = ", re.MULTILINE)
_CALLED = re.compile(r"(?:body|calls|to_apply|true_computation|false_computation)=%?([\w.-]+)")
_CONDITION = re.compile(r" while\(.*condition=%?([\w.-]+)")
_CONSTANT = re.compile(r" = s32\[\]\S* constant\((\d{1,9})\)")
_NO_END = "it has a loop whose end depends on data"


_Steps = Annotated[int, within(1, 1 << 50)]
_Moved = Annotated[float, within(0, 1e30)]


class NoEstimateError(Exception):
    """There is no estimate of a program; the text says why."""


@dataclasses.dataclass(frozen=True)
class _About(Record):
    """What a process says of a program before it compiles it.

    Attributes:
        unknown: why there can be no estimate; empty if there can.
        has_loops: whether it has loops outside of kernels.
        whole: how many steps each kernel has.
        steps: how many it has in the program that is compiled.
        moved_bytes: what the whole kernels move.
    """

    unknown: str
    has_loops: bool
    whole: tuple[_Steps, ...]
    steps: tuple[_Steps, ...]
    moved_bytes: _Moved


@dataclasses.dataclass(frozen=True)
class _Point:
    """The cycles of each operation of a program, and whether it was compiled to its end.

    Copies that need no cycles count by the bytes that they read and write.
    """

    about: _About
    cycles: dict[str, float]
    is_whole: bool
    copied_bytes: float = 0.0


def estimate(bench: Bench, config: Config, target: CompileTarget) -> CompilerFigures:
    """Returns the cycles that the compiler expects, or why it has no such number.

    It must be called before libtpu is loaded, because that starts threads, and this forks.

    Args:
        bench: traces the config.
        config: the config.
        target: the TPU.
    """
    try:
        with shared_names.directory() as directory:
            return CompilerFigures(estimate=_estimate(bench, config, target, Path(directory)))
    except (NoEstimateError, ValueError, OSError) as error:  # what a process left may be half written
        return CompilerFigures(no_estimate=str(error))


def _estimate(bench: Bench, config: Config, target: CompileTarget, directory: Path) -> CycleEstimate:
    deadline, most_steps, points = time.monotonic() + _LONGEST_S, 1, list[_Point]()
    while True:
        work = functools.partial(_compile_growing, bench, config, target, most_steps, directory)
        status = _run_apart(work, directory, deadline)
        if any(directory.glob(f"*{_SUFFIX}")):  # it was ended after it had written
            _keep(directory, _ABOUT)
        before, points = len(points), _read(directory)
        if status == 0 or len(points) >= 2 or time.monotonic() > deadline:
            break
        if len(points) == before or points[-1].about.steps == points[-1].about.whole:
            break  # what there is may do
        most_steps *= 2
    # The first steps alone cost more than those that follow.
    if not points or (len(points) == 1 and points[0].about.steps != points[0].about.whole):
        raise NoEstimateError(_why_none(directory, status))
    about = points[-1].about
    if about.has_loops and not all(point.is_whole for point in points):
        raise NoEstimateError("it has a loop, and libtpu was ended while it wrote")
    return _extrapolated(points, about.moved_bytes + points[-1].copied_bytes)


def _run_apart(work: Callable[[], None], directory: Path, deadline: float) -> int:
    """Runs work in a fork; returns its exit code, or minus the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            _confine(directory)
            work()
            code = 0
        except BaseException as error:
            with contextlib.suppress(BaseException):
                (directory / "error").write_text(f"{type(error).__name__}: {error}"[:500])
        finally:
            os._exit(code)
    ended, status = 0, 0
    try:
        while not ended and time.monotonic() < deadline and len(os.listdir(directory)) < _MOST_FILES:
            ended, status = os.waitpid(pid, os.WNOHANG)
            time.sleep(0 if ended else _PAUSE_S)
    finally:
        if not ended:
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def _confine(directory: Path) -> None:
    """Has this process write small files into one directory only, and print nothing: aborts print gigabytes."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nowhere, fd)
    resource.setrlimit(resource.RLIMIT_FSIZE, (_MOST_BYTES, _MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ["TMPDIR"] = str(directory)
    own = os.environ.get("LIBTPU_INIT_ARGS", "")
    os.environ["LIBTPU_INIT_ARGS"] = f"{own} {_OPTION}{directory}".strip()


def _compile_growing(bench: Bench, config: Config, target: CompileTarget, most_steps: int, directory: Path) -> None:
    """Compiles a program with more and more steps of its grids, and keeps the texts of each in a directory."""
    with bench.traced_for(config, target, is_check=True) as (traced, sharding):
        found = kernels.grids(traced.jaxpr)
        outside = {each.primitive.name for each in jax_internals.equations(traced.jaxpr, closed={"pallas_call"})}
        unknown = _NO_END if "while" in outside else next((grid.unknown for grid in found if grid.unknown), "")
        whole, moved = tuple(grid.steps for grid in found), sum(grid.moved_bytes for grid in found)
        about = _About(unknown, "scan" in outside, whole, (), moved)
        (directory / _ABOUT).write_text(json.dumps(about.to_json()))
        if unknown:
            return
        # The time is that of all threads, and of no other program.
        cores, compiled, began_s = target.num_cores or 1, 0, time.process_time()
        while True:
            if all(grid.steps <= 2 * most_steps * cores for grid in found):
                most_steps *= 2
            smaller, steps = kernels.with_smaller_grids(traced.jaxpr, most_steps, cores)
            args = [jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=sharding) for each in smaller.in_avals]
            lowered = jax.jit(jaxpr_as_fun(smaller)).trace(*args).lower(lowering_platforms=(target.platform,))
            (directory / _ABOUT).write_text(json.dumps(about.to_json() | {"steps": steps}))
            text = lowered.compile().as_text()
            (directory / _TEXT).write_text(text)
            _keep(directory, _ABOUT, _TEXT)
            compiled += 1
            if tuple(steps) == whole or (compiled > 1 and time.process_time() - began_s > _LONG_S):
                return
            most_steps *= 2


def _keep(directory: Path, *names: str) -> None:
    """Moves what libtpu wrote of one program, and files by name, to where it writes over nothing."""
    place = directory / f"{sum(path.name.isdigit() for path in directory.iterdir()):04d}"
    place.mkdir()
    for path in [*directory.glob(f"*{_SUFFIX}"), *(directory / name for name in names)]:
        path.rename(place / path.name)


def _read(directory: Path) -> list[_Point]:
    """Returns what libtpu has written of a program, that with the smallest grids first."""
    points = []
    for place in sorted(path for path in directory.iterdir() if path.name.isdigit()):
        texts = [_content(path) for path in sorted(place.glob(f"*{_SUFFIX}"))[:_MOST_FILES]]
        cycles = {name: count for text in texts for name, count in _parsed(text).items()}
        is_whole = (place / _TEXT).exists()
        turns = _turns(_content(place / _TEXT)) if is_whole else {}
        about = _About.from_json(json.loads(_content(place / _ABOUT)))
        named = {match[1] for name in cycles if (match := _KERNEL.fullmatch(name))}
        if cycles and (is_whole or len(named) == len(about.whole)):
            cycles = {name: count * turns.get(name, 1) for name, count in cycles.items()}
            points.append(_Point(about, cycles, is_whole, sum(map(_copied_bytes, texts))))
    return points


def _content(path: Path) -> str:
    return shared_files.read(path, largest_bytes=_MOST_BYTES).decode("utf-8", errors="replace")


def _parsed(text: str) -> dict[str, float]:
    """Returns the cycles of each operation that a text of libtpu names, all operations like it together.

    Raises:
        DamageError: the text is torn, or is no such text.
    """
    found = {}
    text = _STRING.sub('""', text)
    for _ in range(_DEEPEST):
        text = _PART.sub("", text)
    rest = _ESTIMATE.sub("", text).strip()
    if rest:
        raise DamageError(f"libtpu's estimate is not one: {rest[:80]!r}")
    for block in _ESTIMATE.finditer(text):
        fields = dict(_FIELD.findall(block[1]))
        name, cycles = fields.get("hlo_op_name", '""').strip('"'), fields.get("estimated_cycles", "")
        alike = fields.get("num_equivalent_hlos", "1")
        if not (name and cycles.isdigit() and alike.isdigit() and len(cycles) < 16 and len(alike) < 9):
            raise DamageError(f"libtpu's estimate is not one: {block[1][:80]!r}")
        found[name] = float(int(cycles) * int(alike))
    return found


def _copied_bytes(text: str) -> float:
    """Returns the bytes that the copies in a text of libtpu read and write."""
    return sum(
        2.0 * int(alike) * (int(bits or 8) / 8) * math.prod(map(int, re.findall(r"\d+", sizes)))
        for alike, bits, sizes in _COPY.findall(text)
    )


def _turns(text: str) -> dict[str, float]:
    """Returns how often each operation of a compiled program runs, whose loops are scans: from zero in steps of one.

    Raises:
        NoEstimateError: the end of a loop is no constant.
    """
    made: dict[str, list[str]] = {}
    ends: dict[str, list[int]] = {}
    callers: dict[str, list[tuple[str, str]]] = {}
    at = ""
    for line in text.splitlines():
        if (begins := _COMPUTATION.match(line)) is not None:
            at = "" if line.startswith("ENTRY") else begins[1]
        elif (instruction := _INSTRUCTION.match(line)) is not None:
            made.setdefault(at, []).append(instruction[1])
            if (end := _CONSTANT.search(line)) is not None:
                ends.setdefault(at, []).append(int(end[1]))
            condition = _CONDITION.search(line)
            for called in _CALLED.findall(line):
                callers.setdefault(called, []).append((at, condition[1] if condition else ""))

    def of(computation: str) -> float:
        if computation not in callers:  # the program itself, or a branch
            return 1.0
        return sum(of(caller) * trips(condition) for caller, condition in callers[computation])

    def trips(condition: str) -> int:
        if condition and len(ends.get(condition, ())) != 1:
            raise NoEstimateError(_NO_END)
        return ends[condition][0] if condition else 1

    return {name: of(at) for at, names in made.items() for name in names}


def _extrapolated(points: list[_Point], moved_bytes: float) -> CycleEstimate:
    """Returns the cycles with all steps of all grids: each further step costs as much as the last ones did."""
    last, before, whole = points[-1], points[-2] if len(points) > 1 else None, points[-1].about.whole
    total = of_kernels = 0.0
    for name, cycles in last.cycles.items():
        kernel = _KERNEL.fullmatch(name)
        if kernel is not None and (number := int(kernel[1])) < len(whole):
            steps = last.about.steps[number]
            left, earlier = whole[number] - steps, before.about.steps[number] if before is not None else steps
            if before is not None and name in before.cycles and earlier < steps:
                cycles += left * (cycles - before.cycles[name]) / (steps - earlier)
            else:
                cycles *= whole[number] / steps
            of_kernels += cycles
        total += cycles
    return CycleEstimate(cycles=total, kernel_cycles=of_kernels if whole else None, moved_bytes=moved_bytes)


def _why_none(directory: Path, status: int) -> str:
    if status == -signal.SIGKILL:
        return f"it takes longer than {_LONGEST_S:g} s"
    if status < 0:
        return f"libtpu was ended by {signal.Signals(-status).name} before it wrote one"
    if (error := directory / "error").exists():
        return _content(error)
    if not (about := directory / _ABOUT).exists():
        return f"this version of libtpu takes no option for it: it ended with exit code {status}"
    return _About.from_json(json.loads(_content(about))).unknown or "this version of libtpu writes no cycles"
