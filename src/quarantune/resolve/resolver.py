"""From a call to its config: memory, the cache, a claim on the problem, its journal, and a sweep of what is left."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import inspect
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from quarantune import cache, jax_internals
from quarantune.cache import CacheWriteError, Claim, Entry, Fingerprint, Journal, Store
from quarantune.devices import discovery
from quarantune.host import locks
from quarantune.jax_internals import state as jax_state
from quarantune.measure import finals, sampling
from quarantune.resolve import suitable
from quarantune.results import report
from quarantune.results.compiled_winner import without_arrays
from quarantune.results.progress import Progress
from quarantune.results.result import TuningResult
from quarantune.sandbox import template
from quarantune.sweep import sweep
from quarantune.sweep.events import SweepEvents
from quarantune.sweep.limits import SweepLimits
from quarantune.transport import assignment as assignments
from quarantune.transport import binding, manual_axes
from quarantune.transport.manual_axes import Axes
from quarantune.transport.problem import (
    CallDescription,
    Problem,
    as_structs,
    describe_call,
    fitted,
    is_array,
    key_part,
    named,
)
from quarantune.values import config_space, shardings, shown
from quarantune.values import settings as environment
from quarantune.values.config_values import COMPILER_OPTIONS, NO_OPTIONS, encode, freeze, text_of
from quarantune.values.describe import describe_static
from quarantune.values.options import Options
from quarantune.values.settings import Settings
from quarantune.values.trial import CacheMissError, Config, Outcome, Trial, TuningFailedError, count_outcomes
from quarantune.values.versions import versions

if TYPE_CHECKING:
    from quarantune.sweep.routes import Swept

_logger = logging.getLogger("quarantune")

_HEARTBEAT_S = 1.0
_CLAIM_WORST_CASE_S = 60.0
"""A tuning job shows life every second; one that has not for this long is stopped, or its host is gone."""
_WAITING_WORD_S = 5.0
"""How often a waiting job says that it waits."""
_STATE = "jax settings"
"""What an entry calls JAX's settings, among the parameters."""
_UNSETTLED = frozenset({Outcome.LOST, Outcome.NOT_RUN, Outcome.PRUNED})

Configs = Any  # what a user may give: list of dicts, dict of lists, or a callable that makes one


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Key:
    """One problem on one kind of device."""

    device: str
    text: str
    platform: str
    values: dict[str, Any]
    jax_state: dict[str, Any]
    axes: Axes | None = None

    @property
    def told(self) -> dict[str, Any]:
        """What the key says in values that people can read."""
        return self.values | ({_STATE: self.jax_state} if self.jax_state else {})


class _Times(NamedTuple):
    """What was measured: the best config's time, and the defaults' where it is known, in milliseconds."""

    best_ms: float
    default_ms: float | None


