"""Answers a call that demands the defaults' bits with the trials of an ordinary sweep, if these show all bits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from quarantune.calls.call import BoundCall
from quarantune.calls.key import KeyedCall
from quarantune.functions import batch
from quarantune.functions.description import as_structs
from quarantune.values.codec import canonical_json, decode_json
from quarantune.values.options import BITWISE, ROUNDING
from quarantune.values.trial import SAME, Outcome, Phase, Trial, with_bits


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
        args, kwargs = as_structs(call.args, call.kwargs)
        try:
            batch.halved(call.function.fn, args, kwargs, options.check_batch)
        except ValueError as error:
            raise ValueError(f"{call.name}: {error}") from None


def rounding_key(call: KeyedCall) -> str:
    """Returns the key that a call has under `numerics="rounding"`."""
    code = call.call.function.under(ROUNDING).fingerprint.digest
    return canonical_json(decode_json(call.id.key) | {"code": code})


def judged(trials: Mapping[int, Trial], defaults: Trial) -> dict[int, Trial]:
    """Returns the trials of an ordinary sweep as a sweep for the defaults' bits would have ended them.

    Left out are configs of unknown bits that may be the fastest with the defaults' bits.

    Args:
        trials: the trials by index.
        defaults: the trial of the defaults.
    """
    known = {index: with_bits(trial, defaults.digest) for index, trial in trials.items()}
    same = [trial.merit for trial in (defaults, *known.values()) if trial.bits == SAME and trial.merit is not None]
    best_ms = min(same, default=math.inf)
    found = {}
    for index, trial in known.items():
        if trial.outcome not in (Outcome.OK, Outcome.SLOW):
            found[index] = trial
        elif trial.bits == SAME and trial.time_ms is not None:
            # A config that others with other bits have ruled out may be the fastest of these.
            found[index] = dataclasses.replace(trial, outcome=Outcome.OK)
        elif trial.bits is not None:
            message = f"its output has {trial.bits} bits, compared with the defaults (numerics='bitwise')"
            found[index] = trial.without_times(Outcome.WRONG, message, phase=Phase.CHECK)
        elif trial.outcome is Outcome.SLOW and trial.merit is not None and trial.merit > best_ms:
            found[index] = trial
    return found
