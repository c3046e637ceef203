"""What the author of a tuned function decides about its tuning."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from quarantune.environment import parse_memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What the author of a tuned function decides; the operator's settings beat it.

    Attributes:
        name: the cache file's name; None for the function's own.
        prune_fn: `(config, *args, **kwargs) -> bool`; False drops the config before a worker is spent on it.
        warmup: untimed runs per config.
        rep: at most this many timed samples per config.
        compile_timeout: seconds for loading, tracing, lowering and compiling one config.
        timeout: seconds for checking and measuring one config, from the moment it holds the device.
        memory_limit: host memory of one worker and its children, in bytes or as "8GB"; None for a fair share of what is free.
    """

    name: str | None = None
    prune_fn: Callable[..., bool] | None = None
    warmup: int = 1
    rep: int = 20
    compile_timeout: float = 120.0
    timeout: float = 30.0
    memory_limit: int | str | None = None

    def __post_init__(self) -> None:
        if self.name is not None and (not isinstance(self.name, str) or not self.name.strip()):
            raise ValueError(f"name={self.name!r} is not valid: give a non-empty string, or leave it out")
        if self.prune_fn is not None and not callable(self.prune_fn):
            raise TypeError(f"prune_fn={self.prune_fn!r} is not callable: give a function (config, *args) -> bool")
        for field, least in (("warmup", 0), ("rep", 1)):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{field}={value!r} is not valid: give a whole number of at least {least}")
        for field in ("compile_timeout", "timeout"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ValueError(f"{field}={value!r} is not valid: give a number of seconds above 0")
        if self.memory_limit is not None:
            parse_memory(self.memory_limit)
