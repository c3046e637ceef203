"""The configuration of the documentation: `python -m sphinx -W docs OUTPUT` builds it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from quarantune import __version__

project = "quarantune"
author = "the developers of quarantune"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"quarantune {version}"
html_show_copyright = False
myst_heading_anchors = 3
default_role = "code"  # docstrings mark code with single backquotes
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_use_ivar = True  # the attributes of a dataclass are documented in its docstring alone

# Pages that are files of the repository's root name others relative to the root.
_PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}


def _relink(app: Any, relative_path: Path, parent: str, content: list[str]) -> None:
    """Turns links between files of the repository's root into links between pages."""

    def page(match: re.Match[str]) -> str:
        target = match["target"]
        return f"]({_PAGES.get(target, target.removeprefix('docs/'))}{match['anchor']})"

    content[0] = re.sub(r"\]\((?P<target>[\w./-]+\.md)(?P<anchor>(#[\w-]+)?)\)", page, content[0])


def setup(app: Any) -> None:
    """Connects the event handler; Sphinx calls it."""
    app.connect("include-read", _relink)
