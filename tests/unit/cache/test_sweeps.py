"""Sweeps without a result: those that run, were interrupted or failed, on the command line, in tables and on pages."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from aftermath import eventually
from browser import AXE, CHROMEDRIVER, CHROMIUM, MISSING, NO_AXE, browser
from helpers import child_environ, python

import quarantune
from quarantune.cache import sweeps
from quarantune.cache.claims import Claim
from quarantune.cache.journal import Journal
from quarantune.cache.sweeps import Beginning, Ending, Moment, Sweep, SweepState
from quarantune.cli import entry_point as main
from quarantune.host.process import in_sandbox
from quarantune.results import unfinished
from quarantune.results.html_report import render
from quarantune.values.trial import Outcome, Phase, Trial

X = np.ones(8, np.float32)
PROBLEM = ("kernels.scale", "H200", "a key")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process; returns its exit code and what it wrote to stdout and stderr."""

    def run_it(*words: object) -> tuple[int, str, str]:
        code = main.main([str(word) for word in words])
        return (code, *capsys.readouterr())

    return run_it


def begun(directory: Path, *, total: int | None = 4, ended: int = 2, problem: Any = PROBLEM, **fields: Any) -> None:
    """Leaves the records of a sweep that has begun, and of some of its trials."""
    name, device, key = problem
    about = Beginning(name=name, device=device, key=key, total=total, began_s=time.time() - 90, **fields)
    sweeps.log(directory, *problem).append({"sweep": about.to_json()})
    journal = Journal(directory, *problem)
    for n in range(ended):
        trial = Trial(config={"n": n}, outcome=Outcome.OK, time_ms=2.0 - n, samples_ms=(2.0 - n,) * 5, own_ms=2.0 - n)
        journal.append({"trial": trial.to_json() | {"ended_s": time.time()}})


@contextlib.contextmanager
def running(directory: Path, problem: Any = PROBLEM) -> Iterator[None]:
    """Holds the claim of a sweep in this process."""
    claim = Claim(directory, *problem)
    assert claim.try_acquire()
    with claim:
        yield


def only(directory: Path) -> Sweep:
    [sweep] = sweeps.latest(directory)
    return sweep


# --- what became of a sweep --------------------------------------------------------------------------------------


def test_a_sweep_runs_as_long_as_its_claim_is_held(cache_dir: Path) -> None:
    begun(cache_dir)
    sweeps.log(cache_dir, *PROBLEM).append(Moment(now="2 compiling\x1b[2J").to_json())
    with running(cache_dir):
        sweep = only(cache_dir)
        assert (sweep.state, sweep.now) == (SweepState.RUNNING, "2 compiling\\x1b[2J")
        assert sweep.holder is not None
        assert sweep.holder.owner.pid == os.getpid()
        assert unfinished.progress_text(sweep, sweep.trials()) == "2 of 4 configs"
    assert only(cache_dir).state is SweepState.INTERRUPTED
    assert [trial.config["n"] for trial in only(cache_dir).trials()] == [0, 1]


def test_a_sweep_whose_process_was_killed_is_interrupted(cache_dir: Path) -> None:
    begun(cache_dir)
    python(
        "-c",
        "import os, sys\nfrom pathlib import Path\nfrom quarantune.cache.claims import Claim\n"
        f"assert Claim(Path(sys.argv[1]), *{PROBLEM!r}).try_acquire()\nos._exit(0)",
        cache_dir,
    )
    assert [*cache_dir.glob("*.trials/*.claim")], "the dead process has left no claim, which shows nothing"
    assert only(cache_dir).state is SweepState.INTERRUPTED


def test_a_finished_sweep_is_done_and_the_next_one_runs(cache_dir: Path) -> None:
    begun(cache_dir)
    log = sweeps.log(cache_dir, *PROBLEM)
    log.append(Ending(ended=SweepState.DONE).to_json())
    with running(cache_dir):
        assert only(cache_dir).state is SweepState.DONE
        begun(cache_dir, ended=0)
        assert only(cache_dir).state is SweepState.RUNNING


def test_known_configs_count_as_done_and_a_search_has_a_bound(cache_dir: Path) -> None:
    begun(cache_dir, total=200, is_bound=True, settled=30)
    sweep = only(cache_dir)
    assert unfinished.progress_text(sweep, sweep.trials()) == "32 of at most 200 configs"


