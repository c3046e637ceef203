"""`TuningResult.save` is atomic: after other savers, full disks and kills, one whole result is there."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import SUPPORT, refused

from quarantune import Outcome, SavedResultError, Trial, TuningResult

LARGE = 1 << 17


def doubled(x: Any, n: int = 1) -> Any:
    return x * n


def result(n: int, *, size_bytes: int = 100) -> TuningResult:
    """Returns a result whose parts all contain its number."""
    config = {"n": n, "pad": "x" * size_bytes}
    return TuningResult(
        best_config=config, time_ms=1.0, trials=(), key="key", device="cpu", from_cache=False, tie=(), versions={},
        fn=doubled, name=f"f{n}", executable=bytes([n % 256]) * size_bytes,
    )  # fmt: skip


def whole(directory: Path, *, quiet: bool = True) -> int:
    """Loads the saved result and returns its number; `quiet` means that nobody saves at the same time."""
    loaded = TuningResult.load(directory)  # compares every checksum
    n = int(loaded.best_config["n"])
    assert loaded.name == f"f{n}"
    if not quiet:
        return n  # another saver may have removed the loaded part
    (winner,) = directory.glob("winner*.bin") if len(list(directory.glob("winner*.bin"))) == 1 else [None]
    assert winner is None or set(winner.read_bytes()) == {n % 256}
    return n


def parts(directory: Path) -> list[str]:
    return sorted(re.sub(r"-[0-9a-f]+", "", path.name) for path in directory.iterdir())


def test_a_saved_result_replaces_all_of_the_earlier_one(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for n in (1, 2, 3):
        result(n).save(tmp_path)
        assert whole(tmp_path) == n
    assert parts(tmp_path) == ["function.bin", "notes.txt", "result.json", "winner.bin"]


def old_layout(directory: Path) -> None:
    """Saves a result as earlier versions did."""
    directory.mkdir(exist_ok=True)
    function = b"function of an earlier version"
    (directory / "function.bin").write_bytes(function)
    about = {
        "schema": 1, "best_config": {"n": 7}, "time_ms": 0.5, "device": "cpu", "versions": {}, "tie": [], "key": "key",
        "from_cache": False, "files": {"function.bin": hashlib.sha256(function).hexdigest()}, "trials": [],
    }  # fmt: skip
    (directory / "result.json").write_text(json.dumps(about))


def test_a_result_of_an_earlier_version_is_loaded_and_replaced(tmp_path: Path) -> None:
    old_layout(tmp_path / "saved")
    assert TuningResult.load(tmp_path / "saved").best_config == {"n": 7}
    result(1).save(tmp_path / "saved")
    assert whole(tmp_path / "saved") == 1
    assert parts(tmp_path / "saved") == ["function.bin", "result.json", "winner.bin"]


def newer_layout(directory: Path) -> None:
    """Saves a result as a future version might."""
    result(1).save(directory)
    about = json.loads((directory / "result.json").read_text())
    about |= {"schema": 99, "files": {"names": ["not", "known"]}}
    (directory / "result.json").write_text(json.dumps(about))


def unreadable_layout(directory: Path) -> None:
    """Saves a result with a damaged JSON file and other files that may still be useful."""
    result(1).save(directory)
    (directory / "result.json").write_text('{"schema": 2, "files": {"functi')


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def let_age(directory: Path) -> None:
    """Makes all files of a directory old, as saved results usually are."""
    for path in directory.iterdir():
        os.utime(path, (0, 0))


@contextlib.contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


LAYOUTS = {
    "same": lambda directory: result(1).save(directory),
    "older": old_layout,
    "newer": newer_layout,
    "damaged": unreadable_layout,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_result_that_the_disk_refuses_leaves_the_earlier_one(tmp_path: Path, layout: str) -> None:
    LAYOUTS[layout](tmp_path)
    let_age(tmp_path)
    before = content(tmp_path)
    with files_of_at_most(LARGE // 2), pytest.raises(OSError, match="too large"):
        result(2, size_bytes=LARGE).save(tmp_path)
    assert content(tmp_path) == before
    result(3).save(tmp_path)
    assert whole(tmp_path) == 3


class EndingError(BaseException):
    """Interrupts a save like Ctrl-C."""


@pytest.mark.parametrize("step", ["write", "fsync", "replace", "unlink"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_interrupted_save_leaves_one_whole_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, step: str
) -> None:
    real = getattr(os, step)
    for at in range(1, 9):
        directory = tmp_path / str(at)
        LAYOUTS[layout](directory)
        let_age(directory)
        before, calls = content(directory), iter(range(1, 100))

        def ending(*args: Any, at: int = at, calls: Iterator[int] = calls, **kwargs: Any) -> Any:
            done = real(*args, **kwargs)
            if next(calls) == at:
                raise EndingError
            return done

        with monkeypatch.context() as patch, contextlib.suppress(EndingError):
            patch.setattr(os, step, ending)
            result(2).save(directory)
        after = content(directory)
        assert (before.items() <= after.items()) or whole(directory) == 2
        result(3).save(directory)
        assert whole(directory) == 3


def test_a_result_unreadable_for_a_moment_keeps_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, moved = (os.open, os.replace), []

    def refusing(path: Any, *args: Any, **kwargs: Any) -> int:
        if path == "result.json" and path in moved:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real[0](path, *args, **kwargs)

    def noting(old: str, new: str, **kwargs: Any) -> None:
        real[1](old, new, **kwargs)
        moved.append(new)

    result(1).save(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refusing)
        patch.setattr(os, "replace", noting)
        result(2).save(tmp_path)
    assert TuningResult.load(tmp_path).name == "f2"
    result(3).save(tmp_path)
    assert TuningResult.load(tmp_path).name == "f3"


def test_files_of_other_programs_stay_and_are_not_replaced(tmp_path: Path) -> None:
    theirs = {"function.bin": b"mine", "winner-2.bin": b"mine", ".result.json.tmp": b"mine"}
    for name, text in theirs.items():
        (tmp_path / name).write_bytes(text)
    let_age(tmp_path)
    result(1).save(tmp_path)
    result(2).save(tmp_path)
    assert theirs.items() <= content(tmp_path).items()
    for text in ('{"accuracy": 0.9}', "[1, 2]"):
        (tmp_path / "other").mkdir(exist_ok=True)
        (tmp_path / "other" / "result.json").write_text(text)
        with pytest.raises(SavedResultError, match="another directory"):
            result(1).save(tmp_path / "other")
        assert content(tmp_path / "other") == {"result.json": text.encode()}


def test_what_cannot_be_pickled_or_written_changes_nothing(tmp_path: Path) -> None:
    result(1).save(tmp_path)
    before = content(tmp_path)

    class Refusing:
        def __reduce__(self) -> Any:
            raise EndingError

    with pytest.raises(EndingError):
        dataclasses.replace(result(2), call=((Refusing(),), {})).save(tmp_path)
    with pytest.raises(TypeError):
        dataclasses.replace(result(2), versions={"jax": object()}).save(tmp_path)  # type: ignore[dict-item]
    assert content(tmp_path) == before


def test_a_result_is_saved_through_a_link_to_a_directory(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    result(1).save(tmp_path / "link")
    result(2).save(tmp_path / "link")
    assert whole(tmp_path / "real") == whole(tmp_path / "link") == 2
    assert (tmp_path / "link").is_symlink()


def test_a_directory_that_refuses_new_files_keeps_its_result(tmp_path: Path) -> None:
    result(1).save(tmp_path)
    before = content(tmp_path)
    with refused(tmp_path, 0o500), pytest.raises(PermissionError):
        result(2).save(tmp_path)
    assert content(tmp_path) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small filesystem")
@pytest.mark.parametrize("free_bytes", [0, LARGE // 2, LARGE + LARGE // 2, LARGE + LARGE * 3 // 4])
def test_a_full_disk_leaves_the_earlier_result(tmp_path: Path, free_bytes: int) -> None:
    command = ["mount", "-t", "tmpfs", "-o", f"size={8 * LARGE}", "tmpfs", str(tmp_path)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small filesystem is not allowed here")
    try:
        result(1).save(tmp_path / "saved")
        before = sorted(os.listdir(tmp_path / "saved"))
        (tmp_path / "ballast").write_bytes(bytes(os.statvfs(tmp_path).f_bavail * 4096 - free_bytes))
        with pytest.raises(OSError, match="No space left"):
            result(2, size_bytes=LARGE).save(tmp_path / "saved")
        assert whole(tmp_path / "saved") == 1
        assert sorted(os.listdir(tmp_path / "saved")) == before
        (tmp_path / "ballast").unlink()
        result(2, size_bytes=LARGE).save(tmp_path / "saved")
        assert whole(tmp_path / "saved") == 2
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def table(number: int, *, rows: int = 1) -> TuningResult:
    """Returns a result with `rows` trials."""
    trials = [Trial(config={"n": n}, outcome=Outcome.OK, time_ms=float(number)) for n in range(rows)]
    return TuningResult(best_config={"n": 0}, time_ms=1.0, trials=tuple(trials), key="key", device="cpu", fn=doubled)


@pytest.mark.parametrize("write", [TuningResult.to_csv, TuningResult.report])
def test_a_file_that_the_disk_refuses_leaves_the_earlier_one(
    tmp_path: Path, write: Callable[[TuningResult, Path], None]
) -> None:
    file = tmp_path / "trials"
    large = table(2, rows=2000)
    with files_of_at_most(LARGE // 2), pytest.raises(OSError, match=r"too large: .*/trials'"):
        write(large, file)
    assert os.listdir(tmp_path) == []
    write(table(1), file)
    before = file.read_bytes()
    with files_of_at_most(LARGE // 2), pytest.raises(OSError, match=r"too large: .*/trials'"):
        write(large, file)
    assert file.read_bytes() == before
    assert os.listdir(tmp_path) == ["trials"]
    write(large, file)
    assert len(file.read_bytes()) > LARGE // 2


@pytest.mark.parametrize("write", [TuningResult.to_csv, TuningResult.report])
def test_a_file_in_an_unwritable_directory_is_named_or_written(
    tmp_path: Path, write: Callable[[TuningResult, Path], None]
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    file, writable = place / "trials", place / "writable"
    write(table(1), tmp_path / "earlier")
    with refused(place, 0o555), pytest.raises(PermissionError, match=r"Permission denied: .*/trials'$"):
        write(table(2), file)
    assert os.listdir(place) == []
    for each in (file, writable):
        shutil.copy(tmp_path / "earlier", each)
    file.chmod(0o444)
    writable.chmod(0o666)
    with refused(place, 0o555):
        with pytest.raises(PermissionError, match=r"Permission denied: .*/trials'$"):
            write(table(2), file)
        write(table(2), writable)
    write(table(2), tmp_path / "later")
    assert file.read_bytes() == (tmp_path / "earlier").read_bytes()
    assert len(writable.read_bytes()) == len((tmp_path / "later").read_bytes())
    assert sorted(os.listdir(place)) == ["trials", "writable"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small filesystem")
def test_a_full_disk_leaves_the_earlier_csv(tmp_path: Path) -> None:
    command = ["mount", "-t", "tmpfs", "-o", f"size={LARGE // 2}", "tmpfs", str(tmp_path)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small filesystem is not allowed here")
    try:
        table(1).to_csv(tmp_path / "trials.csv")
        before = (tmp_path / "trials.csv").read_bytes()
        with pytest.raises(OSError, match="No space left"):
            table(2, rows=2000).to_csv(tmp_path / "trials.csv")
        assert (tmp_path / "trials.csv").read_bytes() == before
        assert os.listdir(tmp_path) == ["trials.csv"]
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_file_is_written_through_a_link_and_into_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    table(1).to_csv(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text().startswith("n,outcome,")
    reading, writing = os.pipe()
    with os.fdopen(reading) as pipe:
        table(1).to_csv(f"/proc/self/fd/{writing}")
        os.close(writing)
        assert pipe.read() == (tmp_path / "file").read_text()
    with pytest.raises(IsADirectoryError):
        table(1).to_csv(tmp_path)


def test_a_replaced_file_keeps_its_mode(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (tmp_path / "other").touch()
    table(1).to_csv(shared / "trials.csv")
    assert (shared / "trials.csv").stat().st_mode == (tmp_path / "other").stat().st_mode
    (shared / "trials.csv").chmod(0o600)
    table(2).to_csv(shared / "trials.csv")
    assert stat.S_IMODE((shared / "trials.csv").stat().st_mode) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_mounted_file_is_written_in_place(tmp_path: Path) -> None:
    small, file = tmp_path / "small", tmp_path / "trials.csv"
    small.mkdir()
    file.touch()
    command = ["mount", "-t", "tmpfs", "-o", f"size={LARGE}", "tmpfs", str(small)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small filesystem is not allowed here")
    try:
        (small / "mounted.csv").touch()
        subprocess.run(["mount", "--bind", str(small / "mounted.csv"), str(file)], check=True)
        table(1).to_csv(file)
        assert (small / "mounted.csv").read_text().startswith("n,outcome,")
        subprocess.run(["umount", "-l", str(file)], check=True)
        (tmp_path / "beside.csv").touch()
        subprocess.run(["mount", "--bind", str(tmp_path / "beside.csv"), str(file)], check=True)
        table(1).to_csv(file)
        assert (tmp_path / "beside.csv").read_text() == (small / "mounted.csv").read_text()
    finally:
        subprocess.run(["umount", "-l", str(file)], check=False)
        subprocess.run(["umount", "-l", str(small)], check=True)


SAVERS = """
import os, sys
sys.path[:0] = sys.argv[1].split(os.pathsep)
from pathlib import Path
from test_saved_files import result
results = [result(n, size_bytes=20_000) for n in range(4)]
directory = Path(sys.argv[2])
pids = []
for number in range(2):
    if not (pid := os.fork()):
        for turn in range(int(sys.argv[3])):
            results[number + 2 * (turn % 2)].save(directory)
        os._exit(0)
    pids.append(pid)
