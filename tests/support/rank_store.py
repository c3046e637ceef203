"""The key-value store of a `jax.distributed` program, in memory; this file contains no test."""

from __future__ import annotations

import threading


class Client:
    """A store with the interface of JAX's client.

    Attributes:
        values: the values by key.
        error: the text of the error that every request gets; empty for none.
    """

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.error = ""
        self._lock = threading.Lock()

    def key_value_try_get(self, key: str) -> str:
        if self.error or key not in self.values:
            raise RuntimeError(self.error or f"NOT_FOUND: {key}")
        return self.values[key]

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        if self.error:
            raise RuntimeError(self.error)
        with self._lock:  # threads may play ranks
            if key in self.values and not allow_overwrite:
                raise RuntimeError(f"ALREADY_EXISTS: {key}")
            self.values[key] = value

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        if self.error:
            raise RuntimeError(self.error)
        with self._lock:
            return [item for item in self.values.items() if item[0].startswith(key)]
