"""A saved result is never used for a changed program, and always found for an unchanged one.

Each program has two states, and workers tune it in the first. A new process in the second state must compute the same
as the untuned function. A new process in the first state must find the result. Programs are modules that a driver
imports, or parts of one script that runs as `__main__`.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers import python


class Program(NamedTuple):
    """One program.

    Attributes:
        setup: the code of its module before the kernel; `EXACT` stands for True or False by the state.
        exact: an expression in the kernel that is true in the first state only.
        argument: the static argument of the kernel, `how`, as an expression.
        enter: code that enters the second state, run after the import of its module.
    """

    setup: str = ""
    exact: str = "how(x)"
    argument: str = "None"
    enter: str = ""


_FUNCTION = "def how(x): return EXACT"
_CLASS = """
class Base:
    def run(self, x): return True
class How(Base):
    def run(self, x): return EXACT
    def __call__(self, x): return EXACT
    def __mul__(self, x): return EXACT
    @property
    def shown(self): return EXACT
    @classmethod
    def of(cls, x): return EXACT
    @staticmethod
    def at(x): return EXACT
    def __hash__(self): return 1
    def __eq__(self, other): return type(other) is How
"""
_DATACLASS = """
@dataclasses.dataclass(frozen=True)
class How:
    size: int = 1
    def run(self, x): return EXACT
