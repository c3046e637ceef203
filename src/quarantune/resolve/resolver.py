"""From a call to its config: memory, the layers of the cache, other ranks, or a tuning job."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quarantune import jax_internals
from quarantune.cache import store as cache
from quarantune.cache.store import Entry, Store
from quarantune.host.process import entry_points, in_sandbox, lazy
from quarantune.resolve.call_key import BoundCall, CallKey, KeyedCall, TunedFunction, keyed, keyed_to_tune
from quarantune.transport.problem import assignment_in_force
from quarantune.values import describe
from quarantune.values import settings as environment
from quarantune.values.codec import JsonObject
from quarantune.values.configs import Config
from quarantune.values.settings import Settings, Which, on_forgetting, table_directory
from quarantune.values.trial import ESTIMATED, CacheMissError, Findings, TuningFailedError

if TYPE_CHECKING:
    from quarantune.cache.entries import CacheRecord
    from quarantune.resolve.seeds import CompilationSeeds
    from quarantune.results.result import FromCache, TuningResult
    from quarantune.sweep.limits import SearchLimits
    from quarantune.transport.assignment import Assignment

_logger = logging.getLogger("quarantune")

GROUP = "quarantune.tables"
"""The group of entry points with which packages name their tables."""
_MOST_REMEMBERED = 4096
"""Beyond this many calls of a function, results that were found in files are forgotten, and found again."""
_DEFAULTS = None, False
"""A choice that is not settled: another job may tune the call at any time."""


@dataclasses.dataclass(frozen=True)
class Known:
    """A config that is known for a call.

    Attributes:
        config: the config.
        record: the entry that it is from, or the like: the findings of the sweep as JSON, read when they are needed.
        is_nearest: whether it is that of a near call.
        result: the result, where this process has just found it; never remembered, as it holds an executable.
    """

    config: Config
    record: JsonObject = dataclasses.field(default_factory=dict)
    is_nearest: bool = False
    result: TuningResult | None = None

    @classmethod
    def of(cls, result: TuningResult) -> Known:
        """Returns what a sweep has found."""
        return cls(result.best_config, result.findings.to_json())

    @lazy
    def findings(self) -> Findings:
        """The findings of the sweep."""
        return Findings.from_json(self.record)

    @property
    def search(self) -> JsonObject:
        """The part of the record about the search."""
        return dict_or_empty(self.record.get("search"))

    @property
    def is_estimate(self) -> bool:
        """Whether the config was never measured."""
        return bool(self.search.get("stopped") == ESTIMATED)


class Resolver:
    """Finds the best config for each call of one function: remembered, or by tuning for it."""

    def __init__(
        self,
        function: TunedFunction,
        *,
        job: Callable[..., Any] | None = None,
        on_phase: Callable[[int, str], None] | None = None,
    ) -> None:
        """Sets up a resolver; nothing is read or started.

        Args:
            function: the function.
            job: makes what tunes for a call, as `TuningJob` does.
            on_phase: called with the index of a config and the phase that it enters, at last with `end`.
        """
        self.function = function
        self._known = KnownResults(function)
        self._job = job
        self._agreed: dict[Any, Known | str] = {}
        self._locks: dict[tuple[int, int], threading.RLock] = {}
        self._on_phase = on_phase or (lambda index, phase: None)

    @lazy
    def _seeds(self) -> CompilationSeeds:
        from quarantune.resolve.seeds import CompilationSeeds  # calls that are not tuned for do not need it

        return CompilationSeeds()

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> BoundCall:
        """Returns a call of the function, bound to be resolved."""
        call = BoundCall(self.function, args, kwargs)
        if not self.function.tunables and not call.is_symbolic:
            self.function.tunables = self._known.tunables(call, environment.current())
        return call

    def config(self, call: BoundCall) -> Config | None:
        """Returns the config to use for a call as `choice` does; None to run with the defaults."""
        return self.choice(call)[0]

    def choice(self, call: BoundCall) -> tuple[Config | None, bool]:
        """Returns the config to use for a call, remembered or found by tuning, or that of a near call.

        Returns:
            The config, None to run with the defaults; and whether it stays the choice for all such calls of this
            process.

        Raises:
            TuningFailedError: every config failed, now or earlier in this process.
            CacheMissError: nothing is remembered and `ON_MISS` is `error`.
        """
        if call.is_symbolic:
            from quarantune.sweep import sweep_inputs

            given = sweep_inputs.in_place_of_symbolic((call.args, call.kwargs))
            call = call if given is None else self.bind(*given)
        if call.has_no_key:
            cache.report_once(
                f"{call.name}: running with its defaults where its shapes are symbolic, as in jax.export: give "
                f"autotune a key_fn that returns the same for these as for the shapes it was tuned for"
            )
            return _DEFAULTS
        described = keyed(call)
        assignment: Assignment | None = assignment_in_force.get()
        if assignment is not None:
            if assignment.note is not None:
                self._record(described, environment.current())
                assignment.note(described, self)
                return _DEFAULTS
            slot = assignment.slot(call.name, cache.canonical_json(described.values), self.function.identity)
            is_assigned, config = assignment.find(slot, lambda: _seen(call))
            if is_assigned:
                return config, config is not None
        with self._lock_of(described.key):
            return self._choice(described)

    def result(self, call: BoundCall) -> TuningResult:
        """Returns the result for a call, remembered or found by tuning.

        Raises:
            TuningFailedError: every config failed, now or earlier in this process.
            CacheMissError: nothing is remembered, and `ON_MISS` is neither `tune` nor `default`.
            TypeError: the call sets a tunable parameter by hand.
        """
        settings = environment.current()
        described = keyed_for_engine(call, settings)
        with self._lock_of(described.key):
            found = self._resolve(described, settings)
        from quarantune.resolve.call_results import call_result  # a call that is found does not need it

        if isinstance(found, Known):
            origin: FromCache = "nearest" if found.is_nearest else True
            return found.result or call_result(described, found.config, found.findings, from_cache=origin)
        if (failure := self._known.failure(described.key)) is not None:
            raise failure
        if settings.on_miss == "tune":
            raise TuningFailedError(f"{call.name}: {found}", trials=(), key=described.key.text)
        self._allow_defaults(described, settings, where=() if call.untuned is None else ("default",))
        return call_result(described, call.defaults, Findings(), from_cache="default")

    def tune(self, call: BoundCall, *, resume: bool = False) -> TuningResult:
        """Tunes for a call now, even if it is cached, and remembers the result.

        If another job is tuning the call at this moment, its result is taken, unless `ALWAYS_TUNE` is set.

        Args:
            call: the call.
            resume: whether what an interrupted sweep has measured counts.

        Raises:
            TuningFailedError: every config failed.
            TypeError: the call sets a tunable parameter by hand.
        """
        settings = environment.current()
        store, is_here = open_store(settings), settings.executor is None
        # An engine may take long to name its device, without which no key is known: all entries as they are now.
        saved = {} if is_here or settings.disable_cache else store.read(call.name)
        described = keyed_for_engine(call, settings)
        device, key = described.key.device, described.key.text
        reads_one = is_here and not settings.disable_cache
        earlier = store.get(call.name, device, key) if reads_one else saved.get(device, {}).get(key)
        result = self._tune(described, settings, start_over=not resume, earlier=earlier)
        self._compare(described, settings, found=result)
        return result

    def adopt(self, described: KeyedCall, result: TuningResult, settings: Settings) -> None:
        """Remembers a result that was not found by one sweep, and has the other ranks use it, or uses theirs."""
        self._known.remember(described.key, result, settings)
        self._compare(described, settings, found=result)

    def lookup(self, call: BoundCall) -> Config | None:
        """Returns the remembered config for a call, or None; never tunes."""
        if call.has_no_key:
            return None
        known = self._find(keyed(call), environment.current())
        return None if known is None else known.config

    def is_known(self, call: BoundCall) -> bool:
        """Returns whether a result is remembered for these devices with which no sweep would go on."""
        settings = environment.current()
        known = self._known.find(keyed_for_engine(call, settings), settings)
        return known is not None and self._known.is_enough(known, settings)

    def seeding_compilation(
        self, config: Config, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which a first call finds the worker's executable in JAX's compilation cache."""
        if "_seeds" not in vars(self):  # nothing was tuned
            return contextlib.nullcontext()
        return self._seeds.in_use(self.function.compiled_fn, config, args, kwargs)

    def _tune(
        self, described: KeyedCall, settings: Settings, *, start_over: bool, earlier: Entry | None = None
    ) -> TuningResult:
        """Tunes for a call, and remembers the result or the failure in this process; see `TuningJob`."""
        from quarantune.resolve.tuning_job import TuningJob  # cached calls do not need it

        job = (self._job or TuningJob)(
            described, settings, self._known, self._seeds, self._on_phase, start_over=start_over, earlier=earlier
        )
        try:
            result: TuningResult = job.run()
        except TuningFailedError as error:
            self._known.remember_failure(described.key, error)
            raise
        self._known.remember(described.key, result, settings)
        return result

    def _choice(self, described: KeyedCall) -> tuple[Config | None, bool]:
        call, settings = described.call, environment.current()
        # A sweep within a sweep would measure the two against each other.
        may_tune = not in_sandbox() and not call.is_symbolic
        found = self._resolve(described, settings, may_tune=may_tune)
        if isinstance(found, Known):
            # What a block of code sets does not hold for the calls after it.
            is_settled = not found.is_nearest or not (environment.block_of("on_miss") or settings.record)
            return found.config, is_settled
        if settings.on_miss != "tune" and not in_sandbox():
            self._allow_defaults(described, settings, where=("default", "nearest"))
        elif call.is_symbolic and not in_sandbox():
            cache.report_once(
                f"{call.name}: running with its defaults where its shapes are symbolic and nothing is cached for the "
                f"key {cache.canonical_json(described.values)}: tune it with concrete shapes of that key before "
                f"jax.export"
            )
        return _DEFAULTS

    def _resolve(self, described: KeyedCall, settings: Settings, *, may_tune: bool = True) -> Known | str:
        """Asks one source after another for a call: memory and the cache, other ranks, a near call, a sweep.

        Returns:
            The config, or why it is the function's own defaults, where ranks have agreed on them; empty where no source
            has answered.

        Raises:
            TuningFailedError: every config failed, now or earlier in this process.
        """
        key, known = described.key, self._known
        self._record(described, settings)
        coordination = None if described.call.is_symbolic else _coordination(settings)
        start_over = may_tune and known.must_tune(key, settings)
        must_end_in_sweep = may_tune and (start_over or settings.on_miss == "tune")

        def own() -> Known | None:
            find = self._find if coordination is None else known.find
            found = None if start_over else find(described, settings)
            is_enough = found is not None and (not may_tune or known.is_enough(found, settings))
            return found if is_enough else None

        def near() -> Known | None:
            if settings.on_miss != "nearest":
                return None
            from quarantune.resolve import similar  # a call that is found does not need it

            return similar.nearest(known, described, settings)

        def tune() -> TuningResult | None:
            try:
                return self._tune(described, settings, start_over=start_over)
            except TuningFailedError:  # it is remembered, and another rank may be more successful
                return None

        if coordination is not None:
            from quarantune.resolve.ranks import Agreement  # programs of one process do not need it

            may_tune = must_end_in_sweep and known.failure(key) is None
            agreement = Agreement(described, settings, coordination, self._agreed)
            return agreement.settle(own=own, near=near, tune=tune if may_tune else None)
        if (found := own()) is not None:
            return found
        if not start_over:
            if (failure := known.failure(key)) is not None:
                raise failure
            if (found := near()) is not None:
                return found
        if not must_end_in_sweep:
            return ""
        result = self._tune(described, settings, start_over=start_over)
        return dataclasses.replace(Known.of(result), result=result)

    def _record(self, described: KeyedCall, settings: Settings) -> None:
        """Has a call without a saved result written down, where the settings want that."""
        is_wanted = settings.record is not None and not (in_sandbox() or described.call.is_symbolic)
        if is_wanted and ((known := self._known.find(described, settings)) is None or known.is_estimate):
            from quarantune.resolve import recorded  # programs that record nothing do not need it

            recorded.note(described, self, settings.record)

    def _find(self, described: KeyedCall, settings: Settings) -> Known | None:
        """Returns the remembered result for a call: the one of all ranks, if there are several; never waits."""
        if _coordination(settings) is None:
            return self._known.find(described, settings)
        agreed = self._compare(described, settings, own=lambda: self._known.find(described, settings))
        return agreed if isinstance(agreed, Known) else None

    def _compare(self, described: KeyedCall, settings: Settings, **offered: Any) -> Known | str | None:
        """Offers a result to the other ranks of this program, if it has any; as `Agreement.compare`."""
        if (coordination := _coordination(settings)) is None:
            return None
        from quarantune.resolve.ranks import Agreement  # the same

        return Agreement(described, settings, coordination, self._agreed).compare(**offered)

    def _lock_of(self, key: CallKey) -> threading.RLock:
        """Returns the lock of a key: of the threads that miss the cache together, one tunes.

        It is free in a fork of this process, which lacks the threads that hold it. Keys may be many and long, so a few
        share a lock.
        """
        return self._locks.setdefault((os.getpid(), hash(key) % _MOST_REMEMBERED), threading.RLock())

    def _allow_defaults(self, described: KeyedCall, settings: Settings, *, where: tuple[str, ...]) -> None:
        """Says once that a call runs with the function's own defaults.

        Raises:
            CacheMissError: `ON_MISS` is none of those `where` it may.
        """
        if settings.on_miss not in where:
            from quarantune.resolve import similar

            raise CacheMissError(similar.explain(self._known, described, settings, may_run_untuned=bool(where)))
        why = f"ON_MISS={settings.on_miss}" if settings.record is None else "recorded, to be tuned later"
        cache.report_once(f"{described.call.name}: not tuned for this call, running with its defaults ({why})")


