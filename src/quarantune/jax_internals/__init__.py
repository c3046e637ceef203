"""The only package that uses JAX's private names, each with the reason why no public name will do.

Here is JAX around a call: arrays, traces, jitted functions, options, and the other processes of the program.
"""
