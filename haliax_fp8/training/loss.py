"""exact_gradients, and what a loss returns."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax.quantization import CustomGradientAccumulation
from jax import lax

from .._arguments import require_bool
from .._jax.max_grad import is_max_grad
from .._jax.meshes import manual_axes
from .gradients import filter_value_and_grad
from .updates import common_dtype, in_float32


def exact_gradients(loss_fn: Callable[..., Any], *, has_aux: bool = False) -> Callable[..., Any]:
    """A loss with the gradient of `filter_grad`, even if a trainer takes it with `jax.grad` or `eqx.filter_grad`.

    Some trainers, such as Levanter's, take the gradient of a loss themselves. Their gradient then sums the amaxes of a
    layer that is used several times, updates each layer's state separately, and quantizes a shared input once per
    layer. Wrap the loss in this function to avoid all three: the gradient is taken inside, then multiplied by the
    weight that the trainer gives the loss. That is too late for gradients that vanish in float16: scale the loss inside
    `loss_fn`. And call the wrapped loss once: the trainer's gradient adds what several calls record, as under `vmap`.

    Args:
        loss_fn: `loss_fn(model, *args, **kwargs)`, returning a scalar, or `(scalar, aux)` with `has_aux`. It is
            differentiated with respect to the model alone.
        has_aux: Whether `loss_fn` also returns auxiliary results, which are not differentiated.

    Returns:
        A function with the same arguments and results.

    Raises:
        ValueError: If `has_aux` is not a bool; when called, if it is differentiated with respect to anything except its
            first argument, or inside `shard_map`.

    Example:
        >>> def twice(layer, x):
        ...     return (layer(x) + layer(3.0 * x)).sum().array
        >>> x = hax.ones((hax.Axis("batch", 2), layer.In))
        >>> gradient = eqx.filter_grad(exact_gradients(twice))(layer, x)
        >>> float(gradient.dot_general.amax_history("input")[0])
        3.0
    """

    require_bool("has_aux", has_aux, of="exact_gradients")

    @functools.wraps(loss_fn)
    def call(model: Any, *args: Any, **kwargs: Any) -> Any:
        if any(map(is_max_grad, jax.tree.leaves(model))):
            # `filter_grad` is already taking the gradient.
            return loss_fn(model, *args, **kwargs)
        (model_arrays, other_arrays), rest = eqx.partition((model, (args, kwargs)), eqx.is_inexact_array)
        static: list[Any] = []

        def evaluate(function: Callable[..., Any], model_arrays: Any, other_arrays: Any) -> Any:
            model, (args, kwargs) = eqx.combine((model_arrays, other_arrays), rest)
            return function(model, *args, **kwargs)

        def arrays_of(result: Any) -> Any:
            arrays, others = eqx.partition(result, eqx.is_array)
            static[:] = [others]
            return arrays

        @jax.custom_vjp
        def loss(model_arrays: Any, other_arrays: Any) -> Any:
            return arrays_of(evaluate(loss_fn, model_arrays, other_arrays))

        def forward(model_arrays: Any, other_arrays: Any) -> tuple[Any, Any]:
            if any(x.perturbed for x in jax.tree.leaves(other_arrays, is_leaf=_is_primal)):
                raise ValueError(
                    "a loss in exact_gradients was differentiated with respect to an argument other than its first, "
                    "the model; move everything that you differentiate into the first argument"
                )
            if axes := manual_axes():
                # JAX would add, or not, over devices what this gradient has summed already.
                raise ValueError(
                    f"a loss in exact_gradients was differentiated inside shard_map over {axes}; call "
                    "haliax_fp8.filter_grad(loss_fn) there, or take exact_gradients of a loss that calls shard_map"
                )
            values = jax.tree.map(lambda x: x.value, (model_arrays, other_arrays), is_leaf=_is_primal)
            result, gradients = evaluate(filter_value_and_grad(loss_fn, has_aux=has_aux), *values)
            # The gradients' leaves are the model's, but their tree has no quantized kernels.
            leaves, structure = jax.tree.flatten(values[0])
            pairs = zip(leaves, jax.tree.leaves(gradients), strict=True)
            gradients = jax.tree.unflatten(structure, [lax.convert_element_type(g, x.dtype) for x, g in pairs])
            return arrays_of(result), (gradients, values[1])

        def backward(residuals: Any, cotangents: Any) -> tuple[Any, Any]:
            gradients, other_arrays = residuals
            (cotangent,) = jax.tree.leaves(cotangents[0] if has_aux else cotangents)

            def scaled(node: Any) -> Any:
                # State is not a direction: a loss with weight 2 has the same amaxes.
                if _is_state(node):
                    return node
                # A weight of 65536 is infinite in float16, and one of 1/3 off by 0.2 % in bfloat16.
                wide, factor = in_float32((node, cotangent))
                dtype = common_dtype(wide.dtype, factor.dtype)
                return (wide.astype(dtype) * factor.astype(dtype)).astype(node.dtype)

            return jax.tree.map(scaled, gradients, is_leaf=_is_state), jax.tree.map(jnp.zeros_like, other_arrays)

        loss.defvjp(forward, backward, symbolic_zeros=True)
        arrays = loss(model_arrays, other_arrays)
        result = eqx.combine(arrays, static[0])
        if not has_aux:
            return result
        return result[0], jax.tree.map(lambda x: lax.stop_gradient(x) if eqx.is_array(x) else x, result[1])

    return call


def _is_state(node: Any) -> bool:
    return isinstance(node, CustomGradientAccumulation)


def _is_primal(node: Any) -> bool:
    return isinstance(node, jax.custom_derivatives.CustomVJPPrimal)


def scalar_loss(value: Any) -> Any:
    """The number that a loss function returned; a `NamedArray` without axes counts as one."""
    return value.array if isinstance(value, hax.NamedArray) and not value.axes else value


def loss_and_aux(value: Any) -> Any:
    """The number and the auxiliary results that a loss function with `has_aux` returned; JAX refuses anything else."""
    return (scalar_loss(value[0]), *value[1:]) if isinstance(value, tuple) else value
