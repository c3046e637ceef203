"""Runs the call that a row of `crossings.py` describes, and asserts what always holds; this file contains no test.

Two processes with two devices each run all rows: the first tunes, and the second uses what the first has saved.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import aftermath
import agreeing
import jax
import jax.numpy as jnp
import numpy as np
from crossed_functions import NAME, PACKAGE, Made, Row, is_plain, listed, make
from jax import export
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import quarantune
from quarantune.answers import ranks, recording
from quarantune.cli.entry_point import main
from quarantune.jax_internals import jax_backends
from quarantune.values.codec import text_of

IN_TRACE = ("nested", "grad", "vmap", "scan", "shard_map", "export")
TOLD = (
    "in this process",
    "not tuned for this call, running with its defaults",
    "nothing is cached for",
    "no rule answers",
    "without its compiler_options inside a trace",
    "its defaults run inside a trace",
    "donated buffers were not usable",
    "shapes are symbolic",
    "did not compile",
    "does not use the nearest entry",
)
"""Parts of the warnings that rows may emit."""


# --- arguments, and the code around a call -----------------------------------------------------------------------


@functools.cache
def mesh() -> Mesh:
    return jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))


def argument(row: Row, times: int = 1) -> Any:
    """Returns a new array, which the call may donate; `times` makes it longer."""
    *outer, last = {"vmap": (2, 16), "scan": (2, 16), "shard_map": (32,), "export": (2, 16)}.get(row["kind"], (16,))
    shape = (*outer, times * last)
    x = np.linspace(-1, 1, num=int(np.prod(shape)), dtype=np.float32).reshape(shape)
    if is_plain(row):
        return x
    return jax.device_put(x, NamedSharding(mesh(), P("d"))) if row["devices"] == "two" else jnp.asarray(x)


def surrounded(row: Row, body: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a function of an array that runs `body` in the code that the row demands."""

    def exported(x: Any) -> Any:
        struct = jax.ShapeDtypeStruct(export.symbolic_shape(f"b, {x.shape[-1]}"), x.dtype)
        return export.export(jax.jit(body))(struct).call(x)

    match row["kind"]:
        case "nested":
            return jax.jit(body)
        case "grad":
            return jax.grad(lambda x: body(x).sum())
        case "vmap":
            return jax.vmap(body)
        case "scan":
            return lambda xs: jax.lax.scan(lambda carry, x: (carry, body(x)), 0.0, xs)[1]
        case "shard_map":
            return jax.shard_map(body, mesh=mesh(), in_specs=P("d"), out_specs=P("d"))
        case "export":
            return exported
    return body


# --- settings ------------------------------------------------------------------------------------------------------


