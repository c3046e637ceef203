"""The final: which configs are in it, and how it decides the winner and its ties."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from quarantune.host.waits import RunTime, fastest
from quarantune.measure.model import ALL_DISTURBED, ENOUGH, FEW, LONG_RUN_MS, MARGINS, cautious_share, standard_error
from quarantune.measure.objective import Objective, scored_rounds
from quarantune.values.codec import is_plausible_ms
from quarantune.values.trial import TIME, UNTUNED, Outcome, Trial

_T = TypeVar("_T")
_Rows: TypeAlias = Sequence[Sequence[Any]]

FINALISTS = 4
MOST_FINALISTS = 8
"""The number of finalists if the machine was busy: the times that choose them are less reliable then."""
FAR = 1.2
"""Factor above which a finalist that was slower in each of the first `FEW` rounds will not win in two more."""
_PREFERENCE = 0.015
"""Largest slowdown, as a share, that the function's own default may have and still win a tie."""
_SIGMAS = 3.0
_CLEAR_SIGMAS = 5.0
"""Standard errors needed to stop early: equals that are compared after every round differ by `_SIGMAS` at times."""
NOISE_FLOOR = 0.005
"""Share within which two medians tie. On an H200, one program's median differs by a third of a percent between
processes, so the winner among equals would be arbitrary."""
WARM_BUDGET_S = 0.2
"""Seconds for comparing configs that tie with cold caches again with warm caches, which callers often have."""
WARM_FLOOR = 0.002
"""Noise floor with warm caches: the difference of one program from itself within a process."""


def default_among(trials: Mapping[int, Trial], default: int | None) -> int:
    """Returns the index of the function's own defaults: `default` if they were timed as a config, else `UNTUNED`."""
    return default if default is not None and default in trials and _is_timed(trials[default]) else UNTUNED


def _is_timed(trial: Trial) -> bool:
    return trial.outcome in (Outcome.OK, Outcome.SLOW) and trial.time_ms is not None


def by_machine(trials: Mapping[int, Trial]) -> list[dict[int, Trial]]:
    """Returns the trials by index, apart for each machine or rank that measured them."""
    machines: dict[str, dict[int, Trial]] = {}
    for index, trial in trials.items():
        machines.setdefault(trial.machine, {})[index] = trial
    return list(machines.values())


def in_final(trials: Mapping[int, Trial], default: int | None) -> list[int]:
    """Returns the indices of the trials to compare in the final: the fastest, and last the defaults if they work.

    If several ranks measured configs, the fastest of each rank is one of them: its device may be slower.

    Args:
        trials: the trials by index; the defaults' trial is under `UNTUNED` if they are not a config.
        default: the index of the config that equals the defaults; None without one.
    """
    configs = {index: trial for index, trial in trials.items() if index != UNTUNED}
    chosen = finalists(configs)
    leaders = [index for group in by_machine(configs) for index in finalists(group)[:1] if index not in chosen]
    chosen += sorted(leaders, key=lambda index: trials[index].merit or 0.0)[:MOST_FINALISTS]
    defaults = default_among(trials, default)
    is_there = defaults in trials and _is_timed(trials[defaults])
    if not chosen or not is_there or _program(defaults, trials) in [_program(index, trials) for index in chosen]:
        return chosen
    return [*chosen, defaults]


