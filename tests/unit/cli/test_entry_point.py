"""Every command does its work on good input, and names the fix for bad input; slow tests start programs."""

from __future__ import annotations

import importlib
import io
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tomllib
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT, child_environ, python, run_python
from repeated import best_of

from quarantune.api.tuning_cache import TuningCache
from quarantune.cache.entry_file import encode
from quarantune.cache.journal import Journal
from quarantune.cache.store import Store
from quarantune.cli import entry_point as main
from quarantune.cli.call_texts import GivenCall, parse_call, read_calls
from quarantune.cli.parser import make_parser
from quarantune.values import blocks
from quarantune.values.trial import ArrayKind

KERNELS = """
import functools
import jax
import jax.numpy as jnp
import quarantune

@quarantune.autotune({"block": [1, 2]}, warmup=0, rep=1, ref_fn=None)
@functools.partial(jax.jit, static_argnames=["block", "causal"])
def scale(x, y, causal=False, block: int = 1):
    return x * block + y

@quarantune.autotune({"block": [1, 2]})
@functools.partial(jax.jit, static_argnames=["block"])
def broken(x, block: int = 1):
    raise RuntimeError(f"no {block}")

@jax.jit
def plain(x):
    return x

def inputs():
    print("made by hand")
    yield jnp.ones((8, 8)), jnp.ones(8)
    yield {"x": jnp.ones((4, 8)), "y": jnp.ones(8), "causal": True}

def one_number():
    return 3

if __name__ == "__main__":
    print(scale.lookup(jnp.ones((8, 128)), jnp.ones(128)))
"""

