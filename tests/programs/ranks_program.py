"""One rank of a `jax.distributed` program, with its own cache; `test_rank_programs.py` starts four.

Prints the config that this rank runs with in each case. The ranks pass files to each other to bring the cases about;
the files do not affect the results.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

import quarantune
from quarantune.answers.layers import open_store
from quarantune.calls.call import space_of
from quarantune.calls.key import keyed
from quarantune.devices import discovery
from quarantune.functions.versions import versions
from quarantune.values import blocks

RANKS = 4
CONFIGS = [{"n": 1}, {"n": 2}, {"n": 3}]
X = np.zeros(2, np.float32)
results: dict[str, Any] = {}


def post(name: str) -> bool:
    """Leaves a note for the other ranks; returns whether it is the first of its name."""
    try:
        (SHARED / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def await_notes(*names: str) -> None:
    while not all((SHARED / name).exists() for name in names):
        time.sleep(0.01)


def kernel(name: str, **options: Any) -> Any:
    @quarantune.autotune(CONFIGS, name=name, warmup=0, rep=1, ref_fn=None, **options)
    @functools.partial(jax.jit, static_argnames=["n"])
    def add(x: jax.Array, n: int = 0) -> jax.Array:
        return x + n

    return add


def warm(function: Any, config: dict[str, Any], *args: Any) -> None:
    """Puts a config into this rank's cache, as an earlier program of this rank would have."""
    described = keyed(function._tuner.bind(args, {}))
    entry = {
        "config": config,
        "time_ms": 1.0,
        "key_values": described.readable,
        "space": space_of(described.call.configs),
        "versions": versions(),
    }
    open_store(blocks.current()).put(described.call.name, described.id.device, described.id.key, entry)


def used(function: Any) -> int:
    """Calls a kernel, and returns the config that it ran with; 0 stands for its defaults."""
    return int(function(X)[0])


def case(function: Callable[[], None]) -> Callable[[], None]:
    cases[function.__name__] = function
    return function


cases: dict[str, Callable[[], None]] = {}


@case
def one_is_warm() -> None:
    f = kernel("one_is_warm")
    if RANK == 2:
        warm(f, {"n": 2}, X)
    else:
        await_notes("warm one")  # a rank that looks earlier would rightly tune
    results["one_is_warm"] = [used(f), f.lookup(X)["n"]]
    if RANK == 2:
        post("warm one")


@case
def all_differ() -> None:
    f = kernel("all_differ")
    warm(f, {"n": 1 + RANK % 3}, X)
    results["all_differ"] = int(jax.jit(lambda x: f(x) * 1.0)(X)[0])  # decided while JAX traces
    results["all_differ again"] = used(f)
    with quarantune.settings(agree=False):
        results["own"] = kernel("all_differ").lookup(X)["n"]


@case
def all_are_cold() -> None:
    results["all_are_cold"] = used(kernel("all_are_cold"))


@case
def one_is_late() -> None:
    if RANK == 3:
        await_notes(*(f"late {rank}" for rank in range(3)))
        time.sleep(LATE_S)
    tuner = quarantune.AutoTuner(lambda x, n: x + n, CONFIGS, name="one_is_late", warmup=0, rep=1, ref_fn=None)
    results["one_is_late"] = tuner.run(X).best_config["n"]
    post(f"late {RANK}")


@case
def the_tuner_fails() -> None:
    # If no config may run, the tuner fails as if every config had failed.
    # All ranks have the same rule, code and values, because it is part of the key.
    f = kernel("the_tuner_fails", prune_fn=lambda config, x: "FIRST_TO_FAIL" not in os.environ)
    if post("fails"):
        os.environ["FIRST_TO_FAIL"] = "1"
    results["the_tuner_fails"] = used(f)


@case
def the_tuner_raises() -> None:
    def prune(config: Any, x: Any) -> bool:
        if post("raises"):
            raise LookupError("not about the configs")
        return True

    f = kernel("the_tuner_raises", prune_fn=prune)
    with contextlib.suppress(LookupError):
        used(f)
    results["the_tuner_raises"] = used(f)


