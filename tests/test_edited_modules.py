"""Which modules count as edited since they were imported, and which files as those of installed packages."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quarantune.cache.fingerprint import is_library
from quarantune.host import process
from quarantune.transport import importable

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
    """Writes a module into an empty directory on the path, and imports it until the test has ended."""
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
    assert importable.edited_modules("with_caches") == []


@pytest.mark.parametrize(
    ("old", "new", "edited"), [("STEPS = 3", "STEPS = 4", []), ("x * STEPS", "x + STEPS", ["edited_later"])]
)
def test_a_module_with_edited_code_is_found(imports: Imports, old: str, new: str, edited: list[str]) -> None:
    module = imports("edited_later", SOURCE)
    assert module.__file__ is not None
    Path(module.__file__).write_text(SOURCE.replace(old, new))
    assert importable.edited_modules("edited_later") == edited


def test_objects_that_pass_for_modules_without_a_file_are_not_edited(imports: Imports) -> None:
    class Operators(types.ModuleType):
        __file__ = "_operators.py"

    module = imports("uses_operators", SOURCE)
    sys.modules["uses_operators.operators"] = module.operators = Operators("uses_operators.operators")
    try:
        assert importable.edited_modules("uses_operators") == []
    finally:
        del sys.modules["uses_operators.operators"]


def test_a_package_is_installed_wherever_pip_left_its_record(imports: Imports) -> None:
    theirs = imports("their_kernels", SOURCE)
    imports("own_kernels", SOURCE)
    assert theirs.__file__ is not None
    place = Path(theirs.__file__).parent
    about = place / "their_kernels-1.0.dist-info"
    about.mkdir()
    (about / "RECORD").write_text("their_kernels.py,sha256=x,1\ntheir_package/deep/inside.py,,\n")
    process._recorded.cache_clear()
    process.is_installed.cache_clear()
    found = [is_library("their_kernels"), process.is_installed(str(place / "their_package" / "other.py"))]
    assert found == [True, True]
    assert not is_library("own_kernels"), "a file of one's own beside installed packages"


def test_code_of_no_file_is_nobodys_package_also_where_the_working_directory_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.syspath_prepend("")  # as for `python -c` and in an interactive session
    process.is_installed.cache_clear()
    assert not process.is_installed("<string>")
    assert process.is_installed(pytest.__file__)
