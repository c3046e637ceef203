"""Workers run a function with the values that the caller's program has set in the modules it reaches."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers import SUPPORT, child_environ, python
from shared_python import SharedPython

import quarantune
from quarantune.transport import program_values

pytestmark = pytest.mark.clients  # its programs use absl

MODULES = {
    "mysettings": """
import dataclasses, enum, functools
import numpy as np

CAUSAL = False
TABLE = {}
SIZES = [1, 2]
WEIGHTS = np.zeros(3)

class Config:
    def __init__(self):
        self.depth = 1
        self.inner = {"scale": 1}

    def factor(self):
        return self.inner["scale"]

@dataclasses.dataclass
class Fields:
    depth: int = 1

class Scaled:
    scale = 1

class Order(enum.Enum):
    ROWS = 0
    COLUMNS = 1

CONFIG, FIELDS, ORDER = Config(), Fields(), Order.ROWS

def body(x):
    raise RuntimeError("the function of a fresh import")

def later(x):
    return x + 1

@functools.singledispatch
def size_of(value):
    raise RuntimeError(f"{type(value)} is not registered")

def remembers(function):
    notes = []
    def wrapper(x):
        return function(x, notes)
    wrapper.notes = notes
    return wrapper

@remembers
def noted(x, notes):
    return notes
""",
    "mykernels": """
import functools, os
import jax, jax.numpy as jnp, numpy as np
import quarantune
import mysettings
from mysettings import TABLE, CONFIG, FIELDS
from absl import flags

FLAGS = flags.FLAGS
HOLDER = flags.DEFINE_integer("held", 1, "")
flags.DEFINE_bool("causal", False, "")


tuned = lambda fn: quarantune.autotune({"n": [1, 2]}, rep=1, warmup=0)(jax.jit(fn, static_argnames=["n"]))

def imported():
    from mysettings import CAUSAL
    return CAUSAL

def expect(value, wanted):
    if value != wanted:
        raise RuntimeError(f"{value}, not {wanted}")
""",
}

CASES = {
    "a setting": ("mysettings.CAUSAL", "mysettings.CAUSAL = True", "True"),
    "a setting of a module that the function imports": (
        "imported()",
        "mysettings.CAUSAL = 5",
        "5",
    ),
    "a filled dict": ("TABLE", "mysettings.TABLE['a'] = {'b': 1}", "{'a': {'b': 1}}"),
    "a list": ("mysettings.SIZES", "mysettings.SIZES.append(3)", "[1, 2, 3]"),
    "a numpy array": ("mysettings.WEIGHTS.sum()", "mysettings.WEIGHTS[:] = 1", "3"),
    "a field of an object": ("CONFIG.depth", "mysettings.CONFIG.depth = 2", "2"),
    "a field that a method reads": ("CONFIG.factor()", "mysettings.CONFIG.inner['scale'] = 2", "2"),
    "a field of a dataclass": ("FIELDS.depth", "mysettings.FIELDS.depth = 2", "2"),
    "an attribute of a class": ("mysettings.Scaled.scale", "mysettings.Scaled.scale = 2", "2"),
    "an enum member": ("mysettings.ORDER.name", "mysettings.ORDER = mysettings.Order.COLUMNS", "'COLUMNS'"),
    "a patched function": ("mysettings.body(3)", "mysettings.body = lambda x: 2 * x", "6"),
    "a patched function of a library": ("flags.doc_to_help('x')", "mykernels.flags.doc_to_help = lambda x: 7", "7"),
    "a function that is wrapped": (
        "mysettings.body(3)",
        "import functools; body = mysettings.body\n"
        "mysettings.body = functools.wraps(body)(lambda x, held=[2]: x * held[0])",
        "6",
    ),
    "a function that is jitted later": (
        "mysettings.later.__class__.__name__",
        "mysettings.later = mykernels.jax.jit(mysettings.later)",
        "'PjitFunction'",
    ),
    "a registration of singledispatch": (
        "mysettings.size_of('x')",
        "mysettings.size_of.register(str, lambda value: 5)",
        "5",
    ),
    "a closure": ("mysettings.noted(0)", "mysettings.noted.notes.append(4)", "[4]"),
    "flags": ("FLAGS.causal", "mykernels.FLAGS(['program', '--causal'])", "True"),
    "a flag's holder": ("HOLDER.value", "mykernels.FLAGS(['program', '--held=3'])", "3"),
    "a flag that the program defines": (
        "FLAGS.late",
        "mykernels.flags.DEFINE_string('late', '', ''); mykernels.FLAGS(['program', '--late=x'])",
        "'x'",
    ),
    "the environment": ("os.environ['SOME_SIZE']", "import os; os.environ['SOME_SIZE'] = '64'", "'64'"),
}

PROGRAM = """
import jax.numpy as jnp
import mysettings, mykernels
X = jnp.arange(4.0)
"""


def write(directory: Path, **programs: str) -> None:
    """Writes the modules and the programs."""
    for name, text in {**MODULES, **programs}.items():
        (directory / f"{name}.py").write_text(textwrap.dedent(text))


def run(directory: Path, *arguments: str, **environ: str) -> str:
    """Runs Python in a directory, in a new process; returns the output."""
    return python(*arguments, cwd=directory, path=[directory, SUPPORT], **environ)


@pytest.fixture(scope="module")
def shared() -> Iterator[SharedPython]:
    """The process of all programs that need no fresh one; each program defines its flags again."""
    process = SharedPython(environ=child_environ(SUPPORT), anew=["absl"])
    yield process
    process.close()


def run_shared(shared: SharedPython, directory: Path) -> str:
    """Runs the program in a directory, asserts that it succeeds, and returns its output."""
    done = shared.run(directory / "program.py", cwd=directory)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("cases", [[*CASES][:7], [*CASES][7:14], [*CASES][14:]], ids=["data", "code", "flags"])
def test_workers_have_the_values_that_the_program_has_set(
    tmp_path: Path, shared: SharedPython, cases: list[str]
) -> None:
    # One module of kernels for each case, so that each sweep reaches one value.
    modules, script = {}, [PROGRAM, "import quarantune", "failed = []"]
    for index, name in enumerate(cases):
        read, act, wanted = CASES[name]
        modules[f"case{index}"] = f"""
