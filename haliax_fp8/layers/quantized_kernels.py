"""What a layer multiplies by: its kernel as it hands it to the product, and which product that is."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import haliax as hax
import jax
import jax.numpy as jnp
from haliax.partitioning import physical_axis_name
from jax.sharding import PartitionSpec
from jaxtyping import Array

from .._jax.meshes import automatic_mesh
from .._op import Fp8DotGeneral
from .._product.contraction import AbstractContraction, DotContraction
from .._product.dimensions import DotDimensions
from .._product.grouped.contraction import RaggedContraction
from .checks import require_model
from .config import default_rules
from .frozen_array import thawed
from .kernel import Features, Kernel, axes_of, number_of_features, with_names_of_stacks
from .rule import LayerRule
from .walk import all_ops, is_op, map_layers_in_stacks, rule_of


class BoundKernel(NamedTuple):
    """A kernel as products take it.

    Args:
        array: Its values, times the layer's factor; the axes of ensembles and stacks come first.
        contraction: Its products, with any input.
        leading: How many axes are in front.
        stack: The axes of the stacks among them, the last ones.
        axis_names: The names of one kernel's axes; None if they have none.
    """

    array: Array
    contraction: AbstractContraction
    leading: int
    stack: tuple[hax.Axis, ...]
    axis_names: tuple[str, ...] | None


def is_floating(kernel: Kernel) -> bool:
    """Whether a layer's weight is an array of floating-point numbers."""
    array = kernel.weight.array if isinstance(kernel.weight, hax.NamedArray) else kernel.weight
    return hasattr(array, "dtype") and jnp.issubdtype(array.dtype, jnp.floating)


def bind_kernel(path: str, kernel: Kernel, stack: tuple[hax.Axis, ...], *, per_axis: bool) -> BoundKernel:
    """A kernel as its layer hands it to its products.

    Args:
        path: The path of the layer, for errors.
        kernel: The layer's.
        stack: The axes of the stacks that the layer is in.
        per_axis: Whether scales depend on what is contracted.

    Raises:
        ValueError: If they do, and the kernel does not tell what is.
    """
    members, stack = kernel.members_and_stack(stack)
    leading = len(members) + len(stack)
    names = None
    if isinstance(kernel.weight, hax.NamedArray):
        in_stack = [axis.name for axis in stack]
        array, contraction = _of_named(kernel, in_stack, len(members))
        names = tuple(_axes_of_one(kernel, in_stack))
    else:
        array = kernel.weight
        contraction = _of_plain(path, kernel, array.shape[leading:], per_axis=per_axis)
    if kernel.factor != 1.0:
        array = array * kernel.factor
    return BoundKernel(array, contraction, leading, stack, names)


def _of_named(kernel: Kernel, stack: Sequence[str], members: int) -> tuple[jax.Array, AbstractContraction]:
    """The kernel as the layer hands it over, and its products."""
    array, names = kernel.weight.array, kernel.weight.axis_names
    axes = _axes_of_one(kernel, stack)
    order = [names.index(name) + members for name in (*stack, *axes)]
    array = jnp.transpose(array, (*range(members), *order))
    if kernel.Experts is not None:
        return array, RaggedContraction()
    inputs = kernel.contracted
    if inputs is None:
        inputs = tuple(map(axes.index, _names(kernel.In)))
    return array, _dot(array.shape[members + len(stack) :], inputs)


def _axes_of_one(kernel: Kernel, stack: Sequence[str]) -> list[str]:
    """The names of one kernel's axes, in the order in which the layer hands it over."""
    if kernel.Experts is not None:
        # As `Fp8MoELinear` rearranges it.
        return [*_names(kernel.Experts), *_names(kernel.In), *_names(kernel.Out)]
    return [name for name in kernel.weight.axis_names if name not in stack]


def _names(features: Features | hax.AxisSpec | None) -> list[str]:
    return [] if features is None or isinstance(features, int | str) else [axis.name for axis in axes_of(features)]


def _of_plain(path: str, kernel: Kernel, shape: tuple[int, ...], *, per_axis: bool) -> AbstractContraction:
    """The products of a weight whose axes have no names."""
    if kernel.contracted is not None:
        return _dot(shape, kernel.contracted)
    if kernel.In is not None and kernel.Out is not None:
        sizes = number_of_features(kernel.Out), number_of_features(kernel.In)
        contracted = [axes for axes, fits in (((1,), sizes), ((0,), sizes[::-1])) if shape == fits]
        if len(contracted) == 1:
            return _dot(shape, contracted[0])
    if per_axis:
        raise ValueError(
            f"the kernel of {path or 'the model itself'} has shape {shape}, which does not show what its product sums "
            "over; scales run along those axes. Set them in the Kernel of the layer's LayerRule: contracted=(1,)"
        )
    # One scale for all: what is contracted decides in which order the data are stored, no more.
    return _dot(shape, (len(shape) - 1,) if shape else ())


