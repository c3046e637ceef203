"""The fingerprint of a function changes with its code and values, and with nothing else."""

from __future__ import annotations

import collections
import functools
import gc
import logging
import os
import sys
import textwrap
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import python

import quarantune
import quarantune.functions.fingerprint as fingerprint_module
from quarantune.functions.fingerprint import Fingerprint, code_text, fingerprint

BASE = """
import functools

SCALE = 2.0
UNUSED = 1

def helper(x):
    return deeper(x) * SCALE

def deeper(x):
    return x + 1

def unused(x):
    return x

class Table:
    size = 3
    def look(self, x):
        return x * 7

def kernel(x, BM=32):
    def inner(y):
        return helper(y) - 3
    return inner(x) * BM + Table().look(x)
"""
_serial = iter(range(10**6))


def load(directory: Path, source: str, *, name: str = "module_under_test") -> dict[str, Any]:
    path = directory / f"source_{next(_serial)}.py"
    path.write_text(source)
    scope: dict[str, Any] = {"__name__": name, "__file__": str(path)}
    exec(compile(source, str(path), "exec"), scope)
    return scope


def parts_that_differ(directory: Path, old: str, new: str, *, source: str = BASE) -> list[str]:
    assert old in source
    before = fingerprint(load(directory, source)["kernel"])
    after = fingerprint(load(directory, source.replace(old, new))["kernel"])
    assert (before.digest == after.digest) == (before.differences(after) == [])
    return before.differences(after)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    return inner(x)", "    # a comment\n\n    return inner(x)"),
        ("    return inner(x) * BM", "    return (inner(x)   *BM)"),
        ("    def inner(y):", '    def inner(y):\n        """Says something."""'),
        ("def kernel(x, BM=32):", 'def kernel(x, BM=32):\n    """Says something."""'),
        ("def deeper(x):", "# a comment\n\n\ndef deeper(x):"),
        ("def kernel", "@(lambda function: function)\ndef kernel"),
        ("UNUSED = 1", "UNUSED = 2"),
        ("def unused(x):\n    return x", "def unused(x):\n    return -x"),
    ],
)
def test_edits_that_keep_the_result_keep_the_fingerprint(tmp_path: Path, old: str, new: str) -> None:
    assert parts_that_differ(tmp_path, old, new) == []


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ("inner(x) * BM", "inner(x) * BM * 1", "code"),
        ("helper(y) - 3", "helper(y) - 4", "code"),
        ("helper(y) - 3", "helper(y) - 3.0", "code"),
        ("deeper(x) * SCALE", "deeper(x) / SCALE", "helper:helper"),
        ("return x + 1", "return x + 2", "helper:deeper"),
        ("SCALE = 2.0", "SCALE = 2", "global:SCALE"),
        ("x * 7", "x * 8", "helper:Table.look"),
        ("size = 3", "size = 4", "class:Table.size"),
    ],
)
def test_edits_that_may_change_the_result_change_their_part(tmp_path: Path, old: str, new: str, part: str) -> None:
    assert parts_that_differ(tmp_path, old, new) == [part]


def test_a_changed_default_changes_code_and_defaults(tmp_path: Path) -> None:
    assert parts_that_differ(tmp_path, "BM=32", "BM=64") == ["code", "defaults"]


def test_helpers_that_call_each_other_end_the_walk(tmp_path: Path) -> None:
    source = """
def kernel(x):
    return even(x)
def even(n):
    return n == 0 or odd(n - 1)
def odd(n):
    return n != 0 and even(n - 1) and kernel(n)
"""
    assert parts_that_differ(tmp_path, "n != 0", "n > 0", source=source) == ["helper:odd"]


def test_an_edit_after_the_import_keeps_the_fingerprint(tmp_path: Path) -> None:
    scope = load(tmp_path, BASE)
    path = Path(scope["__file__"])
    fresh = load(tmp_path, BASE.replace("inner(x) * BM", "inner(x) - BM"))
    path.write_text(BASE.replace("inner(x) * BM", "inner(x) - BM"))
    assert "code" in fingerprint(scope["kernel"]).differences(fingerprint(fresh["kernel"]))


