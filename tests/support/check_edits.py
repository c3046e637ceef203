"""Edits kernels at random, and counts saved results that another program uses and programs that are measured again.

It tunes twelve kernels of the examples and of JAX once. Then it imports each edit in place of the original, and
compares the lowered text of every config with the original's. A saved result is *misused* if a call would run it
although the text of the winner differs. An edit is *measured again* if it changes no text and a sweep still measures a
config of it.

    python tests/support/check_edits.py [--edits N] [--seed S] [--kernels NAME ...]
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import dataclasses
import functools
import importlib
import os
import random
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.experimental.pallas.ops.gpu as jax_kernels
import jax.numpy as jnp
import numpy as np

import quarantune

EXAMPLES = Path(__file__).parents[2] / "examples"
JAX_KERNELS = Path(jax_kernels.__path__[0])


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel to edit.

    Attributes:
        file: the file with its code.
        call: the jitted function to tune, as code for a module with the file's content.
        space: the configs.
        shapes: the shapes of the arguments.
    """

    file: Path
    call: str
    space: dict[str, list[Any]]
    shapes: tuple[tuple[int, ...], ...]


def _wrapped(signature: str, tunables: str, body: str) -> str:
    names = [name.partition(":")[0].strip() for name in tunables.split(",")]
    return f"@jax.jit(static_argnames={names})\ndef tuned({signature}, {tunables}):\n    return {body}\n"


KERNELS: dict[str, Kernel] = {
    "matmul": Kernel(
        EXAMPLES / "matmul.py",
        _wrapped("a, b", "BM: int = 32, BK: int = 32", "matmul(a, b, interpret=True, BM=BM, BN=32, BK=BK)"),
        {"BM": [32, 64], "BK": [32, 64]},
        ((64, 64), (64, 64)),
    ),
    "attention": Kernel(
        EXAMPLES / "attention.py",
        _wrapped("q, k, v", "q_chunk: int = 16, k_chunk: int = 16", "attention(q, k, v, q_chunk, k_chunk)"),
        {"q_chunk": [16, 32], "k_chunk": [16, 32]},
        ((2, 64, 8),) * 3,
    ),
    "rmsnorm_rope": Kernel(
        EXAMPLES / "rmsnorm_rope.py",
        _wrapped("x, w, c, s", "BT: int = 4", "rmsnorm_rope(x, w, c, s, interpret=True, BT=BT, BH=2)"),
        {"BT": [4, 8]},
        ((16, 4, 8), (8,), (16, 4), (16, 4)),
    ),
    "gated_mlp": Kernel(
        EXAMPLES / "gated_mlp.py",
        _wrapped("x, g, u", "BM: int = 32, BK: int = 16", "gated_mlp(x, g, u, interpret=True, BM=BM, BN=32, BK=BK)"),
        {"BM": [32, 64], "BK": [16, 32]},
        ((64, 32), (32, 64), (32, 64)),
    ),
    "normalize": Kernel(
        EXAMPLES / "contextual.py",
        _wrapped("x, s", "ROWS: int = 8", "normalize(x, s, interpret=True, ROWS=ROWS)"),
        {"ROWS": [8, 16]},
        ((32, 16), (16,)),
    ),
    "project": Kernel(
        EXAMPLES / "contextual.py",
        _wrapped("x, w", "BM: int = 32, BN: int = 32", "project(x, w, interpret=True, BM=BM, BN=BN)"),
        {"BM": [32, 64], "BN": [32, 64]},
        ((64, 32), (32, 64)),
    ),
    "jax softmax": Kernel(
        JAX_KERNELS / "softmax.py",
        _wrapped("x", "rows: int = 2", "jnp.concatenate([softmax(x[i:i + rows], interpret=True) for i in (0, rows)])"),
        {"rows": [2, 3]},
        ((6, 32),),
    ),
    "jax rms_norm": Kernel(
        JAX_KERNELS / "rms_norm.py",
        _wrapped("x, w, b", "rows: int = 2", "rms_norm(x.reshape(rows, -1, 32), w, b, interpret=True)"),
        {"rows": [2, 3]},
        ((6, 32), (32,), (32,)),
    ),
    "jax layer_norm": Kernel(
        JAX_KERNELS / "layer_norm.py",
        _wrapped("x, w, b", "rows: int = 2", "layer_norm(x.reshape(rows, -1, 32), w, b, interpret=True)"),
        {"rows": [2, 3]},
        ((6, 32), (32,), (32,)),
    ),
    "jax attention": Kernel(
        JAX_KERNELS / "attention.py",
        _wrapped(
            "q, k, v",
            "b: int = 16",
            "mha(q, k, v, None, block_sizes=BlockSizes(block_q=b, block_k=b), interpret=True)",
        ),
        {"b": [16, 32]},
        ((1, 32, 2, 16),) * 3,
    ),
    "jax decode": Kernel(
        JAX_KERNELS / "decode_attention.py",
        _wrapped("q, k, v", "n: int = 2", "mqa(q, k, v, block_h=16, block_k=16, k_splits=n, interpret=True)"),
        {"n": [2, 4]},
        ((1, 16, 16), (1, 64, 16), (1, 64, 16)),
    ),
    "jax decode reference": Kernel(
        JAX_KERNELS / "decode_attention.py",
        _wrapped("q, k, v", "n: int = 1", "mqa_reference(q * n, k, v)"),
        {"n": [1, 2]},
        ((1, 16, 16), (1, 64, 16), (1, 64, 16)),
    ),
}


