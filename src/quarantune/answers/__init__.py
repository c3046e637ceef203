"""What is known for a call: one source of an answer a file, and the ladder that asks them in order."""
