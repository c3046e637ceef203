"""`@autotune`: early errors for misuse, a function that stays a function, one sweep per problem."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import inspect
import json
import math
import os
import pickle
import re
import shutil
import sys
import tempfile
import textwrap
import threading
import typing
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import misdeeds
import numpy as np
import psutil
import pytest
from aftermath import eventually, left_of
from helpers import python

import quarantune
from quarantune import Outcome
from quarantune.functions.names import cache_name
from quarantune.jax_internals import jax_functions
from quarantune.values.blocks import SettingKeywords
from quarantune.values.options import ContextualKeywords, OptionKeywords, Options
from quarantune.values.settings import Settings

pytestmark = pytest.mark.usefixtures("two_slots")

X = np.arange(4, dtype=np.float32)


def choosy(configs: Any = ({"n": 1}, {"n": 2}), **options: Any) -> quarantune.Autotuned:
    """Returns a function whose only good config is n=2, which is not its default; the result shows the config."""

    @quarantune.autotune(configs, **{"rep": 1, "ref_fn": None, **options})
    @functools.partial(jax.jit, static_argnames=["n"])
    def scale(x: Any, n: int = 1) -> Any:
        """Scales x by n; only n=2 works."""
        if n != 2:
            raise ArithmeticError(f"n={n} is bad")
        return x * n

    return scale


def hopeless(**options: Any) -> quarantune.Autotuned:
    @quarantune.autotune([{"n": 1}, {"n": 2}], **{"rep": 1, "ref_fn": None, **options})
    @functools.partial(jax.jit, static_argnames=["n"])
    def fail(x: Any, n: int = 0) -> Any:
        if n:
            raise ArithmeticError(f"n={n} is bad")
        return x

    return fail


# --- misuse -------------------------------------------------------------------------------------------------


def plain(x: Any, n: int = 1) -> Any:
    return x * n


def jitted(x: Any, n: int = 1, m: int = 1, *, k: int, p: int = 0) -> Any:
    return x


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize(
    ("configs", "kind", "says"),
    [
        ([], ValueError, ["configs is empty", "at least one"]),
        ({}, ValueError, ["at least one"]),
        ([{}], ValueError, ["no keys", "at least one"]),
        ([{"n": 1}, {"k": 1}], TypeError, ["configs[0] lacks 'k'", "has no default"]),
        ([{"n": 1}, 7], TypeError, ["configs[1] is 7", "dict"]),
        ({"n": []}, ValueError, ["configs['n'] is empty"]),
        ({"n": 3}, TypeError, ["configs['n'] is 3", "[3]"]),
        ("n", TypeError, ["'n'", "list of dicts"]),
        (None, TypeError, ["None", "list of dicts"]),
        ([{"nn": 1}], TypeError, ["'nn' is not a parameter", "Did you mean 'n'?"]),
        ([{"x": 1}], ValueError, ["['x'] are not static", "static_argnames=['x', 'n', 'm', 'k']"]),
        ([{"p": 1}], ValueError, ["['p'] are not static", "static_argnames="]),
        ([{"k": 1}], TypeError, ["['k'] have no default", "k=1"]),
        ([{"n": {1}}], TypeError, ["configs[0]['n']", "set", "JSON"]),
        ([{"n": float("nan")}], ValueError, ["configs[0]['n']", "nan", "finite"]),
        ([{"n": object}], TypeError, ["configs[0]['n']", "JSON"]),
    ],
)
def test_bad_configs_are_refused_at_decoration_with_the_fix(configs: Any, kind: type, says: list[str]) -> None:
    fn = jax.jit(jitted, static_argnames=["n", "m", "k"])
    with pytest.raises(kind) as caught:
        quarantune.autotune(configs)(fn)
    for text in ["jitted", *says]:
        assert text in str(caught.value)


@pytest.mark.usefixtures("no_process")
def test_a_parameter_static_only_by_position_is_refused() -> None:
    # JAX before 0.11 counts -1 from a call's last positional argument; later versions, from the last parameter.
    fn = jax.jit(lambda x, n=1: x * n, static_argnums=-1)
    if "n" in jax_functions.jit_options(fn).static_argnames:
        quarantune.autotune([{"n": 1}])(fn)
        return
    with pytest.raises(ValueError, match=r"\['n'\] are not static.*static_argnames=\['n'\]"):
        quarantune.autotune([{"n": 1}])(fn)
    with pytest.raises(ValueError, match=r"\['n'\] are not static"):
        quarantune.AutoTuner(fn, [{"n": 1}]).run(X)


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize("fn", [plain, functools.partial(plain, n=2), 3])
def test_a_function_that_is_not_jitted_is_refused_with_the_fix(fn: Any) -> None:
    with pytest.raises(TypeError, match=r"put @jax\.jit\(static_argnames=\[\.\.\.\]\) between"):
        quarantune.autotune([{"n": 1}])(fn)


@pytest.mark.usefixtures("no_process")
def test_an_autotuned_function_is_refused_with_the_fix() -> None:
    with pytest.raises(TypeError, match=r"'choosy.*scale' is already autotuned: put all its tunables into one list"):
        quarantune.autotune([{"n": 1}])(choosy())


@pytest.mark.usefixtures("no_process")
def test_a_decorator_without_configs_is_refused_with_the_fix() -> None:
    with pytest.raises(TypeError, match=r"write @autotune\(\[\.\.\.\]\) above @jax\.jit"):
        quarantune.autotune(jax.jit(plain, static_argnames=["n"]))


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"timeuot": 1}, TypeError, "no option 'timeuot'. Did you mean 'timeout'?"),
        ({"name": ""}, ValueError, "name='' is not valid: give a non-empty string"),
        ({"name": 3}, ValueError, "name=3 is not valid"),
        ({"prune_fn": 3}, TypeError, "prune_fn=3 is not callable: give a function"),
        ({"warmup": -1}, ValueError, "warmup=-1 is not valid: give a whole number of at least 0"),
        ({"rep": 0}, ValueError, "rep=0 is not valid: give a whole number of at least 1"),
        ({"rep": 1.5}, ValueError, "rep=1.5"),
        ({"timeout": 0}, ValueError, "timeout=0 is not valid: give a number of seconds above 0"),
        ({"timeout": float("inf")}, ValueError, "timeout=inf"),
        ({"compile_timeout": "1"}, ValueError, "compile_timeout='1'"),
        ({"memory_limit": "lots"}, ValueError, "'lots' is not an amount of memory"),
        ({"memory_limit": 1}, ValueError, "1 is 1 bytes, and no worker starts with less"),
        ({"timeout": 10**400}, ValueError, "0... is not valid: give a number of seconds above 0 and at most 1e+09"),
        ({"timeout": 10**5000}, ValueError, "timeout=a very large int is not valid"),
        ({"rtol": 10**400}, ValueError, "is not valid: give a number of at least 0"),
        ({"max_mismatched_ratio": 2}, ValueError, "=2 is not valid: give a share of the elements, from 0 to 1"),
        ({"TIMEOUT": 1}, TypeError, "Did you mean 'timeout'?"),
        ({"rep": True}, ValueError, "rep=True is not valid"),
        ({"seed": np.True_}, ValueError, "seed=True is not valid"),
        ({"time_budget": np.float32("nan")}, ValueError, "time_budget=nan is not valid"),
        ({"check_grad": "false"}, ValueError, "check_grad='false' is not valid: give True or False"),
        ({"time_grad": math.nan}, ValueError, "time_grad=nan is not valid"),
        ({"check_grad": []}, ValueError, "check_grad=[] is not valid"),
        ({"time_grad": None}, ValueError, "time_grad=None is not valid"),
    ],
)
def test_bad_options_are_refused_at_decoration_with_the_fix(options: dict[str, Any], kind: type, says: str) -> None:
    with pytest.raises(kind) as caught:
        quarantune.autotune([{"n": 1}], **options)
    assert says in str(caught.value)


def test_scalars_of_numpy_are_options_like_the_numbers_in_them() -> None:
    given = {"rep": np.int64(3), "warmup": np.uint8(2), "seed": np.int32(1), "timeout": np.float32(2.5)}
    taken = Options(**given, rtol=np.float16(0.5), check_grad=np.True_, patience=np.array(4))
    found = [taken.rep, taken.warmup, taken.seed, taken.timeout, taken.rtol, taken.check_grad, taken.patience]
    assert json.dumps(found) == "[3, 2, 1, 2.5, 0.5, true, 4]"


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize(
    ("configs", "kind", "says"),
    [
        (lambda x, **_: iter(()), ValueError, "yielded no config for these arguments"),
        (lambda x, **_: None, TypeError, "returned None; let it return a list of dicts"),
        (lambda x, **_: [{"m": 1}], TypeError, "'m' is not a parameter"),
        (lambda x, **_: [{"x": 1}], ValueError, "['x'] are not static"),
    ],
)
def test_bad_configs_of_a_callable_start_no_process(configs: Callable[..., Any], kind: type, says: str) -> None:
    with pytest.raises(kind) as caught:
        choosy(configs)(X)
    assert says in str(caught.value)


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize(("args", "kwargs"), [((), {}), ((X, 1, 2), {}), ((X,), {"y": 1})])
def test_a_call_that_misfits_the_signature_starts_no_process(args: Any, kwargs: Any) -> None:
    with pytest.raises(TypeError, match="argument"):
        choosy()(*args, **kwargs)


@pytest.mark.usefixtures("no_process")
def test_unsendable_arguments_are_named_before_any_process() -> None:
    numbers = (number for number in range(9))

    @quarantune.autotune([{"n": 1}])
    @functools.partial(jax.jit, static_argnames=["n"])
    def counted(x: Any, n: int = 1) -> Any:
        return x * n * next(numbers)

    with pytest.raises(TypeError, match=r"closure variable 'numbers' of 'test_unsendable.*cannot be sent to a worker"):
        counted(X)


# --- a function that stays a function -----------------------------------------------------------------------


def test_an_autotuned_function_looks_like_the_one_it_wraps() -> None:
    fn = choosy()
    assert fn.__name__ == "scale"
    assert fn.__qualname__ == "choosy.<locals>.scale"
    assert fn.__module__ == __name__
    assert fn.__doc__ == "Scales x by n; only n=2 works."
    assert str(inspect.signature(fn)) == "(x: 'Any', n: 'int' = 1) -> 'Any'"
    assert isinstance(fn.__wrapped__, jax.stages.Wrapped)
    assert "choosy.<locals>.scale" in repr(fn)


def test_lower_trace_and_eval_shape_use_the_winner(sweeps: list[str]) -> None:
    fn = choosy()
    x = jnp.asarray(X)
    np.testing.assert_array_equal(fn.lower(x).compile()(x), X * 2)
    np.testing.assert_array_equal(fn.trace(x).lower().compile()(x), X * 2)
    assert fn.eval_shape(x) == jax.ShapeDtypeStruct(X.shape, X.dtype)
    assert fn.lower(x, n=2).as_text() == fn.lower(x).as_text()
    fn.clear_cache()
    np.testing.assert_array_equal(fn(x), X * 2)
    assert len(sweeps) == 1


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize("by_hand", [((X, 2), {}), ((X,), {"n": 2}), ((), {"x": X, "n": 2})])
def test_a_tunable_passed_by_hand_runs_the_function_untuned(by_hand: Any) -> None:
    args, kwargs = by_hand
    for fn in (choosy(), choosy(lambda x, **_: [{"n": 1}, {"n": 2}])):
        np.testing.assert_array_equal(fn(*args, **kwargs), X * 2)
        np.testing.assert_array_equal(jax.jit(lambda fn=fn: fn(*args, **kwargs))(), X * 2)
        assert "constant dense<2.0" in fn.lower(*args, **kwargs).as_text()
        assert fn.lookup(X) is None
        with pytest.raises(ArithmeticError, match="n=3"):
            fn(X, n=3)


@pytest.mark.usefixtures("no_process")
def test_default_runs_the_functions_own_defaults() -> None:
    with pytest.raises(ArithmeticError, match="n=1"):
        choosy().default(X)
    np.testing.assert_array_equal(hopeless().default(X), X)


def test_lookup_never_tunes_and_then_knows_the_winner(sweeps: list[str]) -> None:
    fn = choosy()
    assert fn.lookup(X) is None
    assert sweeps == []
    fn(X)
    found = fn.lookup(X)
    assert found == {"n": 2}
    found["n"] = 7
    assert fn.lookup(x=X) == {"n": 2}
    assert fn.lookup(X[:3]) is None


@pytest.mark.parametrize("value", [2.0, X.astype(np.float64), np.float64(2), [X.astype(np.float64), 2.0]])
def test_a_call_whose_dtypes_x64_changes_is_tuned_again(value: Any, sweeps: list[str]) -> None:
    @quarantune.autotune([{"n": 1}], rep=1, ref_fn=None)
    @functools.partial(jax.jit, static_argnames=["n"])
    def scale(x: Any, n: int = 1) -> Any:
        return jax.tree.map(lambda leaf: leaf * n, x)

    scale(value)
    with jax.enable_x64(True):
        assert scale.lookup(value) is None
        scale(value)
    scale(value)
    assert len(sweeps) == 2


def test_tune_ignores_the_cache_and_reports_every_config(sweeps: list[str]) -> None:
    fn = choosy({"n": [3, 2, 1]})
    fn(X)
    result = fn.tune(X)
    assert len(sweeps) == 2
    assert result.best_config == {"n": 2}
    assert not result.from_cache
    assert [trial.config for trial in result.trials] == [{"n": 3}, {"n": 2}, {"n": 1}]
    assert result.failures == {"error": 2}
    assert result.time_ms > 0
    np.testing.assert_array_equal(result.fn(X), X * 2)


def test_keyword_and_positional_calls_share_an_entry(sweeps: list[str], cache_dir: Path) -> None:
    @quarantune.autotune({"n": [1]}, rep=1)
    @functools.partial(jax.jit, static_argnames=["n", "mode"])
    def fn(a: Any, b: Any, mode: str = "add", n: int = 1) -> Any:
        return (a + b if mode == "add" else a - b) * n

    for call in (
        lambda: fn(X, X),
        lambda: fn(b=X, a=X),
        lambda: fn(X, mode="add", b=X),
        lambda: fn(jnp.asarray(X), X, "add"),
    ):
        np.testing.assert_array_equal(call(), X + X)
    assert len(sweeps) == 1
    np.testing.assert_array_equal(fn(X, X, "subtract"), X - X)
    assert len(sweeps) == 2
    (file,) = cache_dir.glob("*.json")
    (entries,) = json.loads(file.read_text()).values()
    assert len(entries) == 2


# --- methods ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Scaler:
    factor: float

    @quarantune.autotune({"n": [2]}, rep=1, ref_fn=None)
    @functools.partial(jax.jit, static_argnames=["self", "n"])
    def scale(self, x: Any, n: int = 1) -> Any:
        if n != 2:
            raise ArithmeticError(n)
        return x * self.factor


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    weights: Any

    @quarantune.autotune({"n": [2]}, rep=1, ref_fn=None)
    @functools.partial(jax.jit, static_argnames=["n"])
    def scale(self, x: Any, n: int = 1) -> Any:
        if n != 2:
            raise ArithmeticError(n)
        return x * self.weights


@pytest.mark.parametrize("cls", [Scaler, Layer], ids=["static self", "pytree self"])
def test_methods_are_tuned_through_the_instance_and_the_class(cls: Any, sweeps: list[str]) -> None:
    owner = cls(3.0 if cls is Scaler else jnp.full(4, 3.0))
    np.testing.assert_array_equal(owner.scale(X), X * 3)
    np.testing.assert_array_equal(type(owner).scale(owner, X), X * 3)
    np.testing.assert_array_equal(owner.scale.lower(X).compile()(*(owner, X)[type(owner) is Scaler :]), X * 3)
    assert owner.scale.lookup(X) == type(owner).scale.lookup(owner, x=X) == {"n": 2}
    np.testing.assert_array_equal(jax.jit(owner.scale)(X), X * 3)
    assert owner.scale.__name__ == "scale"
    assert len(sweeps) == 1
    with pytest.raises(ArithmeticError):
        owner.scale.default(X)
    with pytest.raises(AttributeError, match="tuen"):
        owner.scale.tuen  # noqa: B018 - the attribute access is the test


def test_equal_instances_share_an_entry_and_others_do_not(sweeps: list[str]) -> None:
    for factor in (5.0, 5.0, 6.0):
        np.testing.assert_array_equal(Scaler(factor).scale(X), X * factor)
    assert len(sweeps) == 2


@pytest.mark.parametrize("again", [copy.copy, lambda method: pickle.loads(cloudpickle.dumps(method))])
def test_a_method_can_be_copied_and_sent_as_any_other_method(again: Callable[[Any], Any]) -> None:
    method = again(Scaler(3.0).scale)
    assert method.__name__ == "scale"
    np.testing.assert_array_equal(method(X, n=2), X * 3)


# --- the configs --------------------------------------------------------------------------------------------


def test_configs_may_be_a_generator(sweeps: list[str]) -> None:
    fn = choosy({"n": n} for n in (1, 2, 1))
    np.testing.assert_array_equal(fn(X), X * 2)
    np.testing.assert_array_equal(fn(X[:2]), X[:2] * 2)
    assert len(fn.tune(X).trials) == 2


def test_a_callable_takes_the_call_with_shapes_for_arrays() -> None:
    calls = []

    def configs(x: Any, *, mode: str) -> Iterator[dict[str, int]]:
        calls.append((x, mode))
        for n in (1, x.shape[0]):
            yield {"n": n}

    @quarantune.autotune(configs, rep=1)
    @functools.partial(jax.jit, static_argnames=["n", "mode"])
    def fn(x: Any, mode: str, n: int = 1) -> Any:
        if n == 1:
            raise ArithmeticError(mode)
        return x * n

    np.testing.assert_array_equal(fn(X, mode="a"), X * 4)
    np.testing.assert_array_equal(fn(X[:3], mode="a"), X[:3] * 3)
    assert fn.lookup(X, mode="a") == {"n": 4}
    assert set(calls) == {(jax.ShapeDtypeStruct((size,), jnp.float32), "a") for size in (4, 3)}


def test_help_shows_every_option_by_name_the_common_ones_first() -> None:
    names = [field.name for field in dataclasses.fields(Options)]
    shown = inspect.signature(quarantune.autotune).parameters
    assert list(shown) == ["configs", *names]
    assert shown["timeout"].default == Options().timeout
    assert list(inspect.signature(quarantune.AutoTuner).parameters) == ["fn", "configs", "on_progress", *names]
    contextual = inspect.signature(quarantune.contextual_autotune).parameters
    assert (contextual["rep"].default, "prune_fn" in contextual, "numerics" in contextual) == (5, False, True)
    text = inspect.getdoc(quarantune.autotune) or ""
    listed = re.findall(r"^- `(\w+)`:", text, flags=re.MULTILINE)
    assert sorted(listed) == sorted(names)
    first = text.partition("Advanced")[0]
    assert [name for name in listed if f"- `{name}`:" in first] == names[:12]


def test_tuners_print_what_they_are(tmp_path: Path) -> None:
    fn = choosy(name="kernels.scale")
    assert repr(fn) == "<Autotuned kernels.scale: 2 configs of n>"
    assert repr(quarantune.AutoTuner(fn, lambda x: [{"n": 2}], name="s")) == "<AutoTuner s: configs made for each call>"
    assert repr(quarantune.contextual_autotune(lambda x: x, name="f")) == "<Contextual f: the kernels that it calls>"
    assert repr(quarantune.TuningCache(tmp_path)) == f"TuningCache({str(tmp_path)!r})"
    assert not {"forget", "function", "result"} & set(dir(fn))
    assert {"tune", "lookup", "default", "tune_for", "fit", "options"} <= set(dir(fn))


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize("call", ["call", "tune", "lookup", "method"])
def test_a_missing_argument_names_the_function_and_hides_our_frames(call: str) -> None:
    @quarantune.autotune([{"n": 1}], name="kernels.add")
    @functools.partial(jax.jit, static_argnames=["n"])
    def add(x: Any, y: Any, *, scale: float = 1.0, n: int = 1) -> Any:
        return x + y

    called = {"call": add, "tune": add.tune, "lookup": add.lookup, "method": add.__get__(X)}[call]
    given = () if call == "method" else (X,)
    with pytest.raises(TypeError) as caught:
        called(*given)
    assert str(caught.value) == "kernels.add: missing a required argument: 'y': it takes (x, y, scale=1.0)"
    (own,) = [frame for frame in caught.traceback if frame.path == Path(__file__)]
    rest = [frame for frame in caught.traceback if frame is not own]
    assert [str(frame.path) for frame in rest if frame.name != "__call__"] == []
    assert len(rest) <= (call == "method")


def test_editors_know_every_option() -> None:
    assert OptionKeywords.__annotations__.keys() == Options.__annotations__.keys()
    assert typing.get_type_hints(OptionKeywords) == typing.get_type_hints(Options)
    only_autotune = OptionKeywords.__annotations__.keys() - ContextualKeywords.__annotations__.keys()
    assert only_autotune == {"max_device_memory", "check_batch", "objective", "prune_fn"}
    assert SettingKeywords.__annotations__.keys() == Settings.__annotations__.keys()


def test_the_authors_functions_run_once_per_cold_call(sweeps: list[str]) -> None:
    ran: list[str] = []

    def configs(x: Any) -> list[dict[str, int]]:
        ran.append("configs")
        return [{"n": 2}, {"n": 3}]

    def key(x: Any) -> str:
        ran.append("key_fn")
        return "any"

    def prune(config: dict[str, int], x: Any) -> bool:
        ran.append("prune_fn")
        return config["n"] == 2

    np.testing.assert_array_equal(choosy(configs, key_fn=key, prune_fn=prune, ref_fn=None)(X), X * 2)
    assert sorted(ran) == ["configs", "key_fn", "prune_fn", "prune_fn"]
    assert len(sweeps) == 1


def test_prune_fn_drops_configs_before_a_worker_is_spent(sweeps: list[str]) -> None:
    seen = []

    def prune(config: dict[str, int], x: Any) -> bool:
        seen.append((config["n"], x))
        return config["n"] > 1

    result = choosy({"n": [0, 2, 1]}, prune_fn=prune).tune(X)
    assert [trial.outcome for trial in result.trials] == [Outcome.PRUNED, Outcome.OK, Outcome.PRUNED]
    assert result.trials[0].phase is None
    assert sorted(n for n, _ in seen) == [0, 1, 2], "each config is seen once"
    assert {x for _, x in seen} == {jax.ShapeDtypeStruct((4,), jnp.float32)}
    assert result.failures == {"pruned": 2}


def test_an_error_in_prune_fn_reaches_only_that_calls_caller(sweeps: list[str]) -> None:
    broken = [True]

    def prune(config: dict[str, int], x: Any) -> bool:
        if broken:
            raise KeyError("a bug in prune_fn")
        return True

    fn = choosy(prune_fn=prune)
    with pytest.raises(KeyError, match="a bug in prune_fn") as caught:
        fn(X)
    (note,) = caught.value.__notes__
    assert note.startswith("prune_fn of ")
    assert note.endswith(" raised this for the config n=1")
    assert sweeps == []
    broken.clear()
    np.testing.assert_array_equal(fn(X), X * 2)


@pytest.mark.usefixtures("no_process")
def test_pruning_everything_fails_with_the_fix() -> None:
    fn = choosy(prune_fn=lambda config, x: False)
    with pytest.raises(quarantune.TuningFailedError, match=r"prune_fn dropped all 2 configs.*let it keep") as caught:
        fn(X)
    assert [trial.outcome for trial in caught.value.trials] == [Outcome.PRUNED] * 2


# --- failing ------------------------------------------------------------------------------------------------


def test_a_sweep_whose_configs_all_fail_raises_and_is_kept(sweeps: list[str]) -> None:
    fn = hopeless()
    for spelt in (lambda: fn(X), lambda: fn(x=X), lambda: jax.jit(fn)(X)):
        with pytest.raises(quarantune.TuningFailedError) as caught:
            spelt()
        assert isinstance(caught.value, RuntimeError)
        message = str(caught.value)
        assert message.startswith("All 2 configs failed")
        assert "n=1 and 1 more: error (compile) ArithmeticError: n=1 is bad (test_autotune.py:" in message
        assert [trial.outcome for trial in caught.value.trials] == [Outcome.ERROR] * 2
        assert "shape" in caught.value.key
    assert len(sweeps) == 1
    with pytest.raises(quarantune.TuningFailedError):
        fn.tune(X)
    assert len(sweeps) == 2
    with pytest.raises(quarantune.TuningFailedError):
        fn(X[:2])
    assert len(sweeps) == 3
    np.testing.assert_array_equal(fn(X, n=0), X)


def test_failed_sweeps_leave_no_process_descriptor_or_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))

    def left() -> tuple[list[int], int, list[str]]:
        return left_of(psutil.Process()), len(os.listdir("/proc/self/fd")), os.listdir(temporary)

    choosy()(X)
    assert eventually(lambda: len(left_of(psutil.Process())) == 1), "only the template remains"
    before = left()
    for call in (hopeless(), jax.jit(hopeless()), hopeless().tune):
        with pytest.raises(quarantune.TuningFailedError):
            call(X)
        assert eventually(lambda: left() == before)
    np.testing.assert_array_equal(choosy(name="next")(X), X * 2)
    assert eventually(lambda: left() == before)


@pytest.mark.slow
def test_a_remembered_failure_keeps_no_array_alive() -> None:
    fn = hopeless()

    def call() -> weakref.ref[Any]:
        x = jnp.asarray(X)
        with pytest.raises(quarantune.TuningFailedError):
            fn(x)
        return weakref.ref(x)

    left = call()
    gc.collect()
    assert left() is None


# --- the memory of calls ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Shape:
    """A static argument."""

    rows: int


class Layer:
    """A layer whose method takes the instance as a static argument."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layer) and other.rows == self.rows

    def __hash__(self) -> int:
        return hash(self.rows)

    @quarantune.autotune([{"n": 2}], rep=1, ref_fn=None)
    @jax.jit(static_argnames=["self", "n"])
    def scale(self, x: Any, n: int = 1) -> Any:
        return x * n


