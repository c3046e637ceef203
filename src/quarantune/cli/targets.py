"""`quarantune targets`: the devices that `check` can compile for."""

from __future__ import annotations

import argparse

from quarantune.cli.output import DONE, Output
from quarantune.devices import targets as known
from quarantune.values.texts import columns

_FIELDS = ("name", "platform", "device_kind", "is_here", "origin")


def targets(options: argparse.Namespace, out: Output) -> int:
    """Lists the devices, those of this machine first, and what is missing for compiling."""
    records, rows = [], [("device", "here", "needs", "description")]
    for target in known.targets():
        missing = ""
        try:
            known.usable(target)
        except ImportError as error:
            missing = str(error).rpartition(": ")[2]
        rows.append((target.name, "yes" if target.is_here else "", missing, target.origin))
        records.append({name: getattr(target, name) for name in _FIELDS} | {"needs": missing or None})
    out.line("\n".join(columns(rows)))
    out.json(records)
    return DONE
