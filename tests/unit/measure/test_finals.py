"""Configs are timed with few samples, and the fastest is chosen within the limits of the noise."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import types
import weakref
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quarantune.host import waits
from quarantune.host.waits import RunTime
from quarantune.measure import clocks, device_clock, finals, model, sampling
from quarantune.values.codec import is_plausible_ms
from quarantune.values.trial import UNTUNED, Outcome, Trial

SOFT_BUDGET_S = 0.25
DAMAGED = [2.0**64 / 1e6, 0.0, -1.0, math.inf, math.nan, 1e-300]


class Time:
    """A clock that only tests advance."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stops the clocks of sampling and finals: a busy machine could exhaust their budgets between scripted samples."""
    for fn in (sampling.measure, finals.take_turns):
        monkeypatch.setitem(fn.__kwdefaults__ or {}, "clock", Time())


class Sampler:
    """Returns scripted samples in milliseconds; each advances the clock by its length or by a given time."""

    def __init__(self, samples: Iterable[float | RunTime], time: Time | None = None, seconds: float = 0.0) -> None:
        self._samples = iter(samples)
        self._time, self._seconds = time, seconds
        self.taken = 0

    def __call__(self, count: int) -> Sequence[RunTime]:
        self.taken += count
        if self._time is not None:
            self._time.passes(count * self._seconds)
        samples = itertools.islice(self._samples, count)
        return [sample if isinstance(sample, RunTime) else RunTime.exactly(sample) for sample in samples]


def noisy(seed: int, middle: float = 1.0, sigma: float = 0.01) -> Iterable[float]:
    generator = np.random.default_rng(seed)
    while True:
        yield middle * (1 + sigma * generator.standard_normal())


# --- how many samples ---------------------------------------------------------------------------------------


def test_the_first_sample_is_not_counted() -> None:
    samples = sampling.measure(Sampler([1000.0, *[2.0] * 20]), rep=20)
    assert set(samples.samples_ms) == {2.0}


def test_sampling_ends_as_soon_as_the_median_is_steady() -> None:
    take = Sampler(itertools.repeat(1.0))
    samples = sampling.measure(take, rep=1000)
    assert not samples.is_ruled_out
    assert 5 <= len(samples.samples_ms) < 10
    assert take.taken == len(samples.samples_ms) + 1


def test_noise_is_sampled_until_the_median_is_known_to_1_percent() -> None:
    few = sampling.measure(Sampler(noisy(0, sigma=0.01)), rep=1000).samples_ms
    many = sampling.measure(Sampler(noisy(0, sigma=0.05)), rep=1000).samples_ms
    assert len(few) < len(many) < 1000
    for samples_ms in (few, many):
        assert model.standard_error(samples_ms) < 0.01
        assert np.median(samples_ms) == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize("rep", [1, 2, 3, 4, 5, 7, 20])
def test_never_more_than_rep_samples_are_taken(rep: int) -> None:
    take = Sampler(itertools.cycle([1.0, 2.0, 3.0]))
    samples = sampling.measure(take, rep=rep, clock=Time())
    assert len(samples.samples_ms) == rep
    assert take.taken == rep + 1


def test_a_slow_config_is_sampled_three_times_and_no_more() -> None:
    time = Time()
    take = Sampler(itertools.cycle([100.0, 125.0, 150.0]), time, 0.4 * SOFT_BUDGET_S)
    assert len(sampling.measure(take, rep=20, clock=time).samples_ms) == 3


def test_the_first_run_counts_towards_the_soft_budget() -> None:
    time = Time()
    take = Sampler(itertools.cycle([100.0, 125.0, 150.0]), time, 0.3 * SOFT_BUDGET_S)
    assert len(sampling.measure(take, rep=20, clock=time).samples_ms) == 3


def test_the_clock_decides_if_the_median_or_fastest_counts() -> None:
    samples = sampling.Sampled(tuple(map(RunTime.exactly, (1.0, 2.0, 1000.0))))
    assert (samples.ranking_ms(is_exact=True), samples.ranking_ms(is_exact=False)) == (2.0, 1.0)


