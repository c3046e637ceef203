"""The answer of a rule that was fitted on other calls of the function."""

from __future__ import annotations

import logging

from quarantune.answers.answer import Answer, Origin, Situation
from quarantune.answers.layers import Layers, changed_versions, dict_or_empty
from quarantune.cache import problems
from quarantune.cache.entries import CacheRecord
from quarantune.calls.key import KeyedCall
from quarantune.rules.rule import FIELD, Rule, leaves_in, rule_key
from quarantune.values.texts import call_text

_logger = logging.getLogger("quarantune")


def by_rule(call: KeyedCall, now: Situation, layers: Layers) -> Answer | str:
    """Returns the config that a rule answers for a call, or why none does; saves nothing.

    The rule must be for the call's kind of device and code, and its bounds must hold the call. The config must be in
    the call's config space, and `prune_fn` must accept it.
    """
    reason, leaves = "", leaves_in(call.id.key)
    for store in layers.stores(now):
        entry = store.get(call.id.name, call.id.device, rule_key(call.id.key))
        if entry is None:
            continue
        try:
            rule = Rule.from_json(entry.get(FIELD))
        except ValueError as error:
            reason = f"the rule in {store.label} is damaged ({error}): fit it again"
            continue
        if why_not := rule.why_not(leaves):
            reason = f"{why_not}, in {store.label}: tune the call, or fit a rule on calls like it"
        elif layers.versions_serve(changed_versions(entry, call), call, now, is_own=not store.read_only):
            for raw in rule.ranked(leaves):
                config = call.call.find(raw, is_listed=True)
                if config is not None and call.call.keeps(config):
                    why = f"{rule.expected}, in {store.label}"
                    return Answer(Origin.RULE, config, {"expected_loss": rule.loss}, why=why)
            reason = f"the call has none of the configs of the rule in {store.label}: fit it again"
    return reason or _why_none(call, now, layers)


def answered(call: KeyedCall, now: Situation, layers: Layers) -> Answer | None:
    """The rung: returns the answer of a rule and notes the call for `verify`, or reports once why no rule answers."""
    found, name = by_rule(call, now, layers), call.id.name
    text = f"{name}({call_text(call.readable)})"
    if isinstance(found, str):
        _logger.info("%s: no rule answers: %s", text, found)
        problems.report_once(f"{text}: no rule answers: {found} (this is said once)", topic=f"no rule {name}")
        return None
    if now.is_outside:
        from quarantune.answers.recording import RULED, note

        _logger.info("%s: the config is from a rule: %s", text, found.why)
        told = f"nothing is cached for it: using the config of a rule, {found.why} (ON_MISS=rule; this is said once)"
        problems.report_once(f"{text}: {told}", topic=f"rule {name}")
        note(call, None, now.settings.cache_dir, suffix=RULED)
    return found


def _why_none(call: KeyedCall, now: Situation, layers: Layers) -> str:
    """Returns why no layer has a rule for a call: names the nearest that it has."""
    rules = layers.entries(now, are_rules=True)
    for store, record in sorted(rules, key=lambda it: it[1].key.device != call.id.device):
        return f"the rule in {store.label} is for {_difference(call, record)}: fit one for this"
    return "none is fitted: use fit, or `quarantune fit`"


def _difference(call: KeyedCall, record: CacheRecord) -> str:
    if record.key.device != call.id.device:
        return f"another device, {record.key.device!r}, and not for {call.id.device!r}"
    if changed := call.call.function.fingerprint.differences(dict_or_empty(record.entry.get("fingerprint"))):
        return f"other code ({', '.join(changed)} changed since)"
    return "calls with other parameters, ranks or JAX settings"
