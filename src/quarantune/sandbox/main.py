"""The entry point of every freshly started interpreter of the sandbox."""

from __future__ import annotations

import importlib
from typing import NoReturn


def run(frame: object) -> NoReturn:
    """Runs the template or the worker that `frame` describes.

    Args:
        frame: `TemplateOptions` or `WorkerOptions` as encoded by the codec.
    """
    from quarantune.sandbox import contain
    from quarantune.sandbox.template_messages import ROLE_OPTIONS, TemplateOptions, WorkerOptions
    from quarantune.values import codec

    contain.reset_signals()
    match codec.decode(frame, *ROLE_OPTIONS):
        case TemplateOptions() as options:
            from quarantune.sandbox import forker

            forker.run_template(options)
        case WorkerOptions() as options:
            from quarantune.sandbox import worker_program

            importlib.import_module("jax")
            worker_program.run(options, None)
