"""Reports of an exception start with its message, then show the lines in the author's files that led to it."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from made_up_results import table_of

import quarantune
from quarantune.results.report import failure_message
from quarantune.values.trial import Outcome, Phase, Trial
from quarantune.worker.failures import describe_error


def caught(act: Any) -> BaseException:
    try:
        act()
    except BaseException as error:
        return error
    raise AssertionError("it raised nothing")


def told(act: Any) -> list[str]:
    return describe_error(caught(act)).traceback.splitlines()


def reshaped(x: Any, rows: int) -> Any:
    return x.reshape(rows, 7)


def test_the_message_comes_first_then_the_authors_lines() -> None:
    message, *lines = told(lambda: jax.jit(lambda x: reshaped(x, 3))(jnp.ones(8)))
    assert message == "TypeError: cannot reshape array of shape (8,) (size 8) into shape (3, 7) (size 21)"
    places = [re.fullmatch(rf"  {re.escape(__file__)}:\d+, in (\S+): .*", line) for line in lines]
    assert all(places), lines
    assert "in reshaped: return x.reshape(rows, 7)" in lines[0]


def test_a_host_callbacks_own_error_is_shown() -> None:
    def fails(x: Any) -> Any:
        raise ArithmeticError("this config is bad")

    function = jax.jit(lambda x: jax.pure_callback(fails, x, x))
    described = describe_error(caught(lambda: jax.block_until_ready(function(jnp.ones(3)))))
    assert described.text.endswith("error calling callback: ArithmeticError: this config is bad")
    message, line, *_ = described.traceback.splitlines()
    assert message == f"{described.error}: {described.text}"
    assert re.fullmatch(rf"  {re.escape(__file__)}:\d+, in fails: raise ArithmeticError.*", line)


def test_an_exception_is_shown_with_its_causes() -> None:
    def first() -> None:
        raise KeyError("block")

    def second() -> None:
        try:
            first()
        except KeyError as error:
            error.add_note("a note of the author")
            raise ValueError("no such block") from error

    lines = told(second)
    assert lines[0] == "ValueError: no such block"
    earlier = lines.index("from KeyError: 'block'")
    assert lines[earlier + 1] == "a note of the author"
    assert "in first: " in lines[earlier + 2]


def test_a_late_error_of_jax_shows_the_operations_line() -> None:
    from jax.experimental import pallas as pl

    def body(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[...].astype(jnp.int8)

    def kernel(x: Any) -> Any:
        return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)

    lines = told(lambda: jax.jit(kernel)(jnp.ones(8)))
    assert any("in body: o_ref[...] = " in line for line in lines), lines


def test_endless_recursion_is_shown_in_a_few_lines() -> None:
    def endless(n: int) -> int:
        return endless(n + 1) + 1

    lines = told(lambda: endless(0))
    assert lines[0].startswith("RecursionError: ")
    assert len(lines) < 12
    assert re.fullmatch(r"  \.\.\. and \d+ earlier lines", lines[-1])


@functools.partial(jax.jit, static_argnames=["rows"])
def kernel(x: Any, rows: int = 8) -> Any:
    return reshaped(x, rows)


def test_table_and_error_name_the_authors_line_once() -> None:
    with pytest.raises(quarantune.TuningFailedError) as failed:
        quarantune.AutoTuner(kernel, {"rows": [2, 3, 4, 5]}, ref_fn=None, warmup=0, rep=1).run(jnp.ones(8))
    text = str(failed.value)
    assert text.count("cannot reshape") == 2, text  # the reason, and the output of the first
    assert re.search(r"rows=\d and 3 more: error \(compile\) TypeError: .* \(test_failures\.py:\d+\)", text)
    assert re.search(r"^  \| +\S+test_failures\.py:\d+, in reshaped: return x\.reshape", text, re.MULTILINE)
    assert "site-packages" not in text


def test_many_reasons_are_cut_to_those_of_the_first_configs() -> None:
    trials = [
        Trial(config={"n": n}, outcome=Outcome.ERROR, phase=Phase.COMPILE, message=f"E: {'x' * n}")
        for n in range(1, 60)
    ]
    lines = failure_message("f", trials).splitlines()
    assert len(lines) < 25
    assert re.fullmatch(r"  \.\.\. and \d+ other reasons", lines[-1])
    assert "[59] error (compile): E: " in table_of(trials, width=120)
