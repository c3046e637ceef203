"""Results are looked up in the user's cache, in read-only directories and in tables that packages ship."""

from __future__ import annotations

import functools
import json
import os
import shutil
import textwrap
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers import python
from store_servers import new_job, web_store

import quarantune
from quarantune import CacheMissError, CacheWarning
from quarantune.answers import nearest
from quarantune.answers.answer import Situation
from quarantune.buckets import orders
from quarantune.cache.entry_file import SCHEMA
from quarantune.cache.store import Store
from quarantune.calls.key import keyed
from quarantune.functions.versions import versions
from quarantune.tuning.starts import earlier_winners
from quarantune.values.codec import canonical_json
from quarantune.values.options import Options, table_directory

X = np.arange(8, dtype=np.float32)


def kernel(name: str = "scale", *, factor: int = 1, configs: Any = ({"n": 1}, {"n": 2}), **options: Any) -> Any:
    @quarantune.autotune(configs, name=name, **options)
    @functools.partial(jax.jit, static_argnames=["n", "mode"])
    def scale(x: Any, mode: str = "a", n: int = 1) -> Any:
        return x * factor + 0 * n

    return scale


def described(fn: Any, *args: Any, **kwargs: Any) -> Any:
    return keyed(fn._tuner.bind(args, kwargs))


def store_winner(directory: Path, fn: Any, n: int, *args: Any, key: str | None = None, **fields: Any) -> None:
    """Puts an entry into a directory, as tuning for this call would."""
    from quarantune.calls.call import space_of

    call = described(fn, *args)
    entry = {
        "config": {"n": n},
        "time_ms": 1.0,
        "key_values": call.readable,
        "fingerprint": fn.function.fingerprint.parts,
        "space": space_of(call.call.configs),
        "versions": versions(),
    }
    Store(directory).put(fn.name, call.id.device, key or call.id.key, entry | fields)


def on_path(*directories: Path | str, **others: Any) -> Any:
    return quarantune.settings(cache_path=os.pathsep.join(map(str, directories)), **others)


def files_of(directory: Path) -> dict[str, bytes]:
    return {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()}


