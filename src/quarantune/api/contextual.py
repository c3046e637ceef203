"""The contextual decorator: tunes kernels inside the function that calls them, by the time of the whole function."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, Unpack, cast, overload

from quarantune.api.autotune import Autotuned, Described, TunedCallable, memo_key, read_context, remember
from quarantune.api.tuner import Tuner
from quarantune.cache.problems import report_once
from quarantune.functions.binding import assignment_in_force, describe_function
from quarantune.host.frames import own_frames_hidden
from quarantune.host.locks import lazy
from quarantune.results.result import ContextualResult
from quarantune.transport import assignment
from quarantune.values import blocks
from quarantune.values.configs import Config
from quarantune.values.options import (
    BATCH_INVARIANT,
    NO_BATCH,
    ContextualKeywords,
    Options,
    checked_options,
    show_options,
)

if TYPE_CHECKING:
    from quarantune.tuning.contextual_job import ContextualFunction

_RUNS = 5
"""Default of `rep`: a whole function takes longer than a kernel."""
_INSTEAD = {"objective": "time alone", "n_warmup": "warmup", "n_repeat": "rep"} | {
    name: f"{name} of its kernels" for name in ("prune_fn", "max_device_memory", "check_batch")
}
"""Options that a function of kernels lacks, and the advice for each."""

_P = ParamSpec("_P")
_R = TypeVar("_R")


@overload
def contextual_autotune(
    **options: Unpack[ContextualKeywords],
) -> Callable[[Callable[_P, _R]], Contextual[_P, _R]]: ...


@overload
def contextual_autotune(fn: Callable[_P, _R], /, **options: Unpack[ContextualKeywords]) -> Contextual[_P, _R]: ...


def contextual_autotune(fn: Callable[..., Any] | None = None, /, **options: Unpack[ContextualKeywords]) -> Any:
    """Tunes the autotuned kernels that a function calls by the time of the whole function.

    It tries each kernel's configs in turn, with the other kernels at their best so far. A kernel that the function
    calls with several shapes is tuned for each. The result holds within this function only: elsewhere its kernels use
    their own results.

    Args:
        fn: the function; omit it to give options. If it is jitted, several of its programs compile at a time and ahead,
            which on a GPU takes a fraction of a plain function's time.
        **options: the options of `autotune`, except `objective` (time alone), and `prune_fn`, `check_batch` and
            `max_device_memory` (give them to the kernels). `warmup` and `rep` count runs of the function; the default
            of `rep` is 5 here. A function that is not jitted compiles as it runs: `compile_timeout` and `timeout`
            together bound one config.

    Returns:
        A `Contextual`, or a decorator that makes one.

    Raises:
        TypeError: An option does not exist, or the decorated object is not a function that can be tuned.
        ValueError: An option does not accept its value.

    Example:
        >>> import jax, quarantune
        >>> import jax.numpy as jnp
        >>> @quarantune.autotune({"batch": [1, 64]})
        ... @jax.jit(static_argnames=["batch"])
        ... def scale(x, batch: int = 1):
        ...     return jax.lax.map(lambda each: 2 * each + 1, x, batch_size=batch)
        >>> @quarantune.contextual_autotune
        ... @jax.jit
        ... def layer(x):
        ...     return scale(x).sum()
        >>> layer(jnp.ones(2**18))  # tunes `scale` by the time of `layer`
        Array(786432., dtype=float32)
        >>> list(layer.lookup(jnp.ones(2**18)).values())
        [{'batch': 64}]
    """
    if options.get("numerics") == BATCH_INVARIANT:
        raise ValueError(f"contextual_autotune {NO_BATCH}")
    checked = checked_options("contextual_autotune", {"rep": _RUNS, **options}, lacking=_INSTEAD)
    assignment.context()

    def decorate(function: Callable[_P, _R]) -> Contextual[_P, _R]:
        return Contextual(function, checked)

    return decorate if fn is None else decorate(fn)


show_options(contextual_autotune, lacking=_INSTEAD, rep=_RUNS)


class Contextual(TunedCallable[_P, _R]):
    """A function whose autotuned kernels are tuned together; made by `contextual_autotune`.

    A call runs the function with the best config for each kernel in it. The first call for its shapes tunes, and later
    calls remember.
    """

    def __init__(self, fn: Callable[_P, _R], options: Options) -> None:
        """Wraps a function; use `contextual_autotune`."""
        if isinstance(fn, (Autotuned, Contextual)):
            raise TypeError(
                f"{fn!r} is tuned already: put contextual_autotune on a function that calls autotuned kernels"
            )
        describe_function(fn)
        super().__init__(fn, options)

    @lazy
    def _tuner(self) -> Tuner:
        from quarantune.tuning.contextual_job import ContextualFunction, ContextualJob

        options = dataclasses.replace(self._options, name=self.name)
        return Tuner(ContextualFunction(self.__wrapped__, options), make_job=ContextualJob)

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], text: str) -> _R:
        function = cast("ContextualFunction", self.function)
        return cast("_R", function.runner(*args, **kwargs, **{assignment.KEY: text}))

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Calls the function with the best config for each of its kernels."""
        numerics = blocks.numerics_in_force()
        if numerics == BATCH_INVARIANT:
            report_once(
                f"{self.name} runs with the results of each of its kernels alone: contextual_autotune {NO_BATCH}"
            )
            return self.__wrapped__(*args, **kwargs)
        if (outer := assignment_in_force.get()) is not None:  # the outer contextual function tunes as a whole
            if outer.note is not None:
                self._tuner.choice(self._tuner.bind(args, kwargs))
            return self.__wrapped__(*args, **kwargs)
        key = memo_key(self._jit_options, args, kwargs)
        place = read_context(), key, numerics
        text: str | None = self._memo.get(place) if key is not None else None
        if text is None:
            with own_frames_hidden():
                config = self._tuner.choice(self._tuner.bind(args, kwargs)).config
            if config is None:
                return self.__wrapped__(*args, **kwargs)
            text = str(config[assignment.KEY])
            if key is not None:
                remember(self._memo, place, text)
            with self._tuner.seeding_compilation(config, args, kwargs):
                return self._run(args, kwargs, text)
        return self._run(args, kwargs, text)

    @overload
    def tune(self, *args: _P.args, **kwargs: _P.kwargs) -> ContextualResult: ...

    @overload
    def tune(self, described: Described, /, *args: Any, **kwargs: Any) -> ContextualResult: ...

    @overload
    def tune(self, first: Any, described: Described, /, *args: Any, **kwargs: Any) -> ContextualResult: ...

    @overload
    def tune(self, *args: Any, resume: bool, **kwargs: Any) -> ContextualResult: ...

    def tune(self, *args: Any, **kwargs: Any) -> ContextualResult:
        """Tunes for these arguments now, even if the cache has a result, and remembers it; see `Autotuned.tune`.

        Returns:
            The winning config of each kernel, and all trials; see `ContextualResult`.

        Raises:
            TuningFailedError: The function failed with every config of a kernel.
        """
        with own_frames_hidden():
            return cast("ContextualResult", self._tune(args, kwargs))

    def lookup(self, *args: _P.args, **kwargs: _P.kwargs) -> dict[assignment.Slot, Config] | None:
        """Returns each kernel's remembered config for these arguments, by the kernel's name and key, or None."""
        from quarantune.tuning.contextual_job import chosen_in

        is_tuned = blocks.numerics_in_force() != BATCH_INVARIANT
        config = self._tuner.lookup(self._tuner.bind(args, kwargs)) if is_tuned else None
        return None if config is None else chosen_in(config)

    def default(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Calls the function with every kernel at its own defaults, tuned or not."""
        return self._run(args, kwargs, assignment.encode({}, others=assignment.DEFAULT))

    def __repr__(self) -> str:
        """Returns the kind of tuner, and the function's name; the kernels are known once it runs."""
        return f"<Contextual {self.name}: the kernels that it calls>"
