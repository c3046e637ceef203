"""`quarantune fit`: fits rules on calls of functions, given or recorded."""

from __future__ import annotations

import argparse
import contextlib
import functools
import time
from collections.abc import Iterator
from typing import Any, TypeAlias

from quarantune.api.contextual import Contextual
from quarantune.api.fit import aim_of
from quarantune.api.fit import fit as fit_rules
from quarantune.api.tuner import Tuned
from quarantune.calls.rebuilt import described_settings
from quarantune.cli import calls
from quarantune.cli.call_texts import GivenCall
from quarantune.cli.functions import check_cache, loaded_by_name, made_again, recorded_calls
from quarantune.cli.output import DONE, FAILED, Output, input_errors, message_of, printable_lines
from quarantune.devices import discovery
from quarantune.values import blocks
from quarantune.values.codec import JsonObject, canonical_json
from quarantune.values.texts import printable
from quarantune.values.trial import TuningFailedError

_Group: TypeAlias = tuple[Tuned, JsonObject, list[tuple[GivenCall, float]]]
"""A function, JAX's settings, and its calls with their weights."""


def fit(options: argparse.Namespace, out: Output) -> int:
    """Fits rules on the calls of each function, and prints them with the losses to expect."""
    began_s, records, is_right = time.monotonic(), [], True
    with blocks.settings(on_miss="tune", record=None):
        check_cache()
        for tuned, jax_settings, weighted in _groups(options, out):
            left_s = None
            if options.time_budget is not None:
                left_s = max(options.time_budget - (time.monotonic() - began_s), 1e-3)
            with described_settings(jax_settings), input_errors(ValueError, TypeError, ImportError):
                aim = aim_of(options.max_configs, options.max_loss / 100, options.by, left_s)
                try:
                    given = [(call.args, dict(call.kwargs)) for call, _ in weighted]
                    report = fit_rules(tuned._tuner, given, [weight for _, weight in weighted], aim)
                except (TuningFailedError, ValueError) as error:
                    if options.recorded is None and isinstance(error, ValueError):
                        raise
                    out.line(printable(message_of(error)))
                    records.append({"name": tuned.function.name, "error": message_of(error)})
                    is_right = False
                    continue
            out.line(printable_lines(str(report)))
            records.append(report.to_dict() | {"error": None})
    if not records:
        out.line("there are no calls to fit a rule on")
    out.json(records)
    return DONE if is_right and records else FAILED


def _groups(options: argparse.Namespace, out: Output) -> Iterator[_Group]:
    """Yields the calls that the command means, by their function and JAX's settings."""
    if options.recorded is None:
        tuned = calls.load_kernel(options.function, to_do="fit a rule for")
        yield tuned, {}, [(call, 1.0) for call in calls.make(tuned.function, options)]
        return
    named, found = recorded_calls(options)
    loaded: Any = functools.cache(loaded_by_name) if named is None else lambda *_: named
    here, groups = discovery.platform_and_kind(None)[1], dict[Any, _Group]()
    for call in found:
        settings = dict(call.jax_settings)
        with contextlib.ExitStack() as block:
            with contextlib.suppress(Exception):  # if JAX refuses settings, `made_again` sees another key
                block.enter_context(described_settings(settings))
            status, made, reason = made_again(call, here, loaded, force=True)
        if made is None or isinstance(made[0], Contextual):
            out.line(printable(f"left out: {call}: {reason or status}"))
            continue
        group = groups.setdefault((call.name, canonical_json(settings)), (made[0], settings, []))
        group[2].append((made[1], float(call.count)))
    yield from groups.values()
