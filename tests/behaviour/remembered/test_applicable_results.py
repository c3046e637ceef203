"""A saved result is used only for the types, code, versions and checks under which it was found."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from cached_functions import CONFIGS, X, entry_of, one_warning, scaled
from helpers import change_version, python
from tuned_functions import here, tuned

import quarantune
from quarantune.functions import versions

pytestmark = pytest.mark.usefixtures("two_slots")


def plain(x: Any, *rest: Any, n: int) -> Any:
    return x * n


def test_a_plain_functions_results_differ_by_dtype_and_number(name: str) -> None:
    def from_cache(*args: Any) -> bool:
        return quarantune.AutoTuner(plain, CONFIGS, rep=1, name=name).run(*args).from_cache

    assert not from_cache(np.ones(3, np.float32), X, 5)
    assert from_cache(np.zeros(3, np.float32), X, 5)
    assert not from_cache(np.ones(3, np.float64), X, 5)
    assert not from_cache(np.ones(3, np.float32), X, 6)


@pytest.mark.parametrize("version_check", ["0", "1"])
def test_results_of_other_versions_warn_or_are_measured_again(
    version_check: str, name: str, swept: list[list[Any]], monkeypatch: pytest.MonkeyPatch, cache_dir: Path
) -> None:
    scaled(name)(X)
    change_version(cache_dir, "jax", "0.0.1")
    monkeypatch.setenv("QUARANTUNE_VERSION_CHECK", version_check)
    if version_check == "1":
        np.testing.assert_array_equal(scaled(name)(X), X * 2)
        assert swept == [[1, 2], [1, 2]]
        assert entry_of(cache_dir)["versions"] == versions.versions()
    else:
        with one_warning(f"jax 0.0.1 (now {jax.__version__})", "VERSION_CHECK=1"):
            for _ in range(2):
                np.testing.assert_array_equal(scaled(name)(X), X * 2)
        assert swept == [[1, 2]]


ORIGINAL = """
import functools
import jax
import quarantune

OFFSET = 3.0

def helper(x):
    return x + OFFSET

def make(factor):
    @quarantune.autotune([{"n": 1}, {"n": 2}], rep=1, name="changing")
    @functools.partial(jax.jit, static_argnames=["n", "flip"])
    def kernel(x, flip=False, n: int = 1):
        "Scales x."
        return helper(x) * n * factor
    return kernel

kernel = make(5.0)
"""


CHANGES = {
    "same": ("", "", True),
    "comment": ("    return x + OFFSET", "    # adds\n    return x + OFFSET  # the offset", True),
    "layout": (
        "return helper(x) * n * factor",
        "return (\n            helper(x)\n            * n * factor\n        )",
        True,
    ),
    "docstring": ("Scales x.", "Scales x by n.", True),
    "lines above": ("import functools\n", "import functools\nimport os\n\nUNUSED = 1\n\n", True),
    "body": ("* n * factor", "* factor * n", False),
    "default": ("flip=False", "flip=0.5", False),
    "closure": ("make(5.0)", "make(6.0)", False),
    "helper": ("x + OFFSET", "x - OFFSET", False),
    "helper's constant": ("OFFSET = 3.0", "OFFSET = 4.0", False),
}


LOOK_UP = """
import importlib, json, sys
import numpy as np
answers = {}
for directory in sys.argv[1:]:
    sys.path.insert(0, directory)
    sys.modules.pop("changing_kernel", None)
    importlib.invalidate_caches()
    module = importlib.import_module("changing_kernel")
    assert module.__file__.startswith(directory)
    answers[directory] = module.kernel.lookup(np.ones(4, np.float32), False)
print(json.dumps(answers))
"""


def run_code(code: str, *arguments: object) -> str:
    return python("-W", "error", "-c", textwrap.dedent(code), *arguments)


def test_changed_code_is_a_miss_and_a_changed_comment_is_not(tmp_path: Path) -> None:
    wanted = {}
    for change, (old, new, hits) in CHANGES.items():
        directory = tmp_path / change.replace(" ", "-")
        directory.mkdir()
        assert old in ORIGINAL
        (directory / "changing_kernel.py").write_text(ORIGINAL.replace(old, new) if old else ORIGINAL)
        wanted[str(directory)] = hits
    tune = """
        import sys
        import numpy as np
        sys.path.insert(0, sys.argv[1])
        from changing_kernel import kernel
        kernel(np.ones(4, np.float32), False)
    """
    run_code(tune, tmp_path / "same")
    found = json.loads(run_code(LOOK_UP, *wanted))
    assert {directory: config is not None for directory, config in found.items()} == wanted


def test_a_result_that_was_judged_differently_is_a_miss(sweeps: list[str]) -> None:
    def variant(**options: Any) -> Any:
        return tuned(lambda x, do: x * do, [1, 2], **{"name": "judged", "ref_fn": lambda x: x, **options})

    with here():
        variant().tune(X)
    assert variant().lookup(X) == {"do": 1}
    assert variant(warmup=3, rep=2, timeout=9).lookup(X) == {"do": 1}
    for changed in (
        {"ref_fn": lambda x: x + 0},
        {"ref_fn": None},
        {"rtol": 0.5},
        {"atol": 0.5},
        {"max_mismatched_ratio": 0.5},
        {"check_fn": lambda output, expected, x: True},
        {"check_grad": True},
        {"supply": "ones"},
    ):
        assert variant(**changed).lookup(X) is None, changed
    assert len(sweeps) == 1
