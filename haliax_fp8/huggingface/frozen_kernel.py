"""A kernel in FP8 that no optimizer sees."""

import equinox as eqx
import haliax as hax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, DTypeLike, Float, UInt8, UInt32

from .._numerics.quantized_array import expand


class FrozenKernel(eqx.Module):
    """FP8 data and scales as their bits, in whole numbers: not parameters, for `jax.grad`, `optax` and weight decay.

    Args:
        data: The bits of the data, `[*leading, out, in]`.
        scale: The bits of the float32 scales, `[*leading, rows of blocks, columns of blocks]`.
        input_scale: The bits of the float32 scale of the input, `[*leading]`, for exports; None without one.
        format: The dtype of the data.
        block: The rows and columns of a block.
    """

    data: UInt8[Array, "..."] | hax.NamedArray
    scale: UInt32[Array, "..."] | hax.NamedArray
    input_scale: UInt32[Array, "..."] | hax.NamedArray | None
    format: np.dtype = eqx.field(static=True)
    block: tuple[int, int] = eqx.field(static=True)

    def values(self, dtype: DTypeLike) -> Float[Array, "..."]:
        """`data * scale`, computed in float32 and rounded to a dtype, `[*leading, out, in]`."""
        data, scale = (x.array if isinstance(x, hax.NamedArray) else x for x in (self.data, self.scale))
        data = lax.bitcast_convert_type(data, self.format).astype(jnp.float32)
        scale = lax.bitcast_convert_type(scale, jnp.float32)
        block = (*(1,) * (data.ndim - 2), *self.block)
        return (data * expand(scale, data.shape, block)).astype(dtype)