# --- edits ---

_SWAPS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mod}
_COMPARISONS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq}


def _pick(rng: random.Random, tree: ast.Module, kind: Any) -> Any:
    return rng.choice([node for node in ast.walk(tree) if isinstance(node, kind)])


def _functions(tree: ast.Module) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def a_number(rng: random.Random, tree: ast.Module) -> None:
    """Changes a number."""
    numbers = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and type(node.value) in (int, float)]
    node = rng.choice(numbers)
    node.value = rng.choice([node.value + 1, node.value * 2, node.value * 1.0000001 if node.value else 1e-9])


def a_flag(rng: random.Random, tree: ast.Module) -> None:
    """Turns a boolean around."""
    node = rng.choice([node for node in ast.walk(tree) if isinstance(node, ast.Constant) and type(node.value) is bool])
    node.value = not node.value


def an_operator(rng: random.Random, tree: ast.Module) -> None:
    """Replaces an operator."""
    node = rng.choice([node for node in ast.walk(tree) if isinstance(node, ast.BinOp) and type(node.op) in _SWAPS])
    node.op = _SWAPS[type(node.op)]()


def operands(rng: random.Random, tree: ast.Module) -> None:
    """Exchanges two operands."""
    node = _pick(rng, tree, ast.BinOp)
    node.left, node.right = node.right, node.left


