"""The results that are known for the calls of one function: in memory and in the cache, and why a call missed."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from quarantune import cache
from quarantune.cache import Entry
from quarantune.resolve import layers
from quarantune.resolve.bound_call import BoundCall
from quarantune.resolve.call_key import CallKey, KeyedCall
from quarantune.resolve.layers import Found, Layer, changed_versions, open_store
from quarantune.resolve.tuned_function import TunedFunction
from quarantune.values import settings as environment
from quarantune.values.codec import JsonObject
from quarantune.values.configs import Config, format_config
from quarantune.values.settings import Settings, register_keeper
from quarantune.values.texts import former_name
from quarantune.values.trial import Findings, TuningFailedError

if TYPE_CHECKING:
    from quarantune.results.result import TuningResult
    from quarantune.sweep.search_limits import SearchLimits

_logger = logging.getLogger("quarantune")


@dataclasses.dataclass(frozen=True)
class Known:
    """A remembered config, and the findings of the sweep that it is from."""

    config: Config
    findings: Findings = dataclasses.field(default_factory=Findings)

    @classmethod
    def of(cls, result: TuningResult) -> Known:
        """Returns what a sweep has found."""
        return cls(result.best_config, result.findings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resolved:
    """The source that has answered a call.

    Attributes:
        known: the config, with its findings; None for the function's own defaults.
        reason: why it is the defaults, where ranks have agreed on them.
        is_nearest: whether it is the config of a near call.
        tuned: the result, where this process has tuned and its config is the one.
    """

    known: Known | None
    reason: str = ""
    is_nearest: bool = False
    tuned: TuningResult | None = None


class KnownResults:
    """Results for the calls of one function."""

    def __init__(self, function: TunedFunction) -> None:
        """Knows no results yet; nothing is read."""
        self._function = function
        self._winners: dict[CallKey, Known] = {}
        self._failures: dict[CallKey, TuningFailedError] = {}
        self._tuned: set[CallKey] = set()
        register_keeper(self)

    def forget(self, device: str, key: str) -> None:
        """Forgets the result for a key, which somebody has replaced on the disk."""
        self._winners.pop(CallKey(device, key), None)

    def find(self, keyed: KeyedCall, settings: Settings) -> Known | None:
        """Returns the result that memory or the cache holds for a call, or None."""
        if (known := self._winners.get(keyed.key)) is not None:
            return known
        for layer in self.layers(settings):
            found = self._usable(self._entry(layer, keyed), keyed.call, settings, is_own=layer.is_own)
            if found is not None and (known is None or not found.findings.is_estimate):
                _logger.debug("%s: found in %s", self._function.name, layer.label)
                known = found
            if known is not None and not known.findings.is_estimate:
                break
        if known is not None:
            self._winners[keyed.key] = known
        return known

    def _entry(self, layer: Layer, keyed: KeyedCall) -> Entry | None:
        """Returns a layer's entry for a call, which an earlier version may have saved under another name."""
        name, key = self._function.name, keyed.key
        if (entry := layer.store.get(name, key.device, key.text)) is not None:
            return entry
        former = former_name(self._function.fn, name), keyed.former_text
        return None if former == (name, key.text) else layer.store.get(former[0], key.device, former[1])

    def is_enough(self, known: Known, settings: Settings) -> bool:
        """Returns whether a result is as thorough as the call demands; if not, its search goes on.

        Only a larger budget of the kind that ended the search demands more, and only where a miss is tuned for. There,
        an estimate is never enough.
        """
        searched = known.findings.search
        if settings.on_miss != "tune":
            return True
        if known.findings.is_estimate or searched.budget is None:
            return not known.findings.is_estimate
        wanted = self._limits(settings).budget(searched.stopped)
        return wanted is None or wanted <= searched.budget

    def _limits(self, settings: Settings) -> SearchLimits:
        from quarantune.sweep.search_limits import SearchLimits  # a call that is found does not need it

        return SearchLimits.of(self._function.options, settings)

    def must_tune(self, key: CallKey, settings: Settings) -> bool:
        """Returns whether `ALWAYS_TUNE` demands another sweep: once per key and process, or `settings` block."""
        block = environment.block_of("always_tune")
        return settings.always_tune and (key not in self._tuned if block is None else (self, key) not in block.tuned)

    def _note_tuned(self, key: CallKey) -> None:
        self._tuned.add(key)
        if (block := environment.block_of("always_tune")) is not None:
            block.tuned.add((self, key))

    def raise_failure(self, key: CallKey) -> None:
        """Raises the error with which tuning for a key ended earlier in this process, if it did."""
        if key in self._failures:
            raise _without_traceback(self._failures[key])

    def failure(self, key: CallKey) -> TuningFailedError | None:
        """Returns the error with which tuning for a key ended earlier in this process, if it did."""
        return self._failures.get(key)

    def remember(self, key: CallKey, result: TuningResult, settings: Settings) -> None:
        """Remembers a result in this process."""
        self._failures.pop(key, None)
        budget = self._limits(settings).budget(result.stopped) or result.seen  # `auto` has a budget of its own
        findings = result.findings
        findings = dataclasses.replace(findings, search=dataclasses.replace(findings.search, budget=budget))
        self._winners[key] = Known(result.best_config, findings)
        self._note_tuned(key)

    def remember_failure(self, key: CallKey, error: TuningFailedError) -> None:
        """Remembers in this process that every config failed."""
        self._failures[key] = _without_traceback(error)
        self._note_tuned(key)

    def config_from(self, encoded: JsonObject, call: BoundCall) -> Config | None:
        """Returns the config that another process has encoded, or None where it cannot be used here."""
        return call.find(encoded)

    def text_of(self, config: Config) -> str:
        """Returns a config as messages show it."""
        return format_config(config)

    # Entries of the cache

    def saved_now(self, settings: Settings) -> Callable[[CallKey], Entry | None]:
        """Returns a function that gives the entry of a key as it is now, whenever an engine has named the key."""
        if settings.disable_cache:
            return lambda key: None
        store, name = open_store(settings), self._function.name
        if settings.executor is None:  # the key is known at once
            return lambda key: store.get(name, key.device, key.text)
        entries = store.read(name)
        return lambda key: entries.get(key.device, {}).get(key.text)

    def saved(self, keyed: KeyedCall, settings: Settings, *, other_than: Entry | None = None) -> Known | None:
        """Returns the result that the user's cache holds now, or None where there is none to use, or no other."""
        entry = open_store(settings).get(self._function.name, keyed.key.device, keyed.key.text)
        return None if entry == other_than else self._usable(entry, keyed.call, settings)

    def _usable(self, entry: Entry | None, call: BoundCall, settings: Settings, *, is_own: bool = True) -> Known | None:
        config = None if entry is None else self.config_of(entry, call, settings, is_own=is_own)
        return None if config is None else Known(config, Findings.from_json(entry))

    def config_of(self, entry: Entry, call: BoundCall, settings: Settings, *, is_own: bool = True) -> Config | None:
        """Returns the config of an entry if it can be used for the config space of a call under these versions.

        Args:
            entry: the entry.
            call: the call.
            settings: the operator's settings.
            is_own: whether the entry is in the user's cache, so that the user should know why it is not used.
        """
        config = call.find(entry.get("config"))
        if config is None:
            if is_own:
                cache.report_once(
                    f"{self._function.name}: the cached config {entry.get('config')!r} is not in the config space any "
                    "more: it is not used"
                )
            return None
        if entry.get("space") not in (None, call.space):  # None was put there by hand
            return None  # new configs must be measured; the journal holds the trials of the others
        return config if self.versions_serve(entry, settings, is_own=is_own) else None

    def versions_serve(self, entry: Entry, settings: Settings, *, is_own: bool = True) -> bool:
        """Returns whether an entry may be used under the present versions; warns where the user's own have changed."""
        if changed := changed_versions(entry):
            if settings.version_check:
                _logger.info("%s: the cached result was made under %s; tuning again", self._function.name, changed)
                return False
            if not is_own:  # a table that is shipped is seldom made on the user's machine
                _logger.info("%s: using a result of a read-only layer made under %s", self._function.name, changed)
                return True
            cache.report_once(
                f"{self._function.name}: using results made under {changed}; set QUARANTUNE_VERSION_CHECK=1 to tune "
                "again whenever versions change, or QUARANTUNE_ALWAYS_TUNE=1 to tune again now"
            )
        return True

    def layers(self, settings: Settings) -> Iterator[Layer]:
        """Yields the layers in which results are looked up."""
        return iter(()) if settings.disable_cache else layers.open_layers(settings, self._function.options.tables)

    def entries(self, settings: Settings) -> Iterator[Found]:
        """Yields the entries of all layers, in their order."""
        for layer in self.layers(settings):
            yield from layers.entries_of(layer, self._function.name)


def _without_traceback(error: TuningFailedError) -> TuningFailedError:
    """Returns a copy of an error without its traceback, which keeps the arguments of the call alive."""
    return TuningFailedError(str(error), trials=error.trials, key=error.key)