# --- ruled out ----------------------------------------------------------------------------------------------


def test_a_config_beyond_the_margin_is_ruled_out_at_once() -> None:
    take = Sampler(itertools.repeat(1.51))
    samples = sampling.measure(take, rep=20, best_median_ms=1.0, margin=1.5)
    assert samples.is_ruled_out
    assert len(samples.samples_ms) == 3


@pytest.mark.parametrize(
    ("samples_ms", "best_median_ms"),
    [([1.49] * 30, 1.0), ([9.0, 9.0, 9.0, 1.4, *[9.0] * 30], 1.0), ([9.0] * 30, None)],
    ids=["within", "one within", "no bar"],
)
def test_one_sample_within_the_margin_keeps_a_config_in_the_race(
    samples_ms: list[float], best_median_ms: float | None
) -> None:
    samples = sampling.measure(Sampler(samples_ms), rep=20, best_median_ms=best_median_ms, margin=1.5)
    assert not samples.is_ruled_out
    assert len(samples.samples_ms) >= 3


@pytest.mark.parametrize(
    ("best_median_ms", "taken"), [(1.0, 3), (1.25, 8), (None, 8)], ids=["behind", "level", "alone"]
)
def test_a_config_that_is_behind_gets_no_needless_samples(best_median_ms: float | None, taken: int) -> None:
    samples = sampling.measure(Sampler(itertools.repeat(1.2)), rep=20, best_median_ms=best_median_ms, margin=1.5)
    assert (samples.is_ruled_out, len(samples.samples_ms)) == (False, taken)


@pytest.mark.parametrize(
    ("before_ms", "samples_ms", "taken"),
    [(31.0, [31.0], 1), (31.0, [29.0, 31.0, 31.0], 2), (29.0, [31.0, 31.0, 31.0], 2), (4.0, [31.0] * 4, 4)],
    ids=["both beyond", "the second within", "the first within", "too short to tell"],
)
def test_a_long_run_before_counts_and_two_that_agree_rule_out(
    before_ms: float, samples_ms: list[float], taken: int
) -> None:
    take = Sampler(samples_ms)
    samples = sampling.measure(take, rep=20, best_median_ms=20.0, margin=1.5, before_ms=before_ms)
    assert take.taken == taken
    assert samples.is_ruled_out == (taken in (1, 4))


def test_waits_for_a_cpu_rule_no_config_out() -> None:
    waited = RunTime(2.0, 1.8, 1.4)
    samples = sampling.measure(Sampler(itertools.repeat(waited)), rep=9, best_median_ms=1.0, margin=1.5)
    assert not samples.is_ruled_out
    assert set(samples.samples_ms) == {2.0}
    assert (set(samples.cpu_ms), samples.ranking_ms(is_exact=False)) == ({1.8}, 1.8)
    hardly = Sampler(itertools.repeat(RunTime(2.0, 1.8, 1.6)))
    assert sampling.measure(hardly, rep=9, best_median_ms=1.0, margin=1.5).is_ruled_out


def test_one_sample_rules_a_config_out_only_by_an_exact_clock() -> None:
    late = [180.0, *[0.79] * 30]
    for last_ms in (None, 0.8, 1.4):
        samples = sampling.measure(Sampler(late), rep=20, best_median_ms=1.0, margin=1.5, last_ms=last_ms)
        assert not samples.is_ruled_out, last_ms
        assert samples.ranking_ms(is_exact=False) == 0.79
    assert sampling.measure(Sampler([180.0, 180.0]), rep=20, best_median_ms=1.0, margin=1.5).is_ruled_out
    assert sampling.measure(Sampler([180.0]), rep=20, best_median_ms=1.0, margin=1.5, last_ms=150.0).is_ruled_out
    assert sampling.measure(Sampler([180.0]), rep=20, best_median_ms=1.0, margin=1.5, is_exact=True).is_ruled_out


