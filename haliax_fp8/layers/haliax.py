"""Rules for Haliax's layers."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
from haliax.axis import axis_spec_to_tuple
from haliax.quantization import DotGeneralOp

from .._op import Fp8DotGeneral
from ..devices.device import Device
from ..recipes.recipe import Recipe
from ..recipes.support import Support, supported_in_groups
from .layer_work import LayerSize
from .rule import LayerRule, integer_weight, state_like


@dataclasses.dataclass(frozen=True)
class HaliaxLinear(LayerRule):
    """`haliax.nn.Linear`: the op goes into its `dot_general` field."""

    @property
    def layer_type(self) -> type:
        """`haliax.nn.Linear`."""
        return hnn.Linear

    def refusal(self, layer: hnn.Linear) -> str | None:
        """Integer weights, or a `dot_general` that is not Haliax's default and would be lost."""
        if type(layer.dot_general) is not type(DotGeneralOp.default()):
            return f"its dot_general is a {type(layer.dot_general).__name__} already"
        return integer_weight(layer.weight)

    def shape(self, layer: hnn.Linear) -> str:
        """Input axes and output axes with their sizes."""
        return f"{named_sizes(layer.In)} -> {named_sizes(layer.Out)}"

    def size(self, layer: hnn.Linear, stack: tuple[hax.Axis, ...]) -> LayerSize:
        """Input and output axes, and the members of an ensemble."""
        return size_of(layer.weight, layer.In, layer.Out)

    def op(self, layer: hnn.Linear) -> Fp8DotGeneral | None:
        """The `dot_general`, if it is ours."""
        return layer.dot_general if isinstance(layer.dot_general, Fp8DotGeneral) else None

    def convert(self, layer: hnn.Linear, recipe: Recipe, compute_dtype: Any, stack: tuple[hax.Axis, ...]) -> hnn.Linear:
        """The layer with an op whose state has the stack's axes, and those of an ensemble made by `filter_vmap`."""
        return self.with_op(layer, op_for(layer.weight, layer.Out, recipe, compute_dtype, stack))

    def with_op(self, layer: hnn.Linear, op: Fp8DotGeneral) -> hnn.Linear:
        """The layer with another `dot_general`."""
        return dataclasses.replace(layer, dot_general=op)

    def restore(self, layer: hnn.Linear) -> hnn.Linear:
        """The layer with Haliax's default `dot_general`."""
        return dataclasses.replace(layer, dot_general=DotGeneralOp.default())

    def part(self, layer: hnn.Linear) -> Any:
        """The output axes, if the weight has them next to each other and is an array."""
        if type(layer) is not hnn.Linear or (self.op(layer) is None and self.refusal(layer) is not None):
            return None
        if not isinstance(layer.weight, hax.NamedArray) or members_of(layer.weight):
            return None
        names, out = layer.weight.axis_names, tuple(axis.name for axis in axes_of(layer.Out))
        return layer.Out if out and any(names[i : i + len(out)] == out for i in range(len(names))) else None

    def join(self, layers: Sequence[hnn.Linear]) -> hnn.Linear:
        """With one output axis, `joined`, instead of the layers' own."""
        first = layers[0]
        alike = lambda layer: (layer.In, layer.bias is None, layer._reparam_cls, layer.weight.dtype)
        if any(alike(layer) != alike(first) for layer in layers):
            raise ValueError(
                f"layers differ in input axes, bias, reparametrization or dtype: {list(map(alike, layers))}"
            )
        weights = [layer.weight.flatten_axes(layer.Out, _JOINED) for layer in layers]
        others = lambda weight: tuple(axis if axis.name != _JOINED else _JOINED for axis in weight.axes)
        if any(others(weight) != others(weights[0]) for weight in weights):
            raise ValueError(f"weights differ in axes: {[layer.weight.axes for layer in layers]}")
        bias = None
        if first.bias is not None:
            biases = [layer.bias for layer in layers if layer.bias is not None]
            bias = _joined([b.flatten_axes(layer.Out, _JOINED) for b, layer in zip(biases, layers, strict=True)])
        weight = _joined(weights)
        return dataclasses.replace(first, weight=weight, bias=bias, Out=weight.resolve_axis(_JOINED))

    def split(self, joined: hnn.Linear, parts: Sequence[hax.AxisSpec]) -> list[hnn.Linear]:
        """With the axes that the layers had."""
        if members_of(joined.weight):
            return eqx.filter_vmap(lambda member: self.split(member, parts))(joined)
        sizes = [math.prod(axis.size for axis in axes_of(Out)) for Out in parts]

        def part(end: int, size: int, Out: hax.AxisSpec) -> hnn.Linear:
            cut = lambda x: None if x is None else x[_JOINED, end - size : end].unflatten_axis(_JOINED, Out)
            weight, op = cut(joined.weight), joined.dot_general
            if isinstance(op, Fp8DotGeneral):
                op = dataclasses.replace(op, kernel_shape=kernel_shape_of(weight, Out))
            return dataclasses.replace(joined, weight=weight, bias=cut(joined.bias), Out=Out, dot_general=op)

        return [part(sum(sizes[: i + 1]), *where) for i, where in enumerate(zip(sizes, parts, strict=True))]