from mykernels import *

@tuned
def kernel(x, n: int = 1):
    expect({read}, {wanted})
    return x * n / n
"""
        script.append(
            f"import case{index}\n{act}\n"
            f"try:\n    case{index}.kernel(X)\n"
            f"except Exception as error:\n    failed.append(({name!r}, str(error)))\n"
        )
    write(tmp_path, **modules, program="\n".join([*script, "print(failed)"]))
    assert run_shared(shared, tmp_path) == "[]\n"


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("environ", [{"QUARANTUNE_START_METHOD": "spawn"}, {"BEGINS": "jnp.zeros(3) + 1"}])
def test_workers_that_load_the_call_themselves_have_the_values(tmp_path: Path, environ: dict[str, str]) -> None:
    begins = (
        "begun = eval(os.environ.get('BEGINS', '0'))  # a module that starts a backend is not imported by a template"
    )
    script = f"{SET}import kernels\nkernels.by_setting(X)\nprint(kernels.by_setting.lookup(X) is not None)"
    write(tmp_path, kernels=KERNELS + begins, program=script)
    assert run(tmp_path, "program.py", **environ) == "True\n"


READS = """
from mykernels import *

@tuned
def kernel(x, n: int = 1):
    return x * n / n if {read} else x

@tuned
def other(x, n: int = 1):
    return x * n / n
"""


@pytest.mark.parametrize(
    ("act", "message"),
    [
        ("mysettings.CAUSAL = (n for n in ())", r"mysettings.CAUSAL is <generator .*, and False in a fresh import"),
        pytest.param(
            "mysettings.CAUSAL = [bytes([i]) * (1 << 20) for i in range(65)]",
            "mysettings.CAUSAL is .*more than 64 MiB",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "del mysettings.CAUSAL; mysettings.CAUSAL = jax.devices()[0]",
            r"mysettings.CAUSAL is CpuDevice.*, and False in",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_value_that_cannot_travel_is_refused_by_its_name(
    tmp_path: Path, shared: SharedPython, act: str, message: str
) -> None:
    script = f"""{PROGRAM}
import re, threading, jax, psutil, quarantune, reads
{act}
try:
    reads.kernel(X)
except quarantune.TuningFailedError as error:
    assert re.search({message!r}, str(error)), error
else:
    raise AssertionError("another program was tuned")
