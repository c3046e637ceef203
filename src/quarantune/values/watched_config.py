"""A config that notes which of its values are looked at."""

from __future__ import annotations

from typing import Any


class WatchedConfig(dict[str, Any]):
    """A dict that notes the keys whose values are looked at; C code that reads a dict directly is not noticed.

    Attributes:
        looked_at: the keys, in the order in which they were looked at first.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        """Copies a config, at whose values nobody has looked."""
        super().__init__(config)
        self.looked_at: list[str] = []

    def __getitem__(self, key: str) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a value as a dict does."""
        self._note(key)
        return super().get(key, default)

    def __iter__(self) -> Any:
        """Iterates over the keys; with this, `dict(config)` and `f(**config)` ask for the values one by one."""
        return super().__iter__()

    def _note(self, key: str) -> None:
        if key in self and key not in self.looked_at:
            self.looked_at.append(key)


def _noting_all(name: str) -> Any:
    method = getattr(dict, name)

    def noting(self: WatchedConfig, *args: Any) -> Any:
        self.looked_at += [key for key in self.keys() if key not in self.looked_at]
        return method(self, *args)

    return noting


for _name in ("items", "values", "copy", "pop", "popitem", "__eq__", "__ne__", "__or__", "__ror__", "__repr__"):
    setattr(WatchedConfig, _name, _noting_all(_name))
