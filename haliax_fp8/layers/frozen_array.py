"""Arrays that gradients and optimizers do not see: those of a model with adapters."""

from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array

from .._numerics.stored_array import array_of, bits_of
from .._state.op_state import is_state


__all__ = [
    "FrozenArray",
    "frozen",
    "is_frozen_array",
    "thawed",
]


class FrozenArray(eqx.Module):
    """A floating-point array as its bits, in whole numbers: not a parameter, for `jax.grad`, `optax` and weight decay.

    Args:
        bits: The array's bits; of complex numbers those of both parts, along one more axis at the end.
        dtype: Its dtype.
    """

    bits: Any
    dtype: np.dtype = eqx.field(static=True)

    @staticmethod
    def of(array: Any) -> "FrozenArray":
        """The bits of an array."""
        return FrozenArray(bits_of(array), np.dtype(array.dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.bits.shape[:-1] if self.dtype.kind == "c" else self.bits.shape

    @property
    def array(self) -> Array:
        """The array."""
        return array_of(self.bits, self.dtype)


def frozen(leaf: Any) -> Any:
    """A leaf of a model, frozen if it is an array of parameters: not FP8 state, nor whole numbers."""
    return FrozenArray.of(leaf) if not is_state(leaf) and eqx.is_inexact_array(leaf) else leaf


def thawed(tree: Any) -> Any:
    """The tree with each array in place of its bits."""
    return jax.tree.map(lambda node: node.array if is_frozen_array(node) else node, tree, is_leaf=is_frozen_array)


def is_frozen_array(node: Any) -> bool:
    """Whether it is a frozen array."""
    return isinstance(node, FrozenArray)