def finalists(trials: Mapping[int, Trial], *, count: int = FINALISTS) -> list[int]:
    """Returns the indices of the trials that may be the fastest, in order; a single one if nothing is close to it.

    Configs that lowered to the same program were measured once. The first of them represents all.
    """
    measured = [index for index, trial in trials.items() if trial.is_usable]
    first_of = {_program(index, trials): index for index in sorted(measured, reverse=True)}
    ranked = sorted(first_of.values(), key=lambda index: (trials[index].merit or 0.0, index))
    if not ranked:
        return []
    best, is_scored = trials[ranked[0]].merit or 0.0, trials[ranked[0]].score is not None
    contender = MARGINS[trials[ranked[0]].clock or "wall"]
    close = [index for index in ranked if _ratio(best, trials[index].merit or 0.0) <= contender]
    if is_scored or (noise := _noise(trials)) < MARGINS["wall"]:
        return close[:count]
    # Few samples ruled these out, and other processes may have disturbed all their runs.
    few = {
        index: trial.merit
        for index, trial in trials.items()
        if trial.outcome is Outcome.SLOW and trial.merit is not None and len(trial.samples_ms) <= FEW
    }
    again = sorted((index for index, merit in few.items() if merit <= noise * best), key=few.__getitem__)
    # Ranks by many samples are more reliable than ranks by few.
    most = max(count, MOST_FINALISTS)
    seconds = again[: most - count]
    return close[: most - len(seconds)] + seconds


def _noise(trials: Mapping[int, Trial]) -> float:
    """Returns the machine's noise: the ratio of the longest sample to the fastest of a typical config.

    Configs timed by a device's own clock do not count: it is free of this noise.
    """
    shares = [
        max(trial.samples_ms) / trial.merit
        for trial in trials.values()
        if trial.outcome is Outcome.OK and trial.merit and trial.clock != "device" and trial.samples_ms
    ]
    return statistics.median(shares) if shares else 1.0


def with_same_program(rounds: Mapping[int, _T], trials: Mapping[int, Trial]) -> dict[int, _T]:
    """Returns the rounds of a final, also for the configs whose program another config ran in it.

    Args:
        rounds: each finalist's samples, or its observed figures, by index.
        trials: the trials that may win, by index, as before the final.
    """
    timed = {_program(index, trials): each for index, each in rounds.items() if index in trials}
    return {index: timed[program] for index in trials if (program := _program(index, trials)) in timed}


def _program(index: int, trials: Mapping[int, Trial]) -> object:
    """Returns a key that is equal for configs that lowered to the same program: its samples and its compile time.

    Samples alone may be equal by chance: a GPU's clock ticks every 32 ns, and a small kernel takes a hundred ticks.
    """
    trial = trials[index]
    return (trial.samples_ms, trial.compile_s) if trial.samples_ms else index


@dataclasses.dataclass(frozen=True)
class Final:
    """The samples of a final.

    Attributes:
        rounds_ms: each finalist's samples in milliseconds, one per round, by index; empty without a final. A finalist
            that was clearly behind may have fewer rounds.
        warm_ms: the same with warm device caches, for the configs that the other rounds cannot tell apart; empty if
            that was not needed, or without a device clock.
        observed: the observers' figures for one run of each, round by round; empty without observers.
        objective: the author's objective, which decides the rounds.
        processes: how many rounds each process took, in the order of the samples; empty if one took all.
        typical_ms: each finalist's median time in each process, with waits and interruptions; empty if unknown.
    """

    rounds_ms: Mapping[int, Sequence[float]] = dataclasses.field(default_factory=dict)
    warm_ms: Mapping[int, Sequence[float]] = dataclasses.field(default_factory=dict)
    observed: Mapping[int, Sequence[Mapping[str, float]]] = dataclasses.field(default_factory=dict)
    objective: Objective = TIME
    processes: tuple[int, ...] = ()
    typical_ms: Mapping[int, tuple[float, ...]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls, finalists: Iterable[int], rounds_ms: _Rows, warm_ms: _Rows, observed: _Rows = (), **fields: Any
    ) -> Final:
        """Returns the final of some finalists.

        Args:
            finalists: their indices.
            rounds_ms: the samples of each, in the same order.
            warm_ms: the samples of each with warm caches, which may be empty.
            observed: for each of a few rounds, the observers' figures for each finalist; empty without observers.
            **fields: further fields.

        Raises:
            ValueError: the numbers of samples or the figures do not fit one final.
        """
        indices = list(finalists)
        if len({frozenset(figures) for each in observed for figures in each}) > 1:
            raise ValueError("the finalists have different figures")
        return cls(
            dict(zip(indices, rounds_ms, strict=True)),
            {index: samples_ms for index, samples_ms in zip(indices, warm_ms, strict=True) if samples_ms},
            dict(zip(indices, zip(*observed, strict=True), strict=True)) if observed else {},
            **fields,
        )

    def __post_init__(self) -> None:
        """Raises ValueError if a finalist has fewer rounds than others although it was not behind."""
        for rounds in filter(None, (self.rounds_ms, self.warm_ms)):
            leader = max(rounds.values(), key=len)
            least_ms = FAR * statistics.median(leader)
            if any(len(each) < len(leader) and statistics.median(each) <= least_ms for each in rounds.values()):
                raise ValueError("the finalists have different numbers of rounds")

    @property
    def counts(self) -> tuple[int, ...]:
        """How many rounds each process took."""
        return self.processes or (max(map(len, self.rounds_ms.values()), default=0),)

    @property
    def lasting(self) -> list[int]:
        """The indices of the finalists that took part in every round."""
        return [index for index, each in self.rounds_ms.items() if len(each) == sum(self.counts)]

    def joined(self, other: Final) -> Final:
        """Returns this final with the rounds that another process took of `lasting`; without, if they are uneven."""
        if list(other.rounds_ms) != self.lasting or other.lasting != self.lasting:
            return self
        rounds_ms, typical_ms = (
            {index: (*each, *more.get(index, ())) for index, each in first.items()}
            for first, more in ((self.rounds_ms, other.rounds_ms), (self.typical_ms, other.typical_ms))
        )
        counts = (*self.counts, *other.counts)
        return dataclasses.replace(self, rounds_ms=rounds_ms, processes=counts, typical_ms=typical_ms)


