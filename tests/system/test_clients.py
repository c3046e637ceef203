"""Kernels, models and programs of other libraries are tuned as their users write them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import child_environ
from shared_python import SharedPython

pytestmark = [pytest.mark.clients, pytest.mark.usefixtures("two_slots")]

START = """
import jax, jax.numpy as jnp, numpy as np
import quarantune

QUICK = {"rep": 1, "warmup": 0, "ref_fn": None}

def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)

def agree(got, want, tolerance=2e-2):
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)

def only(value, wanted):
    if value != wanted:  # as the defaults do, so that only a tuned call works
        raise ArithmeticError(value)
"""


@pytest.fixture(scope="module", params=[1])
def run(request: pytest.FixtureRequest) -> Iterator[Callable[[Path, str], None]]:
    """Runs a script as its user would, with warnings as errors, on one device or the test's number of devices."""
    # Other libraries may warn of each other; quarantune may not warn.
    strict = ["-W", "error:::quarantune", "-W", "error:::__main__"]
    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={request.param}"}
    shared = SharedPython(*strict, environ=child_environ(**flags))

    def run(directory: Path, script: str) -> None:
        file = directory / "script.py"
        file.write_text(START + script)
        done = shared.run(file, **flags)
        assert done.returncode == 0, done.stdout + done.stderr

    yield run
    shared.close()


def test_flax_models_in_linen_and_nnx_call_a_tuned_kernel(tmp_path: Path, run: Callable[[Path, str], None]) -> None:
    pytest.importorskip("flax")
    run(
        tmp_path,
        """
import flax.linen as nn
from flax import nnx

@quarantune.autotune({"chunk": [2]}, **QUICK)
@jax.jit(static_argnames=["chunk"])
def project(x, w, chunk=1):
    only(chunk, 2)
    return x @ w

class Dense(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.ones, (x.shape[-1], self.features))
        return project(x, w)

x = jnp.ones((2, 4))
model = Dense(3)
variables = model.init(jax.random.key(0), x)
agree(model.apply(variables, x), np.full((2, 3), 4.0))
agree(jax.jit(model.apply)(variables, x), np.full((2, 3), 4.0))
assert project.lookup(x, variables["params"]["w"]) == {"chunk": 2}
grads = jax.grad(lambda variables: model.apply(variables, x).sum())(variables)
agree(grads["params"]["w"], np.full((4, 3), 2.0))

class Layer(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(jnp.ones((4, 5)))
        self.calls = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.calls[...] += 1
        return project(x, self.w[...])

layer = Layer(nnx.Rngs(0))
agree(layer(x), np.full((2, 5), 4.0))
agree(nnx.jit(lambda layer, x: layer(x))(layer, x), np.full((2, 5), 4.0))
grads = nnx.grad(lambda layer: layer(x).sum())(layer)
agree(grads["w"][...], np.full((4, 5), 2.0))
assert float(layer.calls[...]) == 3
""",
    )


def test_a_module_whose_annotations_jaxtyping_checks_is_tuned(tmp_path: Path, run: Callable[[Path, str], None]) -> None:
    (tmp_path / "checkers.py").write_text(
        "def check(function):\n    return lambda *args, **kwargs: function(*args, **kwargs)"
    )
    (tmp_path / "annotated.py").write_text(
        """
import functools
import jax
import quarantune
from jaxtyping import Array, Float

def doubled(x: Float[Array, "n"]) -> Float[Array, "n"]:
    return x * 2

@quarantune.autotune({"n": [1, 2]}, rep=1, warmup=0)
@functools.partial(jax.jit, static_argnames=["n"])
def kernel(x: Float[Array, "n"], n: int = 1) -> Float[Array, "n"]:
    return doubled(x) * 1
"""
    )
    run(
        tmp_path,
        """
from jaxtyping import install_import_hook

with install_import_hook("annotated", "checkers.check"):
    import annotated
assert annotated.kernel.tune(jnp.ones(3)).failures == {}
""",
    )


