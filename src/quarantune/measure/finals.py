"""The final: which configs are in it, how they are timed, and how it decides the winner and its ties."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from quarantune.host.waits import RunTime, fastest
from quarantune.measure.sampling import ALL_DISTURBED, cautious_share, standard_error
from quarantune.values.trial import UNTUNED, Outcome, Trial, is_plausible_ms

FINALISTS = 4
MOST_FINALISTS = 8
"""The number of finalists where the machine was busy, which makes the times that they are chosen by less reliable."""
_CONTENDER = 1.5
"""A config this many times slower than the fastest is not in the final."""
_EXACT_CONTENDER = 1.15
"""The same where a device's own clock, which no other process disturbs, took the times."""
_BUSY_NOISE = 1.5
"""Where the longest sample of a typical config is this many times its fastest, the machine was busy."""
_FEW_SAMPLES = 4
"""Other processes can have disturbed all samples of a config with fewer: on a busy machine it is measured again."""
_PER_ROUND = 3
_MOST_PER_ROUND = 10
_ROUND_MS = 1.0
"""How long one contender's samples of a round take, where each is shorter than the profiler's own work."""
_LONG_MS = 5.0
"""A run of this length is a sample by itself: the interruptions that disturb single samples are much shorter."""
_MIN_ROUNDS = 5
_FEWEST_ROUNDS = 3
_FAR = 1.2
"""A finalist this many times slower in each of the `_FEWEST_ROUNDS` first rounds will not win in two more."""
_MAX_ROUNDS = 100
_BUDGET_S = 0.8
_BUSY_BUDGET_S = 2.4
_BUSY_ROUNDS = 20
"""The fewest rounds on a busy machine, before their fastest decide."""
_FOLDED = 5
"""The number of rounds that the rounds of a busy machine are folded into."""
_SCATTERED = 1.08
"""Where a typical round of one contender is this many times longer than its fastest, other processes disturbed it."""
_PREFERENCE = 0.015
"""Among configs that tie, a preferred one may be slower than the fastest by at most this share."""
_SIGMAS = 3.0
_CLEAR_SIGMAS = 5.0
"""Stopping early takes more: equals that are compared after every round differ by `_SIGMAS` now and then."""
_NOISE_FLOOR = 0.005
"""Two medians closer than this tie: on an H200, the median of one program differs by a third of a percent from one
process to the next, so that the winner among equals would be arbitrary."""
NEAR = 0.008
"""Configs this close with cold caches are compared again with warm ones, as the caller's caches often are."""
WARM_BUDGET_S = 0.2
"""Seconds for comparing them again, which gains at most that share."""
WARM_FLOOR = 0.002
"""The noise floor with warm caches: the difference of one program from itself within a process."""
_LEVEL_ROUNDS = 10
"""With fewer rounds, the estimate of the scatter is too rough."""


def finalists(trials: Mapping[int, Trial], *, count: int = FINALISTS) -> list[int]:
    """Returns the indices of the trials to compare once more, fastest first; one where there is nothing to compare.

    Configs that lowered to the same program were measured once and are represented by the first of them.
    """
    measured = [index for index, trial in trials.items() if trial.outcome is Outcome.OK and trial.time_ms is not None]
    first_of = {_program(index, trials): index for index in sorted(measured, reverse=True)}
    ranked = sorted(first_of.values(), key=lambda index: (trials[index].level_ms or 0.0, index))
    if not ranked:
        return []
    fastest_ms = trials[ranked[0]].level_ms or 0.0
    contender = _EXACT_CONTENDER if trials[ranked[0]].clock == "device" else _CONTENDER
    close = [index for index in ranked if (trials[index].level_ms or 0.0) <= contender * fastest_ms]
    if (noise := _noise(trials)) < _BUSY_NOISE:
        return close[:count]
    again = sorted(_ruled_out_by_few(trials, noise * fastest_ms), key=lambda index: trials[index].level_ms or 0.0)
    # Ranks by many samples are more reliable than ranks by few.
    most = max(count, MOST_FINALISTS)
    seconds = again[: most - count]
    return close[: most - len(seconds)] + seconds


def _noise(trials: Mapping[int, Trial]) -> float:
    """Returns the machine's noise: the ratio of the longest sample to the fastest of a typical config.

    Configs timed by a device's own clock, which is free of it, do not count.
    """
    shares = [
        max(trial.samples_ms) / trial.level_ms
        for trial in trials.values()
        if trial.outcome is Outcome.OK and trial.level_ms and trial.clock != "device" and trial.samples_ms
    ]
    return statistics.median(shares) if shares else 1.0


