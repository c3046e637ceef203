"""Sweeps on the machines of a distributed engine, by way of its `concurrent.futures.Executor`."""
