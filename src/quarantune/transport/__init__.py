"""A call's way to a worker and a compiled program's way back."""
