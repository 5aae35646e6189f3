"""A primitive that does nothing, except to refuse being differentiated.

The gradient of an FP8 product is computed from operands that are rounded to FP8. Its own derivative would run through
that rounding: JAX would carry tangents in FP8, without a scale, and give numbers that are wrong or NaN. So what is
rounded passes through here first: the first derivative never differentiates this, the second always does.
"""

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float


def first_order(*operands: Float[Array, "..."]) -> list[Float[Array, "..."]]:
    """The identity; differentiating it raises a `ValueError` that says what to do instead."""
    return first_order_p.bind(*operands)


first_order_p = Primitive("first_order")
first_order_p.multiple_results = True


def _first_order_jvp(primals, tangents):
    raise ValueError(
        "an FP8 product was differentiated twice: the derivative of its gradient (a Hessian, a Hessian-vector "
        "product) is not defined, because the gradient's operands are rounded to FP8. Compute second derivatives with "
        "the layers in high precision: restore_linear_layers(model) gives the same model without FP8"
    )


first_order_p.def_impl(lambda *operands: list(operands))
first_order_p.def_abstract_eval(lambda *avals: list(avals))
mlir.register_lowering(first_order_p, lambda ctx, *operands: operands)
ad.primitive_jvps[first_order_p] = _first_order_jvp
batching.primitive_batchers[first_order_p] = lambda operands, axes: (first_order_p.bind(*operands), axes)