def test_an_exact_clock_takes_few_samples_of_a_config_far_behind() -> None:
    measure = functools.partial(sampling.measure, rep=20, best_median_ms=1.0, margin=1.15, is_exact=True)
    behind = Sampler(itertools.repeat(2.5))
    assert measure(behind).is_ruled_out
    assert behind.taken == 1 + model.FEW
    near = measure(Sampler([2.5, *[1.0] * 30]))
    assert not near.is_ruled_out
    assert len(near.samples_ms) >= model.ENOUGH
    hopeless = Sampler(itertools.repeat(4.7))
    assert measure(hopeless).is_ruled_out
    assert hopeless.taken == 1
    tiny = Sampler([0.047, *[0.01] * 30])  # a cold start may explain the whole first sample
    assert not measure(tiny, best_median_ms=0.01).is_ruled_out


def test_an_exact_clocks_long_runs_are_few_and_all_count() -> None:
    for run_ms, runs in ((100.0, model.FEW), (6.0, model.ENOUGH), (1.0, 1 + model.ENOUGH)):
        take = Sampler(itertools.repeat(run_ms), time := Time(), run_ms / 1e3)
        samples = sampling.measure(take, rep=20, is_exact=True, clock=time)
        assert (take.taken, set(samples.samples_ms)) == (runs, {run_ms})
    alone = sampling.measure(Sampler([100.0]), rep=1, is_exact=True)
    assert alone.samples_ms == (100.0,)


def test_sampling_continues_while_every_run_is_disturbed() -> None:
    time = Time()
    spinning = RunTime(92.0, 30.0, 0.0)
    take = Sampler([spinning] * 9 + [RunTime.exactly(0.79)] * 30, time, 0.092)
    samples = sampling.measure(take, rep=20, best_median_ms=1.0, margin=1.5, last_ms=0.0, clock=time)
    assert not samples.is_ruled_out
    assert samples.ranking_ms(is_exact=False) == 0.79
    hopeless = Sampler(itertools.repeat(spinning), Time(), 0.0)
    assert len(sampling.measure(hopeless, rep=20, best_median_ms=1.0, margin=1.5).samples_ms) == 20


@pytest.mark.parametrize(
    ("first_ms", "fastest_ms", "fastest_first_ms", "is_hopeless"),
    [
        (101.0, 50.0, 60.0, True),
        (99.0, 50.0, 60.0, False),
        (101.0, 50.0, 70.0, False),
        (29.0, 1.0, 7.0, True),
        (29.0, 1.0, 8.0, False),
    ],
    ids=["long and behind", "long and not", "as long as first runs", "shorter and behind other first runs", "neither"],
)
def test_one_run_rules_out_a_config_that_is_far_behind(
    first_ms: float, fastest_ms: float, fastest_first_ms: float, is_hopeless: bool
) -> None:
    disturbance = sampling.Disturbance([(1.0, 1.0)] * 9)
    told = sampling.is_hopeless(
        first_ms, fastest_ms=fastest_ms, fastest_first_ms=fastest_first_ms, disturbance=disturbance
    )
    assert told == is_hopeless


def test_a_first_sample_beyond_any_cold_start_rules_out() -> None:
    take = Sampler(itertools.repeat(60.0))
    samples = sampling.measure(take, rep=20, best_median_ms=10.0, margin=1.5, last_ms=59.0)
    assert samples.is_ruled_out
    assert (take.taken, samples.samples_ms) == (1, (60.0,))


@pytest.mark.parametrize(
    ("first_ms", "best_median_ms"), [(49.0, 1.0), (60.0, 21.0)], ids=["an interruption", "the cold"]
)
def test_an_unreliable_first_sample_rules_no_config_out(first_ms: float, best_median_ms: float) -> None:
    samples = sampling.measure(
        Sampler([first_ms, *[best_median_ms] * 30]), rep=20, best_median_ms=best_median_ms, margin=1.5
    )
    assert not samples.is_ruled_out
    assert first_ms not in samples.samples_ms


