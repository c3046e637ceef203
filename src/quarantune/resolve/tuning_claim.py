"""The claim of a tuning job on its key: other jobs wait for its answer, or get the failure that it leaves."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from quarantune import cache
from quarantune.cache import Claim, Entry, Journal
from quarantune.resolve.call_key import KeyedCall
from quarantune.sweep.isolation import Isolation, isolation_of
from quarantune.sweep.limits import SweepLimits
from quarantune.values.json_object import JsonObject
from quarantune.values.settings import Settings
from quarantune.values.space import Space
from quarantune.values.trial import Trial, TuningFailedError

_HEARTBEAT_S = 1.0
"""How often a tuning job refreshes its claim."""
_WORST_CASE_S = 60.0
"""A tuning job whose claim has not been refreshed for this long is stopped, or its host is gone."""
_WAIT_MESSAGE_S = 5.0
"""How often a waiting job reports that it waits."""


class TuningClaim:
    """The claim of one tuning job.

    Attributes:
        has_waited: whether another job had it first.
    """

    def __init__(self, keyed: KeyedCall, settings: Settings, limits: SweepLimits) -> None:
        """Names the claim; nothing is read or written.

        Args:
            keyed: the call.
            settings: the operator's settings.
            limits: the limits of the sweep.
        """
        self._keyed = keyed
        self._settings = settings
        self._limits = limits
        self._held: Claim | None = None
        self._next_heartbeat = 0.0
        self.has_waited = False

    def take(
        self,
        directory: Path,
        stack: contextlib.ExitStack,
        *,
        done: Callable[[], Entry | TuningFailedError | None],
        failed: Callable[[JsonObject], Entry | TuningFailedError | None],
        say: Callable[[str], None],
    ) -> Entry | None:
        """Waits until the claim is held, or until another job has answered.

        Args:
            directory: the cache directory.
            stack: releases the claim when it is closed.
            done: returns the answer, if there is one by now.
            failed: takes the failure that another job has left, and returns it as an answer if it is one.
            say: shows that the job waits.

        Returns:
            The other job's answer; None where the claim is held now.

        Raises:
            TuningFailedError: every config failed in that job.
            CacheWriteError: no claim can be made in the directory.
        """
        key = self._keyed.key
        claim = Claim(directory, self._keyed.call.name, key.device, key.text, worst_case_s=self._worst_case_s())
        journal = Journal(directory, self._keyed.call.name, key.device, key.text)
        next_message_s = 0.0

        def on_wait(holder: str, waited_s: float) -> None:
            nonlocal next_message_s
            self.has_waited = True
            if waited_s >= next_message_s:
                next_message_s = waited_s + _WAIT_MESSAGE_S
                trials = sum(1 for _ in journal.each())
                say(f"waiting for {holder} to tune it ({waited_s:.0f} s, {trials:,} trials so far)")

        answer: Entry | TuningFailedError | Claim = cache.wait(claim, done, on_wait, failed=failed)
        if isinstance(answer, Claim):
            self._held = stack.enter_context(claim)
            return None
        if isinstance(answer, TuningFailedError):
            raise answer
        return answer

    def refresh(self) -> None:
        """Shows other jobs that this one goes on, where the claim is held and the last time was long ago."""
        now = time.monotonic()
        if self._held is not None and now >= self._next_heartbeat:
            self._next_heartbeat = now + _HEARTBEAT_S
            self._held.refresh()

    def leave_failure(self, terms: JsonObject, trials: Sequence[Trial]) -> None:
        """Leaves the failure of all configs to the jobs that wait, where the claim is held.

        Args:
            terms: what distinguishes the sweep from others that might have succeeded.
            trials: its trials.
        """
        if self._held is not None:
            self._held.leave_failure({**terms, "trials": [trial.to_json() for trial in trials]})

    def _worst_case_s(self) -> float:
        """Returns the longest time between two refreshes, in seconds.

        There is none while the function is loaded, or while a config runs in this process.
        """
        is_apart = isolation_of(self._settings, self._keyed.problem()) is Isolation.PROCESS
        return _WORST_CASE_S + self._limits.compile_timeout_s + (0.0 if is_apart else self._limits.timeout_s)


def left_trials(about: Mapping[str, object], terms: JsonObject, configs: Space) -> tuple[Trial, ...] | None:
    """Returns the trials of a failure that another job has left, if it ran the same sweep.

    Args:
        about: the failure; anybody may have written it.
        terms: what distinguishes the sweep of this job.
        configs: the configs of this job.
    """
    raw = about.get("trials")
    if not isinstance(raw, list) or {name: value for name, value in about.items() if name != "trials"} != terms:
        return None
    try:
        trials = [Trial.from_json(trial) for trial in raw]
        indices = [configs.find(trial.config) for trial in trials]
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    if None in indices:
        return None
    pairs = zip(trials, indices, strict=True)
    return tuple(dataclasses.replace(trial, config=configs[index]) for trial, index in pairs if index is not None)
