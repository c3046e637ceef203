"""The config that contextual tuning assigns to a kernel, inside the function that it tunes."""

from __future__ import annotations

from quarantune import cache
from quarantune.answers.answer import Answer, Origin, Situation
from quarantune.answers.recording import Recording, Tune
from quarantune.calls.call import BoundCall
from quarantune.calls.key import KeyedCall
from quarantune.functions.binding import assignment_in_force
from quarantune.transport.assignment import Assignment
from quarantune.values.codec import JsonObject
from quarantune.values.configs import Config


class Assigned:
    """The rung of kernels under an assignment: it gives each its config, or lists the calls of a program."""

    def __init__(self, recording: Recording, tune: Tune) -> None:
        self._recording = recording
        self._tune = tune

    def answer(self, call: KeyedCall, now: Situation) -> Answer | None:
        """Returns the assigned config; None if the assignment leaves the choice to the kernel."""
        assignment: Assignment | None = assignment_in_force.get()
        if assignment is None:
            return None
        if assignment.note is not None:
            self._recording.answer(call, now)
            assignment.note(call, self._tune)
            return Answer(Origin.ASSIGNED, lasts=False)
        slot = assignment.slot(call.id.name, cache.canonical_json(call.values), call.call.function.identity)
        is_assigned, config = assignment.find(slot, lambda: _seen(call.call))
        return Answer(Origin.ASSIGNED, config, lasts=config is not None) if is_assigned else None


def _seen(call: BoundCall) -> tuple[list[Config], JsonObject]:
    """Returns the configs of a call that are worth a worker, and its config space."""
    kept = [call.configs[index] for index in call.configs.listed() if call.configs.keeps(index)]
    return kept, call.space
