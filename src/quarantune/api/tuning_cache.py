"""`TuningCache`: reads and writes the cache directory, serves as a store for other tuners, and verifies winners."""

from __future__ import annotations

import os
import pkgutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quarantune.cache import entries, journal
from quarantune.cache.entries import CacheDiff, CacheKey, CacheRecord, MergeReport
from quarantune.cache.entry_file import SCHEMA, Entry
from quarantune.cache.file_names import problem_hash, safe_name
from quarantune.cache.problems import CacheWriteError, report_once
from quarantune.cache.store import Store
from quarantune.host.locks import new_lock
from quarantune.host.shared_files import paths
from quarantune.values import blocks
from quarantune.values.codec import as_json, canonical_json, frozen, plain
from quarantune.values.configs import Config
from quarantune.values.forgetting import forget_choices

if TYPE_CHECKING:
    from quarantune.api.autotune import Autotuned, AutoTuner
    from quarantune.calls.call import TunedFunction
    from quarantune.functions.binding import Arguments
    from quarantune.tuning.verification import VerifyReport


class TuningCache:
    """The tuned results in one directory, from `@quarantune.autotune` or from `put`.

    Configs stay in memory once they are found or put, so a look-up reads the disk once. Several threads may use one
    object, and several processes one directory.

    Example:
        >>> cache = TuningCache(directory)
        >>> cache.put("matmul", (1024, 1024), "cuda:0", {"BM": 64})
        >>> cache.get("matmul", (1024, 1024), "cuda:0")
        {'BM': 64}
    """

    def __init__(self, dir: str | os.PathLike[str] | None = None) -> None:
        """Opens a cache. The first `put` makes the directory.

        Args:
            dir: the directory; None for `QUARANTUNE_CACHE_DIR`, or for memory only under `QUARANTUNE_DISABLE_CACHE`.
        """
        settings = blocks.current()
        self.directory: Path = (
            blocks.settings(cache_dir=dir).values["cache_dir"] if dir is not None else settings.cache_dir
        )
        on_disk = dir is not None or not settings.disable_cache
        self._store = Store(self.directory, lock_timeout_s=settings.lock_timeout) if on_disk else None
        self._configs: dict[CacheKey, Config] = {}
        self._lock = new_lock()

    def __repr__(self) -> str:
        """Returns the class and the directory."""
        return "<TuningCache in memory only>" if self._store is None else f"TuningCache({str(self.directory)!r})"

    def get(self, kernel_type: str, problem_size: Any, device: str) -> Config | None:
        """Returns the config for a problem, or None.

        Args:
            kernel_type: the name of a function or of a kind of kernel.
            problem_size: any JSON-able value, such as a tuple of sizes; a text becomes the key without change.
            device: the kind of device.
        """
        key = _key(kernel_type, problem_size, device)
        with self._lock:
            config = self._configs.get(key)
        if config is None:
            found = (self.entry(*key) or {}).get("config")
            if not isinstance(found, dict):
                return None
            config = frozen(found)
            with self._lock:
                self._configs.setdefault(key, config)
        return dict(config)

    def entry(self, kernel_type: str, problem_size: Any, device: str) -> Entry | None:
        """Returns the whole entry on disk for a problem: config, time, versions and so on; or None."""
        key = _key(kernel_type, problem_size, device)
        return self._store.get(key.kernel_type, key.device, key.problem_size) if self._store else None

    def put(
        self,
        kernel_type: str,
        problem_size: Any,
        device: str,
        config: Mapping[str, Any],
        *,
        time_ms: float | None = None,
    ) -> None:
        """Keeps a config and replaces an earlier one. If it cannot be saved, it stays in memory, with a warning.

        Under the key of a tuned function, its next call uses the config, which must be in its config space.

        Args:
            kernel_type: the name of a function or of a kind of kernel.
            problem_size: any JSON-able value, such as a tuple of sizes; a text becomes the key without change.
            device: the kind of device.
            config: the config.
            time_ms: its time in milliseconds, if known.

        Raises:
            ValueError: A value is NaN or infinite.
            TypeError: JSON cannot hold a value.
        """
        key = _key(kernel_type, problem_size, device)
        values = plain(as_json(config))
        entry = {
            "config": values,
            "time_ms": time_ms,
            "key_values": plain(problem_size),
            "schema": SCHEMA,
            "fingerprint": {},
            "space": None,
            "versions": {},
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "trials": {},
        }
        with self._lock:
            self._configs[key] = frozen(values)
        if self._store is None:
            return
        try:
            self._store.put(key.kernel_type, key.device, key.problem_size, entry)
        except CacheWriteError as error:
            report_once(f"the config for {key.kernel_type!r} is kept in memory only: {error}")
            return
        forget_choices(lambda _, *of: of == (key.device, key.problem_size))

    def delete(self, kernel_type: str, problem_size: Any, device: str) -> bool:
        """Removes a config, with the saved trials and failed compilations of its problem.

        Tuned functions of this process also forget it.

        Returns:
            Whether there was one.

        Raises:
            CacheWriteError: The disk refused the removal; the message explains why.
        """
        key = _key(kernel_type, problem_size, device)
        with self._lock:
            known = self._configs.pop(key, None) is not None
        if self._store is None:
            return known
        on_disk = self._store.delete(key.kernel_type, key.device, key.problem_size)
        forget_choices(lambda _, *of: of == (key.device, key.problem_size))
        journal.discard_all(self.directory, key.kernel_type, problem_hash(key.device, key.problem_size))
        return known or on_disk

    def keys(self) -> list[CacheKey]:
        """Returns the keys of all entries, with the safe names of kernel types."""
        on_disk = {record.key for record in self}
        with self._lock:
            return sorted(on_disk | set(self._configs))

    def __len__(self) -> int:
        """Returns the number of `keys`."""
        return len(self.keys())

    def __contains__(self, key: object) -> bool:
        """Returns whether there is a config for a key: a `CacheKey`, or a tuple of the arguments of `get`."""
        if isinstance(key, CacheRecord):
            return self.entry(*key.key) == key.entry
        return isinstance(key, tuple) and len(key) == 3 and self.get(*key) is not None

    def __iter__(self) -> Iterator[CacheRecord]:
        """Iterates over the entries on disk."""
        return iter(()) if self._store is None else entries.records(self._store)

    def merge(self, other: TuningCache | str | os.PathLike[str]) -> MergeReport:
        """Copies all entries of another cache.

        If both caches have an entry for a problem, equal configs keep the entry with more samples, and different
        configs keep the newer one. The report lists both.

        Args:
            other: the other cache, or its directory; nothing writes to it.

        Returns:
            The added, updated and unchanged keys, and the conflicts.

        Raises:
            ValueError: The other directory does not exist, or one of the caches is in memory only.
            CacheWriteError: The entries could not be saved; the message explains why.
        """
        source = _store_of(other)
        report = entries.merge(self._on_disk(), ((name, source.read(name)) for name in source.names()))
        with self._lock:
            self._configs.clear()
        changed = {*report.added, *report.updated, *(pair.key for pair in report.conflicts)}
        forget_choices(lambda name, device, key: CacheKey(safe_name(name), key, device) in changed)
        return report

    def export(
        self,
        directory: str | os.PathLike[str],
        *,
        names: Collection[str] | str | None = None,
        devices: Collection[str] | str | None = None,
    ) -> list[CacheKey]:
        """Writes entries into another directory, such as a directory that a package ships.

        Entries for other problems in that directory stay. Files are sorted, which suits version control. This takes no
        lock and leaves no lock file.

        Args:
            directory: the directory; made if necessary.
            names: the functions or kinds of kernel, with `*` for any text; None for all.
            devices: the kinds of device; None for all.

        Returns:
            The keys of the entries written.

        Raises:
            ValueError: A name or a device has no entries, or this cache is in memory only.
            CacheWriteError: The directory is not writable, or a file in it is damaged or from a later version.
        """
        names, devices = ([it] if isinstance(it, str) else it for it in (names, devices))
        return entries.export(self._on_disk(), TuningCache(directory).directory, names=names, devices=devices)

    def diff(self, other: TuningCache | str | os.PathLike[str]) -> CacheDiff:
        """Compares the configs of two caches, and changes neither.

        Args:
            other: the other cache, or its directory.

        Raises:
            ValueError: The other directory does not exist, or one of the caches is in memory only.
        """
        return entries.compare(entries.records(self._on_disk()), entries.records(_store_of(other)))

    def clear(self, name: str | None = None) -> None:
        """Removes everything about one kernel type, or about all: entries, and the journals of their sweeps.

        Tuned functions of this process also forget their results and failures.

        Raises:
            CacheWriteError: The disk refused the removal; the message explains why.
        """
        stem = None if name is None else safe_name(name)
        with self._lock:
            self._configs = {key: config for key, config in self._configs.items() if stem not in (None, key[0])}
        if self._store is None:
            return
        swept = [path.stem for path in paths(self.directory, "*.trials")]
        for known in {*self._store.names(), *swept} if stem is None else {stem}:
            self._store.clear(known)
            journal.discard_all(self.directory, known)
        forget_choices(lambda name, *_: stem in (None, safe_name(name)))

    def problems(self) -> list[str]:
        """Returns a sentence for each problem on disk; changes nothing."""
        return [] if self._store is None else entries.problems(self._store)

    def verify(
        self,
        *functions: Autotuned[..., Any] | AutoTuner | str,
        arguments: Callable[[CacheKey], Arguments | None] | None = None,
        max_loss_percent: float | None = None,
        again: bool = False,
    ) -> VerifyReport:
        """Measures the winners in this cache again, each against its function's own defaults, in the sandbox.

        The function's `supply` makes the arguments from each entry's shapes, dtypes and static values, under the JAX
        settings of the entry. A winner that `tune_for` chose is measured for all its calls. Without `again`, this
        saves no result, but it adds the measured program to an entry of an earlier version. It never imports names from
        a cache, so it needs the functions.

        Args:
            *functions: the tuned functions: objects from `autotune` or `AutoTuner`, or texts such as
                `"kernels:matmul"`, which this imports.
            arguments: takes the key of an entry, and returns positional and keyword arguments to measure with; None
                makes them from the entry. An entry of an earlier version needs it if the function has a `key_fn`.
            max_loss_percent: slowdown in percent, compared with the saved time, above which a winner is stale. None
                compares winners with the defaults alone.
            again: whether to tune again each call whose winner is stale or only estimated, and save the result.

        Returns:
            One verdict for each entry: `current`, `stale`, `unclear` (the measurements do not suffice), `tuned again`,
            `unused` (no call can find it) or `unknown` (for another device, without its function, or without its
            arguments).

        Raises:
            TypeError: An argument is not a tuned function or a text.
            ValueError: There is no function, or a text does not name one.

        Example:
            >>> import jax, quarantune
            >>> @quarantune.autotune({"batch": [1, 64]})
            ... @jax.jit(static_argnames=["batch"])
            ... def scale(x, batch: int = 1):
            ...     return jax.lax.map(lambda each: 2 * each + 1, x, batch_size=batch)
            >>> with quarantune.settings(cache_dir=directory / "tuned"):
            ...     _ = scale(jax.numpy.ones(2**16))  # tunes
            >>> print(TuningCache(directory / "tuned").verify(scale))
            1 current
        """
        from quarantune.api.tune_for import tune_for
        from quarantune.api.tuner import Tuner
        from quarantune.tuning import verification

        if not functions:
            raise ValueError("verify needs the tuned functions: give them, or texts such as 'kernels:matmul'")
        tuned = [_tuned(function) for function in functions]
        if self._store is None:
            return verification.VerifyReport(())
        with blocks.settings(cache_dir=self.directory, disable_cache=False):
            return verification.verify(
                self._store,
                tuned,
                arguments,
                tune=lambda call: Tuner(call.function).tune(call),
                tune_for=lambda calls, weights, by: tune_for(Tuner(calls[0].function), calls, weights, by),
                max_loss_percent=max_loss_percent,
                again=again,
            )

    def _on_disk(self) -> Store:
        """Returns the store.

        Raises:
            ValueError: The cache is in memory only.
        """
        if self._store is None:
            raise ValueError(
                "a TuningCache made under QUARANTUNE_DISABLE_CACHE is in memory only, and cannot be "
                "merged, compared or exported: give it a directory, as in TuningCache('/shared/tuned')"
            )
        return self._store


