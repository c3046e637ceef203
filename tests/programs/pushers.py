"""Pushes the caches of many jobs into one bucket at once, and kills some of the processes at random moments.

    python pushers.py URL DIRECTORY JOBS KILLED SEED

DIRECTORY holds a cache for each job, named by its number. Prints the numbers of the jobs whose push has returned, and
the number of processes that were killed while they pushed.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import sys
from pathlib import Path


def main() -> None:
    url, directory, jobs, killed, seed = *sys.argv[1:3], *map(int, sys.argv[3:6])
    importlib.import_module("gcsfs" if url.startswith("gs:") else "s3fs")  # once for all forks; no thread starts yet

    from quarantune.buckets import exchange
    from quarantune.cache.store import Store
    from quarantune.values.store_url import StoreURL

    started, go, ended = os.pipe(), os.pipe(), os.pipe()
    pids = []
    for job in range(jobs):
        if (pid := os.fork()) == 0:
            try:
                os.close(go[1])
                os.write(started[1], b".")
                os.read(go[0], 1)  # until all have started
                exchange.push(StoreURL.parse(url), Store(directory / Path(str(job)), read_only=True))
                os.write(ended[1], b"%3d\n" % job)
                os._exit(0)
            finally:
                os._exit(1)
        pids.append(pid)
    for _ in range(jobs):
        os.read(started[0], 1)
    os.close(go[1])
    os.close(ended[1])
    done: list[int] = []
    rng = random.Random(seed)
    doomed = rng.sample(range(jobs), killed)
    # Each time that a push returns, one or more of the others are killed, at whatever they do.
    while doomed:
        for job in (doomed.pop() for _ in range(min(len(doomed), rng.randint(2, 6)))):
            os.kill(pids[job], signal.SIGKILL)
        if doomed and (line := os.read(ended[0], 4)):
            done.append(int(line))
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    while line := os.read(ended[0], 4):
        done.append(int(line))
    print(json.dumps({"done": sorted(done), "killed": codes.count(-signal.SIGKILL), "failed": sum(map(bool, codes))}))


if __name__ == "__main__":
    main()
