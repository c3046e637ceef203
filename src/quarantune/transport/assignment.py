"""Which kernel of a function is to use which config: assignments, in force for a thread and a block of code."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax

from quarantune.host import locks
from quarantune.values import config_values
from quarantune.values.json_object import JsonObject
from quarantune.values.scoped_stack import ScopedStack
from quarantune.values.trial import Config

KEY = "kernel configs"
"""The keyword by which a runner is given its assignment: no parameter of a function can be called that."""

FIRST, DEFAULT, OWN = "first", "default", "own"
"""What a kernel without a config in the assignment uses: the first of its list, its defaults, what it finds itself."""


_MOST_REPORTED_BYTES = 1 << 24


class Kernel(Protocol):
    """An autotuned function, as far as an assignment knows it."""

    name: str

    def __hash__(self) -> int: ...


class Slot(NamedTuple):
    """One kernel called in one way: calls with other shapes are another slot.

    Attributes:
        name: the kernel's name in the cache; where a function calls several kernels of one name, those of other code
            than the first get a number.
        key: what tells its call from others, as canonical JSON.
    """

    name: str
    key: str


class Seen(NamedTuple):
    """What a slot said of itself as it was asked.

    Attributes:
        configs: those it has to choose from.
        space: stands for its whole list of configs, as in the cache.
    """

    configs: list[Config]
    space: JsonObject


class Assignment:
    """Configs for some slots, and a rule for the others; a context manager that puts them in force in this thread."""

    def __init__(self, text: str) -> None:
        """Makes an assignment of what `encode` wrote."""
        data = json.loads(text)
        self.text = text
        self.others: str = data["others"]
        self.chosen = chosen_from(data["chosen"])
        self.seen: dict[Slot, Seen] = {}
        self.on_seen: Callable[[], None] = lambda: None
        self._codes: dict[str, list[str]] = {}
        self._memos: weakref.WeakKeyDictionary[Kernel, dict[Any, Any]] = weakref.WeakKeyDictionary()
        self._lock = locks.new()

    def slot(self, name: str, key: str, code: str) -> Slot:
        """Returns the slot of a kernel's call.

        Kernels that share a name, as lambdas and those of a factory do, are numbered by the order of their first calls,
        which is the same in every process.

        Args:
            name: the kernel's name in the cache.
            key: what tells its call from others, as canonical JSON.
            code: what tells it from other kernels of its name in this process.
        """
        with self._lock:
            codes = self._codes.setdefault(name, [])
            if code not in codes:
                codes.append(code)
            number = codes.index(code)
        return Slot(f"{name} #{number + 1}" if number else name, key)

    def find(self, slot: Slot, look: Callable[[], Seen]) -> tuple[bool, Config | None]:
        """Returns whether the assignment says what a slot is to use, and that: None for its defaults.

        Args:
            slot: the slot.
            look: returns what there is to know of it.
        """
        if self.others != OWN and slot not in self.seen:
            self.seen[slot] = look()
            self.on_seen()
        if slot in self.chosen:
            # From the kernel's own list, as a config that went through JSON may have lost its types.
            text = config_values.text_of(self.chosen[slot])
            configs = look().configs if self.others == OWN else self.seen[slot].configs
            found = next((config for config in configs if config_values.text_of(config) == text), None)
            if found is not None or self.others != OWN:
                return True, found or self.chosen[slot]
        if self.others == FIRST and self.seen[slot].configs:
            return True, self.seen[slot].configs[0]
        return self.others != OWN, None

    def memo(self, kernel: Kernel) -> dict[Any, Any]:
        """Returns what a kernel remembers of its calls while the assignment is in force."""
        with self._lock:
            return self._memos.setdefault(kernel, {})

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Puts the assignment in force in this thread; programs traced meanwhile are found only under it again."""
        _stack.enter(self)
        try:
            with context()(self.text):
                yield
        finally:
            _stack.leave(self)


