"""What a layer multiplies by: its kernel as it hands it to the product, and which product that is."""

import dataclasses
from collections.abc import Sequence

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._product.contraction import AbstractContraction
from .._product.dimensions import DotDimensions
from .._product.dot import DotContraction
from .._product.grouped.contraction import RaggedContraction
from .kernel import Features, Kernel, axes_of, count


@dataclasses.dataclass(frozen=True, eq=False)
class Multiplied:
    """A kernel as products take it.

    Args:
        array: Its values, times the layer's factor; the axes of ensembles and stacks come first.
        contraction: Its products, with any input.
        leading: How many axes are in front.
        stack: The axes of the stacks among them, the last ones.
        own_names: The names of one kernel's axes; None if they have none.
    """

    array: Array
    contraction: AbstractContraction
    leading: int
    stack: tuple[hax.Axis, ...]
    own_names: tuple[str, ...] | None


def is_floating(kernel: Kernel) -> bool:
    """Whether a layer's weight is an array of floating-point numbers."""
    array = kernel.weight.array if isinstance(kernel.weight, hax.NamedArray) else kernel.weight
    return hasattr(array, "dtype") and jnp.issubdtype(array.dtype, jnp.floating)


def multiplied(path: str, kernel: Kernel, stack: tuple[hax.Axis, ...], *, directional: bool) -> Multiplied:
    """A kernel as its layer hands it to its products.

    Args:
        path: The path of the layer, for errors.
        kernel: The layer's.
        stack: The axes of the stacks that the layer is in.
        directional: Whether scales depend on what is contracted.

    Raises:
        ValueError: If they do, and the kernel does not tell what is.
    """
    members, stack = kernel.members_and_stack(stack)
    leading = len(members) + len(stack)
    names = None
    if isinstance(kernel.weight, hax.NamedArray):
        in_stack = [axis.name for axis in stack]
        array, contraction = _of_named(kernel, in_stack, len(members))
        names = tuple(_own_axes(kernel, in_stack))
    else:
        array = kernel.weight
        contraction = _of_plain(path, kernel, array.shape[leading:], directional=directional)
    if kernel.factor != 1.0:
        array = array * kernel.factor
    return Multiplied(array, contraction, leading, stack, names)


def named_behind(x: Array, stack: Sequence[hax.Axis], leading: int) -> hax.NamedArray:
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


def _of_named(kernel: Kernel, stack: Sequence[str], members: int) -> tuple[jax.Array, AbstractContraction]:
    """The kernel as the layer hands it over, and its products."""
    array, names = kernel.weight.array, kernel.weight.axis_names
    own = _own_axes(kernel, stack)
    order = [names.index(name) + members for name in (*stack, *own)]
    array = jnp.transpose(array, (*range(members), *order))
    if kernel.Experts is not None:
        return array, RaggedContraction()
    inputs = kernel.contracted
    if inputs is None:
        inputs = tuple(map(own.index, _names(kernel.In)))
    return array, _dot(array.shape[members + len(stack) :], inputs)


def _own_axes(kernel: Kernel, stack: Sequence[str]) -> list[str]:
    """The names of one kernel's axes, in the order in which the layer hands it over."""
    if kernel.Experts is not None:
        # As `Fp8MoELinear` rearranges it.
        return [*_names(kernel.Experts), *_names(kernel.In), *_names(kernel.Out)]
    return [name for name in kernel.weight.axis_names if name not in stack]


def _names(features: Features | hax.AxisSpec | None) -> list[str]:
    return [] if features is None or isinstance(features, int | str) else [axis.name for axis in axes_of(features)]


def _of_plain(path: str, kernel: Kernel, shape: tuple[int, ...], *, directional: bool) -> AbstractContraction:
    """The products of a weight whose axes have no names."""
    if kernel.contracted is not None:
        return _dot(shape, kernel.contracted)
    if kernel.In is not None and kernel.Out is not None:
        sizes = count(kernel.Out), count(kernel.In)
        found = [axes for axes, fits in (((1,), sizes), ((0,), sizes[::-1])) if shape == fits]
        if len(found) == 1:
            return _dot(shape, found[0])
    if directional:
        raise ValueError(
            f"the kernel of {path or 'the model itself'} has shape {shape}, which does not show what its product sums "
            "over; scales run along those axes. Set them in the Kernel of the layer's LayerRule: contracted=(1,)"
        )
    # One scale for all: what is contracted decides in which order the data are stored, no more.
    return _dot(shape, (len(shape) - 1,) if shape else ())


def _dot(shape: tuple[int, ...], contracted: tuple[int, ...]) -> DotContraction:
    sizes = tuple(shape[axis] for axis in contracted)
    return DotContraction(DotDimensions.of(((range(len(sizes)), contracted), ((), ())), sizes, shape))