print(*pids, flush=True)
print(*[os.waitpid(pid, 0)[1] for pid in pids])
"""


def savers(directory: Path, turns: int) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-c",
        SAVERS,
        os.pathsep.join([str(SUPPORT), os.path.dirname(__file__)]),
        str(directory),
        str(turns),
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_with_two_savers_one_whole_result_is_always_there(tmp_path: Path) -> None:
    result(0).save(tmp_path)
    with savers(tmp_path, 40) as process:
        assert process.stdout is not None
        process.stdout.readline()
        loaded = set()
        while process.poll() is None:
            loaded.add(whole(tmp_path, quiet=False))
        assert process.stdout.read().split() == ["0", "0"]
    assert loaded <= {0, 1, 2, 3}
    assert whole(tmp_path) in {2, 3, 0, 1}
    result(9).save(tmp_path)
    assert whole(tmp_path) == 9


@pytest.mark.long
@pytest.mark.slow
def test_killed_savers_leave_a_whole_result_and_soon_no_more(tmp_path: Path) -> None:
    result(0).save(tmp_path)
    for _ in range(3):
        with savers(tmp_path, 10**9) as process:
            assert process.stdout is not None
            pids = [int(pid) for pid in process.stdout.readline().split()]
            for pid in pids:
                seen = (tmp_path / "result.json").stat().st_ino
                while (tmp_path / "result.json").stat().st_ino == seen:
                    time.sleep(0)
                os.kill(pid, signal.SIGKILL)
        assert whole(tmp_path) in range(4)
    for path in tmp_path.iterdir():
        os.utime(path, (1e9, 1e9))
    result(9).save(tmp_path)
    assert whole(tmp_path) == 9
    assert parts(tmp_path) == ["function.bin", "result.json", "winner.bin"]


def test_a_saver_removes_no_part_that_another_is_about_to_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result(1).save(tmp_path)
    real, others = os.replace, []

    def replace(source: str, target: str, **where: int) -> None:
        if target == "result.json" and not others:
            others.append(True)
            result(2).save(tmp_path)  # the outer saver has already written all its parts
            assert whole(tmp_path) == 2
        real(source, target, **where)

    monkeypatch.setattr(os, "replace", replace)
    result(3).save(tmp_path)
    assert others
    assert whole(tmp_path) == 3


def test_a_directory_without_a_result_stays_without_one(tmp_path: Path) -> None:
    with files_of_at_most(LARGE // 2), pytest.raises(OSError, match="too large"):
        result(1, size_bytes=LARGE).save(tmp_path / "saved")
    assert list((tmp_path / "saved").iterdir()) == []
    with pytest.raises(SavedResultError, match="no saved result"):
        TuningResult.load(tmp_path / "saved")
