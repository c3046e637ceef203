"""`quarantune report`: a page about the cached results of a function."""

from __future__ import annotations

import argparse
import dataclasses
import webbrowser
from pathlib import Path

from quarantune.cli import cache
from quarantune.cli.output import DONE, InputError, Output, counted, input_errors
from quarantune.results import html_report
from quarantune.results.html_report import cached_results
from quarantune.results.result import ResultData


def _results(name: str, device: str | None, when: str) -> list[ResultData]:
    directory, _, function = name.rpartition("/") if when else ("", "", name)
    store = cache.another(directory) if directory else cache.opened()
    with input_errors(ValueError):
        found = cached_results(store.directory, function, device=device)
    return [dataclasses.replace(data, when=when) for data in found]


def report(options: argparse.Namespace, out: Output) -> int:
    """Writes the page."""
    parts = [(options.name, "")] if options.after is None else [(options.name, "before"), (options.after, "after")]
    results = [data for name, when in parts for data in _results(name, options.device, when)]
    path = Path(options.output if options.output is not None else f"{results[0].result.name}.html").absolute()
    try:
        html_report.write(path, results)
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be written ({error.strerror}): give another file with -o") from error
    trials = sum(len(data.result.trials) for data in results)
    out.line(f"{counted(len(results), 'result')} with {counted(trials, 'trial')} written to {path}")
    out.json({"file": str(path), "function": results[0].result.name, "results": len(results), "trials": trials})
    if options.open:
        webbrowser.open(path.as_uri())
    return DONE
