"""`@autotune`, the decorator for jitted functions, and `AutoTuner` for any callable."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    Self,
    TypeAlias,
    TypeVar,
    Unpack,
    cast,
    overload,
)

import jax
import numpy as np

from quarantune.answers.answer import Origin
from quarantune.api.tuner import Tuned, Tuner
from quarantune.calls.call import TunedFunction
from quarantune.functions.binding import assignment_in_force, bind_config, jitted_with, register_kernel, split_config
from quarantune.functions.names import cache_name
from quarantune.host.frames import ends_at_caller, hide_own_frames, own_frames_hidden
from quarantune.jax_internals import jax_arrays, jax_functions, jax_options
from quarantune.values import blocks
from quarantune.values.blocks import settings
from quarantune.values.configs import Config, MadeConfigs, as_given
from quarantune.values.forgetting import forget_choices, on_forgetting
from quarantune.values.options import ROUNDING, OptionKeywords, Options, checked_options, show_options

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from quarantune.api.fit import FitReport
    from quarantune.results.result import TuningResult
    from quarantune.values.forgetting import Which

_P = ParamSpec("_P")
_R = TypeVar("_R")
_I = TypeVar("_I")
_Q = ParamSpec("_Q")
_T = TypeVar("_T")

Described: TypeAlias = jax.ShapeDtypeStruct | np.ndarray[Any, Any]
"""Arguments that may stand for an array wherever nothing is computed for the caller."""

Memo: TypeAlias = dict[Hashable, _T]
"""Remembered choices, by the state of JAX's settings and the key of the call."""
_MOST_REMEMBERED = 4096
"""Number of calls at which a memo starts again from empty. JAX keeps as many calls of a jitted function."""

read_context = jax_options.trace_context
"""Returns the state of JAX's settings. A remembered choice serves this state only."""

_Known: TypeAlias = dict[Any, tuple[list[Any], Callable[..., _R]]]
_NOTHING: tuple[Any, tuple[Any, ...], list[Any], Callable[..., Any], _Known[Any]] = (None, (), [], print, {})
"""No last call. The fields: state of JAX's settings; array types, places and choice of the last call; all calls."""

_cleared_with_jax = jax_functions.cleared_with_caches(forget_choices)

_aval, _sharding = jax_arrays.aval_of, jax_arrays.raw_sharding_of


