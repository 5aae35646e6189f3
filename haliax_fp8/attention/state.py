"""The scales that an attention reads from its state, and the cotangent that it returns for it."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

from .._jax.max_grad import is_max_grad, to_float32
from .._numerics.formats import E4M3
from .._state.members import recorded_by_first
from .._state.table import next_table, record_length, scales_in
from ..recipes.scaling import AbstractScaling
from .tensors import TENSORS


LIMITS = (E4M3.max,) * len(TENSORS)
"""The largest values of the tensors' formats."""


def scales_of(state: Array, *, is_record: bool) -> Float32[Array, "*ensemble 10"]:
    """The scales of the ten tensors.

    Args:
        state: A table, or a record.
        is_record: Whether it is a record.
    """
    numbers = to_float32(state)
    if not is_record:
        numbers, _ = scales_in(numbers, LIMITS)
    return lax.slice_in_dim(numbers, 0, len(TENSORS), axis=numbers.ndim - 1)


def cotangent(
    measured: Float32[Array, "*ensemble 10"],
    state: Array,
    grad: Array,
    *,
    is_record: bool,
    scaling: AbstractScaling,
    ensemble: int,
) -> Float32[Array, "..."]:
    """The cotangent of the state: the table of the next step; or the amaxes, and the mark of the record.

    Args:
        measured: The amaxes of the ten tensors.
        state: A table, or a record.
        grad: The output's gradient.
        is_record: Whether the state is a record.
        scaling: The scaling of all tensors.
        ensemble: How many leading axes index members.
    """
    numbers, scalings = to_float32(state), (scaling,) * len(TENSORS)
    if not is_record:
        if ensemble and not is_max_grad(state):
            # A product knows by their kernels whether these are copies of one state; attention has no kernels.
            raise ValueError(
                "an Fp8Attention has a state of its own for each example or member (an ensemble, or a lax.cond or "
                "custom_vjp under vmap), and its gradient is taken with eqx.filter_grad, which would sum the amaxes of "
                "examples. Use haliax_fp8.filter_grad, TrainStep, or training.exact_gradients"
            )
        return next_table(numbers, lax.expand_dims(measured, (measured.ndim,)), scalings, LIMITS)
    missing = record_length(scalings) - len(TENSORS)
    mark = lax.slice_in_dim(numbers, numbers.shape[-1] - 1, None, axis=numbers.ndim - 1)
    zeros = jnp.zeros((*measured.shape[:-1], missing), jnp.float32)
    return recorded_by_first(lax.concatenate([measured, zeros, mark], measured.ndim - 1), grad, ensemble)