class Runner:
    """Calls a function under an assignment: what the tuner takes for a callable with one tunable."""

    def __init__(self, fn: Callable[..., Any], reports: str | None = None) -> None:
        """Makes a runner of a function.

        Args:
            fn: the function.
            reports: a directory in which it leaves what `report` would return, however a run ends; None for none.
        """
        self._fn = fn
        self._reports = reports
        self._assignments: dict[str, Assignment] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function under the assignment given as `KEY`."""
        assignment = self.assignment(text := kwargs.pop(KEY))
        if self._reports is not None:
            assignment.on_seen = functools.partial(self._leave_report, text)
        with assignment.in_force():
            return self._fn(*args, **kwargs)

    def __reduce__(self) -> Any:
        """Travels as it was made."""
        return Runner, (self._fn, self._reports)

    def assignment(self, text: str) -> Assignment:
        """Returns the assignment for a text, the same one each time."""
        if (found := self._assignments.get(text)) is None:
            found = self._assignments.setdefault(text, Assignment(text))
        return found

    def report(self, config: Mapping[str, Any]) -> bytes:
        """Returns the slots that were asked for under an assignment, in order, for `read_report`."""
        seen = self.assignment(config[KEY]).seen
        return json.dumps(
            [[*slot, config_values.encode(about.configs), about.space] for slot, about in seen.items()]
        ).encode()

    def left_report(self, text: str) -> dict[Slot, Seen]:
        """Returns the slots that were asked for in a run under an assignment, even if it failed, as far as is known."""
        try:
            with open(self._report_path(text), "rb") as file:
                return read_report(file.read(_MOST_REPORTED_BYTES))
        except (OSError, ValueError):
            return {}

    def _leave_report(self, text: str) -> None:
        path = self._report_path(text)
        with open(unfinished := f"{path}.{os.getpid()}", "wb") as file:
            file.write(self.report({KEY: text}))
        os.replace(unfinished, path)

    def _report_path(self, text: str) -> str:
        assert self._reports is not None
        return os.path.join(self._reports, f"{hashlib.sha256(text.encode()).hexdigest()}.json")


def read_report(report: bytes) -> dict[Slot, Seen]:
    """Returns what a runner reported, which a config may have forged.

    Raises:
        ValueError: it makes no sense.
    """
    try:
        return {
            Slot(str(name), str(key)): Seen([_config(config) for config in configs], dict(space))
            for name, key, configs, space in json.loads(report)
        }
    except (TypeError, AttributeError) as error:
        raise ValueError(f"no report of a runner: {error}") from error


def encode(chosen: Mapping[Slot, Config], *, others: str) -> str:
    """Returns an assignment as text.

    Args:
        chosen: the configs of some slots.
        others: the rule for the other slots: `FIRST`, `DEFAULT` or `OWN`.
    """
    return json.dumps({"others": others, "chosen": nested(chosen)}, sort_keys=True)


def nested(chosen: Mapping[Slot, Config]) -> dict[str, dict[str, Config]]:
    """Returns configs by the kernels' names, then by keys, as JSON can hold them."""
    by_name: dict[str, dict[str, Config]] = {}
    for slot, config in chosen.items():
        by_name.setdefault(slot.name, {})[slot.key] = config_values.encode(config)
    return by_name


def chosen_from(data: Any) -> dict[Slot, Config]:
    """Returns the configs that `nested` arranged.

    Raises:
        ValueError: the data is something else.
    """
    try:
        return {Slot(name, key): _config(config) for name, calls in data.items() for key, config in calls.items()}
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{data!r} does not say which kernel is to use which config") from error


def _config(data: Mapping[str, Any]) -> Config:
    return config_values.restore(data, {})


_stack: ScopedStack[Assignment] = ScopedStack()
"""The assignments in force in a thread."""


def current() -> Assignment | None:
    """Returns the assignment in force in this thread, or None."""
    return _stack.innermost


_NUMBER = re.compile(r" #\d+$")
_kernels: dict[str, weakref.WeakSet[Kernel]] = {}


def register(kernel: Kernel) -> None:
    """Makes a kernel known by its name."""
    _kernels.setdefault(kernel.name, weakref.WeakSet()).add(kernel)


def kernels(name: str) -> Sequence[Any]:
    """Returns the autotuned functions of a name; a factory may have made several."""
    return list(_kernels.get(_NUMBER.sub("", name), ()))


@functools.cache
def context() -> Any:
    """Returns the value by which JAX tells the programs of one assignment from those of another.

    Made with the first contextual function and not before, as JAX then compiles anew what it had compiled.
    """
    return jax.make_user_context(None)
