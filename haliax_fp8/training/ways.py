"""Fallbacks for gradients that JAX or Equinox cannot take in the best way, and the errors if none works."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from .._jax.max_grad import StateNotDifferentiated, is_missing_adder
from .._jax.messages import is_about_cast, is_about_linear_transpose, is_about_structure, is_about_sum, rejects_max_grad
from .._jax.raised_in import by_users_assertion, in_backsolve, in_checkpointed_loop
from .._state.records import OpRecord


@dataclasses.dataclass(frozen=True)
class Way:
    """The form of state inside a differentiated function, and how the function runs. All ways give the same numbers.

    Args:
        inexact: Whether records count as inexact arrays. For other arrays, Equinox gives no tangent in
            `filter_custom_jvp`, and refuses one in `filter_custom_vjp`; but a loss that casts inexact arrays would cast
            them.
        tables: Whether states stay tables, for a function that assembles its model from parts.
        whole: Whether the gradient is one program, even if the user runs operation by operation: outside `jit`, JAX
            cannot add the gradients of several uses.
    """

    inexact: bool = False
    tables: bool = False
    whole: bool = False


def first_that_works(gradients_of: Callable[..., tuple[Any, int]], *args: Any, **kwargs: Any) -> Any:
    """The result of `gradients_of(way, *args, **kwargs)` for the first way that JAX can differentiate.

    Args:
        gradients_of: Returns gradients, and how many arrays of records lost theirs.
        *args: Further arguments.
        **kwargs: Further arguments.

    Raises:
        ValueError: If JAX can differentiate none, with the reason.
    """
    # JAX treats other records as random keys, and would report that they are used twice.
    way = Way(inexact=jax.config.jax_debug_key_reuse)
    while True:
        try:
            found, lost = _in_way(gradients_of, way, *args, **kwargs)
            return found if not lost else _with_fewer_lost(found, lost, gradients_of, way, args, kwargs)
        except (ValueError, TypeError, AssertionError, NotImplementedError, KeyError) as error:
            other = _another(way, error)
            if other is None:
                if way.whole and isinstance(error, NotImplementedError) and _looks_for_nans():
                    raise FloatingPointError(_NAN) from error
                if (reason := _explanation(way, error)) is None:
                    raise
                raise ValueError(reason) from error
        way = other


def _in_way(gradients_of: Callable[..., tuple[Any, int]], way: Way, *args: Any, **kwargs: Any) -> tuple[Any, int]:
    if not way.whole:
        return gradients_of(way, *args, **kwargs)
    with jax.disable_jit(False):
        return eqx.filter_jit(gradients_of)(way, *args, **kwargs)


def _with_fewer_lost(
    found: Any, lost: int, gradients_of: Callable[..., tuple[Any, int]], way: Way, args: Any, kwargs: Any
) -> Any:
    """Gradients of a function in which Equinox lost the gradients of some states.

    It loses them if `filter_custom_jvp` calls a function with a `custom_vjp` of JAX: the state has no tangent outside,
    and its gradient inside is dropped.
    """
    if way.inexact or way.tables:
        return found
    try:
        again, of_these = _in_way(gradients_of, dataclasses.replace(way, inexact=True), *args, **kwargs)
    except Exception:  # noqa: BLE001 - the first attempt worked
        return found
    return again if of_these < lost else found


_NAN = (
    "jax_debug_nans or jax_debug_infs found a NaN or an infinity in the gradient, but cannot locate it, because "
    "gradients with FP8 state cannot run operation by operation. Look for it in restore_linear_layers(model)"
)


def _looks_for_nans() -> bool:
    return jax.config.jax_debug_nans or jax.config.jax_debug_infs


def _another(way: Way, error: Exception) -> Way | None:
    """The way to try after this error; None if the error is final."""
    is_assertion = isinstance(error, AssertionError)
    if by_users_assertion(error):
        return None
    # A part of a model, whose states are records now, did not fit together with the rest of it.
    if not way.tables and is_about_structure(error, holding=OpRecord):
        return dataclasses.replace(way, tables=True)
    if not way.inexact and (isinstance(error, StateNotDifferentiated) or is_assertion):
        return dataclasses.replace(way, inexact=True)
    by_steps = is_assertion or isinstance(error, NotImplementedError) or is_missing_adder(error)
    if not way.whole and (by_steps or (jax.config.jax_disable_jit and rejects_max_grad(error))):
        return dataclasses.replace(way, whole=True)
    return None


def _explanation(way: Way, error: Exception) -> str | None:
    """What to do instead; None if the error is not about state."""
    if in_backsolve(error):
        return (
            "diffrax.BacksolveAdjoint solves for the gradient of FP8 state as if the state changed with time. Use "
            "adjoint=diffrax.DirectAdjoint(), which is exact"
        )
    if in_checkpointed_loop(error):
        return (
            "Equinox's checkpointed loop adds up the gradients of its steps, but FP8 state needs their maximum. Use "
            'equinox.internal.while_loop with kind="bounded", or scan with kind="lax"; with Diffrax, '
            "adjoint=diffrax.DirectAdjoint()"
        )
    if not rejects_max_grad(error):
        return None
    if is_about_linear_transpose(error):
        return (
            "jax.lax.custom_root transposes only functions of floats, and FP8 state is not a float. Use "
            "optimistix.root_find or optimistix.fixed_point, whose default adjoint is exact"
        )
    if is_about_cast(error):
        return (
            "FP8 state was cast inside the differentiated function. Cast only arrays for which "
            "jnp.issubdtype(x.dtype, jnp.floating) holds, which is false for state; eqx.is_inexact_array includes it "
            "if an Equinox function with a custom derivative calls the layer"
        )
    if way.tables and is_about_sum(error):
        return (
            "examples mapped by vmap each take their own branch (jax.lax.cond or switch), or a jax.custom_vjp is "
            "mapped, in a function that gets only a part of its model and assembles the model inside. Pass the whole "
            "model as the first argument; or compute both branches outside cond and select with jnp.where"
        )
    return (
        "FP8 state was sliced inside the differentiated function (as in `jax.tree.map(lambda a: a[0], layers)`), or "
        "added, but JAX cannot differentiate that for state whose gradients accumulate by maximum. Take layers out of "
        "a stack with jax.lax.dynamic_index_in_dim or jnp.unstack, or scan over them; or use eqx.filter_grad, which "
        "sums the newest amaxes of a layer's uses"
    )