assert reads.kernel.lookup(X) is None
reads.other(X)
assert reads.other.lookup(X) is not None
from aftermath import eventually, left_of
assert eventually(lambda: len(left_of(psutil.Process())) == 1), "the template alone is left"
"""
    write(tmp_path, reads=READS.format(read="mysettings.CAUSAL"), program=script)
    run_shared(shared, tmp_path)


CHOOSES = """
import functools

def double(x):
    return 2 * x

def triple(x):
    return 3 * x

def choose(chosen):
    global by_name, by_closure

    if chosen is double:
        def by_name(x):
            return 2 * x
    else:
        def by_name(x):
            return 3 * x

    def by_closure(x):
        return chosen(x)

choose(triple)
CALLS = {"by_name": lambda x: by_name(x), "by_closure": lambda x: by_closure(x)}
"""


@pytest.mark.parametrize("name", ["by_name", "by_closure"])
def test_a_function_that_its_module_has_defined_anew_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    module = f"chooses_{name}"
    write(tmp_path, **{module: CHOOSES})
    monkeypatch.syspath_prepend(tmp_path)
    chooses: Any = importlib.import_module(module)
    unchanged = program_values.collect([chooses.CALLS[name]])
    chooses.choose(chooses.double)
    values = program_values.collect([chooses.CALLS[name]])
    del sys.modules[module]
    program_values.adopt(unchanged)
    with pytest.raises(program_values.ProgramValueError, match=rf"{module}\.{name} is <function"):
        program_values.adopt(values)


def test_an_object_that_raises_when_pickled_is_the_workers_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import multiprocessing\nLOCK = multiprocessing.Lock()\ndef locks(x):\n    with LOCK:\n        return x\n"
    write(tmp_path, has_a_lock=source)
    monkeypatch.syspath_prepend(tmp_path)
    module: Any = importlib.import_module("has_a_lock")
    values = program_values.collect([module.locks])
    del sys.modules["has_a_lock"]
    program_values.adopt(values)
    there: Any = importlib.import_module("has_a_lock")
    assert there.LOCK is not module.LOCK
    assert there.locks(3) == 3


@pytest.mark.long
@pytest.mark.slow
def test_a_filled_cache_of_unsendable_values_is_no_obstacle(tmp_path: Path, shared: SharedPython) -> None:
    read = "expect(mysettings.TABLE.setdefault('scale', 3), 3) or True"
    script = f"""{PROGRAM}
import threading, reads
mysettings.TABLE.update(own=(n for n in ()), compiled=jnp.sin, array=X, scale=3)
reads.kernel(X)
assert reads.kernel.lookup(X) is not None
"""
    write(tmp_path, reads=READS.format(read=read), program=script)
    run_shared(shared, tmp_path)


def test_two_names_of_one_object_stay_one_and_others_stay_apart(tmp_path: Path, shared: SharedPython) -> None:
    kernel = """
from mykernels import *

@tuned
def kernel(x, n: int = 1):
    # Both names had the dict of mysettings, until the program gave one of them another.
    expect((TABLE, mysettings.TABLE, mysettings.SIZES is mysettings.CAUSAL), ({"old": 1}, {"new": 2}, True))
    return x * n / n
"""
    script = f"""{PROGRAM}
import reads
mysettings.TABLE["old"] = 1
mysettings.TABLE = {{"new": 2}}
mysettings.CAUSAL = mysettings.SIZES
mysettings.SIZES.append(3)
reads.kernel(X)
"""
    write(tmp_path, reads=kernel, program=script)
    run_shared(shared, tmp_path)


@pytest.mark.long
@pytest.mark.slow
def test_workers_get_the_programs_own_jax_array(tmp_path: Path, shared: SharedPython) -> None:
    kernel = """
from mykernels import *
import arrays

@tuned
def kernel(x, n: int = 1):
    expect(arrays.BIAS.__array__().tolist(), [5.0, 5.0])
    return x * n / n
