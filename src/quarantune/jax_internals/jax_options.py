"""Options and contexts of JAX that change programs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax._src import config

OPTION_DEFAULTS: Mapping[str, Any] = {
    "jax_accurate_erf_inv": False,
    "jax_allow_f16_reductions": True,
    "jax_auto_pcast": True,
    "jax_check_static_indices": False,
    "jax_custom_jvp3": False,
    "jax_custom_vjp3": False,
    "jax_debug_key_reuse": False,
    "jax_default_matmul_precision": None,
    "jax_default_prng_impl": "threefry2x32",
    "jax_disable_most_optimizations": False,
    "jax_embedded_constants_max_bytes": 32,
    "jax_enable_x64": False,
    "jax_error_checking_behavior_divide": "ignore",
    "jax_error_checking_behavior_nan": "ignore",
    "jax_error_checking_behavior_oob": "ignore",
    "jax_exec_time_optimization_effort": 0.0,
    "jax_explicit_x64_dtypes": "warn",
    "jax_high_dynamic_range_gumbel": False,
    "jax_memory_fitting_effort": 0.0,
    "jax_memory_fitting_level": "O2",
    "jax_numpy_dtype_promotion": "standard",
    "jax_numpy_rank_promotion": "allow",
    "jax_optimization_level": "UNKNOWN",
    "jax_pallas_auto_assign_collective_ids": "no",
    "jax_pallas_auto_assign_collective_ids_limit": 25,
    "jax_pallas_enable_debug_checks": False,
    "jax_pallas_use_mosaic_gpu": True,
    "jax_ragged_dot_use_gpu_pallas_triton_lowering": False,
    "jax_raise_on_ppermute_sort_diff": True,
    "jax_random_seed_offset": 0,
    "jax_remat3": False,
    "jax_remat_barrier_no_cotangents": False,
    "jax_remove_size_one_mesh_axis_from_type": False,
    "jax_scan3": False,
    "jax_softmax_custom_jvp": False,
    "jax_threefry_gpu_kernel_lowering": False,
    "jax_threefry_partitionable": True,
    "jax_use_direct_linearize": True,
    "jax_use_emit_pipeline_primitive": False,
    "jax_use_hlo_logistic_lowering": None,
    "jax_use_shardy_partitioner": True,
    "jax_use_simplified_jaxpr_constants": False,
}
"""The options that change the program, with their defaults. JAX does not keep the defaults: the value of an option
includes its environment variable from the start."""

CONTEXTS = (
    "compute_on_context_manager",
    "pallas_tpu_interpret_mode_context_manager",
    "xla_metadata_context_manager",
)
"""JAX's contexts: values for a thread that are in JAX's key for a program but are not options; None unless set."""

# Options of a process rather than a program: its devices, caches, peers and debugging. The sandbox sets a
# worker's.
_PROCESS_OPTIONS = (
    "jax_platforms",
    "jax_platform_name",
    "jax_xla_backend",
    "jax_backend_target",
    "jax_compilation_cache",
    "jax_enable_compilation_cache",
    "jax_persistent_cache",
    "jax_raise_persistent_cache",
    "jax_share_binary",
    "jax_cuda_",
    "jax_rocm_",
    "jax_oneapi_",
    "jax_mock_gpu",
    "mock_num_gpu",
    "jax_cross_host",
    "jax_force_dcn",
    "jax_distributed",
    "jax_mtls",
    "jax_enable_preemption",
    "jax_enable_recoverability",
    "jax_cpu_collectives",
    "jax_cpu_get_",
    "jax_dump_ir",
    "jax_pjrt_client",
    "jax_default_device",
    "jax_disable_jit",
    "jax_no_tracing",
    "jax_no_execution",
    "jax_transfer_guard",
    "jax_array_garbage_collection_guard",
    "jax_thread_guard",
)


def describe_options(describe_value: Callable[[Any], Any], *, own: str | None = None) -> dict[str, Any]:
    """Returns the settings that change the program of a call made here and now: those that differ from JAX's defaults.

    Args:
        describe_value: makes a JSON-able description of a value.
        own: the value of this package's own user context, which is left out.

    Returns:
        JSON-able descriptions by name; empty if nothing has been set.
    """
    values = jax.config.values
    options = {
        name: values[name] for name, default in OPTION_DEFAULTS.items() if not _is(values.get(name, default), default)
    }

    def described(value: Any) -> Any:
        try:
            return describe_value(value)
        except TypeError:  # a value of some library's, without a description
            return {"type": type(value).__qualname__}

    found = {name: described(value) for name, value in {**options, **contexts()}.items()}
    # The contexts made by `jax.make_user_context`; None for each that is not set.
    named_values = zip(trace_context_names(), trace_context(), strict=False)
    set_by_users = (value for name, value in named_values if name == "user_context" and value is not None)
    if users := [value for value in set_by_users if value != own]:
        found["user_context"] = [described(value) for value in users]
    return found


def _is(value: Any, default: Any) -> bool:
    if isinstance(default, str):  # some options are members of an enum, in all or some versions of JAX
        return str(getattr(value, "name", value)).lower() == default.lower()
    return type(value) is type(default) and bool(value == default)


def other_options(described: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the options whose values here differ from a description, with the values of the description."""
    values = jax.config.values
    wanted = {name: described.get(name, default) for name, default in OPTION_DEFAULTS.items() if name in values}
    return {name: value for name, value in wanted.items() if not _is(values[name], value)}


