"""Joins two entries of one key. An entry holds a result for each program that calls of the key have run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from quarantune.cache.entry_file import Entry
from quarantune.values.codec import canonical_json, plain
from quarantune.values.trial import Findings, is_same_program

OTHERS = "other_programs"
"""Name of the field, in the entry of the latest result, with results of other programs for the same key."""
STALE = "stale"
"""Name of the field, in a result, with the reason why `verify` tunes again. The next result replaces it in any case."""
_MOST_OTHERS = 7
_COMPARABLE = ("space", "versions", "fingerprint", "program", "arguments", "calls")
"""The fields that two results share if the more thorough search has the better winner."""


def results_in(entry: Entry) -> Iterator[Entry]:
    """Yields the results of an entry: the latest, then the results of other programs under the same key."""
    yield entry
    others = entry.get(OTHERS)
    yield from (each for each in (others if isinstance(others, list) else []) if isinstance(each, dict))


def winner_of(entry: Entry, *, which: str = "winner") -> str:
    """Returns the identity of a result's measured program; empty if unknown.

    Args:
        entry: the result.
        which: `winner`, or `defaults` for the program of the function's own defaults.
    """
    program = entry.get("program")
    found = program.get(which) if isinstance(program, dict) else ""
    return found if isinstance(found, str) else ""


def is_conflict(one: Entry, other: Entry) -> bool:
    """Returns whether the latest results of two entries are different choices for one function.

    They are not if one of the entries has both, or if the defaults have two programs: then a value that no key shows
    has changed the function.
    """
    configs, others = ([config_in(each) for each in results_in(entry)] for entry in (one, other))
    if configs[0] in others or others[0] in configs:
        return False
    defaults = winner_of(one, which="defaults"), winner_of(other, which="defaults")
    return not all(defaults) or is_same_program(*defaults)


def config_in(entry: Entry) -> str:
    """Returns the config of an entry, or its rule, as text."""
    return canonical_json(plain(entry.get("rule") or entry.get("config"), finite_only=False))


def joined_by_sweep(device: str, key: str, present: Entry, offered: Entry) -> Entry:
    """Joins the saved entry and the entry of a new sweep, compile check or fit.

    The new result comes first, unless the saved one comes from a more thorough search of the same space under the same
    versions, its config is at least as fast, and nobody has found it stale. An estimate never replaces a measured
    result.

    Args:
        device: the kind of device.
        key: the key of the problem.
        present: the saved entry.
        offered: the new entry.
    """
    return _joined(present, offered, _more_thorough)


def joined_by_merge(device: str, key: str, present: Entry, offered: Entry) -> Entry:
    """Joins the entries of two caches: of two results with one config the one with more samples, else the newer one.

    Args:
        device: the kind of device.
        key: the key of the problem.
        present: the entry of the cache to copy into.
        offered: the entry of the other cache.
    """
    return _joined(present, offered, _newer)


def joined_by_export(device: str, key: str, present: Entry, offered: Entry) -> Entry:
    """Joins the entry of an exported file and an exported entry, whose result comes first."""
    return _joined(present, offered, lambda _, chosen: chosen)


def _joined(present: Entry, offered: Entry, choose: Callable[[Entry, Entry], Entry]) -> Entry:
    """Returns an entry with the results of two entries.

    The result that `choose` returns comes first. The results of the other entry follow if their programs are known,
    because calls choose among several results by the program. If both entries have a result for one program with one
    config, `choose` decides between these, too.
    """
    first = choose(present, offered)
    kept = list(results_in(first))
    for each in results_in(offered if first is present else present):
        at = next((at for at, known in enumerate(kept) if _are_one(known, each)), None)
        if at is None and STALE not in each and winner_of(each) and _can_be_saved(each):
            kept.append(each)
        elif at:
            kept[at] = choose(kept[at], each)
    latest, *others = ({name: value for name, value in each.items() if name != OTHERS} for each in kept)
    return {**latest, OTHERS: others[:_MOST_OTHERS]} if others else latest


def _can_be_saved(entry: Entry) -> bool:
    """Returns whether JSON can hold an entry; an edited file may hold infinity."""
    try:
        return bool(canonical_json(entry))
    except ValueError:
        return False


def _are_one(one: Entry, other: Entry) -> bool:
    """Returns whether two results have one config and one program; two configs may have one program."""
    programs = winner_of(one), winner_of(other)
    return config_in(one) == config_in(other) and all(programs) and is_same_program(*programs)


def _more_thorough(present: Entry, offered: Entry) -> Entry:
    then, now = Findings.from_json(present), Findings.from_json(offered)
    if now.is_estimate != then.is_estimate:
        return present if now.is_estimate else offered
    is_alike = all(present.get(field) == offered.get(field) for field in _COMPARABLE)
    is_less = now.search.thoroughness < then.search.thoroughness
    is_kept = is_alike and is_less and now.figure >= then.figure and STALE not in present
    return present if is_kept else offered


def _newer(present: Entry, offered: Entry) -> Entry:
    if config_in(present) == config_in(offered):
        return offered if _samples_of(offered) > _samples_of(present) else present
    # Measured entries beat estimates. ISO times in UTC sort as text; an entry without a time counts as older.
    return max(present, offered, key=lambda it: (not Findings.from_json(it).is_estimate, str(it.get("created", ""))))


def _samples_of(entry: Entry) -> float:
    samples = entry.get("samples")
    return samples if isinstance(samples, (int, float)) else 0
