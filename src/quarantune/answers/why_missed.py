"""Why no saved result serves a call: the message of CacheMissError."""

from __future__ import annotations

from quarantune.answers.answer import Situation
from quarantune.answers.layers import Layers, changed_versions, dict_or_empty
from quarantune.cache.entries import CacheRecord
from quarantune.calls.key import KeyedCall
from quarantune.values.codec import canonical_json

_FIX = "tune it with QUARANTUNE_ON_MISS=tune"
_ALLOW = f"{_FIX}, or allow defaults with QUARANTUNE_ON_MISS=default"


def explain(known: Layers, call: KeyedCall, now: Situation, *, may_run_untuned: bool) -> str:
    """Explains why no layer has a usable entry for a call: names the key, the layers and the nearest entry."""
    layers = [store.label for store in known.stores(now)]
    name = call.id.name
    wanted = f"{name}: nothing is cached for {canonical_json(call.readable)} on {call.id.device!r}"
    fix = _ALLOW if may_run_untuned else f"{_FIX}, or give its tunables defaults"
    if now.settings.disable_cache:
        return f"{wanted}: the cache is off (QUARANTUNE_DISABLE_CACHE); {fix}"
    candidates = [(_differences(call, record, now), store) for store, record in known.entries(now)]
    if not candidates:
        asked = ", ".join(layers)
        asked = f"{asked} holds no entry" if len(layers) == 1 else f"none of these holds an entry: {asked}"
        return f"{wanted}: {asked}; {fix}"
    differences, store = min(candidates, key=lambda candidate: len(candidate[0]))
    if not differences:
        other = known.differences.get(call.id)
        differences = [f"its program: {other}" if other else "its config, which is not in the config space"]
    place = f" in {store.label}" if len(layers) > 1 else ""
    others = f" (asked: {', '.join(layers)})" if len(layers) > 1 else ""
    return f"{wanted}{others}; the nearest entry{place} differs in {'; '.join(differences)}; {fix}"


def _differences(call: KeyedCall, record: CacheRecord, now: Situation) -> list[str]:
    (_, _, device), entry = record
    differences = [] if device == call.id.device else [f"device: {device!r}, not {call.id.device!r}"]
    ours, theirs = call.readable, dict_or_empty(entry.get("key_values"))
    for name in dict.fromkeys([*ours, *theirs]):
        if theirs.get(name) != ours.get(name):
            differences.append(f"{name}: {canonical_json(theirs.get(name))}, not {canonical_json(ours.get(name))}")
    parts = entry.get("fingerprint")
    if isinstance(parts, dict) and (changed := call.call.function.fingerprint.differences(parts)):
        differences.append(f"the function's {', '.join(changed)}")
    if entry.get("space") != (wanted := call.call.space):
        then, size = dict_or_empty(entry.get("space")).get("configs", "unknown"), wanted.get("configs")
        differences.append(
            "the function that makes the configs" if size is None else f"the list of configs ({then} then, {size} now)"
        )
    if now.settings.version_check and (changed_since := changed_versions(entry)):
        differences.append(f"versions: {changed_since}")
    return differences