def a_comparison(rng: random.Random, tree: ast.Module) -> None:
    """Replaces a comparison."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARISONS]
    node = rng.choice(found)
    node.ops[0] = _COMPARISONS[type(node.ops[0])]()


def a_branch(rng: random.Random, tree: ast.Module) -> None:
    """Exchanges two branches, or removes one."""
    node = _pick(rng, tree, ast.If)
    node.body, node.orelse = (node.orelse, node.body) if node.orelse else ([ast.Pass()], node.body[:0])


def a_function_of_jax(rng: random.Random, tree: ast.Module) -> None:
    """Calls another function of JAX."""
    other = {"exp": "exp2", "sum": "max", "max": "sum", "maximum": "minimum", "sin": "cos", "ones": "zeros"}
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in other]
    node = rng.choice(found)
    node.attr = other[node.attr]


def a_statement(rng: random.Random, tree: ast.Module) -> None:
    """Removes a statement."""
    function = rng.choice(_functions(tree))
    function.body.pop(rng.randrange(len(function.body)))
    function.body = function.body or [ast.Pass()]


def a_local_name(rng: random.Random, tree: ast.Module) -> None:
    """Renames a local variable."""
    function = rng.choice(_functions(tree))
    stored = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    name = rng.choice(sorted(stored))
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.id == name:
            node.id = f"{name}_renamed"


def a_helper_name(rng: random.Random, tree: ast.Module) -> None:
    """Renames a helper function."""
    function = rng.choice([node for node in tree.body if isinstance(node, ast.FunctionDef)])
    name = function.name
    function.name = f"{name}_renamed"
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == name:
            node.id = function.name


def a_docstring(rng: random.Random, tree: ast.Module) -> None:
    """Adds a docstring."""
    rng.choice(_functions(tree)).body.insert(0, ast.Expr(ast.Constant(f"Edited {rng.random()}.")))


def an_unused_local(rng: random.Random, tree: ast.Module) -> None:
    """Adds a local variable that nothing reads."""
    rng.choice(_functions(tree)).body.insert(0, ast.parse(f"unread = {rng.randrange(9)} * 7").body[0])


def an_unused_argument(rng: random.Random, tree: ast.Module) -> None:
    """Adds an argument that nothing reads."""
    arguments = rng.choice(_functions(tree)).args
    arguments.kwonlyargs.append(ast.arg("unread"))
    arguments.kw_defaults.append(ast.Constant(rng.choice([None, 1, "text"])))


def an_unused_global(rng: random.Random, tree: ast.Module) -> None:
    """Adds a global, or an import, that nothing reads."""
    line = rng.choice([f"UNREAD = {rng.random()}", "import colorsys", "def unread(x):\n    return x"])
    tree.body.insert(rng.randrange(_after_future(tree), len(tree.body)), ast.parse(line).body[0])


def the_order(rng: random.Random, tree: ast.Module) -> None:
    """Exchanges two functions of the module."""
    places = [index for index, node in enumerate(tree.body) if isinstance(node, ast.FunctionDef)]
    one, other = rng.sample(places, 2)
    tree.body[one], tree.body[other] = tree.body[other], tree.body[one]


def an_annotation(rng: random.Random, tree: ast.Module) -> None:
    """Annotates an argument."""
    function = rng.choice([node for node in _functions(tree) if node.args.args])
    rng.choice(function.args.args).annotation = ast.Constant("an annotation")


def lines(rng: random.Random, tree: ast.Module) -> None:
    """Adds comments and empty lines."""
    function = rng.choice(_functions(tree))
    added = f"# edited {rng.random()}\n" + rng.choice(["", "\n", "# and more\n"]) * rng.randrange(20)
    # Names stay as they are. Comments need no indentation.
    function.body.insert(rng.randrange(len(function.body)), ast.Expr(ast.Name(added)))


def _after_future(tree: ast.Module) -> int:
    return 1 + max((i for i, node in enumerate(tree.body) if getattr(node, "module", "") == "__future__"), default=0)


EDITS: tuple[Callable[[random.Random, ast.Module], None], ...] = (
    *(a_number, a_number, a_flag, an_operator, operands, a_comparison, a_branch, a_function_of_jax, a_statement),
    *(a_local_name, a_helper_name, a_docstring, an_unused_local, an_unused_argument, an_unused_global),
    *(the_order, an_annotation, lines),
)


# --- one edit ---


def source_of(kernel: Kernel, edit: Callable[[ast.Module], None] | None = None) -> str:
    """Returns the code of a kernel's module, edited."""
    tree = ast.parse(kernel.file.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if getattr(node, "name", "") != "main" and not isinstance(node, ast.If)]
    for node in _functions(tree):
        node.decorator_list = [each for each in node.decorator_list if "quarantune" not in ast.unparse(each)]
    if edit is not None:
        edit(tree)
    tuned = f"tuned = quarantune.autotune({kernel.space}, warmup=0, rep=2, name='edited', ref_fn=None)(tuned)\n"
    imports = "import jax\nimport jax.numpy as jnp\nimport quarantune\n"
    return f"{ast.unparse(ast.fix_missing_locations(tree))}\n\n{imports}\n{kernel.call}\n{tuned}"


class Edited:
    """A module in a new directory, written, imported and looked up again for each edit."""

    def __init__(self, kernel: Kernel, directory: Path) -> None:
        self.kernel, self.directory = kernel, directory
        self._time = 1_700_000_000
        rng = np.random.default_rng(0)
        self.arguments = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in kernel.shapes]

    def load(self, source: str) -> Any:
        """Returns the tuned function of a source."""
        path, self._time = self.directory / "edited_module.py", self._time + 1
        path.write_text(source, encoding="utf-8")
        os.utime(path, (0, self._time))
        sys.modules.pop("edited_module", None)
        importlib.invalidate_caches()
        return importlib.import_module("edited_module").tuned

    def texts(self, tuned: Any) -> dict[str, str]:
        """Returns the lowered text of each config, with numbers in place of function names."""
        return {str(config): self.text(tuned, config) for config in _grid(self.kernel.space)}

    def text(self, tuned: Any, config: dict[str, Any]) -> str:
        """Returns the lowered text of one config."""
        text = tuned.__wrapped__.lower(*self.arguments, **config).as_text()
        # One name for all would hide a call of a different function.
        numbers: dict[str, int] = {}
        return re.sub(r"@[\w.]+", lambda name: f"@{numbers.setdefault(name[0], len(numbers))}", text)


