"""Where the matrices of a layer's weight lie: as `[out, in]`, one for each block of a stack, member and expert."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

from ...layers.kernel import Kernel, axes_of, count
from .tree import ModelPath


@dataclasses.dataclass(frozen=True)
class Parts:
    """The arrays that a checkpoint holds of one array of a model.

    Args:
        order: The axes of the array: leading ones, which number the parts, then those of a part.
        leading: The sizes of the leading axes.
        blocks: For each axis of the stack, which leading axis it is; None if the array is the same in all blocks.
        shape: The shape of a part.
        split: The sizes of the axes that a part's axes were made of.
    """

    order: tuple[int, ...]
    leading: tuple[int, ...]
    blocks: tuple[int | None, ...]
    shape: tuple[int, ...]
    split: tuple[int, ...]

    def named(self, path: ModelPath) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The name of each part, and its index along the leading axes.

        Members of an ensemble and experts are numbered after the name.

        Args:
            path: Where the array, or its layer, is.
        """
        others = [axis for axis in range(len(self.leading)) if axis not in self.blocks]
        stack = [range(axis.size) for axis in path.stack]
        for blocks in itertools.product(*stack):
            for rest in itertools.product(*(range(self.leading[axis]) for axis in others)):
                index = [0] * len(self.leading)
                for number, axis in zip(blocks, self.blocks, strict=True):
                    if axis is not None:
                        index[axis] = number
                for number, axis in zip(rest, others, strict=True):
                    index[axis] = number
                yield path.name(blocks, *rest), tuple(index)

    def read(self, array: Any, index: tuple[int, ...]) -> np.ndarray:
        """One part; of an array on a device, only this part is copied.

        Args:
            array: The array, without names.
            index: Its index along the leading axes.
        """
        if _on_host(array):
            part = np.asarray(array).transpose(self.order)[index]
        else:
            for axis, number in sorted(zip(self.order, index, strict=False), reverse=True):
                array = lax.dynamic_index_in_dim(array, number, axis, keepdims=False)
            rest = self.order[len(self.leading) :]
            part = np.asarray(array).transpose([sorted(rest).index(axis) for axis in rest])
        return part.reshape(self.shape)

    def write(self, array: np.ndarray, index: tuple[int, ...], part: np.ndarray) -> None:
        """Puts a part into an array of the model.

        Args:
            array: The array, without names.
            index: The part's index along the leading axes.
            part: The part.
        """
        # With an ellipsis: the view of an array without axes would be a scalar.
        array.transpose(self.order)[(*index, ...)] = part.reshape(self.split)

    def sharded_like(self, array: np.ndarray, weight: Any, *, transposed: bool = False) -> jax.Array:
        """Data or scales of the matrices on the devices of a weight, divided as that is.

        An axis stays whole if the weight's axes in it are not divided at its first one alone, or if it is too short.

        Args:
            array: The array, `[*leading, ...]`; what follows are the rows and columns of data, or of their scales.
            weight: The weight, or its shape and sharding.
            transposed: Whether columns come before rows.
        """
        sharding = getattr(plain(weight), "sharding", None)
        if not isinstance(sharding, NamedSharding):
            return jnp.asarray(array) if sharding is None else jax.device_put(array, sharding)
        spec = [*sharding.spec, *[None] * len(self.order)]
        leading, rest = self.order[: len(self.leading)], self.order[len(self.leading) :]
        parts, split = [spec[axis] for axis in leading], list(zip(rest, self.split, strict=True))
        of_matrix = []
        for size in self.shape:
            axes = []
            while math.prod(n for _, n in axes) < size or (split and split[0][1] == 1):
                axes.append(split.pop(0))
            divided = [spec[axis] for axis, n in axes if n > 1]
            of_matrix.append(divided[0] if divided and not any(divided[1:]) else None)
        parts += reversed(of_matrix) if transposed else of_matrix
        names = lambda part: part if isinstance(part, tuple) else (part,)
        fits = lambda size, part: part and size % math.prod(sharding.mesh.shape[name] for name in names(part)) == 0
        kept = [part if fits(size, part) else None for size, part in zip(array.shape, parts, strict=False)]
        return jax.device_put(array, NamedSharding(sharding.mesh, P(*kept)))


