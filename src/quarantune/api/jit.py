"""`jax.jit` under a type that keeps the signature of the function, which JAX's own type does not."""

from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, Protocol, TypeVar, cast, overload

import jax

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _Jit(Protocol):
    """The two ways to call `jax.jit`: with the function, or with options alone, as a decorator."""

    @overload
    def __call__(self, fun: Callable[_P, _R], /, **options: Any) -> Callable[_P, _R]: ...

    @overload
    def __call__(
        self, *, static_argnames: str | Iterable[str] | None = ..., **options: Any
    ) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]: ...


jit = cast("_Jit", jax.jit)
"""`jax.jit` itself. Under this name, type checkers and editors see the function's own signature."""
