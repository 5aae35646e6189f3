"""Products and weights of Haliax's layers, with named axes."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ..layers.kernel import axes_of
from .kernel import QuantizedKernel


def apart(x: hax.NamedArray, one: hax.Axis, several: hax.AxisSpec) -> hax.NamedArray:
    """Splits one axis into several, or removes it.

    Args:
        x: An array.
        one: One of its axes.
        several: The axes that replace it.
    """
    return x.unflatten_axis(one, several) if axes_of(several) else x[one, 0]


def in_order(weight: hax.NamedArray, axes: tuple[hax.Axis, ...]) -> tuple[hax.Axis, ...]:
    """The axes in the order in which the weight has them.

    Args:
        weight: The weight.
        axes: The axes of its layer, without those of stacks.
    """
    by_name = {axis.name: axis for axis in axes}
    return tuple(by_name[name] for name in weight.axis_names if name in by_name)


def named_product(
    kernel: QuantizedKernel, inputs: hax.NamedArray, axes: tuple[hax.Axis, ...], contracted: tuple[hax.Axis, ...]
) -> hax.NamedArray:
    """Computes `inputs.dot(weight, axis=contracted)`.

    Args:
        kernel: The weight.
        inputs: The inputs.
        axes: The axes of the kernel.
        contracted: The axes that are summed over.
    """
    of_input, of_kernel = [axis.name for axis in inputs.axes], [axis.name for axis in axes]
    summed = {axis.name for axis in contracted}
    if missing := summed - set(of_input):
        raise ValueError(f"inputs have axes {inputs.axes}, but lack {sorted(missing)}, which the layer sums over")
    pairs = [name for name in of_input if name in summed]
    batch = [name for name in of_input if name in of_kernel and name not in summed]
    positions = lambda names, among: tuple(map(among.index, names))
    summed_axes = positions(pairs, of_input), positions(pairs, of_kernel)
    numbers = summed_axes, (positions(batch, of_input), positions(batch, of_kernel))
    out = kernel.dot_general(inputs.array, numbers, kernel.result_dtype(inputs.array))
    sizes = {axis.name: axis for axis in (*inputs.axes, *axes)}
    rest = [[name for name in names if name not in (*pairs, *batch)] for names in (of_input, of_kernel)]
    named = hax.named(out, tuple(sizes[name] for name in (*batch, *rest[0], *rest[1])))
    order = [name for name in of_input if name not in pairs] + rest[1]
    return named.rearrange(tuple(sizes[name] for name in order))


def weight_of(kernel: QuantizedKernel, axes: tuple[hax.Axis, ...], dtype: DTypeLike, factor: float) -> hax.NamedArray:
    """`data * scale` with named axes, divided by the factor that the layer applies to its weight.

    Args:
        kernel: The weight.
        axes: The axes of the weight, in the order of the kernel's.
        dtype: The dtype of the result.
        factor: The layer's factor.
    """
    values, stored = kernel.values(jnp.float32), kernel.stored
    values = (values if factor == 1.0 else values / factor).astype(dtype)
    # A matrix of a checkpoint has several axes as one.
    values = values.reshape(*values.shape[: stored.leading], *(axis.size for axis in axes))
    stack = stored.data.axis_names[: len(stored.data.axis_names) - len(stored.order)]
    names = (*stack, *(axis.name for axis in axes))
    # As a tree: names do not include the axes of ensembles.
    template = hax.named(np.zeros((1,) * len(names)), names)
    return jax.tree.unflatten(jax.tree.structure(template), [values])
