"""Which tunables change the bits of outputs, and what the bits of the defaults' output cost."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Sequence

from quarantune.values.codec import text_of
from quarantune.values.configs import Config, format_config
from quarantune.values.texts import printable
from quarantune.values.trial import SAME, UNSTABLE, Outcome, Trial, ratio_text


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
        """`never`, `sometimes` or `always`; empty without pairs."""
        never = "never" if self.pairs else ""
        return never if not self.differ else "always" if self.differ == self.pairs else "sometimes"


@dataclasses.dataclass(frozen=True)
class BitsReport:
    """The bits of the outputs of a sweep's configs.

    Attributes:
        tunables: how often each tunable changes bits, in the order of the tunables.
        is_whole: whether all configs of the space were tried. A search tries only some of them.
        fastest: the fastest config with the bits of the defaults' output, perhaps the defaults; None if unknown.
        fastest_ms: its time in milliseconds, from the final if it took part.
        price: that time divided by the winner's time; 1 if the winner has those bits itself; None if unknown.
        is_bound: whether that config was stopped early, so that its time and the price are lower bounds.
    """

    tunables: tuple[TunableBits, ...]
    is_whole: bool
    fastest: Config | None = None
    fastest_ms: float | None = None
    price: float | None = None
    is_bound: bool = False

    def __str__(self) -> str:
        """Returns the report in a few lines."""
        return "\n".join(self.lines)

    @property
    def lines(self) -> list[str]:
        """The report as sentences: what changes bits, and the price of the defaults' bits."""
        found: dict[str, list[str]] = {"never": [], "always": [], "sometimes": [], "": []}
        for each in self.tunables:
            is_clear = self.is_whole and each.verdict != "sometimes"
            pairs = "" if is_clear else f" ({each.differ} of {each.pairs})"
            found[each.verdict].append(f"{printable(each.name)} {each.verdict}{pairs}")
        told = [", ".join(names).replace(f" {verdict},", ",") for verdict, names in found.items() if verdict and names]
        lines = [f"bits: {'; '.join(told)}"] if told else []
        if self.fastest is not None and self.price is not None:
            least = "at least " if self.is_bound else ""
            who = f"{format_config(self.fastest)}, the fastest config with them, takes {least}{self.fastest_ms:.4g} ms"
            cost = f"the defaults' bits cost {least}{ratio_text(self.price)}: {who}"
            lines.append("the winner has the defaults' bits" if self.price == 1 else cost)
        return lines


def bits_of(trials: Sequence[Trial], *, best: Trial | None, defaults: Trial | None, is_whole: bool) -> BitsReport:
    """Returns the report on some trials.

    Args:
        trials: the trials of a sweep.
        best: the winner's trial; None if unknown.
        defaults: the trial of the defaults, one of `trials` or not; None if they have no time.
        is_whole: whether all configs were tried.
    """
    # An earlier sweep may have had other arguments, so its digests are not comparable.
    comparable = [trial for trial in trials if trial.bits == SAME or (trial.digest and trial.recalled_from is None)]
    known = [trial for trial in comparable if trial.bits != UNSTABLE]
    tunables = tuple(_pairs(name, known) for name in dict.fromkeys(name for trial in trials for name in trial.config))
    known_ms = [*trials, *([] if defaults is None or defaults in trials else [defaults])]
    if best is None or not best.time_ms or (fastest := _fastest(known_ms, best)) is None:
        return BitsReport(tunables, is_whole)
    shown_ms = fastest.time_ms or _ms(fastest)  # the time in tables, which is a bound for one that was stopped early
    price = 1.0 if fastest is best else shown_ms / best.time_ms
    return BitsReport(tunables, is_whole, fastest.config, shown_ms, price, fastest.is_bound)


def exact_winner(trials: Collection[Trial], best: Trial) -> Trial | None:
    """Returns the fastest trial with the defaults' bits; None without one, or if one of unknown bits may be faster.

    Args:
        trials: the trials, those of the defaults included.
        best: the winner, whatever its bits.
    """
    fastest = _fastest(trials, best)
    timed = [trial for trial in trials if trial.outcome in (Outcome.OK, Outcome.SLOW) and trial.bits is None]
    return None if fastest is None or any(_ms(trial) <= _ms(fastest) for trial in timed) else fastest


def _fastest(trials: Collection[Trial], best: Trial) -> Trial | None:
    same = [trial for trial in trials if trial.bits == SAME and _ms(trial)]
    return best if best.bits == SAME else min(same, key=_ms, default=None)


def _ms(trial: Trial) -> float:
    """Returns the time of a trial in milliseconds, or of its fastest run if it was stopped early; 0 if unknown."""
    times = {Outcome.OK: trial.time_ms, Outcome.SLOW: trial.merit}
    return times.get(trial.outcome) or 0.0


def _pairs(name: str, trials: Sequence[Trial]) -> TunableBits:
    """Counts the pairs that differ in one tunable only, and those of them whose bits differ."""
    groups: dict[str, list[str]] = {}
    for trial in trials:
        others = {other: value for other, value in trial.config.items() if other != name}
        if len(others) < len(trial.config):
            groups.setdefault(text_of(others), []).append(SAME if trial.bits == SAME else trial.digest)
    pairs = alike = 0
    for digests in groups.values():
        inputs = 1 + min((digest.count(".") for digest in digests if digest != SAME), default=0)  # slow ones have fewer
        counts = collections.Counter(tuple(digest.split(".")[:inputs]) for digest in digests).values()
        pairs += len(digests) * (len(digests) - 1) // 2
        alike += sum(count * (count - 1) // 2 for count in counts)
    return TunableBits(name, pairs, pairs - alike)
