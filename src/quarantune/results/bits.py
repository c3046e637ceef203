"""Which tunables change the bits of outputs, and what the bits of the defaults cost."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from quarantune.values.codec import JsonObject, as_json, text_of
from quarantune.values.configs import Config, format_config
from quarantune.values.texts import printable
from quarantune.values.trial import INVARIANT, SAME, UNSTABLE, Outcome, Trial, ratio_text


@dataclasses.dataclass(frozen=True)
class TunableBits:
    """How often a tunable changes the bits of the output.

    Attributes:
        name: the tunable.
        pairs: the number of pairs of tried configs that differ in this tunable only, and whose bits are known.
        differ: the number of those pairs whose outputs have different bits.
    """

    name: str
    pairs: int
    differ: int

    @property
    def verdict(self) -> str:
        """`never`, `sometimes` or `always`; `unknown` without pairs."""
        if not self.pairs:
            return "unknown"
        return "never" if not self.differ else "always" if self.differ == self.pairs else "sometimes"


@dataclasses.dataclass(frozen=True)
class BitsReport:
    """The bits of the outputs of a sweep's configs.

    Attributes:
        counts: the number of configs by `Trial.bits`; configs of unknown bits do not count.
        batch: the number of configs by `Trial.batch`.
        tunables: how often each tunable changes bits, in the order of the tunables.
        is_whole: whether all configs of the space were tried. A search tries only some of them.
        fastest: the fastest config with the bits of the defaults' output, perhaps the defaults; None if unknown.
        fastest_ms: its time in milliseconds, from the final if it took part.
        price: that time divided by the winner's time; 1 if the winner has those bits itself; None if unknown.
    """

    counts: dict[str, int]
    batch: dict[str, int]
    tunables: tuple[TunableBits, ...]
    is_whole: bool
    fastest: Config | None = None
    fastest_ms: float | None = None
    price: float | None = None

    def __str__(self) -> str:
        """Returns the report in a few lines."""
        return "\n".join(self.lines)

    @property
    def lines(self) -> list[str]:
        """The report as sentences: what changes bits, the price of the defaults' bits, and the batch."""
        found = []
        for verdict in ("never", "always", "sometimes"):
            names = [self._named(each) for each in self.tunables if each.verdict == verdict]
            found += [f"{', '.join(names)} {verdict}"] if names else []
        lines = [f"bits: {'; '.join(found)}"] if found else []
        if self.fastest is not None and self.fastest_ms is not None and self.price is not None:
            who = f"{format_config(self.fastest)}, the fastest config with them, takes {self.fastest_ms:.4g} ms"
            cost = f"the defaults' bits cost {ratio_text(self.price)}: {who}"
            lines.append("the winner has the defaults' bits" if self.price == 1 else cost)
        if known := sum(self.batch.values()):
            lines.append(f"batch: {self.batch.get(INVARIANT, 0)} of {known} configs are invariant to it")
        return lines

    def _named(self, tunable: TunableBits) -> str:
        is_clear = self.is_whole and tunable.verdict != "sometimes"
        return printable(tunable.name) + ("" if is_clear else f" ({tunable.differ} of {tunable.pairs})")

    def to_json(self) -> JsonObject:
        """Returns the report as JSON-able data."""
        tunables = [{**dataclasses.asdict(each), "verdict": each.verdict} for each in self.tunables]
        return {**vars(self), "tunables": tunables, "fastest": None if self.fastest is None else as_json(self.fastest)}


def bits_of(trials: Sequence[Trial], *, best: Trial | None, defaults: Trial | None, is_whole: bool) -> BitsReport:
    """Returns the report on some trials.

    Args:
        trials: the trials of a sweep.
        best: the winner's trial; None if unknown.
        defaults: the trial of the defaults, one of `trials` or not; None if they have no time.
        is_whole: whether all configs were tried.
    """
    known = [trial for trial in trials if trial.digest and trial.bits != UNSTABLE]
    timed = {Outcome.OK, Outcome.SLOW}
    same = [trial for trial in trials if trial.bits == SAME and trial.outcome in timed and trial.time_ms is not None]
    same += [] if defaults is None or defaults.bits == UNSTABLE else [defaults]
    fastest = best if best in same else min(same, key=shown_ms, default=None)
    price = None
    if fastest is not None and best is not None and best.time_ms:
        price = 1.0 if fastest is best else shown_ms(fastest) / best.time_ms
    return BitsReport(
        dict(collections.Counter(trial.bits for trial in trials if trial.bits is not None)),
        dict(collections.Counter(trial.batch for trial in trials if trial.batch is not None)),
        tuple(_pairs(name, known) for name in dict.fromkeys(name for trial in trials for name in trial.config)),
        is_whole,
        None if fastest is None or price is None else fastest.config,
        None if fastest is None else shown_ms(fastest),
        price,
    )


def shown_ms(trial: Trial) -> float:
    """Returns the time of a trial in milliseconds; for one that was stopped early, the time of its fastest run."""
    return (trial.merit if trial.outcome is Outcome.SLOW else trial.time_ms) or 0.0


def _pairs(name: str, trials: Sequence[Trial]) -> TunableBits:
    """Counts the pairs that differ in one tunable only, and those of them whose bits differ."""
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        if name in trial.config:
            others = {other: value for other, value in trial.config.items() if other != name}
            groups.setdefault(text_of(others), []).append(trial)
    pairs = alike = 0
    for group in groups.values():
        inputs = min(trial.digest.count(".") for trial in group) + 1  # slow configs may lack some
        classes = collections.Counter(tuple(trial.digest.split(".")[:inputs]) for trial in group)
        pairs += len(group) * (len(group) - 1) // 2
        alike += sum(count * (count - 1) // 2 for count in classes.values())
    return TunableBits(name, pairs, pairs - alike)


def shown(trials: Sequence[Trial]) -> dict[str, list[str]]:
    """Returns the columns of a table on bits, by heading; only those in which trials differ."""
    columns = {"bits": [trial.bits or "" for trial in trials], "batch": [trial.batch or "" for trial in trials]}
    return {heading: cells for heading, cells in columns.items() if len({*cells} - {""}) > 1}
