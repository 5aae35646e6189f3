"""Errors: what JAX's messages mean, an error of our own, and which frames a traceback shows.

JAX has no types for most of its errors, so their texts tell them apart. A text only chooses the words that explain an
error: it never decides what a program does.
"""

import functools
import inspect
import traceback
from collections.abc import Callable
from typing import Any


class NotDifferentiable(ValueError):
    """An FP8 product, or its state, cannot be differentiated here; the message says why and what to do."""


def calls_users_function[**P, T](function: Callable[P, T]) -> Callable[P, T]:
    """Marks a function that runs the user's: an error in there shows frames of the user, as under JAX's own functions.

    Frames of the file that defines the function are hidden; `JAX_TRACEBACK_FILTERING=off` shows them. If the installed
    JAX hides frames in another way, all of them are shown.

    Args:
        function: The function.
    """
    try:
        from jax._src.traceback_util import api_boundary
    except ImportError:
        return function
    for filename in (__file__, inspect.unwrap(function).__code__.co_filename):
        _hide(filename)
    return api_boundary(function)


def explained_by[**P, T](check: Callable[..., None]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator, `calls_users_function` with checks of arguments that run only after an exception.

    What Python and JAX refuse clearly needs no check. These checks replace their errors where those would be cryptic,
    and cost nothing in a call that succeeds. A mistake that raises nothing needs a check of its own, before the call.

    Args:
        check: Raises a ValueError with argument, value and remedy, or finds nothing. It gets the exception, and the
            arguments of the call.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def explained(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                reason = None if _is_explained(error) else _raised_by(check, error, *args, **kwargs)
                if reason is None:
                    raise
                raise reason from error

        return calls_users_function(explained)

    return decorate


def _is_explained(error: Exception) -> bool:
    """Whether it is an error in words of this package."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    package, _, _ = __name__.partition(".")
    return isinstance(error, ValueError) and frame.f_globals.get("__name__", "").startswith(f"{package}.")


def _raised_by(check: Callable[..., None], *args: Any, **kwargs: Any) -> ValueError | None:
    try:
        check(*args, **kwargs)
    except ValueError as reason:
        return reason
    except Exception:  # noqa: BLE001 - the arguments may be anything
        return None
    return None


# JAX keeps a list, to which each call would add.
@functools.cache
def _hide(filename: str) -> None:
    from jax._src.traceback_util import register_exclusion

    register_exclusion(filename)


# --- Errors of derivatives --------------------------------------------------------------------------------------------


def names_max_grad(error: Exception) -> bool:
    """Whether an error names the element type of state whose gradients accumulate by maximum."""
    return _has(error, "_max_grad")


def is_about_cast(error: Exception) -> bool:
    """Whether an array of an extended element type was cast to another type."""
    return _has(error, "Cannot convert_element_type")


def is_about_sum(error: Exception) -> bool:
    """Whether an array of an extended element type was summed over an axis."""
    return _has(error, "reduce_sum")


def is_about_linear_transpose(error: Exception) -> bool:
    """Whether `linear_transpose`, as in `lax.custom_root`, was given anything but floats."""
    return _has(error, "linear_transpose only supports")


def is_about_structure(error: Exception, holding: type) -> bool:
    """Whether trees did not fit together, one of them with a node of a class.

    JAX names the first node where they differ. With `is_leaf`, as in `eqx.combine`, that is often a None instead.

    Args:
        error: The error.
        holding: The class.
    """
    return _has(error, holding.__name__) or str(error).startswith("pytree structure error")


# --- Errors of arrays and meshes --------------------------------------------------------------------------------------


def is_about_deleted_array(error: Exception) -> bool:
    """Whether an array was used whose memory was donated."""
    return _has(error, "has been deleted")


def is_about_mapped_mesh_axis(error: Exception) -> bool:
    """Whether an array was divided over a mesh axis inside a `vmap` with that `spmd_axis_name`."""
    return _has(error, "spmd_axis_name")


def _has(error: Exception, *texts: str) -> bool:
    return any(text in str(error) for text in texts)
