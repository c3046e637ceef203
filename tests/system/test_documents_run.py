"""Every block of code in the documents runs, or the document says why it does not."""

from __future__ import annotations

import doctest
import importlib.util
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import document_blocks
import jax
import pytest
from helpers import ROOT, SUPPORT, child_environ
from shared_python import SharedPython

PAGES = [
    page
    for page in document_blocks.documents()
    if any(block.reason is None for block in document_blocks.blocks_of((ROOT / page).read_text(encoding="utf-8")))
]
FIRST = {"README.md", "docs/quick-start.md", "docs/tutorial.md"}
"""The pages that people read first. The code of the other pages runs with the long tests."""
NEEDED = {"docs/training.md": ("flax", "equinox", "optax")}
"""Libraries of the extra `clients` that a page uses."""


def test_blocks_keep_their_reasons_and_line_numbers() -> None:
    text = (
        "# Title\n\n1. A list\n\n   ```python\n   x = 1\n   ```\n\n<!-- run first:\ny = 2\n-->\n"
        "<!-- not run: no device -->\n\n```bash\nfalse\n```\n\n```bash\ntrue\n```\n"
    )
    blocks = document_blocks.blocks_of(text)
    assert [(block.line, block.language, block.reason) for block in blocks] == [
        (6, "python", None),
        (10, "python", None),
        (15, "bash", "no device"),
        (19, "bash", None),
    ]
    lines = document_blocks.script_of(text).split("\n")
    assert (lines[5], lines[9], lines[14]) == ("x = 1", "y = 2", "")
    assert "shell('true')" in lines[18]


@pytest.mark.parametrize("page", document_blocks.documents())
def test_a_block_runs_or_says_why_it_does_not(page: str) -> None:
    blocks = document_blocks.blocks_of((ROOT / page).read_text(encoding="utf-8"))
    assert not [
        f"{page}:{block.line}: {block.language}: write <!-- not run: REASON --> above it"
        for block in blocks
        if block.reason is None and block.language not in document_blocks.RUN
    ]


def test_the_quick_start_has_at_most_five_commands() -> None:
    program, commands = document_blocks.quick_start()
    assert len(commands) <= 5
    assert any(command.endswith(" attention.py") for command in commands)
    compile(program, "attention.py", "exec")


def test_examples_in_docstrings_that_are_not_skipped_are_right(tmp_path: Path) -> None:
    source = ROOT / "src"
    with_examples = [path for path in (source / "quarantune").glob("**/*.py") if ">>>" in path.read_text("utf-8")]
    assert with_examples
    for path in with_examples:
        module = importlib.import_module(".".join(path.relative_to(source).with_suffix("").parts))
        ran = doctest.testmod(module, extraglobs={"jax": jax, "directory": tmp_path}, raise_on_error=False)
        assert ran.failed == 0, module.__name__


@pytest.fixture(scope="module")
def pages() -> Iterator[SharedPython]:
    """The process that runs pages."""
    shared = SharedPython(environ=child_environ(SUPPORT))
    yield shared
    shared.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "page", [page if page in FIRST else pytest.param(page, marks=pytest.mark.long) for page in PAGES]
)
def test_the_code_of_a_page_runs_from_top_to_bottom(page: str, tmp_path: Path, pages: SharedPython) -> None:
    if missing := [name for name in NEEDED.get(page, ()) if importlib.util.find_spec(name) is None]:
        pytest.skip(f"{page} needs {', '.join(missing)}")
    script = tmp_path / f"{Path(page).stem.replace('-', '_').lower()}.py"
    script.write_text(document_blocks.script_of((ROOT / page).read_text(encoding="utf-8")), encoding="utf-8")
    commands = tmp_path / ".venv" / "bin"  # pages call their environment's programs by this path
    commands.mkdir(parents=True)
    for command, words in {"python": "", "quarantune": "-m quarantune", "pytest": "-m pytest"}.items():
        program = commands / command
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n', encoding="utf-8")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    done = pages.run(script, cwd=tmp_path, timeout_s=580, PATH=f"{commands}:{os.environ['PATH']}")
    assert done.returncode == 0, f"{page} has the line numbers of the script:\n{done.stdout}\n{done.stderr}"
