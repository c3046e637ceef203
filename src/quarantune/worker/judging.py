"""Judges a config's output: against the author's reference, or against the outputs of other configs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import numbers
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from quarantune.functions import batch
from quarantune.functions.binding import Arguments, bind_config, split_config
from quarantune.functions.fingerprint import describe
from quarantune.host.machine import file_id
from quarantune.jax_internals import jax_functions, jax_traces
from quarantune.measure import bits, compare, rounding
from quarantune.measure.compare import Flat, NoArray
from quarantune.measure.rounding import Allowance
from quarantune.sandbox import spool
from quarantune.sandbox.messages import Judgement
from quarantune.transport import differentiation, executable, pickling
from quarantune.transport.arrays import is_key_dtype
from quarantune.transport.payload import Call, call_as_structs
from quarantune.values.configs import Config
from quarantune.values.options import BATCH_INVARIANT, BITWISE
from quarantune.values.trial import INVARIANT, OTHER, SAME, VARIES, ArrayKind, have_same_bits
from quarantune.worker.arguments import BenchOptions, CallArguments, Program
from quarantune.worker.failures import check_is_done

_WIDER_S = 5.0
"""The longest wait for a wider reference, which counts as part of a config's check."""
_STALE_COPIES = 3
"""Copies to overwrite: an allocator may place the next output in the memory of any of the last few."""
_MOST_STALE_BYTES = 512 << 20
_OTHER_ON_MOVED = "output has other bits on inputs that are moved by a unit in the last place"
_NOT_PLAIN = re.compile(r"pallas|ffi|kernel|triton|cutlass|cute|custom_call|callback|random|threefry|rng")
"""Matches primitives that run code for one dtype, call back, or draw other numbers in another dtype."""


@dataclasses.dataclass(frozen=True)
class ComparedOutput:
    """The parts of a call's result that are compared; pickled into the file of a reference.

    Attributes:
        output: the value that the function returned.
        gradients: its gradients by argument; None if they do not count.
        allowances: how far other outputs may be from it, leaf by leaf, the gradients' last.
        digest: see `Trial`.
    """

    output: Flat
    gradients: Flat | None = None
    allowances: tuple[Allowance, ...] = ()
    digest: str = ""

    @property
    def leaves(self) -> list[Any]:
        """All leaves, the gradients' last."""
        return self.output.values + (self.gradients.values if self.gradients else [])

    def on_host(self) -> ComparedOutput:
        """Returns the same with its arrays as numpy arrays, which hold no device and can travel."""
        gradients = self.gradients and self.gradients.mapped(_fetched)
        return dataclasses.replace(self, output=self.output.mapped(_fetched), gradients=gradients)

    @property
    def noise(self) -> float | None:
        """The largest noise of a leaf, relative to its RMS; None if unknown."""
        return max((each.noise for each in self.allowances if each.noise is not None), default=None)


