"""With a real GPU, workers compile without it, and kernels that go wrong on it are contained."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import threading
from pathlib import Path

import misdeeds
import pytest
from helpers import ROOT

import quarantune
from quarantune import Outcome, Route
from quarantune.devices import targets
from quarantune.host.process import SANDBOX_MARK
from quarantune.measure import device_clock
from quarantune.sandbox import template
from quarantune.sweep import routes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]

jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")
pl = pytest.importorskip("jax.experimental.pallas")
plt = pytest.importorskip("jax.experimental.pallas.triton")


@pytest.fixture(scope="module")
def held():
    """Makes this process hold the GPU with JAX's default preallocation, as a training job does."""
    value = jnp.arange(1 << 20, dtype=jnp.float32)
    return jax.block_until_ready(value)


def still_computes(held) -> bool:
    return float(jnp.sum(held[:1000] * 2)) == 999000.0


def call(kernel, x, *, out=None, grid=()):
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype) if out is None else out,
        grid=grid,
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
    )(x)


def note_devices(directory: str) -> None:
    """Notes, inside a compile worker, the device files that it has open and the platform that it sees."""
    names = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    held = [name for name in names if name.startswith("/dev/nvidia")]
    Path(directory, str(os.getpid())).write_text(f"{jax.default_backend()} {held}")


def double_kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2


@quarantune.autotune({"block": [64, 128, 256]}, rep=5)
@functools.partial(jax.jit, static_argnames=["block", "directory"])
def doubled(x, directory: str, block: int = 64):
    note_devices(directory)
    spec = pl.BlockSpec((block,), lambda i: (i,))
    return pl.pallas_call(
        double_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // block,),
        in_specs=[spec],
        out_specs=spec,
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
    )(x)


def test_kernels_compile_in_workers_that_never_open_the_gpu(held, tmp_path):
    x, notes_in = held[:4096], tmp_path / "notes"
    notes_in.mkdir()
    result = doubled.tune(x, str(notes_in))
    assert {trial.outcome for trial in result.trials} <= {Outcome.OK, Outcome.SLOW}, result.table()
    assert {trial.route for trial in result.trials} == {Route.APART}
    (notes_in / str(os.getpid())).unlink(missing_ok=True)  # this process compares programs of the defaults
    notes = [file.read_text() for file in notes_in.iterdir()]
    assert notes == ["gpu []"] * 3
    assert (doubled(x, str(notes_in)) == 2 * x).all()


def test_a_sweep_leaves_its_gpu_for_compile_checks_elsewhere(held, tmp_path, cache_dir):
    x, notes_in = held[:4096], tmp_path / "notes"
    notes_in.mkdir()
    kind = jax.devices()[0].device_kind
    doubled.tune(x, str(notes_in))
    (file,) = (cache_dir / "targets").iterdir()
    left = targets.of_text(file.read_text())
    assert (left.device_kind, left.num_cores) == (kind, jax.devices()[0].core_count)
    assert left.origin == f"read from {kind} by JAX {jax.__version__}"
    assert targets.find(kind).config_text == left.config_text
    struct = jax.ShapeDtypeStruct(x.shape, x.dtype)
    report = quarantune.compile_check(doubled, {"block": [64, 96]}, struct, str(notes_in), target=kind)
    assert [trial.outcome for trial in report.trials] == [Outcome.OK, Outcome.ERROR], report.table()
    here = next(target for target in quarantune.targets() if target.is_here and target.platform == "cuda")
    assert here.device_kind == kind
    assert quarantune.compile_check(doubled, {"block": [64]}, struct, str(notes_in), target=here).ok


@pytest.mark.parametrize("is_committed", [False, True])
def test_the_first_call_after_a_sweep_compiles_nothing_here(held, is_committed, tmp_path):
    heard = []

    def listen(event, **_):
        if event.startswith("/jax/compilation_cache/cache_"):
            heard.append(event.rpartition("/")[2])

    x, notes_in = held[:4096], tmp_path / "notes"
    x = jax.device_put(x, jax.devices()[0]) if is_committed else x
    notes_in.mkdir()
    tuned = quarantune.autotune({"block": [64, 128]}, rep=5)(doubled.__wrapped__)
    jax.monitoring.register_event_listener(listen)
    try:
        result = tuned.tune(x, str(notes_in))
        assert {trial.route for trial in result.trials} == {Route.APART}
        output = tuned(x, str(notes_in))
        assert heard == ["cache_hits"]
    finally:
        jax.monitoring.unregister_event_listener(listen)
    assert (output == 2 * x).all()


