"""The cast to a format, which saturates."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32

from .._arguments import require
from ..formats import Format


def saturating_cast(x: Float[Array, "*shape"], format: Format) -> Float[Array, "*shape"]:
    """Rounds to the nearest value of a format, ties to even, and clips values beyond its maximum.

    `cast(clip(x, -max, max))`. The clip comes first because the cast alone does not saturate: values above 464 become
    NaN in E4M3, and values from 61440 infinity in E5M2 (jax-ml/ml_dtypes#260). Infinities become ±max; NaN stays.

    Args:
        x: Values to round, any floating dtype.
        format: The format to round to.

    Returns:
        An array of `format.storage` with the shape of `x`.

    Raises:
        ValueError: If `x` is not a floating-point array, or `format` is not a `Format`.

    Example:
        >>> saturating_cast(jnp.array([1.06, 465.0, -jnp.inf]), E4M3).astype(jnp.float32)
        Array([   1.,  448., -448.], dtype=float32)
    """
    require("format", format, Format, "E4M3 or E5M2", of="saturating_cast")
    if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.floating):
        kind = f"{getattr(x, 'dtype', type(x).__name__)}"
        raise ValueError(f"x of saturating_cast is {kind}, not a floating-point array; cast it to float32 first")
    if jnp.finfo(x.dtype).bits < 16:
        # An element type this narrow may not hold the limit: E5M2's maximum, cast to E4M3, is NaN.
        x = x.astype(jnp.float32)
    limit = np.asarray(format.max, x.dtype)
    x = lax.clamp(-limit, x, limit)
    storage = format.storage
    if storage != format.dtype:
        # The cast below rounds to the storage type; this rounds to the format itself.
        x = x.astype(jnp.float32)
        spacing = spacing_of(jnp.abs(x), format)
        x = lax.round(x / spacing, lax.RoundingMethod.TO_NEAREST_EVEN) * spacing
    return lax.convert_element_type(x, storage)


def spacing_of(magnitude: Float32[Array, "*shape"], format: Format) -> Float32[Array, "*shape"]:
    """The distance from the format's value at or below `magnitude` to the next one: a power of two."""
    bits = lax.bitcast_convert_type(magnitude, jnp.uint32)
    binade = lax.bitcast_convert_type(bits & np.uint32(0x7F800000), jnp.float32)
    # Below the smallest normal value, all values are equally spaced.
    return lax.max(binade, np.float32(format.smallest_normal)) * np.float32(2.0**-format.mantissa_bits)
