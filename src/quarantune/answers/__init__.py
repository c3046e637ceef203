"""Answers for a call: each source of answers is a file, and the ladder asks them in order."""
