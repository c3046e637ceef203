"""Which configs of a space to try next; nothing in here knows how they are run."""
