"""The cache on disk, shared by jobs and hosts: entries, claims and journals."""

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
