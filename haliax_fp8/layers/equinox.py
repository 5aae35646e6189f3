"""Rules for Equinox's layers."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._op import Fp8DotGeneral
from ..recipes.recipe import Recipe
from .layer_work import LayerSize
from .rule import LayerRule, integer_weight, state_like


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
            x: Shape `(in_features,)`, or `()` for `"scalar"`.
            key: Not used.
        """
        del key
        if self.in_features == "scalar":
            if jnp.shape(x) != ():
                raise ValueError(f"x of shape {jnp.shape(x)} must be a scalar: the layer's in_features is 'scalar'")
            x = jnp.broadcast_to(x, (1,))
        dtype = jnp.result_type(x, self.weight)
        x = self.dot_general(x, self.weight, (((0,), (1,)), ((), ())), preferred_element_type=dtype)
        if self.bias is not None:
            x = x + self.bias
        return jnp.squeeze(x) if self.out_features == "scalar" else x


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
            return f"{type(layer).__name__} is a subclass of Linear and may multiply otherwise"
        if _leading_shape(layer) is None:
            return (
                f"its weight is a {type(layer.weight).__name__} that holds stacked arrays, and there is no bias that "
                "tells how many layers they are; convert the model once this weight is an array"
            )
        return integer_weight(layer.weight)

    def shape(self, layer: eqx.nn.Linear) -> str:
        """Input and output features."""
        return f"{layer.in_features} -> {layer.out_features}"

    def size(self, layer: eqx.nn.Linear, stack: tuple[hax.Axis, ...]) -> LayerSize:
        """Input and output features, and the members of an ensemble."""
        inputs, outputs = (1 if n == "scalar" else n for n in (layer.in_features, layer.out_features))
        members, _ = _leading(layer, stack)
        return LayerSize(inputs, outputs, members=math.prod(members))

    def op(self, layer: eqx.nn.Linear) -> Fp8DotGeneral | None:
        """The op of an `Fp8Linear`."""
        return layer.dot_general if isinstance(layer, Fp8Linear) else None

    def convert(
        self, layer: eqx.nn.Linear, recipe: Recipe, compute_dtype: Any, stack: tuple[hax.Axis, ...]
    ) -> Fp8Linear:
        """An `Fp8Linear` with the same arrays; leading axes of the weight are those of stacks and ensembles."""
        members, stack = _leading(layer, stack)
        op = Fp8DotGeneral.init(recipe, compute_dtype=compute_dtype, stack=stack)
        return Fp8Linear(layer, state_like(op, layer.weight, members))

    def with_op(self, layer: eqx.nn.Linear, op: Fp8DotGeneral) -> Fp8Linear:
        """An `Fp8Linear` with the op."""
        return Fp8Linear(layer, op)

    def restore(self, layer: eqx.nn.Linear) -> eqx.nn.Linear:
        """A plain `Linear` with the same arrays."""
        return _with_arrays(layer, layer.weight, layer.bias)

    def part(self, layer: eqx.nn.Linear) -> int | None:
        """The output features; those of an ensemble or a stack are along the weight's second last axis."""
        if self.refusal(layer) is not None or not hasattr(layer.weight, "ndim"):
            return None
        return None if "scalar" in (layer.in_features, layer.out_features) else int(layer.out_features)

    def join(self, layers: Sequence[eqx.nn.Linear]) -> eqx.nn.Linear:
        """With all output features."""
        alike = lambda layer: (layer.in_features, layer.use_bias, layer.weight.dtype)
        if any(alike(layer) != alike(layers[0]) for layer in layers):
            raise ValueError(f"layers differ in input features, bias or dtype: {list(map(alike, layers))}")
        weight = jnp.concatenate([layer.weight for layer in layers], -2)
        biases = [layer.bias for layer in layers if layer.bias is not None]
        return _with_arrays(layers[0], weight, jnp.concatenate(biases, -1) if biases else None, weight.shape[-2])

    def split(self, joined: eqx.nn.Linear, parts: Sequence[int]) -> list[eqx.nn.Linear]:
        """With the features that the layers had."""

        def part(end: int, count: int) -> eqx.nn.Linear:
            bias = None if joined.bias is None else joined.bias[..., end - count : end]
            plain = _with_arrays(joined, joined.weight[..., end - count : end, :], bias, count)
            return plain if (op := self.op(joined)) is None else self.with_op(plain, op)

        return [part(sum(parts[: i + 1]), count) for i, count in enumerate(parts)]


def _with_arrays(layer: eqx.nn.Linear, weight: Any, bias: Any, outputs: Any = None) -> eqx.nn.Linear:
    """A plain layer with other arrays, and as many output features; None leaves those."""
    # As JAX rebuilds a module from its leaves: its constructor would draw weights, and a trace of it takes 2 ms.
    plain = object.__new__(eqx.nn.Linear)
    for field in dataclasses.fields(eqx.nn.Linear):
        object.__setattr__(plain, field.name, getattr(layer, field.name))
    object.__setattr__(plain, "weight", weight)
    object.__setattr__(plain, "bias", bias)
    if outputs is not None:
        object.__setattr__(plain, "out_features", outputs)
    return plain


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


def _leading(layer: eqx.nn.Linear, stack: tuple[hax.Axis, ...]) -> tuple[tuple[int, ...], tuple[hax.Axis, ...]]:
    """The weight's axes before its matrix: those of an ensemble, then those of the stacks, if it has them."""
    leading = _leading_shape(layer) or ()
    sizes = tuple(axis.size for axis in stack)
    stack = stack if leading[len(leading) - len(sizes) :] == sizes else ()
    return leading[: len(leading) - len(stack)], stack
