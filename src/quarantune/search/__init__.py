"""Which configs of a space to try next; nothing in here knows how they are run."""

from quarantune.search.making import chosen, make
from quarantune.values.space import Space

__all__ = ["Space", "chosen", "make"]
