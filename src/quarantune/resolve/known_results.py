"""The results that are known for the calls of one function: in memory, and in the layers of the cache."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from quarantune import cache
from quarantune.cache import Entry, Store, plain_function
from quarantune.host.process import commit_of, entry_points
from quarantune.resolve.call_key import BoundCall, CallKey, KeyedCall, TunedFunction
from quarantune.transport.problem import Arguments, as_structs, bind_config, is_array
from quarantune.values import describe
from quarantune.values import settings as environment
from quarantune.values.codec import JsonObject
from quarantune.values.configs import Config, as_given, encode, format_config
from quarantune.values.settings import Settings, register_keeper, table_directory
from quarantune.values.texts import former_name
from quarantune.values.trial import SCORES, Findings, Searched, Trial, TuningFailedError, count_outcomes

if TYPE_CHECKING:
    from quarantune.results.result import FromCache, TuningResult
    from quarantune.sweep.limits import SearchLimits

_logger = logging.getLogger("quarantune")

GROUP = "quarantune.tables"
"""The group of entry points with which packages name their tables."""


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
        """Yields the layers where results are looked up."""
        return iter(()) if settings.disable_cache else open_layers(settings, self._function.options.tables)

    def entries(self, settings: Settings) -> Iterator[Found]:
        """Yields the entries of all layers, in their order."""
        for layer in self.layers(settings):
            for device, entries in layer.store.read(self._function.name).items():
                for key, entry in entries.items():
                    yield Found(layer, device, key, entry)

    def tunables(self, call: BoundCall, settings: Settings) -> frozenset[str]:
        """Returns the names that the configs of a call set, where saved results tell them without the configs."""
        for found in self.entries(settings) if call.has_unread_configs else ():
            if found.entry.get("space") == call.space and (config := call.find(found.entry.get("config"))):
                return frozenset(config)
        return frozenset()


def _without_traceback(error: TuningFailedError) -> TuningFailedError:
    """Returns a copy of an error without its traceback, which keeps the arguments of the call alive."""
    return TuningFailedError(str(error), trials=error.trials, key=error.key)


def call_result(
    keyed: KeyedCall,
    config: Config,
    findings: Findings,
    trials: tuple[Trial, ...] = (),
    *,
    finalists: tuple[Trial, ...] = (),
    tie: tuple[Config, ...] = (),
    from_cache: FromCache = False,
    executable: bytes | None = None,
    noise: float | None = None,
) -> TuningResult:
    """Returns the result of a call.

    Args:
        keyed: the call.
        config: its best config.
        findings: the findings of the sweep.
        trials: the trials of all configs; none for a result that was remembered.
        finalists: the trials of the configs that were in the final.
        tie: the configs that are as fast as the best.
        from_cache: whether the result was remembered; `nearest` where that of a near call stands in.
        executable: the executable of the best config, where there is one.
        noise: as in `TuningResult`.
    """
    from quarantune.results import result  # a call that is found does not need it

    call = keyed.call
    is_unread = bool(from_cache) and call.has_unread_configs
    own_defaults = None if is_unread else call.own_defaults
    return result.TuningResult.of(
        findings,
        name=call.name,
        best_config=as_given(config),
        trials=_given(trials),
        key=keyed.key.text,
        device=keyed.key.device,
        from_cache=from_cache,
        tie=tuple(map(as_given, tie)),
        default_config=None if own_defaults is None else as_given(own_defaults),
        noise=noise,
        finalists=_given(finalists),
        versions=describe.versions(),
        executable=executable,
        call=_without_arrays(call.args, call.kwargs),
        structs=as_structs(call.args, call.kwargs),
        fn=bind_config(call.function.fn, config),
    )


def _without_arrays(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
    """Returns a call with None for every argument that holds an array, so that only static ones are kept.

    Such arguments are replaced as a whole, because their class may validate its contents.
    """

    def emptied(arg: Any) -> Any:
        return None if any(map(is_array, jax.tree.leaves(arg))) else arg

    return tuple(map(emptied, args)), {name: emptied(arg) for name, arg in kwargs.items()}


def _given(trials: Iterable[Trial]) -> tuple[Trial, ...]:
    """Returns trials whose configs are as the author gave them."""
    return tuple(dataclasses.replace(trial, config=as_given(trial.config)) for trial in trials)


def findings_now(call: BoundCall, time_ms: float, trials: Sequence[Trial], search: Searched) -> Findings:
    """Returns the findings of a sweep that has just ended: with the date, and the commit of the user's repository."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    commit = commit_of(plain_function(call.function.fn))
    return Findings(time_ms, created=now, commit=commit, trials=count_outcomes(trials), search=search)