class Judge:
    """Compares the outputs of one call's configs, and their gradients if those count."""

    def __init__(self, call: Call, arguments: CallArguments, options: BenchOptions) -> None:
        """Sets up the judge.

        Args:
            call: the loaded payload.
            arguments: the arguments that every output was computed from.
            options: the sweep's options.
        """
        self._call = call
        self._arguments = arguments
        self._options = options
        self._fixed = None if options.tolerance is None else Allowance.fixed(options.tolerance)
        self._expected: dict[tuple[int, int], Any] = {}
        # On the CPU, compiling the comparison takes a fresh worker longer than numpy takes to compare.
        self._shortcut = None if options.platform in (None, "cpu") else compare.Comparer()

    def prepare(self, references: Sequence[int], programs: int | None = None) -> None:
        """Carries the references to an accelerator, ahead of the first output; leaves errors to `check`."""
        if self._shortcut is not None:
            if programs is not None:
                self._load_programs(self._shortcut, programs)
            for fd in references:
                with contextlib.suppress(Exception):
                    expected = self._expected_in(fd)
                    self._shortcut.prepare(expected.leaves, expected.allowances)

    def expect(self, outputs: Sequence[ArrayKind], fd: int | None = None) -> None:
        """Compiles the comparison of these outputs on an accelerator, ahead of the first; leaves errors to `check`.

        Args:
            outputs: the arrays of each config's output.
            fd: a file with the programs of an earlier sweep, or an empty file for later sweeps, or None.
        """
        if (device := self._shortcut) is None:
            return
        is_empty = fd is not None and not self._load_programs(device, fd)
        with contextlib.suppress(Exception):
            with ThreadPoolExecutor(1) as pool:
                if self._fixed is None:
                    pool.submit(self._arguments.moved, 0, None, device.run)
                device.expect(outputs, bits.sums_of)
            if fd is not None and is_empty:
                programs = {kind: executable.to_pickle(program) for kind, program in device.programs.items()}
                spool.write(fd, pickling.dumps(programs))

    def _load_programs(self, device: compare.Comparer, fd: int) -> bool:
        """Loads the comparisons that another worker has compiled; returns whether there is anything in their file."""
        kept = spool.read(fd)
        with contextlib.suppress(Exception):  # it is empty, not complete yet, or its writer was killed
            device.programs |= {kind: executable.from_pickle(blob) for kind, blob in pickling.loads(kept).items()}
        return bool(kept)

    def compute_reference(self, fd: int) -> None:
        """Writes the reference's output, and its gradients if those count, for comparisons with the configs."""
        ref_fn = self._call.judges["ref_fn"]
        args, kwargs = self._arguments.fresh()
        output = jax.block_until_ready(ref_fn(*args, **kwargs))
        check_is_done(output)
        if "check_fn" in self._call.judges:  # which takes the output as it is
            kept: Any = jax.tree.map(_fetched, output)
        else:
            coarsest = None
            with contextlib.suppress(Exception):  # a plain callable, or defaults that fail while configs may not
                traced = self._trace_defaults().jaxpr.jaxpr
                coarsest = rounding.coarsest_mantissa(traced, self._options.platform)
            program = Program({}, ref_fn, 0.0, coarsest=coarsest)
            compared = self._compared(output, ref_fn, {})
            kept = dataclasses.replace(compared.on_host(), allowances=self._allowances(compared, program, math.inf))
        _write(fd, kept)

    def _trace_defaults(self) -> Any:
        args, kwargs = call_as_structs(self._call)
        jitted: Any = self._call.fn
        return jitted.trace(*args, **kwargs)

    def shapes_differ(self, fd: int) -> str | None:
        """Returns how the output of the function's defaults differs from the reference, by shapes alone.

        Args:
            fd: the file that `compute_reference` wrote.

        Returns:
            One sentence. None if they may agree, or if JAX cannot trace the function with its defaults.
        """
        if self._arguments.is_plain or "check_fn" in self._call.judges:
            return None
        try:
            output = self._trace_defaults().out_info
        except Exception:
            return None  # its configs may do better
        return compare.compare_shapes(_flat(output), _read(fd).output)

    def check(
        self,
        program: Program,
        output: Any,
        *,
        taken_s: float,
        references: Sequence[int] = (),
        standard: int | None = None,
        output_fd: int | None = None,
    ) -> Judgement:
        """Judges a config's output.

        Args:
            program: the config's program; it runs again to see how far rounding moves an output that is kept.
            output: the value that it returned.
            taken_s: the seconds that it took.
            references: descriptors of the files to compare with: the reference's, or those with other configs' outputs.
            standard: the position of the right output among them; None if unknown.
            output_fd: where to keep the output for other configs if it agrees with no reference; None to keep nothing.
        """
        judges, compares = self._call.judges, self._options.compares_outputs
        has_reference, is_judged_apart = "ref_fn" in judges, "check_fn" in judges
        own = self._compared(output, self._call.fn, program.config)
        if self._arguments.is_plain and not has_reference:
            own = dataclasses.replace(own, output=own.output.mapped(_kind_unless_array))
        own = dataclasses.replace(own, digest=self._digest(own, program, taken_s))
        noise: float | None = None
        group, reason = self._group(own, references, standard) if compares else (None, None)
        if group is None and output_fd is not None:
            # The noise of wrong outputs, and of outputs that only have bits to keep, does not matter.
            has_noise = standard is None if compares else has_reference and not is_judged_apart
            group, noise = len(references), self._keep(own, program, taken_s if has_noise else math.inf, output_fd)
        if is_judged_apart:
            wanted = self._expected_in(references[0]) if has_reference else None
            args, kwargs = self._arguments.fresh()
            reason = compare.judge_by(judges["check_fn"], output, wanted, args, kwargs)
        elif has_reference:
            defaults = references[-1] if output_fd is None else output_fd
            reason = self._differs_from_reference(own, references[0], defaults)
        found = Judgement(group, noise if reason is None else None, reason, digest=own.digest)
        at = standard if compares else len(references) - 1 if len(references) > has_reference else None
        found = found if at is None else self._with_bits(found, own, references[at])
        return found if self._options.check_batch is None else self._with_batch(found, program, output)

    def _digest(self, own: ComparedOutput, program: Program, taken_s: float) -> str:
        """Returns the digest of an output, of its gradients, and of outputs on moved inputs if its program is quick."""
        parts, device, inputs = [], self._shortcut, bits.MOVED[self._shortcut is not None]
        with contextlib.suppress(Exception):  # nothing can be moved, or there is too little memory
            parts += [self.digest_of(each) for each in (own.output, own.gradients) if each is not None]
            for run in range(1, 1 + inputs) if taken_s < bits.SLOWEST_S and not self._arguments.is_plain else ():
                moved, _ = self._arguments.moved(run, None, device and device.run, is_quick=True)
                parts.append(self.digest_of(self._run(program, moved)))
        return ".".join(parts)

    def digest_of(self, output: Any) -> str:
        """Returns a hash of the bits of an output, flattened or not."""
        flat = output if isinstance(output, Flat) else _flat(output)
        return bits.digest(flat.mapped(_kind_unless_array) if self._arguments.is_plain else flat, self._shortcut)

    def _with_bits(self, found: Judgement, own: ComparedOutput, defaults: int) -> Judgement:
        """Returns a judgement with the comparison with the defaults' bits, which decides if numerics are exact."""
        with contextlib.suppress(Exception):  # the config that wrote the file may have left anything there
            expected = self._expected_in(defaults)
            is_same, reason = have_same_bits(own.digest, expected.digest), None
            # On the host, equal digests do not prove that outputs are equal.
            if self._options.numerics == BITWISE and not (is_same and self._shortcut):
                pairs = (own.output, expected.output, "output"), (own.gradients, expected.gradients, "the gradient ")
                reasons = [bits.difference(mine, its, what) for mine, its, what in pairs if mine and its]
                reason = next(filter(None, [*reasons, None if is_same else _OTHER_ON_MOVED]), None)
            found = dataclasses.replace(found, bits=SAME if is_same and reason is None else OTHER)
            return _refused(found, reason, "compared with the defaults", BITWISE)
        return found

    def _with_batch(self, found: Judgement, program: Program, output: Any) -> Judgement:
        """Returns a judgement with the comparison of half of the batch with the whole; see `Options.check_batch`."""
        numerics, axes = self._options.numerics, self._options.check_batch
        reason: str | None
        try:
            if (halved := batch.halved(self._call.fn, *self._arguments.for_run(), axes or 0)) is None:
                return found
            args, kwargs = halved
            half = _flat(jax.block_until_ready(bind_config(self._call.fn, program.config)(*args, **kwargs)))
            rows = iter(batch.first_rows(_flat(output).values, half.values))
            reason = bits.difference(half, half.mapped(lambda _: next(rows)))
            found = dataclasses.replace(found, batch=VARIES if reason else INVARIANT)
        except Exception as error:
            reason = f"half of the batch cannot be compared with the whole: {type(error).__name__}: {error}"
        return found if numerics != BATCH_INVARIANT else _refused(found, reason, "for half of the batch", numerics)

    def _differs_from_reference(self, own: ComparedOutput, reference: int, defaults: int) -> str | None:
        """Returns how an output differs from `ref_fn`'s, by more than the noise of the defaults if these work."""
        expected, known = self._expected_in(reference), self._expected_in(defaults).allowances
        if _is_none(expected) and not _is_none(own):
            return "ref_fn returned None, and the config did not: does ref_fn lack a return?"
        if len(known) == len(expected.leaves):
            expected = dataclasses.replace(expected, allowances=known)
        return self._differs(own, expected, same_dtypes=False)

    def _group(
        self, own: ComparedOutput, references: Sequence[int], standard: int | None
    ) -> tuple[int | None, str | None]:
        """Finds the other config's output that this one agrees with.

        Returns:
            Its position, or None; and how this one differs from the standard, or None.
        """
        wrong: str | None = None
        right: ComparedOutput | None = None
        for position in sorted(range(len(references)), key=lambda position: position != standard):
            differs: str | None
            expected: ComparedOutput | None = None
            try:
                expected = self._expected_in(references[position])
            except Exception as error:  # the config that wrote it may have left anything there
                differs = f"the output to compare with cannot be read: {error!r}"
            else:
                differs = self._differs(own, expected)
            if differs is None:
                return position, wrong
            if position == standard:
                right, wrong = expected, f"it does not agree with the defaults: {differs}"
        if right is not None and self._is_as_near(own, right):
            return standard, None
        return None, wrong

    def _compared(
        self, output: Any, fn: Callable[..., Any], config: Config, given: Arguments | None = None
    ) -> ComparedOutput:
        """Returns the parts of an output that count, for the call's own arguments or for `given` ones."""
        if not self._options.check_grad:
            return ComparedOutput(_flat(output))
        return ComparedOutput(_flat(output), _flat(self._gradients(fn, config, given or self._arguments.for_run())))

    @property
    def _needs_spare(self) -> bool:
        """Whether gradients need arguments of their own, because the run for the output may use up its arguments."""
        return self._options.check_grad and self._arguments.may_be_overwritten

    def _differs(
        self, own: ComparedOutput, expected: ComparedOutput, *, same_dtypes: bool = True, truths: Sequence[Any] = ()
    ) -> str | None:
        place = 0
        parts = ((own.output, expected.output, ""), (own.gradients, expected.gradients, "its gradients differ: "))
        for mine, its, what in parts:
            if mine is not None and its is not None:
                part = slice(place, place := place + len(its.leaves))
                allowances, device = expected.allowances[part], self._shortcut
                reason = compare.compare(
                    mine, its, allowances, shortcut=device, same_dtypes=same_dtypes, truths=truths[part]
                )
                if reason is not None:
                    return what + reason
        return None

    def _is_as_near(self, own: ComparedOutput, expected: ComparedOutput) -> bool:
        """Returns whether an output is as near to a wider reference as the expected one, though these two disagree."""
        truths = self._wider if self._fixed is None else []
        return len(truths) == len(expected.leaves) and self._differs(own, expected, truths=truths) is None

    @functools.cached_property
    def _wider(self) -> list[Any]:
        """The leaves that the defaults return for wider inputs; empty if they do not take those, or take too long.

        Defaults that call kernels do not run on wider inputs: a kernel may be written for one dtype only.
        """
        found: list[Any] = []
        fn: Any = self._call.fn

        def compute() -> None:
            with contextlib.suppress(Exception), jax.default_matmul_precision("highest"):
                (args, kwargs), mode = self._arguments.widened()
                spare = self._arguments.widened()[0] if self._needs_spare else (args, kwargs)
                with mode:
                    equations = jax_traces.equations(fn.trace(*args, **kwargs).jaxpr.jaxpr)
                    if not any(_NOT_PLAIN.search(equation.primitive.name) for equation in equations):
                        wide = self._compared(fn(*args, **kwargs), fn, {}, spare)
                        found[:] = wide.on_host().leaves

        if not self._arguments.is_plain:
            thread = threading.Thread(target=compute, daemon=True)
            thread.start()
            thread.join(_WIDER_S)
        return found

    def _keep(self, own: ComparedOutput, program: Program, taken_s: float, fd: int) -> float | None:
        """Writes an output to a file, so that other configs' outputs can be compared with it; returns its noise."""
        on_host = dataclasses.replace(own.on_host(), allowances=self._allowances(own, program, taken_s))
        _write(fd, on_host)
        if self._shortcut is not None:
            self._shortcut.keep(own.output.values, on_host.output.values)
        self._expected[file_id(fd)] = on_host
        return on_host.noise

    def _allowances(self, own: ComparedOutput, program: Program, taken_s: float) -> tuple[Allowance, ...]:
        """Returns how far other outputs may be from one, leaf by leaf; runs its program on moved arguments for that.

        Args:
            own: the output.
            program: its program.
            taken_s: the seconds that a run takes; infinite if the noise counts as unknown.
        """
        if self._fixed is not None:
            return (self._fixed,) * len(own.leaves)
        device, coarsest, outputs = self._shortcut, program.coarsest, len(own.output.leaves)
        noises = [
            compare.noise_of(
                leaf,
                coarsest=coarsest,
                run=device.run if device and device.is_narrow(leaf) else None,
                is_gradient=place >= outputs,
            )
            for place, leaf in enumerate(own.leaves)
        ]
        if any(noises):
            # After an error (too little memory, or no floats), the noise is from the runs before it.
            with contextlib.suppress(Exception):
                for run in rounding.runs(taken_s):
                    move = functools.partial(self._arguments.moved, run, coarsest, device and device.run)
                    arguments, scale = move()
                    spare = move()[0] if self._needs_spare else arguments
                    found = self._compared(self._run(program, arguments), self._call.fn, program.config, spare)
                    if found.output.structure != own.output.structure:
                        break
                    for noise, leaf in zip(noises, found.leaves, strict=True):
                        if noise is not None:
                            noise.add(leaf, scale)
        exact = Allowance(0.0, 0.0, 0.0, is_calibrated=True)
        return tuple(exact if noise is None else noise.allowance() for noise in noises)

    def _run(self, program: Program, arguments: Arguments) -> Any:
        """Runs a program once on moved arguments, and returns its output."""
        args, kwargs = self._arguments.dynamic(arguments)
        output = jax.block_until_ready(program.call(*args, **kwargs))
        return output[0] if self._options.time_grad else output

    def _expected_in(self, fd: int) -> Any:
        """Returns the content of a reference's file, read once: a `ComparedOutput`, or an output for a `check_fn`."""
        file = file_id(fd)
        if file not in self._expected:
            self._expected[file] = _read(fd)
        return self._expected[file]

    def _gradients(self, fn: Callable[..., Any], config: Config, arguments: Arguments) -> Any:
        args, kwargs = arguments
        if not self._arguments.is_plain and jax_functions.is_jitted(fn):
            config, _ = split_config(fn, config)  # JAX refuses compiler options under differentiation
            fn = jax_functions.without_compiler_options(fn)
        bound = functools.partial(fn, **config) if config else fn
        try:
            return differentiation.gradients(bound, args, kwargs, self._arguments.jit)
        except (jax.errors.TracerArrayConversionError, jax.errors.ConcretizationTypeError) as error:
            raise TypeError(
                f"check_grad differentiates it by JAX, and it takes values out of JAX ({type(error).__name__}): "
                f"write it with jax.numpy, or leave check_grad out"
            ) from error


