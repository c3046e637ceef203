"""The cache on disk, shared by jobs and hosts: entries, claims and journals."""

import importlib
from typing import TYPE_CHECKING, Any

from quarantune.cache.entry_file import SCHEMA, Contents, Entry
from quarantune.cache.errors import CacheWarning, CacheWriteError, report_once
from quarantune.cache.fingerprint import Fingerprint, fingerprint
from quarantune.cache.keys import canonical_json, plain, safe_name, short_hash
from quarantune.cache.store import Store

if TYPE_CHECKING:
    from quarantune.cache.claims import Claim, Holder, wait
    from quarantune.cache.exchange import CacheDiff, CacheKey, EntryPair, MergeReport
    from quarantune.cache.journal import Journal, conclusions, remember_trouble, troublesome
    from quarantune.cache.tuning_cache import CacheRecord, TuningCache

_LATER = {
    "claims": ("Claim", "Holder", "wait"),
    "exchange": ("CacheDiff", "CacheKey", "EntryPair", "MergeReport"),
    "journal": ("Journal", "conclusions", "remember_trouble", "troublesome"),
    "tuning_cache": ("CacheRecord", "TuningCache"),
}
_MODULES = {name: module for module, names in _LATER.items() for name in names}
"""The modules of the names that a cached call does not need, imported with their first use."""

__all__ = [
    "SCHEMA",
    "CacheDiff",
    "CacheKey",
    "CacheRecord",
    "CacheWarning",
    "CacheWriteError",
    "Claim",
    "Contents",
    "Entry",
    "EntryPair",
    "Fingerprint",
    "Holder",
    "Journal",
    "MergeReport",
    "Store",
    "TuningCache",
    "canonical_json",
    "conclusions",
    "fingerprint",
    "plain",
    "remember_trouble",
    "report_once",
    "safe_name",
    "short_hash",
    "troublesome",
    "wait",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
