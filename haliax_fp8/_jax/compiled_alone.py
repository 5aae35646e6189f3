"""What a primitive does outside of `jit`: it is compiled alone, because only its lowering says what it computes."""

import functools
from typing import Any

import jax
from jax.extend.core import Primitive


def compile_alone(primitive: Primitive) -> None:
    """Registers that a primitive is compiled where it is evaluated, with `jax.disable_jit` too.

    There `jax.jit` would evaluate the primitive again, without end.

    Args:
        primitive: The primitive, whose parameters are hashable.
    """

    @functools.cache
    def compiled(names: tuple[str, ...]) -> Any:
        return jax.jit(primitive.bind, static_argnames=names)

    def evaluate(*args: Any, **params: Any) -> Any:
        with jax.disable_jit(False):
            return compiled(tuple(params))(*args, **params)

    primitive.def_impl(evaluate)