def autotune(
    configs: MadeConfigs, **options: Unpack[OptionKeywords]
) -> Callable[[Callable[_P, _R]], Autotuned[_P, _R]]:
    """Tunes the static parameters of a jitted function, and runs each call with the best config for its arguments.

    The first call with new shapes, dtypes or static arguments tunes: worker processes compile, check and time every
    config. The cache saves the winner, and later calls use it.

    Inside `jit`, JAX does not say how an argument lies over `Auto` axes of a mesh. There the function is tuned at the
    global shape on one device, with a result separate from the same call outside.

    Args:
        configs: a list of dicts; or a dict of lists, which stands for the full grid in order; or a callable that takes
            the arguments of a call (arrays as `jax.ShapeDtypeStruct`) and returns or yields dicts. A config that lacks
            a key uses the function's default for it. The key `compiler_options`, unless it is a parameter, holds a
            dict of XLA's options for that config, as `jax.jit` takes them; calls inside a trace run without them.
        **options: options from the groups below. `quarantune.Options` describes each in full.

    The options that people use first:

    - `key_fn`: takes the call's arguments and returns a JSON-able value; calls with equal values share one result.
    - `prune_fn`: `(config, *args, **kwargs) -> bool`; False drops the config before it takes a worker.
    - `ref_fn`: source of the expected output: `"defaults"` (default), a function, or None to compare nothing.
    - `rtol`: allowed difference relative to the expected element; by default as much as rounding explains.
    - `atol`: allowed absolute difference, in addition to `rtol`.
    - `numerics`: outputs that may win: `rounding` (default), `bitwise` or `batch_invariant`.
    - `time_grad`: True compiles, checks and times each config together with its gradient.
    - `search`: `auto` (default), `exhaustive`, `random`, `surrogate`, `optuna:<sampler>` or a `Search` object.
    - `max_trials`: the largest number of configs to try.
    - `time_budget`: seconds after which no further config starts.
    - `compile_timeout`: seconds to load, trace, lower and compile one config; the default is 120.
    - `timeout`: seconds to check and measure one config; the default is 30.

    Advanced options of saved results:

    - `name`: the cache file's name; the default is the function's own name.
    - `tables`: `package:directory` of results that a package ships; looked up after the user's cache.

    Advanced options of checks:

    - `check_fn`: `(output, expected_or_None, *args) -> bool or None`; False or an exception fails the config.
    - `max_mismatched_ratio`: the share of an output's elements that may exceed both tolerances.
    - `check_grad`: True also compares gradients.
    - `check_batch`: the axis of the batch, to find out whether rows depend on the batch that they are in.

    Advanced options of measuring:

    - `warmup`: untimed runs per config; the default is 1.
    - `rep`: the largest number of timed samples per config; the default is 20.
    - `objective`: the quantity to minimize: `time` (default), `energy`, or a function of a `Trial`.
    - `supply`: made-up arguments: `auto` (default), `integer`, `uniform`, `normal`, `zeros`, `ones` or a function.
    - `devices_per_trial`: accelerators that one trial holds; the default is 1.

    Advanced options of the search and of one config's limits:

    - `fidelity`: `auto` first ranks configs by a cheap compile if XLA tunes their products; `full` compiles all fully.
    - `patience`: the search ends after this many trials without a gain of 0.5%.
    - `seed`: the same seed and the same trials give the same search; the default is 0.
    - `memory_limit`: host memory of its worker, in bytes or as "8GB"; the default is a fair share of the free memory.
    - `max_device_memory`: device memory of its program, in bytes or as "2GB"; the default is no limit.

    Returns:
        A decorator for a function that `jax.jit` has wrapped. It returns an `Autotuned`.

    Raises:
        TypeError: The function is not jitted, its `jax.jit` options prevent tuning, a tunable has no default, or
            `configs` has an unsupported type.
        ValueError: The configs are empty or endless, or name parameters that are not static.

    Example:
        >>> import jax, quarantune
        >>> import jax.numpy as jnp
        >>> @quarantune.autotune({"batch": [1, 64]})
        ... @jax.jit(static_argnames=["batch"])
        ... def scale(x, batch: int = 1):
        ...     return jax.lax.map(lambda each: 2 * each + 1, x, batch_size=batch)
        >>> x = jnp.ones(2**16)
        >>> scale(x)  # tunes, then runs with the winner; later calls only run
        Array([3., 3., 3., ..., 3., 3., 3.], dtype=float32)
        >>> scale.lookup(x)
        {'batch': 64}
        >>> result = scale.tune(x)  # tunes again, and returns the measurements
        >>> print(result)  # doctest: +ELLIPSIS
        TuningResult: batch=64, ...x faster than the defaults (... ms against ... ms)
        ...
        >>> print(result.table())  # doctest: +ELLIPSIS, +NORMALIZE_WHITESPACE
           batch  outcome      ms  speed-up  compile s...
        *  64     ok      ...     ...x       ...
           1      ...
        <BLANKLINE>
        * batch=64 is the fastest...
    """
    checked = checked_options("autotune", options)

    def decorate(fn: Callable[_P, _R]) -> Autotuned[_P, _R]:
        return Autotuned(fn, configs, checked)

    if jax_functions.is_jitted(configs):
        raise TypeError("autotune needs the configs first: write @autotune([...]) above @jax.jit(...)")
    return decorate


show_options(autotune)


class _Jit(Protocol):
    """The two ways to call `jax.jit`: with the function, or with options alone, as a decorator."""

    @overload
    def __call__(self, fun: Callable[_P, _R], /, **options: Any) -> Callable[_P, _R]: ...

    @overload
    def __call__(
        self, *, static_argnames: str | Iterable[str] | None = ..., **options: Any
    ) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]: ...


jit = cast("_Jit", jax.jit)
"""`jax.jit` itself. Under this name, type checkers and editors see the function's own signature."""


