"""The results that are known for the calls of one function: in memory and in the cache, and why a call missed."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from quarantune import cache
from quarantune.cache import Entry
from quarantune.resolve.call_key import CallKey, KeyedCall
from quarantune.resolve.entries import (
    Times,
    changed_versions,
    dict_or_empty,
    find_config,
    open_store,
    space_of,
    times_of,
)
from quarantune.resolve.tuned_function import TunedFunction
from quarantune.results.result import TuningResult
from quarantune.values.settings import Settings
from quarantune.values.trial import Config, TuningFailedError

_logger = logging.getLogger("quarantune")


@dataclasses.dataclass(frozen=True)
class Known:
    """A remembered config and its times."""

    config: Config
    times: Times


class KnownResults:
    """Results for the calls of one function."""

    def __init__(self, function: TunedFunction) -> None:
        """Knows no results yet; nothing is read."""
        self._function = function
        self._winners: dict[CallKey, Known] = {}
        self._failures: dict[CallKey, TuningFailedError] = {}
        self._tuned: set[CallKey] = set()

    def find(self, keyed: KeyedCall, settings: Settings) -> Known | None:
        """Returns the result that memory or the cache holds for a call, or None."""
        if (known := self._winners.get(keyed.key)) is not None:
            return known
        if settings.disable_cache:
            return None
        entry = open_store(settings).get(self._function.name, keyed.key.device, keyed.key.text)
        if entry is None:
            return None
        config = self.config_of(entry, keyed.call.configs, settings)
        if config is None:
            return None
        known = self._winners[keyed.key] = Known(config, times_of(entry))
        return known

    def must_tune(self, key: CallKey, settings: Settings) -> bool:
        """Returns whether `ALWAYS_TUNE` demands another sweep, which it does once per process and key."""
        return settings.always_tune and key not in self._tuned

    def raise_failure(self, key: CallKey) -> None:
        """Raises the error with which tuning for a key ended earlier in this process, if it did."""
        if key in self._failures:
            raise _without_traceback(self._failures[key])

    def remember(self, key: CallKey, result: TuningResult) -> None:
        """Remembers a result in this process."""
        self._failures.pop(key, None)
        self._winners[key] = Known(result.best_config, Times(result.time_ms, result.default_time_ms))
        self._tuned.add(key)

    def remember_failure(self, key: CallKey, error: TuningFailedError) -> None:
        """Remembers in this process that every config failed."""
        self._failures[key] = _without_traceback(error)
        self._tuned.add(key)

    # Entries of the cache

    def usable_entry(self, keyed: KeyedCall, settings: Settings) -> Entry | None:
        """Returns the cache entry for a call, or None where there is none that can be used."""
        entry = open_store(settings).get(self._function.name, keyed.key.device, keyed.key.text)
        return entry if entry and self.config_of(entry, keyed.call.configs, settings) is not None else None

    def config_of(self, entry: Entry, configs: Sequence[Config], settings: Settings) -> Config | None:
        """Returns the config of an entry if it can be used for this config space under these versions."""
        config = find_config(entry.get("config"), configs)
        if config is None:
            cache.report_once(
                f"{self._function.name}: the cached config {entry.get('config')!r} is not in the config space any "
                "more: it is not used"
            )
            return None
        if entry.get("space") != space_of(configs):
            return None  # new configs must be measured; the journal holds the trials of the others
        return config if self.versions_serve(entry, settings) else None

    def versions_serve(self, entry: Entry, settings: Settings) -> bool:
        """Returns whether an entry may be used under the present versions; warns where they have changed."""
        if changed := changed_versions(entry):
            if settings.version_check:
                _logger.info("%s: the cached result was made under %s; tuning again", self._function.name, changed)
                return False
            cache.report_once(
                f"{self._function.name}: using results made under {changed}; set QUARANTUNE_VERSION_CHECK=1 to tune "
                "again whenever versions change, or QUARANTUNE_ALWAYS_TUNE=1 to tune again now"
            )
        return True

    # Why a call missed

    def explain_miss(self, keyed: KeyedCall, settings: Settings) -> str:
        """Returns a message with the missing key, the nearest entry, and the differences between the two."""
        name = self._function.name
        wanted = f"{name}: nothing is cached for {cache.canonical_json(keyed.readable)} on {keyed.key.device!r}"
        fix = "tune it with QUARANTUNE_ON_MISS=tune, or allow defaults with QUARANTUNE_ON_MISS=default"
        if settings.disable_cache:
            return f"{wanted}: the cache is off (QUARANTUNE_DISABLE_CACHE); {fix}"
        configs = keyed.call.configs
        store = open_store(settings)
        candidates = [
            self._differences(keyed, configs, device, entry, settings)
            for device, entries in store.read(name).items()
            for entry in entries.values()
        ]
        if not candidates:
            return f"{wanted}: {store.path(name)} holds no entry; {fix}"
        nearest = min(candidates, key=len) or ["its config, which is not in the config space"]
        return f"{wanted}; the nearest entry differs in {'; '.join(nearest)}; {fix}"

    def _differences(
        self, keyed: KeyedCall, configs: Sequence[Config], device: str, entry: Entry, settings: Settings
    ) -> list[str]:
        differences = [] if device == keyed.key.device else [f"device: {device!r}, not {keyed.key.device!r}"]
        ours, theirs = keyed.readable, dict_or_empty(entry.get("key_values"))
        for name in dict.fromkeys([*ours, *theirs]):
            if theirs.get(name) != ours.get(name):
                differences.append(
                    f"{name}: {cache.canonical_json(theirs.get(name))}, not {cache.canonical_json(ours.get(name))}"
                )
        parts = entry.get("fingerprint")
        if isinstance(parts, dict) and (changed := self._function.fingerprint.differences(parts)):
            differences.append(f"the function's {', '.join(changed)}")
        if entry.get("space") != (wanted := space_of(configs)):
            then = dict_or_empty(entry.get("space")).get("configs", "unknown")
            differences.append(f"the list of configs ({then} then, {wanted['configs']} now)")
        if settings.version_check and (changed_since := changed_versions(entry)):
            differences.append(f"versions: {changed_since}")
        return differences


def _without_traceback(error: TuningFailedError) -> TuningFailedError:
    """Returns a copy of an error without its traceback, which keeps the arguments of the call alive."""
    return TuningFailedError(str(error), trials=error.trials, key=error.key)
