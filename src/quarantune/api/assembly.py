"""The ladder of a function. Only this module knows all rungs: to add one, write its file and list it here."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from quarantune.answers import guard
from quarantune.answers.answer import Answer, Origin, Rung, Situation
from quarantune.answers.ladder import first
from quarantune.answers.layers import Layers
from quarantune.answers.memory import Memory
from quarantune.calls.call import BoundCall, TunedFunction
from quarantune.calls.key import KeyedCall
from quarantune.functions.binding import assignment_in_force
from quarantune.host.locks import lazy
from quarantune.host.process import without_collections

if TYPE_CHECKING:
    from quarantune.answers.ranks import Agreed, Agreement
    from quarantune.results.result import TuningResult
    from quarantune.tuning.job import Tuning, TuningJob

Result: TypeAlias = "Callable[[BoundCall], TuningResult]"


class Rungs:
    """The rungs of one function. A rung that few calls need imports its module on its first use."""

    def __init__(
        self,
        function: TunedFunction,
        *,
        make_job: Callable[..., TuningJob] | None,
        on_phase: Callable[[int, str], None],
    ) -> None:
        """Reads and starts nothing.

        Args:
            function: the function.
            make_job: makes the job that tunes a call; see `Tuning`.
            on_phase: called with the index of a config and the phase that it enters; see `Tuning`.
        """
        self._make_job, self._on_phase = make_job, on_phase
        self.memory = Memory()
        self._agreed_answers: Agreed = {}
        self.layers = Layers(function, self.memory)

    def in_order(self, result: Result) -> list[Rung]:
        """Returns the rungs to climb under the lock of a call, in their order.

        Args:
            result: returns the result for a recorded call when it is tuned later.
        """
        return [
            functools.partial(self._recorded, result),
            self.agreed,
            *self.known,
            self.memory.repeat_failure,
            self._from_others,
            self._tuned,
        ]

    @property
    def known(self) -> list[Rung]:
        """The rungs that look for a result of the call itself, and neither fail nor tune."""
        return [
            self.layers.measured,  # also in the memory of this process
            self.layers.estimated,
        ]

    def agreed(self, call: KeyedCall, now: Situation) -> Answer | None:
        """Returns the answer of all ranks of this program; waits for it if the call may be tuned.

        It asks the lower rungs on behalf of all ranks, so its answer ends the climb.

        Returns:
            The answer, which may be the defaults with the reason. None in a program without ranks, or if the call must
            not be tuned and has no answer yet.

        Raises:
            RuntimeError: This rank cannot use the config of the others.
        """
        if now.ranks is None:
            return None
        own = functools.partial(first, self.known, call, now)
        agreement = self._agreement(call, now)
        if not now.may_tune:
            return agreement.compare(own)
        may_tune = now.tunes and self.memory.failure(call) is None
        return agreement.agree(
            own=own,
            near=functools.partial(first, [self._from_others], call, dataclasses.replace(now, start_over=False)),
            tune=(lambda board: self._tuned(call, dataclasses.replace(now, board=board))) if may_tune else None,
            help_with=(lambda *about: self.tuning.help(call, now, *about)) if may_tune else None,
            is_paused=now.is_paused,
        )

    def share(self, call: KeyedCall, found: Answer, now: Situation) -> None:
        """Offers a new result to the other ranks; never waits."""
        if now.ranks is not None:
            self._agreement(call, now).compare(found=found)

    def _agreement(self, call: KeyedCall, now: Situation) -> Agreement:
        from quarantune.answers.ranks import Agreement

        assert now.ranks is not None
        return Agreement(call, now.settings, now.ranks, self._agreed_answers)

    def assigned(self, result: Result, call: KeyedCall, now: Situation) -> Answer | None:
        """Returns the config that contextual tuning assigns. Callers ask it before they take the lock of a call."""
        if (assignment := assignment_in_force.get()) is None:
            return None
        from quarantune.answers.assigned import assigned

        if assignment.note is not None:
            self._recorded(result, call, now)
        return assigned(call, assignment, result)

    def _recorded(self, result: Result, call: KeyedCall, now: Situation) -> Answer | None:
        """Notes a call without a measured result, unless in a worker or with symbolic shapes; has no answer."""
        is_wanted = now.settings.record is not None and now.is_outside and not call.call.is_symbolic
        if is_wanted and self.layers.find(call, now) is None:
            from quarantune.answers.recording import note

            note(call, result, now.settings.record)
        return None

    def _from_others(self, call: KeyedCall, now: Situation) -> Answer | None:
        """Returns a config that was measured for other calls, if `ON_MISS` asks for one and the call may use it."""
        on_miss = now.settings.on_miss
        if now.start_over or on_miss not in ("nearest", "rule") or guard.why_not(Origin(on_miss), call):
            return None
        if on_miss == "nearest":
            from quarantune.answers.nearest import nearest

            return nearest(call, now, self.layers)
        from quarantune.answers.by_rule import answered

        return answered(call, now, self.layers)

    def _tuned(self, call: KeyedCall, now: Situation) -> Answer | None:
        return self.tuning.tune(call, now) if now.tunes else None

    @lazy
    def tuning(self) -> Tuning:
        """Tunes calls that have no answer."""
        with without_collections():  # with JAX imported, collecting takes a third of this import and finds nothing
            from quarantune.tuning.job import Tuning

        return Tuning(self.layers, self.memory, job=self._make_job, on_phase=self._on_phase)

    def explain(self, call: KeyedCall, now: Situation, *, may_run_untuned: bool) -> str:
        """Returns the message for a call that no rung has an answer for."""
        from quarantune.answers import why_missed

        return why_missed.explain(self.layers, call, now, may_run_untuned=may_run_untuned)