class TunedCallable(Tuned, Generic[_P, _R]):
    """A tuned function. Callers use it like the function itself; in a class body it becomes a method."""

    __wrapped__: Callable[_P, _R]
    _memo: Memo[Any]
    """The choices for calls so far."""
    _last: tuple[Any, tuple[Any, ...], list[Any], Callable[..., _R], _Known[_R]] = _NOTHING
    """The choice for the last call whose arguments were all JAX arrays."""

    def __init__(self, fn: Callable[_P, _R], options: Options) -> None:
        functools.update_wrapper(cast("Any", self), fn)
        self.name = options.name or cache_name(fn)
        self._options = options
        self._jit_options = jax_functions.jit_options(fn) if jax_functions.is_jitted(fn) else None
        self._memo = {}
        on_forgetting(self.forget)

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...

    @overload
    def __get__(
        self: TunedCallable[Concatenate[_I, _Q], _R], instance: _I, owner: type | None = None
    ) -> BoundMethod[_Q, _R]: ...

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Binds to an instance, as a function does."""
        return self if instance is None else BoundMethod(self, instance)

    def forget(self, of: Which | None = None) -> None:
        """Clears the choices remembered for earlier calls; see `forget_choices`."""
        self._memo.clear()
        self._last = _NOTHING

    def _tune(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        try:
            with on_engine(self.function.signature, kwargs) as (kwargs, resume):
                return self._tuner.tune(self._tuner.bind(args, kwargs), resume=resume)
        finally:
            self.forget()

    def _parts(self) -> tuple[Any, ...]:
        """Returns the constructor's arguments other than the function, to make this object again elsewhere."""
        return (dataclasses.replace(self._options, name=self.name),)  # a worker has another `__main__`

    def __reduce__(self) -> Any:
        """Pickles by name, or as the function with its configs and options; results stay in this process."""
        from quarantune.functions import importable  # calls do not need them
        from quarantune.transport import pickling

        if importable.travels_by_name(self):
            return self.__wrapped__.__qualname__
        return _rebuild, (type(self), self._parts(), *pickling.parts_of(self.__wrapped__))


