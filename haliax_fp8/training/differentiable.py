"""Gradients that JAX can only take in one program, and the reasons why it cannot take some at all."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from .._jax.max_grad import StateNotDifferentiated
from .._jax.messages import is_about_cast, is_about_linear_transpose, is_about_structure, is_about_sum, rejects_max_grad
from .._jax.raised_in import by_users_assertion, calls_users_function, in_checkpointed_loop, in_custom_derivative
from .._state.op_state import OpState


@calls_users_function
def differentiable[T](gradients_of: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """The result of `gradients_of(*args, **kwargs)`, as one program where JAX cannot differentiate step by step.

    Args:
        gradients_of: Takes a gradient.
        *args: Its arguments.
        **kwargs: Its arguments.

    Raises:
        ValueError: If JAX cannot differentiate it, with the construct and what to use instead.
    """
    whole = False
    while True:
        try:
            if not whole:
                return gradients_of(*args, **kwargs)
            with jax.disable_jit(False):
                return eqx.filter_jit(gradients_of)(*args, **kwargs)
        except StateNotDifferentiated:
            raise
        except (ValueError, TypeError, AssertionError, NotImplementedError, KeyError) as error:
            if not whole and _needs_one_program(error):
                whole = True
                continue
            if whole and isinstance(error, NotImplementedError) and _looks_for_nans():
                raise FloatingPointError(_NAN) from error
            if (reason := _explanation(error)) is None:
                raise
            raise ValueError(reason) from error


_NAN = (
    "jax_debug_nans or jax_debug_infs found a NaN or an infinity in the gradient, but cannot locate it, because "
    "gradients with FP8 state cannot run operation by operation. Look for it in restore_linear_layers(model)"
)


def _looks_for_nans() -> bool:
    return jax.config.jax_debug_nans or jax.config.jax_debug_infs


def _needs_one_program(error: Exception) -> bool:
    """Whether the gradient was taken operation by operation, which JAX cannot always do with the type of state."""
    if by_users_assertion(error):
        return False
    return isinstance(error, AssertionError | NotImplementedError) or (
        jax.config.jax_disable_jit and rejects_max_grad(error)
    )


def _explanation(error: Exception) -> str | None:
    """What to do instead; None if the error is not about state."""
    if in_checkpointed_loop(error):
        return (
            "Equinox's checkpointed loop adds up the gradients of its steps, but FP8 state needs their maximum. Use "
            'equinox.internal.while_loop with kind="bounded", or scan with kind="lax"; with Diffrax, '
            "adjoint=diffrax.DirectAdjoint()"
        )
    if in_custom_derivative(error):
        return str(StateNotDifferentiated())
    if is_about_structure(error, holding=OpState):
        return (
            f"{error}\nIf the function assembles its model from parts, and share_input_scales marked it: a part has "
            "the scale that layers share, and the other has none. Pass the whole model, or use "
            "separate_input_scales(model)"
        )
    if not rejects_max_grad(error):
        return None
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