@case
def all_fail() -> None:
    f = kernel("all_fail", prune_fn=lambda config, x: False)
    results["all_fail"] = [used(f), used(f)]
    try:
        quarantune.AutoTuner(lambda x, n: x + n, CONFIGS, name="all_fail too", prune_fn=lambda *_: False).run(X)
    except quarantune.TuningFailedError:
        results["all_fail error"] = "TuningFailedError"


@case
def the_tuner_is_slow() -> None:
    def prune(config: Any, x: Any) -> bool:
        if post("slow tuner"):
            await_notes(*(f"slow {rank}" for rank in range(1, RANKS)))
        return True

    f = kernel("the_tuner_is_slow", prune_fn=prune)
    if RANK == 0:
        results["the_tuner_is_slow"] = used(f)
        with quarantune.settings(agree=False):
            results["the_tuner_is_slow saved"] = kernel("the_tuner_is_slow", prune_fn=prune).lookup(X) in CONFIGS
    else:
        await_notes("slow tuner")
        with quarantune.settings(timeout=0.05, compile_timeout=0.1):  # its deadline is below 3 s
            results["the_tuner_is_slow"] = used(f)
        post(f"slow {RANK}")


@case
def only_some_ranks_call() -> None:
    if RANK in (0, 2):
        results["only_some_ranks_call"] = used(kernel("only_some_ranks_call"))


@case
def interrupted_while_waiting() -> None:
    def prune(config: Any, x: Any) -> bool:
        post("busy tuner")
        await_notes("interrupted")  # for ever, if Ctrl-C does not end the wait of rank 1
        return True

    f = kernel("interrupted_while_waiting", prune_fn=prune)
    if RANK != 0:
        await_notes("busy tuner")
    if RANK == 1:
        with interrupted_on("waits for rank 0"), contextlib.suppress(KeyboardInterrupt):
            used(f)
            results["interrupted_while_waiting"] = "not interrupted"
        post("interrupted")
    results.setdefault("interrupted_while_waiting", used(f))


