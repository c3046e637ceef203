"""The result of tuning one problem, in memory and in a directory."""

from __future__ import annotations

import csv
import dataclasses
import functools
import html
import io
import json
import math
import os
import textwrap
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from quarantune.cache.entries import CacheKey
from quarantune.devices import discovery
from quarantune.functions import versions
from quarantune.functions.binding import Arguments, bind_config, function_inside, jitted_with
from quarantune.metrics import KernelMetrics, from_counts
from quarantune.results import html_report, report, saved_files
from quarantune.results.from_cache import cached_result
from quarantune.results.report import Row
from quarantune.results.report_data import PlainResult, ResultData
from quarantune.results.saved_files import FUNCTION, JSON, WINNER, SavedResultError
from quarantune.transport import pickling
from quarantune.transport.executable import from_pickle
from quarantune.values import blocks
from quarantune.values.codec import IN_MEMORY, DamageError, JsonObject, as_json, decode_json, originals, restore
from quarantune.values.configs import Config, format_config
from quarantune.values.texts import printable
from quarantune.values.trial import SCORES, Outcome, Trial, count_outcomes


def _refuse(folder: Path, *_: object, **__: object) -> None:
    raise SavedResultError(
        f"the function of {folder} was not loaded, because that runs code from there: "
        f"load it with TuningResult.load(..., trusted=True), or call your own with best_config"
    )


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class TuningResult(PlainResult):
    """The result of tuning one problem.

    Attributes:
        best_config: the fastest config.
        time_ms: its median time in milliseconds.
        speedup_interval: the least and the largest speed-up that the noise of the final allows; None where not known.
        noise: how far the defaults' output moves when their inputs move by up to half a unit in the last place,
            relative to its RMS: the noise that configs were judged by. None where this process did not measure it.
        finalists: the trials of the configs that were timed in turn in the end, that of the defaults among them; their
            times and samples are those of that final.
        trials: the trial of every config, in their order; of a search, the trial of every config that it asked, in the
            order of their ends; empty for a result from the cache.
        name: the function's name in the cache; empty for a result that an earlier version saved.
        key: the problem's key in the cache.
        device: the kind of device it was tuned on.
        from_cache: whether it was found in the cache and not measured now; `"nearest"` for the config of another call
            that stands in for one that was never tuned, and `"default"` for the function's own defaults that do, whose
            times are not known (NaN).
        tie: the configs that the noise cannot tell from the best, without the best.
        default_config: the function's own defaults, be they a config or not; None where it cannot run with them.
        default_time_ms: the time of the function with its own defaults, in milliseconds; None where it is not known.
        counts: how many configs ended in each outcome; of a result from the cache, as it was saved.
        created: when it was tuned, in UTC, as `2026-11-22T09:30:00+00:00`; empty where that is not known.
        commit: the commit of the repository with the function's file; empty where there is none.
        stopped: why the search ended: `exhausted`, `no_gain`, `max_trials`, `time_budget` or `patience`; empty where
            that is not known.
        seen: how many configs were tried, or dropped by `prune_fn`; None where that is not known.
        space_size: how many configs there are; None where that is not known.
        versions: the versions of JAX and others under which it was tuned.
        score: what the author's objective makes of the best config, less being better; None where that is its time.
        default_score: the same of the defaults; None where it is not known.
        energy_mj: the energy of one call, in millijoules; None where it was not measured.
        calls: for a result of `tune_for`, the calls that share the config, whose weighted means all times are.
        by: what that result has least of: `total` or `worst`; empty for others.
        fn: the tuned function with the best config bound.
        executable: the executable that a worker compiled from the two, for `save`; None where there is none.
        call: the call that it was compiled for, without its arrays.
        structs: the call with a `jax.ShapeDtypeStruct` for each array; None for a result that was loaded.
    """

    fn: Callable[..., Any] = dataclasses.field(default=_refuse, compare=False, metadata=IN_MEMORY)
    executable: bytes | None = dataclasses.field(default=None, compare=False, metadata=IN_MEMORY)
    call: Arguments = dataclasses.field(default=((), {}), compare=False, metadata=IN_MEMORY)
    structs: Arguments | None = dataclasses.field(default=None, compare=False, metadata=IN_MEMORY)

    @property
    def speedup(self) -> float | None:
        """The time of the defaults divided by that of the best config; None where the former is not known."""
        return self.findings.speedup

    @property
    def config_text(self) -> str:
        """The best config as people read it."""
        return format_config(self.best_config)

    @property
    def failures(self) -> dict[str, int]:
        """The number of configs that ended in each outcome other than `ok`."""
        counts = count_outcomes(self.trials) or self.counts
        return {outcome: count for outcome, count in counts.items() if outcome != "ok"}

    def lowered_text(self) -> str:
        """Returns the text of the winner's compiled program for the call that was tuned, compiled in this process.

        Raises:
            TypeError: the function is not jitted, so that there is no such text.
            SavedResultError: the result was loaded, and shapes to compile for are not saved.
        """
        if self.structs is None:
            raise SavedResultError(
                "shapes are not saved with a result: lower its function for yours, "
                "as in jax.jit(result.fn).lower(x).compile().as_text()"
            )
        fn = function_inside(self.fn)
        if not hasattr(fn, "lower"):
            raise TypeError(f"{fn!r} is not jitted, so there is no text of a compiled program")
        args, kwargs = self.structs
        jitted, config = jitted_with(fn, self.best_config)
        return str(jitted.lower(*args, **kwargs, **config).compile().as_text())

    def table(self, *, width: int | None = None, flops: float | None = None, bytes: float | None = None) -> str:
        """Returns the trials as a table, the fastest first, with the reasons for the winner and for each failure.

        The winner has a star, the configs that tie with it have an equals sign. `> 23.8` is the time of a `slow`
        config: even its fastest run took so long. For a result from the cache, the text says what is cached.

        Args:
            width: columns, as far as the texts can be broken; None for those of the terminal, 120 without one.
            flops: floating-point operations of one call, for a column of TFLOP/s.
            bytes: bytes that one call must move, for a column of GB/s.
        """
        if not self.trials:
            columns = report.columns_for(width)
            lines = [f"* {_winner(self)}", _sweep(self), "the cache keeps the winner; tune() tries the configs again"]
            return "\n".join(textwrap.fill(line, columns, subsequent_indent="  ") for line in lines)
        text = report.table(self, report.by_time(self), width=width, flops=flops, moved_bytes=bytes)
        return "\n".join([text, *(f"  {call}" for call in self.calls)])

    def __repr__(self) -> str:
        return f"{type(self).__name__}: {_winner(self)}\n  {_sweep(self)}"

    def _repr_html_(self) -> str:
        trials = report.by_time(self._shown)
        parts = [repr(self)]
        if trials:
            parts.append(report.table(self._shown, trials[:_MOST_ROWS], width=120))
        if len(trials) > _MOST_ROWS:
            parts.append(f"and {len(trials) - _MOST_ROWS:,} more: see table()")
        text = html.escape("\n\n".join(parts))
        return f'<pre style="margin:0">{text}</pre>'

    def to_dicts(self) -> list[Row]:
        """Returns a flat dict for each trial, in the order of `trials`: the tunables, then the trial's fields.

        Beside the fields of `Trial` there are `speedup`, against the defaults, `is_best`, `is_tie` and `is_default`. A
        tunable with the name of such a column is under `config.<name>`. Of a result from the cache, which has no
        trials, there is the winner alone.
        """
        shown = self._shown
        if not shown.trials:
            known = None if math.isnan(self.time_ms) else self.time_ms
            winner = Trial(config=shown.best_config, outcome=Outcome.OK, time_ms=known, device=self.device)
            winner = dataclasses.replace(winner, score=self.score, energy_mj=self.energy_mj)
            shown = dataclasses.replace(shown, trials=(winner,))
        return report.to_dicts(shown)

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Writes the rows of `to_dicts` as CSV in UTF-8, with a header; values that are no scalars are JSON.

        Args:
            path: the file, which is replaced if it exists.

        Raises:
            OSError: the file cannot be written; an earlier one is as it was.
        """
        rows, text = self.to_dicts(), io.StringIO(newline="")
        writer = csv.DictWriter(text, list(rows[0]))
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
        saved_files.write(path, text.getvalue().encode("utf-8", "backslashreplace"))

    def to_dataframe(self) -> Any:
        """Returns the rows of `to_dicts` as a `pandas.DataFrame`.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError(
                "to_dataframe needs pandas: pip install pandas, or use to_dicts() or to_csv(path)"
            ) from error
        return pandas.DataFrame(self.to_dicts())

    def metrics(
        self, *, flops: float | None = None, bytes: float | None = None, dtype: str | None = None
    ) -> KernelMetrics:
        """Returns the winner's metrics.

        Args:
            flops: floating-point operations of one call.
            bytes: bytes that one call must move.
            dtype: the dtype that it computes in, which decides the device's peak; None gives no share of the peak.
        """
        return from_counts(self.time_ms, flops=flops, bytes=bytes, dtype=dtype, device=self.device)

    def report(self, path: str | os.PathLike[str]) -> None:
        """Writes the result as one self-contained HTML page: the winner, all trials and charts of them.

        For a result from the cache, the trials are read from the journals in the cache directory, if they are there.

        Args:
            path: the file, such as `matmul.html`; it is replaced.

        Raises:
            OSError: the file cannot be written; an earlier one is as it was.
        """
        html_report.write(path, [self._report_data()])

    def with_trials(self) -> Self:
        """Returns the same; of a result from the cache, with the trials of its journal, if that is there."""
        found = self._cached()
        return self if found is None else dataclasses.replace(self, **vars(found.result))

    def _cached(self) -> ResultData | None:
        """Returns the data that the cache holds of a result from it; None if there are none, or it has its trials."""
        if self.from_cache is not True or self.trials or not self.name:
            return None
        return cached_result(blocks.current().cache_dir, CacheKey(self.name, self.key, self.device))

    @property
    def _shown(self) -> PlainResult:
        """The result as tables and reports show it."""
        return self._as_shown(self)

    def _as_shown(self, result: PlainResult) -> PlainResult:
        """Returns this result, or the cache's data of it, in the form of tables."""
        return result

    def _report_data(self) -> ResultData:
        if (found := self._cached()) is not None:
            return dataclasses.replace(found, result=self._as_shown(found.result))
        note = {
            True: "The result is from the cache, which holds no trials.",
            "nearest": "The config of a near call stands in for this one, which was never tuned.",
            "default": "The call was never tuned: the function's own defaults stand in.",
            False: "",
        }[self.from_cache]
        return ResultData(self._shown, _key_values(self.key), "; ".join(filter(None, (note, *map(str, self.calls)))))

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Writes the result into a directory: JSON for people, the function and the compiled winner for `load`.

        Args:
            directory: made if necessary; a result in it is replaced as a whole, or stays if that fails.

        Raises:
            TypeError: the function cannot travel; the message says why.
            SavedResultError: the result was loaded without its function, or the directory has a `result.json` of
                another program.
            OSError: the directory cannot be written to.
        """
        folder = Path(directory)
        if isinstance(self.fn, functools.partial) and self.fn.func is _refuse:
            raise SavedResultError(
                f"this result was loaded without its function, which {str(folder)!r} would lack: copy the directory it "
                "is from, or load it with trusted=True and save that"
            )
        plain = function_inside(self.fn)
        configs = [self.best_config, self.default_config or {}, *self.tie, *(trial.config for trial in self.trials)]
        parts = {FUNCTION: pickling.dumps((plain, self.call, originals(configs)))}
        if self.executable is not None:
            parts[WINNER] = self.executable
        saved_files.save(folder, self.to_json(), parts)

    def to_json(self) -> JsonObject:
        """Returns the content of the JSON file of a saved result."""
        configs = {name: as_json(getattr(self, name)) for name in ("best_config", "default_config", "tie")}
        data = super().to_json() | configs | {"time_ms": None if math.isnan(self.time_ms) else self.time_ms}
        unused = (() if self.calls else ("calls", "by")) + (SCORES if self.score is None else ())
        return {name: value for name, value in data.items() if name not in unused}

    @classmethod
    def load(cls, directory: str | os.PathLike[str], *, trusted: bool = False) -> TuningResult:
        """Reads a result that `save` wrote; that of a contextual result describes the whole function and no kernel.

        Args:
            directory: the directory.
            trusted: whether code from the directory may run. Only then is `fn` the function. It has the winner's
                executable, if one was saved under the same versions on the same kind of device; otherwise it is
                compiled again, with a warning. For a plain callable, and for a result from the cache, no executable is
                saved.

        Returns:
            The result; untrusted, its `fn` raises.

        Raises:
            SavedResultError: the directory holds no result, a damaged one, or one of a newer version.
        """
        folder = Path(directory)
        about, contents = saved_files.load(folder)
        try:
            known = {name: value for name, value in about.items() if name != "time_ms" or value is not None}
            loaded = dataclasses.replace(TuningResult.from_json(known), fn=functools.partial(_refuse, folder))
        except DamageError as error:
            raise SavedResultError(f"{folder / JSON} is damaged: {error!r}; save the result again") from error
        return loaded._with_function(contents) if trusted else loaded

    def _with_function(self, contents: dict[str, bytes]) -> TuningResult:
        from quarantune.results.compiled_winner import Winner  # and with it jax.extend

        plain, call, *rest = pickling.loads(contents[FUNCTION])  # results of earlier versions hold no config values
        values = rest[0] if rest else {}
        best = restore(self.best_config, values)

        def restored(trials: Iterable[Trial]) -> tuple[Trial, ...]:
            return tuple(dataclasses.replace(trial, config=restore(trial.config, values)) for trial in trials)

        fn: Callable[..., Any] = bind_config(plain, best)
        executable = contents.get(WINNER)
        if executable is not None:
            here = discovery.platform_and_kind(None)[1]
            now = versions.versions()
            reason = f"was compiled for {self.device} under {self.versions}, and this is {here} under {now}"
            if (here, now) == (self.device, self.versions):
                try:
                    fn, reason = Winner(plain, best, from_pickle(executable), call, self.key), ""
                except Exception as error:
                    reason = f"cannot be loaded: {error!r:.500}"
            if reason:
                told = f"the saved winner {reason}: it is compiled again, and may not be the best here"
                warnings.warn(told, RuntimeWarning, stacklevel=3)
        return dataclasses.replace(
            self,
            best_config=best,
            trials=restored(self.trials),
            finalists=restored(self.finalists),
            tie=tuple(restore(config, values) for config in self.tie),
            default_config=None if self.default_config is None else restore(self.default_config, values),
            fn=fn,
            executable=executable,
            call=call,
        )


def _cell(value: object) -> object:
    return json.dumps(value) if isinstance(value, (Mapping, list, tuple, bool)) else value


def _key_values(key: str) -> Any:
    """Returns the description of the call in a key, which is canonical JSON; the key itself where it is not."""
    try:
        parts = decode_json(key.encode())
    except ValueError:
        return key
    return parts.get("call", key) if isinstance(parts, dict) else key


_MOST_ROWS = 30


def _winner(result: TuningResult) -> str:
    """Returns the winner with its time and its speed-up."""
    return f"{result.config_text}, {result.findings.text()}"


def _sweep(result: TuningResult) -> str:
    """Returns the number of configs with each outcome, and where the result is from."""
    parts = []
    if result.counts:
        total = sum(result.counts.values())
        of = f" of {result.space_size:,}" if result.space_size is not None and result.space_size > total else ""
        counts = ", ".join(f"{count} {outcome}" for outcome, count in result.counts.items())
        parts.append(f"{total:,}{of} configs: {counts}")
    elif result.seen is not None:
        parts.append(f"{result.seen:,} configs")
    if result.tie:
        parts.append(f"{len(result.tie)} tie with the winner")
    parts.append(result.device)
    if result.created:
        parts.append(f"tuned {result.created}{result.commit and f' at commit {result.commit}'}")
    if result.from_cache == "nearest":
        parts.append("the config of the nearest call in the cache")
    elif result.from_cache == "default":
        parts.append("not tuned: the function's own defaults")
    elif result.from_cache:
        parts.append("from the cache")
    return printable("; ".join(parts))


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelChoice:
    """The choice for one kernel, called in one way.

    Attributes:
        name: the kernel's name in the cache.
        key: the key of its call, as canonical JSON.
        config: the config it uses inside the function.
        time_ms: the median time of the whole function once this kernel was decided, in milliseconds.
        trials: the trials of the kernel's configs there; empty for a result from the cache.
        tie: the configs that the noise cannot tell from the chosen one, without it.
    """

    name: str
    key: str
    config: Config
    time_ms: float
    trials: tuple[Trial, ...] = ()
    tie: tuple[Config, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class ContextualResult(TuningResult):
    """The result of tuning a function's kernels in their context.

    `trials` holds every trial in order; in its configs each kernel has an entry with the config that it used. All times
    are those of the whole function.

    Attributes:
        kernels: the choice for each kernel, in the order of the decisions.
        baseline_ms: the median time with every kernel at the first of its configs; None where that failed.
    """

    kernels: tuple[KernelChoice, ...] = dataclasses.field(default=(), metadata=IN_MEMORY)
    baseline_ms: float | None = dataclasses.field(default=None, metadata=IN_MEMORY)

    def table(self, *, width: int | None = None, flops: float | None = None, bytes: float | None = None) -> str:
        """Returns a table for each kernel, with a star at its choice, and the gain of the whole function.

        Args:
            width: columns, as far as the texts can be broken; None for those of the terminal, 120 without one.
            flops: floating-point operations of one call of the whole function, for a column of TFLOP/s.
            bytes: bytes that one such call must move, for a column of GB/s.
        """
        parts, width = [], report.columns_for(width)
        for name, choice in zip(self.labels, self.kernels, strict=True):
            if choice.trials:
                of = dataclasses.replace(self._shown, best_config=choice.config, tie=choice.tie, trials=choice.trials)
                table = report.table(of, report.by_time(of), width=width, flops=flops, moved_bytes=bytes)
                parts.append(f"{name}\n{table}")
            else:
                parts.append(f"{name}: {format_config(choice.config)}")
        was = "" if self.baseline_ms is None else f", {self.baseline_ms:.4g} ms with every kernel's first config"
        return "\n\n".join([*parts, f"the whole function: {self.time_ms:.4g} ms{was}"])

    @property
    def config_text(self) -> str:
        """The choices for all kernels as people read them."""
        return "; ".join(f"{name}: {text}" for name, text in self._together.items())

    @property
    def _together(self) -> Config:
        """The choices for all kernels as one config, as trials have it."""
        return {name: format_config(it.config) for name, it in zip(self.labels, self.kernels, strict=True)}

    def _as_shown(self, result: PlainResult) -> PlainResult:
        """Returns the result of the whole function: its kernels are tunables, whose first configs are the defaults."""
        return dataclasses.replace(
            result,
            best_config=self._together,
            default_config=None,
            default_time_ms=self.baseline_ms,
            default_label="the whole function with every kernel's first config",
            speedup_interval=None,
            finalists=(),
        )

    @property
    def labels(self) -> list[str]:
        """A short and unique name for each of `kernels`."""
        return labels([choice.name for choice in self.kernels])


def labels(names: list[str]) -> list[str]:
    """Returns the last part of each name, with a number where several are equal."""
    short = [name.rpartition(".")[2] for name in names]
    return [
        f"{name} #{short[: at + 1].count(name)}" if short.count(name) > 1 else name for at, name in enumerate(short)
    ]
