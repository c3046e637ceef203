"""The command line: runs a command, and turns its errors into one line and an exit code.

A command imports JAX only if it needs JAX, because that takes most of a second.
"""