@contextlib.contextmanager
def interrupted_on(text: str) -> Iterator[None]:
    """Sends this process SIGINT once it has logged a text, as Ctrl-C does."""

    class Trigger(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if text in record.getMessage():
                logging.getLogger("quarantune").removeHandler(self)
                threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()

    logging.getLogger("quarantune").addHandler(Trigger())
    yield


@case
def one_tunes_explicitly() -> None:
    f = kernel("one_tunes_explicitly")
    if RANK == 1:
        f.tune(X)
        post("tuned")
    await_notes("tuned")
    results["one_tunes_explicitly"] = used(f)


@case
def nobody_may_tune() -> None:
    f = kernel("nobody_may_tune")
    with quarantune.settings(on_miss="error"):
        try:
            results["nobody_may_tune"] = used(f)
        except quarantune.CacheMissError:
            results["nobody_may_tune"] = "CacheMissError"


@case
def kinds_differ() -> None:
    real = discovery.platform_and_kind
    if RANK == 3:
        discovery.platform_and_kind = lambda hint: ("cpu", "another kind")
    f = kernel("kinds_differ")
    warm(f, {"n": 1 + RANK % 2}, X)
    results["kinds_differ"] = used(f)
    discovery.platform_and_kind = real


@case
def contextual() -> None:
    inner = kernel("inner")

    @quarantune.contextual_autotune(name="contextual", ref_fn=None, rep=1)
    def outer(x: Any) -> Any:
        return inner(x) * 1.0

    results["contextual"] = int(outer(X)[0])


@case
def collectives_depend_on_it() -> None:
    """Each config runs a different number of collectives, so ranks with different configs wait for ever."""

    @functools.partial(jax.jit, static_argnames=["n"])
    def spread(x: jax.Array, n: int = 0) -> jax.Array:
        total = x
        for _ in range(n):
            total = total + total.sum()
        return 0 * total + n

    mesh = jax.make_mesh((jax.device_count(),), ("ranks",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("ranks"))
    x = jax.make_array_from_callback((16,), sharding, lambda index: np.ones(16, np.float32)[index])

    def kernel(name: str) -> Any:
        return quarantune.autotune(CONFIGS, name=name, warmup=0, rep=1, ref_fn=None)(spread)

    eager, traced, cold = kernel("eager"), kernel("traced"), kernel("cold")
    warm(eager, {"n": 1 + RANK % 3}, x)
    jax.jit(lambda x: warm(traced, {"n": 1 + RANK % 3}, x)).trace(x)
    outputs = [eager(x), jax.jit(lambda x: traced(x) + 0)(x), cold(x)]
    results["collectives_depend_on_it"] = [int(output.addressable_shards[0].data[0]) for output in outputs]


@case
def without_workers() -> None:
    """One rank alone cannot run a program over the devices of all."""

    @functools.partial(jax.jit, static_argnames=["n"])
    def spread(x: jax.Array, n: int = 0) -> jax.Array:
        return x.sum() + n

    mesh = jax.make_mesh((jax.device_count(),), ("ranks",), axis_types=(jax.sharding.AxisType.Explicit,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("ranks"))
    x = jax.make_array_from_callback((16,), sharding, lambda index: np.ones(16, np.float32)[index])
    f = quarantune.autotune(CONFIGS, name="without_workers", warmup=0, rep=1, ref_fn=None)(spread)
    with quarantune.settings(isolation="none"):
        try:
            jax.jit(lambda x: f(x) + 0)(x)
        except ValueError as error:
            results["without_workers"] = str(error).partition(",")[0]


@case
def executables_run_here() -> None:
    """A worker numbers its devices from 0; here rank 0 has these numbers."""
    if RANK == 2:

        @functools.partial(jax.jit, static_argnames=["n"])
        def add(x: jax.Array, n: int = 0) -> jax.Array:
            return x + n

        compiled = quarantune.compile_configs(add, CONFIGS[:2], X)
        results["executables_run_here"] = [int(f(X)[0]) for f in compiled]


def coordinator_dies() -> None:
    """Rank 0 has the store; it dies while the others wait for it to tune."""

    def prune(config: Any, x: Any) -> bool:
        if RANK == 0:
            post("claimed")
            await_notes(*(f"waiting {rank}" for rank in range(1, RANKS)))
            os.kill(os.getpid(), signal.SIGKILL)
        return True

    f = kernel("coordinator_dies", prune_fn=prune)
    if RANK != 0:
        await_notes("claimed")
        logging.getLogger("quarantune").addHandler(Posting(f"waiting {RANK}"))
    used(f)


def coordinator_dies_while_another_tunes() -> None:
    """Rank 0 has the store; it dies once rank 1, which tunes, has kept a trial and measures another config."""
    kept, hanging = SHARED / "kept one", SHARED / "hanging"

    def add(x: Any, n: int) -> Any:
        while kept.exists():
            hanging.touch()
            time.sleep(0.1)
        return x + n

    tuner = quarantune.AutoTuner(
        add, CONFIGS, name="left_alone", warmup=0, rep=1, ref_fn=None, prune_fn=lambda *_: post("claimed") or True
    )
    if RANK == 1:
        logging.getLogger("quarantune").addHandler(Posting("kept one", containing=": ok "))
        tuner.run(X)
    await_notes("claimed")
    if RANK == 0:
        await_notes("hanging")
        os.kill(os.getpid(), signal.SIGKILL)
    tuner.run(X)


class Posting(logging.Handler):
    """Posts a note with the first record that contains a text."""

    def __init__(self, note: str, *, containing: str = "") -> None:
        super().__init__()
        self.note = note
        self.containing = containing

    def emit(self, record: logging.LogRecord) -> None:
        if self.containing in record.getMessage():
            post(self.note)


if __name__ == "__main__":
    RANK, SHARED = int(sys.argv[1]), Path(sys.argv[3])
    LATE_S = float(os.environ.get("LATE_S", "0"))
    faulthandler.dump_traceback_later(float(os.environ.get("HUNG_S", "100")), exit=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in background jobs
    logging.basicConfig(filename=SHARED / f"log {RANK}", level=logging.INFO, format="%(message)s")
    jax.distributed.initialize(
        f"localhost:{sys.argv[2]}", num_processes=RANKS, process_id=RANK, initialization_timeout=60
    )
    jax.devices()  # JAX waits here for all ranks
    for name in sys.argv[4:] or cases:
        (cases.get(name) or globals()[name])()
    (SHARED / f"results {RANK}").write_text(json.dumps(results))
    post(f"done {RANK}")
    await_notes(*(f"done {rank}" for rank in range(RANKS)))  # rank 0 has the store
