"""A primitive that does nothing, except to refuse being differentiated.

The gradient of an FP8 product is computed from operands that are rounded to FP8. Its own derivative would run through
that rounding: JAX would carry tangents in FP8, without a scale, and give numbers that are wrong or NaN. So what is
rounded passes through here first: the first derivative never differentiates this, the second always does.
"""

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float


def first_order(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The identity; differentiating it raises a `ValueError` that says what to do instead."""
    return first_order_p.bind(x)


first_order_p = Primitive("first_order")


def _first_order_jvp(primals, tangents):
    raise ValueError(
        "an FP8 product was differentiated twice: the derivative of its gradient (a Hessian, a Hessian-vector "
        "product) is not defined, because the gradient's operands are rounded to FP8. Compute second derivatives with "
        "the layers in high precision: restore_linear_layers(model) gives the same model without FP8"
    )


first_order_p.def_impl(lambda x: x)
first_order_p.def_abstract_eval(lambda aval: aval)
mlir.register_lowering(first_order_p, lambda ctx, x: [x])
ad.primitive_jvps[first_order_p] = _first_order_jvp
batching.defvectorized(first_order_p)
