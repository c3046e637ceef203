"""A script's pytree classes of equinox, flax and chex may be arguments of tuned functions, and `self`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from helpers import python

pytestmark = pytest.mark.clients

DEFINE = """
import dataclasses, functools, sys
import jax, jax.numpy as jnp, numpy as np
import quarantune

tuned = quarantune.autotune({"n": [2]}, rep=1, ref_fn=None)
jitted = functools.partial(jax.jit, static_argnames=["n"])
W, X = jnp.ones((4, 4)), jnp.ones((3, 4))

def check(n):
    if n != 2:  # not the default: what works was tuned
        raise ArithmeticError(n)

@tuned
@jitted
def add_leaves(tree, x, n: int = 1):
    check(n)
    return x + sum(jnp.sum(leaf) for leaf in jax.tree_util.tree_leaves(tree))
"""

EQUINOX = """
import equinox as eqx

class Net(eqx.Module):
    w: jax.Array
    scale: float = eqx.field(static=True)

    def __init__(self, w, scale):
        self.w, self.scale = w, scale

    @tuned
    @jitted
    def __call__(self, x, n: int = 1):
        check(n)
        return x @ self.w * self.scale

class Sub(Net):
    bias: jax.Array | None = None

class Filled(eqx.Module):
    w: jax.Array
    tag: str = eqx.field(static=True, default="a")

@tuned
@jitted
def apply(net, x, n: int = 1):
    check(n)
    made = Filled(net.w * 2)  # the script's class also makes instances in a worker
    return x @ jax.tree_util.tree_map(lambda leaf: leaf, net).w + made.w[0, 0]

net = Net(W, 2.0)
np.testing.assert_array_equal(apply(net, X), np.full((3, 4), 6.0))
np.testing.assert_array_equal(net(X), np.full((3, 4), 8.0))
np.testing.assert_array_equal(Sub(W, 3.0)(X), np.full((3, 4), 12.0))
np.testing.assert_array_equal(eqx.filter_jit(lambda net, x: net(x))(net, X), np.full((3, 4), 8.0))
np.testing.assert_array_equal(eqx.filter_vmap(lambda x: apply(net, x))(X[None])[0], np.full((3, 4), 6.0))
"""

FLAX = """
import flax.struct
from flax import nnx

@flax.struct.dataclass
class Decorated:
    w: jax.Array
    tag: int = flax.struct.field(pytree_node=False, default=3)

class Node(flax.struct.PyTreeNode):
    w: jax.Array
    tag: int = flax.struct.field(pytree_node=False, default=3)

class Model(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(W)
    def __call__(self, x):
        return x @ self.w[...]

@tuned
@jitted
def run(model, x, n: int = 1):
    check(n)
    return model(x)

np.testing.assert_array_equal(add_leaves(Decorated(W), X), np.full((3, 4), 17.0))
np.testing.assert_array_equal(add_leaves(Node(W), X), np.full((3, 4), 17.0))
np.testing.assert_array_equal(run(Model(), X), np.full((3, 4), 4.0))
"""

CHEX = """
import chex

@chex.dataclass
class State:
    w: jax.Array

np.testing.assert_array_equal(add_leaves(State(w=W), X), np.full((3, 4), 17.0))
"""


SCRIPTS = {"equinox": EQUINOX, "flax": FLAX, "chex": CHEX}


def test_classes_of_a_script_arrive_with_their_fields(tmp_path: Path) -> None:
    installed = [script for library, script in SCRIPTS.items() if importlib.util.find_spec(library)]
    if not installed:
        pytest.skip(f"needs one of {', '.join(SCRIPTS)}")
    file = tmp_path / "script.py"
    file.write_text("".join([DEFINE, *installed]))
    python(file)