def shaped(**options: Any) -> quarantune.Autotuned:
    @quarantune.autotune([{"n": 2}], rep=1, ref_fn=None, **options)
    @jax.jit(static_argnames=["shape", "n"])
    def scale(x: Any, shape: Any, n: int = 1) -> Any:
        return x * n

    return scale


def around_shaped() -> Any:
    inner = shaped(name="inner")

    @quarantune.contextual_autotune(rep=1, ref_fn=None)
    @jax.jit(static_argnames=["shape"])
    def outer(x: Any, shape: Any) -> Any:
        return inner(x, shape)

    return outer


def by_keyword(fn: Any) -> Callable[[Any], object]:
    return lambda shape: fn(X, shape=shape)


STATICS: dict[str, Callable[[], tuple[Callable[[Any], object], type]]] = {
    "positional": lambda: (functools.partial(shaped(), X), Shape),
    "keyword": lambda: (by_keyword(shaped()), Shape),
    "key_fn": lambda: (functools.partial(shaped(key_fn=lambda x: {"rows": 1}), X), Shape),
    "of JAX arrays": lambda: (functools.partial(shaped(), jnp.asarray(X)), Shape),
    "instance": lambda: (lambda layer: layer.scale(X), Layer),
    "contextual": lambda: (functools.partial(around_shaped(), X), Shape),
}


