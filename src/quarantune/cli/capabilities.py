"""`quarantune doctor` and `quarantune targets`: checks of this machine, and the devices to compile for."""

from __future__ import annotations

import argparse
import textwrap

import quarantune.doctor as checks
from quarantune.cli.output import DONE, ERROR_STYLE, FAILED, OK_STYLE, Output, wrapped
from quarantune.devices import targets as known
from quarantune.values.texts import columns, printable

_MARKS = {"ok": ("ok  ", OK_STYLE), "warn": ("warn", "33"), "fail": ("FAIL", ERROR_STYLE)}


def doctor(options: argparse.Namespace, out: Output) -> int:
    """Prints each finding as soon as it is known, with its remedy."""

    def show(check: checks.Check) -> None:
        mark, style = _MARKS[check.status]
        found = printable(f"{mark}  {check.name}: {check.found}")
        text = textwrap.fill(found, out.width, subsequent_indent=" " * 6)
        out.line(text.replace(mark, out.styled(mark, style), 1))
        if check.remedy:
            remedy = printable(f"      -> {check.remedy}")
            out.line(textwrap.fill(remedy, out.width, subsequent_indent=" " * 9))

    found = checks.run(on_check=show)
    is_failed = checks.failed(found)
    out.line()
    out.line(
        "something essential is in the way of tuning: see the lines marked FAIL" if is_failed else "tuning works here"
    )
    out.json({"ok": not is_failed, "checks": [check.to_dict() for check in found]})
    return FAILED if is_failed else DONE


_FIELDS = ("name", "platform", "device_kind", "is_here", "origin")


def targets(options: argparse.Namespace, out: Output) -> int:
    """Lists the devices, starting with this machine's, and the missing compilers."""
    records, rows = [], [("device", "here", "description")]
    without_compiler: dict[str, list[str]] = {}
    for target in known.targets():
        missing = None
        try:
            known.usable(target)
        except ImportError as error:
            missing = str(error).rpartition(": ")[2]
            without_compiler.setdefault(missing, []).append(target.name)
        rows.append((target.name, "yes" if target.is_here else "", target.origin))
        records.append({name: getattr(target, name) for name in _FIELDS} | {"needs": missing})
    out.line("\n".join(columns(wrapped(rows, out.width))))
    for missing, names in without_compiler.items():
        out.line(f"\nto compile for {' or '.join(filter(None, (', '.join(names[:-1]), names[-1])))}:\n  {missing}")
    out.json(records)
    return DONE
