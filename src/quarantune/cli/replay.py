"""`quarantune replay`: compares searches on recorded trials."""

from __future__ import annotations

import argparse

from quarantune.cli.output import DONE, Output, input_errors
from quarantune.results.replay import replay as run


def replay(options: argparse.Namespace, out: Output) -> int:
    """Runs the searches against the recorded trials."""
    with input_errors(ValueError, TypeError, ImportError, OSError):
        result = run(
            options.recorded,
            options.search,
            seeds=range(options.seeds),
            max_trials=options.max_trials,
            batch=options.batch,
        )
    out.line(result.table())
    searches = {
        name: [
            {each: getattr(run, each) for each in ("seed", "evaluations", "failures", "cpu_ms")}
            | {"best_ms": run.best_ms[-1] if run.best_ms else None, "trials": len(run.best_ms)}
            for run in runs
        ]
        for name, runs in result.runs.items()
    }
    about = {each: getattr(result, each) for each in ("size", "invalid", "optimum_ms", "within", "max_trials")}
    out.json({**about, "searches": searches})
    return DONE
