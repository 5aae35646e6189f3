"""QuantizedArray: data in a format and the scale that gives the values back."""

import functools
from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Shaped

from ._formats import Format, saturating_cast
from ._rotation import Rotation


type Cast = Callable[[Array], Array]


class QuantizedArray(eqx.Module):
    """An array in a low-precision format: `x ≈ data * scale`.

    `scale` is a scalar for the whole array, or has the rank of `data`; then each of its elements belongs to a block of
    `data`, and `block` is the shape of a block. A scale of shape `(1, 1)` belongs to the whole array too, `(rows, 1)`
    to each row, and with `block=(1, 128)` each row has a scale for every 128 elements, the last of which may be cut by
    the edge. One rule covers all scalings.

    Args:
        data: The rounded values, in an element type of a `Format` (or unrounded, with scales of 1).
        scale: float32, positive (0 for a block of zeros); see above for its shape.
        block: The shape of a block. By default `data.shape / scale.shape`, which then has to be whole.
        power_of_two: Whether every scale is a power of two, which multiplies without rounding.
        rotation: What the values were rotated by before they were quantized.

    Raises:
        ValueError: If the shapes break the rule.

    Example:
        >>> q = quantize(jnp.array([[1.0, -300.0]]), jnp.full((1, 1), 0.75), E4M3)
        >>> q.data.astype(jnp.float32), q.dequantize()
        (Array([[   1.375, -384.   ]], dtype=float32), Array([[   1.03125, -288.     ]], dtype=float32))
    """

    data: Float[Array, "*shape"]
    scale: Float32[Array, "*blocks"]
    block: tuple[int, ...] | None = eqx.field(static=True, default=None)
    power_of_two: bool = eqx.field(static=True, default=False)
    rotation: Rotation | None = eqx.field(static=True, default=None)

    def __check_init__(self) -> None:
        data, scale = self.data.shape, self.scale.shape
        if scale == ():
            return
        if len(data) != len(scale) or (self.block is not None and len(self.block) != len(data)):
            fits = False
        elif self.block is None:
            fits = all(s > 0 and d % s == 0 for d, s in zip(data, scale, strict=True) if d)
        else:
            fits = all(s == -(-d // b) for d, s, b in zip(data, scale, self.block, strict=True))
        if not fits:
            raise ValueError(
                f"scale of shape {scale} does not fit data of shape {data} with block={self.block}: a scale that is no "
                "scalar needs the same rank, and one element for each block of data"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values; that of the data, unless a rotation filled it up."""
        if self.rotation is None:
            return self.data.shape
        return tuple(
            self.rotation.length if axis == self.rotation.axis else n for axis, n in enumerate(self.data.shape)
        )

    def dequantize(self) -> Float32[Array, "*shape"]:
        """The values in float32: `data * scale`, rotated back."""
        values = self.dequantize_rotated()
        return values if self.rotation is None else self.rotation.undo(values)

    def dequantize_rotated(self) -> Float32[Array, "*data"]:
        """`data * scale` in float32, as it was quantized: enough for a product whose operands are rotated alike."""
        return lax.mul(
            lax.convert_element_type(self.data, jnp.float32), expand(self.scale, self.data.shape, self.block)
        )


def expand(
    scale: Shaped[Array, "*blocks"], shape: tuple[int, ...], block: tuple[int, ...] | None = None
) -> Shaped[Array, "..."]:
    """Repeats each scale over its block, without a copy where one serves a whole dimension; a scalar stays one."""
    if scale.ndim == 0:
        return scale
    for axis, (count, size) in enumerate(zip(scale.shape, shape, strict=True)):
        if count not in (1, size):
            repeats = size // count if block is None else block[axis]
            scale = jnp.repeat(scale, repeats, axis=axis)
            scale = lax.slice_in_dim(scale, 0, size, axis=axis)
    return lax.broadcast_in_dim(scale, shape, range(len(shape)))


def quantize(x: Float[Array, "*shape"], scale: Float32[Array, "*blocks"], cast: Format | Cast) -> QuantizedArray:
    """Divides by the scale, clips to the format's maximum and rounds.

    `data = cast(clip(x / scale, -max, max))`, computed in float32. It divides, and does not multiply by a reciprocal:
    the two differ in the last bit, and the division is what Flax computes. Infinities become NaN, and NaN stays.

    Args:
        x: Values in any floating dtype.
        scale: float32, shaped as `QuantizedArray` says.
        cast: The format of the result, rounding to nearest, ties to even; or a function that clips and rounds.

    Returns:
        The quantized array.
    """
    quotient = lax.div(lax.convert_element_type(x, jnp.float32), expand(scale, x.shape))
    return QuantizedArray(_as_cast(cast)(_visible(x, quotient)), scale)


def quantize_by(
    x: Float[Array, "*shape"],
    multiplier: Float32[Array, "*blocks"],
    cast: Format | Cast,
    block: tuple[int, ...] | None = None,
    *,
    power_of_two: bool = False,
) -> QuantizedArray:
    """Multiplies, clips and rounds: `data = cast(clip(x * multiplier))`, `scale = 1 / multiplier`.

    What TransformerEngine and torchao compute where the scale comes from the tensor itself. What holds an infinity or
    NaN, be it a tensor, a row or a block, has a multiplier of NaN, and so are all of its data.

    Args:
        x: Values in any floating dtype.
        multiplier: float32, shaped as a scale.
        cast: As in `quantize`.
        block: The shape of a block, see `QuantizedArray`.
        power_of_two: Whether all multipliers are powers of two.
    """
    x = lax.convert_element_type(x, jnp.float32)
    data = _as_cast(cast)(lax.mul(x, expand(multiplier, x.shape, block)))
    return QuantizedArray(data, lax.div(lax.full_like(multiplier, 1.0), multiplier), block, power_of_two=power_of_two)


def _visible(x: Float[Array, "*shape"], scaled: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """`scaled`, or NaN where `x` is infinite: clipped, it would pass for a value that training may use.

    E4M3 has no infinity. A finite value that overflows when it is scaled is clipped as any other.
    """
    # `x - x` is 0 of finite values alone. XLA's fusions of norms for GPUs take no `is_finite`, so that the cast behind
    # a norm would be a kernel of its own; and a magnitude here is shared with the amax, which tears the two apart.
    finite = lax.eq(lax.sub(x, x), lax.full_like(x, 0.0))
    return lax.select(finite, scaled, lax.full_like(scaled, np.nan))


def _as_cast(cast: Format | Cast) -> Cast:
    return functools.partial(saturating_cast, format=cast) if isinstance(cast, Format) else cast
