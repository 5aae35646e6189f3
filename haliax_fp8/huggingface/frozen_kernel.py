"""A kernel in FP8 or four bits that no optimizer sees."""

from typing import Any

import equinox as eqx
import haliax as hax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, DTypeLike, Float, UInt8, UInt32

from .._jax.xla import divisor_of_each
from .._numerics.formats import E2M1, FORMATS, Format
from .._numerics.quantized_array import expand


class FrozenKernel(eqx.Module):
    """Quantized data and scales as their bits, in whole numbers: not parameters, for `jax.grad`, `optax`, weight decay.

    Args:
        data: The bits of the data, `[*leading, out, in]`; of E2M1 two codes in a byte, `[*leading, out, in / 2]`.
        scale: The bits of the scales, `[*leading, rows of blocks, columns of blocks]`: of float32, or in bytes those of
            E8M0, or with a `unit` those of E4M3.
        input_scale: The bits of the float32 scale of the input, `[*leading]`, for exports; None without one.
        format: The dtype of the data.
        block: The rows and columns of a block.
        unit: The bits of the float32 scales of tensors, `[*leading]`, where those of blocks are in E4M3.
        divides: Whether `unit` and `input_scale` are reciprocals, as compressed-tensors has them in NVFP4.
    """

    data: UInt8[Array, "..."] | hax.NamedArray
    scale: UInt32[Array, "..."] | UInt8[Array, "..."] | hax.NamedArray
    input_scale: UInt32[Array, "..."] | hax.NamedArray | None
    format: np.dtype = eqx.field(static=True)
    block: tuple[int, int] = eqx.field(static=True)
    unit: UInt32[Array, "..."] | hax.NamedArray | None = None
    divides: bool = eqx.field(static=True, default=False)

    @property
    def storage(self) -> Format:
        """The format of the data."""
        return {**FORMATS, E2M1.dtype: E2M1}[self.format]

    @property
    def text(self) -> str:
        """What it is, for `describe`."""
        return "frozen"

    @property
    def recipe(self) -> None:
        """None: it multiplies in high precision."""
        return None

    def values(self, dtype: DTypeLike) -> Float[Array, "..."]:
        """`data * scale`, computed in float32 and rounded to a dtype, `[*leading, out, in]`."""
        data = self._plain(self.data)
        in_four = self.format == E2M1.dtype
        data = _of_codes(data) if in_four else lax.bitcast_convert_type(data, self.format).astype(jnp.float32)
        block = (*(1,) * (data.ndim - 2), *self.block)
        return (data * expand(self._scale(), data.shape, block)).astype(dtype)

    def _scale(self) -> Float[Array, "..."]:
        scale = self._plain(self.scale)
        if self.unit is not None:
            unit = lax.bitcast_convert_type(self._plain(self.unit), jnp.float32)[..., None, None]
            blocks = lax.bitcast_convert_type(scale, jnp.float8_e4m3fn).astype(jnp.float32)
            return blocks / divisor_of_each(unit, blocks.shape) if self.divides else blocks * unit
        if scale.dtype == jnp.uint8:
            # 0 means 2**-127, which is subnormal in float32.
            bits = scale.astype(jnp.uint32)
            scale = jnp.where(bits == 0, np.uint32(0x00400000), bits << np.uint32(23))
        return lax.bitcast_convert_type(scale, jnp.float32)

    def _plain(self, x: Any) -> Array:
        return x.array if isinstance(x, hax.NamedArray) else x


def _of_codes(packed: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """The values of codes of E2M1, of which the lower half of each byte is the first."""
    halves = jnp.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)
    codes = halves.reshape(*packed.shape[:-1], 2 * packed.shape[-1]).astype(jnp.uint32)
    magnitude, sign = codes & np.uint32(7), (codes & np.uint32(8)) << np.uint32(28)
    # Exponent and mantissa where float32 has them; only 0.5 is subnormal.
    normal = (magnitude << np.uint32(22)) + np.uint32(126 << 23)
    bits = jnp.where(magnitude < 2, magnitude * np.uint32(0x3F000000), normal)
    return lax.bitcast_convert_type(bits | sign, jnp.float32)
