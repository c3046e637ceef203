"""The name of a tuned function in the cache."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quarantune.host import caller


def cache_name(fn: Callable[..., Any]) -> str:
    """Returns a callable's name in the cache: its module and its qualified name."""
    inner = fn.func if isinstance(fn, functools.partial) else fn
    return f"{module_name(inner)}.{getattr(inner, '__qualname__', type(inner).__qualname__)}"


def module_name(fn: Callable[..., Any]) -> str:
    """Returns the function's module; for a script the stem of its file, because `__main__` is the same for all.

    For a jitted `functools.partial`, whose module is given as `functools`, returns the module that tunes it.
    """
    module = getattr(fn, "__module__", None) or "unknown"
    if module == functools.__name__ and isinstance(inspect.unwrap(fn), functools.partial):
        module = caller.users_module()
    if module != "__main__":
        return module
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    return Path(file).stem if file else "__main__"
