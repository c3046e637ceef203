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
from quarantune.results import html_report, report, saved_files, times
from quarantune.results.from_cache import result_of
from quarantune.results.report import Row
from quarantune.results.report_data import PlainResult, ResultData
from quarantune.results.saved_files import FUNCTION, JSON, WINNER, SavedResultError
from quarantune.transport import pickling
from quarantune.transport.executable import from_pickle
from quarantune.values.codec import (
    IN_MEMORY,
    DamageError,
    JsonObject,
    as_json,
    decode_json,
    originals,
    restore,
    text_of,
)
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

    None means unknown, NaN an unknown time. An empty text also means unknown.

    The winner:

    Attributes:
        best_config: the fastest config, or the best by the author's objective.
        time_ms: its median time in milliseconds.
        energy_mj: the energy of one call with it, in millijoules.
        score: its value by the author's objective, less is better; None if the objective is time.
        tie: the configs that are as good as the best within the noise, without the best.
        finalists: the trials of the final, with its times; it timed the best configs and the defaults in turn.
        calls: the calls of `tune_for` that share the config; all times are weighted means over them.
        by: the figure that the config of `tune_for` minimizes: `total` or `worst`; empty for other results.

    The defaults:

    Attributes:
        default_config: the function's own defaults, listed as a config or not; None if it cannot run with them.
        default_time_ms: the time of the function with its own defaults, in milliseconds.
        default_score: their value by the author's objective.
        speedup_interval: the least and the largest speed-up of 95 of 100 later runs.

    The search:

    Attributes:
        trials: the trial of every config, in the order of the configs; a search has only the trials of the configs
            that it asked, in the order of their ends. A result from the cache has none.
        counts: the number of configs with each outcome; a result from the cache has the saved numbers.
        stopped: why the search ended: `exhausted`, `no_gain`, `max_trials`, `time_budget` or `patience`.
        seen: the number of configs that were tried, or dropped by `prune_fn`.
        space_size: the number of configs in the space.
        noise: the noise that configs were judged by: how far the defaults' output moves, relative to its RMS, if their
            inputs move by up to half a unit in the last place. Only the process that measured it knows it.

    The provenance:

    Attributes:
        name: the function's name in the cache; earlier versions did not save it.
        key: the problem's key in the cache.
        device: the kind of device it was tuned on.
        from_cache: whether the cache had it, so that nothing was measured. For a call that was never tuned, `"nearest"`
            means the config of another call, `"rule"` the config of a rule, and `"default"` the function's own
            defaults (whose time is NaN).
        created: when it was tuned, in UTC, as `2026-11-22T09:30:00+00:00`.
        commit: the commit of the repository with the function's file; empty without a repository.
        versions: the versions of JAX and other packages at that time.

    In memory, and not in the JSON file of a saved result:

    Attributes:
        fn: the tuned function with the best config bound.
        executable: the executable that a worker compiled for `call`, for `save`; None without one.
        call: the call that was tuned, without its arrays.
        structs: the call with a `jax.ShapeDtypeStruct` for each array; None for a loaded result.
        source: the cache directory and the entry that a result is from; None for others. The trials are in its journal.
        expected_loss: how much longer than the best config the config of a rule takes, as a share; None for others.
    """

    fn: Callable[..., Any] = dataclasses.field(default=_refuse, compare=False, metadata=IN_MEMORY)
    executable: bytes | None = dataclasses.field(default=None, compare=False, metadata=IN_MEMORY)
    call: Arguments = dataclasses.field(default=((), {}), compare=False, metadata=IN_MEMORY)
    structs: Arguments | None = dataclasses.field(default=None, compare=False, metadata=IN_MEMORY)
    source: tuple[Path, JsonObject] | None = dataclasses.field(default=None, compare=False, metadata=IN_MEMORY)

    @property
    def speedup(self) -> float | None:
        """The time of the defaults divided by the time of the best config; None if the former is unknown."""
        return self.findings.speedup

    @property
    def config_text(self) -> str:
        """The best config as readable text."""
        return format_config(self.best_config)

    @property
    def failures(self) -> dict[str, int]:
        """The number of configs with each outcome that rules a config out whatever its time: failures and `pruned`."""
        counts = count_outcomes(self.trials) or self.counts
        return {name: count for name, count in counts.items() if Outcome(name).is_failure or name == Outcome.PRUNED}

    def lowered_text(self) -> str:
        """Compiles the winner in this process for the call that was tuned, and returns the text of the program.

        Raises:
            TypeError: the function is not jitted, so it has no compiled program.
            SavedResultError: the result was loaded, and a saved result holds no shapes to compile for.
        """
        if self.structs is None:
            raise SavedResultError(
                "shapes are not saved with a result: lower its function for your arguments, "
                "as in jax.jit(result.fn).lower(x).compile().as_text()"
            )
        fn = function_inside(self.fn)
        if not hasattr(fn, "lower"):
            raise TypeError(f"{fn!r} is not jitted, so there is no text of a compiled program")
        args, kwargs = self.structs
        jitted, config = jitted_with(fn, self.best_config)
        return str(jitted.lower(*args, **kwargs, **config).compile().as_text())

    def table(
        self,
        *,
        width: int | None = None,
        rows: int | None = None,
        flops: float | None = None,
        bytes: float | None = None,
    ) -> str:
        """Returns the trials as a table, the fastest first, with the reasons for the winner and for each failure.

        The winner has a star, the configs that tie with it have an equals sign. `> 23.8` is the time of a `slow`
        config: each of its runs took at least that long. A result from the cache shows the cached winner.

        Args:
            width: columns, as far as the texts can be broken; None for the width of the terminal, 120 without one.
            rows: the most rows; a line tells of the others. None for all of up to 40 configs, and the first 20 of more.
            flops: floating-point operations of one call, for a column of TFLOP/s.
            bytes: bytes that one call must move, for a column of GB/s.
        """
        if not self.trials:
            columns = report.columns_for(width)
            lines = [f"* {_winner(self)}", _sweep(self), "the cache keeps the winner; tune() tries the configs again"]
            return "\n".join(textwrap.fill(line, columns, subsequent_indent="  ") for line in lines)
        text = report.table(self, times.in_order(self), width=width, rows=rows, flops=flops, moved_bytes=bytes)
        return "\n".join([text, *(f"  {call}" for call in self.calls)])

    def __repr__(self) -> str:
        return f"{type(self).__name__}: {_winner(self)}\n  {_sweep(self)}"

    def _repr_html_(self) -> str:
        trials = times.in_order(self._shown)
        parts = [repr(self)]
        if trials:
            parts.append(report.table(self._shown, trials, width=120))
        text = html.escape("\n\n".join(parts))
        return f'<pre style="margin:0">{text}</pre>'

    def to_dicts(self) -> list[Row]:
        """Returns a flat dict for each trial, in the order of `trials`: the tunables, then the trial's fields.

        Further columns are `time_kind`, `speedup` (against the defaults), `is_best`, `is_tie` and `is_default`. A time
        is of the kind `final`, `median`, `mean` (over several calls) or `at least` (a bound). A tunable with the name
        of another column is under `config.<name>`. A result from the cache has one row, its winner.
        """
        shown = self._shown
        if not shown.trials:
            known = None if math.isnan(self.time_ms) else self.time_ms
            winner = Trial(config=shown.best_config, outcome=Outcome.OK, time_ms=known, device=self.device)
            winner = dataclasses.replace(winner, score=self.score, energy_mj=self.energy_mj)
            shown = dataclasses.replace(shown, trials=(winner,))
        return report.to_dicts(shown)

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Writes the rows of `to_dicts` as CSV in UTF-8, with a header; values other than scalars are JSON.

        Args:
            path: the file; an earlier one is replaced.

        Raises:
            OSError: the file cannot be written; an earlier one is unchanged.
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
            dtype: the dtype of its arithmetic, for the share of the device's peak; None leaves the share out.
        """
        return from_counts(self.time_ms, flops=flops, bytes=bytes, dtype=dtype, device=self.device)

    def report(self, path: str | os.PathLike[str]) -> None:
        """Writes the result as one self-contained HTML page: the winner, all trials and charts of them.

        For a result from the cache, it reads the trials from the journals in its directory, if they exist.

        Args:
            path: the file, such as `matmul.html`; an earlier one is replaced.

        Raises:
            OSError: the file cannot be written; an earlier one is unchanged.
        """
        html_report.write(path, [self._report_data()])

    def with_trials(self) -> Self:
        """Returns the result; a result from the cache gets the trials of its journal, if that exists."""
        if (cached := self._cached()) is None:
            return self
        found, own = cached.result, self.default_config
        fields = {name: getattr(found, name) for name in ("trials", "finalists", "tie")}
        told = dataclasses.replace(self, default_config=found.default_config if own is None else own, **fields)
        return told._restored(originals([self.best_config, own or {}]))

    def _cached(self) -> ResultData | None:
        """Returns the entry that the result is from, with the trials of its journal; None for other results."""
        if self.source is None or self.trials:
            return None
        directory, entry = self.source
        return result_of(directory, CacheKey(self.name, self.key, self.device), entry)

    @property
    def _shown(self) -> PlainResult:
        """The result in the form for tables and reports."""
        return self._as_shown(self)

    def _as_shown(self, result: PlainResult) -> PlainResult:
        """Returns this result, or the cache's data of it, in the form for tables and reports."""
        return result

    def _report_data(self) -> ResultData:
        if (found := self._cached()) is not None:
            return dataclasses.replace(found, result=self._as_shown(found.result))
        note = {
            True: "The result is from the cache, which holds no trials.",
            "rule": "The config is from a rule; the call was never tuned.",
            "nearest": "The config of a near call stands in for this one, which was never tuned.",
            "default": "The call was never tuned: the function's own defaults stand in.",
            False: "",
        }[self.from_cache]
        return ResultData(self._shown, _key_values(self.key), note)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Writes the result into a directory: JSON for people, the function and the compiled winner for `load`.

        Args:
            directory: created if necessary. An earlier result in it is replaced as a whole, or kept if saving fails.

        Raises:
            TypeError: the function cannot be pickled; the message names the reason.
            SavedResultError: the result was loaded without its function, or the directory has another program's
                `result.json`.
            OSError: writing to the directory failed.
        """
        folder = Path(directory)
        if isinstance(self.fn, functools.partial) and self.fn.func is _refuse:
            raise SavedResultError(
                f"this result was loaded without its function, so {str(folder)!r} would lack it: copy the saved "
                "directory, or load it with trusted=True and save that"
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
        """Reads a result that `save` wrote; a contextual result comes back without its kernels.

        Args:
            directory: the directory.
            trusted: whether code from the directory may run; without it, `fn` raises. With it, `fn` is the function. It
                runs the saved executable under the versions and the kind of device that it was saved on; elsewhere JAX
                compiles it again, with a warning. Plain callables and results from the cache are saved without an
                executable.

        Returns:
            The result.

        Raises:
            SavedResultError: the directory holds no result, a damaged result, or a result of a newer version.
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
        from quarantune.results.compiled_winner import Winner  # it imports jax.extend

        plain, call, *rest = pickling.loads(contents[FUNCTION])  # earlier versions saved no config values
        values = rest[0] if rest else {}
        loaded = self._restored(values)
        best = loaded.best_config
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
        return dataclasses.replace(loaded, fn=fn, executable=executable, call=call)

    def _restored(self, values: Mapping[str, Any]) -> Self:
        """Returns the result with config values that JSON does not preserve; see `restore`."""

        def restored(trials: Iterable[Trial]) -> tuple[Trial, ...]:
            return tuple(dataclasses.replace(trial, config=restore(trial.config, values)) for trial in trials)

        return dataclasses.replace(
            self,
            best_config=restore(self.best_config, values),
            trials=restored(self.trials),
            finalists=restored(self.finalists),
            tie=tuple(restore(config, values) for config in self.tie),
            default_config=None if self.default_config is None else restore(self.default_config, values),
        )