def bad_kernel(x_ref, o_ref, *, mode: str):
    if mode == "spin":
        # Each turn stores and loads, because the compiler may remove a loop without effect.
        def body(last):
            o_ref[...] = x_ref[...] * 0 + last
            return jnp.max(o_ref[...])

        o_ref[...] = x_ref[...] + jax.lax.while_loop(lambda last: last < 1e30, body, x_ref[1])
    elif mode == "wild":
        far = (x_ref[1] * 0 + 1e9).astype(jnp.int32)
        pl.store(o_ref, (pl.ds(far, 128),), x_ref[pl.ds(0, 128)]) if hasattr(pl, "store") else plt.store(
            o_ref.at[pl.ds(far, 128)], x_ref[pl.ds(0, 128)]
        )
    else:
        o_ref[...] = x_ref[...] * 2


@quarantune.autotune({"mode": ["good", "spin", "wild", "good again"]}, rep=5, timeout=5, compile_timeout=60)
@functools.partial(jax.jit, static_argnames=["mode"])
def risky(x, mode: str = "good"):
    return call(functools.partial(bad_kernel, mode=mode.split()[0]), x)


def test_kernels_that_spin_or_scribble_are_contained(held):
    result = risky.tune(held[:1024])
    outcomes = {trial.config["mode"]: trial for trial in result.trials}
    table = result.table(width=160)
    assert outcomes["good"].outcome is Outcome.OK, table
    assert outcomes["good again"].outcome is Outcome.OK, table
    assert outcomes["spin"].outcome is Outcome.TIMEOUT, table
    assert outcomes["wild"].outcome in (Outcome.ERROR, Outcome.CRASHED), table
    assert still_computes(held)


# XLA's allocator tries again for ten seconds before it gives up.
@quarantune.autotune({"mode": ["good", "greedy", "good again"]}, rep=5, timeout=40)
@functools.partial(jax.jit, static_argnames=["mode"])
def hungry(x, mode: str = "good"):
    if mode == "greedy":
        # A loop's carry must exist as a whole: 256 GB.
        big = jnp.broadcast_to(x[:1], (1 << 36,))
        return x + jax.lax.fori_loop(0, 3, lambda i, carried: carried * 1.5 + i, big)[: x.shape[0]]
    return call(functools.partial(bad_kernel, mode="good"), x)


def test_a_program_larger_than_gpu_memory_is_contained(held):
    result = hungry.tune(held[:1024])
    table = result.table(width=160)
    assert [trial.outcome.value for trial in result.trials] == ["ok", "device_oom", "ok"], table
    assert still_computes(held)


@quarantune.autotune({"chunks": [1, 2, 4]}, rep=5)
@functools.partial(jax.jit, static_argnames=["chunks"])
def plain_dot(a, b, chunks: int = 1):
    return jnp.concatenate([part @ b for part in jnp.split(a, chunks)])


def test_programs_whose_dots_xla_tunes_are_compiled_on_the_gpu(held):
    a = jnp.ones((512, 512), jnp.bfloat16)
    result = plain_dot.tune(a, a)
    assert {trial.route for trial in result.trials} == {Route.HANDED_OVER}, result.table()
    assert {trial.outcome for trial in result.trials} <= {Outcome.OK, Outcome.SLOW}, result.table()


def left_by_xla() -> list[str]:
    """Returns, in a worker, the files of XLA's findings for workers of the same process."""
    return [str(file) for file in Path("/dev/shm").glob(f"quarantune-{os.environ.get(SANDBOX_MARK)}/**/*.pb")]


@functools.partial(jax.jit, static_argnames=["notes_in", "last", "chunk"])
def layers(x, up, down, notes_in: str, last: str = "sin", chunk: int = 8):
    Path(notes_in, f"{os.getpid()}-{chunk}").write_text("\n".join(left_by_xla()))
    for _ in range(2):
        x = jnp.tanh(jnp.tanh(x @ up) @ down)
    return jax.lax.map(getattr(jnp, last), x.reshape(-1, chunk, x.shape[1])).reshape(x.shape)


