"""QuantizedArray: data in a format and the scale that gives the values back."""

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from ._formats import Format, saturating_cast


class QuantizedArray(eqx.Module):
    """An array in a low-precision format: `x ≈ data * scale`.

    `scale` has the rank of `data`, and each of its dimensions divides the dimension of `data`: a scale of shape
    `(1, 1)` belongs to the whole array, `(rows, 1)` to each row, `(rows // 128, columns // 128)` to each block of
    128x128. One rule covers all scalings.

    Args:
        data: The rounded values, in an element type of a `Format`.
        scale: float32, positive; see above for its shape.

    Raises:
        ValueError: If the shapes break the rule.

    Example:
        >>> q = quantize(jnp.array([[1.0, -300.0]]), jnp.full((1, 1), 0.75), E4M3)
        >>> q.data.astype(jnp.float32), q.dequantize()
        (Array([[   1.375, -384.   ]], dtype=float32), Array([[   1.03125, -288.     ]], dtype=float32))
    """

    data: Float[Array, "*shape"]
    scale: Float32[Array, "*blocks"]

    def __check_init__(self) -> None:
        data, scale = self.data.shape, self.scale.shape
        if len(data) != len(scale) or any(s == 0 or d % s for d, s in zip(data, scale, strict=True) if d):
            raise ValueError(
                f"scale of shape {scale} does not fit data of shape {data}: "
                "both need the same rank, and each dimension of scale must divide that of data"
            )

    def dequantize(self) -> Float32[Array, "*shape"]:
        """The values in float32: `data * scale`."""
        return self.data.astype(jnp.float32) * expand(self.scale, self.data.shape)


def expand(scale: Float32[Array, "*blocks"], shape: tuple[int, ...]) -> Float32[Array, "*shape"]:
    """Repeats each scale over its block, without a copy where one scale serves a whole dimension."""
    if scale.size == 1:
        return lax.broadcast_in_dim(lax.reshape(scale, ()), shape, ())
    for axis, (blocks, size) in enumerate(zip(scale.shape, shape, strict=True)):
        if blocks not in (1, size):
            scale = jnp.repeat(scale, size // blocks, axis=axis)
    return lax.broadcast_in_dim(scale, shape, range(len(shape)))


def quantize(x: Float[Array, "*shape"], scale: Float32[Array, "*blocks"], format: Format) -> QuantizedArray:
    """Divides by the scale, clips to the format's maximum and rounds to nearest, ties to even.

    `data = cast(clip(x / scale, -max, max))`, computed in float32. It divides, and does not multiply by a reciprocal:
    the two differ in the last bit, and the division is what Flax computes.

    Args:
        x: Values in any floating dtype.
        scale: float32, shaped as `QuantizedArray` says.
        format: The format of the result.

    Returns:
        The quantized array.
    """
    x = lax.convert_element_type(x, jnp.float32)
    data = saturating_cast(lax.div(x, expand(scale, x.shape)), format)
    return QuantizedArray(data, scale)
