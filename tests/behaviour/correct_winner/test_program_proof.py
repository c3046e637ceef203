"""Workers trace the caller's program or the sweep ends, even if values are hidden from the function's code."""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import honest_tuning
import jax
import jax.numpy as jnp
import pytest
from helpers import SUPPORT, python

import quarantune
from quarantune.sweep import proof
from quarantune.transport.programs import ProgramLines

HIDDEN = """
# A library whose state only a call changes: no attribute of a module leads to it.
def _made():
    registry = {"scale": 1.0}

    class Scaler:
        def __call__(self, x):
            return x * registry["scale"]

    return (lambda scale: registry.update(scale=scale)), {"scale": Scaler().__call__}

enable, _table = _made()

def scaled(x):
    return _table["scale"](x)
"""
KERNELS = """
import functools
import jax, quarantune
import hidden

tuned = lambda fn: quarantune.autotune({"n": [1, 2]}, rep=1, warmup=0)(jax.jit(fn, static_argnames=["n"]))

@tuned
def kernel(x, n: int = 1):
    return hidden.scaled(x) * n / n

@tuned
def raises(x, n: int = 1):
    if hidden.scaled(1.0) == 1.0:
        raise RuntimeError("it is not enabled")
    return x * n / n

@tuned
def other(x, n: int = 1):
    return x * n / n
"""
TRY = """
import concurrent.futures, os, re
import numpy as np, psutil, quarantune
import hidden, kernels
X = np.arange(8, dtype=np.float32)
hidden.enable(3.0)
with quarantune.settings(**options):
    for kernel, told in ((kernels.kernel, SCALED), (kernels.raises, "only workers raise RuntimeError: it is not")):
        try:
            kernel(X)
        except RuntimeError as error:
            text = "".join([str(error), *getattr(error, "__notes__", [])])
            assert told in text and "pass it to the function as an argument" in text, text
        else:
            raise AssertionError("another program was tuned")
        assert kernel.lookup(X) is None
    left = [name for _, _, names in os.walk(os.environ["QUARANTUNE_CACHE_DIR"]) for name in names]
    assert all(name.endswith((".lock", ".keys", ".sweep")) for name in left), left
    kernels.other(X)
    assert kernels.other.lookup(X) is not None
from aftermath import eventually, left_of
assert eventually(lambda: len(left_of(psutil.Process())) == 1), "the template alone is left"
"""
SCALED = """
SCALED = (
    "there is 'mul float32[8] 3 -> float32[8]' only in this process and 'mul float32[8] 1 -> float32[8]' only in a "
    f"worker, made by {os.path.abspath('site-packages/hidden.py')}:8 in _made.<locals>.Scaler.__call__, which uses "
    "registry"
)
"""


def write(directory: Path, **modules: str) -> None:
    """Writes modules, and a library that looks installed."""
    library = directory / "site-packages"
    library.mkdir(exist_ok=True)
    (library / "hidden.py").write_text(HIDDEN)
    for name, text in modules.items():
        (directory / f"{name}.py").write_text(textwrap.dedent(text))


def run(directory: Path, program: str) -> str:
    """Runs a program of a directory in a new process, and returns its output."""
    (directory / "program.py").write_text(program)
    path = [directory, directory / "site-packages", SUPPORT]
    return python("program.py", cwd=directory, path=path, QUARANTUNE_CACHE_DIR=str(directory / "cache"))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param("{}", marks=pytest.mark.slow),
        pytest.param("{'isolation': 'compile'}", marks=[pytest.mark.slow, pytest.mark.long]),
        pytest.param("{'start_method': 'spawn'}", marks=[pytest.mark.slow, pytest.mark.long]),
    ],
)
def test_a_hidden_value_that_workers_lack_ends_the_sweep(tmp_path: Path, options: str) -> None:
    write(tmp_path, kernels=KERNELS)
    run(tmp_path, f"import os\n{SCALED}\noptions = {options}\n{TRY}")
    # A value set on import is set in workers. The failure is not remembered.
    write(tmp_path, kernels=KERNELS.replace("import hidden", "import hidden\nhidden.enable(3.0)"))
    again = (
        "import numpy, kernels\nfor kernel in (kernels.kernel, kernels.raises):\n    {}\n    print(kernel.lookup(X))"
    )
    told = run(tmp_path, again.replace("{}", "X = numpy.arange(8, dtype=numpy.float32); kernel(X)"))
    assert told.count("'n'") == 2, told


@pytest.mark.long
@pytest.mark.slow
def test_a_hidden_value_that_engine_machines_lack_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, kernels=KERNELS.replace("def raises", "def unused"))
    tried = TRY.replace(', (kernels.raises, "only workers raise RuntimeError: it is not")', ",")
    run(tmp_path, f"import os, concurrent.futures\n{SCALED}\nwith concurrent.futures.ThreadPoolExecutor(1) as pool:\n"
        f"    options = {{'executor': pool}}\n{textwrap.indent(tried, '    ')}")  # fmt: skip