def keyed_for_engine(call: BoundCall, settings: Settings) -> KeyedCall:
    """Returns a call to tune with its key, for the devices of the settings' engine if there is one."""
    if settings.executor is None:
        return keyed_to_tune(call)
    from quarantune.engine import distributed

    return keyed_to_tune(call, distributed.device(settings.executor))


def _coordination(settings: Settings) -> jax_internals.Coordination | None:
    """Returns the means to agree with the other ranks of this program, if it has any, and is to agree with them."""
    coordination = None if in_sandbox() else jax_internals.coordination()
    return coordination if settings.agree else None


def _seen(call: BoundCall) -> tuple[list[Config], JsonObject]:
    """Returns the configs of a call that are worth a worker, and its config space."""
    kept = [call.configs[index] for index in call.configs.listed() if call.configs.keeps(index)]
    return kept, call.space


class KnownResults:
    """Results for the calls of one function."""

    def __init__(self, function: TunedFunction) -> None:
        """Knows no results yet; nothing is read."""
        self._function = function
        self._winners: dict[CallKey, Known] = {}
        self._failures: dict[CallKey, TuningFailedError] = {}
        self._tuned: set[CallKey] = set()
        on_forgetting(self.forget)

    def forget(self, of: Which | None) -> None:
        """Forgets the results and failures that are meant, because their files have changed."""
        for key in [*self._winners, *self._failures]:
            if of is not None and of(self._function.name, key.device, key.text):
                self._winners.pop(key, None)
                self._failures.pop(key, None)

    def find(self, keyed: KeyedCall, settings: Settings) -> Known | None:
        """Returns the result that memory or the cache holds for a call, or None."""
        if (known := self._winners.get(keyed.key)) is not None:
            return known
        for store in self.layers(settings):
            entry = store.get(self._function.name, keyed.key.device, keyed.key.text)
            found = self._usable(entry, keyed.call, settings, is_own=not store.read_only)
            if found is not None and (known is None or not found.is_estimate):
                _logger.debug("%s: found in %s", self._function.name, store.label)
                known = found
            if known is not None and not known.is_estimate:
                break
        if known is not None:
            if len(self._winners) >= _MOST_REMEMBERED:  # all but those that may be in no file
                self._winners = {key: it for key, it in list(self._winners.items()) if key in self._tuned}
            self._winners[keyed.key] = known
        return known

    def is_enough(self, known: Known, settings: Settings) -> bool:
        """Returns whether a result is as thorough as the call demands; if not, its search goes on.

        Only a larger budget of the kind that ended the search demands more, and only where a miss is tuned for. There,
        an estimate is never enough.
        """
        if settings.on_miss != "tune":
            return True
        if known.is_estimate or known.search.get("budget") is None:
            return not known.is_estimate
        searched = known.findings.search
        wanted = self._limits(settings).budget(searched.stopped)
        return wanted is None or searched.budget is None or wanted <= searched.budget

    def _limits(self, settings: Settings) -> SearchLimits:
        from quarantune.sweep.limits import SearchLimits  # a call that is found does not need it

        return SearchLimits.of(self._function.options, settings)

    def must_tune(self, key: CallKey, settings: Settings) -> bool:
        """Returns whether `ALWAYS_TUNE` demands another sweep: once per key and process, or `settings` block."""
        block = environment.block_of("always_tune")
        return settings.always_tune and (key not in self._tuned if block is None else (self, key) not in block.tuned)

    def _note_tuned(self, key: CallKey) -> None:
        self._tuned.add(key)
        if (block := environment.block_of("always_tune")) is not None:
            block.tuned.add((self, key))

    def failure(self, key: CallKey) -> TuningFailedError | None:
        """Returns the error with which tuning for a key ended earlier in this process, if it did."""
        return _without_traceback(self._failures[key]) if key in self._failures else None

    def remember(self, key: CallKey, result: TuningResult, settings: Settings) -> None:
        """Remembers a result in this process."""
        self._failures.pop(key, None)
        budget = self._limits(settings).budget(result.stopped) or result.seen  # `auto` has a budget of its own
        known = Known.of(result)
        known.search["budget"] = budget
        self._winners[key] = known
        self._note_tuned(key)

    def remember_failure(self, key: CallKey, error: TuningFailedError) -> None:
        """Remembers in this process that every config failed."""
        self._failures[key] = _without_traceback(error)
        self._note_tuned(key)

    def saved(
        self, keyed: KeyedCall, settings: Settings, *, other_than: Entry | None = None, afresh: bool = False
    ) -> Known | None:
        """Returns the result that the user's cache holds now, or None where there is none to use, or no other."""
        entry = open_store(settings).get(self._function.name, keyed.key.device, keyed.key.text, afresh=afresh)
        return None if entry == other_than else self._usable(entry, keyed.call, settings)

    def _usable(self, entry: Entry | None, call: BoundCall, settings: Settings, *, is_own: bool = True) -> Known | None:
        """Returns the result of an entry if its config is one of the call's, and these versions may use it.

        Args:
            entry: the entry, if there is one.
            call: the call.
            settings: the operator's settings.
            is_own: whether the entry is in the user's cache, so that the user should know why it is not used.
        """
        config = None if entry is None else self._function.config_of(entry, call, is_own=is_own)
        if entry is None or config is None or not self.versions_serve(entry, settings, is_own=is_own):
            return None
        return Known(config, entry)

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

    def layers(self, settings: Settings) -> Iterator[Store]:
        """Yields the stores where results are looked up, in their order, each opened when it is needed.

        They are the user's cache, the directories of `CACHE_PATH`, and the tables of the function's author and of
        installed packages.
        """
        if settings.disable_cache:
            return
        yield open_store(settings)
        for directory in settings.cache_path:
            if _is_there(directory, f"QUARANTUNE_CACHE_PATH names {str(directory)!r}"):
                yield Store(directory, read_only=True)
        if (tables := self._function.options.tables) is not None:
            directory = table_directory(tables)
            if _is_there(directory, f"tables={tables!r} stands for {str(directory)!r}"):
                yield Store(directory, read_only=True, label=f"the table {tables}")
        yield from _installed(tuple(sys.path))

    def entries(self, settings: Settings) -> Iterator[tuple[Store, CacheRecord]]:
        """Yields the entries of all layers, in their order, each with its layer."""
        from quarantune.cache.entries import entries_of  # a call that is found does not need it

        for store in self.layers(settings):
            for record in entries_of(self._function.name, store.read(self._function.name)):
                yield store, record

    def tunables(self, call: BoundCall, settings: Settings) -> frozenset[str]:
        """Returns the names that the configs of a call set, where saved results tell them without the configs."""
        for store in self.layers(settings) if call.has_unread_configs else ():
            for entries in store.read(self._function.name).values():
                for entry in entries.values():
                    if entry.get("space") == call.space and (config := call.find(entry.get("config"))):
                        return frozenset(config)
        return frozenset()


