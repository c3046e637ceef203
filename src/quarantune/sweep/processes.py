"""Which processes do the steps of a sweep's trials: a class for each mode checks the sweep and opens its workforce."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import jax

from quarantune.devices import discovery, targets
from quarantune.devices.discovery import LOGS_PTXAS, Device, cheap_context
from quarantune.host.frames import warn_once
from quarantune.host.interruptions import Stops
from quarantune.jax_internals import jax_backends, jax_functions
from quarantune.sandbox import shortages, spawning, spool, template, wire
from quarantune.scheduler.plan import Finish, Mode, Proof
from quarantune.sweep.proof import comparison
from quarantune.sweep.request import SweepRequest, Swept
from quarantune.transport import payload
from quarantune.transport.payload import PackedCall
from quarantune.values import codec
from quarantune.values.codec import text_of
from quarantune.values.configs import Config
from quarantune.values.settings import Isolation
from quarantune.values.trial import UNTUNED, CompileTarget
from quarantune.worker.arguments import BenchOptions

if TYPE_CHECKING:
    from quarantune.sandbox.workforce import Workforce
    from quarantune.sweep.routes import Routes

_PALLAS = "jax.experimental.pallas"
_PALLAS_MODULES = {
    "cpu": [f"{_PALLAS}.{backend}" for backend in ("triton", "tpu", "mosaic_gpu")],
    "cuda": [f"{_PALLAS}.triton"],
    "rocm": [f"{_PALLAS}.triton"],
    "tpu": [f"{_PALLAS}.tpu"],
}
"""Modules that Pallas imports when it lowers its first kernel, interpreted or for a device; this takes up to 0.25 s."""

_LARGEST_CONFIG_BYTES = wire.MAX_FRAME_BYTES // 8
"""Largest size of a config, in bytes: the message about finalists holds several configs."""


class InWorkers:
    """Workers do all steps.

    Attributes:
        sends: whether the call travels to other processes.
    """

    sends: ClassVar[bool] = True

    def __init__(self, request: SweepRequest) -> None:
        """Takes the sweep."""
        self._request = request
        self._problem = request.problem

    def observers(self, packed: PackedCall, possible: Sequence[Config]) -> list[str]:
        """Returns the observers whose figures the objective takes.

        Raises:
            ValueError: one of them cannot measure.
        """
        problem, options = self._problem, self._request.options
        if options.is_by_time:
            return []
        from quarantune.measure import objective, observing  # few sweeps need them

        names = objective.needed_observers(options.objective, dict(possible[0]) if possible else {})
        jit = jax_functions.jit_options(problem.fn) if jax_functions.is_jitted(problem.fn) else None
        for observer in map(observing.named, names):
            reason = observer.why_not(problem.platform, problem.device_kind)
            if jit is None or jit.donate_argnums or jit.donate_argnames or self._devices_needed(packed) > 1:
                reason = "that takes one device, and a jitted function that donates no arguments"
            if reason:
                what = observer.WHAT
                raise ValueError(f"{problem.name}: objective needs {what}, which cannot be measured: {reason}")
        return names

    def check(self, packed: PackedCall, possible: Sequence[Config]) -> None:
        """Raises if the sweep cannot run as requested.

        Raises:
            ValueError: the sweep cannot run; the message names a remedy.
        """
        problem = self._problem
        if problem.platform == "tpu" and jax_backends.backends_initialized():
            raise ValueError(
                f"{problem.name}: this process uses the TPU, so workers cannot measure on it: set "
                f"QUARANTUNE_ISOLATION=compile to measure in this process, or tune before JAX is used here"
            )
        self._check_devices(packed, needs_them=problem.platform != "cpu")
        self._check_sizes(possible)

    def run(
        self, configs: Mapping[int, Config], packed: PackedCall, finish: Finish, *, observers: Sequence[str]
    ) -> Swept:
        """Runs every config to its outcome.

        Args:
            configs: the configs by index, in the order to try them.
            packed: the call.
            finish: receives the trials.
            observers: the observers that measure in addition to the clock.

        Raises:
            ValueError: the settings name a device that does not exist.
            SandboxError: the sandbox itself failed.
        """
        request = self._request
        proof = Proof(request.on_program or comparison(request, packed.call), self._proved())
        with shortages.with_advice(self._problem.name):
            # The template starts before the imports, because its start takes longer than importing the routes' modules.
            shortages.patiently(template.shared)
            devices, target = self._devices_and_target()
            with self._routes(packed, finish, proof, devices, target, observers=observers) as routes:
                swept = routes.run(dict(configs))
        return dataclasses.replace(swept, is_traced=not proof.is_due)

    def _proved(self) -> tuple[int | None, ...]:
        """Returns the indices of the configs whose programs this process may trace to compare them; empty for all.

        Tracing may have side effects. This process traces only the defaults, unless the caller is about to run every
        config anyway.
        """
        return () if self._problem.untuned is None else (self._problem.default, UNTUNED)

    def _devices_needed(self, packed: PackedCall) -> int:
        return max(packed.devices_needed, self._request.options.devices_per_trial)

    def _check_devices(self, packed: PackedCall, *, needs_them: bool) -> None:
        """Raises if the sweep `needs_them`, and its arguments need more devices than a trial has."""
        problem, needed, per_trial = self._problem, packed.devices_needed, self._request.options.devices_per_trial
        if needs_them and needed > per_trial:
            why = "its arguments are laid out" if problem.manual_mesh is None else "in shard_map it communicates"
            raise ValueError(
                f"{problem.name}: {why} over {needed} devices, and devices_per_trial={per_trial}: set "
                f"devices_per_trial={needed}"
            )

    def _check_sizes(self, configs: Sequence[Config]) -> None:
        """Raises if a config is too large for a message to a worker."""
        for config in configs:
            size_bytes = len(text_of(config))
            if size_bytes > _LARGEST_CONFIG_BYTES:
                largest = max(config, key=lambda name: len(text_of(config[name])))
                raise ValueError(
                    f"{self._problem.name}: a config takes {size_bytes:,} bytes as JSON, most of them its {largest!r}, "
                    f"and at most {_LARGEST_CONFIG_BYTES:,} can be sent to a worker: pass large data as an argument of "
                    f"the call, and let the config hold a short name or a number for it"
                )

    def _devices_and_target(self) -> tuple[list[Device], CompileTarget | None]:
        """Returns the devices to measure on, and the target of workers without a device; saves the target."""
        request, problem = self._request, self._problem
        devices, target = discovery.devices_and_target(
            problem.platform, request.settings, request.options.devices_per_trial
        )
        if problem.platform == "tpu":
            target = targets.of_tpu(devices[0].kind)
        targets.remember(target, request.settings)
        return devices, target

    @contextlib.contextmanager
    def _routes(
        self,
        packed: PackedCall,
        finish: Finish,
        proof: Proof,
        devices: Sequence[Device],
        target: CompileTarget | None = None,
        *,
        observers: Sequence[str],
    ) -> Iterator[Routes]:
        """Yields the routes of the sweep."""
        request, options = (
            self._request,
            BenchOptions.of(self._problem.platform, self._request.options, observers=observers),
        )
        stops = Stops(time.monotonic)
        with spawning.standard_descriptors(), contextlib.ExitStack() as stack:
            fds = stack.enter_context(_spooled(packed, options))
            about = request, packed.call, devices[0], stops, options, fds[1]
            devices_needed = self._devices_needed(packed)
            yield self._routes_through(
                self._workforce(stack, fds, target, about, devices_needed),
                request,
                finish,
                proof,
                devices=devices,
                target=target,
                is_spread=devices_needed > 1,
                stops=stops,
            )

    def _routes_through(self, *about: Any, **more: Any) -> Routes:
        """Returns the routes through a workforce, from the arguments of `Routes`."""
        from quarantune.sweep.routes import Routes

        return Routes(*about, **more)

    def _workforce(
        self,
        stack: contextlib.ExitStack,
        fds: tuple[int, int],
        target: CompileTarget | None,
        about: Sequence[Any],
        devices_needed: int,
    ) -> Workforce:
        """Returns the workforce.

        Args:
            stack: closes it.
            fds: the payload, and the bytes of its arrays.
            target: the device that workers compile for without having one.
            about: the arguments of `ThisProcess`.
            devices_needed: how many devices one trial needs.
        """
        from quarantune.sandbox.pool import Sandbox

        request, platform = self._request, self._problem.platform
        payload_fd, arrays_fd = fds
        return stack.enter_context(
            Sandbox(
                payload_fd=payload_fd,
                arrays_fd=arrays_fd,
                method=request.settings.start_method or ("fork" if sys.platform == "linux" else "spawn"),
                modules=_PALLAS_MODULES.get(platform, []) if _PALLAS in sys.modules else [],
                plugins=platform != "cpu",
                **self._surroundings(target, devices_needed),
            )
        )

    def _surroundings(self, target: CompileTarget | None, devices_needed: int) -> Mapping[str, Any]:
        """Returns a sandbox's arguments that depend on the device to compile for or measure on."""
        platform = self._problem.platform
        environ = discovery.sandbox_environ(platform, self._problem.device_kind)
        if devices_needed == 1:
            environ |= cheap_context(platform, os.environ)
        can_warm_up = target is not None and target.platform != "tpu" and devices_needed == 1
        return {
            "environ": environ,
            "directory": platform in ("cuda", "rocm"),
            "warm_up": codec.encode(target) if target is not None and can_warm_up else None,
        }


