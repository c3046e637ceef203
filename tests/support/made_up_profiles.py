"""Profiles as the profiler writes them on TPUs and GPUs, which the machine of the tests need not have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.profiler import ProfileData

Events = Sequence[tuple[str, int, int] | tuple[str, int, int, Mapping[str, Any]]]
"""Name, start and length in picoseconds, and figures of each event."""


def xspace(planes: Iterable[str], *, host: str = "machine") -> bytes:
    """Returns a serialised profile of planes from `plane`."""
    hosts = f'hostnames: "{host}"' if host else ""
    written = ProfileData.text_proto_to_serialized_xspace("\n".join(planes) + hosts)
    assert isinstance(written, bytes)
    return written


def plane(
    name: str, lines: Mapping[str, Events], kinds: Mapping[str, Mapping[str, Any]] | None = None, *, zero_ns: int = 0
) -> str:
    """Returns a plane as text.

    Args:
        name: its name.
        lines: the events of its lines.
        kinds: figures that all events of a name share.
        zero_ns: the time from which the events of its lines count.
    """
    stats: dict[str, int] = {}
    numbers: dict[str, int] = {}
    text = f'planes {{ name: "{name}"\n'
    for line, events in lines.items():
        text += f'lines {{ name: "{line}" timestamp_ns: {zero_ns}\n'
        for event, start_ps, duration_ps, *figures in events:
            number = numbers.setdefault(event, len(numbers) + 1)
            own = "".join(_stat(stats, key, value) for key, value in dict(*figures).items())
            text += f"events {{ metadata_id: {number} offset_ps: {start_ps} duration_ps: {duration_ps} {own} }}\n"
        text += "}\n"
    for event in {**numbers, **dict.fromkeys(kinds or {})}:
        number = numbers.setdefault(event, len(numbers) + 1)
        own = "".join(_stat(stats, key, value) for key, value in (kinds or {}).get(event, {}).items())
        text += f'event_metadata {{ key: {number} value {{ id: {number} name: "{event}" {own} }} }}\n'
    for stat, number in stats.items():
        text += f'stat_metadata {{ key: {number} value {{ id: {number} name: "{stat}" }} }}\n'
    return text + "}\n"


def _stat(stats: dict[str, int], name: str, value: Any) -> str:
    number = stats.setdefault(name, len(stats) + 1)
    if isinstance(value, bytes):
        escaped = "".join(f"\\{byte:03o}" for byte in value)
        return f'stats {{ metadata_id: {number} bytes_value: "{escaped}" }} '
    kind, shown = ("str_value", f'"{value}"') if isinstance(value, str) else ("int64_value", value)
    return f"stats {{ metadata_id: {number} {kind}: {shown} }} "


def tpu(number: int, modules: Events, operations: Events = (), asynchronous: Events = (), **options: Any) -> str:
    """Returns the plane of a TPU, with the lines that its profiles have."""
    lines = {"XLA Modules": modules, "XLA Ops": operations, "Async XLA Ops": asynchronous, "XLA TraceMe": ()}
    return plane(f"/device:TPU:{number}", lines, **options)


def runs(name: str, count: int, *, length_ps: int = 3_000_500, gap_ps: int = 125_000_000) -> list[Any]:
    """Returns the events of runs of one program; each takes one picosecond longer than the last."""
    return [
        (name, at * (length_ps + gap_ps), length_ps + at, {"run_id": at, "device_duration_ps": length_ps + at})
        for at in range(count)
    ]