def test_layers_answer_in_order_with_usable_entries_only(tmp_path: Path, cache_dir: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    store_winner(two, kernel(), 2, X)
    with on_path(Path("/" + 300 * "a")), pytest.warns(CacheWarning, match="aaa', which is not a directory"):
        assert kernel().lookup(X) is None
    with on_path(one, two), pytest.warns(CacheWarning, match="one', which is not a directory"):
        assert kernel().lookup(X) == {"n": 2}
    store_winner(one, kernel(), 1, X)
    with on_path(one, two):
        assert kernel().lookup(X) == {"n": 1}
        assert quarantune.AutoTuner(kernel(), [{"n": 1}, {"n": 2}], name="scale").run(X).from_cache is True
    store_winner(one, kernel(), 1, X, space={"configs": 3, "hash": "of another list"})
    with on_path(one, two):
        assert kernel().lookup(X) == {"n": 2}, "an entry for other configs is passed over"
    store_winner(cache_dir, kernel(), 1, X)
    with on_path(one, two):
        assert kernel().lookup(X) == {"n": 1}, "the user's own cache comes first"
    with on_path(two, disable_cache=True):
        assert kernel().lookup(X) is None


def test_an_exact_result_lacks_the_interval_of_the_ordinary_winner(cache_dir: Path) -> None:
    exact = {"config": {"n": 1}, "time_ms": 2.0, "bits": "same", "program": {}}
    store_winner(cache_dir, kernel(), 2, X, speedup_interval=[2.0, 3.0], default_time_ms=2.5, exact=exact)
    with quarantune.settings(numerics="bitwise"):
        (found,) = quarantune.tune_many([(kernel(), (X,))])
    assert (found.best_config, found.time_ms, found.speedup_interval) == ({"n": 1}, 2.0, None)


def test_a_thorough_layer_serves_before_another_sweep(tmp_path: Path, cache_dir: Path, sweeps: list[str]) -> None:
    def fn() -> Any:
        return kernel(search="random", max_trials=2)

    def searched(stopped: str, seen: int) -> dict[str, Any]:
        return {"stopped": stopped, "seen": seen, "space_size": 2, "budget": seen if stopped == "max_trials" else None}

    store_winner(cache_dir, fn(), 1, X, search=searched("max_trials", 1))
    store_winner(tmp_path / "layer", fn(), 2, X, search=searched("exhausted", 2))
    known = fn()
    with on_path(tmp_path / "layer"):
        assert known.lookup(X) == {"n": 1}, "the user's own comes first"
        known(X)
        assert known.lookup(X) == {"n": 2}, "it ended a search with a smaller budget than now"
    assert not sweeps


def test_a_url_is_a_layer_at_its_place(tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "FETCHING_S", 60.0)  # more than a busy machine needs
    new_job()
    store_winner(tmp_path / "served", kernel(), 2, X)
    store_winner(tmp_path / "last", kernel(), 1, X)
    served = {"scale.json": (tmp_path / "served" / "scale.json").read_bytes()}
    with web_store(served) as server, on_path(tmp_path / "none", server.url.parts.geturl(), tmp_path / "last"):
        with pytest.warns(CacheWarning, match="none', which is not a directory"):
            assert kernel().lookup(X) == {"n": 2}
        assert kernel().lookup(X) == {"n": 2}
        assert len(server.requests) == 1, "of one process and function"
        server.objects.clear()
        new_job()
        assert kernel().lookup(X) == {"n": 1}, "what is gone is not used"
        with quarantune.settings(on_miss="error"), pytest.raises(CacheMissError, match=f"asked: .*, {server.url}, "):
            kernel(factor=2)(X)
        store_winner(cache_dir, kernel(), 1, X[:4])
        assert kernel().lookup(X[:4]) == {"n": 1}
        assert len(server.requests) == 2, "no request if the user's cache has the result"
    new_job()


def test_a_read_only_layer_is_never_changed_even_if_damaged(tmp_path: Path, cache_dir: Path) -> None:
    layer = tmp_path / "layer"
    store_winner(layer, kernel("good"), 2, X, versions={"jax": "0.1"})
    (layer / "torn.json").write_text('{"cpu": {')
    (layer / "odd.json").write_text(json.dumps({"cpu": {"key": {"config": 3, "schema": SCHEMA}}}))
    for lock in layer.glob(".*"):
        lock.unlink()
    before = files_of(layer)
    with on_path(layer):
        assert kernel("good").lookup(X) == {"n": 2}, "a table of other versions is used without a warning"
        for name in ("torn", "odd"):
            with pytest.warns(CacheWarning, match="the file stays, because it is only read"):
                assert kernel(name).lookup(X) is None
    assert files_of(layer) == before
    assert not cache_dir.exists()


def test_a_miss_names_the_layers_and_the_nearest_difference(tmp_path: Path, cache_dir: Path) -> None:
    store_winner(tmp_path, kernel(factor=2), 2, X)
    with on_path(tmp_path, on_miss="error"):
        with pytest.raises(CacheMissError) as caught:
            kernel()(X)
        with pytest.raises(CacheMissError, match=f"none of these holds an entry: {cache_dir}, {tmp_path}; tune"):
            kernel("unknown")(X)
    text = str(caught.value)
    assert f"asked: {cache_dir}, {tmp_path}" in text
    assert f"the nearest entry in {tmp_path} differs in the function's closure:factor" in text


def test_an_entry_of_changed_code_is_a_seed_and_not_an_answer(tmp_path: Path) -> None:
    store_winner(tmp_path, kernel(factor=2), 2, X)
    store_winner(tmp_path, kernel(factor=3), 2, X)
    store_winner(tmp_path, kernel(factor=4), 7, X)
    store_winner(tmp_path, kernel(factor=5), 1, X[:4])
    fn = kernel()
    layers = fn._tuner.rungs.layers
    with on_path(tmp_path):
        call = described(fn, X)
        now = Situation.of(call.call)
        assert layers.find(call, now) is None
        assert earlier_winners(call, layers.entries(now)) == [{"n": 2}], "one winner: in this space, for this call"


# --- the nearest entry --------------------------------------------------------------------------------------


def a_key(*shape: int, dtype: str = "float32", mode: str = "a") -> str:
    return canonical_json({"call": {"x": {"shape": shape, "dtype": dtype}, "mode": mode}, "code": "c0de"})


@pytest.mark.parametrize(
    ("found", "doublings"),
    [
        (a_key(64, 64), 0),
        (a_key(32, 128), 2),
        (a_key(256, 16), 4),
        (a_key(257, 64), None),
        (a_key(64, 15), None),
        (a_key(0, 64), None),
        (a_key(10**400, 64), None),
        (a_key(64), None),
        (a_key(64, 64, dtype="bfloat16"), None),
        (a_key(64, 64, mode="b"), None),
        (a_key(64, 64).replace("c0de", "other"), None),
        ("no JSON", None),
    ],
)
def test_the_distance_of_two_calls_depends_on_their_sizes(found: str, doublings: float | None) -> None:
    away = nearest.distance(found, a_key(64, 64))
    assert (None if away is None else away[0]) == doublings


def test_the_smaller_of_two_equally_near_sizes_is_preferred() -> None:
    smaller, larger = (nearest.distance(a_key(size), a_key(64)) for size in (32, 128))
    assert smaller is not None
    assert larger is not None
    assert smaller < larger
    above, below = (nearest.distance(a_key(size), a_key(64)) for size in (65, 32))
    assert above is not None
    assert below is not None
    assert above < below, "but the nearer one wins"


def test_whole_numbers_from_a_key_fn_are_sizes() -> None:
    wanted, near, other = (
        canonical_json({"call": {"key_fn": {"m": m, "dtype": dtype}, "static": 4}, "code": "c"})
        for m, dtype in ((64, "f32"), (128, "f32"), (64, "f16"))
    )
    away = nearest.distance(near, wanted)
    assert away is not None
    assert away[0] == 1
    assert nearest.distance(other, wanted) is None
    assert nearest.distance(wanted.replace('"static":4', '"static":8'), wanted) is None


def test_the_nearest_entry_warns_once_and_is_not_saved(
    tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = tmp_path / "layer"
    monkeypatch.setenv("QUARANTUNE_CACHE_PATH", str(layer))
    fn = kernel(prune_fn=lambda config, x, mode: config["n"] < 3, configs=[{"n": 1}, {"n": 2}, {"n": 3}])
    store_winner(layer, fn, 3, X[:7])
    store_winner(layer, fn, 2, X[:4])
    store_winner(layer, fn, 1, X[:3])
    with pytest.raises(CacheMissError), quarantune.settings(on_miss="error"):
        fn(X)
    with quarantune.settings(on_miss="nearest"):
        with pytest.warns(CacheWarning, match=r'"shape":\[4\].*ON_MISS=nearest') as caught:
            np.testing.assert_array_equal(fn(X), fn(X))
        assert len(caught) == 1
        assert fn.lookup(X) is None
        tuner = quarantune.AutoTuner(fn, fn.function.configs, name="scale", prune_fn=fn._options.prune_fn)
        result = tuner.run(X)
        assert (result.best_config, result.from_cache, result.trials) == ({"n": 2}, "nearest", ())
        assert np.isnan(result.time_ms)
        with pytest.warns(CacheWarning, match="running with its defaults \\(ON_MISS=nearest\\)"):
            fn(np.ones(100, np.float32))
        with pytest.raises(CacheMissError):
            tuner.run(np.ones(100, np.float32))
    with pytest.raises(CacheMissError), quarantune.settings(on_miss="error"):
        fn(X)
    assert not cache_dir.exists()


def rows_of(x: Any, mode: str = "a") -> list[dict[str, Any]]:
    return [{"n": n} for n in range(1, len(x) + 1)]


def bits_of(x: Any, mode: str = "a") -> list[dict[str, Any]]:
    return [{"n": 1 << n} for n in range(3)]


@pytest.mark.parametrize(
    ("configs", "given"),
    [
        (rows_of, {}),
        (rows_of, {"key_fn": lambda x: {"rows": len(x)}}),
        (bits_of, {}),
        (lambda x: rows_of(x), {"prune_fn": lambda config, x: config["n"] < 5}),
    ],
)
def test_the_nearest_entry_gives_only_configs_the_call_has(tmp_path: Path, configs: Any, given: dict[str, Any]) -> None:
    name, x = f"made {tmp_path.name}", X[:4]  # each name warns once
    fn = kernel(name, configs=configs, **given)
    store_winner(tmp_path, fn, 5, X[:5])  # the nearest, but in no list for `x`
    store_winner(tmp_path, fn, 3 if configs is bits_of else 9, X[:3])  # also in no list
    with on_path(tmp_path, on_miss="nearest"):
        with (
            pytest.warns(CacheWarning, match="running with its defaults"),
            pytest.warns(CacheWarning, match="does not use the nearest entry: .* has the config") as why,
        ):
            fn(x)
        assert any("not among the call's configs" in str(each.message) for each in why)
        with pytest.raises(CacheMissError):
            quarantune.AutoTuner(fn, configs, name=name, **given).run(x)
        store_winner(tmp_path, fn, 4, X[:6])
        with pytest.warns(CacheWarning, match=r'"shape":\[6\]|"rows":6'):
            result = quarantune.AutoTuner(fn, configs, name=name, **given).run(x)
        assert (result.best_config, result.from_cache) == ({"n": 4}, "nearest")


def test_a_near_config_that_prune_fn_drops_is_refused_by_name(tmp_path: Path) -> None:
    fn = kernel("choosy", prune_fn=lambda config, x, mode: config["n"] < 3, configs=[{"n": 1}, {"n": 2}, {"n": 3}])
    store_winner(tmp_path, fn, 3, X[:4])
    store_winner(tmp_path, fn, 2, X[:3])
    says = r'"shape":\[3\].*refused: .*"shape":\[4\].* n=3, which prune_fn drops'
    with on_path(tmp_path, on_miss="nearest"), pytest.warns(CacheWarning, match=says):
        fn(X[:5])


def test_another_kind_of_device_is_never_the_nearest(tmp_path: Path) -> None:
    fn = kernel("foreign")
    store_winner(tmp_path, fn, 2, X[:4])
    (file,) = tmp_path.glob("*.json")
    (contents,) = json.loads(file.read_text()).values()
    file.write_text(json.dumps({"NVIDIA H200": contents}))
    with on_path(tmp_path, on_miss="nearest"), pytest.warns(CacheWarning, match="running with its defaults"):
        fn(X)


def test_the_nearest_entry_costs_later_calls_no_look_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fn, y = kernel("hot"), jax.numpy.asarray(X)
    store_winner(tmp_path, fn, 2, y[:4])
    monkeypatch.setenv("QUARANTUNE_CACHE_PATH", str(tmp_path))
    monkeypatch.setenv("QUARANTUNE_ON_MISS", "nearest")
    with pytest.warns(CacheWarning, match="nearest entry"):
        fn(y)
    shutil.rmtree(tmp_path)  # without the entry, a look-up would warn
    np.testing.assert_array_equal(fn(y), X)


# --- tables of packages -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["numpy", "numpy:", ":tables", "numpy:../jax", "numpy:/etc", "no_such_package:tables"])
def test_a_table_that_cannot_exist_is_refused_by_the_decorator(name: str) -> None:
    with pytest.raises(ValueError, match=r"is not valid: .*give a package|is not valid: give 'package:directory'"):
        kernel(tables=name)
    with pytest.raises(TypeError, match="give 'package:directory'"):
        kernel(tables=3)


def test_a_table_is_found_below_its_package_without_an_import() -> None:
    assert table_directory("numpy:tables") == Path(np.__file__).parent / "tables"
    assert table_directory("jax.experimental.pallas:a/b").parts[-4:] == ("experimental", "pallas", "a", "b")
    assert "tables" not in Options(tables="numpy:tables").deciding(), "results stay valid"


KERNELS = """
import functools, jax, quarantune

@quarantune.autotune({{"n": [1, 2, 3]}}, rep=1)
@functools.partial(jax.jit, static_argnames=["n"])
def double(x, n: int = 1):
    return x * {factor} + 0 * n

@quarantune.autotune({{"n": [1, 2]}}, rep=1, tables="shipping:more/tables")
@functools.partial(jax.jit, static_argnames=["n"])
def negate(x, n: int = 1):
    return 0 * n - x
"""
CALL = """
import numpy as np, quarantune
from shipping.kernels import double, negate
x = np.ones(8, np.float32)
"""


def run(place: Path, body: str, cache: Path, **environ: str) -> list[str]:
    """Runs a program that finds the packages in `place` installed, and returns the lines that it prints."""
    changes = {"QUARANTUNE_CACHE_DIR": str(cache), "JAX_PLATFORMS": "cpu", **environ}
    return python("-B", "-W", "error", "-c", CALL + textwrap.dedent(body), path=[place], **changes).splitlines()


def install(place: Path, *, factor: int = 2) -> Path:
    """Installs a package with two kernels, as pip would, and returns its directory."""
    package, about = place / "shipping", place / "shipping-1.0.dist-info"
    for directory in (package / "tables", package / "more" / "tables", about):
        directory.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text("")
    (package / "kernels.py").write_text(KERNELS.format(factor=factor))
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: shipping\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[quarantune.tables]\nshipping = shipping:tables\n")
    return package


@pytest.mark.slow
def test_a_package_answers_from_its_tables_and_writes_nothing(tmp_path: Path) -> None:
    place, author, user = tmp_path / "site-packages", tmp_path / "author", tmp_path / "user"
    package = install(place)
    won = run(
        place,
        f"""
        double(x), negate(x)
        cache = quarantune.TuningCache()
        cache.export({str(package / "tables")!r}, names="*.double")
        cache.export({str(package / "more" / "tables")!r}, names="*.negate")
        print(double.lookup(x), negate.lookup(x))
        """,
        author,
    )
    before = files_of(place)
    assert {name for name in before if name.endswith(".json")} == {
        "shipping/tables/shipping.kernels.double.json",
        "shipping/more/tables/shipping.kernels.negate.json",
    }
    directories = [path for path in place.rglob("*") if path.is_dir()]
    for directory in directories:
        directory.chmod(0o555)
    body = """
    assert (double(x)[0], negate(x)[0]) == (2, -1)
    print(double.lookup(x), negate.lookup(x))
    """
    try:
        assert run(place, body, user, QUARANTUNE_ON_MISS="error") == won
    finally:
        for directory in directories:
            directory.chmod(0o755)
    assert files_of(place) == before
    assert not user.exists()
    install(place, factor=3)
    missed, seeds = run(
        place,
        """
        from quarantune.answers.answer import Situation
        from quarantune.calls.key import keyed
        from quarantune.tuning.starts import earlier_winners
        from quarantune.values.blocks import current
        try:
            double(x)
        except quarantune.CacheMissError as error:
            print(error)
        resolver = double._tuner
        call = keyed(resolver.bind((x,), {}))
        seeds = earlier_winners(call, resolver.rungs.layers.entries(Situation.of(call.call)))
        print(*seeds, negate.lookup(x))
        """,
        user,
        QUARANTUNE_ON_MISS="error",
    )
    assert "the nearest entry in the table shipping:tables differs in the function's code" in missed
    assert [seeds] == won
