"""The sandbox: a template process that forks contained workers, and the wire to them."""

import os

MARK = "QUARANTUNE_SANDBOX"
"""The variable that every process of a sandbox has in its environment, with the token of its template."""


def is_inside() -> bool:
    """Returns whether this process runs in a sandbox, where tuning must not start another sandbox."""
    return MARK in os.environ
