"""How a gradient is taken where JAX or Equinox cannot take it in the best way, and what to do where neither can."""

import dataclasses
import traceback
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from ._state import StateNotDifferentiated, fp32_max_grad


@dataclasses.dataclass(frozen=True)
class Way:
    """What state is inside a differentiated function, and how that is run. All ways give the same numbers.

    Args:
        inexact: Whether records count as inexact arrays. Equinox gives no tangent to what is none in
            `filter_custom_jvp`, and refuses one in `filter_custom_vjp`; but a loss that casts inexact arrays would
            cast them.
        tables: Whether states stay tables, for a function that has the rest of their model and puts it together.
        whole: Whether the gradient is one program, whatever the user runs operation by operation.
    """

    inexact: bool = False
    tables: bool = False
    whole: bool = False


def first_that_works(gradients_of: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`gradients_of(way, *args, **kwargs)` in the first way in which JAX can differentiate the function.

    Raises:
        ValueError: If it can in none, and this is why.
    """
    way = Way()
    while True:
        try:
            if not way.whole:
                return gradients_of(way, *args, **kwargs)
            with jax.disable_jit(False):
                return eqx.filter_jit(gradients_of)(way, *args, **kwargs)
        except (ValueError, TypeError, AssertionError, NotImplementedError) as error:
            other = _another(way, error)
            if other is None:
                raise
        way = other


def _another(way: Way, error: Exception) -> Way | None:
    """The way to take after this error; None if the error is the answer."""
    if not way.tables and "OpRecord" in str(error):
        return dataclasses.replace(way, tables=True)
    if not way.inexact and (isinstance(error, StateNotDifferentiated) or _is_assertion_of("equinox", error)):
        return dataclasses.replace(way, inexact=True)
    by_steps = isinstance(error, NotImplementedError) or _is_assertion_of("jax", error)
    if not way.whole and (by_steps or (jax.config.jax_disable_jit and fp32_max_grad.name in str(error))):
        return dataclasses.replace(way, whole=True)
    return None


def _is_assertion_of(package: str, error: Exception) -> bool:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return isinstance(error, AssertionError) and frames[-1].f_globals.get("__name__", "").split(".")[0] == package