def _cell(value: object) -> object:
    return json.dumps(value) if isinstance(value, (Mapping, list, tuple, bool)) else value


def _key_values(key: str) -> Any:
    """Returns the description of the call in a key; the key itself if it is not JSON."""
    try:
        parts = decode_json(key.encode())
    except ValueError:
        return key
    return parts.get("call", key) if isinstance(parts, dict) else key


def _winner(result: TuningResult) -> str:
    """Returns the winner with its time and its speed-up."""
    return f"{result.config_text}, {result.findings.text()}"


def _sweep(result: TuningResult) -> str:
    """Returns the number of configs with each outcome, and the origin of the result."""
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
    elif result.from_cache == "rule":
        parts.append("the config of a rule, never tuned")
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
        time_ms: the median time of the whole function once this kernel had its config, in milliseconds.
        trials: the trials of the kernel's configs inside the function; empty for a result from the cache.
        tie: the configs that are as good as the chosen one within the noise, without it.
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

    `trials` holds every trial in order. Each trial's config maps the kernels to the configs that they used. All times
    are times of the whole function.

    Attributes:
        kernels: the choice for each kernel, in the order of the decisions.
        baseline_ms: the median time with every kernel at the first of its configs; None if that failed.
    """

    kernels: tuple[KernelChoice, ...] = dataclasses.field(default=(), metadata=IN_MEMORY)
    baseline_ms: float | None = dataclasses.field(default=None, metadata=IN_MEMORY)

    def table(
        self,
        *,
        width: int | None = None,
        rows: int | None = None,
        flops: float | None = None,
        bytes: float | None = None,
    ) -> str:
        """Returns a table for each kernel, with a star at its choice, and the gain of the whole function.

        Args:
            width: columns, as far as the texts can be broken; None for the width of the terminal, 120 without one.
            rows: the most rows; a line tells of the others. None for all of up to 40 configs, and the first 20 of more.
            flops: floating-point operations of one call of the whole function, for a column of TFLOP/s.
            bytes: bytes that one call of the whole function must move, for a column of GB/s.
        """
        parts, width = [], report.columns_for(width)
        for name, choice in zip(self.labels, self.kernels, strict=True):
            if choice.trials:
                of = dataclasses.replace(self._shown, best_config=choice.config, tie=choice.tie, trials=choice.trials)
                table = report.table(of, times.in_order(of), width=width, rows=rows, flops=flops, moved_bytes=bytes)
                parts.append(f"{name}\n{table}")
            else:
                parts.append(f"{name}: {format_config(choice.config)}")
        was = "" if self.baseline_ms is None else f", {self.baseline_ms:.4g} ms with every kernel's first config"
        return "\n\n".join([*parts, f"the whole function: {self.time_ms:.4g} ms{was}"])

    @property
    def config_text(self) -> str:
        """The choices for all kernels as readable text."""
        return "; ".join(f"{name}: {text}" for name, text in self._together.items())

    @property
    def _together(self) -> Config:
        """The choices for all kernels as one config, in the form of the trials' configs."""
        return {name: format_config(it.config) for name, it in zip(self.labels, self.kernels, strict=True)}

    def _as_shown(self, result: PlainResult) -> PlainResult:
        """Returns the result of the whole function: kernels are its tunables, their first configs the defaults.

        A config that was timed again, in the choice for another kernel, has the later time.
        """
        last = {text_of(trial.config): trial for trial in result.trials}
        return dataclasses.replace(
            result,
            trials=tuple(last.values()),
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
    """Returns the last part of each name; equal ones get numbers."""
    short = [name.rpartition(".")[2] for name in names]
    return [
        f"{name} #{short[: at + 1].count(name)}" if short.count(name) > 1 else name for at, name in enumerate(short)
    ]
