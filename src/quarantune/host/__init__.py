"""This machine and this process: cores, memory, waiting times, locks, import paths."""