class Resolver:
    """Finds, or finds out, the best config for each call of one function."""

    def __init__(
        self,
        fn: Callable[..., Any],
        configs: Configs,
        *,
        name: str,
        signature: inspect.Signature,
        static_names: frozenset[str] | None,
        options: Options,
        on_phase: Callable[[int, str], None] | None = None,
        need_defaults: bool = False,
    ) -> None:
        """Sets up a resolver; nothing is read or started yet.

        Args:
            fn: the function, jitted or not; configs reach it as keyword arguments.
            configs: expanded configs, or a callable that makes them for a call.
            name: what the cache calls the function.
            signature: of the function.
            static_names: its static parameters; None for a function that is not jitted, where all counts by value but
                arrays.
            options: the author's.
            on_phase: told of the phases that configs enter, by their indices, and of their `end`.
            need_defaults: whether every tunable must have a default, because the function is also called without.
        """
        if options.time_grad and static_names is None:
            raise TypeError(
                f"{name}: time_grad=True differentiates the function, which jax.jit must have wrapped for that: put "
                f"jax.jit on it, or leave time_grad out"
            )
        self.fn = fn
        self.name = name
        self.options = options
        self._configs = configs
        self._signature = signature
        self._need_defaults = need_defaults
        self._static_names = static_names
        self.on_phase = on_phase or (lambda index, phase: None)
        self._tunables = frozenset() if callable(configs) else frozenset(configs[0])
        self._compiled: dict[str, bytes] = {}
        self._winners: dict[tuple[str, str], Config] = {}
        self._times_ms: dict[tuple[str, str], _Times] = {}
        self._failed: dict[tuple[str, str], TuningFailedError] = {}
        self._tuned: set[tuple[str, str]] = set()
        self._turns: dict[tuple[int, tuple[str, str]], threading.RLock] = {}

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The function's parameters by name."""
        return self._signature.parameters

    # Faces

    def config(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Config | None:
        """Returns the config to use for a call, remembered or found out now; None to run with the defaults.

        Raises:
            TuningFailedError: every config failed, now or earlier in this process.
            CacheMissError: nothing is remembered and `ON_MISS` is `error`.
        """
        if self._has_no_key(args, kwargs):
            cache.report_once(
                f"{self.name}: running with its defaults where its shapes are symbolic, as in jax.export: give "
                f"autotune a key_fn that returns the same for these as for the shapes it was tuned for"
            )
            return None
        _, key = self._describe(args, kwargs)
        if (assignment := assignments.current()) is not None:
            slot = assignment.slot(self.name, cache.canonical_json(key.values), self._identity)
            is_said, config = assignment.find(slot, lambda: self._seen(args, kwargs))
            if is_said:
                return config
        known = (key.device, key.text)
        # Of the threads that miss together one tunes; by process, because a fork lacks the thread that holds a lock.
        with self._turns.setdefault((os.getpid(), known), threading.RLock()):
            return self._config(key, args, kwargs)

    def result(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TuningResult:
        """Returns the result for a call, remembered or found out now.

        Raises:
            TuningFailedError: every config failed, now or earlier in this process.
            CacheMissError: nothing is remembered and `ON_MISS` is not `tune`.
            TypeError: the call sets a tunable parameter by hand.
        """
        key = self._key_to_tune(args, kwargs)
        known = (key.device, key.text)
        with self._turns.setdefault((os.getpid(), known), threading.RLock()):
            settings = environment.current()
            must_tune = settings.always_tune and known not in self._tuned
            config = None if must_tune else self._remembered(key, args, kwargs, settings)
            if config is None:
                if known in self._failed and not must_tune:
                    raise _afresh(self._failed[known])
                if settings.on_miss != "tune" and not must_tune:
                    raise CacheMissError(self._explain_miss(key, self.expand(args, kwargs), settings))
                return self._tune(key, args, kwargs, settings, start_over=must_tune)
            run = self._run_for(key, args, dict(kwargs), [config], settings, start_over=False)
            return run.remembered(config, self._times_ms[known])

    def compile(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], configs: Sequence[Config], *, num_workers: int | None
    ) -> list[tuple[Trial, bytes | None]]:
        """Compiles configs in workers, and neither runs nor remembers them.

        Returns:
            For each config its trial, and its executable where there is one that can leave its worker.
        """
        self._check_outside()
        key = self._key_to_tune(args, kwargs)
        settings = environment.current()
        problem = _Run(self, key, args, dict(kwargs), list(configs), settings, start_over=True).problem()
        trials: dict[int, Trial] = {}
        swept = sweep.run(
            problem,
            dict(enumerate(configs)),
            options=self.options,
            settings=settings,
            limits=SweepLimits.of(self.options, settings, num_workers=num_workers),
            events=SweepEvents(on_trial=trials.__setitem__),
            compile_only=True,
        )
        return [(trials[index], swept.executables.get(index)) for index in range(len(configs))]

    def _config(self, key: _Key, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Config | None:
        settings = environment.current()
        known = (key.device, key.text)
        is_symbolic = suitable.has_symbolic_shapes(args, kwargs)
        must_tune = settings.always_tune and known not in self._tuned and not template.is_inside() and not is_symbolic
        if not must_tune:
            if (config := self._remembered(key, args, kwargs, settings)) is not None:
                return config
            if known in self._failed:
                raise _afresh(self._failed[known])
        if template.is_inside():
            return None  # a sweep within a sweep would measure the two against each other
        if not must_tune and settings.on_miss != "tune":
            self._do_without(key, args, kwargs, settings)
            return None
        if is_symbolic:
            cache.report_once(
                f"{self.name}: running with its defaults where its shapes are symbolic and nothing is cached for the "
                f"key {cache.canonical_json(key.values)}: tune it with concrete shapes of that key before jax.export"
            )
            return None
        return self._tune(key, args, kwargs, settings, start_over=must_tune).best_config

    def lend(self, compiled: dict[str, bytes]) -> None:
        """Has a program that a worker compiled found by this process's JAX, so that it is not compiled again."""
        if compiled and not jax_internals.keep_compiled(compiled):
            self._compiled |= compiled

    @contextlib.contextmanager
    def lending(self) -> Iterator[None]:
        """Lends what workers compiled to a first call, where the caller has no compilation cache of its own."""
        if not self._compiled or jax_internals.is_tracing():
            yield
            return
        with jax_internals.compilation_cache_in_memory(self._compiled):
            self._compiled = {}
            yield

    def tune(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TuningResult:
        """Tunes for a call now, even if it is cached, and remembers the result.

        Raises:
            TuningFailedError: every config failed.
            TypeError: the call sets a tunable parameter by hand.
        """
        key = self._key_to_tune(args, kwargs)
        return self._tune(key, args, kwargs, environment.current(), start_over=True)

    def lookup(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Config | None:
        """Returns the remembered config for a call, or None; never tunes."""
        if self._has_no_key(args, kwargs):
            return None
        _, key = self._describe(args, kwargs)
        return self._remembered(key, args, kwargs, environment.current())

    def tunables_given(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Returns whether a call sets a tunable parameter by hand."""
        if callable(self._configs) and self._has_no_key(args, kwargs):
            return False  # it runs as it is either way, and a space for symbolic shapes could not be made
        tunables = self._tunable_names(args, kwargs)
        return not tunables.isdisjoint(self._signature.bind(*args, **kwargs).arguments)

    def expand(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Config]:
        """Returns the configs to try for a call."""
        if not callable(self._configs):
            return list(self._configs)
        struct_args, struct_kwargs = self._fitted(self._configs, *as_structs(args, kwargs))
        configs = config_space.expand_callable(
            self._configs, struct_args, struct_kwargs, fn_name=self.name, parameters=self._signature
        )
        self.check(configs)
        return configs

    def _seen(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> assignments.Seen:
        """Returns what the function that tunes this one for itself must know of a call."""
        configs = self.expand(args, kwargs)
        keeps = self.pruning(args, kwargs)
        kept = [config for config in configs if keeps(config)]
        return assignments.Seen(kept, space_of(configs))

    def pruning(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[Config], bool]:
        """Returns what says whether a config is worth a worker for a call."""
        prune_fn = self.options.prune_fn
        if prune_fn is None:
            return lambda config: True
        taken_args, taken_kwargs = self._fitted(functools.partial(prune_fn, {}), *as_structs(args, kwargs))
        return lambda config: bool(prune_fn(dict(config), *taken_args, **taken_kwargs))

    def _fitted(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return fitted(function, self._signature, self._statics(args, kwargs), args, kwargs)

    def check(self, configs: Sequence[Config]) -> None:
        """Raises where a config's keys are not what the function can take."""
        if self._static_names is None:
            config_space.check_keywords(configs, parameters=self._signature, fn_name=self.name)
            return
        # Configs come by keyword, where what jit knows as static by its position alone is not.
        static_names = frozenset(jax_internals.jit_options(self.fn).static_argnames)
        config_space.check_parameters(
            configs,
            parameters=self._signature,
            static_names=static_names,
            fn_name=self.name,
            need_defaults=self._need_defaults,
        )
        binding.check(self.fn, configs, name=self.name)

    def _tunable_names(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> frozenset[str]:
        if not self._tunables:  # a callable space, whose keys show with its first use
            self._tunables = frozenset(self.expand(args, kwargs)[0])
        return self._tunables

    def _statics(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> frozenset[str]:
        """Returns the parameters of a call that count by value."""
        if self._static_names is not None:
            return self._static_names
        bound = self._signature.bind_partial(*args, **kwargs)  # without the tunables, which need not have a default
        bound.apply_defaults()
        return frozenset(name for name, value in named(bound) if not any(map(is_array, jax.tree.leaves(value))))

    # Remembering

    @functools.cached_property
    def _identity(self) -> str:
        """What tells this function from another of its name."""
        space = "" if callable(self._configs) else space_of(self._configs)["hash"]
        return f"{self._fingerprint.digest} {space}"

    def _has_no_key(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Returns whether nothing can be remembered for a call, because its shapes are symbolic."""
        return self.options.key_fn is None and suitable.has_symbolic_shapes(args, kwargs)

    @locks.lazy
    def _fingerprint(self) -> Fingerprint:
        return cache.fingerprint(inspect.unwrap(self.fn), options=self.options.deciding())

    def _describe(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[CallDescription, _Key]:
        tunables = self._tunable_names(args, kwargs)
        statics, is_jitted = self._statics(args, kwargs), self._static_names is not None
        if is_jitted:
            bound = named(self._signature.bind_partial(*args, **kwargs))
            suitable.check_arguments({name: value for name, value in bound if name not in statics}, self.name)
        call = describe_call(self._signature, statics, tunables, args, kwargs, is_jitted=is_jitted)
        platform, kind = discovery.platform_and_kind(call.devices[0].platform if call.devices else None)
        described = self._bucketed(call, args, kwargs)
        axes = manual_axes.communicated_over(self.fn, args, kwargs) if call.has_tracers and is_jitted else None
        if axes is not None:
            described = {**described, "communicates over": axes.sizes}
        assignment = assignments.current()
        state = jax_state.describe(describe_static, own=None if assignment is None else assignment.text)
        if (mesh := shardings.describe_context_mesh(args, kwargs)) is not None:
            state["mesh"] = mesh
        parts = {"call": described, "code": self._fingerprint.digest} | ({"jax": state} if state else {})
        text = cache.canonical_json(parts)
        return call, _Key(device=kind, text=text, platform=platform, values=described, jax_state=state, axes=axes)

    def _key_to_tune(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Key:
        """Returns the key of a call to find a config for: one given by hand would be what every config runs with."""
        if suitable.has_symbolic_shapes(args, kwargs):
            raise TypeError(f"{self.name}: symbolic shapes have no data to measure with: tune it with concrete shapes")
        call, key = self._describe(args, kwargs)
        if call.tunables_given:
            verb, them = ("is", "it") if len(call.tunables_given) == 1 else ("are", "them")
            raise TypeError(
                f"{self.name}: {', '.join(sorted(call.tunables_given))} {verb} tuned here: leave {them} out"
            )
        return key

    def _bucketed(self, call: CallDescription, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what the key says of a call: of its arrays, what `key_fn` makes of them where there is one."""
        key_fn = self.options.key_fn
        if key_fn is None:
            return call.key_values
        taken_args, taken_kwargs = self._fitted(key_fn, args, kwargs)
        returned = key_fn(*taken_args, **taken_kwargs)
        bucket = key_part(returned)
        try:
            cache.canonical_json(bucket)
        except (TypeError, ValueError) as error:
            is_symbolic = suitable.has_symbolic_shapes(args, kwargs)
            hint = "; for symbolic shapes return what it returns for the concrete ones" if is_symbolic else ""
            raise TypeError(
                f"{self.name}: key_fn returned {returned!r}, which JSON cannot hold: {error}{hint}"
            ) from None
        static = {name: value for name, value in call.key_values.items() if name in self._statics(args, kwargs)}
        return {**static, "key_fn": bucket}

    def _remembered(
        self, key: _Key, args: tuple[Any, ...], kwargs: Mapping[str, Any], settings: Settings
    ) -> Config | None:
        known = (key.device, key.text)
        if (config := self._winners.get(known)) is not None:
            return config
        if settings.disable_cache:
            return None
        entry = self._store(settings).get(self.name, key.device, key.text)
        if entry is None:
            return None
        config = self._config_of(entry, self.expand(args, kwargs), settings)
        if config is not None:
            self._winners[known] = config
            self._times_ms[known] = _times_of(entry)
        return config

    def _config_of(self, entry: Entry, configs: Sequence[Config], settings: Settings) -> Config | None:
        """Returns an entry's config if it can be used for this space under these versions."""
        config = _find(entry.get("config"), configs)
        if config is None:
            cache.report_once(
                f"{self.name}: the cached config {entry.get('config')!r} is not in the config space any more: "
                "it is not used"
            )
            return None
        if entry.get("space") != space_of(configs):
            return None  # what is new must be measured; the journal knows the rest
        return config if self._versions_serve(entry, settings) else None

    def _versions_serve(self, entry: Entry, settings: Settings) -> bool:
        """Returns whether an entry may be used under the versions of now."""
        if was := _changed_versions(entry):
            if settings.version_check:
                _logger.info("%s: the cached result was made under %s; tuning again", self.name, was)
                return False
            cache.report_once(
                f"{self.name}: using results made under {was}; set QUARANTUNE_VERSION_CHECK=1 to tune again "
                "whenever versions change, or QUARANTUNE_ALWAYS_TUNE=1 to tune again now"
            )
        return True

    def _do_without(self, key: _Key, args: tuple[Any, ...], kwargs: Mapping[str, Any], settings: Settings) -> None:
        if settings.on_miss == "error":
            raise CacheMissError(self._explain_miss(key, self.expand(args, kwargs), settings))
        cache.report_once(f"{self.name}: not tuned for this call, running with its defaults (ON_MISS=default)")

    def _explain_miss(self, key: _Key, configs: Sequence[Config], settings: Settings) -> str:
        """Says what was looked for, what is nearest to it, and how the two differ."""
        wanted = f"{self.name}: nothing is cached for {cache.canonical_json(key.told)} on {key.device!r}"
        fix = "tune it with QUARANTUNE_ON_MISS=tune, or allow defaults with QUARANTUNE_ON_MISS=default"
        if settings.disable_cache:
            return f"{wanted}: the cache is off (QUARANTUNE_DISABLE_CACHE); {fix}"
        contents = self._store(settings).read(self.name)
        candidates = [
            self._differences(key, configs, device, entry, settings)
            for device, entries in contents.items()
            for entry in entries.values()
        ]
        if not candidates:
            return f"{wanted}: {self._store(settings).path(self.name)} holds no entry; {fix}"
        nearest = min(candidates, key=len) or ["its config, which is none of those to choose from"]
        return f"{wanted}; the nearest entry differs in {'; '.join(nearest)}; {fix}"

    def _differences(
        self, key: _Key, configs: Sequence[Config], device: str, entry: Entry, settings: Settings
    ) -> list[str]:
        differences = [] if device == key.device else [f"device: {device!r}, not {key.device!r}"]
        theirs = _dict(entry.get("key_values"))
        for name in dict.fromkeys([*key.told, *theirs]):
            if theirs.get(name) != key.told.get(name):
                differences.append(
                    f"{name}: {cache.canonical_json(theirs.get(name))}, not {cache.canonical_json(key.told.get(name))}"
                )
        parts = entry.get("fingerprint")
        if isinstance(parts, dict) and (changed := self._fingerprint.differences(parts)):
            differences.append(f"the function's {', '.join(changed)}")
        if entry.get("space") != (wanted := space_of(configs)):
            then = _dict(entry.get("space")).get("configs", "unknown")
            differences.append(f"the list of configs ({then} then, {wanted['configs']} now)")
        if settings.version_check and (changed_versions := _changed_versions(entry)):
            differences.append(f"versions: {changed_versions}")
        return differences

    def _store(self, settings: Settings) -> Store:
        return Store(settings.cache_dir, lock_timeout_s=settings.lock_timeout)

    # Finding out

    def _tune(
        self,
        key: _Key,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        settings: Settings,
        *,
        start_over: bool,
    ) -> TuningResult:
        self._check_outside()
        if key.axes is not None:
            key.axes.check(self.name)
        configs = self.expand(args, kwargs)
        known = (key.device, key.text)
        try:
            result = self._run_for(key, args, dict(kwargs), configs, settings, start_over=start_over).run()
        except TuningFailedError as error:
            self._failed[known] = _afresh(error)
            self._tuned.add(known)
            raise
        self._failed.pop(known, None)
        self._winners[known] = result.best_config
        self._times_ms[known] = _Times(result.time_ms, result.default_time_ms)
        self._tuned.add(known)
        return result

    def _check_outside(self) -> None:
        """Raises in a worker, where tuning would start workers that tune, and so on."""
        if template.is_inside():
            raise RuntimeError(
                f"{self.name}: a worker that runs another config, or imports the module of its function, was told to "
                f"tune: put calls of tune(), run() and compile_configs() in a module under "
                f"`if __name__ == '__main__':` or into a function that the module does not call as it is imported"
            )

    def _run_for(self, *problem: Any, start_over: bool) -> _Run:
        """Returns what tunes a problem."""
        return _Run(self, *problem, start_over=start_over)

    def answer(self, key: _Key, configs: Sequence[Config], settings: Settings) -> Entry | None:
        """Returns the usable cache entry for a problem, or None."""
        entry = self._store(settings).get(self.name, key.device, key.text)
        return entry if entry and self._config_of(entry, configs, settings) is not None else None


class _Run:
    """One problem being tuned by this process, or waited for while another does."""

    def __init__(
        self,
        resolver: Resolver,
        key: _Key,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        configs: list[Config],
        settings: Settings,
        *,
        start_over: bool,
    ) -> None:
        self._resolver = resolver
        self._key = key
        self._args = args
        self._kwargs = kwargs
        self._configs = configs
        self._settings = settings
        self._limits = SweepLimits.of(resolver.options, settings)
        self._start_over = start_over
        self._trials: dict[int, Trial] = {}
        self._troubled: set[int] = set()
        self._unsaved: CacheWriteError | None = None
        self._directory: Path | None = None if settings.disable_cache else settings.cache_dir
        self._journal = Journal(settings.cache_dir, resolver.name, key.device, key.text)
        self._claim: Claim | None = None
        self._next_heartbeat = 0.0

    def run(self) -> TuningResult:
        progress = Progress(self._resolver.name, len(self._configs), shown=self._settings.progress)
        with contextlib.closing(progress), contextlib.ExitStack() as stack:
            stack.callback(self._tell_what_was_not_saved)
            if self._directory is not None:
                answer = self._take_claim(progress, self._directory, stack)
                if answer is not None:
                    return self._result_of(answer)
                self._recall()
            self._prune(progress)
            return self._conclude(self._sweep(progress))

    def _take_claim(self, progress: Progress, directory: Path, stack: contextlib.ExitStack) -> Entry | None:
        """Makes this job the one that tunes, or returns the answer of the job that was.

        Raises:
            TuningFailedError: that job found that every config fails.
        """
        claim = Claim(
            directory,
            self._resolver.name,
            self._key.device,
            self._key.text,
            worst_case_s=self._claim_worst_case_s(),
        )

        def done() -> Entry | TuningFailedError | None:
            if self._start_over:
                return None
            return self._resolver.answer(self._key, self._configs, self._settings)

        next_word_s = 0.0

        def on_wait(who: str, waited_s: float) -> None:
            nonlocal next_word_s
            if waited_s >= next_word_s:
                next_word_s = waited_s + _WAITING_WORD_S
                progress.say(f"waiting for {who} to tune it ({waited_s:.0f} s)")

        try:
            answer: Entry | TuningFailedError | Claim = cache.wait(claim, done, on_wait, failed=self._failure_of)
        except CacheWriteError as error:
            cache.report_once(f"{self._resolver.name}: what is found out now is not saved: {error}")
            self._directory = None
            return None
        if isinstance(answer, Claim):
            self._claim = stack.enter_context(claim)
            return None
        if isinstance(answer, TuningFailedError):
            raise answer
        return answer

    def _failure_of(self, about: Mapping[str, Any]) -> Entry | TuningFailedError | None:
        """Returns the failure of the job that was waited for, if it tried what this one would."""
        if (
            self._start_over
            or about.get("space") != space_of(self._configs)
            or about.get("limits") != self._limits.deadlines()
        ):
            return None
        try:
            trials = [Trial.from_json(trial) for trial in about["trials"]]
        except (KeyError, TypeError, ValueError):
            return None
        if len(trials) != len(self._configs):
            return None
        pairs = zip(trials, self._configs, strict=True)
        return self._failure(tuple(dataclasses.replace(trial, config=config) for trial, config in pairs))

    def _failure(self, trials: tuple[Trial, ...]) -> TuningFailedError:
        message = report.failure_message(self._resolver.name, trials)
        return TuningFailedError(message, trials=trials, key=self._key.text)

    def _claim_worst_case_s(self) -> float:
        """Returns how long this job may be silent: while its function is loaded, or its config runs in this process."""
        limits = self._limits
        silent_s = limits.compile_timeout_s + (self._settings.isolation == "none") * limits.timeout_s
        return _CLAIM_WORST_CASE_S + silent_s

    def _recall(self) -> None:
        """Takes over what an earlier sweep of this problem finished, unless it is to be done afresh."""
        positions = {text_of(config): index for index, config in enumerate(self._configs)}
        refused = 0
        for record in self._journal.records():
            try:
                trial = Trial.from_json(record["trial"])
                index = positions.get(cache.canonical_json(trial.config))
                if index is None:
                    continue
                trial = dataclasses.replace(trial, config=self._configs[index])
                if not self._start_over and self._still_counts(trial, record):
                    self._trials[index] = trial
            except (KeyError, TypeError, ValueError, AttributeError):
                refused += 1
        if refused:
            cache.report_once(
                f"{refused} records of the journal in {str(self._journal.directory)!r} are no trials: they are not used"
            )
        if self._start_over:
            with self._saving():
                self._journal.discard()

    def _still_counts(self, trial: Trial, record: Mapping[str, Any]) -> bool:
        if trial.outcome in _UNSETTLED or (
            trial.outcome is Outcome.TIMEOUT and record["limits"] != self._limits.deadlines()
        ):
            return False
        return not self._settings.version_check or record["versions"] == versions()

    def _prune(self, progress: Progress) -> None:
        keeps = self._resolver.pruning(self._args, self._kwargs)
        for index, config in enumerate(self._configs):
            if not keeps(config):
                trial = Trial(config=config, outcome=Outcome.PRUNED, message="prune_fn said no")
                self._trials[index] = trial
                progress.step(trial)

    def _sweep(self, progress: Progress) -> Swept:
        """Runs what is left, and compares the fastest of all."""
        left = {index: config for index, config in enumerate(self._configs) if index not in self._trials}
        progress.recall([trial for trial in self._trials.values() if trial.outcome is not Outcome.PRUNED])
        if not left and len(finals.finalists(self._trials)) < 2:
            from quarantune.sweep.routes import Swept

            return Swept()
        self._troubled = self._find_troubled(left)
        last = set() if self._start_over else self._troubled
        ordered = sorted(left, key=lambda index: index in last)

        def on_trial(index: int, trial: Trial) -> None:
            self._trials[index] = trial
            self._record(index, trial)
            progress.step(trial)

        return sweep.run(
            self.problem(),
            {index: left[index] for index in ordered},
            options=self._resolver.options,
            settings=self._settings,
            limits=self._limits,
            events=SweepEvents(on_trial=on_trial, on_tick=self._show_life, on_phase=self._resolver.on_phase),
            troubled=last,
            known=self._trials,
        )

    def problem(self) -> Problem:
        """Returns the call as a sweep takes it."""
        return Problem(
            fn=self._resolver.fn,
            name=self._resolver.name,
            args=self._args,
            kwargs=self._kwargs,
            platform=self._key.platform,
            device_kind=self._key.device,
            manual_mesh=self._key.axes.mesh if self._key.axes is not None else None,
            untuned=self._untuned(),
            default=self._default_index(),
        )

    def remembered(self, config: Config, times: _Times) -> TuningResult:
        """Returns a result that was found in memory or in the cache."""
        return self._result(config, times.best_ms, (), from_cache=True, default_time_ms=times.default_ms)

    def _find_troubled(self, left: Mapping[int, Config]) -> set[int]:
        """Configs that crashed or hung for this function on this device, whatever the shapes."""
        if self._directory is None:
            return set()
        known = cache.troublesome(self._directory, self._resolver.name, self._key.device)
        return {index for index, config in left.items() if text_of(config) in known}

    def _record(self, index: int, trial: Trial) -> None:
        if self._directory is None:
            return
        self._show_life()
        with self._saving():
            self._journal.append({"trial": trial.to_json(), "limits": self._limits.deadlines(), "versions": versions()})
            if trial.outcome in (Outcome.CRASHED, Outcome.TIMEOUT) or (
                index in self._troubled and trial.outcome not in _UNSETTLED
            ):
                cache.remember_trouble(
                    self._directory,
                    self._resolver.name,
                    self._key.device,
                    encode(trial.config),
                    trial.outcome.value,
                )

    def _show_life(self) -> None:
        now = time.monotonic()
        if self._claim is not None and now >= self._next_heartbeat:
            self._next_heartbeat = now + _HEARTBEAT_S
            self._claim.refresh()

    @contextlib.contextmanager
    def _saving(self) -> Any:
        try:
            yield
        except CacheWriteError as error:
            self._unsaved = error

    def _tell_what_was_not_saved(self) -> None:
        # The last failure says it: that of the result, if there is one, else that of some trials.
        if self._unsaved is not None:
            cache.report_once(str(self._unsaved))

    def _conclude(self, swept: Swept) -> TuningResult:
        if swept.complaint:
            _logger.warning("%s: %s", self._resolver.name, swept.complaint)
        usable = [trial for trial in self._trials.values() if trial.outcome is Outcome.OK and trial.time_ms is not None]
        if not usable:
            trials = tuple(self._trials[index] for index in range(len(self._configs)))
            if self._directory is not None:
                # Another process may find the machine in a better state.
                with self._saving():
                    self._journal.discard()
            if self._claim is not None:
                # Those who wait now are spared it.
                told = [trial.to_json() for trial in trials]
                space = space_of(self._configs)
                self._claim.leave_failure({"space": space, "limits": self._limits.deadlines(), "trials": told})
            raise self._failure(trials)
        self._trials, verdict = finals.conclude(self._trials, swept.final, default=self._default_index())
        trials = tuple(self._trials[index] for index in range(len(self._configs)))
        best, tie = trials[verdict.winner], tuple(trials[index].config for index in verdict.tie)
        _logger.info(
            "%s: best of %d is %s: %.4g ms%s",
            self._resolver.name,
            len(trials),
            shown.format_config(best.config),
            best.time_ms,
            f", level with {' and '.join(map(shown.format_config, tie))}" if tie else "",
        )
        if (scatter := sampling.typical_spread(usable)) > sampling.BUSY[best.clock or "wall"]:
            _logger.warning(
                "%s: the samples scatter by %.0f%%, far above the usual: %s was busy or its clock throttled",
                self._resolver.name,
                100 * scatter,
                self._key.device,
            )
        default = self._default_index()
        default_time_ms = swept.default_time_ms if default is None else trials[default].time_ms
        if self._directory is not None:
            with self._saving():
                self._resolver._store(self._settings).put(
                    self._resolver.name, self._key.device, self._key.text, self._entry(best, trials, default_time_ms)
                )
        assert best.time_ms is not None
        executable = None
        if self._key.axes is None:  # or what was compiled is for the arrays of all shards
            self._resolver.lend(swept.compiled.get(verdict.winner, {}))
            executable = swept.executables.get(verdict.winner)
        return self._result(
            best.config, best.time_ms, trials, tie=tie, executable=executable, default_time_ms=default_time_ms
        )

    def _untuned(self) -> Config | None:
        """Returns the config that leaves all to the function's own defaults; None where they are not for this call."""
        default, empty = self._default_index(), inspect.Parameter.empty
        keywords, _ = binding.split(self._resolver.fn, self._configs[0])
        tunables = [self._resolver.parameters.get(name) for name in keywords]
        if any(tunable is None or tunable.default is empty for tunable in tunables):
            return None
        is_pruned = default in self._trials and self._trials[default].outcome is Outcome.PRUNED
        return None if is_pruned else {}

    def _default_index(self) -> int | None:
        """Returns where the function's own defaults are among the configs, or None."""
        parameters = self._resolver.parameters
        defaults = {name: freeze(parameters[name].default) for name in self._configs[0] if name in parameters}
        if COMPILER_OPTIONS in self._configs[0]:
            defaults.setdefault(COMPILER_OPTIONS, NO_OPTIONS)
        return next((index for index, config in enumerate(self._configs) if _same(config, defaults)), None)

    def _entry(self, best: Trial, trials: Sequence[Trial], default_time_ms: float | None = None) -> Entry:
        return {
            "config": encode(best.config),
            "time_ms": best.time_ms,
            "default_time_ms": default_time_ms,
            "key_values": self._key.told,
            "fingerprint": self._resolver._fingerprint.parts,
            "space": space_of(self._configs),
            "versions": versions(),
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "trials": count_outcomes(trials),
        }

    def _result_of(self, entry: Entry) -> TuningResult:
        config = _find(entry["config"], self._configs)
        assert config is not None  # or it would not have been an answer
        return self.remembered(config, _times_of(entry))

    def _result(
        self,
        config: Config,
        time_ms: float,
        trials: tuple[Trial, ...],
        *,
        tie: tuple[Config, ...] = (),
        from_cache: bool = False,
        executable: bytes | None = None,
        default_time_ms: float | None = None,
    ) -> TuningResult:
        return TuningResult(
            best_config=config,
            time_ms=time_ms,
            trials=trials,
            key=self._key.text,
            device=self._key.device,
            from_cache=from_cache,
            tie=tie,
            default_time_ms=default_time_ms,
            versions=versions(),
            executable=executable,
            call=without_arrays(self._args, self._kwargs),
            structs=as_structs(self._args, self._kwargs),
            fn=binding.bind(self._resolver.fn, config),
        )


def _times_of(entry: Entry) -> _Times:
    best_ms, default_ms = entry.get("time_ms"), entry.get("default_time_ms")
    return _Times(
        float(best_ms) if isinstance(best_ms, (int, float)) else math.nan,
        float(default_ms) if isinstance(default_ms, (int, float)) else None,
    )


def _same(config: Config, other: Mapping[str, Any]) -> bool:
    """Returns whether two configs are equal, 1 and True being different things."""
    return config == other and [*map(type, config.values())] == [type(other[name]) for name in config]


def _afresh(error: TuningFailedError) -> TuningFailedError:
    """Returns the error without its traceback, which keeps alive what the call was given: arrays, or tracers."""
    return TuningFailedError(str(error), trials=error.trials, key=error.key)


def _dict(value: Any) -> dict[str, Any]:
    """Returns a part of an entry that should be a dict, and is if nobody meddled with the file."""
    return value if isinstance(value, dict) else {}


def _find(raw: Any, configs: Sequence[Config]) -> Config | None:
    """Returns the config that an entry's `config` stands for, or None if there is none such."""
    try:
        text = cache.canonical_json(raw)
    except ValueError:  # 1e999 is JSON, and infinite
        return None
    return next((dict(config) for config in configs if text_of(config) == text), None)


def _changed_versions(entry: Entry) -> str:
    """Says which versions an entry was made under that are others now; empty where all are the same."""
    made_under = _dict(entry.get("versions"))
    changed = {name: now for name, now in versions().items() if made_under.get(name) != now}
    return ", ".join(f"{name} {made_under.get(name)} (now {now})" for name, now in changed.items())


def space_of(configs: Sequence[Config]) -> dict[str, Any]:
    """Returns what tells one config space from another, whatever its order."""
    texts = sorted(map(text_of, configs))
    return {"configs": len(texts), "hash": cache.short_hash("\n".join(texts))}