def _dot(shape: tuple[int, ...], contracted: tuple[int, ...]) -> DotContraction:
    sizes = tuple(shape[axis] for axis in contracted)
    return DotContraction(DotDimensions.of(((range(len(sizes)), contracted), ((), ())), sizes, shape))


def quantize_kernels[M](model: M, *, gather: bool = False, rules: tuple[LayerRule, ...] = default_rules) -> M:
    """The model with each kernel as its products take it, so that several evaluations quantize it once.

    Every product quantizes its kernel, and every microbatch has such a product. Give the loss of all microbatches this
    model instead, or make it inside a loss that loops, as over the stages of a pipeline. Numbers are the same, bit for
    bit: outputs, gradients and state. Gradients are those of `model`, and have its structure.

    It is for one step, within its `jit`: the copies are those of the weights that `model` has now, and of no later
    one's. So what would carry them into the next step raises: `TrainStep`, `trainable`, `apply_updates`, and Haliax's
    state dict. Use `model` there. `TrainStep(quantize_kernels="once")` does all this.

    The copies take a byte per weight for fprop and one for dgrad, stored along what each of them sums over, as
    cuBLASLt reads it up to Hopper. Some layers stay as they are, and quantize in each product: those whose recipe
    rounds kernels at random, whose weight is not an array (`eqx.nn.Shared`), or whose class has no rule. In an ensemble
    under `vmap`, a stateless recipe with one scale per tensor has one for each member.

    Args:
        model: A converted model; others are returned unchanged.
        gather: Whether the copies are gathered here, in FP8, from devices that each hold a part of a kernel; by default
            every product gathers its own. Named axes are then divided over the devices as Haliax's axis mapping says,
            that of the computation (`hax.axis_mapping`), and axes that it leaves out are whole. Kernels without names
            are whole. Needs a mesh with automatic axes, `jax.set_mesh(mesh)`.
        rules: The rules that the model was converted with.

    Returns:
        The model for the losses of one step.

    Raises:
        ValueError: If the scales of a layer's recipe run along what is contracted, and its `Kernel` does not tell which
            axes those are, or `gather` is set without such a mesh. When called, if a product gets another kernel than
            the layer's weight: of another shape, or in another dtype, as in a loss that casts its parameters.

    Example:
        >>> fp8_model = fp8_linear_layers(model)
        >>> quantized = quantize_kernels(fp8_model)
        >>> bool(loss_fn(quantized, x) == loss_fn(fp8_model, x))
        True
    """
    require_model(model, "quantize_kernels(model)")
    if gather and not automatic_mesh():
        raise ValueError(
            "kernels cannot be gathered once: no mesh with automatic axes is set. Set it where the step is called, "
            "jax.set_mesh(mesh), with axis_types=AxisType.Auto for all axes; on one device there is nothing to gather, "
            "and quantizing once does the rest"
        )
    done: dict[int, Any] = {}

    def quantized(path: str, layer: Any, stack: tuple[hax.Axis, ...]) -> Any:
        rule = rule_of(layer, rules)
        if (op := rule.op(layer)) is None:
            return layer
        # The same object at two paths stays one object.
        if id(layer) not in done:
            kernel = rule.kernel(thawed(layer))
            done[id(layer)] = rule.with_op(layer, _with_quantized_kernel(path, op, kernel, stack, gather))
        return done[id(layer)]

    return map_layers_in_stacks(quantized, model, rules)


def without_quantized_kernels[T](tree: T) -> T:
    """A model, or its gradients, without what `quantize_kernels` added; unchanged if there is nothing.

    Args:
        tree: The model, or any tree.
    """
    if all(op.quantized_kernel is None for op in all_ops(tree)):
        return tree
    plain = lambda node: dataclasses.replace(node, quantized_kernel=None) if is_op(node) else node
    return jax.tree.map(plain, tree, is_leaf=is_op)


def _with_quantized_kernel(
    path: str, op: Fp8DotGeneral, kernel: Kernel, stack: tuple[hax.Axis, ...], gather: bool
) -> Fp8DotGeneral:
    if not is_floating(kernel) or op.state_per_group:
        return op
    per_axis = any(op.recipe.uses["kernel", product].scaling.per_axis for product in ("fprop", "dgrad"))
    bound = bind_kernel(path, kernel, stack, per_axis=per_axis)
    names, leading = tuple(axis.name for axis in bound.stack), bound.leading
    whole = PartitionSpec()
    if bound.axis_names is not None:
        axes = (*names, *bound.axis_names)
        members = leading - len(names)
        whole = PartitionSpec(*(None for _ in range(members)), *map(physical_axis_name, axes))
    quantized = op.quantize_kernel(bound.array, bound.contraction, leading, whole if gather else None)
    named = lambda x: with_names_of_stacks(x, bound.stack, leading)
    return dataclasses.replace(op, quantized_kernel=jax.tree.map(named, quantized))