def options_to_travel() -> Mapping[str, Any]:
    """Returns the JAX options that a worker takes over, by name."""
    return {
        name: value
        for name, value in jax.config.values.items()
        if not name.startswith(_PROCESS_OPTIONS) and isinstance(value, (bool, int, float, str, type(None)))
    }


def adopt_options(options: Mapping[str, Any]) -> None:
    """Sets JAX's options in this process to the caller's values, except options that are not registered here.

    Args:
        options: the result of `options_to_travel` in the caller's process.
    """
    here = jax.config.values
    for name, value in options.items():
        if name not in here:
            logging.getLogger("quarantune").debug(
                "JAX has no option %s in this process; the caller's value %r is left out", name, value
            )
        elif here[name] != value:
            jax.config.update(name, value)


def is_debugging() -> bool:
    """Returns whether JAX runs functions step by step or checks their outputs, so that programs differ from usual ones.

    Private because the type checker does not know the attributes of `jax.config`.
    """
    return bool(config.disable_jit.value or config.debug_nans.value or config.debug_infs.value)


trace_context: Callable[[], tuple[Any, ...]] = config.trace_context
"""Returns the part of JAX's key for a program that does not come from the call.

Private because JAX has no public way to know whether a program traced earlier would be traced the same now.
"""


def trace_context_names() -> tuple[str, ...]:
    """Returns a name for each part of the tuple that `trace_context()` returns; none if JAX does not publish them."""
    with contextlib.suppress(AttributeError, NotImplementedError):
        return tuple(config.trace_context_names())
    return ()


_COMPILER_OPTIONS = tuple(sorted(OPTION_DEFAULTS.keys() - trace_context_names()))


def program_state() -> tuple[Any, ...]:
    """Returns the values of all settings that `describe_options` describes, which takes a tenth of its time.

    Private (`_read`) because some options, such as the PRNG, are neither in JAX's key for a program nor attributes.
    """
    options: Any = jax.config
    return (*trace_context(), *(options._read(name) for name in _COMPILER_OPTIONS if name in options.meta))


def contexts() -> Mapping[str, Any]:
    """Returns the values of those `CONTEXTS` that are set in this thread or in the process.

    Private because JAX has public ways to enter them (`pltpu.force_tpu_interpret_mode`), but none to read them.
    """
    values = {name: holder.value for name in CONTEXTS if (holder := getattr(config, name, None)) is not None}
    return {name: value for name, value in values.items() if value is not None}


def set_contexts(values: Mapping[str, Any]) -> None:
    """Sets some of `CONTEXTS` for the whole process.

    Args:
        values: the values that `contexts` returned in another process.
    """
    for name, value in values.items():
        getattr(config, name).set_global(value)
