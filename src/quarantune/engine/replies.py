"""Reads the messages of shards, which come from other machines and are checked like any other input."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from quarantune.engine import remote
from quarantune.measure.finals import Final
from quarantune.values.compiler_figures import CompilerFigures
from quarantune.values.json_object import JsonObject
from quarantune.values.trial import (
    END,
    READY,
    Config,
    EngineError,
    Outcome,
    Phase,
    ReferenceFailedError,
    Trial,
    is_plausible_ms,
)

_MOST_TEXT = 20_000
_PHASES = (*Phase, READY, END)
_DEATHS = ("Killed", "Crashed", "Died", "Lost", "Terminated", "Unreachable")
"""Parts of the names of the errors by which engines report that a worker has died."""
_ERRORS = {error.__name__: error for error in (ReferenceFailedError, ValueError, TypeError, ImportError)}


class DamageError(ValueError):
    """A message is not one of a shard's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class End:
    """How a shard ended on its machine.

    Attributes:
        how: one of the constants of `remote`.
        error: the reason, where it failed or was refused.
        kind: the type of the error, where the call itself is at fault.
        final: the comparison of its fastest configs, where it was whole.
        untuned: as `Swept.untuned`.
        complaint: as `Swept.complaint`.
    """

    how: str
    error: str = ""
    kind: str = ""
    final: Final = dataclasses.field(default_factory=Final)
    untuned: Trial | None = None
    complaint: str = ""


def end(message: Mapping[str, Any]) -> End:
    """Returns how a shard ended.

    Raises:
        DamageError: the message is no such thing.
    """
    try:
        texts = {name: str(message.get(name, ""))[:_MOST_TEXT] for name in ("error", "kind")}
        untuned = message.get("untuned")
        return End(
            how=str(message["end"]),
            final=Final(_rounds(message.get("rounds_ms", [])), _rounds(message.get("warm_ms", []))),
            untuned=None if untuned is None else Trial.from_json(untuned),
            complaint=str(message.get("complaint", ""))[:_MOST_TEXT],
            **texts,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamageError(f"its end makes no sense: {error!r:.200}") from error


def _rounds(data: Any) -> dict[int, list[float]]:
    rounds = {index: [*samples_ms] for index, samples_ms in data}
    for index, samples_ms in rounds.items():
        if type(index) is not int or not samples_ms or not all(map(is_plausible_ms, samples_ms)):
            raise ValueError("these are no samples")
    return rounds


def phase(message: Mapping[str, Any]) -> tuple[int, str]:
    """Returns the index of a config and the phase that it has entered.

    Raises:
        DamageError: the message is no such thing.
    """
    try:
        index, name = message["phase"]
        if type(index) is not int or name not in _PHASES:
            raise ValueError("there is no such phase")
        return index, name
    except (TypeError, ValueError) as error:
        raise DamageError(f"it is no phase: {error!r:.200}") from error


def program(message: Mapping[str, Any]) -> tuple[Config, Mapping[str, int]]:
    """Returns a config and the lines of its program.

    Raises:
        DamageError: the message is no such thing.
    """
    match message["program"]:
        case dict(config), dict(lines):
            return config, lines
    raise DamageError("it is no program")


def trials(result: Any) -> Iterator[JsonObject]:
    """Yields the messages about trials in the result of a shard.

    Raises:
        DamageError: this is not the result of a shard.
    """
    found = result.get("trials", []) if isinstance(result, dict) else None
    if not isinstance(found, list):
        raise DamageError(f"the engine returned {result!r:.80}")
    yield from found


def trial(message: Any, configs: Mapping[int, Config], *, is_check: bool) -> tuple[int, Trial]:
    """Returns the index of a config and its trial.

    Args:
        message: the message.
        configs: the configs by index; those of the message do not count.
        is_check: whether configs are only compiled.

    Raises:
        DamageError: the message is no such thing.
    """
    try:
        index, record, figures = message["index"], dict(message["trial"]), message["figures"]
        is_compiled = is_check and record["outcome"] == Outcome.OK
        if is_compiled:
            record["outcome"] = Outcome.NOT_RUN.value  # in files, a trial that is ok has a time
        found = Trial.from_json(record)
        return index, dataclasses.replace(
            found,
            config=configs[index],
            outcome=Outcome.OK if is_compiled else found.outcome,
            figures=None if figures is None else CompilerFigures.from_json(figures),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamageError(f"it is no trial: {error!r:.200}") from error


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
