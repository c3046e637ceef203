"""`quarantune doctor`: what this machine gives to tuning, and what is in the way."""

from __future__ import annotations

import argparse
import textwrap

from quarantune import doctor
from quarantune.cli.output import DONE, ERROR_STYLE, FAILED, OK_STYLE, Output
from quarantune.doctor import Check
from quarantune.values.texts import printable

_MARKS = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}
_STYLES = {"ok": OK_STYLE, "warn": "33", "fail": ERROR_STYLE}


def run(options: argparse.Namespace, out: Output) -> int:
    """Prints each finding as soon as it is known, with its remedy."""

    def show(check: Check) -> None:
        mark = _MARKS[check.status]
        lines = textwrap.wrap(printable(f"{mark}  {check.name}: {check.found}"), out.width, subsequent_indent=" " * 6)
        if check.remedy:
            lines += textwrap.wrap(
                printable(check.remedy), out.width, initial_indent=" " * 6 + "-> ", subsequent_indent=" " * 9
            )
        lines[0] = lines[0].replace(mark, out.styled(mark, _STYLES[check.status]), 1)
        out.line("\n".join(lines))

    checks = doctor.run(on_check=show)
    is_failed = doctor.failed(checks)
    out.line()
    out.line(
        "something essential is in the way of tuning: see the lines marked FAIL" if is_failed else "tuning works here"
    )
    out.json({"ok": not is_failed, "checks": [check.to_dict() for check in checks]})
    return FAILED if is_failed else DONE