def test_xla_reuses_the_gemm_choices_of_earlier_configs(held, tmp_path, monkeypatch):
    monkeypatch.setenv("QUARANTUNE_NUM_WORKERS", "1")
    notes_in, notes_of_cosines = tmp_path / "notes", tmp_path / "cosines"
    template.close_shared()  # other tests may have left files of XLA
    x, up, down = (jnp.ones(shape, jnp.bfloat16) for shape in [(512, 328), (328, 136), (136, 328)])
    tuned = quarantune.autotune({"chunk": [8, 16, 32, 64]}, rep=5)(layers)
    heard = []

    def listen(event, **_):
        heard.append(event.rpartition("/")[2])

    for notes, last, knowing in ((notes_in, "sin", 3), (notes_of_cosines, "cos", 4)):
        notes.mkdir()
        result = tuned.tune(x, up, down, str(notes), last)
        assert {trial.route for trial in result.trials} == {Route.HANDED_OVER}, result.table()
        assert {trial.outcome for trial in result.trials} <= {Outcome.OK, Outcome.SLOW}, result.table()
        knew = [note.read_text().split() for note in notes.iterdir() if not note.name.startswith(f"{os.getpid()}-")]
        assert sum(map(bool, knew)) == knowing
    assert all(Path(name).exists() for names in knew for name in names)
    template.close_shared()
    assert not any(Path(name).exists() for names in knew for name in names)
    jax.monitoring.register_event_listener(listen)
    try:
        tuned(x, up, down, str(notes_of_cosines), "cos")
        assert [event for event in heard if event.startswith("cache_")] == ["cache_hits"]
    finally:
        jax.monitoring.unregister_event_listener(listen)


def test_a_jit_whose_kernels_are_tuned_compiles_like_any_other(held):
    whole = quarantune.contextual_autotune(jax.jit(lambda x: jnp.tanh(plain_dot(x, x))))
    result = whole.tune(jnp.ones((512, 512), jnp.bfloat16))
    assert {trial.route for trial in result.trials} == {Route.HANDED_OVER}, result.table()
    assert {trial.outcome for trial in result.trials} <= {Outcome.OK, Outcome.SLOW}, result.table()


@functools.partial(jax.jit, static_argnames=["rows"])
def sorted_rows(x, rows: int = 1):
    return jnp.sort(jnp.sort(x.reshape(rows, -1), axis=-1).reshape(-1))


def test_a_sort_takes_as_long_in_a_sweep_as_in_a_call(held):
    result = quarantune.autotune({"rows": [1, 2]}, rep=5)(sorted_rows).tune(held)
    flush = device_clock.Flush(jax.jit(lambda: jnp.zeros(64 << 20, jnp.int32)).lower().compile())
    for trial in result.trials:
        compiled = sorted_rows.lower(held, **trial.config).compile()
        own = device_clock.device_clock(lambda compiled=compiled: compiled(held), flush).take(5)
        assert trial.time_ms < 1.5 * min(sample.whole for sample in own), result.table()


@functools.partial(jax.jit, static_argnames=["implementation", "scale"])
def attention(q, implementation: str = "xla", scale: int = 1):
    return jax.nn.dot_product_attention(q * scale, q, q, implementation=implementation)


@pytest.mark.parametrize(
    "options",
    [
        {"configs": {"implementation": ["xla", "cudnn"]}},
        {"configs": {"scale": [1, 2], "implementation": ["cudnn"]}, "ref_fn": None},
    ],
    ids=["one of two", "all"],
)
def test_cudnn_calls_are_compiled_on_the_gpu(held, options):
    q = held[: 2 * 256 * 4 * 64].reshape(2, 256, 4, 64).astype(jnp.bfloat16) / 2**20
    result = quarantune.autotune(**options, rep=5)(attention).tune(q)
    assert {trial.outcome for trial in result.trials} <= {Outcome.OK, Outcome.SLOW}, result.table()
    assert {trial.route for trial in result.trials} == {Route.HANDED_OVER}


BAD = {"segfault": "crashed", "hold the gil": "timeout", "allocate": "oom", "scribble": "crashed", "raise": "error"}


@quarantune.autotune(
    {"chunks": [1, 2, 4, 8], "mode": ["good", *BAD, "also good"]}, compile_timeout=15, memory_limit="8GB", rep=5
)
@functools.partial(jax.jit, static_argnames=["chunks", "mode"])
def hostile_dot(a, b, chunks: int = 1, mode: str = "good"):
    if chunks == 4 and mode in BAD:
        acts = {"segfault": misdeeds.segfault, "hold the gil": misdeeds.hang_holding_the_gil, "raise": misdeeds.fail}
        acts |= {"allocate": lambda: misbehave("30 GB"), "scribble": misdeeds.scribble}
        acts[mode]()
    product = jnp.concatenate([part @ b for part in jnp.split(a, chunks)])
    return product + len(mode) - len(mode)


