"""QuantizedArray: data in a format and the scale that gives the values back."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Float32, Shaped, UInt8

from .._jax.xla import keep_cast, on_cpu
from ..formats import FORMATS, Format
from .casts import saturating_cast
from .rounding import Rotation


type Cast = Callable[[Array], Array]

# What hardware and XLA's scaled dot take: one E8M0 scale for 32 elements along the contraction.
MX_BLOCK = 32

# The same for NVFP4: one E4M3 scale for 16 elements.
NV_BLOCK = 16


class QuantizedArray(eqx.Module):
    """An array in a low-precision format: `x ≈ data * scale`.

    `scale` is a scalar for the whole array, or has the rank of `data`; then each of its elements belongs to a block of
    `data`, and `block` is the shape of a block. A scale of shape `(1, 1)` also belongs to the whole array, and one of
    shape `(rows, 1)` has an element per row. With `block=(1, 128)` each row has a scale for every 128 elements, and its
    last block may be partial. One rule covers all scalings.

    Args:
        data: The rounded values, in an element type of a `Format` (or unrounded, with scales of 1).
        scale: float32, positive (0 for a block of zeros); see above for its shape.
        block: The shape of a block. By default `data.shape / scale.shape`, which then has to divide evenly.
        scale_bits: The largest number of significant bits of any scale: 1 if all are powers of two, which multiply
            without rounding; 4 if the product of two scales is exact in bfloat16; 24 for any float32.
        rotation: The rotation applied to the values before they were quantized.
        tensor_scale: Of scales in two levels the one of the whole tensor, or of each member, with the rank of `data`:
            `scale / tensor_scale` is a value of E4M3, up to the rounding of `scale`. `scale` includes it.
        tensor_scale_bits: The largest number of significant bits of `tensor_scale`.
        swizzled: The bytes of the scales once more, in the order in which cuDNN reads those of a matrix; None if
            nothing has written them.
        amax: The largest magnitude of each member before it was quantized, `[*ensemble, 1, 1]`; infinite where one is
            not finite. None if the scaling has not found it on its way.

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
    scale_bits: int = eqx.field(static=True, default=24)
    rotation: Rotation | None = eqx.field(static=True, default=None)
    tensor_scale: Float32[Array, "*ones"] | None = None
    tensor_scale_bits: int = eqx.field(static=True, default=24)
    swizzled: UInt8[Array, "tiles pieces 512"] | None = None
    amax: Float32[Array, "*ensemble 1 1"] | None = None

    def __check_init__(self) -> None:
        if self.scale.ndim:
            check_blocks(self.data.shape, self.scale.shape, self.block)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values; that of the data, unless a rotation padded it."""
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
        """`data * scale` in float32, still rotated: enough for a product whose operands are rotated alike."""
        data = keep_cast(self.data)
        return lax.mul(lax.convert_element_type(data, jnp.float32), expand(self.scale, data.shape, self.block))


def check_blocks(data: tuple[int, ...], scale: tuple[int, ...], block: tuple[int, ...] | None) -> None:
    """Raises a ValueError unless a scale's shape fits the data's, by the rule of `QuantizedArray`."""
    if scale == ():
        return
    if len(data) != len(scale) or (block is not None and len(block) != len(data)):
        fits = False
    elif block is None:
        fits = all(s > 0 and d % s == 0 for d, s in zip(data, scale, strict=True) if d)
    else:
        fits = all(s == -(-d // b) for d, s, b in zip(data, scale, block, strict=True))
    if not fits:
        raise ValueError(
            f"scale of shape {scale} does not fit data of shape {data} with block={block}: unless it is a scalar, it "
            "needs the same rank and one element per block of data, as jnp.max(..., keepdims=True) returns it"
        )


def factors_out(x: QuantizedArray, contracted: tuple[int, ...]) -> bool:
    """Whether one scale serves everything that is summed, and blocks are whole axes or single elements.

    Args:
        x: An operand, which may be abstract.
        contracted: Its axes that a product sums over.
    """
    if x.scale.ndim == 0:
        return True
    whole = all(count in (1, size) for count, size in zip(x.scale.shape, x.data.shape, strict=True))
    return whole and all(x.scale.shape[axis] == 1 for axis in contracted)


def in_mx_blocks(x: QuantizedArray, contracted: int) -> bool:
    """Whether scales are powers of two for whole blocks of 32 along a contracted axis.

    Args:
        x: An operand, which may be abstract. Without elements it has no blocks to give to the hardware.
        contracted: The last axis that a product sums over.
    """
    return x.scale_bits == 1 and x.block is not None and x.block[contracted] % MX_BLOCK == 0 and x.data.size > 0


def in_nv_blocks(x: QuantizedArray, contracted: int) -> bool:
    """Whether scales are those of NVFP4: values of E4M3 times a scale of the tensor, for blocks of 16 along an axis.

    Args:
        x: An operand, which may be abstract. Without elements it has no blocks to give to the hardware.
        contracted: The last axis that a product sums over.
    """
    has_tensor_scale = x.tensor_scale is not None
    return has_tensor_scale and x.block is not None and x.block[contracted] == NV_BLOCK and x.data.size > 0


def expand(
    scale: Shaped[Array, "*blocks"], shape: tuple[int, ...], block: tuple[int, ...] | None = None
) -> Shaped[Array, "..."]:
    """Repeats each scale over its block, without a copy if one serves a whole dimension; a scalar stays a scalar."""
    if scale.ndim == 0:
        return scale
    for axis, (count, size) in enumerate(zip(scale.shape, shape, strict=True)):
        if count not in (1, size):
            repeats = size // count if block is None else block[axis]
            scale = jnp.repeat(scale, repeats, axis=axis)
            scale = lax.slice_in_dim(scale, 0, size, axis=axis)
    return lax.broadcast_in_dim(scale, shape, range(len(shape)))


def quantize(
    x: Float[ArrayLike, "*shape"], scale: Float32[ArrayLike, "*blocks"], cast: Format | DTypeLike | Cast
) -> QuantizedArray:
    """Divides by the scale, clips to the format's maximum and rounds.

    `data = cast(clip(x / scale, -max, max))`, computed in float32. It divides rather than multiplying by a reciprocal:
    the two differ in the last bit, and Flax divides. Infinities become NaN, and NaN stays NaN.

    Args:
        x: Values in any floating dtype.
        scale: float32 and positive, shaped as `QuantizedArray` says.
        cast: The format of the result or its dtype, rounding to nearest, ties to even; or a function that clips and
            rounds.

    Returns:
        The quantized array.

    Raises:
        ValueError: If `x` is not floating-point; if the scale is not float32, does not fit the shape of `x` or is not
            positive (checked only outside `jit`, where its values are known); or if `cast` is none of these.

    Example:
        >>> quantize(jnp.array([0.5, -1000.0]), 1.0, jnp.float8_e4m3fn).data
        Array([0.5, -448], dtype=float8_e4m3fn)
    """
    for name, value in (("x", x), ("scale", scale)):
        if isinstance(value, str | bytes) or value is None:
            raise ValueError(f"{name}={value!r} is not an array; use one such as jnp.float32(1.0)")
    x, scale = (jnp.asarray(v) if hasattr(v, "dtype") else jnp.asarray(v, jnp.float32) for v in (x, scale))
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x.dtype={x.dtype} is not floating-point; cast it with x.astype(jnp.float32)")
    if scale.dtype != jnp.float32:
        raise ValueError(f"scale.dtype={scale.dtype} must be float32; cast it with scale.astype(jnp.float32)")
    check_blocks(x.shape, scale.shape, None)
    if not isinstance(scale, Tracer) and not bool(jnp.all((scale > 0.0) & jnp.isfinite(scale))):
        raise ValueError(
            "scale must be positive and finite, because values are divided by it; use 1 for a block of zeros and "
            "amax / format.max otherwise"
        )
    return divide_by(x, scale, _format_or_cast(cast))


def divide_by(
    x: Float[Array, "*shape"], scale: Float32[Array, "*blocks"], cast: Format | Cast, *, scale_bits: int = 24
) -> QuantizedArray:
    """`quantize` without its checks of the arguments.

    Args:
        x: Values in any floating dtype.
        scale: float32, shaped as `QuantizedArray` says.
        cast: A format, or a function that clips and rounds.
        scale_bits: See `QuantizedArray`.
    """
    x = lax.convert_element_type(x, jnp.float32)
    return QuantizedArray(_as_cast(cast)(_divided(x, expand(scale, x.shape))), scale, scale_bits=scale_bits)


def quantize_by(
    x: Float[Array, "*shape"],
    multiplier: Float32[Array, "*blocks"],
    cast: Format | Cast,
    block: tuple[int, ...] | None = None,
    *,
    scale_bits: int = 24,
) -> QuantizedArray:
    """Multiplies, clips and rounds: `data = cast(clip(x * multiplier))`, `scale = 1 / multiplier`.

    TransformerEngine and torchao compute this when the scale comes from the tensor itself. A tensor, row or block that
    contains an infinity or NaN has a multiplier of NaN, so all of its data are NaN.

    Args:
        x: Values in any floating dtype.
        multiplier: float32, shaped as a scale.
        cast: As in `quantize`.
        block: The shape of a block, see `QuantizedArray`.
        scale_bits: See `QuantizedArray`; multipliers have the same number.
    """
    x = lax.convert_element_type(x, jnp.float32)
    data = _as_cast(cast)(lax.mul(x, expand(multiplier, x.shape, block)))
    return QuantizedArray(data, lax.div(np.float32(1.0), multiplier), block, scale_bits=scale_bits)


def _format_or_cast(cast: Any) -> Any:
    """Returns the format of a dtype, because calling the dtype would not clip; a format or a function unchanged."""
    with contextlib.suppress(TypeError):  # raised for anything but a dtype
        if not isinstance(cast, Format) and cast is not None:
            dtype = np.dtype(cast)
            if dtype in FORMATS:
                return FORMATS[dtype]
            raise ValueError(f"cast={dtype} is not the dtype of a format; use E4M3 or E5M2, or a function")
    if not (isinstance(cast, Format) or callable(cast)):
        raise ValueError(f"cast={cast!r} must be a format such as E4M3, its dtype, or a function that clips and rounds")
    return cast


def _divided(x: Float32[Array, "*shape"], scales: Float32[Array, "..."]) -> Float32[Array, "*shape"]:
    """`x / scales`, NaN for an infinite value: clipped, it would not show, and E4M3 has no infinity.

    A finite value that overflows when it is scaled is clipped like any other.
    """
    # `x - x` is 0 for finite values and NaN for others; subtracted, so that -0 stays. XLA's GPU fusions of norms do
    # not accept `is_finite`, so the cast after a norm would be a launch of its own; and a magnitude would be shared
    # with the amax, which would split the fusion. In float32, like the scaled values: otherwise XLA would also store
    # an activation computed in float32 in bfloat16. Before the division: after it, XLA reads the rows of experts once
    # more. In the divisor on CPUs, where XLA multiplies by the reciprocal of one divisor for all in some programs, so
    # that last bits depend on what else a program computes; elsewhere experts would take more launches.
    return on_cpu(
        lambda x, scales: lax.div(x, lax.add(scales, lax.sub(x, x))),
        lambda x, scales: lax.div(lax.sub(x, lax.sub(x, x)), scales),
        x,
        scales,
    )


def _as_cast(cast: Format | Cast) -> Cast:
    return functools.partial(saturating_cast, format=cast) if isinstance(cast, Format) else cast
