"""The ways to compile one config: for this worker's device, for a described device, or to find out if it compiles."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeAlias

import jax

from quarantune import device_table
from quarantune.functions.binding import bind_config, jitted_with, split_config
from quarantune.jax_internals import kernels
from quarantune.jax_internals.other_processes import compilation_cache_in_memory
from quarantune.measure import rounding
from quarantune.transport import programs
from quarantune.transport.payload import call_as_structs
from quarantune.transport.program_text import ProgramText
from quarantune.values.codec import restore
from quarantune.values.configs import Config
from quarantune.values.trial import ArrayKind, CompileTarget, lowered_half
from quarantune.worker import compiler_figures
from quarantune.worker.arguments import Program
from quarantune.worker.bench import Bench
from quarantune.worker.deviceless import abstract_device, checked_device, products, why_device_is_needed
from quarantune.worker.failures import NeedsDeviceError

StandIn: TypeAlias = Callable[[CompileTarget], AbstractContextManager[Any]]
"""Stands in for a device while a program is traced and lowered for it; for example `abstract_device`."""


@dataclasses.dataclass(frozen=True)
class CompileHooks:
    """Callbacks while a program is compiled.

    Attributes:
        show: receives the traced program.
        announce: receives the identity of the lowered program, its outputs, and the names of the operations that XLA
            will try kernels for. It returns when the program may be compiled, which may take long.
    """

    show: Callable[[Any], None] = lambda jaxpr: None
    announce: Callable[[str, tuple[ArrayKind, ...], tuple[str, ...]], None] = lambda program, outputs, products: None


NOBODY = CompileHooks()


def compile_here(bench: Bench, config: Config, hooks: CompileHooks = NOBODY, *, away: bool = False) -> Program:
    """Compiles a config for this worker's own device.

    Args:
        bench: the bench.
        config: the config.
        hooks: receive the program.
        away: whether another worker will run it, so that no argument need be made here.
    """
    directory = bench.options.compilation_cache if bench.options.on_gpu else None
    return _compile_here(bench, config, hooks, directory=directory, away=away)


def confirm_here(bench: Bench, config: Config, hooks: CompileHooks = NOBODY) -> Program:
    """Compiles a config for this worker's own device to confirm an error: it waits for nobody, and nobody for it."""
    return _compile_here(bench, config, hooks, directory=None, away=True)


def _compile_here(bench: Bench, config: Config, hooks: CompileHooks, *, directory: str | None, away: bool) -> Program:
    if bench.is_plain:
        config = restore(config, bench.call.config_values)
        return Program(config, bind_config(bench.call.fn, config), 0.0)
    work = _Work(bench, config)
    args = call_as_structs(bench.call) if away else bench.arguments.shared()
    traced = _trace(bench, config, args, bench.options.platform)
    hooks.show(traced.jaxpr)
    work.lower(traced)
    # One file marks each product that XLA has tried kernels for, also in earlier sweeps.
    tried = [Path(directory, name) for name in products(work.jaxpr.jaxpr)] if directory else []
    work.announce(hooks, tuple(file.name for file in tried if not file.exists()))
    with compilation_cache_in_memory({}, named=bench.options.compilation_cache) as cache:
        compiled = work.compile()
    for file in tried:
        with contextlib.suppress(OSError):
            file.touch()
    # With its gradient, the caller compiles another program.
    entries = {} if bench.options.time_grad else cache.programs
    return work.program(compiled, bench.options.platform, is_named=bench.options.on_gpu, cache_entries=entries)


CHEAP_OPTIONS = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}
"""Options that let cuBLAS choose the kernels of products by its own rules, while XLA tries none.

On an H100 with jax 0.11.2, that takes a twentieth of the time, and ranks most programs nearly as a full compile does.
The second option alone ranks products in no useful order: XLA then takes the first Triton kernel that it knows.
examples/benchmarks/fidelity.py measures this.
"""


def compile_for(
    bench: Bench, config: Config, target: CompileTarget, hooks: CompileHooks = NOBODY, *, is_cheap: bool = False
) -> Program:
    """Compiles a config for the device of another worker, without touching that device.

    Args:
        bench: the bench.
        config: the config.
        target: the device, which need not be here.
        hooks: receive the program.
        is_cheap: whether the program is only for ranking the config; it is then compiled with `CHEAP_OPTIONS`.

    Raises:
        NeedsDeviceError: this program must be compiled on its device.
    """
    if bench.is_plain:
        return compile_here(bench, config)
    if any(spec.memory_kind for spec in bench.call.specs):
        raise NeedsDeviceError("an argument is in the memory of the device's host")
    work = _Work(bench, config)
    with traced_for(bench, config, target) as (traced, _):
        hooks.show(traced.jaxpr)
        if reason := why_device_is_needed(traced.jaxpr.jaxpr, target.platform, is_cheap=is_cheap):
            raise NeedsDeviceError(reason)
        work.lower(traced, target.platform)
    if programs.calls_cudnn(work.text):
        raise NeedsDeviceError("cuDNN plans its kernels with the device")
    work.announce(hooks)
    programs.remove_notes(work.lowered)
    return work.program(work.compile(is_cheap=is_cheap), target.platform, is_named=not is_cheap)


