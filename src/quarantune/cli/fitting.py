"""`quarantune fit`, which fits rules on calls, and the sample of `cache verify`, which shows the rules' true losses."""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from quarantune.answers import by_rule, recording
from quarantune.answers.answer import Situation
from quarantune.answers.recording import RecordedCall
from quarantune.api import fit as fits
from quarantune.api.tuner import Tuned
from quarantune.calls.key import keyed_to_tune
from quarantune.calls.rebuilt import described_settings
from quarantune.cli import calls, functions
from quarantune.cli.call_texts import GivenCall
from quarantune.cli.functions import Load
from quarantune.cli.output import DONE, FAILED, InputError, Output, counted, message_of, printable_lines
from quarantune.devices import discovery
from quarantune.values import blocks
from quarantune.values.codec import JsonObject, as_json, canonical_json, text_of
from quarantune.values.configs import format_config
from quarantune.values.errors import SandboxError, TuningFailedError


def fit(options: argparse.Namespace, out: Output) -> int:
    """Fits rules on the calls of each function, and prints them with the losses to expect."""
    began_s, records, is_right = time.monotonic(), list[JsonObject](), True
    with blocks.settings(on_miss="tune", record=None):
        functions.check_cache()
        for tuned, jax_settings, given in _groups(options, out):
            spent_s = time.monotonic() - began_s
            left_s = None if options.time_budget is None else max(options.time_budget - spent_s, 1e-3)
            arguments, weights = [(call.args, dict(call.kwargs)) for call, _ in given], [weight for _, weight in given]
            try:
                with described_settings(jax_settings):
                    loss = options.max_loss / 100
                    report = fits.fit(tuned._tuner, arguments, weights, options.max_configs, loss, left_s)
            except (TuningFailedError, ValueError, TypeError) as error:  # other functions continue
                if options.recorded is None and not isinstance(error, TuningFailedError):
                    raise InputError(message_of(error)) from error
                text, record, is_right = message_of(error), {"name": tuned.function.name, "error": str(error)}, False
            else:
                text, record = str(report), report.to_json() | {"error": None}
            out.line(printable_lines(text))
            records.append(record)
    if not records:
        out.line("there are no calls to fit a rule on")
    out.json(records)
    return DONE if is_right and records else FAILED


def _groups(options: argparse.Namespace, out: Output) -> Iterator[tuple[Tuned, Any, list[tuple[GivenCall, float]]]]:
    """Yields functions, JAX's settings, and the calls of the command with their weights."""
    if options.recorded is None:
        tuned = calls.load_kernel(options.function, to_do="fit a rule for")
        yield tuned, {}, [(call, 1.0) for call in calls.make(tuned.function, options)]
        return
    groups: dict[str, tuple[Tuned, Any, list[tuple[GivenCall, float]]]] = {}
    for call, status, made, reason in _made(*functions.recorded_calls(options, options.recorded)):
        if made is None:
            out.line(printable_lines(f"left out: {call}: {reason or status}"))
        else:
            group = groups.setdefault(canonical_json([call.name, call.jax_settings]), (made[0], call.jax_settings, []))
            group[2].append((made[1], float(call.count)))
    yield from groups.values()


def _made(loaded: Load, found: Iterable[RecordedCall]) -> Iterator[tuple[RecordedCall, str, Any, str]]:
    """Yields recorded calls, each with its status, its function and arguments or None, and the reason for that."""
    here = discovery.platform_and_kind(None)[1]
    for call in found:
        with contextlib.ExitStack() as block:
            with contextlib.suppress(Exception):  # if JAX refuses settings, `made_again` sees another key
                block.enter_context(described_settings(call.jax_settings))
            status, made, reason = functions.made_again(call, here, loaded, again=False)
            yield call, status, made, reason


def sample(tuned: Sequence[Tuned], number: int, out: Output, *, saves: bool) -> list[JsonObject]:
    """Tunes calls that rules have answered and nobody tuned, drawn at random, and prints the rules' true losses."""
    found, records = recording.read(blocks.current().cache_dir, recording.RULED), list[JsonObject]()
    random.shuffle(found)
    named = {each.function.name: each for each in tuned}
    for call, status, made, _ in _made(lambda _, name: named.get(name, "it was not named"), found):
        is_due = status == functions.TUNED and len(records) < number
        if is_due and (record := _sampled(call, *made, saves=saves)) is not None:
            records.append(record)
            out.line(printable_lines(record["text"]))
    losses = [record["loss"] for record in records if record["loss"] is not None]
    mean = f": true loss {statistics.fmean(losses):.1%} on average, {max(losses):.1%} at worst" if losses else ""
    out.line(f"{counted(len(records), 'call')} that a rule answered and nobody tuned{mean}")
    return records


def _sampled(recorded: RecordedCall, fn: Tuned, given: GivenCall, *, saves: bool) -> JsonObject | None:
    """Returns the losses of a rule for a call, measured next to the best config; None if no rule answers it now."""
    call = keyed_to_tune(fn._tuner.bind(given.args, given.kwargs))
    answer = by_rule.by_rule(call, Situation.of(call.call), fn._tuner.rungs.layers)
    if isinstance(answer, str) or answer.config is None:
        return None
    expected, loss, best, reason = answer.findings.expected_loss or 0.0, math.nan, None, ""
    try:
        with blocks.settings(on_miss="tune", record=None, disable_cache=not saves):
            best = fn._tuner.tune(call.call).best_config
        ours, theirs = text_of(answer.config), text_of(best)
        times_ms = fits.times_ms(call.call, [best, *([] if ours == theirs else [answer.config])])
        loss = times_ms[ours] / min(times_ms[ours], times_ms[theirs]) - 1
        reason = f"true loss {loss:.1%} with {format_config(answer.config)}; the best is {format_config(best)}"
    except (TuningFailedError, SandboxError) as error:
        reason = message_of(error)
    text = f"{recorded}: expected loss {expected:.1%}, {reason}"
    told = {"call": str(recorded), "config": as_json(answer.config), "best_config": as_json(best), "text": text}
    return told | {"expected_loss": expected, "loss": loss if math.isfinite(loss) else None}