class MeasuringHere(InWorkers):
    """Workers compile, and this process measures."""

    def check(self, packed: PackedCall, possible: Sequence[Config]) -> None:
        """Raises if the sweep cannot run as requested."""
        _check_here(self._request, packed)
        self._check_devices(packed, needs_them=self._problem.platform not in ("cpu", "tpu"))
        self._check_sizes(possible)

    def _routes_through(self, *about: Any, **more: Any) -> Routes:
        from quarantune.sweep.routes import RoutesHere

        return RoutesHere(*about, **more)

    def _workforce(
        self, stack: contextlib.ExitStack, fds: tuple[int, int], target: Any, about: Sequence[Any], devices_needed: int
    ) -> Workforce:
        from quarantune.sweep.this_process import MeasuringProcess

        compilers = super()._workforce(stack, fds, target, about, devices_needed)
        return stack.enter_context(contextlib.closing(MeasuringProcess(compilers, *about)))


class AllHere(InWorkers):
    """This process does all steps."""

    sends = False

    def check(self, packed: PackedCall, possible: Sequence[Config]) -> None:
        """Raises if the sweep cannot run as requested."""
        _check_here(self._request, packed)

    def run(
        self, configs: Mapping[int, Config], packed: PackedCall, finish: Finish, *, observers: Sequence[str]
    ) -> Swept:
        """Runs every config to its outcome; warns, once for each reason, that configs run in this process."""
        setting = self._request.settings.isolation
        why = {Isolation.NONE.value: " (unset it to tune in worker processes)"}
        by_itself = f", and {self._problem.name} has no jax.jit that workers could compile for"
        warn_once(
            f"QUARANTUNE_ISOLATION={setting}{why.get(setting, by_itself)}: configs run in this process: if one crashes "
            f"or hangs, so does this process",
            RuntimeWarning,
        )
        with self._routes(packed, finish, Proof(), [Device("", "")], observers=observers) as routes:
            return routes.run(dict(configs))

    def _routes_through(self, *about: Any, **more: Any) -> Routes:
        from quarantune.sweep.routes import RoutesAllHere

        return RoutesAllHere(*about, **more)

    def _workforce(
        self, stack: contextlib.ExitStack, fds: tuple[int, int], target: Any, about: Sequence[Any], devices_needed: int
    ) -> Workforce:
        from quarantune.sweep.this_process import ThisProcess  # this imports all of a worker's modules

        return stack.enter_context(contextlib.closing(ThisProcess(*about)))


