"""Barriers that depend on how many devices a program is for, which is known when it is lowered, not before."""

from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

from .after_partitioning import devices_of


def gathered_once(data: Array) -> Array:
    """FP8 data that several products read, of which devices may hold parts.

    Each of these products needs all parts. Behind a barrier, XLA sends them once for all, and in FP8. Otherwise it
    sends them before the cast, or for each product. On a single device a barrier would only keep XLA from fusing.
    """
    return barrier_p.bind(data, several=True)


def transposed_separately_on_one[T](data: T) -> T:
    """As `transposed_separately`, of data that was `gathered_once`: a second barrier would send it again.

    Args:
        data: A tree of arrays.
    """
    return jax.tree.map(lambda x: barrier_p.bind(x, several=False), data)


barrier_p = Primitive("fp8_barrier")
"""The identity; a barrier in programs for several devices, or in those for one."""
barrier_p.def_impl(lambda x, several: x)
barrier_p.def_abstract_eval(lambda x, several: x)
batching.primitive_batchers[barrier_p] = lambda args, axes, several: (barrier_p.bind(*args, several=several), *axes)
# As of a barrier, but a tangent is not data in FP8, and passes without one.
ad.primitive_jvps[barrier_p] = lambda primals, tangents, several: (barrier_p.bind(*primals, several=several), *tangents)


def _lowered(context: Any, x: Any, *, several: bool) -> Any:
    if (devices_of(context) > 1) != several:
        return [x]
    return mlir.lower_fun(lax.optimization_barrier, multiple_results=False)(context, x)


mlir.register_lowering(barrier_p, _lowered)
