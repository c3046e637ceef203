"""The names under which profiles show tuned calls: `quarantune/NAME/ID`, with an id of the call and its config.

A profile knows nothing of keys and configs. The first six digits of an id identify the call, and the other four the
config, so that the calls of a job can be found in the cache and among recorded calls.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from quarantune.values.codec import as_json, canonical_json
from quarantune.values.configs import Config, as_given

SCOPE = re.compile(r"quarantune/([\w.-]+)/([0-9a-f]{6})([0-9a-f]{4})(?![\w.-])")
"""Finds the name, the id of the call and the id of the config in the name of an operation."""


def scope_of(name: str, call: str, config: str) -> str:
    """Returns the scope of a call.

    Args:
        name: the function's name in the cache.
        call: the call's id.
        config: the config's id.
    """
    return f"quarantune/{scope_name(name)}/{call}{config}"


def scope_name(name: str) -> str:
    """Returns a function's name as scopes have it: a slash would end it."""
    return re.sub(r"[^\w.-]+", "_", name, flags=re.ASCII)


def call_id(name: str, device: str, values: Mapping[str, Any], jax_state: Mapping[str, Any]) -> str:
    """Returns the id of a call, which does not depend on the function's code.

    Args:
        name: the function's name in the cache.
        device: the kind of device.
        values: the values of its key.
        jax_state: JAX's settings in its key.
    """
    return _digest([name, device, values, jax_state], 6)


def config_id(config: Config | None) -> str:
    """Returns the id of a config; None is the function's own defaults."""
    return _digest(None if config is None else as_json(as_given(config)), 4)


def _digest(value: Any, digits: int) -> str:
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:digits]
