"""Binds configs to functions, and describes functions and their arguments."""
