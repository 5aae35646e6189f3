"""FP8 data whose rounding XLA can fuse with other operations, but not drop.

`actually_rounded` in `xla.py` does the same with a barrier, which is a launch of its own.
"""

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float

from .xla import not_constant


def still_rounded(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """FP8 data that may be converted back in the same program; other data as they are.

    Otherwise XLA may drop both conversions, and with them the rounding.

    Args:
        x: The data of an operand, which a recipe may leave in high precision.
    """
    return still_rounded_p.bind(x) if jnp.finfo(x.dtype).bits == 8 else x


def _changed(x: Array) -> Array:
    """The data, each byte combined with a 0 that XLA does not know: so it cannot tell that they are the same."""
    zeros = lax.broadcast(not_constant(jnp.uint8(0)), x.shape)
    return lax.bitcast_convert_type(lax.bitwise_xor(lax.bitcast_convert_type(x, jnp.uint8), zeros), x.dtype)


still_rounded_p = Primitive("fp8_still_rounded")
"""The identity."""
still_rounded_p.def_impl(lambda x: x)
still_rounded_p.def_abstract_eval(lambda x: x)
batching.primitive_batchers[still_rounded_p] = lambda args, axes: (still_rounded_p.bind(*args), *axes)
ad.primitive_jvps[still_rounded_p] = lambda primals, tangents: (still_rounded_p.bind(*primals), *tangents)
mlir.register_lowering(still_rounded_p, mlir.lower_fun(_changed, multiple_results=False))
