"""Counts modules, lines of code, classes and functions, package by package.

    python tests/support/count_code.py              # src/quarantune
    python tests/support/count_code.py --files      # with a row for each file
    python tests/support/count_code.py tests        # another directory

A line counts once if it holds code. Comments, blank lines and docstrings, also of constants, do not count.
"""

from __future__ import annotations

import argparse
import ast
import collections
import io
import tokenize
from pathlib import Path
from typing import NamedTuple

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


class Count(NamedTuple):
    modules: int
    lines: int
    classes: int
    functions: int


def count(file: Path) -> Count:
    text = file.read_text(encoding="utf-8")
    nodes = list(ast.walk(ast.parse(text)))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in nodes:
        lines.difference_update(_lines_of_docstring(node))
    functions = sum(isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) for node in nodes)
    return Count(1, len(lines), sum(isinstance(node, ast.ClassDef) for node in nodes), functions)


def _lines_of_docstring(node: ast.AST) -> range:
    """Returns the lines of a text that is a statement."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return range(node.lineno, (node.end_lineno or 0) + 1)
    return range(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", type=Path, default=Path(__file__).parents[2] / "src" / "quarantune")
    parser.add_argument("--files", action="store_true", help="also print a row for each file")
    options = parser.parse_args()
    found = {file.relative_to(options.directory): count(file) for file in sorted(options.directory.rglob("*.py"))}
    packages = collections.defaultdict(list)
    for name, counted in found.items():
        packages[name.parts[0] if len(name.parts) > 1 else "."].append(counted)
    rows = [(package, _sum(counts)) for package, counts in packages.items()]
    rows.sort(key=lambda row: row[1].lines, reverse=True)
    if options.files:
        rows = [(str(name), counted) for name, counted in found.items()] + rows
    print(f"{'':40}" + "".join(f"{column:>10}" for column in Count._fields))
    for name, counted in [*rows, ("total", _sum(list(found.values())))]:
        print(f"{name:40}" + "".join(f"{number:10,}" for number in counted))


def _sum(counts: list[Count]) -> Count:
    return Count(*map(sum, zip(*counts, strict=True)))


if __name__ == "__main__":
    main()
