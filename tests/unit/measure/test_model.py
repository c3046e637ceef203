"""Busy machines do not change the choice of the fastest config: whole seeded sweeps on a simulated machine."""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections.abc import Sequence

import pytest
from simulated_machine import MACHINES, Machine

from quarantune.host.waits import RunTime, fastest
from quarantune.measure import finals, sampling
from quarantune.values.trial import Outcome, Trial

SWEEPS = 300


def sweep(machine: Machine, times_ms: Sequence[float]) -> tuple[dict[int, Trial], int]:
    """Runs a sweep as workers and the scheduler do, and returns its trials and the winner's index."""
    trials: dict[int, Trial] = {}
    best_median_ms, disturbance = None, sampling.Disturbance()
    for index, time_ms in enumerate(times_ms):
        take = machine.runs(time_ms)
        (last,) = take(1)
        samples = sampling.measure(
            take,
            rep=20,
            best_median_ms=best_median_ms,
            margin=1.5,
            last_ms=last.least,
            disturbance=disturbance,
            clock=machine,
        )
        disturbance.add(samples.cpu_ms, min(samples.cpu_ms))
        ranking_ms = samples.ranking_ms(is_exact=False)
        trials[index] = Trial(
            config={"index": index},
            outcome=Outcome.SLOW if samples.is_ruled_out else Outcome.OK,
            time_ms=statistics.median(samples.samples_ms),
            samples_ms=samples.samples_ms,
            own_ms=ranking_ms,
            clock="wall",
        )
        if not samples.is_ruled_out:
            best_median_ms = ranking_ms if best_median_ms is None else min(best_median_ms, ranking_ms)
    finalists = finals.finalists(trials)
    if len(finalists) < 2:
        return trials, finalists[0]
    takes = [machine.runs(times_ms[index]) for index in finalists]
    rounds = finals.take_turns(takes, is_exact=False, clock=machine)
    final = finals.Final.of(finalists, rounds, [[] for _ in finalists])
    return trials, finals.conclude(trials, final, default=None)[1][0]


SHORT_AMONG_LONG = (0.6, 0.8, 1.0, 0.14, 1.2, 1.5)
CLOSE = (2.3, 1.12, 1.06, 5.0, 1.0, 1.5, 9.0, 60.0)


@pytest.mark.parametrize("times_ms", [SHORT_AMONG_LONG, CLOSE], ids=["short among long", "close"])
@pytest.mark.parametrize("machine", MACHINES)
def test_the_fastest_config_is_chosen_however_busy_the_machine(machine: str, times_ms: Sequence[float]) -> None:
    best = times_ms.index(min(times_ms))
    wrong, ruled_out = 0, 0
    for seed in range(SWEEPS):
        trials, winner = sweep(Machine(random.Random(seed), *MACHINES[machine]), times_ms)
        wrong += winner != best
        ruled_out += trials[best].outcome is Outcome.SLOW
    assert wrong <= SWEEPS // 100, f"{wrong} of {SWEEPS} chose wrong, {ruled_out} ruled out the best"


@pytest.mark.parametrize("machine", MACHINES)
def test_a_busy_machine_rules_out_configs_far_behind_soon(machine: str) -> None:
    def seconds(machine: str, times_ms: Sequence[float], seed: int) -> float:
        simulated = Machine(random.Random(seed), *MACHINES[machine])
        assert times_ms[sweep(simulated, times_ms)[1]] < 28.0
        return simulated.now

    behind = [600.0, 300.0, 150.0, 600.0, 80.0, 400.0]
    for seed in range(20):
        assert seconds(machine, (26.0, *behind), seed) - seconds(machine, (26.0, 27.0), seed) < 4.5e-3 * sum(behind)


def test_a_quiet_machine_takes_no_extra_samples() -> None:
    taken = []
    machine = Machine(random.Random(0), *MACHINES["quiet"])

    def counted(count: int) -> Sequence[RunTime]:
        taken.append(count)
        return machine.runs(1.0)(count)

    sampling.measure(counted, rep=20, clock=machine)
    assert sum(taken) <= 9
    alone = [counted] * 2
    taken.clear()
    finals.take_turns(alone, is_exact=False, clock=machine)
    assert machine.now < 1.0