def test_a_damaged_sample_does_not_affect_ruling_out() -> None:
    assert sampling.measure(
        Sampler([1.0, *DAMAGED[:2], 2.0, *[2.0] * 9]), rep=9, best_median_ms=1.0, margin=1.5
    ).is_ruled_out
    spared = sampling.measure(Sampler([1.0, DAMAGED[0], *[1.2] * 12]), rep=9, best_median_ms=1.0, margin=1.5)
    assert not spared.is_ruled_out


# --- implausible samples ------------------------------------------------------------------------------------


@pytest.mark.parametrize("damaged", DAMAGED)
def test_an_impossible_time_is_rejected_and_sampled_again(damaged: float) -> None:
    take = Sampler(itertools.cycle([1.0, damaged, 2.0, 3.0]))
    samples = sampling.measure(take, rep=20)
    assert set(samples.samples_ms) == {1.0, 2.0, 3.0}
    assert len(samples.samples_ms) == 20


@pytest.mark.parametrize("damaged", DAMAGED)
@pytest.mark.parametrize("rep", [1, 20])
def test_a_clock_without_plausible_samples_is_an_error(damaged: float, rep: int) -> None:
    with pytest.raises(ValueError, match="no plausible sample"):
        sampling.measure(Sampler(itertools.repeat(damaged)), rep=rep)


def test_a_clock_without_further_plausible_samples_ends_sampling() -> None:
    samples = sampling.measure(Sampler([1.0, 2.0, 3.0, 1.0, *[math.nan] * 99]), rep=20)
    assert samples.samples_ms == (2.0, 3.0, 1.0)


# --- spread -------------------------------------------------------------------------------------------------


def test_the_spread_is_sigma_as_a_share_of_the_median() -> None:
    samples = list(itertools.islice(noisy(1, middle=5.0, sigma=0.03), 20_000))
    assert model.spread(samples) == pytest.approx(0.03, rel=0.05)


def test_a_few_hiccups_hardly_change_the_spread() -> None:
    samples = list(itertools.islice(noisy(2), 200))
    assert model.spread([*samples, *[1e6] * 10]) == pytest.approx(model.spread(samples), rel=0.2)


def test_equal_samples_have_no_spread_and_zeros_an_infinite_one() -> None:
    assert model.spread([3.0] * 5) == 0.0
    assert model.spread([0.0] * 5) == math.inf


def test_the_standard_error_is_the_scatter_of_medians() -> None:
    batches = [list(itertools.islice(noisy(seed), 25)) for seed in range(400)]
    scatter = float(np.std([np.median(batch) for batch in batches]))
    assert np.median([model.standard_error(batch) for batch in batches]) == pytest.approx(scatter, rel=0.2)


# --- clocks -------------------------------------------------------------------------------------------------


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    """Replaces the clocks' time with a time that the test controls."""
    time = Time()
    told = types.SimpleNamespace(perf_counter=time, thread_time_ns=lambda: 0)
    for module in (clocks, waits):
        monkeypatch.setattr(module, "time", told)
    monkeypatch.setattr(waits.Watch, "read", lambda self: {})
    return time


def wholes(samples: Sequence[RunTime]) -> list[float]:
    return [sample.whole for sample in samples]


class Run:
    """A run of a given length."""

    def __init__(self, time: Time, seconds: float) -> None:
        self._time, self._seconds = time, seconds
        self.count = 0

    def __call__(self) -> None:
        self.count += 1
        self._time.passes(self._seconds)


@pytest.mark.parametrize(
    ("seconds", "repeated"), [(1.0, 1), (1e-3, 1), (50e-6, 4), (1e-6, 200), (1e-9, 1000), (0.0, 1000)]
)
def test_short_runs_are_repeated_within_a_wall_clock_sample(time: Time, seconds: float, repeated: int) -> None:
    run = Run(time, seconds)
    clock = clocks.wall_clock(run, None)
    clock.take(1)
    assert run.count == 1
    # The clock of this test is exact up to the last digits of floats.
    assert wholes(clock.take(3)) == pytest.approx([1e3 * seconds] * 3, rel=1e-2, abs=1e-9)
    assert run.count == pytest.approx(1 + 3 * repeated, rel=1e-2)