def _grid(space: dict[str, list[Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{}]
    for name, values in space.items():
        found = [{**config, name: value} for config in found for value in values]
    return found


@contextlib.contextmanager
def cache(directory: Path) -> Iterator[None]:
    """Makes the block use a copy of a cache directory."""
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(directory, copy, dirs_exist_ok=True)
        with quarantune.settings(cache_dir=copy, progress=False):
            yield


def check(edited: Edited, originals: dict[str, str], saved: Path, source: str, *, in_trace: bool) -> list[str]:
    """Returns the columns of the table that apply to one edit."""
    try:
        tuned = edited.load(source)
        texts = edited.texts(tuned)
    except Exception:  # the edit cannot be imported or traced
        return ["not traced"]
    is_equal = texts == originals
    found = ["equal" if is_equal else "different"]
    with cache(saved), quarantune.settings(on_miss="error"):
        config = tuned.lookup(*edited.arguments)
        if config is not None and texts[str(dict(config))] != originals[str(dict(config))]:
            found.append("misused")
        if in_trace:
            tuned = edited.load(source)
            try:
                jax.jit(jax.grad(lambda x: tuned(x, *edited.arguments[1:]).sum()))(edited.arguments[0])
                used = tuned.lookup(*edited.arguments)
                found.append("used in a trace")
                if used is None or texts[str(dict(used))] != originals[str(dict(used))]:
                    found.append("misused")
            except quarantune.CacheMissError:
                pass
            except Exception:  # the edit has no gradient
                found.append("no gradient")
    found.append("hit" if config is not None else "miss")
    if is_equal and config is None:
        with cache(saved):
            trials = edited.load(source).tune(*edited.arguments, resume=True).trials
        if measured := sum(getattr(trial, "recalled_from", None) is None for trial in trials):
            found += ["measured again"] + ["configs measured"] * measured
    return found


def run(names: list[str], edits: int, seed: int) -> dict[str, collections.Counter[str]]:
    """Returns the counts of each kernel."""
    warnings.simplefilter("ignore")
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = True
    jax.config.update("jax_platforms", "cpu")
    table = {}
    for name in names:
        kernel, rng, counts = KERNELS[name], random.Random(f"{seed} {name}"), collections.Counter[str]()
        with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryDirectory() as saved:
            sys.path.insert(0, directory)
            edited = Edited(kernel, Path(directory))
            with quarantune.settings(cache_dir=saved, progress=False):
                tuned = edited.load(source_of(kernel))
                tuned.tune(*edited.arguments)
                originals = edited.texts(tuned)
            while counts["edits"] < edits:
                edit = rng.choice(EDITS)
                try:
                    source = source_of(kernel, functools.partial(edit, rng))
                except IndexError:  # the kernel has nothing for this edit
                    continue
                if source == source_of(kernel):
                    continue
                result = check(edited, originals, Path(saved), source, in_trace=counts["edits"] % 10 == 0)
                counts["edits"] += 1
                counts.update(result)
                if {"misused", "measured again"} & set(result):
                    counts[f"{edit.__name__}: {' '.join(dict.fromkeys(result))}"] += 1
            sys.path.remove(directory)
        table[name] = counts
    return table


COLUMNS = ("edits", "not traced", "equal", "different", "hit", "miss", "used in a trace", "misused", "measured again")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edits", type=int, default=84, help="edits of each kernel")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kernels", nargs="*", default=[*KERNELS])
    given = parser.parse_args()
    print(f"{'':24}" + "".join(f"{column:>16}" for column in COLUMNS))
    total = collections.Counter[str]()
    for name in given.kernels:
        (counts,) = run([name], given.edits, given.seed).values()
        total += counts
        print(f"{name:24}" + "".join(f"{counts[column]:16,}" for column in COLUMNS), flush=True)
    print(f"{'all':24}" + "".join(f"{total[column]:16,}" for column in COLUMNS))
    for name in sorted(total.keys() - {*COLUMNS, "no gradient"}):
        print(f"  {name}: {total[name]}")


if __name__ == "__main__":
    main()
