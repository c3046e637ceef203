"""Arguments and directories that cannot be used are refused by name, before any work starts."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aftermath import running_templates
from cached_functions import CONFIGS, scaled

import quarantune
from quarantune.sandbox import template

X = np.ones(4, np.float32)


@quarantune.autotune([{"n": 1}, {"n": 2}], rep=1, name="add_to")
@jax.jit(static_argnames=["n"])
def add_to(total: Any, x: Any, n: int = 1) -> Any:
    target = total["sum"] if isinstance(total, dict) else total
    target[...] += n * x
    return x


@pytest.mark.parametrize("place", [lambda total: total, lambda total: {"sum": total}])
def test_a_mutable_array_is_refused_by_the_name_of_its_parameter(place: Any) -> None:
    template.close_shared()
    total = jax.new_ref(jnp.zeros(4))
    says = r"add_to: argument 'total' is a jax.Ref, to which every config would write: .*or give the tunables by hand"
    inside = jax.jit(lambda x: add_to(place(jax.new_ref(x)), x))
    for call in (lambda: add_to(place(total), X), lambda: add_to.tune(place(total), X), lambda: inside(X)):
        with pytest.raises(TypeError, match=says):
            call()
    with pytest.raises(TypeError, match=r"argument 'total' is a jax\.Ref"):
        quarantune.AutoTuner(lambda total, n: total[...] * n, [{"n": 1}], name="plain").run(total)
    assert running_templates() == []
    add_to(place(total), X, n=3)
    np.testing.assert_array_equal(total[...], X * 3)
    add_to.default(place(total), X)
    np.testing.assert_array_equal(total[...], X * 4)


@pytest.mark.parametrize("url", ["gs://bucket/tuned", "s3://bucket", "file:///tmp/tuned", "https://host/x"])
def test_a_url_is_refused_as_a_directory_with_a_way_out(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    says = "not a URL: results at a URL are read with QUARANTUNE_CACHE_PATH, and copied with `quarantune cache push`"
    for name in ("cache_dir", "log_dir", "record"):
        with pytest.raises(ValueError, match=f"{name}='{url}' is not valid: .*{says}"):
            quarantune.settings(**{name: url})
    with pytest.raises(ValueError, match=says):
        quarantune.TuningCache(url)
    monkeypatch.setenv("QUARANTUNE_CACHE_DIR", url)
    with pytest.raises(ValueError, match=f"QUARANTUNE_CACHE_DIR='{url}' is not valid.*{says}"):
        add_to.lookup(X, X)
    assert os.listdir(tmp_path) == []


def plain(x: Any, *rest: Any, n: int) -> Any:
    return x * n


def keywords(x: Any, **config: Any) -> Any:
    return x * config["n"]


@pytest.mark.usefixtures("no_process")
def test_tune_refuses_a_tunable_given_by_hand_before_any_work(name: str) -> None:
    jitted = scaled(name)
    says = re.escape("n is tuned here: leave it out")
    for fn in (plain, keywords, jitted.__wrapped__):
        with pytest.raises(TypeError, match=says):
            quarantune.AutoTuner(fn, CONFIGS, name=name).run(X, n=2)
    with pytest.raises(TypeError, match=says):
        quarantune.AutoTuner(jitted.__wrapped__, lambda x: list(CONFIGS), name=name).run(X, n=2)
    with pytest.raises(TypeError, match=says):
        jitted.tune(X, 2)
    with pytest.raises(TypeError, match=says):
        quarantune.compile_configs(jitted.__wrapped__, CONFIGS, X, n=2)
    with pytest.raises(TypeError, match="m, n are tuned here: leave them out"):
        quarantune.AutoTuner(keywords, [{"n": 1, "m": 2}], name=name).run(X, n=2, m=3)


def test_a_config_too_large_for_a_message_names_its_largest_key() -> None:
    def fn(x: int, table: str) -> int:
        return x

    tuner = quarantune.AutoTuner(fn, [{"table": "ab"}, {"table": "x" * (5 << 20)}])
    with pytest.raises(ValueError, match=r"5,242,\d+ bytes as JSON, most of them its 'table'"):
        tuner.run(1)
