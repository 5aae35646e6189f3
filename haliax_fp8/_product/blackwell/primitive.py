"""The primitive that quantizes an operand in blocks: by GPU kernels on one device, and otherwise by XLA."""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import mlir
from jaxtyping import Array, BFloat16, Float32

from ..._jax.custom_partitioning import devices_of, has_its_part
from ..._jax.meshes import aval_of_result
from ..._jax.opaque import as_if_on_one_device
from ..._jax.primitives import define, mapped_in_front
from ..._numerics.quantized_array import QuantizedArray
from ..._numerics.rounding import GROUP, Rotation, Rounding
from ..._numerics.stored_array import power_of_two
from ...devices.device import Device
from ...formats import E2M1, E4M3, Format
from ...recipes.scaling import AbstractScaling, HadamardScaling, MXFP8Scaling, NVFP4Scaling, OperandUse
from ...recipes.scaling.multiplier import amax_over
from ...recipes.scaling.nvfp4 import SMALLEST_SCALE, unit_of_amax, unit_of_stored
from ..blocks import MX, NV, Blocks, in_blocks
from .swizzle import TILE, in_rows


class BlockUse(NamedTuple):
    """What is static about one use of an operand.

    Args:
        scaling: How it is quantized.
        format: The format of the data.
        rounding: How they are rounded.
        contracted: The axes that the product sums over, the first or the last ones of the operand.
        scale_bits: As in `OperandUse`.
    """

    scaling: AbstractScaling
    format: Format
    rounding: Rounding
    contracted: tuple[int, ...]
    scale_bits: int

    @property
    def after_rotation(self) -> AbstractScaling:
        """The scaling of what is rotated, or of the operand."""
        return self.scaling.scaling if isinstance(self.scaling, HadamardScaling) else self.scaling

    @property
    def is_delayed(self) -> bool:
        """Whether its scale for the tensor is stored."""
        return self.scaling.memory is not None

    @property
    def blocks(self) -> Blocks:
        """The kind of blocks."""
        return NV if isinstance(self.after_rotation, NVFP4Scaling) else MX

    def matrix(self, shape: Sequence[int]) -> tuple[int, int]:
        """The free elements and those that are summed."""
        summed = math.prod(shape[axis] for axis in self.contracted)
        return math.prod(shape) // summed, summed

    def order(self, ndim: int) -> tuple[int, ...]:
        """The axes of the operand as those of that matrix."""
        return (*(axis for axis in range(ndim) if axis not in self.contracted), *self.contracted)

    def is_trailing(self, ndim: int) -> bool:
        """Whether the last axes are summed, so that the operand itself is that matrix, and not its transpose."""
        return self.contracted[-1] == ndim - 1

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a kernel computes what the scaling would, of whole tiles of a matrix."""
        scaling, count, ndim = self.after_rotation, len(self.contracted), len(shape)
        ends = tuple(range(count)), tuple(range(ndim - count, ndim))
        if not 0 < count < ndim or self.contracted not in ends:
            return False
        if not all(size and size % TILE == 0 for size in self.matrix(shape)) or shape[self.contracted[-1]] % 32:
            return False
        if isinstance(scaling, NVFP4Scaling):
            # All other fields as they are by default.
            known = NVFP4Scaling(square=scaling.square, padding=scaling.padding, delayed=scaling.delayed)
            is_known = scaling == known and self.format == E2M1
            return is_known and not (self.scaling is not scaling and self.is_trailing(ndim))
        is_known = isinstance(scaling, MXFP8Scaling) and not scaling.square and scaling.scale_rounding == "up"
        # The cast to a format that is stored in a wider one is another.
        is_plain = self.scaling is scaling and self.format.storage == self.format.dtype
        return is_known and is_plain and not self.rounding.needs_key


def as_quantized(results: Sequence[Array], uses: Sequence[BlockUse]) -> list[QuantizedArray]:
    """The operand as it is quantized for each use, from what the primitive returns."""
    results, by_use, amax = [*results], [], None
    if any(use.is_delayed for use in uses):
        amax = results.pop()
    count = len(results) // len(uses)
    for index, use in enumerate(uses):
        data, bits, swizzled, *unit = results[count * index :][:count]
        last = use.contracted[-1]
        block = tuple(use.blocks.size if axis == last else 1 for axis in range(data.ndim))
        if not unit:
            scale = power_of_two(bits.astype(jnp.int32))
            by_use.append(QuantizedArray(data, scale, block, scale_bits=1, swizzled=swizzled))
            continue
        rotation = None if use.scaling is use.after_rotation else Rotation(last, data.shape[last])
        scale = lax.bitcast_convert_type(bits, E4M3.dtype).astype(jnp.float32) * unit[0]
        two_levels = {"tensor_scale": unit[0], "tensor_scale_bits": use.scale_bits}
        by_use.append(QuantizedArray(data, scale, block, rotation=rotation, swizzled=swizzled, amax=amax, **two_levels))
    return by_use


# --- The primitive ----------------------------------------------------------------------------------------------------


def by_xla(x: Array, *others: Array, uses: tuple[BlockUse, ...]) -> list[Array]:
    """For each use the data, the bytes of the scales, these in cuDNN's order, and in NVFP4 the scale of the tensor.

    Last, if that is stored, the amax of the operand.

    Args:
        x: The operand.
        *others: The words of the keys, of uses that round at random; and the scale that is stored, if one is.
        uses: What it is quantized for.
    """
    results, amax, remaining = [], None, iter(others)
    stored = others[-1] if any(use.is_delayed for use in uses) else None
    for use in uses:
        key = jax.random.wrap_key_data(next(remaining), impl="threefry2x32") if use.rounding.needs_key else None
        static = OperandUse(
            use.format,
            use.contracted,
            stored_scale=stored if use.is_delayed else None,
            rounding=use.rounding,
            key=key,
            scale_bits=use.scale_bits,
        )
        quantized = use.scaling.quantize(x, static)
        amax = quantized.amax if amax is None else amax
        data, bits = in_blocks(quantized, use.contracted[-1], use.blocks)
        data = data if use.blocks.data is None else data.astype(use.blocks.data)
        rows, summed = use.matrix(x.shape)
        matrix = lax.transpose(bits, use.order(x.ndim)).reshape(rows // TILE, 4, 32, -1, 4)
        results += [data, bits, matrix.transpose(0, 3, 2, 1, 4).reshape(rows // TILE, -1, 4 * TILE)]
        if quantized.tensor_scale is not None:
            results.append(quantized.tensor_scale)
    if stored is not None:
        results.append(_amax(x) if amax is None else amax)
    return results


def _amax(x: BFloat16[Array, "*shape"]) -> Float32[Array, "1 1"]:
    """The largest magnitude; infinite if one is not finite."""
    amax = amax_over(x, tuple(range(x.ndim)), keepdims=False)
    return jnp.where(jnp.isnan(amax), np.float32(np.inf), amax).reshape(1, 1)


def by_kernel(
    x: BFloat16[Array, "*shape"], *others: Array, uses: tuple[BlockUse, ...], interpret: bool = False
) -> list[Array]:
    """The same by GPU kernels, on one device."""
    first, ndim = uses[0], x.ndim
    rows, summed = first.matrix(x.shape)
    matrix = x.reshape(rows, summed) if first.is_trailing(ndim) else x.reshape(summed, rows)
    amax = []
    if first.blocks == MX:
        from .mxfp8 import quantize_mxfp8

        trailing = [use.is_trailing(ndim) for use in uses]
        wanted = {"rows": True in trailing, "columns": False in trailing}
        kernel_outputs, units = quantize_mxfp8(matrix, first.format, **wanted, interpret=interpret), []
    else:
        kernel_outputs, units, amax = _in_nvfp4(matrix, others, uses, ndim, interpret=interpret)
    results = []
    for index, (use, (data, swizzled)) in enumerate(zip(uses, kernel_outputs, strict=True)):
        order = use.order(ndim)
        shape, back = [x.shape[axis] for axis in order], [order.index(axis) for axis in range(ndim)]
        if use.blocks.data is not None:
            data = lax.bitcast_convert_type(data, use.blocks.data)
        bits = in_rows(swizzled).reshape(*shape[:-1], shape[-1] // use.blocks.size)
        results += [lax.transpose(data.reshape(shape), back), lax.transpose(bits, back), swizzled]
        if units:
            results.append(units[index].reshape((1,) * ndim))
    return [*results, *amax]


def _in_nvfp4(
    matrix: BFloat16[Array, "rows columns"],
    others: Sequence[Array],
    uses: Sequence[BlockUse],
    ndim: int,
    *,
    interpret: bool,
) -> tuple[list[tuple[Array, ...]], list[Float32[Array, ""]], list[Float32[Array, "1 1"]]]:
    """What the kernels return for each use, and the scale of the tensor; and the amax, if that is stored."""
    from .nvfp4 import Side, amaxes, quantize_nvfp4

    sides, scales, seeds, units, remaining = [], [], [], [], iter(others)
    for use in uses:
        scaling = use.after_rotation
        assert isinstance(scaling, NVFP4Scaling)
        is_rotated, is_drawn = use.scaling is not scaling, use.rounding.needs_key
        sides.append(Side(int(use.is_trailing(ndim)), is_rotated, scaling.square, is_drawn))
        if is_drawn:
            key = jax.random.wrap_key_data(next(remaining), impl="threefry2x32")
            seeds.append(jax.random.bits(key, (), jnp.uint32))
    # Squares look the same from both sides.
    seen = [side._replace(axis=1) if side.is_square else side for side in sides]
    different = list(dict.fromkeys(side for side, use in zip(seen, uses, strict=True) if not use.is_delayed))
    measured = amaxes(matrix, different, interpret=interpret) if different else []
    amax_of_side = dict(zip(different, measured, strict=True))
    for side, use in zip(seen, uses, strict=True):
        if use.is_delayed:
            unit, multiplier = unit_of_stored(others[-1] * np.float32(GROUP**0.5 if side.is_rotated else 1.0))
        else:
            unit, multiplier = unit_of_amax(amax_of_side[side], use.format, use.scale_bits)
        units.append(unit)
        scales.append(jnp.stack([multiplier / np.float32(E2M1.max), SMALLEST_SCALE * multiplier, unit]))
    keeps_amax = any(use.is_delayed for use in uses)
    *results, amax = quantize_nvfp4(matrix, sides, jnp.stack(scales), seeds, keeps_amax=keeps_amax, interpret=interpret)
    return results, units, [amax.reshape(1, 1)] if keeps_amax else []


def _avals(x: Any, *words: Any, uses: tuple[BlockUse, ...], device: Device) -> list[Any]:
    del device
    shapes = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in (x, *words)]
    outputs = jax.eval_shape(lambda *arrays: by_xla(*arrays, uses=uses), *shapes)
    return [aval_of_result(x, out.shape, out.dtype) for out in outputs]


def _evaluated(*arrays: Array, uses: tuple[BlockUse, ...], device: Device) -> list[Array]:
    del device
    return by_xla(*arrays, uses=uses)


def _batched(args: Any, axes: Any, **params: Any) -> tuple[Any, Any]:
    results = jax.vmap(lambda *arrays: _evaluated(*arrays, **params))(*mapped_in_front(args, axes))
    return results, [0] * len(results)


def _lowered(context: Any, *arrays: Any, uses: tuple[BlockUse, ...], device: Device) -> Any:
    is_alone = devices_of(context) == 1 or has_its_part(context)
    function: Callable[..., Any] = by_kernel if is_alone else by_xla
    # Pallas asks the mesh in use for the device.
    mesh = jax.sharding.get_abstract_mesh()
    is_known = getattr(mesh, "abstract_device", None) is not None
    with contextlib.nullcontext() if is_known else device.as_default(), as_if_on_one_device():
        return mlir.lower_fun(lambda *arrays: function(*arrays, uses=uses), multiple_results=True)(context, *arrays)


quantize_blocks_p = define(
    "fp8_quantize_blocks",
    function=_evaluated,
    aval=_avals,
    batch=_batched,
    cuda=_lowered,
    multiple_results=True,
)
