"""Decides when and where each config runs, and when to kill a worker; knows nothing of JAX."""
