"""The notebook of the documentation runs from top to bottom in a fresh kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import ROOT

NOTEBOOK = ROOT / "docs" / "notebook.ipynb"


@pytest.mark.clients
@pytest.mark.timeout(600)
def test_the_notebook_runs_and_prints_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("QUARANTUNE_CACHE_DIR", str(tmp_path / "cache"))
    book = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(book, timeout=500, kernel_name="python3", resources=resources).execute()
    printed = "".join(output.get("text", "") for cell in book.cells for output in cell.get("outputs", []))
    assert "wrong [1]" in printed
    assert "defaults" in printed
    assert "<html" in (tmp_path / "softmax.html").read_text(encoding="utf-8")
