"""Measures the true loss of rules: tunes some of the calls that they answered and that nobody tuned."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from quarantune.answers.answer import Situation
from quarantune.answers.by_rule import by_rule
from quarantune.answers.layers import Layers
from quarantune.answers.memory import Memory
from quarantune.answers.recording import RULED, RecordedCall, Tune, read
from quarantune.calls.call import BoundCall, TunedFunction
from quarantune.calls.key import KeyedCall, keyed_to_tune
from quarantune.calls.rebuilt import CannotRebuildError, described_arguments, described_settings
from quarantune.engine.place import place_of
from quarantune.tuning.verification import SampledCall, swept, times_of
from quarantune.values import blocks
from quarantune.values.codec import text_of
from quarantune.values.configs import Config
from quarantune.values.texts import first_line
from quarantune.values.trial import SandboxError, TuningFailedError


def sampled(
    functions: Iterable[TunedFunction], directory: Path, number: int, *, tune: Tune, saves: bool = False
) -> list[SampledCall]:
    """Tunes some calls that rules have answered and that nobody tuned, drawn at random.

    Args:
        functions: the functions of the calls; calls of others do not count.
        directory: the cache directory, which has the rules and the records of the calls.
        number: the most calls to tune.
        tune: tunes for a call now.
        saves: whether to save the results.
    """
    named = {function.name: function for function in functions}
    recorded = [call for call in read(directory, RULED) if call.name in named]
    random.shuffle(recorded)
    found = list[SampledCall]()
    for record in recorded:
        if len(found) == number:
            break
        with blocks.settings(cache_dir=directory, record=None, on_miss="rule"), described_settings(record.jax_settings):
            if (sample := _sampled(named[record.name], record, tune, saves=saves)) is not None:
                found.append(sample)
    return found


def _sampled(function: TunedFunction, record: RecordedCall, tune: Tune, *, saves: bool) -> SampledCall | None:
    """Returns the losses for a call; None if its rule would not answer it here and now."""
    try:
        args, kwargs = described_arguments(dict(record.arguments), function)
        call = keyed_to_tune(BoundCall(function, args, kwargs), place_of(blocks.current()).device())
    except (CannotRebuildError, TypeError, ValueError):
        return None
    now, layers = Situation.of(call.call), Layers(function, Memory())
    if RecordedCall.of(call).identity != record.identity or layers.find(call, now) is not None:
        return None
    answer = by_rule(call, now, layers)
    if isinstance(answer, str) or answer.config is None:
        return None
    about: Any = {"call": str(record), "config": answer.config, "expected_loss": answer.findings.expected_loss or 0.0}
    try:
        with blocks.settings(on_miss="tune", disable_cache=not saves):
            best = tune(call.call).best_config
        return SampledCall(**about, best_config=best, loss=_loss(call, answer.config, best, tune))
    except (SandboxError, TuningFailedError) as error:
        return SampledCall(**about, reason=first_line(error))


def _loss(call: KeyedCall, config: Config, best: Config, tune: Tune) -> float | None:
    """Returns how much longer a config takes than the best one, both measured in one sweep."""
    ours, theirs = text_of(config), text_of(best)
    times_ms = times_of(swept(call.call, [best, *([config] if ours != theirs else [])], tune))
    ours_ms = times_ms.get(ours, math.inf)
    return ours_ms / min(ours_ms, times_ms.get(theirs, math.inf)) - 1 if ours_ms < math.inf else None
