"""The state that a product needs: there, and that of one layer."""

from ..recipes.recipe import Recipe
from ..recipes.scaling import stores_scale
from .op_state import OpState
from .records import OpRecord


def require_state(state: OpState | OpRecord | None, recipe: Recipe, groups: tuple[int, ...] = ()) -> None:
    """Raises a ValueError unless a stateful recipe has the state of a single layer.

    Args:
        state: The state of an op; None if it has none.
        recipe: Its recipe.
        groups: The number of groups, if each has a state of its own.
    """
    if state is None:
        if recipe.is_stateful:
            raise ValueError(
                f"an FP8 product with the recipe {recipe} was called without its state; if the model was split "
                "(eqx.partition, eqx.filter), join its parts with eqx.combine first"
            )
        return
    leading = state.table.array.shape[: -1 if isinstance(state, OpRecord) else -2]
    if leading != groups:
        raise ValueError(
            f"an FP8 product was called with the state of {leading} layers of an ensemble or a stack; call them under "
            "eqx.filter_vmap or jax.vmap, or in a scan over the stack, so that each gets its own state"
        )


def require_stored_scales(recipe: Recipe) -> None:
    """Raises a ValueError unless all operands have scales in the state, as groups with a state each need them.

    Args:
        recipe: The recipe of the op.
    """
    if not all(stores_scale(scaling) for scaling in recipe.scalings):
        raise ValueError(
            f"scale_per_expert=True needs a recipe that stores the scales of all operands, and {recipe} does not; use "
            '"delayed" or "static", or scale_per_expert=False'
        )
