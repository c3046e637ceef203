"""The source of configs that a run has not been given from the start: a search that learns from the trials."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from quarantune.values.trial import Config, Trial


class ConfigSource(Protocol):
    """Gives further configs to a run, or to several runs one after another, and receives their trials."""

    @property
    def is_closed(self) -> bool:
        """Whether it gives no further configs."""
        ...

    def take(self, count: int) -> Mapping[int, Config]:
        """Returns at most `count` further configs by index; fewer where it waits for trials, or at its end."""
        ...

    def ended(self, index: int, trial: Trial) -> None:
        """Receives the trial of any config of a run, as soon as it has ended."""
        ...

    def reason_to_stop(self) -> str:
        """Returns why configs that are not being measured should not go on; empty while they should."""
        ...


class _Nothing:
    """The source of a run whose configs are all known from the start."""

    is_closed = True

    def take(self, count: int) -> Mapping[int, Config]:
        return {}

    def ended(self, index: int, trial: Trial) -> None:
        return

    def reason_to_stop(self) -> str:
        return ""


NOTHING_MORE: ConfigSource = _Nothing()


class _OnlyStopping(_Nothing):
    """Says when to stop as another source does, and gives no configs."""

    def __init__(self, source: ConfigSource) -> None:
        self._source = source

    def reason_to_stop(self) -> str:
        return self._source.reason_to_stop()


def only_stopping(source: ConfigSource) -> ConfigSource:
    """Returns a source that says when to stop as another one does, but gives no configs and receives no trials."""
    return _OnlyStopping(source)


def one_by_one(configs: Mapping[int, Config], source: ConfigSource) -> Iterator[tuple[int, Config]]:
    """Yields configs in order, then those of a source, each once the trial of the one before it has ended."""
    yield from configs.items()
    while not source.is_closed and (taken := source.take(1)):
        yield from taken.items()
