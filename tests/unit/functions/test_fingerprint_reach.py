"""The fingerprint covers the code that a function reaches in the user's own modules, and stops at installed ones."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import python

from quarantune.functions.fingerprint import Fingerprint, fingerprint

FILES = {
    "config.py": "BLOCK = 8\nUNREACHED = 1\n",
    "deep.py": """
        import config
        OFFSET = 1
        def deepest(x):
            return x + OFFSET + config.BLOCK
        """,
    "kernels.py": """
        import dataclasses
        import enum
        import functools
        import deep
        SCALE = 2.0
        class Mode(enum.Enum):
            FAST = 1
        class Base:
            def shared(self, x):
                return x - 5
        class Layer(Base):
            size = 3
            def apply(self, x):
                return self.inner(x) + self.size
            def inner(self, x):
                return x * 7
            def __call__(self, x):
                return x * 9
            @property
            def doubled(self):
                return 18
        def body(x):
            return helper(x) * SCALE
        def helper(x):
            return deep.deepest(x) + 11
        def chosen(x):
            return x * 13
        OPS = {"one": [chosen], "two": functools.partial(helper)}
        class Plain:
            steps = [chosen]
            def __init__(self):
                self.weight = 97
                self.unnamed = 1
            def __matmul__(self, x):
                return x * 101
            @functools.cached_property
            def cached(self):
                return self.weight * 107
            def weighted(self, x):
                return x * self.weight
        plain = Plain()
        @functools.singledispatch
        def dispatched(x):
            return x
        @dispatched.register
        def _(x: int):
            return x * 103
        @dataclasses.dataclass(frozen=True, slots=True)
        class Choice:
            step: object
            others: object = ()
        choice = Choice(chosen, [Choice(helper)])
        layer = Layer()
        def unreached(x):
            return x / 17
        """,
    "rules.py": """
        import functools
        import jax
        FACTOR = 2.0
        def scaled(g):
            return g * FACTOR
        @jax.custom_vjp
        def op(x):
            return x * 23
        def op_fwd(x):
            return op(x), x + 29
        def op_bwd(x, g):
            return (scaled(g) * 31,)
        op.defvjp(op_fwd, op_bwd)
        @functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
        def whole(x, n):
            return x * n
        @whole.defjvp
        def whole_jvp(n, primals, tangents):
            return whole(*primals, n), tangents[0] * 41
        @jax.custom_jvp
        def each(x):
            return x * 43
        each.defjvps(lambda t, out, x: t * 47)
        @jax.custom_batching.custom_vmap
        def batched(x):
            return x * 67
        @batched.def_vmap
        def batched_vmap(size, is_batched, x):
            return scaled(x) * 71, True
        """,
    "parts.py": """
        from jax.experimental.custom_partitioning import custom_partitioning
        FACTOR = 5.0
        def body(x):
            return x * 73 * FACTOR
        def partition(mesh, args, result):
            return mesh, len, result.sharding, (79,)
        split = custom_partitioning(body)
        split.def_partition(partition, infer_sharding_from_operands=lambda *_: 83, sharding_rule="i j -> j i")
        """,
    "main_module.py": """
        import jax
        import parts
        import rules
        import functools
        import deep as renamed
        import config
        import kernels
        import numpy as np
        from kernels import body, layer, Layer, OPS
        def attribute(x):
            return kernels.body(np.asarray(x))
        def by_name(x):
            return body(x)
        def data(x):
            return x * config.BLOCK
        def alias(x):
            module = renamed
            return module.deepest(x)
        def method(x):
            return layer.apply(x)
        def called(x):
            return layer(x)
        def through_module(x):
            return kernels.layer.doubled
        def made(x):
            return Layer().shared(x)
        def container(x):
            return OPS["one"][0](x) + OPS["two"](x)
        def member(x):
            return x if kernels.Mode.FAST else 0
        def default(x, act=kernels.body):
            return act(x)
        bound = functools.partial(default, act=kernels.helper)
        def make():
            from kernels import helper as captured
            def closing(x):
                return captured(x)
            return closing
        closing = make()
        class Tuned(kernels.Layer):
            def run(self, x):
                return self.own(x)
            def own(self, x):
                return x ** 19
        run = Tuned.run
        def trained(x):
            return rules.op(x) + rules.whole(x, 3) + rules.each(x)
        def mapped(x):
            return rules.batched(x)
        def divided(x):
            return parts.split(x)
        jitted_split = jax.jit(parts.split)
        jitted = jax.jit(rules.op)
        @jax.jit
        @jax.custom_vjp
        def own(x):
            return x * 53
        own.__wrapped__.defvjp(lambda x: (own(x), x * 59), lambda x, g: (g * 61,))
        def field(x):
            return x * kernels.plain.weight
        def through_method(x):
            return kernels.plain.weighted(x)
        def passed(x):
            return attribute(kernels.plain)
        def operated(x):
            return kernels.plain @ x
        def listed(x):
            return kernels.Plain.steps[0](x)
        def dispatches(x):
            return kernels.dispatched(x)
        def literal(x):
            return getattr(kernels, "chosen")(x)
        def chooses(x):
            return kernels.choice.others[0].step(x)
        def caches(x):
            return kernels.plain.cached * x
        def library(x):
            return jax.nn.relu(x)
        """,
}


def fingerprint_of(directory: Path, name: str, monkeypatch: pytest.MonkeyPatch, **changed: str) -> Fingerprint:
    for file, text in FILES.items():
        (directory / file).write_text(changed.get(file.removesuffix(".py"), textwrap.dedent(text)))
    modules = [file.removesuffix(".py") for file in FILES]
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(directory))
        patch.setattr(sys, "dont_write_bytecode", True)
        for module in modules:
            sys.modules.pop(module, None)
        importlib.invalidate_caches()
        try:
            return fingerprint(getattr(importlib.import_module("main_module"), name))
        finally:
            for module in modules:
                sys.modules.pop(module, None)


def change(tmp_path: Path, name: str, patch: pytest.MonkeyPatch, module: str, old: str, new: str) -> list[str]:
    text = textwrap.dedent(FILES[f"{module}.py"])
    assert old in text
    (tmp_path / "before").mkdir()
    (tmp_path / "after").mkdir()
    before = fingerprint_of(tmp_path / "before", name, patch)
    return before.differences(fingerprint_of(tmp_path / "after", name, patch, **{module: text.replace(old, new)}))


@pytest.mark.parametrize(
    ("name", "module", "old", "new", "part"),
    [
        ("attribute", "kernels", "* SCALE", "/ SCALE", "global:kernels.body"),
        ("attribute", "kernels", "SCALE = 2.0", "SCALE = 3.0", "global:kernels.SCALE"),
        ("attribute", "kernels", "+ 11", "+ 12", "global:kernels.helper"),
        ("attribute", "deep", "x + OFFSET", "x - OFFSET", "global:deep.deepest"),
        ("attribute", "deep", "OFFSET = 1", "OFFSET = 2", "global:deep.OFFSET"),
        ("attribute", "config", "BLOCK = 8", "BLOCK = 9", "global:config.BLOCK"),
        ("by_name", "kernels", "+ 11", "+ 12", "global:kernels.helper"),
        ("by_name", "kernels", "SCALE = 2.0", "SCALE = 3.0", "global:kernels.SCALE"),
        ("data", "config", "BLOCK = 8", "BLOCK = 9", "global:config.BLOCK"),
        ("alias", "deep", "OFFSET = 1", "OFFSET = 2", "global:deep.OFFSET"),
        ("method", "kernels", "+ self.size", "- self.size", "class:kernels.Layer.apply"),
        ("method", "kernels", "x * 7", "x * 8", "class:kernels.Layer.inner"),
        ("method", "kernels", "size = 3", "size = 4", "class:kernels.Layer.size"),
        ("called", "kernels", "x * 9", "x * 10", "class:kernels.Layer.__call__"),
        ("through_module", "kernels", "return 18", "return 19", "class:kernels.Layer.doubled"),
        ("made", "kernels", "x - 5", "x - 6", "class:kernels.Base.shared"),
        ("container", "kernels", "+ 11", "+ 12", "global:OPS"),
        ("container", "deep", "OFFSET = 1", "OFFSET = 2", "global:deep.OFFSET"),
        ("member", "kernels", "FAST = 1", "FAST = 2", "class:kernels.Mode.values"),
        ("default", "kernels", "SCALE = 2.0", "SCALE = 3.0", "global:kernels.SCALE"),
        ("bound", "deep", "OFFSET = 1", "OFFSET = 2", "global:deep.OFFSET"),
        ("closing", "deep", "OFFSET = 1", "OFFSET = 2", "global:deep.OFFSET"),
        ("run", "main_module", "x ** 19", "x ** 20", "helper:Tuned.own"),
        ("trained", "rules", "x * 23", "x * 24", "global:rules.op"),
        ("trained", "rules", "x + 29", "x + 30", "rule:op.fwd"),
        ("trained", "rules", "* 31", "* 32", "rule:op.bwd"),
        ("trained", "rules", "FACTOR = 2.0", "FACTOR = 3.0", "global:rules.FACTOR"),
        ("trained", "rules", "* 41", "* 42", "rule:whole.jvp"),
        ("trained", "rules", "t * 47", "t * 48", "rule:each.jvp0"),
        ("jitted", "rules", "* 31", "* 32", "rule:op.bwd"),
        ("mapped", "rules", "x * 67", "x * 68", "global:rules.batched"),
        ("mapped", "rules", "* 71", "* 72", "rule:batched.vmap_rule"),
        ("mapped", "rules", "FACTOR = 2.0", "FACTOR = 3.0", "global:rules.FACTOR"),
        ("divided", "parts", "x * 73", "x * 74", "rule:body.fun"),
        ("divided", "parts", "FACTOR = 5.0", "FACTOR = 6.0", "global:parts.FACTOR"),
        ("divided", "parts", "(79,)", "(80,)", "rule:body.partition"),
        ("divided", "parts", "*_: 83", "*_: 84", "rule:body.infer_sharding_from_operands"),
        ("divided", "parts", "-> j i", "-> i j", "rule:body.sharding_rule"),
        ("jitted_split", "parts", "(79,)", "(80,)", "rule:body.partition"),
        ("own", "main_module", "x * 59", "x * 60", "rule:own.fwd"),
        ("own", "main_module", "g * 61", "g * 62", "rule:own.bwd"),
        ("field", "kernels", "weight = 97", "weight = 98", "global:kernels.plain.weight"),
        ("through_method", "kernels", "weight = 97", "weight = 98", "global:kernels.plain.fields"),
        ("passed", "kernels", "weight = 97", "weight = 98", "global:kernels.plain.fields"),
        ("operated", "kernels", "x * 101", "x * 102", "class:kernels.Plain.__matmul__"),
        ("listed", "kernels", "x * 13", "x * 14", "class:kernels.Plain.steps"),
        ("dispatches", "kernels", "x * 103", "x * 104", "closure:kernels.dispatched[builtins.int]"),
        ("literal", "kernels", "x * 13", "x * 14", "global:kernels.chosen"),
        ("caches", "kernels", "* 107", "* 109", "class:kernels.Plain.cached"),
        ("chooses", "kernels", "x * 13", "x * 14", "global:kernels.choice"),
        ("chooses", "deep", "OFFSET = 1", "OFFSET = 2", "global:deep.OFFSET"),
    ],
)
def test_an_edit_of_code_a_function_reaches_changes_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str, old: str, new: str, part: str
) -> None:
    assert change(tmp_path, name, monkeypatch, module, old, new) == [part]


@pytest.mark.parametrize(
    ("name", "module", "old", "new"),
    [
        ("caches", "main_module", "def caches(x)", "kernels.plain.cached\ndef caches(x)"),
        ("attribute", "kernels", "x / 17", "x / 18"),
        ("attribute", "kernels", "x * 13", "x * 14"),
        ("attribute", "config", "UNREACHED = 1", "UNREACHED = 2"),
        ("attribute", "kernels", "def helper(x):", "# a comment\ndef helper(x):"),
        ("data", "config", "UNREACHED = 1", "UNREACHED = 2"),
        ("called", "kernels", "x * 7", "x * 8"),
        ("field", "kernels", "unnamed = 1", "unnamed = 2"),
    ],
)
def test_an_edit_of_unreached_code_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str, old: str, new: str
) -> None:
    assert change(tmp_path, name, monkeypatch, module, old, new) == []


def test_rules_of_libraries_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(part.startswith("rule:") for part in fingerprint_of(tmp_path, "library", monkeypatch).parts)


def test_installed_packages_count_by_their_version_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site-packages"
    package.mkdir()
    found = []
    for constant in "12":
        (package / "an_installed_one.py").write_text(f"def f(x): return x + {constant}\n")
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        monkeypatch.syspath_prepend(str(package))
        monkeypatch.delitem(sys.modules, "an_installed_one", raising=False)
        module = importlib.import_module("an_installed_one")

        def kernel(x: Any, module: Any = None) -> Any:
            return an_installed_one.f(x)  # type: ignore[name-defined] # noqa: F821

        monkeypatch.setitem(kernel.__globals__, "an_installed_one", module)
        found.append(fingerprint(kernel))
    monkeypatch.delitem(sys.modules, "an_installed_one")
    assert found[0] == found[1]


def test_helpers_over_two_modules_end_the_walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = "import kernels\ndef deepest(x):\n    return kernels.body(x) if x else kernels.helper(x)\n"
    assert "global:deep.deepest" in fingerprint_of(tmp_path, "attribute", monkeypatch, deep=one).parts


@pytest.mark.slow
def test_fingerprints_over_modules_are_the_same_in_every_process(tmp_path: Path) -> None:
    for file, text in FILES.items():
        (tmp_path / file).write_text(textwrap.dedent(text))
    script = """