"""
    script = f"{PROGRAM}\nimport arrays, reads\narrays.BIAS = jnp.full(2, 5.0)\nreads.kernel(X)"
    write(tmp_path, arrays="import jax.numpy as jnp\nBIAS = jnp.zeros(2)", reads=kernel, program=script)
    run_shared(shared, tmp_path)


VALUES = [
    ("FLAGS.causal", "mykernels.FLAGS(['program', '--causal'])"),
    ("CONFIG.factor()", "mysettings.CONFIG.inner['scale'] = 0"),
    ("mysettings.CAUSAL", "mysettings.CAUSAL = True"),
    ("HOLDER.value > 1", "mykernels.FLAGS(['program', '--held=2'])"),
    ("CONFIG.depth", "mysettings.CONFIG.depth = 0"),
    ("TABLE", "mysettings.TABLE['a'] = 1"),
]
"""Expressions that a kernel reads, each with the code by which a program sets its value."""


@pytest.mark.parametrize("values", [VALUES[:2], pytest.param(VALUES[2:], marks=pytest.mark.long)], ids=["two", "four"])
def test_a_result_for_one_value_is_not_used_for_another(tmp_path: Path, values: list[tuple[str, str]]) -> None:
    modules = {f"reads{index}": READS.format(read=read) for index, (read, _) in enumerate(values)}
    acts = "\n    ".join(act for _, act in values)
    script = f"""{PROGRAM}
import sys, {", ".join(modules)}
mykernels.FLAGS(['program'])
if sys.argv[1] == "set":
    {acts}
for module in ({", ".join(modules)}):
    print(module.kernel.lookup(X) is not None)
    module.kernel(X)
"""
    write(tmp_path, **modules, program=script)
    found = [set(run(tmp_path, "program.py", argument).split()) for argument in ("unset", "set", "unset")]
    assert found == [{"False"}, {"False"}, {"True"}]


@pytest.mark.long
def test_a_result_found_under_another_prune_fn_is_not_used() -> None:
    jitted = jax.jit(lambda x, n=1: x * n / n, static_argnames=["n"])
    x = np.arange(4.0)
    for allowed in (1, 2, 1):
        rule = (lambda config, x: config["n"] < 2) if allowed == 1 else (lambda config, x: config["n"] > 1)
        kernel = quarantune.autotune({"n": [1, 2]}, rep=1, warmup=0, name="pruned", prune_fn=rule)(jitted)
        kernel(x)
        assert kernel.lookup(x) == {"n": allowed}


KERNELS = """
from mykernels import *

@tuned
def by_setting(x, n: int = 1):
    expect(mysettings.CAUSAL, True)
    return x * n / n

@tuned
def by_flag(x, n: int = 1):
    expect(FLAGS.causal and HOLDER.value, 3)
    return x * n / n
"""
SET = f"""{PROGRAM}
mysettings.CAUSAL = True
mykernels.FLAGS(["program", "--causal", "--held=3"])
"""
TUNE = """
import kernels
with quarantune.settings(**options):
    for kernel in (kernels.by_setting, kernels.by_flag, by_setting, by_flag):
        kernel(X)
        assert kernel.lookup(X) is not None
print("tuned")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("script", marks=pytest.mark.long),
        "module",
        pytest.param("notebook", marks=pytest.mark.long),
        pytest.param("dask", marks=pytest.mark.engines),
    ],
)
def test_all_kinds_of_programs_may_set_values(tmp_path: Path, kind: str) -> None:
    # Some kernels are in an imported module, others in the program.
    cells = [SET, KERNELS, "options = {}", TUNE]
    write(tmp_path, kernels=KERNELS, program="\n".join(cells))
    if kind == "script":
        assert run(tmp_path, "program.py") == "tuned\n"
    elif kind == "module":
        assert run(tmp_path, "-m", "program") == "tuned\n"
    elif kind == "notebook":
        pytest.importorskip("nbclient")
        write(tmp_path, program=NOTEBOOK.format(cells=cells))
        assert "tuned" in run(tmp_path, "program.py")
    else:
        pytest.importorskip("distributed")
        cells[2] = DASK
        main = "\n".join(cells)
        write(tmp_path, program=f"if __name__ == '__main__':\n{textwrap.indent(main, '    ')}")
        assert run(tmp_path, "program.py") == "tuned\n"


NOTEBOOK = """
import nbformat
from nbclient import NotebookClient

book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in {cells!r}])
NotebookClient(book, timeout=200, kernel_name="python3").execute()
print(book.cells[-1].outputs)
"""
DASK = """
from distributed import Client, LocalCluster

cluster = LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None)
options = {"executor": Client(cluster).get_executor()}
"""
