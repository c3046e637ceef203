"""Starts the template as soon as a call is known to need a sweep, while this process imports the modules that tune."""

from __future__ import annotations

from quarantune.cache.claims import Claim
from quarantune.calls.key import KeyedCall
from quarantune.engine.place import place_of
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
    """
    if not place_of(settings).is_here or isolation_of(settings, call.platform, call.call.function.fn) is Isolation.NONE:
        return
    holder = None if settings.disable_cache else Claim(settings.cache_dir, *call.id).holder()
    if holder is None or holder.owner.is_dead():
        try:
            template.shared()
        except (SandboxError, OSError):
            return  # the sweep tries again, and reports the failure