def test_source_is_recognised_for_every_kind_of_definition(tmp_path: Path) -> None:
    source = """
import functools
def recursive(n, *, k=1):
    return recursive(n - 1) if n else MARK
def make(a, b):
    def nested(x: int = 3) -> int:
        nonlocal a
        a = x
        return nested(a) + b + MARK
    return nested
nested = make(1, 2)
class Base:
    def method(self):
        return super().__repr__() + self.__secret * MARK
    @staticmethod
    def static(x):
        return [y for y in x if (lambda z: z)(y)] or MARK
method, static = Base.method, Base.static
async def coroutine(x):
    async with x as y:
        return {MARK: y}
def generator(x):
    while (y := x.pop()):
        yield from y or MARK
"""
    scope = load(tmp_path, source)
    names = ("recursive", "nested", "static", "coroutine", "generator")
    kinds = ("def ", "async def ", "@staticmethod")
    assert [name for name in names if not code_text(scope[name]).startswith(kinds)] == []
    # A private name compiles differently outside its class, so the comparison fails and the compiled code counts.
    assert not code_text(scope["method"]).startswith(kinds)


def test_the_fingerprint_covers_functions_without_source() -> None:
    def make(source: str) -> Fingerprint:
        scope: dict[str, Any] = {"__name__": "nowhere"}
        exec(source, scope)
        return fingerprint(scope["f"])

    assert make("def f(x): return x + 1") == make("\n\ndef f(x):\n  # comment\n  return x+1")
    assert make("def f(x): return x + 1").differences(make("def f(x): return x + 2")) == ["code"]
    assert make("def f(x): return x in {1, 2}").differences(make("def f(x): return x in {1, 3}")) == ["code"]


def closure_over(value: Any) -> Fingerprint:
    def kernel(x: Any) -> Any:
        return x, value

    return fingerprint(kernel)


class Opaque:
    pass


def with_arrays(step: int) -> np.ndarray[Any, Any]:
    return np.arange(0, 4 * step, step)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2),
        (1, True),
        ("a", "b"),
        ([1, 2], [2, 1]),
        ({"a": 1}, {"a": 2}),
        ({1, 2}, {1, 3}),
        (with_arrays(1), with_arrays(2)),
        (with_arrays(1), with_arrays(1).astype(np.int8)),
        (np.zeros((2, 3)), np.zeros((3, 2))),
        (lambda x: x + 1, lambda x: x + 2),
        (functools.partial(max, 1), functools.partial(max, 2)),
        (int, float),
        (os, sys),
        (np.dtype("float32"), np.dtype("float16")),
    ],
)
def test_closures_count_by_value(one: Any, other: Any) -> None:
    (part,) = closure_over(one).differences(closure_over(other))
    assert part in ("closure:value", "helper:value")
    assert closure_over(one) == closure_over(one)


def test_objects_without_a_value_do_not_count_by_address() -> None:
    assert closure_over(Opaque()) == closure_over(Opaque())
    assert closure_over(Opaque()) != closure_over(object())
    assert closure_over([Opaque()]) == closure_over([Opaque()])


def test_a_logger_does_not_count_by_its_level() -> None:
    logger = logging.getLogger("kernels")
    before = closure_over(logger)
    logger.setLevel(logging.DEBUG)
    assert closure_over(logger) == before
    logger.setLevel(logging.NOTSET)


def test_a_function_inside_wrappers_is_found() -> None:
    def plain(x: int, factor: int = 2) -> int:
        return x * factor

    class Wrapper:
        def __init__(self, fn: Callable[..., Any]) -> None:
            self.__wrapped__ = fn

    bare = fingerprint(plain)
    assert fingerprint(functools.lru_cache(plain)) == bare
    assert fingerprint(Wrapper(Wrapper(plain))) == bare
    assert fingerprint(functools.partial(plain, factor=3)) != fingerprint(functools.partial(plain, factor=4))


def test_a_decorator_around_a_helper_counts_by_its_own_code(tmp_path: Path) -> None:
    source = """
import functools
def twice(fn):
    @functools.wraps(fn)
    def wrapper(x):
        return fn(fn(x))
    return wrapper
@twice
def helper(x):
    return x + 1
def kernel(x):
    return helper(x)
"""
    assert parts_that_differ(tmp_path, "fn(fn(x))", "fn(x)", source=source) == ["helper:helper"]
    assert parts_that_differ(tmp_path, "x + 1", "x + 2", source=source) == ["helper:helper"]


