"""In directories where others make names, no link is followed and no unrelated file is changed."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers import run_python

import quarantune
from quarantune.api.tuning_cache import TuningCache
from quarantune.cache import entries
from quarantune.cache import journal as journals
from quarantune.cache.claims import Claim
from quarantune.cache.journal import Journal
from quarantune.cache.problems import CacheWarning, CacheWriteError
from quarantune.cache.store import Store
from quarantune.devices import targets
from quarantune.host.shared_files import Directory, NotAFileError
from quarantune.sweep import sweep
from quarantune.values.trial import Outcome, Trial

ENTRY: dict[str, Any] = {"config": {"n": 1}}
TEXT = 'platform_name: "CUDA"\ndevice_description_str: "NVIDIA L4"\n'
PROBLEM = "f", "cpu", "key"
SECRET = b"ssh-ed25519 AAAA me@here\n"


def problem_file(suffix: str) -> str:
    return f"f.trials/{journals.problem_hash(*PROBLEM[1:])}.{suffix}"


def put(directory: Path) -> None:
    Store(directory, lock_timeout_s=5).put("f", "cpu", "k", ENTRY)


def append(directory: Path) -> None:
    Journal(directory, *PROBLEM).append({"n": 1})


def claim(directory: Path) -> None:
    with Claim(directory, *PROBLEM) as held:
        if held.try_acquire():
            held.leave_failure({"why": "none"})


def save_target(directory: Path) -> None:
    with contextlib.suppress(NotADirectoryError):
        targets.save(directory, "NVIDIA L4", TEXT)


def keep_log(directory: Path) -> None:
    sweep._keep_log(directory, "f", "1-1-1", Trial(config={"n": 1}, outcome=Outcome.OK), "said")


def export(directory: Path) -> None:
    with tempfile.TemporaryDirectory() as own:
        put(Path(own))
        TuningCache(own).export(directory)


def prune(directory: Path) -> None:
    TuningCache(directory).clear()
    journals.discard_all(directory, "f")
    Journal(directory, *PROBLEM).discard()
    journals.damage(directory)


PLACES = {
    "cache file": ("f.json", put),
    "lock of the cache file": (".f.json.lock", put),
    "claim": (problem_file("claim"), claim),
    "lock of the claim": (problem_file("lock"), claim),
    "failure": (problem_file("failed"), claim),
    "journal": (f"f.trials/{journals.problem_hash(*PROBLEM[1:])}.{journals.this_host()}.jsonl", append),
    "description of a target": (f"targets/NVIDIA_L4.jax{jax.__version__}.textproto", save_target),
    "log": ("f/1-1-1.log", keep_log),
    "exported file": ("f.json", export),
}
REFUSED = {"lock of the cache file", "lock of the claim", "journal", "exported file"}
"""Kinds whose write fails at a link; all other kinds replace it, set it aside or leave it."""
FOLDERS = {
    "claims": ("f.trials", claim),
    "journals": ("f.trials", append),
    "journals that are removed": ("f.trials", prune),
    "targets": ("targets", save_target),
    "logs": ("f", keep_log),
}


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A private file outside the shared directory; nothing may read, change or remove it."""
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o700)
    for name in ("authorized_keys", problem_file("jsonl").partition("/")[2], "x.failed", "x.tmp"):
        path = outside / name
        path.write_bytes(SECRET)
        path.chmod(0o600)
        os.utime(path, (1e9, 1e9))
    before = {path.name: path.lstat() for path in outside.iterdir()}
    yield outside / "authorized_keys"
    after = {path.name: path.lstat() for path in outside.iterdir()}
    assert after.keys() == before.keys()
    for name, found in after.items():
        assert (found.st_mode, found.st_size, found.st_mtime) == (before[name].st_mode, len(SECRET), 1e9), name


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    directory = tmp_path / "shared"
    directory.mkdir()
    directory.chmod(0o777)
    return directory


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.filterwarnings("ignore::quarantune.cache.CacheWarning")
def test_a_link_in_the_place_of_a_file_is_not_followed(shared: Path, victim: Path, name: str) -> None:
    place, work = PLACES[name]
    path = shared / place
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(victim)
    if name in REFUSED:
        with pytest.raises(CacheWriteError, match=r"(?s)\A[^\n]*link, which is not followed[^\n]*\Z"):
            work(shared)
    else:
        work(shared)
    files = [path for path in shared.rglob("*") if path.is_file() and not path.is_symlink()]
    assert SECRET not in [path.read_bytes() for path in files]


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.filterwarnings("ignore::quarantune.cache.CacheWarning")
def test_a_link_in_the_place_of_a_folder_is_not_followed(shared: Path, victim: Path, name: str) -> None:
    place, work = FOLDERS[name]
    (shared / place).symlink_to(victim.parent, target_is_directory=True)
    with contextlib.suppress(CacheWriteError):
        work(shared)