OTHERS = """
@quarantune.contextual_autotune(rep=1)
def layer(x, y):
    return scale(x, y)

def times_two(x, n):
    return x * 2

tuner = quarantune.AutoTuner(times_two, {"n": [1, 2]})
"""

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command in this process; returns its exit code, its stdout and its stderr."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run_it(*words: object) -> tuple[int, str, str]:
        code = main.main([str(word) for word in words])
        return (code, *capsys.readouterr())

    return run_it


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Writes a module into the working directory and returns its name, unique to the test."""
    name = f"kernels_{abs(hash(tmp_path))}"
    directory = tmp_path / "work"
    directory.mkdir()
    (directory / f"{name}.py").write_text(KERNELS)
    monkeypatch.chdir(directory)
    yield name
    sys.modules.pop(name, None)


def entry(size: int, block: int, *, created: str = "2026-01-02T03:04:05+00:00") -> dict[str, Any]:
    return {
        "schema": 1,
        "config": {"block": block},
        "time_ms": 0.5,
        "default_time_ms": 1.0,
        "key_values": {"x": {"shape": [size, 8], "dtype": "bfloat16"}},
        "created": created,
        "trials": {"ok": 2},
    }


@pytest.fixture
def filled(cache_dir: Path) -> Store:
    """Puts results of two functions for two devices into the cache."""
    store = Store(cache_dir)
    store.merge("kernels.scale", {"H200": {"a": entry(1, 2), "b": entry(2, 4)}, "H100": {"a": entry(1, 8)}})
    store.merge("kernels.norm", {"H200": {"c": entry(3, 1, created="2999-01-01T00:00:00Z")}})
    return store


def is_one_line_about(text: str, *parts: str) -> bool:
    return text.count("\n") == 1 and all(part in text for part in parts)


# --- words --------------------------------------------------------------------------------------------------


def test_the_arguments_of_a_call_are_read_as_people_write_them() -> None:
    text = "bf16[4096, 4096], f32[] pred[2] s32[0,1] 3 -0.5 true none bias=u8[7] mode=fast causal=False pad=(1, 2)"
    assert parse_call(text) == GivenCall(
        (
            ArrayKind((4096, 4096), "bfloat16"),
            ArrayKind((), "float32"),
            ArrayKind((2,), "bool"),
            ArrayKind((0, 1), "int32"),
            3,
            -0.5,
            True,
            None,
        ),
        {"bias": ArrayKind((7,), "uint8"), "mode": "fast", "causal": False, "pad": (1, 2)},
    )
    assert parse_call("f8_e4m3fn[8] float16[8]").args == (ArrayKind((8,), "float8_e4m3fn"), ArrayKind((8,), "float16"))
    assert parse_call("") == GivenCall((), {})


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("tun", "Did you mean 'tune'"),
        ("cache prun", "Did you mean 'prune'"),
        ("help cache prun", "Did you mean 'prune'"),
        ("--verson", "quarantune: there is no option '--verson'. Did you mean '--version'?"),
        ("--json cache list", "Options of a command follow it"),
        ("tune --agan", "quarantune tune: there is no option '--agan'. Did you mean '--again'?"),
        ("tune K:scale --arg f32[8]", "Did you mean '--args'?"),
        ("cache list --jsn", "quarantune cache list: there is no option '--jsn'. Did you mean '--json'?"),
        ("report kernels.scale -p", "there is no option '-p' (see quarantune report --help)"),
        ("tune", "--args --shapes --inputs --recorded"),
        ("tune --args f32[8]", "the function is missing: write quarantune tune MODULE:FUNCTION, or --recorded DIR"),
        ("tune --recorded nowhere", "'nowhere' is not a directory: name that of QUARANTUNE_RECORD"),
        ("tune --recorded ~no_such_user/calls", "is not a directory: name that of QUARANTUNE_RECORD"),
        ("tune --recorded . --static a=1", "goes with neither --static nor --estimate-for"),
        ("tune K:scale --args f32[8", "write arrays as bf16[4096,4096]"),
        ("tune K:scale --args f32[8,x]", "'x' is not a size"),
        ("tune K:scale --args f33[8]", "Did you mean 'f32'"),
        ("tune K:scale --args bf16", "write bf16[]"),
        ("tune K:scale --args y=f32[8],f32[8]", "comes after a keyword argument"),
        ("tune K:scale --args y=1,y=2", "y is given twice"),
        ("tune K:scale --args f32[8] --static causal", "write NAME=VALUE"),
        ("tune K:scale --shapes nowhere.txt", "cannot be read (No such file or directory)"),
        ("tune K:scale --shapes empty.txt", "write the arguments of a call on each line"),
        ("tune K:scale --shapes bad.txt", "bad.txt, line 2 'f32': 'f32' is not an argument"),
        ("tune K:scale --shapes utf16.txt", "utf16.txt' cannot be read (it is not UTF-8 text)"),
        ("tune K --args f32[8]", "write MODULE:FUNCTION"),
        ("tune K:scal --args f32[8]", "Did you mean 'scale'"),
        ("tune K:zzz --args f32[8]", "Its autotuned functions are: scale, broken."),
        ("tune nowhere.py:scale --args f32[8]", "there is no file"),
        ("tune no_such_module:scale --args f32[8]", "Give the path of its file"),
        ("tune fails.py:scale --args f32[8]", "fails.py:1 with ZeroDivisionError"),
        ("tune needs.py:scale --args f32[8]", "needs the module 'not_installed_here': install it"),
        ("tune K:plain --args f32[8]", "put @quarantune.autotune(configs) on it"),
        ("tune K:scale --args f32[8]", "no value for y: K:scale takes (x, y, causal=False)"),
        ("tune K:scale --args f32[8],f32[8],block=2", "block is tuned here: leave it out"),
        ("tune K:scale --args f32[8],f32[8],causl=true", "Did you mean 'causal'"),
        ("tune K:scale --args f32[8],f32[8],f32[8]", "--static causal=4"),
        ("tune K:scale --args f32[8],f32[8],1,2,3", "too many positional arguments"),
        ("tune K:scale --args f32[8],x=f32[8]", "two values for 'x', one by its place and one by its name"),
        ("tune K:scale --args f32[8] --args f32[4]", "--args: given twice"),
        ("tune tunes.py:tuner --args f32[8]", "tunes.py:5 with RuntimeError: "),
        ("tune K:scale --args f32[8],y=fast", "y is not a static parameter"),
        ("tune K:scale --args f64[8],f32[8]", "set JAX_ENABLE_X64=1"),
        ("tune K:scale --args f32[8],f32[8],causal=1 --static causal=0", "both give causal"),
        ("tune K:scale --inputs K:one_number", "return a tuple of arguments"),
        ("tune K:scale --inputs K:scale", "give its parameters defaults"),
        ("tune K:scale --args f32[8],f32[8] --search best", "'surrogate'"),
        ("tune K:scale --args f32[8],f32[8] --max-trials 0", "whole number of at least 1"),
        ("tune K:scale --args f32[8],f32[8] --cache-dir bad.txt", "give another directory with --cache-dir"),
        ("tune K:scale --args f32[8],f32[8] --executor dusk://host:1", "Did you mean 'dask'"),
        ("tune K:scale --args f32[8],f32[8] --executor dask://host:1", "pip install 'quarantune[dask]'"),
        ("tune K:scale --args f32[8],f32[8] --executor ray://auto", "pip install 'quarantune[ray]'"),
        ("check K:scale --args f32[8]", "--target"),
        ("check K:scale --args f32[8],f32[8] --target h100", "quarantune[cuda-compile]"),
        ("check K:scale --args f32[8],f32[8] --target TPU_v99", "nown are: cpu, TPU v4"),
        ("check K:scale --args f32[8],f32[8] --target cpu --memory-limit much", "'8GB'"),
        ("cache list --cache-dir bad.txt", "is not a directory: give another one with --cache-dir"),
        ("cache list --cache-dir=", "cache_dir='' is not valid: it must be a directory"),
        ("cache path --cache-dir gs://bucket/cache", "not a URL"),
        ("cache verify --cache-dir ~no_such_user/cache", "cache_dir='~no_such_user/cache' is not valid"),
        ("tune K:scale --args f32[8],f32[8] --cache-dir gs://bucket", "not a URL"),
        ("report kernels.scale --cache-dir s3://bucket", "not a URL"),
        ("doctor --cache-dir=", "cache_dir='' is not valid"),
        ("cache diff gs://bucket", "cache_dir='gs://bucket' is not valid"),
        ("cache merge ~no_such_user/cache", "cache_dir='~no_such_user/cache' is not valid"),
        ("cache export gs://bucket/tables", "not a URL"),
        ("report gs://bucket/kernels.scale kernels.scale", "not a URL"),
        ("cache list kernels.scal", "Did you mean 'kernels.scale'"),
        ("cache show nothing", "`quarantune cache list` shows all names"),
        ("cache show --device H20", "Did you mean 'H200'"),
        ("cache diff nowhere", "there is no directory 'nowhere'"),
        ("cache merge nowhere", "there is no directory 'nowhere'"),
        ("cache export out nothing", "nothing is cached for 'nothing'"),
        ("cache export out --device H20", "Did you mean 'H200'"),
        ("cache push tables", "'tables' is not a URL of results: give https://HOST/PATH"),
        ("cache push https://user:word@host/x", "nothing can be pushed to https://***@host/x: give s3://"),
        ("cache push s3://key:word@bucket", "'s3://***@bucket' is not a URL of results"),
        ("cache push gs://bucket --only kernels.scal", "Did you mean 'kernels.scale'"),
        ("cache pull file:///tmp", "'file:///tmp' is not a URL of results"),
        ("cache prune --older-than soon", "as 90d, 12h or 30m"),
        ("cache rm", "quarantune cache rm: NAME is missing: functions by their names in the cache"),
        ("cache diff", "DIR is missing: the other cache directory"),
        ("tune K:scale --args", "--args needs a value: the arguments of one call"),
        ("report kernels.scale -o", "--output needs a value: the file"),
        ("run K:scale --args f32[8]", "--config is missing: the config"),
        ("cache rm kernels.scal", "Did you mean 'kernels.scale'"),
        ("cache rm kernels.scale --device H20", "Did you mean 'H200'"),
        ("check K:scale --args f32[8],f32[8] --target cpu --num-workers none", "as in '50%'"),
        ("run K:scale --args f32[8],f32[8] --config {} --timeout 0", "number of seconds above 0"),
        ("tune K:scale --args f32[8],f32[8] --force", "there is no option '--force'. Use --again "),
        ("cache verify K:plain", "put @quarantune.autotune(configs) on it"),
        ("cache path --json", "there is no option '--json'"),
        ("report kernels.scal", "Did you mean 'kernels.scale'"),
        ("report kernels.scale --device A100", "nothing is cached for the device 'A100'"),
        ("report My.scale", "nothing is cached for 'My.scale'"),
        ("report kernels.*", "no function 'kernels.*' has results"),
        ("report kernels.scale -o nowhere/page.html", "give another file with -o"),
        ("replay nowhere", "'nowhere' cannot be read"),
        ("replay /dev/zero", "/dev/zero is neither a journal (.jsonl) nor a directory"),
        ("replay bad.txt", "bad.txt is neither a journal (.jsonl) nor a directory"),
        ("replay bad.txt --seeds 0", "whole number of at least 1"),
        ("completion tcsh", "Choose from bash, zsh, fish"),
        ("doctor --args f32[8]", "there is no option '--args'"),
        ("targets all", "quarantune targets: unrecognized arguments: all"),
    ],
)
@pytest.mark.usefixtures("filled", "cpu_only", "no_process")
def test_bad_input_exits_with_2_and_one_line_with_the_fix(
    words: str, fix: str, run: Run, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "h100" in words:
        monkeypatch.setattr("quarantune.devices.targets.has_plugin", lambda platform: platform == "cpu")
    for library in ("distributed", "ray"):
        monkeypatch.setitem(sys.modules, library, None)  # as if it were not installed
    for name, text in (
        ("empty.txt", "\n# nothing\n"),
        ("bad.txt", "f32[8] f32[8]\nf32\n"),
        ("fails.py", "1 / 0\n"),
        ("needs.py", "import not_installed_here\n"),
        ("utf16.txt", "\udcff\udcfef\x003\x00"),
        ("tunes.py", "import quarantune\n\n\ntuner = quarantune.AutoTuner(lambda x, n: x, [{'n': 1}])\ntuner.run(1)\n"),
    ):
        Path(name).write_text(text, "utf-8", "surrogateescape")
    code, out, err = run(*words.replace("K", kernels).split())
    assert (code, out) == (2, "")
    assert is_one_line_about(err, fix.replace("K", kernels)), err


def test_a_cache_that_cannot_be_read_is_named_with_the_fix(run: Run, cache_dir: Path, monkeypatch: Any) -> None:
    cache_dir.mkdir()

    def refuse(path: object) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refuse)  # root ignores the modes of files
    code, _, err = run("cache", "list")
    assert code == 2
    assert is_one_line_about(err, "cannot be read (Permission denied): make it readable, or give another one")


def test_a_bad_variable_is_named_on_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUARANTUNE_TIMEOUT", "soon")
    code, _, err = run("cache", "path")
    assert code == 2
    assert is_one_line_about(err, "QUARANTUNE_TIMEOUT='soon' is not valid")


def test_tuning_without_a_cache_is_refused(run: Run, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUARANTUNE_DISABLE_CACHE", "1")
    code, _, err = run("tune", f"{kernels}:scale", "--args", "f32[8] f32[8]")
    assert code == 2
    assert is_one_line_about(err, "QUARANTUNE_DISABLE_CACHE is set", "unset it")


def test_a_file_is_not_mistaken_for_a_module_of_its_name(run: Run, tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text(KERNELS)
    (tmp_path / "my-kernels.py").write_text(KERNELS)
    code, _, err = run("tune", f"{tmp_path / 'json.py'}:scale", "--args", "f32[8] f32[8]")
    assert code == 2
    assert is_one_line_about(err, "another module is called 'json'", "rename the file")
    code, _, err = run("tune", f"{tmp_path / 'my-kernels.py'}:scale", "--args", "f32[8] f32[8]")
    assert code == 2
    assert is_one_line_about(err, "rename it, as in my_kernels.py")


def test_a_file_in_a_package_is_imported_under_its_full_name(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quarantune.cli import calls

    package = tmp_path / "cli_package" / "inner"
    package.mkdir(parents=True)
    for directory in (package, package.parent):
        (directory / "__init__.py").touch()
    (package / "kernels.py").write_text("def f(): ...\nclass C:\n    def g(self): ...\n")
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    assert calls.load(f"{package / 'kernels.py'}:f").__module__ == "cli_package.inner.kernels"
    assert calls.load(f"{package / 'kernels.py'}:C.g").__qualname__ == "C.g"


@pytest.mark.parametrize("command", ["tune", "fit", "run", "check"])
def test_commands_about_calls_share_their_options(
    command: str, run: Run, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def handler(options: Any, out: Any) -> int:
        seen.append((blocks.current(), options.calls))
        return 0

    module = importlib.import_module(f"quarantune.cli.{'fitting' if command == 'fit' else 'functions'}")
    monkeypatch.setattr(module, command, handler)
    limits = ["--compile-timeout", "7", "--memory-limit", "3GB", "--num-workers", "50%", "--static", "causal=true"]
    own = {"run": ["--config", "{}"], "check": ["--target", "cpu"]}.get(command, ["--timeout", "5"])
    assert run(command, f"{kernels}:scale", "--args", "f32[8],f32[8]", *limits, *own)[0] == 0
    [(now, [call])] = seen
    assert (now.compile_timeout, now.memory_limit, now.num_workers) == (7.0, 3 * 10**9, 0.5)
    assert call.kwargs == {"causal": True}
    assert blocks.current().compile_timeout is None, "the options hold for the command alone"


def test_an_error_of_prune_fn_names_the_config(run: Run, kernels: str) -> None:
    with Path(f"{kernels}.py").open("a") as file:
        file.write(
            "\n\ndivided = quarantune.AutoTuner(\n    lambda x, block: x, {'block': [1, 2]}, name='d', "
            "prune_fn=lambda config, x: int('no')\n)\n"
        )
    code, _, err = run("tune", f"{kernels}:divided", "--args", "f32[]")
    assert code == 2
    assert is_one_line_about(err, "invalid literal", "(prune_fn of d raised this for the config block=1)")


def test_every_command_has_help_and_a_handler(run: Run) -> None:
    def walk(parser: Any) -> Iterator[Any]:
        nodes = [choice for action in parser._actions if isinstance(action.choices, dict) for choice in action.choices]
        inner = next((action.choices for action in parser._actions if isinstance(action.choices, dict)), {})
        yield parser
        for name in nodes:
            yield from walk(inner[name])

    handlers = set()
    for parser in walk(make_parser()):
        code, out, err = run(*parser.prog.split()[1:], "--help")
        assert (code, err) == (0, "")
        assert out.startswith(f"usage: {parser.prog}")
        assert max(map(len, out.splitlines())) <= 120
        if (handler := parser.get_default("run")) and handler != "help:help":  # `help` shows another command's help
            handlers.add(handler)
    assert max(map(len, make_parser().epilog.splitlines())) <= 80  # argparse breaks none of these lines
    assert len(handlers) == 20
    for handler in handlers:
        module, _, name = handler.partition(":")
        assert callable(getattr(importlib.import_module(f"quarantune.cli.{module}"), name))


def test_the_installed_program_is_this_one() -> None:
    project = tomllib.loads(ROOT.joinpath("pyproject.toml").read_text())["project"]
    module, _, name = project["scripts"]["quarantune"].partition(":")
    assert getattr(importlib.import_module(module), name) is main.main


# --- the cache ----------------------------------------------------------------------------------------------


def test_an_empty_cache_is_not_an_error(run: Run, cache_dir: Path) -> None:
    assert run("cache", "path") == (0, f"{cache_dir}\n", "")
    assert run("cache", "list") == (0, f"nothing is cached in {str(cache_dir)!r}\n", "")
    assert run("cache", "list", "--json") == (0, "[]\n", "")
    assert not cache_dir.exists()
    assert run("cache", "path", "--cache-dir", cache_dir / "other")[1] == f"{cache_dir / 'other'}\n"


@pytest.mark.usefixtures("filled")
def test_results_are_listed_by_function_device_and_call(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = run("cache", "list", "kernels.s*", "--device", "H200")
    assert code == 0
    assert out.splitlines() == [
        "kernels.scale on H200",
        "  x bf16[1,8]  block=2  0.5 ms  2.00x  2026-01-02",
        "  x bf16[2,8]  block=4  0.5 ms  2.00x  2026-01-02",
    ]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("NO_COLOR", "1")
    assert run("cache", "list", "kernels.s*", "--device", "H200")[1].splitlines() == [
        "kernels.scale on H200",
        "  x bf16[1,8]",
        "    block=2  0.5 ms  2.00x  2026-01-02",
        "  x bf16[2,8]",
        "    block=4  0.5 ms  2.00x  2026-01-02",
    ]
    _, out, _ = run("cache", "list", "--json")
    listed = json.loads(out)
    assert [(it["function"], it["device"], it["key"], it["config"]["block"]) for it in listed] == [
        ("kernels.norm", "H200", "c", 1),
        ("kernels.scale", "H200", "a", 2),
        ("kernels.scale", "H200", "b", 4),
        ("kernels.scale", "H100", "a", 8),
    ]
    assert listed[0].keys() == {
        *("function", "device", "key", "call", "config", "time_ms", "default_time_ms", "speedup"),
        *("speedup_interval", "created"),
    }


@pytest.mark.usefixtures("filled")
def test_a_result_is_shown_in_full(run: Run, filled: Store) -> None:
    code, out, _ = run("cache", "show", "kernels.norm")
    assert code == 0
    assert out.startswith("kernels.norm(x bf16[3,8])\n  device")
    assert re.search(r"time +2\.00x faster than the defaults \(0\.5 ms against 1 ms\)\n", out)
    assert re.search(r"trials +ok 2\n", out)
    [shown] = json.loads(run("cache", "show", "kernels.norm", "--json")[1])
    assert shown["entry"] == filled.get("kernels.norm", "H200", "c")
    filled.put("kernels.norm", "H200", "c", entry(3, 1) | {"default_time_ms": 0.5, "speedup_interval": [0.97, 1.03]})
    assert re.search(r"time +the defaults are best \(0\.5 ms\)\n", run("cache", "show", "kernels.norm")[1])


def test_a_hostile_entry_cannot_write_to_the_terminal(run: Run, cache_dir: Path) -> None:
    hostile = entry(1, 2) | {"config": {"\x1b[2J": "\x07"}, "key_values": {"x\x1b": "\x9b"}, "created": "\x1b]0;"}
    Store(cache_dir).merge("f", {"\x1b[31m": {"\x1b": hostile | {"more\x1b[2J": 1}}})
    for command in ("list", "show"):
        code, out, _ = run("cache", command)
        assert code == 0
        assert out.replace("\n", "").isprintable()
    for key in ("\x1b", "other"):
        Journal(cache_dir, "f", "\x1b[31m", key).append({"trial": {"config": {"n": 1}, "outcome": "slow"}})
    code, _, err = run("replay", cache_dir / "f.trials")
    assert (code, "holds the journals of 2 problems" in err) == (2, True)
    assert err.replace("\n", "").isprintable()


def test_two_caches_are_compared_merged_and_exported(run: Run, filled: Store, tmp_path: Path) -> None:
    other = tmp_path / "other"
    Store(other).merge("kernels.scale", {"H200": {"a": entry(1, 2), "b": entry(2, 16), "d": entry(4, 1)}})
    code, out, _ = run("cache", "diff", other, "--json")
    found = json.loads(out)
    assert code == 1
    assert [len(found[part]) for part in ("only_here", "only_there", "different", "same")] == [2, 1, 1, 1]
    assert found["different"][0]["there"] == {"block": 16}
    assert run("cache", "diff", other)[1].startswith("2 only here, 1 only there, 1 different, 1 the same\n")

    code, out, _ = run("cache", "merge", other)
    assert code == 0
    assert "1 added, 0 updated, 1 unchanged, 1 in conflict" in out
    assert filled.get("kernels.scale", "H200", "d") is not None
    [merged] = json.loads(run("cache", "merge", other, "--json")[1])
    assert (len(merged["added"]), len(merged["conflicts"])) == (0, 1)

    shipped = tmp_path / "shipped"
    code, out, _ = run("cache", "export", shipped, "kernels.n*")
    assert (code, out) == (0, f"1 result written to {shipped}\n")
    assert run("cache", "diff", shipped, "--cache-dir", shipped)[0] == 0
    assert [file.name for file in shipped.iterdir()] == ["kernels.norm.json"]


def test_damage_is_found_and_named(run: Run, filled: Store) -> None:
    assert run("cache", "verify")[0] == 0
    filled.path("kernels.norm").write_text("{")
    code, out, _ = run("cache", "verify")
    assert code == 1
    problem, summary = out.splitlines()
    assert is_one_line_about(f"{problem}\n", "kernels.norm.json", "is not JSON")
    assert summary == f"1 problem found in {str(filled.directory)!r}"
    assert json.loads(run("cache", "verify", "--json")[1])["problems"]
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        code, out, err = run("cache", "list")
    assert (code, "kernels.scale on H200" in out) == (0, True)
    assert is_one_line_about(err, "quarantune: warning: ", "kernels.norm.json", "is not JSON")
    assert filled.path("kernels.norm").read_text() == "{"


def test_bad_results_are_removed_by_name_device_and_call(run: Run, filled: Store) -> None:
    def left() -> set[tuple[str, str, str]]:
        return {(it["function"], it["device"], it["key"]) for it in json.loads(run("cache", "list", "--json")[1])}

    before = left()
    trials = filled.directory / "kernels.scale.trials"
    for key in ("a", "b", "unfinished"):
        Journal(filled.directory, "kernels.scale", "H200", key).append({"trial": key})
    chosen = ["cache", "rm", "kernels.scale", "--device", "H200", "--call", "x *[1,8]"]
    code, out, _ = run(*chosen, "--dry-run")
    assert (code, out.splitlines()[-1], left()) == (0, "1 result would be removed", before)
    assert run(*chosen, "--json")[0] == 0
    assert before - left() == {("kernels.scale", "H200", "a")}
    assert len(list(trials.iterdir())) == 2, "the trials of other calls stay"
    code, out, _ = run(*chosen)
    assert (code, out) == (1, "0 results removed\n")

    code, out, _ = run("cache", "rm", "kernels.scale")
    assert (code, out.splitlines()[-1]) == (0, "2 results removed")
    assert left() == {("kernels.norm", "H200", "c")}
    assert not list(trials.iterdir()), "also the sweeps without a result are gone"
    Journal(filled.directory, "kernels.other", "H200", "a").append({"trial": "a"})
    code, out, _ = run("cache", "rm", "kernels.*", "--json")
    assert (code, json.loads(out)["functions"]) == (0, ["kernels.norm", "kernels.other"])
    assert left() == set()


def test_old_results_are_pruned_with_their_trials(run: Run, filled: Store) -> None:
    for key in ("a", "unfinished"):
        Journal(filled.directory, "kernels.scale", "H200", key).append({"trial": key})
    journals = sorted((filled.directory / "kernels.scale.trials").iterdir())
    for journal in journals:
        os.utime(journal, (0, 0))
    lock = filled.directory / ".kernels.scale.json.lock"
    assert lock.exists()
    damaged = filled.directory / "kernels.scale.json.corrupt-20260101T000000"
    damaged.write_text("{")
    fresh, dead = (filled.directory / f".kernels.scale.json.{digit * 16}.tmp" for digit in "01")
    for draft in (fresh, dead):
        draft.touch()
    os.utime(dead, (0, 0))

    code, out, _ = run("cache", "prune", "--older-than", "30d", "--dry-run", "--json")
    planned = json.loads(out)
    assert code == 0
    assert len(planned["results"]) == 3
    assert len(TuningCache(filled.directory)) == 4
    assert set(planned["files"]) == {str(damaged), str(dead), str(journals[1]), str(journals[0])} - {
        str(journal) for journal in Journal(filled.directory, "kernels.scale", "H200", "a")._files()
    }

    code, out, _ = run("cache", "prune")
    assert out.endswith("\n2 other files removed; results of any age stay without --older-than\n")
    assert run("cache", "prune")[1] == "nothing removed; results of any age stay without --older-than\n"
    assert all(journal.exists() for journal in journals)
    code, out, _ = run("cache", "prune", "--older-than", "30d", "kernels.scale", "--device", "H100")
    assert out == "kernels.scale on H100, a\n1 result removed\n"
    code, out, _ = run("cache", "prune", "--older-than", "30d")
    assert code == 0
    assert out.endswith("2 results and 1 other file removed\n")
    assert [tuple(record.key) for record in TuningCache(filled.directory)] == [("kernels.norm", "c", "H200")]
    assert not any(path.exists() for path in (*journals, damaged, dead))
    assert fresh.exists()
    assert lock.exists()


@pytest.mark.filterwarnings("always::quarantune.cache.CacheWarning")
def test_a_dry_run_changes_nothing(run: Run, filled: Store) -> None:
    (filled.directory / "package.json").write_text('{"name": "of another program"}')
    before = sorted(os.listdir(filled.directory))
    code, out, err = run("cache", "prune", "--older-than", "30d", "--dry-run")
    assert code == 0
    assert out.endswith("3 results would be removed\n")
    assert err == "", "a file of another program is not damage"
    assert sorted(os.listdir(filled.directory)) == before


def test_a_result_renewed_during_pruning_is_not_pruned(filled: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from quarantune.cache import entries

    read, looked, renewed = Store.read, filled.read, list[str]()
    journal = Journal(filled.directory, "kernels.scale", "H200", "a")
    journal.append({"trial": "a"})

    def renew_after_looking(store: Store, name: str) -> Any:
        found = read(store, name)
        if name == "kernels.scale" and not renewed:
            renewed.append(name)
            filled.put(name, "H200", "a", entry(1, 64, created="2999-01-01T00:00:00Z"))
        return found

    monkeypatch.setattr(Store, "read", renew_after_looking)
    removed, _ = entries.prune(filled, older_than_s=86400.0)
    assert ("kernels.scale", "a", "H200") not in removed
    assert ("kernels.scale", "a", "H100") in removed
    assert journal.records() == [{"trial": "a"}]
    assert {device: list(entries) for device, entries in looked("kernels.scale").items()} == {"H200": ["a"]}


@pytest.mark.parametrize("words", ["cache show", "--help", "help cache", "--version"])
@pytest.mark.usefixtures("filled")
def test_a_reader_that_leaves_early_is_not_an_error(words: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)  # the reader leaves before the first line
    command = [sys.executable, "-m", "quarantune", *words.split()]
    environ = child_environ(PYTHONUNBUFFERED="")
    with os.fdopen(writer, "wb") as out:
        done = subprocess.run(command, env=environ, stdout=out, stderr=subprocess.PIPE, timeout=280)
    assert (done.returncode, done.stderr) == (141, b"")


NOT_WRITTEN = (("cache list", 1), ("cache show --json", 1), ("cache prune --dry-run", 1), ("help cache", 1), ("-V", 1))
WRONG = (("cache", 2), ("nonsense", 2), ("cache list nothing", 2))


def under_shell(words: str, redirections: str) -> subprocess.CompletedProcess[str]:
    """Runs a command with streams as a shell redirects them."""
    before = ["sh", "-c", f'exec "$@" {redirections}', "sh"]
    return run_python("-m", "quarantune", *words.split(), before=before, PYTHONUNBUFFERED="")


@pytest.mark.parametrize(("redirections", "reason"), [(">/dev/full", "No space left"), (">&-", "Bad file descriptor")])
@pytest.mark.usefixtures("filled")
def test_output_that_cannot_be_written_is_one_line_and_code_1(redirections: str, reason: str) -> None:
    for words, code in (*NOT_WRITTEN, *WRONG):
        done = under_shell(words, redirections)
        assert done.returncode == code, (words, done.stderr)
        assert "Traceback" not in done.stderr
        assert words == "cache" or is_one_line_about(done.stderr, reason if code == 1 else ""), words


@pytest.mark.slow
@pytest.mark.parametrize("redirections", ["2>/dev/full", "2>&-", "<&- 2>&-"])
@pytest.mark.usefixtures("filled")
def test_unwritable_messages_leave_output_and_code_alone(redirections: str) -> None:
    for words, code in (("cache list", 0), *WRONG):
        done = under_shell(words, redirections)
        assert (done.returncode, "kernels.scale" in done.stdout) == (code, code == 0), (words, done.stdout)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("two_slots")
def test_all_calls_are_tuned_though_the_output_is_unwritable(run: Run, kernels: str) -> None:
    Path("calls.txt").write_bytes(b"\xef\xbb\xbff32[8] f32[8]\r\nf32[16] f32[16]\r\n")
    for redirections in (">/dev/full", ">&-"):
        done = under_shell(f"tune {kernels}:scale --shapes calls.txt --again", redirections)
        assert done.returncode == 1
        assert "the output cannot be written (" in done.stderr.splitlines()[-1]
        assert "Traceback" not in done.stderr
        assert {it["call"] for it in json.loads(run("cache", "list", "--json")[1])} == {
            "x f32[8], y f32[8], causal false",
            "x f32[16], y f32[16], causal false",
        }
        assert run("cache", "prune", "--older-than", "0s")[0] == 0


def test_values_of_enums_are_listed_by_name_and_kept_in_json(run: Run, cache_dir: Path) -> None:
    config = {"mode": {"$enum": "Mode.FAST"}, "way": [{"$enum": "Way.UP"}, 2], "type": {"a": {"$dtype": "int8"}}}
    Store(cache_dir).merge("kernels.scale", {"H200": {"a": entry(1, 2) | {"config": config}}})
    shown = 'mode=FAST way=[UP,2] type={"a":int8}'
    for command in ("list", "show"):
        assert shown in run("cache", command)[1]
        assert json.loads(run("cache", command, "--json")[1])[0]["config"] == config


def test_a_slash_in_a_name_keeps_its_report_in_this_directory(
    run: Run, filled: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("team/kernel", "../kernel", "/kernel"):
        filled.merge(name, {"H200": {"a": entry(1, 2)}})
        for words in ([name], [name, "kernels.scale"], [name, name]):
            code, out, err = run("report", *words)
            assert code == 0, err
            page = Path(out.rpartition(" written to ")[2].strip())
            assert page.parent == tmp_path
            assert page.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    "text", ["\ufefff32[8]\nf32[16]\n", "\ufeff# calls\r\nf32[8]\r\n\r\nf32[16]", "f32[8]\r\nf32[16]\r\n"]
)
def test_calls_are_read_from_files_of_any_editor(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "calls.txt").write_bytes(text.encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode()), encoding="ascii"))
    for name in (str(tmp_path / "calls.txt"), "-"):
        assert [call.args[0].shape for call in read_calls(name)] == [(8,), (16,)]
    assert parse_call("\ufefff32[8]").args[0].shape == (8,)  # "$(cat FILE)" gives this


def test_keys_are_shown_as_calls(run: Run, cache_dir: Path, tmp_path: Path) -> None:
    key = '{"call":{"x":{"dtype":"float32","shape":[8]}},"code":"0123"}'
    Store(cache_dir).merge("kernels.scale", {"H200": {key: entry(8, 2)}})
    Store(tmp_path / "empty").merge("kernels.other", {"H200": {"odd": entry(8, 2)}})
    for command in (["cache", "prune", "--older-than", "1d", "--dry-run"], ["cache", "diff", tmp_path / "empty"]):
        assert "kernels.scale(x f32[8]) on H200, code 0123\n" in run(*command)[1]
    assert "only there: kernels.other on H200, odd\n" in run("cache", "diff", tmp_path / "empty")[1]


@pytest.mark.parametrize(("words", "title"), [((), "quarantune"), (("cache",), "quarantune cache")])
def test_an_unfinished_command_shows_its_commands(words: tuple[str, ...], title: str, run: Run) -> None:
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert err == run("help", *words)[1]
    assert err.startswith(f"usage: {title} ")
    assert "commands:\n  COMMAND\n" in err


def test_help_and_version_are_spelt_in_several_ways(run: Run) -> None:
    assert run("help", "cache", "prune") == run("cache", "prune", "--help")
    assert run("-V") == run("--version")
    assert run("-V")[1].startswith("quarantune ")
    for words in ((), ("tune",), ("check",), ("cache", "list")):
        assert not re.search(r"docs/|\.md\b|README", run(*words, "--help")[1])  # pip does not install documents


def test_terminals_show_colours_and_files_do_not(run: Run, filled: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

    def shown(**environ: str) -> tuple[str, str]:
        with monkeypatch.context() as patched:
            patched.delenv("NO_COLOR", raising=False)
            for name, value in {"TERM": "xterm", **environ}.items():
                patched.setenv(name, value)
            patched.setattr(sys, "stdout", Terminal())
            patched.setattr(sys, "stderr", Terminal())
            assert [main.main(words) for words in (["cache", "list", "kernels.norm"], ["tun"])] == [0, 2]
            return sys.stdout.getvalue(), sys.stderr.getvalue()  # type: ignore[attr-defined]

    out, err = shown()
    assert out.startswith("\x1b[1mkernels.norm on H200\x1b[0m\n")
    assert err.startswith("\x1b[1;31mquarantune\x1b[0m: there is no 'tun'")
    for plain in (shown(NO_COLOR="1"), shown(TERM="dumb"), run("cache", "list", "kernels.norm")[1:]):
        assert "\x1b" not in "".join(plain)


def test_a_report_is_written(run: Run, tmp_path: Path, filled: Store) -> None:
    page = tmp_path / "scale.html"
    code, out, _ = run("report", "kernels.scale", "-o", page, "--device", "H200")
    assert (code, out) == (0, f"2 results with 0 trials written to {page}\n")
    assert page.read_text().startswith("<!doctype html>")
    written = json.loads(run("report", "kernels.scale", "-o", page, "--json")[1])
    about = {"file": str(page), "function": "kernels.scale"}
    assert written == about | {"results": 3, "trials": 0, "states": ["done"] * 3}
    shutil.copytree(filled.directory, tmp_path / "old")
    code, out, _ = run("report", f"{tmp_path}/old/kernels.scale", "kernels.scale", "-o", page, "--device", "H200")
    assert (code, out) == (0, f"4 results with 0 trials written to {page}\n")
    assert page.read_text().count('"when":"before"') == page.read_text().count('"when":"after"') == 2
    code, _, err = run("report", f"{tmp_path}/none/kernels.scale", "kernels.scale", "-o", page)
    assert (code, "none" in err) == (2, True)


def test_a_function_whose_results_were_all_pruned_has_no_report(run: Run, tmp_path: Path, filled: Store) -> None:
    assert run("cache", "prune", "kernels.scale", "--older-than", "1d")[0] == 0
    code, out, err = run("report", "kernels.scale", "-o", tmp_path / "scale.html")
    assert (code, out) == (2, "")
    assert is_one_line_about(err, "no function 'kernels.scale' has results", "`quarantune cache list` shows all"), err


# --- other commands -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands_and_options(shell: str, run: Run, tmp_path: Path) -> None:
    code, script, _ = run("completion", shell)
    assert code == 0
    assert all(word in script for word in ("prune", "max-trials", "doctor"))
    if shell == "zsh":
        assert script.partition("\n")[2] == run("completion", "bash")[1]
        return
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    file = tmp_path / "completion"
    file.write_text(script)
    lines = ["quarantune cache pr", "quarantune tune --max", "quarantune completion fi", "quarantune ch"]
    if shell == "fish":
        asked = "; ".join(f"complete -C '{line}'" for line in lines)
        program = f"function quarantune; end; source {file}; {asked}"
    else:
        complete = 'COMP_WORDS=($line); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _quarantune quarantune "${line##* }" ""'
        asked = "; ".join(f"line='{line}'; {complete}; echo ${{COMPREPLY[@]}}" for line in lines)
        program = f"source {file}; {asked}"
    done = subprocess.run([shell, "-c", program], capture_output=True, text=True, timeout=280, check=True)
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == ["prune", "--max-trials", "fish", "check"]


def test_searches_are_compared_on_recorded_trials(run: Run, tmp_path: Path) -> None:
    journal = Journal(tmp_path, "space", "cpu", "key")
    for n in range(12):
        journal.append({"trial": {"config": {"n": n}, "outcome": "ok", "time_ms": 1.0 + n}})
    command = ["replay", tmp_path / "space.trials", "--search", "random", "--search", "exhaustive", "--seeds", "3"]
    code, out, _ = run(*command)
    assert code == 0
    assert out.startswith("12 configs, 0% of them fail; best 1 ms;")
    document = json.loads(run(*command, "--json")[1])
    assert [[it["evaluations"] for it in runs] for runs in document["searches"].values()][1] == [1, 1, 1]
    assert document["searches"]["random"][0].keys() == {
        *("seed", "evaluations", "best_ms", "trials", "failures", "cpu_ms")
    }


def test_the_doctors_findings_decide_the_exit_code(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from quarantune import doctor

    found = [
        doctor.Check(name="cores", status=doctor.Status.OK, found="2 of 2"),
        doctor.Check(name="cache", status=doctor.Status.WARN, found="slow", remedy="move it"),
    ]

    def fake(*, on_check: Callable[[doctor.Check], None]) -> list[doctor.Check]:
        for check in found:
            on_check(check)
        return found

    monkeypatch.setattr(doctor, "run", fake)
    code, out, _ = run("doctor")
    assert code == 0
    assert out == "ok    cores: 2 of 2\nwarn  cache: slow\n      -> move it\n\ntuning works here\n"
    found.append(doctor.Check(name="devices", status=doctor.Status.FAIL, found="none", remedy="install a plugin"))
    code, out, _ = run("doctor", "--json")
    assert code == 1
    assert json.loads(out)["ok"] is False
    assert json.loads(out)["checks"][2]["remedy"] == "install a plugin"


@pytest.mark.slow
@pytest.mark.usefixtures("two_slots")
def test_calls_are_tuned_ahead_of_time_and_a_program_finds_them(run: Run, kernels: str) -> None:
    file = Path(f"{kernels}.py").absolute()
    Path("shapes.txt").write_text("# x y\nf32[8,128] f32[128]\n\nx=f32[4] y=f32[4] causal=true\n")
    code, out, _ = run("tune", f"{file.name}:scale", "--shapes", "shapes.txt")
    assert code == 0
    assert [line.partition(": block=")[0] for line in out.splitlines()] == [
        f"{kernels}.scale(x f32[8,128], y f32[128])",
        f"{kernels}.scale(x f32[4], y f32[4], causal true)",
    ]
    assert python(file, JAX_PLATFORMS="cpu").startswith("{'block': ")

    code, out, _ = run("tune", f"{kernels}:scale", "--args", "f32[8,128] f32[128]", "--json")
    [known] = json.loads(out)
    assert known["from_cache"] is True
    code, out, _ = run("tune", f"{kernels}:scale", "--args", "f32[8,128] f32[128]", "--again", "--json")
    [again] = json.loads(out)
    assert (code, again["from_cache"], sum(again["outcomes"].values())) == (0, False, 2)
    assert again.keys() == known.keys()
    assert again["key"] == known["key"]

    code, out, err = run("tune", f"{kernels}:scale", "--inputs", f"{kernels}:inputs", "--max-trials", "1", "--json")
    assert code == 0
    assert [it["call"] for it in json.loads(out)] == ["x f32[8,8], y f32[8]", "x f32[4,8], y f32[8], causal true"]
    assert "made by hand" in err

    code, out, _ = run("tune", f"{kernels}:broken", "--args", "f32[8]")
    assert code == 1
    assert "RuntimeError: no 1" in out
    [failed] = json.loads(run("tune", f"{kernels}:broken", "--args", "f32[8]", "--json")[1])
    assert failed["config"] is None
    assert "All 2 configs failed" in failed["error"]

    assert re.search(r"\n4 results looked at: \d \w+", run("cache", "verify", f"{file.name}:scale")[1])
    code, out, _ = run("cache", "verify", f"{file.name}:scale", "--json")
    assert code in (0, 1)  # two configs do the same, so that either may be faster now
    assert {it["function"] for it in json.loads(out)["entries"]} == {f"{kernels}.scale"}
    assert all(it.keys() >= {"function", "device", "key", "verdict"} for it in json.loads(out)["entries"])


@pytest.mark.slow
@pytest.mark.usefixtures("two_slots")
def test_tuners_and_kernel_functions_are_tuned_by_name(run: Run, kernels: str) -> None:
    with Path(f"{kernels}.py").open("a") as file:
        file.write(OTHERS)
    code, out, _ = run("tune", f"{kernels}:layer", "--args", "f32[8] f32[8]", "--json")
    [new] = json.loads(out)
    assert (code, new["from_cache"], new["config"].keys()) == (0, False, {"scale"})
    code, out, _ = run("tune", f"{kernels}:layer", "--args", "f32[8] f32[8]")
    assert code == 0
    assert f": scale: block={new['config']['scale']['block']}, " in out
    assert "from the cache" in out
    assert f"  scale: block={new['config']['scale']['block']}  " in run("cache", "list")[1]
    code, out, _ = run("tune", f"{kernels}:tuner", "--args", "f32[8]")
    assert code == 0
    assert re.search(r"times_two\(x f32\[8\]\): n=[12], ", out)
    assert run("check", f"{kernels}:tuner", "--target", "cpu", "--args", "f32[8]")[0] == 2


def test_a_ray_without_its_client_names_the_extra(run: Run, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray refuses its client's addresses with a `ValueError` if gRPC is missing."""

    def refuse(address: str, **_: Any) -> None:
        raise ValueError("Ray Client requires pip package `ray[client]`.")

    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(init=refuse))
    code, _, err = run("tune", f"{kernels}:scale", "--args", "f32[8] f32[8]", "--executor", "ray://head:10001")
    assert code == 2
    assert is_one_line_about(err, "--executor ray://head:10001 needs Ray's client: pip install 'quarantune[ray]'"), err


