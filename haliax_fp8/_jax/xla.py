"""What programs tell XLA: barriers and switches between platforms, each as a function named after what it is for.

A barrier is the identity, but XLA computes all of its operands before any of its results is used, and cannot see
through it. So each barrier prevents one optimization that would cost more than it saves; `side_by_side` makes one
possible. `tests/programs/test_xla.py` compiles a program with and without each.
"""

import enum
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.mlir.dialects import sdy, stablehlo
from jax.interpreters import mlir
from jaxtyping import Array, Float

from .custom_partitioning import devices_of, has_its_part, is_divided_by_shardy
from .primitives import define


# --- Switches between platforms ---------------------------------------------------------------------------------------


def on_cuda(there: Callable[..., Array], elsewhere: Callable[..., Array], *operands: Any) -> Array:
    """`there(*operands)` in programs for NVIDIA GPUs, `elsewhere(*operands)` in all others."""
    return lax.platform_dependent(*operands, cuda=there, default=elsewhere)


def on_cpu(there: Callable[..., Array], elsewhere: Callable[..., Array], *operands: Any) -> Array:
    """`there(*operands)` in programs for CPUs, `elsewhere(*operands)` in all others."""
    return lax.platform_dependent(*operands, cpu=there, default=elsewhere)


def lowered_for_cuda(context: Any) -> bool:
    """Whether a program is lowered for NVIDIA GPUs alone, from the context of a primitive's lowering rule."""
    module = context.module_context
    return tuple(context.platforms or module.platforms) == ("cuda",)


# --- Launches: made once, merged or kept apart ------------------------------------------------------------------------


def computed_together[T](values: T) -> T:
    """Values that are made in one launch; every user reads its part of them.

    Otherwise XLA computes each part again where it is used: with many layers, many small launches instead of one.
    """
    return lax.optimization_barrier(values)


def computed_before_measured[T](values: T) -> T:
    """An operand and its quantized form, for several statistics of them.

    XLA would quantize it again for each of them: a reduction is a launch of its own, and fuses its producers.
    """
    return lax.optimization_barrier(values)


def not_constant[T](value: T) -> T:
    """A number that XLA does not treat as a constant.

    With constants, each layer's small program differs from the others and has to be compiled; and a multiplication by
    a constant 1, which joins slices into a single launch, would be dropped.
    """
    return lax.optimization_barrier(value)


def divisor_of_each(divisor: Array, shape: tuple[int, ...]) -> Array:
    """A divisor, repeated for the elements of an array, by which each is divided.

    XLA would compute the reciprocal of one divisor for all, and multiply by it: other last bits.
    """
    return lax.optimization_barrier(jnp.broadcast_to(divisor, shape))


def not_merged_across_layers[T](values: T) -> T:
    """Values of several layers whose users stay apart.

    Otherwise XLA merges launches of different layers that read the same array, and all their results have to be in
    memory at once.
    """
    return lax.optimization_barrier(values)


def once_computed[T](values: T, first: Any) -> T:
    """Values that are read after something else that was computed from them.

    Otherwise XLA merges what is computed from them before and after, and keeps it in memory in between.
    """
    return lax.optimization_barrier((values, first))[0]


def side_by_side(parts: Sequence[Array]) -> Array:
    """Arrays joined along the last axis, in a launch that XLA merges with others.

    XLA merges launches that read the same array, such as those of all layers, but none that concatenates at its end.
    Here the widest part and what stands on either side of it are selected instead.

    Args:
        parts: The arrays, in float32.
    """
    axis = parts[0].ndim - 1
    widest = max(range(len(parts)), key=lambda i: parts[i].shape[axis])
    blocks = [list(block) for block in (parts[:widest], parts[widest : widest + 1], parts[widest + 1 :]) if block]
    blocks = [block[0] if len(block) == 1 else lax.concatenate(block, axis) for block in blocks]
    ends = list(itertools.accumulate([block.shape[axis] for block in blocks]))
    index = lax.broadcasted_iota(np.int32, (*parts[0].shape[:-1], ends[-1]), axis)

    def placed(block: Array, end: int) -> Array:
        padding = (end - block.shape[axis], ends[-1] - end, 0)
        return lax.pad(block, np.float32(0.0), [(0, 0, 0)] * axis + [padding])

    joined = placed(blocks[0], ends[0])
    for block, start, end in zip(blocks[1:], ends, ends[1:], strict=False):
        joined = lax.select(lax.lt(index, np.int32(start)), joined, placed(block, end))
    return joined


@jax.custom_jvp
def read_together(x: Array) -> Array:
    """A product's result, for fusions that become one because they all read it.

    XLA does not merge fusions that share nothing but the result of a Triton product: both gradients of a gated
    activation, their casts and their amaxes would each read the same arrays again. The gradient passes without a
    barrier, so it can be cast where it is computed.
    """
    return lax.optimization_barrier(x)


read_together.defjvps(lambda tangent, out, x: tangent)