def test_methods_and_callable_objects_count_by_their_code() -> None:
    class Kernel:
        def __call__(self, x: int) -> int:
            return x + 1

        def method(self, x: int) -> int:
            return x + 2

    assert fingerprint(Kernel()) == fingerprint(Kernel())
    assert fingerprint(Kernel().method).parts["code"] != fingerprint(Kernel()).parts["code"]
    assert fingerprint(Kernel().method) == fingerprint(Kernel().method)


class Scale:
    def __init__(self, factor: Any, helper: Any = None) -> None:
        self.factor, self.helper = factor, helper

    def __call__(self, x: Any) -> Any:
        return x * self.factor

    def method(self, x: Any) -> Any:
        return x * self.twice

    @functools.cached_property
    def twice(self) -> Any:
        return self.factor * 2


class SlottedScale:
    __slots__ = ("factor",)

    def __init__(self, factor: Any) -> None:
        self.factor = factor

    def __call__(self, x: Any) -> Any:
        return x * self.factor


MADE_OF: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "object": lambda value: Scale(value),
    "slots": lambda value: SlottedScale(value),
    "method": lambda value: Scale(value).method,
    "partial": lambda value: functools.partial(Scale(value).method, 1),
    "nested": lambda value: Scale(1, helper=Scale(value)),
}


@pytest.mark.parametrize("name", MADE_OF)
def test_callable_objects_and_methods_count_by_their_fields(name: str) -> None:
    make = MADE_OF[name]
    assert fingerprint(make(1)) == fingerprint(make(1))
    assert fingerprint(make(1)) != fingerprint(make(1000))
    assert fingerprint(make(np.ones(3))) != fingerprint(make(np.zeros(3)))
    assert fingerprint(make(Opaque())) == fingerprint(make(Opaque()))


def test_a_cached_property_does_not_change_the_fingerprint() -> None:
    plain, used = Scale(1), Scale(1)
    assert used.twice == 2
    assert fingerprint(plain) == fingerprint(used)


def test_an_object_that_holds_itself_has_a_fingerprint() -> None:
    one, other = Scale(1), Scale(1)
    one.helper, other.helper = one, other
    assert fingerprint(one) == fingerprint(other)


class Hostile:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __repr__(self) -> str:
        raise RuntimeError("repr")


class Endless:
    def __getattr__(self, name: str) -> Endless:
        return Endless()


def endless_list() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


ODD = {
    "hostile": Hostile(),
    "endless": Endless(),
    "list": endless_list(),
    "nan": float("nan"),
    "iterator": iter([]),
}


def test_a_namespace_with_sets_counts_by_its_fields() -> None:
    one, other = (types.SimpleNamespace(names={"a", "b", last}, plain=1) for last in "cd")
    assert closure_over(one) == closure_over(types.SimpleNamespace(names={"c", "b", "a"}, plain=1))
    assert closure_over(one) != closure_over(other)


@pytest.mark.parametrize("name", ODD)
def test_odd_objects_are_described_and_never_raise(name: str) -> None:
    assert closure_over(ODD[name]) == closure_over(ODD[name])


def test_a_builtin_and_a_class_have_a_fingerprint() -> None:
    assert fingerprint(max) != fingerprint(min)
    assert fingerprint(Opaque) != fingerprint(Hostile)


def test_options_are_parts_and_their_functions_count_by_code() -> None:
    def kernel(x: Any) -> Any:
        return x

    base = fingerprint(kernel, options={"rtol": 0.1, "ref_fn": lambda x: x})
    assert base.differences(fingerprint(kernel, options={"rtol": 0.2, "ref_fn": lambda x: x})) == ["option:rtol"]
    assert base.differences(fingerprint(kernel, options={"rtol": 0.1, "ref_fn": lambda x: -x})) == ["option:ref_fn"]
    assert base.differences(fingerprint(kernel)) == ["option:ref_fn", "option:rtol"]
    assert base.differences(base.parts) == []


@pytest.mark.parametrize(("old", "new"), [("TOL = 1.0", "TOL = 2.0"), ("return x + 1", "return x + 2")])
@pytest.mark.parametrize("name", ["check", "checker", "bound"])
def test_helpers_of_a_function_among_the_options_count(tmp_path: Path, name: str, old: str, new: str) -> None:
    source = """
import functools
TOL = 1.0
def helper(x):
    return x + 1
def check(output, expected=None):
    return helper(output) < TOL
class Checker:
    def __call__(self, output, expected):
        return check(output)
checker = Checker()
bound = functools.partial(check, expected=3)
"""
    assert old in source
    one, other, same = (load(tmp_path, text)[name] for text in (source, source.replace(old, new), source))
    before = fingerprint(load, options={"check_fn": one})
    assert before.differences(fingerprint(load, options={"check_fn": other})) == ["option:check_fn"]
    assert before == fingerprint(load, options={"check_fn": same})


