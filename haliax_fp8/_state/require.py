"""The state that a product needs: there, that of one layer, and trained with the kernel."""

import pathlib
import warnings

import equinox as eqx
import jax

from ..recipes.recipe import Recipe
from .op_state import OpState
from .table import numbers_of


KEEP_STATE_WITH_TRAINED = """Keep state with what is trained:
    is_state = lambda node: isinstance(node, OverwriteWithGradient)
    spec = jax.tree.map(is_state, model, is_leaf=is_state)
then set the trained weights in spec to True, and split with eqx.partition(model, spec)."""
"""How to split a model, for messages about state that went with the frozen weights."""

# What is in these folders is not the user's, whom a warning should point at.
_LIBRARIES = tuple(
    str(pathlib.Path(file).parent) for file in (pathlib.Path(__file__).parent, jax.__file__, eqx.__file__)
)


def warn_of_constant_state(recipe: Recipe) -> None:
    """Warns that a kernel's gradient was taken and that of its state was not, although steps should write it.

    Args:
        recipe: The recipe of the op.
    """
    if not numbers_of(recipe.scalings):
        return
    warnings.warn(
        f"the gradient of an FP8 layer's weight was taken without that of its state ({recipe}): if this trains the "
        "weight, the scales stay as they are for ever. eqx.partition put the state with the frozen weights, or the "
        f"gradient is of the weights alone. {KEEP_STATE_WITH_TRAINED} In an analysis that does not train, ignore this",
        stacklevel=2,
        skip_file_prefixes=_LIBRARIES,
    )


def require_state(state: OpState | None, recipe: Recipe, groups: tuple[int, ...] = ()) -> None:
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
    leading = leading_axes(state)
    if leading != groups:
        raise ValueError(
            f"an FP8 product was called with the state of {leading} layers of an ensemble or a stack; call them under "
            "eqx.filter_vmap or jax.vmap, or in a scan over the stack, so that each gets its own state"
        )


def leading_axes(state: OpState) -> tuple[int, ...]:
    """The sizes of the axes in front of one op's state, of stacks, ensembles and groups.

    () for a state that has something else in place of its array, as a tree of shapes or of shardings has.

    Args:
        state: The state of an op.
    """
    shape = getattr(state.table.array, "shape", ())
    return shape[:-2] if isinstance(shape, tuple) else ()


def require_stored_scales(recipe: Recipe) -> None:
    """Raises a ValueError unless all operands have scales in the state, as groups with a state each need them.

    Args:
        recipe: The recipe of the op.
    """
    if not all(scaling.stores_scale for scaling in recipe.scalings):
        raise ValueError(
            f"scale_per_expert=True needs a recipe that stores the scales of all operands, and {recipe} does not; use "
            '"delayed" or "static", or scale_per_expert=False'
        )
