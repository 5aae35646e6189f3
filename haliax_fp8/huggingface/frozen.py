"""Layers whose weights stay in FP8 and never change: a base for adapters, with exact gradients to its inputs."""

from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from ..layers.checks import require_model
from ..layers.equinox import plain_linear
from ..layers.kernel import Kernel, axes_of
from ..layers.served import AbstractFrozenLayer
from .frozen_kernel import FrozenKernel


class FrozenLinear(AbstractFrozenLayer, hnn.Linear):
    """A `haliax.nn.Linear` whose weight is FP8 data and scales, which no optimizer sees. Made by `import_model`.

    `out = x · (data * scale)`, with the weight in the dtype of `x`. Gradients reach `x` as those of a plain layer with
    that weight. The backward pass makes the weight again, so that only FP8 data are kept.

    Args:
        kernel: The weight; `weight` holds nothing.
    """

    kernel: FrozenKernel = eqx.field(kw_only=True)

    def __call__(self, inputs: hax.NamedArray, *, key: Any = None) -> hax.NamedArray:
        """Maps `In` to `Out`.

        Args:
            inputs: With the axes `In`.
            key: Not used.
        """
        return _call(self, inputs)

    @property
    def described(self) -> Kernel:
        """Its kernel's axes, without a weight."""
        return Kernel(None, self.In, self.Out)

    def thawed(self, dtype: DTypeLike) -> hnn.Linear:
        """The plain layer with the weight in a dtype."""
        data = self.kernel.data
        assert isinstance(data, hax.NamedArray)
        leading = data.axes[:-2]
        axes = (*leading, *axes_of(self.Out), *axes_of(self.In))
        values = self.kernel.values(dtype)
        extra = values.ndim - len(data.axes)
        weight = values.reshape(*values.shape[:extra], *(axis.size for axis in axes))
        named = _with_names(weight, axes)
        return hnn.Linear(named, self.bias, self.In, self.Out, self.dot_general, self._reparam_cls)


class FrozenMoELinear(AbstractFrozenLayer, hnn.MoELinear):
    """A `haliax.nn.MoELinear` whose experts are FP8 data and scales; see `FrozenLinear`.

    Args:
        kernel: The weight; `weight` holds nothing.
    """

    kernel: FrozenKernel = eqx.field(kw_only=True)

    def __call__(self, inputs: hax.NamedArray, group_sizes: hax.NamedArray, *, key: Any = None) -> hax.NamedArray:
        """Multiplies each expert's rows by its kernel.

        Args:
            inputs: One ragged axis and `In`.
            group_sizes: How many rows each expert has.
            key: Not used.
        """
        return _call(self, inputs, group_sizes)

    @property
    def described(self) -> Kernel:
        """Its kernel's axes, without a weight."""
        return Kernel(None, self.In, self.Out, self.Experts)

    def thawed(self, dtype: DTypeLike) -> hnn.MoELinear:
        """The plain layer with the weight in a dtype."""
        data = self.kernel.data
        assert isinstance(data, hax.NamedArray)
        values = jnp.swapaxes(self.kernel.values(dtype), -1, -2)
        weight = _with_names(values, (*data.axes[:-2], *axes_of(self.In), *axes_of(self.Out)))
        return hnn.MoELinear(weight, self.bias, self.Experts, self.In, self.Out, use_gmm=self.use_gmm)


class FrozenEquinoxLinear(AbstractFrozenLayer, eqx.nn.Linear):
    """An `eqx.nn.Linear` whose weight is FP8 data and scales; see `FrozenLinear`.

    Args:
        linear: The layer whose other fields it takes.
        kernel: The weight.
    """

    kernel: FrozenKernel

    def __init__(self, linear: eqx.nn.Linear, kernel: FrozenKernel):
        for name in ("bias", "in_features", "out_features", "use_bias"):
            setattr(self, name, getattr(linear, name))
        self.weight: Any = None
        self.kernel = kernel

    def __call__(self, x: Array, *, key: Any = None) -> Array:
        """`weight @ x + bias` for one example.

        Args:
            x: Shape `(in_features,)`, or `()` for `"scalar"`.
            key: Not used.
        """
        return _call(self, x)

    @property
    def described(self) -> Kernel:
        """Its kernel's axes, without a weight."""
        return Kernel(None, self.in_features, self.out_features)

    def thawed(self, dtype: DTypeLike) -> eqx.nn.Linear:
        """The plain layer with the weight in a dtype."""
        return plain_linear(self, weight=self.kernel.values(dtype))


def is_frozen(node: Any) -> bool:
    """Whether it is a layer whose weight stays in FP8."""
    return isinstance(node, AbstractFrozenLayer)


def thaw[M](model: M, dtype: DTypeLike = jnp.bfloat16) -> M:
    """The model with plain layers in place of frozen ones: with weights that can be trained, or merged with adapters.

    Args:
        model: A model that `import_model` made, or a part of one.
        dtype: The dtype of these weights.
    """
    require_model(model, "thaw(model)")
    return jax.tree.map(lambda node: node.thawed(dtype) if is_frozen(node) else node, model, is_leaf=is_frozen)


# A new function for each call would be traced again for each layer.
@eqx.filter_checkpoint
def _call(layer: AbstractFrozenLayer, inputs: Any, *others: Any) -> Any:
    return layer.thawed(inputs.dtype)(inputs, *others)


def _with_names(array: Array, axes: tuple[hax.Axis, ...]) -> hax.NamedArray:
    """The array with names for its last axes; those before them are of ensembles."""
    if array.ndim == len(axes):
        return hax.named(array, axes)
    template = hax.named(np.zeros([axis.size for axis in axes], bool), axes)
    return jax.tree.unflatten(jax.tree.structure(template), [array])
