"""A Pallas kernel that reads a matrix in bfloat16 once, and writes MXFP8 along its rows, its columns, or both."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, BFloat16, Int32

from ..._numerics.quantized_array import MX_BLOCK
from ...formats import Format
from .swizzle import TILE, for_cudnn
from .tiles import call, codes


def quantize_mxfp8(
    x: BFloat16[Array, "rows columns"], format: Format, *, rows: bool, columns: bool, interpret: bool = False
) -> list[tuple[Array, ...]]:
    """The data and the bytes of scales, as `MXFP8Scaling()` has them.

    Args:
        x: The matrix, of whole tiles.
        format: The format of the data, E4M3 or E5M2.
        rows: Whether to quantize in blocks along the rows, for products that sum over columns.
        columns: Whether to quantize along the columns too, or alone. Data and scales are those of the transpose.
        interpret: Whether Pallas evaluates the GPU kernel on any device, for tests.

    Returns:
        For each, the data `[rows, columns]`, and the scales in cuDNN's order, see `for_cudnn`.
    """
    outs = [codes((x.shape[0], x.shape[1]), format.storage, MX_BLOCK, flipped=flipped) for flipped in (False, True)]
    outs = [out for out, is_wanted in zip(outs, (rows, columns), strict=True) if is_wanted]
    body = functools.partial(_body, rows=rows, columns=columns, maximum=format.max)
    return call(body, "mxfp8", x, outs, interpret=interpret)


def _body(x_ref: Any, *outs: Any, rows: bool, columns: bool, maximum: float) -> None:
    x, refs = x_ref[...], iter(outs)
    magnitude = lax.bitcast_convert_type(x, jnp.int16).astype(jnp.int32) & 0x7FFF
    x, blocks = x.astype(jnp.float32), TILE // MX_BLOCK
    for is_wanted, axis in ((rows, 2), (columns, 1)):
        if not is_wanted:
            continue
        data, scales = next(refs), next(refs)
        shape = (TILE, blocks, MX_BLOCK) if axis == 2 else (blocks, MX_BLOCK, TILE)
        amax = jnp.max(magnitude.reshape(shape), axis=axis)
        exponent = _exponent(amax, maximum)
        values = (x.reshape(shape) * jnp.expand_dims(_inverse(exponent), axis)).reshape(TILE, TILE)
        values = jnp.minimum(jnp.maximum(values, np.float32(-maximum)), np.float32(maximum))
        bytes = jnp.where(amax == 0, 0, exponent)
        if axis == 1:
            values, bytes = values.T, bytes.T
        data[...] = values.astype(data.dtype)
        scales[0, :, :] = for_cudnn(bytes).astype(jnp.uint8)


def _exponent(amax: Int32[Array, "..."], maximum: float) -> Int32[Array, "..."]:
    """The biased exponent of each scale by the rule "up", from the bits of a bfloat16; 255 for NaN and infinity."""
    exact = lax.bitcast_convert_type(amax << 16, jnp.float32) * np.float32(1.0 / maximum)
    bits = lax.bitcast_convert_type(exact, jnp.int32)
    exponent, significand = bits >> 23, bits & 0x7FFFFF
    # Of subnormal numbers the exponent is at least 1 in any case.
    up = (significand > 0) & (exponent > 0)
    return jnp.where(amax >= 0x7F80, 255, jnp.maximum(exponent + up.astype(jnp.int32), 1))


def _inverse(exponent: Int32[Array, "..."]) -> Array:
    """`2**(127 - exponent)`, NaN of 255. No other exponent is above 253, for amaxes are divided by the maximum."""
    return lax.bitcast_convert_type(jnp.where(exponent == 255, 0x7FC00000, (254 - exponent) << 23), jnp.float32)