def read_by_activation(out: Array, input: Array) -> Array:
    """A product's result, for the fusions that read it: one that casts and one that measures become one launch.

    XLA does not merge fusions that share nothing but the result of a Triton product, see `read_together`. Only a result
    that is larger than the input has a barrier, and only on NVIDIA GPUs: an activation reads it. Others are mostly
    added to a residual, which cuBLASLt does within the product unless a barrier is in between.

    Args:
        out: The result.
        input: The product's input.
    """
    return barrier_p.bind(out, programs=Programs.FOR_NVIDIA_GPUS) if out.size > input.size else out


def operand_per_sharer(x: Array, unshared: Array) -> Array:
    """An operand that several products share, as the operand of one of them.

    XLA merges small products that share an operand, and then has to split the result and to apply separate scales. A
    barrier over the operand and something that belongs to one product alone keeps that product separate.

    Args:
        x: The shared operand.
        unshared: Any array used by this product only. It must have another use, or XLA removes it from the barrier.
    """
    return lax.optimization_barrier((x, unshared))[0]


def precision_per_sharer(index: int | None) -> lax.PrecisionLike:
    """Full accumulation, under a different name for each of several products that share an operand.

    XLA merges such products only if they request the same precision. For FP8 data, all these names mean the same. A
    barrier as in `operand_per_sharer` would separate the operand from its transposition.

    Args:
        index: The product's index among them; None if it is alone.
    """
    high, highest = lax.Precision.HIGH, lax.Precision.HIGHEST
    names = (highest, highest), (highest, high), (high, highest), (high, high)
    return highest if index is None else names[index % len(names)]


# --- FP8 data: saved, transposed and rounded --------------------------------------------------------------------------


def prevent_cse_with_forward(x: Array) -> Array:
    """An operand that the backward pass quantizes again.

    Otherwise XLA finds that the forward pass quantized it in the same way, and keeps that copy in memory.
    """
    return lax.optimization_barrier(x)


def transposed_separately[T](data: T) -> T:
    """FP8 data whose transposition is a launch of its own.

    On NVIDIA GPUs up to Hopper an FP8 operand has to be contiguous along the summed axis. A launch that casts and
    transposes cannot also take the amax, so two launches would read the operand in high precision. A separate
    transposition reads one byte per element.
    """
    return lax.optimization_barrier(data)


def transposed_once(x: Array, order: tuple[int, ...]) -> Array:
    """A transposed copy in memory, which several products read.

    Otherwise XLA would only relabel the axes, and each product that needs the transpose would make it itself. The
    original keeps its own layout; otherwise the launch that computes it would be transposed too.

    Args:
        x: The original.
        order: For each axis of the copy, the axis of `x` that it is.
    """
    as_it_is = lambda x: with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))
    return lax.optimization_barrier(as_it_is(lax.transpose(lax.optimization_barrier(as_it_is(x)), order)))


def transposed_in_bytes(data: Array) -> Array:
    """Quantized data that a library's call reads with another axis last: they are transposed as they are stored.

    Otherwise XLA gives the call's layout to everything that they are computed from, and transposes that in bfloat16.
    """
    return lax.optimization_barrier(with_layout_constraint(data, Layout(major_to_minor=tuple(range(data.ndim)))))


def force_cast(x: Array) -> Array:
    """A value in a narrow format that is about to be converted back.

    Otherwise XLA may drop both conversions, and with them the rounding.
    """
    return lax.optimization_barrier(x)


# --- Barriers that only some programs have ----------------------------------------------------------------------------


def transposed_from_fp8(data: Array) -> Array:
    """FP8 data that one product reads, and another transposed; on NVIDIA GPUs the transposition reads FP8 too.

    Otherwise XLA casts and writes both in one launch. That moves fewer bytes, but about half as many in a second, see
    `docs/design-notes.md`. The barrier is in front of both products, so that devices which need all of the data send it
    once.
    """
    return barrier_p.bind(data, programs=Programs.FOR_NVIDIA_GPUS)


def gathered_once(data: Array) -> Array:
    """FP8 data that several products read, and devices may hold in parts.

    Each of these products needs all parts. With a barrier, XLA sends them once for all products, and in FP8. Otherwise
    it sends them before the cast, or for each product. On a single device a barrier would only keep XLA from fusing.
    """
    return barrier_p.bind(data, programs=Programs.FOR_SEVERAL_DEVICES)


def transposed_separately_on_one[T](data: T) -> T:
    """Like `transposed_separately`, for data that was `gathered_once`: a second barrier would send it again.

    Args:
        data: A tree of arrays.
    """
    return jax.tree.map(lambda x: barrier_p.bind(x, programs=Programs.FOR_ONE_DEVICE), data)


class Programs(enum.Enum):
    """Which programs have a barrier, if that is known when they are lowered, not before."""

    FOR_ONE_DEVICE = enum.auto()
    FOR_SEVERAL_DEVICES = enum.auto()
    FOR_NVIDIA_GPUS = enum.auto()