def test_a_run_that_needs_preparation_gets_it_untimed(time: Time) -> None:
    run, order = Run(time, 1e-6), []

    def prepare() -> None:
        order.append(run.count)
        time.passes(1.0)

    clock = clocks.wall_clock(run, prepare)
    assert wholes([*clock.take(1), *clock.take(3)]) == pytest.approx([1e-3] * 4, rel=1e-2)
    assert order == [0, 1, 2, 3]
    assert run.count == 4


def test_a_wall_clock_distinguishes_runs_that_differ_tenfold() -> None:
    def run(count: int) -> Callable[[], object]:
        return lambda: sum(range(count))

    short, long = (clocks.wall_clock(run(count), None) for count in (1_000, 10_000))
    for clock in (short, long):
        clock.take(1)
    assert 3 * min(wholes(short.take(9))) < min(wholes(long.take(9)))


def test_a_queue_grows_until_waiting_for_it_is_negligible(time: Time) -> None:
    run_s, wait_s = 20e-6, 500e-6

    class Output:
        def block_until_ready(self) -> Output:
            time.passes(wait_s)
            return self

    def dispatch() -> Output:
        time.passes(run_s)
        return Output()

    clock = clocks.queued_clock(dispatch)
    (first,) = clock.take(1)
    assert first.whole == pytest.approx(1e3 * (run_s + wait_s))
    assert clock.take(9)[-1].whole == pytest.approx(1e3 * run_s, rel=0.5)


def test_a_queued_clock_times_real_runs() -> None:
    add = jax.jit(lambda x: x + 1).lower(jnp.zeros(8)).compile()
    clock = clocks.queued_clock(lambda: add(jnp.zeros(8)))
    assert sum(map(is_plausible_ms, wholes([*clock.take(1), *clock.take(4)]))) == 5


# --- choosing the finalists ---------------------------------------------------------------------------------


def test_the_fastest_config_of_each_rank_is_in_the_final() -> None:
    def timed(ms: float, machine: str) -> Trial:
        return dataclasses.replace(trial(ms, samples_ms=(ms,)), device=f"cpu:0{machine}", own_ms=ms)

    trials = dict(enumerate([timed(1.0, ""), timed(1.01, ""), timed(2.0, " on rank 1"), timed(3.0, " on rank 1")]))
    assert finals.in_final(trials, None) == [0, 1, 2]
    trials[4] = timed(9.0, " on rank 2")
    assert finals.in_final(trials, None) == [0, 1, 2, 4]
    many = trials | {10 + rank: timed(9.0 - rank / 100, f" on rank {rank}") for rank in range(3, 30)}
    assert len(finals.in_final(many, None)) == 2 + finals.MOST_FINALISTS


def trial(time_ms: float | None, outcome: Outcome = Outcome.OK, samples_ms: tuple[float, ...] = ()) -> Trial:
    return Trial(config={}, outcome=outcome, time_ms=time_ms, samples_ms=samples_ms)


def finalists_of(*trials: Trial) -> list[int]:
    return finals.finalists(dict(enumerate(trials)))


def test_the_fastest_few_are_in_the_final_fastest_first() -> None:
    assert finalists_of(*(trial(1 + time_ms / 100) for time_ms in (7, 5, 1, 6, 2, 3))) == [2, 4, 5, 1]


def test_a_config_that_is_far_behind_is_not_in_the_final() -> None:
    assert finalists_of(trial(1.6), trial(1.0), trial(1.4)) == [1, 2]


@pytest.mark.parametrize("outcome", [outcome for outcome in Outcome if outcome is not Outcome.OK])
def test_only_configs_measured_to_the_end_are_in_the_final(outcome: Outcome) -> None:
    assert finalists_of(trial(0.5, outcome), trial(1.0), trial(None, outcome)) == [1]
    assert finalists_of(trial(0.5, outcome)) == []