def test_bad_configs_that_compile_on_the_gpu_harm_no_other(held):
    a = jnp.ones((512, 512), jnp.bfloat16)
    result = hostile_dot.tune(a, a)
    for trial in result.trials:
        bad = BAD.get(trial.config["mode"]) if trial.config["chunks"] == 4 else None
        assert trial.outcome.value in ([bad] if bad else ["ok", "slow"]), result.table(width=160)
    assert Route.HANDED_OVER in {trial.route for trial in result.trials}
    assert still_computes(held)


@quarantune.autotune({"chunks": [1, 2, 4]}, rep=5)
@functools.partial(jax.jit, static_argnames=["chunks"])
def dot_with_a_callback(a, b, chunks: int = 1):
    product = jnp.concatenate([part @ b for part in jnp.split(a, chunks)])
    return jax.pure_callback(lambda x: x, product, product)


def test_unserialisable_programs_run_where_they_compile(held):
    a = jnp.ones((512, 512), jnp.float32)
    result = dot_with_a_callback.tune(a, a)
    assert {trial.route for trial in result.trials} == {Route.TOGETHER}, result.table()
    assert {trial.outcome for trial in result.trials} <= {Outcome.OK, Outcome.SLOW}, result.table()


MODULE = """
import functools, jax, jax.numpy as jnp

{at_import}

@functools.partial(jax.jit, static_argnames=["times"])
def shifted(x, times=1):
    assert ON_GPU
    return (x + TABLE) * 2 ** times / 2 ** times
"""


@pytest.mark.parametrize(
    ("at_import", "route"),
    [
        ("TABLE, ON_GPU = jnp.arange(1024.0), jax.default_backend() == 'gpu'", Route.APART),
        ("TABLE, ON_GPU = jax.device_put(jnp.arange(1024.0), jax.devices()[0]), True", Route.HANDED_OVER),
    ],
)
def test_modules_that_make_arrays_on_import_are_compiled(held, at_import, route, tmp_path, monkeypatch):
    name = f"module_for_{route}"
    (tmp_path / f"{name}.py").write_text(MODULE.format(at_import=at_import))
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(name)
    result = quarantune.AutoTuner(module.shifted, {"times": [1, 2, 3]}, name=name, rep=5).run(held[:1024])
    assert {trial.route for trial in result.trials} == {route}, result.table()
    assert {trial.outcome for trial in result.trials} <= {Outcome.OK, Outcome.SLOW}, result.table()
    assert float(result.fn(held[:1024])[7]) == 14.0


@quarantune.autotune({"mode": ["good", "raise", "raise too", "other", "other too", "memory", "memory too"]}, rep=5)
@functools.partial(jax.jit, static_argnames=["mode"])
def raising(x, mode: str = "good"):
    gpu = jax.devices()[0]
    assert gpu.platform == "gpu"
    if mode.startswith("raise"):
        raise ValueError("not this one")
    if mode.startswith("other"):
        raise ValueError("nor this one")
    if mode.startswith("memory"):
        assert gpu.memory_stats()["bytes_limit"] > 1 << 30  # only the GPU itself knows it
    return call(functools.partial(bad_kernel, mode="good"), x)


def test_an_error_without_the_gpu_is_confirmed_on_it_once(held):
    result = raising.tune(held[:1024])
    table = result.table(width=160)
    outcomes = [trial.outcome for trial in result.trials]
    assert outcomes[1:5] == [Outcome.ERROR] * 4, table
    # A kernel of a microsecond may look slower than its equal.
    assert {outcomes[0], *outcomes[5:]} <= {Outcome.OK, Outcome.SLOW}, table
    is_apart = [trial.route is Route.APART for trial in result.trials]
    assert [sorted(is_apart[i : i + 2]) for i in (1, 3)] == [[False, True]] * 2, table
    assert is_apart[5:] == [False] * 2, table


@quarantune.autotune({"part": [1, 2]}, rep=5)
@functools.partial(jax.jit, static_argnames=["part"])
def partly_doubled(x, part: int = 1):
    """Writes its output, or only the first part."""
    spec = pl.BlockSpec((256,), lambda i: (i,))
    return pl.pallas_call(
        double_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // 256 // part,),
        in_specs=[spec],
        out_specs=spec,
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
    )(x)


