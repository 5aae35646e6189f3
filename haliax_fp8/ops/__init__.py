"""The low-level functions of Flax's guide to FP8, under their Flax names and with their Flax semantics.

To write an FP8 product by hand, `in_q` both operands, multiply with `preferred_element_type`, `out_dq` the result.
Layers should use `Fp8DotGeneral`, which has the backward products too.

Scales multiply to give the value back, `x ≈ data * scale`. Numbers equal those of `flax.linen.fp8_ops` bit for bit, in
corner cases too: an amax of zero, infinity or NaN is recorded but leaves the scale unchanged, and an amax below
`fp8_max / float32_max` makes the scale zero. Three things differ: a scale of one element fits every shape, even a
scalar; the amax of an empty array is zero; and dtypes that cannot be right raise `ValueError`, where Flax fails later
or rounds the state.

A gradient carries the new state: the cotangents of `scale` and `amax_history` are their next values. JAX adds the
cotangents of a value that is used twice. To take the maximum instead, cast state to `fp32_max_grad` inside the
differentiated function. These functions do not support `vmap` over examples that share one state: it adds the
cotangents too, and with `fp32_max_grad` JAX raises an error. `Fp8DotGeneral` has neither limitation.
"""

from .._jax.max_grad import fp32_max_grad
from .casts import dequantize, qdq, quantize, quantize_dequantize
from .in_out import in_q, in_qdq, out_dq, out_qdq
from .meta import compute_amax_history, compute_scale, get_fp8_max, update_fp8_meta


__all__ = [
    "compute_amax_history",
    "compute_scale",
    "dequantize",
    "fp32_max_grad",
    "get_fp8_max",
    "in_q",
    "in_qdq",
    "out_dq",
    "out_qdq",
    "qdq",
    "quantize",
    "quantize_dequantize",
    "update_fp8_meta",
]
