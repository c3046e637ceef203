"""Builds the result of a call, of a sweep that has ended or of a remembered config, and the entry to remember."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable, Sequence

from quarantune.cache import Entry
from quarantune.resolve.call_key import KeyedCall
from quarantune.resolve.entries import Saved, Searched
from quarantune.results.compiled_winner import without_arrays
from quarantune.results.result import FromCache, TuningResult
from quarantune.transport import binding
from quarantune.transport.problem import as_structs
from quarantune.values import versions
from quarantune.values.config_values import as_given, encode
from quarantune.values.json_object import JsonObject
from quarantune.values.times import Times
from quarantune.values.trial import Config, Trial, count_outcomes

_UNKNOWN = Searched()
_NOT_SAVED = Saved()


def call_result(
    keyed: KeyedCall,
    config: Config,
    times: Times,
    trials: tuple[Trial, ...] = (),
    *,
    finalists: tuple[Trial, ...] = (),
    tie: tuple[Config, ...] = (),
    from_cache: FromCache = False,
    executable: bytes | None = None,
    searched: Searched = _UNKNOWN,
    saved: Saved = _NOT_SAVED,
    noise: float | None = None,
) -> TuningResult:
    """Returns the result of a call.

    Args:
        keyed: the call.
        config: its best config.
        times: its times.
        trials: the trials of all configs; none for a result that was remembered.
        finalists: the trials of the configs that were in the final.
        tie: the configs that are as fast as the best.
        from_cache: whether the result was remembered; `nearest` where that of a near call stands in.
        executable: the executable of the best config, where there is one.
        searched: how thorough the search was.
        saved: what a remembered entry says of its sweep.
        noise: as in `TuningResult`.
    """
    call = keyed.call
    is_unread = bool(from_cache) and call.has_unread_configs
    own_defaults = None if is_unread else call.own_defaults
    return TuningResult(
        name=call.name,
        best_config=as_given(config),
        time_ms=times.best_ms,
        trials=_given(trials),
        key=keyed.key.text,
        device=keyed.key.device,
        from_cache=from_cache,
        tie=tuple(map(as_given, tie)),
        default_config=None if own_defaults is None else as_given(own_defaults),
        default_time_ms=times.default_ms,
        speedup_interval=times.interval,
        noise=noise,
        finalists=_given(finalists),
        counts=count_outcomes(trials) or dict(saved.counts),
        created=saved.created,
        stopped=searched.stopped,
        seen=searched.seen,
        space_size=searched.space_size,
        versions=versions.versions(),
        executable=executable,
        call=without_arrays(call.args, call.kwargs),
        structs=as_structs(call.args, call.kwargs),
        fn=binding.bind(call.function.fn, config),
    )


def _given(trials: Iterable[Trial]) -> tuple[Trial, ...]:
    """Returns trials whose configs are as the author gave them."""
    return tuple(dataclasses.replace(trial, config=as_given(trial.config)) for trial in trials)


def entry_for(keyed: KeyedCall, config: Config, times: Times, trials: Sequence[Trial], search: JsonObject) -> Entry:
    """Returns the entry that remembers a result.

    Args:
        keyed: the call.
        config: the winner; the function's own defaults where these won, whether or not they are in the config space.
        times: its times.
        trials: the trials of all configs.
        search: how the configs were searched.
    """
    return {
        "config": encode(config),
        "time_ms": times.best_ms,
        "default_time_ms": times.default_ms,
        "speedup_interval": None if times.interval is None else [*times.interval],
        "key_values": keyed.readable,
        "fingerprint": keyed.call.function.fingerprint.parts,
        "space": keyed.call.space,
        "versions": versions.versions(),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "trials": count_outcomes(trials),
        "search": search,
    }
