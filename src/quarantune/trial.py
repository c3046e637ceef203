"""The worker's side of one config: load and compile, then load, check and measure. Knows nothing of the scheduler."""

from __future__ import annotations

import contextlib
import functools
import glob
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.experimental import serialize_executable, topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding

from quarantune import _jax_internals, inputs, measure, payload
from quarantune.outcomes import Config, Outcome, freeze
from quarantune.sandbox import spool

_MEASURE_SEED = 0


class NeedsDeviceError(RuntimeError):
    """The program cannot be compiled well, or at all, without its device: compile it there."""


class Bench:
    """One worker's bench: the call, its arguments, and the config that lies on it."""

    def __init__(self, call: object, *, arrays_fd: int, options: dict[str, Any]) -> None:
        """Sets up the bench.

        Args:
            call: the loaded payload, a `payload.Call`.
            arrays_fd: the file that holds the concrete arrays' bytes; -1 for none.
            options: `platform`, `warmup` and `rep`.
        """
        assert isinstance(call, payload.Call)
        self._call = call
        self._jitted: Any = call.fn
        self._arrays_fd = arrays_fd
        self._options = options
        self._config: Config = {}
        self._compiled: Callable[..., Any] | None = None
        self._arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._jit: _jax_internals.JitOptions | None = None
        self._donates = True  # a plain callable may write into its arguments
        if _jax_internals.is_jitted(call.fn):
            self._jit = _jax_internals.jit_options(call.fn)
            self._donates = bool(self._jit.donate_argnums or self._jit.donate_argnames)
        if options["platform"] == "cpu":
            jax.config.update("jax_platforms", "cpu")  # no context on a device that this worker has no use for

    def prepare(self) -> None:
        """Takes the device and makes the arguments, ahead of the first config."""
        jax.block_until_ready(self._materialized())

    def compile(self, config: Config, *, target: dict[str, Any] | None, save_fd: int | None) -> dict[str, Any]:
        """Traces, lowers and compiles one config.

        Args:
            config: the config.
            target: what to compile for where the device is not to be touched; None compiles for this worker's own.
            save_fd: takes the serialised executable; None keeps it here.

        Returns:
            `compile_s`.

        Raises:
            NeedsDeviceError: this program must be compiled on its device.
        """
        self._config = {name: freeze(value) for name, value in config.items()}
        start = time.perf_counter()
        if self._jit is None:
            self._compiled = functools.partial(self._call.fn, **self._config)
        elif target is None:
            args, kwargs = self._materialized() if save_fd is None else inputs.call_as_structs(self._call)
            self._compiled = self._jitted.trace(*args, **kwargs, **self._config).lower().compile()
        else:
            self._compiled = self._compile_deviceless(target)
        elapsed = time.perf_counter() - start
        if save_fd is not None:
            spool.write(save_fd, _serialize(self._compiled))
        return {"compile_s": elapsed}

    def check(self, config: Config, *, load_fd: int | None) -> None:
        """Loads the executable, if it was compiled elsewhere, and runs it once to its end."""
        if load_fd is not None:
            self._compiled = _deserialize(os.pread(load_fd, os.fstat(load_fd).st_size, 0))
            self._config = {name: freeze(value) for name, value in config.items()}
        run, prepare = self._runner()
        if prepare is not None:
            prepare()
        run()

    def measure(self) -> dict[str, Any]:
        """Times what lies on the bench.

        Returns:
            `samples_ms`.
        """
        run, prepare = self._runner()
        samples = measure.measure(run, warmup=self._options["warmup"], rep=self._options["rep"], prepare=prepare)
        return {"samples_ms": list(samples.samples_ms)}

    def _runner(self) -> tuple[Callable[[], object], Callable[[], None] | None]:
        """Returns what runs the config to its end, and what must come before each run, untimed."""
        compiled = self._compiled
        assert compiled is not None
        fresh: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def run_fresh() -> object:
            args, kwargs = fresh.pop()
            return jax.block_until_ready(compiled(*args, **kwargs))

        def refill() -> None:
            fresh[:] = [jax.block_until_ready(self._dynamic(self._materialize()))]

        if self._donates:
            return run_fresh, refill  # the run may destroy its arguments
        args, kwargs = self._dynamic(self._materialized())
        return lambda: jax.block_until_ready(compiled(*args, **kwargs)), None

    def _dynamic(self, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments without the static ones, as an executable takes them."""
        args, kwargs = arguments
        if self._jit is None:
            return args, kwargs
        static = self._jit
        return (
            tuple(arg for index, arg in enumerate(args) if not static.is_static_position(index, len(args))),
            {name: arg for name, arg in kwargs.items() if name not in static.static_argnames},
        )

    def _materialized(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._arguments is None:
            self._arguments = self._materialize()
        return self._arguments

    def _materialize(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return inputs.materialize(self._call, self._arrays_fd, seed=_MEASURE_SEED)

    def _compile_deviceless(self, target: dict[str, Any]) -> Any:
        with _abstract_device(target) as sharding:
            args, kwargs = inputs.call_as_structs(self._call, sharding=sharding)
            traced = self._jitted.trace(*args, **kwargs, **self._config)
            if reason := why_device_is_needed(traced.jaxpr.jaxpr):
                raise NeedsDeviceError(reason)
            return traced.lower(lowering_platforms=(target["platform"],)).compile()


@contextlib.contextmanager
def _abstract_device(target: dict[str, Any]) -> Iterator[SingleDeviceSharding]:
    """Stands in for the accelerator while a program is compiled for it.

    The abstract device keeps Pallas's lowering from asking for the local one, which would make a context on it: a quarter
    of a second each, one after another.
    """
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    jax.config.update("jax_platforms", "cpu")
    topology = topologies.get_topology_desc(
        platform=target["platform"], topology_name="", topology="1x1x1", target_config=target["config_text"]
    )
    device = AbstractDevice(
        device_kind=target["device_kind"], num_cores=target["num_cores"], platform=target["platform"]
    )
    mesh = AbstractMesh((1,), ("d",), axis_types=(AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh), _jax_internals.answer_for_device("gpu", _refuse_devices):
        yield SingleDeviceSharding(topology.devices[0])


def _refuse_devices(function: str) -> None:
    raise NeedsDeviceError(f"it calls jax.{function}() while it is traced")


_TUNED_BY_XLA = frozenset({"dot_general", "conv_general_dilated", "scaled_dot", "ragged_dot", "ragged_dot_general"})
_CALLBACKS = frozenset({"pure_callback", "io_callback", "debug_callback", "debug_print"})


def why_device_is_needed(jaxpr: Any) -> str | None:
    """Returns why a traced program must be compiled on its device, or None where it need not.

    XLA times its own choices for dots and convolutions on the device, so that without one they come out slower; a host
    callback is bound to the process that compiled it. What happens inside a Pallas kernel is neither's business.
    """
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in _TUNED_BY_XLA:
            return f"XLA tunes its {name} on the device"
        if name in _CALLBACKS:
            return f"its {name} belongs to the process that compiles it"
        if name == "pallas_call":
            continue
        for inner in _inner_jaxprs(equation.params):
            if reason := why_device_is_needed(inner):
                return reason
    return None


def _inner_jaxprs(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            item = getattr(item, "jaxpr", item)
            if hasattr(item, "eqns"):
                yield item


def _serialize(compiled: Any) -> bytes:
    try:
        return payload.dumps(serialize_executable.serialize(compiled))
    except Exception as error:
        raise NeedsDeviceError(f"its executable cannot be serialised: {error}") from error


def _deserialize(blob: bytes) -> Any:
    return serialize_executable.deserialize_and_load(*payload.loads(blob))


def outcome_of(error: BaseException, phase: str) -> str:
    """Returns the outcome that an exception in `phase` stands for, or `unfit` for a program in the wrong worker."""
    if isinstance(error, NeedsDeviceError):
        return "unfit"
    # While compiling, the same status tells of a kernel that wants more shared memory than there is.
    exhausted = isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
    if exhausted and (phase != "compile" or "out of memory" in str(error).lower()):
        return Outcome.DEVICE_OOM.value
    return Outcome.ERROR.value


def probe(platforms: str | None) -> dict[str, Any]:
    """Initialises a backend and describes its devices.

    Args:
        platforms: the caller's `jax_platforms`; None for JAX's own choice.

    Returns:
        `devices`, each with `platform`, `kind`, `index`, `num_cores`, and `config_text`, what a compiler without the device
        must be told of it (None where JAX cannot say).
    """
    jax.config.update("jax_platforms", platforms)
    with tempfile.TemporaryDirectory(prefix="quarantune-probe-") as directory:
        if platforms != "cpu":
            flags = os.environ.get("XLA_FLAGS", "")
            os.environ["XLA_FLAGS"] = f"{flags} --xla_dump_to={directory} --xla_dump_hlo_as_text"
        devices = jax.local_devices()
        if devices[0].platform != "cpu":
            jax.block_until_ready(jax.jit(lambda x: x + 1)(1.0))
        texts = sorted(glob.glob(os.path.join(directory, "*gpu_target_config.pbtxt")))
        config_text = None
        if texts:
            with open(texts[0], encoding="utf-8") as file:
                config_text = file.read()
    return {"devices": describe_devices(devices), "config_text": config_text}


def describe_devices(devices: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns `platform`, `kind`, `index` and `num_cores` of JAX devices, as JSON-able data."""
    return [
        {
            "platform": _platform_of(device),
            "kind": device.device_kind,
            "index": position,
            "num_cores": getattr(device, "core_count", None),
        }
        for position, device in enumerate(devices)
    ]


def _platform_of(device: Any) -> str:
    """Returns `cpu`, `cuda`, `rocm` or `tpu`: JAX's device calls the second and third `gpu`."""
    if device.platform != "gpu":
        return str(device.platform)
    version = device.client.platform_version.lower()
    return "rocm" if "rocm" in version else "cuda"
