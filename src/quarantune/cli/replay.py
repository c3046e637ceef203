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
    out.json(
        {
            "size": result.size,
            "invalid": result.invalid,
            "optimum_ms": result.optimum_ms,
            "within": result.within,
            "max_trials": result.max_trials,
            "searches": {
                name: [
                    {
                        "seed": run.seed,
                        "evaluations": run.evaluations,
                        "best_ms": run.best_ms[-1] if run.best_ms else None,
                        "trials": len(run.best_ms),
                        "failures": run.failures,
                        "cpu_ms": run.cpu_ms,
                    }
                    for run in runs
                ]
                for name, runs in result.runs.items()
            },
        }
    )
    return DONE
