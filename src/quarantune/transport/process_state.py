"""The state of the caller's process that code may read while it is traced, apart from its modules.

This is the one list of it. Environment variables, the working directory, the import path, JAX's options and the flags
of the interpreter, such as `-O`, reach a worker as it starts or with the call (`sandbox/pool.py`,
`sandbox/spawning.py`, `transport/payload.py`).
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
        "warnings": dumps(list(warnings.filters)),  # their classes may be the user's own
        "variables": _variables(),
    }


def adopt_before(state: Mapping[str, Any]) -> None:
    """Takes over what the user's modules may read as they are imported.

    Args:
        state: what `state` returned in another process.
    """
    sys.argv[:] = state["argv"]
    sys.setrecursionlimit(state["recursion_limit"])


def adopt(state: Mapping[str, Any]) -> None:
    """Takes over all of it, once the user's modules are imported.

    Args:
        state: what `state` returned in another process.
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
    """Returns the pickled values of the `ContextVar`s that are set here, by the user's module and the name in it."""
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
                except Exception:  # a value that cannot be pickled: the proof of the program tells if it matters
                    continue
    return found