class Compiling(InWorkers):
    """Workers compile, and nothing runs."""

    def observers(self, packed: PackedCall, possible: Sequence[Config]) -> list[str]:
        """Returns no observers: nothing runs."""
        return []

    def check(self, packed: PackedCall, possible: Sequence[Config]) -> None:
        """Raises if the sweep cannot run as requested."""
        self._check_devices(packed, needs_them=self._problem.platform != "cpu")
        self._check_sizes(possible)

    def _proved(self) -> tuple[int | None, ...]:
        return ()

    def _routes_through(self, *about: Any, **more: Any) -> Routes:
        from quarantune.sweep.routes import CompilingRoutes

        return CompilingRoutes(*about, **more)


class Checking(Compiling):
    """Workers compile for a device that need not exist here, and keep no program."""

    def check(self, packed: PackedCall, possible: Sequence[Config]) -> None:
        """Raises if the sweep cannot run as requested."""
        if packed.devices_needed > 1:
            raise ValueError(
                f"{self._problem.name}: its arguments are laid out over {packed.devices_needed} devices, and a compile "
                f"check is for one: give it the arguments of one device, as arrays or as jax.ShapeDtypeStruct"
            )
        self._check_sizes(possible)

    def _devices_and_target(self) -> tuple[list[Device], CompileTarget | None]:
        target = self._request.target
        assert target is not None
        return [target.device], target.for_compiling

    def _surroundings(self, target: CompileTarget | None, devices_needed: int) -> Mapping[str, Any]:
        environ = super()._surroundings(target, devices_needed)["environ"]
        return {"environ": environ | (LOGS_PTXAS if self._problem.platform == "cuda" else {})}