def test_right_values_in_freed_memory_are_not_an_output(held):
    result = partly_doubled.tune(held[:65536])
    assert [trial.outcome for trial in result.trials] == [Outcome.OK, Outcome.WRONG], result.table()


def test_work_while_the_clock_starts_does_not_change_times(held):
    """A worker's threads compile and move inputs while its profiler attaches."""
    steps = [jax.jit(lambda x: jnp.sort(x)).lower(held).compile() for _ in range(3)]

    def of_several_kernels():
        return [step(held) for step in steps]

    def sample_ms(flush):
        return min(sample.whole for sample in device_clock.device_clock(of_several_kernels, flush).take(5))

    zeros = jax.jit(lambda: jnp.zeros(1 << 20)).lower().compile()
    quiet_ms = sample_ms(device_clock.Flush(zeros))
    for _ in range(5):
        is_over = threading.Event()

        def work(is_over=is_over):
            while not is_over.is_set():
                jax.block_until_ready(of_several_kernels())

        thread = threading.Thread(target=work)
        thread.start()
        flush = device_clock.Flush(zeros)
        is_over.set()
        thread.join()
        assert sample_ms(flush) > 0.9 * quiet_ms


def test_every_gpu_of_one_kind_takes_its_share(held, tmp_path):
    if len(jax.devices()) < 2:
        pytest.skip("one GPU")
    result = spread.tune(held[:4096])
    assert {trial.device for trial in result.trials} == {f"cuda:{i}" for i in range(len(jax.devices()))}


@quarantune.autotune({"block": [32, 64, 128, 256], "warps": [1, 2, 4, 8]}, rep=20)
@functools.partial(jax.jit, static_argnames=["block", "warps"])
def spread(x, block: int = 64, warps: int = 4):
    spec = pl.BlockSpec((block,), lambda i: (i,))
    return pl.pallas_call(
        double_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // block,),
        in_specs=[spec],
        out_specs=spec,
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=1),
    )(x)


@functools.partial(jax.jit, static_argnames=["chunks"])
def centred(x, chunks: int = 1):
    """Subtracts each column's mean, which needs all devices of x."""
    return jnp.concatenate([part - part.mean(axis=0) for part in jnp.split(x, chunks, axis=1)], axis=1)


def test_arguments_on_two_gpus_are_tuned_on_two():
    gpus = jax.devices()
    if len(gpus) < 2:
        pytest.skip("one GPU")
    x = jnp.sin(jnp.arange(4096.0 * 64)).reshape(4096, 64)
    mesh = jax.sharding.Mesh(gpus[:2], ("rows",))
    laid_out = jax.device_put(x, jax.NamedSharding(mesh, jax.P("rows")))

    def on_two(output, expected, x):
        return len(x.sharding.device_set) == len(output.sharding.device_set) == jax.device_count() == 2

    configs = {"chunks": [1, 2, 4]}
    tuned = quarantune.autotune(configs, devices_per_trial=2, ref_fn=centred, check_fn=on_two, rep=5)(centred)
    result = tuned.tune(laid_out)
    assert {trial.outcome for trial in result.trials} <= {Outcome.OK, Outcome.SLOW}, result.table()
    assert {trial.route for trial in result.trials} == {Route.TOGETHER}
    pairs = {f"cuda:{i},{i + 1}" for i in range(0, len(gpus) - 1, 2)}
    assert {trial.device for trial in result.trials} <= pairs
    difference = jnp.abs(jax.device_put(tuned(laid_out), gpus[0]) - centred(x)).max()
    assert difference < 1e-5

    with pytest.raises(ValueError, match="set devices_per_trial=2"):
        quarantune.autotune(configs)(centred).tune(laid_out)
    with pytest.raises(ValueError, match="devices_per_trial=1000 needs 1000 devices"):
        quarantune.autotune(configs, devices_per_trial=1000)(centred).tune(x)


def misbehave(mode: str) -> None:
    if mode == "30 GB":
        held_bytes = [b"\xff" * (1 << 30) for _ in range(30)]
        raise AssertionError(f"nobody stopped it at {len(held_bytes)} GiB")
    acts = {"segfault": misdeeds.segfault, "endless": misdeeds.hang, "exit": misdeeds.exit_with_0}
    acts.get(mode, lambda: None)()


