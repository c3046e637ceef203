"""This process's memory of the calls of one function: answers, failures, and tuned calls."""

from __future__ import annotations

from typing import Any

from quarantune.answers.answer import Answer, Situation
from quarantune.calls.key import KeyedCall, ProblemId
from quarantune.host.locks import new_lock
from quarantune.values import blocks
from quarantune.values.errors import TuningFailedError
from quarantune.values.forgetting import Which, on_forgetting

_MOST_REMEMBERED = 4096
"""Number of a function's answers at which those from files are forgotten; the files still have them."""


class Memory:
    """The memory of one function."""

    def __init__(self) -> None:
        """Remembers nothing yet."""
        self._answers: dict[tuple[Any, ...], dict[ProblemId, Answer]] = {}
        self._failures: dict[ProblemId, TuningFailedError] = {}
        self._tuned: set[ProblemId] = set()
        self._lock = new_lock()
        on_forgetting(self.forget)

    @property
    def answers(self) -> dict[ProblemId, Answer]:
        """The answers for the places of results in force: a block with another cache reads and fills that cache."""
        return self._answers.setdefault(blocks.places_in_force(), {})

    def forget(self, of: Which | None) -> None:
        """Forgets the results and failures that `of` accepts, because their files have changed."""
        if of is None:
            return
        with self._lock:
            for answers in [*self._answers.values()]:
                for id in [id for id in answers if of(*id)]:
                    del answers[id]
            for id in [id for id in self._failures if of(*id)]:
                del self._failures[id]

    def keep(self, id: ProblemId, answer: Answer) -> None:
        """Keeps an answer from a file; if there are too many answers, forgets the others from files."""
        with self._lock:
            if len(self.answers) >= _MOST_REMEMBERED:
                for found in self.answers.keys() - self._tuned:
                    del self.answers[found]
            self.answers[id] = answer

    def remember(self, id: ProblemId, outcome: Answer | TuningFailedError) -> None:
        """Remembers the outcome of a sweep, which no file may have."""
        with self._lock:
            self._failures.pop(id, None)
            if isinstance(outcome, Answer):
                self.answers[id] = outcome
            else:
                self._failures[id] = _without_traceback(outcome)
            self._tuned.add(id)
        if (block := blocks.block_of("always_tune")) is not None:
            block.tuned.add((self, id))

    def must_tune(self, id: ProblemId, now: Situation) -> bool:
        """Returns whether `ALWAYS_TUNE` demands another sweep: one per call in each process or `settings` block."""
        block = blocks.block_of("always_tune")
        is_due = id not in self._tuned if block is None else (self, id) not in block.tuned
        return now.settings.always_tune and is_due

    def failure(self, id: ProblemId) -> TuningFailedError | None:
        """Returns the error of an earlier sweep of this process for a call; None without such an error."""
        return _without_traceback(self._failures[id]) if id in self._failures else None

    def repeat_failure(self, call: KeyedCall, now: Situation) -> Answer | None:
        """The rung that raises the error of an earlier sweep of this process; it has no answers.

        Raises:
            TuningFailedError: Every config failed.
        """
        if not now.start_over and (failure := self.failure(call.id)) is not None:
            raise failure
        return None


def _without_traceback(error: TuningFailedError) -> TuningFailedError:
    """Returns a copy of an error without its traceback, which would keep the arguments of the call alive."""
    return TuningFailedError(str(error), trials=error.trials, key=error.key, sweep=error.sweep)