def decide(
    rounds: Mapping[int, Sequence[float]],
    *,
    default: int | None,
    warm: Mapping[int, Sequence[float]] | None = None,
) -> list[int]:
    """Returns the indices of the configs that a final cannot tell from each other, the winner first.

    Warm rounds, if there are any, decide between configs that tie with cold caches. Among ties, the function's own
    default wins, unless it is slower than the fastest by more than `_PREFERENCE`. Otherwise the first in the list of
    configs wins that is slower by at most `NOISE_FLOOR`. Defaults that are not in the list, under `UNTUNED`, win only
    if no config is within `_PREFERENCE` of them; if they do not win, they are left out.

    Args:
        rounds: each finalist's samples, one per round, in milliseconds, by index.
        default: the index of the config that is the function's own default, if it is in the list.
        warm: the same with warm caches, for the configs that tie.
    """
    tied = level(rounds)
    if warm and all(index in warm for index in tied):
        rounds = {index: warm[index] for index in tied}
        tied = level(rounds, floor=WARM_FLOOR)
    leader = leader_of(rounds, tied)
    behind = {index: 0.0 if index == leader else _behind(rounds[leader], rounds[index]) for index in tied}
    most = _PREFERENCE if leader == UNTUNED else NOISE_FLOOR
    winner = next((index for index in tied if index != UNTUNED and behind[index] <= most), UNTUNED)
    if default is not None and behind.get(default, 1.0) <= _PREFERENCE:
        winner = default
    return [winner, *(index for index in tied if index not in (winner, UNTUNED))]


def level(rounds: Mapping[int, Sequence[float]], *, floor: float = NOISE_FLOOR) -> list[int]:
    """Returns, in order, the indices of a final's fastest config and of the configs that tie with it.

    Samples of one round were taken one right after another, so their ratios are free of drift between rounds.
    Two configs tie if their median ratio is within its own error, or within `floor`, of one.
    """
    leader = leader_of(rounds, rounds)
    return sorted(index for index in rounds if index == leader or _ties(rounds[leader], rounds[index], _SIGMAS, floor))