def _ruled_out_by_few(trials: Mapping[int, Trial], limit_ms: float) -> list[int]:
    """Returns the configs that few samples ruled out, and that may be fast, given the machine's noise."""
    return [
        index
        for index, trial in trials.items()
        if trial.outcome is Outcome.SLOW
        and trial.level_ms is not None
        and len(trial.samples_ms) < _FEW_SAMPLES
        and trial.level_ms <= limit_ms
    ]


def with_same_program(rounds: Mapping[int, Sequence[float]], trials: Mapping[int, Trial]) -> dict[int, Sequence[float]]:
    """Returns the rounds of a final, also for the configs whose program another config ran in it.

    Args:
        rounds: each finalist's samples, by index.
        trials: the trials that may win, by index, as before the final.
    """
    played = {_program(index, trials): samples_ms for index, samples_ms in rounds.items()}
    return {index: played[program] for index in trials if (program := _program(index, trials)) in played}


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
        rounds_ms: each one's samples in milliseconds, one per round, by index; empty where there was no final.
        warm_ms: the same with warm device caches, of the configs that the other rounds cannot tell apart; empty where
            that was not needed, or without a device clock.
    """

    rounds_ms: Mapping[int, Sequence[float]] = dataclasses.field(default_factory=dict)
    warm_ms: Mapping[int, Sequence[float]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls, finalists: Iterable[int], rounds_ms: Sequence[Sequence[float]], warm_ms: Sequence[Sequence[float]]
    ) -> Final:
        """Returns the final of some finalists, from their samples in the same order; those of `warm_ms` may be empty.

        Raises:
            ValueError: these are not the rounds of one final.
        """
        indices = list(finalists)
        final = cls(
            dict(zip(indices, rounds_ms, strict=True)),
            {index: samples_ms for index, samples_ms in zip(indices, warm_ms, strict=True) if samples_ms},
        )
        for rounds in (final.rounds_ms, final.warm_ms):
            if len({len(samples_ms) for samples_ms in rounds.values()}) > 1:
                raise ValueError("not all have the same number of rounds")
        return final


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The decision of a final.

    Attributes:
        winner: the index of the config to use.
        tie: the indices of the configs that the noise cannot tell from the winner, without the winner.
    """

    winner: int
    tie: tuple[int, ...]


def decide(
    rounds: Mapping[int, Sequence[float]],
    *,
    default: int | None,
    warm: Mapping[int, Sequence[float]] | None = None,
) -> Verdict:
    """Names the winner of a final.

    Configs near each other are told apart by their warm rounds, if there are any. Of those that tie, the function's own
    default is preferred, then the first in the list of configs, unless it is slower by more than `_PREFERENCE`.
    Defaults that are not in the list, under `UNTUNED`, win only if no other one is as near to the fastest.

    Args:
        rounds: each finalist's samples, one per round, in milliseconds, by index.
        default: the index of the config that is the function's own default, if it is in the list.
        warm: the same with warm caches, of the configs near each other.
    """
    tied, near = level(rounds), level(rounds, floor=NEAR)
    if warm and all(index in warm for index in near):
        rounds = {index: warm[index] for index in near}
        tied = level(rounds, floor=WARM_FLOOR)
    leader = _leader(rounds, tied)
    preferred = [index for index in tied if index == leader or _behind(rounds[leader], rounds[index]) <= _PREFERENCE]
    winner = default if default in preferred else next((index for index in preferred if index != UNTUNED), UNTUNED)
    assert winner is not None
    return Verdict(winner, tuple(index for index in tied if index not in (winner, UNTUNED)))


def level(rounds: Mapping[int, Sequence[float]], *, floor: float = _NOISE_FLOOR) -> list[int]:
    """Returns, in order, the indices of the fastest config of a final and of those that the noise cannot tell from it.

    Samples of one round were taken one right after another, so their ratios are free of drift between rounds.
    Where the median ratio of two is within its own error, or within `floor` of one, they tie.
    """
    leader = _leader(rounds, rounds)
    return sorted(index for index in rounds if index == leader or _ties(rounds[leader], rounds[index], _SIGMAS, floor))


