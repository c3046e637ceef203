"""A process without streams, /proc, files or a readable name tunes all the same, or gets advice."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import python
from kernel_scripts import KERNEL, run

from quarantune.cache.owner import Owner, this_host
from quarantune.host import machine

NAMED = """
import ctypes
name = "kernels-\u00e9\u00e9\u00e9\u00e9".encode()[:15]  # the kernel keeps 15 bytes and cuts a character in two
assert ctypes.CDLL(None).prctl(15, name, 0, 0, 0) == 0
try:
    name.decode()
except UnicodeDecodeError:
    pass
else:
    raise AssertionError("the name is text")
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_a_process_whose_name_is_not_text_tunes(method: str, tmp_path: Path) -> None:
    """The kernel cuts names after 15 bytes, also in the middle of a character."""
    again = "with quarantune.settings(always_tune=True): agree()\nassert kernel.lookup(X) == {'n': 2}"
    run(f"{NAMED}{KERNEL}\nagree()\n{again}", cwd=tmp_path, environ={"QUARANTUNE_START_METHOD": method})


def test_a_claims_owner_may_have_a_name_that_is_not_text(tmp_path: Path) -> None:
    script = f"{NAMED}\nimport sys\nfrom quarantune.cache.owner import Owner\n"
    script += "me = Owner.this_process()\nprint(me.pid, me.started, flush=True)\nsys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=-1, stdout=-1) as holder:
        assert holder.stdout is not None
        pid, started = map(int, holder.stdout.readline().split())
        owner = Owner(host=this_host(), pid=pid, started=started)
        assert started > 0
        assert machine.activity(pid)[0] in "SR"
        assert machine.resident_bytes(pid)[0] > 1 << 20
        assert pid in machine.descendants(os.getpid())
        assert not owner.is_dead()
        assert Owner(host=this_host(), pid=pid, started=started + 1).is_dead()
        holder.kill()
    assert owner.is_dead()


@pytest.mark.long
@pytest.mark.slow
def test_a_frozen_application_gets_advice_and_no_second_start(tmp_path: Path) -> None:
    application, started = tmp_path / "application", tmp_path / "started"
    application.write_text(f"#!/bin/sh\necho again >> {started}\n")
    application.chmod(0o755)
    cache = tmp_path / "cache"
    environ: dict[str, str | None] = {"QUARANTUNE_CACHE_DIR": str(cache)}
    freeze = f"import sys\nsys.frozen, sys.executable = True, {str(application)!r}\n"
    refused = f"""{KERNEL}
{freeze}
import quarantune
from quarantune.host import machine
from quarantune.sandbox.template import SandboxError

for _ in range(2):
    try:
        kernel(X)
    except SandboxError as error:
        said = str(error)
    else:
        raise AssertionError("it was tuned")
    assert "frozen application" in said and {str(application)!r} in said, said
    for remedy in ("tables", "QUARANTUNE_CACHE_PATH", "QUARANTUNE_ON_MISS=default", "QUARANTUNE_ISOLATION=none"):
        assert remedy in said, said
    assert not machine.descendants(os.getpid())
with quarantune.settings(on_miss="error"):
    try:
        kernel(X)
    except quarantune.CacheMissError:
        pass
with quarantune.settings(isolation="none", disable_cache=True):
    assert kernel.tune(X).best_config == {{"n": 2}}
"""
    run(refused, cwd=tmp_path, environ=environ)
    assert not list(cache.glob("*.json"))
    run(f"{KERNEL}\nagree()", cwd=tmp_path, environ=environ)  # an ordinary Python
    run(f"{KERNEL}\n{freeze}\nagree()", cwd=tmp_path, environ=environ)
    assert not started.exists()


@pytest.mark.slow
@pytest.mark.parametrize("is_cached", [pytest.param(True, marks=pytest.mark.long), False])
def test_a_program_whose_standard_streams_are_closed_tunes(is_cached: bool, tmp_path: Path) -> None:
    report = "import traceback\ntry:\n    agree()\nexcept BaseException:\n"
    report += "    open(sys.argv[1], 'w').write(traceback.format_exc())"
    end = "else:\n    left = [fd for fd in range(3) if os.path.exists(f'/proc/self/fd/{fd}')]"
    end += "\n    open(sys.argv[1], 'w').write(f'agreed {left}')"
    (tmp_path / "program.py").write_text(f"{KERNEL}\n{report}\n{end}\n")
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
    disabled = str(int(not is_cached))
    python(tmp_path / "program.py", tmp_path / "said", before=closed, QUARANTUNE_DISABLE_CACHE=disabled)
    assert (tmp_path / "said").read_text() == "agreed []"


@pytest.mark.slow
def test_a_program_without_files_in_memory_tunes(tmp_path: Path) -> None:
    refuse = """
import os
def memfd_create(*args, **kwargs):
    raise PermissionError(1, "Operation not permitted")
os.memfd_create = memfd_create
"""
    place = tmp_path / "temporary"
    place.mkdir()
    run(f"{refuse}{KERNEL}\nagree()", cwd=tmp_path, environ={"TMPDIR": str(place)})
    assert not os.listdir(place)


@pytest.mark.slow
def test_a_program_that_may_write_no_file_gets_advice(tmp_path: Path) -> None:
    limited = """
import resource
limit = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
try:
    kernel.tune(X)
except quarantune.SandboxError as error:
    assert "may not grow over 0 bytes: raise the limit with `ulimit -f`" in str(error)
else:
    raise AssertionError("it was tuned")
resource.setrlimit(resource.RLIMIT_FSIZE, limit)
"""
    silent = "import warnings\nwarnings.simplefilter('ignore')"  # the result cannot be saved
    run(f"{KERNEL}\n{silent}\n{limited}\nagree()", cwd=tmp_path)


@pytest.mark.slow
def test_a_program_without_proc_tunes(tmp_path: Path) -> None:
    hide = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*hide, "true"], capture_output=True).returncode:
        pytest.skip("this machine lets no user mount (unshare -rm)")
    python("-c", f"{KERNEL}\nagree()", before=hide)
