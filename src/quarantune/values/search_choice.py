"""The choice of a search: the protocol of searches, and the names of those that are built in."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from quarantune.values.texts import did_you_mean, shown
from quarantune.values.trial import Config, Trial

AUTO, EXHAUSTIVE, RANDOM, SURROGATE = "auto", "exhaustive", "random", "surrogate"
OPTUNA = "optuna:"
"""The prefix of the name of one of Optuna's samplers."""

NAMES = (AUTO, EXHAUSTIVE, RANDOM, SURROGATE)

AUTO_EXHAUSTIVE_MOST = 300
"""With `auto`, up to so many configs are all tried."""
AUTO_MAX_TRIALS = 400
"""The number of trials of `auto` in a larger space."""
AUTO_PATIENCE = 200
"""`auto` stops after so many trials without a gain. In replays of recorded GPU spaces, 64 ended as low as 0.60 of the
optimum; 200 ended at worst at 0.93, with a median of 0.997."""
LEAST_GAIN = 0.005
"""A new best counts as a gain if it is faster by this share."""


@runtime_checkable
class Search(Protocol):
    """Decides which configs are tried, and in which order; it knows nothing of how they are run."""

    def ask(self, n: int) -> list[Config]:
        """Returns up to `n` configs to try next.

        Fewer than `n`, or none, means to wait for the trials of configs that were returned earlier; where all of them
        were told already, it means that the search has ended.

        Args:
            n: the most configs to return.
        """
        ...

    def tell(self, config: Config, trial: Trial) -> None:
        """Takes note of a trial, of a config that `ask` returned or of any other one of the space.

        Args:
            config: the config.
            trial: its outcome, with its time where it has one.
        """
        ...


def check_search(search: Any) -> None:
    """Checks the option `search`.

    Args:
        search: a name, or an object with the methods of `Search`.

    Raises:
        TypeError: it is neither a string nor such an object.
        ValueError: no search has this name.
    """
    if not isinstance(search, str):
        if isinstance(search, type) or not all(callable(getattr(search, name, None)) for name in ("ask", "tell")):
            raise TypeError(
                f"search={shown(search)} is no search: give {_choices()}, or an object with the methods "
                "ask(n) -> list[Config] and tell(config, trial)"
            )
    elif search not in NAMES and not (search.startswith(OPTUNA) and len(search) > len(OPTUNA)):
        hint = did_you_mean(search, (*NAMES, f"{OPTUNA}tpe"))
        raise ValueError(
            f"search={shown(search)} is not valid.{hint} Give {_choices()}, or an object with ask and tell."
        )


def _choices() -> str:
    return f"{', '.join(map(repr, NAMES))}, '{OPTUNA}<sampler>' such as '{OPTUNA}tpe'"
