"""One rank of a program whose ranks share a sweep; `test_shared_ranks.py` starts several, on hosts that it makes up.

    shared_ranks_program.py RANK RANKS PORT DIRECTORY CONFIGS MILLISECONDS

The configs wait for that long, or multiply matrices on a GPU if it is 0. Writes the config that this rank runs with and
the seconds that it took, then waits until the test ends the program: rank 0 has the store.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import quarantune
from quarantune.host.process import in_sandbox


def main() -> None:
    rank, ranks, port, configs, run_ms = (int(sys.argv[place]) for place in (1, 2, 3, 5, 6))
    directory = Path(sys.argv[4])
    logging.basicConfig(filename=directory / f"log {rank}", level=logging.INFO, format="%(message)s")
    jax.distributed.initialize(
        f"localhost:{port}",
        num_processes=ranks,
        process_id=rank,
        initialization_timeout=120,
        heartbeat_timeout_seconds=3600,  # a killed rank must not end the others during the test
    )
    best, shorter = configs // 2 + 3, float(os.environ.get("SHORTER", "0.6"))

    def wait(x: Any, n: int) -> Any:
        assert in_sandbox()
        time.sleep((shorter if n == best else 1.0) * run_ms / 1e3)
        return x

    @functools.partial(jax.jit, static_argnames=["n"])
    def multiply(x: jax.Array, n: int = 0) -> jax.Array:
        blocks = x.reshape(2 ** (n % 6), -1, x.shape[1])  # one program for each number of blocks and of their parts
        parts = x.reshape(x.shape[0], 2 ** (n // 6), -1)
        return jax.lax.map(lambda block: jnp.einsum("mk,kpn->mpn", block, parts), blocks).reshape(x.shape)

    fn, x = (wait, 1) if run_ms else (multiply, jnp.ones((8192, 8192), jnp.bfloat16))
    tuner = quarantune.AutoTuner(fn, {"n": range(configs)}, name="wait", ref_fn=None)
    if "IS_WARM" in os.environ:  # an earlier sweep has started the template
        with quarantune.settings(agree=0, disable_cache=True):
            quarantune.AutoTuner(fn, {"n": range(2)}, name="first", ref_fn=None).run(x)
    (directory / f"begun {rank}").touch()
    for name in ("all", str(rank)):  # the test decides when a rank calls
        while not (directory / f"go {name}").exists():
            time.sleep(0.01)
    began = time.monotonic()
    n = tuner.run(x).best_config["n"]
    draft = directory / f"draft {rank}"
    draft.write_text(json.dumps({"n": n, "best": best, "seconds": time.monotonic() - began}))
    draft.rename(directory / f"result {rank}")
    while not (directory / "end").exists():
        time.sleep(0.05)
    os._exit(0)  # JAX would wait for ranks that were killed


if __name__ == "__main__":
    main()
