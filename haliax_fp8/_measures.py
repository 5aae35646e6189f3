"""What a product records of its operands for their state: in parts, which one kernel joins for all three."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from ._mesh_axes import axes_to_reduce
from ._product_spec import ProductSpec
from ._quantized_array import QuantizedArray
from ._scaling import AbstractStatefulScaling, measures
from ._state import to_float32


def measured_parts(
    x: Float[Array, "..."], quantized: QuantizedArray, role: int, spec: ProductSpec, state: Array
) -> Float[Array, "*ensemble measures parts"]:
    """What the state records of parts of an operand, padded with zeros to the largest record.

    Args:
        x: The operand.
        quantized: What it was quantized to.
        role: Which operand: lhs (0), rhs (1) or the output's gradient (2).
        spec: What is static about the product.
        state: The state; inside `shard_map` devices that share it take the maximum over theirs.
    """
    scaling, count = spec.quantizations[role].scaling, measures(spec.recipe.scalings)
    if not (isinstance(scaling, AbstractStatefulScaling) and scaling.measures):
        return jnp.zeros((*x.shape[: spec.ensemble], count, 1), x.dtype)
    values = scaling.measure_parts(x, quantized, spec.ensemble)
    if (missing := count - values.shape[-2]) > 0:
        values = jnp.pad(values, [(0, 0)] * spec.ensemble + [(0, missing), (0, 0)])
    axes = axes_to_reduce(x, state)
    return lax.pmax(values, axes) if axes else values


def of_operands(measured: Sequence[Array]) -> Float[Array, "*ensemble measures parts"]:
    """The measures of several operands, concatenated; those with fewer parts are padded with `-inf`."""
    if len({x.dtype for x in measured}) > 1:
        measured = [to_float32(x) for x in measured]
    axis, parts = measured[0].ndim - 2, max(x.shape[-1] for x in measured)
    none = [(0, 0, 0)] * (axis + 1)
    fill = lambda x: lax.pad(x, np.asarray(-np.inf, x.dtype), [*none, (0, parts - x.shape[-1], 0)])
    return lax.concatenate([x if x.shape[-1] == parts else fill(x) for x in measured], axis)


def whole(measured: Float[Array, "*ensemble measures parts"]) -> Float[Array, "*ensemble measures"]:
    """The measures of the operands as a whole, in float32."""
    axes = (measured.ndim - 1,)
    return to_float32(lax.squeeze(measured, axes) if measured.shape[-1] == 1 else lax.reduce_max(measured, axes))
