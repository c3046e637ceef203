"""The key of a call: all calls with this key use the same config."""

from __future__ import annotations

import dataclasses
import inspect
import reprlib
import sys
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from quarantune.calls.call import BoundCall
from quarantune.devices import discovery
from quarantune.functions.binding import Arguments, assignment_in_force, named
from quarantune.functions.describe import layout_of, sharding_of
from quarantune.functions.description import SCALARS, describe_arguments, describe_jax_state, is_array, key_part
from quarantune.functions.fingerprint import code_digest
from quarantune.values.codec import JsonObject, canonical_json, decode_json
from quarantune.values.options import ROUNDING
from quarantune.values.texts import array_text, printable

if TYPE_CHECKING:
    from quarantune.devices.targets import Target
    from quarantune.transport.manual_axes import Axes

_MOST_KINDS = 3
_STATE = "jax settings"
"""The name of JAX's settings in an entry, next to the names of parameters."""


class ProblemId(NamedTuple):
    """Identifies a problem with one result in the cache: a function, a kind of device, and a key.

    Attributes:
        name: the function's name in the cache.
        device: the kind of device.
        key: the description of the call, as canonical JSON.
    """

    name: str
    device: str
    key: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyedCall:
    """A call with its key and its description, each made once.

    Attributes:
        call: the call.
        id: the identity of its problem in the cache.
        platform: the platform that the call runs on: `cpu`, `cuda`, `rocm` or `tpu`.
        arguments: the descriptions of the arguments by parameter, with arrays even if `key_fn` describes them in the
            key.
        values: the values of the call that the key holds, by parameter.
        jax_state: JAX's settings that the key holds.
        axes: the axes of the mesh that the function communicates over, if it does so inside `shard_map`.
        programs: the programs that the call runs, by the text of the config; `calls.program` fills it.
    """

    call: BoundCall
    id: ProblemId
    platform: str
    arguments: JsonObject
    values: JsonObject
    jax_state: JsonObject
    axes: Axes | None
    programs: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    @property
    def readable(self) -> JsonObject:
        """The values of the key in readable form."""
        return readable(self.values, self.jax_state)

    @property
    def id_under_rounding(self) -> ProblemId:
        """The identity that it has if numerics need not be exact."""
        code = self.call.function.under(ROUNDING).fingerprint.digest
        return self.id._replace(key=canonical_json(decode_json(self.id.key) | {"code": code}))

    @property
    def label(self) -> str:
        """The function and the kinds of its arrays, for progress: `matmul f32[512,512]`."""
        leaves = jax.tree.leaves((self.call.args, self.call.kwargs))
        kinds = dict.fromkeys(array_text(leaf.shape, leaf.dtype) for leaf in leaves if is_array(leaf))
        few = [*kinds][:_MOST_KINDS] + (["..."] if len(kinds) > _MOST_KINDS else [])
        return " ".join([printable(self.call.name.rpartition(".")[2]), *few])

    def sent(self) -> Arguments:
        """Returns the arguments that workers get.

        An argument that `key_fn` does not take and that lacks a description stays here: workers use its default.
        """
        call = self.call
        left = [
            name
            for name in call.optional - self.values.keys()
            if call.function.parameters[name].default is not inspect.Parameter.empty
        ]
        if not left:
            return call.args, call.kwargs
        kept = {name: value for name, value in call.bound.arguments.items() if name not in left}
        bound = inspect.BoundArguments(call.function.signature, kept)
        return bound.args, bound.kwargs


def readable(values: JsonObject, jax_state: JsonObject) -> JsonObject:
    """Returns the values of a key in readable form, with JAX's settings."""
    return values | ({_STATE: jax_state} if jax_state else {})


def keyed(call: BoundCall, target: Target | None = None) -> KeyedCall:
    """Returns a call with its key, in the current state of JAX's settings.

    Args:
        call: the call.
        target: the device that the call is for; None for the device that runs it here.

    Raises:
        TypeError: An argument has no description, or `key_fn` returned a value that JSON cannot hold.
    """
    function, given = call.function, dict(named(call.bound))
    _check_arguments(given, given.keys() - call.statics if function.is_jitted else (), call.name)
    arguments = describe_arguments(call.values, call.statics, is_jitted=function.is_jitted, optional=call.optional)
    dynamic = jax.tree.leaves([value for name, value in call.values.items() if name not in call.statics])
    is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in dynamic)
    if target is None:
        arrays = [leaf for leaf in dynamic if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)]
        here = (device.platform for array in arrays for device in array.devices())
        platform, kind = discovery.platform_and_kind(min(here, default=None))
    else:
        platform, kind = target.platform, target.device_kind
    axes = call.axes
    if axes is None and is_traced and function.is_jitted:
        from quarantune.transport import manual_axes  # calls outside a trace do not need it

        axes = manual_axes.communicated_over(function.fn, call.args, call.kwargs)
    values = _key_values(call, arguments)
    if axes is not None:
        values = {**values, "communicates over": axes.sizes}
    assignment = assignment_in_force.get()
    state = describe_jax_state(call.args, call.kwargs, own=None if assignment is None else assignment.text)
    parts = {"call": values, "code": function.fingerprint.digest} | ({"jax": state} if state else {})
    if not function.is_jitted and (code := code_digest(call.values)):
        parts["code of arguments"] = code
    if sys.flags.optimize:  # code runs without `assert`, and with another `__debug__`
        parts["python"] = {"optimize": sys.flags.optimize}
    return KeyedCall(
        call=call,
        id=ProblemId(call.name, kind, canonical_json(parts)),
        platform=platform,
        arguments=arguments,
        values=values,
        jax_state=state,
        axes=axes,
    )


