"""The documents name only tests, files, options and messages that exist."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import tomllib

import pytest
from document_blocks import blocks_of
from helpers import ROOT

import quarantune
import quarantune.metrics
import quarantune.spaces
from quarantune.values.options import Options
from quarantune.values.settings import Settings
from quarantune.values.trial import Outcome

SOURCE = ROOT / "src" / "quarantune"
DOCUMENTS = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "SECURITY.md"]
DOCUMENTS += sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))
THE_READERS = {"attention.py", "kernels.py", "rmsnorm.py", "targets/", "train.py"}
"""Files that the documents name and readers make in their own directories."""
DOCUMENTS = [name for name in DOCUMENTS if (ROOT / name).exists()]  # a source distribution may lack some


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def section(name: str, heading: str) -> str:
    """Returns the part of a document under a heading, up to the next heading of that level."""
    level = heading.split()[0]
    return re.split(rf"^{level} ", text_of(name).split(f"\n{heading}\n")[1], flags=re.MULTILINE)[0]


def code_in(text: str) -> list[str]:
    """Returns the inline code of a text, without its code blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def first_column(text: str) -> list[str]:
    """Returns the code in the first column of a text's tables."""
    rows = re.findall(r"^\| (`[^|]*) \|", text, flags=re.MULTILINE)
    return [name for row in rows for name in code_in(row)]


@functools.cache
def known_tests() -> set[str]:
    names = set()
    for file in (ROOT / "tests").rglob("test_*.py"):
        for name in re.findall(r"^def (test_\w+)", file.read_text(encoding="utf-8"), flags=re.MULTILINE):
            names |= {name, f"{file.name}::{name}"}
    return names


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_test_named_in_a_document_exists(document: str) -> None:
    known = known_tests()
    named = {code for code in code_in(text_of(document)) if re.fullmatch(r"(test_\w+\.py::)?test_\w+", code)}
    missing = {name: difflib.get_close_matches(name, known, n=2) for name in sorted(named - known)}
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_named_in_a_document_exists(document: str) -> None:
    text = text_of(document)
    named = {code for code in code_in(text) if re.fullmatch(r"[\w./-]+(\.(py|md|toml)|/)", code) and "__" not in code}
    named -= THE_READERS
    places = (ROOT, SOURCE, ROOT / "tests", (ROOT / document).parent)
    assert not [name for name in sorted(named) if not any((place / name).exists() for place in places)]
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", text)
    assert not [link for link in links if not ((ROOT / document).parent / link).exists()]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_variable_named_in_a_document_exists(document: str) -> None:
    known = {field.name.upper() for field in dataclasses.fields(Settings)}
    assert set(re.findall(r"\bQUARANTUNE_([A-Z_]+)", text_of(document))) <= known


@pytest.mark.parametrize("document", DOCUMENTS)
def test_python_in_a_document_has_valid_syntax(document: str) -> None:
    for block in blocks_of(text_of(document)):
        if block.language == "python":
            compile(block.code, document, "exec")


def test_the_python_reference_lists_every_public_name() -> None:
    assert not [name for name in quarantune.__all__ if not hasattr(quarantune, name)]
    pages = "\n".join(text_of(f"docs/{name}.md") for name in ("api", "api-results", "api-tools"))
    listed = set(re.findall(r"^\.\. auto\w+:: quarantune\.(\w+)$", pages, flags=re.MULTILINE))
    of_modules = {name for module in (quarantune.spaces, quarantune.metrics) for name in vars(module)}
    assert not set(quarantune.__all__) - listed - of_modules - {"__version__"}


def test_every_page_is_in_a_toctree_of_the_index() -> None:
    listed = re.findall(r"^[\w-]+$", text_of("docs/index.md"), flags=re.MULTILINE)
    pages = {path.stem for path in (ROOT / "docs").iterdir() if path.suffix in (".md", ".ipynb")} - {"index"}
    assert sorted(pages) == sorted(listed)


def test_the_reference_lists_every_option() -> None:
    assert sorted(first_column(text_of("docs/options.md").split("\n## ")[0])) == sorted(
        ["configs", *(field.name for field in dataclasses.fields(Options))]
    )


def test_the_reference_lists_every_outcome() -> None:
    table = section("docs/failures.md", "## Outcomes").split("\n### ")[0]
    assert first_column(table) == [outcome.value for outcome in Outcome]


def test_the_reference_lists_every_variable() -> None:
    _, *listed = first_column(text_of("docs/environment.md"))  # the first is the column's heading
    assert sorted(listed) == sorted(field.name.upper() for field in dataclasses.fields(Settings))


def test_the_architecture_lists_the_layers_that_are_enforced() -> None:
    contract = tomllib.loads(text_of("pyproject.toml"))["tool"]["importlinter"]["contracts"][0]
    enforced = [package for layer in contract["layers"] for package in layer.split(" | ")]
    assert first_column(section("ARCHITECTURE.md", "## Layers")) == enforced


def test_few_values_of_the_source_are_untyped_dictionaries() -> None:
    assert sum(path.read_text(encoding="utf-8").count("dict[str, Any]") for path in SOURCE.rglob("*.py")) < 25
