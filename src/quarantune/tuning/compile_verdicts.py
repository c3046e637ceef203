"""Verdicts of compilers on configs: failed compilations, and the results of compile checks."""

from __future__ import annotations

import builtins
import dataclasses
import datetime
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from quarantune.cache import problems
from quarantune.cache.journal import Journal, understood
from quarantune.calls.key import KeyedCall
from quarantune.functions import versions
from quarantune.sweep.limits import SweepLimits
from quarantune.values.codec import JsonObject, Record, canonical_json, text_of
from quarantune.values.trial import UNSETTLED, CompilerFigures, Outcome, Phase, Route, Trial

_TRANSIENT = (OSError, ImportError, MemoryError, EOFError, KeyboardInterrupt, SystemExit, GeneratorExit)
"""Exceptions that are faults of the machine rather than of the config."""
_PASSING = re.compile(
    r"\b(UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED|(CUDA|HIP)_ERROR_\w+"
    r"|No space left on device|Too many open files|Cannot allocate memory|Resource temporarily unavailable)\b"
)
"""Texts of compilers' errors that are faults of the machine rather than of the config."""
_AT_COMPILE_TIME = frozenset({Outcome.ERROR, Outcome.DEVICE_OOM, Outcome.TIMEOUT, Outcome.OOM, Outcome.CRASHED})


class CompileVerdicts:
    """The failed compilations of one call for one kind of device, whether or not a device was present.

    They include successful compile checks, so that no check repeats another.
    """

    def __init__(self, call: KeyedCall, limits: SweepLimits, directory: Path, *others: Path) -> None:
        """Names the verdicts on the configs of a call without reading them.

        Args:
            call: the call, with the key of the target device.
            limits: the limits of the sweep.
            directory: the cache directory.
            *others: further directories with verdicts to look up.
        """
        self._device = call.id.device
        # These outlive the journal of a sweep, which starts over now and then.
        # A config may compile for some of the calls of one key only.
        self._journal, *self._others = (
            Journal(each, *call.id, suffix=".uncompiled", arguments=call.arguments_hash)
            for each in (directory, *others)
        )
        self._limits = limits
        self._compilers = versions.compilers(call.platform)

    def known(self, *, start_over: bool = False, with_compiled: bool = False) -> dict[str, Trial]:
        """Returns the trials of configs that nobody needs to compile again, by the text of the config.

        Args:
            start_over: whether to ignore failures that depend on the machine.
            with_compiled: whether to include configs that a check has compiled.
        """
        return {
            text: self._with_origin(it)
            for text, it in self._known.items()
            if (with_compiled or it.trial.outcome is not Outcome.OK) and it.counts(self._limits, start_over=start_over)
        }

    def note(self, trial: Trial, *, source: str) -> None:
        """Remembers a trial that failed to compile or has a compiler's figures; if it works, forgets its failure.

        Args:
            trial: the trial.
            source: the source of the trial: `a sweep` or `a compile check`.

        Raises:
            CacheWriteError: the trial could not be saved. The message says why.
        """
        is_verdict = _is_verdict(trial)
        if not is_verdict and (not self._known or not _compiled(trial)):
            return
        text = text_of(trial.config)
        before = self._known.get(text)
        if not is_verdict and (before is None or before.trial.outcome is Outcome.OK):
            return
        failure = _FailedCompile(
            trial=dataclasses.replace(trial, samples_ms=()),
            source=source,
            found=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
            compilers=self._compilers,
            compile_timeout_s=self._limits.compile_timeout_s,
            memory_limit_bytes=self._limits.memory_limit_bytes,
        )
        if before is not None and _is_same(before, failure):
            return
        self._journal.append(failure.to_json())
        if is_verdict:
            self._known[text] = failure
        else:
            self._known.pop(text, None)

    def discard(self) -> None:
        """Forgets all failures in the cache directory.

        Raises:
            CacheWriteError: the failures could not be removed. The message says why.
        """
        self._journal.discard()
        vars(self).pop("_known", None)

    @functools.cached_property
    def _known(self) -> dict[str, _FailedCompile]:
        """The last verdict on each config under the present versions."""
        last: dict[str, _FailedCompile] = {}
        records = (record for source in [*self._others, self._journal] for record in source.records())

        def complaint(refused: int) -> str:
            return (
                f"{refused} records of failed compilations in {str(self._journal.directory)!r} cannot be understood: "
                "their configs are compiled again"
            )

        for failure in understood(records, _FailedCompile.from_json, complaint):
            text = canonical_json(failure.trial.config)
            if failure.compilers == self._compilers and (text not in last or last[text].found <= failure.found):
                last[text] = failure
        return {text: failure for text, failure in last.items() if _is_verdict(failure.trial)}

    def _with_origin(self, failure: _FailedCompile) -> Trial:
        trial = failure.trial
        ended = "compiled" if trial.outcome is Outcome.OK else "failed to compile"
        origin = f"known since {failure.found[:10]}: {ended} for {self._device} in {failure.source}"
        return dataclasses.replace(trial, message=f"{origin}: {trial.message}" if trial.message else origin)


