"""Pallas kernels for NVFP4: one reads a matrix in bfloat16 for its amax, one again and writes codes and scales.

Two passes, because all scales contain that of the whole tensor.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, BFloat16, Float32, Int32, UInt32

from ..._numerics.quantized_array import NV_BLOCK
from ..._numerics.rounding import hashed, rotation_matrix
from ...formats import E2M1, E4M3
from .swizzle import TILE, for_cudnn
from .tiles import Out, call, codes


class Side(NamedTuple):
    """How a matrix is quantized along its rows (axis 1), or its columns (axis 0).

    Args:
        axis: Along which axis blocks run.
        is_rotated: Whether every 16 elements along that axis are rotated first; along columns alone.
        is_square: Whether blocks are squares.
        is_drawn: Whether it is rounded at random.
    """

    axis: int
    is_rotated: bool
    is_square: bool
    is_drawn: bool


def amaxes(
    x: BFloat16[Array, "rows columns"], sides: Sequence[Side], *, interpret: bool = False
) -> list[Float32[Array, ""]]:
    """The largest magnitude for each side, rotated for some, but for blocks that hold an infinity or NaN."""
    tiles, body = (x.shape[0] // TILE, x.shape[1] // TILE), functools.partial(_amax_body, sides=sides)
    shape = jax.ShapeDtypeStruct((len(sides), *tiles), jnp.int32)
    # In one array, of which XLA takes the maxima in one launch.
    out = Out(shape, pl.BlockSpec((len(sides), 1, 1), lambda i, j: (0, i, j)))
    ((of_tiles,),) = call(body, "amax", x, [(out,)], *_rotations(sides), interpret=interpret)
    largest = _as_float(jnp.max(of_tiles, axis=(1, 2)))
    return [largest[index] for index in range(len(sides))]


def quantize_nvfp4(
    x: BFloat16[Array, "rows columns"],
    sides: Sequence[Side],
    scales: Float32[Array, "sides 3"],
    seeds: Sequence[UInt32[Array, ""]],
    *,
    keeps_amax: bool = False,
    interpret: bool = False,
) -> list[Any]:
    """The codes, two in a byte, and the bytes of scales, as `NVFP4Scaling` has them.

    Args:
        x: The matrix, of whole tiles.
        sides: How it is quantized.
        scales: For each side, what the amaxes of blocks are multiplied by, the smallest scale but zero, and the
            tensor's scale.
        seeds: The seed of the hash for each side that is rounded at random.
        keeps_amax: Whether to find the amax of the matrix too.
        interpret: Whether Pallas evaluates the GPU kernel on any device, for tests.

    Returns:
        For each side the codes `[rows, columns / 2]`, and the scales in cuDNN's order, see `for_cudnn`; along columns,
        those of the transpose. Last the amax, infinite if an element is not finite; None if it is not wanted.
    """
    outs: list[tuple[Out, ...]] = [
        codes((x.shape[0], x.shape[1]), np.dtype(np.uint8), NV_BLOCK, flipped=side.axis == 0, packed=2)
        for side in sides
    ]
    if keeps_amax:
        tiles = jax.ShapeDtypeStruct((x.shape[0] // TILE, x.shape[1] // TILE), jnp.int32)
        outs.append((Out(tiles, pl.BlockSpec((1, 1), lambda i, j: (i, j))),))
    body = functools.partial(_body, sides=sides, width=x.shape[1], keeps_amax=keeps_amax)
    others = *_rotations(sides), *([jnp.stack(seeds)] if seeds else []), scales
    results: list[Any] = call(body, "nvfp4", x, outs, *others, interpret=interpret)
    if not keeps_amax:
        return [*results, None]
    *results, (of_tiles,) = results
    return [*results, _as_float(jnp.minimum(jnp.max(of_tiles), _INFINITY))]


def _rotations(sides: Sequence[Side]) -> list[Array]:
    if not any(side.is_rotated for side in sides):
        return []
    return [jnp.asarray(np.kron(np.eye(TILE // NV_BLOCK), rotation_matrix().T), jnp.bfloat16)]


def _amax_body(x_ref: Any, *refs: Any, sides: Sequence[Side]) -> None:
    *rotation, out = refs
    rotation, x = [ref[...] for ref in rotation], x_ref[...]
    for index, side in enumerate(sides):
        amax = _amax_of_blocks(_rotated(x, side, rotation), side)
        out[index, 0, 0] = jnp.max(jnp.where(amax < _INFINITY, amax, 0))


def _body(x_ref: Any, *refs: Any, sides: Sequence[Side], width: int, keeps_amax: bool) -> None:
    count = 2 * len(sides) + keeps_amax
    *others, scales = refs[:-count]
    seeds = others.pop() if any(side.is_drawn for side in sides) else None
    rotation, outs, x = [ref[...] for ref in others], iter(refs[-count:]), x_ref[...]
    drawn = [side for side in sides if side.is_drawn]
    for index, side in enumerate(sides):
        values = _rotated(x, side, rotation)
        amax = _amax_of_blocks(values, side)
        rounded, inverse = _scale_of_blocks(amax, *(scales[index, i] for i in range(3)), up=side.is_drawn)
        uniform = None if seeds is None or not side.is_drawn else _uniform(width, seeds[drawn.index(side)])
        code = _codes(values.astype(jnp.float32) * _expanded(inverse, side), uniform)
        if side.is_square:
            blocks = TILE // NV_BLOCK
            repeated = (blocks, NV_BLOCK, blocks) if side.axis == 1 else (blocks, blocks, NV_BLOCK)
            rounded = jnp.broadcast_to(jnp.expand_dims(rounded, 1 if side.axis == 1 else 2), repeated)
            rounded = rounded.reshape((TILE, blocks) if side.axis == 1 else (blocks, TILE))
        if side.axis == 0:
            code, rounded = code.T, rounded.T
        # The first of two is in the lower half of a byte.
        pairs = code.reshape(TILE, TILE // 2, 2) << (4 * lax.broadcasted_iota(jnp.int32, (TILE, TILE // 2, 2), 2))
        next(outs)[...] = jnp.sum(pairs, axis=2).astype(jnp.uint8)
        next(outs)[0, :, :] = for_cudnn(rounded)
    if keeps_amax:
        next(outs)[0, 0] = jnp.max(_magnitude(x))


def _rotated(x: Array, side: Side, rotation: Sequence[Array]) -> Array:
    if not side.is_rotated:
        return x
    # All groups of a tile are one product, in which an infinity or NaN would get into the others.
    is_finite = _magnitude(x) < _INFINITY
    rotated = jnp.dot(rotation[0], jnp.where(is_finite, x, jnp.bfloat16(0.0)), preferred_element_type=jnp.float32)
    is_finite = _expanded(_amax_of_blocks(x, side) < _INFINITY, side)
    return jnp.where(is_finite, rotated, np.float32(np.nan)).astype(jnp.bfloat16)


_INFINITY = 0x7F80
"""The bits of infinity in bfloat16; those of every NaN are larger."""


def _magnitude(x: Array) -> Int32[Array, "..."]:
    return lax.bitcast_convert_type(x, jnp.int16).astype(jnp.int32) & 0x7FFF


def _split(side: Side) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of a tile with its blocks apart, and the axes within them."""
    blocks = TILE // NV_BLOCK, NV_BLOCK
    if side.is_square:
        return blocks + blocks, (1, 3)
    return ((TILE, *blocks), (2,)) if side.axis == 1 else ((*blocks, TILE), (1,))