class Client:
    """The key-value store of a program of two ranks, of which the other never calls."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def key_value_try_get(self, key: str) -> str:
        if key not in self._texts:
            raise KeyError("NOT_FOUND")
        return self._texts[key]

    def key_value_set(self, key: str, value: str, *, allow_overwrite: bool) -> None:
        if key in self._texts and not allow_overwrite:
            raise KeyError("ALREADY_EXISTS")
        self._texts[key] = value

    def key_value_dir_get(self, directory: str) -> list[tuple[str, str]]:
        return [item for item in self._texts.items() if item[0].startswith(directory)]


@contextlib.contextmanager
def under(row: Row, place: Path) -> Iterator[None]:
    """Applies the settings of a row that concern the first process only."""
    chosen: dict[str, Any] = {"isolation": row["isolation"], "on_miss": row["on_miss"]}
    if row["always_tune"] == "1":
        chosen["always_tune"] = True
    if row["record"] == "yes":
        chosen["record"] = place / "noted"
    if row["scopes"] == "0":
        chosen["profile_scopes"] = False
    with contextlib.ExitStack() as stack:
        if row["executor"] == "threads":
            chosen["executor"] = stack.enter_context(ThreadPoolExecutor(1))
        if row["ranks"] == "two":
            two = jax_backends.Coordination(client=Client(), rank=0, ranks=2)
            stack.enter_context(mock.patch.object(jax_backends, "coordination", return_value=two))
            stack.enter_context(mock.patch.object(ranks, "GRACE_S", 0.01))
        stack.enter_context(quarantune.settings(**chosen))
        yield


@contextlib.contextmanager
def around(row: Row, place: Path) -> Iterator[None]:
    """Applies what holds in both processes: the cache, the layers of results, and JAX's settings."""
    (place / PACKAGE / "tables").mkdir(parents=True, exist_ok=True)
    (place / PACKAGE / "__init__.py").touch()
    chosen: dict[str, Any] = {"cache_dir": place / "cache", "progress": False, "num_workers": 2}
    if row["source"] == "layer":
        (place / "layer").mkdir(exist_ok=True)
        chosen["cache_path"] = place / "layer"
    states: dict[str, Callable[[], Any]] = {
        "x64": lambda: jax.enable_x64(True),
        "precision": lambda: jax.default_matmul_precision("float32"),
        "no_jit": jax.disable_jit,
        "second_device": lambda: jax.default_device(jax.devices()[1]),
    }
    state = states.get(row["jax"], contextlib.nullcontext)
    sys.path.insert(0, str(place))
    try:
        with quarantune.settings(**chosen), state(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        sys.path.remove(str(place))
        sys.modules.pop(PACKAGE, None)
        sys.path_importer_cache.clear()
    told = [f"{it.category.__name__}: {it.message}" for it in caught]
    assert not (odd := [it for it in told if not any(part in it for part in TOLD)]), odd


def prepare(row: Row, place: Path) -> None:
    """Leaves the results that the source of the row stands for, found by sweeps in this process."""
    source = row["source"]
    if source == "nothing":
        return
    is_tuner = source != "rule" and (row["ask"] == "run" or row["kind"] == "plain")  # which has no `fit`
    ask = row["ask"] if is_tuner or row["ask"] == "contextual" else "call"
    search = "auto" if row["search"] == "object" else row["search"]
    here = {**row, "ask": ask, "search": search, "kind": "jitted" if row["kind"] == "export" else row["kind"]}
    made = make(here)
    cache = place / ("layer" if source in ("layer", "table") else "cache")
    with quarantune.settings(cache_dir=cache, isolation="none"):
        if source == "rule":
            made.kernel.fit([made.args(argument(here, times)) for times in (1, 2, 4)])
        else:
            with contextlib.suppress(quarantune.TuningFailedError):
                surrounded(here, lambda x: call(here, made, x))(argument(here, 2 if source == "near" else 1))
    if source == "table" and any(cache.glob("*.json")):
        quarantune.TuningCache(cache).export(place / PACKAGE / "tables")
    for file in cache.glob("*.json") if source in ("estimate", "journal") else ():
        if source == "journal":
            file.unlink()
        else:
            file.write_text(json.dumps(_estimated(json.loads(file.read_text()))))


def _estimated(contents: Any) -> Any:
    """Returns the contents of a cache file with estimates in the place of measured results."""
    for entry in itertools.chain.from_iterable(entries.values() for entries in contents.values()):
        entry |= {"time_ms": None, "estimated_ms": 1.0, "default_time_ms": None, "speedup_interval": None}
        entry["search"] |= {"stopped": "estimated", "name": "estimated"}
    return contents


# --- one row -------------------------------------------------------------------------------------------------------


def call(row: Row, made: Made, x: Any) -> Any:
    """Calls the tuned function as the row demands."""
    if isinstance(made.tuned, quarantune.AutoTuner):
        return made.tuned.run(*made.args(x)).fn(*made.args(x))
    if made.owner and row["ask"] != "contextual":
        return made.owner[0].apply(x)
    return made.tuned(*made.args(x))


def asked(row: Row, made: Made, x: Any, results: list[Any]) -> Any:
    """Asks as the row demands, then calls."""
    fn, args = made.tuned, made.args(x)
    configs = listed(row) if row["space"] == "over300" else made.configs
    match row["ask"]:
        case "tune" if results:
            pass  # a scan without jit runs its body for each step, and a user's search can be asked once
        case "tune":
            results.append(made.owner[0].apply.tune(x) if made.owner else fn.tune(*args))
        case "lookup":
            _ = made.owner[0].apply.lookup(x) if made.owner else fn.lookup(*args)
        case "tune_many":
            results += quarantune.tune_many([(fn, args)])
        case "tune_for":
            is_wide = row["key_fn"] == "yes" and row["kind"] not in IN_TRACE
            results.append(fn.tune_for([args, made.args(argument(row, 2)) if is_wide else args], [1, 3]))
        case "compile_check":
            assert quarantune.compile_check(fn, configs, *args, target="cpu").table()
        case "compile_configs":
            for compiled in quarantune.compile_configs(fn, configs, *args):
                if compiled is not None and row["kind"] not in IN_TRACE:
                    ours, theirs = (each(*made.args(argument(row))) for each in (compiled, made.untuned))
                    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    return call(row, made, x)


def first(row: Row, place: Path) -> None:
    """Runs a row, asserts what always holds, and writes the outcome for the test and for the second process."""
    outcome: dict[str, Any]
    with around(row, place):
        try:
            prepare(row, place)
            outcome = _run(row, place)
        except AssertionError:
            raise
        except Exception as error:
            outcome = _told_error(row, error.exceptions[0] if isinstance(error, ExceptionGroup) else error)
            if "refused" in outcome and row["source"] == "nothing" and row["ask"] not in ("verify", "recorded"):
                ran = [*place.glob("cache/*/*.jsonl"), *place.glob("cache/*/*.sweep")]
                assert not ran, f"a sweep began before {outcome['refused']}"
    assert aftermath.eventually(lambda: not aftermath.strays()), aftermath.strays()
    assert aftermath.eventually(lambda: not _shared_memory()), _shared_memory()
    (place / "outcome.json").write_text(json.dumps(outcome))


def _shared_memory() -> list[str]:
    """Returns this process's names in the machine's shared memory."""
    return [name for name in aftermath.shared_memory() if name.startswith(f"quarantune-{os.getpid()}-")]


def _told_error(row: Row, error: Exception) -> dict[str, str]:
    """Returns the outcome of a row that raised."""
    has_tuner = row["ask"] == "run" or is_plain(row)  # which runs defaults only if a miss allows them
    may_miss = row["on_miss"] == "error" or row["ask"] == "tune_many" or has_tuner
    if isinstance(error, quarantune.CacheMissError) and may_miss:
        return {"missed": str(error)}
    tunes = row["on_miss"] == "tune" or row["ask"] not in ("call", "lookup", "run", "tune_many", "contextual")
    has_failed = isinstance(error, quarantune.TuningFailedError) or "configs failed for" in str(error)
    if has_failed and row["source"] == "failure" and tunes:
        return {"failed": str(error)}
    return {"refused": f"{type(error).__name__}: {error}", "trace": "".join(traceback.format_exception(error))}


def _run(row: Row, place: Path) -> dict[str, Any]:
    made, results = make(row), list[Any]()
    expected = surrounded(row, lambda x: made.untuned(*made.args(x)))(argument(row))
    if row["ask"] == "recorded":
        _tune_recorded(row, made, place)
        made = make(row)
    with under(row, place):
        output = surrounded(row, lambda x: asked(row, made, x, results))(argument(row))
    np.testing.assert_allclose(output, expected, rtol=1e-5)
    if row["ask"] == "verify":
        _verify(row, made, place)
    found = looked_up(row)
    if found is not None and row["kind"] not in IN_TRACE:
        again = make(row)
        with quarantune.settings(on_miss="error"):
            results += quarantune.tune_many([(again.tuned, again.args(argument(row)))])
    for result in results:
        _show(result, place)
    _list(place)
    return {"config": found}


def looked_up(row: Row) -> str | None:
    """Returns the config that new objects find for the call of a row, in the code around it, as text."""
    made, found = make(row), list[Any]()

    def body(x: Any) -> Any:
        tuned, args = made.tuned, made.args(x)
        is_tuner = isinstance(tuned, quarantune.AutoTuner)
        found.append(tuned._tuner.lookup(tuned._tuner.bind(args, {})) if is_tuner else tuned.lookup(*args))
        return made.untuned(*args)

    surrounded(row, body)(argument(row))
    config = found[0]
    if config is None or row["ask"] != "contextual":
        return None if config is None else text_of(config)
    return json.dumps([[*slot, text_of(each)] for slot, each in config.items()])


def _tune_recorded(row: Row, made: Made, place: Path) -> None:
    """Records the call of a row, and tunes it by the command."""
    with quarantune.settings(isolation=row["isolation"]):
        with quarantune.settings(record=place / "recorded"):
            surrounded(row, lambda x: call(row, made, x))(argument(row))
        recording._flush()
        recording._writers.clear()
        if not (place / "recorded").exists():
            return  # the call has a result, or symbolic shapes, which cannot be tuned
        code, text = command("tune", "--recorded", place / "recorded")
    if code:
        raise LookupError(text)


def _verify(row: Row, made: Made, place: Path) -> None:
    with quarantune.settings(isolation=row["isolation"]):
        report = quarantune.TuningCache(place / "cache").verify(made.kernel)
    for entry in report.entries:
        if entry.key.kernel_type == NAME and entry.verdict not in ("current", "unclear", "stale"):
            raise LookupError(str(entry))


def _show(result: Any, place: Path) -> None:
    """Asserts that a result can be shown in every form."""
    agreeing.check_any(result, place, is_real=True)
    assert result.table()
    assert result.to_dicts() is not None
    result.report(place / "result.html")
    assert (place / "result.html").stat().st_size > 1000


def _list(place: Path) -> None:
    """Asserts that every command can read the cache."""
    here = ("--cache-dir", place / "cache")
    names = {file.name.partition(".")[0] for file in (place / "cache").glob("*.json")}
    printed = {
        words: command(*words.split(), *here)
        for words in ("cache list", "cache list --json", "cache show", "cache verify")
    }
    printed |= {f"report {name}": command("report", name, "-o", place / "of_cache.html", *here) for name in names}
    assert not [it for it in printed.items() if it[1][0]], printed
    assert {it["function"] for it in json.loads(printed["cache list --json"][1])} == names


def command(*words: object) -> tuple[int, str]:
    """Runs the command line in this process; returns its exit code, and everything that it prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = main([*map(str, words)])
    return code, out.getvalue()


def second(row: Row, place: Path) -> None:
    """Asserts that another process gets the same config from the cache, and computes the same with it."""
    wanted = json.loads((place / "outcome.json").read_text())["config"]
    with around(row, place), quarantune.settings(on_miss="error", isolation="none"):
        assert (found := looked_up(row)) == wanted, (found, wanted)
        made = make(row)
        expected = surrounded(row, lambda x: made.untuned(*made.args(x)))(argument(row))
        output = surrounded(row, lambda x: call(row, made, x))(argument(row))
        np.testing.assert_allclose(output, expected, rtol=1e-5)
