"""Modules made from attributes, as JAX makes one from its leaves: without their constructors."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._op import Fp8DotGeneral
from .._product.arguments import check_operands
from .kernel import Kernel
from .rule import LayerRule, integer_weight


def rebuilt(cls: Any, attributes: Mapping[str, Any]) -> Any:
    """A module of a class with these attributes.

    A constructor would draw new weights, and may take other arguments.

    Args:
        cls: The class.
        attributes: All that the module has, by name.
    """
    module = object.__new__(cls)
    for name, value in attributes.items():
        object.__setattr__(module, name, value)
    return module


class Fp8Linear(eqx.nn.Linear):
    """An `eqx.nn.Linear` that multiplies in FP8. Made by `fp8_linear_layers`."""

    dot_general: Fp8DotGeneral

    def __init__(self, linear: eqx.nn.Linear, dot_general: Fp8DotGeneral):
        """Takes over the arrays of a plain layer.

        Args:
            linear: The layer.
            dot_general: The op that multiplies.
        """
        for field in dataclasses.fields(eqx.nn.Linear):
            setattr(self, field.name, getattr(linear, field.name))
        self.dot_general = dot_general

    @jax.named_scope("fp8_linear")
    def __call__(self, x: Float[Array, "..."], *, key: Any = None) -> Float[Array, "..."]:
        """`weight @ x + bias` for one example; `jax.vmap` over a batch is one product.

        Args:
            x: Shape `(in_features,)`, or `()` for `"scalar"`. As in the plain layer, more axes are those of `@`: a
                matrix holds examples in its columns.
            key: Not used.

        Raises:
            ValueError: If `x` has another shape.
        """
        del key
        if self.in_features == "scalar":
            if jnp.shape(x) != ():
                raise ValueError(f"x of shape {jnp.shape(x)} must be a scalar: the layer's in_features is 'scalar'")
            x = jnp.broadcast_to(x, (1,))
        check_operands(x, x)  # before `result_type`, which takes a tuple for a dtype
        weight, bias = self.weight, self.bias
        dtype = jnp.result_type(x, weight)
        features = max(0, x.ndim - 2)
        _require_fit(x.shape, features, weight, bias)
        x = self.dot_general(x, weight, (((features,), (1,)), ((), ())), preferred_element_type=dtype)
        if x.ndim > 1:
            x = jnp.swapaxes(x, -1, -2)
        if bias is not None:
            x = x + bias
        return jnp.squeeze(x) if self.out_features == "scalar" else x


def _require_fit(shape: tuple[int, ...], features: int, weight: Any, bias: Any) -> None:
    """Raises unless a weight multiplies an input of this shape: the op's error could not tell the layer."""
    outputs, inputs = weight.shape[-2:]
    fits = bool(shape) and shape[features] == inputs
    with_bias = bias is None or len(shape) < 2 or shape[-1] in (1, outputs)
    if not (fits and with_bias):
        raise ValueError(
            f"x of shape {shape} does not fit a layer that describe(model) shows as {inputs} -> {outputs}: it takes "
            f"one example, of shape ({inputs},). A batch has one more axis in front: call jax.vmap(model)"
        )


@dataclasses.dataclass(frozen=True)
class EquinoxLinear(LayerRule):
    """`eqx.nn.Linear`, which has no field for an op: an `Fp8Linear`, a subclass, replaces it."""

    @property
    def layer_type(self) -> type:
        """`eqx.nn.Linear`."""
        return eqx.nn.Linear

    def refusal(self, layer: eqx.nn.Linear) -> str | None:
        """Integer or complex weights; a subclass, whose `__call__` would be lost; or a wrapper of unknown shape."""
        if type(layer) not in (eqx.nn.Linear, Fp8Linear):
            return f"{type(layer).__name__} is a subclass of Linear and may multiply differently"
        if _leading_shape(layer) is None:
            return (
                f"its weight is a {type(layer.weight).__name__} that holds stacked arrays, and without a bias the "
                "number of stacked layers is unknown; convert the model once this weight is an array"
            )
        return integer_weight(layer.weight)

    def kernel(self, layer: eqx.nn.Linear) -> Kernel:
        """The weight, from the input features to the output features."""
        leading = _leading_shape(layer) or ()
        features = layer.in_features, layer.out_features
        return Kernel(layer.weight, *features, leading=leading, contracted=(1,), first=False)

    def op(self, layer: eqx.nn.Linear) -> Fp8DotGeneral | None:
        """The op of an `Fp8Linear`."""
        return layer.dot_general if isinstance(layer, Fp8Linear) else None

    def with_op(self, layer: eqx.nn.Linear, op: Fp8DotGeneral | None) -> eqx.nn.Linear:
        """An `Fp8Linear` with the op, or a plain `Linear`."""
        return plain_linear(layer) if op is None else Fp8Linear(layer, op)


def plain_linear(layer: eqx.nn.Linear, **changes: Any) -> eqx.nn.Linear:
    """A plain layer with the fields of another one, or of a converted one.

    Args:
        layer: The layer.
        **changes: Fields with other values.
    """
    fields = {field.name: getattr(layer, field.name) for field in dataclasses.fields(eqx.nn.Linear)}
    return rebuilt(eqx.nn.Linear, fields | changes)


def _leading_shape(layer: eqx.nn.Linear) -> tuple[int, ...] | None:
    """The sizes of the weight's axes before its matrix; None if unknown.

    A weight need not be an array: FlowJAX's layers hold a node that computes it, such as a masked array, once the whole
    model is unwrapped; `eqx.nn.Shared` leaves a node without arrays. The bias has the same leading axes.
    """
    for array, matrix in ((layer.weight, 2), (layer.bias, 1)):
        if (shape := getattr(array, "shape", None)) is not None:
            return shape[: len(shape) - matrix]
    stacked = any(getattr(leaf, "ndim", 0) > 2 for leaf in jax.tree.leaves(layer.weight))
    return None if stacked else ()
