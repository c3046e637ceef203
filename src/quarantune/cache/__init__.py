"""The cache on disk, shared by jobs and hosts: entries, claims and journals."""

from quarantune.cache.claims import Claim, Holder, wait
from quarantune.cache.entry_file import SCHEMA, Contents, Entry
from quarantune.cache.errors import CacheWarning, CacheWriteError, report_once
from quarantune.cache.exchange import CacheDiff, CacheKey, EntryPair, MergeReport
from quarantune.cache.fingerprint import Fingerprint, fingerprint
from quarantune.cache.journal import Journal, conclusions, remember_trouble, troublesome
from quarantune.cache.keys import canonical_json, plain, safe_name, short_hash
from quarantune.cache.store import Store
from quarantune.cache.tuning_cache import CacheRecord, TuningCache

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
