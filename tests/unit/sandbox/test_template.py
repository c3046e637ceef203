"""Stopped and silent templates are found by counting checks."""

from __future__ import annotations

import pytest

from quarantune.host import machine
from quarantune.sandbox import template
from quarantune.sandbox.template import TemplateWatch


@pytest.fixture
def woken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Ids of the woken processes."""
    pids: list[int] = []
    monkeypatch.setattr(template, "wake", pids.extend)
    return pids


def test_a_template_that_stays_stopped_is_woken_then_given_up(
    woken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "is_stopped", lambda pid: pid == 8)
    monkeypatch.setattr(machine, "activity", lambda pid: ("T", 0))
    watch = TemplateWatch()
    found = [watch.check([7, 8], awaits_start=False) for _ in range(template.STOPPED_CHECKS + 2)]
    assert found[:-2] == [None] * template.STOPPED_CHECKS
    assert found[-2:] == [(8, "stays stopped"), None]
    assert woken == [7, 8] * len(found)


@pytest.mark.parametrize(
    ("state", "works", "awaits_start", "is_given_up"),
    [("S", False, True, True), ("S", True, True, False), ("R", False, True, False), ("S", False, False, False)],
    ids=["silent", "works", "waits for a CPU", "has no orders"],
)
def test_only_an_idle_template_with_a_worker_to_start_is_silent(
    state: str, works: bool, awaits_start: bool, is_given_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = iter(range(1000))
    monkeypatch.setattr(machine, "is_stopped", lambda pid: False)
    monkeypatch.setattr(machine, "activity", lambda pid: (state, next(checks) if works else 0))
    watch = TemplateWatch()
    found = [watch.check([7], awaits_start=awaits_start) for _ in range(template.SILENT_CHECKS + 2)]
    assert found[-1] == ((7, "does not answer") if is_given_up else None)
    assert set(found[:-1]) == {None}