@quarantune.autotune(
    {"mode": ["good", "segfault", "endless", "30 GB", "exit", "wrong", "long"], "block": [64]},
    compile_timeout=10,
    memory_limit="8GB",
    rep=5,
)
@functools.partial(jax.jit, static_argnames=["mode", "block"])
def hostile(x, mode: str = "good", block: int = 64):
    misbehave(mode)

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * (3 if mode == "wrong" else 2)

    spec = pl.BlockSpec((block,), lambda i: (i,))
    y = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // block,),
        in_specs=[spec],
        out_specs=spec,
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
    )(x)
    return jax.lax.fori_loop(0, 50, lambda _, y: jnp.sin(y) * 0 + y, y) if mode == "long" else y


def test_workers_only_compile_if_this_process_measures(held, tmp_path):
    x, results = held[: 1 << 16], {}
    for isolation in ("process", "compile"):
        # Caches are separate, because a config that failed to compile is not compiled again.
        with quarantune.settings(isolation=isolation, cache_dir=tmp_path / isolation):
            results[isolation] = hostile.tune(x)
    for result in results.values():
        outcomes = ["ok" if trial.outcome is Outcome.SLOW else trial.outcome for trial in result.trials]
        assert outcomes == ["ok", "crashed", "timeout", "oom", "crashed", "wrong", "ok"], result.table()
        assert result.best_config["mode"] == "good"
    here = results["compile"]
    routes = {trial.route for trial in here.trials if trial.time_ms is not None}
    assert routes == {Route.COMPILED_APART}, here.table()
    if jax.local_device_count() == 1:  # the GPU's clock would add up the times of several devices
        assert here.trials[0].clock == results["process"].trials[0].clock
    assert still_computes(held)


def test_a_program_that_xla_tunes_can_be_measured_here(held):
    with quarantune.settings(isolation="compile"):
        result = quarantune.autotune({"chunks": [1, 2]}, rep=5)(centred_product).tune(
            held[: 512 * 512].reshape(512, 512)
        )
    assert {trial.outcome for trial in result.trials} <= {Outcome.OK, Outcome.SLOW}, result.table()
    assert {trial.route for trial in result.trials} == {Route.COMPILED_APART}, result.table()
    assert still_computes(held)


@functools.partial(jax.jit, static_argnames=["chunks"])
def centred_product(x, chunks: int = 1):
    parts = jnp.split(x / jnp.max(x), chunks)
    return jnp.concatenate([part @ x for part in parts])


def product_in_turns(x, mode: str = "good", turns: int = 1):
    """Multiplies the rows of a matrix with it, part by part, or misbehaves."""
    if mode == "fail":
        raise ArithmeticError("this config is bad")
    if mode == "hang":
        x = jax.lax.while_loop(lambda y: y[0, 0] < jnp.inf, lambda y: y * 0.5, x)
    if mode == "starve":  # a loop's carry must exist as a whole: 256 GB
        big = jnp.broadcast_to(x[:1, :1], (1 << 18, 1 << 18))
        x = x + jax.lax.fori_loop(0, 3, lambda i, carried: carried * 1.5 + i, big)[:1, :1]
    if mode == "wrong":
        x = x * 2
    return jax.lax.map(lambda rows: rows @ x, x.reshape(turns, -1, x.shape[1])).reshape(x.shape)


@pytest.mark.timeout(400)
def test_configs_are_ranked_by_a_cheap_compile(held):
    good = [{"mode": "good", "turns": turns} for turns in (1, 2, 4, 64, 128, 256, 512)]
    bad = [{"mode": mode, "turns": 2} for mode in ("fail", "hang", "starve", "wrong")]
    jitted = jax.jit(product_in_turns, static_argnames=["mode", "turns"])
    with quarantune.settings(timeout=20):
        result = quarantune.autotune([*good, *bad], rep=5)(jitted).tune(held.reshape(1024, 1024))
    ranked, others = result.trials[: len(good)], result.trials[len(good) :]
    assert all(trial.cheap_ms is not None for trial in ranked), result.table()
    assert any(trial.is_ruled_out for trial in ranked), result.table()
    assert {trial.route for trial in ranked if trial.time_ms is not None} == {Route.HANDED_OVER}, result.table()
    assert result.best_config["mode"] == "good"
    assert [trial.outcome for trial in others] == ["error", "timeout", "device_oom", "wrong"], result.table()
    assert still_computes(held)


