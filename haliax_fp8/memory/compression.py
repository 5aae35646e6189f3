"""compressed: an activation function that keeps its inputs in FP8 for the backward pass."""

import functools
from collections.abc import Callable
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._arguments import require
from .._numerics.quantized_array import QuantizedArray
from ..formats import E4M3, Format
from ..recipes.scaling import AbstractScaling, OperandUse, RowwiseScaling


_ROWS = RowwiseScaling()


def compressed(
    function: Callable[..., Any], scaling: AbstractScaling = _ROWS, format: Format = E4M3
) -> Callable[..., Any]:
    """The function, keeping its inputs in FP8 from the forward to the backward pass.

    The result does not change. The gradient is taken at `dequantize(quantize(x))`: each kept element has a relative
    error of up to 1/16, which the forward pass does not see. Once operands are in FP8, the computation between two
    products of a feed-forward layer, such as `silu(gate) * up`, accounts for most of a block's residuals. Automatic
    differentiation keeps `gate`, `up` and intermediate values in high precision. This keeps one byte per element of
    `gate` and `up`.

    Args:
        function: Maps arrays (or NamedArrays) to one; recomputed in the backward pass, so it should be cheap and
            elementwise.
        scaling: The scaling of the kept inputs; must be stateless. By default each row has a scale.
        format: The format in which they are kept.

    Returns:
        A function with the same arguments.

    Raises:
        ValueError: If the scaling keeps state or does not quantize, or an argument has the wrong type.

    References:
        COAT (arXiv:2410.19313, section 5) keeps the inputs of all nonlinear layers in FP8, with scales per group.

    Example:
        >>> swiglu = lambda gate, up: jax.nn.silu(gate) * up
        >>> gate, up = jnp.array([[0.3, -1.0]]), jnp.array([[2.0, 0.7]])
        >>> bool((compressed(swiglu)(gate, up) == swiglu(gate, up)).all())
        True
        >>> gradient = jax.grad(lambda up: compressed(swiglu)(gate, up).sum())(up)
        >>> bool(jnp.allclose(gradient, jax.nn.silu(gate), rtol=1 / 8))
        True
    """
    require("function", function, Callable, "a function of arrays", of="compressed")
    require("scaling", scaling, AbstractScaling, "RowwiseScaling()", of="compressed")
    require("format", format, Format, "E4M3 or E5M2", of="compressed")
    if scaling.memory is not None or not scaling.quantizes:
        raise ValueError(f"scaling={scaling} of compressed must quantize without state; use RowwiseScaling()")
    quantize = functools.partial(_quantized, scaling=scaling, format=format)

    @jax.custom_vjp
    def apply(*args: Any) -> Any:
        return function(*args)

    def forward(*args: Any) -> tuple[Any, Any]:
        return function(*args), jax.tree.map(lambda x: (quantize(x), jnp.zeros((), x.dtype)), args)

    def backward(residuals: Any, gradient: Any) -> Any:
        is_pair = lambda node: isinstance(node, tuple) and len(node) == 2 and isinstance(node[0], QuantizedArray)
        args = jax.tree.map(lambda pair: pair[0].dequantize().astype(pair[1].dtype), residuals, is_leaf=is_pair)
        return jax.vjp(function, *args)[1](gradient)

    apply.defvjp(forward, backward)

    @functools.wraps(function)
    def wrapped(*args: Array | hax.NamedArray) -> Any:
        return apply(*args)

    return wrapped


def _quantized(x: Float[Array, "*shape"], scaling: AbstractScaling, format: Format) -> QuantizedArray:
    """Quantizes with rows along the last axis."""
    contracted = (x.ndim - 1,) if x.ndim else ()
    return scaling.quantize(x, OperandUse(format=format, contracted=contracted))
