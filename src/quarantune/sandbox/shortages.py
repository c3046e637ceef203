"""Errors with advice, for a process that runs out of descriptors, memory or disk space through no config's fault."""

from __future__ import annotations

import contextlib
import errno
import resource
import tempfile
from collections.abc import Iterator

from quarantune.values.trial import SandboxError


@contextlib.contextmanager
def with_advice(name: str) -> Iterator[None]:
    """Replaces the `OSError` of a shortage within the block by an error that gives a remedy.

    Args:
        name: the tuned function's name.

    Raises:
        SandboxError: a resource ran out.
    """
    try:
        yield
    except OSError as error:
        if (remedy := _remedy(error.errno)) is None:
            raise
        raise SandboxError(
            f"{name}: the sweep had to end ({error.strerror}): {remedy}. Finished configs are kept, and the next sweep "
            f"goes on from there"
        ) from error


def _remedy(number: int | None) -> str | None:
    match number:
        case errno.EMFILE:
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            return (
                f"this process may have {limit} descriptors open, and a sweep needs about four for each config that "
                "compiles or waits: raise the limit with `ulimit -n 1024`"
            )
        case errno.ENFILE:
            return "the machine has too many files open: close some, or raise fs.file-max"
        case errno.EFBIG:
            limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
            return f"a file of this process may not grow over {limit} bytes: raise the limit with `ulimit -f`"
        case errno.ENOSPC | errno.EDQUOT:
            return f"there is no room left in memory and in {tempfile.gettempdir()}: make some, or set TMPDIR"
        case errno.ENOMEM:
            return "there is no memory left for this process: free some, or tune with smaller arguments"
    return None
