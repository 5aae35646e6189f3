"""The kernel of a layer: from its weight and its axes follow the text in tables, its size and the state of its op."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax.axis import axis_spec_to_tuple
from jaxtyping import Array, DTypeLike

from .._op import Fp8DotGeneral
from ..devices.device import Device
from ..recipes.recipe import Recipe
from ..recipes.support import Support, supported, supported_in_groups
from .predicted_time import LayerSize


# Equinox has numbers of features, or "scalar".
type Features = hax.AxisSpec | int | str


@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    """What a linear layer multiplies its input by, as a `LayerRule` describes it.

    The rest follows from it: the axes that `describe` shows, the sizes from which times are predicted, and the shape of
    the state that conversion adds.

    Args:
        weight: The layer's weight: a `NamedArray`, an array, an abstract one, or a node that stands for it, such as
            `eqx.nn.Shared` leaves.
        In: The input axes, or the number of input features. Without them, no time is predicted.
        Out: The output axes, or the number of output features.
        Experts: The axes that number the kernels of a grouped product, in which each row is multiplied by one of them.
        leading: The sizes of a plain weight's axes before those of one kernel: ensembles first, then stacks. By default
            all but the last two. Not used for a `NamedArray`, where stacks have names, and ensembles do not.
        contracted: Which axes of one kernel fprop sums over. By default those of `In` in a `NamedArray`, and in a
            matrix the one that has as many elements; a square matrix does not tell.
        factor: What the layer multiplies its weight by before the product, as muP does.
        first: Whether the layer calls its op as `op(weight, x)`, not `op(x, weight)`. By default sizes tell, as where
            `jnp.einsum` may swap the two; if both operands could be the kernel, it is the second.

    Example:
        >>> Kernel(jnp.ones((12, 64, 256)), 64, 256).text
        '64 -> 256'
        >>> Embed, Mlp = hax.make_axes(embed=64, mlp=256)
        >>> Kernel(hax.ones((Mlp, Embed)), Embed, Mlp).text
        'embed 64 -> mlp 256'
    """

    weight: Any
    In: Features | None = None
    Out: Features | None = None
    Experts: hax.AxisSpec | None = None
    leading: tuple[int, ...] | None = None
    contracted: tuple[int, ...] | None = None
    factor: float = 1.0
    first: bool | None = None

    @property
    def text(self) -> str:
        """Its axes for a table, or the shape of the weight if they are unknown."""
        if self.In is None or self.Out is None:
            return " × ".join(map(str, getattr(self._array, "shape", ())))
        experts = "" if self.Experts is None else f"{_text(self.Experts)}: "
        return f"{experts}{_text(self.In)} -> {_text(self.Out)}"

    def size(self, stack: tuple[hax.Axis, ...]) -> LayerSize | None:
        """The matrices of one layer of the stacks; None if the axes are unknown.

        Args:
            stack: The axes of the stacks that the layer is in.
        """
        if self.In is None or self.Out is None:
            return None
        experts = 1 if self.Experts is None else number_of_features(self.Experts)
        members, _ = self.members_and_stack(stack)
        return LayerSize(
            number_of_features(self.In), number_of_features(self.Out), members=math.prod(members), experts=experts
        )

    def support(self, recipe: Recipe, device: Device) -> Support:
        """How a device runs the products with this kernel.

        Args:
            recipe: Their recipe.
            device: The device.
        """
        return supported(recipe, device) if self.Experts is None else supported_in_groups(recipe, device)

    def init_op(
        self,
        recipe: Recipe,
        compute_dtype: DTypeLike | None,
        stack: tuple[hax.Axis, ...],
        *,
        scale_per_expert: bool = False,
    ) -> Fp8DotGeneral:
        """An op for products with this kernel, with a state for each layer of the stacks and member of an ensemble.

        Args:
            recipe: The op's recipe.
            compute_dtype: See `Fp8DotGeneral`.
            stack: The axes of the stacks that the layer is in.
            scale_per_expert: Whether each expert, if the layer has any, gets a state of its own.
        """
        members, stack = self.members_and_stack(stack)
        groups = None
        if scale_per_expert and self.Experts is not None:
            (groups,) = axes_of(self.Experts)
        op = Fp8DotGeneral.init(
            recipe,
            compute_dtype=compute_dtype,
            kernel_shape=self._output_shape,
            kernel_first=self.first,
            stack=stack,
            groups=groups,
        )
        abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(self.weight))

        def repeat(x: jax.Array) -> jax.Array | jax.ShapeDtypeStruct:
            shape = members + x.shape
            return jax.ShapeDtypeStruct(shape, x.dtype) if abstract else jnp.broadcast_to(x, shape)

        return jax.tree.map(repeat, op)

    @property
    def _array(self) -> Any:
        return self.weight.array if isinstance(self.weight, hax.NamedArray) else self.weight

    @property
    def _output_shape(self) -> tuple[int, ...] | None:
        """The sizes of the output axes, in the order in which the weight has them."""
        if self.Out is None:
            return None
        if isinstance(self.Out, int | str):
            shape = getattr(self._array, "shape", None)
            if shape is None or self.contracted is None or isinstance(self.weight, hax.NamedArray):
                return (number_of_features(self.Out),)
            shape = shape[len(shape[:-2] if self.leading is None else self.leading) :]
            contracted = [axis % len(shape) for axis in self.contracted]
            return tuple(size for axis, size in enumerate(shape) if axis not in contracted)
        sizes = {axis.name: axis.size for axis in axes_of(self.Out)}
        names = self.weight.axis_names if isinstance(self.weight, hax.NamedArray) else tuple(sizes)
        return tuple(sizes[name] for name in names if name in sizes)

    def members_and_stack(self, stack: tuple[hax.Axis, ...]) -> tuple[tuple[int, ...], tuple[hax.Axis, ...]]:
        """The sizes of the ensembles' axes, and those of the stacks' axes that the weight has.

        Args:
            stack: The axes of the stacks that the layer is in.
        """
        # The weight, or the array in it, may be a node without a shape, such as `eqx.nn.Shared` leaves.
        shape = getattr(self._array, "shape", None)
        if isinstance(self.weight, hax.NamedArray):
            members = () if shape is None else shape[: len(shape) - len(self.weight.axis_names)]
            return members, tuple(axis for axis in stack if axis.name in self.weight.axis_names)
        leading = self.leading
        if leading is None:
            if shape is None:
                return (), stack
            leading = shape[:-2]
        sizes = tuple(axis.size for axis in stack)
        stack = stack if leading[len(leading) - len(sizes) :] == sizes else ()
        return leading[: len(leading) - len(stack)], stack

    def matrix_axes(self, stack: tuple[hax.Axis, ...]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """The axes of the weight's array that fprop sums over, and those of the outputs; None if they are unknown.

        Axes of stacks, ensembles and experts are neither. Those of a square matrix may be exchanged.

        Args:
            stack: The axes of the stacks that the layer is in.
        """
        members, stack = self.members_and_stack(stack)
        if isinstance(self.weight, hax.NamedArray):
            if isinstance(self.In, int | str | None) or isinstance(self.Out, int | str | None):
                return None
            names = self.weight.axis_names
            of = lambda spec: tuple(len(members) + names.index(axis.name) for axis in axes_of(spec))
            return of(self.In), of(self.Out)
        leading = len(members) + len(stack)
        shape, inputs = self._array.shape[leading:], self.contracted
        if inputs is None and len(shape) == 2 and self.In is not None and self.Out is not None:
            sizes = number_of_features(self.In), number_of_features(self.Out)
            inputs = (0,) if shape == sizes else (1,) if shape[::-1] == sizes else None
        if inputs is None:
            return None
        inputs = [axis % len(shape) for axis in inputs]
        outputs = (axis for axis in range(len(shape)) if axis not in inputs)
        return tuple(leading + axis for axis in inputs), tuple(leading + axis for axis in outputs)


def axes_of(spec: hax.AxisSpec) -> tuple[hax.Axis, ...]:
    """The axes of a specification, which may be a single one."""
    return tuple(axis for axis in axis_spec_to_tuple(spec) if isinstance(axis, hax.Axis))


def _text(features: Features) -> str:
    if isinstance(features, int | str):
        return str(features)
    return " × ".join(f"{axis.name} {axis.size}" for axis in axes_of(features)) or "scalar"


def with_names_of_stacks(x: Array, stack: Sequence[hax.Axis], leading: int) -> hax.NamedArray:
    """An array of layers with the names of their stacks, so that Haliax divides it among them and nothing else.

    Args:
        x: The array.
        stack: The axes of the stacks, the last of the leading ones.
        leading: How many axes are in front.
    """
    axes = (*(axis.name for axis in stack), *(f"fp8_kernel_{i}" for i in range(x.ndim - leading)))
    # Through the tree: names do not count the axes of ensembles.
    template = hax.named(np.zeros((1,) * len(axes)), axes)
    return jax.tree.unflatten(jax.tree.structure(template), [x])


def number_of_features(features: Features) -> int:
    """The number of features."""
    if isinstance(features, int | str):
        return 1 if features == "scalar" else int(features)
    return math.prod(axis.size for axis in axes_of(features))
