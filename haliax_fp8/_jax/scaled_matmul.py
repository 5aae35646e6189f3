"""cuDNN's product of blocks, times a scale for the whole operands that the same launch applies.

`jax.nn.scaled_matmul` has no argument for that scale. A multiplication behind it would be a launch of its own, which
reads the result in float32 and writes it again. And XLA reorders the scales of blocks for cuDNN in two launches for
each product; `swizzled_matmul` takes them reordered.
"""

import json
from typing import Any

import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxtyping import Array, Float, Shaped

from .private import needs


def scaled_matmul(
    lhs: Float[Array, "batch rows sum"],
    rhs: Float[Array, "batch columns sum"],
    lhs_scale: Float[Array, "batch rows blocks"],
    rhs_scale: Float[Array, "batch columns blocks"],
    scale: Float[Array, ""],
) -> Float[Array, "batch rows columns"]:
    """`scale * (lhs * lhs_scale) @ (rhs * rhs_scale)^T` in the dtype of `scale`, on an NVIDIA GPU with such units.

    Args:
        lhs: The data of the first operand.
        rhs: The data of the second.
        lhs_scale: The scales of the first operand's blocks.
        rhs_scale: The scales of the second operand's blocks.
        scale: A scale for the result. XLA requires it in the result's dtype. Before cuDNN 9.13, XLA applies it in a
            launch of its own (openxla/xla#32525).
    """
    return scaled_matmul_p.bind(lhs, rhs, lhs_scale, rhs_scale, scale)


def swizzled_matmul(
    lhs: Float[Array, "1 rows sum"],
    rhs: Float[Array, "1 columns sum"],
    lhs_scale: Shaped[Array, "1 rows blocks"],
    rhs_scale: Shaped[Array, "1 columns blocks"],
    *scale: Float[Array, ""],
    dtype: np.dtype,
) -> Float[Array, "1 rows columns"]:
    """cuDNN's product, which XLA neither pads nor checks: on a B200, for whole tiles of 128 rows and 4 blocks.

    Args:
        lhs: The data of the first operand.
        rhs: The data of the second.
        lhs_scale: The scales of the first operand's blocks, in cuDNN's order: of every 128 rows and 4 blocks, those of
            the rows 32 apart are neighbors.
        rhs_scale: The scales of the second operand's blocks.
        *scale: One for the result, in its dtype, or none.
        dtype: The dtype of the result.
    """
    return swizzled_matmul_p.bind(lhs, rhs, lhs_scale, rhs_scale, *scale, dtype=np.dtype(dtype))


_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def _lowered(context: Any, *operands: Any) -> Any:
    (out,) = context.avals_out
    numbers = {"lhs_batch_dimensions": [0], "rhs_batch_dimensions": [0], "dequantize_type": _NAMES[out.dtype.name]}
    config = json.dumps({"scaled_dot_backend_config": numbers})
    return _call("__op$block_scaled_dot", context, operands, [out], backend_config=config)


def _swizzled_lowered(context: Any, *operands: Any, dtype: np.dtype) -> Any:
    del dtype
    workspace = ShapedArray((0,), np.dtype(np.uint8))
    return _call("__cudnn$blockScaledDot", context, operands, [*context.avals_out, workspace])[:1]


def _call(name: str, context: Any, operands: Any, outs: Any, **options: Any) -> Any:
    with needs("products in FP4"):
        from jax._src.interpreters.mlir import custom_call

    layouts = lambda avals: [tuple(range(x.ndim - 1, -1, -1)) for x in avals]
    call = custom_call(
        name,
        result_types=[mlir.ir.RankedTensorType.get(x.shape, mlir.dtype_to_ir_type(x.dtype)) for x in outs],
        operands=operands,
        operand_layouts=layouts(context.avals_in),
        result_layouts=layouts(outs),
        **options,
    )
    return list(call.results)


scaled_matmul_p = Primitive("fp8_scaled_matmul")
scaled_matmul_p.def_abstract_eval(
    lambda lhs, rhs, lhs_scale, rhs_scale, scale: ShapedArray((*lhs.shape[:2], rhs.shape[1]), scale.dtype)
)
mlir.register_lowering(scaled_matmul_p, _lowered, platform="cuda")

swizzled_matmul_p = Primitive("fp8_swizzled_matmul")
swizzled_matmul_p.def_abstract_eval(lambda lhs, rhs, *scales, dtype: ShapedArray((*lhs.shape[:2], rhs.shape[1]), dtype))
mlir.register_lowering(swizzled_matmul_p, _swizzled_lowered, platform="cuda")
