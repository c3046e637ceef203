"""Counts circles of imports and repeated decisions in the source, which make `src/quarantune` hard to follow.

    python tests/support/count_structure.py              # src/quarantune
    python tests/support/count_structure.py src/other    # another package

Imports in functions and for type checking also count. `from package.x import y` imports the file of `y` if `y` is a
module. An `__init__.py` counts only if a file imports it or a name from it.
"""

from __future__ import annotations

import argparse
import ast
import collections
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[2] / "src" / "quarantune"
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_FLAGS = frozenset(
    [
        "is_check",
        "compile_only",
        "_compile_only",
        "measures_here",
        "_measures_here",
        "_is_alone",
        "is_alone",
        "_on_cpu",
        "on_cpu",
        "_on_tpu",
        "on_many_devices",
        "_on_many_devices",
        "is_spread",
        "exclusive",
        "errors_are_final",
        "confirms",
        "_confirms",
        "may_exceed_alone",
        "is_share",
        "has_final",
        "waits_in_files",
        "prepares_ahead",
        "_compiles_on_device",
        "compiles_with_device",
        "with_device",
        "_saves",
        "_pauses",
        "as_data",
        "must_save",
        "is_taken",
        "_device_is_taken",
        "only_compiles",
    ]
)
"""Names that show where or how a trial runs."""
_ENUMS = ("Route", "Isolation", "Mode")


class Import(NamedTuple):
    """One name that a file imports from another file of the package; `*` for the module itself."""

    importer: str
    imported: str
    name: str
    is_deferred: bool


class Structure:
    """The files of a package, and their counts."""

    def __init__(self, package: Path = PACKAGE) -> None:
        self._root = package.name
        self._trees = {
            file.relative_to(package).as_posix(): ast.parse(file.read_text(encoding="utf-8"))
            for file in sorted(package.rglob("*.py"))
        }
        self.imports = [found for file, tree in self._trees.items() for found in self._imports(file, tree, False)]
        self._next_files = collections.defaultdict(set)
        for each in self.imports:
            self._next_files[each.importer].add(each.imported)

    @functools.cached_property
    def _nodes(self) -> dict[str, list[ast.AST]]:
        """The nodes that counts need, by file; circles need no nodes."""
        counted = (*_FUNCTIONS, ast.Call, ast.Compare, ast.MatchValue)
        trees = self._trees.items()
        return {file: [node for node in ast.walk(tree) if isinstance(node, counted)] for file, tree in trees}

    def circles(self) -> list[list[str]]:
        """Returns each circle of imports: the files that reach each other."""
        reached = {file: self._reached_from(file) for file in self._trees}
        found = {
            tuple(sorted(other for other in reached[file] if file in reached[other]))
            for file in self._trees
            if file in reached[file]
        }
        return sorted(map(list, found))

    def names_between(self, files: list[str]) -> list[str]:
        """Returns a line for each pair of files in a circle: the names that one imports from the other."""
        between = collections.defaultdict(set)
        for each in self.imports:
            if each.importer in files and each.imported in files:
                between[each.importer, each.imported].add(each.name)
        return [f"{a} imports from {b}: {', '.join(sorted(names))}" for (a, b), names in sorted(between.items())]

    def counts(self) -> dict[str, collections.Counter[str]]:
        """Returns each count by package."""
        counts = {
            "functions that only forward settings": self._count(_only_forwards_settings),
            "functions that take settings": self._count(_takes_settings),
            "places that construct SweepRequest": self._count(lambda node: _calls(node, "SweepRequest")),
            "calls of isolation_of, tests of Isolation": self._count(_decides_isolation),
            "tests of .executor (here or engine)": self._count(_decides_here_or_engine),
        }
        deferred = {(each.importer, each.imported) for each in self.imports if each.is_deferred}
        counts["files imported in functions"] = collections.Counter(_package(importer) for importer, _ in deferred)
        return counts

    def asking_lines(self) -> collections.Counter[str]:
        """Returns by file the number of lines with a condition on where a trial runs: on a route or a flag."""
        found = {file: _asking_lines(tree) for file, tree in self._trees.items()}
        return +collections.Counter({file: len(lines) for file, lines in found.items()})

    def _imports(self, file: str, node: ast.AST, is_deferred: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                names = [(alias.name.split("."), "") for alias in child.names]
            elif isinstance(child, ast.ImportFrom):
                names = [(self._absolute(file, child), alias.name) for alias in child.names]
            elif isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):
                yield from self._imports(file, child, is_deferred or isinstance(child, _FUNCTIONS))
                continue
            else:
                continue
            for (root, *module), name in names:
                if root == self._root and (found := self._resolved(module, name)):
                    yield Import(file, *found, is_deferred)

    def _absolute(self, file: str, node: ast.ImportFrom) -> list[str]:
        module = node.module.split(".") if node.module else []
        if not node.level:
            return module
        folders = [self._root, *file.split("/")[:-1]]
        return folders[: len(folders) - node.level + 1] + module

    def _resolved(self, module: list[str], name: str) -> tuple[str, str] | None:
        for parts, imported in (([*module, name] if name else module, "*"), (module, name)):
            for file in ("/".join(parts) + ".py", "/".join([*parts, "__init__.py"])):
                if file in self._trees:
                    return file, imported
        return None

    def _reached_from(self, file: str) -> set[str]:
        reached: set[str] = set()
        left = [file]
        while left:
            new = self._next_files[left.pop()] - reached
            reached |= new
            left += new
        return reached

    def _count(self, is_one: Callable[[ast.AST], bool]) -> collections.Counter[str]:
        counted: collections.Counter[str] = collections.Counter()
        for file, nodes in self._nodes.items():
            counted[_package(file)] += sum(map(is_one, nodes))
        return +counted


