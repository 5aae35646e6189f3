"""Gradients with exact state, which only a compiled program can take, and why JAX cannot take some at all."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jax.core import Tracer

from .._jax.errors import (
    NotDifferentiable,
    calls_users_function,
    is_about_cast,
    is_about_linear_transpose,
    is_about_structure,
    is_about_sum,
)
from .._jax.max_grad import LOST_STATE, StateOutsideJit
from .._state.op_state import OpState


@calls_users_function
def differentiable[T](gradients_of: Callable[..., T], plain: Callable[..., Any], *args: Any, **kwargs: Any) -> T:
    """The result of `gradients_of(*args, **kwargs)`, which is compiled if it is called outside of `jit`.

    If it fails, the plain gradient is traced too: an error that it does not raise is about the type of state.

    Args:
        gradients_of: Takes a gradient with state in `fp32_max_grad`.
        plain: Takes the same gradient with state in float32.
        *args: Their arguments.
        **kwargs: Their arguments.

    Raises:
        ValueError: If JAX cannot differentiate it, with the construct and what to use instead.
    """
    try:
        return _in_one_program(gradients_of, *args, **kwargs)
    except (NotDifferentiable, StateOutsideJit):
        raise
    except (ValueError, TypeError, AssertionError, NotImplementedError) as error:
        if not _is_about_state(plain, *args, **kwargs):
            raise
        raise ValueError(_explanation(error)) from error


def _in_one_program[T](gradients_of: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    try:
        return gradients_of(*args, **kwargs)
    except StateOutsideJit:
        pass
    with jax.disable_jit(False):
        try:
            return eqx.filter_jit(gradients_of)(*args, **kwargs)
        except StateOutsideJit as error:
            # JAX looks for a NaN in a program by running it again, operation by operation.
            if jax.config.jax_debug_nans or jax.config.jax_debug_infs:
                raise FloatingPointError(_NAN) from error
            raise


_NAN = (
    "jax_debug_nans or jax_debug_infs found a NaN or an infinity in the gradient, but cannot locate it, because "
    "gradients with FP8 state cannot run operation by operation. Look for it in restore_linear_layers(model)"
)


def _is_about_state(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Whether an error is about state, from what the plain gradient says: nothing, or that FP8 is the reason."""
    # What is traced already stays so: shapes alone would not show that `vmap` maps an example, for instance.
    is_traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((args, kwargs)))
    try:
        plain(*args, **kwargs) if is_traced else eqx.filter_eval_shape(plain, *args, **kwargs)
    except NotDifferentiable:
        return True
    except Exception:  # noqa: BLE001 - the user's function may raise anything
        return False
    return True


def _explanation(error: Exception) -> str:
    """What to do instead."""
    if isinstance(error, AssertionError):
        return LOST_STATE
    if is_about_structure(error, holding=OpState):
        return (
            f"{error}\nIf the function assembles its model from parts, and share_input_scales marked it: a part has "
            "the scale that layers share, and the other has none. Pass the whole model, or use "
            "separate_input_scales(model)"
        )
    if is_about_linear_transpose(error):
        return (
            "jax.lax.custom_root transposes only functions of floats, and FP8 state is not a float. Take the gradient "
            "with eqx.filter_grad, where state is float32"
        )
    if is_about_cast(error):
        return (
            "FP8 state was cast inside the differentiated function. Cast only arrays for which eqx.is_inexact_array(x) "
            "or jnp.issubdtype(x.dtype, jnp.floating) holds, which is false for state"
        )
    if is_about_sum(error):
        return (
            "JAX copied the state of an FP8 layer, and would sum the amaxes of the copies: examples mapped by vmap "
            "each take their own branch (jax.lax.cond or switch), or one layer was broadcast into a stack. Compute "
            "both branches outside cond and select with jnp.where, or call one layer several times; or take the "
            "gradient with eqx.filter_grad, which sums the newest amaxes"
        )
    return (
        "FP8 state was sliced inside the differentiated function (as in `jax.tree.map(lambda a: a[0], layers)`), or "
        "added, or a jax.custom_vjp is mapped by vmap, or examples mapped by vmap each took their own layer of a "
        "stack, but JAX cannot differentiate that for state whose gradients accumulate by maximum. Take layers out of "
        "a stack with jax.lax.dynamic_index_in_dim or jnp.unstack, scan over them, or call all and select their "
        "outputs; or use eqx.filter_grad, which sums the newest amaxes of a layer's uses"
    )
