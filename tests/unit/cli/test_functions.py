"""`quarantune run` runs one config alone and shows everything it prints."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from aftermath import eventually, strays
from helpers import deadline_s

from quarantune.cli import entry_point as main

KERNELS = """
import enum
import os
import sys

import jax
import jax.numpy as jnp
import quarantune


class Mode(enum.Enum):
    PLAIN = 1
    LOUD = 2


@quarantune.autotune({"block": [8, 24, 64], "mode": list(Mode)}, compile_timeout=20, prune_fn=lambda config, x: False)
@jax.jit(static_argnames=["block", "mode", "negate"])
def total(x, negate=False, block: int = 8, mode: Mode = Mode.PLAIN):
    print("tracing", block, mode.name, negate, flush=True)
    if mode is Mode.LOUD:
        x = x[::-1]
    if block == 2:
        os.write(2, b"the last words\\n")
        os._exit(7)
    if block == 4:
        for number in range(2000):
            print("line", number)
        return x.sum() + 1
    if block == 1:
        quarantune_never_ends()
    return x.reshape(-1, block).sum(axis=1).sum()


def quarantune_never_ends():
    while True:
        pass


@quarantune.autotune({"block": [1, 2]})
@jax.jit(static_argnames=["block"])
def differs(x, block: int = 1):
    return x.reshape(-1, block).sum() * (1 + os.getpid())


@quarantune.contextual_autotune(rep=1)
def layer(x):
    return total(x)


def two_calls():
    yield (jnp.ones(64),)
    yield (jnp.ones(64),)
"""

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Writes a module into the working directory and returns its name, unique to the test."""
    name = f"alone_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(KERNELS)
    monkeypatch.chdir(tmp_path)
    yield name
    sys.modules.pop(name, None)


