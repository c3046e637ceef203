"""Connects to the distributed engine that `--executor` names."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from concurrent.futures import Executor
from typing import Any

from quarantune.cli.output import InputError, message_of
from quarantune.values.texts import did_you_mean, shown

_CONNECT_S = 20
"""No engine takes longer to answer on a network that is fit for tuning."""
_SCHEMES = ("dask", "ray")


@contextlib.contextmanager
def connected(address: str) -> Iterator[Executor]:
    """Yields an executor whose tasks run on an engine, and closes the connection in the end.

    Args:
        address: `dask://HOST:PORT`, `ray://HOST:PORT`, or `ray://auto` for the cluster that this machine is part of.

    Raises:
        InputError: there is no such engine, or its library is not installed.
    """
    scheme, separator, place = address.partition("://")
    if not separator or scheme not in _SCHEMES or not place:
        near = did_you_mean(scheme, _SCHEMES) if separator else ""
        raise InputError(
            f"--executor {shown(address)} names no engine.{near} Write dask://HOST:PORT, ray://HOST:PORT or ray://auto."
        )
    library = {"dask": "distributed", "ray": "ray"}[scheme]
    try:
        engine: Any = importlib.import_module(library)
    except ImportError as error:
        name = scheme.capitalize()
        raise InputError(f"--executor {scheme}:// needs {name}: pip install 'quarantune[{scheme}]'") from error
    with contextlib.ExitStack() as connection:
        try:
            if scheme == "dask":
                client = connection.enter_context(engine.Client(f"tcp://{place}", timeout=_CONNECT_S))
                # Not pure: Dask would take two calls with equal arguments for one.
                executor = client.get_executor(pure=False)
            else:
                from quarantune.ray import executor as ray_executor

                engine.init("auto" if place == "auto" else address, log_to_driver=False)
                connection.callback(engine.shutdown)
                executor = ray_executor()
        except ImportError as error:
            raise InputError(f"--executor {address} needs Ray's client: pip install 'ray[client]'") from error
        except (OSError, ValueError, RuntimeError) as error:
            kind = "Dask scheduler" if scheme == "dask" else "Ray cluster"
            reason = message_of(error)
            raise InputError(f"no {kind} answers at {place!r} ({reason}): start one, or correct the address") from error
        yield executor
