"""The guard of the ladder: which answers a call may use, whatever rung has them."""

from __future__ import annotations

from quarantune.answers.answer import Answer, Origin, Situation
from quarantune.cache import problems
from quarantune.calls.key import KeyedCall
from quarantune.values.codec import canonical_json, equal
from quarantune.values.configs import Config
from quarantune.values.options import ROUNDING

_UNMEASURED = frozenset({Origin.ESTIMATED, Origin.RULE, Origin.NEAREST})
_WAY_OUT = "let key_fn keep such calls apart, or give them all to tune_for"


def why_not(origin: Origin, call: KeyedCall) -> str:
    """Returns why a call takes no config of an origin; empty if it may.

    No sweep has run such a config for the key. So its bits are unknown, and its device memory unless it was compiled.
    """
    function = call.call.function
    if origin not in _UNMEASURED:
        return ""
    if function.most_configs is not None:
        return "its kernels have configs, and choose for themselves"
    if function.options.numerics != ROUNDING:
        return f"numerics={function.options.numerics!r} needs a config that was measured for the call"
    if not function.options.is_by_time and origin is Origin.ESTIMATED:
        return "its objective is not the time that a compile check estimates"
    if function.options.max_device_memory is not None and origin is not Origin.ESTIMATED:
        return "max_device_memory needs a config that was measured for the call"
    return ""


def is_dropped(config: Config | None, call: KeyedCall) -> bool:
    """Returns whether `prune_fn` drops the config of a key for this call, although it kept it for the measured one.

    Only calls with a `key_fn` share a key. If `prune_fn` cannot decide about symbolic shapes, it keeps no config.
    """
    bound, options = call.call, call.call.function.options
    if options.key_fn is None or options.prune_fn is None or config is None:
        return False
    if bound.untuned is not None and equal(config, bound.own_defaults):  # it would run with them in any case
        return False
    index = bound.configs.find(config)
    try:
        return not (bound.keeps(config) if index is None else bound.configs.keeps(index))
    except Exception:
        if bound.is_symbolic:
            return True
        raise


def admitted(found: Answer, call: KeyedCall, now: Situation) -> Answer | None:
    """Returns an answer if the call may use it.

    If `prune_fn` drops the config of the key for this call, the call runs with the defaults. A sweep for it would
    replace the result of the other calls of its key, and their next sweep would replace this one.

    Returns:
        The answer; the defaults, if `prune_fn` drops its config; or None if the next rung may have another answer.

    Raises:
        RuntimeError: `prune_fn` drops the config, and the other ranks of this program may run it.
    """
    if why_not(found.origin, call):
        return None
    if not is_dropped(found.config, call):
        return found
    function = call.call.function
    assert found.config is not None
    why = (
        f"key_fn gives {call.label} the key {canonical_json(call.values)}, and prune_fn drops the config of that key, "
        f"{function.text_of(found.config)}, for it"
    )
    if now.ranks is not None:
        raise RuntimeError(f"{call.id.name}: {why}: all ranks must run one config: {_WAY_OUT}")
    problems.report_once(
        f"{call.id.name}: {why}: the call runs with its defaults: {_WAY_OUT} (this is said once)",
        topic=f"prune_fn {call.id.name}",
    )
    if now.settings.on_miss != "tune" and found.origin is not Origin.ASSIGNED:
        return None
    return Answer(Origin.DEFAULTS, lasts=False, why=f"{why}: {_WAY_OUT}")