def _amax_of_blocks(x: Array, side: Side) -> Int32[Array, "..."]:
    """The largest magnitude of each block, as the bits of a bfloat16."""
    shape, axes = _split(side)
    magnitude = _magnitude(x).reshape(shape)
    for axis in reversed(axes):
        magnitude = jnp.max(magnitude, axis=axis)
    return magnitude


def _expanded(blocks: Array, side: Side) -> Array:
    """A number for each block, at each of its elements."""
    shape, axes = _split(side)
    return jnp.broadcast_to(jnp.expand_dims(blocks, axes), shape).reshape(TILE, TILE)


def _as_float(bits: Int32[Array, "..."]) -> Float32[Array, "..."]:
    return lax.bitcast_convert_type(bits << 16, jnp.float32)


def _spacing(magnitude: Array, smallest: float, mantissa: int) -> Array:
    binade = lax.bitcast_convert_type(lax.bitcast_convert_type(magnitude, jnp.int32) & 0x7F800000, jnp.float32)
    return jnp.maximum(binade, np.float32(smallest)) * np.float32(2.0**-mantissa)


def _scale_of_blocks(bits: Array, multiplier: Array, smallest: Array, unit: Array, *, up: bool) -> tuple[Array, Array]:
    """The bits of each block's scale in E4M3, and what its elements are multiplied by."""
    exact = _as_float(bits) * multiplier
    exact = jnp.where(bits > 0, jnp.maximum(exact, smallest), np.float32(0.0))
    exact = jnp.minimum(exact, np.float32(E4M3.max))
    if up:
        spacing = _spacing(exact, E4M3.smallest_normal, E4M3.mantissa_bits)
        exact = jnp.ceil(exact / spacing) * spacing
    rounded = exact.astype(E4M3.dtype)
    inverse = jnp.minimum(np.float32(1.0) / (rounded.astype(jnp.float32) * unit), np.finfo(np.float32).max)
    return jnp.where(bits >= _INFINITY, 0x7F, lax.bitcast_convert_type(rounded, jnp.uint8)).astype(jnp.uint8), inverse


# Adding and subtracting it rounds a small number to an integer, ties to even.
_ROUNDS = np.float32(1.5 * 2**23)


def _codes(values: Float32[Array, "..."], uniform: Float32[Array, "..."] | None) -> Int32[Array, "..."]:
    """The four bits of each value in E2M1, rounded to nearest, or at random by numbers in [0, 1)."""
    sign = jnp.where(lax.bitcast_convert_type(values, jnp.int32) < 0, 8, 0)
    magnitude = jnp.minimum(jnp.abs(values), np.float32(E2M1.max))
    spacing = _spacing(magnitude, E2M1.smallest_normal, E2M1.mantissa_bits)
    steps = magnitude / spacing
    if uniform is None:
        steps = (steps + _ROUNDS) - _ROUNDS
    else:
        lower = jnp.floor(steps)
        steps = jnp.where(uniform < steps - lower, lower + np.float32(1.0), lower)
    rounded = steps * spacing
    # 0, 0.5, 1, 1.5, 2, 3, 4, 6
    index = jnp.where(rounded <= 2.0, rounded * 2.0, jnp.where(rounded <= 4.0, rounded + 2.0, 7.0))
    return index.astype(jnp.int32) | sign


def _uniform(width: int, seed: Array) -> Float32[Array, "..."]:
    """What `Rounding.STOCHASTIC` draws for a tile of a matrix with so many columns."""
    row, column = (
        lax.broadcasted_iota(jnp.uint32, (TILE, TILE), axis) + jnp.uint32(TILE) * pl.program_id(axis).astype(jnp.uint32)
        for axis in (0, 1)
    )
    bits = hashed((row * np.uint32(width) + column) ^ seed) >> np.uint32(8)
    return bits.astype(jnp.int32).astype(jnp.float32) * np.float32(2.0**-24)