_OF = {
    Mode.IN_WORKERS: InWorkers,
    Mode.MEASURING_HERE: MeasuringHere,
    Mode.HERE: AllHere,
    Mode.COMPILING: Compiling,
    Mode.CHECKING: Checking,
}


def of(request: SweepRequest) -> InWorkers:
    """Returns the processes of a sweep."""
    return _OF[request.mode](request)


def _check_here(request: SweepRequest, packed: PackedCall) -> None:
    """Raises if configs cannot be measured in this process.

    Raises:
        ValueError: the configs communicate, or run on devices of several processes, and only one of these tunes.
    """
    problem, isolation = request.problem, request.settings.isolation
    is_partly_elsewhere = any(own is not None and not own.is_fully_addressable for own in packed.call.own_shardings)
    needed = packed.devices_needed
    if is_partly_elsewhere or (needed > 1 and jax.process_count() > 1 and needed > jax.local_device_count()):
        raise ValueError(
            f"{problem.name}: with QUARANTUNE_ISOLATION={isolation}, a call whose arrays lie on devices of several "
            f"processes cannot be tuned, because only one of these tunes: unset it to tune in workers"
        )
    if problem.manual_mesh is not None:
        raise ValueError(
            f"{problem.name}: inside shard_map, only workers can tune a function that communicates between devices: "
            f"unset QUARANTUNE_ISOLATION or set it to 'process', or give its tunables by hand"
        )


@contextlib.contextmanager
def _spooled(packed: PackedCall, options: BenchOptions) -> Iterator[tuple[int, int]]:
    """Yields read-only descriptors of the payload and of the arrays; -1 for an absent one."""
    with contextlib.ExitStack() as stack:
        fds = []
        for label, size_bytes in (("payload", len(packed.blob)), ("arrays", packed.call.spool_bytes)):
            fds.append(spool.create(label, size_bytes=size_bytes) if size_bytes else -1)
            if size_bytes:
                stack.callback(os.close, fds[-1])
        if packed.blob:
            spool.write_parts(fds[0], [packed.blob, pickle.dumps(options)])
        if packed.call.spool_bytes:
            payload.write_arrays(packed, fds[1])
        for position, fd in enumerate(fds):
            if fd >= 0:
                fds[position] = spool.protect(fd)
                stack.callback(os.close, fds[position])
        yield fds[0], fds[1]
