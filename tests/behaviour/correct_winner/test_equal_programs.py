"""Configs with equal programs are checked and measured once; different programs are never merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers import ends, python
from tuned_functions import SOON, Notes, X, host, tuned

import quarantune
from quarantune.values.configs import format_config

pytestmark = pytest.mark.usefixtures("two_slots")


def test_configs_with_equal_programs_are_measured_once(notes: Notes) -> None:
    def check(output: Any, expected: Any, x: Any) -> bool:
        added = float(host(output)[0] - host(x)[0])
        notes.add(added)
        return added < 2

    trials = tuned(lambda x, do: x + do // 2, [0, 1, 2, 3, 4, 5], check_fn=check).tune(X).trials
    assert ends(trials) == ["ok", "ok", "ok", "ok", "wrong", "wrong"]
    assert sorted(set(notes.lines())) == ["0.0", "1.0", "2.0"]
    assert len(notes.lines()) < 6, "a busy machine may have one of them measured again"
    for pair in zip(trials[::2], trials[1::2], strict=True):
        ran, twin = sorted(pair, key=lambda trial: trial.message.startswith("the same"))
        assert not ran.message.startswith("the same")
        same = f"the same program as {format_config(ran.config)}"
        assert twin.message == ": ".join(filter(None, (same, ran.message)))
        assert ran.samples_ms == twin.samples_ms


def test_programs_that_call_back_into_python_are_never_merged(notes: Notes) -> None:
    def called(x: Any, do: int) -> Any:
        def callback(x: Any) -> Any:
            notes.add(do)
            return np.asarray(x) + do

        return jax.pure_callback(callback, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    trials = (
        tuned(called, [1, 2, 3], check_fn=lambda output, _, x: bool(host(output)[0] - host(x)[0] != 2)).tune(X).trials
    )
    assert ends(trials) == ["ok", "wrong", "ok"]
    assert set(notes.lines()) == {"1", "2", "3", "None"}, "the defaults are called, and fail"
    assert not any("same program" in trial.message for trial in trials)


@pytest.mark.parametrize("dos", [["x", "y"], ["y", "x"]])
def test_programs_of_different_arguments_are_never_merged(dos: list[str]) -> None:
    # Lowering drops unused arguments and numbers the rest again, so both programs have the same text.
    def doubled(x: Any, y: Any, do: str = "") -> Any:
        return 2 * (x if do == "x" else y)

    tuned = quarantune.autotune({"do": dos}, ref_fn=lambda x, y: 2 * x, **SOON)(jax.jit(doubled, static_argnames="do"))
    trials = tuned.tune(X, X + 1).trials
    assert {trial.config["do"]: trial.outcome.value for trial in trials} == {"x": "ok", "y": "wrong"}


def test_programs_of_different_structures_are_never_merged() -> None:
    body = {"tuple": lambda x: (x * 2,), "list": lambda x: [x * 2]}
    trials = tuned(lambda x, do: body[do](x), ["tuple", "list"], ref_fn=lambda x: (x * 2,)).tune(X).trials
    assert ends(trials) == ["ok", "wrong"]


@pytest.mark.slow
def test_programs_of_different_constants_are_never_merged(tmp_path: Path) -> None:
    script = tmp_path / "constants.py"
    script.write_text(
        """
import jax, numpy as np, quarantune

def added(x, do=1):
    return x + do * np.arange(x.size, dtype=x.dtype)

tuned = quarantune.autotune({"do": [1, 2]}, ref_fn=lambda x: added(x), rep=1)(jax.jit(added, static_argnames="do"))
x = np.ones(100, np.float32)
one, two = (tuned.__wrapped__.lower(x, do=do).as_text() for do in (1, 2))
print(one == two, *(trial.outcome.value for trial in tuned.tune(x).trials), tuned(x)[99])
""",
        encoding="utf-8",
    )
    # JAX reads this option when it is imported.
    said = python(script, JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS="1")
    assert said.split() == ["True", "ok", "wrong", "100.0"]
