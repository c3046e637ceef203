"""Explains why a call missed: which layers were asked, and how their nearest entry differs from the call."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from quarantune import cache
from quarantune.resolve.call_key import KeyedCall
from quarantune.resolve.entries import changed_versions, dict_or_empty
from quarantune.resolve.layers import Found
from quarantune.values.settings import Settings

_FIX = "tune it with QUARANTUNE_ON_MISS=tune"
_ALLOW = f"{_FIX}, or allow defaults with QUARANTUNE_ON_MISS=default"


def explain(keyed: KeyedCall, layers: Sequence[str], entries: Iterable[Found], settings: Settings) -> str:
    """Returns a message about a call for which no layer has a usable entry.

    Args:
        keyed: the call.
        layers: the labels of the layers that were asked.
        entries: all entries of the function in these layers.
        settings: the operator's settings.
    """
    name = keyed.call.name
    wanted = f"{name}: nothing is cached for {cache.canonical_json(keyed.readable)} on {keyed.key.device!r}"
    fix = f"{_FIX}, or give its tunables defaults" if keyed.call.untuned is None else _ALLOW
    if settings.disable_cache:
        return f"{wanted}: the cache is off (QUARANTUNE_DISABLE_CACHE); {fix}"
    candidates = [(_differences(keyed, found, settings), found) for found in entries]
    if not candidates:
        asked = ", ".join(layers)
        asked = f"{asked} holds no entry" if len(layers) == 1 else f"none of these holds an entry: {asked}"
        return f"{wanted}: {asked}; {fix}"
    differences, found = min(candidates, key=lambda candidate: len(candidate[0]))
    differences = differences or ["its config, which is not in the config space"]
    place = f" in {found.layer.label}" if len(layers) > 1 else ""
    others = f" (asked: {', '.join(layers)})" if len(layers) > 1 else ""
    return f"{wanted}{others}; the nearest entry{place} differs in {'; '.join(differences)}; {fix}"


def describe_same_call(found: str, wanted: str) -> bool:
    """Returns whether two keys describe the same call, made of whichever code."""
    try:
        ours, theirs = json.loads(wanted), json.loads(found)
    except (ValueError, RecursionError):
        return False
    if not isinstance(theirs, dict):
        return False
    return all(ours.get(part) == theirs.get(part) for part in ("call", "jax"))


def _differences(keyed: KeyedCall, found: Found, settings: Settings) -> list[str]:
    entry = found.entry
    differences = [] if found.device == keyed.key.device else [f"device: {found.device!r}, not {keyed.key.device!r}"]
    ours, theirs = keyed.readable, dict_or_empty(entry.get("key_values"))
    for name in dict.fromkeys([*ours, *theirs]):
        if theirs.get(name) != ours.get(name):
            differences.append(
                f"{name}: {cache.canonical_json(theirs.get(name))}, not {cache.canonical_json(ours.get(name))}"
            )
    parts = entry.get("fingerprint")
    if isinstance(parts, dict) and (changed := keyed.call.function.fingerprint.differences(parts)):
        differences.append(f"the function's {', '.join(changed)}")
    if entry.get("space") != (wanted := keyed.call.space):
        then, now = dict_or_empty(entry.get("space")).get("configs", "unknown"), wanted.get("configs")
        differences.append(
            "the function that makes the configs" if now is None else f"the list of configs ({then} then, {now} now)"
        )
    if settings.version_check and (changed_since := changed_versions(entry)):
        differences.append(f"versions: {changed_since}")
    return differences
