"""Assignments of configs to the kernels of a function, in force for a thread and a block of code."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
from jax.experimental.xla_metadata import set_xla_metadata

from quarantune.functions.binding import assignment_in_force
from quarantune.host.locks import new_lock
from quarantune.jax_internals import jax_functions
from quarantune.values.codec import JsonObject, as_json, decode_json, frozen, text_of
from quarantune.values.configs import Config

KEY = "kernel configs"
"""The keyword for the assignment of a runner. It contains a space, so it cannot be the name of a parameter."""

FIRST, DEFAULT, OWN = "first", "default", "own"
"""Rules for kernels without a config in the assignment: the first of its configs, its defaults, its tuned config."""


_MOST_REPORTED_BYTES = 1 << 24
_numbers = itertools.count(1)


class Slot(NamedTuple):
    """A kernel with one kind of call: calls with other shapes belong to another slot.

    Attributes:
        name: the kernel's name in the cache, with a number from the second kernel of that name on.
        key: the key of the call, as canonical JSON.
    """

    name: str
    key: str


class Seen(NamedTuple):
    """The configs of a slot, recorded at a call of its kernel under an assignment.

    Attributes:
        configs: its configs.
        space: the description of its whole config space, in the form of cache entries.
    """

    configs: list[Config]
    space: JsonObject


class Assignment:
    """Configs for some slots, and a rule for the others; a context manager that puts them in force in this thread.

    Attributes:
        note: the callback for each call of a kernel, which then uses its defaults; None if the rule decides.
    """

    def __init__(self, text: str) -> None:
        """Makes an assignment from the text that `encode` returned."""
        data = json.loads(text)
        self.text = text
        self.others: str = data["others"]
        self.chosen = chosen_from(data["chosen"])
        self.seen: dict[Slot, Seen] = {}
        self.on_seen: Callable[[], None] = lambda: None
        self.note: Callable[..., None] | None = None
        self._codes: dict[str, list[str]] = {}
        self._lock = new_lock()

    def slot(self, name: str, key: str, code: str) -> Slot:
        """Returns the slot of a kernel's call.

        Kernels that share a name (lambdas, or kernels from one factory) get numbers in the order of their first calls,
        which is the same in every process.

        Args:
            name: the kernel's name in the cache.
            key: the key of the call, as canonical JSON.
            code: identifies the kernel among kernels of its name in this process.
        """
        with self._lock:
            codes = self._codes.setdefault(name, [])
            if code not in codes:
                codes.append(code)
            number = codes.index(code)
        return Slot(f"{name} #{number + 1}" if number else name, key)

    def find(self, slot: Slot, look: Callable[[], tuple[list[Config], JsonObject]]) -> tuple[bool, Config | None]:
        """Looks up the config of a slot.

        Args:
            slot: the slot.
            look: returns the slot's configs and the description of its space, both for `Seen`.

        Returns:
            Whether the assignment decides for the slot, and its config; None for the kernel's defaults.
        """
        if self.others != OWN and slot not in self.seen:
            self.seen[slot] = Seen(*look())
            self.on_seen()
        if slot in self.chosen:
            # The config from the kernel's own list, because JSON may lose types.
            text = text_of(self.chosen[slot])
            configs = look()[0] if self.others == OWN else self.seen[slot].configs
            found = next((config for config in configs if text_of(config) == text), None)
            if found is not None or self.others != OWN:
                return True, found or self.chosen[slot]
        if self.others == FIRST and self.seen[slot].configs:
            return True, self.seen[slot].configs[0]
        return self.others != OWN, None

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Puts the assignment in force in this thread. JAX reuses programs traced in the block only under it."""
        token = assignment_in_force.set(self)
        try:
            with context()(self.text):
                yield
        finally:
            assignment_in_force.reset(token)


@contextlib.contextmanager
def without_tuning(apart: object = None) -> Iterator[Mapping[Slot, Seen]]:
    """Makes kernels that this thread calls in the block use their defaults, and yields the slots of these calls.

    Args:
        apart: a name for the block's traces, so that JAX does not reuse them for other calls; None if the owner of the
            block prevents this.
    """
    defaults = Assignment(encode({}, others=DEFAULT))
    token = assignment_in_force.set(defaults)
    try:
        with set_xla_metadata(**({} if apart is None else {"quarantune": str(apart)})):
            yield defaults.seen
    finally:
        assignment_in_force.reset(token)


