"""The ladder of a function: the only module that knows all rungs. To add one, write its file and name it here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quarantune.answers.answer import Answer, Rung, Situation
from quarantune.answers.estimated import Estimated
from quarantune.answers.ladder import Ladder
from quarantune.answers.layers import Layers
from quarantune.answers.memory import EarlierFailure, Memory
from quarantune.calls.call import TunedFunction
from quarantune.calls.key import KeyedCall
from quarantune.functions.binding import assignment_in_force
from quarantune.host.process import lazy


class Rungs:
    """The rungs of one function; those that few calls need are imported when they are first climbed."""

    def __init__(
        self, function: TunedFunction, *, make_job: Callable[..., Any] | None, on_phase: Callable[[int, str], None]
    ) -> None:
        """Reads and starts nothing.

        Args:
            function: the function.
            make_job: makes what tunes for a call; None for `TuningJob`.
            on_phase: as for `Tuning`.
        """
        self._make_job, self._on_phase = make_job, on_phase
        self.memory = Memory()
        self.layers = Layers(function, self.memory)
        self.estimated = Estimated(self.layers)

    def ladder(self, tune: Callable[..., Any]) -> Ladder:
        """Returns the ladder.

        Args:
            tune: returns the result for a call that was noted to be tuned later.
        """

        def recording() -> Rung:
            from quarantune.answers.recording import Recording

            return Recording(self.layers, tune)

        def assigned() -> Rung:
            from quarantune.answers.assigned import Assigned
            from quarantune.answers.recording import Recording

            return Assigned(Recording(self.layers, tune), tune)

        return Ladder(
            Late(assigned, lambda now: assignment_in_force.get() is not None),
            [
                Late(recording, lambda now: now.settings.record is not None),
                Late(lambda: self.ranks, lambda now: now.ranks is not None),
                self.layers,  # with the memory of this process
                self.estimated,
                EarlierFailure(self.memory),
                self._nearest,
                Late(lambda: self.tuning, lambda now: now.tunes),
            ],
            explain=self._explain,
        )

    @lazy
    def tuning(self) -> Any:
        """The rung that tunes."""
        from quarantune.tuning.job import Tuning

        return Tuning(self.layers, self.memory, job=self._make_job, on_phase=self._on_phase)

    @lazy
    def ranks(self) -> Any:
        """The rung that agrees with the other ranks."""
        from quarantune.answers.ranks import Ranks

        own: list[Rung] = [self.layers, self.estimated]
        return Ranks(own, self._nearest, Late(lambda: self.tuning, lambda now: now.tunes), self.memory)

    @lazy
    def _nearest(self) -> Rung:
        def nearest() -> Rung:
            from quarantune.answers.nearest import Nearest

            return Nearest(self.layers)

        return Late(nearest, lambda now: now.settings.on_miss == "nearest" and not now.start_over)

    def _explain(self, call: KeyedCall, now: Situation, *, may_run_untuned: bool) -> str:
        from quarantune.answers import why_missed

        return why_missed.explain(self.layers, call, now, may_run_untuned=may_run_untuned)


class Late:
    """A rung that is made when the first call needs it."""

    def __init__(self, make: Callable[[], Rung], is_asked: Callable[[Situation], bool]) -> None:
        """Makes nothing yet.

        Args:
            make: imports the rung and makes it.
            is_asked: returns whether it may have an answer in a situation.
        """
        self._make = make
        self._is_asked = is_asked

    @lazy
    def _rung(self) -> Rung:
        return self._make()

    def answer(self, call: KeyedCall, now: Situation) -> Answer | None:
        """Asks the rung, if it may have an answer."""
        return self._rung.answer(call, now) if self._is_asked(now) else None
