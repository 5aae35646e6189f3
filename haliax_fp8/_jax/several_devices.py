"""Barriers that depend on how many devices a program is for, which is known when it is lowered, not before.

`tests/programs/test_several_devices.py` compiles a program with and without each.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.extend.mlir.dialects import sdy
from jax.interpreters import batching, mlir
from jaxtyping import Array

from .after_partitioning import is_divided_by_shardy
from .xla import Programs, barrier_p


def gathered_once(data: Array) -> Array:
    """FP8 data that several products read, and devices may hold in parts.

    Each of these products needs all parts. With a barrier, XLA sends them once for all products, and in FP8. Otherwise
    it sends them before the cast, or for each product. On a single device a barrier would only keep XLA from fusing.
    """
    return barrier_p.bind(data, programs=Programs.FOR_SEVERAL_DEVICES)


def transposed_separately_on_one[T](data: T) -> T:
    """Like `transposed_separately`, for data that was `gathered_once`: a second barrier would send it again.

    Args:
        data: A tree of arrays.
    """
    return jax.tree.map(lambda x: barrier_p.bind(x, programs=Programs.FOR_ONE_DEVICE), data)


def divided_as_made(parts: Array) -> Array:
    """Amaxes of an array's parts, to be reduced over the last axis, divided as the array is.

    XLA's partitioner divides arrays as their users are divided, and passes that on to their producers. The amaxes of
    rows are joined with those of other operands, whose rows may be divided; without this barrier, an activation would
    be divided like some kernel's rows. In programs for several devices, the maximum comes first, followed by zeros, so
    that each device sends one number. On one device this would cost an additional launch, while one for all operands
    is enough.

    Args:
        parts: The amaxes; none is negative.
    """
    return as_made_p.bind(parts)


as_made_p = Primitive("fp8_divided_as_made")
as_made_p.def_impl(lambda x: x)
as_made_p.def_abstract_eval(lambda x: x)
# Measurements are not differentiated.
batching.primitive_batchers[as_made_p] = lambda args, axes: (as_made_p.bind(jnp.moveaxis(args[0], axes[0], 0)), 0)


def _as_made_lowered(context: Any, x: Any) -> Any:
    if not is_divided_by_shardy(context):
        return [x]
    (x,) = mlir.lower_fun(_largest_first, multiple_results=False)(context, x)
    return [sdy.PropagationBarrierOp(x, _FORWARD).result]


def _largest_first(x: Array) -> Array:
    """The maximum along the last axis, then zeros."""
    zeros = lax.full((*x.shape[:-1], x.shape[-1] - 1), 0, x.dtype)
    return lax.concatenate((jnp.max(x, axis=-1, keepdims=True), zeros), x.ndim - 1)


# Shardy's number for "from operands to results".
_FORWARD = 1

mlir.register_lowering(as_made_p, _as_made_lowered)
