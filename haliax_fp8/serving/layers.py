"""Layers with data and scales in place of the weight: for inference, or as the frozen base of adapters."""

import dataclasses
import math
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax.quantization import DotGeneralOp
from haliax.state_dict import StateDict, to_state_dict
from jax import Array
from jax.typing import DTypeLike

from ..layers.equinox import plain_linear
from ..layers.kernel import Kernel, axes_of
from ..layers.quantized import AbstractQuantizedLayer
from ..scopes import SERVED_LINEAR
from .kernel import QuantizedKernel
from .named import apart, in_order, named_product, weight_of


# In place of the plain layer's weight.
_NO_WEIGHT: Any = None

# The axes of a matrix into which a layer's several output and input axes are flattened.
_AS_ONE = ("fp8_out", "fp8_in")


class QuantizedLinear(AbstractQuantizedLayer, hnn.Linear):
    """A `haliax.nn.Linear` whose weight is data and scales. Made by `quantize_for_inference` and `import_model`.

    Args:
        kernel: The weight, with muP's factor multiplied in; `weight` itself is empty.
        axes: The axes of the kernel.
    """

    kernel: QuantizedKernel = eqx.field(kw_only=True)
    axes: tuple[hax.Axis, ...] = eqx.field(static=True, kw_only=True)

    @staticmethod
    def of(layer: hnn.Linear, kernel: QuantizedKernel) -> "QuantizedLinear":
        """The layer with a kernel in place of its weight.

        Args:
            layer: A plain or a converted layer.
            kernel: Its weight, quantized.
        """
        axes = in_order(layer.weight, (*axes_of(layer.Out), *axes_of(layer.In)))
        plain: Any = DotGeneralOp.default()
        return QuantizedLinear(
            _NO_WEIGHT, layer.bias, layer.In, layer.Out, plain, layer._reparam_cls, kernel=kernel, axes=axes
        )

    @staticmethod
    def of_matrix(layer: hnn.Linear, kernel: QuantizedKernel) -> "QuantizedLinear":
        """The layer with a matrix of a checkpoint in place of its weight.

        Its blocks may straddle the layer's own axes, so several axes are multiplied as one.

        Args:
            layer: A plain or a converted layer.
            kernel: `[out, in]`.
        """
        axes = (*axes_of(layer.Out), *axes_of(layer.In))
        if len(axes_of(layer.Out)) != 1 or len(axes_of(layer.In)) != 1:
            sizes = (math.prod(axis.size for axis in axes_of(part)) for part in (layer.Out, layer.In))
            axes = tuple(hax.Axis(name, size) for name, size in zip(_AS_ONE, sizes, strict=True))
        return dataclasses.replace(QuantizedLinear.of(layer, kernel), axes=axes, dot_general=layer.dot_general)

    def __call__(self, inputs: hax.NamedArray, *, key: Any = None) -> hax.NamedArray:
        """Maps `In` to `Out`.

        Args:
            inputs: An array with the axes `In`.
            key: Not used.
        """
        del key
        return dequantized_call(self, inputs) if self.kernel.has_gradient else self._in_fp8(inputs)

    @jax.named_scope(SERVED_LINEAR)
    def _in_fp8(self, inputs: hax.NamedArray) -> hax.NamedArray:
        if self._multiplies_as_one:
            inputs = (
                inputs.flatten_axes(self.In, _AS_ONE[1]) if axes_of(self.In) else inputs.broadcast_axis(self.axes[1])
            )
            q = named_product(self.kernel, inputs, self.axes, self.axes[1:])
            q = hax.auto_sharded(apart(q, self.axes[0], self.Out))
        else:
            q = hax.auto_sharded(named_product(self.kernel, inputs, self.axes, axes_of(self.In)))
        return q if self.bias is None else hax.auto_sharded(q + self.bias)

    @property
    def described(self) -> Kernel:
        """The kernel, from the input axes to the output axes."""
        return Kernel(None, self.In, self.Out)

    def dequantized(self, dtype: DTypeLike) -> hnn.Linear:
        axes = (*axes_of(self.Out), *axes_of(self.In)) if self._multiplies_as_one else self.axes
        weight = weight_of(self.kernel, axes, dtype, float(self.reparam.active_scale))
        return hnn.Linear(weight, self.bias, self.In, self.Out, self.dot_general, self._reparam_cls)

    @property
    def _multiplies_as_one(self) -> bool:
        return self.axes[-1].name == _AS_ONE[1]

    def to_state_dict(self, prefix: str | None = None) -> StateDict:
        """The plain layer's state dict: `data * scale` in the dtype of the weight, under the same keys."""
        return to_state_dict(self.dequantized(self.kernel.dtype), prefix)

    def from_state_dict(self, state_dict: StateDict, prefix: str | None = None) -> Any:
        """Raises a ValueError: a state dict holds weights in high precision."""
        raise _no_state_dict(prefix)


