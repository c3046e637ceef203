"""Modules edited after their import are found, and files of installed packages are recognised."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import python

from quarantune.functions import importable
from quarantune.functions.fingerprint import is_library
from quarantune.host import packages

SOURCE = """
STEPS = 3
SIZES = [64, 128]
_seen = {}
_names = []

def kernel(x):
    return x * STEPS
"""
Imports = Callable[[str, str], types.ModuleType]


@pytest.fixture
def imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Imports]:
    """Writes a module into an empty directory on the path, and imports it for the duration of the test."""
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    names = []

    def imported(name: str, source: str) -> types.ModuleType:
        (place / f"{name}.py").write_text(source)
        importlib.invalidate_caches()
        names.append(name)
        return importlib.import_module(name)

    yield imported
    for name in names:
        del sys.modules[name]


def test_a_module_that_has_filled_its_caches_is_not_edited(imports: Imports) -> None:
    module = imports("with_caches", SOURCE)
    module._seen["kernel"] = object()
    module._names.append("kernel")
    assert not importable.leads_to_edited("with_caches")


@pytest.mark.parametrize(
    ("old", "new", "edited"), [("STEPS = 3", "STEPS = 4", False), ("x * STEPS", "x + STEPS", True)]
)
def test_a_module_with_edited_code_is_found(imports: Imports, old: str, new: str, edited: bool) -> None:
    module = imports("edited_later", SOURCE)
    assert module.__file__ is not None
    Path(module.__file__).write_text(SOURCE.replace(old, new))
    assert importable.leads_to_edited("edited_later") is edited


def test_modules_that_import_each_other_are_all_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there.py").write_text("")
    for number in range(3000):
        module: Any = types.ModuleType(f"chained_{number}")
        module.__file__ = str(tmp_path / ("there.py" if number < 2999 else "gone.py"))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        if number:
            sys.modules[f"chained_{number - 1}"].next = module  # type: ignore[attr-defined]
    assert importable.leads_to_edited("chained_0")


def test_a_module_is_looked_at_once_at_one_moment(imports: Imports, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["asked_0", "asked_1", "asked_2", "asked_3"]
    for number, name in enumerate(names):
        imports(name, "".join(f"import {earlier}\n" for earlier in names[:number]))
    looked: list[str] = []
    look_at = importable._look_at
    monkeypatch.setattr(importable, "_look_at", lambda name: looked.append(name) or look_at(name))
    can_import = importable.remembering()
    assert all(map(can_import, [*names, *names]))
    assert set(names) <= set(looked)
    assert len(looked) == len(set(looked))


def test_objects_that_pose_as_modules_are_not_edited(imports: Imports) -> None:
    class Operators(types.ModuleType):
        __file__ = "_operators.py"

    module = imports("uses_operators", SOURCE)
    sys.modules["uses_operators.operators"] = module.operators = Operators("uses_operators.operators")
    try:
        assert not importable.leads_to_edited("uses_operators")
    finally:
        del sys.modules["uses_operators.operators"]


LAZY = """
import importlib.abc, importlib.util, sys

class Missing(importlib.abc.Loader):
    def create_module(self, spec):
        return None

    def exec_module(self, module):
        raise ModuleNotFoundError("an optional package is not installed")

