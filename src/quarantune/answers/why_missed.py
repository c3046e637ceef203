"""Why no saved result serves a call, and the command that tunes it: the message of CacheMissError."""

from __future__ import annotations

import inspect
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quarantune.answers import guard
from quarantune.answers.answer import Origin, Situation
from quarantune.answers.layers import Layers, changed_versions, demands_versions, dict_or_empty
from quarantune.cache.entries import CacheRecord
from quarantune.calls.call import BoundCall
from quarantune.calls.key import KeyedCall
from quarantune.functions.describe import canonical_dtype
from quarantune.functions.names import PROGRAMS, cache_name, module_name
from quarantune.values.codec import canonical_json
from quarantune.values.texts import array_text

_FIX = "with QUARANTUNE_ON_MISS=tune"
_ALLOW = "allow defaults with QUARANTUNE_ON_MISS=default"


def explain(known: Layers, call: KeyedCall, now: Situation, *, may_run_untuned: bool) -> str:
    """Explains why no layer has a usable entry for a call: names the key, the layers and the nearest entry."""
    layers = [store.label for store in known.stores(now)]
    name = call.id.name
    wanted = f"{name}: nothing is cached for {canonical_json(call.readable)} on {call.id.device!r}"
    command = tuning_command(call)
    fix = f"tune it by `{command}`, or {_FIX}" if command else f"tune it {_FIX}"
    fix += f", or {_ALLOW}" if may_run_untuned else ", or give its tunables defaults"
    if now.settings.disable_cache:
        return f"{wanted}: the cache is off (QUARANTUNE_DISABLE_CACHE); {fix}"
    if missing := [str(it) for it in now.settings.cache_path if isinstance(it, Path) and not os.path.isdir(it)]:
        wanted += f" (QUARANTUNE_CACHE_PATH names {', '.join(map(repr, missing))}, which is not there)"
    candidates = [(_differences(call, record, now), store) for store, record in known.entries(now)]
    if not candidates:
        asked = ", ".join(layers)
        asked = f"{asked} holds no entry" if len(layers) == 1 else f"none of these holds an entry: {asked}"
        return f"{wanted}: {asked}; {fix}"
    differences, store = min(candidates, key=lambda candidate: len(candidate[0]))
    if not differences:
        differences = ["its config, which is not in the config space"]
        if other := known.differences.get(call.id):
            differences = [f"its program: {other}"]
        elif known.find(call, now) is not None:
            differences = ["prune_fn, which drops its config for this call"]
        elif known.estimated(call, now) is not None:
            differences = [f"its config, which is an estimate: {guard.why_not(Origin.ESTIMATED, call)}"]
    place = f" in {store.label}" if len(layers) > 1 else ""
    others = f" (asked: {', '.join(layers)})" if len(layers) > 1 else ""
    return f"{wanted}{others}; the nearest entry{place} differs in {'; '.join(differences)}; {fix}"


def tuning_command(call: KeyedCall) -> str:
    """Returns the command that tunes a call; empty if no command can name the function or the arguments."""
    function, fn = call.call.function, inspect.unwrap(call.call.function.fn)
    module, name = module_name(function.fn), cache_name(function.fn)
    name = name.removeprefix(f"{module}.")
    if "<" in name or call.jax_state or call.axes is not None:
        return ""
    if getattr(fn, "__module__", None) in PROGRAMS:
        module = getattr(fn, "__globals__", {}).get("__file__", "")
        module = os.path.relpath(module) if module.startswith(os.getcwd() + os.sep) else module
    try:
        words = [*_argument_words(call.call)]
    except ValueError:
        how = "--inputs MODULE:FUNCTION"
    else:
        how = f"--args {shlex.quote(' '.join(words))}"
    return f"quarantune tune {shlex.quote(f'{module}:{name}')} {how}" if module else ""


def _argument_words(call: BoundCall) -> Iterator[str]:
    """Yields the arguments of a call as `quarantune tune --args` takes them.

    Raises:
        ValueError: an argument can only be given by a function.
    """
    is_by_place = True
    for name, value in call.values.items():
        parameter = call.function.parameters[name]
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            if value:
                raise ValueError
            continue
        is_default = value is parameter.default
        is_by_place &= not is_default and not isinstance(value, str) and parameter.kind is not parameter.KEYWORD_ONLY
        if not is_default:
            yield _word(value) if is_by_place else f"{name}={_word(value)}"


def _word(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return array_text(value.shape, canonical_dtype(value.dtype))
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)) or (isinstance(value, str) and value.isidentifier()):
        return str(value)
    raise ValueError


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
    if demands_versions(call, now) and (changed_since := changed_versions(entry, call)):
        differences.append(f"versions: {changed_since}")
    return differences