def keyed_to_tune(call: BoundCall, target: Target | None = None) -> KeyedCall:
    """Returns a call to tune with its key.

    Args:
        call: the call.
        target: see `keyed`.

    Raises:
        TypeError: The call has symbolic shapes, or sets a tunable that the configs should set.
    """
    if call.is_symbolic:
        raise TypeError(f"{call.name}: symbolic shapes have no data to measure with: tune it with concrete shapes")
    described = keyed(call, target)
    if given := call.tunables & dict(named(call.bound)).keys():
        verb, them = ("is", "it") if len(given) == 1 else ("are", "them")
        raise TypeError(f"{call.name}: {', '.join(sorted(given))} {verb} tuned here: leave {them} out")
    return described


def check_can_travel(call: BoundCall) -> None:
    """Raises if workers cannot make an argument as the function gets it here.

    Raises:
        ValueError: An array is unreduced over axes of a mesh, or is not in row-major order.
    """
    for parameter, value in named(call.bound):
        for path, leaf in jax.tree_util.tree_flatten_with_path(value)[0]:
            sharding = sharding_of(leaf) if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) else None
            reason = ""
            if sharding is not None and getattr(sharding.spec, "unreduced", None):
                reason = f"is unreduced over {', '.join(sorted(sharding.spec.unreduced))}: reduce it before the call"
            elif layout_of(leaf) is not None:
                reason = f"has the layout {layout_of(leaf)}, not row-major order: copy it before the call"
            if reason:
                raise ValueError(
                    f"{call.name}: {parameter}{jax.tree_util.keystr(path)} {reason}, as workers cannot make such an "
                    f"array, or give the tunables by hand"
                )


def _key_values(call: BoundCall, arguments: JsonObject) -> JsonObject:
    """Returns the part of the key that describes the arguments; a `key_fn` describes the arrays."""
    key_fn = call.function.options.key_fn
    if key_fn is None:
        return arguments
    args, kwargs = call.fitted(key_fn, call.args, call.kwargs)
    returned = key_fn(*args, **kwargs)
    bucket = key_part(returned)
    try:
        canonical_json(bucket)
    except (TypeError, ValueError) as error:
        hint = "; for symbolic shapes return the value for the concrete shapes" if call.is_symbolic else ""
        raise TypeError(f"{call.name}: key_fn returned {returned!r}, which JSON cannot hold: {error}{hint}") from None
    static = {name: value for name, value in arguments.items() if name in call.statics}
    return {**static, "key_fn": bucket}


def _check_arguments(arguments: Mapping[str, Any], dynamic: Collection[str], name: str) -> None:
    """Raises if every config would write to an argument, or if `jax.jit` would refuse an argument.

    Args:
        arguments: the arguments by parameter.
        dynamic: the parameters that `jax.jit` accepts only arrays and numbers for.
        name: the function's name in messages.

    Raises:
        TypeError: An argument contains a `jax.Ref`, or a dynamic argument contains a value that is neither an array
            nor a number.
    """
    for parameter, value in arguments.items():
        for number, leaf in enumerate(jax.tree.leaves(value)):
            if type(leaf) not in SCALARS and isinstance(leaf, jax.Ref):
                raise TypeError(
                    f"{name}: argument {parameter!r} is a jax.Ref, to which every config would write: tune a function "
                    f"that takes its value and returns the new one: {parameter}[...] = fn({parameter}[...]), or give "
                    f"the tunables by hand"
                )
            if parameter in dynamic and (reason := _why_not_dynamic(leaf)) is not None:
                path, _ = jax.tree_util.tree_flatten_with_path(value)[0][number]
                where = f"argument {parameter!r}" if not path else f"{parameter}{jax.tree_util.keystr(path)}"
                raise TypeError(
                    f"{name}: {where} is {reprlib.repr(leaf)}, which jax.jit does not take as a dynamic argument "
                    f"({reason}): {_remedy(parameter, leaf, is_inside=bool(path))}"
                )


def _why_not_dynamic(leaf: Any) -> str | None:
    if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, bool, int, float, complex)):
        return None
    try:
        jax.typeof(leaf)
    except (TypeError, ValueError):
        return f"dtype {leaf.dtype}" if isinstance(leaf, (np.ndarray, np.generic)) else type(leaf).__name__
    return None


def _remedy(parameter: str, leaf: Any, *, is_inside: bool) -> str:
    if isinstance(leaf, (np.ndarray, np.generic)):
        return "give an array of numbers"
    static = (
        f"pass it as a separate static argument, or make it a static field of the pytree {parameter!r}"
        if is_inside
        else f"make it static with static_argnames=[{parameter!r}] in jax.jit"
    )
    kind = type(leaf)
    if kind.__module__ == "builtins":
        return static
    return f"{static}, or register {kind.__qualname__} as a pytree (jax.tree_util.register_dataclass)"