def _refused(found: Judgement, reason: str | None, where: str, numerics: str) -> Judgement:
    """Returns the judgement of an output whose bits are wrong, unless it is wrong already or there is no reason."""
    if reason is None or found.wrong is not None:
        return found
    return dataclasses.replace(found, wrong=f"{reason}, {where} (numerics={numerics!r})", is_harmless=True)


def _write(fd: int, kept: Any) -> None:
    arrays: list[memoryview] = []
    spool.write_parts(fd, [pickling.dumps(kept, arrays), *arrays])


def _read(fd: int) -> Any:
    blob, *arrays = spool.map_parts(fd)
    return pickling.loads(blob, arrays)


def _flat(tree: Any) -> Flat:
    return Flat.of(tree, describe)


def _is_none(compared: ComparedOutput) -> bool:
    return [leaf is None for leaf in compared.output.values] == [True]


def _kind_unless_array(leaf: Any) -> Any:
    """Returns a leaf of a plain callable's output if it is an array; else only its kind (times, names, handles)."""
    if isinstance(leaf, (np.ndarray, jax.Array)) and not jnp.issubdtype(leaf.dtype, jnp.object_):
        return leaf
    if leaf is None:
        return None
    return NoArray("a number" if isinstance(leaf, (numbers.Number, np.generic)) else f"a {type(leaf).__qualname__}")