class Autotuned(TunedCallable[_P, _R]):
    """A jitted function with tuned static parameters; made by `autotune`.

    A call runs the function with the best config for the shapes of the arguments on their device. The first call for
    these shapes tunes, and later calls remember. A call that sets a tunable parameter runs the function untuned.

    It has the name, signature and docstring of the function, which is its `__wrapped__`, and works as a method.
    """

    __qualname__: str

    def __init__(self, fn: Callable[_P, _R], configs: Any, options: Options) -> None:
        """Wraps a jitted function; use `autotune`."""
        if isinstance(fn, Autotuned):
            raise TypeError(f"{_name_of(fn)!r} is already autotuned: put all its tunables into one list of configs")
        if not jax_functions.is_jitted(fn):
            raise TypeError(
                f"autotune wraps a function that jax.jit has wrapped, and {_name_of(fn)!r} is a {type(fn).__name__}: "
                f"put @jax.jit(static_argnames=[...]) between @autotune(...) and the function"
            )
        super().__init__(fn, options)
        self._tuner = Tuner(TunedFunction.of(fn, configs, options, need_defaults=True))
        register_kernel(self)

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Calls the function with the best config for these arguments."""
        # Every call of a training step takes this path. It compares JAX's settings and the arrays' types and places
        # with the last call, then with all known calls. Arrays of one type usually share the object that describes it.
        context, avals, shardings, bound, known = self._last
        if not kwargs and read_context() == context:
            try:
                if len(args) == len(avals):
                    for arg, aval, sharding in zip(args, avals, shardings):  # noqa: B905 - naming `strict` takes time
                        if _aval(arg) is not aval or _sharding(arg) is not sharding:
                            break
                    else:
                        return bound(*args)
                shardings, bound = known[tuple(map(_aval, args))]
                if list(map(_sharding, args)) == shardings:
                    return bound(*args)
            except (AttributeError, KeyError, TypeError):  # `contextlib.suppress` takes time
                pass
        with own_frames_hidden():
            return self._call_any(args, kwargs)

    @property
    def options(self) -> Options:
        """The options given to `autotune`."""
        return self._options

    @overload
    def tune(self, *args: _P.args, **kwargs: _P.kwargs) -> TuningResult: ...

    @overload
    def tune(self, described: Described, /, *args: Any, **kwargs: Any) -> TuningResult: ...

    @overload
    def tune(self, first: Any, described: Described, /, *args: Any, **kwargs: Any) -> TuningResult: ...

    @overload
    def tune(self, *args: Any, executor: Executor, resume: bool = False, **kwargs: Any) -> TuningResult: ...

    @overload
    def tune(self, *args: Any, resume: bool, **kwargs: Any) -> TuningResult: ...

    def tune(self, *args: Any, **kwargs: Any) -> TuningResult:
        """Tunes for these arguments now, even if the cache has a result, and remembers the new result.

        If another job is tuning the same call at this moment, this waits for it and takes its result, unless
        `ALWAYS_TUNE` is set.

        Args:
            *args: the call's positional arguments.
            **kwargs: its keyword arguments. `executor=` sets the setting of that name for this call. `resume=True`
                skips the configs that an interrupted sweep has measured.

        Returns:
            The winner and all trials; see `TuningResult`.

        Raises:
            TuningFailedError: Every config failed.
            EngineError: The executor could not run the sweep.
            TypeError: The call sets a tunable parameter.
        """
        with own_frames_hidden():
            return cast("TuningResult", self._tune(args, kwargs))

    def tune_for(
        self, calls: Sequence[Any], weights: Sequence[float] | None = None, *, by: Literal["total", "worst"] = "total"
    ) -> TuningResult:
        """Finds one config for several calls that share a key, and remembers it under that key.

        Each call gets a separate sweep, as if there were no `key_fn`. Earlier measurements of it count, unless
        `ALWAYS_TUNE` is set. A config has to work for all calls. If the search does not try the whole space, the first
        call decides which configs the others try.

        Args:
            calls: for each call a tuple of positional arguments or a dict of keyword arguments, with arrays or
                `jax.ShapeDtypeStruct`s; or calls from `recording`.
            weights: how much each call counts, for example how often a program makes it. None takes the counts of
                recorded calls, and 1 for others.
            by: `total` for the least weighted total time; `worst` for the least slowdown in any call, relative to the
                best config for that call.

        Returns:
            The result, whose times are weighted means over the calls; `calls` shows how far each is from its own best.

        Raises:
            TuningFailedError: No config works for all calls.
            TypeError: `calls` holds something that is not a call, or a call that sets a tunable.
            ValueError: The calls do not share a key, or an argument is not valid.
        """
        from quarantune.api.tune_for import tune_for  # cached calls do not need it

        try:
            with own_frames_hidden():
                return tune_for(self._tuner, calls, weights, by)
        finally:
            self.forget()

    def fit(
        self,
        calls: Sequence[Any],
        weights: Sequence[float] | None = None,
        *,
        max_configs: int = 8,
        max_loss: float | str = "3%",
        time_budget: float | None = None,
    ) -> FitReport:
        """Fits a rule on some calls, which answers for calls that nobody tuned, and saves it in the cache.

        The rule is a small decision tree from the sizes and dtypes of a call to one of a few configs. It answers under
        `ON_MISS=rule`, and searches begin with its answer. Each call is tuned as far as the rule needs it: calls with
        results keep these, a large space is searched, and the configs that are good for some calls are measured for the
        others. It replaces an earlier rule for calls of the same kind.

        Args:
            calls: for each call a tuple of positional arguments or a dict of keyword arguments, with arrays or
                `jax.ShapeDtypeStruct`s; or calls from `recording`.
            weights: how much each call counts. None takes the counts of recorded calls, and 1 for others.
            max_configs: the most configs that the rule chooses between.
            max_loss: how much longer than with its own best config any call may take, as `"3%"` or `0.03`. The rule
                takes the fewest configs with which this holds for all calls. If these are too many, it takes those with
                the least total loss.
            time_budget: seconds after which nothing further is measured.

        Returns:
            The rules, with the loss to expect for other calls. There are several rules if the calls differ in ranks, in
            parameters or in JAX's settings.

        Raises:
            TuningFailedError: No config works for any call.
            TypeError: `calls` holds something that is not a call, or a call that sets a tunable.
            ValueError: There are fewer than three calls of one kind, or an argument is not valid.
        """
        from quarantune.api.fit import fit  # calls do not need these
        from quarantune.api.tune_for import given_arguments, given_weights

        try:
            with own_frames_hidden():
                given, many = [given_arguments(call) for call in calls], given_weights(calls, weights)
                return fit(self._tuner, given, many, max_configs, max_loss, time_budget)
        finally:
            self.forget()

    @overload
    def lookup(self, *args: _P.args, **kwargs: _P.kwargs) -> Config | None: ...

    @overload
    def lookup(self, described: Described, /, *args: Any, **kwargs: Any) -> Config | None: ...

    @overload
    def lookup(self, first: Any, described: Described, /, *args: Any, **kwargs: Any) -> Config | None: ...

    def lookup(self, *args: Any, **kwargs: Any) -> Config | None:
        """Returns the remembered config for these arguments, or None; never tunes."""
        with own_frames_hidden():
            config = self._tuner.lookup(self._tuner.bind(args, kwargs))
        return None if config is None else as_given(config)

    def default(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Calls the function with its own defaults, tuned or not."""
        return self.__wrapped__(*args, **kwargs)

    def lower(self, *args: _P.args, **kwargs: _P.kwargs) -> Any:
        """Lowers the function with the best config, as `jax.jit(...).lower` does."""
        jitted, config = jitted_with(self.__wrapped__, self._config(args, kwargs))
        return jitted.lower(*args, **kwargs, **config)

    def trace(self, *args: _P.args, **kwargs: _P.kwargs) -> Any:
        """Traces the function with the best config, as `jax.jit(...).trace` does."""
        jitted, config = jitted_with(self.__wrapped__, self._config(args, kwargs))
        return jitted.trace(*args, **kwargs, **config)

    def eval_shape(self, *args: _P.args, **kwargs: _P.kwargs) -> Any:
        """Returns the outputs' shapes and dtypes, as `jax.jit(...).eval_shape` does; never tunes.

        The config is the remembered one, or the defaults. `jax.eval_shape(f, ...)` tunes, as tracing does, because JAX
        keeps its trace for the calls that follow.
        """
        call = self._tuner.bind(args, kwargs)
        config = {} if call.given else self._tuner.lookup(call)
        keywords, _ = split_config(self.__wrapped__, config or {})
        jitted: Any = self.__wrapped__
        return jitted.eval_shape(*args, **kwargs, **keywords)

    def clear_cache(self) -> None:
        """Clears the programs that this process compiled, as `jax.jit(...).clear_cache` does; tuned results stay.

        It also clears the memory of calls, which holds their static arguments; `jax.clear_caches` does the same.
        """
        self.forget()
        jax_functions.clear_caches(self.__wrapped__)

    def _parts(self) -> tuple[Any, ...]:
        return self.function.configs, *super()._parts()

    def _config(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Config:
        """Returns the config to add to a call; empty if the caller sets tunables or the call runs untuned."""
        call = self._tuner.bind(args, kwargs)
        return {} if call.given else self._tuner.choice(call).config or {}

    def _call_any(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _R:
        memo: Memo[Callable[..., _R]] = self._memo
        key, context = memo_key(self._jit_options, args, kwargs), read_context()
        place = context, assignment_in_force.get(), key, blocks.numerics_in_force() if blocks.with_numerics else None
        if key is not None and (bound := memo.get(place)) is not None:
            self._keep_ready(context, args, kwargs, bound)
            return bound(*args, **kwargs)
        call = self._tuner.bind(args, kwargs)
        config: Config = {}
        if call.given:
            bound = self.__wrapped__
        else:
            answer = self._tuner.choice(call)
            if answer.config is None:
                with self._tuner.scope(call, None):
                    return self.__wrapped__(*args, **kwargs)
            config = answer.config
            is_exact = call.function.options.numerics != ROUNDING and answer.origin is not Origin.ASSIGNED
            bound = bind_config(self.__wrapped__, config, is_exact=is_exact)
            if not answer.lasts:
                with self._tuner.scope(call, config):
                    return bound(*args, **kwargs)
            if key is None and not self._options.time_grad:
                from quarantune.transport import differentiation  # calls outside a trace do not need it

                differentiation.explain_failure(self.__wrapped__, config, args, kwargs, name=self.name)
        if key is not None:
            remember(memo, place, bound)
            self._keep_ready(context, args, kwargs, bound)
        scope = contextlib.nullcontext() if call.given else self._tuner.scope(call, config)
        with self._tuner.seeding_compilation(config, args, kwargs), scope:
            return bound(*args, **kwargs)

    def _keep_ready(
        self, context: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], bound: Callable[..., Any]
    ) -> None:
        """Prepares the short path of `__call__` for calls like this one, if JAX's arrays are its only arguments."""
        if kwargs or blocks.with_numerics or any(type(arg) is not jax_arrays.array_type for arg in args):
            return
        before, *_, known = self._last
        if before != context:
            known = {}
        avals, shardings = tuple(map(_aval, args)), list(map(_sharding, args))
        remember(known, avals, (shardings, bound))
        self._last = context, avals, shardings, bound, known


class BoundMethod(Generic[_P, _R]):
    """A tuned function bound to an instance, as a method is."""

    __wrapped__: Callable[..., _R]
    __qualname__: str

    def __init__(self, function: Any, instance: object) -> None:
        functools.update_wrapper(self, function)
        self.__func__, self.__self__ = function, instance  # the names of a method

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Calls the method with the best config for these arguments."""
        try:
            return self.__wrapped__(self.__self__, *args, **kwargs)
        except BaseException as error:
            if ends_at_caller(error):
                hide_own_frames(error)
            raise

    def __getattr__(self, name: str) -> Any:
        if name not in ("tune", "lookup", "default", "lower", "trace", "eval_shape"):
            hint = f": use {self.__qualname__}.{name}, with calls that begin with the object"
            raise AttributeError(f"a tuned method has no {name!r}{hint if hasattr(self.__wrapped__, name) else ''}")
        return functools.partial(getattr(self.__wrapped__, name), self.__self__)

    def __reduce__(self) -> Any:
        """Pickles and copies the function and the instance, as a method does."""
        return BoundMethod, (self.__wrapped__, self.__self__)


class AutoTuner(Tuned):
    """Tunes any callable that takes a config as keyword arguments.

    Args:
        fn: a jitted function, or any other callable: numpy code, a C extension, something that starts a program.
        configs: a list of dicts, a dict of lists, or a callable that makes dicts from the call's arguments.
        on_progress: called in this process with the index of a config and the phase that it enters: `load` if its
            worker loads the function itself or makes a device's context, `compile`, `check`, `measure`, and `end` once
            its trial is over.
        **options: the same options as for `autotune`.

    Raises:
        TypeError: `fn` is not callable, an option is unknown, or `configs` has an unsupported type.
        ValueError: The configs are empty or endless, or the function cannot take them.

    Example:
        >>> import numpy as np, quarantune
        >>> def total(rows, block: int = 1):
        ...     return sum(float(rows[at : at + block].sum()) for at in range(0, len(rows), block))
        >>> result = quarantune.AutoTuner(total, {"block": [1, 64]}, rep=5).run(np.ones((1024, 8)))
        >>> result.best_config
        {'block': 64}
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        configs: MadeConfigs,
        *,
        on_progress: Callable[[int, str], None] | None = None,
        **options: Unpack[OptionKeywords],
    ) -> None:
        function = TunedFunction.of(fn, configs, checked_options("AutoTuner", options))
        self._tuner = Tuner(function, on_phase=on_progress)

    def run(self, *args: Any, **kwargs: Any) -> TuningResult:
        """Returns the result for these arguments, from the cache or by tuning now.

        Args:
            *args: the call's positional arguments.
            **kwargs: its keyword arguments. `executor=` sets the setting of that name for this call. `resume=True`
                continues an interrupted sweep, instead of using the best config that it had found.

        Returns:
            The winner and all trials; see `TuningResult`.

        Raises:
            TuningFailedError: Every config failed.
            EngineError: The executor could not run the sweep.
            CacheMissError: The cache has no result, and `ON_MISS` is `error`.
        """
        with own_frames_hidden(), on_engine(self._tuner.function.signature, kwargs) as (kwargs, resume):
            call = self._tuner.bind(args, kwargs)
            return self._tuner.tune(call, resume=True) if resume else self._tuner.result(call)


