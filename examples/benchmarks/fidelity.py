"""Compares cheap compiles with full ones, on programs in plain JAX whose products XLA tunes on a GPU.

For each set of compiler options, a separate process compiles all configs of a program, so that no set finds kernels
that another set has chosen. This process loads the executables and times them in turn.

    python examples/benchmarks/fidelity.py --out fidelity.json               # one NVIDIA GPU, about 8 minutes
    python examples/benchmarks/fidelity.py --platform cpu --small            # shows that it works
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import pickle
import random
import selectors
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

FULL, CHEAP, DEVICELESS = "full", "cheap", "deviceless"
_NO_TUNING = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}
SETS: dict[str, dict[str, dict[str, Any]]] = {
    "gpu": {
        FULL: {},
        CHEAP: _NO_TUNING,
        "level 1": {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 1},
        "llvm 1": _NO_TUNING | {"xla_backend_optimization_level": 1},
        "triton": {"xla_gpu_autotune_level": 0},
    },
    "cpu": {
        FULL: {},
        CHEAP: {"xla_backend_optimization_level": 0},
        "quick llvm": {"xla_llvm_disable_expensive_passes": True},
    },
}
"""The compiler options of each set, by platform. `full` and `cheap` come first, then the others if time is left.

With jax 0.11.2, `cheap` makes the same programs for an H100 if `xla_gpu_enable_cublaslt`, `xla_gpu_cublas_fallback` or
`xla_gpu_cudnn_gemm_fusion_level` is also set.
"""

_LEAST_ROUNDS, _ROUNDS = 5, 15
_SAMPLE_S = 0.003
_WARM_UP_S = 0.01
_TIMING_S = 9.0
"""Seconds after which a program gets no more rounds than the least, and no further sets."""
_ANSWER_S = 120.0
"""Seconds that one step of a compiling process may take."""


# --- compiling, in a process for each set ---


class Compiler:
    """A process that compiles programs with one set of options."""

    def __init__(self, name: str, options: argparse.Namespace, directory: Path) -> None:
        """Sets up the process; `start` starts it."""
        self.name = name
        self._options = options
        self._directory = directory
        self._log = directory / f"{name.replace(' ', '-')}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""

    def start(self) -> None:
        """Starts the process, unless it runs."""
        if self._process is not None:
            return
        command = [sys.executable, __file__, "--serve", self.name, "--platform", self._options.platform]
        command += ["--threads", str(self._options.threads), "--out", str(self._directory)]
        command += ["--small"] if self._options.small else []
        environ = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environ
            )
        self._buffer = b""

    def ask(self, step: str, program: str) -> None:
        """Begins a step of a program: `lower` or `compile`."""
        self.start()
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the answer shows that the process has died
            self._process.stdin.write(json.dumps({"step": step, "program": program}).encode() + b"\n")
            self._process.stdin.flush()

    def answer(self, within_s: float = _ANSWER_S) -> dict[str, Any]:
        """Returns the answer to the last question; a process that dies or takes too long is replaced."""
        assert self._process is not None
        assert self._process.stdout is not None
        ends = time.monotonic() + within_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, ends - time.monotonic())):
                    return {"error": f"{self.name}: no answer within {within_s:.0f} s{self._end()}"}
                if not (read := os.read(self._process.stdout.fileno(), 1 << 16)):
                    return {"error": f"{self.name}: the compiling process has ended{self._end()}"}
                self._buffer += read
        line, _, self._buffer = self._buffer.partition(b"\n")
        return dict(json.loads(line))

    def _end(self) -> str:
        self.close()
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return f": {lines[-1][-300:]}" if lines else ""

    def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()


def serve(options: argparse.Namespace) -> None:
    """Lowers and compiles programs until the last question."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print
    import jax
    from fidelity_programs import PROGRAMS

    target = None
    compiler_options = SETS[_kind(options.platform)].get(options.serve, {})
    if options.serve == DEVICELESS:
        from quarantune.values.trial import CompileTarget

        target = CompileTarget(**json.loads((options.out / "target.json").read_text()))
        compiler_options = SETS["gpu"][CHEAP] if target.platform == "cuda" else {}
    else:
        jax.block_until_ready(jax.numpy.zeros(8) + 1)  # starts the backend
    lowered: dict[int, Any] = {}
    for line in sys.stdin:
        question = json.loads(line)
        recipe = PROGRAMS[question["program"]]
        answer: dict[str, Any] = {}
        try:
            if target is not None:
                answer = _compile_deviceless(recipe, options, target, compiler_options)
            elif question["step"] == "lower":
                answer, lowered = _lower(recipe, options)
            else:
                answer = _compile(lowered, options, compiler_options)
        except Exception as error:
            answer = {"error": _short(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _lower(recipe: Any, options: argparse.Namespace) -> tuple[dict[str, Any], dict[int, Any]]:
    lowered, errors = {}, {}
    start = time.perf_counter()
    for index, config in enumerate(recipe.configs):
        try:
            lowered[index] = recipe.lowered(config, small=options.small)
        except Exception as error:
            errors[index] = _short(error)
    return {"lower_s": time.perf_counter() - start, "errors": errors}, lowered


def _compile(lowered: Mapping[int, Any], options: argparse.Namespace, compiler_options: Any) -> dict[str, Any]:
    from jax.experimental import serialize_executable

    errors: dict[int, str] = {}
    seconds: dict[int, float] = {}
    compiled: dict[int, Any] = {}

    def one(index: int) -> None:
        start = time.perf_counter()
        try:
            compiled[index] = lowered[index].compile(compiler_options=compiler_options or None)
        except Exception as error:
            errors[index] = _short(error)
        seconds[index] = time.perf_counter() - start

    start, cpu = time.perf_counter(), _cpu_s()
    with concurrent.futures.ThreadPoolExecutor(options.threads) as pool:
        list(pool.map(one, lowered))
    answer = {"wall_s": time.perf_counter() - start, "cpu_s": _cpu_s() - cpu, "seconds": seconds, "errors": errors}
    files = {}
    for index, program in compiled.items():
        try:
            blob = pickle.dumps(serialize_executable.serialize(program))
            files[index] = str(options.out / f"{options.serve.replace(' ', '-')}-{index}")
            Path(files[index]).write_bytes(blob)
        except Exception as error:
            errors[index] = f"cannot be serialised: {_short(error)}"
            files.pop(index, None)
    return answer | {"files": files}


def _compile_deviceless(recipe: Any, options: argparse.Namespace, target: Any, compiler_options: Any) -> dict[str, Any]:
    """Compiles the first config against a description of the device."""
    from quarantune.transport import executable
    from quarantune.worker.deviceless import abstract_device, why_device_is_needed

    with abstract_device(target) as sharding:
        traced = recipe.traced(recipe.configs[0], small=options.small, sharding=sharding)
        reason = why_device_is_needed(traced.jaxpr.jaxpr, target.platform)
        lowered = traced.lower()
        start, cpu = time.perf_counter(), _cpu_s()
        compiled = lowered.compile(compiler_options=compiler_options)
        answer = {"wall_s": time.perf_counter() - start, "cpu_s": _cpu_s() - cpu, "why_device_is_needed": reason}
        file = options.out / DEVICELESS
        file.write_bytes(executable.to_pickle(compiled))
    return answer | {"files": {0: str(file)}}


def _cpu_s() -> float:
    return sum(os.times()[:4])  # with the children, such as ptxas


def _short(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


# --- timing ---


def arguments(recipe: Any, *, small: bool) -> Any:
    """Returns arguments of normal numbers, on the device."""
    import jax

    rng = np.random.default_rng(0)

    def array(kind: Any) -> Any:
        values = recipe.scale * rng.standard_normal(kind.shape, np.float32)
        if np.dtype(kind.dtype).kind in "iu":
            values = values.round().clip(-100, 100)
        return jax.device_put(values.astype(kind.dtype))

    return jax.block_until_ready(jax.tree.map(array, recipe.shapes(small)))


def load(file: str, *, is_deviceless: bool = False) -> Any:
    """Returns the executable from a compiling process."""
    import jax
    from jax.experimental import serialize_executable

    blob = Path(file).read_bytes()
    if is_deviceless:
        from quarantune.transport import executable

        return executable.from_pickle(blob)
    parts = pickle.loads(blob)
    return serialize_executable.deserialize_and_load(*parts, execution_devices=jax.devices()[:1])


def time_in_turn(programs: Mapping[Any, Any], args: Any, *, until: float) -> dict[Any, float]:
    """Returns the median milliseconds of each program.

    Args:
        programs: the executables, which have run before.
        args: their arguments.
        until: the time after which programs get only the fewest rounds. Programs too slow even for these get fewer.
    """
    began = time.monotonic()
    late = until + (until - began)
    calls = {}
    for key, program in programs.items():
        once_s = _run_s(program, args, 1)
        calls[key] = max(1, min(200, round(_SAMPLE_S / max(once_s, 1e-5))))
    samples: dict[Any, list[float]] = {key: [] for key in programs}
    order = list(programs)
    for done in range(_ROUNDS):
        if done and time.monotonic() > (until if done >= _LEAST_ROUNDS else late):
            break
        random.shuffle(order)
        for key in order:
            samples[key].append(1e3 * _run_s(programs[key], args, calls[key]) / calls[key])
    return {key: statistics.median(times) for key, times in samples.items()}


def _run_s(program: Any, args: Any, calls: int) -> float:
    import jax

    start = time.perf_counter()
    for _ in range(calls):
        out = program(*args)
    jax.block_until_ready(out)
    return time.perf_counter() - start


def distance_of() -> Any:
    """Returns a function that gives the distance of two outputs, as a share of the second one's norm."""
    import jax
    import jax.numpy as jnp

    def norm(tree: Any) -> Any:
        return jnp.sqrt(sum(jnp.sum(leaf.astype(jnp.float32) ** 2) for leaf in jax.tree.leaves(tree)))

    def distance(out: Any, expected: Any) -> Any:
        apart = jax.tree.map(lambda a, b: a.astype(jnp.float32) - b.astype(jnp.float32), out, expected)
        return norm(apart) / norm(expected)

    return jax.jit(distance)


# --- one program ---


@dataclasses.dataclass
class Study:
    """The findings about one program.

    Attributes:
        name: the program's name.
        configs: its configs.
        ms: for each set, the milliseconds of the configs that work, by index.
        seconds: for each set, the compile time of each config, by index.
        rounds: for each set, wall and CPU seconds of compiling all configs, and seconds of lowering them.
        off_by: for each set, the distance of each output from the output of the first config, by index.
        errors: one line for each failure and each output that does not agree.
        deviceless: the outcome of a compile without the device.
    """

    name: str
    configs: Sequence[Mapping[str, Any]]
    ms: dict[str, dict[int, float]] = dataclasses.field(default_factory=dict)
    seconds: dict[str, dict[int, float]] = dataclasses.field(default_factory=dict)
    rounds: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    off_by: dict[str, dict[int, float]] = dataclasses.field(default_factory=dict)
    errors: list[str] = dataclasses.field(default_factory=list)
    deviceless: dict[str, Any] = dataclasses.field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Returns the study with one record for each config."""
        configs = [
            {
                "config": dict(config),
                "full_ms": self.ms.get(FULL, {}).get(index),
                "cheap_ms": self.ms.get(CHEAP, {}).get(index),
                "ms": {name: times.get(index) for name, times in self.ms.items()},
                "compile_s": {name: times.get(index) for name, times in self.seconds.items()},
                "off_by": {name: found.get(index) for name, found in self.off_by.items()},
            }
            for index, config in enumerate(self.configs)
        ]
        return {
            "program": self.name,
            "rounds": self.rounds,
            "configs": configs,
            "errors": self.errors,
            "deviceless": self.deviceless,
        }


def study(
    name: str, recipe: Any, sets: Sequence[str], compilers: Mapping[str, Compiler], options: argparse.Namespace
) -> Study:
    """Compiles all configs of a program with some sets of options, and times them in turn."""
    found = Study(name, recipe.configs)
    for each in sets:
        compilers[each].ask("lower", name)
    answers = {each: compilers[each].answer() for each in sets}
    files: dict[tuple[str, int], str] = {}
    for each in sets:
        if "error" in answers[each]:
            found.errors.append(answers[each]["error"])
            continue
        _add_errors(found, each, answers[each])
        compilers[each].ask("compile", name)
        answer = compilers[each].answer()
        if "error" in answer:
            found.errors.append(answer["error"])
            continue
        _add_errors(found, each, answer)
        found.rounds[each] = {
            "wall_s": answer["wall_s"],
            "cpu_s": answer["cpu_s"],
            "lower_s": answers[each]["lower_s"],
        }
        found.seconds[each] = {int(index): seconds for index, seconds in answer["seconds"].items()}
        files |= {(each, int(index)): file for index, file in answer["files"].items()}
    if options.deviceless:
        compilers[DEVICELESS].ask("compile", name)
        found.deviceless = compilers[DEVICELESS].answer()
        if "files" in found.deviceless:
            files[DEVICELESS, 0] = found.deviceless.pop("files")["0"]
    if files:
        _time(found, files, recipe, options)
    return found


def _add_errors(found: Study, name: str, answer: Mapping[str, Any]) -> None:
    for index, error in answer["errors"].items():
        found.errors.append(f"{name}: {found.configs[int(index)]}: {error}")


def _time(found: Study, files: Mapping[tuple[str, int], str], recipe: Any, options: argparse.Namespace) -> None:
    import jax

    args = arguments(recipe, small=options.small)
    distance, expected = distance_of(), None
    programs: dict[tuple[str, int], Any] = {}
    for (name, index), file in files.items():
        try:
            program = load(file, is_deviceless=name == DEVICELESS)
            out = jax.block_until_ready(program(*args))
            start = time.monotonic()
            while time.monotonic() < start + _WARM_UP_S:
                out = jax.block_until_ready(program(*args))
            expected = out if expected is None else expected
            off_by = float(distance(out, expected))
        except Exception as error:
            if name == DEVICELESS:
                found.deviceless["error"] = f"does not load or run: {_short(error)}"
            else:
                found.errors.append(f"{name}: {recipe.configs[index]} does not load or run: {_short(error)}")
            continue
        programs[name, index] = program
        found.off_by.setdefault(name, {})[index] = off_by
        if not off_by <= recipe.off_by:
            found.errors.append(f"{name}: the output of {recipe.configs[index]} is off by {off_by:.2g}")
    del expected
    for (name, index), ms in time_in_turn(
        programs, args, until=time.monotonic() + (1.0 if options.small else _TIMING_S)
    ).items():
        if name == DEVICELESS:
            found.deviceless["ms"] = ms
        else:
            found.ms.setdefault(name, {})[index] = ms


# --- the table ---

_HEAD = (
    f"{'program':18} {'set':10} {'configs':>7} {'full s/CPU':>13} {'cheap s/CPU':>13} {'Spearman':>8}"
    f" {'cheap winner':>12} {'full/cheap: least median most':>30} {'in 1.5x':>7}"
)


def rows(found: Study) -> Iterator[str]:
    """Yields a row of the table for each set compared with the full compiles."""
    full = found.ms.get(FULL, {})
    for name, cheap in found.ms.items():
        both = sorted(full.keys() & cheap.keys())
        if name == FULL or len(both) < 2:
            continue
        a, b = np.array([full[index] for index in both]), np.array([cheap[index] for index in both])
        ratios = a / b
        regret = a[b.argmin()] / a.min() - 1
        winner = "same" if a.argmin() == b.argmin() else f"{100 * regret:+.1f}%"
        yield (
            f"{found.name:18} {name:10} {len(both):7} {_seconds(found, FULL):>13} {_seconds(found, name):>13}"
            f" {spearman(a, b):8.3f} {winner:>12} {ratios.min():14.3f} {np.median(ratios):7.3f} {ratios.max():7.3f}"
            f" {int((b <= 1.5 * b.min()).sum()):7}"
        )


def _seconds(found: Study, name: str) -> str:
    taken = found.rounds[name]
    return f"{taken['wall_s']:.1f} / {taken['cpu_s']:.1f}"


def spearman(a: Any, b: Any) -> float:
    """Returns the correlation of the ranks of two arrays."""
    ranks = [values.argsort().argsort().astype(float) for values in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


# --- all programs ---


def _kind(platform: str) -> str:
    return "cpu" if platform == "cpu" else "gpu"


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--small", action="store_true", help="small arguments, to show that it works")
    parser.add_argument("--only", action="append", metavar="NAME", help="this program; may be repeated")
    parser.add_argument("--skip", action="append", default=[], metavar="NAME", help="not this program; may be repeated")
    parser.add_argument("--sets", metavar="A,B", help="the sets of options to compare with `full`")
    parser.add_argument("--deviceless", action="store_true", help="also compile one config of each without the device")
    parser.add_argument("--threads", type=int, default=min(14, len(os.sched_getaffinity(0))))
    parser.add_argument("--budget", type=float, default=480.0, metavar="S", help="seconds for all programs")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write every number as JSON")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Studies the programs one after another, and prints their rows as they come."""
    options = _parsed()
    os.environ["JAX_PLATFORMS"] = {"cpu": "cpu", "gpu": "cuda"}[options.platform]
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    if options.serve:
        serve(options)
        return
    begin = time.monotonic()
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")  # the compiling processes need some
    with tempfile.TemporaryDirectory(prefix="fidelity-") as directory, contextlib.ExitStack() as ending:
        known = SETS[options.platform]
        sets = [name for name in known if not options.sets or name == FULL or name in options.sets.split(",")]
        compilers = {name: Compiler(name, options, Path(directory)) for name in (*sets, DEVICELESS)}
        for compiler in compilers.values():
            ending.callback(compiler.close)
        for name in sets:
            compilers[name].start()
        _study_all(options, sets, compilers, Path(directory), begin)


def _study_all(
    options: argparse.Namespace,
    sets: Sequence[str],
    compilers: Mapping[str, Compiler],
    directory: Path,
    begin: float,
) -> None:
    import jax
    from fidelity_programs import PROGRAMS, library

    device = jax.devices()[0]
    print(f"{device.device_kind}, {len(os.sched_getaffinity(0))} CPU cores; jax {jax.__version__}", flush=True)
    for name in ("flax", "equinox"):
        if library(name) is None:
            print(f"{name} is not installed: its attention is written in plain JAX", flush=True)
    options.deviceless = options.deviceless and _describe(directory)
    unknown = {*(options.only or ()), *options.skip} - PROGRAMS.keys()
    if unknown:
        sys.exit(f"unknown program {', '.join(sorted(unknown))}; there are {', '.join(PROGRAMS)}")
    names = [name for name in PROGRAMS if name not in options.skip and (not options.only or name in options.only)]
    studies: list[Study] = []
    table: list[str] = []
    for place, name in enumerate(names):
        left_s = options.budget - (time.monotonic() - begin)
        if left_s < 15:
            print(f"left out, because the time is over: {', '.join(names[place:])}", flush=True)
            break
        start = time.monotonic()
        # Each program has its share of the remaining time; the further sets are dropped first.
        few = left_s / (len(names) - place) < _FEW_SETS_S and not options.sets
        try:
            found = study(name, PROGRAMS[name], sets[:2] if few else sets, compilers, options)
        except Exception as error:
            found = Study(name, PROGRAMS[name].configs, errors=[_short(error)])
        studies.append(found)
        lines = list(rows(found))
        table += lines
        print(f"\n{name}: {time.monotonic() - start:.1f} s", *found.errors, sep="\n  ! ", flush=True)
        if options.deviceless:
            print(f"  deviceless: {found.deviceless}")
        print(_HEAD, *lines, sep="\n", flush=True)
        _save(options.out, studies, device, options)
    print("", _HEAD, *table, sep="\n", flush=True)
    print(f"{time.monotonic() - begin:.0f} s in all", flush=True)


_FEW_SETS_S = 13.0
"""Seconds below which a program is compiled only fully and cheaply, with no further set."""


def _describe(directory: Path) -> bool:
    """Writes a description of the device for the compiling process without it; returns whether it could."""
    import jax

    try:
        from quarantune.devices.discovery import described

        (target, *_) = described(jax.local_devices()[:1])
        (directory / "target.json").write_text(json.dumps(dataclasses.asdict(target)))
    except Exception as error:
        print(f"no compiles without the device: {_short(error)}", flush=True)
        return False
    if target.platform == "cpu":
        print("no compiles without the device, because a CPU is always there", flush=True)
        return False
    return True


def _save(file: Path | None, studies: Sequence[Study], device: Any, options: argparse.Namespace) -> None:
    if file is None:
        return
    import jax

    content = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "small": options.small,
        "sets": SETS[options.platform],
        "programs": [found.as_json() for found in studies],
    }
    draft = file.with_name(f"{file.name}.draft")
    draft.write_text(json.dumps(content, indent=1) + "\n")
    draft.replace(file)


if __name__ == "__main__":
    main()
