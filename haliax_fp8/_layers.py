"""Which layer classes can be converted, and how: one rule per class, a value that users can add to."""

import abc
import dataclasses
from typing import Any

import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax.quantization import DotGeneralOp
from haliax.util import ensure_tuple

from ._op import Fp8DotGeneral
from ._recipe import Recipe


@dataclasses.dataclass(frozen=True)
class LayerRule(abc.ABC):
    """How the layers of one class are converted.

    Write one for a class of your own and pass it in `Fp8Config(layers=(*default_layers, MyRule()))`; the first rule
    whose class fits a layer is used.
    """

    @property
    @abc.abstractmethod
    def layer_type(self) -> type:
        """The class, subclasses included."""

    @abc.abstractmethod
    def refusal(self, layer: Any) -> str | None:
        """Why this layer cannot be converted, or None if it can be."""

    @abc.abstractmethod
    def shape(self, layer: Any) -> str:
        """The kernel's axes for a table, such as `embed 64 -> mlp 256`."""

    @abc.abstractmethod
    def op(self, layer: Any) -> Fp8DotGeneral | None:
        """The op of a converted layer; None if it is not converted."""

    @abc.abstractmethod
    def convert(self, layer: Any, recipe: Recipe, compute_dtype: Any, stack: tuple[hax.Axis, ...]) -> Any:
        """The layer with an `Fp8DotGeneral`, state included; `stack` holds the axes of the stacks that it is in."""

    @abc.abstractmethod
    def restore(self, layer: Any) -> Any:
        """The layer as it was before `convert`."""


@dataclasses.dataclass(frozen=True)
class HaliaxLinear(LayerRule):
    """`haliax.nn.Linear`: the op goes into its `dot_general` field."""

    @property
    def layer_type(self) -> type:
        """`haliax.nn.Linear`."""
        return hnn.Linear

    def refusal(self, layer: hnn.Linear) -> str | None:
        """Integer weights, or a `dot_general` that is not Haliax's default and would be lost."""
        weight = layer.weight.array if isinstance(layer.weight, hax.NamedArray) else None
        if weight is not None and not jnp.issubdtype(weight.dtype, jnp.floating):
            return f"its weight has dtype {weight.dtype}, which is not floating-point"
        if type(layer.dot_general) is not type(DotGeneralOp.default()):
            return f"its dot_general is a {type(layer.dot_general).__name__} already"
        return None

    def shape(self, layer: hnn.Linear) -> str:
        """Input axes and output axes with their sizes."""
        return f"{_axes(layer.In)} -> {_axes(layer.Out)}"

    def op(self, layer: hnn.Linear) -> Fp8DotGeneral | None:
        """The `dot_general`, if it is ours."""
        return layer.dot_general if isinstance(layer.dot_general, Fp8DotGeneral) else None

    def convert(self, layer: hnn.Linear, recipe: Recipe, compute_dtype: Any, stack: tuple[hax.Axis, ...]) -> hnn.Linear:
        """The layer with an op whose state has the stack's axes, and those of an ensemble made by `filter_vmap`."""
        out = {axis.name: axis.size for axis in ensure_tuple(layer.Out)}
        names, shape = tuple(out), None
        members: tuple[int, ...] = ()
        if isinstance(layer.weight, hax.NamedArray):
            # `weight` is a node of `eqx.nn.Shared` instead where it is tied to another array.
            array, axis_names = layer.weight.array, layer.weight.axis_names
            members = array.shape[: array.ndim - len(axis_names)]
            stack = tuple(axis for axis in stack if axis.name in axis_names)
            names = tuple(name for name in axis_names if name in out)
        shape = tuple(out[name] for name in names)
        op = Fp8DotGeneral.init(recipe, compute_dtype=compute_dtype, kernel_shape=shape, stack=stack)
        return dataclasses.replace(layer, dot_general=state_like(op, layer.weight, members))

    def restore(self, layer: hnn.Linear) -> hnn.Linear:
        """The layer with Haliax's default `dot_general`."""
        return dataclasses.replace(layer, dot_general=DotGeneralOp.default())


def state_like(op: Fp8DotGeneral, weight: Any, members: tuple[int, ...]) -> Fp8DotGeneral:
    """The op with its state repeated for each member of an ensemble, and abstract where the weight is abstract."""
    abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(weight))

    def repeat(x: jax.Array) -> jax.Array | jax.ShapeDtypeStruct:
        shape = members + x.shape
        return jax.ShapeDtypeStruct(shape, x.dtype) if abstract else jnp.broadcast_to(x, shape)

    return jax.tree.map(repeat, op)


def _axes(spec: hax.AxisSpec) -> str:
    return " × ".join(f"{axis.name} {axis.size}" for axis in ensure_tuple(spec)) or "scalar"


default_layers: tuple[LayerRule, ...] = (HaliaxLinear(),)
