"""The tuner of one function: its calls, `.tune`, `.lookup` and the commands ask it for a config."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax

from quarantune.answers.answer import Answer, Origin, Situation
from quarantune.answers.ladder import Ladder, first
from quarantune.answers.layers import open_store
from quarantune.api.assembly import Rungs
from quarantune.cache import problems
from quarantune.cache.file_names import safe_name
from quarantune.calls.call import BoundCall, TunedFunction
from quarantune.calls.key import KeyedCall, keyed, keyed_to_tune
from quarantune.functions import profile_scope
from quarantune.jax_internals import jax_traces
from quarantune.values import blocks
from quarantune.values.configs import Config
from quarantune.values.errors import TuningFailedError
from quarantune.values.trial import Findings

if TYPE_CHECKING:
    from quarantune.results.report_data import FromCache
    from quarantune.results.result import TuningResult
    from quarantune.values.forgetting import Which


class Tuner:
    """Finds the config for each call of one function: climbs the ladder, tunes, or only looks."""

    def __init__(
        self,
        function: TunedFunction,
        *,
        make_job: Callable[..., Any] | None = None,
        on_phase: Callable[[int, str], None] | None = None,
    ) -> None:
        """Sets up a tuner; nothing is read or started.

        Args:
            function: the function.
            make_job: makes the job that tunes a call; None for `TuningJob`.
            on_phase: called with the index of a config and the phase that it enters; the last phase is `end`.
        """
        self.function = function
        self.rungs = Rungs(function, make_job=make_job, on_phase=on_phase or (lambda index, phase: None))
        self.ladder = Ladder(self.rungs.memory.must_tune, self.rungs.explain)

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> BoundCall:
        """Binds arguments to the function, and returns the call."""
        call = BoundCall(self.function, args, kwargs)
        if not call.function.tunables and not call.is_symbolic:
            call.function.tunables = self.rungs.layers.tunables(call, Situation.of(call, only_looks=True))
        return call

    def choice(self, call: BoundCall) -> Answer:
        """Returns the answer for a call, remembered or found by tuning; the defaults if no rung has an answer.

        Raises:
            TuningFailedError: Every config failed, now or earlier in this process.
            CacheMissError: There is no saved result, and `ON_MISS` is `error`.
        """
        if call.is_symbolic:
            from quarantune.calls import given_inputs

            given = given_inputs.in_place_of_symbolic((call.args, call.kwargs))
            call = call if given is None else self.bind(*given)
        if call.has_no_key:
            problems.report_once(
                f"{call.name}: running with its defaults, because its shapes are symbolic, as in jax.export: give "
                f"autotune a key_fn that returns the same value for these as for the tuned shapes"
            )
            return Answer(Origin.DEFAULTS, lasts=False)
        described, now = keyed(call), Situation.of(call)
        if (assigned := self.rungs.assigned(self.result, described, now)) is not None:
            return assigned
        return self.ladder.climb(described, now, self.rungs.in_order(self.result))

    def result(self, call: BoundCall) -> TuningResult:
        """Returns the result for a call, remembered or found by tuning.

        Raises:
            TuningFailedError: Every config failed, now or earlier in this process.
            CacheMissError: There is no saved result, and `ON_MISS` is neither `tune` nor `default`.
            TypeError: The call sets a tunable parameter.
            RuntimeError: This process is a worker, which must not tune.
        """
        described, now = self._to_tune(call)
        answer = self.ladder.answer_of(described, now, self.rungs.in_order(self.result))
        if answer.result is not None:
            return answer.result
        from quarantune.tuning.outcome import call_result, saved_result  # new results do not need it

        if answer.config is not None:
            origins: dict[Origin, FromCache] = {Origin.NEAREST: "nearest", Origin.RULE: "rule"}
            origin = origins.get(answer.origin, True)
            return saved_result(described, answer, from_cache=origin)
        if (failure := self.rungs.memory.failure(described.id)) is not None:
            raise failure
        if now.settings.on_miss == "tune":
            raise TuningFailedError(f"{call.name}: {answer.why}", trials=(), key=described.id.key)
        self.ladder.allow_defaults(described, now, among=() if call.untuned is None else ("default",))
        return call_result(described, call.defaults, Findings(), from_cache="default")

    def tune(self, call: BoundCall, *, resume: bool = False) -> TuningResult:
        """Tunes for a call now, even if the cache has a result, and remembers the new result.

        If another job is tuning the call at this moment, this takes its result, unless `ALWAYS_TUNE` is set.

        Args:
            call: the call.
            resume: whether the measurements of an interrupted sweep count.

        Raises:
            TuningFailedError: Every config failed.
            TypeError: The call sets a tunable parameter.
        """
        from quarantune.engine.place import place_of

        now = dataclasses.replace(Situation.of(call), start_over=not resume)
        place, has_store = place_of(now.settings), not now.settings.disable_cache
        store = open_store(now.settings)
        # The key needs the device, which an engine may take long to name. So this reads all entries as they are now.
        saved = store.read(call.name) if has_store and not place.is_here else {}
        described = keyed_to_tune(call, place.device())
        _, device, key = described.id
        earlier = store.get(*described.id) if has_store and place.is_here else saved.get(device, {}).get(key)
        answer = self.rungs.tuning.tune(described, now, earlier=earlier)
        self.rungs.share(described, answer, now)
        assert answer.result is not None
        return answer.result

    def adopt(self, described: KeyedCall, result: TuningResult, now: Situation) -> None:
        """Remembers a result that combines several sweeps, and offers it to the other ranks."""
        self.rungs.share(described, self.rungs.tuning.remember(described, result, now), now)

    def lookup(self, call: BoundCall) -> Config | None:
        """Returns the remembered config for a call, or None; never tunes."""
        if call.has_no_key:
            return None
        described, rungs = keyed(call), self.rungs
        now = Situation.of(call, only_looks=True)
        found = rungs.agreed(described, now) if now.ranks is not None else first(rungs.known, described, now)
        return None if found is None else found.config

    def is_known(self, call: BoundCall) -> bool:
        """Returns whether there is a result for these devices that needs no further sweep."""
        return first(self.rungs.known, *self._to_tune(call)) is not None

    def seeding_compilation(
        self, config: Config, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager that lets a first call find the worker's executable in JAX's compilation cache."""
        if "tuning" not in vars(self.rungs):  # no call has tuned yet
            return contextlib.nullcontext()
        return self.rungs.tuning.seeds.in_use(self.function.compiled_fn, config, args, kwargs)

    def scope(self, call: BoundCall, config: Config | None) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager that names the operations of a traced call, so that profiles show them.

        JAX keeps the names apart from the program, and its compilation cache leaves them out of its keys.

        Args:
            call: the call.
            config: its config; None for the defaults.
        """
        if not jax_traces.is_tracing() or call.is_symbolic or not blocks.current().profile_scopes:
            return contextlib.nullcontext()
        described = keyed(call)
        name = safe_name(call.name)
        about = profile_scope.call_id(name, described.id.device, described.readable)
        return jax.named_scope(profile_scope.scope_of(name, about, profile_scope.config_id(config)))

    def _to_tune(self, call: BoundCall) -> tuple[KeyedCall, Situation]:
        """Returns a call to tune, with its key on the devices that would tune it, and its situation.

        The situation allows tuning even in a worker: the job then raises an error that explains the refusal.
        """
        from quarantune.engine.place import place_of  # calls of decorated functions do not need it

        now = dataclasses.replace(Situation.of(call), may_tune=True)
        return keyed_to_tune(call, place_of(now.settings).device()), now


class Tuned:
    """A function with a tuner."""

    _tuner: Tuner

    def __repr__(self) -> str:
        """Returns the kind of tuner, the function's name, its tunables and the number of its configs."""
        configs = self.function.configs
        tunes = (
            "configs made for each call"
            if callable(configs)
            else f"{len(configs):,} config{'' if len(configs) == 1 else 's'} of {', '.join(configs.names)}"
        )
        return f"<{type(self).__name__} {self.function.name}: {tunes}>"

    def __dir__(self) -> list[str]:
        """Returns the names that users may rely on, and those with underscores; for completion."""
        return sorted({*super().__dir__()} - {"forget", "function", "result"})

    @property
    def function(self) -> TunedFunction:
        """The function with its configs and options."""
        return self._tuner.function

    def forget(self, of: Which | None = None) -> None:
        """Clears the choices remembered for earlier calls, if the class keeps any; see `forget_choices`."""

    def result(self, call: tuple[tuple[Any, ...], Mapping[str, Any]], *, anew: bool = False) -> TuningResult:
        """Returns the result for a call; for `tune_many` and the command line.

        Args:
            call: its positional and its keyword arguments.
            anew: whether to tune even if the cache has a result.

        Raises:
            TuningFailedError: Every config failed.
            TypeError: The function does not take these arguments.
        """
        try:
            bound = self._tuner.bind(*call)
            return self._tuner.tune(bound) if anew else self._tuner.result(bound)
        finally:
            self.forget()