@pytest.mark.parametrize("name", STATICS)
def test_cleared_caches_of_jax_keep_no_static_argument_alive(name: str) -> None:
    fn, kind = STATICS[name]()
    static: Any = kind(3)
    fn(static)
    fn(static)
    left = weakref.ref(static)
    del static
    jax.clear_caches()
    gc.collect()
    assert left() is None
    fn(kind(3))


CLEAR: dict[str, Callable[[Any, Path], object]] = {
    "function": lambda fn, _: fn.clear_cache(),
    "cache": lambda _, directory: quarantune.TuningCache(directory).clear(),
    "tune": lambda fn, _: fn.tune(X, Shape(1)),
}


@pytest.mark.parametrize("name", CLEAR)
def test_clearing_a_function_empties_its_memory_of_calls(name: str, cache_dir: Path) -> None:
    fn = shaped()
    fn(jnp.asarray(X), Shape(1))
    assert fn._memo
    CLEAR[name](fn, cache_dir)
    assert not fn._memo
    assert not fn._last[-1]


@pytest.mark.long
@pytest.mark.slow
def test_the_memory_of_calls_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quarantune.api.autotune._MOST_REMEMBERED", 2, raising=False)
    monkeypatch.setattr("quarantune.answers.ladder._MOST_LOCKS", 2)
    shapes, statics, outer = choosy(name="shapes"), shaped(name="statics"), around_shaped()
    for fn in (shapes, statics, outer):
        for size in range(1, 5):
            args = (jnp.ones(size), Shape(size))[: 1 if fn is shapes else 2]
            for _ in range(2):
                np.testing.assert_array_equal(fn(*args), 2 * args[0])
            assert len(fn._memo) <= 2
            assert len(fn._tuner.ladder._locks) <= 2
    assert len(shapes._last[-1]) <= 2
    for size in range(1, 5):
        with jax.make_user_context(None)(size):
            shapes(X)
        assert len(shapes._memo) <= 2


