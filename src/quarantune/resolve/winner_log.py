"""Says in the log which config won, and whether the machine was too busy to trust it."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Sequence

from quarantune.measure import model
from quarantune.values import shown
from quarantune.values.trial import Config, Trial

_logger = logging.getLogger("quarantune")


def log_winner(
    name: str,
    device: str,
    best: Trial,
    tie: Sequence[Config],
    usable: Sequence[Trial],
    *,
    tried: int,
    is_untuned: bool,
) -> None:
    """Logs the winner of a sweep, and warns where no config won or times scattered far above the usual.

    Args:
        name: the function's.
        device: the device's.
        best: the winner's trial.
        tie: the configs that are as fast.
        usable: the trials of all configs that were measured.
        tried: the number of all configs.
        is_untuned: whether the winner is no config, but the function's own defaults.
    """
    if is_untuned:
        shown_best = shown.format_config(best.config)
        _logger.warning("%s: its own defaults (%s) beat all %d configs: calls run with them", name, shown_best, tried)
    _logger.info(
        "%s: best of %d is %s: %.4g ms%s",
        name,
        tried,
        shown.format_config(best.config),
        best.time_ms,
        f", level with {' and '.join(map(shown.format_config, tie))}" if tie else "",
    )
    scatter = statistics.median(model.spread(trial.samples_ms) for trial in usable)
    if scatter > model.CLOCKS[best.clock or "wall"].busy:
        _logger.warning(
            "%s: the samples scatter by %.0f%%, far above the usual: %s was busy or its clock throttled",
            name,
            100 * scatter,
            device,
        )
