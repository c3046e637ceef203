"""`quarantune report`: pages about the results of a function, and about sweeps without one."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import time
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from quarantune.cache import sweeps
from quarantune.cache.entries import CacheKey
from quarantune.cache.file_names import safe_name
from quarantune.cache.store import Store
from quarantune.cache.sweeps import Sweep, SweepState
from quarantune.cli.output import DONE, InputError, Output, counted, input_errors
from quarantune.cli.saved import another, opened
from quarantune.host.shared_files import advice
from quarantune.results import unfinished
from quarantune.results.from_cache import cached_result, cached_results, page_rules
from quarantune.results.report_data import ResultData
from quarantune.values.codec import JsonObject, canonical_json
from quarantune.values.texts import did_you_mean, printable, shown

_REWRITE_S = 1.0
"""Seconds between two writings of the page of a running sweep."""
_REST = 4.0
"""Least seconds between two writings, as a multiple of the time that one takes."""
_ENDED_S = 2.0
"""Seconds without a running sweep after which there is nothing more to watch; one call is often tuned after another."""


def report(options: argparse.Namespace, out: Output) -> int:
    """Writes the page."""
    if options.running or options.watch:
        return _report_running(options, out)
    parts = [(options.name, "")] if options.after is None else [(options.name, "before"), (options.after, "after")]
    results = [data for name, when in parts for data in _results(name, options.device, when)]
    rules = [rule for name, when in parts for rule in _rules(name, options.device, when)]
    path = _page_of(options, results[0].result.name)
    _write_page(path, results, rules)
    _say_written(options, out, path, results)
    return DONE


def _page_of(options: argparse.Namespace, name: str) -> Path:
    return Path(options.output or f"{safe_name(name)}.html").absolute()


def _write_page(
    path: Path, results: Sequence[ResultData], rules: Sequence[JsonObject] = (), *, reload_s: float | None = None
) -> None:
    from quarantune.results import html_report

    try:
        html_report.write(path, results, rules, reload_s=reload_s)
    except OSError as error:
        remedy = f"{advice(error)}, or give another file with -o"
        raise InputError(f"{str(path)!r} cannot be written ({error.strerror}): {remedy}") from error


def _say_written(options: argparse.Namespace, out: Output, path: Path, results: Sequence[ResultData]) -> None:
    trials = sum(len(data.result.trials) for data in results)
    ended = sum(not data.state for data in results)
    others = [f"{data.state} sweep ({data.progress})" for data in results if data.state]
    what = " and ".join([*([counted(ended, "result")] if ended else []), *others])
    out.line(f"{what} with {counted(trials, 'trial')} written to {path}")
    out.json(
        {"file": str(path), "function": results[0].result.name, "results": ended, "trials": trials}
        | {"states": [data.state or "done" for data in results]}
    )
    if options.open and not options.watch:
        webbrowser.open(path.as_uri())


def _report_running(options: argparse.Namespace, out: Output) -> int:
    """Writes the page of the sweeps that run now; with `--watch` again and again, until they have ended."""
    if options.after is not None:
        raise InputError("--running and --watch are about one function: leave out the second name")
    directory, seen = opened().directory, dict[CacheKey, Sweep]()

    def look() -> bool:
        """Notes the sweeps that run, and what became of those that ran; returns whether one runs."""
        found = {_problem(sweep): sweep for sweep in sweeps.latest(directory, options.name)}
        of_device = {key: it for key, it in found.items() if options.device in (None, key.device)}
        seen.update((key, it) for key, it in of_device.items() if key in seen or it.state is SweepState.RUNNING)
        return any(sweep.state is SweepState.RUNNING for sweep in seen.values())

    if not look():
        raise InputError(_none_runs(directory, options.name))
    path = _page_of(options, next(iter(seen)).kernel_type)
    if not options.watch:
        results = [unfinished.data_of(sweep) for sweep in seen.values()]
        _write_page(path, results)
        _say_written(options, out, path, results)
        return DONE

    def shown() -> list[ResultData]:
        return [
            (cached_result(directory, key) if sweep.state is SweepState.DONE else None) or unfinished.data_of(sweep)
            for key, sweep in seen.items()
        ]

    try:
        _write_page(path, shown(), reload_s=2 * _REWRITE_S)
        out.line(f"{path} shows {counted(len(seen), 'running sweep')} until the end; Ctrl-C stops watching")
        if options.open:
            webbrowser.open(path.as_uri())
        last_s, took_s = time.monotonic(), 0.0
        while look() or time.monotonic() - last_s < _ENDED_S:
            started_s = time.monotonic()
            if any(sweep.state is SweepState.RUNNING for sweep in seen.values()):
                last_s = started_s
            _write_page(path, shown(), reload_s=2 * _REWRITE_S)
            took_s = time.monotonic() - started_s
            time.sleep(max(_REWRITE_S, _REST * took_s))
    except KeyboardInterrupt as error:
        error.add_note(f"stopped watching; {path} stays as it is, and the sweep goes on")
        raise
    finally:
        _write_page(path, shown())  # it loads itself no more
    _say_written(options, out, path, shown())
    return DONE


def _problem(sweep: Sweep) -> CacheKey:
    return CacheKey(sweep.beginning.name, sweep.beginning.key, sweep.beginning.device)


def _none_runs(directory: Path, name: str) -> str:
    """Returns the message that no sweep of a function runs, with what can be shown instead."""
    others = unfinished.without_result(directory, name)
    running = {sweep.beginning.name for sweep in sweeps.latest(directory) if sweep.state is SweepState.RUNNING}
    message = f"no sweep of {shown(name)} runs in {str(directory)!r}"
    if others:
        states = ", ".join(f"{sweep.state} ({unfinished.progress_text(sweep, sweep.trials())})" for sweep in others)
        return f"{message}; the last was {states}: leave out --running and --watch to see it"
    near = did_you_mean(name, running) or (f" These run: {', '.join(sorted(running))}." if running else "")
    return f"{message}.{printable(near) or ' `quarantune cache list --running` shows the sweeps without a result.'}"


def _place_of(name: str, when: str) -> tuple[Store, str]:
    """Returns the cache with the results of a function, and the function's name there."""
    is_here = not when or safe_name(name) in opened().names()  # a function's name may contain a slash
    directory, _, function = ("", "", name) if is_here else name.rpartition("/")
    return (another(directory) if directory else opened()), function


def _rules(name: str, device: str | None, when: str) -> list[JsonObject]:
    store, function = _place_of(name, when)
    return page_rules(store.directory, function, device=device)


def _results(name: str, device: str | None, when: str) -> list[ResultData]:
    store, function = _place_of(name, when)
    others = [] if when else unfinished.without_result(store.directory, function, device=device)
    found: list[ResultData] = []
    with contextlib.suppress(ValueError) if others else input_errors(ValueError):
        found = cached_results(store.directory, function, device=device)
    known = {(data.result.device, canonical_json(data.key_values)) for data in found}
    left = [it for it in others if (it.beginning.device, canonical_json(it.beginning.call)) not in known]
    found += map(unfinished.data_of, left)
    return [dataclasses.replace(data, when=when) for data in found]