def conclude(trials: Mapping[int, Trial], final: Final, *, default: int | None) -> tuple[dict[int, Trial], Verdict]:
    """Settles a sweep.

    Args:
        trials: its trials by index, of which at least one is `ok`.
        final: the finalists' samples.
        default: as for `decide`.

    Returns:
        The trials, finalists with their times in the final, and the verdict.
    """
    usable = {
        index: trial
        for index, trial in sorted(trials.items())
        if (trial.outcome is Outcome.OK or index in final.rounds_ms) and trial.time_ms is not None
    }
    fastest = min(usable, key=lambda index: usable[index].level_ms or 0.0)
    played, warm = (
        {index: rounds[index] for index in rounds.keys() & usable.keys()} for rounds in (final.rounds_ms, final.warm_ms)
    )
    rounds = with_same_program(played or {fastest: usable[fastest].samples_ms}, usable)
    verdict = decide(rounds, default=default, warm=with_same_program(warm, usable))
    settled = dict(trials)
    for index, samples_ms in rounds.items():
        timed = dataclasses.replace(trials[index], time_ms=statistics.median(samples_ms), samples_ms=tuple(samples_ms))
        if timed.outcome is Outcome.OK:
            settled[index] = timed
        elif index in (verdict.winner, *verdict.tie):  # the final proved the first measurement wrong
            settled[index] = dataclasses.replace(timed, outcome=Outcome.OK, message="")
    return settled, verdict


def play(
    contenders: Sequence[Callable[[int], Sequence[RunTime]]],
    *,
    floor: float = _NOISE_FLOOR,
    is_exact: bool = True,
    budget_s: float = _BUDGET_S,
    rep: int = _MAX_ROUNDS,
    clock: Callable[[], float] = time.perf_counter,
) -> list[list[float]]:
    """Times contenders in turn until the fastest is clear, the noise is as low as it gets, or the rounds run out.

    Args:
        contenders: each takes a number of samples, in milliseconds.
        floor: the smallest share by which two contenders can be told apart.
        is_exact: whether samples are free of the effects of other processes. These make rounds longer and never
            shorter, so that the fastest of several rounds stands for all of them.
        budget_s: seconds after which the rounds that were played must do.
        rep: the largest number of samples of a contender. Rounds of short runs are several times as many, and count
            together.
        clock: seconds.

    Returns:
        Each contender's samples, one per round: the median of a few taken together, or the fastest of them.
    """
    rounds_ms = _played(contenders, floor, is_exact, budget_s, rep, clock)
    parts = min(rep, len(rounds_ms[0]))
    joined = statistics.median if is_exact else min
    return [[joined(taken[first::parts]) for first in range(parts)] for taken in rounds_ms]


def _played(
    contenders: Sequence[Callable[[int], Sequence[RunTime]]],
    floor: float,
    is_exact: bool,
    budget_s: float,
    rep: int,
    clock: Callable[[], float],
) -> list[list[float]]:
    """Returns the rounds of each contender, for `play`."""
    warmed = [_plausible(take(1)) for take in contenders]  # the first sample is not counted
    rounds: dict[int, list[float]] = {index: [] for index in range(len(contenders))}
    taken: dict[int, list[RunTime]] = {index: [] for index in rounds}
    started = clock()
    for played in range(1, _MAX_ROUNDS + 1):
        for index, take in enumerate(contenders):
            # Instead of an implausible batch, the last round counts again, so that rounds stay aligned.
            last = rounds[index][-1:] or [sample.cpu for sample in warmed[index]]
            samples = _plausible(take(_samples_for(last)))
            samples = samples or [RunTime.exactly(ms) for ms in last]
            if not samples:
                raise ValueError("the clock gave no plausible sample")
            taken[index].append(fastest(samples))
            cpu_ms = [sample.cpu for sample in samples]
            rounds[index].append(statistics.median(cpu_ms) if is_exact else taken[index][-1].cpu)
        is_long = any(samples_ms[-1] > _LONG_MS for samples_ms in rounds.values())
        is_over = played >= (rep if is_long else _FOLDED * rep)
        if not is_exact and any(map(_is_disturbed, taken.values())):
            passed_s = clock() - started
            if played >= _MIN_ROUNDS and _is_won(taken):
                return [_fastest_rounds(taken[index]) for index in range(len(contenders))]
            folded = _folded(taken)
            is_settled = played >= _BUSY_ROUNDS and is_clear(folded, floor=floor)
            if is_over or (played >= _MIN_ROUNDS and (is_settled or passed_s > _BUSY_BUDGET_S)):
                return [folded[index] for index in range(len(contenders))]
            continue
        if played >= _MIN_ROUNDS and (is_clear(rounds, floor=floor) or clock() - started > budget_s):
            break
        if is_over or (played >= _FEWEST_ROUNDS and _is_far(rounds)):
            break
    return [rounds[index] for index in range(len(contenders))]


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
        index: [fastest(taken[first::_FOLDED]).cpu for first in range(min(_FOLDED, len(taken)))]
        for index, taken in rounds.items()
    }