def test_a_config_that_runs_in_the_tuning_process_is_not_shown_as_lost(cache_dir: Path) -> None:
    begun(cache_dir)
    lost = Trial(config={"n": 3}, outcome=Outcome.LOST, phase=Phase.CHECK)
    Journal(cache_dir, *PROBLEM).append({"trial": lost.to_json()})
    assert [trial.config["n"] for trial in only(cache_dir).trials()] == [0, 1]


@pytest.mark.parametrize(
    "record",
    [
        {"sweep": {"name": "other", "device": "H200", "key": "a key", "began_s": 1.0}},
        {"sweep": {"name": "kernels.scale", "device": "H200", "key": "a key", "began_s": 1e300}},
        {"sweep": {"name": "kernels.scale"}},
        {"sweep": 3},
        {"ended": "done"},
        {"now": 3},
        {},
    ],
)
def test_records_that_make_no_sense_are_no_sweep(cache_dir: Path, record: Any) -> None:
    sweeps.log(cache_dir, *PROBLEM).append(record)
    assert sweeps.latest(cache_dir) == []


# --- pages and the command line ----------------------------------------------------------------------------------


def test_a_page_says_in_its_title_what_became_of_the_sweep(cache_dir: Path) -> None:
    begun(cache_dir, default={"n": 0}, call={"x": {"shape": [8], "dtype": "float32"}})

    def title() -> str:
        page = render([unfinished.data_of(only(cache_dir))])
        return re.findall("<title>(.*)</title>", page)[0].removesuffix(" · kernels.scale · tuning report")

    assert title() == "interrupted: 2 of 4 configs"
    with running(cache_dir):
        assert title() == "running: 2 of 4 configs"
    failed = tuple(Trial(config={"n": n}, outcome=Outcome.CRASHED, message="no") for n in range(4))
    sweeps.log(cache_dir, *PROBLEM).append(Ending(ended=SweepState.FAILED, trials=failed).to_json())
    assert title() == "failed: all 4 configs failed"


def test_the_best_config_so_far_stands_for_the_winner(cache_dir: Path) -> None:
    begun(cache_dir, default={"n": 0})
    result = unfinished.data_of(only(cache_dir)).result
    assert (result.best_config, result.time_ms, result.speedup_of(result.trials[1])) == ({"n": 1}, 1.0, 2.0)


def test_unfinished_sweeps_are_listed(cache_dir: Path, run: Run) -> None:
    assert run("cache", "list", "--running")[1].startswith("no sweep runs in")
    begun(cache_dir, call={"x": {"shape": [8], "dtype": "float32"}})
    begun(cache_dir, problem=("kernels.norm", "H200", "b"), ended=0, total=None)
    with running(cache_dir):
        _, out, _ = run("cache", "list", "--running")
        assert re.search(r"kernels\.scale on H200\n  x f32\[8\]  running  2 of 4 configs  best n=1, 1 ms", out)
        assert re.search(r"kernels\.norm on H200\n  all calls  interrupted  no config recorded", out)
        assert out.index("kernels.scale") < out.index("kernels.norm"), "running sweeps come first"
        first, second = json.loads(run("cache", "list", "--running", "--json")[1])
        assert (first["state"], first["done"], first["total"], first["pid"]) == ("running", 2, 4, os.getpid())
        assert (second["state"], second["total"], second["pid"], second["config"]) == ("interrupted", None, None, None)
        assert "kernels.scale" not in run("cache", "list", "--running", "kernels.n*")[1]
        assert "kernels.scale" not in run("cache", "list", "--running", "--device", "H100")[1]


