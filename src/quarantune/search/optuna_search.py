"""Searches with the samplers of Optuna, without asking for a config twice."""

from __future__ import annotations

import importlib
import importlib.util
import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from quarantune.search.fields import Fields, by_size
from quarantune.search.random_search import RandomSearch
from quarantune.search.strategy import MOST_REPEATS, log_time
from quarantune.values.configs import Config
from quarantune.values.options import OPTUNA
from quarantune.values.space import Space
from quarantune.values.texts import did_you_mean
from quarantune.values.trial import Outcome, Trial

_LEFT_OUT = frozenset({"base", "basega", "bruteforce", "grid", "partialfixed"})
"""Names that no search may have: base classes, samplers that need further arguments, and a sampler that stops a study
that nobody has started."""
_NEEDED = {"cmaes": "cmaes", "gp": "torch"}
"""Modules that Optuna imports only after some trials."""


class OptunaSearch(RandomSearch):
    """Asks a sampler for configs; numbers are ordered by size, words are categories."""

    def __init__(self, sampler: str, space: Space, seed: int, starts: Iterable[Config] = ()) -> None:
        """Makes a study in memory.

        Args:
            sampler: the name of a class in `optuna.samplers` in lower case, without `Sampler`.
            space: the configs.
            seed: the sampler's seed.
            starts: configs to try first; see `Strategy`.

        Raises:
            ImportError: Optuna, or a module that the sampler needs, is not installed.
            ValueError: Optuna has no sampler of this name.
        """
        try:
            self._optuna: Any = importlib.import_module("optuna")
        except ImportError as error:
            raise ImportError(
                f"search='{OPTUNA}...' needs Optuna, which is not installed: pip install 'quarantune[optuna]'"
            ) from error
        made = _make_sampler(self._optuna, sampler, seed)
        super().__init__(space, seed, starts)
        self._fields = Fields(space)
        kinds = self._optuna.distributions
        self._orders: dict[str, Sequence[int]] = {}
        self._distributions: dict[str, Any] = {}
        for name, values in zip(self._fields.names, self._fields.values, strict=True):
            order, words = by_size(values), range(len(values))
            self._orders[name] = order or words
            numbers = kinds.IntDistribution(0, len(values) - 1)
            self._distributions[name] = numbers if order else kinds.CategoricalDistribution(words)
        verbosity = self._optuna.logging.get_verbosity()
        self._optuna.logging.set_verbosity(self._optuna.logging.WARNING)
        try:
            self._study = self._optuna.create_study(sampler=made)
        finally:
            self._optuna.logging.set_verbosity(verbosity)
        self._asked: dict[int, Any] = {}

    def pick(self, n: int) -> Iterable[int]:
        """Yields the sampler's next new configs; random configs if the sampler only repeats itself."""
        repeats = 0
        while repeats < MOST_REPEATS:
            proposal = self._study.ask(self._distributions)
            position = self._position(proposal.params)
            if position is not None and self.is_free(position):
                self._asked[position] = proposal
                yield position
                repeats = 0
                continue
            repeats += 1
            value = None if position is None else self._value(self.trials.get(position))
            self._finish(proposal, value)
        yield from super().pick(n)

    def learn(self, position: int, trial: Trial) -> None:
        """Adds a trial to the study, even if the study did not ask for it."""
        value = self._value(trial)
        if (proposal := self._asked.pop(position, None)) is not None:
            self._finish(proposal, value)
        elif value is not None:
            codes = zip(self._orders.items(), self._fields.codes([position])[0].tolist(), strict=True)
            params = {name: order.index(code) for (name, order), code in codes}
            make = self._optuna.trial.create_trial
            self._study.add_trial(make(params=params, distributions=self._distributions, value=value))

    def _position(self, params: dict[str, int]) -> int | None:
        codes = [order[params[name]] for name, order in self._orders.items()]
        return next(iter(self._fields.positions_of(np.array([codes], np.int64))), None)

    def _value(self, trial: Trial | None) -> float | None:
        """Returns the study's value for a trial: a failure counts as the slowest config, or None if none is known."""
        log = None if trial is None else log_time(trial)
        if log is None or not math.isnan(log):
            return log
        logs = [log_time(known) for known in self.trials.values() if known.outcome is Outcome.OK]
        return max((log for log in logs if log is not None), default=None)

    def _finish(self, proposal: Any, value: float | None) -> None:
        self._study.tell(proposal, value, self._optuna.trial.TrialState.FAIL if value is None else None)


def _make_sampler(optuna: Any, name: str, seed: int) -> Any:
    classes = {
        attribute.removesuffix("Sampler").lower(): getattr(optuna.samplers, attribute)
        for attribute in optuna.samplers.__all__
        if attribute.endswith("Sampler")
    }
    names = sorted(classes.keys() - _LEFT_OUT)
    if name not in names:
        raise ValueError(
            f"search='{OPTUNA}{name}' is not valid: Optuna has no such sampler.{did_you_mean(name, names)} "
            f"Give one of {', '.join(names)}."
        )
    if (needed := _NEEDED.get(name)) is not None and importlib.util.find_spec(needed) is None:
        raise ImportError(
            f"search='{OPTUNA}{name}' needs {needed}, which is not installed: pip install {needed}, or give another "
            f"sampler such as '{OPTUNA}tpe'"
        )
    seed %= 1 << 32  # Optuna's generators take no larger seeds
    with warnings.catch_warnings():
        # Optuna warns that samplers, and the option for several trials at a time, are experimental.
        warnings.simplefilter("ignore")
        more = {"constant_liar": True} if name == "tpe" else {}
        return classes[name](seed=seed, **more)
