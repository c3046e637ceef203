"""The statistical model for timing, ruling out and comparing configs, with the constants that its parts share.

**A sample** is the time of one run, or of several short runs in a row. It is the config's own time, times a small
scatter that falls either way (clock rates, caches), plus the waits of its threads for a CPU, plus interruptions. A
device's own clock sees no waits and no interruptions. With a wall clock, waits are known (`host.waits`) and subtracted.
Interruptions are unknown, but they only ever make a run longer. So the median of a device's samples counts, and the
fastest of a wall clock's samples.

**Scatter** is the median absolute deviation, scaled to the sigma of a normal distribution, because some samples are
far off (Rousseeuw and Croux, Alternatives to the Median Absolute Deviation, JASA 1993). A median's standard error
follows.

**A config is out** when even its fastest run is `MARGINS` times slower than the best config, unless every single run
may have been interrupted for that long. Runs are interrupted independently of each other. The latest runs of all
configs show the probability; before there are any, it is one in four (a Beta(1, 3) prior). The config is out once the
probability that all its runs were interrupted is below `ALL_DISTURBED`.

**A first run** may also be cold. It counts only if a cold start can be no more than a small part of it. The limit for
it allows for how much longer first runs were here than later ones.

**The final** compares pairs: two contenders in one round share its drift, so the ratio of their times scatters less
than the times. The race between two is decided once the median of their ratios is far enough from one, in its standard
errors: `_SIGMAS` (three) after the last round, and `_CLEAR_SIGMAS` (five) to stop early. Equals that are compared after
every round differ by three sooner or later (Armitage, McPherson and Rowe, Repeated Significance Tests on Accumulating
Data, JRSS A 1969). It is a tie if more rounds would not separate them: both are within the `floor`, the difference of
one program from itself.

**Between processes**, a ratio differs by more than its rounds scatter. `intervals` has the model for it, and `BETWEEN`
its constants.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

FEW = 3
"""Fewest samples whose median does not depend on a single one."""
ENOUGH = 5
"""Fewest samples whose scatter is meaningful, as two of them may be far off."""
LONG_RUN_MS = 5.0
"""Length above which a single run is informative: interruptions of single samples are much shorter, and so are the
remains of a cold start in a second run."""
STRAY = 0.25
"""Share of their time above which only an interruption explains a difference between runs of one config."""
ALL_DISTURBED = 0.0025
"""Highest acceptable probability that all runs that rule a config out were interrupted."""
_MAD_TO_SIGMA = 1.4826
_MEDIAN_EFFICIENCY = 1.2533
"""Ratio of a median's standard error to a mean's, for normal noise: the root of pi / 2."""
MARGINS = {"device": 1.15, "queued": 1.5, "wall": 1.5}
"""Factor to the fastest config above which a config cannot win, by clock; the final decides between the rest."""
BETWEEN = {"device": 0.005, "queued": 0.02, "wall": 0.06}
"""Scatter, by clock, of the ratio of two programs' times between fresh processes, as a share. In 14 sweeps of the
README's function on a busy CPU with two cores it was 0.08; a quiet one has less. On an H200, the median of one program
differs by a third of a percent. The figure of a queued clock is a guess between the two."""
TIMES_BETWEEN = {"device": 0.02, "queued": 0.05, "wall": 0.1}
"""The same for the time of one program, which clock rates and neighbours change more than a ratio: a guess."""
PROCESSES = {"device": 1, "queued": 3, "wall": 3}
"""The most processes of a final, by clock: between processes, a device's own clock scatters hardly more than within."""
BUSY = {"device": 0.05, "queued": 0.15, "wall": 0.25}
"""Scatter, by clock, as a share of the median, above which the machine was busy."""


def cautious_share(disturbed: int, samples: int) -> float:
    """Returns the share of disturbed samples to reckon with: with few samples, a low share may be chance."""
    return (disturbed + 1) / (samples + 4)


def spread(samples: Sequence[float]) -> float:
    """Returns the samples' scatter as a share of their median: the median absolute deviation, scaled as sigma is."""
    middle = statistics.median(samples)
    if not middle:
        return math.inf
    return _MAD_TO_SIGMA * statistics.median(abs(sample - middle) for sample in samples) / middle


def standard_error(samples: Sequence[float]) -> float:
    """Returns the standard error of the samples' median, as a share of it, from their median absolute deviation."""
    return _MEDIAN_EFFICIENCY * spread(samples) / math.sqrt(len(samples))
