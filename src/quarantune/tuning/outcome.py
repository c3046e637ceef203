"""The results of calls: a config with its findings, for users and as a cache entry."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from quarantune.answers import saved_program
from quarantune.answers.answer import Answer
from quarantune.cache.entry_file import Entry
from quarantune.calls.call import BoundCall
from quarantune.calls.key import KeyedCall
from quarantune.functions import versions
from quarantune.functions.binding import Arguments, bind_config
from quarantune.functions.description import as_structs, is_array
from quarantune.functions.fingerprint import plain_function
from quarantune.host.repository import commit_of
from quarantune.results.from_cache import shares_of
from quarantune.results.report_data import FromCache
from quarantune.results.result import TuningResult
from quarantune.results.unfinished import FailedSweep
from quarantune.values.codec import JsonObject, as_json
from quarantune.values.configs import Config, as_given
from quarantune.values.options import ROUNDING
from quarantune.values.trial import SCORES, TIME, Findings, Searched, Trial, count_outcomes, ranked_by


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
        trials: the trials of all configs; empty for a remembered result.
        finalists: the trials of the configs in the final.
        tie: the configs that are as fast as the best.
        from_cache: whether it is a remembered result; `nearest` if it is the result of a similar call.
        executable: the executable of the best config, if there is one.
        noise: see `TuningResult`.
    """
    call = keyed.call
    is_unread = bool(from_cache) and call.has_unread_configs
    own_defaults = None if is_unread else call.own_defaults
    return TuningResult.of(
        findings,
        name=call.name,
        best_config=as_given(config),
        trials=_given(trials),
        key=keyed.id.key,
        device=keyed.id.device,
        from_cache=from_cache,
        tie=tuple(map(as_given, tie)),
        default_config=None if own_defaults is None else as_given(own_defaults),
        noise=noise,
        finalists=_given(finalists),
        versions=versions.versions(),
        executable=executable,
        call=_without_arrays(call.args, call.kwargs),
        structs=as_structs(call.args, call.kwargs),
        fn=bind_config(call.function.fn, config, is_exact=call.function.options.numerics != ROUNDING),
    )


def saved_result(keyed: KeyedCall, answer: Answer, *, from_cache: FromCache = True) -> TuningResult:
    """Returns the result of a call whose config is from an answer; it tells of the entry that the answer is from.

    Args:
        keyed: the call.
        answer: the answer; it has a config.
        from_cache: see `TuningResult`.
    """
    assert answer.config is not None
    result = call_result(keyed, answer.config, answer.findings, from_cache=from_cache)
    if answer.directory is None:
        return result
    (shares, by), made_under = shares_of(answer.record), answer.record.get("versions")
    known = {str(name): str(it) for name, it in made_under.items()} if isinstance(made_under, dict) else {}
    source = answer.directory, answer.record
    return dataclasses.replace(result, calls=shares, by=by, versions=known, source=source)


def failed_sweep(keyed: KeyedCall, trials: Iterable[Trial]) -> FailedSweep:
    """Returns a sweep whose configs all failed, for its error."""
    return FailedSweep(
        **keyed.id._asdict(),
        key_values=keyed.readable,
        trials=_given(trials),
        default=keyed.call.own_defaults,
        versions=versions.versions(),
    )


def _without_arrays(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
    """Returns a call with None for every argument that holds an array, to keep only static arguments.

    None replaces the whole argument, because its class may validate its contents.
    """

    def emptied(arg: Any) -> Any:
        return None if any(map(is_array, jax.tree.leaves(arg))) else arg

    return tuple(map(emptied, args)), {name: emptied(arg) for name, arg in kwargs.items()}


def _given(trials: Iterable[Trial]) -> tuple[Trial, ...]:
    """Returns trials with their configs as the author gave them."""
    return tuple(dataclasses.replace(trial, config=as_given(trial.config)) for trial in trials)


def findings_now(call: BoundCall, found: Findings, trials: Sequence[Trial], search: Searched) -> Findings:
    """Returns the findings of a sweep that has just ended, with the date and the commit of the user's repository."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    commit = commit_of(plain_function(call.function.fn))
    return dataclasses.replace(found, created=now, commit=commit, trials=count_outcomes(trials), search=search)


def entry_for(
    keyed: KeyedCall, config: Config, findings: Findings, search: JsonObject, program: JsonObject | None = None
) -> Entry:
    """Returns the entry that remembers a result.

    Args:
        keyed: the call.
        config: the winner. If the function's own defaults won, it may lie outside of the config space.
        findings: the findings of the sweep.
        search: the search that chose the configs.
        program: the measured program, as returned by `measured_program`; None if unknown.
    """
    found = findings.to_json()
    return {
        "config": as_json(config),
        **{name: found[name] for name in ("time_ms", "default_time_ms", "speedup_interval")},
        "key_values": keyed.readable,
        **({"arguments": [keyed.arguments]} if keyed.call.function.options.key_fn is not None else {}),
        "fingerprint": keyed.call.function.fingerprint.parts,
        "space": keyed.call.space,
        "versions": versions.versions(),
        "created": findings.created,
        **({"commit": findings.commit} if findings.commit else {}),
        **({} if ranked_by(findings) == TIME else {name: found[name] for name in SCORES}),
        **({"bits": findings.bits} if findings.bits else {}),
        "trials": found["trials"],
        "search": search | found["search"],
        # An empty program says that no process can rely on its trace, so that nobody adds it later.
        **({} if program is None else {"program": program}),
    }


def more_thorough(device: str, key: str, present: Entry, offered: Entry) -> Entry:
    """Chooses between the saved entry and a new one for the same problem.

    The new entry wins, unless the saved one comes from a more thorough search of the same space under the same versions
    and its config is at least as fast, and nobody has found it stale. An estimate never replaces a measured entry. An
    entry for another program also keeps the saved entry's result.

    Args:
        device: the kind of device.
        key: the key of the problem.
        present: the saved entry.
        offered: the new entry.
    """
    is_alike = all(present.get(part) == offered.get(part) for part in ("space", "versions", "fingerprint", "program"))
    then, now = Findings.from_json(present), Findings.from_json(offered)
    if now.is_estimate != then.is_estimate:
        return present if now.is_estimate else saved_program.with_others(offered, present)
    is_less = now.search.thoroughness < then.search.thoroughness
    is_kept = is_alike and is_less and now.figure >= then.figure and saved_program.STALE not in present
    return present if is_kept else saved_program.with_others(offered, present)
