"""The command line. A command imports JAX only if it needs JAX, because that takes most of a second."""

from quarantune.cli.program import main

__all__ = ["main"]