spec = importlib.util.spec_from_file_location("of_optional", __file__, loader=importlib.util.LazyLoader(Missing()))
optional = sys.modules["of_optional"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(optional)

class Connected:
    @property
    def __class__(self):
        raise RuntimeError("the connection failed")

    __module__ = __class__

connection = Connected()
"""


def test_objects_that_fail_on_first_use_are_left_alone(imports: Imports) -> None:
    imports("uses_optional", LAZY + SOURCE)
    try:
        assert not importable.leads_to_edited("uses_optional")
        assert "uses_optional" not in importable.own_edited_modules()
    finally:
        del sys.modules["of_optional"]


CHANGED = "compile('def kernel(x): return 2 * x', {}, 'exec')"
HOOK = """
import importlib.machinery, os, sys

class Loader(importlib.machinery.SourceFileLoader):
    def {method}:
        {body}

class Finder:
    def find_spec(name, path, target=None):
        found = importlib.machinery.PathFinder.find_spec(name, path)
        if name == "hooked":
            found.loader = Loader(name, found.origin)
        return found

sys.meta_path.insert(0, Finder)
import hooked
if {is_written_again}:
    open(hooked.__file__, "w").write("def kernel(x): return x")
from quarantune.functions import importable
print(hooked.kernel(1), importable.leads_to_edited("hooked"))
"""


@pytest.mark.parametrize(
    ("method", "body", "is_written_again"),
    [
        ("exec_module(self, module)", f"exec({CHANGED.format('module.__file__')}, vars(module))", False),
        ("source_to_code(self, data, path)", f"return {CHANGED.format('path')}", True),
    ],
    ids=["as it runs", "as it is compiled"],
)
def test_a_module_that_an_import_hook_changes_is_not_edited(
    method: str, body: str, is_written_again: bool, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(HOOK.format(method=method, body=body, is_written_again=is_written_again))
    (tmp_path / "hooked.py").write_text("def kernel(x): return x")
    assert python(script) == "2 False\n"


def test_a_package_made_by_this_program_cannot_be_imported(imports: Imports) -> None:
    module = imports("of_made_up", SOURCE)
    assert module.__file__ is not None
    package: Any = types.ModuleType("made_up")
    sys.modules["made_up"] = package
    package.__path__ = [str(Path(module.__file__).parent)]  # like pytest's --import-mode=importlib
    importlib.import_module("made_up.of_made_up")
    try:
        assert not importable.can_import("made_up.of_made_up")
    finally:
        del sys.modules["made_up"], sys.modules["made_up.of_made_up"]


FINDERS = """
import importlib.machinery, importlib.util, sys
from pathlib import Path

file = Path(__file__).with_name("hidden") / "secret.py"
spec_of = importlib.util.spec_from_file_location

class Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return spec_of(name, file) if name == "secret" else None

def directory_hook(entry):
    if entry != "elsewhere://":
        raise ImportError
    return importlib.machinery.FileFinder(str(file.parent), (importlib.machinery.SourceFileLoader, [".py"]))

def suffix_hook(entry):
    if entry != str(file.parent):
        raise ImportError
    return importlib.machinery.FileFinder(entry, (importlib.machinery.SourceFileLoader, [".other"]))

def install(kind):
    if kind == "finder":
        sys.meta_path.insert(0, Finder)
    elif kind == "finder object":
        sys.meta_path.append(Finder())
    elif kind == "directory":
        sys.path_hooks.insert(0, directory_hook)
        sys.path.append("elsewhere://")
    elif kind == "suffix":
        sys.path_hooks.insert(0, suffix_hook)
        sys.path.append(str(file.parent))
        file.rename(file.with_suffix(".other"))
    elif kind in ("specification", "next to a directory"):
        spec = spec_of("secret", file)
        sys.modules["secret"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["secret"])
        if kind == "next to a directory":
            Path(__file__).with_name("secret").mkdir()
    elif kind == "no path any more":
        sys.path.insert(0, str(file.parent))
        import secret
        del sys.path[0]
"""
SECRET = """
import pickle
import numpy as np

class Box:
    def __init__(self, value):
        self.value = value

def kernel(x, n=1):
    import secret
    assert secret.kernel is kernel
    return pickle.loads(pickle.dumps(Box(x))).value * 2
"""
TUNES_SECRET = """
import sys
import finders
finders.install(sys.argv[1])
import numpy as np
import quarantune
import secret
from quarantune.functions import importable

print(importable.can_import("secret"))
if sys.argv[2:]:
    result = quarantune.AutoTuner(secret.kernel, {"n": [1, 2]}, warmup=0, rep=1).run(np.ones(3))
    print(sum(trial.outcome == "ok" for trial in result.trials))
"""


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """Writes a program with a module that only the program's finders find, and returns its file."""
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "secret.py").write_text(SECRET)
    (tmp_path / "finders.py").write_text(FINDERS)
    (tmp_path / "script.py").write_text(TUNES_SECRET)
    return tmp_path / "script.py"


KINDS = ["finder", "finder object", "directory", "suffix", "specification", "next to a directory", "no path any more"]


LONG = ("finder object", "directory", "suffix")
"""Kinds whose only difference is the finder; only a release needs them."""


@pytest.mark.parametrize(
    "kind",
    [
        KINDS[0],
        *(pytest.param(kind, marks=pytest.mark.long if kind in LONG else pytest.mark.slow) for kind in KINDS[1:]),
    ],
)
def test_a_function_of_a_module_found_only_here_is_tuned(kind: str, secret: Path) -> None:
    assert python(secret, kind, "tune", QUARANTUNE_CACHE_DIR=str(secret.parent / "cache")).split() == ["False", "2"]


def test_a_module_found_by_startup_files_can_be_imported(secret: Path) -> None:
    (secret.parent / "sitecustomize.py").write_text("import finders\nfinders.install('finder object')")
    assert python(secret, "none", path=[secret.parent]) == "True\n"


def test_a_namespace_can_be_imported(imports: Imports) -> None:
    module = imports("beside_namespace", SOURCE)
    assert module.__file__ is not None
    Path(module.__file__).with_name("namespace").mkdir()
    importlib.import_module("namespace")
    try:
        assert importable.can_import("namespace")
    finally:
        del sys.modules["namespace"]


def test_a_package_is_installed_wherever_pip_left_its_record(imports: Imports) -> None:
    theirs = imports("their_kernels", SOURCE)
    imports("own_kernels", SOURCE)
    assert theirs.__file__ is not None
    place = Path(theirs.__file__).parent
    about = place / "their_kernels-1.0.dist-info"
    about.mkdir()
    (about / "RECORD").write_text("their_kernels.py,sha256=x,1\ntheir_package/deep/inside.py,,\n")
    packages._recorded.cache_clear()
    packages.is_installed.cache_clear()
    found = [is_library("their_kernels"), packages.is_installed(str(place / "their_package" / "other.py"))]
    assert found == [True, True]
    assert not is_library("own_kernels"), "the user's file is next to installed packages"


def test_code_without_a_file_belongs_to_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.syspath_prepend("")  # `python -c` and interactive sessions have this entry
    packages.is_installed.cache_clear()
    assert not packages.is_installed("<string>")
    assert packages.is_installed(pytest.__file__)