@pytest.mark.parametrize("machine", ["half of all, half told", "most of all, half told", "half of all, none told"])
def test_a_busy_machine_ends_a_final_on_an_unexplained_lead(machine: str) -> None:
    def run_final(times_ms: Sequence[float], seed: int) -> tuple[float, list[int]]:
        simulated = Machine(random.Random(seed), *MACHINES[machine])
        rounds = finals.take_turns([simulated.runs(each) for each in times_ms], is_exact=False, clock=simulated)
        return simulated.now, finals.decide(dict(enumerate(rounds)), default=0)

    far = [run_final((48.0, 30.0, 45.0), seed) for seed in range(100)]
    assert sum(verdict[0] != 1 for _, verdict in far) <= 1
    assert sum(verdict == [1] for _, verdict in far) >= 95
    near = [run_final((30.2, 30.0, 30.3), seed) for seed in range(20)]
    assert statistics.mean(seconds for seconds, _ in far) < 0.6 * statistics.mean(seconds for seconds, _ in near)
    assert sum(verdict[0] == 0 for _, verdict in near) >= 15, "they tie, and the default is preferred"


# --- the second look ----------------------------------------------------------------------------------------


def trial(own_ms: float, *samples_ms: float, outcome: Outcome = Outcome.OK) -> Trial:
    samples = samples_ms or (own_ms,)
    return Trial(
        config={}, outcome=outcome, time_ms=statistics.median(samples), samples_ms=samples, own_ms=own_ms, clock="wall"
    )


def test_finalists_are_chosen_by_fastest_runs_not_by_median() -> None:
    others = {index: trial(1.0 + index / 10, 1.0 + index / 10, 1.1 + index / 10) for index in range(5)}
    unlucky = trial(0.14, 2.59, 4.67, 0.21, 2.81, 0.14)
    assert finals.finalists({**others, 7: unlucky})[0] == 7


def test_a_busy_machine_runs_again_what_one_sample_ruled_out() -> None:
    dropped = trial(80.0, 80.0, outcome=Outcome.SLOW)
    noisy = {index: trial(1.0 + index / 100, 1.0 + index / 100, 100.0, 90.0) for index in range(6)}
    assert finals.finalists({**noisy, 9: dropped})[-1] == 9
    assert len(finals.finalists({**noisy, 9: dropped})) == 7
    beyond_all_noise = trial(180.0, 180.0, outcome=Outcome.SLOW)
    thoroughly = trial(2.0, 2.0, 3.0, 4.0, 5.0, outcome=Outcome.SLOW)
    assert {8, 9}.isdisjoint(finals.finalists({**noisy, 8: thoroughly, 9: beyond_all_noise}))
    quiet = {index: trial(1.0 + index / 100, 1.0 + index / 100, 1.1) for index in range(6)}
    assert finals.finalists({**quiet, 9: dropped}) == [0, 1, 2, 3]


def test_a_second_measurement_decides_between_winner_and_slow() -> None:
    trials = {0: trial(1.0, 1.0, 90.0), 1: trial(80.0, 80.0, outcome=Outcome.SLOW)}
    final = finals.Final({0: [1.0] * 5, 1: [0.79] * 5})
    settled, verdict = finals.conclude(trials, final, default=0)
    assert verdict == [1]
    assert (settled[1].outcome, settled[1].time_ms, settled[1].message) == (Outcome.OK, 0.79, "")
    settled, verdict = finals.conclude(trials, finals.Final({0: [1.0] * 5, 1: [60.0] * 5}), default=0)
    assert verdict == [0]
    assert (settled[1].outcome, settled[1].time_ms, settled[1].samples_ms) == (Outcome.OK, 60.0, (60.0,) * 5)


def test_the_default_yields_to_what_may_be_much_faster() -> None:
    rounds = {0: [1.3, 0.9, 1.2, 1.0, 1.1], 1: [1.0] * 5}
    assert finals.level(rounds) == [0, 1]
    assert finals.decide(rounds, default=0) == [1, 0]


