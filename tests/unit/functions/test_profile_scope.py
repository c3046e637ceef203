"""Tuned calls in traced programs have names for profiles, which change neither the program nor its key."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import python

from quarantune.functions.profile_scope import SCOPE, call_id, config_id, scope_of


def test_an_id_depends_on_the_call_and_on_its_config() -> None:
    one = call_id("kernels.mm", "TPU v6 lite", {"x": [8, 8]})
    assert one == call_id("kernels.mm", "TPU v6 lite", {"x": [8, 8]})
    others = [("kernels.mm", "TPU v6 lite", {"x": [8, 16]}), ("kernels.mm", "TPU v4", {"x": [8, 8]})]
    assert one not in [call_id(*other) for other in [*others, ("kernels.up", "TPU v6 lite", {"x": [8, 8]})]]
    assert config_id({"tile": (8, 128)}) == config_id({"tile": [8, 128]}) == config_id({"tile": [8, 128]} | {})
    assert len({config_id(None), config_id({}), config_id({"tile": 8})}) == 3


@pytest.mark.parametrize("wrapped", ["jit(f)/{}/dot", "jvp({})/dot", "transpose(jvp({}))/dot", "{}", "{}:"])
def test_a_scope_is_found_in_the_names_of_jax(wrapped: str) -> None:
    scope = scope_of("kernels.mm-1f", "3f2a99aa", "1b77")
    found = SCOPE.search(wrapped.format(scope))
    assert found is not None
    assert found.groups() == ("kernels.mm-1f", "3f2a99aa", "1b77")


@pytest.mark.parametrize(
    "other", ["quarantune/kernels.mm", "quarantune/mm/3f2a99aa1b77ff/dot", "quarantune/mm/other/dot"]
)
def test_no_other_name_is_a_scope(other: str) -> None:
    assert SCOPE.search(other) is None


_TRACED = """
import hashlib, os, re, sys, jax, jax.numpy as jnp, quarantune

@quarantune.autotune({"batch": [1, 64]}, name="demo.Scale", rep=2)
@jax.jit(static_argnames=["batch"])
def scale(x, batch: int = 1):
    return jax.lax.map(lambda each: 2 * each + 1, x, batch_size=batch)

jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
x = jnp.ones(128)

def traced(on, around=lambda fn: fn):
    jax.clear_caches()
    with quarantune.settings(profile_scopes=on, on_miss="default", progress=False):
        lowered = jax.jit(around(lambda x: scale(x).sum())).lower(x)
    compiled = lowered.compile()
    return hashlib.sha256(lowered.as_text().encode()).hexdigest(), compiled.as_text()

def files():
    return sorted(name for name in os.listdir(sys.argv[1]) if name.endswith("-cache"))

for around in (lambda fn: fn, jax.grad, jax.checkpoint):
    without, text = traced(False, around)
    assert "quarantune/demo" not in text
    before = files()
    assert before
    named, _ = traced(True, around)
    assert named == without  # the program
    assert files() == before  # its key in JAX's compilation cache

jax.config.update("jax_enable_compilation_cache", False)
jax.clear_caches()
scopes = set(re.findall(r"quarantune/demo.Scale-[0-9a-f]+/[0-9a-f]{12}", traced(True)[1]))
assert len(scopes) == 1, scopes
"""


def test_names_change_neither_a_program_nor_its_key_in_jax(tmp_path: Path) -> None:
    (tmp_path / "programs").mkdir()
    python("-W", "ignore", "-c", _TRACED, str(tmp_path / "programs"), QUARANTUNE_CACHE_DIR=str(tmp_path / "tuned"))
