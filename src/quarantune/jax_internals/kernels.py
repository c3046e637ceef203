"""Pallas kernels inside a traced program: their grids, the bytes they move, and the program with smaller grids."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval

from quarantune.jax_internals.jax_traces import equations

_KERNEL = "pallas_call"
_IN_VMEM = ("default", "vmem")
"""The memory spaces of blocks and scratch that a TPU's kernel has on the chip."""
_Params: TypeAlias = Mapping[str, Any]


def free_steps(jaxpr: Any) -> list[int]:
    """Returns how many steps the grid of each Pallas kernel has along the axes that may be made smaller.

    These are the axes declared `parallel`, and the axes that every output depends on. The figure at index n is for
    `kernel_n` of `with_smaller_grids`.

    Raises:
        ValueError: the steps of a kernel, or the turns of a loop in it, depend on data.
    """
    found = _kernels(jaxpr)
    for params in found:
        if not all(isinstance(size, int) for size in params["grid_mapping"].grid):
            raise ValueError("its grid depends on data")
        if any(equation.primitive.name == "while" for equation in equations(params["jaxpr"])):
            raise ValueError("it has a loop whose end depends on data")
    return [math.prod(params["grid_mapping"].grid[axis] for axis in _free_axes(params)) for params in found]


def moved_bytes(jaxpr: Any) -> float:
    """Returns how many bytes the pipelines of all Pallas kernels read and write in the device's main memory.

    Each moves a block whenever its index changes. The grids must not depend on data.
    """
    mappings = [params["grid_mapping"] for params in _kernels(jaxpr)]
    return sum(_moved_bytes(mapping.grid, block) for mapping in mappings for block in mapping.block_mappings)


def with_smaller_grids(closed: Any, most_steps: int, cores: int = 1) -> tuple[Any, list[int]]:
    """Returns a program whose kernels run only the first steps of their grids, for compiling and never for running.

    Private because JAX has no public way to a grid once it is traced.

    Args:
        closed: the program, a closed jaxpr.
        most_steps: the most steps of each core along the axes of each kernel that may be made smaller.
        cores: how many cores the compiler divides a `parallel` axis among; these axes keep at least as many steps.

    Returns:
        The program with kernels named `kernel_0`, `kernel_1`, ..., and how many of these steps each has.
    """
    steps: list[int] = []

    def smaller(equation: Any) -> Any:
        params, left = equation.params, most_steps
        grid = list(params["grid_mapping"].grid)
        for axis in reversed(_free_axes(params)):
            least = min(grid[axis], cores if axis in _parallel_axes(params) else 1)
            grid[axis] = min(grid[axis], least * max(1, left))
            left //= grid[axis] // least
        steps.append(math.prod(grid[axis] for axis in _free_axes(params)))
        # The compiler names an operation after the innermost scope of its source.
        source, scope = equation.source_info, f"kernel_{len(steps) - 1}"
        return equation.replace(
            params={**params, "grid_mapping": dataclasses.replace(params["grid_mapping"], grid=tuple(grid))},
            source_info=source.replace(name_stack=source.name_stack.extend(scope)),
        )

    return closed.replace(jaxpr=_replaced(closed.jaxpr, smaller)), steps


def vmem_needs(jaxpr: Any) -> list[tuple[int, int | None]]:
    """Returns, for each Pallas kernel for a TPU, the least bytes of VMEM that it needs, and the most that it may have.

    It needs its blocks and its scratch once each; the compiler keeps most blocks twice. The most is None if the
    kernel's author has not set it.
    """
    return [
        (
            sum(_bytes(each.aval) for each in params["jaxpr"].invars if str(each.aval.memory_space) in _IN_VMEM),
            getattr(params["compiler_params"], "vmem_limit_bytes", None),
        )
        for params in _kernels(jaxpr)
        if not params["interpret"]
    ]


def _bytes(array: Any) -> int:
    """Returns the size of an array whose elements may be smaller than a byte."""
    is_number = jnp.issubdtype(array.dtype, jnp.number)  # and not, for example, a semaphore
    return int(math.prod(array.shape) * jax.dtypes.itemsize_bits(array.dtype)) // 8 if is_number else 0


def _kernels(jaxpr: Any) -> list[_Params]:
    return [each.params for each in equations(jaxpr, closed={_KERNEL}) if each.primitive.name == _KERNEL]


def _replaced(jaxpr: Any, named: Callable[[Any], Any]) -> Any:
    """Returns a jaxpr with other equations for its kernels, visited in the order of `equations`."""

    def replaced(value: Any) -> Any:
        inner = getattr(value, "jaxpr", value)
        if not hasattr(inner, "eqns"):
            return value
        return _replaced(value, named) if inner is value else value.replace(jaxpr=_replaced(inner, named))

    return jaxpr.replace(
        eqns=[
            named(equation)
            if equation.primitive.name == _KERNEL
            else equation.replace(params={name: jax.tree.map(replaced, each) for name, each in equation.params.items()})
            for equation in jaxpr.eqns
        ]
    )


def _free_axes(params: _Params) -> list[int]:
    """Returns the axes of a kernel's grid along which one step costs as much as any other."""
    mapping = params["grid_mapping"]
    used = [_axes_of(block, len(mapping.grid)) for block in mapping.block_mappings_output]
    return sorted(_parallel_axes(params) | (set.intersection(*used) if used else set()))


def _parallel_axes(params: _Params) -> set[int]:
    declared = getattr(params["compiler_params"], "dimension_semantics", None) or ()
    return {axis for axis, semantics in enumerate(declared) if "parallel" in str(semantics).lower()}


def _axes_of(block: Any, axes: int) -> set[int]:
    """Returns the axes of the grid on which a block's index depends."""
    jaxpr = getattr(block.index_map_jaxpr, "jaxpr", block.index_map_jaxpr)
    _, is_used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return {axis for axis in range(axes) if is_used[axis]}


def _moved_bytes(grid: tuple[int, ...], block: Any) -> float:
    """Returns the bytes that the pipeline moves of one argument: its block whenever the index of the block changes."""
    array = block.array_aval
    if str(getattr(block.block_aval, "memory_space", "")).lower() in ("any", "hbm"):  # the kernel moves it itself
        return float(math.prod(array.shape) * array.dtype.itemsize)
    used = [axis for axis in _axes_of(block, len(grid)) if grid[axis] > 1]
    # The last axis runs fastest: the index changes at each step of the last axis that it depends on.
    changes = math.prod(grid[: max(used) + 1]) if used else 1
    return float(changes * math.prod(block.block_aval.shape) * array.dtype.itemsize)
