"""The types of this package: an answer with its origin, the situation of a call, and a rung of the ladder."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from quarantune.calls.call import BoundCall
from quarantune.calls.key import KeyedCall
from quarantune.host.locks import lazy
from quarantune.host.process import in_sandbox
from quarantune.jax_internals import jax_backends
from quarantune.values import blocks
from quarantune.values.codec import JsonObject
from quarantune.values.configs import Config
from quarantune.values.settings import Settings
from quarantune.values.trial import Findings

if TYPE_CHECKING:
    from quarantune.engine.among_ranks import Board
    from quarantune.results.result import TuningResult


class Origin(enum.Enum):
    """The origin of an answer's config."""

    MEASURED = "measured"
    """A sweep of this process that has just ended."""
    SAVED = "saved"
    """A sweep, found in memory or in a file."""
    ESTIMATED = "estimated"
    """A compile check: the config was never run."""
    RULE = "rule"
    """A rule that was fitted on other calls."""
    NEAREST = "nearest"
    """The saved result of a call with other sizes."""
    ASSIGNED = "assigned"
    """The contextual tuning around the call."""
    DEFAULTS = "defaults"
    """No source has a config: the function's own defaults."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer for a call: a config, or the function's own defaults.

    Attributes:
        origin: the origin of the config.
        config: the config; None for the function's own defaults.
        record: the saved entry, or the findings of the sweep in the same form; decoded by `findings`.
        lasts: whether later calls of this process with this key may use it. If not, they look again, because another
            job may find a better answer.
        why: the reason for the defaults, if known.
        directory: the cache directory with the journal of the sweep; None if unknown.
        result: the result of the sweep, for `MEASURED` only. Remembered answers drop it, because a result holds an
            executable.
    """

    origin: Origin
    config: Config | None = None
    record: JsonObject = dataclasses.field(default_factory=dict)
    lasts: bool = True
    why: str = ""
    directory: Path | None = None
    result: TuningResult | None = None

    @lazy
    def findings(self) -> Findings:
        """The findings of the sweep."""
        return Findings.from_json(self.record)


@dataclasses.dataclass(frozen=True)
class Situation:
    """The circumstances of one call, apart from its arguments; read once, when the call begins.

    Attributes:
        settings: the operator's settings.
        is_outside: whether this process is not a worker. In a worker, a sweep would start workers that tune.
        may_tune: whether a sweep may run; False for symbolic shapes, which have no data.
        ranks: the means to agree with the other ranks of this program; None without ranks, in a worker, or if `AGREE`
            is off.
        board: the place to share a sweep with the other ranks; None if this rank does not tune for them.
        start_over: whether a sweep must run even if there is an answer.
    """

    settings: Settings
    is_outside: bool
    may_tune: bool
    ranks: jax_backends.Coordination | None = None
    board: Board | None = None
    start_over: bool = False

    @classmethod
    def of(cls, call: BoundCall, *, only_looks: bool = False) -> Situation:
        """Reads the situation of a call.

        Args:
            call: the call.
            only_looks: whether the caller wants no sweep.
        """
        settings, is_outside = blocks.current(), not in_sandbox()
        may_tune = is_outside and not (only_looks or call.is_symbolic)
        return cls(
            settings, is_outside, may_tune, jax_backends.coordination() if is_outside and settings.agree else None
        )

    @property
    def tunes(self) -> bool:
        """Whether a miss ends in a sweep."""
        return self.may_tune and (self.start_over or self.settings.on_miss == "tune")

    @property
    def keeps_others(self) -> bool:
        """Whether a config that was measured for other calls lasts.

        A `settings` block ends, and its choice must not outlive it.
        """
        return not (blocks.block_of("on_miss") or self.settings.record)


Rung: TypeAlias = Callable[[KeyedCall, Situation], Answer | None]
"""One source of answers: returns the answer for a call, or None to pass the call to the next rung."""
