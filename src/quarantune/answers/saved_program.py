"""The proof of a saved result: the call would run the program that was measured, with the config of the result."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Iterator
from typing import Any

from quarantune.cache.entry_file import Entry
from quarantune.calls.call import BoundCall
from quarantune.calls.key import KeyedCall
from quarantune.calls.program import CallProgram, program_of
from quarantune.functions.binding import arguments_of
from quarantune.transport.programs import is_same
from quarantune.values.codec import JsonObject, canonical_json, short_hash
from quarantune.values.configs import Config
from quarantune.values.trial import Trial

OTHERS = "other_programs"
"""The results for the same key that other programs have, within the entry of the latest."""
_MOST_OTHERS = 7
_numbers = itertools.count()
_ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def measured_program(
    call: KeyedCall, best: Trial, defaults: Trial | None, *, is_here: bool, is_disputed: bool = False
) -> JsonObject:
    """Returns what an entry holds of the program that a sweep has measured.

    Args:
        call: the call.
        best: the trial of the winner.
        defaults: the trial of the function's defaults; None if they did not run.
        is_here: whether the call would run in this process, which then traces the program, too.
        is_disputed: whether this process has found another program for a result of this key. If it traces the same
            program as workers and lowers another, only what is traced is compared from now on.

    Returns:
        The identities of both programs, and the lines of the winner's; empty if workers trace another text of it than
        this process, so that no process could be sure to trace the same one, or if it calls kernels that are tuned.
    """
    found: JsonObject = {"winner": best.program, "defaults": "" if defaults is None else defaults.program}
    found["spelling"] = _spelling(call.call)
    if call.call.function.options.key_fn is not None:
        found["arguments"] = _arguments(call)
    if is_here and best.program:
        ours = traced_apart(call, best.config)
        if ours is None or ours.text is None or not is_same(ours.identity, best.program):
            return {}
        found["lines"] = ours.text.short
        if is_disputed:
            found["winner"] = ours.identity
    return found if best.program else {}


def traced_apart(call: KeyedCall, config: Config) -> CallProgram | None:
    """Returns the traced program of a call, apart from all traces that calls use.

    Returns:
        The program; None if it calls kernels, which are not tuned for this, or as for `program_of`.
    """
    from quarantune.sweep.proof import unheard  # calls that are found need neither
    from quarantune.transport.assignment import without_tuning

    with without_tuning(f"saved {next(_numbers)}") as reached, unheard():
        found = program_of(dataclasses.replace(call, programs={}), config, lowers=False)
        return None if reached else found


def results_in(entry: Entry) -> Iterator[Entry]:
    """Yields the results of an entry: the latest one, and those that other programs have under the same key."""
    yield entry
    others = entry.get(OTHERS)
    yield from (each for each in (others if isinstance(others, list) else []) if isinstance(each, dict))


def with_others(offered: Entry, present: Entry) -> Entry:
    """Returns a new entry with the results that the present one has for other programs."""
    program = _winner_of(offered)
    kept = [each for each in results_in(present) if program and (it := _winner_of(each)) and not is_same(it, program)]
    others = [{name: value for name, value in each.items() if name != OTHERS} for each in kept[:_MOST_OTHERS]]
    return {**offered, OTHERS: others} if others else offered


def why_another(entry: Entry, call: KeyedCall, config: Config) -> str:
    """Returns how the program that a call would run differs from the one that was measured; empty if it is the same.

    A result of a `key_fn` may be for other shapes, whose program is another one; it is used as it is, like a result
    without a program.

    Args:
        entry: the entry of the result, made under the present versions.
        call: the call.
        config: the config of the result.
    """
    program, winner = entry.get("program"), _winner_of(entry)
    if not winner or not isinstance(program, dict):
        return ""
    if "arguments" in program and program["arguments"] != _arguments(call):
        return ""
    ours = program_of(call, config)
    if ours is None:
        return ""
    if ours.text is None:
        return f"it cannot be traced: {ours.error}"
    spelling = program.get("spelling", _spelling(call.call))
    if is_same(ours.identity, winner) or _is_same_as_spelt(spelling, call, config, winner):
        return ""
    lines = program.get("lines")
    return ours.text.difference(lines) if isinstance(lines, str) and lines else "its text is another one"


def as_spelt(entry: Entry, call: BoundCall) -> BoundCall:
    """Returns a call spelt as the one that was measured, whose program may be another; itself if that is unknown."""
    program = entry.get("program")
    spelt = _as_spelt(program.get("spelling"), call) if isinstance(program, dict) else None
    return spelt or call


def _spelling(call: BoundCall) -> list[Any]:
    """Returns how a call is spelt: JAX numbers arguments by it, and a default that is left out is a constant."""
    return [len(call.args), sorted(call.kwargs)]


def _is_same_as_spelt(spelling: Any, call: KeyedCall, config: Config, winner: str) -> bool:
    """Returns whether the call runs a program if it is spelt as another one; that is traced for this alone."""
    spelt = _as_spelt(spelling, call.call)
    if spelt is None:
        return False
    found = program_of(dataclasses.replace(call, call=spelt, programs={}), config)
    return found is not None and is_same(found.identity, winner)


def _as_spelt(spelling: Any, call: BoundCall) -> BoundCall | None:
    """Returns a call with another spelling; None if it has that spelling, or does not fit it."""
    values, parameters = arguments_of(call.bound), list(call.function.parameters.values())
    if spelling == _spelling(call) or any(each.kind in _ANY_NUMBER for each in parameters):
        return None
    try:
        count, names = spelling
        args = tuple(values[each.name] for each in parameters[:count])
        return BoundCall(call.function, args, {name: values[name] for name in names})
    except (KeyError, TypeError, ValueError):  # a file may hold anything
        return None


def _winner_of(entry: Entry) -> str:
    program = entry.get("program")
    winner = program.get("winner") if isinstance(program, dict) else ""
    return winner if isinstance(winner, str) else ""


def _arguments(call: KeyedCall) -> str:
    return short_hash(canonical_json(call.arguments))
