"""The ladder: asks the rungs in their order, one thread for each call, and reports calls that run the defaults."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Iterable, Sequence

from quarantune.answers import guard
from quarantune.answers.answer import Answer, Origin, Rung, Situation
from quarantune.cache import problems
from quarantune.calls.key import KeyedCall, ProblemId
from quarantune.values.codec import canonical_json
from quarantune.values.errors import CacheMissError

_MOST_LOCKS = 4096
"""Keys may be many and long, so a few share a lock."""
_DEFAULTS = Answer(Origin.DEFAULTS, lasts=False)
"""Another job may tune the call at any time."""


class Ladder:
    """The rungs of one function."""

    def __init__(self, must_tune: Callable[[ProblemId, Situation], bool], explain: Callable[..., str]) -> None:
        """Sets up a ladder. Each climb takes the rungs as an argument: a ladder that kept them would refer to itself.

        Args:
            must_tune: returns whether `ALWAYS_TUNE` demands another sweep for a call.
            explain: returns the message for a call that no rung has an answer for; see `why_missed.explain`.
        """
        self._must_tune = must_tune
        self._explain = explain
        self._locks: dict[tuple[int, int], threading.RLock] = {}

    def climb(self, call: KeyedCall, now: Situation, rungs: Sequence[Rung]) -> Answer:
        """Returns the first answer for a call, by tuning if necessary; the defaults if no rung has an answer.

        Args:
            call: the call.
            now: its situation.
            rungs: the rungs, in their order.

        Raises:
            TuningFailedError: Every config failed, now or earlier in this process.
            CacheMissError: No rung has an answer, and `ON_MISS` is `error`.
        """
        answer = self.answer_of(call, now, rungs)
        if answer.origin is Origin.DEFAULTS and now.is_outside:
            if now.settings.on_miss != "tune":
                self.allow_defaults(call, now, among=("default", "nearest", "rule"))
            elif call.call.is_symbolic and not answer.why:
                problems.report_once(
                    f"{call.id.name}: running with its defaults, because its shapes are symbolic and nothing is cached "
                    f"for the key {canonical_json(call.values)}: tune it with concrete shapes of that key before "
                    f"jax.export"
                )
        return answer

    def answer_of(self, call: KeyedCall, now: Situation, rungs: Sequence[Rung]) -> Answer:
        """Returns the first answer for a call under its lock: of the threads that miss together, one tunes."""
        with self._lock_of(call.id):
            if now.may_tune and self._must_tune(call.id, now):  # no other thread has tuned it
                now = dataclasses.replace(now, start_over=True)
            answer = first(rungs, call, now) or _DEFAULTS
        if answer.origin in (Origin.NEAREST, Origin.RULE, Origin.ESTIMATED) and not now.keeps_others:
            return dataclasses.replace(answer, lasts=False)
        return answer

    def allow_defaults(self, call: KeyedCall, now: Situation, *, among: tuple[str, ...]) -> None:
        """Reports once that a call runs with the function's own defaults.

        Raises:
            CacheMissError: `ON_MISS` is not in `among`.
        """
        settings, refused = now.settings, ""
        if settings.on_miss in ("nearest", "rule") and (reason := guard.why_not(Origin(settings.on_miss), call)):
            refused = f": {reason}"
        if settings.on_miss not in among:
            missed = self._explain(call, now, may_run_untuned=bool(among))
            raise CacheMissError(f"{missed}{refused and f' (ON_MISS={settings.on_miss}{refused})'}")
        why = f"ON_MISS={settings.on_miss}{refused}" if settings.record is None else "recorded, to be tuned later"
        problems.report_once(f"{call.id.name}: not tuned for this call, running with its defaults ({why})")

    def _lock_of(self, id: ProblemId) -> threading.RLock:
        """Returns the lock of a call. A fork gets new locks: it lacks the threads that could release the old ones."""
        return self._locks.setdefault((os.getpid(), hash(id) % _MOST_LOCKS), threading.RLock())


def first(rungs: Iterable[Rung], call: KeyedCall, now: Situation) -> Answer | None:
    """Returns the first answer of the rungs that the call may use, or None."""
    found = (answer for rung in rungs if (answer := rung(call, now)) is not None)
    return next((usable for each in found if (usable := guard.admitted(each, call, now)) is not None), None)
