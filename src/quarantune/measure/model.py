"""The statistical model by which configs are timed, ruled out and compared, with the constants that its parts share.

**A sample** is the time of one run, or of several short ones in a row: the config's own time, times a small scatter
that falls either way (clock rates, caches), plus the time that its threads waited for a CPU, plus interruptions. A
device's own clock sees no waits and no interruptions; of a wall clock, waits are known (`host.waits`) and are taken
off, and interruptions are not known, but only ever make a run longer. So a device's samples are judged by their
median, and those of a wall clock by their fastest.

**Scatter** is the median absolute deviation, scaled to the sigma of a normal distribution, because some samples are
far off (Rousseeuw and Croux, Alternatives to the Median Absolute Deviation, JASA 1993). A median's standard error
follows.

**A config is out** when even its fastest run is `MARGINS` times slower than the best config, unless every single run
may have been interrupted for that long. Runs are interrupted independently of each other, with the probability that the
latest runs of all configs show; before there are any, one in four (a Beta(1, 3) prior). The config is out after so many
runs that all of them were interrupted with a probability below `ALL_DISTURBED`.

**A first run** may be cold, too. It is judged by how much longer than later ones first runs were here, and only if it
takes so long that a cold start is a small part of it.

**The final** compares pairs: two contenders in one round share its drift, so the ratio of their times scatters less
than the times. The race is decided between two when the median of their ratios is off one by more than so many of its
standard errors: `_SIGMAS` (three) after the last round, and `_CLEAR_SIGMAS` (five) to stop early, because who looks
after every round sees three sooner or later among equals (Armitage, McPherson and Rowe, Repeated Significance Tests
on Accumulating Data, JRSS A 1969). It is a tie when more rounds would not tell: both are within the `floor`, the
difference of one program from itself.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

FEW = 3
"""Samples: the fewest whose median is no matter of one of them."""
ENOUGH = 5
"""Samples: the fewest whose scatter says something, as two of them may be far off."""
LONG_RUN_MS = 5.0
"""Runs longer than this are informative one by one: interruptions that disturb single samples are much shorter, and so
is what a second run still has of a cold start."""
STRAY = 0.25
"""Where runs of one config differ by more than this share of their time, only an interruption explains it."""
ALL_DISTURBED = 0.0025
"""The highest acceptable probability that all runs that rule a config out were interrupted."""
_MAD_TO_SIGMA = 1.4826
_MEDIAN_EFFICIENCY = 1.2533
"""The standard error of a median is this many times that of a mean, for normal noise: the root of pi / 2."""
MARGINS = {"device": 1.15, "queued": 1.5, "wall": 1.5}
"""By clock, how many times slower than the fastest config one is that cannot win; less is left to the final."""
BUSY = {"device": 0.05, "queued": 0.15, "wall": 0.25}
"""By clock, the scatter, as a share of the median, above which the machine was busy."""


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
