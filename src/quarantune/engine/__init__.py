"""Sweeps on the machines of a distributed engine, through its `concurrent.futures.Executor`."""