class QuantizedEmbedding(AbstractQuantizedLayer, hnn.Embedding):
    """A `haliax.nn.Embedding` with its table in FP8: `embed` looks up and scales rows, `unembed` multiplies.

    Args:
        kernel: The table; `weight` itself is empty.
        axes: Its axes.
    """

    kernel: QuantizedKernel = eqx.field(kw_only=True)
    axes: tuple[hax.Axis, ...] = eqx.field(static=True, kw_only=True)

    @staticmethod
    def of(layer: hnn.Embedding, kernel: QuantizedKernel) -> "QuantizedEmbedding":
        """The layer with a kernel in place of its table.

        Args:
            layer: A plain or a converted layer.
            kernel: Its table, quantized.
        """
        axes = in_order(layer.weight, (layer.Vocab, *axes_of(layer.Embed)))
        return QuantizedEmbedding(_NO_WEIGHT, layer.Vocab, layer.Embed, layer._reparam_cls, kernel=kernel, axes=axes)

    def embed(self, input_ids: hax.NamedArray) -> hax.NamedArray:
        """The vectors of tokens, `data * scale` in the dtype of the table.

        Args:
            input_ids: The tokens.
        """
        kernel = self.kernel.quantized
        if kernel.scale.ndim and kernel.scale.shape[1:] != (1,) * (kernel.scale.ndim - 1):
            raise ValueError(
                f"an embedding has block scales, {self.kernel.text}, so its rows cannot be looked up; exclude it, "
                "or choose a layout with one scale for each row, such as 'FP8_DYNAMIC'"
            )
        rows = hax.named(kernel.data, self.axes).take(self.Vocab, input_ids)
        values = rows.astype(jnp.float32)
        scale = kernel.scale.reshape(-1)
        if scale.shape[0] == self.Vocab.size > 1:
            values = values * hax.named(scale, self.Vocab).take(self.Vocab, input_ids)
        else:
            values = values * scale[0]
        return values.astype(self.kernel.dtype) * self.reparam.active_scale

    def unembed(self, input_embeds: hax.NamedArray) -> hax.NamedArray:
        """The logits.

        Args:
            input_embeds: An array with the embedding axes.
        """
        return (
            named_product(self.kernel, input_embeds, self.axes, axes_of(self.Embed)) * self.reparam.unembed_active_scale
        )

    def resize_embeddings(self, new_size: int, key: Array | None = None) -> Any:
        """Raises a ValueError: new rows would have to be quantized."""
        raise ValueError("a quantized embedding was resized; resize it before quantize_for_inference")

    @property
    def described(self) -> Kernel:
        """The kernel, from the embedding axes to the vocabulary."""
        return Kernel(None, self.Embed, self.Vocab)

    def dequantized(self, dtype: DTypeLike) -> hnn.Embedding:
        return hnn.Embedding(weight_of(self.kernel, self.axes, dtype, 1.0), self.Vocab, self.Embed, self._reparam_cls)


