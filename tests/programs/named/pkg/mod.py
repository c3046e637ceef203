"""A file that tests run and import in every way; next to it are results that an earlier version saved for it."""

import dataclasses
import enum
import functools
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor

import jax
import numpy as np

import quarantune


@dataclasses.dataclass(frozen=True)
class Options:
    scale: int = 2


class Mode(enum.Enum):
    FAST = 1


HELD = Options(3)


@quarantune.autotune({"n": [1, 2]}, rep=1, ref_fn=None)
@functools.partial(jax.jit, static_argnames=["options", "mode", "n"])
def kernel(x, options, mode, n: int = 1):
    return x * options.scale * HELD.scale if mode is Mode.FAST else x


CALL = (np.ones(4, np.float32), Options(), Mode.FAST)


def report():
    """Returns the name of the kernel and its saved config."""
    return [kernel.name, kernel.lookup(*CALL)]


def report_to(queue):
    queue.put(report())


def report_from_a_child():
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=report_to, args=(queue,))
    child.start()
    found = queue.get(timeout=100)
    child.join()
    return found


def report_from_a_pool():
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(report).result()


def tune():
    kernel.tune(*CALL)
    return report()


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]]()))