def conclude(
    trials: Mapping[int, Trial], final: Final, *, default: int | None, untuned_wins: bool = True
) -> tuple[dict[int, Trial], list[int]]:
    """Settles a sweep.

    Args:
        trials: its trials by index, at least one of them `ok`.
        final: the finalists' samples.
        default: the index of the config that is the function's own default, if it is in the list.
        untuned_wins: whether the defaults may win if they are not a config.

    Returns:
        The trials, finalists with their times in the final, and the result of `decide`.
    """
    usable = {
        index: trial
        for index, trial in sorted(trials.items())
        if (trial.outcome is Outcome.OK or index in final.rounds_ms) and trial.time_ms is not None
    }
    may_win = usable.keys() if untuned_wins else usable.keys() - {UNTUNED}
    fastest = min(may_win, key=lambda index: usable[index].merit or 0.0)
    timed, warm = with_same_program(final.rounds_ms, usable), with_same_program(final.warm_ms, usable)
    rounds = timed or with_same_program({fastest: usable[fastest].samples_ms}, usable)
    settled, figures = dict(trials), dict(rounds)
    seen = with_same_program(final.observed, usable)
    for index, samples_ms in rounds.items():
        settled[index] = dataclasses.replace(
            trials[index],
            time_ms=statistics.median(samples_ms),
            samples_ms=tuple(samples_ms),
            outcome=Outcome.OK,
            message=_message(trials[index]),
        )
        if usable[index].score is not None:
            settled[index], figures[index] = scored_rounds(settled[index], seen.get(index, ()), final.objective)
            warm = {}
    racing = {index: each for index, each in figures.items() if index in may_win}
    racing = racing or {fastest: [usable[fastest].merit or 0.0]}
    return settled, decide(racing, default=default, warm=warm)


def _message(trial: Trial) -> str:
    """Returns a finalist's message without the reason why few samples ruled it out: the final has measured it."""
    return trial.message.rpartition(": ")[0] if trial.outcome is Outcome.SLOW else trial.message


def is_clear(rounds: Mapping[int, Sequence[float]], *, floor: float = NOISE_FLOOR) -> bool:
    """Returns whether more rounds would change nothing: each finalist is clearly behind, or level within the noise."""
    leader = min(rounds, key=lambda index: statistics.median(rounds[index]))
    others = [rounds[index] for index in rounds if index != leader]
    return all(
        not _ties(rounds[leader], other, _CLEAR_SIGMAS, floor) or _is_level(rounds[leader], other, floor)
        for other in others
    )


def leader_of(rounds: Mapping[int, Sequence[float]], among: Iterable[int]) -> int:
    """Returns the contender with the shortest median."""
    return min(among, key=lambda index: (statistics.median(rounds[index]), index))


def _behind(leader: Sequence[float], other: Sequence[float]) -> float:
    """Returns how much slower one contender is than the leader, as a share."""
    return statistics.median(_ratios(leader, other)) - 1.0


def _ties(leader: Sequence[float], other: Sequence[float], sigmas: float, floor: float) -> bool:
    return _behind(leader, other) <= max(floor, sigmas * standard_error(_ratios(leader, other)))


def _is_level(leader: Sequence[float], other: Sequence[float], floor: float) -> bool:
    """Returns whether the noise between two is so low that more rounds would not tell them apart any better."""
    ratios = _ratios(leader, other)
    return len(ratios) >= 2 * ENOUGH and _SIGMAS * standard_error(ratios) < floor


def _ratios(leader: Sequence[float], other: Sequence[float]) -> list[float]:
    return [_ratio(ours, theirs) for ours, theirs in zip(leader, other, strict=False)]


def _ratio(ours: float, theirs: float) -> float:
    """Returns `theirs` as a multiple of `ours`; if `ours` is not positive (a score), 1 plus their relative distance."""
    if ours > 0:
        return theirs / ours
    return 1.0 if ours == theirs else 1.0 + (theirs - ours) / abs(ours) if ours else math.copysign(math.inf, theirs)


# --- the rounds of the final ---


