"""The command line: its commands, the parser of their arguments, and their output.

A command imports JAX only if it needs JAX, because the import takes most of a second.
"""
