"""Rotation: a Hadamard matrix with random signs, applied to groups of 16 elements along one axis."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32


GROUP = 16
"""How many elements are rotated together."""

ROTATION = "rotation"
"""The scope of the rotation's own product; the products whose operands it rotates are outside it."""

# The same signs everywhere, as in TransformerEngine: both operands of a product need the same signs.
_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


@functools.cache
def _matrix() -> np.ndarray:
    hadamard = np.ones((1, 1))
    while len(hadamard) < GROUP:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    return (np.diag(_SIGNS) @ hadamard / np.sqrt(GROUP)).astype(np.float32)  # +-1/4: exact


@dataclasses.dataclass(frozen=True)
class Rotation:
    """`x R` for every 16 elements along an axis, with `R` orthogonal: `R R^T = 1`.

    Args:
        axis: The axis.
        length: Its length. If not a multiple of 16, the axis is padded with zeros, which `undo` removes.

    References:
        TransformerEngine, `get_wgrad_sign_vector` of its NVFP4 recipe (the signs).

    Example:
        >>> rotation, x = Rotation(axis=0, length=20), jnp.arange(20.0)
        >>> rotation.apply(x).shape, bool(jnp.allclose(rotation.undo(rotation.apply(x)), x, atol=1e-5))
        ((32,), True)
    """

    axis: int
    length: int

    @property
    def padding(self) -> int:
        """The number of zeros that pad the axis."""
        return -self.length % GROUP

    def apply(self, x: Float[Array, "*shape"]) -> Float32[Array, "*padded"]:
        """The rotated array, in float32."""
        padding = [(0, self.padding if axis == self.axis else 0) for axis in range(x.ndim)]
        return self._times(jnp.pad(x.astype(jnp.float32), padding), _matrix())

    def undo(self, x: Float[Array, "*padded"]) -> Float32[Array, "*shape"]:
        """Reverses `apply`: rotates back and removes the padding."""
        return lax.slice_in_dim(self._times(x, _matrix().T), 0, self.length, axis=self.axis)

    def _times(self, x: Array, matrix: np.ndarray) -> Array:
        last = jnp.moveaxis(x, self.axis, -1)
        groups = last.reshape(*last.shape[:-1], last.shape[-1] // GROUP, GROUP)
        with jax.named_scope(ROTATION):
            rotated = lax.dot_general(
                groups,
                jnp.asarray(matrix),
                (((groups.ndim - 1,), (0,)), ((), ())),
                precision=lax.Precision.HIGHEST,
                preferred_element_type=jnp.float32,
            )
        return jnp.moveaxis(rotated.reshape(last.shape), -1, self.axis)
