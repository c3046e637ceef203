"""Workers and their children find the names that the caller's program defines, and start no sweep of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import python
from kernel_scripts import KERNEL, run


@pytest.mark.slow
def test_tuning_during_an_import_is_refused_with_advice(tmp_path: Path) -> None:
    calls = {
        "tune_module": "kernel.tune(X)",
        "run_module": "quarantune.AutoTuner(plain, [{'n': 1}, {'n': 2}]).run(X)",
        "compile_module": "quarantune.compile_configs(kernel, [{'n': 1}], X)",
    }
    begin = "import warnings\nwarnings.simplefilter('error')\ndef plain(x, n):\n    return x * n\n"
    for name, call in calls.items():
        (tmp_path / f"{name}.py").write_text(f"{KERNEL}\n{begin}\n{call}\n")
    script = f"""
import importlib, sys
sys.path.insert(0, {str(tmp_path)!r})
for name in {list(calls)}:
    text = ""
    try:
        importlib.import_module(name)
    except UserWarning as warning:
        assert name == "compile_module"
        text = str(warning)
    except Exception as error:
        assert name != "compile_module"
        text = str(error)
        assert "__name__" in text, text
    assert "imports the module of a function to tune it" in text, text
"""
    run(script, cwd=tmp_path)


POOLS = """
from __future__ import annotations
import concurrent.futures, dataclasses, multiprocessing, os, pickle, sys, typing
import numpy as np
import quarantune

cannot_travel = (number for number in range(3))
SCALE = 2.0

class Box:
    class Inner:
        value = 3

@dataclasses.dataclass
class Holds:
    box: Box

def part(value): return value * SCALE

def in_processes(x, method, workers=1):
    context = multiprocessing.get_context(method)
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        return np.array(list(pool.map(part, x.tolist())))

def in_pool(x, method, workers=1):
    with multiprocessing.get_context(method).Pool(workers) as pool:
        return np.array(pool.map(part, x.tolist()))

def by_name(x, box, workers: Number = 1) -> Box:
    import __main__
    assert typing.get_type_hints(by_name) == {"workers": int, "return": Box}
    assert typing.get_type_hints(Holds) == {"box": Box}
    assert type(pickle.loads(pickle.dumps(box))) is Box.Inner
    return x * sys.modules["__main__"].SCALE * __main__.SCALE

Number = int

def tuned(function, *args):
    expected = function(*args)
    result = quarantune.AutoTuner(function, {"workers": [1, 2]}, warmup=0, rep=1).run(*args)
    assert [trial.outcome for trial in result.trials] == ["ok", "ok"], result.trials
    np.testing.assert_array_equal(result.fn(*args), expected)

if __name__ == "__main__":
    for method in sys.argv[1:]:
        tuned(in_processes, np.arange(4.0), method)
        tuned(in_pool, np.arange(4.0), method)
    tuned(by_name, np.arange(4.0), Box.Inner())
    print("done")
"""


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(("program/pools.py", "fork"), marks=pytest.mark.slow),
        pytest.param(("-m", "program.pools", "spawn", "forkserver"), marks=pytest.mark.long),
        pytest.param(("program/pools.py", "spawn", "forkserver"), marks=pytest.mark.long),
    ],
)
def test_configs_start_pools_and_find_the_programs_names(command: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "pools.py").write_text(POOLS)
    output = python(*command, cwd=tmp_path, path=[tmp_path], QUARANTUNE_CACHE_DIR=str(tmp_path / "cache"))
    assert output.splitlines()[-1] == "done"


OF_ONE_NAME = """
import sys
import numpy as np
import quarantune

SCALE = {scale}
def helper(x): return x * SCALE

def kernel(x, path, n=1):
    if path:
        assert quarantune.TuningResult.load(path, trusted=True).fn(x, "")[0] == 200
    assert helper(1) == {scale}
    return helper(x) + SCALE

path = sys.argv[1] if {scale} == 2 else ""
result = quarantune.AutoTuner(kernel, {{"n": [1, 2]}}, warmup=0, rep=1).run(np.ones(3), path)
print([trial.outcome.value for trial in result.trials])
if not path:
    result.save(sys.argv[1])
"""


@pytest.mark.slow
def test_a_config_may_load_a_result_of_equally_named_functions(tmp_path: Path) -> None:
    for scale in (100, 2):
        (script := tmp_path / f"by_{scale}.py").write_text(OF_ONE_NAME.format(scale=scale))
        output = python(script, tmp_path / "saved", QUARANTUNE_CACHE_DIR=str(tmp_path / "cache"))
        assert output.splitlines()[-1] == "['ok', 'ok']"


UNGUARDED = """
import multiprocessing, os, sys
import numpy as np
import quarantune

with open(sys.argv[1], "a") as file:
    print(__name__, file=file)

def part(value): return value * 2

def pool(x, method, workers=1):
    with multiprocessing.get_context(method).Pool(workers) as pool:
        return np.array(pool.map_async(part, x.tolist()).get(20))

for method in ("fork", "spawn"):
    try:
        tuner = quarantune.AutoTuner(pool, {"workers": [1]}, warmup=0, rep=1, timeout=40)
        print([trial.outcome.value for trial in tuner.run(np.arange(4.0), method).trials])
    except quarantune.TuningFailedError as error:
        print("refused" if "was asked to tune" in error.trials[0].log_tail else error)
"""


@pytest.mark.long
@pytest.mark.slow
def test_children_that_run_a_program_again_start_no_sweeps(tmp_path: Path) -> None:
    (script := tmp_path / "unguarded.py").write_text(UNGUARDED)
    ran = tmp_path / "ran"
    output = python(script, ran, QUARANTUNE_CACHE_DIR=str(tmp_path / "cache"))
    assert output.splitlines() == ["['ok']", "refused"]
    assert set(ran.read_text().split()) == {"__main__", "__mp_main__"}
    assert ran.read_text().split().count("__main__") == 1