@pytest.mark.slow
def test_results_found_in_files_are_bounded_in_memory(
    monkeypatch: pytest.MonkeyPatch, sweeps: list[str], cache_dir: Path
) -> None:
    monkeypatch.setattr("quarantune.answers.memory._MOST_REMEMBERED", 3)
    first, second = choosy(), choosy()
    for size in range(1, 6):
        first(np.ones(size, np.float32))
    tuned = len(sweeps)
    for _ in range(2):
        for size in range(1, 6):
            assert second.lookup(np.ones(size, np.float32)) == {"n": 2}
            assert len(second._tuner.rungs.memory.answers) <= 3
    second.tune(np.ones(9, np.float32))
    quarantune.TuningCache(cache_dir)._store.clear(second.name)  # type: ignore[union-attr]
    for size in range(1, 6):
        first(np.ones(size, np.float32))  # results tuned in this process stay
    assert len(sweeps) == tuned + 1


# --- cached calls -------------------------------------------------------------------------------------------

_watched: list[str] | None = None


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if _watched is not None and event in ("open", "os.listdir", "os.scandir", "subprocess.Popen", "os.fork"):
        _watched.append(f"{event} {arguments}")


sys.addaudithook(_watch)


@pytest.fixture
def watched() -> Iterator[Callable[[], list[str]]]:
    """Records the files this process opens and the processes it starts."""
    global _watched

    def start() -> list[str]:
        global _watched
        _watched = []
        return _watched

    yield start
    _watched = None