class QuantizedMoELinear(AbstractQuantizedLayer, hnn.MoELinear):
    """A `haliax.nn.MoELinear` whose experts are data and scales.

    Args:
        kernel: The kernels of all experts; `weight` itself is empty.
        axes: Their axes.
        weight_axes: The axes of the weight, in its order.
    """

    kernel: QuantizedKernel = eqx.field(kw_only=True)
    axes: tuple[hax.Axis, ...] = eqx.field(static=True, kw_only=True)
    weight_axes: tuple[hax.Axis, ...] = eqx.field(static=True, kw_only=True)

    @staticmethod
    def of(layer: hnn.MoELinear, kernel: QuantizedKernel) -> "QuantizedMoELinear":
        """The layer with a kernel in place of its weight.

        Args:
            layer: A plain or a converted layer.
            kernel: Its weight, quantized.
        """
        axes = (*axes_of(layer.Experts), layer.In, layer.Out)
        return QuantizedMoELinear(
            _NO_WEIGHT,
            layer.bias,
            layer.Experts,
            layer.In,
            layer.Out,
            layer.use_gmm,
            kernel=kernel,
            axes=axes,
            weight_axes=in_order(layer.weight, axes),
        )

    def __call__(self, inputs: hax.NamedArray, group_sizes: hax.NamedArray, *, key: Any = None) -> hax.NamedArray:
        """Multiplies each expert's rows by its kernel; rows beyond the last group give 0.

        Args:
            inputs: One ragged axis and `In`; the rows of each expert are consecutive.
            group_sizes: How many rows each expert has.
            key: Not used.
        """
        del key
        if self.kernel.has_gradient:
            return dequantized_call(self, inputs, group_sizes)
        return self._in_fp8(inputs, group_sizes)

    @jax.named_scope("served_moe_linear")
    def _in_fp8(self, inputs: hax.NamedArray, group_sizes: hax.NamedArray) -> hax.NamedArray:
        rows = hax.axis.without_axes(inputs.axes, self.In)
        if len(rows) != 1:
            raise ValueError(f"inputs have axes {inputs.axes}; flatten all but {self.In.name!r} into one axis of rows")
        sizes = group_sizes.rearrange(axes_of(self.Experts)).array
        out = self.kernel.ragged_dot(inputs.rearrange((*rows, self.In)).array, sizes)
        named = hax.named(out, (*rows, self.Out))
        named = named.rearrange(axes_of(hax.axis.replace_axis(inputs.axes, self.In, self.Out)))
        return hax.auto_sharded(named if self.bias is None else named + self.bias)

    @property
    def described(self) -> Kernel:
        """The kernel, from the input axis to the output axis, for each expert."""
        return Kernel(None, self.In, self.Out, self.Experts)

    def dequantized(self, dtype: DTypeLike) -> hnn.MoELinear:
        weight = weight_of(self.kernel, self.axes, dtype, 1.0)
        stack = weight.axes[: len(weight.axes) - len(self.axes)]
        weight = weight.rearrange((*stack, *self.weight_axes))
        return hnn.MoELinear(weight, self.bias, self.Experts, self.In, self.Out, use_gmm=self.use_gmm)


class QuantizedEquinoxLinear(AbstractQuantizedLayer, eqx.nn.Linear):
    """An `eqx.nn.Linear` whose weight is data and scales.

    Args:
        linear: The layer that provides all other fields.
        kernel: The quantized weight.
    """

    kernel: QuantizedKernel

    def __init__(self, linear: eqx.nn.Linear, kernel: QuantizedKernel):
        for name in ("bias", "in_features", "out_features", "use_bias"):
            setattr(self, name, getattr(linear, name))
        self.weight: Any = None
        self.kernel = kernel

    def __call__(self, x: Array, *, key: Any = None) -> Array:
        """`weight @ x + bias` for one example; `jax.vmap` over a batch is one product.

        Args:
            x: Shape `(in_features,)`, or `()` for `"scalar"`.
            key: Not used.
        """
        del key
        return dequantized_call(self, x) if self.kernel.has_gradient else self._in_fp8(x)

    @jax.named_scope(SERVED_LINEAR)
    def _in_fp8(self, x: Array) -> Array:
        if self.in_features == "scalar":
            x = jnp.broadcast_to(x, (1,))
        x = self.kernel.dot_general(x, (((0,), (1,)), ((), ())), self.kernel.result_dtype(x))
        if self.bias is not None:
            x = x + self.bias
        return jnp.squeeze(x) if self.out_features == "scalar" else x

    @property
    def described(self) -> Kernel:
        """The kernel, from the input features to the output features."""
        return Kernel(None, self.in_features, self.out_features)

    def dequantized(self, dtype: DTypeLike) -> eqx.nn.Linear:
        return plain_linear(self, weight=self.kernel.values(dtype))


# A new function for each call would be traced again for each layer.
@eqx.filter_checkpoint
def dequantized_call(layer: AbstractQuantizedLayer, inputs: Any, *others: Any) -> Any:
    """What the plain layer computes, with the weight in the dtype of the inputs.

    The backward pass makes the weight again, so that only data and scales are kept.

    Args:
        layer: The layer.
        inputs: Its inputs.
        *others: What else it is called with.
    """
    return layer.dequantized(inputs.dtype)(inputs, *others)


def _no_state_dict(prefix: str | None) -> ValueError:
    return ValueError(
        f"a state dict was loaded into {prefix or 'a layer'}, whose weight is data and scales: load it into the "
        "plain model, then quantize that"
    )
