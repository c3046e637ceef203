"""Sends a call to a worker process, and a compiled program back."""