def test_a_cached_call_touches_no_file_and_starts_no_process(watched: Callable[[], list[str]], cache_dir: Path) -> None:
    @quarantune.autotune({"n": [1]}, rep=1)
    @functools.partial(jax.jit, static_argnames=["n", "mode"])
    def fn(x: Any, y: Any = 1.0, mode: str = "a", n: int = 1) -> Any:
        return jax.tree.map(lambda leaf: leaf * n * y, x)

    x = jnp.asarray(X)
    calls: list[Callable[[], Any]] = [
        lambda: fn(x),
        lambda: fn(x=x),
        lambda: fn(X, 2.0),
        lambda: fn({"a": [x, X]}),
        lambda: fn(x, mode="b"),
        lambda: fn(x, n=3),
    ]
    for call in calls:
        call()
    shutil.rmtree(cache_dir)
    events = watched()
    for call in calls:
        jax.block_until_ready(call())
    assert events == []
    for call in calls:
        jax.jit(call)()
    assert fn.lookup(x) == {"n": 1}
    assert [event for event in events if "'/sys/" not in event] == []  # JAX reads the CPU's kind there
    assert not cache_dir.exists()


def test_a_first_call_searches_for_no_garbage_while_it_imports(tmp_path: Path) -> None:
    program = """
        import functools, gc, sys
        import jax
        import jax.numpy as jnp
        import quarantune

        def note(phase, info):
            frame = sys._getframe().f_back
            while frame is not None:
                if frame.f_code.co_name == "<module>":
                    importing.add(frame.f_globals["__name__"])
                frame = frame.f_back

        @quarantune.autotune({"n": [1, 2]})
        @functools.partial(jax.jit, static_argnames="n")
        def fn(x, n=1):
            return x * n

        x, importing = jnp.ones(4), set()
        gc.set_threshold(1)
        gc.callbacks.append(note)
        import wave
        assert fn.lookup(x) is None
        gc.callbacks.remove(note)
        assert "wave" in importing
        assert "quarantune.answers.ladder" in sys.modules
        assert not [name for name in importing if name.startswith("quarantune.")], importing
        assert gc.isenabled()
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(program))
    python("-W", "error", tmp_path / "program.py", JAX_PLATFORMS="cpu")


def test_a_new_function_object_finds_the_cached_result(sweeps: list[str]) -> None:
    choosy()(X)
    again = choosy()
    assert again.lookup(X) == {"n": 2}
    np.testing.assert_array_equal(again(X), X * 2)
    assert len(sweeps) == 1


# --- names --------------------------------------------------------------------------------------------------


def test_the_cache_file_is_named_after_module_and_qualname(cache_dir: Path) -> None:
    choosy()(X)
    (file,) = cache_dir.glob("*.json")
    assert file.name.startswith("test_autotune.choosy")
    assert "scale" in file.name


def test_the_name_option_names_the_cache_file(cache_dir: Path) -> None:
    choosy(name="my-kernel")(X)
    assert [file.name for file in cache_dir.glob("*.json")] == ["my-kernel.json"]


def test_a_script_is_named_after_its_file(tmp_path: Path, cache_dir: Path) -> None:
    script = tmp_path / "some_script.py"
    script.write_text(
        textwrap.dedent(
            """
            import functools, jax, quarantune
            @quarantune.autotune({"n": [1]})
            @functools.partial(jax.jit, static_argnames=["n"])
            def kernel(x, n: int = 1): return x
            print(repr(kernel))
            """
        )
    )
    assert python(script).strip() == "<Autotuned some_script.kernel: 1 config of n>"


# --- travelling ---------------------------------------------------------------------------------------------


def test_pickle_carries_a_function_of_a_module_by_name() -> None:
    for pickler in (pickle, cloudpickle):
        assert pickler.loads(pickler.dumps(misdeeds.kernel)) is misdeeds.kernel


def test_a_closure_can_be_copied_as_it_can_be_sent(sweeps: list[str]) -> None:
    fn = choosy([{"n": 1}, {"n": 2}])
    for again in (copy.copy, copy.deepcopy):
        np.testing.assert_array_equal(again(fn)(X), X * 2)
    assert len(sweeps) == 1


def test_cloudpickle_carries_a_closure_that_still_tunes(sweeps: list[str]) -> None:
    factor = 3.0

    @quarantune.autotune(({"n": n} for n in (1, 2)), rep=1, name="travelled")
    @functools.partial(jax.jit, static_argnames=["n"])
    def fn(x: Any, n: int = 1) -> Any:
        if n != 2:
            raise ArithmeticError(n)
        return x * factor

    travelled = cloudpickle.loads(cloudpickle.dumps(fn))
    np.testing.assert_array_equal(travelled(X), X * 3)
    np.testing.assert_array_equal(travelled.lower(X).compile()(X), X * 3)
    assert travelled.lookup(X) == {"n": 2}
    assert fn.lookup(X) == {"n": 2}
    assert len(sweeps) == 1


# --- threads ------------------------------------------------------------------------------------------------


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Returns the results of calls that start together, each in its own thread."""
    barrier = threading.Barrier(len(calls))

    def start(call: Callable[[], Any]) -> Any:
        barrier.wait()
        try:
            return call()
        except quarantune.TuningFailedError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(start, calls))


