"""Packs a sweep for the machines of an engine: the call as workers get it, without what belongs to the submitter."""

from __future__ import annotations

import dataclasses
import os
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from quarantune import jax_internals
from quarantune.devices.targets import Target
from quarantune.sandbox import spool
from quarantune.sweep import sweep, sweep_inputs
from quarantune.sweep.request import SweepRequest
from quarantune.transport import payload
from quarantune.transport.call import Call, PackedCall
from quarantune.transport.problem import Problem
from quarantune.values.config_values import encode
from quarantune.values.options import TIME, Options
from quarantune.values.trial import Config

_THREADS = ("OMP", "MKL", "OPENBLAS", "BLIS", "NUMEXPR")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parcel:
    """One call as the shards of its sweep run it.

    Attributes:
        problem: the call, without its arguments; a stand-in takes the place of the function.
        is_jitted: whether the function is jitted.
        packed: the call as a sweep sends it to its workers; only these unpack it.
        options: the author's options; stand-ins take the place of functions, which travel with the call.
        settings: the settings that hold on every machine, by name.
        threads: the variables that limit threads of numerical libraries, with their values in the submitter's process.
        target: the device to compile for, which the machines need not have; None where configs are measured.
    """

    problem: Problem
    is_jitted: bool
    packed: PackedCall
    options: Options
    settings: Mapping[str, Any]
    threads: Mapping[str, str | None]
    target: Target | None


def stand_in(*args: Any, **kwargs: Any) -> None:
    """Takes the place of a function that only the workers of a sandbox load.

    Raises:
        RuntimeError: it was called.
    """
    raise RuntimeError("this function stands for another one, and is never called")


_jitted_stand_in = jax.jit(stand_in)


def pack(request: SweepRequest, configs: Sequence[Config]) -> tuple[bytes, Call]:
    """Returns the call of a sweep packed for `unpack`, and as it is in this process.

    Args:
        request: the sweep.
        configs: configs with all values that the configs of the space have.

    Raises:
        TypeError: a part of the call cannot be pickled.
    """
    problem, options, settings, limits = request.problem, request.options, request.settings, request.limits
    packed = sweep.pack(problem, configs, options, with_values=sweep_inputs.are_given(options.supply))
    values = _values_of(packed)
    untuned = None if problem.untuned is None else encode(problem.untuned)
    parcel = Parcel(
        problem=dataclasses.replace(problem, fn=stand_in, args=(), kwargs={}, untuned=untuned),
        is_jitted=jax_internals.is_jitted(problem.fn),
        packed=dataclasses.replace(
            packed,
            call=Call(fn=stand_in, args=(), kwargs={}, specs=packed.call.specs),
            sources=(None,) * len(packed.call.specs),
            spool=values,
        ),
        options=_plain(options),
        settings={
            "compile_timeout": limits.compile_timeout_s,
            "timeout": limits.timeout_s,
            "memory_limit": limits.memory_limit_bytes,
            "configs_per_worker": settings.configs_per_worker,
            "start_method": settings.start_method,
            "isolation": "process",
            "disable_cache": True,  # only the submitter writes
        },
        threads={name: os.environ.get(name) for name in (f"{library}_NUM_THREADS" for library in _THREADS)},
        target=request.target,
    )
    return pickle.dumps(parcel), packed.call


def unpack(data: bytes) -> Parcel:
    """Returns the parcel that `pack` packed in a process with the same versions."""
    parcel = pickle.loads(data)
    assert isinstance(parcel, Parcel)
    if not parcel.is_jitted:
        return parcel
    return dataclasses.replace(parcel, problem=dataclasses.replace(parcel.problem, fn=_jitted_stand_in))


def _values_of(packed: PackedCall) -> bytes:
    if not packed.call.spool_bytes:
        return b""
    fd = spool.create("arrays", size_bytes=packed.call.spool_bytes)
    try:
        payload.write_arrays(packed, fd)
        return spool.read(fd)
    finally:
        os.close(fd)


def _plain(options: Options) -> Options:
    """Returns options without what only the submitter needs, and with stand-ins for functions of the user's."""
    return dataclasses.replace(
        options,
        key_fn=None,
        prune_fn=None,
        objective=TIME,
        supply="auto" if callable(options.supply) else options.supply,
        ref_fn=stand_in if callable(options.ref_fn) else options.ref_fn,
        check_fn=None if options.check_fn is None else stand_in,
        search="exhaustive",
        max_trials=None,
        time_budget=None,
        patience=None,
        tables=None,
    )