def test_a_report_shows_sweeps_without_a_result(cache_dir: Path, run: Run, tmp_path: Path) -> None:
    begun(cache_dir)
    page = tmp_path / "page.html"
    code, out, err = run("report", "kernels.scale", "--running", "-o", page)
    assert (code, out, page.exists()) == (2, "", False)
    assert "the last was interrupted (2 of 4 configs): leave out --running" in err
    code, out, _ = run("report", "kernels.scale", "-o", page)
    assert (code, out) == (0, f"interrupted sweep (2 of 4 configs) with 2 trials written to {page}\n")
    with running(cache_dir):
        written = json.loads(run("report", "kernels.scale", "--running", "-o", page, "--json")[1])
    assert (written["states"], written["results"], written["trials"]) == (["running"], 0, 2)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("report kernels.scale other --running", "leave out the second name"),
        ("report kernels.scale --watch", "no sweep of 'kernels.scale' runs"),
        ("report attention --watch", "These run: kernels.norm."),
        ("report kernels.norn --running", "Did you mean 'kernels.norm'?"),
    ],
)
def test_wrong_words_are_refused_before_any_work(cache_dir: Path, run: Run, words: str, expected: str) -> None:
    problem = ("kernels.norm", "H200", "b")
    begun(cache_dir, problem=problem)
    with running(cache_dir, problem):
        code, _, err = run(*words.split())
    assert (code, expected in err, err.count("\n")) == (2, True, 1), err


def test_watching_follows_a_sweep_to_its_end(cache_dir: Path, run: Run, tmp_path: Path) -> None:
    begun(cache_dir, ended=1)
    page = tmp_path / "page.html"
    claim = Claim(cache_dir, *PROBLEM)
    assert claim.try_acquire()
    seen: list[str] = []

    def go_on() -> None:
        assert eventually(page.exists)
        seen.append(page.read_text())
        begun(cache_dir, ended=2)
        assert eventually(lambda: "running: 2 of 4 configs" in page.read_text())
        claim.release()

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        code, out, _ = run("report", "kernels.scale", "--watch", "-o", page)
    finally:
        thread.join()
    assert code == 0
    assert "shows 1 running sweep until the end" in out
    assert "interrupted sweep (2 of 4 configs)" in out
    assert "running: 1 of 4 configs" in seen[0]
    assert '"reloadS":' in seen[0]
    assert '"reloadS":' not in page.read_text(), "the last page must not load itself again"


# --- real sweeps -------------------------------------------------------------------------------------------------


def test_the_error_of_a_failed_sweep_has_a_table_and_a_page(cache_dir: Path, run: Run, tmp_path: Path) -> None:
    @quarantune.autotune({"n": [1, 2, 3]}, ref_fn=None, name="kernels.broken")
    @functools.partial(jax.jit, static_argnames=["n"])
    def broken(x: Any, n: int = 7) -> Any:
        if n != 7:
            assert in_sandbox()
            raise ValueError(f"no block of {n}")
        return x

    for _ in range(2):  # the second error is remembered
        with pytest.raises(quarantune.TuningFailedError) as caught:
            broken(X)
        table = caught.value.table(width=100)
        assert [line.split()[1] for line in table.splitlines()[1:4]] == ["error"] * 3
        assert "no block of" in table
    page = tmp_path / "page.html"
    caught.value.report(page)
    assert "<title>failed: all 3 configs failed · kernels.broken" in page.read_text()
    assert "no block of 3" in page.read_text()
    assert "failed: all 3 configs failed" not in json.dumps(run("cache", "list", "--json"))
    assert json.loads(run("cache", "list", "--running", "--json")[1])[0]["state"] == "failed"
    code, out, _ = run("report", "kernels.broken", "-o", page)
    assert (code, "failed sweep (all 3 configs failed)" in out, "no block of 3" in page.read_text()) == (0, True, True)


def test_an_error_without_trials_has_no_page(tmp_path: Path) -> None:
    error = quarantune.TuningFailedError("nothing", trials=(), key="")
    assert error.table() == "nothing"
    with pytest.raises(ValueError, match="nothing has run, so there is nothing to report on: nothing"):
        error.report(tmp_path / "page.html")


