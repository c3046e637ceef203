"""The saved results of one function: in the user's cache, `CACHE_PATH`, its table and the tables of packages."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quarantune.answers import saved_program
from quarantune.answers.answer import Answer, Origin, Situation
from quarantune.answers.memory import Memory
from quarantune.cache import problems
from quarantune.cache.entry_file import Entry
from quarantune.cache.store import Prefer, Store
from quarantune.calls.call import BoundCall, TunedFunction
from quarantune.calls.key import KeyedCall, ProblemId
from quarantune.functions import versions
from quarantune.host.packages import entry_points
from quarantune.values.codec import JsonObject
from quarantune.values.options import BITWISE, ROUNDING, table_directory
from quarantune.values.settings import Settings
from quarantune.values.trial import ESTIMATED

if TYPE_CHECKING:
    from quarantune.cache.entries import CacheRecord

_logger = logging.getLogger("quarantune")

GROUP = "quarantune.tables"
"""The group of entry points that name the tables of packages."""


class Layers:
    """Two rungs: a measured result, from memory or the layers, and an estimate.

    Attributes:
        differences: by the id of a call, how its program differs from the program of a result that it could not use.
    """

    def __init__(self, function: TunedFunction, memory: Memory) -> None:
        """Opens nothing yet.

        Args:
            function: the function.
            memory: keeps the answers.
        """
        self._function = function
        self._memory = memory
        self.differences: dict[ProblemId, str] = {}

    def measured(self, call: KeyedCall, now: Situation) -> Answer | None:
        """Returns the measured result if it is as thorough as the call demands; if not, the search continues."""
        if now.start_over or (found := self.find(call, now)) is None:
            return None
        return found if not now.tunes or self.serves(found, now) else None

    def estimated(self, call: KeyedCall, now: Situation) -> Answer | None:
        """Returns the estimate that `measured` left in memory, unless the call will be tuned.

        An estimated config has never run, so its bits are unknown. So a call with exact numerics gets none.
        """
        is_exact = call.call.function.options.numerics != ROUNDING
        found = None if now.tunes or is_exact else self._memory.answers.get(call.id)
        return found if found is not None and found.origin is Origin.ESTIMATED else None

    def serves(self, found: Answer, now: Situation) -> bool:
        """Returns whether an answer is thorough enough for a call that would otherwise be tuned.

        An estimate is not. A measured result is, unless the budget that ended its search is larger now.
        """
        if found.origin is Origin.ESTIMATED or now.settings.on_miss != "tune":
            return found.origin is not Origin.ESTIMATED
        if dict_or_empty(found.record.get("search")).get("budget") is None:
            return True
        from quarantune.sweep.limits import SearchLimits  # most saved results do not need it

        searched = found.findings.search
        wanted = SearchLimits.of(self._function.options, now.settings).budget(searched.stopped)
        return wanted is None or searched.budget is None or wanted <= searched.budget

    def find(self, call: KeyedCall, now: Situation) -> Answer | None:
        """Returns the measured result for a call from memory or a layer, even if its search was not thorough."""
        found = self._memory.answers.get(call.id)
        if found is None and (found := self._best(call, now)) is not None:
            self._memory.keep(call.id, found)
        return found if found is not None and found.origin is Origin.SAVED else None

    def _best(self, call: KeyedCall, now: Situation) -> Answer | None:
        """Returns the first measured result of the layers, or else their first estimate; reads each layer once."""
        best = None
        for store in self.stores(now):
            found = self._usable(store, _entry(store, call), call, now)
            if found is not None and (best is None or found.origin is Origin.SAVED):
                _logger.debug("%s: found in %s", call.id.name, store.label)
                best = found
            if best is not None and best.origin is Origin.SAVED:
                break
        return best

    def saved(
        self, call: KeyedCall, now: Situation, *, other_than: Entry | None = None, afresh: bool = False
    ) -> Answer | None:
        """Returns the usable result in the user's cache now; None if it has none, or only `other_than`."""
        entry = (store := open_store(now.settings)).get(*call.id, afresh=afresh)
        return None if entry == other_than else self._usable(store, entry, call, now)

    def _usable(self, store: Store, entry: Entry | None, call: KeyedCall, now: Situation) -> Answer | None:
        """Returns a result of an entry that the call may use, or None.

        The config of the result must be one of the call's, and these versions must accept it. If the same versions
        made it, the call must also run the measured program.

        Args:
            store: the layer. If it is the user's cache, a warning explains why an entry cannot serve.
            entry: the entry; None if there is no entry.
            call: the call.
            now: the situation of the call.
        """
        is_own = not store.read_only
        for each in () if entry is None else saved_program.results_in(entry):
            config = self._function.config_of(each, call.call, is_own=is_own)
            if config is None or not self.versions_serve(changed := changed_versions(each), now, is_own=is_own):
                continue
            if not changed and (difference := saved_program.why_another(each, call, config)):
                self.differences.setdefault(call.id, difference)
                continue
            self.differences.pop(call.id, None)
            is_estimate = dict_or_empty(each.get("search")).get("stopped") == ESTIMATED
            origin = Origin.ESTIMATED if is_estimate else Origin.SAVED
            return Answer(origin, config, each, directory=store.directory)
        if is_own and call.id in self.differences:
            problems.report_once(
                f"{call.id.name}: the saved result is for another program than this call runs: "
                f"{self.differences[call.id]}: it is not used"
            )
        return None

    def versions_serve(self, changed: str, now: Situation, *, is_own: bool = True) -> bool:
        """Returns whether an entry serves although versions changed; warns if it is in the user's cache."""
        if changed:
            # Another version of XLA may give the defaults other bits.
            if now.settings.version_check or (now.settings.numerics or self._function.options.numerics) == BITWISE:
                _logger.info("%s: the cached result was made under %s; tuning again", self._function.name, changed)
                return False
            if not is_own:  # a shipped table seldom comes from the user's machine
                _logger.info("%s: using a result of a read-only layer made under %s", self._function.name, changed)
                return True
            problems.report_once(
                f"{self._function.name}: using results made under {changed}; set QUARANTUNE_VERSION_CHECK=1 to tune "
                "again whenever versions change, or QUARANTUNE_ALWAYS_TUNE=1 to tune again now"
            )
        return True

    def stores(self, now: Situation) -> Iterator[Store]:
        """Yields the layers in their order, and opens each on demand.

        They are the user's cache, the directories and URLs of `CACHE_PATH`, and the tables of the function's author and
        of installed packages.
        """
        if now.settings.disable_cache:
            return
        yield open_store(now.settings)
        for place in now.settings.cache_path:
            if not isinstance(place, Path):
                from quarantune.buckets import orders  # few programs name a URL

                yield orders.layer(place, self._function.name, now.settings.cache_dir)
            elif _is_there(place, f"QUARANTUNE_CACHE_PATH names {str(place)!r}"):
                yield Store(place, read_only=True)
        if (tables := self._function.options.tables) is not None:
            directory = table_directory(tables)
            if _is_there(directory, f"tables={tables!r} stands for {str(directory)!r}"):
                yield Store(directory, read_only=True, label=f"the table {tables}")
        yield from _installed(tuple(sys.path))

    def entries(self, now: Situation) -> Iterator[tuple[Store, CacheRecord]]:
        """Yields the results of all layers, in their order, each with its layer; no rules."""
        from quarantune.cache.entries import entries_of  # most calls do not need it

        for store in self.stores(now):
            for record in entries_of(self._function.name, store.read(self._function.name)):
                if "rule" not in record.entry:
                    yield store, record

    def tunables(self, call: BoundCall, now: Situation) -> frozenset[str]:
        """Returns the names of tunables from saved results, for a call whose configs a callable makes; else none."""
        if not call.has_unread_configs:
            return frozenset()
        maker = call.space["made_by"]
        for store in self.stores(now):
            for entry in store.entries_with(self._function.name, maker):
                if entry.get("space") == call.space and (config := call.find(entry.get("config"))):
                    return frozenset(config)
        return frozenset()


