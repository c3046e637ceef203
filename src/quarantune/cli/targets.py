"""`quarantune targets`: the devices that `check` can compile for."""

from __future__ import annotations

import argparse

from quarantune.cli.output import DONE, Output, columns
from quarantune.devices import targets


def show(options: argparse.Namespace, out: Output) -> int:
    """Lists the devices, those of this machine first, and what is missing for compiling."""
    records, rows = [], [("device", "here", "needs", "description")]
    for target in targets.targets():
        missing = ""
        try:
            targets.usable(target)
        except ImportError as error:
            missing = str(error).rpartition(": ")[2]
        rows.append((target.name, "yes" if target.is_here else "", missing, target.origin))
        records.append(
            {
                "name": target.name,
                "platform": target.platform,
                "device_kind": target.device_kind,
                "is_here": target.is_here,
                "origin": target.origin,
                "needs": missing or None,
            }
        )
    for line in columns(rows):
        out.line(line)
    out.json(records)
    return DONE