def check_for(bench: Bench, config: Config, target: CompileTarget, hooks: CompileHooks = NOBODY) -> Program:
    """Compiles a config for a device that need not be here, to find out whether it compiles; nobody will run it."""
    if bench.is_plain:
        return compile_here(bench, config)
    work = _Work(bench, config)
    with traced_for(bench, config, target, checked_device) as (traced, _):
        hooks.show(traced.jaxpr)
        work.lower(traced, target.platform)
    work.announce(hooks)
    programs.remove_notes(work.lowered)
    if target.platform != "cuda":
        return work.program(work.compile(), target.platform)
    compiled, figures = compiler_figures.compiled(work.lowered, target)
    return work.program(compiled, target.platform, figures=figures)


@contextlib.contextmanager
def traced_for(
    bench: Bench, config: Config, target: CompileTarget, device: StandIn = abstract_device
) -> Iterator[tuple[Any, Any]]:
    """Yields the traced program of a config and the sharding of its arguments; the block lowers for the target.

    Args:
        bench: the bench.
        config: the config.
        target: the device, which need not be here.
        device: stands in for the device.
    """
    with device(target) as sharding:
        args = call_as_structs(bench.call, sharding=sharding)
        yield _trace(bench, config, args, target.platform, target.device_kind), sharding


def _trace(bench: Bench, config: Config, arguments: Any, platform: str | None, device_kind: str = "") -> Any:
    args, kwargs = arguments
    jitted, keywords = jitted_with(bench.jitted, restore(config, bench.call.config_values))
    traced = jitted.trace(*args, **kwargs, **keywords)
    if platform == "tpu":
        _check_vmem(traced.jaxpr, device_kind or jax.local_devices()[0].device_kind)
    return traced


class _Work:
    """A program that is lowered, announced and then compiled; the time of the announcement does not count."""

    jaxpr: Any
    lowered: Any
    text: str
    _identity: str

    def __init__(self, bench: Bench, config: Config) -> None:
        self._bench = bench
        self._config = restore(config, bench.call.config_values)
        self._began = time.perf_counter()

    def lower(self, traced: Any, platform: str | None = None) -> None:
        """Lowers a traced program, for `platform` if given, else for the platform of this worker."""
        self.jaxpr = traced.jaxpr
        self.lowered = traced.lower(lowering_platforms=None if platform is None else (platform,))
        self.text = self.lowered.as_text()

    def announce(self, hooks: CompileHooks, found: tuple[str, ...] = ()) -> None:
        """Announces the program with its products. If gradients are only checked, it does not contain them."""
        lowered_at, options = time.perf_counter(), self._bench.options
        is_all = options.time_grad or not options.check_grad
        self._identity = programs.identity(
            self.lowered, self.text, ProgramText(self.jaxpr), self._own_options(), is_shared=is_all
        )
        arrays = jax.tree.leaves(self.lowered.out_info)
        hooks.announce(self._identity, tuple(ArrayKind(array.shape, array.dtype.name) for array in arrays), found)
        self._began += time.perf_counter() - lowered_at

    def compile(self, *, is_cheap: bool = False) -> Any:
        """Compiles the lowered program; cheaply with `CHEAP_OPTIONS`, which the config's own options override."""
        own = self._own_options()
        cheap = {name: value for name, value in CHEAP_OPTIONS.items() if name not in own}
        return self.lowered.compile(compiler_options=cheap if is_cheap else None)

    def _own_options(self) -> Mapping[str, Any]:
        return split_config(self._bench.jitted, self._config)[1]

    def program(self, compiled: Any, platform: str | None, *, is_named: bool = True, **more: Any) -> Program:
        """Returns the compiled program; `is_named` means that it is for an accelerator and keeps its identity."""
        return Program(
            self._config,
            compiled,
            time.perf_counter() - self._began,
            calls_back=programs.calls_back(self.text),
            identity=self._identity if lowered_half(self._identity) and is_named else None,
            coarsest=rounding.coarsest_mantissa(self.jaxpr.jaxpr, platform),
            **more,
        )


def _check_vmem(jaxpr: Any, kind: str) -> None:
    """Refuses a program that cannot fit into a TPU, since its compiler may spend minutes on it.

    Raises:
        ValueError: the blocks and scratch of one of its kernels are larger than the device's VMEM.
    """
    there = device_table.limits_of(kind).shared_memory_per_block_bytes
    for needed, allowed in kernels.vmem_needs(jaxpr):
        most = min((limit for limit in (there, allowed) if limit is not None), default=needed)
        if needed > most:
            amounts = f"Used {needed / 2**20:.2f}M of {most / 2**20:.2f}M vmem"
            raise ValueError(f"a kernel's blocks and scratch do not fit into memory space vmem, once each. {amounts}.")
