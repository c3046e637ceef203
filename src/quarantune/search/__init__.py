"""Chooses which configs of a space to try next, without knowing how they run."""