def test_a_folder_named_like_a_pattern_prunes_no_others_trials(shared: Path) -> None:
    append(shared)
    Store(shared).put(*PROBLEM, ENTRY)
    (shared / "*.trials").mkdir()
    journal = Journal(shared, *PROBLEM)
    for path in journal._files():
        os.utime(path, (1e9, 1e9))
    assert entries.prune(Store(shared), older_than_s=3600.0) == ([], [])
    assert journal.records() == [{"n": 1}]


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.filterwarnings("ignore::quarantune.cache.CacheWarning")
def test_after_a_planted_link_is_removed_the_next_write_succeeds(shared: Path, victim: Path, name: str) -> None:
    place, work = PLACES[name]
    path = shared / place
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(victim)
    with contextlib.suppress(CacheWriteError):
        work(shared)
    path.unlink(missing_ok=True)
    descriptors = sorted(os.listdir("/proc/self/fd"))
    work(shared)
    assert sorted(os.listdir("/proc/self/fd")) == descriptors
    assert not list(shared.rglob("*.tmp"))


def test_the_mode_of_a_file_that_was_there_before_is_not_changed(shared: Path) -> None:
    for name in (".f.json.lock", PLACES["journal"][0], problem_file("lock")):
        (shared / name).parent.mkdir(exist_ok=True)
        (shared / name).touch(mode=0o600)
        (shared / name).chmod(0o600)
    put(shared)
    append(shared)
    claim(shared)
    for name in (".f.json.lock", PLACES["journal"][0], problem_file("lock")):
        assert (shared / name).stat().st_mode & 0o777 == 0o600
    assert (shared / "f.json").stat().st_mode & 0o777 == 0o666


@pytest.mark.parametrize("shares", [False, True])
def test_a_file_in_a_links_place_is_not_writable_for_others(tmp_path: Path, shares: bool) -> None:
    (tmp_path / "result.json").symlink_to("elsewhere")
    with Directory(tmp_path, shares=shares) as place:
        place.replace("result.json", b"{}")
    about = (tmp_path / "result.json").lstat()
    assert stat.S_ISREG(about.st_mode)
    assert not about.st_mode & 0o002


def test_a_pipe_in_the_place_of_a_lock_is_refused_at_once(shared: Path) -> None:
    os.mkfifo(shared / ".f.json.lock")
    with pytest.raises(CacheWriteError, match="not a regular file"):
        put(shared)


def test_a_cache_directory_that_is_itself_a_link_is_used(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "cache").symlink_to(tmp_path / "disk")
    for work in (put, append, claim, save_target, keep_log, export):
        work(tmp_path / "cache")
    assert Store(tmp_path / "cache").get("f", "cpu", "k")
    assert Journal(tmp_path / "cache", *PROBLEM).records() == [{"n": 1}]
    made = {path.name for path in (tmp_path / "disk").iterdir()}
    assert made == {"f", "f.json", "f.trials", "targets", ".f.json.lock"}
    prune(tmp_path / "cache")
    assert not list((tmp_path / "disk").glob("*.json"))
    assert not list((tmp_path / "disk").glob("f.trials/*.jsonl"))


def test_a_directory_only_read_from_may_hold_links(tmp_path: Path) -> None:
    # Mounted configurations and packages installed by links have these.
    put(tmp_path / "data")
    (tmp_path / "table").mkdir()
    (tmp_path / "table" / "f.json").symlink_to(tmp_path / "data" / "f.json")
    assert Store(tmp_path / "table", read_only=True).get("f", "cpu", "k")