def test_an_equinox_module_of_a_script_is_an_argument_and_a_self(
    tmp_path: Path, run: Callable[[Path, str], None]
) -> None:
    pytest.importorskip("equinox")
    run(
        tmp_path,
        """
import equinox as eqx

@quarantune.autotune({"chunk": [2]}, **QUICK)
@jax.jit(static_argnames=["chunk"])
def apply(net, x, chunk=1):
    only(chunk, 2)
    return x @ net.w + net.bias

class Net(eqx.Module):
    w: jax.Array
    bias: jax.Array
    name: str = eqx.field(static=True, default="net")

    def __call__(self, x):
        return apply(self, x)

    @quarantune.autotune({"chunk": [4]}, **QUICK)
    @jax.jit(static_argnames=["chunk"])
    def method(self, x, chunk=1):
        only(chunk, 4)
        return x @ self.w + self.bias

net = Net(jnp.eye(4) * 3, jnp.ones(4))
x, want = jnp.ones((2, 4)), np.full((2, 4), 4.0)
agree(apply(net, x), want)
agree(net.method(x), want)
assert (apply.lookup(net, x), net.method.lookup(x)) == ({"chunk": 2}, {"chunk": 4})
agree(eqx.filter_jit(lambda net, x: net(x) * 2)(net, x), want * 2)
agree(eqx.filter_vmap(net)(jnp.ones((3, 2, 4))), np.stack([want] * 3))
agree(eqx.filter_vmap(net.method)(jnp.ones((3, 4))), np.full((3, 4), 4.0))
agree(eqx.filter_grad(lambda net: net(x).sum())(net).bias, np.full(4, 2.0))
""",
    )


def test_optax_trains_through_a_tuned_attention(tmp_path: Path, run: Callable[[Path, str], None]) -> None:
    pytest.importorskip("optax")
    run(
        tmp_path,
        """
import optax

@quarantune.autotune({"block": [4, 16]}, **QUICK)
@jax.jit(static_argnames=["block"])
def attention(q, k, v, block=8):
    if block == 4:
        raise ArithmeticError("the first of the configs")
    rows = [jax.nn.softmax(q[start : start + block] @ k.T) @ v for start in range(0, q.shape[0], block)]
    return jnp.concatenate(rows)

def loss(params, x, y):
    def layer(x, w):
        return x + jax.checkpoint(attention)(x @ w["q"], x @ w["k"], x @ w["v"]), None

    out, _ = jax.lax.scan(layer, x, params)
    return jnp.mean((out - y) ** 2)

optimizer = optax.adam(1e-2)

@jax.jit
def step(params, state, x, y):
    value, grads = jax.value_and_grad(loss)(params, x, y)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value

params = {name: normal(seed, 2, 8, 8) * 0.1 for seed, name in enumerate("qkv")}
x, y = normal(3, 16, 8), normal(4, 16, 8)
state = optimizer.init(params)
losses = []
for _ in range(10):
    params, state, value = step(params, state, x, y)
    losses.append(float(value))
assert losses[-1] < losses[0] - 0.01, losses
assert attention.lookup(x, x, x) == {"block": 16}
""",
    )