class Runner:
    """Calls a function under an assignment. For the tuner it is a callable whose only tunable is the assignment."""

    def __init__(self, fn: Callable[..., Any], reports: str | None = None, *, is_jitted: bool = False) -> None:
        """Makes a runner of a function.

        Args:
            fn: the function.
            reports: a directory for reports, if any. A run writes its report early, in case it fails.
            is_jitted: whether the caller jits the runner, which then calls the plain function inside the jitted `fn`.
        """
        self.__name__ = getattr(fn, "__name__", "function")  # names its programs
        self._fn = fn
        self._reports = reports
        self._is_jitted = is_jitted
        self._assignments: dict[str, Assignment] = {}

    @property
    def tunable(self) -> Any:
        """The callable that a sweep tunes: a jitted runner for a jitted function, to compile programs ahead of runs.

        JAX cannot jit a function anew if its jit has shardings or devices: the sweep then tunes this runner.
        """
        return self if self._jitted is None else self._jitted

    @functools.cached_property
    def _jitted(self) -> Any:
        options = jax_functions.jit_options(self._fn) if jax_functions.is_jitted(self._fn) else None
        if options is None or options.cannot_travel:
            return None
        options = dataclasses.replace(options, static_argnames=(*options.static_argnames, KEY))
        return options.rebuild(Runner(self._fn, self._reports, is_jitted=True))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function under the assignment given as `KEY`."""
        assignment = self.assignment(text := kwargs.pop(KEY))
        if self._reports is not None:
            assignment.on_seen = functools.partial(self._leave_report, text)
        fn: Any = self._fn
        with assignment.in_force():
            return (fn.__wrapped__ if self._is_jitted else fn)(*args, **kwargs)

    def __reduce__(self) -> Any:
        """Pickles all but the assignments."""
        return functools.partial(Runner, is_jitted=self._is_jitted), (self._fn, self._reports)

    def assignment(self, text: str) -> Assignment:
        """Returns the assignment for a text, the same one each time."""
        if (found := self._assignments.get(text)) is None:
            found = self._assignments.setdefault(text, Assignment(text))
        return found

    def report(self, config: Mapping[str, Any]) -> bytes:
        """Returns the slots looked up under an assignment, in order, as bytes for `read_report`."""
        seen = self.assignment(config[KEY]).seen.items()
        return json.dumps([[*slot, as_json(about.configs), about.space] for slot, about in seen]).encode()

    def traced(self, text: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[Slot, Seen]:
        """Traces a jitted function under an assignment, and returns the slots that it looks up."""
        fn: Any = self._fn
        assignment = Assignment(text)
        assignment.text += f" {next(_numbers)}"  # otherwise JAX would reuse an earlier trace
        with assignment.in_force():
            fn.eval_shape(*args, **kwargs)
        return assignment.seen

    def left_report(self, text: str) -> dict[Slot, Seen]:
        """Returns the slots that a run under an assignment looked up before its end or failure."""
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
    """Returns the slots of a runner's report. A config may have forged it.

    Raises:
        ValueError: The bytes are not a report.
    """
    try:
        return {
            Slot(str(name), str(key)): Seen([frozen(config) for config in configs], dict(space))
            for name, key, configs, space in decode_json(report)
        }
    except (TypeError, AttributeError) as error:
        raise ValueError(f"not a report of a runner: {error}") from error


def encode(chosen: Mapping[Slot, Config], *, others: str) -> str:
    """Returns an assignment as text.

    Args:
        chosen: the configs of some slots.
        others: the rule for the other slots: `FIRST`, `DEFAULT` or `OWN`.
    """
    return json.dumps({"others": others, "chosen": nested(chosen)}, sort_keys=True)


def nested(chosen: Mapping[Slot, Config]) -> dict[str, dict[str, Config]]:
    """Returns JSON-able configs by the kernels' names, then by keys."""
    by_name: dict[str, dict[str, Config]] = {}
    for slot, config in chosen.items():
        by_name.setdefault(slot.name, {})[slot.key] = as_json(config)
    return by_name


def chosen_from(data: Any) -> dict[Slot, Config]:
    """Returns the configs by slot, from the result of `nested`.

    Raises:
        ValueError: The data has another form.
    """
    try:
        return {Slot(name, key): frozen(config) for name, calls in data.items() for key, config in calls.items()}
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{data!r} is not a mapping of kernels to configs") from error


@functools.cache
def context() -> Any:
    """Returns the JAX context that makes the assignment part of JAX's key for a program.

    The first contextual function creates it, because creating it makes JAX compile all programs again.
    """
    return jax.make_user_context(None)