def entry_for(keyed: KeyedCall, config: Config, findings: Findings, search: JsonObject) -> Entry:
    """Returns the entry that remembers a result.

    Args:
        keyed: the call.
        config: the winner; the function's own defaults where these won, whether or not they are in the config space.
        findings: the findings of the sweep.
        search: the search that chose the configs.
    """
    found = findings.to_json()
    return {
        "config": encode(config),
        **{name: found[name] for name in ("time_ms", "default_time_ms", "speedup_interval")},
        "key_values": keyed.readable,
        "fingerprint": keyed.call.function.fingerprint.parts,
        "space": keyed.call.space,
        "versions": describe.versions(),
        "created": findings.created,
        **({"commit": findings.commit} if findings.commit else {}),
        **({} if findings.score is None else {name: found[name] for name in SCORES}),
        "trials": found["trials"],
        "search": search | found["search"],
    }


def more_thorough(device: str, key: str, present: Entry, offered: Entry) -> Entry:
    """Returns the one of two entries for one problem to keep.

    That is the offered one, unless the present one comes from a more thorough search of the same space under the same
    versions, and its config is as fast. An estimate never replaces a measured one.

    Args:
        device: the kind of device.
        key: the key of the problem.
        present: the entry that is saved.
        offered: the entry to save.
    """
    is_alike = all(present.get(part) == offered.get(part) for part in ("space", "versions", "fingerprint"))
    then, now = Findings.from_json(present), Findings.from_json(offered)
    if now.is_estimate != then.is_estimate:
        return present if now.is_estimate else offered
    is_less = now.search.thoroughness < then.search.thoroughness
    return present if is_alike and is_less and now.figure >= then.figure else offered


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


@dataclasses.dataclass(frozen=True)
class Layer:
    """One directory of results.

    Attributes:
        label: the layer in messages.
        store: its entries.
        is_own: whether it is the user's cache, which is written too.
    """

    label: str
    store: Store
    is_own: bool = False


@dataclasses.dataclass(frozen=True)
class Found:
    """An entry of a layer.

    Attributes:
        layer: the layer.
        device: the kind of device that it is for.
        key: its key.
        entry: the entry.
    """

    layer: Layer
    device: str
    key: str
    entry: Entry


def open_layers(settings: Settings, tables: str | None) -> Iterator[Layer]:
    """Yields the layers in the order of look-ups, each opened when it is needed.

    Args:
        settings: the operator's settings, with the user's cache and the directories of `CACHE_PATH`.
        tables: the table that the function's author names, as `package:directory`.
    """
    own = settings.cache_dir
    yield Layer(str(own), Store(own, lock_timeout_s=settings.lock_timeout), is_own=True)
    for directory in settings.cache_path:
        if _is_there(directory, f"QUARANTUNE_CACHE_PATH names {str(directory)!r}"):
            yield _read_only(str(directory), directory)
    if tables is not None:
        directory = table_directory(tables)
        if _is_there(directory, f"tables={tables!r} stands for {str(directory)!r}"):
            yield _read_only(f"the table {tables}", directory)
    for label, directory in _installed(tuple(sys.path)):
        yield _read_only(label, directory)


def _read_only(label: str, directory: Path) -> Layer:
    return Layer(label, Store(directory, read_only=True))


def _is_there(directory: Path, origin: str) -> bool:
    if os.path.isdir(directory):  # unlike `Path.is_dir`, it raises nothing where the path cannot be examined
        return True
    cache.report_once(f"{origin}, which is no directory: no results are looked up there; make it, or correct the name")
    return False


@functools.lru_cache(maxsize=4)
def _installed(_: tuple[str, ...]) -> list[tuple[str, Path]]:
    """Returns the tables of installed packages, by the names of their entry points."""
    found = []
    for point in sorted(entry_points(GROUP), key=lambda point: (point.name, point.value)):
        try:
            directory = table_directory(point.value)
        except ValueError as error:
            cache.report_once(f"the entry point {point.name!r} of the group {GROUP!r} is not usable: {error}")
            continue
        if _is_there(directory, f"the entry point {point.name!r} of the group {GROUP!r} names {str(directory)!r}"):
            found.append((f"the table {point.value}", directory))
    return found
