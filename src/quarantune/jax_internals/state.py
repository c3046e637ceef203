"""What JAX is set to around a call: what of it makes another program, and how it reaches a worker."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax

from quarantune.jax_internals import configuration

_logger = logging.getLogger("quarantune")

_DEFAULTS: dict[str, Any] = {
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
"""The options that make another program, and what they are if nobody has set them. JAX does not keep its defaults: an
environment variable is in an option's value from the start."""

NOT_OF_THE_CALL = frozenset(
    {
        # Meshes and devices: what matters of them is described with the arguments.
        "abstract_mesh_context_manager",
        "axis_env_state",
        "jax_default_device",
        "mesh_context_manager",
        # A sweep traces and runs the program whatever these are, or JAX itself sets them while it traces.
        "check_vma",
        "eager_constant_folding",
        "jax_disable_jit",
        "jax_mutable_array_checks",
        "jax_no_execution",
        # JAX sets these while it traces the body of a kernel, inside which no call is tuned.
        "layout_tracing_mode",
        "pallas_fuser_disable_nested_fuse",
        # How a program is profiled, and which file names it mentions.
        "jax_enable_pgle",
        "jax_hlo_source_file_canonicalization_regex",
        "jax_pgle_profiling_runs",
        "jax_xla_profile_version",
    }
)
"""What is in JAX's own key and not in a call's."""

# Options that belong to a process: which devices it may touch, where it caches, whom it talks to, whether somebody
# debugs it. A worker's are set by the sandbox.
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


def describe(describe_value: Callable[[Any], Any], *, own: str | None = None) -> dict[str, Any]:
    """Returns what makes another program of a call here and now: all that is not as JAX has it by default.

    Args:
        describe_value: makes a JSON-able description of a value.
        own: a context of this package's, which does not count.

    Returns:
        JSON-able descriptions by name; empty where nobody has set anything.
    """
    values = configuration.config_values()
    options = {name: values[name] for name, default in _DEFAULTS.items() if not _is(values.get(name, default), default)}

    def described(value: Any) -> Any:
        try:
            return describe_value(value)
        except TypeError:  # some library's own, of which little can be said
            return {"type": type(value).__qualname__}

    found = {name: described(value) for name, value in (options | configuration.contexts()).items()}
    if users := [value for value in configuration.user_contexts() if value is not None and value != own]:
        found["user_context"] = [described(value) for value in users]
    return found


def is_known(name: str) -> bool:
    """Returns whether a name of JAX's own key is one that this module has an opinion on."""
    return name in _DEFAULTS or name in NOT_OF_THE_CALL or name in (*configuration.CONTEXTS, "user_context")


def _is(value: Any, default: Any) -> bool:
    if isinstance(default, str):  # some are members of an enum, of some versions or always
        return str(getattr(value, "name", value)).lower() == default.lower()
    return type(value) is type(default) and bool(value == default)


def options_to_travel() -> Mapping[str, Any]:
    """Returns JAX's options, by name, that a worker has to share."""
    return {
        name: value
        for name, value in configuration.config_values().items()
        if not name.startswith(_PROCESS_OPTIONS) and isinstance(value, (bool, int, float, str, type(None)))
    }


def adopt_options(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Sets JAX's options in this process to what they were where they come from.

    Returns:
        Those that this process does not know: a module that it has not imported registers them.
    """
    here = configuration.config_values()
    for name, value in options.items():
        if name in here and here[name] != value:
            jax.config.update(name, value)
    return {name: value for name, value in options.items() if name not in here}


def adopt_late_options(options: Mapping[str, Any]) -> None:
    """Does the same once the function's modules are imported, and lets go of what is still unknown."""
    for name, value in adopt_options(options).items():
        _logger.debug("JAX knows no option %s here, which is %r where the call is from: it is left out", name, value)