@pytest.mark.parametrize("disable_cache", ["0", "1"])
def test_threads_that_call_a_cold_function_share_one_sweep(
    disable_cache: str, sweeps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUARANTUNE_DISABLE_CACHE", disable_cache)
    fn = choosy()
    for result in at_once(*[lambda: fn(X)] * 4):
        np.testing.assert_array_equal(result, X * 2)
    assert len(sweeps) == 1


def test_threads_also_share_a_failed_sweep(sweeps: list[str]) -> None:
    fn = hopeless()
    results = at_once(*[lambda: fn(X)] * 3)
    assert [type(result) for result in results] == [quarantune.TuningFailedError] * 3
    assert len(sweeps) == 1


def test_threads_may_tune_different_functions_and_shapes_at_once(sweeps: list[str]) -> None:
    one, two = choosy(name="one"), choosy(name="two")
    results = at_once(lambda: one(X), lambda: two(X), lambda: one(X[:2]), lambda: jax.jit(two)(X[:3]))
    for result, size in zip(results, (4, 4, 2, 3), strict=True):
        np.testing.assert_array_equal(result, X[:size] * 2)
    assert sorted(sweeps) == ["one", "one", "two", "two"]


@pytest.mark.parametrize("tune", [lambda fn: quarantune.autotune({"n": [1]})(fn).name, cache_name])
def test_a_jitted_partial_is_named_after_its_tuning_module(tune: Callable[..., str]) -> None:
    def softmax(x: Any, axis: int = 0, n: int = 1) -> Any:
        return x

    name = tune(jax.jit(functools.partial(softmax, axis=1), static_argnames=["n"]))
    assert name == f"{__name__}.softmax"