def test_configs_with_one_program_take_one_place_in_the_final() -> None:
    twins = [trial(1.0, samples_ms=(1.0, 0.9, 1.1))] * 5
    assert finalists_of(trial(1.2, samples_ms=(1.2,)), *twins, trial(1.3, samples_ms=(1.3,))) == [1, 0, 6]


def test_two_programs_with_equal_samples_take_two_places() -> None:
    first, second = (dataclasses.replace(trial(1.0, samples_ms=(1.0,) * 5), compile_s=s) for s in (0.21, 0.22))
    assert finalists_of(first, second, first) == [0, 1]
    assert finals.with_same_program({0: [1.1]}, {0: first, 1: second, 2: first}) == {0: [1.1], 2: [1.1]}


def test_configs_with_one_program_share_its_times_in_the_final() -> None:
    trials = {0: trial(1.2, samples_ms=(1.2,)), 3: trial(1.0, samples_ms=(1.0,)), 5: trial(1.0, samples_ms=(1.0,))}
    assert finals.with_same_program({3: [1.1], 0: [1.3]}, trials) == {0: [1.3], 3: [1.1], 5: [1.1]}
    assert finals.with_same_program({3: [1.1]}, trials) == {3: [1.1], 5: [1.1]}


@pytest.mark.parametrize(("takes_ms", "samples"), [([5.0], 1), ([0.2, 0.3, 0.2], 3), ([0.0, 0.3, 0.2], 2)])
def test_a_glance_takes_one_long_sample_or_few_short_ones(takes_ms: list[float], samples: int) -> None:
    left = [RunTime.exactly(ms) for ms in takes_ms]
    assert len(sampling.glance(lambda count: [left.pop(0) for _ in range(count)]).taken) == samples
    assert left == []


def test_a_glance_without_a_plausible_sample_fails() -> None:
    with pytest.raises(ValueError, match="the clock gave no plausible sample"):
        sampling.glance(lambda count: [RunTime.exactly(0.0)] * count)


# --- deciding the final -------------------------------------------------------------------------------------

TRIALS = 200


