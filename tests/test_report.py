"""Tables and messages: no config and no message can garble a terminal or break print."""

from __future__ import annotations

import io

from quarantune.results import report
from quarantune.values.trial import Outcome, Trial

CLEAR = "\x1b[2J\x1b]0;title\x07"


def hostile() -> list[Trial]:
    return [
        Trial(
            config={"mode": f"a\udc80{CLEAR}"},
            outcome=Outcome.ERROR,
            message=f"no\ud800 \u202e{CLEAR}\nmore",
            log_tail=CLEAR,
        ),
        Trial(config={"mode": (CLEAR, {"\x1b": "\r"})}, outcome=Outcome.CRASHED, message="\x00"),
        Trial(config={"mode": "naïve ✓"}, outcome=Outcome.OK, time_ms=1.0),
    ]


def test_a_table_shows_surrogates_and_terminal_escapes_as_text() -> None:
    shown = report.table(hostile(), width=200)
    assert all(line.isprintable() for line in shown.splitlines())
    print(shown, file=io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    assert "a\\udc80\\x1b[2J" in shown
    assert "no\\ud800 \\u202e\\x1b[2J" in shown
    assert "naïve ✓" in shown


def test_the_message_of_a_failed_sweep_is_shown_as_text() -> None:
    message = report.failure_message("f", hostile()[:2])
    assert all(line.isprintable() for line in message.splitlines())
    assert len(message.splitlines()) == 5
