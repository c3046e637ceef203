"""The config that contextual tuning assigns to a kernel, inside the function that it tunes."""

from __future__ import annotations

from typing import Any

from quarantune.answers.answer import Answer, Origin
from quarantune.calls.call import BoundCall
from quarantune.calls.key import KeyedCall
from quarantune.transport.assignment import Assignment
from quarantune.values.codec import JsonObject, canonical_json
from quarantune.values.configs import Config


def assigned(call: KeyedCall, assignment: Assignment, tune: Any) -> Answer | None:
    """Returns the config that an assignment has for a kernel; None if it leaves the choice to the kernel.

    Args:
        call: the call.
        assignment: the assignment in force. It may only list the calls of a program, which run with their defaults.
        tune: returns the result for a listed call.
    """
    if assignment.note is not None:
        assignment.note(call, tune)
        return Answer(Origin.ASSIGNED, lasts=False)
    slot = assignment.slot(call.id.name, canonical_json(call.values), call.call.function.identity)
    is_assigned, config = assignment.find(slot, lambda: _seen(call.call))
    return Answer(Origin.ASSIGNED, config, lasts=config is not None) if is_assigned else None


def _seen(call: BoundCall) -> tuple[list[Config], JsonObject]:
    """Returns the configs of a call that are worth a worker, and its config space."""
    kept = [call.configs[index] for index in call.configs.listed() if call.configs.keeps(index)]
    return kept, call.space
