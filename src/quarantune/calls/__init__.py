"""A call of a tuned function: its function, its arguments and its key; no files and no processes."""
