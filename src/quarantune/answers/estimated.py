"""Estimates of compile checks, which stand in for results that nobody has measured."""

from __future__ import annotations

from quarantune.answers.answer import Answer, Situation
from quarantune.answers.layers import Layers
from quarantune.calls.key import KeyedCall


class Estimated:
    """The rung that looks for an estimate; a call that may be tuned is measured instead."""

    def __init__(self, layers: Layers) -> None:
        self._layers = layers

    def answer(self, call: KeyedCall, now: Situation) -> Answer | None:
        """Returns the estimate, unless the call will be tuned."""
        return None if now.tunes else self._layers.estimated(call, now)
