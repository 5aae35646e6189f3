"""An operand in blocks, read once for both of its products: by a GPU kernel where one fits, and otherwise by XLA."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import mlir
from jaxtyping import Array, BFloat16

from ..._jax.custom_partitioning import devices_of, has_its_part
from ..._jax.meshes import aval_of_result
from ..._jax.primitives import define, mapped_in_front
from ..._numerics.formats import Format
from ..._numerics.quantized_array import MX_BLOCK, QuantizedArray
from ..._numerics.stored_array import power_of_two
from ...devices.device import Device
from ...recipes.scaling import AbstractScaling, Members, MXFP8Scaling, OperandUse
from .check import check_once
from .tiles import TILE, in_rows


class BlockUse(NamedTuple):
    """What is static about one use of an operand.

    Args:
        scaling: How it is quantized.
        format: The format of the data.
        contracted: The axes that the product sums over, the first or the last ones of the operand.
    """

    scaling: AbstractScaling
    format: Format
    contracted: tuple[int, ...]

    def matrix(self, shape: Sequence[int]) -> tuple[int, int]:
        """The free elements and those that are summed."""
        summed = math.prod(shape[axis] for axis in self.contracted)
        return math.prod(shape) // summed, summed

    def is_trailing(self, ndim: int) -> bool:
        """Whether the last axes are summed, and so the rows of the matrix that has the operand's order."""
        return self.contracted[-1] == ndim - 1


def in_one_pass(
    x: Array, scaling: AbstractScaling, use: OperandUse, other: tuple[int, ...] | None
) -> QuantizedArray | None:
    """What `scaling.quantize(x, use)` returns, by a kernel that may serve another use too; None if none fits.

    Two calls for two uses are the same launch: XLA merges them.

    Args:
        x: The operand.
        scaling: How it is quantized.
        use: What is done with it.
        other: The axes that the operand's other product sums over, if that one takes it too and is quantized now.
    """
    uses = [BlockUse(scaling, use.format, axes) for axes in (use.contracted, other) if axes is not None]
    if not _fits(x, use, uses):
        return None
    device = Device.default()
    check_once(device)
    uses = sorted(dict.fromkeys(uses), key=lambda one: -one.contracted[-1])
    index = [one.contracted for one in uses].index(use.contracted)
    results = quantize_blocks_p.bind(x, uses=tuple(uses), device=device)
    data, bits, swizzled = results[3 * index : 3 * index + 3]
    block = tuple(MX_BLOCK if axis == use.contracted[-1] else 1 for axis in range(x.ndim))
    return QuantizedArray(data, power_of_two(bits.astype(jnp.int32)), block, scale_bits=1, swizzled=swizzled)


def _fits(x: Array, use: OperandUse, uses: Sequence[BlockUse]) -> bool:
    """Whether a kernel computes what the scaling would: whole tiles of a matrix in bfloat16 on a B200."""
    plain = type(use.members) is Members and not use.ensemble and use.contiguous_sum and not use.rounding.needs_key
    known = isinstance(scaling := uses[0].scaling, MXFP8Scaling) and dataclasses.replace(scaling, padding=True) == (
        MXFP8Scaling()
    )
    if not (plain and known and x.dtype == jnp.bfloat16 and use.format.storage == use.format.dtype):
        return False
    return Device.default().is_cuda_from(10.0, below=11.0) and all(_is_matrix(x.shape, one) for one in uses)


def _is_matrix(shape: tuple[int, ...], use: BlockUse) -> bool:
    count, ndim = len(use.contracted), len(shape)
    if not 0 < count < ndim or use.contracted not in (tuple(range(count)), tuple(range(ndim - count, ndim))):
        return False
    is_tiled = all(size and size % TILE == 0 for size in use.matrix(shape))
    return is_tiled and shape[use.contracted[-1]] % MX_BLOCK == 0


# --- The primitive ----------------------------------------------------------------------------------------------------


def by_xla(x: Array, *, uses: tuple[BlockUse, ...], device: Device) -> list[Array]:
    """For each use the data, the bytes of the scales, and these in cuDNN's order of the matrix."""
    del device
    results = []
    for use in uses:
        quantized = use.scaling.quantize(x, OperandUse(use.format, use.contracted))
        bits = (lax.bitcast_convert_type(quantized.scale, jnp.uint32) >> 23).astype(jnp.uint8)
        rows, summed = use.matrix(x.shape)
        free = [axis for axis in range(x.ndim) if axis not in use.contracted]
        matrix = lax.transpose(bits, (*free, *use.contracted)).reshape(rows, summed // MX_BLOCK)
        pieces = matrix.reshape(rows // TILE, 4, 32, -1, 4).transpose(0, 3, 2, 1, 4)
        results += [quantized.data, bits, pieces.reshape(rows // TILE, -1, 4 * TILE)]
    return results


def by_kernel(
    x: BFloat16[Array, "*shape"], *, uses: tuple[BlockUse, ...], device: Device, interpret: bool = False
) -> list[Array]:
    """The same by a GPU kernel, on one device."""
    from .mxfp8 import quantize_mxfp8

    del device
    first = uses[0]
    trailing = {use.is_trailing(x.ndim): use for use in uses}
    rows, summed = first.matrix(x.shape)
    matrix = x.reshape(rows, summed) if first.is_trailing(x.ndim) else x.reshape(summed, rows)
    wanted = {"rows": True in trailing, "columns": False in trailing}
    found = iter(quantize_mxfp8(matrix, first.format, **wanted, interpret=interpret))
    results = []
    for use in uses:
        data, swizzled = next(found)
        free = [axis for axis in range(x.ndim) if axis not in use.contracted]
        order = (*free, *use.contracted)
        shape = [x.shape[axis] for axis in order]
        back = [order.index(axis) for axis in range(x.ndim)]
        bits = in_rows(swizzled).reshape(*shape[:-1], shape[-1] // MX_BLOCK)
        results += [lax.transpose(data.reshape(shape), back), lax.transpose(bits, back), swizzled]
    return results


def _avals(x: Any, *, uses: tuple[BlockUse, ...], device: Device) -> list[Any]:
    found = jax.eval_shape(lambda x: by_xla(x, uses=uses, device=device), jax.ShapeDtypeStruct(x.shape, x.dtype))
    return [aval_of_result(x, out.shape, out.dtype) for out in found]


def _batched(args: Any, axes: Any, **params: Any) -> tuple[Any, Any]:
    results = jax.vmap(lambda x: by_xla(x, **params))(*mapped_in_front(args, axes))
    return results, [0] * len(results)


def _lowered(context: Any, x: Any, *, device: Device, **params: Any) -> Any:
    is_alone = devices_of(context) == 1 or has_its_part(context)
    function: Callable[..., Any] = by_kernel if is_alone else by_xla
    with device.as_default():
        return mlir.lower_fun(lambda x: function(x, device=device, **params), multiple_results=True)(context, x)


quantize_blocks_p = define(
    "fp8_quantize_blocks",
    function=by_xla,
    aval=_avals,
    batch=_batched,
    cuda=_lowered,
    multiple_results=True,
)
