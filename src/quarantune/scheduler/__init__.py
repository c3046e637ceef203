"""Decides which config runs when and where, and when a worker is killed; knows nothing of JAX."""
