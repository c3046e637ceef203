"""The worker's side of one config: load and compile, then load, check and measure. Knows nothing of the scheduler."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding

from quarantune import jax_internals
from quarantune.devices.device import describe_jax_devices
from quarantune.host.waits import Taken, Watch
from quarantune.measure import clocks, finals, on_device, sampling
from quarantune.measure import compare as check
from quarantune.measure.compare import Tolerance
from quarantune.sandbox import spool
from quarantune.transport import (
    assignment,
    binding,
    differentiation,
    executable,
    inputs,
    manual_axes,
    payload,
    pickling,
)
from quarantune.values.config_values import restore, text_of
from quarantune.values.trial import INCOMPARABLE, Config, Outcome

_SEED = 0
_FLUSH_BYTES = 256 << 20
"""Several times the L2 cache of any GPU; Triton's `do_bench` writes as much."""

Arguments: TypeAlias = "tuple[tuple[Any, ...], dict[str, Any]]"


class NeedsDeviceError(RuntimeError):
    """The program cannot be compiled well, or at all, without its device: compile it there."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A config made ready to run.

    Attributes:
        config: the config.
        call: takes the dynamic arguments.
        compile_s: seconds spent tracing, lowering and compiling it here.
        for_cache: the executable as JAX's compilation cache holds it, by its key there; empty where it would not be
            found again, as one that was compiled without its device would not.
        calls_back: whether it is known to call back into Python.
    """

    config: Config
    call: Callable[..., Any]
    compile_s: float
    for_cache: dict[str, bytes] = dataclasses.field(default_factory=dict)
    calls_back: bool = False