def _without_traceback(error: TuningFailedError) -> TuningFailedError:
    """Returns a copy of an error without its traceback, which keeps the arguments of the call alive."""
    return TuningFailedError(str(error), trials=error.trials, key=error.key)


def changed_versions(entry: Entry) -> str:
    """Lists the versions that have changed since an entry was made; empty where all are the same."""
    then = dict_or_empty(entry.get("versions"))
    changed = {name: now for name, now in describe.versions().items() if then and then.get(name) != now}
    return ", ".join(f"{name} {then.get(name)} (now {now})" for name, now in changed.items())


def dict_or_empty(value: Any) -> JsonObject:
    """Returns a part of an entry that should be a dict; an empty one where somebody has edited the file."""
    return value if isinstance(value, dict) else {}


def open_store(settings: Settings) -> Store:
    """Returns the store of results in the cache directory."""
    return Store(settings.cache_dir, lock_timeout_s=settings.lock_timeout)


def _is_there(directory: Path, origin: str) -> bool:
    if os.path.isdir(directory):  # unlike `Path.is_dir`, it raises nothing where the path cannot be examined
        return True
    cache.report_once(f"{origin}, which is no directory: no results are looked up there; make it, or correct the name")
    return False


@functools.lru_cache(maxsize=4)
def _installed(_: tuple[str, ...]) -> list[Store]:
    """Returns the tables of installed packages, by the names of their entry points."""
    found = []
    for point in sorted(entry_points(GROUP), key=lambda point: (point.name, point.value)):
        try:
            directory = table_directory(point.value)
        except ValueError as error:
            cache.report_once(f"the entry point {point.name!r} of the group {GROUP!r} is not usable: {error}")
            continue
        if _is_there(directory, f"the entry point {point.name!r} of the group {GROUP!r} names {str(directory)!r}"):
            found.append(Store(directory, read_only=True, label=f"the table {point.value}"))
    return found
