"""One finding of the doctor."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable


class Status(enum.StrEnum):
    """How a check ended."""

    OK = "ok"
    WARN = "warn"
    """Tuning works, but is slower, less precise or less safe than it could be."""
    FAIL = "fail"
    """Tuning does not work, or does not reach the device or the cache that it is meant for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """One finding.

    Attributes:
        name: the thing that was looked at.
        status: how the check ended.
        found: the finding, in a sentence without a full stop.
        remedy: the way to put it right; empty where there is nothing to do.
    """

    name: str
    status: Status
    found: str
    remedy: str = ""

    def to_dict(self) -> dict[str, str]:
        """Returns the finding as JSON holds it."""
        return {"name": self.name, "status": self.status.value, "found": self.found, "remedy": self.remedy}


def ok(name: str, found: str) -> Check:
    """Returns a finding that needs nothing."""
    return Check(name=name, status=Status.OK, found=found)


def warn(name: str, found: str, remedy: str) -> Check:
    """Returns a finding with which tuning works, but could work better."""
    return Check(name=name, status=Status.WARN, found=found, remedy=remedy)


def fail(name: str, found: str, remedy: str) -> Check:
    """Returns a finding with which tuning does not work."""
    return Check(name=name, status=Status.FAIL, found=found, remedy=remedy)


def judged(name: str, found: str, remedy: str, *, is_good: bool, is_needed: bool = False) -> Check:
    """Returns a finding that needs nothing where it is good; else one with which tuning works, unless it is needed."""
    return ok(name, found) if is_good else (fail if is_needed else warn)(name, found, remedy)


def failed(checks: Iterable[Check]) -> bool:
    """Returns whether something essential failed."""
    return any(check.status is Status.FAIL for check in checks)


def first_line(error: BaseException) -> str:
    """Returns an error as one line."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
