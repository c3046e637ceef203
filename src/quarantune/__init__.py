"""An autotuner for JAX and Pallas kernels that compiles and runs every config in a worker process."""

import importlib
from typing import TYPE_CHECKING, Any

from quarantune._version import __version__

if TYPE_CHECKING:
    from quarantune.api.autotune import Autotuned, autotune
    from quarantune.api.compile_check import compile_check, compile_configs
    from quarantune.api.contextual import Contextual, contextual_autotune
    from quarantune.api.jit import jit
    from quarantune.api.tune_many import tune_many
    from quarantune.api.tuner import AutoTuner
    from quarantune.api.tuning_cache import TuningCache
    from quarantune.cache import CacheWarning, CacheWriteError
    from quarantune.devices.targets import Target, targets
    from quarantune.metrics import KernelMetrics, compute_elementwise_metrics, compute_gemm_metrics
    from quarantune.results.replay import ReplayResult, replay
    from quarantune.results.report import CompileReport
    from quarantune.results.result import ContextualResult, KernelChoice, TuningResult
    from quarantune.results.saved_files import SavedResultError
    from quarantune.spaces import filter_valid_configs, generate_configs, get_default_config
    from quarantune.sweep.sweep_inputs import set_autotune_inputs
    from quarantune.values.config_space import grid
    from quarantune.values.search_choice import Search
    from quarantune.values.settings import settings
    from quarantune.values.trial import (
        CacheMissError,
        EngineError,
        Outcome,
        Phase,
        ReferenceFailedError,
        Route,
        SandboxError,
        Trial,
        TuningFailedError,
    )

_NAMES = {
    "api.autotune": ("Autotuned", "autotune"),
    "api.compile_check": ("compile_check", "compile_configs"),
    "api.contextual": ("Contextual", "contextual_autotune"),
    "api.jit": ("jit",),
    "api.tuner": ("AutoTuner",),
    "api.tuning_cache": ("TuningCache",),
    "api.tune_many": ("tune_many",),
    "cache": ("CacheWarning", "CacheWriteError"),
    "devices.targets": ("Target", "targets"),
    "metrics": ("KernelMetrics", "compute_elementwise_metrics", "compute_gemm_metrics"),
    "results.replay": ("ReplayResult", "replay"),
    "results.report": ("CompileReport",),
    "results.result": (
        "ContextualResult",
        "KernelChoice",
        "TuningResult",
    ),
    "results.saved_files": ("SavedResultError",),
    "spaces": ("filter_valid_configs", "generate_configs", "get_default_config"),
    "sweep.sweep_inputs": ("set_autotune_inputs",),
    "values.config_space": ("grid",),
    "values.search_choice": ("Search",),
    "values.settings": ("settings",),
    "values.trial": (
        "CacheMissError",
        "EngineError",
        "Outcome",
        "Phase",
        "ReferenceFailedError",
        "Route",
        "SandboxError",
        "Trial",
        "TuningFailedError",
    ),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
"""The modules of all names. Each is imported with the first use of a name in it, so that a command that needs no JAX
does not wait for it."""
_PUBLIC_MODULES = ("cache", "doctor", "metrics", "ray", "spaces")

__all__ = [
    "AutoTuner",
    "Autotuned",
    "CacheMissError",
    "CacheWarning",
    "CacheWriteError",
    "CompileReport",
    "Contextual",
    "ContextualResult",
    "EngineError",
    "KernelChoice",
    "KernelMetrics",
    "Outcome",
    "Phase",
    "ReferenceFailedError",
    "ReplayResult",
    "Route",
    "SandboxError",
    "SavedResultError",
    "Search",
    "Target",
    "Trial",
    "TuningCache",
    "TuningFailedError",
    "TuningResult",
    "__version__",
    "autotune",
    "compile_check",
    "compile_configs",
    "compute_elementwise_metrics",
    "compute_gemm_metrics",
    "contextual_autotune",
    "filter_valid_configs",
    "generate_configs",
    "get_default_config",
    "grid",
    "jit",
    "replay",
    "set_autotune_inputs",
    "settings",
    "targets",
    "tune_many",
]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC_MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
