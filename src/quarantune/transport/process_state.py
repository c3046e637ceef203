"""The state of the caller's process that code may read during tracing, apart from its modules.

This is the complete list. Environment variables, the working directory, the import path, JAX's options and interpreter
flags such as `-O` reach a worker elsewhere: at its start or with the call (`sandbox/pool.py`, `sandbox/spawning.py`,
`transport/payload.py`).
"""

from __future__ import annotations

import contextvars
import decimal
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from quarantune.host.packages import content, is_installed
from quarantune.transport.pickling import dumps, loads


def state() -> Mapping[str, Any]:
    """Returns the state of this process and thread, as plain values and pickles."""
    return {
        "argv": list(sys.argv),
        "recursion_limit": sys.getrecursionlimit(),
        "floating_point": np.geterr(),
        "decimal": decimal.getcontext().copy(),
        "warnings": dumps(list(warnings.filters)),  # filters may name the user's classes
        "variables": _variables(),
    }


def adopt_before(state: Mapping[str, Any]) -> None:
    """Takes over the state that the user's modules may read during their import.

    Args:
        state: the result of `state` in another process.
    """
    sys.argv[:] = state["argv"]
    sys.setrecursionlimit(state["recursion_limit"])


def adopt(state: Mapping[str, Any]) -> None:
    """Takes over all of the state, after the import of the user's modules.

    Args:
        state: the result of `state` in another process.
    """
    adopt_before(state)
    np.seterr(**state["floating_point"])
    decimal.setcontext(state["decimal"])
    warnings.resetwarnings()
    warnings.filters[:] = loads(state["warnings"])  # type: ignore[index]
    for (module, name), value in state["variables"].items():
        variable = content(sys.modules.get(module)).get(name)
        if isinstance(variable, contextvars.ContextVar):
            variable.set(loads(value))


def _variables() -> dict[tuple[str, str], bytes]:
    """Returns the pickled values of `ContextVar`s of the user's modules that have a value here, by module and name."""
    values = {id(variable): value for variable, value in contextvars.copy_context().items()}
    found: dict[tuple[str, str], bytes] = {}
    for module in list(sys.modules.values()) if values else ():
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or is_installed(file):
            continue
        for name, variable in list(content(module).items()):
            if isinstance(variable, contextvars.ContextVar) and id(variable) in values:
                try:
                    found[str(content(module).get("__name__")), name] = dumps(values[id(variable)])
                except Exception:  # pickle fails on the value; the proof of the program shows if it matters
                    continue
    return found