def note_check(verdicts: CompileVerdicts, trial: Trial) -> None:
    """Remembers a failure of a compile check, and warns if that is impossible."""
    try:
        verdicts.note(trial, source="a compile check")
    except problems.CacheWriteError as error:
        problems.report_once(f"the failures of a compile check are not remembered: {error}")


@dataclasses.dataclass(frozen=True)
class _FailedCompile(Record):
    """A failed compilation, or a successful compile check, with the conditions under which it counts.

    Attributes:
        trial: the trial. The trial of a successful check has the compiler's figures.
        source: its source, for messages: `a sweep` or `a compile check`.
        found: the time of the compilation, in UTC as ISO text.
        compilers: the versions and flags of the compilers.
        compile_timeout_s: the deadline of the compilation, in seconds.
        memory_limit_bytes: the memory limit of the compilation; None for a share of the free memory.
        figures: the compiler's figures of the trial; set only in a record.
    """

    trial: Trial
    source: str
    found: Annotated[str, _date]
    compilers: Mapping[str, Any]
    compile_timeout_s: float
    memory_limit_bytes: int | None
    figures: CompilerFigures | None = None

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Returns the failure that a record describes.

        Raises:
            DamageError: the data does not describe a failure.
        """
        read = super().from_json(data)
        if read.figures is None:
            return read
        return dataclasses.replace(
            read, trial=dataclasses.replace(read.trial, outcome=Outcome.OK, figures=read.figures)
        )

    def to_json(self) -> JsonObject:
        """Returns the failure as JSON-able data."""
        data, figures = super().to_json(), self.trial.figures
        if self.trial.outcome is not Outcome.OK or figures is None:
            return {name: value for name, value in data.items() if name != "figures"}
        # Readers of files refuse an `ok` trial without a time.
        trial = dataclasses.replace(self.trial, outcome=Outcome.NOT_RUN, figures=None)
        return data | {"trial": trial.to_json(), "figures": figures.to_json()}

    def counts(self, limits: SweepLimits, *, start_over: bool) -> bool:
        """Returns whether the failure makes another compilation of the config needless.

        An error of the compiler always counts. A lack of time or memory depends on the machine: it counts only under
        limits that are not more generous, and not if the sweep starts over.
        """
        match self.trial.outcome:
            case Outcome.OK | Outcome.ERROR | Outcome.DEVICE_OOM:
                return True
            case Outcome.TIMEOUT:
                return not start_over and self.compile_timeout_s >= limits.compile_timeout_s
            case Outcome.OOM:
                return not start_over and self._had_as_much_memory(limits)
            case Outcome.CRASHED:
                same = self.memory_limit_bytes == limits.memory_limit_bytes
                return not start_over and (same or self._had_as_much_memory(limits))
        return False

    def _had_as_much_memory(self, limits: SweepLimits) -> bool:
        then, now = self.memory_limit_bytes, limits.memory_limit_bytes
        return then is not None and now is not None and then >= now


def _date(text: str) -> str:
    datetime.datetime.fromisoformat(text)
    return text


def _is_verdict(trial: Trial) -> bool:
    """Returns whether a trial shows that its config does not compile, or compiles in a check, without other faults.

    A lack of device memory is a verdict if the compiler has no device, or names a memory space: it has then computed
    that the memory is too small. In a worker that holds the device, other programs may have taken the memory.
    """
    if trial.outcome is Outcome.OK:
        return trial.time_ms is None and trial.figures is not None
    if trial.phase is not Phase.COMPILE or trial.outcome not in _AT_COMPILE_TIME:
        return False
    if trial.outcome is Outcome.DEVICE_OOM:
        return trial.route is Route.APART or "memory space" in trial.message
    return trial.outcome is not Outcome.ERROR or not _is_transient(trial.message)


def _is_transient(message: str) -> bool:
    name = message.partition(":")[0].strip()
    kind = getattr(builtins, name, None)
    is_ours = name.startswith("quarantune.")  # such as `UncheckableError`: the config never reached a compiler
    is_transient = isinstance(kind, type) and issubclass(kind, _TRANSIENT)
    return is_ours or is_transient or _PASSING.search(message) is not None


def _compiled(trial: Trial) -> bool:
    has_run = trial.outcome not in UNSETTLED and trial.phase in (Phase.CHECK, Phase.MEASURE)
    return has_run or trial.outcome is Outcome.OK


def _is_same(before: _FailedCompile, after: _FailedCompile) -> bool:
    """Returns whether a failure adds nothing to an earlier one."""
    return (
        (before.trial.outcome, before.trial.message, before.trial.figures)
        == (after.trial.outcome, after.trial.message, after.trial.figures)
        and before.compile_timeout_s >= after.compile_timeout_s
        and before.memory_limit_bytes == after.memory_limit_bytes
    )
