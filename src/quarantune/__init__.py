"""quarantune: an autotuner for JAX kernels that tries every config in a process of its own."""

from typing import TYPE_CHECKING, Any

from quarantune._version import __version__
from quarantune.contextual import Contextual, contextual_autotune
from quarantune.contextual_result import ContextualResult, KernelChoice
from quarantune.decorator import Autotuned, autotune
from quarantune.environment import settings
from quarantune.outcomes import (
    CacheMissError,
    Outcome,
    Phase,
    ReferenceFailedError,
    Route,
    SandboxError,
    Trial,
    TuningFailedError,
)
from quarantune.result import SavedResultError, TuningResult
from quarantune.space import grid
from quarantune.supply import set_autotune_inputs
from quarantune.tuner import AutoTuner, compile_configs

if TYPE_CHECKING:
    from quarantune.cache import CacheWarning, CacheWriteError, TuningCache

__all__ = [
    "AutoTuner",
    "Autotuned",
    "CacheMissError",
    "CacheWarning",
    "CacheWriteError",
    "Contextual",
    "ContextualResult",
    "KernelChoice",
    "Outcome",
    "Phase",
    "ReferenceFailedError",
    "Route",
    "SandboxError",
    "SavedResultError",
    "Trial",
    "TuningCache",
    "TuningFailedError",
    "TuningResult",
    "__version__",
    "autotune",
    "compile_configs",
    "contextual_autotune",
    "grid",
    "set_autotune_inputs",
    "settings",
]


def __getattr__(name: str) -> Any:
    # The cache is imported when it is first used: together with JAX, importing this package is to cost little more.
    if name in ("CacheWarning", "CacheWriteError", "TuningCache"):
        from quarantune import cache

        return getattr(cache, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
