"""The interface of a scheduler to its workers: workers of a sandbox, this process, or workers of a test."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

from quarantune.host import machine
from quarantune.sandbox.template_messages import Ended
from quarantune.values.codec import DamageError, JsonObject


@dataclasses.dataclass(frozen=True)
class Said:
    """A worker sent a message, or damaged its connection.

    Attributes:
        number: the worker.
        message: the message's frame, not yet decoded; or the damage, which ends reading from the worker.
    """

    number: int
    message: JsonObject | DamageError


Event: TypeAlias = Said | Ended


class Workforce(Protocol):
    """Starts workers, gives them tasks, and reports what they say and how they end.

    A worker has a number. Its tasks and replies are frames as `values.codec.encode` makes them of `sandbox.messages`.
    The end of each worker comes once, after its last message. All methods accept the number of a worker that has ended;
    `forget` ends its life here.
    """

    @property
    def baseline_bytes(self) -> int:
        """Private memory that a worker has from the start."""

    def open(self, *, load_timeout_s: float | None) -> None:
        """Makes ready for workers, and loads the call that they share.

        Args:
            load_timeout_s: the deadline for loading; None if there is nothing to load.

        Raises:
            LoadError: the call cannot be loaded.
            SandboxError: no worker could ever start.
        """

    def start(self, task: JsonObject, *, fds: Sequence[int] = (), environ: Mapping[str, str] | None = None) -> int:
        """Starts a worker with its first task, and returns the worker's number.

        Args:
            task: the task's frame.
            fds: descriptors that go with the task; the caller may close them afterwards.
            environ: environment variables that only this worker gets.
        """

    def send(self, number: int, message: JsonObject, fds: Sequence[int] = ()) -> None:
        """Sends a worker a further task; if the worker no longer reads, `Ended` follows."""

    def finish(self, number: int) -> None:
        """Lets a worker end once it has nothing to do."""

    def kill(self, number: int, *, shows_stack: bool = False) -> None:
        """Kills a worker and everything it started; `Ended` follows.

        Args:
            number: the worker's number.
            shows_stack: whether the worker writes its stack to its log first.
        """

    def poll(self, timeout_s: float) -> list[Event]:
        """Returns the events since the last call, waiting for at most `timeout_s` seconds if there are none."""

    def forget(self, number: int) -> None:
        """Removes a worker that has ended, or one that does not die."""

    def pid(self, number: int) -> int | None:
        """Returns a worker's process id; None until it is known, and for a worker without a separate process."""

    def log(self, number: int) -> str:
        """Returns a worker's output."""

    def clear_log(self, number: int) -> None:
        """Removes the output of a worker so far, which does not belong to its next config."""

    def trim_logs(self) -> None:
        """Shortens the logs that have grown too large."""

    def share_modules(self, names: Sequence[str]) -> None:
        """Imports modules that a worker lacked, for later workers."""

    def common_files(self) -> set[machine.FileId]:
        """Returns the files in memory that every worker has open or mapped and that no worker has made."""
