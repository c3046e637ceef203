"""The names under which profiles show tuned calls: `quarantune/NAME/ID`, with an id of the call and its config.

A profile knows nothing of keys and configs. The first eight digits of an id identify the call, and the other four the
config, so that the calls of a job can be found in the cache and among recorded calls.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from quarantune.values.codec import as_json, canonical_json
from quarantune.values.configs import COMPILER_OPTIONS

SCOPE = re.compile(r"quarantune/([\w.-]+)/([0-9a-f]{8})([0-9a-f]{4})(?![\w.-])")
"""Finds the name, the id of the call and the id of the config in the name of an operation."""


def scope_of(name: str, call: str, config: str) -> str:
    """Returns the scope of a call.

    Args:
        name: the function's name as the cache's files have it.
        call: the call's id.
        config: the config's id.
    """
    return f"quarantune/{name}/{call}{config}"


def call_id(name: str, device: str, values: Any) -> str:
    """Returns the id of a call, which does not depend on the function's code.

    Args:
        name: the function's name as the cache's files have it.
        device: the kind of device.
        values: the readable values of its key, as an entry of the cache holds them.
    """
    return _digest([name, device, values], 8)


def config_id(config: Any) -> str:
    """Returns the id of a config, also of one in its JSON form; None is the function's own defaults."""
    if isinstance(config, Mapping):
        config = {name: value for name, value in config.items() if value or name != COMPILER_OPTIONS}
    return _digest(as_json(config), 4)


def _digest(value: Any, digits: int) -> str:
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:digits]