_JOINED = "joined"


def _joined(arrays: Sequence[hax.NamedArray]) -> hax.NamedArray:
    """Along the axis of that name, which each may have in another size."""
    Joined = hax.Axis(_JOINED, sum(x.resolve_axis(_JOINED).size for x in arrays))
    return hax.concatenate(Joined, [x.rearrange(arrays[0].axis_names) for x in arrays])


class Fp8Embedding(hnn.Embedding):
    """A `haliax.nn.Embedding` whose `unembed` multiplies in FP8; the lookup does not change."""

    dot_general: Fp8DotGeneral = eqx.field(kw_only=True)

    @jax.named_scope("unembed")
    def unembed(self, input_embeds: hax.NamedArray) -> hax.NamedArray:
        """The logits, `input_embeds.dot(weight)` over the embedding axes."""
        logits = input_embeds.dot(self.weight, axis=self.Embed, dot_general=self.dot_general)
        return logits * self.reparam.unembed_active_scale

    def resize_embeddings(self, new_size: int, key: jax.Array | None = None) -> "Fp8Embedding":
        """With another vocabulary size; the op keeps its state and knows the kernel by its new shape."""
        resized = super().resize_embeddings(new_size, key=key)
        return dataclasses.replace(resized, dot_general=dataclasses.replace(self.dot_general, kernel_shape=(new_size,)))


@dataclasses.dataclass(frozen=True)
class HaliaxEmbedding(LayerRule):
    """`haliax.nn.Embedding`: its `unembed`, the tied head of a language model, becomes an FP8 product."""

    @property
    def layer_type(self) -> type:
        """`haliax.nn.Embedding`."""
        return hnn.Embedding

    def refusal(self, layer: hnn.Embedding) -> str | None:
        """Integer weights, or a subclass, whose methods would be lost."""
        return subclass(layer, hnn.Embedding) or integer_weight(layer.weight)

    def only_if_named(self, layer: hnn.Embedding) -> str:
        """A lookup is not a product, and an FP8 head is an explicit choice: the loss reads it directly."""
        return "a tied head is converted only if a target names it"

    def shape(self, layer: hnn.Embedding) -> str:
        """Of the product: embedding axes to vocabulary."""
        return f"{named_sizes(layer.Embed)} -> {named_sizes(layer.Vocab)}"

    def size(self, layer: hnn.Embedding, stack: tuple[hax.Axis, ...]) -> LayerSize:
        """Of the product, as its shape."""
        return size_of(layer.weight, layer.Embed, layer.Vocab)

    def op(self, layer: hnn.Embedding) -> Fp8DotGeneral | None:
        """The op of `unembed`."""
        return layer.dot_general if isinstance(layer, Fp8Embedding) else None

    def convert(
        self, layer: hnn.Embedding, recipe: Recipe, compute_dtype: Any, stack: tuple[hax.Axis, ...]
    ) -> Fp8Embedding:
        """An `Fp8Embedding` with the same arrays."""
        return self.with_op(layer, op_for(layer.weight, layer.Vocab, recipe, compute_dtype, stack))

    def with_op(self, layer: hnn.Embedding, op: Fp8DotGeneral) -> Fp8Embedding:
        """An `Fp8Embedding` with the op."""
        return Fp8Embedding(layer.weight, layer.Vocab, layer.Embed, layer._reparam_cls, dot_general=op)

    def restore(self, layer: hnn.Embedding) -> hnn.Embedding:
        """A plain `Embedding`."""
        return hnn.Embedding(layer.weight, layer.Vocab, layer.Embed, layer._reparam_cls)


class Fp8MoELinear(hnn.MoELinear):
    """A `haliax.nn.MoELinear` whose grouped products run in FP8."""

    dot_general: Fp8DotGeneral = eqx.field(kw_only=True)

    @jax.named_scope("moe_linear")
    def __call__(self, inputs: hax.NamedArray, group_sizes: hax.NamedArray, *, key: Any = None) -> hax.NamedArray:
        """Multiplies each expert's rows by its kernel; rows beyond the last group give 0.

        Args:
            inputs: One ragged axis and `In`; the rows of each expert are consecutive.
            group_sizes: How many rows each expert has; may be 0.
            key: Not used.
        """
        del key
        ragged = hax.axis.without_axes(inputs.axes, self.In)
        if len(ragged) != 1:
            raise ValueError(
                f"inputs have axes {inputs.axes}; a MoELinear takes one axis of rows besides {self.In.name!r}: flatten "
                "the others into it"
            )
        rows = inputs.rearrange((*ragged, self.In)).array
        (experts,) = axes_of(self.Experts)
        kernel = self.weight.rearrange((experts, self.In, self.Out)).array
        sizes = group_sizes.rearrange((experts,)).array
        out = hax.named(self.dot_general.ragged_dot(rows, kernel, sizes), (*ragged, self.Out))
        out = out.rearrange(axes_of(hax.axis.replace_axis(inputs.axes, self.In, self.Out)))
        return hax.auto_sharded(out if self.bias is None else out + self.bias)


