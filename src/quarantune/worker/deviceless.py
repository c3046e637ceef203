"""Compiles for an accelerator without touching it, and describes one for a process that may not touch it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding

from quarantune.devices.discovery import described
from quarantune.jax_internals import jax_traces
from quarantune.jax_internals.other_processes import answer_for_device
from quarantune.values.trial import CompileTarget
from quarantune.worker.failures import NeedsDeviceError, UncheckableError

LIBTPU_LOGS = {
    "TPU_LOG_DIR": "disabled",  # no directory of logs in /tmp
    "TPU_MIN_LOG_LEVEL": "3",  # and no file in TMPDIR instead: below level 3, the fatal errors, it logs to files too
}
"""Environment that keeps libtpu from leaving files."""
_LIBTPU_ENVIRON = LIBTPU_LOGS | {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",  # else only one process at a time may load it
    "TPU_SKIP_MDS_QUERY": "1",  # no query of a cloud machine's metadata, which waits for the network
    "TPU_WORKER_HOSTNAMES": "localhost",  # else it warns that it knows none
}
"""Environment that lets libtpu compile without a TPU; the caller's own variables have priority."""
_PRODUCTS = frozenset({"dot_general", "scaled_dot", "ragged_dot", "ragged_dot_general"})
_BETTER_WITH_GPU = frozenset({"conv_general_dilated", "sort"}) | _PRODUCTS
"""Operations that XLA compiles better with its GPU at hand. It times its own choices for products and convolutions. For
sorts it asks CUB, which sorts a million numbers 4 to 12 times as fast on an H200 as XLA's own code."""
_CALLBACKS = frozenset({"pure_callback", "io_callback", "debug_callback", "debug_print"})

asked_at_import: list[str] = []
"""Names of JAX's functions, for example `devices`, that the caller's modules called when this process imported them.
The list is global, because a process has one target."""


@contextlib.contextmanager
def answers_at_import(target: CompileTarget) -> Iterator[None]:
    """Answers for the accelerator while the caller's modules are imported, as it did in the caller's process.

    Arrays that they make are in this process's own memory; a program that is compiled for the accelerator takes their
    values.

    Args:
        target: describes the accelerator.

    Raises:
        NeedsDeviceError: a module cannot be imported without the accelerator, or not at all.
    """
    jax.config.update("jax_platforms", "cpu")
    with contextlib.ExitStack() as answering:
        with contextlib.suppress(UncheckableError):  # compiling meets the same error
            described = topology(target).devices[0]
            answering.enter_context(answer_for_device(described, asked_at_import.append))
        try:
            yield
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise NeedsDeviceError(f"its modules cannot be imported without the device: {what}") from error


@contextlib.contextmanager
def abstract_device(
    target: CompileTarget, on_question: Callable[[str], None] = lambda name: None
) -> Iterator[SingleDeviceSharding]:
    """Stands in for the accelerator while a program is traced and lowered for it.

    A function that asks `jax.devices()` gets the description of the device: its kind and its number of cores, but not
    its free memory. So an error after a question says nothing about the config on the device itself: a sweep confirms
    it there, and a check does not count it.

    The abstract device keeps Pallas's lowering from asking for the local device, which would make a context on it: a
    quarter of a second for each worker, one after another.

    Args:
        target: describes the accelerator to compile for.
        on_question: receives the name of each function of JAX that asks about the device.

    Yields:
        The sharding that the program's arguments have on the accelerator.
    """
    jax.config.update("jax_platforms", "cpu")
    described = topology(target).devices[0]
    with jax.sharding.use_abstract_mesh(_mesh_of(target)), answer_for_device(described, on_question):
        yield SingleDeviceSharding(described)


@contextlib.contextmanager
def checked_device(target: CompileTarget) -> Iterator[SingleDeviceSharding]:
    """Stands in for the accelerator if no process will compile the program on the accelerator itself.

    Raises:
        UncheckableError: an error followed a question about the device, or came from the function's own mesh.
    """
    jax.config.update("jax_platforms", "cpu")
    topology(target)  # first, as its own error is not the config's
    asked = [*asked_at_import]
    try:
        with abstract_device(target, asked.append) as sharding:
            yield sharding
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        if str(_mesh_of(target)) in str(error):
            reason = "a check is for one device, and the function has its own mesh"
            raise UncheckableError(f"{reason}: {what}") from error
        if asked:
            caution = f"perhaps only because the device is not here: it calls jax.{asked[0]}() while it is traced"
            raise UncheckableError(f"{what} ({caution})") from error
        raise


def _mesh_of(target: CompileTarget) -> AbstractMesh:
    device = AbstractDevice(device_kind=target.device_kind, num_cores=target.num_cores, platform=target.platform)
    return AbstractMesh((1,), ("d",), axis_types=(AxisType.Auto,), abstract_device=device)


@functools.cache
def topology(target: CompileTarget) -> Any:
    """Returns JAX's description of the accelerator, made once. For a TPU this starts threads: nothing may fork then.

    Raises:
        UncheckableError: this version of JAX, or of its plugin, cannot describe the accelerator.
    """
    try:
        if target.platform == "tpu":
            for name, value in _LIBTPU_ENVIRON.items():
                os.environ.setdefault(name, value)
            return topologies.get_topology_desc(platform="tpu", topology_name=target.topology)
        os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # the check would initialise CUDA
        return topologies.get_topology_desc(
            platform=target.platform, topology_name="", topology="1x1x1", target_config=target.config_text
        )
    except Exception as error:
        raise UncheckableError(
            f"JAX {jax.__version__} cannot compile for {target.device_kind} here: {error}"
        ) from error


def why_device_is_needed(jaxpr: Any, platform: str | None, *, is_cheap: bool = False) -> str | None:
    """Returns why a traced program must be compiled on its device, or None if it need not.

    Some programs come out slower without their GPU. A host callback is bound to the process that compiled it. Neither
    applies inside a Pallas kernel.

    Args:
        jaxpr: the traced program.
        platform: the device's platform.
        is_cheap: whether it is compiled only for ranking. Products need no device then, but convolutions and sorts do:
            on an H100, cuDNN's kernel for a convolution is up to 500 times slower if it was not chosen there.
    """
    better = _BETTER_WITH_GPU - _PRODUCTS if is_cheap else _BETTER_WITH_GPU
    for equation in jax_traces.equations(jaxpr, closed={"pallas_call"}):
        name = equation.primitive.name
        if name in better and platform != "tpu":
            return f"XLA compiles its {name} better with the device"
        if name in _CALLBACKS:
            return f"its {name} belongs to the process that compiles it"
    return None


def products(jaxpr: Any) -> tuple[str, ...]:
    """Returns names of all operations that XLA tries kernels for while it compiles a traced program with its GPU.

    Equal operations have the same name in every process. Nearly all are matrix products.
    """
    found = set()
    for equation in jax_traces.equations(jaxpr, closed={"pallas_call"}):
        if equation.primitive.name in _BETTER_WITH_GPU:
            kinds = [str(variable.aval) for variable in equation.invars]
            text = f"{equation.primitive.name} {kinds} {sorted(equation.params.items())}"
            found.add(hashlib.sha256(text.encode()).hexdigest()[:16])
    return tuple(sorted(found))


def probe(platforms: str | None) -> tuple[CompileTarget, ...]:
    """Initialises a backend and describes its devices.

    Args:
        platforms: the caller's `jax_platforms`; None for JAX's own choice.
    """
    for name, value in LIBTPU_LOGS.items():
        os.environ.setdefault(name, value)
    jax.config.update("jax_platforms", platforms)
    return described(jax.local_devices())