@pytest.mark.long
def test_jaxs_own_gpu_kernels_are_tuned_in_interpret_mode(tmp_path: Path, run: Callable[[Path, str], None]) -> None:
    run(
        tmp_path,
        """
import warnings

warnings.simplefilter("ignore", DeprecationWarning)  # JAX deprecates these kernels from version 0.12 on
from jax.experimental.pallas.ops.gpu import (
    attention, decode_attention, layer_norm, paged_attention, rms_norm, softmax
)

backward = {"block_q_dkv": 16, "block_kv_dkv": 16, "block_q_dq": 16, "block_kv_dq": 16}
sizes = [attention.BlockSizes(block_q=q, block_k=k, **backward) for q, k in ((16, 16), (32, 32))]

@quarantune.autotune({"block_sizes": sizes[1:]}, **QUICK)
@jax.jit(static_argnames=["block_sizes"])
def mha(q, k, v, block_sizes=sizes[0]):
    return attention.mha(q, k, v, None, causal=True, block_sizes=block_sizes, interpret=True)

def reference(q, k, v):
    return attention.mha_reference(q, k, v, None, causal=True)

q, k, v = (normal(seed, 1, 32, 1, 16) for seed in range(3))
agree(mha(q, k, v), reference(q, k, v))
assert mha.lookup(q, k, v) == {"block_sizes": sizes[1]}
agree(jax.grad(lambda q: mha(q, k, v).sum())(q), jax.grad(lambda q: reference(q, k, v).sum())(q))

soft = quarantune.autotune({"num_warps": [1]}, **QUICK)(softmax.softmax)
x = normal(3, 4, 32)
agree(soft(x, interpret=True), jax.nn.softmax(x))

x, w, b = normal(4, 2, 4, 32), normal(5, 32), normal(6, 32)
for norm in (rms_norm.rms_norm, layer_norm.layer_norm):
    @jax.jit(static_argnames=["num_warps"])
    def bare(x, w, b, num_warps=4):
        return norm(x, w, b, num_warps, interpret=True)

    tuned = quarantune.autotune({"num_warps": [1]}, name=norm.__name__, **QUICK)(bare)
    agree(tuned(x, w, b), norm(x, w, b, interpret=True))

q, kv = normal(7, 1, 16, 32), normal(8, 1, 64, 1, 32)
gqa = quarantune.autotune([{"block_k": 16, "k_splits": 2}], **QUICK)(
    decode_attention.gqa
)
agree(gqa(q, kv, kv, interpret=True), decode_attention.gqa_reference(q, kv, kv))

q, pages, table = normal(9, 1, 8, 32), normal(10, 1, 4, 16, 32), jnp.arange(4, dtype=jnp.int32)[None]
paged = quarantune.autotune([{"k_splits": 1, "pages_per_compute_block": 2}], **QUICK)(
    paged_attention.paged_attention
)
kv = pages[0].reshape(1, 64, 1, 32)
lengths = jnp.array([64], jnp.int32)
got = paged(q, pages, pages, table, lengths, interpret=True)
agree(got, paged_attention.paged_attention_reference(q, kv, kv, lengths))
""",
    )


def test_the_config_objects_of_jaxs_hopper_kernels_can_be_listed(
    tmp_path: Path, run: Callable[[Path, str], None]
) -> None:
    pytest.importorskip("absl")  # these modules of JAX import it
    run(
        tmp_path,
        """
from jax.experimental.pallas.ops.gpu import attention_mgpu, hopper_matmul_mgpu

M, N = hopper_matmul_mgpu.MatmulDimension
matmul_configs = [
    hopper_matmul_mgpu.TuningConfig(tile_m=64, tile_n=64, tile_k=64, max_concurrent_steps=2, grid_minor_dim=minor)
    for minor in (M, N)
]
attention_configs = [
    attention_mgpu.TuningConfig(block_q=64, block_kv=size, max_concurrent_steps=2) for size in (64, 128)
]

@jax.jit(static_argnames=["config", "other"])
def kernel(a, config, other):
    assert isinstance(config, hopper_matmul_mgpu.TuningConfig)
    if config.grid_minor_dim is not M or other.block_kv != 128:
        raise ArithmeticError("not these")
    return a * 2

space = {"config": matmul_configs, "other": attention_configs}
a = normal(0, 8)
result = quarantune.AutoTuner(kernel, space, name="kernel", **QUICK).run(a)
best = result.best_config
assert (best["config"].grid_minor_dim, best["other"]) == (M, attention_configs[1])
assert result.failures["error"] == 3
agree(result.fn(a), a * 2)
again = quarantune.AutoTuner(kernel, space, name="kernel", **QUICK).run(a)
assert again.from_cache
assert again.best_config == best
""",
    )


