"""The saved config of the call with the nearest sizes."""

from __future__ import annotations

import math

from quarantune.answers.answer import Answer, Origin, Situation
from quarantune.answers.layers import Layers, changed_versions
from quarantune.cache import problems
from quarantune.cache.entry_file import Entry
from quarantune.calls.call import BoundCall
from quarantune.calls.key import KeyedCall
from quarantune.values.codec import canonical_json, decode_json, leaves_of
from quarantune.values.configs import Config, format_config
from quarantune.values.trial import Findings

_LARGEST_FACTOR = 4
"""Largest factor between two sizes that may share a config. Beyond it the best config probably differs."""
_ROUNDING = 9


def nearest(call: KeyedCall, now: Situation, layers: Layers) -> Answer | None:
    """Returns the config of the entry whose sizes are nearest to the call's, with a warning; saves nothing.

    The entry must have the call's kind of device, code, dtypes and static arguments. Its config must be in the call's
    config space, and `prune_fn` must accept it. An estimate serves only if no measured result does.
    """
    candidates = []
    for store, (key, entry) in layers.entries(now):
        away = distance(key.problem_size, call.id.key) if key.device == call.id.device else None
        if away is not None:
            candidates.append(((Findings.from_json(entry).is_estimate, away), store, entry))
    refused = ""
    for _, store, entry in sorted(candidates, key=lambda candidate: candidate[0]):
        wanted, there = map(canonical_json, (call.readable, entry.get("key_values")))
        config = kept(entry, call.call)
        if config is None:
            refused = refused or f"{there} in {store.label} has {_why_refused(entry, call.call)}"
        elif layers.versions_serve(changed := changed_versions(entry, call), call, now, is_own=not store.read_only):
            problems.report_once(
                f"{call.id.name}: nothing is cached for {wanted}: using the config of the nearest entry, "
                f"{there} in {store.label}{f' (a nearer one is refused: {refused})' if refused else ''} "
                "(ON_MISS=nearest; this is said once)",
                topic=f"nearest {call.id.name}",
            )
            return Answer(Origin.NEAREST, config)
        else:
            refused = refused or f"{there} in {store.label} was made under {changed}"
    if refused:
        problems.report_once(
            f"{call.id.name}: ON_MISS=nearest does not use the nearest entry: {refused}; tune the call, or let its "
            "configs have that one",
            topic=f"nearest refused {call.id.name}",
        )
    return None


def kept(entry: Entry, call: BoundCall) -> Config | None:
    """Returns the config of an entry if the call has it and `prune_fn` accepts it; else None."""
    config = call.find(entry.get("config"), is_listed=True)
    return config if config is not None and call.keeps(config) else None


def _why_refused(entry: Entry, call: BoundCall) -> str:
    """Returns the config of an entry that `kept` refuses, and the reason."""
    config = call.find(entry.get("config"), is_listed=True)
    if config is None:
        return f"the config {canonical_json(entry.get('config'))}, which is not among the call's configs"
    return f"the config {format_config(config)}, which prune_fn drops for the call"


def distance(found: str, wanted: str) -> tuple[float, bool] | None:
    """Returns the distance between two keys; None if they differ in more than sizes, or by too much.

    Sizes are the dimensions of arrays. With a `key_fn`, all whole numbers that it returns are sizes.

    Args:
        found: the key of an entry.
        wanted: the key of a call.

    Returns:
        The sum of the absolute logarithms to base 2 of the factors between their sizes; and whether a found size is
        larger than the wanted size. Of two keys at one distance, the smaller sizes win.
    """
    try:
        there, here = (dict(leaves_of(decode_json(key))) for key in (found, wanted))
    except ValueError:
        return None
    if there.keys() != here.keys():
        return None
    factors = []
    for path, size in here.items():
        other = there[path]
        if type(size) is type(other) and size == other:
            continue
        is_size = "key_fn" in path or (path[-2:-1] == ("shape",) and (*path[:-2], "dtype") in here)
        if not (is_size and type(size) is int and type(other) is int and min(size, other) >= 1):
            return None
        if max(size, other) > _LARGEST_FACTOR * min(size, other):
            return None
        factors.append(math.log2(other / size))
    return (round(math.fsum(map(abs, factors)), _ROUNDING), any(factor > 0 for factor in factors))