def _key(kernel_type: str, problem_size: Any, device: str) -> CacheKey:
    problem = problem_size if isinstance(problem_size, str) else canonical_json(problem_size)
    return CacheKey(safe_name(kernel_type), problem, str(device))


def _store_of(other: TuningCache | str | os.PathLike[str]) -> Store:
    """Opens another cache for reading."""
    if isinstance(other, TuningCache):
        return other._on_disk()
    directory = Path(other)
    if not directory.is_dir():
        raise ValueError(f"there is no cache in {str(directory)!r}: it is not a directory")
    return Store(directory, read_only=True)


def _tuned(function: Any) -> TunedFunction:
    from quarantune.api.autotune import Autotuned, AutoTuner, BoundMethod
    from quarantune.api.tuner import Tuned

    found = _imported(function) if isinstance(function, str) else function
    found = found.__func__ if isinstance(found, BoundMethod) else found
    if isinstance(found, Tuned) and not isinstance(found, (Autotuned, AutoTuner)):
        what = "tunes kernels in their context, and verify measures kernels alone: give its kernels"
        raise TypeError(f"{found!r} {what}")
    if not isinstance(found, (Autotuned, AutoTuner)):
        shown = function if isinstance(function, str) else getattr(found, "__qualname__", None) or repr(found)
        raise TypeError(f"{shown!r} is not a tuned function: give the result of @quarantune.autotune, or an AutoTuner")
    return found.function


def _imported(text: str) -> Any:
    if not all(text.partition(":")):
        raise ValueError(f"{text!r} does not name a function: write it as 'module:function'")
    try:
        return pkgutil.resolve_name(text)
    except ImportError as error:
        raise ValueError(f"{text!r} cannot be imported ({error}): correct the name, or set PYTHONPATH") from None
    except AttributeError as error:
        raise ValueError(f"{text!r} does not name a function ({error}): correct the name after the colon") from None