def _is_won(rounds: Mapping[int, Sequence[RunTime]]) -> bool:
    """Returns whether one contender is so far ahead that disturbances do not explain it.

    For another one to be as fast, each of its rounds must have been disturbed, by more than the factor between the
    fastest rounds of the two. The rounds of all contenders tell how often that happens.
    """
    quick = {index: _fastest_rounds(taken) for index, taken in rounds.items()}
    leader = min(quick, key=lambda index: quick[index])
    lengthened = [taken.cpu / quick[index][0] for index in rounds for taken in rounds[index]]
    for index in rounds.keys() - {leader}:
        factor = quick[index][0] / quick[leader][0]
        share = cautious_share(sum(each > factor for each in lengthened), len(lengthened))
        if quick[index][0] <= _FAR * quick[leader][-1] or share ** len(rounds[index]) > ALL_DISTURBED:
            return False
    return True


def _fastest_rounds(rounds: Sequence[RunTime]) -> list[float]:
    """Returns the fastest rounds, which were disturbed least, in the order of their times."""
    clean = [taken for taken in rounds if taken.is_clean]
    chosen = clean if len(clean) >= _FEWEST_ROUNDS else rounds
    return sorted(taken.cpu for taken in chosen)[:_FEWEST_ROUNDS]


def _is_far(rounds: Mapping[int, Sequence[float]]) -> bool:
    """Returns whether every finalist was far behind the leader in every round."""
    leader = min(rounds, key=lambda index: statistics.median(rounds[index]))
    others = [samples_ms for index, samples_ms in rounds.items() if index != leader]
    return all(theirs > _FAR * ours for other in others for ours, theirs in zip(rounds[leader], other, strict=True))


def _samples_for(last_ms: Sequence[float]) -> int:
    """Returns how many samples a contender takes in a round, by its last run; none where that was implausible."""
    if not last_ms:
        return _PER_ROUND
    if last_ms[-1] > _LONG_MS:
        return 1
    return max(_PER_ROUND, min(_MOST_PER_ROUND, round(_ROUND_MS / last_ms[-1])))


def is_clear(rounds: Mapping[int, Sequence[float]], *, floor: float = _NOISE_FLOOR) -> bool:
    """Returns whether more rounds would change nothing: each finalist is clearly behind, or level within the noise."""
    leader = min(rounds, key=lambda index: statistics.median(rounds[index]))
    others = [rounds[index] for index in rounds if index != leader]
    return all(
        not _ties(rounds[leader], other, _CLEAR_SIGMAS, floor) or _is_level(rounds[leader], other, floor)
        for other in others
    )


def _leader(rounds: Mapping[int, Sequence[float]], among: Iterable[int]) -> int:
    return min(among, key=lambda index: (statistics.median(rounds[index]), index))


def _behind(leader: Sequence[float], other: Sequence[float]) -> float:
    """Returns by which share one contender is slower than the leader."""
    return statistics.median(_ratios(leader, other)) - 1.0


def _ties(leader: Sequence[float], other: Sequence[float], sigmas: float, floor: float) -> bool:
    return _behind(leader, other) <= max(floor, sigmas * standard_error(_ratios(leader, other)))


def _is_level(leader: Sequence[float], other: Sequence[float], floor: float) -> bool:
    """Returns whether the noise between two is so low that more rounds would not tell them apart any better."""
    ratios = _ratios(leader, other)
    return len(ratios) >= _LEVEL_ROUNDS and _SIGMAS * standard_error(ratios) < floor


def _ratios(leader: Sequence[float], other: Sequence[float]) -> list[float]:
    return [theirs / ours for ours, theirs in zip(leader, other, strict=False)]
