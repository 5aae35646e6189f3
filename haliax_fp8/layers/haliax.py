"""Rules for Haliax's layers."""

import dataclasses
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
from haliax.quantization import DotGeneralOp

from .._op import Fp8DotGeneral
from .experts import MeshAxes, product_on_each_device
from .kernel import Kernel, axes_of
from .rule import LayerRule, OnlyIfNamed, integer_weight


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
            return f"its dot_general is already a {type(layer.dot_general).__name__}"
        return integer_weight(layer.weight)

    def kernel(self, layer: hnn.Linear) -> Kernel:
        """The weight, from the input axes to the output axes."""
        return Kernel(layer.weight, layer.In, layer.Out, factor=float(layer.reparam.active_scale))

    def op(self, layer: hnn.Linear) -> Fp8DotGeneral | None:
        """The `dot_general`, if it is ours."""
        return layer.dot_general if isinstance(layer.dot_general, Fp8DotGeneral) else None

    def with_op(self, layer: hnn.Linear, op: Fp8DotGeneral | None) -> hnn.Linear:
        """The layer with another `dot_general`; with None, Haliax's default."""
        return dataclasses.replace(layer, dot_general=DotGeneralOp.default() if op is None else op)


class Fp8Embedding(hnn.Embedding):
    """A `haliax.nn.Embedding` whose `unembed` multiplies in FP8; the lookup does not change."""

    dot_general: Fp8DotGeneral = eqx.field(kw_only=True)

    @jax.named_scope("unembed")
    def unembed(self, input_embeds: hax.NamedArray) -> hax.NamedArray:
        """The logits, `input_embeds.dot(weight)` over the embedding axes."""
        logits = input_embeds.dot(self.weight, axis=self.Embed, dot_general=self.dot_general)
        return logits * self.reparam.unembed_active_scale

    def resize_embeddings(self, new_size: int, key: jax.Array | None = None) -> "Fp8Embedding":
        """This layer with another vocabulary size; the op keeps its state and knows the kernel by its new shape."""
        resized = super().resize_embeddings(new_size, key=key)
        return dataclasses.replace(resized, dot_general=dataclasses.replace(self.dot_general, kernel_shape=(new_size,)))


@dataclasses.dataclass(frozen=True)
class HaliaxEmbedding(LayerRule):
    """`haliax.nn.Embedding`: its `unembed`, the tied head of a language model, becomes an FP8 product."""

    @property
    def layer_type(self) -> type:
        """`haliax.nn.Embedding`."""
        return hnn.Embedding

    def refusal(self, layer: hnn.Embedding) -> str | OnlyIfNamed:
        """Integer weights, or a subclass, whose methods would be lost; any other is converted only if it is named.

        A lookup is not a product, and an FP8 head is an explicit choice: the loss reads it directly.
        """
        cannot_be = _subclass(layer, hnn.Embedding, Fp8Embedding) or integer_weight(layer.weight)
        return cannot_be or OnlyIfNamed("a tied head is converted only if a target names it")

    def kernel(self, layer: hnn.Embedding) -> Kernel:
        """The weight, from the embedding axes to the vocabulary."""
        return Kernel(layer.weight, layer.Embed, layer.Vocab)

    def op(self, layer: hnn.Embedding) -> Fp8DotGeneral | None:
        """The op of `unembed`."""
        return layer.dot_general if isinstance(layer, Fp8Embedding) else None

    def with_op(self, layer: hnn.Embedding, op: Fp8DotGeneral | None) -> hnn.Embedding:
        """An `Fp8Embedding` with the op, or a plain `Embedding`."""
        fields = _fields(layer, hnn.Embedding)
        return hnn.Embedding(**fields) if op is None else Fp8Embedding(**fields, dot_general=op)


class Fp8MoELinear(hnn.MoELinear):
    """A `haliax.nn.MoELinear` whose grouped products run in FP8.

    With `use_gmm`, each device of a mesh multiplies its own rows, as without FP8; see `product_on_each_device`.
    """

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
        mesh_axes = MeshAxes.of(*ragged, self.In, self.Out, experts) if self.use_gmm else None
        if mesh_axes is None:
            product = self.dot_general.ragged_dot(rows, kernel, sizes)
        else:
            product = product_on_each_device(self.dot_general, rows, kernel, sizes, mesh_axes)
        out = hax.named(product, (*ragged, self.Out))
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
        return _subclass(layer, hnn.MoELinear, Fp8MoELinear) or integer_weight(layer.weight)

    def kernel(self, layer: hnn.MoELinear) -> Kernel:
        """The weight, from the input axis to the output axis, for each expert."""
        return Kernel(layer.weight, layer.In, layer.Out, layer.Experts)

    def op(self, layer: hnn.MoELinear) -> Fp8DotGeneral | None:
        """The op of the grouped product."""
        return layer.dot_general if isinstance(layer, Fp8MoELinear) else None

    def with_op(self, layer: hnn.MoELinear, op: Fp8DotGeneral | None) -> hnn.MoELinear:
        """An `Fp8MoELinear` with the op, or a plain `MoELinear`."""
        fields = _fields(layer, hnn.MoELinear)
        return hnn.MoELinear(**fields) if op is None else Fp8MoELinear(**fields, dot_general=op)


def _fields(layer: Any, plain: type) -> dict[str, Any]:
    """The fields that a layer has in common with its plain class."""
    return {field.name: getattr(layer, field.name) for field in dataclasses.fields(plain)}


def _subclass(layer: Any, plain: type, converted: type) -> str | None:
    """The refusal of a layer whose class is not exactly the one that the rule rewrites."""
    if type(layer) in (plain, converted):
        return None
    return f"{type(layer).__name__} is a subclass of {plain.__name__} and may multiply differently"