def test_a_draft_replaced_by_a_link_does_not_take_the_place(
    shared: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(shared)
    real, planted = os.fsync, []

    def plant(fd: int) -> None:
        real(fd)
        for draft in [] if planted else shared.glob(".f.json.*.tmp"):
            planted.append(draft)
            draft.unlink()
            draft.symlink_to(victim)

    monkeypatch.setattr(os, "fsync", plant)
    monkeypatch.setattr("quarantune.cache.entry_file._STALE_S", 0.0)  # the link's name belongs to a live writer
    Store(shared).put("f", "cpu", "k2", ENTRY)
    assert planted
    assert not (shared / "f.json").is_symlink()
    assert set(Store(shared).read("f")["cpu"]) == {"k", "k2"}


# --- several users ------------------------------------------------------------------------------------------

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")


def as_user(user: int, script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs a script as another user, who may not be able to read the interpreter: modules are imported before."""
    head = f"""
        import os, sys, warnings
        from pathlib import Path
        from quarantune.cache.problems import CacheWriteError
        from quarantune.cache.store import Store
        from quarantune.cache.claims import Claim
        from quarantune.cache.journal import Journal
        from quarantune.values import blocks
        import filelock, platformdirs.unix
        place = Path(sys.argv[1])
        os.umask(0o022)
        os.setgroups([])
        os.setgid({user})
        os.setuid({user})
    """
    return run_python("-c", textwrap.dedent(head) + textwrap.dedent(script), *arguments)


@pytest.fixture
def open_place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o777)
        yield Path(place)


USE = """
Store(place).put("f", "cpu", sys.argv[2], {"config": {"n": 1}})
Journal(place, "f", "cpu", "key").append({"by": sys.argv[2]})
with Claim(place, "f", "cpu", "key") as claim:
    assert claim.try_acquire()
    claim.leave_failure({"by": sys.argv[2]})
"""


@needs_root
def test_two_users_and_root_share_a_directory(open_place: Path) -> None:
    for user in (65533, 65534, 0, 65533):
        done = as_user(user, USE, open_place, f"k{user}")
        assert done.returncode == 0, done.stderr
    assert set(Store(open_place).read("f")["cpu"]) == {"k65533", "k65534", "k0"}
    assert len(Journal(open_place, *PROBLEM).records()) == 4
    assert (open_place / ".f.json.lock").stat().st_mode & 0o777 == 0o666


@needs_root
@pytest.mark.filterwarnings("ignore::quarantune.cache.CacheWarning")
@pytest.mark.parametrize("name", [name for name, (_, work) in PLACES.items() if work in (put, append, claim)])
def test_another_users_links_do_not_reach_the_users_files(open_place: Path, victim: Path, name: str) -> None:
    plant = """
        path = place / sys.argv[2]
        if path.parent != place:
            path.parent.mkdir()
            path.parent.chmod(0o777)
        path.symlink_to(sys.argv[3])
    """
    place, work = PLACES[name]
    planted = as_user(65534, plant, open_place, place, victim)
    assert planted.returncode == 0, planted.stderr
    if name in REFUSED:
        with pytest.raises(CacheWriteError, match="link, which is not followed"):
            work(open_place)
    else:
        work(open_place)


@needs_root
@pytest.mark.parametrize("kind", ["directory", "link", "open to all"])
def test_a_directory_in_tmp_named_for_this_user_must_be_theirs(open_place: Path, kind: str) -> None:
    open_place.chmod(0o1777)
    make = """
        named = place / f"quarantune-{sys.argv[2]}"
        if sys.argv[3] == "link":
            (place / "trap").mkdir()
            (place / "trap").chmod(0o777)
            named.symlink_to(place / "trap")
        else:
            named.mkdir()
            named.chmod(0o777)
    """
    owner = 65533 if kind == "open to all" else 65534
    assert as_user(owner, make, open_place, 65533, kind).returncode == 0
    use = """
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert Store(place / "quarantune-65533").get("f", "cpu", "k") is None
        try:
            Store(place / "quarantune-65533").put("f", "cpu", "k", {"config": {"n": 1}})
        except CacheWriteError as error:
            print(error)
    """
    done = as_user(65533, use, open_place)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert ("not followed" if kind == "link" else "yours alone") in line
    assert "QUARANTUNE_CACHE_DIR" in line
    assert [path.name for path in open_place.rglob("*.json*")] == []


@needs_root
def test_without_a_home_results_are_saved_in_a_private_directory(open_place: Path) -> None:
    script = """
        for name in ("HOME", "XDG_CACHE_HOME", "QUARANTUNE_CACHE_DIR"):
            os.environ.pop(name, None)
        os.environ["TMPDIR"] = str(place)
        directory = blocks.current().cache_dir
        Store(directory).put("f", "cpu", "k", {"config": {"n": 1}})
        print(directory, oct(directory.stat().st_mode & 0o777))
    """
    done = as_user(54321, script, open_place)
    assert done.stdout.split() == [str(open_place / "quarantune-54321"), "0o700"], done.stderr


def test_a_call_whose_cache_is_refused_runs_and_says_so(
    shared: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUARANTUNE_CACHE_DIR", str(shared))
    monkeypatch.setenv("QUARANTUNE_LOG_DIR", str(shared / "logs"))

    def times(x: Any, n: int = 1) -> Any:
        return x * n

    tuned = quarantune.autotune({"n": [1, 2]}, rep=2, ref_fn=None, name="f")(jax.jit(times, static_argnames=["n"]))
    (shared / "f.trials").symlink_to(victim.parent)
    (shared / ".f.json.lock").symlink_to(victim)
    (shared / "logs").mkdir()
    (shared / "logs" / "f").symlink_to(victim.parent)
    with pytest.warns(CacheWarning, match="link, which is not followed") as told:
        assert tuned(jnp.ones(3)).shape == (3,)
    assert all("\n" not in str(warning.message) for warning in told)


def test_a_file_is_made_once_by_racing_processes(tmp_path: Path) -> None:
    with Directory(tmp_path) as place:
        first, second = (place.open("f", os.O_RDWR | os.O_CREAT) for _ in range(2))
        assert os.path.samestat(os.fstat(first), os.fstat(second))
        for fd in (first, second):
            os.close(fd)
        with pytest.raises(FileExistsError):
            place.open("f", os.O_RDWR | os.O_CREAT | os.O_EXCL)
        (tmp_path / "folder").mkdir()
        with pytest.raises(NotAFileError, match="directory"):
            place.open("folder", os.O_RDWR | os.O_CREAT)
