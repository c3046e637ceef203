"""quarantune: an autotuner for JAX kernels that tries every config in a process of its own."""

from quarantune.cache import CacheWarning, TuningCache
from quarantune.decorator import Autotuned, autotune
from quarantune.environment import settings
from quarantune.outcomes import CacheMissError, Outcome, Phase, Route, SandboxError, Trial, TuningFailedError
from quarantune.result import TuningResult
from quarantune.space import grid

__all__ = [
    "Autotuned",
    "CacheMissError",
    "CacheWarning",
    "Outcome",
    "Phase",
    "Route",
    "SandboxError",
    "Trial",
    "TuningCache",
    "TuningFailedError",
    "TuningResult",
    "autotune",
    "grid",
    "settings",
]