def _barrier_lowered(context: Any, x: Any, *, programs: Programs) -> Any:
    if programs is Programs.FOR_NVIDIA_GPUS:
        has_barrier = lowered_for_cuda(context)
    else:
        has_barrier = (devices_of(context) > 1) == (programs is Programs.FOR_SEVERAL_DEVICES)
    # The operation itself: to trace `lax.optimization_barrier` for each takes JAX longer than the cast that it is for.
    return list(stablehlo.OptimizationBarrierOp([x]).results) if has_barrier else [x]


barrier_p = define(
    "fp8_barrier",
    function=lambda x, programs: x,
    aval=lambda x, programs: x,
    batch=lambda args, axes, programs: (barrier_p.bind(*args, programs=programs), *axes),
    # As for `optimization_barrier`, but a tangent is not FP8 data and passes without one.
    jvp=lambda primals, tangents, programs: (barrier_p.bind(*primals, programs=programs), *tangents),
    lower=_barrier_lowered,
)
"""The identity; in the programs that its parameter names, a barrier."""


# --- How measurements are divided over devices ------------------------------------------------------------------------


def divided_as_made(parts: Array) -> Array:
    """Amaxes of an array's parts, to be reduced over the last axis, divided as the array is.

    XLA's partitioner divides arrays as their users are divided, and passes that on to their producers. The amaxes of
    rows are joined with those of other operands, whose rows may be divided; without this barrier, an activation would
    be divided like some kernel's rows. In programs for several devices, the maximum comes first, followed by zeros, so
    that each device sends one number. On one device this would cost an additional launch, while one for all operands
    is enough.

    Args:
        parts: The amaxes; none is negative.
    """
    return as_made_p.bind(parts)


def _as_made_lowered(context: Any, x: Any) -> Any:
    if not is_divided_by_shardy(context):
        return [x]
    (x,) = mlir.lower_fun(_largest_first, multiple_results=False)(context, x)
    return [sdy.PropagationBarrierOp(x, _FORWARD).result]


def _largest_first(x: Array) -> Array:
    """The maximum along the last axis, then zeros."""
    zeros = lax.full((*x.shape[:-1], x.shape[-1] - 1), 0, x.dtype)
    return lax.concatenate((jnp.max(x, axis=-1, keepdims=True), zeros), x.ndim - 1)


# Shardy's number for "from operands to results".
_FORWARD = 1

as_made_p = define(
    "fp8_divided_as_made",
    function=lambda x: x,
    aval=lambda x: x,
    # Measurements are not differentiated.
    batch=lambda args, axes: (as_made_p.bind(jnp.moveaxis(args[0], axes[0], 0)), 0),
    lower=_as_made_lowered,
)


# --- Casts that XLA can fuse, but not drop ----------------------------------------------------------------------------


def keep_cast(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Stops XLA from cancelling the cast to FP8 with a cast back; data in high precision pass unchanged.

    It is not a barrier, so XLA can still fuse the cast.

    Args:
        x: The data of an operand, which a recipe may leave in high precision.
    """
    return keep_cast_in_parts(x, smallest=1)


def keep_cast_in_parts(x: Float[Array, "*shape"], smallest: int) -> Float[Array, "*shape"]:
    """An operand of a product that XLA widens only if an axis has a single element, whole or as devices divide it.

    How many devices there are is known when the program is lowered. On enough of them the data are as `keep_cast`
    returns them, otherwise as they are.

    Args:
        x: The data of an operand, which a recipe may leave in high precision.
        smallest: The smallest side of the product's matrices.
    """
    return keep_cast_p.bind(x, smallest=smallest) if jnp.finfo(x.dtype).bits == 8 else x


def _opaque_identity(x: Array) -> Array:
    """The data, each byte combined with a 0 that XLA does not know: so it cannot tell that they are the same."""
    zeros = lax.broadcast(not_constant(jnp.uint8(0)), x.shape)
    return lax.bitcast_convert_type(lax.bitwise_xor(lax.bitcast_convert_type(x, jnp.uint8), zeros), x.dtype)


def _keep_cast_lowered(context: Any, x: Any, *, smallest: int) -> Any:
    # Inside `shard_map` the sizes are those of the parts already.
    devices = 1 if has_its_part(context) else devices_of(context)
    return _always(context, x) if smallest <= devices else [x]


_always = mlir.lower_fun(_opaque_identity, multiple_results=False)

keep_cast_p = define(
    "fp8_keep_cast",
    function=lambda x, smallest: x,
    aval=lambda x, smallest: x,
    batch=lambda args, axes, smallest: (keep_cast_p.bind(*args, smallest=smallest), *axes),
    # The derivative of the identity: a tangent is not FP8 data.
    jvp=lambda primals, tangents, smallest: (keep_cast_p.bind(*primals, smallest=smallest), *tangents),
    lower=_keep_cast_lowered,
)
"""The identity."""