@pytest.mark.slow
def test_a_fingerprint_is_equal_in_all_processes_and_places(tmp_path: Path) -> None:
    module = textwrap.dedent(
        """
        import collections, functools, types
        class Shown:
            def __init__(self): self.names = {"shown", "in", "any", "order"}
            def __repr__(self): return f"Shown({self.names})"
        SPACE = types.SimpleNamespace(a={"one", "two", "three", "four"}, b=[frozenset({"x", "y", "z"})])
        QUEUE = collections.deque([{"k", "l", "m", "n"}])
        SHOWN = [Shown()]
        SET = frozenset({"a", "b", "c", 1, 2.5})
        class Thing: pass
        def helper(x, thing=Thing(), names={"u", "v", "w"}): return x in {"p", "q", "r"}, SET, SPACE, QUEUE, SHOWN
        def make():
            thing, fn = Thing(), (lambda x: x in {"i", "j", "k"})
            def kernel(x, BM=32): return helper(x), thing, fn
            return kernel
        kernel = make()
        """
    )
    (tmp_path / "stable_module.py").write_text(module)
    script = """
import stable_module
from quarantune.functions.fingerprint import fingerprint
found = fingerprint(stable_module.kernel)
print(found.digest, len(found.parts))
"""
    digests = set()
    for seed in range(3):
        directory = tmp_path / str(seed)
        directory.mkdir()
        digests.add(python("-c", script, path=[tmp_path], cwd=directory, PYTHONHASHSEED=str(seed)))
    assert len(digests) == 1


def test_a_class_may_change_while_it_is_described() -> None:
    class Lazy:
        def __repr__(self) -> str:
            setattr(Holder, f"made_{len(vars(Holder))}", 1)
            return "Lazy()"

    class Holder:
        first = Lazy()
        second = Lazy()

        @staticmethod
        def scale(x: Any) -> Any:
            return x

    def kernel(x: Any) -> Any:
        return Holder.scale(x)

    assert fingerprint(kernel).parts
    assert len([name for name in vars(Holder) if name.startswith("made_")]) > 0


@pytest.mark.parametrize(("module", "held_as"), [("triton.runtime.jit", "fn"), ("numba.core.registry", "__wrapped__")])
def test_the_code_of_another_languages_kernel_counts(module: str, held_as: str) -> None:
    def kernel_of(body: Callable[..., Any]) -> Any:
        def __repr__(self: Any) -> str:
            return "Kernel(body)"

        kernel = type("Kernel", (), {"__module__": module, "__repr__": __repr__})()
        setattr(kernel, held_as, body)
        return kernel

    def fingerprint_with(body: Callable[..., Any]) -> Fingerprint:
        kernel = kernel_of(body)

        def run(x: Any, block: int = 8) -> Any:
            return kernel(x, block)

        return fingerprint(run)

    def body(x: Any, block: int) -> Any:
        return x * block

    def other(x: Any, block: int) -> Any:
        return x + block

    other.__name__, other.__qualname__ = body.__name__, body.__qualname__
    assert fingerprint_with(body) == fingerprint_with(body)
    assert fingerprint_with(body) != fingerprint_with(other)


def test_code_is_described_alike_by_any_number_of_threads() -> None:
    # Python 3.11 raises SystemError in a thread that builds a syntax tree while another one does.
    def switch(*_: object) -> None:
        time.sleep(0)

    function, thresholds, found = quarantune.AutoTuner.run, gc.get_threshold(), collections.Counter[str]()
    expected = fingerprint_module._code_text(function, with_decorators=True)

    def describe() -> None:
        for _ in range(20):
            found[fingerprint_module._code_text(function, with_decorators=True)] += 1

    threads = [threading.Thread(target=describe) for _ in range(4)]
    gc.callbacks.append(switch)
    gc.set_threshold(50)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.callbacks.remove(switch)
        gc.set_threshold(*thresholds)
    assert found == {expected: 80}