def _entry(store: Store, call: KeyedCall) -> Entry | None:
    """Returns the entry of a call. If it must have the defaults' bits, an ordinary sweep may have found its config."""
    entry = store.get(*call.id)
    if entry is None and call.call.function.options.numerics == BITWISE:
        ordinary = store.get(*call.id_under_rounding) or {}
        exact = [(each, dict_or_empty(each.get("exact"))) for each in saved_program.results_in(ordinary)]
        found = [{**each, **its} for each, its in exact if its]
        return {**found[0], saved_program.OTHERS: found[1:]} if found else None
    return entry


def changed_versions(entry: Entry) -> str:
    """Lists the versions that have changed since an entry was made; empty if all are the same."""
    then = dict_or_empty(entry.get("versions"))
    changed = {name: now for name, now in versions.versions().items() if then and then.get(name) != now}
    return ", ".join(f"{name} {then.get(name)} (now {now})" for name, now in changed.items())


def dict_or_empty(value: Any) -> JsonObject:
    """Returns a part of an entry that should be a dict; an empty one if somebody has edited the file."""
    return value if isinstance(value, dict) else {}


def open_store(settings: Settings) -> Store:
    """Returns the store of results in the cache directory."""
    return Store(settings.cache_dir, lock_timeout_s=settings.lock_timeout)


def save(settings: Settings, problem: ProblemId, entry: Mapping[str, Any], *, prefer: Prefer | None = None) -> None:
    """Saves an entry in the cache directory, and when this process ends in the bucket of `PUSH`; see `Store.put`."""
    open_store(settings).put(*problem, entry, prefer=prefer)
    if settings.push is not None:
        from quarantune.buckets import orders  # few programs push

        orders.push_later(settings.push, problem.name, settings.cache_dir)


def _is_there(directory: Path, origin: str) -> bool:
    if os.path.isdir(directory):  # unlike `Path.is_dir`, it never raises
        return True
    problems.report_once(f"{origin}, which is not a directory: it gives no results; make it, or correct the name")
    return False


@functools.lru_cache(maxsize=4)
def _installed(_: tuple[str, ...]) -> list[Store]:
    """Returns the tables of installed packages, by the names of their entry points."""
    found = []
    for point in sorted(entry_points(GROUP), key=lambda point: (point.name, point.value)):
        try:
            directory = table_directory(point.value)
        except ValueError as error:
            problems.report_once(f"the entry point {point.name!r} of the group {GROUP!r} is not usable: {error}")
            continue
        if _is_there(directory, f"the entry point {point.name!r} of the group {GROUP!r} names {str(directory)!r}"):
            found.append(Store(directory, read_only=True, label=f"the table {point.value}"))
    return found