_MOST_PER_ROUND = 10
_ROUND_MS = 1.0
"""Milliseconds of runs that one contender takes in a round; each run may be shorter than the profiler's own work."""
_CLEARLY = 3.0
"""Factor above which a finalist that was slower in all its rounds cannot win: only its time is wanted."""
_LONG_FINAL_S = 0.5
"""Seconds of rounds after which a clearly slower finalist leaves, once it had `FEW` of them."""
_LONGEST_FINAL_S = 3.0
"""Seconds of rounds after which a clearly slower finalist leaves in any case: defaults may take 100 times as long as
the winner."""
_VERY_LONG_MS = 1000.0
"""Length of a run above which a cold start hardly matters, so the first run counts."""
_MAX_ROUNDS = 100
_BUDGET_S = 0.8
_BUSY_BUDGET_S = 2.4
_BUSY_ROUNDS = 20
"""The fewest rounds on a busy machine before the fastest of them decide."""
_SCATTERED = 1.08
"""Ratio of a contender's typical round to its fastest above which other processes disturbed it."""


def take_turns(
    contenders: Sequence[Callable[[int], Sequence[RunTime]]],
    *,
    floor: float = NOISE_FLOOR,
    is_exact: bool = True,
    budget_s: float | None = None,
    rep: int = _MAX_ROUNDS,
    clock: Callable[[], float] = time.perf_counter,
) -> list[list[float]]:
    """Times contenders in turn until the fastest is clear, the noise is as low as it gets, or the rounds run out.

    Args:
        contenders: each takes a number of samples, in milliseconds.
        floor: the smallest difference that can separate two contenders, as a share.
        is_exact: whether samples are free of the effects of other processes. If not, the fastest of several rounds
            stands for all of them, because other processes only make rounds longer.
        budget_s: the most seconds of rounds, after the least that a result needs; None for the usual time, which is
            longer if other processes disturb the rounds.
        rep: the largest number of samples of a contender. Short runs get several times as many rounds, which count
            together.
        clock: returns seconds.

    Returns:
        Each contender's samples, one per round: the median of a few taken together, or the fastest of them. A contender
        that is clearly behind, and whose rounds take long, has fewer.
    """
    warmed = [_plausible(take(1)) for take in contenders]  # the first sample is not counted, unless it is very long
    taken: dict[int, list[RunTime]] = {index: [] for index in range(len(contenders))}
    racing, spent_s = dict.fromkeys(taken), dict.fromkeys(taken, 0.0)
    started, most_s = clock(), math.inf if budget_s is None else budget_s
    for count in range(1, _MAX_ROUNDS + 1):
        for index in racing:
            began = clock()
            # Instead of an implausible batch, the last round counts again, so that rounds stay aligned.
            last = [sample.cpu for sample in taken[index][-1:] or warmed[index]]
            is_enough = count == 1 and bool(last) and last[-1] > _VERY_LONG_MS
            samples = warmed[index] if is_enough else _plausible(contenders[index](_samples_for(last)))
            samples = samples or [RunTime.exactly(ms) for ms in last]
            if not samples:
                raise ValueError("the clock gave no plausible sample")
            typical = RunTime.exactly(statistics.median(sample.cpu for sample in samples))
            taken[index].append(typical if is_exact else fastest(samples))
            spent_s[index] += 1e-3 * last[-1] if is_enough else clock() - began
        rounds = {index: [sample.cpu for sample in each] for index, each in taken.items()}
        racing = {index: None for index in racing if not _leaves(rounds, index, spent_s[index])}
        marks = {index: rounds[index] for index in racing}
        passed_s = clock() - started - sum(spent_s[index] for index in rounds.keys() - racing.keys())
        is_long = any(samples_ms[-1] > LONG_RUN_MS for samples_ms in marks.values())
        is_over = count >= (rep if is_long else ENOUGH * rep)
        if not is_exact and any(_is_disturbed(taken[index]) for index in racing):
            if count >= ENOUGH and _is_won({index: taken[index] for index in racing}):
                rounds = {index: _fastest_rounds(each) for index, each in taken.items()}
                break
            folded = _folded(taken)
            is_settled = count >= _BUSY_ROUNDS and is_clear({index: folded[index] for index in racing}, floor=floor)
            if is_over or (count >= ENOUGH and (is_settled or passed_s > min(most_s, _BUSY_BUDGET_S))):
                rounds = folded
                break
            continue
        if count >= ENOUGH and (is_clear(marks, floor=floor) or passed_s > min(most_s, _BUDGET_S)):
            break
        if is_over or (count >= FEW and is_clear(marks, floor=FAR - 1)):
            break
    joined = statistics.median if is_exact else min
    return [
        [joined(each[first :: min(rep, len(each))]) for first in range(min(rep, len(each)))] for each in rounds.values()
    ]


