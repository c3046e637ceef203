"""Starts the template as soon as a call is known to need a sweep, while this process imports the modules that tune."""

from __future__ import annotations

from quarantune.cache.claims import Claim
from quarantune.calls.key import KeyedCall, check_can_travel
from quarantune.engine.place import place_of
from quarantune.host.process import in_sandbox
from quarantune.sandbox import template
from quarantune.sweep.limits import isolation_of
from quarantune.values.settings import Isolation, Settings
from quarantune.values.trial import SandboxError


def start_template(call: KeyedCall, settings: Settings) -> None:
    """Starts this process's template if the call will surely be tuned in workers here.

    The start takes longer than the imports, and nothing else can begin before its end. A job that waits for another
    one needs no template.

    Args:
        call: the call.
        settings: the operator's settings.

    Raises:
        ValueError: the call cannot be tuned, because workers cannot make an argument.
    """
    isolation = isolation_of(settings, call.platform, call.call.function.fn)
    if in_sandbox() or isolation is Isolation.NONE or not place_of(settings).is_here:
        return
    check_can_travel(call.call)
    holder = None if settings.disable_cache else Claim(settings.cache_dir, *call.id).holder()
    if holder is None or holder.owner.is_dead():
        try:
            template.shared()
        except (SandboxError, OSError):
            return  # the sweep tries again, and reports the failure
