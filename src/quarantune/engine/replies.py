"""Reads the messages of shards, which come from other machines and are checked like any other input."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

from quarantune.engine import remote
from quarantune.measure.finals import Final
from quarantune.values.codec import DamageError, Record, one_of
from quarantune.values.json_object import JsonObject
from quarantune.values.trial import (
    END,
    READY,
    Config,
    EngineError,
    Milliseconds,
    Outcome,
    Phase,
    ReferenceFailedError,
    Trial,
)

_MOST_TEXT = 20_000
_DEATHS = ("Killed", "Crashed", "Died", "Lost", "Terminated", "Unreachable")
"""Parts of the names of the errors by which engines report that a worker has died."""
_ERRORS = {error.__name__: error for error in (ReferenceFailedError, ValueError, TypeError, ImportError)}


def _cut(text: str) -> str:
    return text[:_MOST_TEXT]


def _not_empty(samples_ms: tuple[float, ...]) -> tuple[float, ...]:
    if not samples_ms:
        raise ValueError("there are no samples")
    return samples_ms


_Text: TypeAlias = Annotated[str, _cut]
_Rounds: TypeAlias = tuple[tuple[int, Annotated[tuple[Milliseconds, ...], _not_empty]], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ended(Record):
    """A config has ended.

    Attributes:
        index: its index.
        trial: its trial, as `Trial.to_json` describes it.
    """

    index: int
    trial: JsonObject

    def read(self, configs: Mapping[int, Config], *, is_check: bool) -> Trial:
        """Returns the trial.

        Args:
            configs: the configs by index; those of messages do not count.
            is_check: whether configs are only compiled.

        Raises:
            DamageError: the message describes none.
        """
        if self.index not in configs:
            raise DamageError(f"there is no config {self.index}")
        is_compiled = is_check and self.trial.get("outcome") == Outcome.OK
        # In files, a trial that is ok has a time.
        found = Trial.from_json(self.trial | ({"outcome": Outcome.NOT_RUN.value} if is_compiled else {}))
        outcome = Outcome.OK if is_compiled else found.outcome
        return dataclasses.replace(found, config=configs[self.index], outcome=outcome)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entered(Record):
    """A config has entered a phase.

    Attributes:
        phase: its index, and the phase.
    """

    phase: tuple[int, Annotated[str, one_of(*Phase, READY, END)]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lowered(Record):
    """A config has been lowered.

    Attributes:
        program: the config, and the lines of its program.
    """

    program: tuple[JsonObject, Mapping[str, int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class End(Record):
    """A shard has ended on its machine.

    Attributes:
        end: how: one of the constants of `remote`.
        host: the machine.
        error: the reason, where it failed or was refused.
        kind: the type of the error, where the call itself is at fault.
        rounds_ms: the comparison of its fastest configs, where it was whole, as in `Final`.
        warm_ms: as in `Final`.
        untuned: as `Swept.untuned`.
        complaint: as `Swept.complaint`.
        trials: all that have ended, in the result of a shard.
    """

    end: str
    host: _Text = ""
    error: _Text = ""
    kind: _Text = ""
    rounds_ms: _Rounds = ()
    warm_ms: _Rounds = ()
    untuned: Trial | None = None
    complaint: _Text = ""
    trials: tuple[Ended, ...] = ()

    @property
    def final(self) -> Final:
        """The comparison of its fastest configs."""
        return Final(dict(self.rounds_ms), dict(self.warm_ms))


def read(message: JsonObject) -> End | Entered | Lowered | Ended:
    """Returns the message of a shard.

    Raises:
        DamageError: it is none.
    """
    if "end" in message:
        return End.from_json(message)
    if "phase" in message:
        return Entered.from_json(message)
    return Lowered.from_json(message) if "program" in message else Ended.from_json(message)


def error_of(end: End, name: str, host: str) -> Exception:
    """Returns the error of a call that cannot be tuned, as a machine has found.

    Args:
        end: the end of its shard.
        name: the function's name.
        host: the machine.
    """
    if (kind := _ERRORS.get(end.kind)) is not None:
        return kind(f"{end.error} (on {host})")
    return EngineError(f"{name}: {host} cannot take part: {end.error}; give all machines the same versions")


def means_death(error: BaseException) -> bool:
    """Returns whether an engine's error says that a worker has died, and not only that it gave up the work."""
    return isinstance(error, concurrent.futures.BrokenExecutor) or any(part in type(error).__name__ for part in _DEATHS)


def cannot_import(error: BaseException) -> str | None:
    """Returns the text of an error that says that a worker lacks this package; None for any other error."""
    found: BaseException | None = error
    while found is not None:
        if "No module named 'quarantune" in str(found):
            return next(line for line in str(found).splitlines() if "No module named 'quarantune" in line)
        found = found.__cause__ or found.__context__
    return None


def lacks_package(text: str) -> str:
    """Returns the end of a sentence that says that a worker lacks this package, and the remedy.

    Args:
        text: the worker's error.
    """
    ours = remote.versions_here()
    return f"cannot import quarantune ({text}): install quarantune {ours['quarantune']} with jax {ours['jax']} there"


def check_description(found: Any) -> None:
    """Raises where a worker's description of itself shows that it can take no part.

    Raises:
        EngineError: it has other versions, or no device that could be found.
    """
    if not isinstance(found, dict) or not isinstance(found.get("versions"), dict):
        raise EngineError(f"a worker of the executor described itself as {found!r:.80}: give it this quarantune")
    if differing := remote.differing(remote.versions_here(), found["versions"]):
        raise EngineError(f"{found['host']} cannot take part: {differing}; give all machines the same versions")
    if "kind" not in found:
        raise EngineError(f"{found['host']} cannot take part, because its devices are not known: {found['error']}")
