"""The only package that uses JAX's private names, each with the reason why no public name will do.

Each module holds one part of JAX: arrays, backends, functions, options, traces, Pallas kernels, or the exchange with
other processes.
"""
