"""A function's fingerprint depends on the names in its code, not on other fields, history, seeds or places."""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import python

import quarantune
from quarantune.functions.fingerprint import code_digest, fingerprint

_HEAD = "import argparse, dataclasses, types\nfrom pathlib import Path\n"
_names = (f"hinted_{number}" for number in itertools.count())


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Returns a function that imports a source as a new module from its own directory."""

    def load_module(source: str, directory: str = "here", name: str = "") -> Any:
        place = tmp_path / directory
        place.mkdir(exist_ok=True)
        name = name or next(_names)
        (place / f"{name}.py").write_text(_HEAD + source)
        monkeypatch.syspath_prepend(place)
        sys.modules.pop(name, None)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    return load_module


def digest(fn: Any) -> str:
    return fingerprint(fn, is_proved=True).digest


OBJECTS = {
    "namespace": "thing = argparse.Namespace(scale={scale}, seed={seed})",
    "simple namespace": "thing = types.SimpleNamespace(scale={scale}, seed={seed})",
    "dataclass": "@dataclasses.dataclass\nclass Thing:\n    scale: int\n    seed: int\nthing = Thing({scale}, {seed})",
    "plain object": "class Thing: pass\nthing = Thing(); thing.scale = {scale}; thing.seed = {seed}",
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_an_object_counts_by_the_fields_that_the_code_names(kind: str, load: Callable[..., Any]) -> None:
    def made(scale: int, seed: int, body: str = "x * thing.scale") -> str:
        objects = OBJECTS[kind].format(scale=1, seed=1)
        module = load(f"{objects}\ndef kernel(x):\n    return {body}\n", name="hinted_object")
        module.thing.scale, module.thing.seed = scale, seed
        return digest(module.kernel)

    assert made(1, 1) == made(1, 2) != made(2, 1)
    assert made(1, 1, "print(thing)") != made(1, 2, "print(thing)"), "the object itself is used"


def test_a_value_the_code_writes_counts_by_its_type(load: Callable[..., Any]) -> None:
    module = load(
        """
memo, count, table = {}, 0, {"a": 1}
def helper(n):
    global count
    count += 1
    if n not in memo:
        memo[n] = n
    return memo[n] + table["a"]
class Memo:
    def __init__(self):
        self.known, self.size = {}, 3
    def __call__(self, n):
        self.known.setdefault(n, n)
        return self.known[n] + self.size
kept = Memo()
def kernel(x):
    return helper(x) + kept(x)
"""
    )
    fresh = digest(module.kernel)
    module.kernel(5)
    assert digest(module.kernel) == fresh
    module.table["a"] = 2
    changed = digest(module.kernel)
    assert changed != fresh, "no call writes to it"
    module.kept.size = 4
    assert digest(module.kernel) != changed


def test_without_a_program_everything_the_code_writes_counts(load: Callable[..., Any]) -> None:
    module = load("memo = {}\ndef kernel(x):\n    memo[x] = x\n    return memo[x]\n")
    fresh = fingerprint(module.kernel).digest
    module.kernel(5)
    assert fingerprint(module.kernel).digest != fresh


def test_a_path_in_the_checkout_counts_relative_to_the_module(load: Callable[..., Any]) -> None:
    source = (
        "HERE = Path(__file__).parent\nDATA, AWAY = HERE / 'data', Path('/elsewhere')\ndef kernel(x): return HERE, {}\n"
    )
    one, other = (load(source.format("DATA"), place, "hinted_path") for place in ("one", "other"))
    assert (
        digest(one.kernel) == digest(other.kernel) != digest(load(source.format("AWAY"), "one", "hinted_path").kernel)
    )


_SEEDED = """
import sys
from jax.sharding import PartitionSpec as P
from quarantune.functions.fingerprint import fingerprint
SPEC = P("x", unreduced={"alpha", "beta", "gamma", "delta"})
NAMES = frozenset({"a", "b", "c", "d"})
class Shown:
    def __init__(self): self.names = {"e", "f", "g", "h"}
    def __repr__(self): return f"Shown({self.names})"