def verdicts(
    times_ms: Sequence[float],
    *,
    default: int | None = None,
    sigma: float = 0.01,
    drift: float = 0.0,
) -> list[list[int]]:
    """Plays finals between configs whose true times are known, on a machine that is noisy and drifts between rounds."""
    generator = np.random.default_rng(3)

    def run_final() -> list[int]:
        taken = itertools.count()
        speeds = [1 + drift * generator.random() for _ in range(101)]

        def contender(time_ms: float) -> Callable[[int], Sequence[RunTime]]:
            def take(count: int) -> Sequence[RunTime]:
                speed = speeds[next(taken) // len(times_ms)]
                samples = time_ms * speed * (1 + sigma * generator.standard_normal(count))
                return [RunTime.exactly(float(sample)) for sample in samples]

            return take

        rounds = finals.take_turns([contender(time_ms) for time_ms in times_ms], clock=lambda: 0.0)
        return finals.decide(dict(enumerate(rounds)), default=default)

    return [run_final() for _ in range(TRIALS)]


@pytest.mark.parametrize("drift", [0.0, 0.5], ids=["steady", "drifting"])
@pytest.mark.parametrize(
    "times_ms", [(1.02, 1.0), (1.04, 1.0, 1.02), (1.02, 1.03, 1.04, 1.0)], ids=lambda times: str(len(times))
)
def test_two_percent_beat_the_noise_and_the_preferred_default(times_ms: tuple[float, ...], drift: float) -> None:
    best = times_ms.index(min(times_ms))
    won = [verdict[0] == best for verdict in verdicts(times_ms, default=0, drift=drift)]
    assert np.mean(won) >= 0.95


@pytest.mark.parametrize("drift", [0.0, 0.5], ids=["steady", "drifting"])
def test_equals_tie_nearly_always_and_the_default_wins(drift: float) -> None:
    of_two = verdicts([1.0, 1.0], default=1, drift=drift)
    assert np.mean([verdict == [1, 0] for verdict in of_two]) >= 0.85
    of_four = verdicts([1.0] * 4, default=2, drift=drift)
    assert np.mean([verdict[0] == 2 for verdict in of_four]) >= 0.9


def test_without_a_default_the_first_of_equals_wins() -> None:
    assert np.mean([verdict[0] == 0 for verdict in verdicts([1.0, 1.0, 1.0])]) >= 0.9


def test_without_noise_the_order_is_exact() -> None:
    assert all(won == [1] for won in verdicts([1.01, 1.0, 1.02], default=0, sigma=0.0, drift=0.5))


def test_a_default_that_is_slower_is_not_preferred() -> None:
    rounds = {4: [1.0] * 5, 7: [1.1] * 5, 9: [1.0] * 5}
    assert finals.decide(rounds, default=7) == [4, 9]
    assert finals.decide(rounds, default=9) == [9, 4]
    assert finals.decide(rounds, default=1) == [4, 9]


def test_warm_rounds_decide_between_equals_unless_they_tie() -> None:
    cold = {2: [1.004] * 9, 4: [1.0] * 9, 6: [1.002] * 9, 7: [1.007] * 9, 8: [1.3] * 9}
    assert finals.decide(cold, default=2) == [2, 4, 6]
    warm = {2: [0.803] * 9, 4: [0.8] * 9, 6: [0.801] * 9}
    assert finals.decide(cold, default=2, warm=warm) == [4, 6]
    assert finals.decide(cold, default=6, warm=warm) == [6, 4]
    assert finals.decide(cold, default=6, warm=warm | {2: [0.7] * 9}) == [2]
    # One config stands for all with its program; if it has no warm rounds, the final had none.
    assert finals.decide(cold, default=2, warm={4: [0.8] * 9, 6: [0.9] * 9}) == [2, 4, 6]


def test_times_closer_than_the_noise_floor_tie_however_steady() -> None:
    assert finals.decide({0: [1.004] * 9, 1: [1.0] * 9}, default=None) == [0, 1]
    assert finals.decide({0: [1.006] * 9, 1: [1.0] * 9}, default=None) == [1]


def test_a_final_continues_until_the_fastest_is_clear() -> None:
    far = finals.take_turns([Sampler(noisy(4, 1.0)), Sampler(noisy(5, 1.5))], clock=lambda: 0.0)
    clear = finals.take_turns([Sampler(noisy(4, 1.0)), Sampler(noisy(5, 1.15))], clock=lambda: 0.0)
    level = finals.take_turns([Sampler(noisy(4, 1.0)), Sampler(noisy(5, 1.0))], clock=lambda: 0.0)
    assert [len(rounds) for rounds in far] == [3, 3]
    assert [len(rounds) for rounds in clear] == [5, 5]
    assert len(level[0]) == len(level[1]) >= 10
    assert finals.is_clear(dict(enumerate(clear)))
    assert not finals.is_clear({index: samples_ms[:9] for index, samples_ms in enumerate(level)})


def test_a_final_of_equals_ends_when_its_time_is_up() -> None:
    time = Time()
    rounds = finals.take_turns([Sampler(noisy(seed), time, 0.1) for seed in (6, 7)], clock=time)
    assert len(rounds[0]) == 5


def test_one_long_run_is_a_sample() -> None:
    long, short = Sampler(noisy(8, 100.0)), Sampler(noisy(9, 1.0))
    finals.take_turns([long, short], clock=lambda: 0.0)
    assert (long.taken, short.taken) == (1 + 3, 1 + 3 * 3)


def test_a_round_takes_more_samples_of_short_runs() -> None:
    short, long = Sampler(noisy(8, 0.05, 0.001)), Sampler(noisy(9, 0.5, 0.001))
    finals.take_turns([short, long], clock=lambda: 0.0)
    assert (short.taken, long.taken) == (1 + 3 * 10, 1 + 3 * 3)


def test_contenders_are_timed_in_turn() -> None:
    turns: list[str] = []

    def contender(name: str, time_ms: float) -> Callable[[int], Sequence[RunTime]]:
        def take(count: int) -> Sequence[RunTime]:
            turns.append(name)
            return [RunTime.exactly(time_ms)] * count

        return take

    finals.take_turns([contender("a", 1.0), contender("b", 1.1), contender("c", 1.2)])
    assert "".join(turns) == "abc" * (1 + 5)


def test_a_final_survives_impossible_samples() -> None:
    damaged = [1.0] * 4 + DAMAGED[:3] + [2.0, math.nan, 4.0]
    ours, theirs = finals.take_turns(
        [Sampler([*damaged, *[1.0] * 99]), Sampler(itertools.repeat(1.1))], clock=lambda: 0.0
    )
    assert ours[:4] == [1.0, 1.0, 3.0, 1.0]
    assert len(ours) == len(theirs)


def test_a_final_without_any_plausible_sample_is_an_error() -> None:
    with pytest.raises(ValueError, match="no plausible sample"):
        finals.take_turns([Sampler(itertools.repeat(1.0)), Sampler(itertools.repeat(math.nan))])


def test_the_profiler_holds_the_outputs_of_one_run_at_a_time() -> None:
    made: list[weakref.ref[jax.Array]] = []

    def alive() -> int:
        return sum(output() is not None for output in made)

    def dispatch() -> jax.Array:
        assert not alive(), "the previous run's outputs are freed"
        output = jnp.arange(4) + 1
        made.append(weakref.ref(output))
        return output

    run = device_clock._ProfiledRun(dispatch, flush=lambda: jnp.zeros(8))
    results = [run() for _ in range(5)]  # the profiler runs it like this
    assert len(jax.block_until_ready(results)) == 5
    assert alive() == 1
    run.release()
    assert not alive()


def test_finalists_by_a_devices_clock_are_close_to_the_fastest() -> None:
    times_ms = [1.0, 1.1, 1.2, 1.4]
    for clock, expected in (("device", [0, 1]), ("wall", [0, 1, 2, 3])):
        trials = {
            index: Trial(config={"n": index}, outcome=Outcome.OK, time_ms=ms, samples_ms=(ms, ms), clock=clock)
            for index, ms in enumerate(times_ms)
        }
        assert finals.finalists(trials) == expected


@pytest.mark.parametrize(
    ("samples_ms", "cpu_ms", "is_unreliable"),
    [
        ([2.0, 2.1, 9.0], [2.0, 2.1, 3.0], False),
        ([2.0, 9.0, 9.0], [2.0, 3.0, 3.0], True),
        ([2.0, 3.0, 3.0], [2.0, 3.0, 3.0], False),
        ([9.0, 8.0, 9.0], [2.0, 2.0, 2.0], True),
        ([9.0], [9.0], False),
        ([9.0], [5.0], True),
        ([9.0, 1.0, 5.0], [], False),
    ],
)
def test_times_are_unreliable_unless_two_samples_hardly_waited(
    samples_ms: list[float], cpu_ms: list[float], is_unreliable: bool
) -> None:
    assert sampling.is_unreliable(samples_ms, cpu_ms) is is_unreliable


def test_a_trial_is_usable_if_it_is_ok_and_has_a_time() -> None:
    trials = [Trial(config={}, outcome=outcome, time_ms=time_ms) for outcome in Outcome for time_ms in (None, 1.0)]
    assert [(trial.outcome, trial.time_ms) for trial in trials if trial.is_usable] == [(Outcome.OK, 1.0)]


def test_the_first_of_a_tie_is_preferred_within_the_noise() -> None:
    wide = [0.98, 1.0, 1.02] * 3
    for ahead, winner in ((1.004, 0), (1.008, 1)):
        rounds = {0: [ahead * time for time in reversed(wide)], 1: wide}
        assert finals.level(rounds) == [0, 1]
        assert finals.decide(rounds, default=None)[0] == winner
        assert finals.decide(rounds, default=0)[0] == 0
    assert finals.decide({UNTUNED: wide, 1: [1.008 * time for time in reversed(wide)]}, default=None)[0] == 1