def _fetched(leaf: Any) -> Any:
    is_plain = isinstance(leaf, jax.Array) and not is_key_dtype(leaf.dtype)
    return np.asarray(leaf) if is_plain else leaf


# --- memory that earlier outputs have left ---


class StaleMemory:
    """Remembers the outputs of the last config, and overwrites free memory of their sizes.

    A kernel that does not write all of its output returns whatever the memory held. In a worker that has run other
    configs, that may well be the right values of one of them, and the config would pass.
    """

    def __init__(self, *, is_shared: bool) -> None:
        """Begins without any output.

        Args:
            is_shared: whether configs are checked one after another in the same memory; if not, nothing is done.
        """
        self._is_shared = is_shared
        self._outputs: list[jax.ShapeDtypeStruct] = []
        self._fills: dict[jax.ShapeDtypeStruct, Callable[[], jax.Array]] = {}

    def note(self, output: Any) -> None:
        """Remembers the arrays of an output, which free memory will hold."""
        arrays = [leaf for leaf in jax.tree.leaves(output) if isinstance(leaf, jax.Array)] if self._is_shared else []
        self._outputs = [
            _alike(array.shape, array.dtype, next(iter(array.devices())))
            for array in arrays
            if len(array.devices()) == 1 and fill_value(array.dtype) is not None
        ]

    def expect(self, outputs: Sequence[ArrayKind]) -> None:
        """Compiles the programs that overwrite these outputs, ahead of the first: 0.06 s each on a GPU. Best effort."""
        with contextlib.suppress(Exception):
            for output in outputs if self._is_shared else ():
                if fill_value(jnp.dtype(output.dtype)) is not None:
                    self._compiled(_alike(output.shape, output.dtype, jax.local_devices()[0]))

    def overwrite(self) -> None:
        """Overwrites freed memory, so that no config passes with an earlier config's output. Best effort."""
        size = sum(like.dtype.itemsize * like.size for like in self._outputs)
        copies = min(_STALE_COPIES, _MOST_STALE_BYTES // size) if size else 0
        try:
            with jax.debug_nans(False):  # the values may be NaN
                jax.block_until_ready([self._filled(like) for _ in range(copies) for like in self._outputs])
        except Exception:
            self._is_shared = False  # too little memory: waiting for more takes seconds each time

    def _filled(self, like: jax.ShapeDtypeStruct) -> jax.Array:
        return self._compiled(like)()

    def _compiled(self, like: jax.ShapeDtypeStruct) -> Callable[[], jax.Array]:
        if like not in self._fills:
            value = fill_value(like.dtype)
            with jax.default_device(*like.sharding.device_set):
                self._fills[like] = jax.jit(lambda: jnp.full(like.shape, value, like.dtype)).lower().compile()
        return self._fills[like]


def _alike(shape: tuple[int, ...], dtype: Any, device: jax.Device) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))


def fill_value(dtype: Any) -> Any:
    """Returns a value that outputs of a type hardly ever have; None for a type without one."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.nan
    with contextlib.suppress(TypeError, ValueError):
        return jnp.iinfo(dtype).max  # type: ignore[no-untyped-call]
    return None