shown = Shown()
def kernel(x): return x, SPEC, NAMES, shown, x in {"i", "j", "k"}
print(fingerprint(kernel).digest)
"""


@pytest.mark.slow
def test_a_fingerprint_is_the_same_under_every_hash_seed(tmp_path: Path) -> None:
    path = tmp_path / "seeded.py"
    path.write_text(_SEEDED)
    assert len({python(path, PYTHONHASHSEED=seed) for seed in ("1", "2", "3")}) == 1


@pytest.mark.parametrize("make", ["{{f'token {{i}}': i for i in range({size})}}", "[float(i) for i in range({size})]"])
def test_a_large_table_takes_little_time_and_counts_whole(make: str, load: Callable[..., Any]) -> None:
    module = load(
        f"TABLE = {make.format(size=300_000).replace('{{', '{').replace('}}', '}')}\ndef kernel(x): return TABLE\n"
    )
    began = time.process_time()
    before = digest(module.kernel)
    assert time.process_time() - began < 1.5  # describing each part alone took 5 s
    module.TABLE["token 7" if isinstance(module.TABLE, dict) else 7] = -1
    assert digest(module.kernel) != before


CODE = {
    "function": ("def how(x): return {body}", "how"),
    "partial": ("import functools\ndef run(n, x): return {body}", "functools.partial(run, 1)"),
    "closure": ("def make(n):\n    def how(x): return n + {body}\n    return how", "make(1)"),
    "method": ("class How:\n    def run(self, x): return {body}", "How().run"),
    "object": ("class How:\n    def run(self, x): return {body}", "How()"),
    "dataclass": ("@dataclasses.dataclass\nclass How:\n    n: int = 1\n    def run(self, x): return {body}", "How()"),
    "class": ("class How:\n    @staticmethod\n    def run(x): return {body}", "How"),
    "inherited": ("class Base:\n    def run(self, x): return {body}\nclass How(Base): pass", "How()"),
    "in a list": ("def how(x): return {body}", "[1, {'a': how}]"),
    "helper": ("def helper(x): return {body}\ndef how(x): return helper(x)", "how"),
}


@pytest.mark.parametrize("kind", CODE)
def test_code_among_the_arguments_of_a_plain_callable_counts(kind: str, load: Callable[..., Any]) -> None:
    setup, argument = CODE[kind]

    def of(body: str) -> str:
        module = load(f"{setup.replace('{body}', body)}\nargument = {argument}\n", name="hinted_code")
        return code_digest({"how": module.argument})

    assert of("x + 1") == of("x + 1") != of("x + 2")
    assert of("x + 1") != ""


def test_arguments_without_the_users_code_have_no_digest() -> None:
    assert (
        code_digest({"x": np.ones(3), "n": 3, "f": np.sin, "p": functools.partial(np.sum, axis=0), "d": {"a": [1]}})
        == ""
    )


def test_a_plain_callable_is_tuned_again_for_an_edited_argument(load: Callable[..., Any]) -> None:
    def applied(x: Any, how: Any, n: int) -> Any:
        return how(x)

    def run(body: str) -> bool:
        how = load(f"def how(x): return {body}\n", name="hinted_argument").how
        return bool(
            quarantune.AutoTuner(applied, {"n": [1]}, rep=1, warmup=0, name="applied").run(np.ones(3), how).from_cache
        )

    assert [run("x + 1"), run("x + 1"), run("x + 2")] == [False, True, False]


_STATE = """
import contextvars, decimal, json, os, sys, warnings
import numpy as np, quarantune
mode = contextvars.ContextVar("mode")
def state(x, n):
    seen = [os.environ["KERNEL_MODE"], sys.argv[1:], sys.getrecursionlimit(), np.geterr()["over"]]
    seen += [decimal.getcontext().prec, mode.get(), warnings.filters[0][0], sys.flags.optimize]
    print("SEEN", json.dumps(seen))
    return x
if __name__ == "__main__":
    os.environ["KERNEL_MODE"] = "set late"
    sys.argv.append("appended")
    sys.setrecursionlimit(4321)
    np.seterr(over="raise")
    decimal.getcontext().prec = 7
    mode.set("set")
    warnings.simplefilter("error", BytesWarning)
    trial = quarantune.AutoTuner(state, {"n": [1]}, rep=1, warmup=0, ref_fn=None).run(np.ones(1)).trials[0]
    print(trial.log_tail.partition("SEEN ")[2].splitlines()[0])
"""


@pytest.mark.slow
def test_workers_have_the_state_of_the_process(tmp_path: Path) -> None:
    path = tmp_path / "state.py"
    path.write_text(_STATE)
    seen = json.loads(python("-O", path, "given", QUARANTUNE_CACHE_DIR=str(tmp_path / "cache")).splitlines()[-1])
    assert seen == ["set late", ["given", "appended"], 4321, "raise", 7, "set", "error", 1]
