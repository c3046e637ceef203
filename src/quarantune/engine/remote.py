"""Runs one shard of a sweep where an engine has put it: in a sandbox of that machine, as a local sweep."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from quarantune.devices import discovery, targets
from quarantune.engine import contact
from quarantune.engine.contact import Address, Contact
from quarantune.engine.parcel import Parcel, unpack
from quarantune.host import locks
from quarantune.sandbox import template
from quarantune.sweep import sweep
from quarantune.sweep.events import SweepEvents
from quarantune.sweep.limits import SweepLimits
from quarantune.sweep.request import SweepRequest
from quarantune.sweep.swept import Swept
from quarantune.values import settings as environment
from quarantune.values import versions
from quarantune.values.json_object import JsonObject
from quarantune.values.trial import Outcome, Phase, ReferenceFailedError, Trial

DONE, STOPPED, LATE, REFUSED, FAILED, INVALID = "done", "stopped", "late", "refused", "failed", "invalid"
"""How a shard ends on its machine."""
NO_CONFIG = -1
"""The index in the message that a machine has the device, and begins."""
REFUSAL_S = 0.3
"""A machine that cannot run a shard stays busy for this long, times the number of refusals, after it has said so: the
machines that can run it should get it next."""
_LONGEST_REFUSAL_S = 2.0


class _StopError(Exception):
    """Ends a sweep in its `on_tick`."""


class _RefusalError(Exception):
    """This machine cannot take part in the sweep; the message says why."""


def versions_here() -> dict[str, str]:
    """Returns the versions that must be the same on all machines of a sweep."""
    found = versions.versions()
    python = ".".join(platform.python_version_tuple()[:2])
    return {name: found[name] for name in ("quarantune", "jax", "jaxlib")} | {"python": python}


def describe() -> JsonObject:
    """Returns the platform and the kind of the device that this process would tune for, or how that failed.

    An engine runs it before there is a sweep, so that its result is plain data, and it raises nothing.
    """
    found: JsonObject = {"host": socket.gethostname(), "versions": versions_here()}
    try:
        return found | dict(zip(("platform", "kind"), discovery.platform_and_kind(None), strict=True))
    except Exception as error:
        return found | {"error": f"{type(error).__name__}: {error}"}


def run(task: Mapping[str, Any]) -> JsonObject:
    """Runs a shard, and returns how it ended as plain data; raises nothing.

    Args:
        task: as `Shards.task` makes it, of plain data, so that machines with another version can say so.
    """
    about = {"host": socket.gethostname(), "pid": os.getpid()}
    reached = contact.reach(Address.from_json(task["address"]), task["shard"], about)
    if reached is False:
        return about | {"end": STOPPED}
    line = reached if isinstance(reached, Contact) else None
    trials: list[JsonObject] = []
    with contextlib.closing(line) if line is not None else contextlib.nullcontext():
        end = about | _Shard(task, line, trials, about).run()
        if line is not None:
            line.say(end)
    return end | {"trials": trials}


def differing(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """Returns how the versions of a machine differ from the submitter's; empty where they do not.

    Args:
        theirs: the submitter's versions by name.
        ours: those of the machine.
    """
    differ = [name for name in ours if theirs.get(name) != ours[name]]
    return "; ".join(f"it has {name} {ours[name]}, and the submitter {theirs.get(name)}" for name in differ)


class _Shard:
    """One shard on its machine."""

    def __init__(
        self, task: Mapping[str, Any], line: Contact | None, trials: list[JsonObject], about: JsonObject
    ) -> None:
        self._task = task
        self._line = line
        self._trials = trials
        self._about = about
        self._ends_at = time.monotonic() + task["deadline_s"]

    def run(self) -> JsonObject:
        """Returns how the shard ended."""
        try:
            if self._task["versions"] != (here := versions_here()):
                raise _RefusalError(differing(self._task["versions"], here))
            parcel = unpack(self._task["parcel"])
            self._check_device(parcel)
            self._say({"phase": [NO_CONFIG, Phase.LOAD.value]})
            with prepared(parcel.threads):
                swept = self._sweep(parcel)
        except (_RefusalError, ImportError) as refusal:
            return self._refused(str(refusal))
        except _StopError as stop:
            return {"end": str(stop)}
        except (ReferenceFailedError, ValueError, TypeError) as error:
            return {"end": INVALID, "kind": type(error).__name__, "error": str(error)}
        except Exception as error:
            return {"end": FAILED, "error": f"{type(error).__name__}: {error}"}
        except (KeyboardInterrupt, SystemExit):  # an engine's way of cancelling
            return {"end": STOPPED}
        return {"end": DONE} | _described(swept)

    def _check_device(self, parcel: Parcel) -> None:
        """Raises where this machine does not have the device."""
        if parcel.target is not None:
            return
        platform, kind = parcel.problem.platform, parcel.problem.device_kind
        found = discovery.platform_and_kind("cpu" if platform == "cpu" else None)
        if found != (platform, kind):
            raise _RefusalError(f"it has {found[1]}, another kind of device than {kind}")

    def _refused(self, reason: str) -> JsonObject:
        """Returns the refusal of this machine, which is told at once, and stays busy while another takes the shard."""
        refusal: JsonObject = {"end": REFUSED, "error": reason}
        if self._line is not None:
            self._line.say(self._about | refusal)
        time.sleep(min(_LONGEST_REFUSAL_S, REFUSAL_S * (1 + self._task["refusals"])))
        return refusal

    def _sweep(self, parcel: Parcel) -> Swept:
        configs: dict[int, Any] = dict(self._task["configs"])
        with environment.settings(**parcel.settings):
            settings = environment.current()
        target = None if parcel.target is None else targets.usable(parcel.target)
        request = SweepRequest(
            problem=parcel.problem,
            options=parcel.options,
            settings=settings,
            limits=SweepLimits.of(parcel.options, settings),
            events=SweepEvents(
                on_trial=self._tell,
                on_tick=self._look,
                on_phase=lambda index, phase: self._say({"phase": [index, phase]}),
                on_program=lambda config, lines: self._say({"program": [config, lines]}),
            ),
            troubled=self._task["troubled"],
            target=target,
            has_final=self._task["is_whole"],
        )
        return sweep.run(request, configs, packed=parcel.packed)

    def _tell(self, index: int, trial: Trial) -> None:
        if trial.outcome is Outcome.ERROR and trial.phase is Phase.LOAD:
            raise _RefusalError(f"it cannot load the function: {trial.message}")  # no config is to blame
        record = trial.to_json()
        if trial.device:
            record["device"] = f"{trial.device} on {socket.gethostname()}"
        message = {"index": index, "trial": record}
        self._trials.append(message)
        self._say(message)

    def _say(self, message: JsonObject) -> None:
        if self._line is not None and not self._line.say(message):
            raise _StopError(STOPPED)

    def _look(self) -> None:
        if self._line is not None and self._line.is_over:
            raise _StopError(STOPPED)
        if time.monotonic() > self._ends_at:
            raise _StopError(LATE)


def _described(swept: Swept) -> JsonObject:
    """Returns the findings of a sweep as plain data."""
    return {
        "rounds_ms": [[index, list(samples_ms)] for index, samples_ms in swept.final.rounds_ms.items()],
        "warm_ms": [[index, list(samples_ms)] for index, samples_ms in swept.final.warm_ms.items()],
        "untuned": None if swept.untuned is None else swept.untuned.to_json(),
        "complaint": swept.complaint,
    }


_LINGER_S = 20.0
"""A template that no shard has used for this long is ended."""

_lock = locks.new()
_running = 0
_begun = 0
_before: dict[str, str | None] = {}


@contextlib.contextmanager
def prepared(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Prepares this process for a shard, and keeps its template for the next one unless the shard is interrupted.

    Args:
        variables: the submitter's limits of threads, None for those that are not set. A numerical library reads them
            when it is loaded, in the template, and engines set them to 1 for their own workers. Where shards of several
            sweeps run in one process at a time, those of the first hold.
    """
    global _running, _begun
    with _lock:
        _running += 1
        _begun += 1
        if _running == 1:
            _before.update({name: os.environ.get(name) for name in variables})
            _set(variables)
    linger_s = 0.0
    try:
        yield
        linger_s = _LINGER_S
    finally:
        with _lock:
            _running -= 1
            if not _running:
                _set(_before)
                _before.clear()
        _end_template_after(linger_s, _begun)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        elif os.environ.get(name) != value:
            os.environ[name] = value


def _end_template_after(linger_s: float, begun: int) -> None:
    """Ends the template unless a shard runs by then, or another has."""
    if "quarantune.engine.distributed" in sys.modules:
        return  # this process tunes, too, and keeps its template

    def end() -> None:
        with _lock:
            if not _running and begun == _begun:
                template.close_shared()

    if not linger_s:
        end()
        return
    timer = threading.Timer(linger_s, end)
    timer.daemon = True
    timer.start()
