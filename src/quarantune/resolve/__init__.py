"""From a call to its config: key, memory, cache, claim, journal, and a sweep where none of them has the answer."""
