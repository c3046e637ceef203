"""The package states the same author, version and license everywhere, and users install only the package."""

from __future__ import annotations

import ast
import collections
import inspect
import re
import tomllib
from pathlib import Path

from helpers import ROOT

import quarantune

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_author_version_and_license_are_the_same_everywhere() -> None:
    [author] = PROJECT["project"]["authors"]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f'  - name: "{author["name"]}"\n' in citation
    assert f'author = "{author["name"]}"\n' in (ROOT / "docs" / "conf.py").read_text(encoding="utf-8")
    assert f"\nversion: {quarantune.__version__}\n" in citation
    assert f"\nlicense: {PROJECT['project']['license']}\n" in citation


def test_the_changelog_has_a_part_for_the_next_release() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    first, *released = re.findall(r"^## (.+)$", changes, flags=re.MULTILINE)
    assert first == "Unreleased"
    assert quarantune.__version__ in (released[0] if released else changes.split("\n### ")[0])


def test_completion_shows_promised_names_alone() -> None:
    modules = {"cache", "doctor", "metrics", "ray", "spaces"}
    assert set(dir(quarantune)) == {*quarantune.__all__, *modules}
    for name in modules:
        module = getattr(quarantune, name)
        shown = {each: getattr(module, each) for each in dir(module)}
        assert not [each for each, value in shown.items() if each.startswith("_") or inspect.ismodule(value)]
        assert "Any" not in shown


def test_users_install_only_the_package() -> None:
    assert PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"] == {"packages": ["src/quarantune"]}
    package = ROOT / "src" / "quarantune"
    found = [path.relative_to(package) for path in package.rglob("*") if path.is_file()]
    found = [path for path in found if "__pycache__" not in path.parts and path.suffix != ".py"]
    page = {path for path in found if path.parts[:2] == ("results", "page") and path.suffix in (".js", ".css", ".html")}
    targets = {path for path in found if path.parts[:2] == ("devices", "target_texts") and path.suffix == ".textproto"}
    assert page
    assert targets
    assert set(found) - page - targets == {Path("py.typed")}


def test_no_class_or_module_has_the_name_of_another() -> None:
    places = collections.defaultdict(list)
    for path in sorted((ROOT / "src").rglob("*.py")):
        place = str(path.relative_to(ROOT / "src"))
        if path.name != "__init__.py":
            places[path.name].append(place)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(f"{place}:{node.lineno}")
    assert not {name: found for name, found in places.items() if len(found) > 1}
