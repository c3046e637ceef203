"""Answers a call that demands the defaults' bits with the trials of an ordinary sweep, if these show all bits."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from quarantune.answers.answer import Situation
from quarantune.answers.layers import open_store
from quarantune.calls.call import BoundCall
from quarantune.calls.key import KeyedCall
from quarantune.functions import batch
from quarantune.functions.description import as_structs
from quarantune.sweep.limits import SweepLimits
from quarantune.sweep.request import Swept
from quarantune.tuning.claim_and_journal import ClaimAndJournal
from quarantune.values.codec import DamageError, canonical_json, decode_json
from quarantune.values.options import BITWISE, ROUNDING
from quarantune.values.trial import SAME, UNTUNED, Findings, Outcome, Phase, Searched, Trial, with_bits


def check(call: BoundCall) -> None:
    """Raises if a call cannot be tuned under its numerics.

    Raises:
        ValueError: it has no defaults whose bits to keep, or its arguments have no batch.
    """
    options = call.function.options
    if options.numerics == BITWISE and call.untuned is None:
        raise ValueError(
            f"{call.name}: numerics='bitwise' keeps the bits of the function's own defaults, and it cannot run with "
            f"them: give every tunable a default that prune_fn keeps, or leave numerics (or QUARANTUNE_NUMERICS) out"
        )
    if options.check_batch is not None:
        try:
            batch.bound_batch(call.function.fn, *as_structs(call.args, call.kwargs), options.check_batch)
        except ValueError as error:
            raise ValueError(f"{call.name}: {error}") from None


def known(call: KeyedCall, now: Situation, limits: SweepLimits) -> tuple[dict[int, Trial], Swept, Searched] | None:
    """Returns the trials of an ordinary sweep as a sweep for the defaults' bits would have ended them.

    Args:
        call: the call, whose numerics are exact.
        now: its situation.
        limits: the limits of the sweep.

    Returns:
        The trials by index, the end of the sweep, and how thorough it was. None if there is no such sweep by the same
        versions, or if a config of unknown bits may be the fastest with the defaults' bits.
    """
    code = call.call.function.under(ROUNDING).fingerprint.digest
    ordinary = call.id._replace(key=canonical_json(decode_json(call.id.key) | {"code": code}))
    entry = open_store(now.settings).get(*ordinary)
    if entry is None or entry.get("space") != call.call.space:
        return None
    configs, strict = call.call.configs, dataclasses.replace(now.settings, version_check=True)
    records = ClaimAndJournal(dataclasses.replace(call, id=ordinary), dataclasses.replace(now, settings=strict), limits)
    with contextlib.suppress(DamageError, KeyError, TypeError):
        untuned, default, searched = records.untuned(), call.call.default_index, Findings.from_json(entry).search
        trials = records.read(configs) | ({} if untuned is None or default is not None else {UNTUNED: untuned})
        for finalist in records.finalists():
            index = configs.find(finalist.config)
            index = UNTUNED if index is None else index
            if index in trials and finalist.time_ms is not None:
                best_ms = min(finalist.time_ms, trials[index].merit or math.inf)
                timed: Any = {"time_ms": finalist.time_ms, "own_ms": best_ms, "samples_ms": finalist.samples_ms}
                trials[index] = dataclasses.replace(trials[index], **timed)
        found = _judged(trials, trials[UNTUNED if default is None else default])
        untuned = found.pop(UNTUNED, None)
        pruned = call.call.pruned if searched.seen == searched.space_size else ()
        if found.keys() == trials.keys() - {UNTUNED} and len(found) + len(pruned) >= (searched.seen or 0):
            return found, Swept(untuned=untuned), searched
    return None


def _judged(trials: Mapping[int, Trial], defaults: Trial) -> dict[int, Trial]:
    """Returns the trials with their outcomes under exact numerics, without those whose unknown bits may matter."""
    known = {index: with_bits(trial, defaults.digest) for index, trial in trials.items()}
    best_ms = min((trial.merit or math.inf for trial in known.values() if trial.bits == SAME), default=0.0)
    found = {}
    for index, trial in known.items():
        is_timed = trial.outcome in (Outcome.OK, Outcome.SLOW)
        if is_timed and (trial.bits == SAME or trial.config == defaults.config):
            # Others with other bits may have ruled it out, and it may be the fastest of these.
            time_ms = trial.time_ms if trial.outcome is Outcome.OK else trial.merit
            found[index] = dataclasses.replace(trial, outcome=Outcome.OK, time_ms=time_ms, message="")
        elif is_timed and trial.bits is not None:
            message = f"its output has {trial.bits} bits, compared with the defaults (numerics='bitwise')"
            found[index] = trial.without_times(Outcome.WRONG, message, phase=Phase.CHECK)
        elif not is_timed or (trial.outcome is Outcome.SLOW and (trial.merit or 0.0) > best_ms):
            found[index] = trial
    return found