@pytest.fixture
def run(kernels: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, cache_dir: Path) -> Run:
    """Runs a config of `total`, and checks that it leaves no process or file."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(cache_dir.parent / "temporary"))
    (cache_dir.parent / "temporary").mkdir()

    def run_it(config: str, *words: str, function: str = "total", args: str = "f32[64]") -> tuple[int, str, str]:
        given = [] if "--inputs" in words else ["--args", args]
        code = main.main(["run", f"{kernels}:{function}", "--config", config, *given, *words])
        assert eventually(lambda: not strays()), strays()
        assert not list(cache_dir.glob("*.json"))
        assert not list((cache_dir.parent / "temporary").glob("quarantune-run-*"))
        return (code, *capsys.readouterr())

    return run_it


def test_configs_that_work_show_a_time_and_others_a_reason(run: Run, kernels: str) -> None:
    code, out, err = run('{"block": 64}')
    assert (code, err) == (0, "")
    assert re.fullmatch(
        rf"tracing 64 PLAIN False\n{kernels}\.total\(x f32\[64\]\) with block=64: ok, \S+ ms, compiled in \S+ s\n", out
    )
    code, out, err = run('{"block": 24}', "--static", "negate=true")
    assert (code, err) == (1, "")
    first, message, line, end = out.splitlines()
    assert first == "tracing 24 PLAIN True"
    assert message.startswith("TypeError: cannot reshape array of shape (64,)")
    assert re.fullmatch(rf"  \S*/{kernels}\.py:\d+, in total: return x\.reshape\(-1, block\)\S*", line)
    assert end == f"{kernels}.total(x f32[64], negate true) with block=24: error (compile)"


@pytest.mark.slow
def test_a_config_that_kills_its_worker_leaves_its_last_words(run: Run) -> None:
    code, out, _ = run('{"block": 2}')
    assert code == 1
    assert out.startswith("tracing 2 PLAIN False\nthe last words\n")
    message = "the process exited with code 7 without a result: see the end of its output"
    assert f"with block=2: crashed (compile)\n  {message}" in out
    assert run('{"block": 8}')[0] == 0


@pytest.mark.slow
def test_an_endless_config_is_ended_with_its_stack_shown(run: Run) -> None:
    from quarantune import settings

    deadline = deadline_s(2.0)
    with settings(compile_timeout=deadline):
        code, out, _ = run('{"block": 1}')
    assert code == 1
    assert "in quarantune_never_ends\n" in out
    message = f"compiling took longer than {deadline:g} s: raise compile_timeout to allow more"
    assert out.endswith(f"with block=1: timeout (compile)\n  {message}\n")


@pytest.mark.slow
def test_the_log_is_whole_in_text_and_json(run: Run) -> None:
    code, out, err = run('{"block": 4}', "--json")
    found = json.loads(out)
    assert (code, err, found["outcome"], found["phase"]) == (1, "", "wrong", "check")
    assert [line for line in found["log"].splitlines() if line.startswith("line ")] == [
        f"line {n}" for n in range(2000)
    ]
    assert found["config"] == {"block": 4}
    assert found["message"]


@pytest.mark.long
@pytest.mark.slow
def test_a_value_of_an_enum_is_written_as_in_json_tables(run: Run, kernels: str) -> None:
    from quarantune.values.codec import as_json as encode

    sys.path.insert(0, os.getcwd())
    module = __import__(kernels)
    encoded = encode({"block": 8, "mode": module.Mode.LOUD})
    code, out, _ = run(json.dumps(encoded))
    assert (code, out.splitlines()[0]) == (0, "tracing 8 LOUD False")


@pytest.mark.parametrize(
    ("config", "words", "fix"),
    [
        ("{block: 8}", (), "write it as '{\"bm\": 64}'"),
        ("[8]", (), "is not a config: write values by their names"),
        ("{}", (), "is not a config: write values by their names"),
        ('{"blok": 8}', (), "total has no tunable 'blok'. Did you mean 'block'?"),
        ('{"negate": true}', (), "Tuned are: block, mode."),
        ('{"block": 8}', ("--inputs", "K:two_calls"), "--inputs gives 2 calls: give one of them"),
    ],
)
@pytest.mark.usefixtures("no_process")
def test_a_config_that_cannot_run_is_refused_before_any_run(
    config: str, words: tuple[str, ...], fix: str, run: Run, kernels: str
) -> None:
    code, out, err = run(config, *(word.replace("K", kernels) for word in words))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert fix in err


@pytest.mark.usefixtures("no_process")
def test_kernels_are_run_by_their_own_names(run: Run) -> None:
    code, _, err = run('{"block": 8}', function="layer")
    assert (code, err.count("\n")) == (2, 1)
    assert "run one of the kernels that it calls" in err


@pytest.mark.slow
def test_a_function_that_differs_in_workers_is_one_line(run: Run) -> None:
    code, out, err = run('{"block": 2}', function="differs")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "workers run another program than this process" in err


@pytest.mark.long
@pytest.mark.slow
def test_failing_defaults_are_shown_with_a_working_config(run: Run, kernels: str) -> None:
    text = Path(f"{kernels}.py").read_text()
    Path(f"{kernels}.py").write_text(text.replace("negate=False, block: int = 8", "negate=False, block: int = 24"))
    code, out, _ = run('{"block": 8}')
    assert (code, "with block=8: ok, " in out, "  its defaults failed (error: TypeError" in out) == (0, True, True)


@pytest.mark.slow
def test_tuning_shows_the_command_that_repeats_a_failure(
    kernels: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path(f"{kernels}.py").write_text(KERNELS.replace(", prune_fn=lambda config, x: False", ""))
    assert main.main(["tune", f"{kernels}:total", "--args", "f32[64]"]) == 0
    *_, hint, command = capsys.readouterr().out.splitlines()
    assert hint == "to repeat one that failed, alone:"
    assert main.main(shlex.split(command)[1:]) == 1
    assert "with block=24 mode=PLAIN: error (compile)" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.slow
def test_contextual_tuning_names_no_command_that_is_refused(
    kernels: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    text = KERNELS.replace(", prune_fn=lambda config, x: False", "")
    layer = "\n\n@quarantune.contextual_autotune(warmup=0, rep=1)\ndef layer(x):\n    return total(x)\n"
    Path(f"{kernels}.py").write_text(text + layer)
    assert main.main(["tune", f"{kernels}:layer", "--args", "f32[64]"]) == 0
    shown = capsys.readouterr().out
    assert "error (" in shown
    assert "quarantune run" not in shown
