"""Whether a sweep runs on this machine or on those of a distributed engine, and for which device."""

from __future__ import annotations

import concurrent.futures
import functools
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any

from quarantune.host.process import new_lock
from quarantune.sweep.isolation import AUTO, Isolation
from quarantune.values.configs import Config
from quarantune.values.settings import TIME, Settings
from quarantune.values.trial import EngineError, Trial

if TYPE_CHECKING:
    from quarantune.devices.targets import Target
    from quarantune.sweep.request import SweepRequest, Swept

_MOST_ASKED = 6
"""How many further answers are asked for where a first machine cannot take part."""
_LOOK_S = 0.2
"""Ctrl-C ends a wait for an engine within this time."""

_devices: weakref.WeakKeyDictionary[Executor, Target] = weakref.WeakKeyDictionary()
_lock = new_lock()


def run(request: SweepRequest, configs: Mapping[int, Config], *, known: Mapping[int, Trial] | None = None) -> Swept:
    """Runs a sweep, as `sweep.run` does, on this machine or on those of an engine.

    Raises:
        ValueError: there is an engine, and the settings want trials in this process, or the objective is not time.
    """
    settings = request.settings
    if settings.executor is None:
        from quarantune.sweep import sweep  # cached calls do not need it

        return sweep.run(request, configs, known=known)
    if request.options.objective != TIME and not (request.compile_only or request.target):
        raise ValueError(f"{request.problem.name}: with executor=, time is the only objective: leave out one of them")
    if settings.isolation not in (AUTO, Isolation.PROCESS.value):
        raise ValueError(
            f"QUARANTUNE_ISOLATION={settings.isolation} runs configs in this process, and executor= on other machines: "
            f"unset one of them"
        )
    from quarantune.engine import distributed

    return distributed.run(settings.executor, request, configs, known=known)


def device(settings: Settings) -> Target | None:
    """Returns the device of an engine's machines: that of the first one that answers; None without an engine.

    Raises:
        EngineError: the engine cannot run anything, or its machine has other versions than this one.
    """
    executor = settings.executor
    if executor is None:
        return None
    from quarantune.engine.distributed import WholeSweeps

    executor = executor.executor if isinstance(executor, WholeSweeps) else executor
    with _lock:
        try:
            known = _devices.get(executor)
        except TypeError:  # it has no hash, or no weak references
            return _ask(executor)
        if known is None:
            known = _devices[executor] = _ask(executor)
        return known


def _ask(executor: Executor) -> Target:
    """Returns the device of the first machine that can take part.

    Raises:
        EngineError: none of those that answered can, or none answered.
    """
    from quarantune.devices.targets import Target
    from quarantune.engine import remote

    faults: dict[str, None] = {}
    for count in (1, _MOST_ASKED):  # at a time, so that other machines get some of them
        for answer in _answers(executor, count):
            try:
                found = answer()
                remote.check_description(found)
            except EngineError as error:
                faults[str(error)] = None
                continue
            return Target(
                name=found["kind"], platform=found["platform"], device_kind=found["kind"], origin=found["host"]
            )
    raise EngineError("; ".join(faults))


def _answers(executor: Executor, count: int) -> list[Callable[[], Any]]:
    """Asks machines of an engine to describe themselves; returns functions that wait for their answers."""
    from quarantune.engine import remote
    from quarantune.engine.shards import Silence

    silence = Silence(executor)

    def wait(future: Future[Any]) -> Any:
        try:
            while True:
                try:
                    return future.result(_LOOK_S)
                except concurrent.futures.TimeoutError:
                    if future.done():
                        raise
                    silence.check()
        except EngineError:
            raise
        except Exception as error:
            if (text := remote.cannot_import(error)) is not None:
                reason = remote.lacks_package(text)
                raise EngineError(f"a worker of the executor {type(executor).__name__} {reason}") from error
            raise _unable(executor, error) from error

    try:
        return [functools.partial(wait, executor.submit(remote.describe)) for _ in range(count)]
    except Exception as error:
        raise _unable(executor, error) from error


def _unable(executor: Executor, error: Exception) -> EngineError:
    from quarantune.engine import remote

    reason = f"{type(error).__name__}: {error}"
    if remote.means_death(error):
        reason = f"its worker ended; perhaps it {remote.lacks_package(reason)}"
    return EngineError(f"the executor {type(executor).__name__} could not run a first task: {reason}")
