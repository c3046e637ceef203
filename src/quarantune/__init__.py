"""An autotuner for JAX and Pallas kernels that compiles and runs every config in a worker process."""

import importlib
from typing import TYPE_CHECKING, Any

from quarantune._version import __version__

if TYPE_CHECKING:
    from quarantune.answers.recording import RecordedCall as RecordedCall
    from quarantune.answers.recording import calls_in as calls_in
    from quarantune.answers.recording import recording as recording
    from quarantune.api.autotune import Autotuned as Autotuned
    from quarantune.api.autotune import AutoTuner as AutoTuner
    from quarantune.api.autotune import autotune as autotune
    from quarantune.api.autotune import jit as jit
    from quarantune.api.compile_check import compile_check as compile_check
    from quarantune.api.compile_check import compile_configs as compile_configs
    from quarantune.api.contextual import Contextual as Contextual
    from quarantune.api.contextual import contextual_autotune as contextual_autotune
    from quarantune.api.tune_many import tune_many as tune_many
    from quarantune.api.tuning_cache import TuningCache as TuningCache
    from quarantune.cache import CacheWarning as CacheWarning
    from quarantune.cache import CacheWriteError as CacheWriteError
    from quarantune.calls.given_inputs import set_autotune_inputs as set_autotune_inputs
    from quarantune.devices.targets import Target as Target
    from quarantune.devices.targets import targets as targets
    from quarantune.results.replay import ReplayResult as ReplayResult
    from quarantune.results.replay import replay as replay
    from quarantune.results.report import CompileReport as CompileReport
    from quarantune.results.result import ContextualResult as ContextualResult
    from quarantune.results.result import KernelChoice as KernelChoice
    from quarantune.results.result import TuningResult as TuningResult
    from quarantune.results.saved_files import SavedResultError as SavedResultError
    from quarantune.spaces import filter_valid_configs as filter_valid_configs
    from quarantune.spaces import generate_configs as generate_configs
    from quarantune.spaces import get_default_config as get_default_config
    from quarantune.values.blocks import settings as settings
    from quarantune.values.errors import CacheMissError as CacheMissError
    from quarantune.values.errors import EngineError as EngineError
    from quarantune.values.errors import ReferenceFailedError as ReferenceFailedError
    from quarantune.values.errors import SandboxError as SandboxError
    from quarantune.values.errors import TuningFailedError as TuningFailedError
    from quarantune.values.options import Options as Options
    from quarantune.values.options import Search as Search
    from quarantune.values.space import grid as grid
    from quarantune.values.trial import Outcome as Outcome
    from quarantune.values.trial import Phase as Phase
    from quarantune.values.trial import Route as Route
    from quarantune.values.trial import Trial as Trial

_NAMES = {
    "api.autotune": ("AutoTuner", "Autotuned", "autotune", "jit"),
    "api.compile_check": ("compile_check", "compile_configs"),
    "api.contextual": ("Contextual", "contextual_autotune"),
    "api.tuning_cache": ("TuningCache",),
    "api.tune_many": ("tune_many",),
    "cache": ("CacheWarning", "CacheWriteError"),
    "devices.targets": ("Target", "targets"),
    "answers.recording": ("RecordedCall", "calls_in", "recording"),
    "results.replay": ("ReplayResult", "replay"),
    "results.report": ("CompileReport",),
    "results.result": ("ContextualResult", "KernelChoice", "TuningResult"),
    "results.saved_files": ("SavedResultError",),
    "spaces": ("filter_valid_configs", "generate_configs", "get_default_config"),
    "calls.given_inputs": ("set_autotune_inputs",),
    "values.blocks": ("settings",),
    "values.options": ("Options", "Search"),
    "values.space": ("grid",),
    "values.errors": ("CacheMissError", "EngineError", "ReferenceFailedError", "SandboxError", "TuningFailedError"),
    "values.trial": ("Outcome", "Phase", "Route", "Trial"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
"""The module of each name. The first use of a name imports its module, so a command without JAX does not wait for
JAX."""
_PUBLIC_MODULES = ("cache", "doctor", "metrics", "ray", "spaces")

__all__ = [*_MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC_MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_PUBLIC_MODULES])
