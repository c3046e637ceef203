"""`quarantune tune --recorded`: tunes the calls that programs have recorded, the most frequent first."""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from quarantune import cache
from quarantune.api import ahead
from quarantune.api.contextual import Contextual
from quarantune.api.tune_many import MOST, tune_many
from quarantune.cli import calls
from quarantune.cli.call_texts import Call
from quarantune.cli.output import DONE, FAILED, InputError, Output, counted, message_of
from quarantune.cli.tune import End, told, told_failure
from quarantune.devices import discovery
from quarantune.resolve import engines, recorded
from quarantune.resolve.rebuilding import described_arguments, described_settings
from quarantune.resolve.recorded import RecordedCall
from quarantune.values import settings as environment
from quarantune.values.call_text import call_text
from quarantune.values.json_object import JsonObject
from quarantune.values.texts import shown
from quarantune.values.trial import TuningFailedError

_TUNED, _KNOWN, _FAILED, _REFUSED = "tuned", "tuned before", "failed", "not possible here"


def tune(options: argparse.Namespace, out: Output) -> int:
    """Tunes recorded calls that are not tuned yet, and names those that could not be."""
    directory = Path(options.recorded).expanduser()
    if not directory.is_dir():
        raise InputError(f"--recorded {shown(options.recorded)} is no directory: name that of QUARANTUNE_RECORD")
    named = None if options.function is None else calls.load_tuned(options.function)
    name = None if named is None else ahead.function_of(named).name
    found = [call for call in recorded.read(directory) if name in (None, call.name)]
    counts, records = Counter[str](), []
    for call, status, (record, text) in _ends(found, options, named):
        about = {"function": call.name, "call": call_text(call.arguments), "count": call.count, "status": status}
        records.append(about | record)
        if status in (_TUNED, _FAILED, _REFUSED):
            out.line(f"{call}, met {counted(call.count, 'time')}: {text}")
        counts[status] += 1
    ends = ", ".join(f"{number} {status}" for status, number in counts.items()) or "nothing to tune"
    out.line(f"{counted(len(found), 'call')} recorded in {str(directory)!r}: {ends}")
    out.json(records)
    return FAILED if counts[_FAILED] or counts[_REFUSED] else DONE


_Made = tuple[ahead.Tuned, Call]
_Ended = tuple[RecordedCall, str, tuple[JsonObject, str]]
"""A call, what became of it, and that as JSON and as text."""


def _ends(found: Sequence[RecordedCall], options: argparse.Namespace, named: ahead.Tuned | None) -> Iterator[_Ended]:
    """Yields what became of each call."""
    engine = engines.device(environment.current())
    loaded = functools.cache(_loaded) if named is None else lambda *_: named
    here = discovery.platform_and_kind(None)[1] if engine is None else engine.device_kind
    ends_s = math.inf if options.time_budget is None else time.monotonic() + options.time_budget
    for _, alike in itertools.groupby(found, key=lambda call: cache.canonical_json(call.jax_settings)):
        while batch := [*itertools.islice(alike, 1 if engine is None else MOST)]:
            ready: list[tuple[RecordedCall, _Made]] = []
            with contextlib.ExitStack() as block:
                with contextlib.suppress(Exception):  # whatever JAX refuses makes the calls others than they were
                    block.enter_context(described_settings(batch[0].jax_settings))
                left_s = ends_s - time.monotonic()
                for call in batch:
                    status, made, reason = _made_again(call, here, loaded, force=options.force)
                    if status == _TUNED and left_s <= 0:
                        status, made = "left for the next run", None
                    if made is None:
                        yield call, status, told_failure(TuningFailedError(reason or status, trials=(), key=""))
                    elif status == _KNOWN:
                        yield _ended(call, made, status)
                    else:
                        ready.append((call, made))
                if left_s < math.inf:
                    block.enter_context(environment.settings(time_budget=max(left_s, 1e-3)))
                block.enter_context(environment.settings(always_tune=options.force))
                if engine is not None:
                    with contextlib.suppress(ExceptionGroup):  # these fail once more below
                        tune_many((fn, to.args, to.kwargs) for _, (fn, to) in ready if not isinstance(fn, Contextual))
                yield from (_ended(call, made, _TUNED) for call, made in ready)


def _made_again(
    call: RecordedCall, here: str, loaded: Callable[[str, str], ahead.Tuned | str], *, force: bool
) -> tuple[str, _Made | None, str]:
    """Returns what is to become of a call, and its function and arguments without values, or why there are none."""
    if call.device != here:
        return f"for {call.device}, and not for {here}", None, ""
    try:
        if isinstance(tuned := loaded(call.function, call.name), str):
            return _REFUSED, None, tuned
        args, kwargs = described_arguments(dict(call.arguments), ahead.function_of(tuned))
        if not ahead.is_same(call, tuned, args, kwargs):
            return _REFUSED, None, "made again, it has another key, as inside shard_map: tune it where it is called"
        status = _TUNED if force or not ahead.is_known(tuned, args, kwargs) else _KNOWN
    except Exception as error:  # of the author's functions, too
        return _REFUSED, None, f"it cannot be made again ({message_of(error)}): tune it with --inputs"
    return status, (tuned, Call(args, kwargs)), ""


def _loaded(function: str, name: str) -> ahead.Tuned | str:
    """Imports a function, or the tuner of it in its module; returns what was wrong where that fails."""
    module = function.partition(":")[0]
    if "<locals>" in function or not module.replace(".", "_").isidentifier():  # a path, for one
        return f"{function!r} is at the top of no module: tune it in Python, by quarantune.tune_many of its recording"
    try:
        found, missing = calls.load(function), f"{module!r} tunes nothing of the name {name!r}."
    except InputError as error:
        found, missing = None, str(error)
    for candidate in (found, *vars(sys.modules.get(module, object)).values()):
        if ahead.is_tuned(candidate) and ahead.function_of(candidate).name == name:
            return candidate
    return f"{missing} Or name it: quarantune tune PATH/FILE.py:NAME --recorded DIR"


def _ended(call: RecordedCall, made: _Made, status: str) -> _Ended:
    tuned, again = made
    ended: End
    try:
        ended = ahead.result_of(tuned, again.args, again.kwargs, anew=False)
    except Exception as error:  # the others are tuned all the same
        failed = TuningFailedError(message_of(error), trials=(), key="")
        ended, status = error if isinstance(error, TuningFailedError) else failed, _FAILED
    return call, status, told(tuned, again, ended, was_known=status == _KNOWN)
