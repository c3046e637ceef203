"""The cache on disk, shared by jobs and hosts: entries, claims and journals.

Users may import these names from here.
"""

import importlib
from typing import TYPE_CHECKING, Any

from quarantune.cache.fingerprint import Fingerprint as Fingerprint
from quarantune.cache.fingerprint import fingerprint as fingerprint
from quarantune.cache.fingerprint import plain_function as plain_function
from quarantune.cache.store import SCHEMA as SCHEMA
from quarantune.cache.store import CacheWarning as CacheWarning
from quarantune.cache.store import CacheWriteError as CacheWriteError
from quarantune.cache.store import Contents as Contents
from quarantune.cache.store import Entry as Entry
from quarantune.cache.store import Store as Store
from quarantune.cache.store import canonical_json as canonical_json
from quarantune.cache.store import plain as plain
from quarantune.cache.store import report_once as report_once
from quarantune.cache.store import safe_name as safe_name
from quarantune.cache.store import short_hash as short_hash

if TYPE_CHECKING:
    from quarantune.cache.claims import Claim as Claim
    from quarantune.cache.claims import Holder as Holder
    from quarantune.cache.claims import wait as wait
    from quarantune.cache.entries import CacheDiff as CacheDiff
    from quarantune.cache.entries import CacheKey as CacheKey
    from quarantune.cache.entries import CacheRecord as CacheRecord
    from quarantune.cache.entries import EntryPair as EntryPair
    from quarantune.cache.entries import MergeReport as MergeReport
    from quarantune.cache.journal import Journal as Journal
    from quarantune.cache.journal import conclusions as conclusions
    from quarantune.cache.journal import remember_trouble as remember_trouble
    from quarantune.cache.journal import troublesome as troublesome

_MODULES = {
    **dict.fromkeys(("Claim", "Holder", "wait"), "quarantune.cache.claims"),
    **dict.fromkeys(("CacheDiff", "CacheKey", "CacheRecord", "EntryPair", "MergeReport"), "quarantune.cache.entries"),
    **dict.fromkeys(("Journal", "conclusions", "remember_trouble", "troublesome"), "quarantune.cache.journal"),
    "TuningCache": "quarantune.api.tuning_cache",  # which users find here, too
}
"""The modules of the names that a cached call does not need, imported with their first use."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
