"""FP8 data whose rounding XLA can fuse with other operations, but not drop.

`actually_rounded` in `xla.py` does the same with a barrier, which is a launch of its own.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float

from .after_partitioning import devices_of, has_its_part
from .xla import not_constant


def still_rounded(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """FP8 data that may be converted back in the same program; other data as they are.

    Otherwise XLA may drop both conversions, and with them the rounding.

    Args:
        x: The data of an operand, which a recipe may leave in high precision.
    """
    return still_rounded_in_parts(x, smallest=1)


def still_rounded_in_parts(x: Float[Array, "*shape"], smallest: int) -> Float[Array, "*shape"]:
    """An operand of a product that XLA widens only if an axis has a single element, whole or as devices divide it.

    How many devices there are is known when the program is lowered. On enough of them the data are as `still_rounded`
    returns them, otherwise as they are.

    Args:
        x: The data of an operand, which a recipe may leave in high precision.
        smallest: The smallest side of the product's matrices.
    """
    return still_rounded_p.bind(x, smallest=smallest) if jnp.finfo(x.dtype).bits == 8 else x


def _changed(x: Array) -> Array:
    """The data, each byte combined with a 0 that XLA does not know: so it cannot tell that they are the same."""
    zeros = lax.broadcast(not_constant(jnp.uint8(0)), x.shape)
    return lax.bitcast_convert_type(lax.bitwise_xor(lax.bitcast_convert_type(x, jnp.uint8), zeros), x.dtype)


def _batched(args: Any, axes: Any, *, smallest: int) -> tuple[Array, Any]:
    return still_rounded_p.bind(*args, smallest=smallest), *axes


def _jvp(primals: Any, tangents: Any, *, smallest: int) -> tuple[Array, Any]:
    """The derivative of the identity: a tangent is not FP8 data."""
    return still_rounded_p.bind(*primals, smallest=smallest), *tangents


def _lowered(context: Any, x: Any, *, smallest: int) -> Any:
    # Inside `shard_map` the sizes are those of the parts already.
    devices = 1 if has_its_part(context) else devices_of(context)
    return _always(context, x) if smallest <= devices else [x]


_always = mlir.lower_fun(_changed, multiple_results=False)

still_rounded_p = Primitive("fp8_still_rounded")
"""The identity."""
still_rounded_p.def_impl(lambda x, smallest: x)
still_rounded_p.def_abstract_eval(lambda x, smallest: x)
batching.primitive_batchers[still_rounded_p] = _batched
ad.primitive_jvps[still_rounded_p] = _jvp
mlir.register_lowering(still_rounded_p, _lowered)
