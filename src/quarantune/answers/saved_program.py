"""The proof of a saved result: with its config, the call would run the measured program."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import jax

from quarantune.cache.entry_file import Entry
from quarantune.calls.call import BoundCall
from quarantune.calls.key import KeyedCall
from quarantune.calls.program import CallProgram, program_of
from quarantune.functions.binding import arguments_of
from quarantune.jax_internals import jax_backends
from quarantune.transport.programs import is_same
from quarantune.values.codec import JsonObject, canonical_json, short_hash
from quarantune.values.configs import Config
from quarantune.values.trial import Trial

OTHERS = "other_programs"
"""Name of the field, in the entry of the latest result, with results of other programs for the same key."""
STALE = "stale"
"""Name of the field, in a result, with the reason why `verify` tunes again. The next result replaces it in any case."""
_MOST_OTHERS = 7
_numbers = itertools.count()
_ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def measured_program(
    call: KeyedCall, best: Trial, defaults: Trial | None, *, is_here: bool, is_disputed: bool = False
) -> JsonObject:
    """Returns an entry's record of the program that a sweep has measured.

    Args:
        call: the call.
        best: the trial of the winner.
        defaults: the trial of the function's defaults; None if they did not run.
        is_here: whether the call would run in this process, which then also traces the program. It also does so for
            an engine's machine with the platform of this one.
        is_disputed: whether this process has found another program for a result of this key. If this process and the
            workers agree on the traced program but not on the lowered one, later checks compare only the traced one.

    Returns:
        The identities of both programs, and the lines of the winner's. Empty if workers trace another text than this
        process, so that no process can rely on its trace, or if the program calls tuned kernels.
    """
    found: JsonObject = {"winner": best.program, "defaults": "" if defaults is None else defaults.program}
    found["spelling"] = _spelling(call.call)
    if call.call.function.options.key_fn is not None:
        found["arguments"] = _arguments(call)
    if best.program and (is_here or _may_run_here(call)):
        ours = traced_apart(call, best.config)
        if ours is None or ours.text is None or not is_same(ours.identity, best.program):
            return {}
        found["lines"] = ours.text.short
        if is_disputed:
            found["winner"] = ours.identity
    return found if best.program else {}


def _may_run_here(call: KeyedCall) -> bool:
    """Returns whether this process has the platform of a call; False if it has initialised none."""
    return jax_backends.backends_initialized() and jax.default_backend() == call.platform


def traced_apart(call: KeyedCall, config: Config) -> CallProgram | None:
    """Traces the program of a call anew, apart from the traces of real calls.

    Returns:
        The program; None if it calls autotuned kernels, which do not tune here, or if `program_of` returns None.
    """
    from quarantune.sweep.proof import unheard  # most calls need neither
    from quarantune.transport.assignment import without_tuning

    with without_tuning(f"saved {next(_numbers)}") as reached, unheard():
        found = program_of(dataclasses.replace(call, programs={}), config, lowers=False)
        return None if reached else found


def results_in(entry: Entry) -> Iterator[Entry]:
    """Yields the results of an entry: the latest, then the results of other programs under the same key."""
    yield entry
    others = entry.get(OTHERS)
    yield from (each for each in (others if isinstance(others, list) else []) if isinstance(each, dict))


def with_others(offered: Entry, present: Entry) -> Entry:
    """Returns a new entry, with the present entry's results for other programs added."""
    program = _winner_of(offered)
    known = [each for each in results_in(present) if STALE not in each]
    kept = [each for each in known if program and (it := _winner_of(each)) and not is_same(it, program)]
    others = [{name: value for name, value in each.items() if name != OTHERS} for each in kept[:_MOST_OTHERS]]
    return {**offered, OTHERS: others} if others else offered


def why_another(entry: Entry, call: KeyedCall, config: Config) -> str:
    """Returns how the call's program differs from the measured program; empty if they are the same.

    With a `key_fn`, a result may be for other shapes, and then its program differs. The call accepts it, like a result
    without a program.

    Args:
        entry: the entry of the result, made under the present versions.
        call: the call.
        config: the config of the result.
    """
    program, winner = entry.get("program"), _winner_of(entry)
    if not winner or not isinstance(program, dict) or call.call.is_symbolic:  # other shapes have other programs
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
    """Returns the spelling of a call: JAX numbers arguments by it, and an omitted default is a constant."""
    return [len(call.args), sorted(call.kwargs)]


def _is_same_as_spelt(spelling: Any, call: KeyedCall, config: Config, winner: str) -> bool:
    """Returns whether the call, in another spelling, runs the winner's program. Traces it for this check alone."""
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
