"""The findings of one sweep beside its trials."""

from __future__ import annotations

import dataclasses

from quarantune.measure import finals
from quarantune.values.trial import Trial


@dataclasses.dataclass(frozen=True)
class Swept:
    """The findings of a sweep beside its trials.

    Attributes:
        final: the comparison of the finalists.
        compiled: by the index of a config, the contents for JAX's compilation cache, by JAX's own key.
        executables: by the index of a config, its executable as `compiled_winner.Winner` loads it.
        untuned: the trial of the function's defaults, where they ran beside the configs.
        complaint: how outputs disagreed, where the author should know; else empty.
        noise: how far the output of the defaults moves when its inputs do, as in `Agreement`.
        is_traced: whether a worker may have traced a config to its end.
        retimed: by the index of a config, its trial on the machine of the final, where it was tried on another before.
    """

    final: finals.Final = dataclasses.field(default_factory=finals.Final)
    compiled: dict[int, dict[str, bytes]] = dataclasses.field(default_factory=dict)
    executables: dict[int, bytes] = dataclasses.field(default_factory=dict)
    untuned: Trial | None = None
    complaint: str = ""
    noise: float | None = None
    is_traced: bool = True
    retimed: dict[int, Trial] = dataclasses.field(default_factory=dict)