show_options(AutoTuner.__init__)


def remember(memo: dict[Any, _T], key: Hashable, choice: _T) -> None:
    """Adds a choice to a memo, and empties a full memo first."""
    if len(memo) >= _MOST_REMEMBERED:
        memo.clear()
    memo[key] = choice


def memo_key(jit: jax_functions.JitOptions | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable | None:
    """Returns a key of a call. Calls have equal keys if neither JAX nor the function can distinguish them.

    Args:
        jit: the function's options of `jax.jit`; None for a plain function, which sees the values of Python's numbers
            and strings.
        args: the call's positional arguments.
        kwargs: its keyword arguments.

    Returns:
        The key; None if an argument, such as a tracer, needs a closer look each time.
    """
    count = len(args)
    try:
        parts: list[Any] = [
            _token(jit, arg, is_static=jit is not None and jit.is_static_position(index, count))
            for index, arg in enumerate(args)
        ]
        for name, arg in kwargs.items():
            parts += [name, _token(jit, arg, is_static=jit is not None and name in jit.static_argnames)]
        key = tuple(parts)
        hash(key)
    except TypeError:
        return None
    return key


def _token(jit: jax_functions.JitOptions | None, arg: Any, *, is_static: bool = False) -> Hashable:
    if type(arg) is jax_arrays.array_type:
        return (arg.aval, arg.sharding)
    # A plain function sees the values of its arguments; a jitted one sees only static values.
    if is_static or (jit is None and type(arg) in (bool, int, str)):
        return (type(arg), arg)
    if jit is not None:
        # The dtype that JAX gives to a Python number or NumPy's float64 depends on x64.
        if isinstance(arg, (bool, int, float, complex)):
            return (type(arg), _is_x64())
        if isinstance(arg, (np.ndarray, np.generic)):
            return (np.ndarray, arg.shape, arg.dtype, _is_x64())
    leaves, structure = jax.tree_util.tree_flatten(arg)
    if len(leaves) == 1 and leaves[0] is arg:
        raise TypeError(f"a {type(arg).__name__} has no token")
    return (structure, *(_token(jit, leaf) for leaf in leaves))


def _is_x64() -> bool:
    config: Any = jax.config  # some versions have types for its options
    return bool(config.jax_enable_x64)


@contextlib.contextmanager
def on_engine(signature: inspect.Signature, kwargs: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], bool]]:
    """Takes `executor=` and `resume=` out of a call's keyword arguments. `executor` holds as a `settings` block.

    Args:
        signature: the signature of the tuned function. If it has a parameter `executor` or `resume`, the function
            gets that argument.
        kwargs: the keyword arguments.

    Yields:
        The other keyword arguments, and the value of `resume`.
    """
    own = {name: kwargs[name] for name in kwargs.keys() & {"executor", "resume"} - signature.parameters.keys()}
    with settings(executor=own["executor"]) if "executor" in own else contextlib.nullcontext():
        yield {name: value for name, value in kwargs.items() if name not in own}, bool(own.get("resume"))


def _rebuild(kind: Callable[..., Any], given: tuple[Any, ...], *function: Any) -> Any:
    from quarantune.transport import pickling  # calls do not need it

    return kind(pickling.from_parts(*function), *given)


def _name_of(fn: object) -> str:
    return getattr(fn, "__qualname__", None) or repr(fn)
