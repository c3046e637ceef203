"""An autotuner for JAX and Pallas kernels that compiles and runs every config in a worker process."""

import importlib
from typing import TYPE_CHECKING, Any

from quarantune._version import __version__
from quarantune.api.autotune import Autotuned, autotune
from quarantune.api.compile_check import compile_check
from quarantune.api.contextual import Contextual, contextual_autotune
from quarantune.api.tuner import AutoTuner, compile_configs
from quarantune.results.contextual_result import ContextualResult, KernelChoice
from quarantune.results.result import SavedResultError, TuningResult
from quarantune.sweep.sweep_inputs import set_autotune_inputs
from quarantune.values.config_space import grid
from quarantune.values.search_choice import Search
from quarantune.values.settings import settings
from quarantune.values.trial import (
    CacheMissError,
    Outcome,
    Phase,
    ReferenceFailedError,
    Route,
    SandboxError,
    Trial,
    TuningFailedError,
)

if TYPE_CHECKING:
    from quarantune.cache import CacheWarning, CacheWriteError, TuningCache
    from quarantune.devices.targets import Target, targets
    from quarantune.metrics import KernelMetrics, compute_elementwise_metrics, compute_gemm_metrics
    from quarantune.results.compile_report import CompileReport
    from quarantune.results.replay import ReplayResult, replay
    from quarantune.spaces import filter_valid_configs, generate_configs, get_default_config

_LAZY = {
    "CacheWarning": "cache",
    "CacheWriteError": "cache",
    "CompileReport": "results.compile_report",
    "TuningCache": "cache",
    "KernelMetrics": "metrics",
    "ReplayResult": "results.replay",
    "compute_elementwise_metrics": "metrics",
    "compute_gemm_metrics": "metrics",
    "filter_valid_configs": "spaces",
    "generate_configs": "spaces",
    "get_default_config": "spaces",
    "replay": "results.replay",
    "targets": "devices.targets",
}
"""The modules of names that are imported on first use, which keeps the import of this package quick."""

__all__ = [
    "AutoTuner",
    "Autotuned",
    "CacheMissError",
    "CacheWarning",
    "CacheWriteError",
    "CompileReport",
    "Contextual",
    "ContextualResult",
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
    "replay",
    "set_autotune_inputs",
    "settings",
    "targets",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"quarantune.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
