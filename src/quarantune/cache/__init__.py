"""The cache on disk, shared by jobs and hosts: entries, claims and journals.

Users may import these names from here.
"""

import importlib
from typing import TYPE_CHECKING, Any

from quarantune.cache.problems import CacheWarning as CacheWarning
from quarantune.cache.problems import CacheWriteError as CacheWriteError
from quarantune.cache.store import Store as Store

if TYPE_CHECKING:
    from quarantune.cache.entries import CacheDiff as CacheDiff
    from quarantune.cache.entries import CacheKey as CacheKey
    from quarantune.cache.entries import CacheRecord as CacheRecord
    from quarantune.cache.entries import EntryPair as EntryPair
    from quarantune.cache.entries import MergeReport as MergeReport

_MODULES = {
    **dict.fromkeys(("Claim", "Holder", "wait"), "quarantune.cache.claims"),
    **dict.fromkeys(("CacheDiff", "CacheKey", "CacheRecord", "EntryPair", "MergeReport"), "quarantune.cache.entries"),
    **dict.fromkeys(("Journal", "conclusions", "remember_trouble", "troublesome"), "quarantune.cache.journal"),
    "TuningCache": "quarantune.api.tuning_cache",  # which users also find here
}
"""The modules of names that a cached call does not need; the first use of a name imports its module."""


def __dir__() -> list[str]:
    return sorted([*_MODULES, "CacheWarning", "CacheWriteError", "Store"])


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
