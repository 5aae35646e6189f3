"""The table of the next step: the cotangent of a state that enters a differentiated function as a whole."""

import functools

import jax
from jax import lax
from jaxtyping import Array

from .._jax.max_grad import is_max_grad, to_float32
from .._state.members import measured_of_copies
from .._state.table import next_table
from ..recipes.recipe import Recipe
from .spec import ProductSpec


def next_state(state: Array, measured: Array, grad: Array, spec: ProductSpec) -> Array:
    """The table of the next step; zeros where another member, a copy of this one's state, records for both.

    Args:
        state: This step's table, in any element type.
        measured: What the step measured, `[*ensemble, 3 * measures]`.
        grad: The output's gradient.
        spec: What is static about the product.
    """
    maxima, state = is_max_grad(state), to_float32(state)
    if maxima:
        return _next_table(state, measured, recipe=spec.recipe)
    of_kernel = lax.index_in_dim(_of_rows(measured), 1, axis=measured.ndim - 1, keepdims=False)
    measured, records = measured_of_copies(measured, state, of_kernel, grad, spec.ensemble)
    table = _next_table(state, measured, recipe=spec.recipe)
    return lax.select(lax.broadcast_in_dim(records, table.shape, range(records.ndim)), table, lax.full_like(table, 0.0))


# Apart from `backward`, so that ops of all shapes share one trace.
@functools.partial(jax.jit, static_argnames="recipe")
def _next_table(state: Array, measured: Array, *, recipe: Recipe) -> Array:
    return next_table(state, _of_rows(measured) if measured.shape[-1] else None, recipe.scalings, recipe.limits)


def _of_rows(measured: Array) -> Array:
    """What was measured of each operand, `[*ensemble, 3, measures]`."""
    return lax.reshape(measured, (*measured.shape[:-1], 3, measured.shape[-1] // 3))