"""
_HOLDER = "class Holder: pass\nholder = Holder()\n"

PROGRAMS: dict[str, Program] = {
    # Code that is reached through an argument
    "function": Program(_FUNCTION, "how(x)", "how"),
    "lambda in a dict": Program("HOW = {'a': lambda x: EXACT}", "how(x)", "HOW['a']"),
    "closure": Program("def make(n):\n    def how(x): return n == 1 and EXACT\n    return how", "how(x)", "make(1)"),
    "partial": Program("def run(n, x): return EXACT", "how(x)", "functools.partial(run, 1)"),
    "nested partials": Program(
        "def run(n, m, x): return EXACT", "how(x)", "functools.partial(functools.partial(run, 1), 2)"
    ),
    "partial of JAX": Program(_FUNCTION, "how(x)", "jax.tree_util.Partial(how)"),
    "wrapped function": Program(
        f"{_FUNCTION}\n@functools.wraps(how)\ndef wrapped(x): return how(x)", "how(x)", "wrapped"
    ),
    "jitted helper": Program("@jax.jit\ndef how(x): return x if EXACT else x * 0", "how", "how"),
    "class": Program(_CLASS, "how.at(x)", "How"),
    "class method": Program(_CLASS, "how.of(x)", "How"),
    "static method": Program(_CLASS, "how.at(x)", "How()"),
    "bound method": Program(_CLASS, "how(x)", "How().run"),
    "overridden method": Program(_CLASS, "how.run(x)", "How()"),
    "callable object": Program(_CLASS, "how(x)", "How()"),
    "property": Program(_CLASS, "how.shown", "How()"),
    "operator": Program(_CLASS, "how * x", "How()"),
    "static dataclass": Program(_DATACLASS, "how.run(x)", "How()"),
    "tuple of functions": Program(_FUNCTION, "how[0](x)", "(how,)"),
    "named tuple": Program(f"{_FUNCTION}\nPair = collections.namedtuple('Pair', 'a b')", "how.a(x)", "Pair(how, 1)"),
    "value of an enum": Program("How = enum.Enum('How', {'A': EXACT})", "how.value", "How.A"),
    "attribute of a function": Program(f"{_FUNCTION}\ndef run(x): return run.how(x)\nrun.how = how", "how(x)", "run"),
    "default of a function": Program("def how(x, exact=EXACT): return exact", "how(x)", "how"),
    # State that the kernel reads by name
    "os.environ": Program("", "os.environ.get('KERNEL_MODE') != 'quick'", enter="os.environ['KERNEL_MODE'] = 'quick'"),
    "os.getenv": Program("", "os.getenv('KERNEL_MODE') != 'quick'", enter="os.environ['KERNEL_MODE'] = 'quick'"),
    "expanded variable": Program(
        "", "os.path.expandvars('$KERNEL_MODE') != 'quick'", enter="os.environ['KERNEL_MODE'] = 'quick'"
    ),
    "sys.argv": Program("", "'quick' not in sys.argv", enter="sys.argv.append('quick')"),
    "context variable": Program(
        "mode = contextvars.ContextVar('mode', default=True)", "mode.get()", enter="module.mode.set(False)"
    ),
    "attribute by a computed name": Program(
        _HOLDER, "getattr(holder, 'mo' + 'de', True)", enter="module.holder.mode = False"
    ),
    "class attribute by a computed name": Program(
        _HOLDER, "getattr(Holder, 'mo' + 'de', True)", enter="module.Holder.mode = False"
    ),
    "attribute of a library": Program("", "getattr(collections, 'mo' + 'de', True)", enter="collections.mode = False"),
    "builtins": Program("", "not hasattr(builtins, 'quick_mode')", enter="builtins.quick_mode = True"),
    "sys.modules": Program("", "'quick_mode' not in sys.modules", enter="sys.modules['quick_mode'] = sys"),
    "thread": Program("local = threading.local()", "getattr(local, 'exact', True)", enter="module.local.exact = False"),
    "file": Program("", "not os.path.exists('quick')", enter="open('quick', 'w').close()"),
    "working directory": Program(
        "", "not os.getcwd().endswith('quick')", enter="os.makedirs('d/quick', exist_ok=True); os.chdir('d/quick')"
    ),
    "numpy.geterr": Program("", "np.geterr()['over'] != 'ignore'", enter="np.seterr(over='ignore')"),
    "decimal": Program("", "decimal.getcontext().prec != 5", enter="decimal.getcontext().prec = 5"),
    "recursion limit": Program("", "sys.getrecursionlimit() != 5000", enter="sys.setrecursionlimit(5000)"),
    "level of a logger": Program(
        "", "logging.getLogger('kernels').level != 10", enter="logging.getLogger('kernels').setLevel(10)"
    ),
    "filter of warnings": Program(
        "",
        "('always', ImportWarning) not in [(each[0], each[2]) for each in warnings.filters]",
        enter="warnings.simplefilter('always', ImportWarning)",
    ),
    "option of JAX": Program(
        "", "not jax.config.jax_log_compiles", enter="jax.config.update('jax_log_compiles', True)"
    ),
    "garbage collector": Program("", "gc.isenabled()", enter="gc.disable()"),
    "attribute of JAX": Program("", "not hasattr(jax, 'quick_mode')", enter="jax.quick_mode = True"),
    "open closure": Program(
        "def make():\n    box = [True]\n    return (lambda: box[0]), box\nread, box = make()\nread_of = {'a': read}",
        "globals()['read_of']['a']()",
        enter="module.box[0] = False",
    ),
}

_HEAD = """
import builtins, collections, contextvars, dataclasses, decimal, enum, functools, gc, importlib, json, logging, os, sys
import threading, warnings
import jax, jax.numpy as jnp, numpy as np, quarantune