def tuned_matmul(configs=None, **options):
    kernels = pytest.importorskip("kernels", reason="needs examples/benchmarks")
    problem = kernels.PROBLEMS["gpu"]
    space = {"bm": [64, 128], "bn": [128, 256], "bk": [64], "warps": [8]}
    return quarantune.autotune(configs or space, rep=5, **options)(problem.kernel), problem.arguments(4096)


def test_sweeps_for_energy_choose_configs_that_take_as_much(held, monkeypatch):
    pytest.importorskip("pynvml")
    monkeypatch.syspath_prepend(ROOT / "examples" / "benchmarks")
    fn, args = tuned_matmul(objective="energy", name="for_energy")
    results = [fn.tune(*args) for _ in range(2)]
    for result in results:
        assert result.energy_mj is not None
        watts = [trial.watts for trial in result.trials if trial.watts is not None]
        assert len(watts) > 2, result.table()
        assert all(50 < each < 1000 for each in watts), result.table()
    first, second = (result.best_config for result in results)
    if first != second:
        matmul, _ = tuned_matmul(objective="energy", name="both_winners", configs=[first, second])
        energy_mj = [trial.energy_mj for trial in matmul.tune(*args).trials]
        assert max(energy_mj) <= 1.03 * min(energy_mj), (first, second, energy_mj)


def test_energy_without_its_package_names_the_extra(held, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples" / "benchmarks")
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "pynvml" else found(name, *more)
    )
    fn, args = tuned_matmul(objective="energy", name="without_package")
    with pytest.raises(ValueError, match=r"objective needs the energy of a call.*pip install 'quarantune\[energy\]'"):
        fn.tune(*args)


def test_one_process_times_the_finalists_by_the_gpu_s_own_clock(held, monkeypatch):
    counts = []
    repeated = routes.Routes._repeated

    def noting(*given):
        final = repeated(*given)
        counts.append(final.counts)
        return final

    monkeypatch.setattr(routes.Routes, "_repeated", noting)

    @quarantune.autotune({"n": [1, 40, 80]}, name="gpu_chain", ref_fn=None)
    @functools.partial(jax.jit, static_argnames=["n"])
    def chain(x, n=40):
        return jax.lax.fori_loop(0, n, lambda _, y: jnp.tanh(y), x)

    result = chain.tune(jnp.ones(1 << 20))
    assert result.best_config == {"n": 1}
    low, high = result.speedup_interval
    assert low < result.speedup < high
    if result.trials[0].clock == "device":
        assert [len(each) for each in counts] == [1]
        assert high / low < 1.2
    assert still_computes(held)


@pytest.mark.parametrize("isolation", ["process", "none"])
def test_bits_of_a_gpu_are_those_that_a_comparison_of_the_outputs_finds(held, isolation):
    def sums(x_ref, out_ref, *, step):
        total = jnp.zeros(out_ref.shape, jnp.float32)
        for start in range(0, x_ref.shape[0], step):
            total += x_ref[pl.ds(start, step), :].astype(jnp.float32).sum(0)
        out_ref[...] = total.astype(out_ref.dtype)

    @functools.partial(jax.jit, static_argnames=["step", "warps"])
    def kernel(x, step=64, warps=4):
        return pl.pallas_call(
            functools.partial(sums, step=step),
            out_shape=jax.ShapeDtypeStruct((64,), x.dtype),
            compiler_params=plt.CompilerParams(num_warps=warps, num_stages=1),
        )(x)

    x = jax.random.normal(jax.random.key(0), (256, 64), jnp.float32)
    space = {"step": [16, 32, 64, 128], "warps": [1, 4]}
    with quarantune.settings(isolation=isolation, always_tune=True):
        result = quarantune.AutoTuner(kernel, space, rep=3).run(x)
        exact = quarantune.AutoTuner(kernel, space, rep=3, numerics="bitwise").run(x)
    assert exact.from_cache is False
    wanted = jax.device_get(kernel(x)).view("uint32")
    for trial in result.trials:
        is_same = (jax.device_get(kernel(x, **trial.config)).view("uint32") == wanted).all()
        assert trial.bits == ("same" if is_same else "other"), trial.config
    assert {trial.config["step"] for trial in result.trials if trial.bits == "other"}, "the order of sums counts"
    for before, after in zip(result.trials, exact.trials, strict=True):
        assert (after.outcome is Outcome.WRONG) == (before.bits == "other"), after.config