def _package(file: str) -> str:
    return file.partition("/")[0] if "/" in file else "."


def _takes_settings(node: ast.AST) -> bool:
    if not isinstance(node, _FUNCTIONS):
        return False
    arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    return any(argument.arg == "settings" for argument in arguments)


def _only_forwards_settings(node: ast.AST) -> bool:
    if not _takes_settings(node):
        return False
    calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
    given = {id(each) for call in calls for each in (*call.args, *(keyword.value for keyword in call.keywords))}
    used = [id(each) for each in ast.walk(node) if isinstance(each, ast.Name) and each.id == "settings"]
    return bool(used) and given.issuperset(used)


def _calls(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and name in (getattr(node.func, "id", ""), getattr(node.func, "attr", ""))


def _decides_isolation(node: ast.AST) -> bool:
    tests = isinstance(node, (ast.Compare, ast.MatchValue))
    return _calls(node, "isolation_of") or (tests and any(getattr(e, "id", "") == "Isolation" for e in ast.walk(node)))


def _decides_here_or_engine(node: ast.AST) -> bool:
    return isinstance(node, ast.Compare) and getattr(node.left, "attr", "") == "executor"


def _is_flag(node: ast.AST) -> bool:
    if isinstance(node, ast.Name):
        return node.id in _FLAGS
    if not isinstance(node, ast.Attribute):
        return False
    owner = getattr(node.value, "attr", getattr(node.value, "id", ""))
    asked = (node.attr == "route" and owner == "plan") or (
        node.attr in ("mode", "runs") and owner.lstrip("_") in ("request", "given")
    )
    is_of_job = node.attr == "is_alone" and owner != "self"  # a config that runs when no other does
    return owner in _ENUMS or asked or (node.attr in _FLAGS and not is_of_job)


def _asking_lines(tree: ast.AST) -> set[int]:
    found: set[int] = set()
    for node in ast.walk(tree):
        match node:
            case ast.If() | ast.IfExp() | ast.While() | ast.Assert():
                asked: list[ast.AST] = [node.test]
            case ast.BoolOp() | ast.Compare() | ast.MatchValue() | ast.UnaryOp(op=ast.Not()):
                asked = [node]
            case ast.comprehension():
                asked = [*node.ifs]
            case ast.match_case(guard=ast.expr() as guard):
                asked = [guard]
            case _:
                continue
        found |= {part.lineno for each in asked for part in ast.walk(each) if _is_flag(part)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", type=Path, default=PACKAGE)
    structure = Structure(parser.parse_args().directory)
    circles = structure.circles()
    print(f"{'circles of imports':44}{len(circles):6}")
    for circle in circles:
        print(f"  {' '.join(circle)}", *structure.names_between(circle), sep="\n    ")
    for title, counts in structure.counts().items():
        print(f"{title:44}{counts.total():6}  {', '.join(f'{name} {count}' for name, count in sorted(counts.items()))}")
    asking = structure.asking_lines()
    print(f"{'lines that ask where a trial runs':44}{asking.total():6}")
    for file, count in asking.most_common():
        print(f"  {count:4}  {file}")


if __name__ == "__main__":
    main()
