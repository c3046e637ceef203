"""The key under which the result of a call is remembered, and how it is found."""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING

import jax

from quarantune import cache
from quarantune.devices import discovery
from quarantune.host.process import lazy
from quarantune.jax_internals import state as jax_state
from quarantune.resolve import suitable
from quarantune.resolve.bound_call import BoundCall
from quarantune.transport import assignment as assignments
from quarantune.transport.problem import CallDescription, Problem, describe_call, is_array, key_part, named
from quarantune.values.codec import JsonObject
from quarantune.values.describe import describe_context_mesh, describe_static
from quarantune.values.texts import array_text, as_formerly, printable

if TYPE_CHECKING:
    from quarantune.devices.targets import Target
    from quarantune.transport.manual_axes import Axes

_MOST_KINDS = 3
_STATE = "jax settings"
"""The name of JAX's settings in an entry, among those of the parameters."""


@dataclasses.dataclass(frozen=True)
class CallKey:
    """One problem on one kind of device.

    Attributes:
        device: the kind of device.
        text: the description of the problem as canonical JSON.
    """

    device: str
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyedCall:
    """A call together with its key.

    Attributes:
        call: the call.
        key: its key.
        platform: the platform that the call runs on: `cpu`, `cuda`, `rocm` or `tpu`.
        values: the values of the call that the key holds, by parameter.
        jax_state: JAX's settings that the key holds.
        axes: the axes of the mesh that the function communicates over, where it does so inside `shard_map`.
        tunables_given: the tunable parameters that the caller sets by hand.
    """

    call: BoundCall
    key: CallKey
    platform: str
    values: JsonObject
    jax_state: JsonObject
    axes: Axes | None
    tunables_given: frozenset[str]

    @property
    def readable(self) -> JsonObject:
        """The values of the key in a form that people can read."""
        return self.values | ({_STATE: self.jax_state} if self.jax_state else {})

    @lazy
    def former_text(self) -> str:
        """The text of the key in earlier versions."""

        def text() -> str:
            former = _description(self.call).key_values  # the part that `key_fn` returned stays
            values = {name: former.get(name, value) for name, value in self.values.items()}
            return _text(values, self.call, self.jax_state)

        return as_formerly(text)

    @property
    def arguments(self) -> JsonObject:
        """The descriptions of the arguments by parameter, also where `key_fn` stands for the arrays in the key."""
        return _description(self.call).key_values

    @property
    def label(self) -> str:
        """The function and the kinds of its arrays, for progress: `matmul f32[512,512]`."""
        leaves = jax.tree.leaves((self.call.args, self.call.kwargs))
        kinds = dict.fromkeys(array_text(leaf.shape, leaf.dtype) for leaf in leaves if is_array(leaf))
        few = [*kinds][:_MOST_KINDS] + (["..."] if len(kinds) > _MOST_KINDS else [])
        return " ".join([printable(self.call.name.rpartition(".")[2]), *few])

    def problem(self) -> Problem:
        """Returns the call as a sweep takes it.

        An argument that `key_fn` leaves out and that has no description is not sent: workers use its default.
        """
        call = self.call
        sent = call.function.signature.bind_partial(*call.args, **call.kwargs)
        for name in call.optional - self.values.keys():
            if call.function.parameters[name].default is not inspect.Parameter.empty:
                sent.arguments.pop(name, None)
        args, kwargs = (sent.args, sent.kwargs) if call.optional else (call.args, call.kwargs)
        return Problem(
            fn=call.function.fn,
            name=call.name,
            args=args,
            kwargs=kwargs,
            platform=self.platform,
            device_kind=self.key.device,
            manual_mesh=self.axes.mesh if self.axes is not None else None,
            untuned=call.untuned,
            default=call.default_index,
        )


def keyed(call: BoundCall, target: Target | None = None) -> KeyedCall:
    """Returns a call with its key, in the current state of JAX's settings.

    Args:
        call: the call.
        target: the device that the call is for; None for the one that it would run on here.

    Raises:
        TypeError: an argument cannot be described, or `key_fn` returned a value that JSON cannot hold.
    """
    function = call.function
    bound = dict(named(function.signature.bind_partial(*call.args, **call.kwargs)))
    suitable.check_no_references(bound, call.name)
    if function.is_jitted:
        suitable.check_arguments({name: value for name, value in bound.items() if name not in call.statics}, call.name)
    description = _description(call)
    if target is None:
        platform, kind = discovery.platform_and_kind(description.platform)
    else:
        platform, kind = target.platform, target.device_kind
    axes = None
    if description.has_tracers and function.is_jitted:
        from quarantune.transport import manual_axes  # calls outside a trace do not need it

        axes = manual_axes.communicated_over(function.fn, call.args, call.kwargs)
    values = _key_values(call, description)
    if axes is not None:
        values = {**values, "communicates over": axes.sizes}
    assignment = assignments.current()
    state = jax_state.describe(describe_static, own=None if assignment is None else assignment.text)
    if (mesh := describe_context_mesh(call.args, call.kwargs)) is not None:
        state["mesh"] = mesh
    return KeyedCall(
        call=call,
        key=CallKey(kind, _text(values, call, state)),
        platform=platform,
        values=values,
        jax_state=state,
        axes=axes,
        tunables_given=description.tunables_given,
    )


def keyed_to_tune(call: BoundCall, target: Target | None = None) -> KeyedCall:
    """Returns a call to tune with its key.

    Args:
        call: the call.
        target: as for `keyed`.

    Raises:
        TypeError: its shapes are symbolic, or it sets a tunable by hand, and every config would run with that.
    """
    if call.is_symbolic:
        raise TypeError(f"{call.name}: symbolic shapes have no data to measure with: tune it with concrete shapes")
    described = keyed(call, target)
    if given := described.tunables_given:
        verb, them = ("is", "it") if len(given) == 1 else ("are", "them")
        raise TypeError(f"{call.name}: {', '.join(sorted(given))} {verb} tuned here: leave {them} out")
    return described


def _description(call: BoundCall) -> CallDescription:
    function = call.function
    return describe_call(
        function.signature,
        call.statics,
        call.tunables,
        call.args,
        call.kwargs,
        is_jitted=function.is_jitted,
        optional=call.optional,
    )


def _text(values: JsonObject, call: BoundCall, state: JsonObject) -> str:
    parts = {"call": values, "code": call.function.fingerprint.digest} | ({"jax": state} if state else {})
    return cache.canonical_json(parts)


def _key_values(call: BoundCall, description: CallDescription) -> JsonObject:
    """Returns the part of the key that describes the arguments; `key_fn` describes the arrays where there is one."""
    key_fn = call.function.options.key_fn
    if key_fn is None:
        return description.key_values
    args, kwargs = call.fitted(key_fn, call.args, call.kwargs)
    returned = key_fn(*args, **kwargs)
    bucket = key_part(returned)
    try:
        cache.canonical_json(bucket)
    except (TypeError, ValueError) as error:
        hint = "; for symbolic shapes return what it returns for the concrete ones" if call.is_symbolic else ""
        raise TypeError(f"{call.name}: key_fn returned {returned!r}, which JSON cannot hold: {error}{hint}") from None
    static = {name: value for name, value in description.key_values.items() if name in call.statics}
    return {**static, "key_fn": bucket}