PROGRAM = """
import sys, time
from pathlib import Path
import numpy as np
import quarantune
from quarantune.host.process import in_sandbox

def held(rows, n=1):
    assert in_sandbox()
    while n == 6 and not Path(sys.argv[1]).exists():
        time.sleep(0.01)
    return rows + n

if __name__ == "__main__":
    quarantune.AutoTuner(held, {"n": [1, 2, 3, 4, 5, 6]}, name="kernels.held", ref_fn=None).run(np.ones(8))
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_second_process_watches_a_real_sweep(cache_dir: Path, tmp_path: Path, is_stopped: bool) -> None:
    """With `is_stopped`, Ctrl-C ends the watching; the sweep goes on in both cases."""
    (tmp_path / "program.py").write_text(PROGRAM)
    page, go = tmp_path / "page.html", tmp_path / "go"
    tune = subprocess.Popen([sys.executable, tmp_path / "program.py", go], env=child_environ())
    watch = None
    try:
        assert eventually(lambda: any(it.state is SweepState.RUNNING for it in sweeps.latest(cache_dir)), timeout_s=100)
        script = "import signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        script += "from quarantune.cli.entry_point import main\nsys.exit(main())"
        command = [sys.executable, "-c", script, "report", "kernels.held", "--watch", "-o", str(page)]
        watch = subprocess.Popen(
            command, env=child_environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert eventually(lambda: page.exists() and "<title>running: " in page.read_text(), timeout_s=100)
        if is_stopped:
            watch.send_signal(signal.SIGINT)
            _, err = watch.communicate(timeout=60)
            assert (watch.returncode, "Traceback" in err) == (130, False)
            assert "stopped watching" in err
            assert tune.poll() is None
        go.touch()
        assert tune.wait(100) == 0
        if not is_stopped:
            out, _ = watch.communicate(timeout=60)
            assert (watch.returncode, "1 result with 6 trials written" in out) == (0, True)
            assert "<title>kernels.held · tuning report</title>" in page.read_text()
        assert '"reloadS":' not in page.read_text()
        assert only(cache_dir).state is SweepState.DONE
    finally:
        for process in filter(None, (tune, watch)):
            process.kill()
            process.communicate()


@pytest.mark.clients
@pytest.mark.skipif(not (CHROMEDRIVER and CHROMIUM), reason=MISSING)
def test_a_browser_loads_the_page_again_until_the_end(cache_dir: Path, tmp_path: Path) -> None:
    begun(cache_dir, ended=1, default={"n": 0})
    page = tmp_path / "page.html"

    def heading() -> str:
        return str(window.run("return document.querySelector('.kind').textContent"))

    with running(cache_dir), browser(tmp_path) as window:
        page.write_text(render([unfinished.data_of(only(cache_dir))], reload_s=0.2))
        window.open(page)
        assert heading() == "Tuning report · running: 1 of 4 configs"
        choose = (
            "const filter = document.getElementById('filter'); filter.value = 'n=0';"
            "filter.dispatchEvent(new Event('input', { bubbles: true }));"
            "if (document.documentElement.dataset.theme !== 'dark') document.getElementById('theme').click()"
        )
        kept = "return [document.documentElement.dataset.theme, document.getElementById('filter').value]"

        def is_chosen() -> bool:
            """Chooses again if the page was just being loaded anew."""
            return window.run(kept) == ["dark", "n=0"] or bool(window.run(choose))

        assert eventually(is_chosen)
        begun(cache_dir, ended=2, default={"n": 0})
        page.write_text(render([unfinished.data_of(only(cache_dir))], reload_s=0.2))
        assert eventually(lambda: heading() == "Tuning report · running: 2 of 4 configs")
        assert window.run(kept) == ["dark", "n=0"]
        assert window.complaints() == []
        page.write_text(render([unfinished.data_of(only(cache_dir))]))
        assert eventually(lambda: window.run("return document.getElementById('pause').hidden"))


@pytest.mark.clients
@pytest.mark.skipif(not (CHROMEDRIVER and CHROMIUM), reason=MISSING)
@pytest.mark.skipif(not AXE.exists(), reason=NO_AXE)
@pytest.mark.parametrize("ended", [0, 2, 4])
def test_axe_finds_nothing_on_a_page_that_is_watched(cache_dir: Path, tmp_path: Path, ended: int) -> None:
    begun(cache_dir, ended=ended, default={"n": 0})
    page = tmp_path / "page.html"
    with running(cache_dir), browser(tmp_path) as window:
        page.write_text(render([unfinished.data_of(only(cache_dir))], reload_s=1000))
        for width in (390, 1440):
            window.size(width, 900)
            window.open(page)
            assert window.barriers() == []
            window.click("#theme")
            assert window.barriers() == []