import types, main_module
from quarantune.functions.fingerprint import fingerprint
names = [name for name in vars(main_module) if callable(getattr(main_module, name))]
print([fingerprint(getattr(main_module, name)).digest for name in sorted(names)])
"""
    digests = set()
    for seed in range(2):
        digests.add(python("-c", script, path=[tmp_path], PYTHONHASHSEED=str(seed)))
    assert len(digests) == 1


LIBRARY = """
from typing import Any, NamedTuple

class Pair(NamedTuple):
    init: Any
    apply: Any

class Solver:
    def __init__(self, fun):
        self.fun = fun

def transform(f):
    def apply(*args):
        return f(*args)
    return apply

def twice(pair):
    def apply(*args):
        return pair.apply(*args)
    return Pair(None, apply)
"""


@pytest.mark.parametrize(
    "hold",
    [
        lambda library, f: library.transform(f),
        lambda library, f: library.Pair(None, library.transform(f)),
        lambda library, f: library.twice(library.twice(library.Pair(None, library.transform(f)))),
        lambda library, f: library.transform([f, 3]),
        lambda library, f: library.Solver(f),
    ],
    ids=["function", "named tuple", "nested", "list", "object"],
)
def test_the_users_functions_that_libraries_hold_count(
    hold: Callable[[Any, Any], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site-packages"
    package.mkdir()
    (package / "a_library_of_layers.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(package))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    library = importlib.import_module("a_library_of_layers")

    def helper(x: Any) -> Any:
        return x + 1

    def layer(x: Any) -> Any:
        return helper(x) * 2

    def other(x: Any) -> Any:
        return helper(x) * 3

    other.__name__, other.__qualname__ = layer.__name__, layer.__qualname__

    def digest_with(f: Any) -> str:
        held = hold(library, f)

        def kernel(x: Any) -> Any:
            return held, x

        return fingerprint(kernel).digest

    assert digest_with(layer) == digest_with(layer)
    assert digest_with(layer) != digest_with(other)
    monkeypatch.delitem(sys.modules, "a_library_of_layers")


def test_a_librarys_rule_counts_with_the_values_it_is_made_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site-packages"
    package.mkdir()
    source = "def below(limit):\n    def rule(config, *_):\n        return config['n'] < limit\n    return rule\n"
    (package / "a_library_of_rules.py").write_text(source)
    monkeypatch.syspath_prepend(str(package))
    library = importlib.import_module("a_library_of_rules")
    digests = [fingerprint(len, options={"prune_fn": library.below(limit)}).digest for limit in (2, 2, 3)]
    monkeypatch.delitem(sys.modules, "a_library_of_rules")
    assert digests[0] == digests[1] != digests[2]