def _leaves(rounds: Mapping[int, Sequence[float]], index: int, spent_s: float) -> bool:
    """Returns whether a contender leaves: it was clearly behind in every round, and its rounds took long."""
    leader = leader_of(rounds, rounds)
    is_behind = all(theirs > _CLEARLY * ours for ours, theirs in zip(rounds[leader], rounds[index], strict=False))
    is_long = spent_s > _LONG_FINAL_S and len(rounds[index]) >= FEW
    return is_behind and (is_long or spent_s > _LONGEST_FINAL_S)


def _plausible(samples: Sequence[RunTime]) -> list[RunTime]:
    return [sample for sample in samples if is_plausible_ms(sample.whole) and is_plausible_ms(sample.cpu)]


def _is_disturbed(rounds: Sequence[RunTime]) -> bool:
    """Returns whether other processes disturbed one contender's rounds."""
    cpu_ms = [taken.cpu for taken in rounds]
    waited = sum(taken.is_disturbed for taken in rounds)
    return 2 * waited > len(rounds) or statistics.median(cpu_ms) > _SCATTERED * min(cpu_ms)


def _folded(rounds: Mapping[int, Sequence[RunTime]]) -> dict[int, list[float]]:
    """Returns fewer rounds, each the fastest of several from different times of the final."""
    return {
        index: [fastest(taken[first::ENOUGH]).cpu for first in range(min(ENOUGH, len(taken)))]
        for index, taken in rounds.items()
    }


def _is_won(rounds: Mapping[int, Sequence[RunTime]]) -> bool:
    """Returns whether one contender is so far ahead that disturbances do not explain it.

    For another one to be as fast, each of its rounds must have been disturbed, by more than the factor between the
    fastest rounds of the two. The rounds of all contenders show how often that happens.
    """
    quick = {index: _fastest_rounds(taken) for index, taken in rounds.items()}
    leader = min(quick, key=lambda index: quick[index])
    lengthened = [taken.cpu / quick[index][0] for index in rounds for taken in rounds[index]]
    for index in rounds.keys() - {leader}:
        factor = quick[index][0] / quick[leader][0]
        share = cautious_share(sum(each > factor for each in lengthened), len(lengthened))
        if quick[index][0] <= FAR * quick[leader][-1] or share ** len(rounds[index]) > ALL_DISTURBED:
            return False
    return True


def _fastest_rounds(rounds: Sequence[RunTime]) -> list[float]:
    """Returns the fastest rounds, sorted by time: other processes disturbed them least."""
    clean = [taken for taken in rounds if taken.is_clean]
    chosen = clean if len(clean) >= FEW else rounds
    return sorted(taken.cpu for taken in chosen)[:FEW]


def _samples_for(last_ms: Sequence[float]) -> int:
    """Returns how many samples a contender takes in a round, by its last run; `last_ms` may be empty."""
    if not last_ms:
        return FEW
    if last_ms[-1] > LONG_RUN_MS:
        return 1
    return max(FEW, min(_MOST_PER_ROUND, round(_ROUND_MS / last_ms[-1])))