@pytest.mark.long
def test_jaxs_own_tpu_kernels_are_tuned_in_tpu_interpret_mode(tmp_path: Path, run: Callable[[Path, str], None]) -> None:
    run(
        tmp_path,
        """
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu import megablox
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

sizes = [
    splash.BlockSizes(block_q=128, block_kv=kv, block_kv_compute=compute)
    for kv, compute in ((128, 128), (256, 128))
]
mask = masks.MultiHeadMask([masks.CausalMask((256, 256))])

@quarantune.autotune({"block_sizes": sizes[1:]}, **QUICK)
@jax.jit(static_argnames=["block_sizes"])
def attend(q, k, v, block_sizes=sizes[0]):
    return splash.make_splash_mha(mask, block_sizes=block_sizes, head_shards=1, q_seq_shards=1)(q, k, v)

gmm = quarantune.autotune({"tiling": [(64, 128, 128)]}, **QUICK)(
    jax.jit(megablox.gmm, static_argnames=["tiling", "preferred_element_type"])
)

q, k, v = (normal(seed, 1, 256, 128) for seed in range(3))
lhs, rhs, groups = normal(3, 128, 128), normal(4, 2, 128, 128), jnp.array([64, 64], jnp.int32)
with pltpu.force_tpu_interpret_mode():
    attended, product = attend(q, k, v), gmm(lhs, rhs, groups)
logits = jnp.where(np.tril(np.ones((256, 256), bool)), q[0] @ k[0].T, -1e30)
agree(attended[0], jax.nn.softmax(logits) @ v[0])
agree(product, jnp.concatenate([lhs[:64] @ rhs[0], lhs[64:] @ rhs[1]]))
""",
    )


@pytest.mark.parametrize("run", [4], indirect=True)
def test_gspmd_and_shard_map_programs_call_tuned_kernels(tmp_path: Path, run: Callable[[Path, str], None]) -> None:
    run(
        tmp_path,
        """
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))

@quarantune.autotune({"chunk": [2]}, **QUICK)
@jax.jit(static_argnames=["chunk"])
def doubled(a, chunk=1):
    only(chunk, 2)
    return a * 2

@quarantune.autotune({"chunk": [2]}, **QUICK)
@jax.jit(static_argnames=["chunk"])
def summed(a, chunk=1):
    return jax.lax.psum(a * chunk, "x")

a = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P("x")))
agree(doubled(a), np.full((8, 4), 2.0))
assert doubled.lookup(a) == {"chunk": 2}
agree(jax.jit(lambda a: doubled(a).sum(0))(a), np.full(4, 16.0))
sharded = {"in_specs": P("x"), "out_specs": P("x")}
mapped = jax.shard_map(lambda a: doubled(a).sum(keepdims=True), mesh=mesh, **sharded)
agree(jax.jit(mapped)(a), np.full((4, 1), 16.0))
with jax.set_mesh(mesh):
    agree(jax.jit(jax.shard_map(lambda a: doubled(a) * 2, **sharded))(a), np.full((8, 4), 4.0))
collective = jax.shard_map(summed, mesh=mesh, in_specs=P("x"), out_specs=P())
agree(jax.jit(collective)(a), np.full((2, 4), 8.0))
""",
    )


def test_a_kernel_defined_anew_in_a_notebooks_cell_is_tuned_anew() -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    cell = """
@quarantune.autotune({{"n": [{best}]}}, **QUICK)
@jax.jit(static_argnames=["n"])
def kernel(x, n=1):
    only(n, {best})
    return x * n

print(kernel(jnp.ones(3))[0], kernel.lookup(jnp.ones(3)))
"""
    sources = [START, cell.format(best=2), cell.format(best=3), cell.format(best=2)]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    nbclient.NotebookClient(notebook, timeout=280, kernel_name="python3").execute()
    printed = [[output["text"] for output in cell.outputs] for cell in notebook.cells]
    assert printed == [[], ["2.0 {'n': 2}\n"], ["3.0 {'n': 3}\n"], ["2.0 {'n': 2}\n"]]