class Bench:
    """One worker's bench: the call, its arguments, and the programs that lie on it."""

    def __init__(self, call: payload.Call, *, arrays_fd: int, options: dict[str, Any]) -> None:
        """Sets up the bench.

        Args:
            call: the loaded payload.
            arrays_fd: the file that holds the concrete arrays' bytes; -1 for none.
            options: `platform`, `compilation_cache`, the directory of the caller's or None, `warmup`, `rep`, `supply`,
                `tolerance`, `check_grad` and `time_grad`.
        """
        call = manual_axes.under_shard_map(call)
        self._call = call
        self._jitted: Any = call.fn
        self._arrays_fd = arrays_fd
        self._options = options
        self._arguments: Arguments | None = None
        self._flush: clocks.Flush | None = None
        self._expected: dict[int, dict[str, Any]] = {}
        # Compiling the comparison takes a fresh CPU worker longer than numpy takes.
        self._shortcut = None if options["platform"] in (None, "cpu") else on_device.Comparer()
        self._last_run: Taken | None = None
        self._jit: jax_internals.JitOptions | None = None
        self._may_write = True  # a plain callable may write into its arguments
        if jax_internals.is_jitted(call.fn):
            self._jit = jax_internals.jit_options(call.fn)
            self._may_write = bool(self._jit.donate_argnums or self._jit.donate_argnames)
            if options.get("time_grad"):
                self._jitted = differentiation.with_gradient(call.fn)
        # XLA's threads sleep until there is work for them.
        self._spins = self._jit is None
        if options["platform"] == "cpu":
            jax.config.update("jax_platforms", "cpu")  # no context on a device that this worker has no use for
        if call.context_mesh is not None:
            jax.set_mesh(inputs.mesh_like(call.context_mesh))

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing to compile."""
        return self._jit is None

    def prepare(self, references: Sequence[int] = ()) -> None:
        """Takes the device, and makes the arguments and whatever comparing outputs needs, ahead of the first config.

        Args:
            references: descriptors of what outputs will be compared with, as for `check`.
        """
        jax.block_until_ready(self.arguments())
        if self._shortcut is not None:
            for position, fd in enumerate(references):
                with contextlib.suppress(Exception):  # comparing the first output will meet it, too
                    self._shortcut.prepare(self._expected_at(position, fd)["output"], self._tolerance())
        if self._has_own_clock():
            with contextlib.suppress(clocks.NoDeviceClockError):  # which the first config will meet, too
                self._flusher()

    def compile(
        self,
        config: Config,
        *,
        target: dict[str, Any] | None,
        away: bool = False,
        announce: Callable[[str], None] = lambda program: None,
    ) -> Program:
        """Traces, lowers and compiles one config.

        Args:
            config: the config.
            target: what to compile for where the device is not to be touched; None compiles for this worker's own.
            away: whether another worker will run it, so that no argument need be made here.
            announce: told the program's hash between lowering and compiling.

        Raises:
            NeedsDeviceError: this program must be compiled on its device.
        """
        config = restore(config, self._call.config_values)
        start = time.perf_counter()
        if self._jit is None:
            return Program(config, binding.bind(self._call.fn, config), 0.0)
        if target is not None:
            compiled = self._compile_deviceless(config, target, announce)
        else:
            args, kwargs = inputs.call_as_structs(self._call) if away else self.arguments()
            jitted, keywords = binding.applied(self._jitted, config)
            lowered = jitted.trace(*args, **kwargs, **keywords).lower()
            calls_back = self._announce(lowered, config, announce)
            with jax_internals.compilation_cache_in_memory({}, named=self._options["compilation_cache"]) as cache:
                compiled = lowered.compile()
            for_cache = {} if self._options.get("time_grad") else cache.programs  # the caller compiles another program
            return Program(config, compiled, time.perf_counter() - start, for_cache, calls_back)
        return Program(config, compiled, time.perf_counter() - start)

    def save(self, program: Program, fd: int, *, as_data: bool = False) -> None:
        """Writes a program where another worker can load it.

        Args:
            program: the program.
            fd: the file.
            as_data: whether it is for the caller, who runs no code of ours to load it: nothing is written where that
                is not possible.

        Raises:
            NeedsDeviceError: it cannot leave this process.
        """
        if isinstance(self._call.fn, assignment.Runner):
            spool.write_parts(fd, [self._call.fn.report(program.config), b"", b""])  # what it ran says more than it is
            return
        if as_data:
            if self._options.get("time_grad"):
                return  # it is not the caller's program
            with contextlib.suppress(ValueError):
                spool.write_parts(fd, [executable.dumps_as_data(program.call)])
            return
        try:
            blob = executable.dumps(program.call)
        except Exception as error:
            raise NeedsDeviceError(f"its executable cannot be serialised: {error}") from error
        key, value = next(iter(program.for_cache.items()), ("", b""))
        spool.write_parts(fd, [blob, key.encode(), value])

    def load(self, config: Config, fd: int) -> Program:
        """Loads a config's program that another worker compiled."""
        if self._jit is None:
            return self.compile(config, target=None)
        config = restore(config, self._call.config_values)
        return Program(config, executable.loads(spool.read_parts(fd)[0]), 0.0)

    def run(self, program: Program) -> Any:
        """Runs a program once, to its end, on pristine arguments, and returns its output."""
        args, kwargs = self.arguments() if not self._may_write else self._materialize()
        args, kwargs = self.dynamic((args, kwargs))
        with Watch(spins=self._spins) as watch:
            taken, output = watch.time(lambda: jax.block_until_ready(program.call(*args, **kwargs)))
        self._last_run = taken.scaled(1e3)
        return output[0] if self._options.get("time_grad") else output

    def refer(self, fd: int) -> None:
        """Writes what the configs' outputs, and their gradients where those count, are to be compared with."""
        ref_fn = self._call.companions["ref_fn"]
        args, kwargs = self._materialize()
        expected = {"output": _on_host(jax.block_until_ready(ref_fn(*args, **kwargs)))}
        if self._options["check_grad"]:
            expected["gradients"] = _on_host(self._gradients(ref_fn, {}))
        spool.write(fd, pickling.dumps(expected))

    def shapes_differ(self, fd: int) -> str | None:
        """Says how what the function returns with its defaults differs, by shapes alone, from the reference.

        Args:
            fd: holds what `refer` wrote.

        Returns:
            One sentence, or None where they may agree, or where JAX cannot trace the function with its defaults.
        """
        if self._jit is None or "check_fn" in self._call.companions:
            return None
        args, kwargs = inputs.call_as_structs(self._call)
        jitted: Any = self._call.fn
        try:
            output = jitted.trace(*args, **kwargs).out_info
        except Exception:
            return None  # its configs may do better
        return check.compare_shapes(output, pickling.loads(spool.read(fd))["output"])

    def check(
        self,
        program: Program,
        *,
        references: Sequence[int] = (),
        standard: int | None = None,
        output_fd: int | None = None,
    ) -> int | None:
        """Runs a program once and judges its output.

        Args:
            program: the program.
            references: descriptors of what to compare with: what `refer` wrote, or outputs of other configs.
            standard: which of them is right; None where that is not known.
            output_fd: where to keep the output, for other configs, if it is like none of them; None to keep nothing.

        Returns:
            The position of the one that it agrees with, `len(references)` where it was kept, `INCOMPARABLE`, or None
            where it is like none or was not compared.

        Raises:
            WrongResultError: the output, or a gradient, is not what it should be.
        """
        output = self.run(program)
        check_fn = self._call.companions.get("check_fn")
        if check_fn is not None or "ref_fn" in self._call.companions:
            self._judge(program, output, references, check_fn)
            return None
        if not references and output_fd is None:
            return None
        return self._group(program, output, references, standard, output_fd)

    def _judge(
        self, program: Program, output: Any, references: Sequence[int], check_fn: Callable[..., Any] | None
    ) -> None:
        """Compares an output with what the author says is right."""
        expected = self._expected_at(0, references[0]) if references else {"output": None}
        args, kwargs = self._materialize() if check_fn is not None else ((), {})
        reason = check.judge(
            output,
            expected["output"],
            args,
            kwargs,
            tolerance=self._tolerance(),
            check_fn=check_fn,
            shortcut=self._shortcut,
        )
        if reason is None and "gradients" in expected:
            reason = self._gradients_differ(self._gradients(self._call.fn, program.config), expected)
        if reason is not None:
            raise WrongResultError(reason)

    def _group(
        self, program: Program, output: Any, references: Sequence[int], standard: int | None, output_fd: int | None
    ) -> int | None:
        """Finds which output of another config this one agrees with."""
        own = {"output": output if self._jit is not None else _arrays_alone(output)}
        if not jax.tree.leaves(own):
            return INCOMPARABLE
        if self._options["check_grad"]:
            own["gradients"] = self._gradients(self._call.fn, program.config)
        wrong: str | None = None
        group: int | None = None
        for position in sorted(range(len(references)), key=lambda position: position != standard):
            differs: str | None
            try:
                expected = self._expected_at(position, references[position])
            except Exception as error:  # its config may have left anything
                differs = f"the output to compare with cannot be read: {error!r}"
            else:
                differs = self._differs(own, expected)
            if differs is None:
                group = position
                break
            wrong = differs if position == standard else wrong
        if group is None and output_fd is not None:
            try:
                spool.write(output_fd, pickling.dumps({name: _on_host(part) for name, part in own.items()}))
            except TypeError as error:
                print(f"its output cannot be compared with that of other configs: {error}")
                return INCOMPARABLE
            group = len(references)
        if wrong is not None:
            raise WrongResultError(f"it does not compute what the defaults do: {wrong}", group)
        return group

    def _differs(self, own: dict[str, Any], expected: dict[str, Any]) -> str | None:
        reason = check.compare(
            own["output"], expected["output"], self._tolerance(), shortcut=self._shortcut, same_dtypes=True
        )
        if reason is None and "gradients" in expected:
            reason = self._gradients_differ(own["gradients"], expected)
        return reason

    def _gradients_differ(self, gradients: Any, expected: dict[str, Any]) -> str | None:
        differs = check.compare(gradients, expected["gradients"], self._tolerance())
        return None if differs is None else f"its gradients differ: {differs}"

    def _tolerance(self) -> Tolerance:
        return Tolerance(**self._options["tolerance"])

    def _expected_at(self, position: int, fd: int) -> dict[str, Any]:
        """Returns what a file holds; the same position is always the same file."""
        if position not in self._expected:
            self._expected[position] = pickling.loads(spool.read(fd))
        return self._expected[position]

    def _gradients(self, fn: Callable[..., Any], config: Config) -> Any:
        args, kwargs = self.arguments()
        static = self._jit or jax_internals.JitOptions()
        positions = [index for index in range(len(args)) if static.is_static_position(index, len(args))]
        if self._jit is not None and jax_internals.is_jitted(fn):
            config, _ = binding.split(fn, config)  # with which JAX differentiates nothing
            fn = jax_internals.without_compiler_options(fn)
        bound = functools.partial(fn, **config) if config else fn
        return check.gradients(bound, args, kwargs, static_argnums=positions, static_argnames=static.static_argnames)

    def clock(self, program: Program, *, is_flushed: bool = True) -> clocks.Clock:
        """Returns the best clock there is for a program.

        Args:
            program: the program.
            is_flushed: whether a device's clock is to flush its cache before each run.
        """
        call = program.call
        if self._may_write:
            fresh: list[Arguments] = []

            def run_fresh() -> object:
                args, kwargs = fresh.pop()
                return jax.block_until_ready(call(*args, **kwargs))

            def refill() -> None:
                fresh[:] = [jax.block_until_ready(self.dynamic(self._materialize()))]

            return clocks.WallClock(run_fresh, refill, spins=self._spins)
        args, kwargs = self.dynamic(self.arguments())

        def dispatch() -> object:
            return call(*args, **kwargs)

        if self._has_own_clock():
            with contextlib.suppress(clocks.NoDeviceClockError):
                return clocks.DeviceClock(dispatch, self._flusher() if is_flushed else None)
        if self._options["platform"] in ("cuda", "rocm"):
            return clocks.QueuedClock(dispatch)
        return clocks.WallClock(lambda: jax.block_until_ready(call(*args, **kwargs)), None)

    def measure(self, program: Program, *, bar_ms: float | None, noise: sampling.Noise | None = None) -> dict[str, Any]:
        """Times a program.

        Args:
            program: the program; it has run once.
            bar_ms: the time of the fastest config so far; None for none.
            noise: as for `measure.measure`.

        Returns:
            `samples_ms`; `disturbed`, how many of them were; `own_ms`, what finalists are chosen by; `clock`; and
            `is_slow`, whether sampling stopped because it cannot win any more.
        """
        # To be checked it ran once already. That tells nothing where something may have been compiled or made then: by
        # Python, or by JAX, to carry an argument from one device to all that the others are on.
        is_warm = self._jit is not None and self._call.devices_needed == 1 and not program.calls_back
        for _ in range(self._options["warmup"] - is_warm):
            self.run(program)
            is_warm = True
        clock, last = self.clock(program), self._last_run
        samples = sampling.measure(
            clock.take,
            rep=self._options["rep"],
            bar_ms=bar_ms,
            margin=clock.margin,
            before_ms=None if last is None or not is_warm or clock.name != "wall" else last.least,
            last_ms=None if last is None or clock.name != "wall" else last.least,
            is_exact=clock.is_exact,
            noise=noise,
        )
        return {
            "disturbed": samples.disturbed(is_exact=clock.is_exact),
            "samples_ms": list(samples.samples_ms),
            "own_ms": samples.level_ms(is_exact=clock.is_exact),
            "clock": clock.name,
            "is_slow": samples.is_ruled_out,
        }

    def telling_run(self, program: Program) -> Taken | None:
        """Returns how long the first run took, where it was so long that this says something; else None."""
        is_telling = (
            self._jit is not None
            and not self._has_own_clock()
            and self._call.devices_needed == 1
            and not program.calls_back  # what Python keeps is made in the first run
            and self._options["warmup"] <= 1  # or its author knows that it takes several
        )
        return self._last_run if is_telling and self._last_run and self._last_run.whole > sampling.TELLING_MS else None

    def compare(self, programs: Sequence[Program]) -> tuple[list[list[float]], list[list[float]]]:
        """Times programs in turn, round by round, until the fastest is clear or the rounds run out.

        Returns:
            The samples of each program in milliseconds, one per round; and the same with the device's cache not
            flushed, of those that are near the fastest, empty for the others: kernels often run on what the last has
            just written.
        """
        each = [self.clock(program) for program in programs]
        is_exact = all(clock.is_exact for clock in each)
        rounds_ms = finals.play([clock.take for clock in each], is_exact=is_exact)
        warm_ms: list[list[float]] = [[] for _ in programs]
        near = finals.level(dict(enumerate(rounds_ms)), floor=finals.NEAR)
        if len(near) > 1 and self._has_own_clock():
            contenders = [self.clock(programs[position], is_flushed=False).take for position in near]
            for position, samples_ms in zip(near, finals.play(contenders, floor=finals.WARM_FLOOR), strict=True):
                warm_ms[position] = samples_ms
        return rounds_ms, warm_ms

    def _announce(self, lowered: Any, config: Config, announce: Callable[[str], None]) -> bool:
        """Tells a lowered program's hash, which configs have in common that lower to the same one.

        A program that calls back into Python says where in a table the function is, not which: its text tells nothing.
        Neither does it tell of the gradients, where those are to be checked. Nor does it say all of what it takes and
        gives, nor the compiler's options.

        Returns:
            Whether it calls back into Python.
        """
        text, interface = lowered.as_text(), jax_internals.interface(lowered)
        calls_back = "callback" in text
        if not calls_back and not self._options["check_grad"] and interface is not None:
            _, compiler_options = binding.split(self._jitted, config)
            whole = f"{interface} {text_of(compiler_options)} {text}"
            announce(hashlib.sha256(whole.encode()).hexdigest())
        return calls_back

    def dynamic(self, arguments: Arguments) -> Arguments:
        """Returns the arguments without the static ones, as an executable takes them."""
        args, kwargs = arguments
        if self._jit is None:
            return args, kwargs
        static = self._jit
        return (
            tuple(arg for index, arg in enumerate(args) if not static.is_static_position(index, len(args))),
            {name: arg for name, arg in kwargs.items() if name not in static.static_argnames},
        )

    def arguments(self) -> Arguments:
        """Returns the call's arguments, made once."""
        if self._arguments is None:
            self._arguments = self._materialize()
        return self._arguments

    def _has_own_clock(self) -> bool:
        # Of several devices it would add up the times, also that which one waits for another.
        return self._options["platform"] in ("cuda", "rocm") and jax.local_device_count() == 1

    def _materialize(self) -> Arguments:
        args, kwargs = inputs.materialize(self._call, self._arrays_fd, seed=_SEED, kind=self._options["supply"])
        if self._jit is None:
            return args, kwargs
        # A jitted function's numpy arguments are carried to the device here and not with every timed call. Not by
        # jnp.asarray: it compiles a program for that, which is half of what a fresh worker costs.
        on_device = jax.tree.map(
            lambda leaf: jax.device_put(leaf, may_alias=False) if isinstance(leaf, np.ndarray) else leaf,
            (args, kwargs),
        )
        return on_device[0], on_device[1]

    def _flusher(self) -> clocks.Flush:
        """Returns what writes more than the device's cache holds.

        Raises:
            NoDeviceClockError: the device's clock cannot be read.
        """
        if self._flush is None:
            self._flush = clocks.Flush(jax.jit(lambda: jnp.zeros(_FLUSH_BYTES // 4, jnp.int32)).lower().compile())
        return self._flush

    def _compile_deviceless(
        self, config: Config, target: dict[str, Any], announce: Callable[[str], None]
    ) -> Callable[..., Any]:
        with _abstract_device(target) as sharding:
            args, kwargs = inputs.call_as_structs(self._call, sharding=sharding)
            jitted, keywords = binding.applied(self._jitted, config)
            traced = jitted.trace(*args, **kwargs, **keywords)
            if reason := why_device_is_needed(traced.jaxpr.jaxpr):
                raise NeedsDeviceError(reason)
            lowered = traced.lower(lowering_platforms=(target["platform"],))
            self._announce(lowered, config, announce)
            compiled: Callable[..., Any] = lowered.compile()
            return compiled


class WrongResultError(Exception):
    """A config ran, and what it returned is not what it should be; the message says how.

    Attributes:
        group: which output of another config it agrees with, as `Bench.check` says it.
    """

    def __init__(self, reason: str, group: int | None = None) -> None:
        super().__init__(reason)
        self.group = group


def _arrays_alone(tree: Any) -> Any:
    """Returns what a plain callable returned with its arrays, and None for all else: times, names, handles."""

    def kept(leaf: Any) -> Any:
        is_array = isinstance(leaf, (np.ndarray, jax.Array))
        return leaf if is_array and not jnp.issubdtype(leaf.dtype, np.object_) else None

    return jax.tree.map(kept, tree)


def _on_host(tree: Any) -> Any:
    """Returns a tree with its arrays as numpy arrays, which hold no device and can travel."""

    def fetched(leaf: Any) -> Any:
        is_plain = isinstance(leaf, jax.Array) and not payload.is_key_dtype(leaf.dtype)
        return np.asarray(leaf) if is_plain else leaf

    return jax.tree.map(fetched, tree)


@contextlib.contextmanager
def _abstract_device(target: dict[str, Any]) -> Iterator[SingleDeviceSharding]:
    """Stands in for the accelerator while a program is compiled for it.

    The abstract device keeps Pallas's lowering from asking for the local one, which would make a context on it: a
    quarter of a second each, one after another.
    """
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    jax.config.update("jax_platforms", "cpu")
    topology = topologies.get_topology_desc(
        platform=target["platform"], topology_name="", topology="1x1x1", target_config=target["config_text"]
    )
    device = AbstractDevice(
        device_kind=target["device_kind"], num_cores=target["num_cores"], platform=target["platform"]
    )
    mesh = AbstractMesh((1,), ("d",), axis_types=(AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh), jax_internals.answer_for_device("gpu", _refuse_devices):
        yield SingleDeviceSharding(topology.devices[0])


def _refuse_devices(function: str) -> None:
    raise NeedsDeviceError(f"it calls jax.{function}() while it is traced")


_TUNED_BY_XLA = frozenset({"dot_general", "conv_general_dilated", "scaled_dot", "ragged_dot", "ragged_dot_general"})
_CALLBACKS = frozenset({"pure_callback", "io_callback", "debug_callback", "debug_print"})


def why_device_is_needed(jaxpr: Any) -> str | None:
    """Returns why a traced program must be compiled on its device, or None where it need not.

    XLA times its own choices for dots and convolutions on the device, so that without one they come out slower; a host
    callback is bound to the process that compiled it. What happens inside a Pallas kernel is neither's business.
    """
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in _TUNED_BY_XLA:
            return f"XLA tunes its {name} on the device"
        if name in _CALLBACKS:
            return f"its {name} belongs to the process that compiles it"
        if name == "pallas_call":
            continue
        for inner in jax_internals.inner_jaxprs(equation.params):
            if reason := why_device_is_needed(inner):
                return reason
    return None


def outcome_of(error: BaseException, phase: str) -> str:
    """Returns the outcome that an exception in `phase` stands for, or `unfit` for a program in the wrong worker."""
    if isinstance(error, NeedsDeviceError):
        return "unfit"
    if isinstance(error, WrongResultError):
        return Outcome.WRONG.value
    # While compiling, the same status tells of a kernel that wants more shared memory than there is.
    exhausted = isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
    if exhausted and (phase != "compile" or "out of memory" in str(error).lower()):
        return Outcome.DEVICE_OOM.value
    return Outcome.ERROR.value


def probe(platforms: str | None) -> dict[str, Any]:
    """Initialises a backend and describes its devices.

    Args:
        platforms: the caller's `jax_platforms`; None for JAX's own choice.

    Returns:
        `devices`, each with `platform`, `kind`, `index`, `num_cores`, and `config_text`, what a compiler without the
        device must be told of it (None where JAX cannot say).
    """
    jax.config.update("jax_platforms", platforms)
    devices = jax.local_devices()
    return {"devices": describe_jax_devices(devices), "config_text": jax_internals.target_config(devices)}
