"""A result names the commit of the user's repository."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from helpers import isolated

import quarantune
from quarantune.host import repository as code_repository

PROGRAM = "def scaled(x, n=1):\n    return x * n\n"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one commit and, in a folder, a module."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "kernels.py").write_text(PROGRAM)
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        settings = ["-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(tmp_path), *settings, *arguments], check=True)
    return tmp_path


def head(repository: Path) -> str:
    command = ["git", "-C", str(repository), "rev-parse", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def loaded(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernels", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_entry_result_and_report_name_the_commit(repository: Path, cache_dir: Path) -> None:
    tuner = quarantune.AutoTuner(loaded(repository / "src" / "kernels.py").scaled, {"n": [1]}, rep=1, name="scaled")
    with isolated("none"):
        result = tuner.run(np.ones(4, np.float32))
    assert head(repository).startswith(result.commit)
    assert len(result.commit) == 12
    assert tuner.run(np.ones(4, np.float32)).commit == result.commit, "a cached result names it"
    assert f"at commit {result.commit}" in repr(result)
    result.report(repository / "report.html")
    assert f'"commit":"{result.commit}"' in (repository / "report.html").read_text()


def test_the_environments_repository_does_not_give_the_commit(
    repository: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path_factory.mktemp("other")
    subprocess.run(["git", "-C", str(other), "init", "-q"], check=True)
    expected = head(repository)[:12]
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))  # a hook of that repository may run this process
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    code_repository._commit.cache_clear()
    assert code_repository.commit_of(loaded(repository / "src" / "kernels.py").scaled) == expected


def test_without_a_repository_there_is_no_commit(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    function = loaded(repository / "src" / "kernels.py").scaled
    installed = repository / "site-packages"
    (repository / "src").rename(installed)
    code_repository._commit.cache_clear()
    assert code_repository.commit_of(loaded(installed / "kernels.py").scaled) == "", (
        "an installed package has its version"
    )
    monkeypatch.chdir(os.sep)
    assert code_repository.commit_of(function) == "", "its file is gone, and the working directory is in no repository"
    assert code_repository.commit_of(None) == ""
    installed.rename(repository / "src")
    monkeypatch.setenv("PATH", "")
    assert code_repository.commit_of(function) == "", "git is missing"
