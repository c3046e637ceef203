"""The code blocks of the documents: whether they run, why not, and a page as a script.

`python tests/support/document_blocks.py` prints the quick start as a shell script for a clean checkout.
"""

from __future__ import annotations

import dataclasses
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUN = ("python", "bash")
"""The languages of blocks that run."""
_PROSE = ("", "text")
"""The languages of blocks that are diagrams or output."""

_FENCE = re.compile(r"(?P<indent> *)```(?P<language>[\w{][^\n]*)?$")
_REASON = re.compile(r" *<!-- not run: (?P<reason>.+) -->")
_HIDDEN = re.compile(r" *<!-- run first:$")


@dataclasses.dataclass(frozen=True)
class Block:
    """One block of code in a document.

    Attributes:
        line: the number of its first line of code, counted from 1.
        language: the word after the fence; `python` for code in a comment, hidden from readers.
        code: without its indentation.
        reason: the reason for not running it; None if it must run.
    """

    line: int
    language: str
    code: str
    reason: str | None = None


def documents() -> list[str]:
    """Returns the documents with blocks that must run, relative to the root."""
    pages = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("**/*.md"))
    others = ("README.md", "CONTRIBUTING.md", "examples/benchmarks/README.md")
    return [*(name for name in others if (ROOT / name).exists()), *pages]


def blocks_of(text: str) -> list[Block]:
    """Returns the blocks of a document and its `run first` comments, without Sphinx directives."""
    lines = text.split("\n")
    blocks, reason, position = [], None, 0
    while position < len(lines):
        line = lines[position]
        if fence := _FENCE.fullmatch(line):
            end = lines.index(fence["indent"] + "```", position + 1)
            language, first = fence["language"] or "", position + 1
        elif _HIDDEN.fullmatch(line):
            end = next(i for i in range(position + 1, len(lines)) if lines[i].strip() == "-->")
            language, first = "python", position + 1
        else:
            if said := _REASON.fullmatch(line):
                reason = said["reason"]
            elif line.strip():
                reason = None
            position += 1
            continue
        if not language.startswith("{") and language not in _PROSE:
            code = textwrap.dedent("\n".join(lines[first:end]))
            blocks.append(Block(first + 1, language, code, reason))
        reason, position = None, end + 1
    return blocks


def script_of(text: str) -> str:
    """Returns a document's blocks as one script with the line numbers of the document."""
    script = [""] * (text.count("\n") + 2)
    for block in blocks_of(text):
        if block.reason is not None:
            continue
        if block.language == "python":
            code = block.code.split("\n")
            script[block.line - 1 : block.line - 1 + len(code)] = code
        else:
            script[block.line - 1] = f"__import__('document_blocks').shell({block.code!r})"
    return "\n".join(script) + "\n"


def quick_start() -> tuple[str, list[str]]:
    """Returns the program of the quick start and its shell commands, up to the page's second heading."""
    page = (ROOT / "docs" / "quick-start.md").read_text(encoding="utf-8").partition("\n## ")[0]
    blocks = blocks_of(page)
    (program,) = (block.code for block in blocks if block.language == "python")
    commands = [line for block in blocks if block.language == "bash" for line in block.code.splitlines()]
    return program, commands


def shell(code: str) -> None:
    """Runs a block of shell commands, and fails if a command fails."""
    import subprocess

    subprocess.run(["bash", "-euo", "pipefail", "-c", code], check=True)


if __name__ == "__main__":
    program, commands = quick_start()
    print(f"cat > attention.py <<'END OF PROGRAM'\n{program}\nEND OF PROGRAM")
    print("\n".join(commands))