@pytest.mark.slow
@pytest.mark.clients
@pytest.mark.parametrize(
    "module", ["honest_programs", "honest_arrays", pytest.param("honest_modules", marks=pytest.mark.long)]
)
def test_honest_programs_are_tuned(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    importlib.import_module(module)

    found: list[Any] = []
    differ = proof._difference
    monkeypatch.setattr(proof, "_difference", lambda *given: found.append(differ(*given)) or found[-1])
    failed = {}
    for name, (kernel, arguments) in honest_tuning.CASES[module].items():
        found.clear()
        try:
            kernel(*arguments)
            assert found[0] == "", "the sweep compared no programs"
        except Exception as error:
            failed[name] = error
    assert not failed


def test_inside_a_trace_programs_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    differ = proof._difference
    monkeypatch.setattr(proof, "_difference", lambda *given: found.append(differ(*given)) or found[-1])

    @quarantune.autotune({"n": [1, 2]}, rep=1, warmup=0)
    @jax.jit(static_argnames=["n"])
    def traced(x: jax.Array, n: int = 1) -> jax.Array:
        return jax.nn.softmax(x) * n / n

    jax.jit(jax.vmap(jax.grad(lambda x: traced(x).sum())))(jnp.ones((3, 4)))
    assert found == [""]


def test_programs_agree_although_jit_is_disabled_here() -> None:
    @quarantune.autotune({"n": [1, 2]}, rep=1, warmup=0, time_grad=True)
    @jax.jit(static_argnames=["n"])
    def calling(x: jax.Array, n: int = 1) -> jax.Array:
        return jax.jit(jnp.sin)(x) * n / n

    with jax.disable_jit():
        assert calling.tune(jnp.ones(4)).best_config["n"] in (1, 2)


def test_this_process_traces_only_defaults_and_winner() -> None:
    traced = []

    @quarantune.autotune({"n": [4, 1, 2, 3]}, rep=1, warmup=0)
    @jax.jit(static_argnames=["n"])
    def noting(x: jax.Array, n: int = 2) -> jax.Array:
        traced.append(n)
        return x * n / n

    winner = noting.tune(jnp.ones(4)).best_config["n"]
    assert set(traced) == {2, winner}


def _lines(fn: Callable[..., Any], *args: Any) -> ProgramLines:
    return ProgramLines(jax.jit(fn).trace(*args).jaxpr)


X = jax.ShapeDtypeStruct((4,), jnp.float32)


def test_the_lines_of_a_program_show_what_differs_and_where() -> None:
    one, other = (_lines(lambda x, k=k: jax.lax.scan(lambda c, a: (c * k, a), x, x)[0], X) for k in (2.0, 3.0))
    (here,), (there,) = one.counts - other.counts, other.counts - one.counts
    assert (here, there) == ("mul float32[4] 2 -> float32[4]", "mul float32[4] 3 -> float32[4]")
    assert f"{__file__}:" in one.place(here)
    assert one.place(here).endswith(".<lambda>, which uses k")
    assert one.place(there) == ""


def test_program_lines_omit_what_may_differ_by_process() -> None:
    def program(order: str, seed: int) -> ProgramLines:
        def named(x: jax.Array) -> jax.Array:
            for name in order:
                x = x * ord(name)
            return x + jnp.float32(seed) + jax.jit(lambda y: y)(x)

        named.__name__ = f"named_{seed}"
        return _lines(jax.jit(named), X)

    assert program("abc", 1 << 21).counts == program("cba", 1 << 21).counts
    keys = [
        _lines(lambda x, seed=seed: jax.random.normal(jax.random.key(seed), x.shape), X) for seed in (1 << 21, 1 << 22)
    ]
    assert keys[0].counts == keys[1].counts


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jax.grad(lambda y: jnp.fmax(y, 2.0).sum())(x),
        lambda x: jax.grad(lambda y: (y + jnp.ones((3, 4))).sum())(x),
        lambda x: jnp.searchsorted(jnp.arange(8.0), x),
        lambda x: jax.nn.softplus(jnp.nan_to_num(x)),
        lambda x: jax.scipy.special.logsumexp(x, b=x),
    ],
)
def test_program_lines_are_equal_for_a_described_device(fn: Callable[..., Any]) -> None:
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
    mesh = jax.sharding.AbstractMesh((1,), ("d",), abstract_device=device)
    here = _lines(lambda x: fn(x), X)
    with jax.sharding.use_abstract_mesh(mesh):
        assert _lines(lambda x: fn(x), X).counts == here.counts


def test_prints_return_though_another_thread_redirects_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before, elsewhere = sys.stdout, contextlib.redirect_stdout(io.StringIO())
    with proof.unheard():
        print("unheard")
        elsewhere.__enter__()
    elsewhere.__exit__(None, None, None)
    try:
        print("heard")
    finally:
        sys.stdout = before
    assert capsys.readouterr().out == "heard\n"