def total(x, rows, exact):
    if not isinstance(exact, (bool, np.bool_)):
        return exact(x).sum() + 0 * rows
    if exact:
        return sum(x[i : i + rows].sum() for i in range(0, len(x), rows))
    return x[: len(x) // rows * rows].reshape(-1, rows).sum() * 1.0
"""

_PROGRAM = """
{setup}

@quarantune.autotune({{"rows": [1, 5]}}, warmup=0, rep=2, name={name!r})
@functools.partial(jax.jit, static_argnames=["rows", "how"])
def kernel(x, how=None, rows: int = 1):
    return total(x, rows, {exact})

argument = {argument}
"""

_DRIVER = """
def check(state, name, module, kernel, argument, enter):
    warnings.filters[:] = log_filters
    warnings.filterwarnings("ignore", message=".*saved result is for another program")
    warnings.filterwarnings("ignore", message=".*not tuned for this call")
    start = os.getcwd(), dict(os.environ), list(sys.argv), sys.getrecursionlimit(), np.geterr(), gc.isenabled()
    if state == "second":
        exec(enter)
    with quarantune.settings(progress=False, on_miss={"tune": "tune", "first": "error", "second": "default"}[state]):
        try:
            found = kernel(x, argument)
            in_trace = jax.jit(jax.grad(lambda x: kernel(x, argument)))(x)
            config = kernel.lookup(x, argument)
            untuned = jax.value_and_grad(lambda x: kernel.default(x, argument))(x)
            is_right = bool(found == untuned[0]) and bool((in_trace == untuned[1]).all())
            print(json.dumps([name, config is not None, is_right]))
        except Exception as error:
            print(json.dumps([name, f"{type(error).__name__}: {error}"[:300], False]))
    os.chdir(start[0])
    os.environ.clear()
    os.environ.update(start[1])
    sys.argv[:] = start[2]
    sys.setrecursionlimit(start[3])
    np.seterr(**start[4])
    (gc.enable if start[5] else gc.disable)()

state = sys.argv.pop(1)
x = np.arange(12, dtype=np.float32)
log_filters = list(warnings.filters)
"""


def run(state: str, names: list[str], directory: Path, *, is_script: bool) -> dict[str, tuple[bool | str, bool]]:
    """Returns for each program whether its result was found, and whether its calls were right."""
    scripts, checks = "", ""
    for number, name in enumerate(names):
        program = PROGRAMS[name]
        setup = program.setup.replace("EXACT", str(state != "second"))
        source = _PROGRAM.format(setup=setup, name=name, exact=program.exact, argument=program.argument)
        enter = program.enter
        if is_script:
            source, enter = (numbered(text, number, of=source) for text in (source, enter))
            scripts += source
            checks += "module = sys.modules['__main__']\n"
            checks += f"check(state, {name!r}, module, kernel_{number}, argument_{number}, {enter!r})\n"
        else:
            (directory / f"program_{number}.py").write_text(_HEAD + source)
            checks += f"module = importlib.import_module('program_{number}')\n"
            checks += f"check(state, {name!r}, module, module.kernel, module.argument, {enter!r})\n"
    driver = directory / "driver.py"
    driver.write_text(_HEAD + scripts + _DRIVER + checks)
    told = python(driver, state, path=[directory], cwd=directory, PYTHONDONTWRITEBYTECODE="1")
    lines = (json.loads(line) for line in told.splitlines() if line.startswith("["))
    return {name: (is_found, is_right) for name, is_found, is_right in lines}


def numbered(text: str, number: int, *, of: str) -> str:
    """Returns a text with a number after each name that the module `of` defines, so that many fit into one script."""
    defined = {node.name for node in ast.parse(of).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    targets = [target for node in ast.parse(of).body if isinstance(node, ast.Assign) for target in node.targets]
    defined |= {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}
    return re.sub(rf"(?:(?<=module\.)|(?<!\.))\b({'|'.join(defined)})\b", rf"\1_{number}", text)


def check(names: list[str], directory: Path, *, is_script: bool = False) -> None:
    tuned = run("tune", names, directory, is_script=is_script)
    assert {name: found for name, found in tuned.items() if found != (True, True)} == {}
    second = run("second", names, directory, is_script=is_script)
    assert {name: found for name, found in second.items() if found != (False, True)} == {}
    (directory / "quick").unlink(missing_ok=True)
    first = run("first", names, directory, is_script=is_script)
    assert {name: found for name, found in first.items() if found != (True, True)} == {}
    assert tuned.keys() == second.keys() == first.keys() == set(names)


@pytest.mark.slow
def test_a_result_is_used_for_its_program_alone(tmp_path: Path) -> None:
    check(["function", "os.environ", "context variable"], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "is_script",
    [
        pytest.param(False, id="modules", marks=pytest.mark.long),
        pytest.param(True, id="script", marks=pytest.mark.long),
    ],
)
def test_a_changed_program_never_runs_another_programs_result(tmp_path: Path, is_script: bool) -> None:
    assert len(PROGRAMS) >= 40
    check([*PROGRAMS], tmp_path, is_script=is_script)
