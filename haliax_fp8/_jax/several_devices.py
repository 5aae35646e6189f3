"""What a program tells XLA only if it is for several devices, which is known when it is lowered, not before."""

from typing import Any

from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

from .after_partitioning import devices_of


def gathered_once(data: Array) -> Array:
    """FP8 data that several products read, of which devices may hold parts.

    Each of these products needs all parts. Behind a barrier, XLA sends them once for all, and in FP8. Otherwise it
    sends them before the cast, or for each product. On a single device a barrier would only keep XLA from fusing.
    """
    return gathered_once_p.bind(data)


gathered_once_p = Primitive("fp8_gathered_once")
gathered_once_p.def_impl(lambda x: x)
gathered_once_p.def_abstract_eval(lambda x: x)
batching.primitive_batchers[gathered_once_p] = lambda args, axes: (gathered_once(*args), *axes)
# As of a barrier, but the tangent is not data in FP8, and passes without one.
ad.primitive_jvps[gathered_once_p] = lambda primals, tangents: (gathered_once(*primals), *tangents)


def _lowered(context: Any, x: Any) -> Any:
    if devices_of(context) == 1:
        return [x]
    return mlir.lower_fun(lax.optimization_barrier, multiple_results=False)(context, x)


mlir.register_lowering(gathered_once_p, _lowered)
