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
    with _dask(place) if scheme == "dask" else _ray(address, place) as executor:
        yield executor


@contextlib.contextmanager
def _dask(place: str) -> Iterator[Executor]:
    try:
        distributed: Any = importlib.import_module("distributed")
    except ImportError as error:
        raise InputError("--executor dask:// needs Dask: pip install 'quarantune[dask]'") from error
    try:
        client = distributed.Client(f"tcp://{place}", timeout=_CONNECT_S)
    except (OSError, ValueError, TimeoutError) as error:
        raise _no_answer("Dask scheduler", place, error) from error
    with client:
        # Not pure: Dask would take two calls with equal arguments for one.
        yield client.get_executor(pure=False)


@contextlib.contextmanager
def _ray(address: str, place: str) -> Iterator[Executor]:
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        raise InputError("--executor ray:// needs Ray: pip install 'quarantune[ray]'") from error
    from quarantune.ray import executor

    try:
        ray.init("auto" if place == "auto" else address, log_to_driver=False)
    except ImportError as error:
        raise InputError(f"--executor {address} needs Ray's client: pip install 'ray[client]'") from error
    except (OSError, ValueError, RuntimeError) as error:
        raise _no_answer("Ray cluster", place, error) from error
    try:
        yield executor()
    finally:
        ray.shutdown()


def _no_answer(engine: str, place: str, error: Exception) -> InputError:
    return InputError(f"no {engine} answers at {place!r} ({message_of(error)}): start one, or correct the address")