@pytest.mark.engines
@pytest.mark.slow
@pytest.mark.clients
@pytest.mark.filterwarnings("ignore")  # warnings of other libraries
def test_calls_are_tuned_on_a_cluster_and_saved_here(run: Run, kernels: str) -> None:
    distributed = pytest.importorskip("distributed")
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    Path("shapes.txt").write_text("f32[8] f32[8]\nf32[4] f32[4]\n")
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        address = cluster.scheduler_address.replace("tcp://", "dask://")
        command = ["tune", f"{kernels}:scale", "--shapes", "shapes.txt", "--executor", address, "--json"]
        code, out, err = run(*command)
        assert code == 0, err
        assert [(it["from_cache"], sum(it["outcomes"].values())) for it in json.loads(out)] == [(False, 2)] * 2
        assert [it["from_cache"] for it in json.loads(run(*command)[1])] == [True, True]
        failing = ["tune", f"{kernels}:broken", "--args", "f32[8]", "--executor", address]
        code, out, _ = run(*failing)
        assert (code, "RuntimeError: no 1" in out) == (1, True)
    assert len(TuningCache()) == 2


@pytest.mark.long
@pytest.mark.slow
def test_configs_are_checked_for_a_target(run: Run, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = run("check", f"{kernels}:scale", "--target", "cpu", "--args", "f32[8] f32[8]", "--json")
    [report] = json.loads(out)
    assert (code, report["ok"], report["outcomes"]) == (0, True, {"ok": 2})
    assert report["trials"][0]["figures"]["argument_bytes"] == 64
    code, out, _ = run("check", f"{kernels}:broken", "--target", "cpu", "--args", "f32[8]", "--all")
    assert code == 1
    assert "RuntimeError: no 1" in out
    assert not out.endswith("\n\n")
    monkeypatch.setenv("QUARANTUNE_PROGRESS", "1")
    _, out, err = run("check", f"{kernels}:scale", "--target", "cpu", "--args", "f32[8] f32[8]")
    assert ("2 of 2 known from earlier checks" in out, err) == (True, "")


@pytest.mark.usefixtures("cpu_only")
def test_targets_are_listed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = run("targets", "--json")
    listed = {it["name"]: it for it in json.loads(out)}
    assert code == 0
    assert listed["cpu"]["is_here"]
    assert listed["TPU v5e"]["platform"] == "tpu"
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("quarantune.devices.targets.has_plugin", lambda platform: platform == "cpu")
    lines = run("targets")[1].splitlines()
    assert lines[1].split() == ["cpu", "yes", "this", "machine"]
    assert max(map(len, lines)) <= 80
    assert "to compile for TPU v4, TPU v5e, TPU v5p, TPU v6e or TPU 7x:" in lines
    assert "  pip install 'quarantune[tpu]'" in lines


@pytest.mark.slow
def test_a_fresh_machine_needs_nothing_but_the_package(tmp_path: Path) -> None:
    environ: dict[str, str | None] = {name: None for name in os.environ if name.startswith(("QUARANTUNE", "XDG"))}
    environ |= {"HOME": str(tmp_path / "home"), "JAX_PLATFORMS": "cpu"}
    (tmp_path / "home").mkdir()
    (tmp_path / "fresh_kernels.py").write_text(KERNELS)

    def quarantune(*words: str) -> str:
        return python("-m", "quarantune", *words, cwd=tmp_path, **environ)

    assert quarantune("cache", "path") == f"{tmp_path / 'home' / '.cache' / 'quarantune'}\n"
    assert "block=" in quarantune("tune", "fresh_kernels:scale", "--args", "f32[8,128] f32[128]")
    assert quarantune("cache", "list").startswith("fresh_kernels.scale on ")


# --- speed --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("filled")
def test_commands_that_need_no_jax_do_not_import_it(tmp_path: Path) -> None:
    script = (
        "import sys; from quarantune.cli.entry_point import main; "
        "codes = [main(words.split()) for words in sys.argv[1:]]; print(codes, 'jax' in sys.modules)"
    )
    commands = ["cache list", "cache show", "cache verify", "cache prune", f"cache export {tmp_path / 'out'}"]
    commands += [f"cache diff {tmp_path / 'out'}", f"cache merge {tmp_path / 'out'}", "completion bash", "--help"]
    commands += ["tune kernels:scale --args f32[8"]
    assert python("-c", script, *commands).splitlines()[-1] == "[0, 0, 0, 0, 0, 0, 0, 0, 0, 2] False"


@pytest.mark.slow
def test_the_program_starts_in_time_and_lists_10_000_results(cache_dir: Path, tmp_path: Path) -> None:
    cache_dir.mkdir()
    for number in range(100):
        entries = {f'{{"call":{{}},"code":"{key}"}}': entry(key, key) for key in range(100)}
        (cache_dir / f"kernels.f{number:02}.json").write_bytes(encode({"NVIDIA H200": entries}))

    def cpu_s(*words: str) -> float:
        with (tmp_path / "out").open("w+") as out:
            process = subprocess.Popen([sys.executable, "-m", "quarantune", *words], env=child_environ(), stdout=out)
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        return used.ru_utime + used.ru_stime

    # The aims are 0.15 and 0.5 s. The test allows four times as long, because test machines are slow and shared: one
    # machine took 0.43 s for the same listing on one day, and 0.83 to 1.5 s on another.
    assert best_of(lambda: cpu_s("cache", "path"), limit=4 * 0.15) <= 4 * 0.15
    assert best_of(lambda: cpu_s("cache", "list"), limit=4 * 0.5) <= 4 * 0.5
    assert (tmp_path / "out").read_text().count("x bf16[") == 10_000
