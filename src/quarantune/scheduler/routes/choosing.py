"""Chooses the routes of a sweep's configs, one after another: each route leaves to the next the configs it cannot run.

If possible, workers compile configs without their device: more configs can then compile at the same time, and a bad
config holds no device. Several workers with the device compile the configs that need it. One worker compiles and
measures a config whose program cannot leave its process. If this process measures, workers compile for it as long as
they can.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from quarantune.scheduler.plan import Mode
from quarantune.scheduler.routes.apart import Apart, ApartInTurns, Cheaply
from quarantune.scheduler.routes.base import Conditions, TrialRoute
from quarantune.scheduler.routes.compiled_only import CompileCheck, CompiledOnly, CompiledOnlyApart
from quarantune.scheduler.routes.handed_over import HandedOver
from quarantune.scheduler.routes.here import CompiledApart, Here, MeasuredHere
from quarantune.scheduler.routes.together import Together
from quarantune.values.trial import Route

_FEWEST_RANKED = 8
"""Least number of configs to rank: fewer compile nearly at the same time, and some of them compile fully anyway."""


def without_device(given: Conditions, unfit: Collection[Route], *, is_closed: bool) -> TrialRoute | None:
    """Returns the route on which workers compile without the device; None if they cannot.

    Args:
        given: the conditions.
        unfit: the routes that no config of the function could take in an earlier sweep of this process.
        is_closed: whether no search adds configs.
    """
    if given.mode is Mode.CHECKING:
        return CompileCheck.of(given)
    on_cpu = given.platform == "cpu"
    can_compile = given.is_jitted and Route.APART not in unfit and (on_cpu or given.target is not None)
    # A worker without a device compiles for a single device.
    match None if given.is_spread else given.mode:
        case Mode.COMPILING if can_compile or on_cpu:
            return CompiledOnlyApart.of(given)
        case Mode.MEASURING_HERE if can_compile or on_cpu:
            return CompiledApart.of(given, is_closed=is_closed)
        case Mode.IN_WORKERS if can_compile and not on_cpu:
            return Apart.of(given, is_closed=is_closed)
        # CPU workers are cheap: handing over an executable saves time only if a measuring worker takes several configs.
        case Mode.IN_WORKERS if can_compile and given.configs_per_worker > 1:
            return ApartInTurns.of(given, is_closed=is_closed)
    return None


def cheaply(given: Conditions, unfit: Collection[Route], *, count: int, is_closed: bool) -> TrialRoute | None:
    """Returns the route that ranks configs whose products XLA would tune on the device; None if that cannot pay.

    Args:
        given: the conditions.
        unfit: the routes that no config of the function could take in an earlier sweep of this process.
        count: how many configs there are.
        is_closed: whether no search adds configs.
    """
    is_apart = given.mode is Mode.IN_WORKERS and given.platform == "cuda" and given.target is not None
    is_worth = count >= _FEWEST_RANKED or not is_closed
    can_leave = given.can_hand_over and Route.HANDED_OVER not in unfit
    can_rank = given.ranks and is_apart and can_leave and is_worth
    return Cheaply.of(given, is_closed=is_closed) if can_rank else None


def with_device(given: Conditions, unfit: Collection[Route], *, count: int, is_closed: bool) -> Iterator[TrialRoute]:
    """Yields the routes of configs that must compile with their device; the last route can take any config.

    Yields nothing if configs only compile and workers cannot use the device.

    Args:
        given: the conditions.
        unfit: the routes that no config of the function could take in an earlier sweep of this process.
        count: how many configs there are.
        is_closed: whether no search adds configs.
    """
    match given.mode:
        case Mode.COMPILING:
            if not given.is_taken:
                yield CompiledOnly.of(given)
        case Mode.MEASURING_HERE if not given.is_taken:
            yield MeasuredHere.of(given, is_closed=is_closed)
        case Mode.IN_WORKERS:
            is_gpu = given.platform not in ("cpu", "tpu")  # a TPU belongs to one process
            can_leave = given.can_hand_over and Route.HANDED_OVER not in unfit
            if is_gpu and can_leave and (count > 1 or not is_closed):
                yield HandedOver.of(given, is_closed=is_closed)
            yield Together.of(given, is_closed=is_closed)
        case _:
            yield Here.of(given, is_closed=is_closed)
