"""The device of an engine is of this process's kind if any machine has it, else of the most common kind."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Executor, Future
from typing import Any

import pytest

from quarantune.devices import discovery
from quarantune.engine import distributed, remote
from quarantune.values.errors import EngineError

SMALL, LARGE = ("cpu", "small CPU (4 cores)"), ("cuda", "NVIDIA H200")


class Answers(Executor):
    """An engine whose machines answer as given; further questions wait for ever.

    Args:
        answers: the platform and the kind of the device of each machine by name, or its error.
    """

    def __init__(self, answers: Iterable[tuple[str, tuple[str, str] | Exception]]) -> None:
        self._answers = iter(answers)
        self.asked: list[Future[Any]] = []

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        assert fn is remote.describe
        future: Future[Any] = Future()
        self.asked.append(future)
        host, answer = next(self._answers, ("", None))
        if isinstance(answer, Exception):
            future.set_exception(answer)
        elif answer is not None:
            platform, kind = answer
            versions = remote.versions_here()
            future.set_result({"host": host, "versions": versions, "platform": platform, "kind": kind})
        return future


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "_HEARS_S", 0.2)
    monkeypatch.setattr(discovery, "platform_and_kind", lambda hint: ("cpu", "login node (2 cores)"))


def chosen(*answers: tuple[str, tuple[str, str] | Exception]) -> tuple[str, str, str]:
    engine = Answers(answers)
    found = distributed.device(engine)
    assert len(engine.asked) == distributed._MOST_ASKED
    assert all(future.done() for future in engine.asked), "no question is left in the engine"
    return found.platform, found.device_kind, found.origin


def test_the_kind_of_most_machines_is_chosen_and_named(caplog: pytest.LogCaptureFixture) -> None:
    assert chosen(("a", SMALL), ("b", LARGE), ("c", LARGE)) == (*LARGE, "b")
    assert "has machines of several kinds (" in caplog.text
    assert "small CPU (4 cores) on a" in caplog.text
    assert "NVIDIA H200 on b, c" in caplog.text
    assert "and tunes for NVIDIA H200, because most of the machines that answered have it" in caplog.text


def test_answers_of_one_machine_count_once() -> None:
    assert chosen(("a", SMALL), ("a", SMALL), ("a", SMALL), ("b", LARGE), ("c", LARGE)) == (*LARGE, "b")


def test_the_kind_of_this_process_is_preferred(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(discovery, "platform_and_kind", lambda hint: SMALL)
    assert chosen(("b", LARGE), ("c", LARGE), ("a", SMALL)) == (*SMALL, "a")
    assert "tunes for small CPU (4 cores), because this process has the same kind" in caplog.text


def test_machines_of_one_kind_need_no_word(caplog: pytest.LogCaptureFixture) -> None:
    assert chosen(("a", LARGE), ("b", LARGE)) == (*LARGE, "a")
    assert caplog.messages == []


def test_machines_that_cannot_take_part_do_not_decide() -> None:
    assert chosen(("a", RuntimeError("no")), ("b", LARGE)) == (*LARGE, "b")
    engine = Answers([(f"{n}", RuntimeError(f"no {n % 2}")) for n in range(distributed._MOST_ASKED)])
    with pytest.raises(EngineError, match=r"could not run a first task: RuntimeError: no 0; .*RuntimeError: no 1"):
        distributed.device(engine)


def test_a_process_without_devices_lets_the_machines_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(hint: str | None) -> Any:
        raise RuntimeError("no backend")

    monkeypatch.setattr(discovery, "platform_and_kind", fail)
    assert chosen(("a", SMALL), ("b", LARGE)) == (*SMALL, "a")
