"""`TuningCache` as users know it: the entries of a directory, which can also be measured again."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from quarantune.cache import tuning_cache
from quarantune.cache.tuning_cache import CacheKey
from quarantune.values import settings

if TYPE_CHECKING:
    from quarantune.api.autotune import Autotuned, AutoTuner
    from quarantune.resolve.call_key import TunedFunction
    from quarantune.resolve.verification import VerifyReport
    from quarantune.transport.problem import Arguments


class TuningCache(tuning_cache.TuningCache):
    """The tuned results in one directory: those of `@quarantune.autotune`, and any that you put there.

    Configs that were found or put stay in memory, so that a look-up reads the disk once. All methods may be called from
    several threads, and on one directory from several processes.

    Example:
        >>> cache = TuningCache(directory)  # doctest: +SKIP
        >>> cache.put("matmul", (1024, 1024), "cuda:0", {"BM": 64})  # doctest: +SKIP
        >>> print(cache.verify(matmul))  # doctest: +SKIP
    """

    def verify(
        self,
        *functions: Autotuned[..., Any] | AutoTuner | str,
        arguments: Callable[[CacheKey], Arguments | None] | None = None,
        max_loss_percent: float | None = None,
        retune: bool = False,
    ) -> VerifyReport:
        """Measures the winners in this cache again, each against its function's own defaults, in the sandbox.

        The arguments are made from each entry's shapes, dtypes and static values, by the function's `supply`. Without
        `retune`, nothing is saved, and no entry is changed. Names in a cache are never imported, so the functions have
        to be given.

        Args:
            *functions: the tuned functions: those of `autotune`, `AutoTuner` objects, or texts such as
                `"kernels:matmul"`, which are imported.
            arguments: takes the key of an entry, and returns positional and keyword arguments to measure with; None
                makes them from the key. A function with a `key_fn` needs it, and so do arguments on several devices.
            max_loss_percent: a winner that takes longer than when it was saved by more than so many percent is stale,
                too; None for no such bound.
            retune: whether a call whose winner is stale, or was only estimated, is tuned again, and the result saved.

        Returns:
            One verdict for each entry: `current`, `stale`, `retuned`, `unused` (no call finds it any more) or `unknown`
            (for another device, without its function, or without its arguments).

        Raises:
            TypeError: a function is neither of these.
            ValueError: no function is given, or a text names none.
        """
        from quarantune.resolve import verification

        if not functions:
            raise ValueError("verify needs the tuned functions: give them, or texts such as 'kernels:matmul'")
        tuned = [_tuned(function) for function in functions]
        with settings.settings(cache_dir=self.directory):
            return verification.verify(iter(self), tuned, arguments, max_loss_percent=max_loss_percent, retune=retune)


def _tuned(function: Any) -> TunedFunction:
    from quarantune.api.autotune import Autotuned, AutoTuner

    found = _imported(function) if isinstance(function, str) else function
    if not isinstance(found, (Autotuned, AutoTuner)):
        shown = function if isinstance(function, str) else getattr(found, "__qualname__", None) or repr(found)
        raise TypeError(f"{shown!r} is no tuned function: give what @quarantune.autotune returned, or an AutoTuner")
    return found._resolver.function


def _imported(text: str) -> Any:
    if not all(text.partition(":")):
        raise ValueError(f"{text!r} names no function: write it as 'module:function'")
    try:
        return pkgutil.resolve_name(text)
    except ImportError as error:
        raise ValueError(f"{text!r} cannot be imported ({error}): correct the name, or set PYTHONPATH") from None
    except AttributeError as error:
        raise ValueError(f"{text!r} names no function ({error}): correct the name after the colon") from None