def plain(array: Any) -> Any:
    """The array in a `NamedArray`, or a plain one as it is."""
    return array.array if isinstance(array, hax.NamedArray) else array


def of_kernel(kernel: Kernel, path: ModelPath) -> Parts:
    """The matrices of a layer's weight, each `[out, in]`.

    Args:
        kernel: The kernel, as the layer's rule describes it.
        path: Where the layer is.

    Raises:
        ValueError: If the rule does not tell which axes are summed over.
    """
    weight = kernel.weight
    if isinstance(weight, hax.NamedArray):
        names, members = weight.axis_names, weight.array.ndim - len(weight.axis_names)
        inputs, outputs = _names(kernel.In), _names(kernel.Out)
        experts, stack = _names(kernel.Experts), [axis.name for axis in path.stack]
        leading = [name for name in stack if name in names] + experts
        if sorted((*leading, *outputs, *inputs)) != sorted(names):
            raise _unknown(path, weight.axes)
        order = (*range(members), *(members + names.index(name) for name in (*leading, *outputs, *inputs)))
        blocks = tuple(members + leading.index(name) if name in leading else None for name in stack)
        n = members + len(leading)
    else:
        members, stack = kernel.members_and_stack(path.stack)
        n = len(members) + len(stack)
        body = tuple(range(n, len(weight.shape)))
        inputs = _contracted(kernel, weight.shape[n:], path)
        order = (*range(n), *(axis for axis in body if axis - n not in inputs), *(n + axis for axis in inputs))
        outputs = body[len(inputs) :]
        blocks = tuple(len(members) + stack.index(axis) if axis in stack else None for axis in path.stack)
    sizes = [plain(weight).shape[axis] for axis in order]
    split = tuple(sizes[n:])
    shape = math.prod(split[: len(outputs)]), math.prod(split[len(outputs) :])
    return Parts(order, tuple(sizes[:n]), blocks, shape, split)


def of_array(array: Any, path: ModelPath, *, members: int = 0, flat: bool = False) -> Parts:
    """The arrays of a stack's blocks.

    Args:
        array: The array.
        path: Where it is.
        members: How many axes of ensembles are in front.
        flat: Whether a part becomes a vector.
    """
    stack = [axis.name for axis in path.stack]
    shape = plain(array).shape
    if isinstance(array, hax.NamedArray):
        names, members = array.axis_names, len(shape) - len(array.axis_names)
        leading = [members + names.index(name) for name in stack if name in names]
        leading = [*range(members), *leading]
        blocks = tuple(leading.index(members + names.index(name)) if name in names else None for name in stack)
    else:
        sizes = tuple(axis.size for axis in path.stack)
        stacked = shape[members : members + len(sizes)] == sizes
        leading = list(range(members + (len(sizes) if stacked else 0)))
        blocks = tuple(members + i if stacked else None for i in range(len(sizes)))
    order = (*leading, *(axis for axis in range(len(shape)) if axis not in leading))
    split = tuple(shape[axis] for axis in order[len(leading) :])
    part = (math.prod(split),) if flat else split
    return Parts(order, tuple(shape[axis] for axis in leading), blocks, part, split)


def _names(features: Any) -> list[str]:
    return [] if features is None else [axis.name for axis in axes_of(features)]


def _contracted(kernel: Kernel, shape: tuple[int, ...], path: ModelPath) -> tuple[int, ...]:
    if kernel.contracted is not None:
        return kernel.contracted
    if kernel.In is not None and kernel.Out is not None and len(shape) == 2:
        sizes = count(kernel.Out), count(kernel.In)
        found = [axis for axis, fits in ((1, sizes), (0, sizes[::-1])) if shape == fits]
        if len(found) == 1:
            return (found[0],)
    raise _unknown(path, shape)


def _unknown(path: ModelPath, axes: Any) -> ValueError:
    return ValueError(
        f"the weight of {path} has axes {axes}, and its LayerRule does not say which are inputs and which are outputs. "
        "Set them in its Kernel: Kernel(..., contracted=(0,)), or In and Out that name all axes"
    )


def _on_host(array: Any) -> bool:
    """Whether NumPy can read it without a copy from a device."""
    if not isinstance(array, jax.Array):
        return True
    return len(array.devices()) == 1 and all(device.platform == "cpu" for device in array.devices())
