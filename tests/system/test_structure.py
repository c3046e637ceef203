"""No two files of the package import each other, even indirectly."""

from __future__ import annotations

import functools
import textwrap
from pathlib import Path

from count_structure import Structure


@functools.cache
def of_package() -> Structure:
    return Structure()


def test_imports_make_no_circle() -> None:
    structure = of_package()
    found = structure.circles()
    assert not found, "\n".join(line for circle in found for line in structure.names_between(circle))


def test_circles_are_found_wherever_an_import_stands(tmp_path: Path) -> None:
    files = {
        "__init__.py": "from pack.a import one",
        "a.py": "def one():\n    from pack.low import b",
        "low/__init__.py": "from pack.low.d import four",
        "low/b.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..low.c import Three",
        "low/c.py": "import pack.low.b",
        "low/d.py": "from pack import low\nfrom pack.a import one",
        "low/e.py": "from pack.low import b, d\nfrom pack import __doc__",
    }
    for name, text in files.items():
        (tmp_path / "pack" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "pack" / name).write_text(text)
    structure = Structure(tmp_path / "pack")
    assert structure.circles() == [["low/__init__.py", "low/d.py"], ["low/b.py", "low/c.py"]]
    assert structure.names_between(["low/b.py", "low/c.py"]) == [
        "low/b.py imports from low/c.py: Three",
        "low/c.py imports from low/b.py: *",
    ]


def test_repeated_decisions_are_counted(tmp_path: Path) -> None:
    source = """
    def forwards(settings):
        return find(settings, other=settings)

    def asks(x, *, settings=None):
        if settings.executor is None and isolation_of(settings, x) is Isolation.NONE:
            import pack.low.b
        return sweep.SweepRequest(settings)
    """
    (tmp_path / "pack" / "low").mkdir(parents=True)
    (tmp_path / "pack" / "low" / "b.py").write_text("")
    (tmp_path / "pack" / "low" / "a.py").write_text(textwrap.dedent(source))
    counts = {title: dict(count) for title, count in Structure(tmp_path / "pack").counts().items()}
    assert counts == {
        "functions that only forward settings": {"low": 1},
        "functions that take settings": {"low": 2},
        "places that construct SweepRequest": {"low": 1},
        "calls of isolation_of, tests of Isolation": {"low": 2},
        "tests of .executor (here or engine)": {"low": 1},
        "files imported in functions": {"low": 1},
    }


def test_lines_that_ask_where_a_trial_runs_are_counted(tmp_path: Path) -> None:
    source = """
    def asks(plan, request, job, kind):
        if plan.route is Route.APART and not request.runs:
            return [each for each in kind if each.exclusive]
        match kind:
            case Mode.HERE:
                return job.is_alone and job.runs
        return Route.TOGETHER, request.mode
    """
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "a.py").write_text(textwrap.dedent(source))
    assert dict(Structure(tmp_path / "pack").asking_lines()) == {"a.py": 3}


def test_few_lines_ask_where_a_trial_runs() -> None:
    asking = of_package().asking_lines()
    assert asking.total() <= 35, asking.most_common()
    assert asking["scheduler/routes/choosing.py"] >= 10, "this file should ask most"