def test_a_run_without_an_estimate_is_believed_first() -> None:
    estimated, clean = RunTime(60.0, 0.5, 0.5), RunTime.exactly(1.1)
    assert fastest([estimated, clean, RunTime.exactly(1.2)]) == clean
    assert fastest([estimated, RunTime(60.0, 0.7, 0.7)]) == estimated
    assert sampling.Sampled((estimated, clean)).ranking_ms(is_exact=False) == 1.1
    rounds = finals.take_turns(
        [lambda count: [estimated, clean], lambda count: [RunTime.exactly(1.0)] * count], is_exact=False
    )
    assert [set(samples_ms) for samples_ms in rounds] == [{1.1}, {1.0}]


# --- one first run ------------------------------------------------------------------------------------------


def test_a_first_run_is_judged_by_other_first_runs() -> None:
    def is_hopeless(first_ms: float, disturbance: sampling.Disturbance) -> bool:
        return sampling.is_hopeless(first_ms, fastest_ms=50.0, fastest_first_ms=60.0, disturbance=disturbance)

    disturbance = sampling.Disturbance([(50.0, 50.0)] * 9)
    disturbance.add_first_run(60.0, 50.0)
    disturbance.add_first_run(7.0, 0.5)  # a cold start may be most of a short first run
    assert is_hopeless(101.0, disturbance)
    disturbance.add_first_run(100.0, 50.0)
    assert not is_hopeless(101.0, disturbance)
    assert is_hopeless(126.0, disturbance)
    disturbance.add([50.0] * 4 + [1000.0] * 5, 50.0)
    assert not is_hopeless(3000.0, disturbance), "if half of all samples are disturbed as much, one run proves nothing"
    assert is_hopeless(5000.0, disturbance), "no sample was disturbed nearly as much"
    assert not is_hopeless(1e6, sampling.Disturbance()), "the noise is unknown"


@pytest.mark.parametrize(
    ("samples", "disturbed", "needed"), [(12, 0, 2), (100, 0, 2), (100, 5, 2), (100, 50, 8), (100, 65, 13)]
)
def test_runs_must_agree_until_disturbance_of_all_is_unlikely(samples: int, disturbed: int, needed: int) -> None:
    disturbance = sampling.Disturbance()
    disturbance.add([1.0] * (samples - disturbed) + [3.0] * disturbed, 1.0)
    assert disturbance.runs_needed(9.0, 1.0) == needed
    assert disturbance.runs_needed(9.1, 1.0) == 2, "no sample was disturbed nearly as much"
    take = [RunTime.exactly(9.0)] * 30
    ruled_out = sampling.measure(
        lambda count: take[:count], rep=20, best_median_ms=1.0, margin=1.5, disturbance=disturbance, clock=lambda: 0.0
    )
    assert ruled_out.is_ruled_out
    assert 3 <= len(ruled_out.samples_ms) <= needed + 1


def test_a_first_run_stops_after_the_time_of_hopeless_ones() -> None:
    quiet = sampling.Disturbance(runs=[(80.0, 80.0)] * 20)
    assert sampling.longest_first_run(80.0, disturbance=quiet) == 2 * 2 * 80.0
    assert sampling.longest_first_run(80.0, disturbance=sampling.Disturbance()) == 4 * 2 * 80.0, (
        "the noise is still unknown"
    )
    assert sampling.longest_first_run(1.0, disturbance=quiet) == 2 * 2 * 50.0, (
        "a cold start may take tens of milliseconds"
    )
    cold = dataclasses.replace(quiet, first_run=4.0)
    assert sampling.longest_first_run(80.0, disturbance=cold) == 2 * 5 * 80.0, (
        "first runs take up to four times as long here"
    )
    busy = sampling.Disturbance(runs=[(400.0, 80.0)] * 10 + [(80.0, 80.0)] * 10)
    assert sampling.longest_first_run(80.0, disturbance=busy) > 7 * 2 * 80.0


def test_a_config_whose_samples_scatter_is_not_soon_ruled_out() -> None:
    scattered = [9.0, 2.6, 4.7, 2.8, 17.0, 30.0, 3.9, 0.14, 0.14]
    disturbance = sampling.Disturbance([(1.0, 1.0)] * 12)
    samples = sampling.measure(
        lambda count: [RunTime.exactly(scattered.pop(0)) for _ in range(count)],
        rep=8,
        best_median_ms=1.0,
        margin=1.5,
        disturbance=disturbance,
        clock=lambda: 0.0,
    )
    assert not samples.is_ruled_out
    assert samples.ranking_ms(is_exact=False) == 0.14
