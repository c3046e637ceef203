"""The configuration of the documentation: `python -m sphinx -W docs OUTPUT` builds it."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from quarantune import __version__

project = "quarantune"
author = "the quarantune developers"
release = version = __version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"quarantune {version}"
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["narrow.css"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # the notebook is shown with the output that it was saved with
default_role = "code"  # docstrings mark code with single backquotes
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_use_ivar = True  # the attributes of a dataclass as one list

# Pages that are files of the repository's root name others relative to the root.
_PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}


def _relink(app: Any, relative_path: Path, parent: str, content: list[str]) -> None:
    """Turns links between files of the repository's root into links between pages."""

    def page(match: re.Match[str]) -> str:
        target = match["target"]
        return f"]({_PAGES.get(target, target.removeprefix('docs/'))}{match['anchor']})"

    content[0] = re.sub(r"\]\((?P<target>[\w./-]+\.md)(?P<anchor>(#[\w-]+)?)\)", page, content[0])


def _without_fields(app: Any, what: str, name: str, value: Any, *_: object) -> tuple[str, str] | None:
    """Leaves out the constructors of dataclasses that quarantune makes, whose fields are listed as attributes."""
    is_made_by_us = what == "class" and dataclasses.is_dataclass(value) and not name.endswith(".Options")
    return ("", "") if is_made_by_us else None


def setup(app: Any) -> None:
    """Connects the event handlers; Sphinx calls it."""
    app.connect("autodoc-process-signature", _without_fields)
    app.connect("include-read", _relink)
