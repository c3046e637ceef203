"""Plays a final: times its contenders in turn, round by round, until the fastest is clear."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from quarantune.host.waits import RunTime, fastest
from quarantune.measure.finals import FAR, NOISE_FLOOR, is_clear, leader_of
from quarantune.measure.model import ALL_DISTURBED, ENOUGH, FEW, LONG_RUN_MS, cautious_share
from quarantune.values.trial import is_plausible_ms

_MOST_PER_ROUND = 10
_ROUND_MS = 1.0
"""How long one contender's samples of a round take, where each is shorter than the profiler's own work."""
_CLEARLY = 3.0
"""A finalist this many times slower in each of its rounds is there for its time only, not because it may win."""
_LONG_FINAL_S = 0.5
"""Such a finalist leaves after `FEW` rounds once its rounds have taken this long,"""
_LONGEST_FINAL_S = 3.0
"""and after this time in any case: the function's own defaults may take a hundred times as long as the winner."""
_VERY_LONG_MS = 1000.0
"""A cold start hardly matters to a run of this length, so that the first one counts."""
_MAX_ROUNDS = 100
_BUDGET_S = 0.8
_BUSY_BUDGET_S = 2.4
_BUSY_ROUNDS = 20
"""The fewest rounds on a busy machine, before their fastest decide."""
_SCATTERED = 1.08
"""Where a typical round of one contender is this many times longer than its fastest, other processes disturbed it."""


def play(
    contenders: Sequence[Callable[[int], Sequence[RunTime]]],
    *,
    floor: float = NOISE_FLOOR,
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
        Each contender's samples, one per round: the median of a few taken together, or the fastest of them. One that is
        clearly behind, and whose rounds take long, has fewer.
    """
    rounds_ms = _played(contenders, floor, is_exact, budget_s, rep, clock)
    joined = statistics.median if is_exact else min
    return [
        [joined(taken[first :: min(rep, len(taken))]) for first in range(min(rep, len(taken)))] for taken in rounds_ms
    ]


def _played(
    contenders: Sequence[Callable[[int], Sequence[RunTime]]],
    floor: float,
    is_exact: bool,
    budget_s: float,
    rep: int,
    clock: Callable[[], float],
) -> list[list[float]]:
    """Returns the rounds of each contender, for `play`."""
    warmed = [_plausible(take(1)) for take in contenders]  # the first sample is not counted, unless it is very long
    rounds: dict[int, list[float]] = {index: [] for index in range(len(contenders))}
    taken: dict[int, list[RunTime]] = {index: [] for index in rounds}
    racing, spent_s = dict.fromkeys(rounds), dict.fromkeys(rounds, 0.0)
    started = clock()
    for played in range(1, _MAX_ROUNDS + 1):
        for index in racing:
            began = clock()
            # Instead of an implausible batch, the last round counts again, so that rounds stay aligned.
            last = rounds[index][-1:] or [sample.cpu for sample in warmed[index]]
            is_enough = played == 1 and bool(last) and last[-1] > _VERY_LONG_MS
            samples = warmed[index] if is_enough else _plausible(contenders[index](_samples_for(last)))
            samples = samples or [RunTime.exactly(ms) for ms in last]
            if not samples:
                raise ValueError("the clock gave no plausible sample")
            taken[index].append(fastest(samples))
            cpu_ms = [sample.cpu for sample in samples]
            rounds[index].append(statistics.median(cpu_ms) if is_exact else taken[index][-1].cpu)
            spent_s[index] += 1e-3 * last[-1] if is_enough else clock() - began
        racing = {index: None for index in racing if not _leaves(rounds, index, spent_s[index])}
        run, marks = {index: taken[index] for index in racing}, {index: rounds[index] for index in racing}
        passed_s = clock() - started - sum(spent_s[index] for index in rounds.keys() - racing.keys())
        is_long = any(samples_ms[-1] > LONG_RUN_MS for samples_ms in marks.values())
        is_over = played >= (rep if is_long else ENOUGH * rep)
        if not is_exact and any(map(_is_disturbed, run.values())):
            if played >= ENOUGH and _is_won(run):
                return [_fastest_rounds(taken[index]) for index in range(len(contenders))]
            folded = _folded(taken)
            is_settled = played >= _BUSY_ROUNDS and is_clear({index: folded[index] for index in racing}, floor=floor)
            if is_over or (played >= ENOUGH and (is_settled or passed_s > _BUSY_BUDGET_S)):
                return [folded[index] for index in range(len(contenders))]
            continue
        if played >= ENOUGH and (is_clear(marks, floor=floor) or passed_s > budget_s):
            break
        if is_over or (played >= FEW and _is_far(marks)):
            break
    return [rounds[index] for index in range(len(contenders))]


def _leaves(rounds: Mapping[int, Sequence[float]], index: int, spent_s: float) -> bool:
    """Returns whether a contender that is clearly behind in all its rounds has taken enough time for them."""
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
    fastest rounds of the two. The rounds of all contenders tell how often that happens.
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
    """Returns the fastest rounds, which were disturbed least, in the order of their times."""
    clean = [taken for taken in rounds if taken.is_clean]
    chosen = clean if len(clean) >= FEW else rounds
    return sorted(taken.cpu for taken in chosen)[:FEW]


def _is_far(rounds: Mapping[int, Sequence[float]]) -> bool:
    """Returns whether every finalist was far behind the leader in every round."""
    leader = min(rounds, key=lambda index: statistics.median(rounds[index]))
    others = [samples_ms for index, samples_ms in rounds.items() if index != leader]
    return all(theirs > FAR * ours for other in others for ours, theirs in zip(rounds[leader], other, strict=True))


def _samples_for(last_ms: Sequence[float]) -> int:
    """Returns how many samples a contender takes in a round, by its last run; none where that was implausible."""
    if not last_ms:
        return FEW
    if last_ms[-1] > LONG_RUN_MS:
        return 1
    return max(FEW, min(_MOST_PER_ROUND, round(_ROUND_MS / last_ms[-1])))
