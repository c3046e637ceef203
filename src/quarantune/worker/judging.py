"""Judges a config's output: against the author's reference, or against the outputs of other configs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from quarantune import jax_internals
from quarantune.measure import compare, on_device
from quarantune.measure.gradients import gradients as gradients_of
from quarantune.sandbox import spool
from quarantune.sandbox.messages import BenchOptions
from quarantune.transport import binding, inputs, pickling
from quarantune.transport.arrays import is_key_dtype
from quarantune.transport.call import Call
from quarantune.values.compiling import OutputArray
from quarantune.values.trial import INCOMPARABLE, Config
from quarantune.worker.arguments import CallArguments
from quarantune.worker.failures import WrongResultError


@dataclasses.dataclass(frozen=True)
class ComparedOutput:
    """The parts of a call's result that are compared; pickled into the file of a reference.

    Attributes:
        output: the value that the function returned.
        gradients: its gradients by argument; None where they do not count.
    """

    output: Any
    gradients: Any = None


class Judge:
    """Compares the outputs of one call's configs, and their gradients where those count."""

    def __init__(self, call: Call, arguments: CallArguments, options: BenchOptions) -> None:
        """Sets up the judge.

        Args:
            call: the loaded payload.
            arguments: the arguments that every output was computed from.
            options: the sweep's options.
        """
        self._call = call
        self._arguments = arguments
        self._check_grad = options.check_grad
        self._tolerance = options.tolerance
        self._expected: dict[tuple[int, int], ComparedOutput] = {}
        # On the CPU, compiling the comparison takes a fresh worker longer than numpy takes to compare.
        self._shortcut = None if options.platform in (None, "cpu") else on_device.Comparer()

    def prepare(self, references: Sequence[int]) -> None:
        """Carries the references to an accelerator, ahead of the first output; errors are left to `check`."""
        if self._shortcut is not None:
            for fd in references:
                with contextlib.suppress(Exception):
                    self._shortcut.prepare(self._expected_in(fd).output, self._tolerance)

    def expect(self, outputs: Sequence[OutputArray]) -> None:
        """Compiles the comparison of such outputs on an accelerator, ahead of the first; errors are left to `check`."""
        if self._shortcut is not None:
            with contextlib.suppress(Exception):
                self._shortcut.expect(outputs)

    def compute_reference(self, fd: int) -> None:
        """Writes the reference's output, and its gradients where those count, for the configs to be compared with."""
        ref_fn = self._call.companions["ref_fn"]
        args, kwargs = self._arguments.fresh()
        output = _on_host(jax.block_until_ready(ref_fn(*args, **kwargs)))
        gradients = _on_host(self._gradients(ref_fn, {})) if self._check_grad else None
        spool.write(fd, pickling.dumps(ComparedOutput(output, gradients)))

    def shapes_differ(self, fd: int) -> str | None:
        """Returns how the output of the function's defaults differs from the reference, by shapes alone.

        Args:
            fd: the file that `compute_reference` wrote.

        Returns:
            One sentence, or None where they may agree, or where JAX cannot trace the function with its defaults.
        """
        if self._arguments.jit is None or "check_fn" in self._call.companions:
            return None
        args, kwargs = inputs.call_as_structs(self._call)
        jitted: Any = self._call.fn
        try:
            output = jitted.trace(*args, **kwargs).out_info
        except Exception:
            return None  # its configs may do better
        return compare.compare_shapes(output, self._read(fd).output)

    def check(
        self,
        config: Config,
        output: Any,
        *,
        references: Sequence[int] = (),
        standard: int | None = None,
        output_fd: int | None = None,
    ) -> int | None:
        """Judges a config's output.

        Args:
            config: the config.
            output: the value that it returned.
            references: descriptors of the files to compare with: the reference's, or those of other configs' outputs.
            standard: the position of the one that is right; None where that is not known.
            output_fd: where to keep the output for other configs if it agrees with no reference; None to keep nothing.

        Returns:
            The position of the reference that it agrees with, `len(references)` where it was kept, `INCOMPARABLE`, or
            None where it agrees with none or was not compared.

        Raises:
            WrongResultError: the output, or a gradient, is wrong.
        """
        check_fn = self._call.companions.get("check_fn")
        if check_fn is not None or "ref_fn" in self._call.companions:
            self._judge(config, output, references, check_fn)
            return None
        if not references and output_fd is None:
            return None
        return self._group(config, output, references, standard, output_fd)

    def _judge(
        self, config: Config, output: Any, references: Sequence[int], check_fn: Callable[..., Any] | None
    ) -> None:
        """Applies the author's `check_fn`, or compares an output with that of `ref_fn`."""
        expected = self._expected_in(references[0]) if references else ComparedOutput(None)
        args, kwargs = self._arguments.fresh() if check_fn is not None else ((), {})
        reason = compare.judge(
            output,
            expected.output,
            args,
            kwargs,
            tolerance=self._tolerance,
            check_fn=check_fn,
            shortcut=self._shortcut,
        )
        if reason is None and expected.gradients is not None:
            reason = self._gradients_differ(self._gradients(self._call.fn, config), expected)
        if reason is not None:
            raise WrongResultError(reason)

    def _group(
        self, config: Config, output: Any, references: Sequence[int], standard: int | None, output_fd: int | None
    ) -> int | None:
        """Finds the other config's output that this one agrees with."""
        output = output if self._arguments.jit is not None else _arrays_alone(output)
        if not jax.tree.leaves(output):
            return INCOMPARABLE
        own = ComparedOutput(output, self._gradients(self._call.fn, config) if self._check_grad else None)
        wrong: str | None = None
        group: int | None = None
        for position in sorted(range(len(references)), key=lambda position: position != standard):
            differs: str | None
            try:
                expected = self._expected_in(references[position])
            except Exception as error:  # the config that wrote it may have left anything there
                differs = f"the output to compare with cannot be read: {error!r}"
            else:
                differs = self._differs(own, expected)
            if differs is None:
                group = position
                break
            wrong = differs if position == standard else wrong
        if group is None and output_fd is not None:
            try:
                self._keep(own, output_fd)
            except TypeError as error:
                print(f"its output cannot be compared with that of other configs: {error}")
                return INCOMPARABLE
            group = len(references)
        if wrong is not None:
            raise WrongResultError(f"it does not compute what the defaults do: {wrong}", group)
        return group

    def _differs(self, own: ComparedOutput, expected: ComparedOutput) -> str | None:
        reason = compare.compare(
            own.output, expected.output, self._tolerance, shortcut=self._shortcut, same_dtypes=True
        )
        if reason is None and expected.gradients is not None:
            reason = self._gradients_differ(own.gradients, expected)
        return reason

    def _gradients_differ(self, found: Any, expected: ComparedOutput) -> str | None:
        differs = compare.compare(found, expected.gradients, self._tolerance)
        return None if differs is None else f"its gradients differ: {differs}"

    def _keep(self, own: ComparedOutput, fd: int) -> None:
        """Writes an output to the file from which other configs' outputs are compared with it.

        Raises:
            TypeError: it cannot be pickled.
        """
        on_host = ComparedOutput(_on_host(own.output), _on_host(own.gradients))
        spool.write(fd, pickling.dumps(on_host))
        if self._shortcut is not None:
            self._shortcut.keep(own.output, on_host.output)
        self._expected[_identity(fd)] = on_host

    def _expected_in(self, fd: int) -> ComparedOutput:
        """Returns the content of a reference's file, read once."""
        file = _identity(fd)
        if file not in self._expected:
            self._expected[file] = self._read(fd)
        return self._expected[file]

    @staticmethod
    def _read(fd: int) -> ComparedOutput:
        found: ComparedOutput = pickling.loads(spool.read(fd))
        return found

    def _gradients(self, fn: Callable[..., Any], config: Config) -> Any:
        args, kwargs = self._arguments.shared()
        static = self._arguments.jit or jax_internals.JitOptions()
        positions = [index for index in range(len(args)) if static.is_static_position(index, len(args))]
        if self._arguments.jit is not None and jax_internals.is_jitted(fn):
            config, _ = binding.split(fn, config)  # JAX refuses compiler options under differentiation
            fn = jax_internals.without_compiler_options(fn)
        bound = functools.partial(fn, **config) if config else fn
        return gradients_of(bound, args, kwargs, static_argnums=positions, static_argnames=static.static_argnames)


def _identity(fd: int) -> tuple[int, int]:
    about = os.fstat(fd)
    return about.st_dev, about.st_ino


def _arrays_alone(tree: Any) -> Any:
    """Returns a plain callable's output with None in place of all leaves but arrays: of times, names and handles."""

    def kept(leaf: Any) -> Any:
        is_array = isinstance(leaf, (np.ndarray, jax.Array))
        return leaf if is_array and not jnp.issubdtype(leaf.dtype, np.object_) else None

    return jax.tree.map(kept, tree)


def _on_host(tree: Any) -> Any:
    """Returns a tree with its arrays as numpy arrays, which hold no device and can travel."""

    def fetched(leaf: Any) -> Any:
        is_plain = isinstance(leaf, jax.Array) and not is_key_dtype(leaf.dtype)
        return np.asarray(leaf) if is_plain else leaf

    return jax.tree.map(fetched, tree)