@dataclasses.dataclass(frozen=True)
class HaliaxMoELinear(LayerRule):
    """`haliax.nn.MoELinear`: one state for all experts, as the kernel is one array."""

    @property
    def layer_type(self) -> type:
        """`haliax.nn.MoELinear`."""
        return hnn.MoELinear

    def refusal(self, layer: hnn.MoELinear) -> str | None:
        """Integer weights, or a subclass, whose `__call__` would be lost."""
        return subclass(layer, hnn.MoELinear) or integer_weight(layer.weight)

    def support(self, recipe: Recipe, device: Device) -> Support:
        """Of grouped products."""
        return supported_in_groups(recipe, device)

    def shape(self, layer: hnn.MoELinear) -> str:
        """Experts, input and output axes."""
        return f"{named_sizes(layer.Experts)}: {named_sizes(layer.In)} -> {named_sizes(layer.Out)}"

    def size(self, layer: hnn.MoELinear, stack: tuple[hax.Axis, ...]) -> LayerSize:
        """Experts, input and output axes."""
        size = size_of(layer.weight, layer.In, layer.Out)
        return dataclasses.replace(size, experts=math.prod(axis.size for axis in axes_of(layer.Experts)))

    def op(self, layer: hnn.MoELinear) -> Fp8DotGeneral | None:
        """The op of the grouped product."""
        return layer.dot_general if isinstance(layer, Fp8MoELinear) else None

    def convert(
        self, layer: hnn.MoELinear, recipe: Recipe, compute_dtype: Any, stack: tuple[hax.Axis, ...]
    ) -> Fp8MoELinear:
        """An `Fp8MoELinear` with the same arrays."""
        return self.with_op(layer, op_for(layer.weight, layer.Out, recipe, compute_dtype, stack))

    def with_op(self, layer: hnn.MoELinear, op: Fp8DotGeneral) -> Fp8MoELinear:
        """An `Fp8MoELinear` with the op."""
        return Fp8MoELinear(**_moe_fields(layer), dot_general=op)

    def restore(self, layer: hnn.MoELinear) -> hnn.MoELinear:
        """A plain `MoELinear`."""
        return hnn.MoELinear(**_moe_fields(layer))


def _moe_fields(layer: hnn.MoELinear) -> dict[str, Any]:
    return {field.name: getattr(layer, field.name) for field in dataclasses.fields(hnn.MoELinear)}


def op_for(
    weight: Any, Out: hax.AxisSpec, recipe: Recipe, compute_dtype: Any, stack: tuple[hax.Axis, ...]
) -> Fp8DotGeneral:
    """An op for a kernel with named axes, which may be stacked, or be the members of an ensemble."""
    if isinstance(weight, hax.NamedArray):
        stack = tuple(axis for axis in stack if axis.name in weight.axis_names)
    shape = kernel_shape_of(weight, Out)
    op = Fp8DotGeneral.init(recipe, compute_dtype=compute_dtype, kernel_shape=shape, stack=stack)
    return state_like(op, weight, members_of(weight))


def kernel_shape_of(weight: Any, Out: hax.AxisSpec) -> tuple[int, ...]:
    """The sizes of a kernel's output axes, in the order in which it has them."""
    sizes = {axis.name: axis.size for axis in axes_of(Out)}
    names = weight.axis_names if isinstance(weight, hax.NamedArray) else tuple(sizes)
    return tuple(sizes[name] for name in names if name in sizes)


def size_of(weight: Any, In: hax.AxisSpec, Out: hax.AxisSpec) -> LayerSize:
    """The size of a layer whose kernel has named axes."""
    inputs, outputs = (math.prod(axis.size for axis in axes_of(spec)) for spec in (In, Out))
    return LayerSize(inputs, outputs, members=math.prod(members_of(weight)))


def members_of(weight: Any) -> tuple[int, ...]:
    """The axes without names that an ensemble's weight begins with."""
    # Where a weight is tied to another array, it (or the array in it) is a node of `eqx.nn.Shared` instead.
    shape = getattr(weight.array, "shape", None) if isinstance(weight, hax.NamedArray) else None
    return () if shape is None else shape[: len(shape) - len(weight.axis_names)]


def subclass(layer: Any, *types: type) -> str | None:
    """The refusal of a layer whose class is not exactly the one that the rule rewrites."""
    ours = (Fp8Embedding, Fp8MoELinear)
    if type(layer) in (*types, *ours):
        return None
    return f"{type(layer).__name__} is a subclass of {types[0].__name__} and may multiply otherwise"


def named_sizes(spec: hax.AxisSpec) -> str:
    """Axes with their sizes, for a table."""
    return " × ".join(f"{axis.name} {axis.size}" for axis in axes_of(spec)) or "scalar"


def axes_of(spec: hax.AxisSpec) -> tuple[hax.Axis, ...]:
    """The axes of a specification, which may be a single one."""
    return tuple(axis for axis in axis_spec_to_tuple(spec) if isinstance(axis, hax.Axis))
