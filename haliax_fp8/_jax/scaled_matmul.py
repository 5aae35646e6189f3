"""cuDNN's product of blocks, times a scale for the whole operands that the same launch applies.

`jax.nn.scaled_matmul` has no argument for that scale. A multiplication behind it would be a launch of its own, which
reads the result in float32 and writes it again.
"""

import json
from typing import Any

from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxtyping import Array, Float

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


_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def _lowered(context: Any, *operands: Any) -> Any:
    with needs("products in FP4"):
        from jax._src.interpreters.mlir import custom_call

    (out,) = context.avals_out
    numbers = {"lhs_batch_dimensions": [0], "rhs_batch_dimensions": [0], "dequantize_type": _NAMES[out.dtype.name]}
    layouts = [tuple(range(x.ndim - 1, -1, -1)) for x in (*context.avals_in, out)]
    call = custom_call(
        "__op$block_scaled_dot",
        result_types=[mlir.ir.RankedTensorType.get(out.shape, mlir.dtype_to_ir_type(out.dtype))],
        operands=operands,
        backend_config=json.dumps({"scaled_dot_backend_config": numbers}),
        operand_layouts=layouts[:-1],
        result_layouts=layouts[-1:],
    )
    return call.results


scaled_matmul_p = Primitive("fp8_scaled_matmul")
scaled_matmul_p.def_abstract_eval(
    lambda lhs, rhs, lhs_scale, rhs_scale, scale: ShapedArray((*lhs.shape[:2], rhs.shape[1]), scale.dtype)
)
mlir.register_lowering(scaled_matmul_p, _lowered, platform="cuda")
