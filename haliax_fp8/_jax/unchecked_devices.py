"""Gradients taken around a `shard_map` with `check_vma=False`, where JAX would add the amaxes of all devices."""

import traceback
from typing import Any

from jax.interpreters import ad

from .max_grad import is_max_grad
from .mesh_axes import unchecked_axes


def require_gradient_inside(state: Any) -> None:
    """Raises if state was cast outside the surrounding `shard_map`, so that its gradient is taken outside as well.

    Args:
        state: The state whose gradient is wanted.

    Raises:
        ValueError: With the remedy. State that a caller cast passes: where that happened is unknown.
    """
    axes = unchecked_axes()
    if is_max_grad(state) and state.dtype.knows_its_axes and any(axis not in state.dtype.manual_axes for axis in axes):
        raise ValueError(_reason(axes))


def require_transposition_inside(state: Any) -> None:
    """The same check in reverse mode, for state that a caller cast with `astype`.

    Args:
        state: The stand-in for its tangent during transposition.

    Raises:
        ValueError: With the remedy.
    """
    aval = state.aval if ad.is_undefined_primal(state) else state
    by_caller = is_max_grad(aval) and not aval.dtype.knows_its_axes
    if by_caller and (axes := unchecked_axes()) and _transposes_shard_map():
        raise ValueError(_reason(axes))


def _reason(axes: tuple[str, ...]) -> str:
    return (
        f"a gradient is taken outside of shard_map over {axes} with check_vma=False, where JAX would sum the amaxes of "
        "all devices. Take the gradient inside shard_map, or use check_vma=True"
    )


def _transposes_shard_map() -> bool:
    """Whether JAX is transposing the innermost `shard_map`, not a function inside it; the names on the stack tell."""
    frames = (frame for frame, _ in traceback.walk_stack(None))
    of_shard_map = (frame for frame in frames if frame.f_globals.get("__name__") == "jax._src.shard_map")
    innermost = next(of_shard_map, None)
    return innermost is not None and "transpose" in innermost.f_code.co_qualname
